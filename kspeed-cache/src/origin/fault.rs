//! An origin that fails on a plan: for tests of everything above it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream};

use super::{
    Attributes, ListPage, ListRequest, ObjectBody, Origin, OriginError, PutBody, PutOptions,
};
use crate::object::{Key, ObjectMeta};

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// 500 or no connection.
    Unavailable,
    /// 503 SlowDown.
    Throttled,
    /// The credentials have expired.
    Expired,
    /// The body ends half-way (GET only).
    CutBody,
    /// The body has a byte too many (GET only).
    LongBody,
    /// No answer, ever.
    Hang,
}

/// Which calls fail.
#[derive(Debug)]
pub struct FaultPlan {
    every: u64,
    kind: FaultKind,
    calls: AtomicU64,
}

impl FaultPlan {
    /// Every `n`-th call fails with `kind`, the first one included.
    #[must_use]
    pub fn every(n: u64, kind: FaultKind) -> Self {
        Self { every: n.max(1), kind, calls: AtomicU64::new(0) }
    }

    fn next(&self) -> Option<FaultKind> {
        let n = self.calls.fetch_add(1, Ordering::Relaxed);
        n.is_multiple_of(self.every).then_some(self.kind)
    }
}

/// Fails on a plan, else does what the inner origin does.
pub struct Fault {
    inner: Arc<dyn Origin>,
    plan: FaultPlan,
}

impl Fault {
    /// Wraps `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Origin>, plan: FaultPlan) -> Self {
        Self { inner, plan }
    }

    async fn strike(&self, has_body: bool) -> Result<Option<FaultKind>, OriginError> {
        let what = || self.inner.name().to_owned();
        match self.plan.next() {
            None => Ok(None),
            Some(k @ (FaultKind::CutBody | FaultKind::LongBody)) => Ok(has_body.then_some(k)),
            Some(FaultKind::Unavailable) => {
                Err(OriginError::Unavailable { what: what(), detail: "injected".into() })
            }
            Some(FaultKind::Throttled) => {
                Err(OriginError::Throttled { what: what(), detail: "injected".into() })
            }
            Some(FaultKind::Expired) => Err(OriginError::Expired { what: what() }),
            Some(FaultKind::Hang) => std::future::pending().await,
        }
    }
}

#[async_trait]
impl Origin for Fault {
    fn name(&self) -> &str {
        self.inner.name()
    }

    async fn list(&self, r: &ListRequest) -> Result<ListPage, OriginError> {
        self.strike(false).await?;
        self.inner.list(r).await
    }

    async fn head(&self, key: &Key) -> Result<ObjectMeta, OriginError> {
        self.strike(false).await?;
        self.inner.head(key).await
    }

    async fn get(&self, meta: &ObjectMeta, range: Range<u64>) -> Result<ObjectBody, OriginError> {
        let fault = self.strike(true).await?;
        let len = range.end - range.start;
        let mut body = self.inner.get(meta, range).await?;
        match fault {
            Some(FaultKind::CutBody) => {
                let mut left = len / 2;
                body.stream = body
                    .stream
                    .map(move |item| {
                        item.map(|mut b| {
                            b.truncate(left.min(b.len() as u64) as usize);
                            left -= b.len() as u64;
                            b
                        })
                    })
                    .boxed();
            }
            Some(FaultKind::LongBody) => {
                let extra = stream::iter([Ok(Bytes::from_static(b"!"))]);
                body.stream = body.stream.chain(extra).boxed();
            }
            _ => {}
        }
        Ok(body)
    }

    async fn put(
        &self,
        key: &Key,
        body: PutBody,
        how: &PutOptions,
    ) -> Result<ObjectMeta, OriginError> {
        self.strike(false).await?;
        self.inner.put(key, body, how).await
    }

    async fn rename(&self, from: &Key, to: &Key) -> Result<ObjectMeta, OriginError> {
        self.strike(false).await?;
        self.inner.rename(from, to).await
    }

    async fn owner(&self, key: &Key) -> Result<(ObjectMeta, Option<String>), OriginError> {
        self.strike(false).await?;
        self.inner.owner(key).await
    }

    async fn abort_upload(&self, key: &Key, id: &str) -> Result<(), OriginError> {
        self.strike(false).await?;
        self.inner.abort_upload(key, id).await
    }

    async fn delete(&self, key: &Key) -> Result<(), OriginError> {
        self.strike(false).await?;
        self.inner.delete(key).await
    }

    async fn copy(
        &self,
        from: &ObjectMeta,
        to: &Key,
        attributes: &Attributes,
    ) -> Result<ObjectMeta, OriginError> {
        self.strike(false).await?;
        self.inner.copy(from, to, attributes).await
    }
}

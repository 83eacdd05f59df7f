//! The one place that retries: exponential backoff with full jitter
//! (Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015).
//!
//! A stream that breaks is resumed at the byte where it broke, so bytes already
//! handed on are never fetched or served twice. Expired credentials are read
//! again before the next try.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream};
use rand::Rng;
use tokio::time::Instant;

use super::{
    Attributes, ListPage, ListRequest, ObjectBody, Origin, OriginError, PutBody, PutOptions,
};
use crate::object::{Key, ObjectMeta};

/// When to try again, and when to give up.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// All tries of one call end by this.
    pub deadline: Duration,
    /// Upper bound of the first pause.
    pub first_pause: Duration,
    /// Upper bound of every pause.
    pub max_pause: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            // Longer than a minute of SlowDown or of a cut network.
            deadline: Duration::from_secs(90),
            first_pause: Duration::from_millis(50),
            max_pause: Duration::from_secs(5),
        }
    }
}

/// Retries what may succeed at another try.
pub struct Retry {
    inner: Arc<dyn Origin>,
    policy: RetryPolicy,
}

/// One call's tries.
struct Tries {
    policy: RetryPolicy,
    started: Instant,
    n: u32,
}

impl Tries {
    fn new(policy: RetryPolicy) -> Self {
        Self { policy, started: Instant::now(), n: 0 }
    }

    /// The next pause, or none when another try would end after the deadline.
    fn pause(&mut self) -> Option<Duration> {
        let cap =
            self.policy.first_pause.saturating_mul(1 << self.n.min(16)).min(self.policy.max_pause);
        self.n += 1;
        let pause = cap.mul_f64(rand::rng().random_range(0.5..=1.0));
        (self.started.elapsed() + pause < self.policy.deadline).then_some(pause)
    }

    /// After `e`: waits and says yes, or says no.
    async fn again(&mut self, origin: &dyn Origin, e: &OriginError) -> bool {
        if !e.is_transient() {
            return false;
        }
        let Some(pause) = self.pause() else { return false };
        tracing::debug!(error = %e, tries = self.n, pause_ms = pause.as_millis() as u64, "retry");
        tokio::time::sleep(pause).await;
        if matches!(e, OriginError::Expired { .. })
            && let Err(e) = origin.reload().await
        {
            tracing::warn!(error = %e, "credentials could not be read again");
        }
        true
    }

    /// What is left until the deadline.
    fn left(&self) -> Duration {
        self.policy.deadline.saturating_sub(self.started.elapsed())
    }

    fn timed_out(&self, origin: &dyn Origin) -> OriginError {
        OriginError::TimedOut {
            what: origin.name().to_owned(),
            after_ms: self.policy.deadline.as_millis() as u64,
        }
    }
}

impl Retry {
    /// Wraps `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Origin>, policy: RetryPolicy) -> Self {
        Self { inner, policy }
    }

    async fn tried<T, F>(&self, mut call: impl FnMut() -> F) -> Result<T, OriginError>
    where
        F: Future<Output = Result<T, OriginError>>,
    {
        let mut tries = Tries::new(self.policy);
        loop {
            let result = tokio::time::timeout(tries.left(), call())
                .await
                .unwrap_or_else(|_| Err(tries.timed_out(&*self.inner)));
            match result {
                Ok(v) => return Ok(v),
                Err(e) => {
                    if !tries.again(&*self.inner, &e).await {
                        return Err(e);
                    }
                }
            }
        }
    }
}

struct Resuming {
    origin: Arc<dyn Origin>,
    meta: ObjectMeta,
    at: u64,
    end: u64,
    stream: Option<stream::BoxStream<'static, Result<Bytes, OriginError>>>,
    tries: Tries,
}

impl Resuming {
    async fn next(&mut self) -> Result<Option<Bytes>, OriginError> {
        loop {
            let e = match self.piece().await {
                Ok(Some(b)) => {
                    // Progress: the next fault has the whole deadline again.
                    self.tries = Tries::new(self.tries.policy);
                    self.at += b.len() as u64;
                    return Ok(Some(b));
                }
                Ok(None) => return Ok(None),
                Err(e) => e,
            };
            self.stream = None;
            if !self.tries.again(&*self.origin, &e).await {
                return Err(e);
            }
        }
    }

    async fn piece(&mut self) -> Result<Option<Bytes>, OriginError> {
        if self.at == self.end {
            return Ok(None);
        }
        if self.stream.is_none() {
            let left = self.tries.left();
            let body = tokio::time::timeout(left, self.origin.get(&self.meta, self.at..self.end))
                .await
                .unwrap_or_else(|_| Err(self.tries.timed_out(&*self.origin)))?;
            self.stream = Some(body.stream);
        }
        let Some(stream) = &mut self.stream else { return Ok(None) };
        let left = self.tries.left();
        match tokio::time::timeout(left, stream.next()).await {
            Ok(Some(item)) => {
                let b = item?;
                if b.len() as u64 > self.end - self.at {
                    return Err(OriginError::Corrupt {
                        what: self.meta.key.to_string(),
                        detail: "more bytes than the range has".into(),
                    });
                }
                Ok(Some(b))
            }
            Ok(None) => Err(OriginError::Corrupt {
                what: self.meta.key.to_string(),
                detail: format!("the body ended {} bytes early", self.end - self.at),
            }),
            Err(_) => Err(self.tries.timed_out(&*self.origin)),
        }
    }
}

#[async_trait]
impl Origin for Retry {
    fn name(&self) -> &str {
        self.inner.name()
    }

    async fn list(&self, r: &ListRequest) -> Result<ListPage, OriginError> {
        self.tried(|| self.inner.list(r)).await
    }

    async fn head(&self, key: &Key) -> Result<ObjectMeta, OriginError> {
        self.tried(|| self.inner.head(key)).await
    }

    async fn get(&self, meta: &ObjectMeta, range: Range<u64>) -> Result<ObjectBody, OriginError> {
        let body = self.tried(|| self.inner.get(meta, range.clone())).await?;
        let state = Resuming {
            origin: self.inner.clone(),
            meta: meta.clone(),
            at: range.start,
            end: range.end,
            stream: Some(body.stream),
            tries: Tries::new(self.policy),
        };
        let stream =
            stream::try_unfold(state, |mut s| async move { Ok(s.next().await?.map(|b| (b, s))) });
        Ok(ObjectBody { version: body.version, size: body.size, stream: stream.boxed() })
    }

    async fn put(
        &self,
        key: &Key,
        body: PutBody,
        how: &PutOptions,
    ) -> Result<ObjectMeta, OriginError> {
        // Uploads of large files may rightly take longer than one call's
        // deadline: each try has the inner origin's own timeouts instead.
        let mut tries = Tries::new(self.policy);
        loop {
            match self.inner.put(key, body.clone(), how).await {
                Ok(m) => return Ok(m),
                Err(e) => {
                    if !tries.again(&*self.inner, &e).await {
                        return Err(e);
                    }
                }
            }
        }
    }

    async fn rename(&self, from: &Key, to: &Key) -> Result<ObjectMeta, OriginError> {
        self.inner.rename(from, to).await
    }

    async fn owner(&self, key: &Key) -> Result<(ObjectMeta, Option<String>), OriginError> {
        self.tried(|| self.inner.owner(key)).await
    }

    async fn abort_upload(&self, key: &Key, id: &str) -> Result<(), OriginError> {
        self.tried(|| self.inner.abort_upload(key, id)).await
    }

    async fn delete(&self, key: &Key) -> Result<(), OriginError> {
        self.tried(|| self.inner.delete(key)).await
    }

    async fn copy(
        &self,
        from: &ObjectMeta,
        to: &Key,
        attributes: &Attributes,
    ) -> Result<ObjectMeta, OriginError> {
        self.tried(|| self.inner.copy(from, to, attributes)).await
    }

    async fn reload(&self) -> Result<(), OriginError> {
        self.inner.reload().await
    }

    fn local_path(&self, key: &Key) -> Option<std::path::PathBuf> {
        self.inner.local_path(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::origin::{Fault, FaultKind, FaultPlan, MemoryOrigin, collect, conformance};

    fn quick() -> RetryPolicy {
        RetryPolicy {
            deadline: Duration::from_secs(20),
            first_pause: Duration::from_millis(1),
            max_pause: Duration::from_millis(5),
        }
    }

    fn faulty(plan: FaultPlan) -> Retry {
        let memory = Arc::new(MemoryOrigin::new("memory://t/"));
        Retry::new(Arc::new(Fault::new(memory, plan)), quick())
    }

    #[tokio::test]
    async fn conforms_over_a_faulty_origin() {
        for kind in [
            FaultKind::Unavailable,
            FaultKind::Throttled,
            FaultKind::CutBody,
            FaultKind::LongBody,
            FaultKind::Expired,
        ] {
            conformance::run(Arc::new(faulty(FaultPlan::every(3, kind)))).await;
        }
    }

    /// F1: a body that ends early is resumed where it ended, never served short.
    #[tokio::test]
    async fn f1_a_cut_body_is_resumed_where_it_was_cut() {
        let o = faulty(FaultPlan::every(2, FaultKind::CutBody));
        let data: Bytes = (0..1_000_000u32).map(|i| (i % 251) as u8).collect::<Vec<_>>().into();
        let meta = o
            .put(&"k".into(), PutBody::Bytes(data.clone()), &PutOptions::default())
            .await
            .expect("put");
        for _ in 0..4 {
            let got = collect(o.get(&meta, 5..999_999).await.expect("get")).await.expect("body");
            assert_eq!(got, data.slice(5..999_999));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn gives_up_at_the_deadline() {
        let memory = Arc::new(MemoryOrigin::new("memory://t/"));
        let o = Retry::new(
            Arc::new(Fault::new(memory, FaultPlan::every(1, FaultKind::Hang))),
            RetryPolicy { deadline: Duration::from_secs(3), ..quick() },
        );
        let t = Instant::now();
        let e = o.head(&"k".into()).await.expect_err("hangs");
        assert!(matches!(e, OriginError::TimedOut { .. }), "{e}");
        assert!(t.elapsed() <= Duration::from_secs(4));
    }
}

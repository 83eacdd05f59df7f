//! Bounds what is asked of an origin at once.
//!
//! The number of requests in flight follows AIMD (Chiu and Jain, 1989): halved
//! when the store asks to slow down, then raised by one for each full window of
//! successes. An optional token bucket bounds the bytes per second.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::{
    Attributes, ListPage, ListRequest, ObjectBody, Origin, OriginError, PutBody, PutOptions,
};
use crate::object::{Key, ObjectMeta};

/// Never fewer requests in flight than this, however much the store complains.
const MIN_REQUESTS: usize = 2;
/// One halving covers all complaints of this long: they stem from one burst.
const HALVE_AT_MOST_EVERY: Duration = Duration::from_millis(500);

struct Window {
    /// Permits taken out of the semaphore to shrink it.
    held_back: Vec<OwnedSemaphorePermit>,
    /// Permits still to be taken out as they return.
    owed: usize,
    size: usize,
    successes: usize,
    halved: Option<Instant>,
}

struct Bucket {
    rate: f64,
    tokens: f64,
    last: Instant,
}

struct Shared {
    slots: Arc<Semaphore>,
    max: usize,
    window: Mutex<Window>,
    bucket: Option<Mutex<Bucket>>,
}

/// Limits requests in flight and bytes per second.
pub struct Limit {
    inner: Arc<dyn Origin>,
    shared: Arc<Shared>,
}

impl Limit {
    /// At most `max_requests` at once, and `max_rate_bytes` per second if given.
    #[must_use]
    pub fn new(inner: Arc<dyn Origin>, max_requests: usize, max_rate_bytes: Option<u64>) -> Self {
        let max = max_requests.max(MIN_REQUESTS);
        let shared = Shared {
            slots: Arc::new(Semaphore::new(max)),
            max,
            window: Mutex::new(Window {
                held_back: Vec::new(),
                owed: 0,
                size: max,
                successes: 0,
                halved: None,
            }),
            bucket: max_rate_bytes
                .map(|r| Mutex::new(Bucket { rate: r as f64, tokens: 0.0, last: Instant::now() })),
        };
        Self { inner, shared: Arc::new(shared) }
    }

    /// Requests that may be in flight now.
    #[must_use]
    pub fn window(&self) -> usize {
        self.shared.window.lock().size
    }

    async fn slot(&self) -> Slot {
        let permit = self.shared.slots.clone().acquire_owned().await.ok();
        Slot { shared: self.shared.clone(), permit }
    }

    async fn slotted<T>(
        &self,
        call: impl Future<Output = Result<T, OriginError>>,
    ) -> Result<T, OriginError> {
        let slot = self.slot().await;
        let r = call.await;
        slot.shared.learn(r.as_ref().err());
        r
    }
}

/// A request's place in the window; gone when dropped.
struct Slot {
    shared: Arc<Shared>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut w = self.shared.window.lock();
        if w.owed > 0
            && let Some(p) = self.permit.take()
        {
            w.owed -= 1;
            w.held_back.push(p);
        }
    }
}

impl Shared {
    fn learn(&self, error: Option<&OriginError>) {
        let mut w = self.window.lock();
        match error {
            Some(OriginError::Throttled { .. }) => {
                let now = Instant::now();
                if w.halved.is_some_and(|t| now - t < HALVE_AT_MOST_EVERY) {
                    return;
                }
                w.halved = Some(now);
                w.successes = 0;
                let target = (w.size / 2).max(MIN_REQUESTS);
                while w.size > target {
                    w.size -= 1;
                    match self.slots.clone().try_acquire_owned() {
                        Ok(p) => w.held_back.push(p),
                        Err(_) => w.owed += 1,
                    }
                }
            }
            Some(_) => {}
            None => {
                w.successes += 1;
                if w.size < self.max && w.successes >= w.size {
                    w.successes = 0;
                    w.size += 1;
                    if w.owed > 0 {
                        w.owed -= 1;
                    } else {
                        w.held_back.pop();
                    }
                }
            }
        }
    }

    async fn pay(&self, bytes: usize) {
        let Some(bucket) = &self.bucket else { return };
        let debt = {
            let mut b = bucket.lock();
            let now = Instant::now();
            // A tenth of a second of burst keeps pieces from stuttering.
            b.tokens = (b.tokens + b.rate * (now - b.last).as_secs_f64()).min(b.rate / 10.0);
            b.last = now;
            b.tokens -= bytes as f64;
            -b.tokens / b.rate
        };
        if debt > 0.0 {
            tokio::time::sleep(Duration::from_secs_f64(debt)).await;
        }
    }
}

#[async_trait]
impl Origin for Limit {
    fn name(&self) -> &str {
        self.inner.name()
    }

    async fn list(&self, r: &ListRequest) -> Result<ListPage, OriginError> {
        self.slotted(self.inner.list(r)).await
    }

    async fn head(&self, key: &Key) -> Result<ObjectMeta, OriginError> {
        self.slotted(self.inner.head(key)).await
    }

    async fn get(&self, meta: &ObjectMeta, range: Range<u64>) -> Result<ObjectBody, OriginError> {
        let slot = self.slot().await;
        let body = match self.inner.get(meta, range).await {
            Ok(b) => b,
            Err(e) => {
                slot.shared.learn(Some(&e));
                return Err(e);
            }
        };
        // The slot lives as long as the body does.
        let stream = stream::unfold((body.stream, slot), |(mut s, slot)| async move {
            let item: Option<Result<Bytes, OriginError>> = s.next().await;
            match &item {
                Some(Ok(b)) => slot.shared.pay(b.len()).await,
                Some(Err(e)) => slot.shared.learn(Some(e)),
                None => slot.shared.learn(None),
            }
            item.map(|i| (i, (s, slot)))
        });
        Ok(ObjectBody { stream: stream.boxed(), ..body })
    }

    async fn put(
        &self,
        key: &Key,
        body: PutBody,
        how: &PutOptions,
    ) -> Result<ObjectMeta, OriginError> {
        self.slotted(self.inner.put(key, body, how)).await
    }

    async fn rename(&self, from: &Key, to: &Key) -> Result<ObjectMeta, OriginError> {
        self.slotted(self.inner.rename(from, to)).await
    }

    async fn owner(&self, key: &Key) -> Result<(ObjectMeta, Option<String>), OriginError> {
        self.slotted(self.inner.owner(key)).await
    }

    async fn abort_upload(&self, key: &Key, id: &str) -> Result<(), OriginError> {
        self.slotted(self.inner.abort_upload(key, id)).await
    }

    async fn delete(&self, key: &Key) -> Result<(), OriginError> {
        self.slotted(self.inner.delete(key)).await
    }

    async fn copy(
        &self,
        from: &ObjectMeta,
        to: &Key,
        attributes: &Attributes,
    ) -> Result<ObjectMeta, OriginError> {
        self.slotted(self.inner.copy(from, to, attributes)).await
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
    use crate::origin::{Fault, FaultKind, FaultPlan, MemoryOrigin, conformance};

    #[tokio::test]
    async fn conforms() {
        let memory = Arc::new(MemoryOrigin::new("memory://t/"));
        conformance::run(Arc::new(Limit::new(memory, 3, Some(1 << 30)))).await;
    }

    /// F2: the window halves while the store complains and opens again after.
    #[tokio::test(start_paused = true)]
    async fn f2_slow_down_halves_the_window_and_success_opens_it() {
        let memory = Arc::new(MemoryOrigin::new("memory://t/"));
        memory
            .put(&"k".into(), PutBody::Bytes(Bytes::from_static(b"x")), &PutOptions::default())
            .await
            .expect("put");
        let fault = Fault::new(memory.clone(), FaultPlan::every(1, FaultKind::Throttled));
        let l = Limit::new(Arc::new(fault), 32, None);
        for _ in 0..4 {
            assert!(l.head(&"k".into()).await.is_err());
            tokio::time::advance(HALVE_AT_MOST_EVERY).await;
        }
        assert_eq!(l.window(), 2);
        let l2 = Limit { inner: memory, shared: l.shared.clone() };
        for _ in 0..2 + 3 {
            l2.head(&"k".into()).await.expect("head");
        }
        assert_eq!(l2.window(), 4);
        assert_eq!(l2.shared.slots.available_permits(), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn the_rate_is_kept() {
        let memory = Arc::new(MemoryOrigin::new("memory://t/"));
        let data = Bytes::from(vec![7u8; 4 << 20]);
        let meta = memory
            .put(&"k".into(), PutBody::Bytes(data), &PutOptions::default())
            .await
            .expect("put");
        let l = Limit::new(memory, 8, Some(1 << 20));
        let t = Instant::now();
        let body = l.get(&meta, 0..4 << 20).await.expect("get");
        crate::origin::collect(body).await.expect("body");
        let s = t.elapsed().as_secs_f64();
        assert!((3.5..4.5).contains(&s), "4 MiB at 1 MiB/s took {s} s");
    }
}

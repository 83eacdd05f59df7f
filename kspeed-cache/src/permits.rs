//! Memory as byte permits, demand before prefetch (invariant I5).
//!
//! Whoever wants a buffer first takes permits for its bytes, and the permits
//! return when the last reference to the buffer is dropped. Demand is served in
//! order and ahead of prefetch; prefetch never takes the last quarter, so that a
//! waiting reader finds room even when prefetch has filled the rest.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Who asks for memory, a request slot or bandwidth.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub enum Priority {
    /// A reader waits for it.
    Demand,
    /// Nobody waits for it yet.
    Prefetch,
}

/// Prefetch leaves this part of the permits (a divisor) to demand.
const DEMAND_RESERVE_DIVISOR: u64 = 4;

struct Waiter {
    bytes: u64,
    wake: oneshot::Sender<Permit>,
}

struct State {
    free: u64,
    demand: VecDeque<Waiter>,
    prefetch: VecDeque<Waiter>,
}

struct Inner {
    total: u64,
    state: Mutex<State>,
}

/// A pool of byte permits. Clones share the pool.
#[derive(Clone)]
pub struct Permits(Arc<Inner>);

/// Permits for some bytes; they return on drop.
pub struct Permit {
    pool: Permits,
    bytes: u64,
}

impl Permits {
    /// A pool of `total` bytes.
    #[must_use]
    pub fn new(total: u64) -> Self {
        Self(Arc::new(Inner {
            total,
            state: Mutex::new(State {
                free: total,
                demand: VecDeque::new(),
                prefetch: VecDeque::new(),
            }),
        }))
    }

    /// Takes `bytes`, waiting for them in order of priority, then of arrival.
    /// A request above the whole pool is clamped to it: it runs alone.
    pub async fn acquire(&self, bytes: u64, priority: Priority) -> Permit {
        let cap = match priority {
            Priority::Demand => self.0.total,
            Priority::Prefetch => self.0.total - self.reserve(),
        };
        let bytes = bytes.min(cap);
        let wait = {
            let mut s = self.0.state.lock();
            if let Some(p) = self.take(&mut s, bytes, priority) {
                return p;
            }
            let (wake, wait) = oneshot::channel();
            let queue = match priority {
                Priority::Demand => &mut s.demand,
                Priority::Prefetch => &mut s.prefetch,
            };
            queue.push_back(Waiter { bytes, wake });
            wait
        };
        match wait.await {
            Ok(p) => p,
            // The sender lives in the pool that `self` keeps alive and is only
            // taken out to send, so this arm is for completeness.
            Err(_) => Permit { pool: self.clone(), bytes: 0 },
        }
    }

    /// Takes `bytes` if that needs no waiting.
    #[must_use]
    pub fn try_acquire(&self, bytes: u64, priority: Priority) -> Option<Permit> {
        let mut s = self.0.state.lock();
        self.take(&mut s, bytes, priority)
    }

    fn take(&self, s: &mut State, bytes: u64, priority: Priority) -> Option<Permit> {
        let fits = match priority {
            Priority::Demand => s.demand.is_empty() && s.free >= bytes,
            Priority::Prefetch => {
                s.demand.is_empty() && s.prefetch.is_empty() && s.free >= bytes + self.reserve()
            }
        };
        fits.then(|| {
            s.free -= bytes;
            Permit { pool: self.clone(), bytes }
        })
    }

    fn reserve(&self) -> u64 {
        self.0.total / DEMAND_RESERVE_DIVISOR
    }

    /// Bytes of the whole pool.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.total
    }

    /// Bytes taken now.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.0.total - self.0.state.lock().free
    }

    /// Whether prefetch would have to wait: the sign of memory pressure.
    #[must_use]
    pub fn is_pressed(&self) -> bool {
        let s = self.0.state.lock();
        !s.demand.is_empty() || !s.prefetch.is_empty() || s.free <= self.reserve()
    }

    fn give_back(&self, bytes: u64) {
        let mut woken = Vec::new();
        {
            let mut s = self.0.state.lock();
            s.free += bytes;
            loop {
                let reserve = if s.demand.is_empty() { self.reserve() } else { 0 };
                let queue = if s.demand.is_empty() { &s.prefetch } else { &s.demand };
                let Some(need) = queue.front().map(|w| w.bytes) else { break };
                let gone = queue.front().is_some_and(|w| w.wake.is_closed());
                if !gone && s.free < need + reserve {
                    break;
                }
                let queue = if s.demand.is_empty() { &mut s.prefetch } else { &mut s.demand };
                let Some(w) = queue.pop_front() else { break };
                if !gone {
                    s.free -= need;
                    woken.push(w);
                }
            }
        }
        for w in woken {
            // If the waiter has gone meanwhile, dropping the returned permit
            // gives the bytes back.
            let _ = w.wake.send(Permit { pool: self.clone(), bytes: w.bytes });
        }
    }
}

impl Permit {
    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Cuts `bytes` off into a permit of their own.
    #[must_use]
    pub fn split(&mut self, bytes: u64) -> Permit {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Permit { pool: self.pool.clone(), bytes }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.pool.give_back(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn demand_goes_first_and_prefetch_leaves_a_reserve() {
        let p = Permits::new(100);
        assert!(p.try_acquire(80, Priority::Prefetch).is_none());
        let a = p.acquire(75, Priority::Prefetch).await;
        let b = p.acquire(25, Priority::Demand).await;
        let mut late_prefetch = Box::pin(p.acquire(10, Priority::Prefetch));
        let mut demand = Box::pin(p.acquire(30, Priority::Demand));
        assert!((&mut late_prefetch).now_or_never().is_none());
        assert!((&mut demand).now_or_never().is_none());
        drop(b);
        assert!((&mut demand).now_or_never().is_none());
        drop(a);
        let d = demand.await;
        assert_eq!(d.bytes(), 30);
        let l = late_prefetch.await;
        assert_eq!(p.used(), 40);
        drop((d, l));
        assert_eq!(p.used(), 0);
    }

    #[tokio::test]
    async fn a_cancelled_waiter_leaks_nothing_and_blocks_nobody() {
        let p = Permits::new(10);
        let a = p.acquire(10, Priority::Demand).await;
        let mut gone = Box::pin(p.acquire(10, Priority::Demand));
        assert!((&mut gone).now_or_never().is_none());
        let mut next = Box::pin(p.acquire(4, Priority::Demand));
        assert!((&mut next).now_or_never().is_none());
        drop(gone);
        drop(a);
        let n = next.await;
        assert_eq!(p.used(), 4);
        drop(n);
        assert_eq!(p.used(), 0);
    }

    #[tokio::test]
    async fn a_request_above_the_pool_runs_alone() {
        let p = Permits::new(10);
        let a = p.acquire(1000, Priority::Demand).await;
        assert_eq!(a.bytes(), 10);
        assert!(p.is_pressed());
    }
}

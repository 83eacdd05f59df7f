//! Which key the uploader looks at next.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use kspeed_cache::Key;
use parking_lot::Mutex;
use tokio::sync::Notify;

#[derive(Default)]
struct Waiting {
    ready: VecDeque<Key>,
    queued: HashSet<Key>,
    later: BinaryHeap<Reverse<(Instant, Key)>>,
    urgent: HashSet<Key>,
    in_flight: HashSet<Key>,
    draining: bool,
    sample: Option<(Instant, u64)>,
    rate: u64,
}

/// Keys that are to be looked at.
#[derive(Default)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    wake: Notify,
}

impl Queue {
    /// Now, behind the others.
    pub(super) fn push(&self, key: Key) {
        let mut w = self.waiting.lock();
        if w.queued.insert(key.clone()) {
            w.ready.push_back(key);
        }
        drop(w);
        self.wake.notify_one();
    }

    /// Later.
    pub(super) fn push_at(&self, key: Key, at: Instant) {
        self.waiting.lock().later.push(Reverse((at, key)));
        self.wake.notify_one();
    }

    /// Somebody waits for this one.
    pub(super) fn urge(&self, key: Key) {
        let mut w = self.waiting.lock();
        w.urgent.insert(key.clone());
        if w.queued.insert(key.clone()) {
            w.ready.push_front(key);
        }
        drop(w);
        self.wake.notify_one();
    }

    fn pop(&self) -> Result<Key, Option<Instant>> {
        let mut w = self.waiting.lock();
        let now = Instant::now();
        while let Some(Reverse((at, _))) = w.later.peek()
            && *at <= now
        {
            let Some(Reverse((_, key))) = w.later.pop() else { break };
            if w.queued.insert(key.clone()) {
                w.ready.push_back(key);
            }
        }
        match w.ready.pop_front() {
            Some(k) => {
                w.queued.remove(&k);
                Ok(k)
            }
            None => Err(w.later.peek().map(|Reverse((at, _))| *at)),
        }
    }

    pub(super) async fn next(&self) -> Key {
        loop {
            match self.pop() {
                Ok(k) => return k,
                Err(None) => self.wake.notified().await,
                Err(Some(at)) => {
                    let _ = tokio::time::timeout_at(at.into(), self.wake.notified()).await;
                }
            }
        }
    }

    pub(super) fn set_draining(&self, on: bool) {
        self.waiting.lock().draining = on;
    }

    pub(super) fn hurries(&self, key: &Key) -> (bool, bool) {
        let w = self.waiting.lock();
        let urgent = w.urgent.contains(key);
        (urgent, urgent || w.draining)
    }

    pub(super) fn begin(&self, key: &Key) {
        self.waiting.lock().in_flight.insert(key.clone());
    }

    pub(super) fn end(&self, key: &Key, is_done: bool) {
        let mut w = self.waiting.lock();
        w.in_flight.remove(key);
        if is_done {
            w.urgent.remove(key);
        }
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.waiting.lock().in_flight.len() as u64
    }

    pub(super) fn is_in_flight(&self, key: &Key) -> bool {
        self.waiting.lock().in_flight.contains(key)
    }

    /// Bytes per second between the last two times that somebody asked.
    pub(super) fn rate(&self, uploaded: u64) -> u64 {
        let mut w = self.waiting.lock();
        match w.sample {
            Some((at, _)) if at.elapsed() < Duration::from_secs(1) => {}
            Some((at, before)) => {
                let rate = (uploaded - before) as f64 / at.elapsed().as_secs_f64();
                w.rate = rate as u64;
                w.sample = Some((Instant::now(), uploaded));
            }
            None => w.sample = Some((Instant::now(), uploaded)),
        }
        w.rate
    }
}

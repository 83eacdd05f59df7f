//! Writes small objects to their packs behind the fetches' back: a disk that is
//! slower than the origin must not hold up the tasks that receive.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use super::CacheStats;
use super::object::CachedObject;
use crate::permits::Permit;

enum Job {
    /// With the permit for its bytes, which bounds the queue.
    Write(Arc<CachedObject>, Bytes, Permit),
    Flush(oneshot::Sender<()>),
}

/// The thread that writes, and its queue.
pub(super) struct Packer {
    jobs: mpsc::UnboundedSender<Job>,
    waiting: AtomicU64,
    max_waiting: u64,
}

impl Packer {
    /// With its thread, which ends when the last sender is gone, and a queue of so
    /// many bytes.
    pub(super) fn new(max_waiting: u64) -> Self {
        let (jobs, mut inbox) = mpsc::unbounded_channel();
        let spawned = std::thread::Builder::new().name("kspeed-pack".into()).spawn(move || {
            while let Some(job) = inbox.blocking_recv() {
                match job {
                    Job::Write(object, data, permit) => {
                        write(&object, &data);
                        let waiting = &object.cache.0.packer.waiting;
                        waiting.fetch_sub(data.len() as u64, Ordering::Relaxed);
                        drop(permit);
                    }
                    Job::Flush(done) => drop(done.send(())),
                }
            }
        });
        if let Err(e) = spawned {
            tracing::warn!(error = %e, "no thread to write small objects: they are kept in RAM only");
        }
        Self { jobs, waiting: AtomicU64::new(0), max_waiting }
    }

    /// Writes by and by; until then the bytes are found with the object. Not at
    /// all if the disk does not keep up: it holds what it can take.
    pub(super) fn put(&self, object: &Arc<CachedObject>, data: &Bytes, permit: Permit) {
        let inner = &object.cache.0;
        let bytes = data.len() as u64;
        if inner.disk(object.id).is_none()
            || self.waiting.load(Ordering::Relaxed) + bytes > self.max_waiting
        {
            return;
        }
        self.waiting.fetch_add(bytes, Ordering::Relaxed);
        object.writes.send_modify(|w| drop(w.insert(0, data.clone())));
        if self.jobs.send(Job::Write(object.clone(), data.clone(), permit)).is_err() {
            object.writes.send_modify(|w| drop(w.remove(&0)));
        }
    }

    /// Waits for what was put before.
    pub(super) async fn flush(&self) {
        let (done, wait) = oneshot::channel();
        if self.jobs.send(Job::Flush(done)).is_ok() {
            let _ = wait.await;
        }
    }
}

fn write(object: &CachedObject, data: &[u8]) {
    let inner = &object.cache.0;
    if !object.writes.borrow().contains_key(&0) {
        // Evicted meanwhile.
        return;
    }
    if let Some(disk) = inner.disk(object.id)
        && disk.put_small(object.id, data).is_err()
    {
        CacheStats::add(&inner.stats.disk_write_errors, 1);
    }
    object.writes.send_modify(|w| drop(w.remove(&0)));
}

//! Tier 0: puts the bytes of files into the kernel's page cache before they are
//! read (FUSE_NOTIFY_STORE), so that the first read asks nobody.
//!
//! The kernel takes pages only for inodes that it has looked up, and may drop
//! them at any time: the daemon can always serve the read. A thread of its own
//! does the storing: it may wait for a page that a read holds, which the session
//! threads then answer.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use fuser::{INodeNo, Notifier};
use kspeed_cache::CachedObject;
use tokio::sync::{mpsc, oneshot};

use crate::namespace::Ino;

/// One notification's bytes: a multiple of the page size, in bytes.
const STORE_BYTES: usize = 1 << 20;
/// Files waiting to be stored.
const QUEUE_FILES: usize = 64;
/// Free memory is asked for after so many bytes.
const MEMORY_CHECK_BYTES: u64 = 32 << 20;
/// Pushing stops when less than this part (a divisor) of memory is available:
/// the kernel would drop what was pushed, or what others need.
const AVAILABLE_MIN_DIVISOR: u64 = 8;

struct Job {
    ino: Ino,
    data: Bytes,
    done: oneshot::Sender<bool>,
}

/// Pushes for one mount.
pub struct Pusher {
    jobs: mpsc::Sender<Job>,
    notifier: Arc<OnceLock<Notifier>>,
    since_check: AtomicU64,
    bytes: AtomicU64,
    files: AtomicU64,
}

impl Pusher {
    /// With its thread.
    ///
    /// # Errors
    /// No thread can be made.
    pub fn new() -> std::io::Result<Self> {
        let (jobs, mut inbox) = mpsc::channel::<Job>(QUEUE_FILES);
        let notifier: Arc<OnceLock<Notifier>> = Arc::default();
        let n = notifier.clone();
        // It ends when the last sender is gone, with its mount.
        std::thread::Builder::new().name("kspeed-push".into()).spawn(move || {
            while let Some(job) = inbox.blocking_recv() {
                let stored = n.get().is_some_and(|n| store(n, job.ino, &job.data));
                let _ = job.done.send(stored);
            }
        })?;
        Ok(Self {
            jobs,
            notifier,
            since_check: AtomicU64::new(MEMORY_CHECK_BYTES),
            bytes: AtomicU64::new(0),
            files: AtomicU64::new(0),
        })
    }

    /// The mount's channel to the kernel, once it is there.
    pub fn connect(&self, n: Notifier) {
        let _ = self.notifier.set(n);
    }

    /// Bytes pushed since the start.
    #[must_use]
    pub fn pushed_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Files pushed since the start.
    #[must_use]
    pub fn pushed_files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    /// Pushes a file whole, waiting for its bytes if they are on their way. False
    /// if memory is short, or the bytes can't be had.
    pub async fn push(&self, ino: Ino, object: &Arc<CachedObject>) -> bool {
        let size = object.meta().size;
        if size == 0 {
            return true;
        }
        if !self.has_memory(size) {
            return false;
        }
        let Ok(size) = usize::try_from(size) else { return false };
        let Ok(data) = object
            .read(0, size)
            .await
            .and_then(|h| h.to_bytes().map_err(|e| kspeed_cache::CacheError::Disk(Arc::new(e))))
        else {
            return false;
        };
        let (done, wait) = oneshot::channel();
        if self.jobs.send(Job { ino, data, done }).await.is_err() {
            return false;
        }
        let stored = wait.await.unwrap_or(false);
        if stored {
            self.bytes.fetch_add(size as u64, Ordering::Relaxed);
            self.files.fetch_add(1, Ordering::Relaxed);
        }
        stored
    }

    fn has_memory(&self, bytes: u64) -> bool {
        if self.since_check.fetch_add(bytes, Ordering::Relaxed) + bytes < MEMORY_CHECK_BYTES {
            return true;
        }
        let Some((total, available)) = memory() else { return true };
        let enough = available > total / AVAILABLE_MIN_DIVISOR;
        if enough {
            self.since_check.store(0, Ordering::Relaxed);
        }
        enough
    }
}

fn store(n: &Notifier, ino: Ino, data: &[u8]) -> bool {
    let mut at = 0u64;
    for piece in data.chunks(STORE_BYTES) {
        if n.store(INodeNo(ino), at, piece).is_err() {
            return false;
        }
        at += piece.len() as u64;
    }
    true
}

/// Memory of the machine, and what is available of it, in bytes.
#[must_use]
pub fn memory() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find(|l| l.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    Some((field("MemTotal:")?, field("MemAvailable:")?))
}

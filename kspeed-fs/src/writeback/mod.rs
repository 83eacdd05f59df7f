//! Write-back: what is written here is in the origin later, and never lost.
//!
//! Bytes lie in stage files on the cache disk ([`Stages`]); what the origin is to
//! have is the [`Wishes`]; the [`journal`] holds both over a crash; the
//! [`uploader`] makes the origin as it is wished. docs/semantics.md tells what
//! each acknowledgement means.
//!
//! Order of a promise: bytes (fdatasync of the stage) → wish (a record of the
//! journal) → journal (fdatasync) → acknowledged. Order of keeping it: object
//! complete in the origin → wish settled (a record) → stage file becomes a file
//! of the cache. A crash between any two leaves more than was promised, never
//! less: a stage without a wish is removed at the next start, a wish whose stage
//! is gone was settled.
//!
//! Lock order: `uploads` → `wishes` → the namespace's and the journal's. Whoever
//! decides by what the namespace says of the origin does it under `wishes`: a
//! wish is settled, and the namespace told, under it too. No lock is held across
//! an await but a stage's `uploading`.

mod crash;
pub mod journal;
mod progress;
mod queue;
mod recovery;
pub mod stage;
mod uploader;
pub use crash::POINTS as CRASH_POINTS;
pub mod wishes;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use kspeed_cache::origin::{Condition, Origin, PartialUpload};
use kspeed_cache::{Cache, Key, ObjectMeta};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

use crate::errno::FsError;
use crate::namespace::Live;
use journal::{Journal, JournalError, Record};
use progress::Retry;
pub use progress::{Failure, Pending};
use queue::Queue;
pub use recovery::{Found, boot_id, dir_of, find_all, stage_files, take_over};
pub use stage::{Stage, Stages};
pub use wishes::{Change, Child, StageId, Wish, Wishes};

/// When close and fsync return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ack {
    /// When bytes and journal are on the cache disk.
    Local,
    /// When the object is complete in the origin.
    Origin,
}

/// How write-back behaves.
#[derive(Clone, Debug)]
pub struct WritebackConfig {
    /// Where stages are, on the cache disk.
    pub dir: PathBuf,
    /// When close and fsync return.
    pub ack: Ack,
    /// With [`Ack::Local`]: whether close waits for the disk, as fsync does, or
    /// only for the page cache.
    pub sync_on_close: bool,
    /// A closed file is uploaded after this: time for a rename or a removal.
    pub delay: Duration,
    /// What stages may take, in bytes; then writers wait.
    pub max_bytes: u64,
    /// How long they wait for room before ENOSPC.
    pub room_timeout: Duration,
}

/// Why write-back can't begin.
#[derive(Debug, thiserror::Error)]
pub enum WritebackError {
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// Files that another source's mount has not uploaded.
    #[error(
        "{dir} holds {files} files that were written to {other} and are not uploaded; mount that again to upload them, or take them over with --recover"
    )]
    Foreign {
        /// The stage directory.
        dir: PathBuf,
        /// Files that wait.
        files: usize,
        /// Their origin.
        other: String,
    },
}

/// Counters.
#[derive(Default, Debug)]
pub struct WritebackStats {
    /// Bytes uploaded.
    pub uploaded_bytes: AtomicU64,
    /// Objects uploaded.
    pub uploads: AtomicU64,
    /// Tries that failed.
    pub failures: AtomicU64,
    /// Files that somebody else had changed in the origin meanwhile.
    pub conflicts: AtomicU64,
}

/// See [`Writeback::hold`].
pub struct Held<'a> {
    writeback: &'a Writeback,
    prefix: &'a Key,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.writeback.wishes.lock().release(self.prefix);
    }
}

/// The write-back of a mount.
pub struct Writeback {
    config: WritebackConfig,
    origin: Arc<dyn Origin>,
    cache: Cache,
    live: Arc<Live>,
    wishes: Arc<Mutex<Wishes>>,
    uploads: Mutex<HashMap<StageId, (Key, PartialUpload)>>,
    journal: Journal,
    stages: Stages,
    queue: Queue,
    retries: Mutex<HashMap<Key, Retry>>,
    /// Since when there is a wish, by key.
    since: Mutex<HashMap<Key, Instant>>,
    settled: Notify,
    staged: Mutex<(Instant, u64)>,
    stats: WritebackStats,
    tasks: TaskTracker,
    /// Tells this process's tokens from those of others, as wishes are numbered
    /// anew by each.
    run: u64,
}

impl Writeback {
    /// The stages.
    #[must_use]
    pub fn stages(&self) -> &Stages {
        &self.stages
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> &WritebackStats {
        &self.stats
    }

    /// Whether close waits for the disk.
    #[must_use]
    pub fn syncs_on_close(&self) -> bool {
        self.config.sync_on_close || self.config.ack == Ack::Origin
    }

    /// When close and fsync return.
    #[must_use]
    pub fn ack_mode(&self) -> Ack {
        self.config.ack
    }

    /// Runs a question on the wishes.
    pub fn with_wishes<T>(&self, f: impl FnOnce(&Wishes) -> T) -> T {
        f(&self.wishes.lock())
    }

    /// A file begins to be written at a key: it is seen through the mount, and no
    /// promise yet.
    /// `base`: what the origin has there, where no wish tells; asked while no wish
    /// changes.
    pub fn begin_file(&self, key: &Key, stage: &Stage, base: impl FnOnce() -> Condition) {
        let mut wishes = self.wishes.lock();
        let base = wishes.get(key).map_or_else(base, |e| e.base.clone());
        let wish =
            Wish::File { stage: stage.id(), attributes: *stage.attributes.lock(), durable: false };
        wishes.apply(&[Change { key: key.clone(), wish: Some(wish), base }], false);
    }

    /// Promises changes, computed and applied as one. They survive the process
    /// when this returns, and the machine after [`Self::sync_journal`]. `tell`, called
    /// before any of them can be settled, tells the namespace.
    ///
    /// # Errors
    /// What `compute` fails with, or the journal can't be written: nothing has
    /// changed.
    pub fn change(
        &self,
        compute: impl FnOnce(&Wishes) -> Result<Vec<Change>, FsError>,
        tell: impl FnOnce(),
    ) -> Result<Vec<Change>, FsError> {
        let changes = {
            let mut wishes = self.wishes.lock();
            let changes = compute(&wishes)?;
            if !changes.is_empty() {
                self.journal.append(&Record::Set(changes.clone()))?;
                crash::point("change: appended");
                wishes.apply(&changes, true);
            }
            tell();
            changes
        };
        self.retries.lock().retain(|k, _| !changes.iter().any(|c| c.key == *k));
        for c in &changes {
            self.note(&c.key, c.wish.is_some());
        }
        Ok(changes)
    }

    fn note(&self, key: &Key, wished: bool) {
        let mut since = self.since.lock();
        if wished {
            since.entry(key.clone()).or_insert_with(Instant::now);
            drop(since);
            self.queue.push(key.clone());
        } else {
            since.remove(key);
            drop(since);
            self.settled.notify_waiters();
        }
    }

    /// Nothing below a prefix is changed in the origin as long as the guard lives,
    /// nor is anything on its way when this returns: what a listing tells from
    /// then on holds.
    pub async fn hold<'a>(&'a self, prefix: &'a Key) -> Held<'a> {
        self.wishes.lock().hold(prefix);
        let held = Held { writeback: self, prefix };
        while self.wishes.lock().is_busy_below(prefix) {
            let _ = tokio::time::timeout(Duration::from_millis(20), self.settled.notified()).await;
        }
        held
    }

    /// Promises what a stage holds now. Blocks on the disk if it is to be
    /// durable. None: the file has no name any more.
    ///
    /// # Errors
    /// The disk or the journal fails.
    pub fn ack(&self, s: &Stage, durable: bool) -> io::Result<Option<Key>> {
        let look = s.look()?;
        crash::point("ack: before the bytes are synced");
        if durable {
            s.sync()?;
            if s.is_name_unsynced() {
                journal::sync_dir(&self.config.dir)?;
            }
        }
        crash::point("ack: bytes synced");
        let (key, at) = {
            let mut wishes = self.wishes.lock();
            let Some(key) = wishes.key_of(s.id()).cloned() else {
                s.set_acked(look, durable);
                return Ok(None);
            };
            let base = wishes.get(&key).map_or(Condition::Any, |e| e.base.clone());
            let attributes = *s.attributes.lock();
            let wish = Wish::File { stage: s.id(), attributes, durable };
            let change = Change { key: key.clone(), wish: Some(wish), base };
            let at = self.journal.append(&Record::Set(vec![change.clone()]))?;
            wishes.apply(&[change], true);
            (key, at)
        };
        crash::point("ack: wish appended");
        s.set_unpublished();
        s.set_acked(look, durable);
        // Too much, if it was counted before; it is counted anew soon.
        self.staged.lock().1 += look.size();
        if durable {
            self.journal.sync(at)?;
            crash::point("ack: journal synced");
        }
        self.retries.lock().remove(&key);
        self.note(&key, true);
        Ok(Some(key))
    }

    /// All promises so far survive the machine when this returns.
    ///
    /// # Errors
    /// The disk fails.
    pub fn sync_journal(&self) -> io::Result<()> {
        self.journal.sync_all()
    }

    /// Nobody writes to a stage any more.
    pub fn closed(&self, s: &Arc<Stage>) {
        let key = {
            let mut wishes = self.wishes.lock();
            let Some(key) = wishes.key_of(s.id()).cloned() else { return };
            let unacked = wishes.get(&key).is_some_and(|e| !e.acked);
            if unacked {
                // Opened for writing and not written to.
                wishes
                    .apply(&[Change { key: key.clone(), wish: None, base: Condition::Any }], false);
                let now = s.published().or_else(|| s.original.clone());
                self.live.settled(&key, now.as_ref());
            }
            drop(wishes);
            if unacked {
                self.note(&key, false);
                return;
            }
            key
        };
        self.queue.push(key);
    }

    /// What becomes of a stage that nobody has open: settled, it is a file of the
    /// cache; without a wish it goes.
    pub async fn retire(&self, s: &Arc<Stage>) {
        let _alone = s.uploading.lock().await;
        {
            // Under the lock, so that no wish for it is made meanwhile.
            let wishes = self.wishes.lock();
            if wishes.key_of(s.id()).is_some() || !self.stages.begin_to_retire(s) {
                return;
            }
        }
        let begun = self.uploads.lock().get(&s.id()).cloned();
        if let Some((key, upload)) = begun {
            // Of a file that was removed meanwhile; at the next start at the latest.
            self.abort(s.id(), &key, &upload.id).await;
        }
        let published = s.published().filter(|m| s.look().is_ok_and(|l| l.size() == m.size));
        if let Some(meta) = published {
            // Readers find the stage until the cache has it.
            crash::point("retire: before the cache has it");
            let object = self.cache.object(&self.origin, &meta);
            if let Err(e) = object.adopt(s.path()).await {
                tracing::debug!(error = %e, key = %meta.key, "not kept in the cache");
            }
        }
        crash::point("retire: the cache has it");
        self.stages.remove(s);
        let _ = std::fs::remove_file(s.path());
    }

    /// As [`Self::retire`], without waiting: a part of its upload may be on its way,
    /// and to be aborted.
    pub fn retire_soon(self: &Arc<Self>, s: Arc<Stage>) {
        let this = self.clone();
        self.tasks.spawn(async move { this.retire(&s).await });
    }

    /// Waits until stages leave room for another writer.
    ///
    /// # Errors
    /// There is none within the time that writers wait: ENOSPC.
    pub async fn room(&self) -> Result<(), FsError> {
        let full = |w: &Self| {
            let mut staged = w.staged.lock();
            if staged.0.elapsed() > Duration::from_millis(500) || staged.1 >= w.config.max_bytes {
                *staged = (Instant::now(), w.stages.bytes());
            }
            staged.1 >= w.config.max_bytes
        };
        let until = Instant::now() + self.config.room_timeout;
        while full(self) {
            if Instant::now() >= until {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC).into());
            }
            let _ = tokio::time::timeout(Duration::from_millis(200), self.settled.notified()).await;
        }
        Ok(())
    }

    /// The origin's object that a name has, for [`Condition`]s.
    #[must_use]
    pub fn base_of(meta: Option<&ObjectMeta>) -> Condition {
        meta.map_or(Condition::Absent, |m| Condition::Version(m.version.clone()))
    }
}

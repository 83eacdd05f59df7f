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
pub mod stage;
mod uploader;
pub use crash::POINTS as CRASH_POINTS;
pub mod wishes;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kspeed_cache::origin::{Condition, Origin, OriginError, PartialUpload};
use kspeed_cache::{Cache, Key, ObjectMeta};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

use crate::errno::FsError;
use crate::namespace::Live;
use journal::{FileLog, Journal, JournalError, Record, Writer, replay};
pub use stage::{Stage, Stages};
use uploader::Queue;
pub use wishes::{Change, Child, StageId, Wish, Wishes};

const JOURNAL: &str = "journal";
const OWNER: &str = "owner";

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

/// Why a wish is not settled yet.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Failure {
    /// The path.
    pub path: String,
    /// The last error.
    pub reason: String,
    /// How often it was tried.
    pub tries: u32,
    /// Trying again helps only after somebody has changed something.
    pub permanent: bool,
}

struct Retry {
    failure: Failure,
    at: Instant,
}

/// What waits, as `kspeed status` shows it.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Pending {
    /// Files and directories that are not as wished in the origin.
    pub changes: u64,
    /// Bytes in stage files.
    pub staged_bytes: u64,
    /// How long the oldest change has waited, in seconds.
    pub oldest_s: f64,
    /// Upload rate since the first change that waits, in bytes per second.
    pub rate: u64,
    /// Estimated time until all is uploaded, in seconds.
    pub left_s: Option<f64>,
    /// Uploads in flight.
    pub in_flight: u64,
    /// What failed and is tried again, at most 20 of them.
    pub failed: Vec<Failure>,
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

/// The directory of an origin's stages below a cache disk's.
#[must_use]
pub fn dir_of(stage_dir: &Path, origin: &str) -> PathBuf {
    stage_dir.join(format!("{:032x}", xxhash_rust::xxh3::xxh3_128(origin.as_bytes())))
}

/// What a stage directory holds.
#[derive(Debug)]
pub struct Found {
    /// The directory.
    pub dir: PathBuf,
    /// Whose stages they are.
    pub origin: String,
    /// Its journal.
    pub journal: Result<journal::Replayed, JournalError>,
}

/// Reads the machine's boot id; empty where it has none.
#[must_use]
pub fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    text.map(|t| t.trim().to_owned()).unwrap_or_default()
}

fn read_journal(dir: &Path, boot: &str) -> Result<journal::Replayed, JournalError> {
    let path = dir.join(JOURNAL);
    let bytes = match std::fs::read(&path) {
        Ok(b) => b,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(source) => return Err(JournalError::Io { path, source }),
    };
    replay(&bytes, boot).map_err(|(line, detail)| JournalError::Damaged { path, line, detail })
}

/// All stage directories below a cache disk's, whoever they are of.
///
/// # Errors
/// The disk fails.
pub fn find_all(stage_dir: &Path) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    let boot = boot_id();
    for e in std::fs::read_dir(stage_dir)? {
        let dir = e?.path();
        if !dir.is_dir() {
            continue;
        }
        let origin = std::fs::read_to_string(dir.join(OWNER)).unwrap_or_default();
        let journal = read_journal(&dir, &boot);
        found.push(Found { dir, origin: origin.trim().to_owned(), journal });
    }
    Ok(found)
}

/// Stage files of a directory, by number.
///
/// # Errors
/// The disk fails.
pub fn stage_files(dir: &Path) -> io::Result<Vec<StageId>> {
    let mut ids = Vec::new();
    for e in std::fs::read_dir(dir)? {
        if let Some(id) = e?.file_name().to_str().and_then(stage::id_of) {
            ids.push(id);
        }
    }
    Ok(ids)
}

/// Moves what another origin's mount has not uploaded into this origin's
/// directory, under the same paths.
///
/// # Errors
/// The disk fails, or this origin has wishes of its own.
pub fn take_over(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::create_dir_all(to)?;
    let own = std::fs::metadata(to.join(JOURNAL)).map_or(0, |m| m.len());
    if own > 0 && !read_journal(to, "").is_ok_and(|r| r.wishes.is_empty()) {
        return Err(io::Error::other(
            "this source has files of its own that are not uploaded: mount without --recover first",
        ));
    }
    // The journal last: until it is there, the files belong to the other one.
    for id in stage_files(from)? {
        std::fs::rename(stage::path_of(from, id), stage::path_of(to, id))?;
    }
    journal::sync_dir(to)?;
    std::fs::rename(from.join(JOURNAL), to.join(JOURNAL))?;
    journal::sync_dir(to)?;
    let _ = std::fs::remove_dir_all(from);
    Ok(())
}

impl Writeback {
    /// Opens the stage directory of an origin and takes up what is in it.
    ///
    /// # Errors
    /// The journal is damaged, or the disk fails.
    pub fn open(
        config: WritebackConfig,
        origin: Arc<dyn Origin>,
        cache: Cache,
        live: Arc<Live>,
    ) -> Result<Arc<Self>, WritebackError> {
        let dir = config.dir.clone();
        let io = |source| JournalError::Io { path: dir.clone(), source };
        std::fs::create_dir_all(&dir).map_err(io)?;
        let boot = boot_id();
        let mut replayed = read_journal(&dir, &boot)?;
        if replayed.torn_bytes > 0 {
            tracing::warn!(
                bytes = replayed.torn_bytes,
                "the journal's end was never synced and is torn; it was not acknowledged"
            );
        }
        for (key, stage) in std::mem::take(&mut replayed.lost) {
            tracing::error!(%key, stage, "written but not synced when the machine went down: dropped (--sync-on-close false)");
            replayed.wishes.apply(&[Change { key, wish: None, base: Condition::Any }], true);
        }
        let mut recovered = HashMap::new();
        let mut gone = Vec::new();
        for (key, e) in replayed.wishes.iter() {
            if let Wish::File { stage, attributes, .. } = &e.wish {
                if stage::path_of(&dir, *stage).exists() {
                    recovered.insert(*stage, *attributes);
                } else {
                    gone.push(Change { key: key.clone(), wish: None, base: Condition::Any });
                }
            }
        }
        for c in &gone {
            tracing::info!(key = %c.key, "its stage file is gone: it was uploaded or removed");
        }
        replayed.wishes.apply(&gone, true);
        for id in stage_files(&dir).map_err(io)? {
            if !recovered.contains_key(&id) {
                // Never acknowledged, or settled.
                let _ = std::fs::remove_file(stage::path_of(&dir, id));
            }
        }
        let id = match &*replayed.writer.id {
            "" => format!("{:016x}", rand::random::<u64>()),
            id => id.to_owned(),
        };
        let writer = Writer { origin: origin.name().to_owned(), id, boot };
        std::fs::write(dir.join(OWNER), origin.name()).map_err(io)?;
        let log = FileLog::open(&dir.join(JOURNAL)).map_err(io)?;
        let journal = Journal::begin(Box::new(log), writer, &replayed).map_err(io)?;
        let journal::Replayed { wishes, uploads, .. } = replayed;
        if !wishes.is_empty() {
            tracing::info!(changes = wishes.len(), "what was not uploaded is taken up");
        }
        let now = Instant::now();
        let since = wishes.iter().map(|(k, _)| (k.clone(), now)).collect();
        let queue = Queue::default();
        for (k, _) in wishes.iter() {
            queue.push(k.clone());
        }
        let wishes = Arc::new(Mutex::new(wishes));
        live.overlay(wishes.clone());
        Ok(Arc::new(Self {
            stages: Stages::new(dir, recovered),
            config,
            origin,
            cache,
            live,
            wishes,
            uploads: Mutex::new(uploads),
            journal,
            queue,
            retries: Mutex::default(),
            since: Mutex::new(since),
            settled: Notify::new(),
            staged: Mutex::new((now, 0)),
            stats: WritebackStats::default(),
            tasks: TaskTracker::new(),
            run: rand::random(),
        }))
    }

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

    /// The key of a stage whose promise is not kept yet. It is tried at once.
    #[must_use]
    pub fn unkept(&self, s: &Stage) -> Option<Key> {
        let key = {
            let wishes = self.wishes.lock();
            let key = wishes.key_of(s.id())?;
            wishes.get(key).filter(|e| e.acked)?;
            key.clone()
        };
        self.retries.lock().remove(&key);
        Some(key)
    }

    /// Waits until nothing is wished for a key any more.
    ///
    /// # Errors
    /// A try of it failed. It is tried again all the same.
    pub async fn settle(&self, key: &Key) -> Result<(), FsError> {
        loop {
            self.queue.urge(key.clone());
            let woken = self.settled.notified();
            tokio::pin!(woken);
            woken.as_mut().enable();
            if !self.wishes.lock().get(key).is_some_and(|e| e.acked) {
                return Ok(());
            }
            if let Some(r) = self.retries.lock().get(key) {
                return Err(FsError::NotStored(r.failure.reason.clone()));
            }
            // Another upload of the key that ends now may take the urgency away.
            let _ = tokio::time::timeout(Duration::from_millis(100), woken).await;
        }
    }

    /// Waits until all that is promised below a path is in the origin; `progress`
    /// is told what waits, now and then.
    ///
    /// # Errors
    /// Something failed for good, or (with `patience`) did not get on for so long.
    pub async fn drain(
        &self,
        below: &[u8],
        patience: Option<Duration>,
        progress: &(dyn Fn(u64, u64) + Send + Sync),
    ) -> Result<(), FsError> {
        let mut last = (u64::MAX, Instant::now());
        self.queue.set_draining(true);
        self.retries.lock().clear();
        let result = loop {
            let keys: Vec<Key> = {
                let wishes = self.wishes.lock();
                let dir = [below, b"/"].concat();
                let all = wishes.iter().filter(|(k, e)| {
                    e.acked
                        && (below.is_empty()
                            || k.as_bytes() == below
                            || k.as_bytes().starts_with(&dir))
                });
                all.map(|(k, _)| k.clone()).collect()
            };
            if keys.is_empty() {
                break Ok(());
            }
            for k in &keys {
                self.queue.urge(k.clone());
            }
            let left = keys.len() as u64;
            if left != last.0 {
                last = (left, Instant::now());
                progress(left, self.stages.bytes());
            }
            let failed = {
                let retries = self.retries.lock();
                let all = keys.iter().all(|k| retries.get(k).is_some_and(|r| r.failure.permanent));
                all.then(|| keys.first().and_then(|k| retries.get(k)).map(|r| r.failure.clone()))
            };
            if let Some(Some(f)) = failed {
                break Err(FsError::NotStored(format!("{}: {}", f.path, f.reason)));
            }
            if patience.is_some_and(|p| last.1.elapsed() > p) {
                let why = self.pending().failed.first().map(|f| f.reason.clone());
                let why = why.unwrap_or_else(|| "files are still open for writing".into());
                break Err(FsError::NotStored(format!("{left} changes are left: {why}")));
            }
            let _ = tokio::time::timeout(Duration::from_millis(200), self.settled.notified()).await;
        };
        self.queue.set_draining(false);
        result
    }

    /// What waits.
    #[must_use]
    pub fn pending(&self) -> Pending {
        let changes = self.wishes.lock().iter().filter(|(_, e)| e.acked).count() as u64;
        let oldest = self.since.lock().values().map(Instant::elapsed).max().unwrap_or_default();
        let staged_bytes = if self.stages.count() == 0 { 0 } else { self.stages.bytes() };
        let rate = self.queue.rate(self.stats.uploaded_bytes.load(Ordering::Relaxed));
        let failed = self.retries.lock().values().take(20).map(|r| r.failure.clone()).collect();
        Pending {
            changes,
            staged_bytes,
            oldest_s: if changes == 0 { 0.0 } else { oldest.as_secs_f64() },
            rate,
            left_s: (rate > 0 && changes > 0).then(|| staged_bytes as f64 / rate as f64),
            in_flight: self.queue.in_flight(),
            failed,
        }
    }

    /// The state of a file as `user.kspeed.state` tells it.
    #[must_use]
    pub fn state_of(&self, s: &Stage) -> &'static str {
        let key = self.wishes.lock().key_of(s.id()).cloned();
        match key {
            None => "clean",
            Some(k) if self.retries.lock().contains_key(&k) => "failed",
            Some(k) if self.queue.is_in_flight(&k) => "uploading",
            Some(_) => "staged",
        }
    }

    /// The origin's object that a name has, for [`Condition`]s.
    #[must_use]
    pub fn base_of(meta: Option<&ObjectMeta>) -> Condition {
        meta.map_or(Condition::Absent, |m| Condition::Version(m.version.clone()))
    }

    fn failed(&self, key: &Key, e: &OriginError) {
        self.stats.failures.fetch_add(1, Ordering::Relaxed);
        let mut retries = self.retries.lock();
        let tries = retries.get(key).map_or(0, |r| r.failure.tries) + 1;
        let pause = Duration::from_secs(1 << tries.min(8)).min(Duration::from_secs(300));
        tracing::warn!(error = %e, %key, tries, again_s = pause.as_secs(), "not stored in the origin yet");
        let failure = Failure {
            path: key.to_string(),
            reason: e.to_string(),
            tries,
            permanent: !e.is_transient(),
        };
        let at = Instant::now() + pause;
        retries.insert(key.clone(), Retry { failure, at });
        drop(retries);
        self.queue.push_at(key.clone(), at);
        self.settled.notify_waiters();
    }
}

//! Stage files: what is written through the mount, on the cache disk, until the
//! origin has it.
//!
//! All writers and readers of an inode share its stage. It is dirty when its
//! size or times differ from those that were last acknowledged: that holds
//! whether the bytes came through us or by passthrough.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kspeed_cache::ObjectMeta;
use kspeed_cache::origin::Attributes;
use parking_lot::{Mutex, RwLock};
use tokio_util::sync::CancellationToken;

use super::wishes::StageId;
use crate::namespace::Ino;

/// What a stage looked like: size, mtime, ctime.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Look(u64, (i64, i64), (i64, i64));

impl Look {
    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0
    }

    /// Time of modification, nanoseconds since 1970.
    #[must_use]
    pub fn mtime_ns(&self) -> i64 {
        self.1.0.saturating_mul(1_000_000_000).saturating_add(self.1.1)
    }

    /// Size and time of modification; the change of an attribute is none of the
    /// content's.
    fn content(self) -> (u64, (i64, i64)) {
        (self.0, self.1)
    }
}

#[derive(Default)]
struct Users {
    handles: u32,
    writers: u32,
}

/// A stage file.
pub struct Stage {
    id: StageId,
    path: PathBuf,
    file: File,
    users: Mutex<Users>,
    acked: Mutex<Option<Look>>,
    durable: AtomicBool,
    failed: AtomicBool,
    name_synced: AtomicBool,
    retired: AtomicBool,
    published: Mutex<Option<ObjectMeta>>,
    closed_at: Mutex<Instant>,
    /// Inodes that it was ever bound to.
    inos: Mutex<Vec<Ino>>,
    /// The object that the file was before it was written to.
    pub original: Option<ObjectMeta>,
    /// Attributes set through the mount.
    pub attributes: Mutex<Attributes>,
    /// Held by the upload that reads the file, and cancelled by writers.
    pub uploading: tokio::sync::Mutex<()>,
    cancel: Mutex<CancellationToken>,
}

impl Stage {
    fn new(
        dir: &Path,
        id: StageId,
        create: bool,
        original: Option<ObjectMeta>,
    ) -> io::Result<Self> {
        let path = path_of(dir, id);
        let file = File::options().read(true).write(true).create_new(create).open(&path)?;
        Ok(Self {
            id,
            path,
            file,
            users: Mutex::default(),
            acked: Mutex::new(None),
            durable: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            name_synced: AtomicBool::new(!create),
            retired: AtomicBool::new(false),
            published: Mutex::new(None),
            closed_at: Mutex::new(Instant::now()),
            inos: Mutex::default(),
            original,
            attributes: Mutex::default(),
            uploading: tokio::sync::Mutex::new(()),
            cancel: Mutex::default(),
        })
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> StageId {
        self.id
    }

    /// Its path on the cache disk.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file, open for reading and writing.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// What it looks like now.
    ///
    /// # Errors
    /// The disk fails.
    pub fn look(&self) -> io::Result<Look> {
        let m = self.file.metadata()?;
        Ok(Look(m.len(), (m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec())))
    }

    /// Whether there is something that was not acknowledged.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.look().map_or(true, |s| *self.acked.lock() != Some(s))
    }

    /// Whether the bytes are those of a look.
    #[must_use]
    pub fn is_as(&self, look: Look) -> bool {
        self.look().is_ok_and(|now| now.content() == look.content())
    }

    /// As it looked, it is acknowledged; `durable`: on the disk too.
    pub fn set_acked(&self, look: Look, durable: bool) {
        *self.acked.lock() = Some(look);
        self.durable.store(durable, Ordering::Release);
    }

    /// Whether something was ever acknowledged.
    #[must_use]
    pub fn was_acked(&self) -> bool {
        self.acked.lock().is_some()
    }

    /// Whether what was acknowledged is on the disk.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        self.durable.load(Ordering::Acquire)
    }

    /// Makes the bytes durable.
    ///
    /// # Errors
    /// The disk fails, or failed before: what a failed fsync did not write is
    /// gone, so none after it may succeed.
    pub fn sync(&self) -> io::Result<()> {
        if self.failed.load(Ordering::Acquire) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.file.sync_data().inspect_err(|_| self.failed.store(true, Ordering::Release))
    }

    /// The origin has these bytes as this object.
    pub fn set_published(&self, meta: ObjectMeta) {
        *self.published.lock() = Some(meta);
    }

    /// Writing begins: no longer as the origin has it.
    pub fn set_unpublished(&self) {
        *self.published.lock() = None;
    }

    /// What the origin has of it, if it has it all.
    #[must_use]
    pub fn published(&self) -> Option<ObjectMeta> {
        self.published.lock().clone()
    }

    /// Whether somebody has it open for writing.
    #[must_use]
    pub fn has_writers(&self) -> bool {
        self.users.lock().writers > 0
    }

    /// Whether somebody has it open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.users.lock().handles > 0
    }

    /// How long ago its last writer closed it.
    #[must_use]
    pub fn closed_for(&self) -> Duration {
        self.closed_at.lock().elapsed()
    }

    /// A handle more. Counted under the lock of [`Stages`].
    fn enter(&self, writes: bool) {
        let mut u = self.users.lock();
        u.handles += 1;
        u.writers += u32::from(writes);
    }

    /// A handle less; true for the last.
    fn leave(&self, writes: bool) -> bool {
        let mut u = self.users.lock();
        u.handles = u.handles.saturating_sub(1);
        u.writers = u.writers.saturating_sub(u32::from(writes));
        if writes && u.writers == 0 {
            *self.closed_at.lock() = Instant::now();
        }
        u.handles == 0
    }

    /// Whether the file's name was never made durable; it is on its way to be.
    #[must_use]
    pub fn is_name_unsynced(&self) -> bool {
        !self.name_synced.swap(true, Ordering::AcqRel)
    }

    /// Ends an upload that reads the file.
    pub fn cancel_upload(&self) {
        self.cancel.lock().cancel();
    }

    /// As [`Self::cancel_upload`], and waits until it reads no more.
    pub async fn stop_upload(&self) {
        self.cancel_upload();
        drop(self.uploading.lock().await);
    }

    /// What ends an upload that begins now.
    #[must_use]
    pub fn upload_token(&self) -> CancellationToken {
        let mut c = self.cancel.lock();
        if c.is_cancelled() {
            *c = CancellationToken::new();
        }
        c.clone()
    }

    /// Reads; fewer bytes than asked for at the end.
    ///
    /// # Errors
    /// The disk fails.
    pub fn read(&self, offset: u64, len: usize) -> io::Result<Bytes> {
        let mut buf = vec![0; len];
        let mut n = 0;
        while n < len {
            match self.file.read_at(&mut buf[n..], offset + n as u64)? {
                0 => break,
                k => n += k,
            }
        }
        buf.truncate(n);
        Ok(buf.into())
    }

    /// Writes.
    ///
    /// # Errors
    /// The disk fails, or an fsync of the file failed before.
    pub fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if self.failed.load(Ordering::Acquire) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.file.write_all_at(data, offset)
    }
}

/// Where a stage's file is.
#[must_use]
pub fn path_of(dir: &Path, id: StageId) -> PathBuf {
    dir.join(format!("{id:016x}.stage"))
}

/// The number of a stage file by its name.
#[must_use]
pub fn id_of(name: &str) -> Option<StageId> {
    StageId::from_str_radix(name.strip_suffix(".stage")?, 16).ok()
}

#[derive(Default)]
struct Maps {
    by_id: HashMap<StageId, Arc<Stage>>,
    by_ino: HashMap<Ino, StageId>,
    /// Acknowledged by a former process and not opened yet: a file descriptor
    /// each would be too many.
    recovered: HashMap<StageId, Attributes>,
    last_id: StageId,
}

/// The stages of a mount.
pub struct Stages {
    dir: PathBuf,
    maps: RwLock<Maps>,
}

impl Stages {
    /// In a directory, with those that a former process left.
    #[must_use]
    pub fn new(dir: PathBuf, recovered: HashMap<StageId, Attributes>) -> Self {
        let last_id = recovered.keys().copied().max().unwrap_or(0);
        let maps = Maps { recovered, last_id, ..Maps::default() };
        Self { dir, maps: RwLock::new(maps) }
    }

    /// A stage by its number.
    #[must_use]
    pub fn by_id(&self, id: StageId) -> Option<Arc<Stage>> {
        {
            let maps = self.maps.read();
            if let Some(s) = maps.by_id.get(&id) {
                return Some(s.clone());
            }
            if !maps.recovered.contains_key(&id) {
                return None;
            }
        }
        let mut maps = self.maps.write();
        let attributes = maps.recovered.remove(&id);
        if attributes.is_none() {
            return maps.by_id.get(&id).cloned();
        }
        match Stage::new(&self.dir, id, false, None) {
            Ok(s) => {
                if let Ok(l) = s.look() {
                    s.set_acked(l, true);
                }
                *s.attributes.lock() = attributes.unwrap_or_default();
                let s = Arc::new(s);
                maps.by_id.insert(id, s.clone());
                Some(s)
            }
            Err(e) => {
                tracing::error!(error = %e, stage = id, "a stage file can't be opened");
                None
            }
        }
    }

    /// The stage that is bound to an inode; `named` tells the stage of an inode
    /// that is not bound yet.
    #[must_use]
    pub fn of(&self, ino: Ino, named: impl FnOnce() -> Option<StageId>) -> Option<Arc<Stage>> {
        {
            let maps = self.maps.read();
            if maps.by_id.is_empty() && maps.recovered.is_empty() {
                return None;
            }
            if let Some(s) = maps.by_ino.get(&ino).and_then(|id| maps.by_id.get(id)) {
                return Some(s.clone());
            }
        }
        let id = named()?;
        let s = self.by_id(id)?;
        self.bind(ino, &s);
        Some(s)
    }

    fn bind(&self, ino: Ino, s: &Stage) {
        let mut maps = self.maps.write();
        if maps.by_ino.insert(ino, s.id) != Some(s.id) {
            s.inos.lock().push(ino);
        }
    }

    /// Makes a stage file.
    ///
    /// # Errors
    /// The disk fails or is full.
    pub fn create(&self, original: Option<ObjectMeta>) -> io::Result<Arc<Stage>> {
        let id = {
            let mut maps = self.maps.write();
            // By the clock, so that a number is new even where the journal that
            // knew it is gone.
            let now = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |d| d.as_nanos());
            maps.last_id = (maps.last_id + 1).max(u64::try_from(now).unwrap_or(0));
            maps.last_id
        };
        Ok(Arc::new(Stage::new(&self.dir, id, true, original)?))
    }

    /// Binds a stage to an inode, with one handle more: `new`, or the one that is
    /// bound already. True: `new` was.
    pub fn join(&self, ino: Ino, new: &Arc<Stage>, writes: bool) -> (Arc<Stage>, bool) {
        let mut maps = self.maps.write();
        if let Some(s) = maps.by_ino.get(&ino).and_then(|id| maps.by_id.get(id))
            && !s.retired.load(Ordering::Acquire)
        {
            s.enter(writes);
            return (s.clone(), false);
        }
        new.enter(writes);
        maps.by_id.insert(new.id, new.clone());
        maps.by_ino.insert(ino, new.id);
        new.inos.lock().push(ino);
        (new.clone(), true)
    }

    /// A handle more, unless the stage is gone, or going and is to be written to.
    #[must_use]
    pub fn enter(&self, s: &Arc<Stage>, writes: bool) -> bool {
        let maps = self.maps.write();
        let may = !writes || !s.retired.load(Ordering::Acquire);
        let there = may && maps.by_id.contains_key(&s.id);
        if there {
            s.enter(writes);
        }
        there
    }

    /// A handle was closed; true for the last.
    pub fn leave(&self, s: &Arc<Stage>, writes: bool) -> bool {
        let _maps = self.maps.write();
        s.leave(writes)
    }

    /// From now on nobody writes to it; false if somebody has it open, or if this
    /// was called before.
    #[must_use]
    pub fn begin_to_retire(&self, s: &Stage) -> bool {
        let maps = self.maps.write();
        if s.is_open() || !maps.by_id.contains_key(&s.id) {
            return false;
        }
        !s.retired.swap(true, Ordering::AcqRel)
    }

    /// Takes it out of the maps.
    pub fn remove(&self, s: &Stage) {
        let mut maps = self.maps.write();
        for ino in s.inos.lock().drain(..) {
            if maps.by_ino.get(&ino) == Some(&s.id) {
                maps.by_ino.remove(&ino);
            }
        }
        maps.by_id.remove(&s.id);
    }

    /// Bytes in all stage files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let maps = self.maps.read();
        let open = maps.by_id.values().filter_map(|s| s.look().ok()).map(|l| l.size());
        let closed = maps.recovered.keys().filter_map(|id| path_of(&self.dir, *id).metadata().ok());
        open.sum::<u64>() + closed.map(|m| m.len()).sum::<u64>()
    }

    /// Stages that are held.
    #[must_use]
    pub fn count(&self) -> usize {
        let maps = self.maps.read();
        maps.by_id.len() + maps.recovered.len()
    }
}

//! Opening for writing, writing, and what close and fsync promise.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kspeed_cache::Key;
use kspeed_cache::origin::{Attributes, Condition};

use super::{FileSystem, HandleId, OpenKind, Opened, Stage};
use crate::errno::FsError;
use crate::namespace::{Entry, Ino, Kind, Live, Namespace};
use crate::writeback::{Ack, Change, Child, Wish, Wishes, Writeback};

/// Pieces in which an object is brought into a stage, in bytes.
const COPY_BYTES: usize = 4 << 20;

/// Who makes something, and with which permission bits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Maker {
    /// Permission bits, after the umask.
    pub mode: u32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl FileSystem {
    pub(super) fn writer(&self) -> Result<(&Arc<Live>, &Arc<Writeback>), FsError> {
        match (&self.namespace, &self.writeback) {
            (Namespace::Live(l), Some(w)) => Ok((l, w)),
            _ if self.options.read_only => Err(FsError::ReadOnly),
            _ => Err(FsError::Unsupported("writing needs a cache directory (--cache-dir)")),
        }
    }

    /// The stage of an inode, if its bytes are not those of an object.
    pub(super) fn stage(&self, ino: Ino) -> Option<Arc<Stage>> {
        let w = self.writeback.as_ref()?;
        let Namespace::Live(l) = &self.namespace else { return None };
        w.stages().of(ino, || l.stage_of(ino))
    }

    /// What differs from what this mount shows of files without attributes.
    pub(super) fn attributes_of(&self, by: Maker, default_mode: u32) -> Attributes {
        let o = &self.options;
        let mode = by.mode & 0o7777;
        Attributes {
            mode: (mode != default_mode).then_some(mode),
            uid: (by.uid != o.uid).then_some(by.uid),
            gid: (by.gid != o.gid).then_some(by.gid),
            mtime_ns: None,
        }
    }

    /// Creates a file and opens it for writing.
    ///
    /// # Errors
    /// The name is taken or can't be a key.
    pub async fn create(
        &self,
        parent: Ino,
        name: &[u8],
        exclusive: bool,
        by: Maker,
    ) -> Result<(Entry, Opened), FsError> {
        let (live, w) = self.writer()?;
        let key = live.key_of(parent, name)?;
        match self.within(self.lookup(parent, name)).await {
            Ok(e) => {
                self.forget(e.attr.ino, 1);
                if exclusive {
                    return Err(FsError::Exists);
                }
                if e.attr.kind == Kind::Directory {
                    return Err(FsError::IsADirectory);
                }
                let opened = self.open_write(e.attr.ino, true).await?;
                let entry = self.lookup(parent, name).await?;
                return Ok((entry, opened));
            }
            Err(FsError::NotFound) => {}
            Err(e) => return Err(e),
        }
        w.room().await?;
        let stage = w.stages().create(None)?;
        *stage.attributes.lock() = self.attributes_of(by, self.options.file_mode);
        w.begin_file(&key, &stage, || Condition::Absent);
        let entry = live.adopt_made(parent, name, Child::Staged(stage.id()))?;
        live.set_attributes(entry.attr.ino, &stage.attributes.lock());
        let (stage, _) = w.stages().join(entry.attr.ino, &stage, true);
        let opened = self.open_stage(stage);
        Ok((self.attr(entry.attr.ino)?, opened))
    }

    /// A handle for writing to a stage that counts it already.
    fn open_stage(&self, stage: Arc<Stage>) -> Opened {
        let kind = OpenKind::Stage(stage, true);
        Opened { handle: self.handles.add(kind.clone()), kind, keep_cache: false }
    }

    /// Opens a file for writing. Unless it is to be cut to nothing, its bytes are
    /// brought into the stage first.
    ///
    /// # Errors
    /// No such inode, or the origin failed.
    pub async fn open_write(&self, ino: Ino, truncate: bool) -> Result<Opened, FsError> {
        let (live, w) = self.writer()?;
        self.rewritten.lock().insert(ino);
        if let Some(s) = self.stage(ino)
            && w.stages().enter(&s, true)
        {
            let entered = Entered { w, stage: Some(s) };
            s_of(&entered)?.stop_upload().await;
            let s = s_of(&entered)?;
            self.name_again(ino, s);
            if truncate {
                s.file().set_len(0)?;
            }
            return Ok(self.open_stage(entered.stay()?));
        }
        if self.modes.is_through(ino) {
            // The kernel reads this inode from a cache file (or a stage that
            // becomes one), which is not to be written to, and an inode has one
            // backing file. The name gets
            // another inode; upon ESTALE the kernel looks it up again. Who has
            // the old one open keeps the old version.
            live.fork(ino);
            return Err(FsError::Forked);
        }
        w.room().await?;
        let object = self.object(ino)?;
        // The name may be another inode's, from a fork: to be looked up again.
        let key = live.key_of_ino(ino).ok_or(FsError::Forked)?;
        let attr = self.attr(ino)?.attr;
        let stage = w.stages().create(Some(object.meta().clone()))?;
        *stage.attributes.lock() =
            Attributes { mode: attr.mode, uid: attr.uid, gid: attr.gid, mtime_ns: None };
        let filled = async {
            if !truncate {
                let size = object.meta().size;
                let mut at = 0;
                while at < size {
                    let bytes = self.read_bytes(ino, &object, at, COPY_BYTES).await?;
                    stage.write(at, &bytes)?;
                    at += bytes.len() as u64;
                }
                // As it was, until somebody writes.
                stage.file().set_modified(system_time(attr.mtime_ns))?;
                let look = stage.look()?;
                stage.set_acked(look, true);
            }
            Ok::<_, FsError>(())
        };
        if let Err(e) = filled.await {
            let _ = std::fs::remove_file(stage.path());
            return Err(e);
        }
        // Cut to nothing it is dirty, even if nothing is written: an empty
        // object is what is wanted (W7).
        let (joined, is_own) = w.stages().join(ino, &stage, true);
        let entered = Entered { w, stage: Some(joined.clone()) };
        if is_own {
            let copied =
                w.with_wishes(|w| w.get(&key).is_some_and(|e| matches!(e.wish, Wish::Copy { .. })));
            w.begin_file(&key, &joined, || {
                Writeback::base_of(self.namespace.object(ino).ok().as_ref())
            });
            live.bind(ino, &key, joined.id());
            if copied {
                // What it was a copy of may go once nobody wishes that copy.
                self.acknowledge(&joined, true).await?;
            }
        } else {
            let _ = std::fs::remove_file(stage.path());
            if truncate {
                joined.file().set_len(0)?;
            }
        }
        Ok(self.open_stage(entered.stay()?))
    }

    /// A stage that the origin has, and that readers keep open, is written to
    /// again.
    fn name_again(&self, ino: Ino, s: &Stage) {
        let Ok((live, w)) = self.writer() else { return };
        if w.with_wishes(|w| w.key_of(s.id()).is_some()) {
            return;
        }
        if let (Some(key), Some(meta)) = (live.key_of_ino(ino), s.published()) {
            w.begin_file(&key, s, || Writeback::base_of(Some(&meta)));
            live.bind(ino, &key, s.id());
        }
    }

    /// Writes through us (without passthrough).
    ///
    /// # Errors
    /// The handle is not open for writing, or the disk fails.
    pub fn write(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<u32, FsError> {
        match self.handles.get(handle)? {
            OpenKind::Stage(s, true) => {
                s.write(offset, data)?;
                Ok(data.len() as u32)
            }
            _ => Err(FsError::BadHandle),
        }
    }

    /// Promises what a stage holds; on a thread that may wait for the disk.
    pub(super) async fn acknowledge(
        &self,
        s: &Arc<Stage>,
        durable: bool,
    ) -> Result<Option<Key>, FsError> {
        let (_, w) = self.writer()?;
        let (w, s) = (w.clone(), s.clone());
        let acked = tokio::task::spawn_blocking(move || w.ack(&s, durable));
        Ok(acked.await.map_err(io::Error::other)??)
    }

    /// Waits, with `--ack origin`, until the origin is as wished.
    pub(super) async fn stored(&self, keys: &[Key]) -> Result<(), FsError> {
        let (_, w) = self.writer()?;
        if w.ack_mode() == Ack::Origin {
            for k in keys {
                w.settle(k).await?;
            }
        }
        Ok(())
    }

    /// Close and fsync: a handle's changes are where `--ack` says when this
    /// returns. `is_sync`: fsync.
    ///
    /// # Errors
    /// The disk fails; with `--ack origin` also when the upload failed.
    pub async fn flush(&self, handle: HandleId, is_sync: bool) -> Result<(), FsError> {
        let OpenKind::Stage(s, _) = self.handles.get(handle)? else { return Ok(()) };
        let (_, w) = self.writer()?;
        let durable = is_sync || w.syncs_on_close();
        if s.is_dirty() || (durable && s.was_acked() && !s.is_durable()) {
            self.acknowledge(&s, durable).await?;
        }
        // One that failed before is not forgotten by the next.
        self.stored(w.unkept(&s).as_slice()).await
    }

    /// Whether a flush of this handle would have something to do.
    #[must_use]
    pub fn needs_flush(&self, handle: HandleId) -> bool {
        let Ok(OpenKind::Stage(s, writes)) = self.handles.get(handle) else { return false };
        let waits = |w: &Arc<Writeback>| w.ack_mode() == Ack::Origin && w.unkept(&s).is_some();
        (writes && s.is_dirty())
            || (s.was_acked() && !s.is_durable())
            || self.writeback.as_ref().is_some_and(waits)
    }

    /// Closes a handle.
    pub async fn release(&self, ino: Ino, handle: HandleId) {
        self.modes.leave(ino);
        let Some(OpenKind::Stage(s, writes)) = self.handles.remove(handle) else { return };
        // Written by a memory map after the last flush.
        if writes
            && s.is_dirty()
            && let Err(e) = self.acknowledge(&s, true).await
        {
            tracing::error!(error = %e, ino, "changes made after the last flush are lost");
        }
        self.leave(&s, writes).await;
    }

    /// A handle less on a stage.
    pub(super) async fn leave(&self, s: &Arc<Stage>, writes: bool) {
        let Ok((_, w)) = self.writer() else { return };
        let last = w.stages().leave(s, writes);
        if writes && !s.has_writers() {
            w.closed(s);
        }
        if last {
            w.retire(s).await;
        }
    }

    /// Closes a handle that has nothing to upload.
    pub fn release_now(&self, ino: Ino, handle: HandleId) {
        self.modes.leave(ino);
        self.handles.remove(handle);
    }

    /// Whether a handle can be closed by [`Self::release_now`].
    #[must_use]
    pub fn is_plain(&self, handle: HandleId) -> bool {
        !matches!(self.handles.get(handle), Ok(OpenKind::Stage(..)))
    }

    /// Closes a directory.
    pub fn release_dir(&self, handle: HandleId) {
        self.handles.remove(handle);
    }

    /// Names that were made, moved and removed so far survive the machine.
    ///
    /// # Errors
    /// The disk fails.
    pub async fn sync_names(&self) -> Result<(), FsError> {
        let Ok((_, w)) = self.writer() else { return Ok(()) };
        let w = w.clone();
        Ok(tokio::task::spawn_blocking(move || w.sync_journal())
            .await
            .map_err(io::Error::other)??)
    }

    /// Cuts or extends a file.
    ///
    /// # Errors
    /// The origin failed.
    pub async fn truncate(
        &self,
        ino: Ino,
        handle: Option<HandleId>,
        size: u64,
    ) -> Result<Entry, FsError> {
        let (_, w) = self.writer()?;
        if let Some(h) = handle
            && let OpenKind::Stage(s, true) = self.handles.get(h)?
        {
            s.file().set_len(size)?;
            return self.attr(ino);
        }
        let opened = self.open_write(ino, size == 0).await?;
        let OpenKind::Stage(s, _) = &opened.kind else { return Err(FsError::BadHandle) };
        let r = match s.file().set_len(size) {
            Ok(()) => self.acknowledge(s, w.syncs_on_close()).await,
            Err(e) => Err(e.into()),
        };
        let entry = self.attr(ino);
        self.handles.remove(opened.handle);
        self.leave(s, true).await;
        if let Some(key) = r? {
            self.stored(&[key]).await?;
        }
        entry
    }

    /// Sets permission bits, owner and time of modification. They go to the
    /// origin with the object, for directories they are told by this mount as
    /// long as it knows the inode.
    ///
    /// # Errors
    /// The mount is read-only, or the disk fails.
    pub async fn set_attributes(&self, ino: Ino, a: Attributes) -> Result<Entry, FsError> {
        let (live, w) = self.writer()?;
        live.set_attributes(ino, &a);
        let attr = self.attr(ino)?.attr;
        if attr.kind != Kind::File {
            return self.attr(ino);
        }
        if let Some(s) = self.stage(ino) {
            {
                let mut own = s.attributes.lock();
                own.mode = a.mode.or(own.mode);
                own.uid = a.uid.or(own.uid);
                own.gid = a.gid.or(own.gid);
            }
            let was_dirty = s.is_dirty();
            if let Some(t) = a.mtime_ns {
                s.file().set_modified(system_time(t))?;
            }
            if w.with_wishes(|w| w.key_of(s.id()).is_some()) {
                if !was_dirty {
                    let key = self.acknowledge(&s, s.is_durable()).await?;
                    self.stored(key.as_slice()).await?;
                }
                return self.attr(ino);
            }
            // The origin has it, readers have it open.
            if s.published().is_none() {
                return self.attr(ino);
            }
        }
        let Some(key) = live.key_of_ino(ino) else { return self.attr(ino) };
        let attributes = Attributes {
            mode: attr.mode,
            uid: attr.uid,
            gid: attr.gid,
            mtime_ns: Some(attr.mtime_ns),
        };
        let compute = |w: &Wishes| {
            let meta = match self.stage(ino).and_then(|s| s.published()) {
                Some(m) => m,
                None => self.namespace.object(ino)?,
            };
            let from = match w.get(&key).map(|e| &e.wish) {
                Some(Wish::Copy { from, .. }) => from.clone(),
                _ => meta.clone(),
            };
            let base = w.get(&key).map_or(Writeback::base_of(Some(&meta)), |e| e.base.clone());
            let wish = Some(Wish::Copy { from, attributes });
            Ok(vec![Change { key: key.clone(), wish, base }])
        };
        w.change(compute, || {})?;
        self.stored(&[key]).await?;
        self.attr(ino)
    }

    /// Allocates, punches or zeroes a range of a file that is open for writing.
    ///
    /// # Errors
    /// As fallocate(2) on the cache disk's file system.
    pub fn fallocate(
        &self,
        handle: HandleId,
        offset: u64,
        len: u64,
        mode: i32,
    ) -> Result<(), FsError> {
        let OpenKind::Stage(s, true) = self.handles.get(handle)? else {
            return Err(FsError::BadHandle);
        };
        let flags = rustix::fs::FallocateFlags::from_bits(mode as u32)
            .ok_or(FsError::Unsupported("this mode of fallocate"))?;
        rustix::fs::fallocate(s.file(), flags, offset, len).map_err(io::Error::from)?;
        Ok(())
    }

    /// Where the next data (`SEEK_DATA`) or hole (`SEEK_HOLE`) begins.
    ///
    /// # Errors
    /// ENXIO past the end, as lseek(2) has it.
    pub fn seek(
        &self,
        ino: Ino,
        handle: HandleId,
        offset: u64,
        whence: i32,
    ) -> Result<u64, FsError> {
        let nothing = || FsError::from(io::Error::from_raw_os_error(libc::ENXIO));
        if let OpenKind::Stage(s, _) = self.handles.get(handle)? {
            let to = match whence {
                libc::SEEK_DATA => rustix::fs::SeekFrom::Data(offset),
                libc::SEEK_HOLE => rustix::fs::SeekFrom::Hole(offset),
                _ => return Err(FsError::Invalid("SEEK_DATA or SEEK_HOLE")),
            };
            // The position is nobody's: all reads tell theirs.
            return Ok(rustix::fs::seek(s.file(), to).map_err(io::Error::from)?);
        }
        // An object is data to its end.
        let size = self.attr(ino)?.attr.size;
        match whence {
            _ if offset >= size => Err(nothing()),
            libc::SEEK_DATA => Ok(offset),
            libc::SEEK_HOLE => Ok(size),
            _ => Err(FsError::Invalid("SEEK_DATA or SEEK_HOLE")),
        }
    }

    /// Free space, as statfs tells it: of the origin's file system where it has
    /// one, else what no bucket ends at.
    #[must_use]
    pub fn space(&self) -> (u64, u64) {
        const PLENTY_BYTES: u64 = 1 << 50;
        let root = self.origin.local_path(&"x".into());
        let dir = root.as_deref().and_then(std::path::Path::parent);
        match dir.map(rustix::fs::statvfs) {
            Some(Ok(s)) => (s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize),
            _ => (PLENTY_BYTES, PLENTY_BYTES),
        }
    }
}

/// A writer that was counted and has no handle yet: not counted any more if the
/// caller is gone before it gets one.
struct Entered<'a> {
    w: &'a Arc<Writeback>,
    stage: Option<Arc<Stage>>,
}

fn s_of<'a>(e: &'a Entered<'_>) -> Result<&'a Arc<Stage>, FsError> {
    e.stage.as_ref().ok_or(FsError::BadHandle)
}

impl Entered<'_> {
    fn stay(mut self) -> Result<Arc<Stage>, FsError> {
        self.stage.take().ok_or(FsError::BadHandle)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(s) = self.stage.take() {
            self.w.stages().leave(&s, true);
            if !s.has_writers() {
                self.w.closed(&s);
            }
        }
    }
}

fn system_time(ns: i64) -> SystemTime {
    let d = Duration::from_nanos(ns.unsigned_abs());
    if ns >= 0 { SystemTime::UNIX_EPOCH + d } else { SystemTime::UNIX_EPOCH - d }
}

/// A name as the kernel gives it.
#[must_use]
pub fn name_bytes(name: &std::ffi::OsStr) -> &[u8] {
    name.as_bytes()
}

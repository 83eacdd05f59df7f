//! Writing, as far as it goes without a write-back journal: `--ack origin`. When
//! close or fsync returns without an error, the object is complete in the origin.

use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kspeed_cache::origin::{ListRequest, PutBody};
use kspeed_cache::{ObjectKind, ObjectMeta};

use super::{FileSystem, HandleId, OpenKind, Opened, Stage};
use crate::errno::FsError;
use crate::namespace::{Attr, Entry, Ino, Kind, LOCAL_VERSION, Listed, Live, Namespace};

/// Pieces in which an object is brought into a stage, in bytes.
const COPY_BYTES: usize = 4 << 20;

impl FileSystem {
    fn writable(&self) -> Result<&Arc<Live>, FsError> {
        match &self.namespace {
            Namespace::Live(l) if !self.options.read_only => Ok(l),
            _ => Err(FsError::ReadOnly),
        }
    }

    fn new_stage(&self, ino: Ino) -> Result<Arc<Stage>, FsError> {
        let dir = self
            .options
            .stage_dir
            .as_ref()
            .ok_or(FsError::Unsupported("writing needs a cache directory (--cache-dir)"))?;
        Ok(Arc::new(Stage::create(dir, ino)?))
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
    ) -> Result<(Entry, Opened), FsError> {
        let live = self.writable()?;
        let key = live.key_of(parent, name)?;
        match self.lookup(parent, name).await {
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
        let version = format!("{LOCAL_VERSION}{:016x}", fresh_number());
        let meta = ObjectMeta {
            key,
            size: 0,
            mtime_ns: 0,
            version: version.into(),
            kind: ObjectKind::File,
            mode: None,
        };
        let listed = Listed { name: name.into(), kind: Kind::File, meta: Some(meta) };
        let attr = live.put(parent, &listed, None, 1)?;
        let stage = match self.new_stage(attr.ino) {
            Ok(s) => s,
            Err(e) => {
                live.remove(parent, name);
                return Err(e);
            }
        };
        let opened = self.open_stage(self.stages.join(stage));
        Ok((self.attr(attr.ino)?, opened))
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
        let live = self.writable()?;
        if let Some(s) = self.stages.open(ino) {
            if truncate && let Err(e) = s.file().set_len(0) {
                self.stages.close(&s);
                return Err(e.into());
            }
            return Ok(self.open_stage(s));
        }
        if self.modes.reads_cache_file(ino) {
            // The kernel reads this inode from the cache file, which is not to be
            // written to, and an inode has one backing file. The name gets
            // another inode; upon ESTALE the kernel looks it up again. Who has
            // the old one open keeps the old version.
            live.fork(ino);
            return Err(FsError::Forked);
        }
        let object = self.object(ino)?;
        let stage = self.new_stage(ino)?;
        if !truncate {
            let size = object.meta().size;
            let mut at = 0;
            while at < size {
                let bytes = self.read_bytes(ino, &object, at, COPY_BYTES).await?;
                stage.write(at, &bytes)?;
                at += bytes.len() as u64;
            }
            stage.set_uploaded(stage.state()?);
        }
        // Cut to nothing it is dirty, even if nothing is written: an empty
        // object is what is wanted (W7).
        let joined = self.stages.join(stage.clone());
        if truncate && !Arc::ptr_eq(&joined, &stage) {
            joined.file().set_len(0)?;
        }
        Ok(self.open_stage(joined))
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

    /// A handle's changes are in the origin when this returns.
    ///
    /// # Errors
    /// The upload failed; the next flush or fsync tries again.
    pub async fn flush(&self, handle: HandleId) -> Result<(), FsError> {
        match self.handles.get(handle)? {
            OpenKind::Stage(s, true) => self.upload(&s).await,
            _ => Ok(()),
        }
    }

    /// Whether a flush of this handle would have something to do.
    #[must_use]
    pub fn needs_flush(&self, handle: HandleId) -> bool {
        matches!(self.handles.get(handle), Ok(OpenKind::Stage(s, true)) if s.is_dirty())
    }

    async fn upload(&self, s: &Arc<Stage>) -> Result<(), FsError> {
        let live = self.writable()?;
        let _one = s.uploading.lock().await;
        if !s.is_dirty() {
            return Ok(());
        }
        // Not under the call's deadline: a large file rightly takes longer, and
        // each request of the upload has its own.
        let (parent, name) = live.name_of(s.ino()).ok_or(FsError::NotFound)?;
        let key = live.key_of(parent, &name)?;
        let look = s.state()?;
        let (len, _) = s.look()?;
        let body = PutBody::File { path: s.path().to_path_buf(), len };
        let meta = self.origin.put(&key, body).await?;
        self.stats.uploaded_bytes.fetch_add(len, Ordering::Relaxed);
        if s.is_unlinked() {
            // Removed while it was on its way.
            self.origin.delete(&key).await?;
            return Ok(());
        }
        s.set_uploaded(look);
        self.recent.invalidate(&s.ino());
        self.rewritten.lock().insert(s.ino());
        let listed = Listed { name, kind: Kind::File, meta: Some(meta) };
        live.put(parent, &listed, Some(s.ino()), 0)?;
        Ok(())
    }

    /// Closes a handle.
    pub async fn release(&self, ino: Ino, handle: HandleId) {
        self.modes.leave(ino);
        let Some(OpenKind::Stage(s, _)) = self.handles.remove(handle) else { return };
        // Written by a memory map after the last flush.
        if s.is_dirty()
            && let Err(e) = self.upload(&s).await
        {
            tracing::error!(error = %e, ino, "changes made after the last flush are lost");
        }
        if self.stages.close(&s)
            && !s.was_uploaded()
            && let Namespace::Live(l) = &self.namespace
        {
            // Made here and never stored: nothing of it remains.
            l.drop_local(ino);
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
        self.writable()?;
        if let Some(h) = handle
            && let OpenKind::Stage(s, true) = self.handles.get(h)?
        {
            s.file().set_len(size)?;
            return self.attr(ino);
        }
        let opened = self.open_write(ino, size == 0).await?;
        let OpenKind::Stage(s, _) = &opened.kind else { return Err(FsError::BadHandle) };
        let r = match s.file().set_len(size) {
            Ok(()) => self.upload(s).await,
            Err(e) => Err(e.into()),
        };
        let entry = self.attr(ino);
        self.handles.remove(opened.handle);
        self.stages.close(s);
        r?;
        entry
    }

    /// Sets times; they are told by this mount as long as it knows the inode, and
    /// are not stored in the origin.
    ///
    /// # Errors
    /// The mount is read-only.
    pub fn set_mtime(&self, ino: Ino, mtime_ns: i64) -> Result<Entry, FsError> {
        self.writable()?.set_mtime(ino, mtime_ns);
        self.attr(ino)
    }

    /// Removes a file.
    ///
    /// # Errors
    /// No such file, or the origin failed.
    pub async fn unlink(&self, parent: Ino, name: &[u8]) -> Result<(), FsError> {
        let live = self.writable()?;
        let e = self.lookup(parent, name).await?;
        self.forget(e.attr.ino, 1);
        if e.attr.kind == Kind::Directory {
            return Err(FsError::IsADirectory);
        }
        let stage = self.stages.get(e.attr.ino);
        let uploading = match &stage {
            Some(s) => {
                s.unlink();
                Some(s.uploading.lock().await)
            }
            None => None,
        };
        self.origin.delete(&live.key_of(parent, name)?).await?;
        drop(uploading);
        live.remove(parent, name);
        Ok(())
    }

    /// Makes a directory: a marker.
    ///
    /// # Errors
    /// The name is taken.
    pub async fn mkdir(&self, parent: Ino, name: &[u8]) -> Result<Entry, FsError> {
        let live = self.writable()?;
        let key = live.key_of(parent, name)?;
        match self.lookup(parent, name).await {
            Ok(e) => {
                self.forget(e.attr.ino, 1);
                return Err(FsError::Exists);
            }
            Err(FsError::NotFound) => {}
            Err(e) => return Err(e),
        }
        let marker = [key.as_bytes(), b"/"].concat();
        self.origin.put(&marker.into(), PutBody::Bytes(bytes::Bytes::new())).await?;
        let listed = Listed { name: name.into(), kind: Kind::Directory, meta: None };
        let attr = live.put(parent, &listed, None, 1)?;
        self.attr(attr.ino)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// It isn't empty, or the origin failed.
    pub async fn rmdir(&self, parent: Ino, name: &[u8]) -> Result<(), FsError> {
        let live = self.writable()?;
        let e = self.lookup(parent, name).await?;
        self.forget(e.attr.ino, 1);
        if e.attr.kind != Kind::Directory {
            return Err(FsError::NotADirectory);
        }
        let prefix = [live.key_of(parent, name)?.as_bytes(), b"/"].concat();
        // Asked of the origin, not of a listing that may be old.
        let request = ListRequest {
            prefix: prefix.clone(),
            max_keys: 2,
            delimited: true,
            ..ListRequest::default()
        };
        let page = self.origin.list(&request).await?;
        let only_marker = page.objects.iter().all(|m| m.key.as_bytes() == prefix);
        let staged = live.listing(e.attr.ino).await.is_ok_and(|l| !l.entries.is_empty());
        if !only_marker || !page.prefixes.is_empty() || staged {
            return Err(FsError::NotEmpty);
        }
        self.origin.delete(&prefix.into()).await?;
        live.remove(parent, name);
        Ok(())
    }

    /// Renames a file by copy and delete. A directory is refused with EXDEV, upon
    /// which mv copies.
    ///
    /// # Errors
    /// As said, or the origin failed.
    pub async fn rename(
        &self,
        parent: Ino,
        name: &[u8],
        to_parent: Ino,
        to_name: &[u8],
        no_replace: bool,
    ) -> Result<(), FsError> {
        let live = self.writable()?;
        let from = self.lookup(parent, name).await?.attr;
        self.forget(from.ino, 1);
        if from.kind == Kind::Directory {
            return Err(FsError::CrossDevice);
        }
        let to_key = live.key_of(to_parent, to_name)?;
        let replaced: Option<Attr> = match self.lookup(to_parent, to_name).await {
            Ok(e) => {
                self.forget(e.attr.ino, 1);
                Some(e.attr)
            }
            Err(FsError::NotFound) => None,
            Err(e) => return Err(e),
        };
        if let Some(r) = replaced {
            if no_replace {
                return Err(FsError::Exists);
            }
            if r.kind == Kind::Directory {
                return Err(FsError::IsADirectory);
            }
            if r.ino == from.ino {
                return Ok(());
            }
            if let Some(s) = self.stages.get(r.ino) {
                s.unlink();
            }
        }
        if let Some(s) = self.stages.get(from.ino) {
            self.upload(&s).await?;
        }
        let meta = self.namespace.object(from.ino)?;
        let moved = self.origin.copy(&meta, &to_key).await?;
        self.origin.delete(&meta.key).await?;
        live.remove(parent, name);
        self.recent.invalidate(&from.ino);
        let listed = Listed { name: to_name.into(), kind: Kind::File, meta: Some(moved) };
        live.put(to_parent, &listed, Some(from.ino), 0)?;
        Ok(())
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

fn fresh_number() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

/// A name as the kernel gives it.
#[must_use]
pub fn name_bytes(name: &std::ffi::OsStr) -> &[u8] {
    name.as_bytes()
}

//! Files being written: a file on the cache disk, uploaded whole at flush.
//!
//! All writers and readers of an inode share its stage. It is dirty when its
//! size or times differ from those that were last uploaded: that holds whether
//! the bytes came through us or by passthrough.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};

use crate::namespace::Ino;

/// What a stage looked like: size, mtime, ctime.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Look(u64, (i64, i64), (i64, i64));

/// A file being written.
pub struct Stage {
    ino: Ino,
    path: PathBuf,
    file: File,
    handles: AtomicU32,
    uploaded: Mutex<Option<Look>>,
    unlinked: AtomicBool,
    pub(super) uploading: tokio::sync::Mutex<()>,
}

static NAMES: AtomicU64 = AtomicU64::new(0);

impl Stage {
    pub(super) fn create(dir: &Path, ino: Ino) -> io::Result<Self> {
        let n = NAMES.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!("{}-{n}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path)?;
        Ok(Self {
            ino,
            path,
            file,
            handles: AtomicU32::new(0),
            uploaded: Mutex::new(None),
            unlinked: AtomicBool::new(false),
            uploading: tokio::sync::Mutex::new(()),
        })
    }

    pub(super) fn ino(&self) -> Ino {
        self.ino
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file, open for reading and writing.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn state(&self) -> io::Result<Look> {
        let m = self.file.metadata()?;
        Ok(Look(m.len(), (m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec())))
    }

    /// Size in bytes and time of modification, nanoseconds since 1970.
    ///
    /// # Errors
    /// The disk fails.
    pub fn look(&self) -> io::Result<(u64, i64)> {
        let m = self.file.metadata()?;
        Ok((m.len(), m.mtime().saturating_mul(1_000_000_000).saturating_add(m.mtime_nsec())))
    }

    /// Whether there is something that was not uploaded.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        !self.unlinked.load(Ordering::Acquire)
            && self.state().map_or(true, |s| *self.uploaded.lock() != Some(s))
    }

    /// Whether the origin has, or had, what was in it at some time.
    pub(super) fn was_uploaded(&self) -> bool {
        self.uploaded.lock().is_some()
    }

    pub(super) fn set_uploaded(&self, look: Look) {
        *self.uploaded.lock() = Some(look);
    }

    /// Its name was removed: never upload it any more.
    pub(super) fn unlink(&self) {
        self.unlinked.store(true, Ordering::Release);
    }

    pub(super) fn is_unlinked(&self) -> bool {
        self.unlinked.load(Ordering::Acquire)
    }

    pub(super) fn read(&self, offset: u64, len: usize) -> io::Result<Bytes> {
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

    pub(super) fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The stages of a mount, by inode.
#[derive(Default)]
pub(super) struct Stages(RwLock<HashMap<Ino, Arc<Stage>>>);

impl Stages {
    pub(super) fn get(&self, ino: Ino) -> Option<Arc<Stage>> {
        let s = self.0.read();
        if s.is_empty() { None } else { s.get(&ino).cloned() }
    }

    /// The inode's stage with one handle more, if it has one.
    pub(super) fn open(&self, ino: Ino) -> Option<Arc<Stage>> {
        let stages = self.0.read();
        let s = stages.get(&ino)?;
        s.handles.fetch_add(1, Ordering::AcqRel);
        Some(s.clone())
    }

    /// The inode's stage with one handle more: `new`, unless somebody else was as
    /// quick.
    pub(super) fn join(&self, new: Arc<Stage>) -> Arc<Stage> {
        let mut stages = self.0.write();
        let s = stages.entry(new.ino()).or_insert(new);
        s.handles.fetch_add(1, Ordering::AcqRel);
        s.clone()
    }

    /// A handle was closed; true for the last one, whose stage is gone with it.
    pub(super) fn close(&self, s: &Arc<Stage>) -> bool {
        let mut stages = self.0.write();
        let last = s.handles.fetch_sub(1, Ordering::AcqRel) == 1;
        if last {
            stages.remove(&s.ino());
        }
        last
    }

    pub(super) fn len(&self) -> usize {
        self.0.read().len()
    }
}

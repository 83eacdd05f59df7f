//! Opening and reading.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use kspeed_cache::{CachedObject, Hit};

use super::handles::{Backing, Registration};
use super::{FileSystem, HandleId, OpenKind, Opened, Stage};
use crate::errno::FsError;
use crate::namespace::{Ino, Namespace};

/// A read looks again so often when its blocks are evicted under it.
const MAX_EVICTED: u32 = 8;

/// What a read is answered from.
pub enum Readable {
    /// One version of an object.
    Object(Arc<CachedObject>),
    /// A file that is being written.
    Stage(Arc<Stage>),
}

impl FileSystem {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// No such inode, or a directory.
    pub fn open_read(&self, ino: Ino) -> Result<Opened, FsError> {
        // The stage first: who opens a file that is being written reads what was
        // written (C5).
        let kind = match self.stage_to_read(ino) {
            Some(s) => OpenKind::Stage(s, false),
            None => OpenKind::Object(self.object(ino)?),
        };
        if let OpenKind::Object(o) = &kind {
            self.pipeline.on_open(ino, o);
        }
        let keep_cache =
            matches!(kind, OpenKind::Object(_)) && !self.rewritten.lock().contains(&ino);
        let handle = self.handles.add(kind.clone());
        Ok(Opened { handle, kind, keep_cache })
    }

    fn stage_to_read(&self, ino: Ino) -> Option<Arc<Stage>> {
        let s = self.stage(ino)?;
        let w = self.writeback.as_ref()?;
        w.stages().enter(&s, false).then_some(s)
    }

    /// Settles by what way the kernel will read this open file; `register` makes
    /// a passthrough of a file descriptor. None: through us.
    pub fn settle(
        &self,
        ino: Ino,
        opened: &Opened,
        register: impl FnOnce(&std::fs::File) -> Option<Registration>,
    ) -> Option<Registration> {
        let backing = match &opened.kind {
            OpenKind::Object(o) => o.passthrough().map(|p| Backing::Cached(Arc::new(p))),
            OpenKind::Stage(s, _) => Some(Backing::Stage(s.clone())),
            OpenKind::Directory(_) => None,
        };
        let r = self.modes.enter(ino, backing, |b| match b {
            Backing::Cached(p) => register(p.file()),
            Backing::Stage(s) => register(s.file()),
        });
        let n = if r.is_some() { &self.stats.passthrough_opens } else { &self.stats.other_opens };
        n.fetch_add(1, Ordering::Relaxed);
        r
    }

    /// What a read of an inode, by a handle if there is one, is answered from.
    ///
    /// # Errors
    /// A bad handle or inode.
    pub fn readable(&self, ino: Ino, handle: HandleId) -> Result<Readable, FsError> {
        if handle == 0 {
            return match self.stage(ino) {
                Some(s) => Ok(Readable::Stage(s)),
                None => Ok(Readable::Object(self.object(ino)?)),
            };
        }
        match self.handles.get(handle)? {
            OpenKind::Stage(s, _) => Ok(Readable::Stage(s)),
            // Opened before somebody began to write: POSIX shows the writes.
            OpenKind::Object(o) => Ok(match self.stage(ino) {
                Some(s) => Readable::Stage(s),
                None => Readable::Object(o),
            }),
            OpenKind::Directory(_) => Err(FsError::IsADirectory),
        }
    }

    /// Answers a read from RAM or the local disk by calling `reply` once; gives
    /// `reply` back if that is not possible now.
    ///
    /// # Errors
    /// `reply`, unused.
    pub fn read_now<R, F: FnOnce(Result<&[u8], FsError>) -> R>(
        &self,
        ino: Ino,
        readable: &Readable,
        offset: u64,
        len: usize,
        reply: F,
    ) -> Result<R, F> {
        self.stats.reads.fetch_add(1, Ordering::Relaxed);
        let object = match readable {
            Readable::Stage(s) => {
                return Ok(match s.read(offset, len) {
                    Ok(b) => reply(Ok(&b)),
                    Err(e) => reply(Err(e.into())),
                });
            }
            Readable::Object(o) => o,
        };
        // The reader is answered first, then what follows is thought about.
        let served = match object.try_read(offset, len) {
            Some(hit) => self.serve(&hit, reply).inspect(|_| {
                self.stats.inline_reads.fetch_add(1, Ordering::Relaxed);
            }),
            None => Err(reply),
        };
        self.pipeline.on_read(self, ino, object, offset, len as u64, served.is_ok());
        served
    }

    fn serve<R, F: FnOnce(Result<&[u8], FsError>) -> R>(
        &self,
        hit: &Hit,
        reply: F,
    ) -> Result<R, F> {
        let mut reply = Some(reply);
        let served = hit.serve(|b| {
            self.stats.read_bytes.fetch_add(b.len() as u64, Ordering::Relaxed);
            reply.take().map(|r| r(Ok(b)))
        });
        match (served.ok().flatten(), reply) {
            (Some(r), _) => Ok(r),
            (None, Some(reply)) => Err(reply),
            (None, None) => unreachable!("serve calls back once, and then returns its value"),
        }
    }

    /// As [`Self::read_now`], waiting for the origin if need be.
    pub async fn read_patiently<R, F: FnOnce(Result<&[u8], FsError>) -> R>(
        &self,
        ino: Ino,
        object: &Arc<CachedObject>,
        offset: u64,
        len: usize,
        mut reply: F,
    ) -> R {
        for _ in 0..MAX_EVICTED {
            let hit = match self.read(ino, object, offset, len).await {
                Ok(h) => h,
                Err(e) => return reply(Err(e)),
            };
            match self.serve(&hit, reply) {
                Ok(r) => return r,
                Err(back) => reply = back,
            }
        }
        reply(Err(std::io::Error::other("blocks are evicted before they can be served").into()))
    }

    /// The bytes of a range, from wherever they are.
    ///
    /// # Errors
    /// The origin failed, the version is gone, or the deadline passed.
    pub async fn read(
        &self,
        ino: Ino,
        object: &Arc<CachedObject>,
        offset: u64,
        len: usize,
    ) -> Result<Hit, FsError> {
        let r = self.within(async { Ok(object.read(offset, len).await?) }).await;
        if let Err(e) = &r
            && e.errno() == libc::ESTALE
        {
            self.expire(ino);
        }
        r
    }

    /// As [`Self::read`], with the bytes in memory.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub async fn read_bytes(
        &self,
        ino: Ino,
        object: &Arc<CachedObject>,
        offset: u64,
        len: usize,
    ) -> Result<Bytes, FsError> {
        let mut last = None;
        for _ in 0..MAX_EVICTED {
            match self.read(ino, object, offset, len).await?.to_bytes() {
                Ok(b) => {
                    self.stats.read_bytes.fetch_add(b.len() as u64, Ordering::Relaxed);
                    return Ok(b);
                }
                Err(e) => last = Some(e),
            }
        }
        Err(last.map_or(FsError::TimedOut, Into::into))
    }

    /// The version behind an inode is gone: its directory is not believed any
    /// longer, so that the next open sees the new one.
    fn expire(&self, ino: Ino) {
        if let Namespace::Live(l) = &self.namespace
            && let Some((parent, name)) = l.name_of(ino)
        {
            l.expire(parent);
            self.tell_stale(parent, &name);
        }
    }
}

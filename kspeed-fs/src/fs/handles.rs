//! Open files and directories, and by what way the kernel reads each inode.
//!
//! The kernel refuses (EIO) to open an inode by passthrough while it is open
//! through its own cache, and the other way round, so the way is fixed for as
//! long as any handle of the inode is open.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kspeed_cache::CachedObject;
use kspeed_cache::tier::PassthroughFile;
use parking_lot::{Mutex, RwLock};

use crate::errno::FsError;
use crate::namespace::{Ino, Listing};
use crate::writeback::Stage;

/// A handle's number, as the kernel is told; 0 is none.
pub type HandleId = u64;

/// What a handle has open.
#[derive(Clone)]
pub enum OpenKind {
    /// One version of an object.
    Object(Arc<CachedObject>),
    /// A file that is being written.
    Stage(Arc<Stage>, bool),
    /// A directory at one moment.
    Directory(Arc<Listing>),
}

/// What an open came to.
pub struct Opened {
    /// Its handle.
    pub handle: HandleId,
    /// What is open.
    pub kind: OpenKind,
    /// The kernel may keep the pages that it has: an inode is one version.
    pub keep_cache: bool,
}

#[derive(Default)]
pub(super) struct Handles {
    next: AtomicU64,
    open: RwLock<HashMap<HandleId, OpenKind>>,
}

impl Handles {
    pub(super) fn add(&self, kind: OpenKind) -> HandleId {
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.open.write().insert(id, kind);
        id
    }

    pub(super) fn get(&self, id: HandleId) -> Result<OpenKind, FsError> {
        self.open.read().get(&id).cloned().ok_or(FsError::BadHandle)
    }

    pub(super) fn listing(&self, id: HandleId) -> Result<Arc<Listing>, FsError> {
        match self.open.read().get(&id) {
            Some(OpenKind::Directory(l)) => Ok(l.clone()),
            Some(_) => Err(FsError::NotADirectory),
            None => Err(FsError::BadHandle),
        }
    }

    pub(super) fn remove(&self, id: HandleId) -> Option<OpenKind> {
        self.open.write().remove(&id)
    }

    pub(super) fn len(&self) -> usize {
        self.open.read().len()
    }
}

/// What keeps a passthrough alive on our side.
#[derive(Clone)]
pub enum Backing {
    /// A complete cache file.
    Cached(Arc<PassthroughFile>),
    /// A stage.
    Stage(Arc<Stage>),
}

/// The kernel's registration of a backing file; dropped, it is undone.
pub type Registration = Arc<dyn std::any::Any + Send + Sync>;

enum Way {
    Cached(u32),
    Through {
        handles: u32,
        /// Not evicted while the kernel reads it.
        _backing: Backing,
        registration: Registration,
    },
}

#[derive(Default)]
pub(super) struct Modes(Mutex<HashMap<Ino, Way>>);

impl Modes {
    /// Joins or starts passthrough; `register` is asked for a first handle. None:
    /// the inode is open otherwise, or the kernel refuses; it is counted as open
    /// through the cache then.
    pub(super) fn enter(
        &self,
        ino: Ino,
        backing: Option<Backing>,
        register: impl FnOnce(&Backing) -> Option<Registration>,
    ) -> Option<Registration> {
        let mut modes = self.0.lock();
        match modes.get_mut(&ino) {
            Some(Way::Cached(n)) => {
                *n += 1;
                None
            }
            Some(Way::Through { handles: n, registration: r, .. }) => {
                *n += 1;
                Some(r.clone())
            }
            None => {
                let made = backing.and_then(|b| register(&b).map(|r| (b, r)));
                match made {
                    Some((b, r)) => {
                        let way = Way::Through { handles: 1, _backing: b, registration: r.clone() };
                        modes.insert(ino, way);
                        Some(r)
                    }
                    None => {
                        modes.insert(ino, Way::Cached(1));
                        None
                    }
                }
            }
        }
    }

    /// Whether the kernel reads the inode from some file by itself now.
    pub(super) fn is_through(&self, ino: Ino) -> bool {
        matches!(self.0.lock().get(&ino), Some(Way::Through { .. }))
    }

    /// Whether somebody has the inode open.
    pub(super) fn is_open(&self, ino: Ino) -> bool {
        self.0.lock().contains_key(&ino)
    }

    /// A handle of the inode was closed.
    pub(super) fn leave(&self, ino: Ino) {
        let mut modes = self.0.lock();
        let last = match modes.get_mut(&ino) {
            Some(Way::Cached(n) | Way::Through { handles: n, .. }) => {
                *n -= 1;
                *n == 0
            }
            None => false,
        };
        if last {
            modes.remove(&ino);
        }
    }
}

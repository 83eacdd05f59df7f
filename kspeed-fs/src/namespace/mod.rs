//! Directories made of keys: names, attributes, listings.
//!
//! Two implementations: [`Live`] lists as it is asked and forgets after the
//! metadata lifetime; [`Snapshot`] serves an immutable index of the whole prefix
//! from a memory map. Both follow the rules in [`names`].
//!
//! **An inode is a version.** When the origin's object changes, the name gets
//! another inode number; descriptors of the old one keep the old version or fail,
//! and the kernel's pages of two versions can't meet (I1).

mod live;
pub mod names;
mod snapshot;

use std::sync::Arc;
use std::time::Duration;

use kspeed_cache::{ObjectKind, ObjectMeta};

pub use live::{INODE_BYTES, Live, LiveConfig, OnStale};
pub use snapshot::{Snapshot, SnapshotBuilder, SnapshotError, SnapshotIndex, build, is_stale};

use crate::errno::FsError;

/// Inode number.
pub type Ino = u64;
/// The root directory's.
pub const ROOT: Ino = 1;

/// What kind of thing a name is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Kind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
    /// A symbolic link.
    Symlink,
}

/// Attributes of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attr {
    /// Inode number.
    pub ino: Ino,
    /// Kind.
    pub kind: Kind,
    /// Size in bytes.
    pub size: u64,
    /// Last modification, nanoseconds since the Unix epoch.
    pub mtime_ns: i64,
    /// Permission bits of the origin, if it has such.
    pub mode: Option<u32>,
    /// Owner, if it was set.
    pub uid: Option<u32>,
    /// Group, if it was set.
    pub gid: Option<u32>,
}

/// A name found, and for how long that holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Attributes.
    pub attr: Attr,
    /// Remaining lifetime.
    pub ttl: Duration,
}

/// One entry of a listing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// Name.
    pub name: Box<[u8]>,
    /// Kind.
    pub kind: Kind,
    /// Object, for all but directories.
    pub meta: Option<ObjectMeta>,
}

/// A directory as listed at one moment. A handle keeps one, so that who reads
/// the directory sees each entry exactly once, whatever changes meanwhile (N6).
#[derive(Debug, Default)]
pub struct Listing {
    /// Entries in bytewise order of names.
    pub entries: Vec<Listed>,
    /// When the content last changed, as far as seen; nanoseconds since 1970.
    pub changed_ns: i64,
    /// Keys that no rule makes visible.
    pub hidden: u64,
}

impl Listing {
    /// The place of a name.
    #[must_use]
    pub fn find(&self, name: &[u8]) -> Option<usize> {
        self.entries.binary_search_by(|e| (*e.name).cmp(name)).ok()
    }
}

impl Kind {
    pub(crate) fn of(kind: ObjectKind) -> Self {
        match kind {
            ObjectKind::File => Self::File,
            ObjectKind::Symlink => Self::Symlink,
        }
    }
}

/// The namespace of a mount. Clones share it.
#[derive(Clone)]
pub enum Namespace {
    /// Lists as it is asked.
    Live(Arc<Live>),
    /// An immutable index.
    Snapshot(Arc<Snapshot>),
}

/// What a child is told to those that page through a directory.
pub struct Child<'a> {
    /// Name.
    pub name: &'a [u8],
    /// Attributes.
    pub attr: Attr,
    /// Where the next call goes on.
    pub next: u64,
}

impl Namespace {
    /// Looks a name up without waiting; none: ask [`Self::lookup`].
    #[must_use]
    pub fn lookup_now(&self, parent: Ino, name: &[u8]) -> Option<Result<Entry, FsError>> {
        match self {
            Self::Live(l) => l.lookup_now(parent, name),
            Self::Snapshot(s) => Some(s.lookup(parent, name)),
        }
    }

    /// Looks a name up, asking the origin if need be. Counts as one lookup of
    /// the inode, which the kernel gives back by forget.
    ///
    /// # Errors
    /// No such name, or the origin failed.
    pub async fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Entry, FsError> {
        match self {
            Self::Live(l) => l.lookup(parent, name).await,
            Self::Snapshot(s) => s.lookup(parent, name),
        }
    }

    /// Attributes of an inode that the kernel knows.
    ///
    /// # Errors
    /// There is no such inode.
    pub fn attr(&self, ino: Ino) -> Result<Entry, FsError> {
        match self {
            Self::Live(l) => l.attr(ino),
            Self::Snapshot(s) => s.attr(ino),
        }
    }

    /// The object behind a file's inode.
    ///
    /// # Errors
    /// There is no such inode, or it is a directory.
    pub fn object(&self, ino: Ino) -> Result<ObjectMeta, FsError> {
        match self {
            Self::Live(l) => l.object(ino),
            Self::Snapshot(s) => s.object(ino),
        }
    }

    /// The kernel gives lookups back.
    pub fn forget(&self, ino: Ino, lookups: u64) {
        match self {
            Self::Live(l) => l.forget(ino, lookups),
            Self::Snapshot(_) => {}
        }
    }

    /// The directory that an inode is in, and its name where that is at hand.
    #[must_use]
    pub fn parent_and_name(&self, ino: Ino) -> Option<(Ino, Option<Box<[u8]>>)> {
        match self {
            Self::Live(l) => l.name_of(ino).map(|(p, n)| (p, Some(n))),
            Self::Snapshot(s) => s.parent(ino).ok().map(|p| (p, None)),
        }
    }

    /// A file's directory, its place there, the number of files and their mean
    /// size in bytes, if that is known without asking.
    #[must_use]
    pub fn place(&self, ino: Ino) -> Option<(Ino, u64, u64, u64)> {
        match self {
            Self::Live(l) => l.place(ino),
            Self::Snapshot(s) => s.place(ino),
        }
    }

    /// The files of a directory at these places: inode and object.
    #[must_use]
    pub fn files_at(&self, directory: Ino, places: std::ops::Range<u64>) -> Vec<(Ino, ObjectMeta)> {
        match self {
            Self::Live(l) => l.files_at(directory, places),
            Self::Snapshot(s) => s.files_at(directory, places),
        }
    }

    /// Inodes held in memory.
    #[must_use]
    pub fn inodes(&self) -> u64 {
        match self {
            Self::Live(l) => l.inodes(),
            Self::Snapshot(_) => 0,
        }
    }
}

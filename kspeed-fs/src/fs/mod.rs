//! The file system, without FUSE: names, handles, reads, and writes that are in
//! the origin when close returns.
//!
//! Calls that can be answered at once have a synchronous form (`*_now`), which
//! the session threads use; the others are asynchronous and end by a deadline.
//!
//! Lock order: `handles` → `modes` → a stage's lock. None is held across an
//! await but a stage's upload lock.

mod handles;
mod names;
mod read;
mod write;
mod xattr;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use kspeed_cache::origin::Origin;
use kspeed_cache::{Cache, CachedObject, ObjectKind, ObjectMeta};
use parking_lot::Mutex;

pub use handles::{HandleId, OpenKind, Opened, Registration};
use handles::{Handles, Modes};
pub use read::Readable;
pub use write::{Maker, name_bytes};

use crate::errno::FsError;
use crate::namespace::{Attr, Entry, Ino, Kind, Listed, Listing, Namespace, OnStale};
use crate::pipeline::Pipeline;
pub use crate::writeback::Stage;
use crate::writeback::Writeback;

/// How a mount behaves.
#[derive(Clone, Debug)]
pub struct FsOptions {
    /// No writes; no-open.
    pub read_only: bool,
    /// How long the absence of a name is believed.
    pub negative_ttl: Duration,
    /// A call ends by this.
    pub io_timeout: Duration,
    /// Owner of everything.
    pub uid: u32,
    /// Group of everything.
    pub gid: u32,
    /// Permission bits of files from origins without such.
    pub file_mode: u32,
    /// Permission bits of directories.
    pub dir_mode: u32,
}

/// Counters of a mount.
#[derive(Default, Debug)]
pub struct FsStats {
    /// Calls by the kernel.
    pub requests: AtomicU64,
    /// Reads among them.
    pub reads: AtomicU64,
    /// Bytes they asked for and got.
    pub read_bytes: AtomicU64,
    /// Reads that were answered by the session thread.
    pub inline_reads: AtomicU64,
    /// Files opened by passthrough.
    pub passthrough_opens: AtomicU64,
    /// Other opens.
    pub other_opens: AtomicU64,
    /// Calls that ended with an error worth logging.
    pub errors: AtomicU64,
}

/// One mount's file system.
pub struct FileSystem {
    pub(crate) namespace: Namespace,
    pub(crate) cache: Cache,
    pub(crate) origin: Arc<dyn Origin>,
    pub(crate) options: FsOptions,
    pub(crate) stats: FsStats,
    handles: Handles,
    modes: Modes,
    /// None where nothing can be written.
    pub(crate) writeback: Option<Arc<Writeback>>,
    /// Inodes whose object this mount replaced: the kernel must not keep the
    /// pages that it has of them.
    rewritten: Mutex<HashSet<Ino>>,
    /// Objects read lately, so that their files stay open between reads of
    /// mounts without handles.
    recent: moka::sync::Cache<Ino, Arc<CachedObject>>,
    pub(crate) pipeline: Pipeline,
    stale: Mutex<Option<OnStale>>,
}

/// Objects whose cache files are kept open: a file descriptor each.
const RECENT_OBJECTS: u64 = 1024;
const RECENT_IDLE: Duration = Duration::from_secs(60);

impl FileSystem {
    /// Over a namespace, a cache and an origin.
    #[must_use]
    pub fn new(
        namespace: Namespace,
        cache: Cache,
        origin: Arc<dyn Origin>,
        pipeline: Pipeline,
        writeback: Option<Arc<Writeback>>,
        options: FsOptions,
    ) -> Self {
        let recent = moka::sync::Cache::builder()
            .max_capacity(RECENT_OBJECTS)
            .time_to_idle(RECENT_IDLE)
            .build();
        Self {
            namespace,
            cache,
            origin,
            options,
            stats: FsStats::default(),
            handles: Handles::default(),
            modes: Modes::default(),
            writeback,
            rewritten: Mutex::default(),
            recent,
            pipeline,
            stale: Mutex::new(None),
        }
    }

    /// Options.
    #[must_use]
    pub fn options(&self) -> &FsOptions {
        &self.options
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> &FsStats {
        &self.stats
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The cache.
    #[must_use]
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The origin.
    #[must_use]
    pub fn origin(&self) -> &Arc<dyn Origin> {
        &self.origin
    }

    /// What is written through this mount.
    #[must_use]
    pub fn writeback(&self) -> Option<&Arc<Writeback>> {
        self.writeback.as_ref()
    }

    /// Files whose bytes are not in the origin, or that are open.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.writeback.as_ref().map_or(0, |w| w.stages().count())
    }

    /// Handles open now.
    #[must_use]
    pub fn open_handles(&self) -> usize {
        self.handles.len()
    }

    /// Who is told of a name whose inode the kernel should drop.
    pub fn on_stale(&self, tell: OnStale) {
        *self.stale.lock() = Some(tell);
    }

    fn tell_stale(&self, parent: Ino, name: &[u8]) {
        if let Some(tell) = &*self.stale.lock() {
            tell(parent, name);
        }
    }

    /// A call's deadline.
    ///
    /// # Errors
    /// What the call fails with, or [`FsError::TimedOut`].
    pub async fn within<T>(
        &self,
        call: impl Future<Output = Result<T, FsError>>,
    ) -> Result<T, FsError> {
        match tokio::time::timeout(self.options.io_timeout, call).await {
            Ok(r) => r,
            Err(_) => Err(FsError::TimedOut),
        }
    }

    /// Looks a name up without waiting, or not at all.
    #[must_use]
    pub fn lookup_now(&self, parent: Ino, name: &[u8]) -> Option<Result<Entry, FsError>> {
        self.namespace.lookup_now(parent, name).map(|r| r.map(|e| self.staged_entry(e)))
    }

    /// Looks a name up.
    ///
    /// # Errors
    /// No such name, or the origin failed.
    pub async fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Entry, FsError> {
        self.namespace.lookup(parent, name).await.map(|e| self.staged_entry(e))
    }

    /// Attributes of an inode.
    ///
    /// # Errors
    /// No such inode.
    pub fn attr(&self, ino: Ino) -> Result<Entry, FsError> {
        self.namespace.attr(ino).map(|e| self.staged_entry(e))
    }

    /// A file that is being written is as large as its stage.
    fn staged_entry(&self, mut e: Entry) -> Entry {
        if e.attr.kind == Kind::File
            && let Some(s) = self.stage(e.attr.ino)
            && let Ok(look) = s.look()
        {
            e.attr.size = look.size();
            e.attr.mtime_ns = look.mtime_ns();
            let own = s.attributes.lock();
            e.attr.mode = own.mode.or(e.attr.mode);
            e.attr.uid = own.uid.or(e.attr.uid);
            e.attr.gid = own.gid.or(e.attr.gid);
            if s.has_writers() {
                // The kernel writes the stage without us: attributes don't last.
                e.ttl = Duration::ZERO;
            }
        }
        e
    }

    /// The kernel gives lookups back.
    pub fn forget(&self, ino: Ino, lookups: u64) {
        self.namespace.forget(ino, lookups);
        if !self.options.read_only && self.namespace.attr(ino).is_err() {
            self.rewritten.lock().remove(&ino);
        }
        self.pipeline.forget(ino);
    }

    /// Opens a directory: who reads it sees this moment of it.
    ///
    /// # Errors
    /// No such directory, or the origin failed.
    pub async fn open_dir(&self, ino: Ino) -> Result<HandleId, FsError> {
        match &self.namespace {
            Namespace::Live(l) => {
                let listing = l.listing(ino).await?;
                Ok(self.handles.add(OpenKind::Directory(listing)))
            }
            Namespace::Snapshot(s) => {
                s.attr(ino)?;
                Ok(self.handles.add(OpenKind::Directory(Arc::default())))
            }
        }
    }

    /// As [`Self::open_dir`], without waiting, or not at all.
    #[must_use]
    pub fn open_dir_now(&self, ino: Ino) -> Option<HandleId> {
        let listing = match &self.namespace {
            Namespace::Live(l) => l.listing_now(ino)?,
            Namespace::Snapshot(_) => Arc::default(),
        };
        Some(self.handles.add(OpenKind::Directory(listing)))
    }

    /// Calls `each` with (name, attributes, next position) of the children from
    /// a position on, until it returns false. With `lookups`, each child that it
    /// took counts as looked up once.
    ///
    /// # Errors
    /// A bad handle.
    pub fn read_dir(
        &self,
        ino: Ino,
        handle: HandleId,
        position: u64,
        lookups: bool,
        each: &mut dyn FnMut(&[u8], Entry, u64) -> bool,
    ) -> Result<(), FsError> {
        match &self.namespace {
            Namespace::Snapshot(s) => {
                let ttl = s.attr(ino)?.ttl;
                s.children(ino, position, &mut |c| {
                    each(c.name, Entry { attr: c.attr, ttl }, c.next)
                })
            }
            Namespace::Live(l) => {
                let listing = self.handles.listing(handle)?;
                let from = usize::try_from(position).unwrap_or(usize::MAX);
                for (i, e) in listing.entries.iter().enumerate().skip(from) {
                    let entry = if lookups {
                        match l.adopt_listed(ino, e, 1) {
                            Ok(e) => e,
                            // Removed since the directory was opened.
                            Err(FsError::NotFound) => continue,
                            Err(e) => return Err(e),
                        }
                    } else {
                        let ino = l.number_of(ino, e)?;
                        Entry { attr: plain_attr(ino, e), ttl: Duration::ZERO }
                    };
                    let entry = self.staged_entry(entry);
                    if !each(&e.name, entry, i as u64 + 1) {
                        // Not taken: its lookup does not count.
                        if lookups {
                            l.forget(entry.attr.ino, 1);
                        }
                        break;
                    }
                }
                Ok(())
            }
        }
    }

    /// When a directory's content last changed, nanoseconds since 1970.
    #[must_use]
    pub fn listing_changed_ns(&self, handle: HandleId) -> i64 {
        self.handles.listing(handle).map_or(0, |l: Arc<Listing>| l.changed_ns)
    }

    /// The directory that a directory is in.
    #[must_use]
    pub fn parent(&self, ino: Ino) -> Ino {
        self.namespace.parent_and_name(ino).map_or(ino, |(p, _)| p)
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// Not a link, or the origin failed.
    pub async fn read_link(&self, ino: Ino) -> Result<bytes::Bytes, FsError> {
        let meta = self.namespace.object(ino)?;
        if meta.kind != ObjectKind::Symlink {
            return Err(FsError::Invalid("not a symbolic link"));
        }
        let body = self.origin.get(&meta, 0..meta.size).await?;
        Ok(kspeed_cache::origin::collect(body).await?)
    }

    /// The cached object behind an inode.
    ///
    /// # Errors
    /// No such inode, or a directory.
    pub fn object(&self, ino: Ino) -> Result<Arc<CachedObject>, FsError> {
        let recent = self.recent.get(&ino);
        if self.writeback.is_none()
            && let Some(o) = recent
        {
            return Ok(o);
        }
        let meta = self.namespace.object(ino)?;
        // What is written here gives an inode another object.
        if let Some(o) =
            recent.filter(|o| o.meta().version == meta.version && o.meta().key == meta.key)
        {
            return Ok(o);
        }
        let o = self.cache.object(&self.origin, &meta);
        self.recent.insert(ino, o.clone());
        Ok(o)
    }

    /// Looks a path up, component by component.
    ///
    /// # Errors
    /// As [`Self::lookup`].
    pub async fn resolve(&self, path: &[u8]) -> Result<Attr, FsError> {
        let mut attr = self.attr(crate::namespace::ROOT)?.attr;
        for name in path.split(|b| *b == b'/').filter(|c| !c.is_empty()) {
            let next = self.lookup(attr.ino, name).await?.attr;
            self.forget(next.ino, 0);
            attr = next;
        }
        Ok(attr)
    }

    /// All files below a directory, or the file itself, as (inode, object).
    ///
    /// # Errors
    /// The origin failed.
    pub async fn files_below(&self, ino: Ino) -> Result<Vec<(Ino, ObjectMeta)>, FsError> {
        let attr = self.attr(ino)?.attr;
        if attr.kind != Kind::Directory {
            return Ok(vec![(ino, self.namespace.object(ino)?)]);
        }
        let mut out = Vec::new();
        let mut todo = vec![ino];
        while let Some(dir) = todo.pop() {
            match &self.namespace {
                Namespace::Snapshot(s) => {
                    let mut found = Vec::new();
                    s.children(dir, 0, &mut |c| {
                        found.push(c.attr);
                        true
                    })?;
                    for a in found {
                        match a.kind {
                            Kind::Directory => todo.push(a.ino),
                            _ => out.push((a.ino, s.object(a.ino)?)),
                        }
                    }
                }
                Namespace::Live(l) => {
                    for e in &l.listing(dir).await?.entries {
                        match &e.meta {
                            Some(m) if e.kind == Kind::File => {
                                out.push((l.number_of(dir, e)?, m.clone()));
                            }
                            Some(_) => {}
                            None => todo.push(l.adopt_listed(dir, e, 0)?.attr.ino),
                        }
                    }
                }
            }
        }
        Ok(out)
    }
}

fn plain_attr(ino: Ino, e: &Listed) -> Attr {
    Attr {
        ino,
        kind: e.kind,
        size: e.meta.as_ref().map_or(0, |m| m.size),
        mtime_ns: e.meta.as_ref().map_or(0, |m| m.mtime_ns),
        mode: e.meta.as_ref().and_then(|m| m.mode),
        uid: None,
        gid: None,
    }
}

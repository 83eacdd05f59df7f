//! FUSE requests to file system calls and back: thin.
//!
//! A request that can be answered from memory or the local disk is answered by
//! the session thread that took it; the others become tasks, which end by the
//! call's deadline, by a signal to the caller, or at shutdown. A panic in a
//! handler would kill its session thread and hang the mount: it is caught, and
//! the request is answered with EIO.

mod convert;
mod interrupt;
mod virtual_files;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use fuser::{
    BackingId, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use kspeed_cache::origin::Attributes;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::errno::FsError;
use crate::fs::{FileSystem, HandleId, Maker, Opened, Registration, name_bytes};
use crate::namespace::{Entry, Ino};
use convert::{errno, file_attr, kind_of, nothing};

pub use virtual_files::StatusText;
use virtual_files::VirtualFiles;

/// Requests of 4 MiB, if the kernel's limit of pages allows.
const MAX_REQUEST_BYTES: u32 = 4 << 20;
/// Requests that the kernel may queue for readahead: 64 of 4 MiB.
const MAX_BACKGROUND: u16 = 64;
/// "." and ".." come before the children.
const DOTS: u64 = 2;
const BLOCK_BYTES: u32 = 4096;
/// Directories whose cached listing is remembered; beyond, all are told anew.
const MAX_TOLD: usize = 100_000;

/// What the kernel let us have.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct KernelSupport {
    /// Files can be read by passthrough.
    pub passthrough: bool,
    /// FUSE protocol version.
    pub protocol: String,
}

/// What the adapter shares with its mount.
pub struct AdapterContext {
    /// Where tasks run.
    pub runtime: Handle,
    /// All tasks of requests.
    pub tasks: TaskTracker,
    /// Ends them.
    pub stop: CancellationToken,
    /// What `.kspeed/` shows.
    pub status: Arc<dyn StatusText>,
    /// Passthrough is wanted.
    pub passthrough: bool,
}

/// How requests are answered, shared by all session threads.
pub struct Adapter {
    fs: Arc<FileSystem>,
    context: AdapterContext,
    opener: Arc<Opener>,
    virtual_files: VirtualFiles,
}

/// Answers opens, from session threads and tasks alike.
struct Opener {
    fs: Arc<FileSystem>,
    support: Arc<Mutex<KernelSupport>>,
    /// When each cached directory's content was last told to have changed.
    told: Mutex<HashMap<Ino, i64>>,
}

impl Opener {
    fn settle(
        &self,
        ino: INodeNo,
        opened: &Opened,
        register: impl FnOnce(&std::fs::File) -> io::Result<BackingId>,
    ) -> Option<Registration> {
        let wanted = self.support.lock().passthrough;
        self.fs.settle(ino.0, opened, |file| {
            if !wanted {
                return None;
            }
            match register(file) {
                Ok(id) => Some(Arc::new(id) as Registration),
                Err(e) => {
                    tracing::warn!(error = %e, "the kernel refuses passthrough; files are read through the daemon");
                    self.support.lock().passthrough = false;
                    None
                }
            }
        })
    }

    fn reply_opened(&self, ino: INodeNo, opened: &Opened, reply: ReplyOpen) {
        let mut flags =
            if opened.keep_cache { FopenFlags::FOPEN_KEEP_CACHE } else { FopenFlags::empty() };
        let writes = matches!(&opened.kind, crate::fs::OpenKind::Stage(_, true));
        if !writes {
            flags |= FopenFlags::FOPEN_NOFLUSH;
        }
        let through = self.settle(ino, opened, |f| reply.open_backing(f));
        match through.as_ref().and_then(|r| r.downcast_ref::<BackingId>()) {
            Some(id) => reply.opened_passthrough(
                FileHandle(opened.handle),
                flags & !FopenFlags::FOPEN_KEEP_CACHE,
                id,
            ),
            None => reply.opened(FileHandle(opened.handle), flags),
        }
    }

    fn reply_dir(&self, ino: INodeNo, handle: HandleId, reply: ReplyOpen) {
        let mut flags = FopenFlags::empty();
        if self.fs.options().read_only {
            // The kernel keeps the listing that it has, as long as it is this one.
            flags |= FopenFlags::FOPEN_CACHE_DIR;
            let changed = self.fs.listing_changed_ns(handle);
            let mut told = self.told.lock();
            if told.len() >= MAX_TOLD {
                told.clear();
            }
            if told.insert(ino.0, changed) == Some(changed) {
                flags |= FopenFlags::FOPEN_KEEP_CACHE;
            }
        }
        reply.opened(FileHandle(handle), flags);
    }
}

fn maker(req: &Request, mode: u32, umask: u32) -> Maker {
    Maker { mode: mode & !umask & 0o7777, uid: req.uid(), gid: req.gid() }
}

fn note(fs: &FileSystem, e: &FsError, what: &str, ino: Ino) {
    if e.is_worth_logging() {
        fs.stats().errors.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(error = %e, what, ino, "a call failed");
    }
}

/// Answers an entry or an error; absence is told with its lifetime.
fn reply_entry(fs: &FileSystem, reply: ReplyEntry, r: Result<Entry, FsError>) {
    let o = fs.options();
    match r {
        Ok(e) => reply.entry(&e.ttl, &file_attr(o, &e.attr), Generation(0)),
        // Inode 0 tells the kernel to remember that there is nothing.
        Err(FsError::NotFound) if !o.negative_ttl.is_zero() => {
            reply.entry(&o.negative_ttl, &file_attr(o, &nothing()), Generation(0));
        }
        Err(e) => reply.error(errno(&e)),
    }
}

fn reply_attr(fs: &FileSystem, reply: ReplyAttr, r: Result<Entry, FsError>) {
    match r {
        Ok(e) => reply.attr(&e.ttl, &file_attr(fs.options(), &e.attr)),
        Err(e) => reply.error(errno(&e)),
    }
}

fn reply_empty(reply: ReplyEmpty, r: Result<(), FsError>) {
    match r {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(errno(&e)),
    }
}

fn reply_xattr(reply: ReplyXattr, size: u32, value: &[u8]) {
    if size == 0 {
        reply.size(value.len() as u32);
    } else if value.len() <= size as usize {
        reply.data(value);
    } else {
        reply.error(Errno::ERANGE);
    }
}

fn nanoseconds(t: TimeOrNow) -> i64 {
    let t = match t {
        TimeOrNow::SpecificTime(t) => t,
        TimeOrNow::Now => SystemTime::now(),
    };
    match t.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(d) => i64::try_from(d.as_nanos()).unwrap_or(i64::MAX),
        Err(e) => -i64::try_from(e.duration().as_nanos()).unwrap_or(i64::MAX),
    }
}

impl Adapter {
    /// Over a file system.
    #[must_use]
    pub fn new(fs: Arc<FileSystem>, context: AdapterContext) -> Self {
        Self {
            virtual_files: VirtualFiles::new(context.status.clone()),
            opener: Arc::new(Opener {
                fs: fs.clone(),
                support: Arc::default(),
                told: Mutex::default(),
            }),
            fs,
            context,
        }
    }

    /// What the kernel let us have; known once the session has begun.
    #[must_use]
    pub fn support(&self) -> Arc<Mutex<KernelSupport>> {
        self.opener.support.clone()
    }

    /// Runs a call as a task, then replies.
    fn spawn<T: Send + 'static>(
        &self,
        request: &Request,
        what: &'static str,
        ino: INodeNo,
        call: impl Future<Output = Result<T, FsError>> + Send + 'static,
        reply: impl FnOnce(Result<T, FsError>) + Send + 'static,
    ) {
        let caller = request.pid();
        let (stop, fs) = (self.context.stop.clone(), self.fs.clone());
        let task = async move {
            let r = tokio::select! {
                r = call => r,
                () = interrupt::signalled(caller) => Err(FsError::Interrupted),
                () = stop.cancelled() => {
                    Err(FsError::Cache(kspeed_cache::CacheError::ShuttingDown))
                }
            };
            if let Err(e) = &r {
                note(&fs, e, what, ino.0);
            }
            reply(r);
        };
        self.context.tasks.spawn_on(task, &self.context.runtime);
    }

    /// Runs a handler so that a panic costs one request, not a thread.
    fn guarded(&self, what: &str, handler: impl FnOnce()) {
        self.fs.stats().requests.fetch_add(1, Ordering::Relaxed);
        if catch_unwind(AssertUnwindSafe(handler)).is_err() {
            tracing::error!(what, "a handler panicked; the request was answered with EIO");
        }
    }

    /// Calls `add` with each entry that a directory reader is to get: inode,
    /// next offset, name, entry; it returns true when the reply is full.
    fn list(
        &self,
        ino: Ino,
        handle: HandleId,
        offset: u64,
        lookups: bool,
        add: &mut dyn FnMut(u64, &OsStr, &Entry) -> bool,
    ) -> Result<(), FsError> {
        let this = self.fs.attr(ino)?;
        if offset == 0 && add(1, OsStr::new("."), &this) {
            return Ok(());
        }
        if offset <= 1 {
            let mut parent = this;
            parent.attr.ino = self.fs.parent(ino);
            if add(2, OsStr::new(".."), &parent) {
                return Ok(());
            }
        }
        let from = offset.saturating_sub(DOTS);
        self.fs.read_dir(ino, handle, from, lookups, &mut |name, e, next| {
            use std::os::unix::ffi::OsStrExt;
            !add(next + DOTS, OsStr::from_bytes(name), &e)
        })
    }
}

impl Filesystem for Adapter {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let mut want = vec![
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_MAX_PAGES,
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_NO_OPEN_SUPPORT,
        ];
        if !self.fs.options().read_only {
            // Names are primed on read-only mounts always, else as the kernel
            // sees fit.
            want.push(InitFlags::FUSE_READDIRPLUS_AUTO);
            // Else the kernel asks for the file's capabilities before each write,
            // also by passthrough: a round trip for each. The bits that are to be
            // cleared then mean nothing here, as the mount is nosuid.
            want.push(InitFlags::FUSE_HANDLE_KILLPRIV_V2);
        }
        for flag in want {
            let _ = config.add_capabilities(flag);
        }
        let passthrough = self.context.passthrough
            && !self.fs.options().read_only
            && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
            && config.set_max_stack_depth(1).is_ok();
        // More than the kernel offers comes back as what it offers.
        if let Err(most) = config.set_max_readahead(MAX_REQUEST_BYTES) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_write(MAX_REQUEST_BYTES);
        let _ = config.set_max_background(MAX_BACKGROUND);
        let v = config.kernel_abi();
        *self.opener.support.lock() =
            KernelSupport { passthrough, protocol: format!("{}.{}", v.0, v.1) };
        Ok(())
    }

    fn lookup(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.guarded("lookup", || {
            let fs = &self.fs;
            if let Some(r) = self.virtual_files.lookup(parent.0, name) {
                return reply_entry(fs, reply, r);
            }
            if let Some(r) = fs.lookup_now(parent.0, name_bytes(name)) {
                return reply_entry(fs, reply, r);
            }
            let (fs, name) = (fs.clone(), name_bytes(name).to_vec());
            let after = fs.clone();
            self.spawn(
                req,
                "lookup",
                parent,
                async move { fs.within(fs.lookup(parent.0, &name)).await },
                move |r| reply_entry(&after, reply, r),
            );
        });
    }

    fn forget(&self, _req: &Request, ino: INodeNo, nlookup: u64) {
        self.fs.forget(ino.0, nlookup);
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        self.guarded("getattr", || {
            let r = self.virtual_files.attr(ino.0).unwrap_or_else(|| self.fs.attr(ino.0));
            reply_attr(&self.fs, reply, r);
        });
    }

    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.guarded("setattr", || {
            let fs = self.fs.clone();
            let set = Attributes {
                mode: mode.map(|m| m & 0o7777),
                uid,
                gid,
                mtime_ns: mtime.map(nanoseconds),
            };
            let after = fs.clone();
            self.spawn(
                req,
                "setattr",
                ino,
                async move {
                    let mut entry = None;
                    if let Some(size) = size {
                        entry = Some(fs.truncate(ino.0, fh.map(|h| h.0), size).await?);
                    }
                    if set != Attributes::default() {
                        entry = Some(fs.set_attributes(ino.0, set).await?);
                    }
                    match entry {
                        Some(e) => Ok(e),
                        None => fs.attr(ino.0),
                    }
                },
                move |r| reply_attr(&after, reply, r),
            );
        });
    }

    fn readlink(&self, req: &Request, ino: INodeNo, reply: ReplyData) {
        self.guarded("readlink", || {
            let fs = self.fs.clone();
            self.spawn(
                req,
                "readlink",
                ino,
                async move { fs.within(fs.read_link(ino.0)).await },
                move |r| match r {
                    Ok(target) => reply.data(&target),
                    Err(e) => reply.error(errno(&e)),
                },
            );
        });
    }

    fn mkdir(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        self.guarded("mkdir", || {
            let (fs, name) = (self.fs.clone(), name_bytes(name).to_vec());
            let by = maker(req, mode, umask);
            let after = fs.clone();
            self.spawn(
                req,
                "mkdir",
                parent,
                async move { fs.mkdir(parent.0, &name, by).await },
                move |r| reply_entry(&after, reply, r),
            );
        });
    }

    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.guarded("unlink", || {
            let (fs, name) = (self.fs.clone(), name_bytes(name).to_vec());
            self.spawn(
                req,
                "unlink",
                parent,
                async move { fs.unlink(parent.0, &name).await },
                move |r| reply_empty(reply, r),
            );
        });
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.guarded("rmdir", || {
            let (fs, name) = (self.fs.clone(), name_bytes(name).to_vec());
            self.spawn(
                req,
                "rmdir",
                parent,
                async move { fs.rmdir(parent.0, &name).await },
                move |r| reply_empty(reply, r),
            );
        });
    }

    fn symlink(
        &self,
        _req: &Request,
        _parent: INodeNo,
        _link_name: &OsStr,
        _target: &Path,
        reply: ReplyEntry,
    ) {
        reply.error(Errno::EPERM);
    }

    fn link(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _newparent: INodeNo,
        _newname: &OsStr,
        reply: ReplyEntry,
    ) {
        reply.error(Errno::EPERM);
    }

    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        self.guarded("rename", || {
            if flags.intersects(RenameFlags::RENAME_EXCHANGE | RenameFlags::RENAME_WHITEOUT) {
                return reply.error(Errno::EINVAL);
            }
            let no_replace = flags.contains(RenameFlags::RENAME_NOREPLACE);
            let (fs, from, to) =
                (self.fs.clone(), name_bytes(name).to_vec(), name_bytes(newname).to_vec());
            self.spawn(
                req,
                "rename",
                parent,
                async move { fs.rename(parent.0, &from, newparent.0, &to, no_replace).await },
                move |r| reply_empty(reply, r),
            );
        });
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.guarded("open", || {
            if self.fs.options().read_only {
                // No-open: the kernel asks never again, and every later open
                // costs no request.
                return reply.error(Errno::ENOSYS);
            }
            if self.virtual_files.attr(ino.0).is_some() {
                return reply.opened(FileHandle(0), FopenFlags::FOPEN_NOFLUSH);
            }
            if flags.acc_mode() == OpenAccMode::O_RDONLY {
                return match self.fs.open_read(ino.0) {
                    Ok(o) => self.opener.reply_opened(ino, &o, reply),
                    Err(e) => {
                        note(&self.fs, &e, "open", ino.0);
                        reply.error(errno(&e));
                    }
                };
            }
            let truncate = flags.0 & libc::O_TRUNC != 0;
            let this = self.opener.clone();
            let fs = self.fs.clone();
            self.spawn(
                req,
                "open",
                ino,
                async move { fs.open_write(ino.0, truncate).await },
                move |r| match r {
                    Ok(o) => this.reply_opened(ino, &o, reply),
                    Err(e) => reply.error(errno(&e)),
                },
            );
        });
    }

    fn read(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.guarded("read", || {
            if let Some(b) = self.virtual_files.read(ino.0, offset, size as usize) {
                return reply.data(&b);
            }
            let readable = match self.fs.readable(ino.0, fh.0) {
                Ok(r) => r,
                Err(e) => return reply.error(errno(&e)),
            };
            let (fs, len) = (self.fs.clone(), size as usize);
            let answer = move |r: Result<&[u8], FsError>| match r {
                Ok(b) => reply.data(b),
                Err(e) => {
                    note(&fs, &e, "read", ino.0);
                    reply.error(errno(&e));
                }
            };
            let Err(answer) = self.fs.read_now(ino.0, &readable, offset, len, answer) else {
                return;
            };
            let crate::fs::Readable::Object(object) = readable else {
                return answer(Err(FsError::BadHandle));
            };
            let (fs, caller, stop) = (self.fs.clone(), req.pid(), self.context.stop.clone());
            // Not `spawn`: the bytes are answered from where they lie.
            let task = async move {
                let mut answer = Some(answer);
                let mut reply = |r: Result<&[u8], FsError>| {
                    if let Some(a) = answer.take() {
                        a(r);
                    }
                };
                let ended = {
                    let read = fs.read_patiently(ino.0, &object, offset, len, &mut reply);
                    tokio::select! {
                        () = read => None,
                        () = interrupt::signalled(caller) => Some(FsError::Interrupted),
                        () = stop.cancelled() => {
                            Some(FsError::Cache(kspeed_cache::CacheError::ShuttingDown))
                        }
                    }
                };
                if let Some(e) = ended {
                    reply(Err(e));
                }
            };
            self.context.tasks.spawn_on(task, &self.context.runtime);
        });
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.guarded("write", || match self.fs.write(fh.0, offset, data) {
            Ok(n) => reply.written(n),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn flush(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.guarded("flush", || {
            if self.fs.options().read_only {
                return reply.error(Errno::ENOSYS);
            }
            self.flushed(req, ino, fh, false, reply);
        });
    }

    fn fsync(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.guarded("fsync", || self.flushed(req, ino, fh, true, reply));
    }

    fn release(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.guarded("release", || {
            if self.virtual_files.attr(ino.0).is_some() {
                return reply.ok();
            }
            if self.fs.is_plain(fh.0) {
                self.fs.release_now(ino.0, fh.0);
                return reply.ok();
            }
            let fs = self.fs.clone();
            self.spawn(
                req,
                "release",
                ino,
                async move {
                    fs.release(ino.0, fh.0).await;
                    Ok(())
                },
                move |r| reply_empty(reply, r),
            );
        });
    }

    fn opendir(&self, req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.guarded("opendir", || {
            if self.virtual_files.attr(ino.0).is_some() {
                return reply.opened(FileHandle(0), FopenFlags::empty());
            }
            let this = self.opener.clone();
            if let Some(h) = self.fs.open_dir_now(ino.0) {
                return this.reply_dir(ino, h, reply);
            }
            let fs = self.fs.clone();
            self.spawn(
                req,
                "opendir",
                ino,
                async move { fs.within(fs.open_dir(ino.0)).await },
                move |r| match r {
                    Ok(h) => this.reply_dir(ino, h, reply),
                    Err(e) => reply.error(errno(&e)),
                },
            );
        });
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        self.guarded("readdir", || {
            if self.virtual_files.attr(ino.0).is_some() {
                self.virtual_files.list(offset, &mut |n, i, kind, name| {
                    reply.add(INodeNo(i), n, kind_of(kind), name)
                });
                return reply.ok();
            }
            let r = self.list(ino.0, fh.0, offset, false, &mut |next, name, e| {
                reply.add(INodeNo(e.attr.ino), next, kind_of(e.attr.kind), name)
            });
            match r {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        self.guarded("readdirplus", || {
            if self.virtual_files.attr(ino.0).is_some() {
                return reply.error(Errno::ENOSYS);
            }
            let options = self.fs.options();
            let r = self.list(ino.0, fh.0, offset, true, &mut |next, name, e| {
                let attr = file_attr(options, &e.attr);
                reply.add(INodeNo(e.attr.ino), next, name, &e.ttl, &attr, Generation(0))
            });
            match r {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn releasedir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.fs.release_dir(fh.0);
        reply.ok();
    }

    fn fsyncdir(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.guarded("fsyncdir", || {
            let fs = self.fs.clone();
            self.spawn(req, "fsyncdir", ino, async move { fs.sync_names().await }, move |r| {
                reply_empty(reply, r);
            });
        });
    }

    fn fallocate(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.guarded("fallocate", || {
            reply_empty(reply, self.fs.fallocate(fh.0, offset, length, mode));
        });
    }

    fn lseek(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        self.guarded("lseek", || {
            let r = match u64::try_from(offset) {
                Ok(o) => self.fs.seek(ino.0, fh.0, o, whence),
                Err(_) => Err(FsError::Invalid("a negative offset")),
            };
            match r {
                Ok(at) => reply.offset(i64::try_from(at).unwrap_or(i64::MAX)),
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    /// No file is a terminal, which is what Python asks at each open.
    fn ioctl(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let (total, free) = self.fs.space();
        let b = u64::from(BLOCK_BYTES);
        let files = self.fs.namespace().inodes();
        reply.statfs(
            total / b,
            free / b,
            free / b,
            files,
            u64::MAX / 2,
            BLOCK_BYTES,
            255,
            BLOCK_BYTES,
        );
    }

    fn setxattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        _flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        self.guarded("setxattr", || {
            let r = match name.to_str() {
                Some(n) => self.fs.set_xattr(ino.0, n, value),
                None => Err(FsError::NoAttribute),
            };
            reply_empty(reply, r);
        });
    }

    fn getxattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.guarded("getxattr", || {
            match name
                .to_str()
                .ok_or(FsError::NoAttribute)
                .and_then(|n| self.fs.get_xattr(ino.0, n))
            {
                Ok(v) => reply_xattr(reply, size, &v),
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn listxattr(&self, _req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.guarded("listxattr", || {
            let names = self.fs.list_xattr(ino.0);
            let list: Vec<u8> = names.iter().flat_map(|n| n.bytes().chain([0])).collect();
            reply_xattr(reply, size, &list);
        });
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        self.guarded("create", || {
            let (fs, name) = (self.fs.clone(), name_bytes(name).to_vec());
            let this = self.opener.clone();
            let exclusive = flags & libc::O_EXCL != 0;
            let by = maker(req, mode, umask);
            self.spawn(
                req,
                "create",
                parent,
                async move { fs.create(parent.0, &name, exclusive, by).await },
                move |r| {
                    let (e, o) = match r {
                        Ok(r) => r,
                        Err(e) => return reply.error(errno(&e)),
                    };
                    let attr = file_attr(this.fs.options(), &e.attr);
                    let fh = FileHandle(o.handle);
                    let none = FopenFlags::empty();
                    let through = this.settle(INodeNo(e.attr.ino), &o, |f| reply.open_backing(f));
                    match through.as_ref().and_then(|r| r.downcast_ref::<BackingId>()) {
                        Some(id) => {
                            reply.created_passthrough(&e.ttl, &attr, Generation(0), fh, none, id);
                        }
                        None => reply.created(&e.ttl, &attr, Generation(0), fh, none),
                    }
                },
            );
        });
    }
}

impl Adapter {
    fn flushed(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        is_sync: bool,
        reply: ReplyEmpty,
    ) {
        if !self.fs.needs_flush(fh.0) {
            return reply.ok();
        }
        let fs = self.fs.clone();
        self.spawn(req, "flush", ino, async move { fs.flush(fh.0, is_sync).await }, move |r| {
            reply_empty(reply, r);
        });
    }
}

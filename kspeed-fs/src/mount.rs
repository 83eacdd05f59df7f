//! The composition root: opens the cache, builds each mount from its parts, runs
//! until the mounts are gone, and takes everything down in order.
//!
//! Shutdown order: no new requests (the kernel's session ends) → tasks of
//! requests → pipeline → cache → runtime. After it no task lives.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use kspeed_cache::origin::{Origin, PosixOrigin, RetryPolicy, S3Origin, layered};
use kspeed_cache::{Cache, CacheConfig, best_io};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{MountConfig, ProcessConfig, Source};
use crate::dataset::Parts;
use crate::fs::{FileSystem, FsOptions};
use crate::fuse::{Adapter, AdapterContext, KernelSupport, StatusText};
use crate::namespace::{self, INODE_BYTES, Live, LiveConfig, Namespace, Snapshot, SnapshotIndex};
use crate::pipeline::Pipeline;
use crate::push::Pusher;
use crate::telemetry::{MountStatus, ProcessStatus, prometheus};
use crate::writeback::{self, Ack, Writeback, WritebackConfig, WritebackError};

/// Session threads: more than cores, since one may wait for the local disk.
const SESSION_THREADS: usize = 8;
/// Prefetches in flight for all mounts of the process: enough that small files
/// at 20 ms each keep a fast store busy.
const MAX_PREFETCHES: usize = 224;
/// What the kernel's table of mounts shows before the source: by it our commands
/// find our mounts. (The FUSE library does not set the subtype of mounts that it
/// makes without fusermount3.)
pub const FS_NAME: &str = "kspeed:";
/// After SIGTERM the mounts are detached, and who uses them has this long to end.
const GRACE: Duration = Duration::from_secs(5);
/// At the end uploads are waited for as long as one ends within this time.
const DRAIN_PATIENCE: Duration = Duration::from_secs(20);

/// Largest readahead the kernel is asked for, in KiB: one 4 MiB request.
const READ_AHEAD_KB: u32 = 4096;

/// Why a mount failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The cache directory.
    #[error(transparent)]
    Disk(#[from] kspeed_cache::tier::DiskError),
    /// The origin.
    #[error("{source_text}: {source}")]
    Origin {
        /// As the user named it.
        source_text: String,
        /// The cause.
        source: kspeed_cache::origin::OriginError,
    },
    /// The snapshot index.
    #[error("snapshot of {source_text}: {source}")]
    Snapshot {
        /// As the user named it.
        source_text: String,
        /// The cause.
        source: namespace::SnapshotError,
    },
    /// The kernel refused.
    #[error("{mountpoint}: {source}; {hint}")]
    Kernel {
        /// Where.
        mountpoint: PathBuf,
        /// The cause.
        source: std::io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// What is written.
    #[error(transparent)]
    Writeback(#[from] WritebackError),
    /// Something local.
    #[error("{what}: {source}")]
    Io {
        /// What.
        what: String,
        /// The cause.
        source: std::io::Error,
    },
}

/// One mount that serves.
pub struct Mounted {
    /// Its configuration.
    pub config: MountConfig,
    /// Its file system.
    pub fs: Arc<FileSystem>,
    /// What the kernel let it have.
    pub support: Arc<Mutex<KernelSupport>>,
    session: Option<BackgroundSession>,
    stop: CancellationToken,
    tasks: TaskTracker,
    uploader: Option<Uploader>,
}

/// The task that makes the origin as it is wished.
struct Uploader {
    stop: CancellationToken,
    task: Mutex<Option<tokio::task::JoinHandle<()>>>,
}

/// A process: one cache, its mounts.
pub struct Process {
    /// Its configuration.
    pub config: ProcessConfig,
    /// The cache.
    pub cache: Cache,
    /// The mounts, in the order in which they were made.
    pub mounts: Mutex<Vec<Arc<Mounted>>>,
    runtime: Handle,
}

/// Opens an origin with its layers.
///
/// # Errors
/// It can't be reached, or refuses us.
pub async fn open_origin(config: &MountConfig) -> Result<Arc<dyn Origin>, MountError> {
    let err = |source| MountError::Origin { source_text: config.source_text.clone(), source };
    let inner: Arc<dyn Origin> = match &config.source {
        Source::S3(c) => Arc::new(S3Origin::new(c.clone()).await),
        Source::Posix(dir) => Arc::new(PosixOrigin::new(dir).map_err(err)?),
    };
    // Retries end before the caller's deadline does.
    let policy = RetryPolicy {
        deadline: config.io_timeout.mul_f64(0.9).max(Duration::from_millis(900)),
        ..RetryPolicy::default()
    };
    Ok(layered(inner, policy, config.max_requests, config.max_fetch_rate))
}

impl Process {
    /// Opens the cache.
    ///
    /// # Errors
    /// A cache directory can't be used.
    pub fn start(config: ProcessConfig, runtime: Handle) -> Result<Arc<Self>, MountError> {
        let cache = Cache::open(
            CacheConfig {
                disks: config.disks.clone(),
                ram_bytes: config.ram_bytes,
                buffer_bytes: config.buffer_bytes,
                block_bytes: config.block_bytes,
                max_prefetches: MAX_PREFETCHES,
            },
            &best_io(),
            runtime.clone(),
        )?;
        Ok(Arc::new(Self { config, cache, mounts: Mutex::default(), runtime }))
    }

    /// Mounts; returns when the kernel can ask. `share`: between how many mounts
    /// the memory for names is divided; `progress` is told the keys indexed.
    ///
    /// # Errors
    /// The origin, the index or the kernel refuses.
    pub async fn mount(
        self: &Arc<Self>,
        config: MountConfig,
        share: u64,
        progress: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<Arc<Mounted>, MountError> {
        let origin = open_origin(&config).await?;
        let namespace = self.namespace(&config, &origin, share, progress).await?;
        let pusher = if config.read_only {
            let p = Pusher::new()
                .map_err(|source| MountError::Io { what: "push thread".into(), source })?;
            Some(Arc::new(p))
        } else {
            None
        };
        let options = FsOptions {
            read_only: config.read_only,
            negative_ttl: config.negative_ttl,
            io_timeout: config.io_timeout,
            uid: config.uid,
            gid: config.gid,
            file_mode: config.file_mode,
            dir_mode: config.dir_mode,
        };
        let parts = Parts {
            names: namespace.clone(),
            cache: self.cache.clone(),
            origin: origin.clone(),
            pusher: pusher.clone(),
            runtime: self.runtime.clone(),
            memory_bytes: self.config.orders_bytes / share.max(1),
            share: config.scan_share,
        };
        let pipeline = Pipeline::new(config.predict, parts);
        let writeback = self.writeback(&config, &origin, &namespace, share)?;
        let uploader = writeback.as_ref().map(|w| {
            let stop = CancellationToken::new();
            let task = self.runtime.spawn(w.clone().run(stop.clone()));
            Uploader { stop, task: Mutex::new(Some(task)) }
        });
        let fs =
            FileSystem::new(namespace, self.cache.clone(), origin, pipeline, writeback, options);
        let fs = Arc::new(fs);
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let adapter = Adapter::new(
            fs.clone(),
            AdapterContext {
                runtime: self.runtime.clone(),
                tasks: tasks.clone(),
                stop: stop.clone(),
                status: Arc::new(Texts(Arc::downgrade(self))),
                passthrough: config.passthrough,
            },
        );
        let support = adapter.support();
        let session = self.session(&config, adapter).await?;
        if let Some(p) = &pusher {
            p.connect(session.notifier());
        }
        connect_invalidation(&fs, &session);
        raise_readahead(&config.mountpoint);
        let mounted = Arc::new(Mounted {
            config,
            fs,
            support,
            session: Some(session),
            stop,
            tasks,
            uploader,
        });
        self.mounts.lock().push(mounted.clone());
        Ok(mounted)
    }

    /// The write-back of a mount that is written to, with what a former process
    /// left.
    fn writeback(
        &self,
        config: &MountConfig,
        origin: &Arc<dyn Origin>,
        namespace: &Namespace,
        share: u64,
    ) -> Result<Option<Arc<Writeback>>, MountError> {
        let Namespace::Live(live) = namespace else { return Ok(None) };
        if config.read_only {
            return Ok(None);
        }
        let Ok(stage_dir) = self.cache.stage_dir() else { return Ok(None) };
        let dir = writeback::dir_of(&stage_dir, origin.name());
        let err = |source| MountError::Io { what: stage_dir.display().to_string(), source };
        for found in writeback::find_all(&stage_dir).map_err(err)? {
            let files = found.journal.as_ref().map_or(0, |j| j.wishes.len());
            if found.origin == origin.name() || found.dir == dir || files == 0 {
                continue;
            }
            if config.recover {
                writeback::take_over(&found.dir, &dir).map_err(err)?;
                tracing::warn!(from = found.origin, files, "taken over");
            } else if share == 1 {
                return Err(
                    WritebackError::Foreign { dir: found.dir, files, other: found.origin }.into()
                );
            }
        }
        let half = self.cache.disks().iter().map(|d| d.max_bytes).sum::<u64>() / 2;
        let settings = WritebackConfig {
            dir,
            ack: config.ack,
            sync_on_close: config.sync_on_close,
            delay: match config.ack {
                Ack::Local => config.upload_delay,
                Ack::Origin => Duration::ZERO,
            },
            max_bytes: config.stage_bytes.unwrap_or(half),
            room_timeout: config.io_timeout,
        };
        let w = Writeback::open(settings, origin.clone(), self.cache.clone(), live.clone())?;
        Ok(Some(w))
    }

    async fn namespace(
        &self,
        config: &MountConfig,
        origin: &Arc<dyn Origin>,
        share: u64,
        progress: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<Namespace, MountError> {
        if config.snapshot {
            return self.snapshot(config, origin, progress).await;
        }
        // Nothing was asked of the origin so far: wrong names and credentials
        // are told now, not at the first ls.
        let probe = kspeed_cache::origin::ListRequest {
            max_keys: 1,
            delimited: true,
            ..Default::default()
        };
        origin.list(&probe).await.map_err(|source| MountError::Origin {
            source_text: config.source_text.clone(),
            source,
        })?;
        let bytes = self.config.names_bytes / share.max(1);
        let live = Live::new(
            origin.clone(),
            LiveConfig {
                ttl: config.metadata_ttl,
                negative_ttl: config.negative_ttl,
                max_inodes: bytes / 2 / INODE_BYTES,
                listing_bytes: bytes / 2,
            },
        );
        Ok(Namespace::Live(Arc::new(live)))
    }

    async fn snapshot(
        &self,
        config: &MountConfig,
        origin: &Arc<dyn Origin>,
        progress: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<Namespace, MountError> {
        let err = |source| MountError::Snapshot { source_text: config.source_text.clone(), source };
        let dir = self.config.disks.first().map_or_else(std::env::temp_dir, |d| d.dir.clone());
        let name = format!("{:032x}.idx", xxhash_rust::xxh3::xxh3_128(origin.name().as_bytes()));
        let path = dir.join("snapshots").join(name);
        if let Ok(index) = SnapshotIndex::open(&path, origin.name()) {
            match namespace::is_stale(origin, &index).await {
                Ok(false) => return Ok(Namespace::Snapshot(Arc::new(Snapshot::new(index)))),
                Ok(true) => tracing::info!("the snapshot index is stale: it is built anew"),
                Err(e) => {
                    // Better old names than none.
                    tracing::warn!(error = %e, "the snapshot index could not be checked; it is used as it is");
                    return Ok(Namespace::Snapshot(Arc::new(Snapshot::new(index))));
                }
            }
        }
        let index = namespace::build(origin, &path, progress).await.map_err(err)?;
        Ok(Namespace::Snapshot(Arc::new(Snapshot::new(index))))
    }

    async fn session(
        &self,
        config: &MountConfig,
        adapter: Adapter,
    ) -> Result<BackgroundSession, MountError> {
        let mut options = vec![
            MountOption::FSName(format!("{FS_NAME}{}", config.source_text)),
            MountOption::NoAtime,
            MountOption::NoDev,
            MountOption::NoSuid,
        ];
        if config.read_only {
            options.push(MountOption::RO);
        }
        if config.allow_other || !config.read_only {
            // A dataset mount that only its owner can look into has nothing to
            // check at each open.
            options.push(MountOption::DefaultPermissions);
        }
        let mut c = Config::default();
        c.mount_options = options;
        c.acl = if config.allow_other { SessionACL::All } else { SessionACL::Owner };
        c.n_threads = Some(SESSION_THREADS);
        c.clone_fd = true;
        let mountpoint = config.mountpoint.clone();
        let err = |source: std::io::Error| MountError::Kernel {
            hint: mount_hint(&source),
            mountpoint: config.mountpoint.clone(),
            source,
        };
        // Mounting waits for the kernel's handshake.
        tokio::task::spawn_blocking(move || Session::new(adapter, mountpoint, &c)?.spawn())
            .await
            .map_err(|e| err(std::io::Error::other(e)))?
            .map_err(err)
    }

    /// Detaches all mounts and waits for those who still use them, but not long:
    /// what waits for a store that hangs gets an error when the process ends.
    pub async fn detach(&self) {
        self.unmount_all();
        if tokio::time::timeout(GRACE, self.wait()).await.is_err() {
            tracing::warn!("files are still open; they fail from now on");
        }
    }

    /// Waits until every mount's session has ended.
    pub async fn wait(&self) {
        loop {
            let running = self
                .mounts
                .lock()
                .iter()
                .any(|m| m.session.as_ref().is_some_and(|s| !s.guard.is_finished()));
            if !running {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Unmounts everything, busy or not.
    pub fn unmount_all(&self) {
        for m in self.mounts.lock().iter() {
            if let Err(e) = unmount(&m.config.mountpoint, true) {
                tracing::warn!(error = %e, mountpoint = %m.config.mountpoint.display(), "could not unmount");
            }
        }
    }

    /// Waits until all that was written is in the origin, or nothing gets on any
    /// more; what is left is taken up at the next start.
    pub async fn drain(&self) {
        let mounts: Vec<_> = self.mounts.lock().clone();
        for m in mounts {
            let Some(w) = m.fs.writeback() else { continue };
            let tell = |changes, bytes| tracing::info!(changes, bytes, "not uploaded yet");
            if let Err(e) = w.drain(b"", Some(DRAIN_PATIENCE), &tell).await {
                tracing::warn!(error = %e, "what is not uploaded is kept in the cache directory, for the next mount of this source");
            }
        }
    }

    /// Ends all tasks. Returns how many live on, which is none.
    pub async fn shutdown(&self) -> usize {
        let mounts: Vec<_> = std::mem::take(&mut *self.mounts.lock());
        for m in &mounts {
            m.stop.cancel();
            m.tasks.close();
            m.tasks.wait().await;
            m.fs.pipeline.shutdown().await;
            if let Some(u) = &m.uploader {
                u.stop.cancel();
                let task = u.task.lock().take();
                if let Some(t) = task {
                    let _ = t.await;
                }
            }
        }
        self.cache.shutdown().await;
        self.cache.tasks() + mounts.iter().map(|m| m.tasks.len()).sum::<usize>()
    }

    /// The mount at this path.
    #[must_use]
    pub fn find(&self, mountpoint: &Path) -> Option<Arc<Mounted>> {
        self.mounts.lock().iter().find(|m| m.config.mountpoint == mountpoint).cloned()
    }

    /// What `kspeed status` shows.
    #[must_use]
    pub fn status(&self) -> ProcessStatus {
        ProcessStatus::of(self)
    }
}

struct Texts(std::sync::Weak<Process>);

impl StatusText for Texts {
    fn status(&self) -> String {
        let Some(p) = self.0.upgrade() else { return "{}".into() };
        serde_json::to_string_pretty(&p.status())
            .unwrap_or_else(|e| format!("{{\"error\":\"{e}\"}}"))
            + "\n"
    }

    fn stats(&self) -> String {
        self.0.upgrade().map(|p| prometheus(&p.status())).unwrap_or_default()
    }
}

impl MountStatus {
    /// A mount's state now.
    #[must_use]
    pub fn of(m: &Mounted) -> Self {
        Self::collect(&m.config, &m.fs, &m.support.lock())
    }
}

fn mount_hint(e: &std::io::Error) -> &'static str {
    match e.raw_os_error() {
        Some(libc::ENOENT) => "the mountpoint must be an existing directory",
        Some(libc::ENODEV) => "the kernel has no FUSE; load it with `modprobe fuse`",
        Some(libc::EPERM | libc::EACCES) => {
            "mount as root, or install fuse3 so that fusermount3 mounts for you"
        }
        Some(libc::EBUSY) => "something is mounted there",
        Some(libc::ENOTCONN) => "a dead mount is there: `umount` it first",
        _ => "see `kspeed doctor`",
    }
}

/// Names and pages that the origin has changed are dropped by the kernel.
fn connect_invalidation(fs: &Arc<FileSystem>, session: &BackgroundSession) {
    use std::os::unix::ffi::OsStrExt;
    let notifier = session.notifier();
    let (tell, told) = std::sync::mpsc::sync_channel::<(u64, Box<[u8]>)>(4096);
    // A thread of its own: the kernel may wait for a lookup of the same name,
    // which the session threads answer.
    let spawned = std::thread::Builder::new().name("kspeed-inval".into()).spawn(move || {
        for (parent, name) in told {
            let _ =
                notifier.inval_entry(fuser::INodeNo(parent), std::ffi::OsStr::from_bytes(&name));
        }
    });
    if spawned.is_err() {
        return;
    }
    let send = {
        let tell = tell.clone();
        // A full queue: the names expire by themselves.
        move |parent: u64, name: &[u8]| drop(tell.try_send((parent, name.into())))
    };
    if let Namespace::Live(l) = fs.namespace() {
        l.on_stale(Box::new(send.clone()));
    }
    fs.on_stale(Box::new(send));
}

/// Lets the kernel ask for 4 MiB at once; without the right to, requests stay
/// at 128 KiB, which `kspeed doctor` tells.
fn raise_readahead(mountpoint: &Path) {
    let Ok(s) = rustix::fs::stat(mountpoint) else { return };
    let (major, minor) = (rustix::fs::major(s.st_dev), rustix::fs::minor(s.st_dev));
    let path = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    if let Err(e) = std::fs::write(&path, READ_AHEAD_KB.to_string()) {
        tracing::info!(error = %e, path, "readahead stays small");
    }
}

/// Unmounts a mountpoint; `lazily` also when it is busy.
///
/// # Errors
/// The kernel or fusermount3 refuses.
pub fn unmount(mountpoint: &Path, lazily: bool) -> std::io::Result<()> {
    use rustix::mount::UnmountFlags;
    let flags = if lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(mountpoint, flags) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::PERM) => {
            let mut c = std::process::Command::new("fusermount3");
            c.arg("-u");
            if lazily {
                c.arg("-z");
            }
            let out = c.arg(mountpoint).output()?;
            if out.status.success() {
                Ok(())
            } else {
                Err(std::io::Error::other(String::from_utf8_lossy(&out.stderr).trim().to_owned()))
            }
        }
        Err(e) => Err(e.into()),
    }
}

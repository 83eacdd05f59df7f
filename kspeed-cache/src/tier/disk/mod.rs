//! One cache directory on a local disk.
//!
//! ```text
//! CACHE_DIR/
//!   lock                     flock of the one process that uses it; its pid
//!   format                   "kspeed-cache 1\n"
//!   large/ab/<id>.data       sparse: the object's bytes at their own offsets
//!   large/ab/<id>.meta       header, then 8 bytes a block: XXH3, 0 = absent
//!   small/<n>.seg            packed records of objects under 1 MiB
//!   small/<n>.idx            index of a sealed segment
//!   pins                     ids that eviction spares, a line each
//!   stage/                   files being written through a mount
//! ```
//!
//! Assumptions about the disk: it may lose or tear any write that was not
//! synced, in any order, and flip bits at rest. Nothing is synced, since all
//! that is kept can be fetched again: instead a block is served only after its
//! checksum was checked by this process, either when it was written or at the
//! first touch after a start (I3). Small objects are checked at each read.
//!
//! Lock order: policy → sizes → expected; policy → large (files map) → a file's gate. Nothing is held
//! across I/O but a file's gate for reading.

mod large;
mod pins;
mod small;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use rustix::fs::FlockOperation;

use large::{CHUNK_BLOCKS, LargeStore};
pub use large::{LargeFile, PassthroughFile};
use pins::Pins;
use small::SmallStore;

use super::policy::{EvictionPolicy, Expected, NextUse};
use crate::io::FileIo;
use crate::object::{Blocks, ObjectId, ObjectMeta};

const FORMAT: &str = "kspeed-cache 1\n";
/// The free space of the disk is asked for after so many bytes written.
const FREE_CHECK_BYTES: u64 = 64 << 20;
/// Eviction goes on to this many per cent of the limit, so that it runs in
/// batches.
const LOW_WATER_PERCENT: u64 = 99;
/// Small objects from this size on, in bytes, go one by one when their next use is
/// known: holes of less would free little of the pages that they are in.
const ALONE_MIN_BYTES: u64 = 32 << 10;
/// So many I/O errors in a row and the disk is out of service.
const MAX_ERRORS: u32 = 3;

/// How a cache directory may be used.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// The directory; created if need be.
    pub dir: PathBuf,
    /// Limit of what is cached, in bytes.
    pub max_bytes: u64,
    /// Space left free on the disk, in bytes.
    pub min_free_bytes: u64,
    /// zstd level for small objects, if they are to be compressed.
    pub compress: Option<i32>,
}

/// Why a cache directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// Another process has it.
    #[error(
        "{dir}: in use by process {pid}; give this mount its own --cache-dir, or mount both from one process (`kspeed mount --config`)"
    )]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// That process, if it told.
        pid: String,
    },
    /// Something else is in there.
    #[error("{dir}: holds another format ({found:?}); name an empty directory, or remove it")]
    Format {
        /// The directory.
        dir: PathBuf,
        /// What its format file says.
        found: String,
    },
    /// The disk fails.
    #[error("{dir}: {source}; check the disk and its permissions")]
    Io {
        /// The directory or file.
        dir: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// What eviction takes out at once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Unit {
    /// 64 blocks of a large object.
    Chunk(ObjectId, u32),
    /// A segment of small objects, but for those that go alone.
    Segment(u32),
    /// A small object whose next use is known.
    Small(ObjectId),
}

/// One cache directory.
pub struct DiskTier {
    config: DiskConfig,
    io: Arc<dyn FileIo>,
    large: LargeStore,
    small: SmallStore,
    pins: Pins,
    policy: Mutex<Box<dyn EvictionPolicy<Unit>>>,
    /// Bytes by unit, as accounted.
    sizes: Mutex<HashMap<Unit, u64>>,
    /// Next uses that are known, of what is here and of what is to come.
    expected: Mutex<HashMap<ObjectId, Expected>>,
    used: AtomicU64,
    since_free_check: AtomicU64,
    /// What `min_free_bytes` leaves us, as last asked.
    allowed: AtomicU64,
    errors: AtomicU32,
    out_of_service: AtomicBool,
    evicting: Mutex<()>,
    evicted: AtomicU64,
    _lock: File,
}

impl DiskTier {
    /// Takes the directory over and recovers what is in it.
    ///
    /// # Errors
    /// It is in use, holds something else, or its disk fails.
    pub fn open(config: DiskConfig, io: Arc<dyn FileIo>) -> Result<Self, DiskError> {
        let dir = config.dir.clone();
        let err = |source| DiskError::Io { dir: dir.clone(), source };
        fs::create_dir_all(&dir).map_err(err)?;
        let lock = lock_dir(&dir)?;
        check_format(&dir)?;
        let large = LargeStore::open(&dir).map_err(err)?;
        let small = SmallStore::open(&dir, config.compress).map_err(err)?;
        let pins = Pins::open(&dir).map_err(err)?;
        let tier = Self {
            io,
            large,
            small,
            pins,
            policy: Mutex::new(Box::new(NextUse::new())),
            sizes: Mutex::default(),
            expected: Mutex::default(),
            used: AtomicU64::new(0),
            since_free_check: AtomicU64::new(FREE_CHECK_BYTES),
            allowed: AtomicU64::new(u64::MAX),
            errors: AtomicU32::new(0),
            out_of_service: AtomicBool::new(false),
            evicting: Mutex::new(()),
            evicted: AtomicU64::new(0),
            _lock: lock,
            config,
        };
        for (id, chunk, bytes) in tier.large.stored().map_err(err)? {
            tier.account(Unit::Chunk(id, chunk), bytes);
        }
        for (segment, bytes) in tier.small.stored() {
            tier.account(Unit::Segment(segment), bytes);
        }
        tier.make_room();
        Ok(tier)
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.config.dir
    }

    /// Bytes stored.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes evicted since the start.
    #[must_use]
    pub fn evicted_bytes(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Limit as configured, in bytes.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.config.max_bytes
    }

    /// Whether it was taken out of service because the disk fails.
    #[must_use]
    pub fn is_out_of_service(&self) -> bool {
        self.out_of_service.load(Ordering::Relaxed)
    }

    /// Takes note of how an operation on this disk ended.
    fn learn<T>(&self, result: &io::Result<T>) {
        match result {
            Ok(_) => self.errors.store(0, Ordering::Relaxed),
            Err(e) if e.kind() == io::ErrorKind::StorageFull => {
                // Somebody else fills the disk: ask for its free space anew.
                self.since_free_check.store(FREE_CHECK_BYTES, Ordering::Relaxed);
                self.make_room();
            }
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {}
            Err(e) => {
                let n = self.errors.fetch_add(1, Ordering::Relaxed) + 1;
                tracing::warn!(dir = %self.dir().display(), error = %e, "the cache disk fails");
                if n >= MAX_ERRORS && !self.out_of_service.swap(true, Ordering::Relaxed) {
                    tracing::error!(
                        dir = %self.dir().display(),
                        "the cache disk is out of service; reads go on without it"
                    );
                }
            }
        }
    }

    /// The cache file of a large object; made if `create`.
    ///
    /// # Errors
    /// The disk fails.
    pub fn large(
        &self,
        id: ObjectId,
        origin: &str,
        meta: &ObjectMeta,
        blocks: Blocks,
        create: bool,
    ) -> io::Result<Option<Arc<LargeFile>>> {
        if self.is_out_of_service() {
            return Ok(None);
        }
        let r = self.large.open_object(id, origin, meta, blocks, create);
        self.learn(&r);
        r
    }

    /// Makes a file on this disk the cache file of a large object. Reads it once,
    /// for its checksums.
    ///
    /// # Errors
    /// The disk fails, or the file is not as large as the object.
    pub fn adopt(
        &self,
        id: ObjectId,
        origin: &str,
        meta: &ObjectMeta,
        blocks: Blocks,
        path: &Path,
    ) -> io::Result<()> {
        if self.is_out_of_service() {
            return Ok(());
        }
        let r = self.large.adopt(id, origin, meta, blocks, path);
        let Some(_file) = r? else { return Ok(()) };
        for chunk in 0..blocks.count().div_ceil(CHUNK_BLOCKS) {
            let first = chunk * CHUNK_BLOCKS;
            let last = (first + CHUNK_BLOCKS).min(blocks.count());
            let bytes = (first..last).map(|i| blocks.len(i) as u64).sum();
            self.account(Unit::Chunk(id, chunk), bytes);
            self.wrote(bytes);
        }
        Ok(())
    }

    /// Stores a block of a large object.
    ///
    /// # Errors
    /// The disk fails or is full.
    pub async fn put_block(&self, file: &LargeFile, block: u32, data: Bytes) -> io::Result<()> {
        let len = data.len() as u64;
        let r = file.write_block(&*self.io, block, data).await;
        self.learn(&r);
        r?;
        self.account(Unit::Chunk(file.id(), block / CHUNK_BLOCKS), len);
        self.wrote(len);
        Ok(())
    }

    /// Checks a block that a former process stored: its bytes, or none if it is
    /// bad, and then it is gone.
    ///
    /// # Errors
    /// The disk fails.
    pub async fn verify_block(&self, file: &LargeFile, block: u32) -> io::Result<Option<Bytes>> {
        let r = file.verify_block(&*self.io, block).await;
        self.learn(&r);
        r
    }

    /// Notes the use of a block, for eviction.
    pub fn touch_block(&self, file: &LargeFile, block: u32) {
        if file.is_new_touch(block / CHUNK_BLOCKS) {
            self.policy.lock().touch(&Unit::Chunk(file.id(), block / CHUNK_BLOCKS));
        }
    }

    /// A small object, checked.
    #[must_use]
    pub fn small(&self, id: ObjectId) -> Option<Bytes> {
        if self.is_out_of_service() {
            return None;
        }
        let (segment, r) = self.small.get(id)?;
        self.learn(&r);
        match r {
            Ok(Some(b)) => {
                self.policy.lock().touch(&Unit::Segment(segment));
                Some(b)
            }
            // Bad: forgotten, the caller fetches it again.
            Ok(None) | Err(_) => None,
        }
    }

    /// Whether a small object is here, without reading it.
    #[must_use]
    pub fn has_small(&self, id: ObjectId) -> bool {
        !self.is_out_of_service() && self.small.contains(id)
    }

    /// Stores a small object.
    ///
    /// # Errors
    /// The disk fails or is full.
    pub fn put_small(&self, id: ObjectId, data: &[u8]) -> io::Result<()> {
        if self.is_out_of_service() || self.small.contains(id) {
            return Ok(());
        }
        let r = self.small.put(id, data);
        self.learn(&r);
        let (segment, bytes) = r?;
        let alone = bytes >= ALONE_MIN_BYTES && self.expected.lock().contains_key(&id);
        self.account(if alone { Unit::Small(id) } else { Unit::Segment(segment) }, bytes);
        self.wrote(bytes);
        Ok(())
    }

    /// When an object of so many blocks will be used next: what is used last goes
    /// first. Remembered for when it comes.
    pub fn expect(&self, id: ObjectId, blocks: u32, next: Expected) {
        {
            let mut expected = self.expected.lock();
            match next {
                Expected::Unknown => drop(expected.remove(&id)),
                _ => drop(expected.insert(id, next)),
            }
        }
        let mut policy = self.policy.lock();
        let mut sizes = self.sizes.lock();
        for chunk in 0..blocks.div_ceil(CHUNK_BLOCKS) {
            let unit = Unit::Chunk(id, chunk);
            if sizes.contains_key(&unit) {
                policy.expect(&unit, next);
            }
        }
        let alone = Unit::Small(id);
        if !sizes.contains_key(&alone) {
            // It leaves its segment's account for one of its own.
            let Some((segment, bytes)) = self.small.place(id) else { return };
            let packed = sizes.get_mut(&Unit::Segment(segment)).filter(|n| **n >= bytes);
            let Some(packed) = packed.filter(|_| bytes >= ALONE_MIN_BYTES) else { return };
            *packed -= bytes;
            sizes.insert(alone, bytes);
            policy.insert(alone);
        }
        policy.expect(&alone, next);
    }

    /// Spares an object from eviction, or no longer.
    ///
    /// # Errors
    /// The list of pins can't be written.
    pub fn pin(&self, id: ObjectId, on: bool) -> io::Result<()> {
        self.pins.set(id, on)
    }

    /// Whether an object is spared.
    #[must_use]
    pub fn is_pinned(&self, id: ObjectId) -> bool {
        self.pins.contains(id)
    }

    /// Forgets an object at once, even one that is pinned. What a reader has
    /// open by passthrough stays readable for it.
    pub fn forget(&self, id: ObjectId) {
        let _ = self.pins.set(id, false);
        let mut freed = 0;
        {
            let mut policy = self.policy.lock();
            let mut sizes = self.sizes.lock();
            sizes.retain(|u, n| match u {
                Unit::Chunk(i, _) | Unit::Small(i) if *i == id => {
                    policy.remove(u);
                    freed += *n;
                    false
                }
                _ => true,
            });
            if let Some((segment, bytes)) = self.small.place(id)
                && freed == 0
                && let Some(n) = sizes.get_mut(&Unit::Segment(segment)).filter(|n| **n >= bytes)
            {
                *n -= bytes;
                freed = bytes;
            }
        }
        self.small.drop_object(id, None);
        self.used.fetch_sub(freed, Ordering::Relaxed);
        self.large.remove(id);
    }

    /// Directory for files being written.
    ///
    /// # Errors
    /// It can't be made.
    pub fn stage_dir(&self) -> io::Result<PathBuf> {
        let d = self.dir().join("stage");
        fs::create_dir_all(&d)?;
        Ok(d)
    }

    fn account(&self, unit: Unit, bytes: u64) {
        let mut policy = self.policy.lock();
        let mut sizes = self.sizes.lock();
        let n = sizes.entry(unit).or_insert_with(|| {
            policy.insert(unit);
            0
        });
        *n += bytes;
        if let Unit::Chunk(id, _) | Unit::Small(id) = unit
            && let Some(next) = self.expected.lock().get(&id)
        {
            policy.expect(&unit, *next);
        }
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    fn wrote(&self, bytes: u64) {
        self.since_free_check.fetch_add(bytes, Ordering::Relaxed);
        if self.used_bytes() > self.limit() {
            self.make_room();
        }
    }

    /// What may be stored now: the configured size, or less when others fill
    /// the disk.
    fn limit(&self) -> u64 {
        if self.since_free_check.load(Ordering::Relaxed) >= FREE_CHECK_BYTES {
            self.since_free_check.store(0, Ordering::Relaxed);
            if let Ok(s) = rustix::fs::statvfs(self.dir()) {
                let free = s.f_bavail * s.f_frsize;
                let allowed = (self.used_bytes() + free).saturating_sub(self.config.min_free_bytes);
                self.allowed.store(allowed, Ordering::Relaxed);
            }
        }
        self.config.max_bytes.min(self.allowed.load(Ordering::Relaxed))
    }

    /// Evicts until there is room.
    fn make_room(&self) {
        let Some(_one) = self.evicting.try_lock() else { return };
        let limit = self.limit();
        if self.used_bytes() <= limit {
            return;
        }
        let target = limit / 100 * LOW_WATER_PERCENT;
        while self.used_bytes() > target {
            let mut may_go = |u: &Unit| match u {
                Unit::Chunk(id, _) => !self.pins.contains(*id) && !self.large.is_open_through(*id),
                Unit::Small(id) => !self.pins.contains(*id),
                Unit::Segment(s) => {
                    !self.small.is_active(*s) && !self.small.holds_any(*s, &self.pins)
                }
            };
            let Some(unit) = self.policy.lock().victim(&mut may_go) else {
                tracing::warn!(dir = %self.dir().display(), "all that is cached is pinned or open: the limit is exceeded");
                return;
            };
            let bytes = self.sizes.lock().remove(&unit).unwrap_or(0);
            match unit {
                Unit::Chunk(id, chunk) => {
                    let last = !self
                        .sizes
                        .lock()
                        .keys()
                        .any(|u| matches!(u, Unit::Chunk(i, _) if *i == id));
                    if last {
                        self.large.remove(id);
                    } else {
                        self.large.drop_chunk(id, chunk);
                    }
                }
                Unit::Segment(s) => {
                    let alone = |id| self.sizes.lock().contains_key(&Unit::Small(id));
                    self.small.drop_segment(s, &alone);
                }
                Unit::Small(id) => self.small.drop_object(id, None),
            }
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            self.evicted.fetch_add(bytes, Ordering::Relaxed);
        }
    }
}

/// Makes a cache directory this process's as long as the file lives.
///
/// # Errors
/// Another process has it.
pub fn lock_dir(dir: &Path) -> Result<File, DiskError> {
    let path = dir.join("lock");
    let err = |source| DiskError::Io { dir: path.clone(), source };
    let mut f = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(err)?;
    if rustix::fs::flock(&f, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut pid = String::new();
        let _ = f.read_to_string(&mut pid);
        return Err(DiskError::InUse { dir: dir.to_path_buf(), pid: pid.trim().to_owned() });
    }
    f.set_len(0).map_err(err)?;
    writeln!(f, "{}", std::process::id()).map_err(err)?;
    Ok(f)
}

fn check_format(dir: &Path) -> Result<(), DiskError> {
    let path = dir.join("format");
    let err = |source| DiskError::Io { dir: path.clone(), source };
    match fs::read_to_string(&path) {
        Ok(s) if s == FORMAT => Ok(()),
        Ok(found) => Err(DiskError::Format { dir: dir.to_path_buf(), found }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let foreign =
                fs::read_dir(dir).map_err(err)?.filter_map(Result::ok).map(|e| e.file_name()).find(
                    |n| {
                        n != "lock" && n != "lost+found" && n != "control.sock" && n != "kspeed.log"
                    },
                );
            match foreign {
                Some(n) => Err(DiskError::Format {
                    dir: dir.to_path_buf(),
                    found: n.to_string_lossy().into_owned(),
                }),
                None => fs::write(&path, FORMAT).map_err(err),
            }
        }
        Err(e) => Err(err(e)),
    }
}

#[cfg(test)]
mod tests;

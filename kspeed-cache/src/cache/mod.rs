//! The cache as its users see it: objects whose ranges are at hand or fetched.
//!
//! A [`CachedObject`] is one version of one object. [`CachedObject::try_read`]
//! answers from RAM or disk without waiting for anything but the local disk;
//! [`CachedObject::read`] fetches what is missing, once however many ask;
//! [`CachedObject::prefetch`] does so before anybody asks. Every fetch is a
//! task of the cache, so a reader that gives up cancels nothing for others, and
//! [`Cache::shutdown`] ends and joins all of them.

mod fetch;
mod object;
mod packing;
mod stats;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use fetch::EXTENT_BYTES;
pub use object::{CachedObject, Hit};
pub use stats::{CacheStats, StatsSnapshot};

use crate::flight::Flights;
use crate::io::FileIo;
use crate::object::{ObjectId, ObjectMeta};
use crate::origin::{Origin, OriginError};
use crate::permits::Permits;
use crate::pool::Pool;
use crate::tier::{DiskConfig, DiskError, DiskTier, Expected, RamTier};
use fetch::Ready;
use packing::Packer;

/// How much the cache may use.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Cache directories; none: RAM only.
    pub disks: Vec<DiskConfig>,
    /// RAM tier, in bytes.
    pub ram_bytes: u64,
    /// Buffers of fetches in flight, in bytes. At least one extent.
    pub buffer_bytes: u64,
    /// Block of large objects, in bytes: a power of two from 64 KiB to 64 MiB.
    pub block_bytes: u64,
    /// Prefetch requests in flight at the most; demand is not counted.
    pub max_prefetches: usize,
}

/// Why a read failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CacheError {
    /// The origin failed.
    #[error(transparent)]
    Origin(#[from] OriginError),
    /// The cache shuts down.
    #[error("the cache is shutting down")]
    ShuttingDown,
    /// The local disk failed in a way that fetching again does not mend.
    #[error("cache disk: {0}")]
    Disk(Arc<io::Error>),
}

/// A cache directory, as `kspeed status` shows it.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct DiskStatus {
    /// The directory.
    pub dir: PathBuf,
    /// Bytes stored.
    pub used_bytes: u64,
    /// Limit in bytes.
    pub max_bytes: u64,
    /// Bytes evicted since the start.
    pub evicted_bytes: u64,
    /// Taken out of service because the disk fails.
    pub out_of_service: bool,
}

type BlockFlights = Flights<(ObjectId, u32), Ready, CacheError>;

pub(crate) struct Inner {
    config: CacheConfig,
    runtime: Handle,
    ram: RamTier,
    disks: Vec<DiskTier>,
    flights: BlockFlights,
    permits: Permits,
    pool: Pool,
    prefetches: Arc<Semaphore>,
    objects: Mutex<HashMap<ObjectId, Weak<CachedObject>>>,
    packer: Packer,
    tasks: TaskTracker,
    stop: CancellationToken,
    stats: CacheStats,
}

/// The cache of one process, shared by its mounts. Clones share it.
#[derive(Clone)]
pub struct Cache(pub(crate) Arc<Inner>);

impl Cache {
    /// Opens the cache directories and recovers what is in them.
    ///
    /// # Errors
    /// A directory is in use, holds something else, or its disk fails.
    pub fn open(
        config: CacheConfig,
        io: &Arc<dyn FileIo>,
        runtime: Handle,
    ) -> Result<Self, DiskError> {
        let disks = config
            .disks
            .iter()
            .map(|d| DiskTier::open(d.clone(), io.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self(Arc::new(Inner {
            ram: RamTier::new(config.ram_bytes),
            // Idle buffers are memory too: within that of the buffers in flight.
            pool: Pool::new(config.block_bytes, config.buffer_bytes / 4),
            permits: Permits::new(config.buffer_bytes.max(fetch::EXTENT_BYTES)),
            disks,
            flights: Flights::new(),
            prefetches: Arc::new(Semaphore::new(config.max_prefetches.max(1))),
            objects: Mutex::default(),
            packer: Packer::new(config.buffer_bytes / 4),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            stats: CacheStats::default(),
            runtime,
            config,
        })))
    }

    /// One version of an object. Equal ones share one.
    #[must_use]
    pub fn object(&self, origin: &Arc<dyn Origin>, meta: &ObjectMeta) -> Arc<CachedObject> {
        let id = ObjectId::new(origin.name(), meta);
        let mut objects = self.0.objects.lock();
        if let Some(o) = objects.get(&id).and_then(Weak::upgrade) {
            return o;
        }
        // Sweep the dead now and then, at a cost that stays proportional.
        if objects.len() >= 1024 && objects.len().is_power_of_two() {
            objects.retain(|_, w| w.strong_count() > 0);
        }
        let o = Arc::new(CachedObject::new(self.clone(), origin.clone(), meta.clone(), id));
        objects.insert(id, Arc::downgrade(&o));
        o
    }

    /// When an object will be used next, which eviction goes by.
    pub fn expect(&self, origin: &Arc<dyn Origin>, meta: &ObjectMeta, next: Expected) {
        let id = ObjectId::new(origin.name(), meta);
        let block_bytes = self.0.config.block_bytes;
        let blocks = if meta.size <= block_bytes { 0 } else { meta.size.div_ceil(block_bytes) };
        if let Some(d) = self.0.disk(id) {
            d.expect(id, u32::try_from(blocks).unwrap_or(u32::MAX), next);
        }
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> &CacheStats {
        &self.0.stats
    }

    /// State of the cache directories.
    #[must_use]
    pub fn disks(&self) -> Vec<DiskStatus> {
        self.0
            .disks
            .iter()
            .map(|d| DiskStatus {
                dir: d.dir().to_path_buf(),
                used_bytes: d.used_bytes(),
                max_bytes: d.max_bytes(),
                evicted_bytes: d.evicted_bytes(),
                out_of_service: d.is_out_of_service(),
            })
            .collect()
    }

    /// What the cache holds at the most, in bytes.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        let disks = self.0.disks.iter().filter(|d| !d.is_out_of_service());
        self.0.config.ram_bytes + disks.map(DiskTier::max_bytes).sum::<u64>()
    }

    /// Bytes in the RAM tier.
    #[must_use]
    pub fn ram_used_bytes(&self) -> u64 {
        self.0.ram.used_bytes()
    }

    /// Bytes in buffers of fetches.
    #[must_use]
    pub fn buffers_used_bytes(&self) -> u64 {
        self.0.permits.used()
    }

    /// Whether prefetch has to wait for memory.
    #[must_use]
    pub fn is_pressed(&self) -> bool {
        self.0.permits.is_pressed()
    }

    /// Block size of large objects, in bytes.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.0.config.block_bytes
    }

    /// Directory for files being written, on the first disk in service.
    ///
    /// # Errors
    /// There is no cache disk.
    pub fn stage_dir(&self) -> io::Result<PathBuf> {
        let disk = self.0.disks.iter().find(|d| !d.is_out_of_service());
        disk.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?.stage_dir()
    }

    /// Fetches running now.
    #[must_use]
    pub fn fetches_in_flight(&self) -> usize {
        self.0.flights.len()
    }

    /// Ends all fetches; when this returns, no task of the cache lives.
    pub async fn shutdown(&self) {
        self.0.stop.cancel();
        self.0.tasks.close();
        self.0.tasks.wait().await;
        self.0.packer.flush().await;
    }

    /// Tasks that live, for the test that none survives.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.0.tasks.len()
    }
}

impl Inner {
    /// The disk on which an object of this id lives, or is to live. Several
    /// disks share by id; one out of service is passed over.
    fn disk(&self, id: ObjectId) -> Option<&DiskTier> {
        let n = self.disks.len();
        (0..n).map(|i| &self.disks[(id.0 as usize % n + i) % n]).find(|d| !d.is_out_of_service())
    }
}

/// How long a read may wait in all, beside the origin's own deadlines: three
/// rounds of a fetch that is evicted before it is served.
pub(crate) const READ_DEADLINE: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests;

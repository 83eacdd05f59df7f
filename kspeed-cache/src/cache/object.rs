//! One version of one object in the cache.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::RwLock;

use super::fetch::{self, Ready};
use super::{Cache, CacheError, CacheStats, READ_DEADLINE};
use crate::flight::{Claim, Outcome};
use crate::io::with_mapped;
use crate::object::{Blocks, ObjectId, ObjectMeta};
use crate::origin::{Origin, OriginError};
use crate::permits::Priority;
use crate::tier::{LargeFile, PassthroughFile};

/// Replies up to this are read into a buffer, larger ones come from a mapping:
/// making and dropping a mapping costs as much as copying so many bytes.
const MAP_ABOVE_BYTES: usize = 128 << 10;
/// So often a read looks again after its blocks were evicted before it came
/// to serve them.
const MAX_ROUNDS: u32 = 4;

/// Bytes at hand.
pub enum Hit {
    /// In memory.
    Bytes(Bytes),
    /// In memory, in several pieces.
    Parts(Vec<Bytes>),
    /// In a cache file.
    File {
        /// The file.
        file: Arc<LargeFile>,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: usize,
        /// Blocks touched.
        blocks: Range<u32>,
    },
}

impl Hit {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes(b) => b.len(),
            Self::Parts(p) => p.iter().map(Bytes::len).sum(),
            Self::File { len, .. } => *len,
        }
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Calls `f` once with the bytes, in one slice, without copying them where
    /// that pays.
    ///
    /// # Errors
    /// The cache file can't be read, or its blocks were evicted meanwhile
    /// (`WouldBlock`): read again. `f` was not called then.
    pub fn serve<R>(&self, f: impl FnOnce(&[u8]) -> R) -> io::Result<R> {
        match self {
            Self::Bytes(b) => Ok(f(b)),
            Self::Parts(p) => Ok(f(&p.concat())),
            Self::File { file, offset, len, blocks } => {
                let (_gate, data) = file.serve();
                if !blocks.clone().all(|i| file.is_ready(i)) {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                if *len > MAP_ABOVE_BYTES {
                    with_mapped(data, *offset, *len, f)
                } else {
                    read_small(data, *offset, *len, f)
                }
            }
        }
    }

    /// The bytes, copied if need be.
    ///
    /// # Errors
    /// As [`Self::serve`].
    pub fn to_bytes(&self) -> io::Result<Bytes> {
        match self {
            Self::Bytes(b) => Ok(b.clone()),
            other => other.serve(Bytes::copy_from_slice),
        }
    }
}

fn read_small<R>(
    file: &File,
    offset: u64,
    len: usize,
    f: impl FnOnce(&[u8]) -> R,
) -> io::Result<R> {
    thread_local! {
        static BUFFER: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    BUFFER.with(|b| {
        let mut b = b.borrow_mut();
        if b.len() < len {
            b.resize(len, 0);
        }
        file.read_exact_at(&mut b[..len], offset)?;
        Ok(f(&b[..len]))
    })
}

/// See the module above.
pub struct CachedObject {
    pub(super) cache: Cache,
    pub(super) origin: Arc<dyn Origin>,
    pub(super) meta: ObjectMeta,
    pub(super) id: ObjectId,
    pub(super) blocks: Blocks,
    file: RwLock<Option<Arc<LargeFile>>>,
    /// Blocks on their way to the disk.
    pub(super) writes: tokio::sync::watch::Sender<HashMap<u32, Bytes>>,
}

impl CachedObject {
    pub(super) fn new(
        cache: Cache,
        origin: Arc<dyn Origin>,
        meta: ObjectMeta,
        id: ObjectId,
    ) -> Self {
        let block_bytes = cache.0.config.block_bytes;
        Self {
            blocks: Blocks { size: meta.size, block_bytes },
            cache,
            origin,
            meta,
            id,
            file: RwLock::new(None),
            writes: tokio::sync::watch::Sender::new(HashMap::new()),
        }
    }

    /// What the listing told.
    #[must_use]
    pub fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    /// Whether it is one block and packed with others.
    #[must_use]
    pub fn is_small(&self) -> bool {
        self.meta.size <= self.blocks.block_bytes
    }

    /// The cache file of a large object, if there is one, or if it is to be
    /// made and there is a disk.
    pub(super) fn file(&self, create: bool) -> Option<Arc<LargeFile>> {
        if let Some(f) = &*self.file.read() {
            return Some(f.clone());
        }
        let disk = self.cache.0.disk(self.id)?;
        let mut slot = self.file.write();
        if slot.is_none() {
            let opened = disk.large(self.id, self.origin.name(), &self.meta, self.blocks, create);
            *slot = opened.unwrap_or_else(|e| {
                tracing::warn!(error = %e, key = %self.meta.key, "no cache file");
                None
            });
        }
        slot.clone()
    }

    /// Lets go of a cache file that was unlinked or whose disk fails.
    pub(super) fn drop_file(&self) {
        *self.file.write() = None;
    }

    /// Clamps a range to the object: (offset, length).
    fn clamp(&self, offset: u64, len: usize) -> (u64, usize) {
        let end = offset.saturating_add(len as u64).min(self.meta.size);
        (offset, end.saturating_sub(offset) as usize)
    }

    /// Answers from RAM or disk, or not at all. A range past the end is cut;
    /// beyond the end it is empty.
    #[must_use]
    pub fn try_read(&self, offset: u64, len: usize) -> Option<Hit> {
        let (offset, len) = self.clamp(offset, len);
        if len == 0 {
            return Some(Hit::Bytes(Bytes::new()));
        }
        let stats = &self.cache.0.stats;
        if self.is_small() {
            let slice = |b: &Bytes| b.slice(offset as usize..offset as usize + len);
            if let Some(b) = self.in_memory(0) {
                CacheStats::add(&stats.ram_hits, 1);
                return Some(Hit::Bytes(slice(&b)));
            }
            let b = self.cache.0.disk(self.id)?.small(self.id)?;
            if b.len() as u64 != self.meta.size {
                return None;
            }
            CacheStats::add(&stats.disk_hits, 1);
            return Some(Hit::Bytes(slice(&b)));
        }
        let blocks = self.blocks.touched(offset, len as u64);
        // One block in RAM first: it has just arrived, or there is no disk.
        // Several would have to be joined by a copy, which a mapping spares.
        if blocks.len() == 1
            && let Some(b) = self.in_memory(blocks.start)
        {
            CacheStats::add(&stats.ram_hits, 1);
            return Some(self.cut(vec![b], blocks, offset, len));
        }
        if let Some(file) = self.file(false)
            && blocks.clone().all(|i| file.is_ready(i))
        {
            if let Some(d) = self.cache.0.disk(self.id) {
                d.touch_block(&file, blocks.start);
            }
            CacheStats::add(&stats.disk_hits, 1);
            return Some(Hit::File { file, offset, len, blocks });
        }
        let parts: Option<Vec<Bytes>> = blocks.clone().map(|i| self.in_memory(i)).collect();
        let hit = self.cut(parts?, blocks, offset, len);
        CacheStats::add(&stats.ram_hits, 1);
        Some(hit)
    }

    /// Cuts the first and last of whole blocks to a range.
    fn cut(&self, mut parts: Vec<Bytes>, blocks: Range<u32>, offset: u64, len: usize) -> Hit {
        let start = self.blocks.range(blocks.start).start;
        let total: usize = parts.iter().map(Bytes::len).sum();
        let lead = (offset - start) as usize;
        let tail = total - lead - len;
        if let Some(last) = parts.last_mut() {
            last.truncate(last.len() - tail);
        }
        if let Some(first) = parts.first_mut() {
            *first = first.slice(lead..);
        }
        match <[Bytes; 1]>::try_from(parts) {
            Ok([one]) => Hit::Bytes(one),
            Err(parts) => Hit::Parts(parts),
        }
    }

    /// Answers from wherever the bytes are, fetching what is missing.
    ///
    /// # Errors
    /// The origin failed, or the version is gone.
    pub async fn read(self: &Arc<Self>, offset: u64, len: usize) -> Result<Hit, CacheError> {
        tokio::time::timeout(READ_DEADLINE, self.read_rounds(offset, len)).await.unwrap_or_else(
            |_| {
                Err(CacheError::Origin(OriginError::TimedOut {
                    what: self.meta.key.to_string(),
                    after_ms: READ_DEADLINE.as_millis() as u64,
                }))
            },
        )
    }

    async fn read_rounds(self: &Arc<Self>, offset: u64, len: usize) -> Result<Hit, CacheError> {
        if let Some(hit) = self.try_read(offset, len) {
            return Ok(hit);
        }
        CacheStats::add(&self.cache.0.stats.misses, 1);
        let (offset, len) = self.clamp(offset, len);
        let blocks = self.touched(offset, len as u64);
        for _ in 0..MAX_ROUNDS {
            let ready = self.obtain(blocks.clone()).await?;
            // What arrived, if it is all that was asked for: it may be kept
            // nowhere (no disk, RAM full), or not be written yet.
            if let Some(parts) = ready {
                return Ok(self.cut(parts, blocks, offset, len));
            }
            if let Some(hit) = self.try_read(offset, len) {
                return Ok(hit);
            }
        }
        Err(CacheError::Disk(Arc::new(io::Error::other(
            "blocks are evicted before they can be served: the cache is too small",
        ))))
    }

    /// A block in the RAM tier, or on its way to the disk.
    fn in_memory(&self, i: u32) -> Option<Bytes> {
        self.cache.0.ram.get(self.id, i).or_else(|| self.writes.borrow().get(&i).cloned())
    }

    fn touched(&self, offset: u64, len: u64) -> Range<u32> {
        if self.is_small() { 0..1 } else { self.blocks.touched(offset, len) }
    }

    /// Waits until each of `blocks` is ready. Their bytes, unless some are in the
    /// cache file and were not read.
    async fn obtain(
        self: &Arc<Self>,
        blocks: Range<u32>,
    ) -> Result<Option<Vec<Bytes>>, CacheError> {
        loop {
            let mut waits = Vec::with_capacity(blocks.len());
            let mut leads = Vec::new();
            for i in blocks.clone() {
                if let Some(ready) = self.at_hand(i) {
                    waits.push(Ok(ready));
                    continue;
                }
                match self.cache.0.flights.claim(&(self.id, i)) {
                    Claim::Follow(w) => waits.push(Err(w)),
                    Claim::Lead(lead) => {
                        leads.push((i, lead));
                        // Follow our own flight: the task that leads it is the
                        // cache's, not this reader's.
                        match self.cache.0.flights.claim(&(self.id, i)) {
                            Claim::Follow(w) => waits.push(Err(w)),
                            Claim::Lead(_) => continue,
                        }
                    }
                }
            }
            fetch::start(self, leads, Priority::Demand, None);
            let mut ready = Vec::with_capacity(waits.len());
            let mut again = false;
            for w in waits {
                match w {
                    Ok(r) => ready.push(r),
                    Err(w) => match w.outcome().await {
                        Outcome::Done(Ready(b)) => ready.push(Some(b)),
                        Outcome::Failed(e) => return Err(e),
                        Outcome::Abandoned => again = true,
                    },
                }
            }
            if !again {
                return Ok(ready.into_iter().collect());
            }
            if self.cache.0.stop.is_cancelled() {
                return Err(CacheError::ShuttingDown);
            }
        }
    }

    /// A block that needs no waiting: its bytes, or `Some(None)` if they are in
    /// the cache file.
    pub(super) fn at_hand(&self, i: u32) -> Option<Option<Bytes>> {
        if let Some(b) = self.in_memory(i) {
            return Some(Some(b));
        }
        if self.is_small() {
            return self.cache.0.disk(self.id)?.small(self.id).map(Some);
        }
        self.file(false)?.is_ready(i).then_some(None)
    }

    /// Whether all of a range is in the cache, checked or not.
    #[must_use]
    pub fn has(&self, range: Range<u64>) -> bool {
        let inner = &self.cache.0;
        if self.is_small() {
            return self.meta.size == 0
                || self.in_memory(0).is_some()
                || inner.disk(self.id).is_some_and(|d| d.has_small(self.id));
        }
        let mut blocks = self.blocks.touched(range.start, range.end - range.start);
        match self.file(false) {
            Some(f) => {
                blocks.all(|i| f.is_ready(i) || f.is_unchecked(i) || self.in_memory(i).is_some())
            }
            None => blocks.all(|i| self.in_memory(i).is_some()),
        }
    }

    /// Starts to fetch what is missing of a range, behind the reader's back.
    /// Returns when all of it is under way; waits for memory and for a request
    /// slot as long as demand leaves none. Dropped, it starts no more.
    pub async fn prefetch(self: &Arc<Self>, range: Range<u64>) {
        if range.is_empty() || self.meta.size == 0 {
            return;
        }
        let inner = &self.cache.0;
        let blocks = self.touched(range.start, range.end - range.start);
        let max = (fetch::EXTENT_BYTES / self.blocks.block_bytes).max(1) as u32;
        let mut at = blocks.start;
        while at < blocks.end {
            if self.present(at) {
                at += 1;
                continue;
            }
            // A run of missing blocks, at most an extent.
            let limit = blocks.end.min(at + max);
            let end = (at + 1..limit).find(|i| self.present(*i)).unwrap_or(limit);
            let Ok(slot) = inner.prefetches.clone().acquire_owned().await else { return };
            let bytes: u64 = (at..end).map(|i| self.blocks.len(i) as u64).sum();
            // Memory first, then the claim: a reader that joins the flight
            // never waits for prefetch's turn at the memory.
            let permit = inner.permits.acquire(bytes, Priority::Prefetch).await;
            let leads: Vec<_> = (at..end)
                .filter(|i| !self.present(*i))
                .filter_map(|i| Some((i, inner.flights.lead(&(self.id, i))?)))
                .collect();
            if !leads.is_empty() {
                fetch::start(self, leads, Priority::Prefetch, Some((permit, slot)));
            }
            at = end;
        }
    }

    fn present(&self, i: u32) -> bool {
        self.has(self.blocks.range(i))
    }

    /// Brings the whole object in, and checks what a former process stored.
    ///
    /// # Errors
    /// The origin failed.
    pub async fn warm(self: &Arc<Self>) -> Result<(), CacheError> {
        let whole = async {
            self.prefetch(0..self.meta.size).await;
            // What is under way or only unchecked is waited for here.
            let step = fetch::EXTENT_BYTES;
            let mut at = 0;
            while at < self.meta.size {
                self.obtain(self.touched(at, step.min(self.meta.size - at))).await?;
                at += step;
            }
            // There means on disk, where there is one.
            let mut writes = self.writes.subscribe();
            let _ = writes.wait_for(HashMap::is_empty).await;
            Ok(())
        };
        whole.await
    }

    /// Takes over a file that holds the object's bytes, on the first cache disk;
    /// the file may be gone afterwards. Blocks no task: it reads the file on a
    /// thread for that.
    ///
    /// # Errors
    /// The disk fails, or the file is not as large as the object.
    pub async fn adopt(self: &Arc<Self>, path: &Path) -> io::Result<()> {
        let (this, path) = (self.clone(), path.to_path_buf());
        let adopted = tokio::task::spawn_blocking(move || {
            let Some(disk) = this.cache.0.disk(this.id) else { return Ok(()) };
            if this.is_small() {
                let bytes = std::fs::read(&path)?;
                if bytes.len() as u64 != this.meta.size {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                return disk.put_small(this.id, &bytes);
            }
            disk.adopt(this.id, this.origin.name(), &this.meta, this.blocks, &path)
        });
        adopted.await.map_err(io::Error::other)?
    }

    /// Bytes in the cache.
    #[must_use]
    pub fn cached_bytes(&self) -> u64 {
        if self.is_small() {
            return if self.has(0..self.meta.size) { self.meta.size } else { 0 };
        }
        match self.file(false) {
            Some(f) => (0..self.blocks.count())
                .filter(|i| f.is_stored(*i) || self.in_memory(*i).is_some())
                .map(|i| self.blocks.len(i) as u64)
                .sum(),
            None => self.ram_bytes(),
        }
    }

    /// Bytes in the RAM tier.
    #[must_use]
    pub fn ram_bytes(&self) -> u64 {
        (0..self.blocks.count())
            .filter(|i| self.cache.0.ram.get(self.id, *i).is_some())
            .map(|i| self.blocks.len(i) as u64)
            .sum()
    }

    /// The complete and checked cache file, for the kernel to read by itself.
    #[must_use]
    pub fn passthrough(&self) -> Option<PassthroughFile> {
        if self.is_small() {
            return None;
        }
        self.file(false)?.passthrough()
    }

    /// Drops it from all tiers, even if pinned.
    pub fn evict(&self) {
        self.cache.0.ram.remove(self.id, self.blocks.count());
        if self.is_small() {
            self.writes.send_modify(HashMap::clear);
        }
        if let Some(d) = self.cache.0.disk(self.id) {
            d.forget(self.id);
        }
        self.drop_file();
    }

    /// Spares it from eviction, or no longer.
    ///
    /// # Errors
    /// The list of pins can't be written.
    pub fn pin(&self, on: bool) -> io::Result<()> {
        match self.cache.0.disk(self.id) {
            Some(d) => d.pin(self.id, on),
            None => Err(io::Error::other("there is no cache disk to pin on")),
        }
    }

    /// Whether it is pinned.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.cache.0.disk(self.id).is_some_and(|d| d.is_pinned(self.id))
    }
}

//! Cache files of large objects: sparse data beside a table of checksums.
//!
//! ```text
//! <id>.meta   0  magic "KSLARGE1"
//!             8  block size, bytes, u64
//!            16  object size, bytes, u64
//!            24  id, u128
//!            40  XXH3-64 of bytes 0..40, u64
//!            48  lengths of origin, key, version, 3 x u32, then their bytes
//!                (for people; identity is the id), zero-filled to 4096
//!          4096  XXH3-64 of block 0, u64 (0: absent), block 1, ...
//! ```
//! All integers are little-endian. A block's data is written before its
//! checksum, and a checksum of 0 is stored as 1.
//!
//! A block is in one of three states: absent; stored (a former process wrote
//! it, unchecked); ready (checked by this process). Only ready blocks are
//! served, and what is ready is remembered while the file is closed. The `fence` holds mtime and size of the data file after our last
//! write: if they differ at the next open, somebody else wrote, and all blocks
//! are merely stored again.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use rustix::fs::FallocateFlags;
use xxhash_rust::xxh3::xxh3_64;

use crate::io::FileIo;
use crate::object::{Blocks, ObjectId, ObjectMeta};

const MAGIC: &[u8; 8] = b"KSLARGE1";
const HEADER_BYTES: u64 = 4096;
/// Blocks evicted together: 64 MiB of 1 MiB blocks.
pub(super) const CHUNK_BLOCKS: u32 = 64;

/// What O_DIRECT wants of buffer, offset and length; buffers come from the pool,
/// which aligns to pages.
const DIRECT_ALIGN_BYTES: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Fence {
    mtime: (i64, i64),
    size: u64,
}

/// What was checked of a file that is closed now: its fence and ready bits.
type Trusted = Arc<Mutex<HashMap<ObjectId, (Fence, Vec<u64>)>>>;

/// Closed files whose checks are remembered, at 100 bytes each and a bit a
/// block; beyond, all are forgotten and checked again when they are opened.
const MAX_TRUSTED: usize = 200_000;

/// The cache file of one version of one large object.
pub struct LargeFile {
    trusted: Trusted,
    id: ObjectId,
    blocks: Blocks,
    data: Arc<File>,
    /// The same file past the page cache, where its file system can do that.
    direct: Option<Arc<File>>,
    data_path: PathBuf,
    meta: File,
    /// Checksums as stored; 0 = absent.
    sums: Vec<AtomicU64>,
    /// Bit per block: ready to be served.
    ready: Vec<AtomicU64>,
    ready_count: AtomicU32,
    /// Held for reading while blocks are served, for writing to punch holes.
    gate: RwLock<()>,
    writes: AtomicU32,
    fence: Mutex<Option<Fence>>,
    through: AtomicU32,
    last_touched: AtomicU32,
}

/// A complete file that the kernel may read by itself. While it lives the file
/// is not evicted.
pub struct PassthroughFile {
    owner: Arc<LargeFile>,
    file: File,
}

impl PassthroughFile {
    /// The file, opened for reading.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for PassthroughFile {
    fn drop(&mut self) {
        self.owner.through.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for LargeFile {
    fn drop(&mut self) {
        if let Some(fence) = *self.fence.lock()
            && *self.ready_count.get_mut() > 0
        {
            let mut trusted = self.trusted.lock();
            if trusted.len() >= MAX_TRUSTED {
                trusted.clear();
            }
            let bits = self.ready.iter_mut().map(|b| *b.get_mut()).collect();
            trusted.insert(self.id, (fence, bits));
        }
    }
}

fn open_direct(path: &Path) -> Option<Arc<File>> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    File::options().write(true).custom_flags(flags).open(path).ok().map(Arc::new)
}

fn sum_of(data: &[u8]) -> u64 {
    xxh3_64(data).max(1)
}

impl LargeFile {
    pub(super) fn id(&self) -> ObjectId {
        self.id
    }

    /// Whether block `i` may be served.
    #[must_use]
    pub fn is_ready(&self, i: u32) -> bool {
        self.ready[i as usize / 64].load(Ordering::Acquire) >> (i % 64) & 1 == 1
    }

    /// Whether block `i` is stored but not checked yet.
    #[must_use]
    pub fn is_unchecked(&self, i: u32) -> bool {
        !self.is_ready(i) && self.is_stored(i)
    }

    /// Whether every block may be served.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.ready_count.load(Ordering::Acquire) == self.blocks.count()
    }

    /// Whether block `i` is stored, checked or not.
    #[must_use]
    pub fn is_stored(&self, i: u32) -> bool {
        self.sums[i as usize].load(Ordering::Acquire) != 0
    }

    /// The data file, with a guard against eviction for as long as it is held.
    /// The caller checks [`Self::is_ready`] under the guard.
    pub fn serve(&self) -> (RwLockReadGuard<'_, ()>, &File) {
        (self.gate.read(), &self.data)
    }

    /// Whether this chunk is another than that touched last: spares the policy
    /// most of its calls.
    pub(super) fn is_new_touch(&self, chunk: u32) -> bool {
        self.last_touched.swap(chunk, Ordering::Relaxed) != chunk
    }

    fn set_ready(&self, i: u32) {
        let bit = 1 << (i % 64);
        if self.ready[i as usize / 64].fetch_or(bit, Ordering::AcqRel) & bit == 0 {
            self.ready_count.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn clear_ready(&self, i: u32) {
        let bit = 1u64 << (i % 64);
        if self.ready[i as usize / 64].fetch_and(!bit, Ordering::AcqRel) & bit != 0 {
            self.ready_count.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn store_sum(&self, i: u32, sum: u64) -> io::Result<()> {
        self.meta.write_all_at(&sum.to_le_bytes(), HEADER_BYTES + u64::from(i) * 8)?;
        self.sums[i as usize].store(sum, Ordering::Release);
        Ok(())
    }

    fn look(&self) -> io::Result<Fence> {
        let m = self.data.metadata()?;
        Ok(Fence { mtime: (m.mtime(), m.mtime_nsec()), size: m.len() })
    }

    /// Reserves the disk's blocks for a range that is about to be written: blocks
    /// written past the page cache and out of order would else be strewn over the
    /// disk. Only a hint.
    pub fn reserve(&self, blocks: std::ops::Range<u32>) {
        if blocks.is_empty() || self.direct.is_none() {
            return;
        }
        let start = self.blocks.range(blocks.start).start;
        let end = self.blocks.range(blocks.end - 1).end;
        self.begin_write();
        let _ = rustix::fs::fallocate(&*self.data, FallocateFlags::KEEP_SIZE, start, end - start);
        self.end_write();
    }

    fn begin_write(&self) {
        self.writes.fetch_add(1, Ordering::AcqRel);
    }

    fn end_write(&self) {
        // Looked at and stored under the lock, so that the last of several
        // writers stores what it left.
        let mut fence = self.fence.lock();
        let last = self.writes.fetch_sub(1, Ordering::AcqRel) == 1;
        *fence = if last { self.look().ok() } else { None };
    }

    pub(super) async fn write_block(&self, io: &dyn FileIo, i: u32, data: Bytes) -> io::Result<()> {
        let sum = sum_of(&data);
        self.begin_write();
        let at = self.blocks.range(i).start;
        let aligned = data.len().is_multiple_of(DIRECT_ALIGN_BYTES)
            && data.as_ptr().addr().is_multiple_of(DIRECT_ALIGN_BYTES);
        let mut r = match self.direct.as_ref().filter(|_| aligned) {
            Some(direct) => io.write(direct.clone(), at, data.clone()).await,
            None => Err(io::ErrorKind::InvalidInput.into()),
        };
        // Not aligned enough for this disk, or not at all: by the page cache.
        if r.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::InvalidInput) {
            r = io.write(self.data.clone(), at, data).await;
        }
        self.end_write();
        r?;
        self.store_sum(i, sum)?;
        self.set_ready(i);
        Ok(())
    }

    pub(super) async fn verify_block(&self, io: &dyn FileIo, i: u32) -> io::Result<Option<Bytes>> {
        let want = self.sums[i as usize].load(Ordering::Acquire);
        let range = self.blocks.range(i);
        let good = match io.read(self.data.clone(), range.start, self.blocks.len(i)).await {
            Ok(b) => Some(b).filter(|b| want != 0 && sum_of(b) == want),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => None,
            Err(e) => return Err(e),
        };
        if good.is_some() {
            self.set_ready(i);
        } else {
            self.clear_ready(i);
            self.store_sum(i, 0)?;
        }
        Ok(good)
    }

    /// Whether nobody but us wrote since we last looked; if somebody did, no
    /// block is ready any more.
    fn check_fence(&self) -> io::Result<bool> {
        if self.writes.load(Ordering::Acquire) > 0 {
            return Ok(true);
        }
        let now = self.look()?;
        let mut fence = self.fence.lock();
        if fence.is_none_or(|f| f == now) {
            *fence = Some(now);
            return Ok(true);
        }
        tracing::warn!(file = %self.data_path.display(), "the cache file was changed by somebody else: its blocks are checked again");
        let _alone = self.gate.write();
        for i in 0..self.blocks.count() {
            self.clear_ready(i);
        }
        if now.size != self.blocks.size {
            self.data.set_len(self.blocks.size)?;
        }
        *fence = Some(self.look()?);
        Ok(false)
    }

    /// For the kernel to read by itself: complete, checked, unchanged.
    #[must_use]
    pub fn passthrough(self: &Arc<Self>) -> Option<PassthroughFile> {
        self.through.fetch_add(1, Ordering::AcqRel);
        let release = || {
            self.through.fetch_sub(1, Ordering::AcqRel);
        };
        if !self.check_fence().unwrap_or(false) || !self.is_complete() {
            release();
            return None;
        }
        // A descriptor of its own: the kernel needs one open for reading only.
        match File::open(&self.data_path) {
            Ok(file) => Some(PassthroughFile { owner: self.clone(), file }),
            Err(_) => {
                release();
                None
            }
        }
    }

    fn drop_chunk(&self, chunk: u32) {
        let _alone = self.gate.write();
        let first = chunk * CHUNK_BLOCKS;
        let end = (first + CHUNK_BLOCKS).min(self.blocks.count());
        if first >= end {
            return;
        }
        for i in first..end {
            self.clear_ready(i);
            if let Err(e) = self.store_sum(i, 0) {
                tracing::warn!(file = %self.data_path.display(), error = %e, "checksum not cleared");
            }
        }
        let start = self.blocks.range(first).start;
        let len = self.blocks.range(end - 1).end - start;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(e) = rustix::fs::fallocate(&*self.data, flags, start, len) {
            tracing::warn!(file = %self.data_path.display(), error = %e, "no hole could be punched");
        }
        *self.fence.lock() = self.look().ok();
    }
}

/// All large objects of a directory.
pub(super) struct LargeStore {
    root: PathBuf,
    trusted: Trusted,
    open: Mutex<HashMap<ObjectId, Weak<LargeFile>>>,
}

impl LargeStore {
    pub(super) fn open(dir: &Path) -> io::Result<Self> {
        let root = dir.join("large");
        fs::create_dir_all(&root)?;
        Ok(Self { root, trusted: Trusted::default(), open: Mutex::default() })
    }

    fn paths(&self, id: ObjectId) -> (PathBuf, PathBuf) {
        let name = id.to_string();
        let dir = self.root.join(&name[..2]);
        (dir.join(format!("{name}.data")), dir.join(format!("{name}.meta")))
    }

    /// What is stored: (object, chunk, bytes), oldest first.
    pub(super) fn stored(&self) -> io::Result<Vec<(ObjectId, u32, u64)>> {
        let mut found = Vec::new();
        for dir in fs::read_dir(&self.root)? {
            let dir = dir?.path();
            if !dir.is_dir() {
                continue;
            }
            for e in fs::read_dir(&dir)? {
                let path = e?.path();
                let stem = path.file_stem().and_then(|s| s.to_str());
                let id = stem.and_then(|s| u128::from_str_radix(s, 16).ok()).map(ObjectId);
                match (path.extension().and_then(|x| x.to_str()), id) {
                    (Some("meta"), Some(id)) => match read_meta(&path, id) {
                        Ok((blocks, sums)) => {
                            let mtime = fs::metadata(&path)?.modified()?;
                            for (c, chunk) in sums.chunks(CHUNK_BLOCKS as usize).enumerate() {
                                let first = c as u32 * CHUNK_BLOCKS;
                                let bytes: u64 = (first..)
                                    .zip(chunk)
                                    .filter(|(_, s)| **s != 0)
                                    .map(|(i, _)| blocks.len(i) as u64)
                                    .sum();
                                if bytes > 0 {
                                    found.push((mtime, id, c as u32, bytes));
                                }
                            }
                        }
                        // Torn by a crash: of no use.
                        Err(_) => self.remove(id),
                    },
                    (Some("data"), Some(id)) => {
                        if !path.with_extension("meta").exists() {
                            self.remove(id);
                        }
                    }
                    _ => {
                        let _ = fs::remove_file(&path);
                    }
                }
            }
        }
        found.sort_unstable_by_key(|f| (f.0, f.1, f.2));
        Ok(found.into_iter().map(|(_, id, c, bytes)| (id, c, bytes)).collect())
    }

    pub(super) fn open_object(
        &self,
        id: ObjectId,
        origin: &str,
        meta: &ObjectMeta,
        blocks: Blocks,
        create: bool,
    ) -> io::Result<Option<Arc<LargeFile>>> {
        let mut open = self.open.lock();
        if let Some(f) = open.get(&id).and_then(Weak::upgrade) {
            drop(open);
            f.check_fence()?;
            return Ok(Some(f));
        }
        let (data_path, meta_path) = self.paths(id);
        let sums = match read_meta(&meta_path, id) {
            Ok((b, sums)) if b.size == blocks.size && b.block_bytes == blocks.block_bytes => sums,
            _ if !create => return Ok(None),
            _ => {
                if let Some(d) = data_path.parent() {
                    fs::create_dir_all(d)?;
                }
                let _ = fs::remove_file(&data_path);
                self.trusted.lock().remove(&id);
                write_header(&meta_path, id, origin, meta, blocks)?;
                vec![0; blocks.count() as usize]
            }
        };
        let data =
            File::options().read(true).write(true).create(true).truncate(false).open(&data_path)?;
        if data.metadata()?.len() != blocks.size {
            data.set_len(blocks.size)?;
        }
        let file = Arc::new(LargeFile {
            trusted: self.trusted.clone(),
            id,
            blocks,
            data: Arc::new(data),
            direct: open_direct(&data_path),
            data_path,
            meta: File::options().read(true).write(true).open(&meta_path)?,
            ready: (0..sums.len().div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            sums: sums.into_iter().map(AtomicU64::new).collect(),
            ready_count: AtomicU32::new(0),
            gate: RwLock::new(()),
            writes: AtomicU32::new(0),
            fence: Mutex::new(None),
            through: AtomicU32::new(0),
            last_touched: AtomicU32::new(u32::MAX),
        });
        let trusted = self.trusted.lock().remove(&id);
        if let Some((fence, bits)) = trusted
            && fence == file.look()?
        {
            for i in 0..blocks.count() {
                if bits.get(i as usize / 64).is_some_and(|b| b >> (i % 64) & 1 == 1) {
                    file.set_ready(i);
                }
            }
        }
        file.check_fence()?;
        open.retain(|_, w| w.strong_count() > 0);
        open.insert(id, Arc::downgrade(&file));
        Ok(Some(file))
    }

    /// Makes a file with an object's bytes its cache file, without copying it. The
    /// file must be on the same disk, and nobody may write to it any more.
    pub(super) fn adopt(
        &self,
        id: ObjectId,
        origin: &str,
        meta: &ObjectMeta,
        blocks: Blocks,
        path: &Path,
    ) -> io::Result<Option<Arc<LargeFile>>> {
        let (data_path, meta_path) = self.paths(id);
        let file = File::open(path)?;
        if file.metadata()?.len() != blocks.size {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut buf = vec![0; blocks.block_bytes as usize];
        let mut sums = Vec::with_capacity(blocks.count() as usize * 8);
        for i in 0..blocks.count() {
            let b = &mut buf[..blocks.len(i)];
            file.read_exact_at(b, blocks.range(i).start)?;
            sums.extend_from_slice(&sum_of(b).to_le_bytes());
        }
        if let Some(d) = data_path.parent() {
            fs::create_dir_all(d)?;
        }
        {
            // Nobody begins a file of this object meanwhile, to fetch into it.
            let open = self.open.lock();
            let taken = open.get(&id).is_some_and(|w| w.strong_count() > 0);
            if taken || meta_path.exists() {
                return Ok(None);
            }
            // The sums last: without them the data is of no use to a next process.
            fs::rename(path, &data_path)?;
            write_header(&meta_path, id, origin, meta, blocks)?;
            File::options().write(true).open(&meta_path)?.write_all_at(&sums, HEADER_BYTES)?;
        }
        let adopted = self.open_object(id, origin, meta, blocks, false)?;
        if let Some(f) = &adopted {
            for i in 0..blocks.count() {
                f.set_ready(i);
            }
        }
        Ok(adopted)
    }

    fn opened(&self, id: ObjectId) -> Option<Arc<LargeFile>> {
        self.open.lock().get(&id).and_then(Weak::upgrade)
    }

    pub(super) fn is_open_through(&self, id: ObjectId) -> bool {
        self.opened(id).is_some_and(|f| f.through.load(Ordering::Acquire) > 0)
    }

    pub(super) fn drop_chunk(&self, id: ObjectId, chunk: u32) {
        if let Some(f) = self.opened(id) {
            f.drop_chunk(chunk);
            return;
        }
        let (_, meta_path) = self.paths(id);
        let Ok((blocks, _)) = read_meta(&meta_path, id) else { return };
        let meta = ObjectMeta {
            key: "".into(),
            size: blocks.size,
            mtime_ns: 0,
            version: "".into(),
            kind: crate::object::ObjectKind::File,
            mode: None,
        };
        if let Ok(Some(f)) = self.open_object(id, "", &meta, blocks, false) {
            f.drop_chunk(chunk);
        }
    }

    /// Unlinks an object's files. A file that is open keeps its bytes for
    /// those that hold it, but is no longer found.
    pub(super) fn remove(&self, id: ObjectId) {
        if let Some(f) = self.open.lock().remove(&id).and_then(|w| w.upgrade()) {
            let _alone = f.gate.write();
            for i in 0..f.blocks.count() {
                f.clear_ready(i);
                f.sums[i as usize].store(0, Ordering::Release);
            }
        }
        self.trusted.lock().remove(&id);
        let (data, meta) = self.paths(id);
        let _ = fs::remove_file(meta);
        let _ = fs::remove_file(data);
    }
}

fn write_header(
    path: &Path,
    id: ObjectId,
    origin: &str,
    meta: &ObjectMeta,
    blocks: Blocks,
) -> io::Result<()> {
    let mut h = Vec::with_capacity(HEADER_BYTES as usize);
    h.extend_from_slice(MAGIC);
    h.extend_from_slice(&blocks.block_bytes.to_le_bytes());
    h.extend_from_slice(&blocks.size.to_le_bytes());
    h.extend_from_slice(&id.0.to_le_bytes());
    h.extend_from_slice(&xxh3_64(&h).to_le_bytes());
    let texts = [origin.as_bytes(), meta.key.as_bytes(), meta.version.as_str().as_bytes()];
    for t in texts {
        h.extend_from_slice(&(t.len() as u32).to_le_bytes());
    }
    for t in texts {
        h.extend_from_slice(t);
    }
    h.resize(HEADER_BYTES as usize, 0);
    let temp = path.with_extension("new");
    let f = File::create(&temp)?;
    f.write_all_at(&h, 0)?;
    f.set_len(HEADER_BYTES + u64::from(blocks.count()) * 8)?;
    fs::rename(&temp, path)
}

/// Reads a meta file; anything that does not fit is `InvalidData`.
fn read_meta(path: &Path, id: ObjectId) -> io::Result<(Blocks, Vec<u64>)> {
    let bytes = fs::read(path)?;
    let bad = || io::Error::from(io::ErrorKind::InvalidData);
    let word = |at: usize| -> io::Result<u64> {
        let b = bytes.get(at..at + 8).ok_or_else(bad)?;
        Ok(u64::from_le_bytes(b.try_into().map_err(|_| bad())?))
    };
    let head = bytes.get(..40).ok_or_else(bad)?;
    if &head[..8] != MAGIC || word(40)? != xxh3_64(head) || head[24..40] != id.0.to_le_bytes() {
        return Err(bad());
    }
    let blocks = Blocks { block_bytes: word(8)?, size: word(16)? };
    if !blocks.block_bytes.is_power_of_two() {
        return Err(bad());
    }
    let n = blocks.count() as usize;
    let sums = (0..n).map(|i| word(HEADER_BYTES as usize + i * 8)).collect::<io::Result<_>>()?;
    Ok((blocks, sums))
}

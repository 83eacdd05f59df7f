//! Small objects packed into segment files, since a hundred million files of
//! their own would drown the disk's file system.
//!
//! ```text
//! record   0  magic "KSR1", u32          segment: records, 8-byte aligned
//!          4  stored length, u32         index of a sealed segment: per record
//!          8  raw length, u32              0  id, u128
//!         12  flags, u32                  16  offset, u32
//!         16  id, u128                    20  stored length, u32
//!         32  XXH3-64 of stored bytes     then XXH3-64 of all that
//!         40  XXH3-64 of bytes 0..40
//!         48  stored bytes
//! ```
//! All little-endian; flags: 1 = zstd, 2 = dead, its bytes are a hole. A segment is appended to until it is full, then sealed:
//! its index is written, and removed when a record of it dies alone. At a start sealed segments are loaded from their
//! indices, others are scanned from record to record; a scan ends at the first
//! header that is not whole, which is where a crash cut it.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use rustix::fs::FallocateFlags;
use xxhash_rust::xxh3::xxh3_64;

use super::pins::Pins;
use crate::object::ObjectId;

const MAGIC: u32 = u32::from_le_bytes(*b"KSR1");
const HEADER_BYTES: usize = 48;
/// A segment is sealed at this size: large enough that a million objects need
/// few files, small enough to be the unit of eviction.
const SEGMENT_BYTES: u32 = 64 << 20;
const FLAG_ZSTD: u32 = 1;
const FLAG_DEAD: u32 = 2;
/// Pages of the cache disk's file system, between which holes are punched.
const PAGE_BYTES: u64 = 4096;
/// Compressed bytes are kept only if they save at least an eighth.
const COMPRESS_MIN_SAVING_DIVISOR: usize = 8;

#[derive(Clone, Copy)]
struct Place {
    segment: u32,
    offset: u32,
    stored: u32,
}

struct Active {
    number: u32,
    file: Arc<File>,
    end: u32,
}

/// All small objects of a directory.
pub(super) struct SmallStore {
    root: PathBuf,
    compress: Option<i32>,
    index: RwLock<HashMap<ObjectId, Place>>,
    segments: RwLock<HashMap<u32, Segment>>,
    active: Mutex<Active>,
}

struct Segment {
    file: Arc<File>,
    ids: Vec<(ObjectId, u32, u32)>,
    bytes: u64,
}

struct Header {
    stored: u32,
    raw: u32,
    flags: u32,
    id: ObjectId,
    sum: u64,
}

impl Header {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut h = [0u8; HEADER_BYTES];
        h[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        h[4..8].copy_from_slice(&self.stored.to_le_bytes());
        h[8..12].copy_from_slice(&self.raw.to_le_bytes());
        h[12..16].copy_from_slice(&self.flags.to_le_bytes());
        h[16..32].copy_from_slice(&self.id.0.to_le_bytes());
        h[32..40].copy_from_slice(&self.sum.to_le_bytes());
        let own = xxh3_64(&h[..40]);
        h[40..48].copy_from_slice(&own.to_le_bytes());
        h
    }

    fn decode(h: &[u8]) -> Option<Self> {
        let u32_at = |i: usize| Some(u32::from_le_bytes(h.get(i..i + 4)?.try_into().ok()?));
        let u64_at = |i: usize| Some(u64::from_le_bytes(h.get(i..i + 8)?.try_into().ok()?));
        if u32_at(0)? != MAGIC || u64_at(40)? != xxh3_64(h.get(..40)?) {
            return None;
        }
        let id = u128::from_le_bytes(h.get(16..32)?.try_into().ok()?);
        Some(Self {
            stored: u32_at(4)?,
            raw: u32_at(8)?,
            flags: u32_at(12)?,
            id: ObjectId(id),
            sum: u64_at(32)?,
        })
    }
}

fn record_bytes(stored: u32) -> u32 {
    (HEADER_BYTES as u32 + stored).next_multiple_of(8)
}

impl SmallStore {
    pub(super) fn open(dir: &Path, compress: Option<i32>) -> io::Result<Self> {
        let root = dir.join("small");
        fs::create_dir_all(&root)?;
        let mut numbers = Vec::new();
        for e in fs::read_dir(&root)? {
            let path = e?.path();
            let number = path.file_stem().and_then(|s| s.to_str()).and_then(|s| s.parse().ok());
            match (number, path.extension().and_then(|x| x.to_str())) {
                (Some(n), Some("seg")) => numbers.push(n),
                (Some(_), Some("idx")) if path.with_extension("seg").exists() => {}
                _ => {
                    let _ = fs::remove_file(&path);
                }
            }
        }
        numbers.sort_unstable();
        let next = numbers.last().map_or(0, |n: &u32| n + 1);
        let mut index = HashMap::new();
        let mut segments = HashMap::new();
        for n in numbers {
            let path = root.join(format!("{n}.seg"));
            let file = Arc::new(File::options().read(true).write(true).open(path)?);
            let idx = root.join(format!("{n}.idx"));
            let ids = match read_index(&idx) {
                Some(ids) => ids,
                None => {
                    let ids = scan(&file);
                    write_index(&idx, &ids)?;
                    ids
                }
            };
            let mut bytes = 0;
            for (id, offset, stored) in &ids {
                bytes += u64::from(record_bytes(*stored));
                index.insert(*id, Place { segment: n, offset: *offset, stored: *stored });
            }
            segments.insert(n, Segment { file, ids, bytes });
        }
        let active = start_segment(&root, next)?;
        segments.insert(next, Segment { file: active.file.clone(), ids: Vec::new(), bytes: 0 });
        Ok(Self {
            root,
            compress,
            index: RwLock::new(index),
            segments: RwLock::new(segments),
            active: Mutex::new(active),
        })
    }

    /// Segments and their bytes, oldest first.
    pub(super) fn stored(&self) -> Vec<(u32, u64)> {
        let mut v: Vec<_> =
            self.segments.read().iter().map(|(n, s)| (*n, s.bytes)).filter(|s| s.1 > 0).collect();
        v.sort_unstable();
        v
    }

    pub(super) fn contains(&self, id: ObjectId) -> bool {
        self.index.read().contains_key(&id)
    }

    /// The object's segment and bytes: `Ok(None)` if they are bad and forgotten.
    pub(super) fn get(&self, id: ObjectId) -> Option<(u32, io::Result<Option<Bytes>>)> {
        let place = *self.index.read().get(&id)?;
        let file = self.segments.read().get(&place.segment)?.file.clone();
        let r = match read_record(&file, id, place) {
            Ok(Some(b)) => Ok(Some(b)),
            Ok(None) => {
                tracing::warn!(%id, segment = place.segment, "a cached object has a bad checksum: it is fetched again");
                self.forget(id);
                Ok(None)
            }
            Err(e) => {
                self.forget(id);
                Err(e)
            }
        };
        Some((place.segment, r))
    }

    /// Appends an object: its segment, and the bytes that it takes.
    pub(super) fn put(&self, id: ObjectId, data: &[u8]) -> io::Result<(u32, u64)> {
        let packed = self.compress.and_then(|level| zstd::bulk::compress(data, level).ok());
        let packed =
            packed.filter(|p| p.len() + data.len() / COMPRESS_MIN_SAVING_DIVISOR < data.len());
        let (bytes, flags) = match &packed {
            Some(p) => (p.as_slice(), FLAG_ZSTD),
            None => (data, 0),
        };
        let header = Header {
            stored: bytes.len() as u32,
            raw: data.len() as u32,
            flags,
            id,
            sum: xxh3_64(bytes),
        };
        let whole = record_bytes(header.stored);
        let (number, file, offset) = {
            let mut a = self.active.lock();
            if a.end + whole > SEGMENT_BYTES && a.end > 0 {
                let next = start_segment(&self.root, a.number + 1)?;
                let mut segments = self.segments.write();
                if let Some(s) = segments.get(&a.number) {
                    write_index(&self.root.join(format!("{}.idx", a.number)), &s.ids)?;
                }
                segments.insert(
                    next.number,
                    Segment { file: next.file.clone(), ids: Vec::new(), bytes: 0 },
                );
                *a = next;
            }
            let at = a.end;
            a.end += whole;
            (a.number, a.file.clone(), at)
        };
        file.write_all_at(&header.encode(), u64::from(offset))?;
        file.write_all_at(bytes, u64::from(offset) + HEADER_BYTES as u64)?;
        if let Some(s) = self.segments.write().get_mut(&number) {
            s.ids.push((id, offset, header.stored));
            s.bytes += u64::from(whole);
        }
        self.index.write().insert(id, Place { segment: number, offset, stored: header.stored });
        Ok((number, u64::from(whole)))
    }

    pub(super) fn forget(&self, id: ObjectId) {
        self.index.write().remove(&id);
    }

    pub(super) fn is_active(&self, segment: u32) -> bool {
        self.active.lock().number == segment
    }

    pub(super) fn holds_any(&self, segment: u32, pins: &Pins) -> bool {
        !pins.is_empty()
            && self
                .segments
                .read()
                .get(&segment)
                .is_some_and(|s| s.ids.iter().any(|(id, ..)| pins.contains(*id)))
    }

    /// The segment of an object and the bytes that it takes there.
    pub(super) fn place(&self, id: ObjectId) -> Option<(u32, u64)> {
        self.index.read().get(&id).map(|p| (p.segment, u64::from(record_bytes(p.stored))))
    }

    /// Drops all of a segment but what is to be kept.
    pub(super) fn drop_segment(&self, number: u32, keep: &dyn Fn(ObjectId) -> bool) {
        let Some(ids) = self.segments.read().get(&number).map(|s| s.ids.clone()) else { return };
        if !ids.iter().any(|(id, ..)| keep(*id)) {
            return self.remove_segment(number);
        }
        for (id, ..) in ids.iter().filter(|(id, ..)| !keep(*id)) {
            self.drop_object(*id, Some(number));
        }
    }

    fn remove_segment(&self, number: u32) {
        let Some(s) = self.segments.write().remove(&number) else { return };
        let mut index = self.index.write();
        for (id, ..) in &s.ids {
            if index.get(id).is_some_and(|p| p.segment == number) {
                index.remove(id);
            }
        }
        drop(index);
        let _ = fs::remove_file(self.root.join(format!("{number}.idx")));
        let _ = fs::remove_file(self.root.join(format!("{number}.seg")));
    }

    /// Drops one object, if it is in that segment: its bytes become a hole.
    pub(super) fn drop_object(&self, id: ObjectId, segment: Option<u32>) {
        let place = {
            let mut index = self.index.write();
            match index.get(&id).copied() {
                Some(p) if segment.is_none_or(|s| s == p.segment) => index.remove(&id),
                _ => None,
            }
        };
        let Some(p) = place else { return };
        let file = {
            let mut segments = self.segments.write();
            let Some(s) = segments.get_mut(&p.segment) else { return };
            s.ids.retain(|(_, offset, _)| *offset != p.offset);
            s.bytes = s.bytes.saturating_sub(u64::from(record_bytes(p.stored)));
            s.file.clone()
        };
        if self.segments.read().get(&p.segment).is_some_and(|s| s.ids.is_empty())
            && !self.is_active(p.segment)
        {
            return self.remove_segment(p.segment);
        }
        // A start must not believe the index of a sealed segment any longer.
        let _ = fs::remove_file(self.root.join(format!("{}.idx", p.segment)));
        if let Err(e) = bury(&file, id, p) {
            tracing::warn!(segment = p.segment, error = %e, "no hole could be punched");
        }
    }
}

fn start_segment(root: &Path, number: u32) -> io::Result<Active> {
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(root.join(format!("{number}.seg")))?;
    Ok(Active { number, file: Arc::new(file), end: 0 })
}

fn read_record(file: &File, id: ObjectId, place: Place) -> io::Result<Option<Bytes>> {
    let mut buf = vec![0u8; HEADER_BYTES + place.stored as usize];
    match file.read_exact_at(&mut buf, u64::from(place.offset)) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(e),
    }
    let Some(h) = Header::decode(&buf) else { return Ok(None) };
    let stored = &buf[HEADER_BYTES..];
    if h.flags & FLAG_DEAD != 0
        || h.id != id
        || h.stored != place.stored
        || h.sum != xxh3_64(stored)
    {
        return Ok(None);
    }
    if h.flags & FLAG_ZSTD == 0 {
        return Ok(Some(Bytes::from(buf).slice(HEADER_BYTES..)));
    }
    let raw = zstd::bulk::decompress(stored, h.raw as usize).ok();
    Ok(raw.filter(|r| r.len() == h.raw as usize).map(Bytes::from))
}

/// Marks a record dead, and frees the pages of its bytes.
fn bury(file: &File, id: ObjectId, p: Place) -> io::Result<()> {
    let header = Header { stored: p.stored, raw: 0, flags: FLAG_DEAD, id, sum: 0 };
    file.write_all_at(&header.encode(), u64::from(p.offset))?;
    let bytes = u64::from(p.offset) + HEADER_BYTES as u64;
    let start = bytes.next_multiple_of(PAGE_BYTES);
    let end = (bytes + u64::from(p.stored)) / PAGE_BYTES * PAGE_BYTES;
    if end > start {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(file, flags, start, end - start)?;
    }
    Ok(())
}

fn scan(file: &File) -> Vec<(ObjectId, u32, u32)> {
    let mut found = Vec::new();
    let size = file.metadata().map_or(0, |m| m.len());
    let mut at = 0u64;
    let mut h = [0u8; HEADER_BYTES];
    while file.read_exact_at(&mut h, at).is_ok() {
        let Some(header) = Header::decode(&h) else { break };
        if at + HEADER_BYTES as u64 + u64::from(header.stored) > size {
            break;
        }
        if header.flags & FLAG_DEAD == 0 {
            found.push((header.id, at as u32, header.stored));
        }
        at += u64::from(record_bytes(header.stored));
    }
    found
}

fn write_index(path: &Path, ids: &[(ObjectId, u32, u32)]) -> io::Result<()> {
    let mut b = Vec::with_capacity(ids.len() * 24 + 8);
    for (id, offset, stored) in ids {
        b.extend_from_slice(&id.0.to_le_bytes());
        b.extend_from_slice(&offset.to_le_bytes());
        b.extend_from_slice(&stored.to_le_bytes());
    }
    b.extend_from_slice(&xxh3_64(&b).to_le_bytes());
    let temp = path.with_extension("new");
    fs::write(&temp, b)?;
    fs::rename(temp, path)
}

fn read_index(path: &Path) -> Option<Vec<(ObjectId, u32, u32)>> {
    let b = fs::read(path).ok()?;
    let (body, sum) = b.split_at_checked(b.len().checked_sub(8)?)?;
    if xxh3_64(body) != u64::from_le_bytes(sum.try_into().ok()?) || body.len() % 24 != 0 {
        return None;
    }
    body.chunks_exact(24)
        .map(|e| {
            let id = u128::from_le_bytes(e[..16].try_into().ok()?);
            let offset = u32::from_le_bytes(e[16..20].try_into().ok()?);
            let stored = u32::from_le_bytes(e[20..24].try_into().ok()?);
            Some((ObjectId(id), offset, stored))
        })
        .collect()
}

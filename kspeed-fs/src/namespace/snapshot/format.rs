//! The index file: sorted keys, front-coded in blocks, with what a listing tells.
//!
//! ```text
//!  0  magic "KSSNAP01"             16  blocks, u64        32  shadowed, u64
//!  8  entries, u64                 24  built, ns, i64     40  source, XXH3-128
//! 56  XXH3-64 of all that follows  64  offsets of blocks from the start of the
//!     and of bytes 0..56               file, u64 each; then shadowed ordinals,
//!                                      u64 each; then the blocks
//! block = 16 entries (the last may have fewer):
//!   shared, suffix length: varint; suffix; size: varint;
//!   mtime in seconds: zigzag varint, as a difference to the entry before;
//!   version: 0 + 16 bytes (an MD5 in hex) | 1 + 16 bytes + varint (MD5-parts)
//!            | n + 2, then n bytes
//! ```
//! Little-endian; front coding as in Witten, Moffat and Bell, "Managing
//! Gigabytes", ch. 4: each key is the number of bytes shared with the one
//! before, and the rest. "Shadowed" are the ordinals of objects hidden by a
//! directory of the same name.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use kspeed_cache::{Key, ObjectKind, ObjectMeta, Version};
use memmap2::Mmap;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::namespace::names;

const MAGIC: &[u8; 8] = b"KSSNAP01";
const HEADER_BYTES: usize = 64;
/// Entries a block: a lookup decodes half of them on average, and each block
/// costs 8 bytes of offset.
const BLOCK_ENTRIES: u64 = 16;

/// Why an index can't be used.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The file fails.
    #[error("{path}: {source}; remove it to have it built anew")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Not an index, or a damaged one.
    #[error(
        "{path}: not a snapshot index of this source, or damaged; remove it to have it built anew"
    )]
    Bad {
        /// The file.
        path: PathBuf,
    },
    /// Keys that are not in order.
    #[error("the origin's listing is not in order: {key} after {before}")]
    Order {
        /// The key.
        key: Key,
        /// The one before.
        before: Key,
    },
    /// The origin failed.
    #[error(transparent)]
    Origin(#[from] kspeed_cache::origin::OriginError),
}

fn put_varint(out: &mut Vec<u8>, mut v: u64) {
    while v >= 0x80 {
        out.push(v as u8 | 0x80);
        v >>= 7;
    }
    out.push(v as u8);
}

fn zigzag(v: i64) -> u64 {
    ((v << 1) ^ (v >> 63)) as u64
}

fn unzigzag(v: u64) -> i64 {
    (v >> 1) as i64 ^ -((v & 1) as i64)
}

fn put_version(out: &mut Vec<u8>, v: &str) {
    let (hash, parts) = match v.split_once('-') {
        Some((h, p)) => (h, p.parse::<u64>().ok().filter(|n| n.to_string() == p)),
        None => (v, None),
    };
    let md5 = (hash.len() == 32 && !hash.bytes().any(|b| b.is_ascii_uppercase()))
        .then(|| u128::from_str_radix(hash, 16).ok())
        .flatten();
    match (md5, parts, v.contains('-')) {
        (Some(h), None, false) => {
            out.push(0);
            out.extend_from_slice(&h.to_be_bytes());
        }
        (Some(h), Some(n), true) => {
            out.push(1);
            out.extend_from_slice(&h.to_be_bytes());
            put_varint(out, n);
        }
        _ => {
            put_varint(out, v.len() as u64 + 2);
            out.extend_from_slice(v.as_bytes());
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut v = 0u64;
        for shift in (0..64).step_by(7) {
            let (b, rest) = self.0.split_first()?;
            self.0 = rest;
            v |= u64::from(b & 0x7f) << shift;
            if b & 0x80 == 0 {
                return Some(v);
            }
        }
        None
    }

    fn take(&mut self, n: u64) -> Option<&'a [u8]> {
        let (a, b) = self.0.split_at_checked(usize::try_from(n).ok()?)?;
        self.0 = b;
        Some(a)
    }

    fn version(&mut self) -> Option<Version> {
        let tag = self.varint()?;
        if tag >= 2 {
            return std::str::from_utf8(self.take(tag - 2)?).ok().map(Version::from);
        }
        let h = u128::from_be_bytes(self.take(16)?.try_into().ok()?);
        if tag == 0 {
            return Some(format!("{h:032x}").into());
        }
        Some(format!("{h:032x}-{}", self.varint()?).into())
    }
}

/// Writes an index. Keys come in order; those that have no path are counted
/// and left out.
pub struct SnapshotBuilder {
    path: PathBuf,
    body: BufWriter<File>,
    body_path: PathBuf,
    body_bytes: u64,
    offsets: Vec<u64>,
    shadowed: Vec<u64>,
    entries: u64,
    hidden: u64,
    last_key: Vec<u8>,
    last_mtime: i64,
    /// Objects of which the current key may turn out to be below.
    open: Vec<(Vec<u8>, u64)>,
    buffer: Vec<u8>,
}

impl SnapshotBuilder {
    /// Starts an index that will be at `path`; nothing is there until
    /// [`Self::finish`].
    ///
    /// # Errors
    /// The directory can't be written.
    pub fn new(path: &Path) -> Result<Self, SnapshotError> {
        let body_path = path.with_extension("body");
        let io = |source| SnapshotError::Io { path: body_path.clone(), source };
        if let Some(d) = path.parent() {
            std::fs::create_dir_all(d).map_err(io)?;
        }
        let body = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&body_path)
            .map_err(io)?;
        Ok(Self {
            path: path.to_path_buf(),
            body: BufWriter::with_capacity(1 << 20, body),
            body_path,
            body_bytes: 0,
            offsets: Vec::new(),
            shadowed: Vec::new(),
            entries: 0,
            hidden: 0,
            last_key: Vec::new(),
            last_mtime: 0,
            open: Vec::new(),
            buffer: Vec::new(),
        })
    }

    /// Adds the next key.
    ///
    /// # Errors
    /// It is not after the last one, or the disk fails.
    pub fn push(&mut self, m: &ObjectMeta) -> Result<(), SnapshotError> {
        let key = m.key.as_bytes();
        if !names::is_path(key) {
            self.hidden += 1;
            return Ok(());
        }
        if self.entries > 0 && key <= self.last_key.as_slice() {
            return Err(SnapshotError::Order {
                key: m.key.clone(),
                before: self.last_key.as_slice().into(),
            });
        }
        while self.open.last().is_some_and(|(k, _)| !key.starts_with(k)) {
            self.open.pop();
        }
        for (k, n) in &self.open {
            if key.get(k.len()) == Some(&b'/') && self.shadowed.last().is_none_or(|l| l < n) {
                self.shadowed.push(*n);
            }
        }
        if key.last() != Some(&b'/') {
            self.open.push((key.to_vec(), self.entries));
        }
        let b = &mut self.buffer;
        b.clear();
        if self.entries.is_multiple_of(BLOCK_ENTRIES) {
            self.offsets.push(self.body_bytes);
            self.last_key.clear();
            self.last_mtime = 0;
        }
        let shared = self.last_key.iter().zip(key).take_while(|(a, b)| a == b).count();
        put_varint(b, shared as u64);
        put_varint(b, (key.len() - shared) as u64);
        b.extend_from_slice(&key[shared..]);
        put_varint(b, m.size);
        let mtime = m.mtime_ns.div_euclid(1_000_000_000);
        put_varint(b, zigzag(mtime.wrapping_sub(self.last_mtime)));
        put_version(b, m.version.as_str());
        self.body
            .write_all(b)
            .map_err(|source| SnapshotError::Io { path: self.body_path.clone(), source })?;
        self.body_bytes += b.len() as u64;
        self.last_key.clear();
        self.last_key.extend_from_slice(key);
        self.last_mtime = mtime;
        self.entries += 1;
        Ok(())
    }

    /// Entries so far.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Writes header and tables, and puts the file in place in one step.
    ///
    /// # Errors
    /// The disk fails.
    pub fn finish(mut self, source: &str, built_ns: i64) -> Result<SnapshotIndex, SnapshotError> {
        let path = self.path.clone();
        let io = |e| SnapshotError::Io { path: path.clone(), source: e };
        // Ordinals are found in the order of the keys that shadow them.
        self.shadowed.sort_unstable();
        self.shadowed.dedup();
        let tables = (self.offsets.len() + self.shadowed.len()) as u64 * 8;
        let base = HEADER_BYTES as u64 + tables;
        let mut head = Vec::with_capacity(HEADER_BYTES);
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(&self.entries.to_le_bytes());
        head.extend_from_slice(&(self.offsets.len() as u64).to_le_bytes());
        head.extend_from_slice(&built_ns.to_le_bytes());
        head.extend_from_slice(&(self.shadowed.len() as u64).to_le_bytes());
        head.extend_from_slice(&xxh3_128(source.as_bytes()).to_le_bytes());
        let temp = path.with_extension("new");
        let mut out = BufWriter::with_capacity(1 << 20, File::create(&temp).map_err(io)?);
        let mut sum = Xxh3::new();
        sum.update(&head);
        out.write_all(&head).map_err(io)?;
        out.write_all(&[0; 8]).map_err(io)?;
        for v in self.offsets.iter().map(|o| o + base).chain(self.shadowed.iter().copied()) {
            sum.update(&v.to_le_bytes());
            out.write_all(&v.to_le_bytes()).map_err(io)?;
        }
        self.body.flush().map_err(io)?;
        let mut body = self.body.get_ref();
        body.seek(SeekFrom::Start(0)).map_err(io)?;
        let mut chunk = vec![0; 1 << 20];
        loop {
            let n = body.read(&mut chunk).map_err(io)?;
            if n == 0 {
                break;
            }
            sum.update(&chunk[..n]);
            out.write_all(&chunk[..n]).map_err(io)?;
        }
        let mut file = out.into_inner().map_err(|e| io(e.into_error()))?;
        file.seek(SeekFrom::Start(56)).map_err(io)?;
        file.write_all(&sum.digest().to_le_bytes()).map_err(io)?;
        file.sync_all().map_err(io)?;
        std::fs::rename(&temp, &path).map_err(io)?;
        SnapshotIndex::open(&path, source)
    }
}

impl Drop for SnapshotBuilder {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.body_path);
    }
}

/// An index, mapped.
pub struct SnapshotIndex {
    map: Mmap,
    entries: u64,
    blocks: u64,
    shadowed: u64,
    built_ns: i64,
}

impl SnapshotIndex {
    /// Maps a file and checks it whole.
    ///
    /// # Errors
    /// It can't be read, is damaged, or of another source.
    pub fn open(path: &Path, source: &str) -> Result<Self, SnapshotError> {
        let io = |source| SnapshotError::Io { path: path.to_path_buf(), source };
        let bad = || SnapshotError::Bad { path: path.to_path_buf() };
        let file = File::open(path).map_err(io)?;
        // SAFETY: the file is in our cache directory, which one process locks;
        // it is replaced by rename and never written to or cut.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let word = |at: usize| -> Option<u64> {
            Some(u64::from_le_bytes(map.get(at..at + 8)?.try_into().ok()?))
        };
        if map.get(..8) != Some(MAGIC) || map.len() < HEADER_BYTES {
            return Err(bad());
        }
        if map[40..56] != xxh3_128(source.as_bytes()).to_le_bytes() {
            return Err(bad());
        }
        let mut sum = Xxh3::new();
        sum.update(&map[..56]);
        sum.update(&map[64..]);
        if word(56) != Some(sum.digest()) {
            return Err(bad());
        }
        let (entries, blocks, shadowed) =
            (word(8).ok_or_else(bad)?, word(16).ok_or_else(bad)?, word(32).ok_or_else(bad)?);
        let built_ns = word(24).ok_or_else(bad)? as i64;
        let tables = blocks.checked_add(shadowed).and_then(|n| n.checked_mul(8)).ok_or_else(bad)?;
        if blocks != entries.div_ceil(BLOCK_ENTRIES)
            || HEADER_BYTES as u64 + tables > map.len() as u64
        {
            return Err(bad());
        }
        Ok(Self { map, entries, blocks, shadowed, built_ns })
    }

    /// Number of keys.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.entries
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// When it was built, nanoseconds since 1970.
    #[must_use]
    pub fn built_ns(&self) -> i64 {
        self.built_ns
    }

    /// Bytes of the file: what can be resident at the most.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    fn table(&self, i: u64) -> u64 {
        let at = HEADER_BYTES + i as usize * 8;
        self.map
            .get(at..at + 8)
            .and_then(|b| b.try_into().ok())
            .map_or(u64::MAX, u64::from_le_bytes)
    }

    /// Whether the object is hidden by a directory of its name.
    #[must_use]
    pub fn is_shadowed(&self, ordinal: u64) -> bool {
        let (mut lo, mut hi) = (0, self.shadowed);
        while lo < hi {
            let mid = (lo + hi) / 2;
            match self.table(self.blocks + mid).cmp(&ordinal) {
                std::cmp::Ordering::Equal => return true,
                std::cmp::Ordering::Less => lo = mid + 1,
                std::cmp::Ordering::Greater => hi = mid,
            }
        }
        false
    }

    fn block(&self, b: u64) -> Cursor<'_> {
        let at = usize::try_from(self.table(b)).unwrap_or(usize::MAX);
        Cursor {
            reader: Reader(self.map.get(at..).unwrap_or(&[])),
            index: self,
            next: b * BLOCK_ENTRIES,
            key: Vec::new(),
            mtime: 0,
        }
    }

    /// Entries from an ordinal on.
    #[must_use]
    pub fn from(&self, ordinal: u64) -> Cursor<'_> {
        if ordinal >= self.entries {
            return Cursor {
                reader: Reader(&[]),
                index: self,
                next: self.entries,
                key: Vec::new(),
                mtime: 0,
            };
        }
        let mut c = self.block(ordinal / BLOCK_ENTRIES);
        while c.next < ordinal {
            if c.advance().is_none() {
                break;
            }
        }
        c
    }

    /// The first ordinal whose key is not before `key`.
    #[must_use]
    pub fn lower_bound(&self, key: &[u8]) -> u64 {
        // The last block whose first key is not after `key`.
        let (mut lo, mut hi) = (0, self.blocks);
        while lo < hi {
            let mid = (lo + hi) / 2;
            let mut c = self.block(mid);
            let before = c.advance().is_some() && c.key.as_slice() <= key;
            if before {
                lo = mid + 1;
            } else {
                hi = mid;
            }
        }
        let mut c = self.block(lo.saturating_sub(1));
        if self.is_empty() {
            return 0;
        }
        loop {
            let at = c.next;
            if c.advance().is_none() || c.key.as_slice() >= key {
                return at;
            }
        }
    }
}

/// Walks over entries.
pub struct Cursor<'a> {
    reader: Reader<'a>,
    index: &'a SnapshotIndex,
    next: u64,
    key: Vec<u8>,
    mtime: i64,
}

/// What [`Cursor::advance`] found beside the key.
pub struct Raw {
    /// Its ordinal.
    pub ordinal: u64,
    /// Size in bytes.
    pub size: u64,
    /// Seconds since 1970.
    pub mtime_s: i64,
    /// Version.
    pub version: Version,
}

impl Cursor<'_> {
    /// The next entry; its key is [`Self::key`]. None at the end.
    pub fn advance(&mut self) -> Option<Raw> {
        if self.next >= self.index.entries {
            return None;
        }
        if self.next.is_multiple_of(BLOCK_ENTRIES) {
            self.key.clear();
            self.mtime = 0;
        }
        let shared = usize::try_from(self.reader.varint()?).ok()?;
        let n = self.reader.varint()?;
        let suffix = self.reader.take(n)?;
        self.key.truncate(shared);
        self.key.extend_from_slice(suffix);
        let size = self.reader.varint()?;
        self.mtime = self.mtime.wrapping_add(unzigzag(self.reader.varint()?));
        let version = self.reader.version()?;
        let ordinal = self.next;
        self.next += 1;
        Some(Raw { ordinal, size, mtime_s: self.mtime, version })
    }

    /// Key of the last entry.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// The last entry as a listing tells it.
    #[must_use]
    pub fn meta(&self, raw: &Raw) -> ObjectMeta {
        ObjectMeta {
            key: self.key.as_slice().into(),
            size: raw.size,
            mtime_ns: raw.mtime_s.saturating_mul(1_000_000_000),
            version: raw.version.clone(),
            kind: ObjectKind::File,
            mode: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn meta(key: &str, size: u64, version: &str) -> ObjectMeta {
        ObjectMeta {
            key: key.into(),
            size,
            mtime_ns: size as i64 * 1_000_000_000,
            version: version.into(),
            kind: ObjectKind::File,
            mode: None,
        }
    }

    fn built(dir: &Path, objects: &BTreeMap<String, ObjectMeta>) -> SnapshotIndex {
        let mut b = SnapshotBuilder::new(&dir.join("s.idx")).expect("builder");
        for m in objects.values() {
            b.push(m).expect("push");
        }
        b.finish("src", 7).expect("finish")
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn it_is_the_map_that_went_in(
            keys in proptest::collection::btree_set("[a-c/]{0,3}[a-d]{1,6}", 0..200),
            probes in proptest::collection::vec("[a-d/]{0,6}", 20),
        ) {
            let dir = tempfile::tempdir().expect("tempdir");
            let versions = ["d41d8cd98f00b204e9800998ecf8427e", "d41d8cd98f00b204e9800998ecf8427e-12", "D41D8CD98F00B204E9800998ECF8427E", "v1", "", "x-1"];
            let objects: BTreeMap<String, ObjectMeta> = keys
                .into_iter()
                .filter(|k| names::is_path(k.as_bytes()))
                .enumerate()
                .map(|(i, k)| (k.clone(), meta(&k, (i * 7919) as u64, versions[i % versions.len()])))
                .collect();
            let s = built(dir.path(), &objects);
            prop_assert_eq!(s.len(), objects.len() as u64);
            let mut c = s.from(0);
            for (k, m) in &objects {
                let raw = c.advance().expect("entry");
                prop_assert_eq!(c.key(), k.as_bytes());
                prop_assert_eq!(&c.meta(&raw), m);
            }
            prop_assert!(c.advance().is_none());
            let sorted: Vec<&String> = objects.keys().collect();
            for p in probes {
                let want = sorted.partition_point(|k| k.as_bytes() < p.as_bytes());
                prop_assert_eq!(s.lower_bound(p.as_bytes()), want as u64);
            }
            for (i, k) in sorted.iter().enumerate() {
                let below = format!("{k}/");
                let shadowed = sorted.iter().any(|o| o.starts_with(&below));
                prop_assert_eq!(s.is_shadowed(i as u64), shadowed, "{}", k);
            }
        }
    }

    #[test]
    fn a_damaged_file_or_one_of_another_source_is_refused() {
        let dir = tempfile::tempdir().expect("tempdir");
        let objects = [("a".to_owned(), meta("a", 1, "v"))].into();
        built(dir.path(), &objects);
        let path = dir.path().join("s.idx");
        assert!(matches!(SnapshotIndex::open(&path, "other"), Err(SnapshotError::Bad { .. })));
        let mut bytes = std::fs::read(&path).expect("read");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&path, &bytes).expect("write");
        assert!(matches!(SnapshotIndex::open(&path, "src"), Err(SnapshotError::Bad { .. })));
        bytes.truncate(30);
        std::fs::write(&path, &bytes).expect("write");
        assert!(matches!(SnapshotIndex::open(&path, "src"), Err(SnapshotError::Bad { .. })));
    }

    #[test]
    fn keys_out_of_order_are_an_error() {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut b = SnapshotBuilder::new(&dir.path().join("s.idx")).expect("builder");
        b.push(&meta("b", 1, "v")).expect("push");
        assert!(matches!(b.push(&meta("a", 1, "v")), Err(SnapshotError::Order { .. })));
    }
}

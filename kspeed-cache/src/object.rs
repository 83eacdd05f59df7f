//! Names for what is cached: keys, versions, objects and their blocks.
//!
//! Invariant I1 rests on [`ObjectId`]: it hashes origin, key, version and size,
//! so bytes of two versions can never meet under one name.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xxhash_rust::xxh3::Xxh3;

/// Default block: the unit of the bitmap, of checksums and of waiting, in bytes.
///
/// 1 MiB, not the 4 MiB of the first design: a cold random read waits for one
/// block (10 ms at 100 MB/s instead of 42 ms), while sequential readers still
/// fetch [`crate::EXTENT_BYTES`] a request.
pub const BLOCK_BYTES_DEFAULT: u64 = 1 << 20;

/// An object's key, relative to the mounted prefix. Bytes, since names in a
/// directory origin need not be UTF-8; cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<[u8]>);

impl Key {
    /// The key as bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The key as UTF-8, which every key of an S3 origin is.
    ///
    /// # Errors
    /// The key is not UTF-8.
    pub fn to_str(&self) -> Result<&str, std::str::Utf8Error> {
        std::str::from_utf8(&self.0)
    }
}

impl From<&[u8]> for Key {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }
}

impl From<Vec<u8>> for Key {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl From<&str> for Key {
    fn from(s: &str) -> Self {
        Self(s.as_bytes().into())
    }
}

impl From<String> for Key {
    fn from(s: String) -> Self {
        Self(s.into_bytes().into())
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// Keys are written as text with all but printable ASCII, and `%`, as `%XX`.
impl Serialize for Key {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(&percent_encoding::percent_encode(self.as_bytes(), ESCAPED))
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        Ok(percent_encoding::percent_decode_str(&text).collect::<Vec<u8>>().into())
    }
}

const ESCAPED: &percent_encoding::AsciiSet = &percent_encoding::CONTROLS.add(b'%');

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d).map(Into::into)
    }
}

/// What tells two contents of one key apart: the ETag without quotes, or
/// inode, mtime and size for a directory origin.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Version(Arc<str>);

impl Version {
    /// The version as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Version {
    fn from(s: &str) -> Self {
        Self(s.into())
    }
}

impl From<String> for Version {
    fn from(s: String) -> Self {
        Self(s.into())
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What kind of thing a key names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ObjectKind {
    /// Bytes.
    File,
    /// A symbolic link (directory origins only); its target is its content.
    Symlink,
}

/// What a listing tells of an object.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ObjectMeta {
    /// Key relative to the origin's prefix.
    pub key: Key,
    /// Size in bytes.
    pub size: u64,
    /// Last modification, nanoseconds since the Unix epoch.
    pub mtime_ns: i64,
    /// Version of the content.
    pub version: Version,
    /// File or symbolic link.
    pub kind: ObjectKind,
    /// Permission bits, where the origin has native ones.
    pub mode: Option<u32>,
}

/// Identity of one version of one object of one origin: 128 bits of XXH3.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId(pub u128);

impl ObjectId {
    /// Hashes what makes the content unique. Lengths are hashed too, so that
    /// no two splits of the same bytes collide.
    #[must_use]
    pub fn new(origin: &str, meta: &ObjectMeta) -> Self {
        let mut h = Xxh3::new();
        for part in [origin.as_bytes(), meta.key.as_bytes(), meta.version.as_str().as_bytes()] {
            h.update(&(part.len() as u64).to_le_bytes());
            h.update(part);
        }
        h.update(&meta.size.to_le_bytes());
        Self(h.digest128())
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// How an object of `size` bytes is cut into blocks of `block_bytes`.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    /// Object size in bytes.
    pub size: u64,
    /// Block size in bytes, a power of two.
    pub block_bytes: u64,
}

impl Blocks {
    /// Number of blocks.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.size.div_ceil(self.block_bytes)).unwrap_or(u32::MAX)
    }

    /// The blocks that `len` bytes at `offset` touch, clamped to the object.
    #[must_use]
    pub fn touched(&self, offset: u64, len: u64) -> Range<u32> {
        let end = offset.saturating_add(len).min(self.size);
        if offset >= end {
            return 0..0;
        }
        let first = (offset / self.block_bytes) as u32;
        let last = ((end - 1) / self.block_bytes) as u32;
        first..last + 1
    }

    /// The bytes of block `index`.
    #[must_use]
    pub fn range(&self, index: u32) -> Range<u64> {
        let start = u64::from(index) * self.block_bytes;
        start..(start + self.block_bytes).min(self.size)
    }

    /// Length of block `index` in bytes.
    #[must_use]
    pub fn len(&self, index: u32) -> usize {
        let r = self.range(index);
        (r.end - r.start) as usize
    }

    /// Whether there are no blocks, as in an empty object.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.size == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn meta(key: &str, version: &str, size: u64) -> ObjectMeta {
        ObjectMeta {
            key: key.into(),
            size,
            mtime_ns: 0,
            version: version.into(),
            kind: ObjectKind::File,
            mode: None,
        }
    }

    #[test]
    fn identity_covers_origin_key_version_and_size() {
        let base = ObjectId::new("s3://b/", &meta("k", "v", 1));
        assert_eq!(base, ObjectId::new("s3://b/", &meta("k", "v", 1)));
        for other in [
            ObjectId::new("s3://c/", &meta("k", "v", 1)),
            ObjectId::new("s3://b/", &meta("kv", "", 1)),
            ObjectId::new("s3://b/", &meta("", "kv", 1)),
            ObjectId::new("s3://b/", &meta("k", "w", 1)),
            ObjectId::new("s3://b/", &meta("k", "v", 2)),
        ] {
            assert_ne!(base, other);
        }
    }

    proptest! {
        #[test]
        fn touched_blocks_cover_exactly_the_bytes(size in 0u64..10_000, off in 0u64..12_000, len in 0u64..12_000) {
            let b = Blocks { size, block_bytes: 256 };
            let t = b.touched(off, len);
            for i in 0..b.count() {
                let r = b.range(i);
                let meets = off < r.end && off + len > r.start && len > 0;
                prop_assert_eq!(t.contains(&i), meets && off < size);
            }
        }
    }
}

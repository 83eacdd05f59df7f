//! Directories over a sorted index, without a table: an inode number says where
//! to look.
//!
//! ```text
//! file       01 | ordinal (62 bits)
//! directory  1 | ordinal of the first key below (52 bits) | prefix length (11)
//! ```
//! A directory is the first key below it and how much of that key is its path.
//! Keys have at most 1,024 bytes, so 11 bits hold any prefix length.

use std::time::Duration;

use kspeed_cache::ObjectMeta;

use super::format::SnapshotIndex;
use crate::errno::FsError;
use crate::namespace::{Attr, Child, Entry, Ino, Kind, ROOT, names};

const FILE: u64 = 1 << 62;
const DIRECTORY: u64 = 1 << 63;
const LENGTH_BITS: u32 = 11;
/// Nothing changes in a snapshot: the kernel may keep names as long as it likes.
const TTL: Duration = Duration::from_secs(30 * 24 * 3600);

/// The namespace of an index.
pub struct Snapshot(SnapshotIndex);

/// A directory's key prefix (empty, or ending with `/`) and its first ordinal.
struct Dir {
    prefix: Vec<u8>,
    first: u64,
}

fn file_ino(ordinal: u64) -> Ino {
    FILE | ordinal
}

fn dir_ino(first: u64, prefix_len: usize) -> Ino {
    DIRECTORY | first << LENGTH_BITS | prefix_len as u64
}

impl Snapshot {
    /// Over an index.
    #[must_use]
    pub fn new(index: SnapshotIndex) -> Self {
        Self(index)
    }

    /// The index.
    #[must_use]
    pub fn index(&self) -> &SnapshotIndex {
        &self.0
    }

    fn dir(&self, ino: Ino) -> Result<Dir, FsError> {
        if ino == ROOT {
            return Ok(Dir { prefix: Vec::new(), first: 0 });
        }
        if ino & DIRECTORY == 0 {
            return Err(FsError::NotADirectory);
        }
        let first = (ino & !DIRECTORY) >> LENGTH_BITS;
        let len = (ino & ((1 << LENGTH_BITS) - 1)) as usize;
        let mut c = self.0.from(first);
        c.advance().ok_or(FsError::NotFound)?;
        let prefix = c.key().get(..len).ok_or(FsError::NotFound)?.to_vec();
        Ok(Dir { prefix, first })
    }

    fn dir_attr(&self, ino: Ino) -> Attr {
        Attr {
            ino,
            kind: Kind::Directory,
            size: 0,
            mtime_ns: self.0.built_ns(),
            mode: None,
            uid: None,
            gid: None,
        }
    }

    /// See [`crate::namespace::Namespace::lookup`].
    ///
    /// # Errors
    /// No such name.
    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Entry, FsError> {
        if !names::is_visible(name) {
            return Err(if name.len() > names::NAME_MAX {
                FsError::NameTooLong
            } else {
                FsError::NotFound
            });
        }
        let d = self.dir(parent)?;
        let mut key = [&d.prefix, name].concat();
        let at = self.0.lower_bound(&key);
        let mut c = self.0.from(at);
        if let Some(raw) = c.advance()
            && c.key() == key
            && !self.0.is_shadowed(at)
        {
            let attr = Attr {
                ino: file_ino(at),
                kind: Kind::File,
                size: raw.size,
                mtime_ns: raw.mtime_s.saturating_mul(1_000_000_000),
                mode: None,
                uid: None,
                gid: None,
            };
            return Ok(Entry { attr, ttl: TTL });
        }
        key.push(b'/');
        let at = self.0.lower_bound(&key);
        let mut c = self.0.from(at);
        if c.advance().is_some() && c.key().starts_with(&key) {
            return Ok(Entry { attr: self.dir_attr(dir_ino(at, key.len())), ttl: TTL });
        }
        Err(FsError::NotFound)
    }

    /// See [`crate::namespace::Namespace::attr`].
    ///
    /// # Errors
    /// No such inode.
    pub fn attr(&self, ino: Ino) -> Result<Entry, FsError> {
        if ino == ROOT || ino & DIRECTORY != 0 {
            return Ok(Entry { attr: self.dir_attr(ino), ttl: TTL });
        }
        let m = self.object(ino)?;
        let attr = Attr {
            ino,
            kind: Kind::File,
            size: m.size,
            mtime_ns: m.mtime_ns,
            mode: None,
            uid: None,
            gid: None,
        };
        Ok(Entry { attr, ttl: TTL })
    }

    /// See [`crate::namespace::Namespace::object`].
    ///
    /// # Errors
    /// No such inode, or a directory.
    pub fn object(&self, ino: Ino) -> Result<ObjectMeta, FsError> {
        if ino == ROOT || ino & DIRECTORY != 0 {
            return Err(FsError::IsADirectory);
        }
        let ordinal = ino & !FILE;
        let mut c = self.0.from(ordinal);
        let raw = c.advance().filter(|r| r.ordinal == ordinal).ok_or(FsError::NotFound)?;
        Ok(c.meta(&raw))
    }

    /// The directory that a file or directory is in.
    ///
    /// # Errors
    /// No such inode.
    pub fn parent(&self, ino: Ino) -> Result<Ino, FsError> {
        let d = if ino != ROOT && ino & DIRECTORY == 0 {
            let mut c = self.0.from(ino & !FILE);
            c.advance().ok_or(FsError::NotFound)?;
            Dir { prefix: c.key().to_vec(), first: 0 }
        } else {
            self.dir(ino)?
        };
        let inner = d.prefix.strip_suffix(b"/").unwrap_or(&d.prefix);
        match inner.iter().rposition(|b| *b == b'/') {
            None => Ok(ROOT),
            Some(i) => Ok(dir_ino(self.0.lower_bound(&d.prefix[..=i]), i + 1)),
        }
    }

    /// A directory's path below the prefix.
    #[must_use]
    pub fn path(&self, ino: Ino) -> String {
        let prefix = self.dir(ino).map(|d| d.prefix).unwrap_or_default();
        String::from_utf8_lossy(&prefix).trim_end_matches('/').to_owned()
    }

    /// Calls `each` with the children from a position on (0: the first; else
    /// what an earlier child told as `next`) until it returns false.
    ///
    /// # Errors
    /// No such directory.
    pub fn children(
        &self,
        ino: Ino,
        position: u64,
        each: &mut dyn FnMut(Child<'_>) -> bool,
    ) -> Result<(), FsError> {
        let d = self.dir(ino)?;
        let mut c = self.0.from(d.first.max(position));
        while let Some(raw) = c.advance() {
            let Some(rest) = c.key().strip_prefix(d.prefix.as_slice()) else { break };
            if rest.is_empty() {
                continue;
            }
            match rest.iter().position(|b| *b == b'/') {
                None => {
                    if self.0.is_shadowed(raw.ordinal) {
                        continue;
                    }
                    let attr = Attr {
                        ino: file_ino(raw.ordinal),
                        kind: Kind::File,
                        size: raw.size,
                        mtime_ns: raw.mtime_s.saturating_mul(1_000_000_000),
                        mode: None,
                        uid: None,
                        gid: None,
                    };
                    if !each(Child { name: rest, attr, next: raw.ordinal + 1 }) {
                        break;
                    }
                }
                Some(i) => {
                    // One child for all that lies below; go on behind it.
                    let len = d.prefix.len() + i + 1;
                    let mut behind = c.key()[..len].to_vec();
                    behind[len - 1] = b'/' + 1;
                    let next = self.0.lower_bound(&behind);
                    let attr = self.dir_attr(dir_ino(raw.ordinal, len));
                    if !each(Child { name: &rest[..i], attr, next }) {
                        break;
                    }
                    c = self.0.from(next);
                }
            }
        }
        Ok(())
    }

    /// See [`crate::namespace::Namespace::place`]. The place is the ordinal, so
    /// files of subdirectories count too.
    #[must_use]
    pub fn place(&self, ino: Ino) -> Option<(Ino, u64, u64, u64)> {
        if ino & FILE == 0 || ino & DIRECTORY != 0 {
            return None;
        }
        let ordinal = ino & !FILE;
        // The mean of a few neighbours stands for the directory's.
        let mut c = self.0.from(ordinal);
        let (mut n, mut bytes) = (0, 0);
        while n < 8 {
            let Some(raw) = c.advance() else { break };
            n += 1;
            bytes += raw.size;
        }
        Some((ROOT, ordinal, self.0.len(), bytes / n.max(1)))
    }

    /// See [`crate::namespace::Namespace::files_at`].
    #[must_use]
    pub fn files_at(
        &self,
        _directory: Ino,
        places: std::ops::Range<u64>,
    ) -> Vec<(Ino, ObjectMeta)> {
        let mut out = Vec::new();
        let mut c = self.0.from(places.start);
        while let Some(raw) = c.advance() {
            if raw.ordinal >= places.end {
                break;
            }
            if c.key().last() != Some(&b'/') && !self.0.is_shadowed(raw.ordinal) {
                out.push((file_ino(raw.ordinal), c.meta(&raw)));
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::snapshot::SnapshotBuilder;
    use kspeed_cache::ObjectKind;
    use std::collections::BTreeSet;

    fn snapshot(dir: &std::path::Path, keys: &[&str]) -> Snapshot {
        let sorted: BTreeSet<&str> = keys.iter().copied().collect();
        let mut b = SnapshotBuilder::new(&dir.join("s.idx")).expect("builder");
        for k in sorted {
            b.push(&ObjectMeta {
                key: k.into(),
                size: k.len() as u64,
                mtime_ns: 0,
                version: "v".into(),
                kind: ObjectKind::File,
                mode: None,
            })
            .expect("push");
        }
        Snapshot::new(b.finish("src", 5).expect("finish"))
    }

    fn list(s: &Snapshot, ino: Ino, a_time: usize) -> Vec<String> {
        let (mut out, mut position) = (Vec::new(), 0);
        loop {
            let before = out.len();
            s.children(ino, position, &mut |c| {
                out.push(String::from_utf8_lossy(c.name).into_owned());
                position = c.next;
                out.len() - before < a_time
            })
            .expect("children");
            if out.len() == before {
                return out;
            }
        }
    }

    /// N1, N2, N8: the same rules as in the live namespace, in lookup and
    /// listing, paged at any position.
    #[test]
    fn n1_n2_n8_the_tree_of_odd_keys() {
        let dir = tempfile::tempdir().expect("tempdir");
        let s = snapshot(
            dir.path(),
            &[
                "a//b",
                "/lead",
                "a/../b",
                "a/ok",
                "blue",
                "blue-2",
                "blue/x.jpg",
                "blue.txt",
                "empty/",
                "z/y/x/w",
            ],
        );
        for page in [1, 2, 100] {
            assert_eq!(list(&s, ROOT, page), ["a", "blue-2", "blue.txt", "blue", "empty", "z"]);
        }
        let blue = s.lookup(ROOT, b"blue").expect("blue").attr;
        assert_eq!(blue.kind, Kind::Directory);
        assert_eq!(list(&s, blue.ino, 9), ["x.jpg"]);
        let empty = s.lookup(ROOT, b"empty").expect("empty").attr;
        assert!(list(&s, empty.ino, 9).is_empty());
        let z = s.lookup(ROOT, b"z").expect("z").attr.ino;
        let y = s.lookup(z, b"y").expect("y").attr.ino;
        let x = s.lookup(y, b"x").expect("x").attr.ino;
        assert_eq!(
            (
                s.parent(x).expect("parent"),
                s.parent(y).expect("parent"),
                s.parent(z).expect("parent")
            ),
            (y, z, ROOT)
        );
        let w = s.lookup(x, b"w").expect("w").attr;
        assert_eq!(s.object(w.ino).expect("object").key.as_bytes(), b"z/y/x/w");
        assert_eq!(s.attr(w.ino).expect("attr").attr, w);
        assert!(matches!(s.lookup(ROOT, b"lead"), Err(FsError::NotFound)));
        assert!(matches!(s.lookup(w.ino, b"q"), Err(FsError::NotADirectory)));
    }
}

//! `.kspeed/` at the root: what the daemon says of itself, as files. It is not
//! listed, but can be opened.
//!
//! Each lookup makes a text and a fresh inode for it, so that size and content
//! agree even on mounts without opens.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;

use crate::errno::FsError;
use crate::namespace::{Attr, Entry, Ino, Kind, ROOT};

const DIR_NAME: &str = ".kspeed";
/// Inodes of their own: no hash and no index entry is this large.
const DIRECTORY: Ino = u64::MAX - 1;
const FIRST_FILE: Ino = u64::MAX - (1 << 32);
/// Texts kept for those who have looked them up and not read yet.
const MAX_TEXTS: usize = 64;
const FILES: [&str; 2] = ["stats", "status"];

/// Makes the texts.
pub trait StatusText: Send + Sync {
    /// `status`: JSON.
    fn status(&self) -> String;
    /// `stats`: Prometheus text.
    fn stats(&self) -> String;
}

struct Texts {
    next: Ino,
    made: VecDeque<(Ino, Bytes)>,
}

pub(super) struct VirtualFiles {
    source: Arc<dyn StatusText>,
    texts: Mutex<Texts>,
}

fn entry(ino: Ino, kind: Kind, size: u64) -> Entry {
    Entry {
        attr: Attr { ino, kind, size, mtime_ns: 0, mode: Some(0o444), uid: None, gid: None },
        ttl: Duration::ZERO,
    }
}

impl VirtualFiles {
    pub(super) fn new(source: Arc<dyn StatusText>) -> Self {
        Self { source, texts: Mutex::new(Texts { next: FIRST_FILE, made: VecDeque::new() }) }
    }

    /// None: not one of ours.
    pub(super) fn lookup(&self, parent: Ino, name: &OsStr) -> Option<Result<Entry, FsError>> {
        if parent == ROOT && name == DIR_NAME {
            return Some(Ok(entry(DIRECTORY, Kind::Directory, 0)));
        }
        if parent != DIRECTORY {
            return None;
        }
        let text = match name.to_str() {
            Some("status") => self.source.status(),
            Some("stats") => self.source.stats(),
            _ => return Some(Err(FsError::NotFound)),
        };
        let mut t = self.texts.lock();
        let ino = t.next;
        t.next = FIRST_FILE + (t.next + 1 - FIRST_FILE) % (1 << 31);
        if t.made.len() == MAX_TEXTS {
            t.made.pop_front();
        }
        let size = text.len() as u64;
        t.made.push_back((ino, text.into()));
        Some(Ok(entry(ino, Kind::File, size)))
    }

    pub(super) fn attr(&self, ino: Ino) -> Option<Result<Entry, FsError>> {
        if ino < FIRST_FILE {
            return None;
        }
        if ino == DIRECTORY {
            return Some(Ok(entry(DIRECTORY, Kind::Directory, 0)));
        }
        let t = self.texts.lock();
        let size = t.made.iter().find(|(i, _)| *i == ino).map(|(_, b)| b.len() as u64);
        size.map(|s| Ok(entry(ino, Kind::File, s)))
    }

    pub(super) fn read(&self, ino: Ino, offset: u64, len: usize) -> Option<Bytes> {
        if ino < FIRST_FILE {
            return None;
        }
        let t = self.texts.lock();
        let b = t.made.iter().find(|(i, _)| *i == ino).map(|(_, b)| b.clone())?;
        let start = (offset as usize).min(b.len());
        Some(b.slice(start..(start + len).min(b.len())))
    }

    pub(super) fn list(&self, offset: u64, add: &mut dyn FnMut(u64, Ino, Kind, &OsStr) -> bool) {
        let names =
            [(".", DIRECTORY), ("..", ROOT), (FILES[0], FIRST_FILE), (FILES[1], FIRST_FILE)];
        for (i, (name, ino)) in names.into_iter().enumerate().skip(offset as usize) {
            let kind = if i < 2 { Kind::Directory } else { Kind::File };
            if add(i as u64 + 1, ino, kind, OsStr::new(name)) {
                break;
            }
        }
    }
}

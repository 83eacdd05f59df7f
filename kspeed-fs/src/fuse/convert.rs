//! Attributes and errors in the words of FUSE.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{Errno, FileAttr, FileType, INodeNo};

use crate::errno::FsError;
use crate::fs::FsOptions;
use crate::namespace::{Attr, Kind};

const BLOCK_BYTES: u32 = 4096;

pub(super) fn errno(e: &FsError) -> Errno {
    Errno::from_i32(e.errno())
}

pub(super) fn kind_of(k: Kind) -> FileType {
    match k {
        Kind::Directory => FileType::Directory,
        Kind::File => FileType::RegularFile,
        Kind::Symlink => FileType::Symlink,
    }
}

/// Attributes of no inode, for the answer that there is none.
pub(super) fn nothing() -> Attr {
    Attr { ino: 0, kind: Kind::File, size: 0, mtime_ns: 0, mode: None, uid: None, gid: None }
}

fn time(ns: i64) -> SystemTime {
    let d = Duration::from_nanos(ns.unsigned_abs());
    if ns >= 0 { UNIX_EPOCH + d } else { UNIX_EPOCH - d }
}

pub(super) fn file_attr(o: &FsOptions, a: &Attr) -> FileAttr {
    let mode = match a.kind {
        Kind::Directory => a.mode.unwrap_or(o.dir_mode),
        Kind::File => a.mode.unwrap_or(o.file_mode),
        Kind::Symlink => 0o777,
    };
    let mode = if o.read_only { mode & !0o222 } else { mode };
    let t = time(a.mtime_ns);
    FileAttr {
        ino: INodeNo(a.ino),
        size: a.size,
        blocks: a.size.div_ceil(512),
        atime: t,
        mtime: t,
        ctime: t,
        crtime: t,
        kind: kind_of(a.kind),
        perm: (mode & 0o7777) as u16,
        // 1 for directories too: it keeps find from counting subdirectories by
        // links, as on btrfs.
        nlink: 1,
        uid: a.uid.unwrap_or(o.uid),
        gid: a.gid.unwrap_or(o.gid),
        rdev: 0,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

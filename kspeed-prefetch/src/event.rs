//! The vocabulary: what happened, and what to do.

/// A file, as its mount numbers it.
pub type FileId = u64;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Bytes of a file were asked for.
    Read {
        /// The file.
        file: FileId,
        /// Its size in bytes.
        size: u64,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// The first bytes of a file were asked for, and this is its place.
    Entered {
        /// The directory.
        directory: FileId,
        /// Place of the file among the directory's files, in the order of names.
        index: u64,
        /// Files in the directory.
        count: u64,
        /// Mean size of the directory's files in bytes.
        mean_bytes: u64,
    },
    /// Nobody has the file (or directory) open any more.
    Forgotten {
        /// The file.
        file: FileId,
    },
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Bring these bytes of a file into the cache.
    Fetch {
        /// The file.
        file: FileId,
        /// First byte.
        start: u64,
        /// End, exclusive.
        end: u64,
    },
    /// Bring these files of a directory into the cache, by their place.
    FetchFiles {
        /// The directory.
        directory: FileId,
        /// First file.
        start: u64,
        /// End, exclusive.
        end: u64,
        /// Of these, the file whose read is to reach us, so that progress is
        /// seen: it is not pushed into the page cache.
        beacon: u64,
    },
}

/// What the world is like while an event is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conditions {
    /// Time to first byte at the origin, in microseconds; 0: not measured yet.
    pub latency_us: u64,
    /// Rate of one stream of the origin, in bytes per second; 0: not measured.
    pub stream_bytes_per_s: u64,
    /// What the cache holds, in bytes: what is fetched ahead must stay in it.
    pub cache_bytes: u64,
    /// Memory is short: windows halve instead of growing.
    pub pressed: bool,
}

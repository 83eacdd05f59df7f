//! The bytes of KSpeed: where they come from (origins), where they are kept
//! (RAM and disk tiers), and how they get from one to the other exactly once
//! (single flight, memory permits).
//!
//! Nothing here knows about FUSE, directories or prediction.

mod cache;
mod flight;
mod io;
mod object;
mod permits;
mod pool;

/// The lock of [`Flights`], which its test replaces by one that explores
/// interleavings.
mod sync {
    pub(crate) use parking_lot::Mutex;
}

pub mod origin;
pub mod tier;

pub use cache::{
    Cache, CacheConfig, CacheError, CacheStats, CachedObject, DiskStatus, EXTENT_BYTES, Hit,
    StatsSnapshot,
};
pub use flight::{Claim, Flights, Lead, Outcome, Wait};
pub use io::{FileIo, PlainIo, UringIo, best_io};
pub use object::{BLOCK_BYTES_DEFAULT, Blocks, Key, ObjectId, ObjectKind, ObjectMeta, Version};
pub use permits::{Permit, Permits, Priority};

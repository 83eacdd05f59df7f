//! Where bytes are kept: RAM, and the local disk.

pub(crate) mod disk;
mod policy;
mod ram;

pub use disk::{DiskConfig, DiskError, DiskTier, LargeFile, PassthroughFile};
pub use policy::{EvictionPolicy, Lru, Sieve};
pub(crate) use ram::RamTier;

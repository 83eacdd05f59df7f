//! Where bytes are kept: RAM, and the local disk.

pub(crate) mod disk;
pub mod policy;
mod ram;

pub use disk::{DiskConfig, DiskError, DiskTier, LargeFile, PassthroughFile, lock_dir};
pub use policy::{EvictionPolicy, Expected, Lru, NextUse, Sieve};
pub(crate) use ram::RamTier;

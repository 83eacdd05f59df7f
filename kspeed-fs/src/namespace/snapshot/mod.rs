//! An index of a whole prefix, built once and mapped at each mount: `find` and
//! `stat` over millions of files ask nobody.
//!
//! - [`format`]: the file
//! - [`tree`]: directories over the sorted keys, without any table of inodes
//! - [`builder`]: parallel listing, and the check whether it is stale

mod builder;
mod format;
mod tree;

pub use builder::{build, is_stale};
pub use format::{SnapshotBuilder, SnapshotError, SnapshotIndex};
pub use tree::Snapshot;

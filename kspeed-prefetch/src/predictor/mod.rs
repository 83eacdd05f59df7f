//! Predictors, a file each.

mod streams;

pub use streams::{Mode, Streams, Window};

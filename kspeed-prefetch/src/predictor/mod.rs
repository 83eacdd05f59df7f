//! Predictors, a file each.

mod epoch;
mod ranks;
mod streams;

pub use epoch::{Ahead, Follower, Met, Passed};
pub use streams::{Mode, Streams, Window};

//! The decisions of KSpeed: what to fetch next, and what to push into the page
//! cache. Pure: no I/O, no clock, no threads, so that everything decided can be
//! replayed and tested against a model.
//!
//! Events come in ([`Event`]), actions go out ([`Action`]); [`Readahead`] is the
//! state machine between them, one for each mount.

mod event;
pub mod order;
mod predictor;
mod readahead;
mod samples;
pub mod seed;

pub use event::{Action, Conditions, Event, FileId};
pub use predictor::{Ahead, Follower, Met, Mode, Passed, Streams, Window};
pub use readahead::Readahead;
pub use samples::{Outlook, Samples, Search, View, Want};

//! The daemon's control socket: HTTP over a Unix socket of mode 0600 beside the
//! cache, spoken by the other commands.
//!
//! | request | answer |
//! |---|---|
//! | `GET /status` | [`crate::telemetry::ProcessStatus`] as JSON |
//! | `GET /metrics` | Prometheus text |
//! | `POST /hint` with a [`HintRequest`] | a [`HintAnswer`] |
//! | `POST /paths` with a [`PathsRequest`] | [`PathsLine`]s, a JSON object a line, as the work goes on |

mod client;
mod server;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::dataset::Told;

pub use client::{Client, ClientError, daemon_of, mounts};
pub use server::{Control, serve_metrics};

/// What to do with paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PathsAction {
    /// Bring in; on dataset mounts push into the page cache too.
    Warm,
    /// Bring in and spare from eviction.
    WarmAndPin,
    /// Drop.
    Evict,
    /// Spare from eviction.
    Pin,
    /// No longer.
    Unpin,
    /// Tell what is cached.
    List,
    /// Wait until the origin has it as it was written.
    Sync,
}

/// An order in which files will be read, so that they are there before.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HintRequest {
    /// Mountpoint.
    pub mountpoint: PathBuf,
    /// Who tells: an order replaces the one told before under this name.
    #[serde(default)]
    pub id: String,
    /// Files, relative to the mountpoint.
    pub files: Vec<String>,
    /// Their order.
    pub told: Told,
}

/// What became of a hint.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct HintAnswer {
    /// How many of the files exist.
    pub known: usize,
}

/// A request on paths of one mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PathsRequest {
    /// Action.
    pub action: PathsAction,
    /// Mountpoint.
    pub mountpoint: PathBuf,
    /// Paths relative to it; directories stand for all files below.
    pub paths: Vec<PathBuf>,
    /// For [`PathsAction::Sync`]: it fails when nothing gets on for so many
    /// milliseconds; none: only when it can't get on.
    #[serde(default)]
    pub patience_ms: Option<u64>,
}

/// A line of the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum PathsLine {
    /// How far it is.
    Progress {
        /// Files done.
        files: u64,
        /// Bytes done.
        bytes: u64,
        /// Files in all.
        total_files: u64,
        /// Bytes in all.
        total_bytes: u64,
    },
    /// A file, for [`PathsAction::List`].
    File {
        /// Key.
        path: String,
        /// Size in bytes.
        size: u64,
        /// Bytes in the cache.
        cached: u64,
        /// Of these, in RAM.
        ram: u64,
        /// Spared from eviction.
        pinned: bool,
    },
    /// A file or path that failed.
    Failed {
        /// What.
        path: String,
        /// Why.
        error: String,
    },
    /// The end.
    Done {
        /// Files done.
        files: u64,
        /// Bytes done.
        bytes: u64,
        /// Of these, pushed into the page cache.
        pushed_bytes: u64,
        /// Files that failed.
        failed: u64,
    },
}

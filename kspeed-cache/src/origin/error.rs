//! What can go wrong at an origin, and whether trying again may help.

use std::sync::Arc;

/// An origin's failure. Messages name the thing, the cause and the next step.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OriginError {
    /// No such object (or bucket).
    #[error("{what} is not there")]
    NotFound {
        /// What was asked for.
        what: String,
    },
    /// The object has another version now than the one asked for.
    #[error(
        "{what} was replaced or shrunk while it was in use; open it again to see the new version"
    )]
    Changed {
        /// What was asked for.
        what: String,
    },
    /// Credentials are missing, wrong, or lack the right.
    #[error(
        "{what}: access denied ({detail}); check the credentials and the bucket's policy (`kspeed doctor`)"
    )]
    Denied {
        /// What was asked for.
        what: String,
        /// The store's own words.
        detail: String,
    },
    /// Credentials have expired; they are read again before the next try.
    #[error("{what}: the credentials have expired; they are read again from their source")]
    Expired {
        /// What was asked for.
        what: String,
    },
    /// The store asks to slow down.
    #[error("{what}: the store asks to slow down ({detail})")]
    Throttled {
        /// What was asked for.
        what: String,
        /// The store's own words.
        detail: String,
    },
    /// No answer within the deadline.
    #[error("{what}: no answer within {after_ms} ms")]
    TimedOut {
        /// What was asked for.
        what: String,
        /// The deadline, in milliseconds.
        after_ms: u64,
    },
    /// The store cannot be reached, or answers 5xx.
    #[error("{what}: the store is not available ({detail})")]
    Unavailable {
        /// What was asked for.
        what: String,
        /// The cause.
        detail: String,
    },
    /// An answer that does not fit the question: never served as data.
    #[error("{what}: the answer is not what was asked for ({detail})")]
    Corrupt {
        /// What was asked for.
        what: String,
        /// What does not fit.
        detail: String,
    },
    /// Who asked for it wants it no longer.
    #[error("{what}: given up")]
    Cancelled {
        /// What was asked for.
        what: String,
    },
    /// The request can't succeed as it is.
    #[error("{what}: {detail}")]
    Invalid {
        /// What was asked for.
        what: String,
        /// Why.
        detail: String,
    },
    /// The origin cannot do this.
    #[error("{what}: not supported by this origin")]
    Unsupported {
        /// What was asked for.
        what: String,
    },
    /// The directory behind the origin failed.
    #[error("{what}: {source}; check that file system")]
    Io {
        /// The path.
        what: String,
        /// The cause.
        source: Arc<std::io::Error>,
    },
}

impl OriginError {
    /// Whether trying again may help.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Expired { .. }
            | Self::Throttled { .. }
            | Self::TimedOut { .. }
            | Self::Unavailable { .. }
            | Self::Corrupt { .. } => true,
            Self::NotFound { .. }
            | Self::Changed { .. }
            | Self::Denied { .. }
            | Self::Cancelled { .. }
            | Self::Invalid { .. }
            | Self::Unsupported { .. }
            | Self::Io { .. } => false,
        }
    }

    /// From a failure of the file at `what`.
    pub(crate) fn io(what: impl Into<String>, e: std::io::Error) -> Self {
        let what = what.into();
        match e.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
                Self::NotFound { what }
            }
            std::io::ErrorKind::PermissionDenied => Self::Denied { what, detail: e.to_string() },
            _ => Self::Io { what, source: Arc::new(e) },
        }
    }
}

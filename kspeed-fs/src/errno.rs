//! What a file system call can fail with, and the one place where that becomes
//! an errno.

use kspeed_cache::CacheError;
use kspeed_cache::origin::OriginError;

/// Why a call failed. Messages name the thing, the cause and the next step.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FsError {
    /// No such name.
    #[error("no such file or directory")]
    NotFound,
    /// A directory is needed.
    #[error("not a directory")]
    NotADirectory,
    /// A file is needed.
    #[error("is a directory")]
    IsADirectory,
    /// rmdir of a directory that isn't empty.
    #[error("the directory is not empty")]
    NotEmpty,
    /// The name is taken.
    #[error("the name exists")]
    Exists,
    /// The name has more than 255 bytes, or its key more than 1,024.
    #[error("the name is too long for a directory entry (255 bytes) or a key (1,024 bytes)")]
    NameTooLong,
    /// The origin's keys are UTF-8 and this name isn't.
    #[error("the name is not UTF-8, which keys in this origin must be")]
    NotUtf8,
    /// The mount is read-only.
    #[error("the mount is read-only; mount without --read-only to write")]
    ReadOnly,
    /// This is not possible on this origin.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// To be done as copy and delete by the caller.
    #[error(
        "a directory of over 100,000 objects, or with one over 5 GiB, is not renamed; copy and delete, as mv does"
    )]
    CrossDevice,
    /// No such extended attribute.
    #[error("no such attribute")]
    NoAttribute,
    /// A wrong argument.
    #[error("{0}")]
    Invalid(&'static str),
    /// A handle that is not open.
    #[error("bad file handle")]
    BadHandle,
    /// Missing rights.
    #[error("permission denied")]
    Denied,
    /// The call's deadline passed.
    #[error("no answer within the deadline (--io-timeout); see `kspeed status`")]
    TimedOut,
    /// What was written is kept, but is not in the origin.
    #[error(
        "not stored in the origin yet: {0}; it is kept and tried again (`kspeed status`, `kspeed sync`)"
    )]
    NotStored(String),
    /// Somebody waits no longer (a signal).
    #[error("interrupted")]
    Interrupted,
    /// The name has another inode now; looking it up again finds it.
    #[error("the file is read by others from the cache; look it up again")]
    Forked,
    /// The version is gone.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The origin failed.
    #[error(transparent)]
    Origin(OriginError),
    /// The local disk failed.
    #[error("cache disk: {0}")]
    Disk(std::sync::Arc<std::io::Error>),
}

impl From<OriginError> for FsError {
    fn from(e: OriginError) -> Self {
        Self::Origin(e)
    }
}

impl From<std::io::Error> for FsError {
    fn from(e: std::io::Error) -> Self {
        Self::Disk(std::sync::Arc::new(e))
    }
}

fn of_origin(e: &OriginError) -> i32 {
    match e {
        OriginError::NotFound { .. } => libc::ENOENT,
        // The open file's version is gone: as NFS says it.
        OriginError::Changed { .. } => libc::ESTALE,
        OriginError::Denied { .. } | OriginError::Expired { .. } => libc::EACCES,
        OriginError::TimedOut { .. } => libc::ETIMEDOUT,
        OriginError::Throttled { .. }
        | OriginError::Unavailable { .. }
        | OriginError::Corrupt { .. } => libc::EIO,
        OriginError::Invalid { .. } => libc::EINVAL,
        OriginError::Unsupported { .. } => libc::EOPNOTSUPP,
        OriginError::Cancelled { .. } => libc::ECANCELED,
        OriginError::Io { source, .. } => of_io(source),
    }
}

fn of_io(e: &std::io::Error) -> i32 {
    e.raw_os_error().unwrap_or(libc::EIO)
}

impl FsError {
    /// The errno that POSIX has for it.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::NotStored(_) => libc::EIO,
            Self::NotFound => libc::ENOENT,
            Self::NotADirectory => libc::ENOTDIR,
            Self::IsADirectory => libc::EISDIR,
            Self::NotEmpty => libc::ENOTEMPTY,
            Self::Exists => libc::EEXIST,
            Self::NameTooLong => libc::ENAMETOOLONG,
            Self::NotUtf8 => libc::EILSEQ,
            Self::ReadOnly => libc::EROFS,
            Self::Unsupported(_) => libc::EOPNOTSUPP,
            Self::CrossDevice => libc::EXDEV,
            Self::NoAttribute => libc::ENODATA,
            Self::Invalid(_) => libc::EINVAL,
            Self::BadHandle => libc::EBADF,
            Self::Denied => libc::EACCES,
            Self::TimedOut => libc::ETIMEDOUT,
            Self::Interrupted => libc::EINTR,
            Self::Forked => libc::ESTALE,
            Self::Cache(CacheError::Origin(e)) | Self::Origin(e) => of_origin(e),
            Self::Cache(CacheError::ShuttingDown) => libc::EIO,
            Self::Cache(CacheError::Disk(e)) | Self::Disk(e) => of_io(e),
        }
    }

    /// Whether it is news for the log: not what programs provoke all day.
    #[must_use]
    pub fn is_worth_logging(&self) -> bool {
        matches!(
            self.errno(),
            libc::EIO | libc::ETIMEDOUT | libc::EACCES | libc::ESTALE | libc::ENOSPC
        )
    }
}

//! Where bytes come from: object stores and directories behind one trait.
//!
//! # Contract of [`Origin`]
//! - Keys are relative to the origin's prefix. Listings are in bytewise order
//!   of keys, in pages; the union of all pages has each key once.
//! - With a delimiter, keys below the next `/` are folded into one prefix, which
//!   ends with `/`. A prefix and an object may share a name (`blue`, `blue/x`).
//! - [`Origin::get`] serves exactly the range asked for, of exactly the version
//!   asked for, or fails: [`OriginError::Changed`] when the version is gone,
//!   [`OriginError::Corrupt`] when status, length, range or ETag do not fit.
//!   Bytes already yielded by the stream are good even if a later item fails.
//! - Every call ends by its deadline.
//! - Errors say whether trying again may help ([`OriginError::is_transient`]).
//!   Implementations do not retry: [`Retry`] does, once for all.
//!
//! Every implementation and every stack of layers passes the suite in
//! `conformance`.

mod error;
mod fault;
mod limit;
mod memory;
mod posix;
mod retry;
mod s3;

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

pub use error::OriginError;
pub use fault::{Fault, FaultKind, FaultPlan};
pub use limit::Limit;
pub use memory::MemoryOrigin;
pub use posix::PosixOrigin;
pub use retry::{Retry, RetryPolicy};
pub use s3::{AddressingStyle, S3Config, S3Origin};

use crate::object::{Key, ObjectMeta, Version};

/// What to list.
#[derive(Clone, Debug, Default)]
pub struct ListRequest {
    /// Only keys that start with this, relative to the origin's prefix.
    pub prefix: Vec<u8>,
    /// Fold what lies below the next `/`.
    pub delimited: bool,
    /// Only keys after this one (ignored when `token` is set).
    pub start_after: Option<Key>,
    /// Continuation token of the page before.
    pub token: Option<String>,
    /// At most so many entries; 0: the origin's own page size.
    pub max_keys: u32,
}

/// One page of a listing.
#[derive(Clone, Debug, Default)]
pub struct ListPage {
    /// Objects, in order of keys.
    pub objects: Vec<ObjectMeta>,
    /// Common prefixes, in order, each ending with `/`.
    pub prefixes: Vec<Key>,
    /// Token of the next page, if there is one.
    pub next: Option<String>,
}

/// An object's bytes as they arrive.
pub struct ObjectBody {
    /// Version that the bytes belong to.
    pub version: Version,
    /// Size of the whole object in bytes.
    pub size: u64,
    /// The bytes of the range, in order.
    pub stream: BoxStream<'static, Result<Bytes, OriginError>>,
}

/// What to store.
#[derive(Clone, Debug)]
pub enum PutBody {
    /// These bytes.
    Bytes(Bytes),
    /// The first `len` bytes of a file.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Bytes to take.
        len: u64,
    },
}

impl PutBody {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Bytes(b) => b.len() as u64,
            Self::File { len, .. } => *len,
        }
    }

    /// Whether there is nothing to store.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What must hold at a key for a put to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Condition {
    /// Nothing: the last writer wins.
    #[default]
    Any,
    /// No object is there.
    Absent,
    /// This version is there.
    Version(Version),
}

/// POSIX attributes of an object; what is none is left as the origin has it.
/// On S3 they are user metadata under the names that s3fs uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// Permission bits.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mode: Option<u32>,
    /// Owner.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub uid: Option<u32>,
    /// Group.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gid: Option<u32>,
    /// Last modification, nanoseconds since the Unix epoch.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mtime_ns: Option<i64>,
}

/// An upload in parts that was begun and not ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartialUpload {
    /// The store's name of it.
    pub id: String,
    /// Size of each part but the last, in bytes.
    pub part_bytes: u64,
    /// Parts that the store has: number from 1 on, ETag.
    pub parts: BTreeMap<u32, String>,
}

/// Who remembers an upload in parts, so that another try, or another process,
/// goes on where it ended instead of beginning again, or aborts it.
pub trait UploadLog: Send + Sync {
    /// What was begun before.
    fn resume(&self) -> Option<PartialUpload>;
    /// An upload has begun; what was begun before is no more.
    fn began(&self, id: &str, part_bytes: u64);
    /// The store has a part.
    fn part(&self, number: u32, etag: &str);
    /// The upload is complete, or aborted.
    fn ended(&self);
}

/// How an object is stored.
#[derive(Clone, Default)]
pub struct PutOptions {
    /// What must hold before; else [`OriginError::Changed`].
    pub condition: Condition,
    /// Attributes of the object.
    pub attributes: Attributes,
    /// Names this put. A put whose answer was lost, tried again, finds by it
    /// that the object that is in its way is its own, and succeeds. Where the
    /// origin can't keep it, equal bytes tell the same.
    pub token: Option<String>,
    /// Remembers parts. Without it an upload in parts that fails is aborted.
    pub log: Option<Arc<dyn UploadLog>>,
    /// Ends an upload in parts: nothing of it stays, and
    /// [`OriginError::Cancelled`] is what comes back. A put in one request goes on.
    pub cancel: Option<CancellationToken>,
}

/// A source of objects. See the module for the contract.
#[async_trait]
pub trait Origin: Send + Sync {
    /// How users name it, e.g. `s3://bucket/prefix/`; part of each object's
    /// identity, so it must be the same at the next start.
    fn name(&self) -> &str;

    /// Lists one page.
    async fn list(&self, request: &ListRequest) -> Result<ListPage, OriginError>;

    /// Attributes of one object.
    async fn head(&self, key: &Key) -> Result<ObjectMeta, OriginError>;

    /// Streams `range` (bytes, not empty, within the object) of `meta`'s version.
    async fn get(&self, meta: &ObjectMeta, range: Range<u64>) -> Result<ObjectBody, OriginError>;

    /// Stores an object whole; it appears at once or not at all.
    async fn put(
        &self,
        key: &Key,
        body: PutBody,
        how: &PutOptions,
    ) -> Result<ObjectMeta, OriginError>;

    /// Removes an object; one that isn't there is no error.
    async fn delete(&self, key: &Key) -> Result<(), OriginError>;

    /// Copies an object within the origin, onto itself to change attributes.
    async fn copy(
        &self,
        from: &ObjectMeta,
        to: &Key,
        attributes: &Attributes,
    ) -> Result<ObjectMeta, OriginError>;

    /// Renames a file or a directory, at once and whole, where the origin can: only
    /// a directory can.
    async fn rename(&self, from: &Key, _to: &Key) -> Result<ObjectMeta, OriginError> {
        Err(OriginError::Unsupported { what: format!("{}{from}", self.name()) })
    }

    /// Attributes of one object, and the token of the put that made it.
    async fn owner(&self, key: &Key) -> Result<(ObjectMeta, Option<String>), OriginError> {
        Ok((self.head(key).await?, None))
    }

    /// Aborts an upload in parts; one that isn't there is no error.
    async fn abort_upload(&self, _key: &Key, _id: &str) -> Result<(), OriginError> {
        Ok(())
    }

    /// Reads credentials and the like from their source again.
    async fn reload(&self) -> Result<(), OriginError> {
        Ok(())
    }

    /// The file behind an object, where the origin is a local directory.
    fn local_path(&self, _key: &Key) -> Option<PathBuf> {
        None
    }
}

/// Collects a body whole; for small objects and tests.
///
/// # Errors
/// What the stream fails with.
pub async fn collect(body: ObjectBody) -> Result<Bytes, OriginError> {
    use futures::TryStreamExt;
    let parts: Vec<Bytes> = body.stream.try_collect().await?;
    Ok(match <[Bytes; 1]>::try_from(parts) {
        Ok([one]) => one,
        Err(parts) => parts.concat().into(),
    })
}

/// The layers that a mount puts around an origin, outermost first: retry, then
/// the limit of requests in flight, so that a backoff holds no slot.
#[must_use]
pub fn layered(
    origin: Arc<dyn Origin>,
    policy: RetryPolicy,
    max_requests: usize,
    max_rate_bytes: Option<u64>,
) -> Arc<dyn Origin> {
    Arc::new(Retry::new(Arc::new(Limit::new(origin, max_requests, max_rate_bytes)), policy))
}

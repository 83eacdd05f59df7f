//! Puts: in one request, or in parts that are remembered, resumed and aborted.

use std::collections::HashMap;
use std::time::Duration;

use aws_sdk_s3::primitives::{ByteStream, Length};
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use futures::{StreamExt, TryStreamExt, stream};

use super::super::{
    Attributes, Condition, Origin, OriginError, PartialUpload, PutBody, PutOptions,
};
use super::{S3Origin, TOKEN_NAME, etag, within};
use crate::object::{Key, Version};

/// Objects above this are uploaded in parts.
const MULTIPART_ABOVE_BYTES: u64 = 32 << 20;
/// Parts are at least this large and grow so that 10,000 suffice.
const PART_MIN_BYTES: u64 = 16 << 20;
/// S3's limit.
const MAX_PARTS: u64 = 10_000;
const PARTS_IN_FLIGHT: usize = 8;
/// Pieces in which a file is read for its upload: each is a hand-over to a thread.
const READ_BYTES: usize = 1 << 20;

impl S3Origin {
    pub(super) async fn put_whole(
        &self,
        key: &Key,
        body: &PutBody,
        how: &PutOptions,
    ) -> Result<Version, OriginError> {
        let len = body.len();
        if len > MULTIPART_ABOVE_BYTES {
            return self.put_parts(key, body, how).await;
        }
        let whole = slice(body, 0, len).await?;
        self.put_one(key, whole, len, how).await
    }

    async fn put_one(
        &self,
        key: &Key,
        body: ByteStream,
        len: u64,
        how: &PutOptions,
    ) -> Result<Version, OriginError> {
        let what = self.what(key);
        // An upload of this size at 1 MB/s still fits.
        let limit = self.config.timeout() + Duration::from_secs(len >> 20);
        let call = self
            .client()
            .put_object()
            .bucket(&self.config.bucket)
            .key(self.full_key(key)?)
            .content_length(len as i64)
            .set_metadata(metadata(&how.attributes, how.token.as_deref()))
            .set_if_match(if_match(&how.condition))
            .set_if_none_match(if_none_match(&how.condition))
            .body(body)
            .send();
        let out = within(limit, &what, call).await?;
        etag(out.e_tag(), &what)
    }

    async fn put_parts(
        &self,
        key: &Key,
        body: &PutBody,
        how: &PutOptions,
    ) -> Result<Version, OriginError> {
        let what = self.what(key);
        let full = self.full_key(key)?;
        let bucket = &self.config.bucket;
        let timeout = self.config.timeout();
        let client = self.client();
        let len = body.len();
        let part_bytes = part_bytes(len);
        let begun = how.log.as_ref().and_then(|l| l.resume());
        let PartialUpload { id, parts: there, .. } = match begun {
            Some(b) if b.part_bytes == part_bytes => b,
            _ => {
                let call = client
                    .create_multipart_upload()
                    .bucket(bucket)
                    .key(&full)
                    .set_metadata(metadata(&how.attributes, how.token.as_deref()))
                    .send();
                let created = within(timeout, &what, call).await?;
                let id = created.upload_id().unwrap_or_default().to_owned();
                if let Some(l) = &how.log {
                    l.began(&id, part_bytes);
                }
                PartialUpload { id, part_bytes, ..PartialUpload::default() }
            }
        };
        let parts = len.div_ceil(part_bytes);
        let upload = stream::iter(0..parts).map(|n| {
            let (client, id, full, what, there) = (client.clone(), &id, &full, &what, &there);
            async move {
                let start = n * part_bytes;
                if let Some(tag) = u32::try_from(n + 1).ok().and_then(|n| there.get(&n)) {
                    let number = i32::try_from(n + 1).unwrap_or(i32::MAX);
                    return Ok(CompletedPart::builder().part_number(number).e_tag(tag).build());
                }
                let n_bytes = part_bytes.min(len - start);
                let part = slice(body, start, n_bytes).await?;
                let number = i32::try_from(n + 1).unwrap_or(i32::MAX);
                let call = client
                    .upload_part()
                    .bucket(bucket)
                    .key(full)
                    .upload_id(id)
                    .part_number(number)
                    .content_length(n_bytes as i64)
                    .body(part)
                    .send();
                let out = within(timeout + Duration::from_secs(n_bytes >> 20), what, call).await?;
                if let (Some(l), Some(tag)) = (&how.log, out.e_tag()) {
                    l.part(u32::try_from(n + 1).unwrap_or(u32::MAX), tag);
                }
                Ok::<_, OriginError>(
                    CompletedPart::builder()
                        .part_number(number)
                        .set_e_tag(out.e_tag().map(str::to_owned))
                        .build(),
                )
            }
        });
        let cancelled = async {
            match &how.cancel {
                Some(c) => c.cancelled().await,
                None => std::future::pending().await,
            }
        };
        let done: Result<Vec<CompletedPart>, OriginError> = tokio::select! {
            r = upload.buffered(PARTS_IN_FLIGHT).try_collect() => r,
            () = cancelled => Err(OriginError::Cancelled { what: what.clone() }),
        };
        let completed = match done {
            Ok(parts) => {
                let all = CompletedMultipartUpload::builder().set_parts(Some(parts)).build();
                within(
                    timeout * 4,
                    &what,
                    client
                        .complete_multipart_upload()
                        .bucket(bucket)
                        .key(&full)
                        .upload_id(&id)
                        .multipart_upload(all)
                        .set_if_match(if_match(&how.condition))
                        .set_if_none_match(if_none_match(&how.condition))
                        .send(),
                )
                .await
            }
            Err(e) => Err(e),
        };
        match completed {
            Ok(out) => {
                if let Some(l) = &how.log {
                    l.ended();
                }
                etag(out.e_tag(), &what)
            }
            // Whoever remembers the parts goes on with them.
            Err(e) if how.log.is_some() && e.is_transient() => Err(e),
            Err(e) => {
                // Leave no parts behind that somebody pays for.
                match self.abort_upload(key, &id).await {
                    Ok(()) => {
                        if let Some(l) = &how.log {
                            l.ended();
                        }
                    }
                    Err(e) => {
                        tracing::warn!(error = %e, upload_id = id, "a multipart upload could not be aborted");
                    }
                }
                Err(e)
            }
        }
    }
}

fn part_bytes(len: u64) -> u64 {
    len.div_ceil(MAX_PARTS).max(PART_MIN_BYTES).next_multiple_of(1 << 20)
}

async fn slice(body: &PutBody, start: u64, len: u64) -> Result<ByteStream, OriginError> {
    match body {
        PutBody::Bytes(b) => Ok(ByteStream::from(b.slice(start as usize..(start + len) as usize))),
        PutBody::File { path, .. } => ByteStream::read_from()
            .path(path)
            .buffer_size(READ_BYTES)
            .offset(start)
            .length(Length::Exact(len))
            .build()
            .await
            .map_err(|e| OriginError::Invalid {
                what: path.display().to_string(),
                detail: e.to_string(),
            }),
    }
}

/// User metadata: POSIX attributes as s3fs names and writes them, and the token
/// of the put.
pub(super) fn metadata(a: &Attributes, token: Option<&str>) -> Option<HashMap<String, String>> {
    const REGULAR: u32 = 0o100_000;
    let mut m = HashMap::new();
    let mut set = |name: &str, value: Option<String>| {
        if let Some(v) = value {
            m.insert(name.to_owned(), v);
        }
    };
    set("mode", a.mode.map(|m| (REGULAR | m & 0o7777).to_string()));
    set("uid", a.uid.map(|u| u.to_string()));
    set("gid", a.gid.map(|g| g.to_string()));
    set(
        "mtime",
        a.mtime_ns
            .map(|t| format!("{}.{:09}", t.div_euclid(1_000_000_000), t.rem_euclid(1_000_000_000))),
    );
    set(TOKEN_NAME, token.map(str::to_owned));
    (!m.is_empty()).then_some(m)
}

fn if_match(c: &Condition) -> Option<String> {
    match c {
        Condition::Version(v) => Some(format!("\"{v}\"")),
        Condition::Any | Condition::Absent => None,
    }
}

fn if_none_match(c: &Condition) -> Option<String> {
    (*c == Condition::Absent).then(|| "*".to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::MAX_OBJECT_BYTES;
    use super::*;

    #[test]
    fn parts_grow_so_that_ten_thousand_suffice() {
        for len in [1, PART_MIN_BYTES, 200 << 30, MAX_OBJECT_BYTES] {
            let p = part_bytes(len);
            assert!(p >= PART_MIN_BYTES && len.div_ceil(p) <= MAX_PARTS, "{len}");
        }
    }
}

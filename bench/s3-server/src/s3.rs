//! The S3 operations that KSpeed and its benchmarks use.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use futures::{StreamExt, stream};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::*;
use s3s::{S3, S3Error, S3ErrorCode, S3Request, S3Response, S3Result, s3_error};
use tokio::io::AsyncWriteExt;

use crate::store::{Object as Stored, Store};

/// Pieces of a body: few enough to cost little, small enough to flow.
const PIECE_BYTES: usize = 256 << 10;
const MAX_KEYS: i32 = 1000;
const MAX_KEY_BYTES: usize = 1024;
/// What `encoding-type=url` leaves as it is.
const LISTED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'*');

pub(crate) struct Api(pub(crate) Arc<Store>);

fn internal(e: io::Error) -> S3Error {
    S3Error::with_source(S3ErrorCode::InternalError, Box::new(e))
}

fn matches(condition: &ETagCondition, etag: &str) -> bool {
    match condition {
        ETagCondition::Any => true,
        ETagCondition::ETag(t) => t.value() == etag,
    }
}

fn may_put(
    old: Option<&Stored>,
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
) -> bool {
    match (if_match, if_none_match, old) {
        (Some(c), _, Some(o)) => matches(c, &o.etag),
        (Some(_), _, None) => false,
        (_, Some(c), Some(o)) => !matches(c, &o.etag),
        _ => true,
    }
}

impl Api {
    fn find(&self, bucket: &str, key: &str) -> S3Result<Arc<Stored>> {
        if !self.0.has_bucket(bucket) {
            return Err(s3_error!(NoSuchBucket));
        }
        self.0.get(bucket, key).ok_or_else(|| s3_error!(NoSuchKey))
    }

    fn check_put(
        &self,
        bucket: &str,
        key: &str,
        if_match: Option<&ETagCondition>,
        if_none_match: Option<&ETagCondition>,
    ) -> S3Result<()> {
        if !self.0.has_bucket(bucket) {
            return Err(s3_error!(NoSuchBucket));
        }
        if key.len() > MAX_KEY_BYTES {
            return Err(s3_error!(KeyTooLongError));
        }
        let old = self.0.get(bucket, key);
        if may_put(old.as_deref(), if_match, if_none_match) {
            Ok(())
        } else {
            Err(s3_error!(PreconditionFailed))
        }
    }

    fn parts(&self, bucket: &str, upload: &str) -> S3Result<PathBuf> {
        if upload.is_empty() || !upload.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            return Err(s3_error!(NoSuchUpload));
        }
        let dir = self.0.temp(bucket).map_err(internal)?;
        Ok(dir.with_file_name(format!("tmp-upload-{upload}")))
    }

    async fn receive(&self, bucket: &str, body: Option<StreamingBlob>) -> S3Result<PathBuf> {
        let temp = self.0.temp(bucket).map_err(internal)?;
        write_body(&temp, body).await.inspect_err(|_| drop(fs::remove_file(&temp)))?;
        Ok(temp)
    }
}

async fn write_body(path: &Path, body: Option<StreamingBlob>) -> S3Result<()> {
    let mut f = tokio::fs::File::create(path).await.map_err(internal)?;
    if let Some(mut body) = body {
        while let Some(piece) = body.next().await {
            let piece = piece.map_err(|e| S3Error::with_source(S3ErrorCode::IncompleteBody, e))?;
            f.write_all(&piece).await.map_err(internal)?;
        }
    }
    f.flush().await.map_err(internal)
}

fn encode(key: &str, as_url: bool) -> String {
    if as_url {
        utf8_percent_encode(key, LISTED).to_string().replace("%20", "+")
    } else {
        key.to_owned()
    }
}

#[async_trait::async_trait]
impl S3 for Api {
    async fn get_object(
        &self,
        r: S3Request<GetObjectInput>,
    ) -> S3Result<S3Response<GetObjectOutput>> {
        let i = r.input;
        let o = self.find(&i.bucket, &i.key)?;
        if i.if_match.as_ref().is_some_and(|c| !matches(c, &o.etag)) {
            return Err(s3_error!(PreconditionFailed));
        }
        let range = match &i.range {
            None => 0..o.size,
            Some(r) => r.check(o.size).map_err(|_| s3_error!(InvalidRange))?,
        };
        let mut bytes = o.bytes(range.start, range.end).map_err(internal)?;
        let mut pieces: Vec<io::Result<Bytes>> = Vec::new();
        while !bytes.is_empty() {
            pieces.push(Ok(bytes.split_to(bytes.len().min(PIECE_BYTES))));
        }
        let content_range = i
            .range
            .is_some()
            .then(|| format!("bytes {}-{}/{}", range.start, range.end.saturating_sub(1), o.size));
        Ok(S3Response::new(GetObjectOutput {
            body: Some(StreamingBlob::wrap(stream::iter(pieces))),
            content_length: Some((range.end - range.start) as i64),
            content_range,
            e_tag: Some(ETag::Strong(o.etag.clone())),
            last_modified: Some(o.modified.into()),
            accept_ranges: Some("bytes".into()),
            ..GetObjectOutput::default()
        }))
    }

    async fn head_object(
        &self,
        r: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let o = self.find(&r.input.bucket, &r.input.key)?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: Some(o.size as i64),
            e_tag: Some(ETag::Strong(o.etag.clone())),
            last_modified: Some(o.modified.into()),
            metadata: o.metadata.clone(),
            ..HeadObjectOutput::default()
        }))
    }

    async fn head_bucket(
        &self,
        r: S3Request<HeadBucketInput>,
    ) -> S3Result<S3Response<HeadBucketOutput>> {
        if self.0.has_bucket(&r.input.bucket) {
            Ok(S3Response::new(HeadBucketOutput::default()))
        } else {
            Err(s3_error!(NoSuchBucket))
        }
    }

    async fn create_bucket(
        &self,
        r: S3Request<CreateBucketInput>,
    ) -> S3Result<S3Response<CreateBucketOutput>> {
        self.0.create_bucket(&r.input.bucket).map_err(internal)?;
        Ok(S3Response::new(CreateBucketOutput::default()))
    }

    async fn list_objects_v2(
        &self,
        r: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let i = r.input;
        let as_url = i.encoding_type.as_ref().is_some_and(|e| e.as_str() == EncodingType::URL);
        let prefix = i.prefix.clone().unwrap_or_default();
        let delimiter = i.delimiter.as_deref().filter(|d| !d.is_empty());
        let max = i.max_keys.unwrap_or(MAX_KEYS).clamp(0, MAX_KEYS);
        let token = match &i.continuation_token {
            None => None,
            Some(t) => Some(unhex(t).ok_or_else(|| s3_error!(InvalidArgument, "bad token"))?),
        };
        let after = token.as_deref().or(i.start_after.as_deref());
        let page = self
            .0
            .list(&i.bucket, &prefix, delimiter, after, max as usize)
            .ok_or_else(|| s3_error!(NoSuchBucket))?;
        let contents: Vec<_> = page
            .objects
            .iter()
            .map(|(k, o)| Object {
                key: Some(encode(k, as_url)),
                size: Some(o.size as i64),
                e_tag: Some(ETag::Strong(o.etag.clone())),
                last_modified: Some(o.modified.into()),
                ..Object::default()
            })
            .collect();
        let prefixes: Vec<_> = page
            .prefixes
            .iter()
            .map(|p| CommonPrefix { prefix: Some(encode(p, as_url)) })
            .collect();
        Ok(S3Response::new(ListObjectsV2Output {
            name: Some(i.bucket),
            key_count: Some((contents.len() + prefixes.len()) as i32),
            max_keys: Some(max),
            contents: Some(contents),
            common_prefixes: Some(prefixes),
            prefix: Some(encode(&prefix, as_url)),
            delimiter: i.delimiter,
            encoding_type: i.encoding_type,
            is_truncated: Some(page.next.is_some()),
            next_continuation_token: page.next.map(|n| hex(&n)),
            ..ListObjectsV2Output::default()
        }))
    }

    async fn put_object(
        &self,
        r: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        let i = r.input;
        self.check_put(&i.bucket, &i.key, i.if_match.as_ref(), i.if_none_match.as_ref())?;
        let temp = self.receive(&i.bucket, i.body).await?;
        let got = fs::metadata(&temp).map_err(internal)?.len();
        if i.content_length.is_some_and(|l| l >= 0 && l as u64 != got) {
            let _ = fs::remove_file(&temp);
            return Err(s3_error!(IncompleteBody));
        }
        // Again, and with no time for others between look and leap.
        let may = |o: Option<&Stored>| may_put(o, i.if_match.as_ref(), i.if_none_match.as_ref());
        let o = self.0.put_file(&i.bucket, &i.key, &temp, i.metadata, &may).map_err(internal)?;
        let o = o.ok_or_else(|| s3_error!(PreconditionFailed))?;
        Ok(S3Response::new(PutObjectOutput {
            e_tag: Some(ETag::Strong(o.etag.clone())),
            ..PutObjectOutput::default()
        }))
    }

    async fn copy_object(
        &self,
        r: S3Request<CopyObjectInput>,
    ) -> S3Result<S3Response<CopyObjectOutput>> {
        let i = r.input;
        let CopySource::Bucket { bucket, key, .. } = &i.copy_source else {
            return Err(s3_error!(NotImplemented));
        };
        let from = self.find(bucket, key)?;
        if i.copy_source_if_match.as_ref().is_some_and(|c| !matches(c, &from.etag)) {
            return Err(s3_error!(PreconditionFailed));
        }
        self.check_put(&i.bucket, &i.key, None, None)?;
        let temp = self.0.temp(&i.bucket).map_err(internal)?;
        fs::write(&temp, from.bytes(0, from.size).map_err(internal)?).map_err(internal)?;
        let replace = i.metadata_directive.as_ref().is_some_and(|d| d.as_str() == "REPLACE");
        if !replace && *bucket.as_ref() == *i.bucket && *key.as_ref() == *i.key {
            return Err(s3_error!(InvalidRequest));
        }
        let metadata = if replace { i.metadata } else { from.metadata.clone() };
        let o = self.0.put_file(&i.bucket, &i.key, &temp, metadata, &|_| true).map_err(internal)?;
        let o = o.ok_or_else(|| s3_error!(PreconditionFailed))?;
        Ok(S3Response::new(CopyObjectOutput {
            copy_object_result: Some(CopyObjectResult {
                e_tag: Some(ETag::Strong(o.etag.clone())),
                last_modified: Some(o.modified.into()),
                ..CopyObjectResult::default()
            }),
            ..CopyObjectOutput::default()
        }))
    }

    async fn delete_object(
        &self,
        r: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        self.0.delete(&r.input.bucket, &r.input.key);
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn create_multipart_upload(
        &self,
        r: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let i = r.input;
        self.check_put(&i.bucket, &i.key, None, None)?;
        let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |d| d.as_nanos());
        let salt = self.0.temp(&i.bucket).map_err(internal)?;
        let name = salt.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let id = format!("{now:x}-{}", name.rsplit('-').next().unwrap_or("0"));
        let dir = self.parts(&i.bucket, &id)?;
        fs::create_dir_all(&dir).map_err(internal)?;
        if let Some(m) = &i.metadata {
            let text = serde_json::to_vec(m).map_err(|e| internal(e.into()))?;
            fs::write(dir.join("metadata"), text).map_err(internal)?;
        }
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(i.bucket),
            key: Some(i.key),
            upload_id: Some(id),
            ..CreateMultipartUploadOutput::default()
        }))
    }

    async fn upload_part(
        &self,
        r: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        let i = r.input;
        let dir = self.parts(&i.bucket, &i.upload_id)?;
        if !dir.is_dir() {
            return Err(s3_error!(NoSuchUpload));
        }
        let temp = self.receive(&i.bucket, i.body).await?;
        let part = dir.join(i.part_number.to_string());
        fs::rename(&temp, &part).map_err(internal)?;
        let size = fs::metadata(&part).map_err(internal)?.len();
        Ok(S3Response::new(UploadPartOutput {
            e_tag: Some(ETag::Strong(format!("part-{}-{size}", i.part_number))),
            ..UploadPartOutput::default()
        }))
    }

    async fn complete_multipart_upload(
        &self,
        r: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let i = r.input;
        let dir = self.parts(&i.bucket, &i.upload_id)?;
        if !dir.is_dir() {
            return Err(s3_error!(NoSuchUpload));
        }
        self.check_put(&i.bucket, &i.key, i.if_match.as_ref(), i.if_none_match.as_ref())?;
        let parts = i.multipart_upload.and_then(|m| m.parts).unwrap_or_default();
        let temp = self.0.temp(&i.bucket).map_err(internal)?;
        let join = || -> S3Result<()> {
            let mut out = fs::File::create(&temp).map_err(internal)?;
            let mut last = 0;
            for (n, p) in parts.iter().enumerate() {
                let number = p.part_number.unwrap_or(0);
                let path = dir.join(number.to_string());
                let size = fs::metadata(&path).map_err(|_| s3_error!(InvalidPart))?.len();
                let tag = format!("part-{number}-{size}");
                if number <= last {
                    return Err(s3_error!(InvalidPartOrder));
                }
                if p.e_tag.as_ref().is_none_or(|t| t.value() != tag) {
                    return Err(s3_error!(InvalidPart));
                }
                if n + 1 < parts.len() && size < 5 << 20 {
                    return Err(s3_error!(EntityTooSmall));
                }
                last = number;
                let mut part = fs::File::open(&path).map_err(internal)?;
                io::copy(&mut part, &mut out).map_err(internal)?;
            }
            Ok(())
        };
        join().inspect_err(|_| drop(fs::remove_file(&temp)))?;
        let metadata = fs::read(dir.join("metadata")).ok();
        let metadata = metadata.and_then(|m| serde_json::from_slice(&m).ok());
        let may = |o: Option<&Stored>| may_put(o, i.if_match.as_ref(), i.if_none_match.as_ref());
        let o = self.0.put_file(&i.bucket, &i.key, &temp, metadata, &may).map_err(internal)?;
        let o = o.ok_or_else(|| s3_error!(PreconditionFailed))?;
        let _ = fs::remove_dir_all(&dir);
        Ok(S3Response::new(CompleteMultipartUploadOutput {
            bucket: Some(i.bucket),
            key: Some(i.key),
            e_tag: Some(ETag::Strong(o.etag.clone())),
            ..CompleteMultipartUploadOutput::default()
        }))
    }

    async fn abort_multipart_upload(
        &self,
        r: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let dir = self.parts(&r.input.bucket, &r.input.upload_id)?;
        let _ = fs::remove_dir_all(dir);
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }
}

/// Tokens are opaque to clients: hex hides nothing but survives any URL.
fn hex(s: &str) -> String {
    use std::fmt::Write;
    s.bytes().fold(String::new(), |mut out, b| {
        let _ = write!(out, "{b:02x}");
        out
    })
}

fn unhex(s: &str) -> Option<String> {
    let bytes: Option<Vec<u8>> =
        (0..s.len()).step_by(2).map(|i| u8::from_str_radix(s.get(i..i + 2)?, 16).ok()).collect();
    String::from_utf8(bytes?).ok()
}

//! S3 and what speaks it: AWS, OSS, MinIO, Ceph.
//!
//! The SDK signs, finds credentials and speaks HTTP. Checked here, since a
//! cache that keeps a wrong answer serves it for ever: status, `Content-Range`,
//! `Content-Length`, ETag, and the count of bytes that arrive. The SDK's own
//! retries are off; [`super::Retry`] is the only place that retries.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use aws_config::BehaviorVersion;
use aws_config::retry::RetryConfig;
use aws_config::timeout::TimeoutConfig;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::{Region, RequestChecksumCalculation, ResponseChecksumValidation};
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::types::{EncodingType, MetadataDirective};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use bytes::Bytes;
use futures::{StreamExt, stream};
use parking_lot::RwLock;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::{
    Attributes, ListPage, ListRequest, ObjectBody, Origin, OriginError, PutBody, PutOptions,
};
use crate::object::{Key, ObjectKind, ObjectMeta, Version};

/// S3's largest object.
const MAX_OBJECT_BYTES: u64 = 5 << 40;
/// CopyObject's limit.
const MAX_COPY_BYTES: u64 = 5 << 30;
/// User metadata that holds [`PutOptions::token`].
const TOKEN_NAME: &str = "kspeed-put";
/// S3's limit of a key.
const MAX_KEY_BYTES: usize = 1024;
/// What `x-amz-copy-source` must have escaped: all but unreserved and `/`.
const COPY_SOURCE: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// How a bucket is put into the URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AddressingStyle {
    /// Path style for endpoints that are addresses or `localhost`, else virtual.
    #[default]
    Auto,
    /// `https://endpoint/bucket/key`.
    Path,
    /// `https://bucket.endpoint/key`.
    Virtual,
}

/// Where the bucket is.
#[derive(Clone, Debug, Default)]
pub struct S3Config {
    /// Bucket name.
    pub bucket: String,
    /// Key prefix without leading slash; empty or ending with `/`.
    pub prefix: String,
    /// Endpoint, for other stores than AWS.
    pub endpoint: Option<String>,
    /// Region; found as the SDK does when absent, `us-east-1` at the last.
    pub region: Option<String>,
    /// Bucket in path or host.
    pub style: AddressingStyle,
    /// `s3` or `oss`: only part of the name that users see.
    pub scheme: &'static str,
    /// One request ends by this; zero: 15 s.
    pub request_timeout: Duration,
}

impl S3Config {
    fn is_path_style(&self) -> bool {
        match (self.style, &self.endpoint) {
            (AddressingStyle::Path, _) => true,
            (AddressingStyle::Virtual, _) | (AddressingStyle::Auto, None) => false,
            (AddressingStyle::Auto, Some(url)) => {
                let host = url.split("://").last().unwrap_or(url);
                let host = host.split('/').next().unwrap_or(host);
                let host = host.rsplit_once(':').map_or(host, |(h, _)| h);
                host == "localhost"
                    || host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok()
                    || !host.contains('.')
            }
        }
    }

    fn timeout(&self) -> Duration {
        if self.request_timeout.is_zero() { Duration::from_secs(15) } else { self.request_timeout }
    }
}

/// An origin over one prefix of one bucket.
pub struct S3Origin {
    config: S3Config,
    name: String,
    client: RwLock<Client>,
    generation: AtomicU64,
    reloading: tokio::sync::Mutex<()>,
}

impl S3Origin {
    /// Connects lazily: nothing is asked of the store yet.
    pub async fn new(config: S3Config) -> Self {
        let client = connect(&config).await;
        let scheme = if config.scheme.is_empty() { "s3" } else { config.scheme };
        // The endpoint is part of the identity: equal bucket names at two
        // stores are different data.
        let at = config.endpoint.as_deref().map(|e| format!("@{e}")).unwrap_or_default();
        let name = format!("{scheme}://{}{at}/{}", config.bucket, config.prefix);
        Self {
            config,
            name,
            client: RwLock::new(client),
            generation: AtomicU64::new(0),
            reloading: tokio::sync::Mutex::new(()),
        }
    }

    fn client(&self) -> Client {
        self.client.read().clone()
    }

    fn full_key(&self, key: &Key) -> Result<String, OriginError> {
        let invalid = |detail: &str| OriginError::Invalid {
            what: key.to_string(),
            detail: detail.to_owned(),
        };
        let k = key.to_str().map_err(|_| invalid("S3 keys are UTF-8"))?;
        let full = format!("{}{k}", self.config.prefix);
        if full.len() > MAX_KEY_BYTES {
            return Err(invalid("S3 keys have at most 1,024 bytes"));
        }
        Ok(full)
    }

    fn what(&self, key: &Key) -> String {
        format!("{}{key}", self.name)
    }

    /// A key of a listing, relative to the prefix.
    fn relative<'a>(&self, full: &'a str) -> Option<&'a str> {
        full.strip_prefix(&self.config.prefix)
    }
}

impl S3Origin {
    async fn head_with_token(
        &self,
        key: &Key,
    ) -> Result<(ObjectMeta, Option<String>), OriginError> {
        let what = self.what(key);
        let call =
            self.client().head_object().bucket(&self.config.bucket).key(self.full_key(key)?).send();
        let out = within(self.config.timeout(), &what, call).await?;
        let size = out.content_length().and_then(|n| u64::try_from(n).ok());
        let meta = ObjectMeta {
            key: key.clone(),
            size: size.ok_or_else(|| OriginError::Corrupt {
                what: what.clone(),
                detail: "no Content-Length".into(),
            })?,
            mtime_ns: out.last_modified().map_or(0, |t| t.as_nanos().try_into().unwrap_or(0)),
            version: etag(out.e_tag(), &what)?,
            kind: ObjectKind::File,
            mode: None,
        };
        Ok((meta, out.metadata().and_then(|m| m.get(TOKEN_NAME)).cloned()))
    }
}

async fn connect(config: &S3Config) -> Client {
    let mut loader = aws_config::defaults(BehaviorVersion::latest())
        .retry_config(RetryConfig::disabled())
        .timeout_config(
            TimeoutConfig::builder()
                .connect_timeout(Duration::from_secs(5).min(config.timeout()))
                .read_timeout(config.timeout())
                .build(),
        );
    if let Some(r) = &config.region {
        loader = loader.region(Region::new(r.clone()));
    }
    if let Some(url) = &config.endpoint {
        loader = loader.endpoint_url(url);
    }
    let shared = loader.load().await;
    let mut b = aws_sdk_s3::config::Builder::from(&shared)
        .force_path_style(config.is_path_style())
        // A ranged GET has no checksum of its own to validate.
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
    if config.endpoint.is_some() {
        // Trailing checksums are AWS's; others refuse them (OSS) or differ.
        b = b.request_checksum_calculation(RequestChecksumCalculation::WhenRequired);
    }
    if shared.region().is_none() {
        b = b.region(Region::new("us-east-1"));
    }
    Client::from_conf(b.build())
}

fn etag(tag: Option<&str>, what: &str) -> Result<Version, OriginError> {
    tag.map(|t| t.trim_matches('"').into())
        .ok_or_else(|| OriginError::Corrupt { what: what.to_owned(), detail: "no ETag".into() })
}

async fn within<T, E>(
    limit: Duration,
    what: &str,
    call: impl Future<Output = Result<T, SdkError<E, HttpResponse>>>,
) -> Result<T, OriginError>
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    match tokio::time::timeout(limit, call).await {
        Ok(Ok(v)) => Ok(v),
        Ok(Err(e)) => Err(classify(what, &e)),
        Err(_) => {
            Err(OriginError::TimedOut { what: what.to_owned(), after_ms: limit.as_millis() as u64 })
        }
    }
}

/// The causes of an error on one line.
fn chain(e: &dyn std::error::Error) -> String {
    let mut s = e.to_string();
    let mut at = e.source();
    while let Some(c) = at {
        let t = c.to_string();
        if !s.contains(&t) {
            s.push_str(": ");
            s.push_str(&t);
        }
        at = c.source();
    }
    s
}

fn classify<E>(what: &str, e: &SdkError<E, HttpResponse>) -> OriginError
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    let what = what.to_owned();
    let (status, code, message) = match e {
        SdkError::ServiceError(s) => (
            s.raw().status().as_u16(),
            s.err().code().unwrap_or_default().to_owned(),
            s.err().message().unwrap_or_default().to_owned(),
        ),
        SdkError::ResponseError(r) => {
            let s = r.raw().status().as_u16();
            if s < 400 {
                return OriginError::Corrupt { what, detail: chain(e) };
            }
            (s, String::new(), chain(e))
        }
        SdkError::TimeoutError(_) => {
            return OriginError::Unavailable { what, detail: chain(e) };
        }
        SdkError::DispatchFailure(d) if d.is_timeout() || d.is_io() => {
            return OriginError::Unavailable { what, detail: chain(e) };
        }
        SdkError::DispatchFailure(_) => {
            let detail = chain(e);
            // The SDK has no kind for "no credentials found"; its words do.
            return if detail.to_ascii_lowercase().contains("credentials") {
                OriginError::Denied { what, detail }
            } else {
                OriginError::Unavailable { what, detail }
            };
        }
        _ => return OriginError::Invalid { what, detail: chain(e) },
    };
    let detail = match (code.is_empty(), message.is_empty()) {
        (false, false) => format!("{code}: {message}"),
        (false, true) => code.clone(),
        (true, false) => format!("HTTP {status}: {message}"),
        (true, true) => format!("HTTP {status}"),
    };
    match code.as_str() {
        "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired" | "RequestExpired" => {
            return OriginError::Expired { what };
        }
        "SlowDown"
        | "Throttling"
        | "ThrottlingException"
        | "RequestLimitExceeded"
        | "TooManyRequests"
        | "DownloadTrafficRateLimitExceeded" => {
            return OriginError::Throttled { what, detail };
        }
        "RequestTimeTooSkewed" => {
            return OriginError::Denied {
                what,
                detail: format!("{detail}; this machine's clock is wrong, set it (NTP)"),
            };
        }
        "NotImplemented" => return OriginError::Unsupported { what },
        "NoSuchBucket" => {
            return OriginError::NotFound { what: format!("the bucket of {what}") };
        }
        _ => {}
    }
    match status {
        401 | 403 => OriginError::Denied { what, detail },
        404 => OriginError::NotFound { what },
        409 | 412 => OriginError::Changed { what },
        // The range no longer fits: the object has shrunk.
        416 => OriginError::Changed { what },
        408 => OriginError::Unavailable { what, detail },
        429 | 503 => OriginError::Throttled { what, detail },
        500.. => OriginError::Unavailable { what, detail },
        _ => OriginError::Invalid { what, detail },
    }
}

/// `bytes 5-9/100` to (5..10, 100).
fn content_range(header: &str) -> Option<(Range<u64>, u64)> {
    let (range, total) = header.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    Some((first..last.checked_add(1)?, total.parse().ok()?))
}

/// A listing's key under `encoding-type=url`: `+` is a space, `%XX` a byte.
fn decode_key(raw: &str, encoded: bool) -> String {
    if !encoded {
        return raw.to_owned();
    }
    percent_decode_str(&raw.replace('+', " ")).decode_utf8_lossy().into_owned()
}

#[async_trait]
impl Origin for S3Origin {
    fn name(&self) -> &str {
        &self.name
    }

    async fn list(&self, r: &ListRequest) -> Result<ListPage, OriginError> {
        let prefix = String::from_utf8(r.prefix.clone()).map_err(|_| OriginError::Invalid {
            what: r.prefix.escape_ascii().to_string(),
            detail: "S3 keys are UTF-8".into(),
        })?;
        let what = format!("listing of {}{prefix}", self.name);
        let mut call = self
            .client()
            .list_objects_v2()
            .bucket(&self.config.bucket)
            .prefix(format!("{}{prefix}", self.config.prefix))
            // XML 1.0 has no words for control characters.
            .encoding_type(EncodingType::Url);
        if r.delimited {
            call = call.delimiter("/");
        }
        if r.max_keys > 0 {
            call = call.max_keys(i32::try_from(r.max_keys).unwrap_or(1000).min(1000));
        }
        match (&r.token, &r.start_after) {
            (Some(t), _) => call = call.continuation_token(t),
            (None, Some(k)) => call = call.start_after(self.full_key(k)?),
            (None, None) => {}
        }
        let out = within(self.config.timeout(), &what, call.send()).await?;
        let encoded = out.encoding_type() == Some(&EncodingType::Url);
        let mut page = ListPage::default();
        for o in out.contents() {
            let full = decode_key(o.key().unwrap_or_default(), encoded);
            let Some(key) = self.relative(&full).filter(|k| !k.is_empty()) else { continue };
            let size = o.size().and_then(|s| u64::try_from(s).ok()).unwrap_or(0);
            let mtime_ns = o.last_modified().map_or(0, |t| t.as_nanos().try_into().unwrap_or(0));
            page.objects.push(ObjectMeta {
                key: key.into(),
                size,
                mtime_ns,
                version: etag(o.e_tag(), &what)?,
                kind: ObjectKind::File,
                mode: None,
            });
        }
        for p in out.common_prefixes() {
            let full = decode_key(p.prefix().unwrap_or_default(), encoded);
            if let Some(key) = self.relative(&full) {
                page.prefixes.push(key.into());
            }
        }
        if out.is_truncated() == Some(true) {
            page.next = out.next_continuation_token().map(str::to_owned);
            if page.next.is_none() {
                return Err(OriginError::Corrupt {
                    what,
                    detail: "a truncated page without a continuation token".into(),
                });
            }
        }
        Ok(page)
    }

    async fn head(&self, key: &Key) -> Result<ObjectMeta, OriginError> {
        self.head_with_token(key).await.map(|(m, _)| m)
    }

    async fn get(&self, meta: &ObjectMeta, range: Range<u64>) -> Result<ObjectBody, OriginError> {
        let what = self.what(&meta.key);
        if range.is_empty() || range.end > meta.size {
            return Err(OriginError::Invalid { what, detail: format!("no bytes {range:?}") });
        }
        let call = self
            .client()
            .get_object()
            .bucket(&self.config.bucket)
            .key(self.full_key(&meta.key)?)
            .range(format!("bytes={}-{}", range.start, range.end - 1))
            .if_match(format!("\"{}\"", meta.version))
            .send();
        let out = within(self.config.timeout(), &what, call).await?;
        let corrupt = |detail: String| OriginError::Corrupt { what: what.clone(), detail };
        let len = range.end - range.start;
        match out.content_range().and_then(content_range) {
            Some((got, size)) if got == range && size == meta.size => {}
            // A store that sends the whole object with 200 for the whole range.
            None if range.start == 0 && len == meta.size => {}
            Some((_, size)) if size != meta.size => {
                return Err(OriginError::Changed { what });
            }
            got => return Err(corrupt(format!("asked for {range:?}, got {got:?}"))),
        }
        if out.content_length() != Some(len as i64) {
            return Err(corrupt(format!(
                "{len} bytes asked for, {:?} announced",
                out.content_length()
            )));
        }
        let version = etag(out.e_tag(), &what)?;
        if version != meta.version {
            return Err(OriginError::Changed { what });
        }
        let stall = self.config.timeout();
        let state = (out.body, 0u64, what);
        let stream = stream::try_unfold(state, move |(mut body, got, what)| async move {
            match tokio::time::timeout(stall, body.try_next()).await {
                Err(_) => Err(OriginError::TimedOut { what, after_ms: stall.as_millis() as u64 }),
                Ok(Err(e)) => Err(OriginError::Unavailable { what, detail: chain(&e) }),
                Ok(Ok(Some(b))) if got + b.len() as u64 > len => Err(OriginError::Corrupt {
                    what,
                    detail: format!("more than the {len} bytes announced"),
                }),
                Ok(Ok(Some(b))) => {
                    let got = got + b.len() as u64;
                    Ok::<Option<(Bytes, _)>, _>(Some((b, (body, got, what))))
                }
                Ok(Ok(None)) if got < len => Err(OriginError::Corrupt {
                    what,
                    detail: format!("the body ended {} bytes early", len - got),
                }),
                Ok(Ok(None)) => Ok(None),
            }
        });
        Ok(ObjectBody { version, size: meta.size, stream: stream.boxed() })
    }

    async fn put(
        &self,
        key: &Key,
        body: PutBody,
        how: &PutOptions,
    ) -> Result<ObjectMeta, OriginError> {
        let len = body.len();
        if len > MAX_OBJECT_BYTES {
            return Err(OriginError::Invalid {
                what: self.what(key),
                detail: "S3 objects have at most 5 TiB".into(),
            });
        }
        let version = match self.put_whole(key, &body, how).await {
            // In the way may be what an earlier try of this put stored, whose
            // answer was lost.
            Err(e @ (OriginError::Changed { .. } | OriginError::NotFound { .. })) => {
                let Some(token) = &how.token else { return Err(e) };
                return match self.head_with_token(key).await {
                    Ok((meta, Some(there))) if there == *token && meta.size == len => Ok(meta),
                    Err(unknown) if unknown.is_transient() => Err(unknown),
                    _ => Err(e),
                };
            }
            r => r?,
        };
        // PUT doesn't tell the time that the store gave it; HEAD does, and
        // shows that what is there is what was sent.
        let meta = self.head(key).await?;
        if meta.version == version && meta.size == len {
            Ok(meta)
        } else {
            Err(OriginError::Changed { what: self.what(key) })
        }
    }

    async fn owner(&self, key: &Key) -> Result<(ObjectMeta, Option<String>), OriginError> {
        self.head_with_token(key).await
    }

    async fn abort_upload(&self, key: &Key, id: &str) -> Result<(), OriginError> {
        let what = self.what(key);
        let call = self
            .client()
            .abort_multipart_upload()
            .bucket(&self.config.bucket)
            .key(self.full_key(key)?)
            .upload_id(id)
            .send();
        match within(self.config.timeout(), &what, call).await {
            Ok(_) | Err(OriginError::NotFound { .. }) => Ok(()),
            Err(e) => Err(e),
        }
    }

    async fn delete(&self, key: &Key) -> Result<(), OriginError> {
        let what = self.what(key);
        let call = self
            .client()
            .delete_object()
            .bucket(&self.config.bucket)
            .key(self.full_key(key)?)
            .send();
        match within(self.config.timeout(), &what, call).await {
            Ok(_) | Err(OriginError::NotFound { .. }) => Ok(()),
            Err(e) => Err(e),
        }
    }

    async fn copy(
        &self,
        from: &ObjectMeta,
        to: &Key,
        attributes: &Attributes,
    ) -> Result<ObjectMeta, OriginError> {
        let what = self.what(&from.key);
        if from.size > MAX_COPY_BYTES {
            return Err(OriginError::Unsupported { what });
        }
        let source = format!("{}/{}", self.config.bucket, self.full_key(&from.key)?);
        let call = self
            .client()
            .copy_object()
            .bucket(&self.config.bucket)
            .copy_source(utf8_percent_encode(&source, COPY_SOURCE).to_string())
            .copy_source_if_match(format!("\"{}\"", from.version))
            .key(self.full_key(to)?)
            .set_metadata(put::metadata(attributes, None))
            .set_metadata_directive(
                (*attributes != Attributes::default()).then_some(MetadataDirective::Replace),
            )
            .send();
        // The store copies within itself, at 100 MB/s or better.
        let limit = self.config.timeout() + Duration::from_secs(from.size / 100_000_000);
        let out = within(limit, &what, call).await?;
        let Some(r) = out.copy_object_result() else {
            return Err(OriginError::Corrupt { what, detail: "no result of the copy".into() });
        };
        Ok(ObjectMeta {
            key: to.clone(),
            version: etag(r.e_tag(), &what)?,
            mtime_ns: r.last_modified().map_or(0, |t| t.as_nanos().try_into().unwrap_or(0)),
            ..from.clone()
        })
    }

    async fn reload(&self) -> Result<(), OriginError> {
        let seen = self.generation.load(Ordering::Acquire);
        let _one = self.reloading.lock().await;
        // Whoever waited for a reload has it.
        if self.generation.load(Ordering::Acquire) != seen {
            return Ok(());
        }
        let client = connect(&self.config).await;
        *self.client.write() = client;
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

/// What a bucket answers to the smallest signed request, for `kspeed doctor`.
impl S3Origin {
    /// Lists one key.
    ///
    /// # Errors
    /// What the store answers.
    pub async fn probe(&self) -> Result<(), OriginError> {
        self.list(&ListRequest { max_keys: 1, delimited: true, ..ListRequest::default() })
            .await
            .map(drop)
    }
}

/// Shared so that layers can hold it.
impl From<S3Origin> for Arc<dyn Origin> {
    fn from(o: S3Origin) -> Self {
        Arc::new(o)
    }
}

mod put;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read_strictly() {
        assert_eq!(content_range("bytes 5-9/100"), Some((5..10, 100)));
        for bad in ["", "bytes 5-9", "bytes */100", "5-9/100", "bytes 5-/100", "bytes 5-9/*"] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }

    #[test]
    fn endpoints_that_are_addresses_get_path_style() {
        let style = |url: &str| S3Config { endpoint: Some(url.into()), ..S3Config::default() };
        for url in
            ["http://127.0.0.1:9000", "http://localhost:1", "http://[::1]:80", "http://minio:9000/"]
        {
            assert!(style(url).is_path_style(), "{url}");
        }
        assert!(!style("https://oss-cn-hangzhou.aliyuncs.com").is_path_style());
        assert!(!S3Config::default().is_path_style());
    }

    #[test]
    fn listed_keys_are_decoded_as_s3_encodes_them() {
        assert_eq!(decode_key("a+b%2Bc%0A%C3%A9", true), "a b+c\n\u{e9}");
        assert_eq!(decode_key("a+b%2B", false), "a+b%2B");
    }
}

//! Configuration in two steps: raw (flags, environment, file) to checked.
//!
//! A wrong value is refused with the allowed ones and never silently changed.

mod raw;
mod units;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kspeed_cache::BLOCK_BYTES_DEFAULT;
use kspeed_cache::origin::{AddressingStyle, S3Config};
use kspeed_cache::tier::DiskConfig;

pub use raw::{RawFile, RawMount};
pub use units::{parse_duration, parse_rate, parse_size, size_text};

use crate::dataset::CpuShare;
use crate::pipeline::Predict;
use crate::writeback::Ack;

/// Default of --cache-size when the disk's free space is not known, in bytes.
const CACHE_SIZE_FALLBACK: u64 = 10 << 30;
/// Default --cache-size: this part of the free space, in per cent.
const CACHE_SIZE_PERCENT: u64 = 80;
/// Default of the space left free, in bytes.
const MIN_FREE_DEFAULT: u64 = 1 << 30;
/// Default --memory-limit, in bytes.
const MEMORY_DEFAULT: u64 = 1 << 30;
/// Smallest --memory-limit: below, not even a few extents fit.
const MEMORY_MIN: u64 = 128 << 20;
/// What the process needs beside what is counted: code, stacks, connections.
const MEMORY_FIXED: u64 = 64 << 20;
/// Below this a --metadata-ttl has no lower bound; 0 asks at each lookup.
const METADATA_TTL_DEFAULT: Duration = Duration::from_secs(60);
const NEGATIVE_TTL_DEFAULT: Duration = Duration::from_secs(5);
const UPLOAD_DELAY_DEFAULT: Duration = Duration::from_secs(1);
const IO_TIMEOUT_DEFAULT: Duration = Duration::from_secs(100);
/// Requests to the origin at once.
const MAX_REQUESTS_DEFAULT: usize = 256;
/// Part of all processors for scans, in a hundred.
const SCAN_CPU_DEFAULT: u32 = 50;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A value that is not allowed.
    #[error("{option}: {value:?} is not allowed: {allowed}")]
    Value {
        /// Option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// Something that is needed is missing.
    #[error("{0}")]
    Missing(String),
    /// A file that can't be read.
    #[error("{path}: {detail}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        detail: String,
    },
}

pub(crate) fn bad(
    option: &'static str,
    value: impl Into<String>,
    allowed: impl Into<String>,
) -> ConfigError {
    ConfigError::Value { option, value: value.into(), allowed: allowed.into() }
}

/// Where a mount's objects come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A bucket.
    S3(S3Config),
    /// A directory.
    Posix(PathBuf),
}

/// One mount, checked.
#[derive(Clone, Debug)]
pub struct MountConfig {
    /// As the user named it.
    pub source_text: String,
    /// Source.
    pub source: Source,
    /// Absolute mountpoint.
    pub mountpoint: PathBuf,
    /// Read-only, no-open.
    pub read_only: bool,
    /// Serve names from a snapshot index.
    pub snapshot: bool,
    /// Use passthrough where possible.
    pub passthrough: bool,
    /// What to predict.
    pub predict: Predict,
    /// What a search for seeds may take of the processors.
    pub scan_share: CpuShare,
    /// Lifetime of listings.
    pub metadata_ttl: Duration,
    /// Lifetime of absence.
    pub negative_ttl: Duration,
    /// Deadline of a call.
    pub io_timeout: Duration,
    /// When close and fsync return.
    pub ack: Ack,
    /// Close waits for the disk.
    pub sync_on_close: bool,
    /// A closed file is uploaded after this.
    pub upload_delay: Duration,
    /// What may be written and not uploaded, in bytes; none: half the cache.
    pub stage_bytes: Option<u64>,
    /// Take over what another source's mount did not upload.
    pub recover: bool,
    /// Bytes per second from the origin.
    pub max_fetch_rate: Option<u64>,
    /// Requests to the origin at once.
    pub max_requests: usize,
    /// Others than the mounting user may look in.
    pub allow_other: bool,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits of files.
    pub file_mode: u32,
    /// Permission bits of directories.
    pub dir_mode: u32,
}

/// What all mounts of a process share, checked.
#[derive(Clone, Debug)]
pub struct ProcessConfig {
    /// Cache directories.
    pub disks: Vec<DiskConfig>,
    /// RAM tier, in bytes.
    pub ram_bytes: u64,
    /// Buffers in flight, in bytes.
    pub buffer_bytes: u64,
    /// Inodes and listings, in bytes, for all mounts.
    pub names_bytes: u64,
    /// Datasets' numbers and orders, in bytes, for all mounts.
    pub orders_bytes: u64,
    /// The whole, in bytes.
    pub memory_limit: u64,
    /// Block size, in bytes.
    pub block_bytes: u64,
    /// Prometheus endpoint.
    pub metrics: Option<SocketAddr>,
    /// Log level or filter.
    pub log: String,
}

impl ProcessConfig {
    /// Where the control socket is: beside the cache.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        match self.disks.first() {
            Some(d) => d.dir.join("control.sock"),
            None => std::env::temp_dir().join(format!("kspeed-{}.sock", std::process::id())),
        }
    }

    /// Checks the raw options of a process.
    ///
    /// # Errors
    /// A value is not allowed.
    pub fn check(raw: &RawMount) -> Result<Self, ConfigError> {
        let memory_limit = size("--memory-limit", raw.memory_limit.as_deref(), MEMORY_DEFAULT)?;
        if memory_limit < MEMORY_MIN {
            return Err(bad("--memory-limit", size_text(memory_limit), "at least 128MiB"));
        }
        let counted = memory_limit - MEMORY_FIXED;
        let ram_bytes = size("--ram-size", raw.ram_size.as_deref(), counted / 4)?;
        if ram_bytes > counted / 2 {
            return Err(bad(
                "--ram-size",
                size_text(ram_bytes),
                format!("at most {} with this --memory-limit", size_text(counted / 2)),
            ));
        }
        let block_bytes = size("--block-size", raw.block_size.as_deref(), BLOCK_BYTES_DEFAULT)?;
        if !block_bytes.is_power_of_two() || !(65_536..=8 << 20).contains(&block_bytes) {
            return Err(bad(
                "--block-size",
                size_text(block_bytes),
                "a power of two from 64KiB to 8MiB",
            ));
        }
        let compress = match raw.compress.as_deref() {
            None | Some("off") => None,
            Some("zstd") => Some(3),
            Some(z) => match z.strip_prefix("zstd:").and_then(|l| l.parse().ok()) {
                Some(l @ 1..=19) => Some(l),
                _ => return Err(bad("--compress", z, "off, zstd, or zstd:1 to zstd:19")),
            },
        };
        let mut dirs = raw.cache_dir.clone().unwrap_or_default();
        if dirs.is_empty() && !raw.no_cache_dir.unwrap_or(false) {
            dirs.push(default_cache_dir());
        }
        let min_free_bytes = size("--min-free", raw.min_free.as_deref(), MIN_FREE_DEFAULT)?;
        let count = dirs.len() as u64;
        let disks = dirs
            .into_iter()
            .map(|dir| {
                let max_bytes = match raw.cache_size.as_deref() {
                    Some(s) => size("--cache-size", Some(s), 0)? / count.max(1),
                    None => default_cache_size(&dir),
                };
                Ok(DiskConfig { dir: absolute(&dir)?, max_bytes, min_free_bytes, compress })
            })
            .collect::<Result<Vec<_>, ConfigError>>()?;
        let metrics =
            match raw.metrics.as_deref() {
                None => None,
                Some(a) => Some(a.parse().map_err(|_| {
                    bad("--metrics", a, "an address and port, such as 127.0.0.1:9464")
                })?),
            };
        Ok(Self {
            disks,
            ram_bytes,
            buffer_bytes: counted / 2,
            names_bytes: counted / 6,
            orders_bytes: counted / 4 - counted / 6,
            memory_limit,
            block_bytes,
            metrics,
            log: raw.log.clone().unwrap_or_else(|| "info".into()),
        })
    }
}

impl MountConfig {
    /// Checks the raw options of one mount.
    ///
    /// # Errors
    /// A value is not allowed, or source or mountpoint are missing.
    pub fn check(raw: &RawMount) -> Result<Self, ConfigError> {
        let missing = |what: &str| ConfigError::Missing(format!("{what} is missing"));
        let source_text = raw.source.clone().ok_or_else(|| missing("the source"))?;
        let mountpoint = raw.mountpoint.clone().ok_or_else(|| missing("the mountpoint"))?;
        let source = parse_source(&source_text, raw)?;
        let read_only = raw.read_only.unwrap_or(false);
        let snapshot = raw.snapshot.unwrap_or(false);
        if snapshot && !read_only {
            return Err(bad("--snapshot", "without --read-only", "only together with --read-only"));
        }
        if snapshot && matches!(source, Source::Posix(_)) {
            return Err(bad("--snapshot", source_text, "an s3:// or oss:// source"));
        }
        let ack = match raw.ack.as_deref() {
            None | Some("local") => Ack::Local,
            Some("origin") => Ack::Origin,
            Some(a) => {
                return Err(bad(
                    "--ack",
                    a,
                    "local: the cache disk has it; origin: the object is in the bucket (replica comes with the peer cache)",
                ));
            }
        };
        let upload_delay =
            duration("--upload-delay", raw.upload_delay.as_deref(), UPLOAD_DELAY_DEFAULT)?;
        let stage_bytes = match raw.stage_size.as_deref() {
            Some(s) => Some(size("--stage-size", Some(s), 0)?),
            None => None,
        };
        let predict = match raw.predict.as_deref() {
            None | Some("auto") => Predict::Auto,
            Some("sequential") => Predict::Sequential,
            Some("off") => Predict::Off,
            Some(p) => return Err(bad("--predict", p, "off, sequential or auto")),
        };
        let scan_cpu = raw.scan_cpu.unwrap_or(SCAN_CPU_DEFAULT);
        if !(1..=100).contains(&scan_cpu) {
            return Err(bad("--scan-cpu", scan_cpu.to_string(), "1 to 100"));
        }
        let io_timeout = duration("--io-timeout", raw.io_timeout.as_deref(), IO_TIMEOUT_DEFAULT)?;
        if io_timeout < Duration::from_secs(1) {
            return Err(bad("--io-timeout", format!("{io_timeout:?}"), "at least 1s"));
        }
        let max_requests = raw.max_requests.unwrap_or(MAX_REQUESTS_DEFAULT);
        if !(2..=4096).contains(&max_requests) {
            return Err(bad("--max-requests", max_requests.to_string(), "2 to 4096"));
        }
        let max_fetch_rate = raw
            .max_fetch_rate
            .as_deref()
            .map(|r| {
                parse_rate(r).ok_or_else(|| {
                    bad("--max-fetch-rate", r, "a size per second, such as 500MiB or 4Gbit")
                })
            })
            .transpose()?;
        let mode = |option, text: Option<&str>, default| match text {
            None => Ok(default),
            Some(t) => match u32::from_str_radix(t, 8) {
                Ok(m) if m <= 0o777 => Ok(m),
                _ => Err(bad(option, t, "an octal mode from 000 to 777")),
            },
        };
        Ok(Self {
            source_text,
            source,
            mountpoint: absolute(&mountpoint)?,
            read_only,
            snapshot,
            passthrough: !raw.no_passthrough.unwrap_or(false),
            predict,
            scan_share: CpuShare::of_all(scan_cpu),
            metadata_ttl: duration(
                "--metadata-ttl",
                raw.metadata_ttl.as_deref(),
                METADATA_TTL_DEFAULT,
            )?,
            negative_ttl: duration(
                "--negative-ttl",
                raw.negative_ttl.as_deref(),
                NEGATIVE_TTL_DEFAULT,
            )?,
            io_timeout,
            ack,
            sync_on_close: raw.sync_on_close.unwrap_or(true),
            upload_delay,
            stage_bytes,
            recover: raw.recover.unwrap_or(false),
            max_fetch_rate,
            max_requests,
            allow_other: raw.allow_other.unwrap_or(false),
            uid: raw.uid.unwrap_or_else(|| rustix::process::getuid().as_raw()),
            gid: raw.gid.unwrap_or_else(|| rustix::process::getgid().as_raw()),
            file_mode: mode("--file-mode", raw.file_mode.as_deref(), 0o644)?,
            dir_mode: mode("--dir-mode", raw.dir_mode.as_deref(), 0o755)?,
        })
    }
}

/// Reads `s3://BUCKET[/PREFIX]`, `oss://…`, `file:///DIR` or `DIR`.
///
/// # Errors
/// It is none of these.
pub fn parse_source(text: &str, raw: &RawMount) -> Result<Source, ConfigError> {
    let allowed = "s3://BUCKET[/PREFIX], oss://BUCKET[/PREFIX], file:///DIR or a directory";
    let (scheme, rest) = match text.split_once("://") {
        Some((s @ ("s3" | "oss"), rest)) => (s, rest),
        Some(("file", dir)) => return Ok(Source::Posix(absolute(Path::new(dir))?)),
        Some(_) => return Err(bad("SOURCE", text, allowed)),
        None => return Ok(Source::Posix(absolute(Path::new(text))?)),
    };
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() {
        return Err(bad("SOURCE", text, allowed));
    }
    let mut prefix = prefix.to_owned();
    if !prefix.is_empty() && !prefix.ends_with('/') {
        prefix.push('/');
    }
    let mut endpoint = raw.endpoint_url.clone();
    let mut style = match (raw.path_style.unwrap_or(false), raw.virtual_host.unwrap_or(false)) {
        (true, true) => {
            return Err(bad("--path-style", "with --virtual-host", "one of the two"));
        }
        (true, false) => AddressingStyle::Path,
        (false, true) => AddressingStyle::Virtual,
        (false, false) => AddressingStyle::Auto,
    };
    let mut region = raw.region.clone();
    if scheme == "oss" {
        // OSS speaks S3 with the bucket in the host, at an endpoint per region.
        let r = region.get_or_insert_with(|| "cn-hangzhou".into());
        let r = r.trim_start_matches("oss-").to_owned();
        endpoint.get_or_insert_with(|| format!("https://oss-{r}.aliyuncs.com"));
        if style == AddressingStyle::Auto {
            style = AddressingStyle::Virtual;
        }
    }
    if let Some(url) = &endpoint
        && !url.starts_with("http://")
        && !url.starts_with("https://")
    {
        return Err(bad("--endpoint-url", url, "http://HOST[:PORT] or https://HOST[:PORT]"));
    }
    Ok(Source::S3(S3Config {
        bucket: bucket.to_owned(),
        prefix,
        endpoint,
        region,
        style,
        scheme: if scheme == "oss" { "oss" } else { "s3" },
        request_timeout: Duration::ZERO,
    }))
}

fn absolute(p: &Path) -> Result<PathBuf, ConfigError> {
    std::path::absolute(p)
        .map_err(|e| ConfigError::File { path: p.to_path_buf(), detail: e.to_string() })
}

fn size(option: &'static str, text: Option<&str>, default: u64) -> Result<u64, ConfigError> {
    match text {
        None => Ok(default),
        Some(t) => {
            parse_size(t).ok_or_else(|| bad(option, t, "a size, such as 512MiB, 1GiB or 2TB"))
        }
    }
}

fn duration(
    option: &'static str,
    text: Option<&str>,
    default: Duration,
) -> Result<Duration, ConfigError> {
    match text {
        None => Ok(default),
        Some(t) => {
            parse_duration(t).ok_or_else(|| bad(option, t, "a duration, such as 500ms, 30s or 1h"))
        }
    }
}

/// `/var/cache/kspeed` for root, else under the user's cache directory.
fn default_cache_dir() -> PathBuf {
    if rustix::process::getuid().is_root() {
        return "/var/cache/kspeed".into();
    }
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache"));
    base.or_else(home).unwrap_or_else(std::env::temp_dir).join("kspeed")
}

fn default_cache_size(dir: &Path) -> u64 {
    let existing = dir.ancestors().find(|d| d.exists()).unwrap_or(Path::new("/"));
    rustix::fs::statvfs(existing)
        .map_or(CACHE_SIZE_FALLBACK, |s| s.f_bavail * s.f_frsize / 100 * CACHE_SIZE_PERCENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(source: &str) -> RawMount {
        RawMount {
            source: Some(source.into()),
            mountpoint: Some("/mnt".into()),
            ..RawMount::default()
        }
    }

    #[test]
    fn sources_are_read() {
        let s3 = |text: &str| match parse_source(text, &raw(text)) {
            Ok(Source::S3(c)) => c,
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!(s3("s3://b").prefix, "");
        assert_eq!(s3("s3://b/a/b").prefix, "a/b/");
        assert_eq!(s3("s3://b/a/").prefix, "a/");
        let oss = s3("oss://b/p");
        assert_eq!(oss.endpoint.as_deref(), Some("https://oss-cn-hangzhou.aliyuncs.com"));
        assert_eq!(oss.style, AddressingStyle::Virtual);
        assert!(
            matches!(parse_source("file:///data", &raw("")), Ok(Source::Posix(p)) if p == Path::new("/data"))
        );
        assert!(matches!(parse_source("/data", &raw("")), Ok(Source::Posix(_))));
        for bad in ["s3://", "gs://b", "s3:///x"] {
            assert!(parse_source(bad, &raw(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn wrong_values_are_refused_with_the_allowed_ones() {
        type Change = (&'static str, fn(&mut RawMount));
        let wrong: [Change; 10] = [
            ("--ack", |r| r.ack = Some("replica".into())),
            ("--upload-delay", |r| r.upload_delay = Some("soon".into())),
            ("--stage-size", |r| r.stage_size = Some("big".into())),
            ("--predict", |r| r.predict = Some("always".into())),
            ("--metadata-ttl", |r| r.metadata_ttl = Some("soon".into())),
            ("--file-mode", |r| r.file_mode = Some("999".into())),
            ("--max-requests", |r| r.max_requests = Some(1)),
            ("--snapshot", |r| r.snapshot = Some(true)),
            ("--io-timeout", |r| r.io_timeout = Some("1ms".into())),
            ("--endpoint-url", |r| r.endpoint_url = Some("minio:9000".into())),
        ];
        for (option, change) in wrong {
            let mut r = raw("s3://b");
            change(&mut r);
            let e = MountConfig::check(&r).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(e.starts_with(option) && e.contains("not allowed: "), "{option}: {e}");
        }
        let wrong: [Change; 4] = [
            ("--memory-limit", |r| r.memory_limit = Some("1MiB".into())),
            ("--ram-size", |r| r.ram_size = Some("100GiB".into())),
            ("--block-size", |r| r.block_size = Some("3MiB".into())),
            ("--compress", |r| r.compress = Some("zstd:99".into())),
        ];
        for (option, change) in wrong {
            let mut r = raw("s3://b");
            change(&mut r);
            let e = ProcessConfig::check(&r).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(e.starts_with(option), "{option}: {e}");
        }
    }

    #[test]
    fn the_parts_of_memory_fit_its_limit() {
        for limit in ["128MiB", "512MiB", "16GiB"] {
            let mut r = raw("s3://b");
            r.memory_limit = Some(limit.into());
            let c = ProcessConfig::check(&r).expect(limit);
            assert!(c.ram_bytes + c.buffer_bytes + c.names_bytes + MEMORY_FIXED <= c.memory_limit);
        }
    }
}

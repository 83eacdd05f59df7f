//! Options as they come: flags over environment over file.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::ConfigError;

macro_rules! raw_mount {
    ($( $(#[$meta:meta])* $name:ident: $ty:ty ),+ $(,)?) => {
        /// Options of `kspeed mount`; flag, configuration key and KSPEED_ variable
        /// have the same name.
        #[derive(Clone, Debug, Default, clap::Args, Deserialize)]
        #[serde(rename_all = "kebab-case", deny_unknown_fields)]
        pub struct RawMount {
            $( $(#[$meta])* pub $name: Option<$ty>, )+
        }

        impl RawMount {
            /// Takes from `other` what is not set here.
            #[must_use]
            pub fn or(self, other: &Self) -> Self {
                Self { $( $name: self.$name.or_else(|| other.$name.clone()), )+ }
            }
        }
    };
}

raw_mount! {
    /// s3://BUCKET[/PREFIX], oss://BUCKET[/PREFIX], file:///DIR or a directory.
    source: String,
    /// Directory to mount on.
    mountpoint: PathBuf,
    /// Cache directory; repeatable [default: /var/cache/kspeed, or ~/.cache/kspeed].
    #[arg(long, env = "KSPEED_CACHE_DIR", value_name = "DIR")]
    cache_dir: Vec<PathBuf>,
    /// No cache directory: RAM only, and no writing.
    #[arg(long, env = "KSPEED_NO_CACHE_DIR", num_args = 0..=1, default_missing_value = "true")]
    no_cache_dir: bool,
    /// Limit of all cache directories together [default: 80% of the free space].
    #[arg(long, env = "KSPEED_CACHE_SIZE", value_name = "SIZE")]
    cache_size: String,
    /// Space left free on each cache disk [default: 1GiB].
    #[arg(long, env = "KSPEED_MIN_FREE", value_name = "SIZE")]
    min_free: String,
    /// RAM tier [default: a quarter of the memory limit].
    #[arg(long, env = "KSPEED_RAM_SIZE", value_name = "SIZE")]
    ram_size: String,
    /// Limit of the whole process's memory [default: 1GiB].
    #[arg(long, env = "KSPEED_MEMORY_LIMIT", value_name = "SIZE")]
    memory_limit: String,
    /// Dataset mount: no-open, names primed, files pushed into the page cache.
    #[arg(long, env = "KSPEED_READ_ONLY", num_args = 0..=1, default_missing_value = "true")]
    read_only: bool,
    /// Serve names from an index of the whole prefix, built once (with --read-only).
    #[arg(long, env = "KSPEED_SNAPSHOT", num_args = 0..=1, default_missing_value = "true")]
    snapshot: bool,
    /// When close and fsync return: local (the cache disk has it) or origin [default: local].
    #[arg(long, env = "KSPEED_ACK", value_name = "WHEN")]
    ack: String,
    /// With --ack local: close waits for the disk, as fsync does [default: true].
    #[arg(long, env = "KSPEED_SYNC_ON_CLOSE", num_args = 0..=1, default_missing_value = "true")]
    sync_on_close: bool,
    /// A closed file is uploaded after this [default: 1s].
    #[arg(long, env = "KSPEED_UPLOAD_DELAY", value_name = "D")]
    upload_delay: String,
    /// What is written and not uploaded may take this of the cache disk [default: half of --cache-size].
    #[arg(long, env = "KSPEED_STAGE_SIZE", value_name = "SIZE")]
    stage_size: String,
    /// Takes over files of another source that were written and not uploaded.
    #[arg(long, env = "KSPEED_RECOVER", num_args = 0..=1, default_missing_value = "true")]
    recover: bool,
    /// Endpoint of another store than AWS.
    #[arg(long, env = "KSPEED_ENDPOINT_URL", value_name = "URL")]
    endpoint_url: String,
    /// Region [default: as the AWS SDK finds it].
    #[arg(long, env = "KSPEED_REGION")]
    region: String,
    /// Bucket in the path of URLs (MinIO).
    #[arg(long, env = "KSPEED_PATH_STYLE", num_args = 0..=1, default_missing_value = "true")]
    path_style: bool,
    /// Bucket in the host of URLs (AWS, OSS).
    #[arg(long, env = "KSPEED_VIRTUAL_HOST", num_args = 0..=1, default_missing_value = "true")]
    virtual_host: bool,
    /// How long listings and attributes are believed [default: 60s].
    #[arg(long, env = "KSPEED_METADATA_TTL", value_name = "D")]
    metadata_ttl: String,
    /// How long the absence of a name is believed [default: 5s].
    #[arg(long, env = "KSPEED_NEGATIVE_TTL", value_name = "D")]
    negative_ttl: String,
    /// Every call ends by this [default: 100s].
    #[arg(long, env = "KSPEED_IO_TIMEOUT", value_name = "D")]
    io_timeout: String,
    /// Block of the cache: a power of two from 64KiB to 8MiB [default: 1MiB].
    #[arg(long, env = "KSPEED_BLOCK_SIZE", value_name = "SIZE")]
    block_size: String,
    /// Compress small objects in the cache: off or zstd[:LEVEL] [default: off].
    #[arg(long, env = "KSPEED_COMPRESS", value_name = "HOW")]
    compress: String,
    /// What to predict: off, sequential or auto [default: auto].
    #[arg(long, env = "KSPEED_PREDICT", value_name = "WHAT")]
    predict: String,
    /// Share of all processors that a scan for seeds may take [default: 50].
    #[arg(long, env = "KSPEED_SCAN_CPU", value_name = "PERCENT")]
    scan_cpu: u32,
    /// Bytes per second from the origin at the most.
    #[arg(long, env = "KSPEED_MAX_FETCH_RATE", value_name = "RATE")]
    max_fetch_rate: String,
    /// Requests to the origin at once [default: 256].
    #[arg(long, env = "KSPEED_MAX_REQUESTS", value_name = "N")]
    max_requests: usize,
    /// Never hand files to the kernel to read by itself.
    #[arg(long, env = "KSPEED_NO_PASSTHROUGH", num_args = 0..=1, default_missing_value = "true")]
    no_passthrough: bool,
    /// Prometheus metrics at this address.
    #[arg(long, env = "KSPEED_METRICS", value_name = "ADDR")]
    metrics: String,
    /// Log level or filter: error, warn, info, debug, trace [default: info].
    #[arg(long, env = "KSPEED_LOG", value_name = "LEVEL")]
    log: String,
    /// Other users may use the mount.
    #[arg(long, env = "KSPEED_ALLOW_OTHER", num_args = 0..=1, default_missing_value = "true")]
    allow_other: bool,
    /// Owner of files [default: who mounts].
    #[arg(long, env = "KSPEED_UID", value_name = "N")]
    uid: u32,
    /// Group of files [default: that of who mounts].
    #[arg(long, env = "KSPEED_GID", value_name = "N")]
    gid: u32,
    /// Mode of files, octal [default: 644].
    #[arg(long, env = "KSPEED_FILE_MODE", value_name = "M")]
    file_mode: String,
    /// Mode of directories, octal [default: 755].
    #[arg(long, env = "KSPEED_DIR_MODE", value_name = "M")]
    dir_mode: String,
}

/// A configuration file: options for all, and `[[mount]]` sections.
#[derive(Debug, Default, Deserialize)]
pub struct RawFile {
    /// Options for the process and all its mounts.
    #[serde(default)]
    pub defaults: RawMount,
    /// The mounts.
    #[serde(default)]
    pub mount: Vec<RawMount>,
}

impl RawFile {
    /// Reads a TOML file.
    ///
    /// # Errors
    /// It can't be read, or has a key that is unknown.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let err = |detail: String| ConfigError::File { path: path.to_path_buf(), detail };
        let text = std::fs::read_to_string(path).map_err(|e| err(e.to_string()))?;
        toml::from_str(&text).map_err(|e| err(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_two_mounts_and_defaults() {
        let text = r#"
            [defaults]
            cache-dir = ["/nvme"]
            metadata-ttl = "1h"
            [[mount]]
            source = "s3://a"
            mountpoint = "/mnt/a"
            read-only = true
            [[mount]]
            source = "s3://b"
            mountpoint = "/mnt/b"
            metadata-ttl = "1s"
        "#;
        let f: RawFile = toml::from_str(text).expect("toml");
        let b = f.mount[1].clone().or(&f.defaults);
        assert_eq!(b.metadata_ttl.as_deref(), Some("1s"));
        assert_eq!(f.mount[0].clone().or(&f.defaults).metadata_ttl.as_deref(), Some("1h"));
        assert!(toml::from_str::<RawFile>("[defaults]\nno-such-key = 1").is_err());
    }
}

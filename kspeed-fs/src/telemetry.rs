//! What the daemon says of itself: one table of metrics, from which the
//! Prometheus text is made and against which a test holds the docs; and the
//! status as JSON.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use kspeed_cache::{DiskStatus, StatsSnapshot};
use serde::{Deserialize, Serialize};

use crate::config::MountConfig;
use crate::dataset::{DatasetStatus, Datasets};
use crate::fs::FileSystem;
use crate::fuse::KernelSupport;
use crate::mount::Process;
use crate::namespace::Namespace;
use crate::writeback::Pending;

/// A process's state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProcessStatus {
    /// Version of the program.
    pub version: String,
    /// Process id.
    pub pid: u32,
    /// Control socket.
    pub control: PathBuf,
    /// Resident memory, in bytes.
    pub resident_bytes: u64,
    /// Its limit, in bytes.
    pub memory_limit_bytes: u64,
    /// RAM tier, in bytes.
    pub ram_used_bytes: u64,
    /// Buffers of fetches, in bytes.
    pub buffers_used_bytes: u64,
    /// Blocks being fetched.
    pub fetches_in_flight: u64,
    /// Counters of the cache.
    pub cache: StatsSnapshot,
    /// Cache directories.
    pub disks: Vec<DiskStatus>,
    /// Mounts.
    pub mounts: Vec<MountStatus>,
    /// What does not work as it should, and why.
    pub degraded: Vec<String>,
}

/// A mount's state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MountStatus {
    /// Source.
    pub source: String,
    /// Where.
    pub mountpoint: PathBuf,
    /// Dataset mount.
    pub read_only: bool,
    /// Names come from a snapshot index of so many keys.
    pub snapshot_entries: Option<u64>,
    /// Files can be read by passthrough.
    pub passthrough: bool,
    /// FUSE protocol.
    pub fuse_protocol: String,
    /// Inodes in memory.
    pub inodes: u64,
    /// Keys that have no path.
    pub hidden_keys: u64,
    /// Handles open.
    pub open_handles: u64,
    /// Files being written.
    pub staged_files: u64,
    /// Counters.
    pub requests: u64,
    /// Reads that reached the daemon.
    pub reads: u64,
    /// Of these, answered at once.
    pub inline_reads: u64,
    /// Bytes that they got.
    pub read_bytes: u64,
    /// Opens by passthrough.
    pub passthrough_opens: u64,
    /// Other opens.
    pub other_opens: u64,
    /// Bytes pushed into the page cache.
    pub pushed_bytes: u64,
    /// Files pushed.
    pub pushed_files: u64,
    /// Bytes uploaded.
    pub uploaded_bytes: u64,
    /// Objects uploaded.
    pub uploads: u64,
    /// Tries to make the origin as it is wished that failed.
    pub upload_failures: u64,
    /// Files that somebody else had changed in the origin.
    pub conflicts: u64,
    /// What is not in the origin yet.
    pub pending: Pending,
    /// Datasets read in a shuffled order, and what steers for each.
    pub datasets: Vec<DatasetStatus>,
    /// Reads while an order was followed, those of pushed files by progress.
    pub predicted_reads: u64,
    /// Of these, that did not wait for the origin.
    pub predicted_ready: u64,
    /// Files fetched ahead by an order.
    pub predicted_fetches: u64,
    /// Calls that failed.
    pub errors: u64,
}

impl ProcessStatus {
    /// A process's state now.
    #[must_use]
    pub fn of(p: &Process) -> Self {
        let mounts: Vec<_> = p.mounts.lock().iter().map(|m| MountStatus::of(m)).collect();
        let disks = p.cache.disks();
        let cache = p.cache.stats().snapshot();
        let mut degraded = Vec::new();
        for d in disks.iter().filter(|d| d.out_of_service) {
            degraded
                .push(format!("{}: the cache disk fails and is out of service", d.dir.display()));
        }
        for m in &mounts {
            for f in &m.pending.failed {
                degraded.push(format!("{}: not uploaded: {}", f.path, f.reason));
            }
            if !m.read_only && !m.passthrough {
                degraded.push(format!(
                    "{}: no passthrough, files are read through the daemon (kernel 6.9 and root are needed)",
                    m.mountpoint.display()
                ));
            }
        }
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            control: p.config.control_socket(),
            resident_bytes: resident_bytes(),
            memory_limit_bytes: p.config.memory_limit,
            ram_used_bytes: p.cache.ram_used_bytes(),
            buffers_used_bytes: p.cache.buffers_used_bytes(),
            fetches_in_flight: p.cache.fetches_in_flight() as u64,
            cache,
            disks,
            mounts,
            degraded,
        }
    }
}

impl MountStatus {
    /// From a mount's parts.
    #[must_use]
    pub fn collect(config: &MountConfig, fs: &FileSystem, support: &KernelSupport) -> Self {
        let s = fs.stats();
        let n = |c: &std::sync::atomic::AtomicU64| c.load(Ordering::Relaxed);
        let pusher = fs.pipeline.pusher();
        let counts = fs.pipeline.datasets().map(Datasets::counts).unwrap_or_default();
        let (snapshot_entries, hidden_keys) = match fs.namespace() {
            Namespace::Snapshot(s) => (Some(s.index().len()), 0),
            Namespace::Live(l) => (None, l.hidden()),
        };
        Self {
            source: config.source_text.clone(),
            mountpoint: config.mountpoint.clone(),
            read_only: config.read_only,
            snapshot_entries,
            passthrough: support.passthrough,
            fuse_protocol: support.protocol.clone(),
            inodes: fs.namespace().inodes(),
            hidden_keys,
            open_handles: fs.open_handles() as u64,
            staged_files: fs.stages() as u64,
            requests: n(&s.requests),
            reads: n(&s.reads),
            inline_reads: n(&s.inline_reads),
            read_bytes: n(&s.read_bytes),
            passthrough_opens: n(&s.passthrough_opens),
            other_opens: n(&s.other_opens),
            pushed_bytes: pusher.map_or(0, |p| p.pushed_bytes()),
            pushed_files: pusher.map_or(0, |p| p.pushed_files()),
            uploaded_bytes: fs.writeback().map_or(0, |w| n(&w.stats().uploaded_bytes)),
            uploads: fs.writeback().map_or(0, |w| n(&w.stats().uploads)),
            upload_failures: fs.writeback().map_or(0, |w| n(&w.stats().failures)),
            conflicts: fs.writeback().map_or(0, |w| n(&w.stats().conflicts)),
            pending: fs.writeback().map(|w| w.pending()).unwrap_or_default(),
            datasets: fs.pipeline.datasets().map(Datasets::status).unwrap_or_default(),
            predicted_reads: counts.reads,
            predicted_ready: counts.ready,
            predicted_fetches: counts.fetched,
            errors: n(&s.errors),
        }
    }
}

/// Resident memory of this process, in bytes; 0 where /proc is missing.
#[must_use]
pub fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|p| p.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Type {
    Counter,
    Gauge,
}

/// A metric of the process.
type OfProcess = (&'static str, Type, &'static str, fn(&ProcessStatus) -> u64);
/// A metric of a mount.
type OfMount = (&'static str, Type, &'static str, fn(&MountStatus) -> u64);

const PROCESS_METRICS: &[OfProcess] = &[
    ("kspeed_resident_bytes", Type::Gauge, "Resident memory of the daemon", |s| s.resident_bytes),
    ("kspeed_memory_limit_bytes", Type::Gauge, "Its configured limit", |s| s.memory_limit_bytes),
    ("kspeed_ram_tier_bytes", Type::Gauge, "Bytes in the RAM tier", |s| s.ram_used_bytes),
    ("kspeed_buffers_bytes", Type::Gauge, "Bytes in buffers of fetches", |s| s.buffers_used_bytes),
    ("kspeed_fetches_in_flight", Type::Gauge, "Blocks being fetched", |s| s.fetches_in_flight),
    ("kspeed_disk_used_bytes", Type::Gauge, "Bytes in the cache directories", |s| {
        s.disks.iter().map(|d| d.used_bytes).sum()
    }),
    (
        "kspeed_disk_evicted_bytes_total",
        Type::Counter,
        "Bytes evicted from the cache directories",
        |s| s.disks.iter().map(|d| d.evicted_bytes).sum(),
    ),
    ("kspeed_disks_out_of_service", Type::Gauge, "Cache directories out of service", |s| {
        s.disks.iter().filter(|d| d.out_of_service).count() as u64
    }),
    ("kspeed_ram_hits_total", Type::Counter, "Reads answered from the RAM tier", |s| {
        s.cache.ram_hits
    }),
    ("kspeed_disk_hits_total", Type::Counter, "Reads answered from the disk tier", |s| {
        s.cache.disk_hits
    }),
    ("kspeed_misses_total", Type::Counter, "Reads that waited for the origin", |s| s.cache.misses),
    ("kspeed_origin_gets_total", Type::Counter, "GET requests to the origin", |s| {
        s.cache.origin_gets
    }),
    ("kspeed_origin_bytes_total", Type::Counter, "Bytes received from the origin", |s| {
        s.cache.origin_bytes
    }),
    (
        "kspeed_prefetched_bytes_total",
        Type::Counter,
        "Bytes fetched before they were asked for",
        |s| s.cache.prefetched_bytes,
    ),
    ("kspeed_fetch_errors_total", Type::Counter, "Fetches that failed after all retries", |s| {
        s.cache.fetch_errors
    }),
    ("kspeed_bad_blocks_total", Type::Counter, "Cached blocks found bad and fetched again", |s| {
        s.cache.bad_blocks
    }),
    (
        "kspeed_disk_write_errors_total",
        Type::Counter,
        "Blocks that could not be written to a cache disk",
        |s| s.cache.disk_write_errors,
    ),
    ("kspeed_origin_latency_microseconds", Type::Gauge, "Time to first byte, smoothed", |s| {
        s.cache.latency_us
    }),
    ("kspeed_origin_stream_bytes_per_second", Type::Gauge, "Rate of one stream, smoothed", |s| {
        s.cache.stream_bytes_per_s
    }),
];

const MOUNT_METRICS: &[OfMount] = &[
    ("kspeed_mount_requests_total", Type::Counter, "FUSE requests", |m| m.requests),
    ("kspeed_mount_reads_total", Type::Counter, "Reads that reached the daemon", |m| m.reads),
    (
        "kspeed_mount_inline_reads_total",
        Type::Counter,
        "Of these, answered by the session thread",
        |m| m.inline_reads,
    ),
    ("kspeed_mount_read_bytes_total", Type::Counter, "Bytes that they got", |m| m.read_bytes),
    ("kspeed_mount_passthrough_opens_total", Type::Counter, "Files opened by passthrough", |m| {
        m.passthrough_opens
    }),
    ("kspeed_mount_other_opens_total", Type::Counter, "Other opens", |m| m.other_opens),
    ("kspeed_mount_pushed_bytes_total", Type::Counter, "Bytes pushed into the page cache", |m| {
        m.pushed_bytes
    }),
    ("kspeed_mount_pushed_files_total", Type::Counter, "Files pushed into the page cache", |m| {
        m.pushed_files
    }),
    ("kspeed_mount_uploaded_bytes_total", Type::Counter, "Bytes uploaded", |m| m.uploaded_bytes),
    ("kspeed_mount_uploads_total", Type::Counter, "Objects uploaded", |m| m.uploads),
    (
        "kspeed_mount_upload_failures_total",
        Type::Counter,
        "Tries to upload, copy or delete that failed; they are tried again",
        |m| m.upload_failures,
    ),
    (
        "kspeed_mount_conflicts_total",
        Type::Counter,
        "Files that somebody else had changed in the origin",
        |m| m.conflicts,
    ),
    (
        "kspeed_mount_pending_changes",
        Type::Gauge,
        "Files and directories that the origin does not have as they were written",
        |m| m.pending.changes,
    ),
    ("kspeed_mount_pending_bytes", Type::Gauge, "Bytes in stage files", |m| m.pending.staged_bytes),
    ("kspeed_mount_pending_seconds", Type::Gauge, "How long the oldest of them has waited", |m| {
        m.pending.oldest_s as u64
    }),
    (
        "kspeed_mount_predicted_reads_total",
        Type::Counter,
        "Reads while an order was followed",
        |m| m.predicted_reads,
    ),
    (
        "kspeed_mount_predicted_ready_total",
        Type::Counter,
        "Of these, that did not wait for the origin",
        |m| m.predicted_ready,
    ),
    (
        "kspeed_mount_predicted_fetches_total",
        Type::Counter,
        "Files fetched ahead by an order",
        |m| m.predicted_fetches,
    ),
    ("kspeed_mount_errors_total", Type::Counter, "Calls that failed with an I/O error", |m| {
        m.errors
    }),
    ("kspeed_mount_inodes", Type::Gauge, "Inodes in memory", |m| m.inodes),
    ("kspeed_mount_hidden_keys", Type::Gauge, "Keys seen that have no path", |m| m.hidden_keys),
    ("kspeed_mount_open_handles", Type::Gauge, "Handles open", |m| m.open_handles),
    ("kspeed_mount_staged_files", Type::Gauge, "Files being written", |m| m.staged_files),
];

fn head(out: &mut String, name: &str, t: Type, help: &str) {
    let t = if t == Type::Counter { "counter" } else { "gauge" };
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {t}");
}

/// The status in Prometheus's text format (version 0.0.4).
#[must_use]
pub fn prometheus(s: &ProcessStatus) -> String {
    let mut out = String::new();
    for (name, t, help, value) in PROCESS_METRICS {
        head(&mut out, name, *t, help);
        let _ = writeln!(out, "{name} {}", value(s));
    }
    for (name, t, help, value) in MOUNT_METRICS {
        head(&mut out, name, *t, help);
        for m in &s.mounts {
            let label = m.mountpoint.to_string_lossy().replace('\\', "\\\\").replace('"', "\\\"");
            let _ = writeln!(
                out,
                "{name}{{mountpoint=\"{}\"}} {}",
                label.replace('\n', "\\n"),
                value(m)
            );
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table and docs/operations.md have the same metrics.
    #[test]
    fn every_metric_is_documented_and_every_documented_one_exists() {
        let docs = include_str!("../../docs/operations.md");
        let table: Vec<&str> =
            PROCESS_METRICS.iter().map(|m| m.0).chain(MOUNT_METRICS.iter().map(|m| m.0)).collect();
        for name in &table {
            assert!(docs.contains(&format!("`{name}`")), "{name} is not in docs/operations.md");
        }
        for word in docs.split('`').filter(|w| w.starts_with("kspeed_")) {
            assert!(table.contains(&word), "{word} is documented but does not exist");
        }
    }
}

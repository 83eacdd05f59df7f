//! Counters of the cache, and what it learns of the origin's speed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident),+ $(,)?) => {
        /// Counters since the start.
        #[derive(Default, Debug)]
        pub struct CacheStats {
            $(pub(crate) $name: AtomicU64,)+
            latency_us: AtomicU64,
            stream_bytes_per_s: AtomicU64,
        }

        /// The counters at one moment.
        #[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub struct StatsSnapshot {
            $($(#[doc = $doc])+ pub $name: u64,)+
            /// Time to first byte of a fetch, smoothed, in microseconds.
            pub latency_us: u64,
            /// Rate of one stream after its first byte, smoothed, in bytes per second.
            pub stream_bytes_per_s: u64,
        }

        impl CacheStats {
            /// The counters now.
            #[must_use]
            pub fn snapshot(&self) -> StatsSnapshot {
                StatsSnapshot {
                    $($name: self.$name.load(Ordering::Relaxed),)+
                    latency_us: self.latency_us.load(Ordering::Relaxed),
                    stream_bytes_per_s: self.stream_bytes_per_s.load(Ordering::Relaxed),
                }
            }
        }
    };
}

counters! {
    /// Reads answered from the RAM tier.
    ram_hits,
    /// Reads answered from the disk tier.
    disk_hits,
    /// Reads that had to wait for the origin.
    misses,
    /// GET requests to the origin.
    origin_gets,
    /// Bytes received from the origin.
    origin_bytes,
    /// Of these, bytes fetched before they were asked for.
    prefetched_bytes,
    /// Fetches that failed after all retries.
    fetch_errors,
    /// Cached blocks found bad and fetched again.
    bad_blocks,
    /// Blocks that could not be written to a cache disk.
    disk_write_errors,
}

impl CacheStats {
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    /// Learns from a fetch: its time to first byte, then `bytes` in `rest`.
    pub(crate) fn learn(&self, first: Duration, bytes: u64, rest: Duration) {
        smooth(&self.latency_us, first.as_micros() as u64);
        let us = rest.as_micros() as u64;
        // A small object comes whole with its first byte: it tells no rate.
        if bytes >= 1 << 20 && us > 0 {
            smooth(
                &self.stream_bytes_per_s,
                (u128::from(bytes) * 1_000_000 / u128::from(us)) as u64,
            );
        }
    }
}

/// Exponential moving average with weight 1/8, as TCP's smoothed RTT (RFC 6298).
fn smooth(at: &AtomicU64, sample: u64) {
    let old = at.load(Ordering::Relaxed);
    let new = if old == 0 { sample.max(1) } else { old - old / 8 + sample / 8 };
    at.store(new, Ordering::Relaxed);
}

//! Readahead of a mount: streams in files, and runs of files in directories.

use std::collections::HashMap;

use crate::event::{Action, Conditions, Event, FileId};
use crate::predictor::{Mode, Streams, Window};

/// First window of a stream in a file, in bytes: two fetch extents' worth would
/// waste the store's bandwidth on readers that stop early.
const MIN_WINDOW_BYTES: u64 = 8 << 20;
/// The least that a lasting stream may grow to, whatever was measured: sixteen
/// connections at an extent of 8 MiB each.
const BASE_WINDOW_BYTES: u64 = 128 << 20;
/// The most, whatever was measured.
const MAX_WINDOW_BYTES: u64 = 256 << 20;
/// The kernel's own readahead reorders requests within about two of its
/// largest.
const SLACK_BYTES: u64 = 8 << 20;
/// Streams that a store serves side by side: what one stream's rate is
/// multiplied with to estimate the whole.
const PARALLEL_STREAMS: u64 = 16;
/// A run of files is fetched so many bytes ahead at the most.
const FILES_WINDOW_BYTES: u64 = 64 << 20;
/// And so many files: each is a request in flight or just done.
const MAX_WINDOW_FILES: u64 = 512;
const MIN_WINDOW_FILES: u64 = 16;
/// Readers of one directory spread over so many files: workers that take turns.
const SLACK_FILES: u64 = 64;
/// Files whose streams are remembered; beyond, the least recently read goes.
const MAX_LINES: usize = 4096;

#[derive(Default)]
struct Line {
    streams: Streams,
    used: u64,
}

/// The state machine. `apply` is its only way in.
#[derive(Default)]
pub struct Readahead {
    files: HashMap<FileId, Line>,
    directories: HashMap<FileId, Line>,
    clock: u64,
}

impl Readahead {
    /// Knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Lines remembered: files and directories.
    #[must_use]
    pub fn lines(&self) -> usize {
        self.files.len() + self.directories.len()
    }

    /// Judges one event.
    pub fn apply(&mut self, event: Event, now: Conditions) -> Option<Action> {
        self.clock += 1;
        let mode = if now.pressed { Mode::Shrink } else { Mode::Grow };
        match event {
            Event::Read { file, size, offset, len } => {
                let window = Window {
                    min: MIN_WINDOW_BYTES,
                    max: window_bytes(now),
                    slack: SLACK_BYTES,
                    from_first: true,
                };
                let line = line(&mut self.files, file, self.clock);
                let end = offset.saturating_add(len).min(size);
                if offset >= end {
                    return None;
                }
                let (start, end) = line.streams.access(offset, end, size, window, mode)?;
                Some(Action::Fetch { file, start, end })
            }
            Event::Entered { directory, index, count, mean_bytes } => {
                let max = (FILES_WINDOW_BYTES / mean_bytes.max(1))
                    .clamp(MIN_WINDOW_FILES, MAX_WINDOW_FILES);
                let window =
                    Window { min: MIN_WINDOW_FILES, max, slack: SLACK_FILES, from_first: false };
                let line = line(&mut self.directories, directory, self.clock);
                let (start, end) = line.streams.access(index, index + 1, count, window, mode)?;
                // Half-way, so that the next step is asked for in time.
                Some(Action::FetchFiles {
                    directory,
                    start,
                    end,
                    beacon: start + (end - start) / 2,
                })
            }
            Event::Forgotten { file } => {
                self.files.remove(&file);
                self.directories.remove(&file);
                None
            }
        }
    }
}

fn line(lines: &mut HashMap<FileId, Line>, id: FileId, clock: u64) -> &mut Line {
    if lines.len() >= MAX_LINES
        && !lines.contains_key(&id)
        && let Some(oldest) = lines.iter().min_by_key(|(_, l)| l.used).map(|(k, _)| *k)
    {
        lines.remove(&oldest);
    }
    let line = lines.entry(id).or_default();
    line.used = clock;
    line
}

/// Latency × bandwidth of the whole store, with a margin of two, between the
/// base and the most.
fn window_bytes(now: Conditions) -> u64 {
    let store = now.stream_bytes_per_s.saturating_mul(PARALLEL_STREAMS);
    let product = u128::from(store) * u128::from(now.latency_us) / 1_000_000;
    u64::try_from(product * 2).unwrap_or(u64::MAX).clamp(BASE_WINDOW_BYTES, MAX_WINDOW_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALM: Conditions = Conditions {
        latency_us: 20_000,
        stream_bytes_per_s: 100_000_000,
        cache_bytes: u64::MAX,
        pressed: false,
    };
    const GIB: u64 = 1 << 30;

    #[test]
    fn a_sequential_reader_is_kept_a_window_ahead() {
        let mut r = Readahead::new();
        let mut fetched = 0;
        for i in 0..256u64 {
            let read = Event::Read { file: 1, size: GIB, offset: i << 22, len: 4 << 20 };
            if let Some(Action::Fetch { start, end, .. }) = r.apply(read, CALM) {
                assert!(start >= fetched);
                fetched = end;
            }
            if i > 10 {
                let ahead = fetched.min(GIB) - ((i + 1) << 22);
                assert!(ahead >= BASE_WINDOW_BYTES / 2 || fetched == GIB, "{ahead} at {i}");
            }
        }
        assert_eq!(fetched, GIB);
    }

    #[test]
    fn the_window_follows_latency_times_bandwidth() {
        let far = Conditions { latency_us: 80_000, ..CALM };
        assert_eq!(window_bytes(CALM), BASE_WINDOW_BYTES);
        assert_eq!(window_bytes(far), 2 * 16 * 100_000_000 * 80 / 1000);
        assert_eq!(window_bytes(Conditions { latency_us: 10_000_000, ..CALM }), MAX_WINDOW_BYTES);
    }

    #[test]
    fn a_run_of_files_is_fetched_ahead_with_a_beacon_inside() {
        let mut r = Readahead::new();
        let mut front = 0;
        for index in 0..1000 {
            let e = Event::Entered { directory: 7, index, count: 1000, mean_bytes: 110_000 };
            if let Some(Action::FetchFiles { start, end, beacon, .. }) = r.apply(e, CALM) {
                assert!((start..end).contains(&beacon));
                assert!(start >= front && end - start <= MAX_WINDOW_FILES);
                front = end;
            }
        }
        assert_eq!(front, 1000);
    }

    #[test]
    fn files_in_random_order_are_not_run_after() {
        for count in [60, 120, 1000, 10_000, 1_000_000] {
            let mut r = Readahead::new();
            let mut x = 1u64;
            let mut asked = 0;
            for _ in 0..10_000 {
                x = x
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let index = (x >> 33) % count;
                let e = Event::Entered { directory: 7, index, count, mean_bytes: 110_000 };
                if let Some(Action::FetchFiles { start, end, .. }) = r.apply(e, CALM) {
                    asked += end - start;
                }
            }
            assert!(asked < 500, "{asked} files asked for by 10,000 random opens of {count}");
        }
    }

    #[test]
    fn memory_is_bounded_however_many_files_are_read() {
        let mut r = Readahead::new();
        for file in 0..20_000 {
            r.apply(Event::Read { file, size: 100, offset: 0, len: 10 }, CALM);
        }
        assert!(r.lines() <= MAX_LINES);
        r.apply(Event::Forgotten { file: 19_999 }, CALM);
        assert!(r.lines() < MAX_LINES);
    }
}

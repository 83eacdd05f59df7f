//! Sequential streams on a line of positions: bytes of a file, or files of a
//! directory.
//!
//! Not one stream a file and not one a descriptor: forked workers share a
//! descriptor, and several ranks read several parts of one file. An access
//! continues the stream whose next position it is nearest to, with slack for
//! requests that overtake each other; other accesses start a stream of their
//! own, which asks for nothing until it has been continued. After Linux's
//! on-demand readahead (Wu et al., "On the design of a new Linux readahead
//! framework", 2008): the window doubles while a stream lasts.

/// Streams followed at once on one line; the least recently used is replaced.
const MAX_STREAMS: usize = 32;
/// Log-likelihood, in nats, of a stream against random accesses, from which it
/// is believed: so much, or that part of the logarithm of the line's length. A
/// file read from its first byte is believed at once.
const BELIEVED_NATS: f64 = 7.0;
const BELIEVED_PART: f64 = 0.8;
/// It is not believed for longer than this much evidence lasts, nor doubted.
const MOST_NATS: f64 = 12.0;
const LEAST_NATS: f64 = -2.0;

/// How far a window may reach, in positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First window of a stream.
    pub min: u64,
    /// Largest window.
    pub max: u64,
    /// An access that far from the expected position still continues.
    pub slack: u64,
    /// A first access at position 0 is believed at once: so files are read whole.
    /// The first file of a directory is one of many for a random reader too.
    pub from_first: bool,
}

/// Whether the window may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Doubles at each continuation.
    Grow,
    /// Halves.
    Shrink,
}

#[derive(Clone, Debug)]
struct Stream {
    next: u64,
    /// Up to where was asked for already.
    asked: u64,
    window: u64,
    /// How much better a stream explains its accesses than chance, in nats.
    evidence: f64,
    used: u64,
}

impl Stream {
    /// A sequential probability ratio test (Wald, 1945): of `streams` that take
    /// turns, this one's next access is `away` units from where it is expected
    /// with a probability that falls as the square of that, while a random one is
    /// anywhere on the line; and it comes after about as many others as there are
    /// streams. Within the `ahead` units that were asked for (and are pushed, so
    /// that only some of their reads are seen) it may be anywhere: that explains
    /// little where it is most of the line.
    fn weigh(&mut self, away: f64, ahead: Option<f64>, others: f64, length: f64, streams: f64) {
        let near = 0.5 / ((away + 1.0) * (away + 1.0));
        let near = ahead.map_or(near, |a| near.max(0.25 / (a + 1.0)));
        let gain = (near * length / streams).ln().max(-1.0);
        let cost = others / (2.0 * streams);
        self.evidence = (self.evidence + gain - cost).clamp(LEAST_NATS, MOST_NATS);
    }
}

/// The evidence from which a stream is believed.
fn believed(length: f64) -> f64 {
    BELIEVED_NATS.min(length.ln() * BELIEVED_PART)
}

/// The streams on one line.
#[derive(Clone, Debug, Default)]
pub struct Streams {
    streams: Vec<Stream>,
    clock: u64,
}

impl Streams {
    /// No streams.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Streams followed now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.streams.len()
    }

    /// Whether none is followed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    /// An access to `start..end` on a line of `size` positions: what to ask for
    /// next, if anything. The answer starts where the stream's last one ended,
    /// so nothing is asked for twice by one stream.
    pub fn access(
        &mut self,
        start: u64,
        end: u64,
        size: u64,
        w: Window,
        mode: Mode,
    ) -> Option<(u64, u64)> {
        self.clock += 1;
        let count = self.streams.len();
        let near = self
            .streams
            .iter_mut()
            .filter(|s| {
                // Within what was asked for: the read of a beacon.
                let reach = s.next.saturating_add(w.slack).max(s.asked);
                start <= reach && end.saturating_add(w.slack) >= s.next
            })
            .min_by_key(|s| s.next.abs_diff(start));
        let Some(s) = near else {
            self.begin(start, end, w);
            return if start == 0 && w.from_first { self.extend_last(size, w) } else { None };
        };
        let unit = (end - start).max(1);
        let length = (size / unit).max(1) as f64;
        let away = (s.next.abs_diff(start) / unit) as f64;
        let ahead = (s.next..=s.asked).contains(&start).then(|| ((s.asked - s.next) / unit) as f64);
        s.weigh(away, ahead, (self.clock - s.used - 1) as f64, length, count as f64);
        s.used = self.clock;
        if end <= s.next {
            // Behind the front: a request that was overtaken. No news.
            return None;
        }
        s.next = end;
        match mode {
            Mode::Grow => s.window = (s.window * 2).min(w.max),
            Mode::Shrink => s.window = (s.window / 2).max(w.min),
        }
        if s.evidence < believed(length) {
            return None;
        }
        Self::extend(s, size)
    }

    fn begin(&mut self, start: u64, end: u64, w: Window) {
        if self.streams.len() == MAX_STREAMS
            && let Some(oldest) = (0..self.streams.len()).min_by_key(|i| self.streams[*i].used)
        {
            self.streams.swap_remove(oldest);
        }
        let window = w.min.max((end - start).saturating_mul(2)).min(w.max);
        self.streams.push(Stream {
            next: end,
            asked: end,
            window,
            evidence: 0.0,
            used: self.clock,
        });
    }

    fn extend_last(&mut self, size: u64, w: Window) -> Option<(u64, u64)> {
        let s = self.streams.last_mut()?;
        s.window = s.window.min(w.max);
        s.evidence = BELIEVED_NATS;
        Self::extend(s, size)
    }

    fn extend(s: &mut Stream, size: u64) -> Option<(u64, u64)> {
        let from = s.asked.max(s.next);
        let to = s.next.saturating_add(s.window).min(size);
        // In steps of half a window, so that requests stay large.
        let due = to > from && (to - from >= s.window / 2 || to == size);
        due.then(|| {
            s.asked = to;
            (from, to)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const W: Window = Window { min: 8, max: 64, slack: 4, from_first: true };

    fn run(
        s: &mut Streams,
        accesses: impl Iterator<Item = (u64, u64)>,
        size: u64,
    ) -> Vec<(u64, u64)> {
        accesses.filter_map(|(a, b)| s.access(a, b, size, W, Mode::Grow)).collect()
    }

    #[test]
    fn a_stream_is_fetched_once_without_gaps_ahead_of_the_reader() {
        let mut s = Streams::new();
        let got = run(&mut s, (0..250).map(|i| (i * 4, i * 4 + 4)), 1000);
        let mut at = 4;
        for (a, b) in &got {
            assert_eq!(*a, at);
            at = *b;
        }
        assert_eq!(at, 1000);
        assert!(got.iter().skip(6).all(|(a, b)| b - a >= 32 || *b == 1000), "large steps: {got:?}");
    }

    #[test]
    fn interleaved_streams_are_told_apart() {
        let mut s = Streams::new();
        let mut front = [0u64; 4];
        let mut asked: Vec<Vec<(u64, u64)>> = vec![Vec::new(); 4];
        for i in 0..400u64 {
            let k = (i * 7 % 4) as usize;
            let base = k as u64 * 10_000;
            let at = base + front[k];
            front[k] += 4;
            if let Some(r) = s.access(at, at + 4, 100_000, W, Mode::Grow) {
                asked[k].push(r);
            }
        }
        assert_eq!(s.len(), 4);
        for (k, ranges) in asked.iter().enumerate() {
            let base = k as u64 * 10_000;
            assert!(!ranges.is_empty());
            assert!(ranges.iter().all(|(a, b)| *a >= base && *b <= base + front[k] + W.max));
        }
    }

    #[test]
    fn requests_that_overtake_each_other_stay_one_stream() {
        let mut s = Streams::new();
        let order = [0u64, 2, 1, 3, 5, 4, 6, 8, 7, 9];
        run(&mut s, order.iter().map(|i| (i * 4, i * 4 + 4)), 1000);
        assert_eq!(s.len(), 1);
    }

    #[test]
    fn random_reads_ask_for_nothing() {
        let mut s = Streams::new();
        let mut x = 12345u64;
        let mut asked = 0;
        for _ in 0..1000 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = 1 + (x >> 20) % 1_000_000;
            asked += s.access(at, at + 1, 2_000_000, W, Mode::Grow).map_or(0, |(a, b)| b - a);
        }
        assert!(asked < 200, "{asked} positions asked for by 1000 random reads");
        assert_eq!(s.len(), MAX_STREAMS);
    }

    #[test]
    fn pressure_halves_the_window() {
        let mut s = Streams::new();
        run(&mut s, (0..20).map(|i| (i * 4, i * 4 + 4)), 10_000);
        let before = s.streams[0].window;
        s.access(80, 84, 10_000, W, Mode::Shrink);
        assert_eq!(s.streams[0].window, before / 2);
    }

    proptest! {
        #[test]
        fn answers_stay_within_the_line_and_ahead(
            accesses in proptest::collection::vec((0u64..500, 1u64..40), 1..200),
            size in 1u64..600,
        ) {
            let mut s = Streams::new();
            for (a, n) in accesses {
                if a >= size { continue; }
                let b = (a + n).min(size);
                if let Some((from, to)) = s.access(a, b, size, W, Mode::Grow) {
                    prop_assert!(from < to && to <= size && from >= b && to <= b + W.max);
                }
                prop_assert!(s.len() <= MAX_STREAMS);
            }
        }
    }
}

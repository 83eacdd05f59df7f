//! The shuffled epoch: follows readers through an order that is known.
//!
//! Loader workers and ranks read ahead of and behind each other, so progress is
//! the median of the last places read, and their spread is how far around it
//! reads are expected. What lies ahead is fetched as far as the readers come in
//! the time that a fetch takes, with a margin.

use std::collections::VecDeque;

use super::ranks::Ranks;
use crate::event::Conditions;
use crate::order::Recipe;
use crate::seed::{Found, divergence};

/// No place in this order.
const NONE: u32 = u32::MAX;
/// Places whose median is the progress.
const RECENT: usize = 64;
/// Reads are expected this far around the progress, whatever the spread: so many
/// places, or that part of the dataset (a divisor).
const MIN_REACH: u32 = 512;
const REACH_DIVISOR: u32 = 40;
/// Reads at places of ranks that are elsewhere, before it is believed that they
/// are here, among so many of ours.
const FOREIGN: u32 = 8;
const FOREIGN_AMONG: u32 = 256;
/// Outcomes by which an order is judged. A lost order asks for nothing meanwhile.
const JUDGED: usize = 256;
/// Reads by others after which an order's job has ended.
const IDLE: u32 = 16_384;
/// Of the last reads that did not fit, so many must be at the beginning of
/// another order before it is believed to have begun…
const BEGUN: usize = 6;
const STRAYS: usize = 32;
/// …and that much better than chance, in nats.
const BEGUN_NATS: f64 = 16.0;
/// The margin: so many latencies of the store, and so many microseconds.
const MARGIN_LATENCIES: u64 = 8;
const MARGIN_US: u64 = 500_000;
/// Fetched ahead at least, and at most, in bytes.
const MIN_AHEAD_BYTES: u64 = 32 << 20;
const MAX_AHEAD_BYTES: u64 = 256 << 20;
/// Of the cache, at most this part (a divisor) is filled ahead.
const CACHE_DIVISOR: u64 = 4;
/// The rate of progress is taken over at least this long, in microseconds.
const RATE_US: u64 = 500_000;
/// One file of so many is not pushed, so that its read is seen.
const BEACON_EVERY: u32 = 16;

/// One epoch's order and what was done of it.
struct Order {
    samples: Vec<u32>,
    places: Vec<u32>,
    read: Vec<bool>,
    asked: Vec<bool>,
    /// All before, as far as behind the reach, was asked for or skipped.
    cursor: u32,
    /// All before was told as passed.
    passed: u32,
    reads: u32,
    epoch: u64,
    recipe: Option<Recipe>,
}

impl Order {
    fn new(n: u32, samples: Vec<u32>, recipe: Option<Recipe>, epoch: u64) -> Self {
        let mut places = vec![NONE; n as usize];
        for (p, s) in samples.iter().enumerate().rev() {
            if let Some(slot) = places.get_mut(*s as usize) {
                *slot = p as u32;
            }
        }
        let len = samples.len();
        Self {
            samples,
            places,
            read: vec![false; len],
            asked: vec![false; len],
            cursor: 0,
            passed: 0,
            reads: 0,
            epoch,
            recipe,
        }
    }

    fn place(&self, sample: u32) -> Option<u32> {
        self.places.get(sample as usize).copied().filter(|p| *p != NONE)
    }

    fn len(&self) -> u32 {
        self.samples.len() as u32
    }

    /// Whether these reads are the beginning of this order, and up to what place.
    fn beginning(&self, reads: impl ExactSizeIterator<Item = u32>) -> Option<u32> {
        let (n, k) = (f64::from(self.len().max(1)), reads.len() as f64);
        let mut places: Vec<u32> = reads.filter_map(|s| self.place(s)).collect();
        places.sort_unstable();
        let nats = |h: usize, p: u32| k * divergence(h as f64 / k, f64::from(p + 1) / n);
        let (nats, end) = places
            .iter()
            .enumerate()
            .skip(BEGUN - 1)
            .map(|(i, p)| (nats(i + 1, *p), p + 1))
            .max_by(|a, b| a.0.total_cmp(&b.0))?;
        (nats >= BEGUN_NATS).then_some(end)
    }
}

/// What to bring, and whether to push it into the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// The sample.
    pub sample: u32,
    /// False for beacons: their read is to reach us.
    pub push: bool,
    /// When it will be read, on the order's clock, which counts places.
    pub at: u64,
}

/// When a sample that was passed will be read next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passed {
    /// The sample.
    pub sample: u32,
    /// On the order's clock; none: not in this epoch, and the next one's order is
    /// not known.
    pub next: Option<u64>,
}

/// How a sample met an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Met {
    /// About where it was expected.
    Fits,
    /// Read before in this epoch.
    Repeat,
    /// Elsewhere, or not in the order.
    Strays,
}

/// Follows one job through its epochs.
pub struct Follower {
    n: u32,
    /// Dataset numbers of the order's samples, where they differ.
    view: Option<std::sync::Arc<[u32]>>,
    current: Order,
    next: Vec<Order>,
    /// Orders that may follow, beside those of the recipe.
    heirs: Vec<(Recipe, u64)>,
    recent: VecDeque<u32>,
    outcomes: VecDeque<bool>,
    strays: VecDeque<u32>,
    ranks: Ranks,
    foreign: u32,
    /// Reads since the last that fitted.
    idle: u32,
    progress: VecDeque<(u64, u64)>,
    /// Samples of an epoch that ended before they were passed.
    left: Vec<u32>,
    /// Places before the current order's, of the epochs that ended.
    base: u64,
    /// The place from which on it is followed.
    from: u64,
    nats: f64,
}

impl Follower {
    /// Follows what was found, in a dataset of `n` samples; `view` gives the
    /// samples that the order numbers, if not all.
    #[must_use]
    pub fn of(n: u32, view: Option<std::sync::Arc<[u32]>>, found: Found) -> Option<Self> {
        let order = ordered(n, view.as_deref(), found.recipe, found.epoch)?;
        Some(Self::new(n, view, order, found.nats))
    }

    /// Follows an order that was told: sample numbers, in the order of reading.
    #[must_use]
    pub fn told(n: u32, samples: Vec<u32>) -> Self {
        Self::new(n, None, Order::new(n, samples, None, 0), f64::INFINITY)
    }

    fn new(n: u32, view: Option<std::sync::Arc<[u32]>>, current: Order, nats: f64) -> Self {
        Self {
            n,
            view,
            current,
            next: Vec::new(),
            heirs: Vec::new(),
            recent: VecDeque::new(),
            outcomes: VecDeque::new(),
            strays: VecDeque::new(),
            ranks: Ranks::default(),
            foreign: 0,
            idle: 0,
            progress: VecDeque::new(),
            left: Vec::new(),
            base: 0,
            from: 0,
            nats,
        }
    }

    /// In words: the order and the epoch.
    #[must_use]
    pub fn describe(&self) -> String {
        match self.current.recipe {
            Some(r) => format!("{}, epoch {}", r.describe(), self.current.epoch),
            None => "an order that was told".into(),
        }
    }

    /// The recipe of the epoch that runs, if it is not a told order.
    #[must_use]
    pub fn recipe(&self) -> Option<(Recipe, u64)> {
        self.current.recipe.map(|r| (r, self.current.epoch))
    }

    /// How much better than chance the order explained the samples when it was
    /// found, in nats; infinite when it was told.
    #[must_use]
    pub fn nats(&self) -> f64 {
        self.nats
    }

    /// Of the last samples, how many were where they were expected, 0 to 1.
    #[must_use]
    pub fn fits(&self) -> f64 {
        let n = self.outcomes.len().max(1);
        self.outcomes.iter().filter(|f| **f).count() as f64 / n as f64
    }

    /// Part of the epoch that is over, 0 to 1.
    #[must_use]
    pub fn done(&self) -> f64 {
        f64::from(self.center()) / f64::from(self.current.len().max(1))
    }

    /// Samples that were passed since it is followed, seen or not.
    #[must_use]
    pub fn passed(&self) -> u64 {
        let places = (self.base + u64::from(self.center())).saturating_sub(self.from);
        places * u64::from(self.ranks.here()) / u64::from(self.ranks.world())
    }

    /// Ranks here, and in all, as far as known.
    #[must_use]
    pub fn ranks(&self) -> (u32, u32) {
        (self.ranks.here(), self.ranks.world())
    }

    /// The reads do not follow the order any more: of the last that no other
    /// order explains, no more were where they were expected than chance has it
    /// and half as much, or none at all for long.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        if self.idle > IDLE.max(self.n / 4) {
            return true;
        }
        let chance = 2.0 * f64::from(self.reach()) / f64::from(self.current.len().max(1));
        self.outcomes.len() == JUDGED && self.fits() < (1.5 * chance).clamp(0.02, 0.4)
    }

    /// An epoch whose order is not known follows: the seeds of the global
    /// generator that may give it.
    pub fn inherits(&mut self, seeds: impl IntoIterator<Item = u32>) {
        self.heirs = seeds.into_iter().map(|seed| (Recipe::TorchGlobal { seed }, 1)).collect();
        self.next.clear();
    }

    /// The median of the last places.
    fn center(&self) -> u32 {
        let mut r: Vec<u32> = self.recent.iter().copied().collect();
        r.sort_unstable();
        r.get(r.len() / 2).copied().unwrap_or(0)
    }

    /// From the median to the front of the readers.
    fn spread(&self) -> u32 {
        let mut r: Vec<u32> = self.recent.iter().copied().collect();
        r.sort_unstable();
        match (r.get(r.len() / 2), r.get(r.len() * 15 / 16)) {
            (Some(m), Some(f)) => f - m,
            _ => 0,
        }
    }

    fn reach(&self) -> u32 {
        let len = self.current.len();
        let least = (MIN_REACH * self.ranks.world()).max(len / REACH_DIVISOR);
        self.spread().saturating_mul(4).max(least).min(len / 8).max(64)
    }

    /// Begins with what was read so far, in which the order was found; returns
    /// what is not of its beginning.
    pub fn begin(&mut self, read: &[u32], now_us: u64) -> Vec<u32> {
        let end = self.current.beginning(read.iter().copied()).unwrap_or(0);
        let mut rest = Vec::new();
        for s in read {
            match self.current.place(*s).filter(|p| *p < end) {
                Some(p) if !self.current.read[p as usize] => {
                    self.take(p);
                    self.outcome(true);
                }
                _ => rest.push(*s),
            }
        }
        self.from = self.center().into();
        self.advance(now_us);
        rest
    }

    /// A sample was read.
    pub fn meet(&mut self, sample: u32, now_us: u64) -> Met {
        let met = self.judge(sample);
        if met == Met::Fits {
            self.outcome(true);
            self.idle = 0;
            self.advance(now_us);
        } else {
            self.idle += 1;
        }
        met
    }

    /// The sample fitted nobody: whether the next epoch has begun with it.
    pub fn turn(&mut self, sample: u32, met: Met, now_us: u64) -> bool {
        let turned = self.turns(sample);
        if turned {
            self.idle = 0;
            self.advance(now_us);
        } else if met == Met::Strays {
            self.outcome(false);
        }
        turned
    }

    /// Whether this is an order that the other follows or will follow next.
    #[must_use]
    pub fn is_known_to(&self, other: &Self) -> bool {
        let head = |o: &Order| o.samples.iter().take(16).copied().collect::<Vec<_>>();
        let ours = head(&self.current);
        std::iter::once(&other.current).chain(&other.next).any(|o| head(o) == ours)
    }

    fn judge(&mut self, sample: u32) -> Met {
        let Some(p) = self.current.place(sample) else { return Met::Strays };
        if self.current.read[p as usize] {
            return Met::Repeat;
        }
        let (center, reach) = (self.center(), self.reach());
        if p > center.saturating_add(reach) || p.saturating_add(reach) < center {
            return Met::Strays;
        }
        if !self.ranks.has(p) {
            self.foreign += 1;
            if self.foreign < FOREIGN {
                return Met::Strays;
            }
            self.ranks.contradicted();
            self.current.cursor = 0;
        }
        self.take(p);
        Met::Fits
    }

    fn take(&mut self, p: u32) {
        self.current.read[p as usize] = true;
        self.current.reads += 1;
        self.recent.push_back(p);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        let reads = self.current.reads;
        if reads.is_multiple_of(FOREIGN_AMONG) {
            self.foreign = 0;
        }
        let read = &self.current.read;
        let mut places = (0..read.len() as u32).filter(|p| read[*p as usize]);
        self.ranks.learn(&mut places, reads);
    }

    fn outcome(&mut self, fits: bool) {
        self.outcomes.push_back(fits);
        if self.outcomes.len() > JUDGED {
            self.outcomes.pop_front();
        }
    }

    fn turns(&mut self, sample: u32) -> bool {
        self.strays.push_back(sample);
        if self.strays.len() > STRAYS {
            self.strays.pop_front();
        }
        if self.strays.len() < BEGUN || self.current.recipe.is_none() {
            return false;
        }
        self.prepare_next();
        let strays = &self.strays;
        let begun = self.next.iter().enumerate().find_map(|(i, o)| {
            let end = o.beginning(strays.iter().copied())?;
            o.place(sample).is_some_and(|p| p < end).then_some((i, end))
        });
        let Some((i, end)) = begun else { return false };
        let next = self.next.swap_remove(i);
        self.base += u64::from(self.current.len());
        // What the epoch left out counts from the new one on.
        let rest = self.current.passed as usize;
        let ranks = &self.ranks;
        let ours = self.current.samples.iter().enumerate().skip(rest);
        self.left.extend(ours.filter(|(p, _)| ranks.has(*p as u32)).map(|(_, s)| *s));
        self.heirs.clear();
        self.next.clear();
        self.recent.clear();
        self.outcomes.clear();
        self.current = next;
        for s in std::mem::take(&mut self.strays) {
            if let Some(p) = self.current.place(s).filter(|p| *p < end) {
                self.take(p);
                self.outcome(true);
            }
        }
        true
    }

    /// The orders that may follow, the likeliest first.
    fn prepare_next(&mut self) {
        if !self.next.is_empty() {
            return;
        }
        let Some((recipe, epoch)) = self.recipe() else { return };
        let mut may = vec![(recipe, epoch + 1)];
        may.extend(self.heirs.iter().copied());
        // Who forgets set_epoch reads the same order again.
        may.push((recipe, epoch));
        let (n, view) = (self.n, self.view.as_deref());
        self.next = may.into_iter().filter_map(|(r, e)| ordered(n, view, r, e)).collect();
    }

    fn advance(&mut self, now_us: u64) {
        let at = self.base + u64::from(self.center());
        self.progress.push_back((now_us, at));
        while self.progress.len() > 2
            && self.progress.get(1).is_some_and(|(t, _)| now_us.saturating_sub(*t) > RATE_US)
        {
            self.progress.pop_front();
        }
    }

    /// Places a second.
    fn rate(&self) -> f64 {
        match (self.progress.front(), self.progress.back()) {
            (Some((t0, p0)), Some((t1, p1))) if t1 > t0 => {
                p1.saturating_sub(*p0) as f64 * 1e6 / (t1 - t0) as f64
            }
            _ => 0.0,
        }
    }

    /// What to bring now, in the order in which it will be read. `mean_bytes`:
    /// of a sample.
    pub fn ahead(&mut self, mean_bytes: u64, now: Conditions) -> Vec<Ahead> {
        let density = f64::from(self.ranks.here()) / f64::from(self.ranks.world());
        let place_bytes = (mean_bytes.max(1) as f64 * density).max(1.0);
        let lead_us = now.latency_us * MARGIN_LATENCIES + MARGIN_US;
        let lead = self.rate() * lead_us as f64 / 1e6;
        let most = MAX_AHEAD_BYTES.min(now.cache_bytes / CACHE_DIVISOR) as f64;
        let most = if now.pressed { most / 4.0 } else { most };
        let bytes = (lead * place_bytes).clamp((MIN_AHEAD_BYTES as f64).min(most), most);
        let (center, spread) = (self.center(), self.spread());
        let horizon = center.saturating_add(spread).saturating_add((bytes / place_bytes) as u32);
        let mut out = Vec::new();
        let from = center.saturating_sub(self.reach());
        bring(&mut self.current, &self.ranks, from..horizon, self.base, &mut out);
        let over = horizon.saturating_sub(self.current.len());
        if over > 0 {
            // Half a window into the next epoch: it may not come.
            self.prepare_next();
            let base = self.base + u64::from(self.current.len());
            if let Some(next) = self.next.first_mut() {
                bring(next, &self.ranks, 0..over.div_ceil(2), base, &mut out);
            }
        }
        out
    }

    /// The samples that were passed since this was asked last.
    pub fn passed_since(&mut self) -> Vec<Passed> {
        let mut out: Vec<Passed> = std::mem::take(&mut self.left)
            .into_iter()
            .map(|sample| Passed { sample, next: self.when(sample) })
            .collect();
        let end = self.center().saturating_sub(self.spread()).min(self.current.len());
        if end <= self.current.passed {
            return out;
        }
        self.prepare_next();
        let start = self.base + u64::from(self.current.len());
        let next = self.next.first();
        for p in self.current.passed..end {
            if self.ranks.has(p) {
                let sample = self.current.samples[p as usize];
                let place = next.and_then(|o| o.place(sample));
                out.push(Passed { sample, next: place.map(|p| start + u64::from(p)) });
            }
        }
        self.current.passed = end;
        out
    }

    /// When a sample will be read next, on the order's clock.
    #[must_use]
    pub fn when(&self, sample: u32) -> Option<u64> {
        self.next_use(sample).map(|d| self.now() + d)
    }

    /// The order's clock.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.base + u64::from(self.center())
    }

    /// How many reads from now a sample is wanted again; none: not known.
    #[must_use]
    pub fn next_use(&self, sample: u32) -> Option<u64> {
        let center = self.center();
        match self.current.place(sample) {
            Some(p) if p >= center || !self.current.read[p as usize] => {
                return Some(u64::from(p.saturating_sub(center)));
            }
            _ => {}
        }
        let left = u64::from(self.current.len() - center.min(self.current.len()));
        let next = self.next.first()?;
        next.place(sample).map(|p| left + u64::from(p))
    }
}

fn ordered(n: u32, view: Option<&[u32]>, recipe: Recipe, epoch: u64) -> Option<Order> {
    let samples = match view {
        None => recipe.order(n, epoch)?,
        Some(v) => {
            recipe.order(v.len() as u32, epoch)?.into_iter().map(|i| v[i as usize]).collect()
        }
    };
    Some(Order::new(n, samples, Some(recipe), epoch))
}

/// Asks for what is neither read nor asked for of these places.
fn bring(
    o: &mut Order,
    ranks: &Ranks,
    places: std::ops::Range<u32>,
    base: u64,
    out: &mut Vec<Ahead>,
) {
    let end = places.end.min(o.len());
    for p in places.start.max(o.cursor)..end {
        let i = p as usize;
        if !o.asked[i] && !o.read[i] && ranks.has(p) {
            o.asked[i] = true;
            let push = !is_beacon(p);
            out.push(Ahead { sample: o.samples[i], push, at: base + u64::from(p) });
        }
    }
    o.cursor = o.cursor.max(end);
}

/// Scattered without a pattern, which would be taken for that of ranks: a place's
/// hash (MurmurHash3's finalizer).
fn is_beacon(place: u32) -> bool {
    let mut h = place;
    h = (h ^ (h >> 16)).wrapping_mul(0x85eb_ca6b);
    h = (h ^ (h >> 13)).wrapping_mul(0xc2b2_ae35);
    (h ^ (h >> 16)).is_multiple_of(BEACON_EVERY)
}

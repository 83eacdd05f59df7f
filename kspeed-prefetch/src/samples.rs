//! The samples of one dataset: watches the reads of its files, has the seed of
//! their order searched for, and follows the orders that were found or told.
//!
//! Several jobs may read one dataset: a read belongs to the first order in which
//! it is about where it was expected; the reads that belong to none are those
//! that the next search explains.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::event::Conditions;
use crate::order::Recipe;
use crate::predictor::{Ahead, Follower, Met, Passed};
use crate::seed::{Found, Observed};

/// The first search, in distinct samples read; the next at twice as many.
const FIRST_SEARCH: usize = 16;
/// No more searches after this many.
const LAST_SEARCH: usize = 16_384;
/// From here on a search goes through all seeds, once for each beginning.
const SCAN_FROM: usize = 512;
/// Datasets smaller than this are not worth an order.
const MIN_SAMPLES: u32 = 64;
/// Reads in which a new epoch of an unknown order shows: most were read before.
const RECENT: usize = 64;
const RECENT_REPEATS: usize = 48;
/// Reads over which the part that no order explains is taken.
const CLAIMED: usize = 128;
/// Below this part in a hundred, what no order explains is noise.
const NOISE_PERCENT: usize = 20;
/// Orders followed at once; told ones take the place of the oldest.
const MAX_FOLLOWERS: usize = 32;
/// Neighbours in the order of names, by which a sequential reader shows.
const NEIGHBOURS: u32 = 16;

/// How a dataset's samples may be numbered: all of them, or, in the numbers of
/// the dataset, those with certain names or in another order.
pub type View = Option<Arc<[u32]>>;

/// A search that is to be done elsewhere: it takes seconds, or minutes.
#[derive(Clone, Debug)]
pub struct Search {
    /// What was observed, for each view.
    pub observed: Vec<Observed>,
}

/// What is to be done.
#[derive(Debug)]
pub enum Want {
    /// Bring a sample in.
    Bring(Ahead),
    /// When a sample will be read next: eviction goes by it.
    Expect(Passed),
    /// The orders that are followed have changed, and with them what
    /// [`Samples::when`] knows of all samples.
    ExpectAll,
    /// Try the likely seeds; answered by [`Samples::found`].
    Search(Search),
    /// Try all seeds; answered by [`Samples::scanned`].
    Scan(Search),
    /// Look for the global generators whose first epoch has this seed; answered
    /// by [`Samples::inherits`].
    Global(u32),
}

struct Followed {
    id: Option<String>,
    follower: Follower,
}

/// See the module.
pub struct Samples {
    n: u32,
    mean_bytes: u64,
    views: Vec<View>,
    followers: Vec<Followed>,
    seen: Vec<u32>,
    is_seen: Vec<bool>,
    recent: VecDeque<(u32, bool)>,
    claimed: VecDeque<bool>,
    next_search: usize,
    searching: bool,
    scanning: bool,
    /// No other scan for what is being watched.
    scanned: bool,
}

/// What a dataset's predictor is doing, for people.
#[derive(Clone, Debug, PartialEq)]
pub struct Outlook {
    /// Predictor or order, in words.
    pub predictor: String,
    /// Confidence when it was found, in nats better than chance; none when it was
    /// told or is still sought.
    pub nats: Option<f64>,
    /// Part of the last reads that were where they were expected, 0 to 1.
    pub fits: f64,
    /// Part of the epoch that is over, 0 to 1.
    pub done: f64,
    /// Samples that were passed since it is followed, seen or not.
    pub passed: u64,
    /// Ranks that read here.
    pub ranks_here: u32,
    /// Ranks in all, as far as known.
    pub world: u32,
}

impl Samples {
    /// For a dataset of `n` samples of so many bytes in the mean.
    #[must_use]
    pub fn new(n: u32, mean_bytes: u64, views: Vec<View>) -> Self {
        Self {
            n,
            mean_bytes,
            views: if views.is_empty() { vec![None] } else { views },
            followers: Vec::new(),
            seen: Vec::new(),
            is_seen: vec![false; n as usize],
            recent: VecDeque::new(),
            claimed: VecDeque::new(),
            next_search: FIRST_SEARCH,
            searching: false,
            scanning: false,
            scanned: false,
        }
    }

    /// Samples in all.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.n
    }

    /// None.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Whether an order is followed.
    #[must_use]
    pub fn is_following(&self) -> bool {
        !self.followers.is_empty()
    }

    /// A view, by its number.
    #[must_use]
    pub fn view(&self, i: usize) -> View {
        self.views.get(i).cloned().flatten()
    }

    /// A sample was read.
    pub fn read(&mut self, sample: u32, now_us: u64, now: Conditions) -> Vec<Want> {
        let mut out = Vec::new();
        if sample >= self.n {
            return out;
        }
        let mut met: Vec<Met> = Vec::with_capacity(self.followers.len());
        for f in &mut self.followers {
            met.push(f.follower.meet(sample, now_us));
            if met.last() == Some(&Met::Fits) {
                break;
            }
        }
        let mut owner = met.iter().position(|m| *m == Met::Fits);
        let repeats = met.contains(&Met::Repeat);
        if owner.is_none() {
            let mut all = self.followers.iter_mut().zip(met);
            owner = all.position(|(f, met)| f.follower.turn(sample, met, now_us));
        }
        self.claimed.push_back(owner.is_some() || repeats);
        if self.claimed.len() > CLAIMED {
            self.claimed.pop_front();
        }
        if let Some(f) = owner.and_then(|i| self.followers.get_mut(i)) {
            out.extend(f.follower.ahead(self.mean_bytes, now).into_iter().map(Want::Bring));
            let passed = f.follower.passed_since();
            // Another job may want it sooner.
            let alone = self.followers.len() == 1;
            out.extend(passed.into_iter().map(|p| {
                Want::Expect(if alone { p } else { Passed { next: self.when(p.sample), ..p } })
            }));
        } else if !repeats {
            self.unclaimed(sample);
        }
        if self.drop_lost() {
            out.push(Want::ExpectAll);
        }
        out.extend(self.search());
        out
    }

    fn drop_lost(&mut self) -> bool {
        let before = self.followers.len();
        self.followers.retain(|f| !f.follower.is_lost());
        if self.followers.len() < before {
            // What was read since it was lost begins something else.
            self.begin(self.recent.iter().map(|(s, _)| *s).collect());
        }
        self.followers.len() < before
    }

    fn begin(&mut self, samples: Vec<u32>) {
        self.recent.clear();
        self.seen.clear();
        self.is_seen.fill(false);
        self.next_search = FIRST_SEARCH;
        self.scanned = false;
        for s in samples {
            self.see(s);
        }
    }

    fn see(&mut self, sample: u32) -> bool {
        let repeat = std::mem::replace(&mut self.is_seen[sample as usize], true);
        if !repeat {
            self.seen.push(sample);
        }
        repeat
    }

    fn unclaimed(&mut self, sample: u32) {
        let repeat = self.see(sample);
        self.recent.push_back((sample, repeat));
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        if self.recent.iter().filter(|(_, r)| *r).count() >= RECENT_REPEATS {
            self.begin(self.recent.iter().map(|(s, _)| *s).collect());
        }
    }

    fn search(&mut self) -> Option<Want> {
        let k = self.seen.len();
        if self.searching || self.n < MIN_SAMPLES || k < self.next_search || k > LAST_SEARCH {
            return None;
        }
        let stray = self.claimed.iter().filter(|c| !**c).count();
        if stray * 100 < self.claimed.len() * NOISE_PERCENT || self.is_sequential() {
            return None;
        }
        while self.next_search <= k {
            self.next_search *= 2;
        }
        self.searching = true;
        Some(Want::Search(self.observation()))
    }

    fn observation(&self) -> Search {
        let observed = self.views.iter().map(|v| observed(self.n, v.as_deref(), &self.seen));
        Search { observed: observed.collect() }
    }

    /// Most reads are near the one before: no shuffle.
    fn is_sequential(&self) -> bool {
        let last = &self.seen[self.seen.len().saturating_sub(SCAN_FROM)..];
        let near = last.windows(2).filter(|w| w[0].abs_diff(w[1]) <= NEIGHBOURS).count();
        near * 2 > last.len() && self.n > NEIGHBOURS * 8
    }

    /// The likely seeds were tried: with an order to follow, or without.
    pub fn found(&mut self, follower: Option<Follower>, now_us: u64, now: Conditions) -> Vec<Want> {
        self.searching = false;
        match follower {
            Some(f) => self.adopt(f, now_us, now),
            None if self.seen.len() >= SCAN_FROM && !self.scanned && !self.scanning => {
                self.scanned = true;
                self.scanning = true;
                vec![Want::Scan(self.observation())]
            }
            None => Vec::new(),
        }
    }

    /// All seeds were tried.
    pub fn scanned(
        &mut self,
        follower: Option<Follower>,
        now_us: u64,
        now: Conditions,
    ) -> Vec<Want> {
        self.scanning = false;
        follower.map_or_else(Vec::new, |f| self.adopt(f, now_us, now))
    }

    fn adopt(&mut self, mut follower: Follower, now_us: u64, now: Conditions) -> Vec<Want> {
        if self.followers.iter().any(|f| follower.is_known_to(&f.follower)) {
            return Vec::new();
        }
        let mut out = Vec::new();
        if let Some((Recipe::Alone { seed }, _)) = follower.recipe() {
            out.push(Want::Global(seed));
        }
        // What the order explains is its own; the rest is somebody else's.
        let seen = std::mem::take(&mut self.seen);
        let rest = follower.begin(&seen, now_us);
        self.begin(rest);
        self.claimed.clear();
        out.extend(follower.ahead(self.mean_bytes, now).into_iter().map(Want::Bring));
        self.follow(None, follower);
        out.push(Want::ExpectAll);
        out
    }

    /// The seeds of global generators that gave the seed of an epoch.
    pub fn inherits(&mut self, seed: u32, globals: &[u32]) {
        for f in &mut self.followers {
            if matches!(f.follower.recipe(), Some((Recipe::Alone { seed: s }, _)) if s == seed) {
                f.follower.inherits(globals.iter().copied());
            }
        }
    }

    /// An order was told, under a name: it replaces the one of that name.
    pub fn told(&mut self, id: &str, follower: Follower, now: Conditions) -> Vec<Want> {
        let mut follower = follower;
        self.followers.retain(|f| f.id.as_deref() != Some(id));
        let ahead = follower.ahead(self.mean_bytes, now).into_iter().map(Want::Bring);
        let out = ahead.chain([Want::ExpectAll]).collect();
        self.follow(Some(id.into()), follower);
        out
    }

    fn follow(&mut self, id: Option<String>, follower: Follower) {
        if self.followers.len() >= MAX_FOLLOWERS {
            self.followers.remove(0);
        }
        self.followers.push(Followed { id, follower });
    }

    /// When a sample will be read next, on a clock that counts reads of the
    /// dataset: that of the oldest order. None: not known.
    #[must_use]
    pub fn when(&self, sample: u32) -> Option<u64> {
        let now = self.followers.first().map(|f| f.follower.now())?;
        let next = self.followers.iter().filter_map(|f| f.follower.next_use(sample)).min()?;
        Some(now + next)
    }

    /// Samples that were passed since orders are followed, seen or not.
    #[must_use]
    pub fn passed(&self) -> u64 {
        self.followers.iter().map(|f| f.follower.passed()).sum()
    }

    /// For people.
    #[must_use]
    pub fn outlook(&self) -> Vec<Outlook> {
        let mut out: Vec<Outlook> = self
            .followers
            .iter()
            .map(|f| {
                let (ranks_here, world) = f.follower.ranks();
                Outlook {
                    predictor: f.follower.describe(),
                    nats: Some(f.follower.nats()).filter(|n| n.is_finite()),
                    fits: f.follower.fits(),
                    done: f.follower.done(),
                    passed: f.follower.passed(),
                    ranks_here,
                    world,
                }
            })
            .collect();
        if out.is_empty() {
            let predictor = match (self.scanning, self.scanned) {
                (true, _) => "none yet: scanning all seeds",
                (false, true) => "none: no seed explains the reads",
                (false, false) => "none yet: watching",
            };
            out.push(Outlook {
                predictor: predictor.into(),
                nats: None,
                fits: 0.0,
                done: 0.0,
                passed: 0,
                ranks_here: 1,
                world: 1,
            });
        }
        out
    }
}

/// The samples seen, in the numbers of a view.
fn observed(n: u32, view: Option<&[u32]>, seen: &[u32]) -> Observed {
    let Some(view) = view else { return Observed::new(n, seen.iter().copied()) };
    let mut number = vec![u32::MAX; n as usize];
    for (i, s) in view.iter().enumerate() {
        if let Some(slot) = number.get_mut(*s as usize) {
            *slot = i as u32;
        }
    }
    let numbers = seen.iter().map(|s| number[*s as usize]).filter(|i| *i != u32::MAX);
    Observed::new(view.len() as u32, numbers)
}

impl Search {
    /// The likely seeds, for each view: the view's number and what was found.
    #[must_use]
    pub fn likely(&self) -> Option<(usize, Found)> {
        let views = self.observed.iter().enumerate();
        views.filter(|(_, o)| !o.is_empty()).find_map(|(i, o)| Some((i, crate::seed::likely(o)?)))
    }
}

//! Seed recovery: which seed made the order that is being read.
//!
//! The first samples of an epoch say little about the order in which they came:
//! loader workers and ranks interleave. They say which samples come *early*. Under
//! the right seed they all have low places in its permutation; under a wrong one
//! their places are as if drawn at random. [`Observed::score`] measures that, and
//! [`likely`] and [`Scan`] look for the seed that explains it.

mod lanes;
mod likely;
mod scan;

pub use likely::{LIKELY_CANDIDATES, likely};
pub use scan::{GlobalScan, SEEDS, Scan};

use crate::order::{Recipe, Shuffle};

/// A chance that none of the candidates tried may have to score as well: one in
/// a million, in nats.
const CHANCE_NATS: f64 = 13.8;
/// The heads of permutations that are compared, each if the one before gave
/// hope.
const HEADS: [u32; 3] = [1024, 8192, 65_536];
/// Hope: more than this, in nats.
const HOPE_NATS: f64 = 5.0;
/// Fewer of the observed samples than this prove nothing.
const MIN_HITS: u32 = 8;

/// A seed that explains what was observed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// How the epochs' orders are made.
    pub recipe: Recipe,
    /// The epoch that is running.
    pub epoch: u64,
    /// How much better than chance it explains the samples, in nats.
    pub nats: f64,
}

/// Distinct samples in the order in which they were read, and of how many.
#[derive(Clone, Debug)]
pub struct Observed {
    n: u32,
    samples: Vec<u32>,
    bits: Vec<u32>,
}

impl Observed {
    /// Samples below `n`; repeated ones count once.
    #[must_use]
    pub fn new(n: u32, samples: impl IntoIterator<Item = u32>) -> Self {
        let mut bits = vec![0u32; (n as usize).div_ceil(32)];
        let mut distinct = Vec::new();
        for s in samples {
            if s < n && (bits[s as usize / 32] >> (s % 32)) & 1 == 0 {
                bits[s as usize / 32] |= 1 << (s % 32);
                distinct.push(s);
            }
        }
        Self { n, samples: distinct, bits }
    }

    /// Distinct samples.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.samples.len() as u32
    }

    /// None yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Samples in all.
    #[must_use]
    pub fn of(&self) -> u32 {
        self.n
    }

    /// The first `k` of them.
    #[must_use]
    pub fn first(&self, k: usize) -> Self {
        Self::new(self.n, self.samples.iter().copied().take(k))
    }

    fn has(&self, sample: u32) -> bool {
        (self.bits[sample as usize / 32] >> (sample % 32)) & 1 == 1
    }

    /// How much better than chance the head of an order explains the samples, in
    /// nats. With k samples observed, of which h are among the first x·n places,
    /// chance has it with probability at most exp(-k·KL(h/k ‖ x)) (Chernoff's
    /// bound of the binomial tail); the best x counts.
    #[must_use]
    pub fn score(&self, head: &[u32]) -> f64 {
        let (n, k) = (f64::from(self.n), f64::from(self.len()));
        let mut hits = 0u32;
        let mut best = 0.0f64;
        for (place, s) in head.iter().enumerate() {
            if self.has(*s) {
                hits += 1;
                if hits >= MIN_HITS {
                    best = best.max(k * divergence(f64::from(hits) / k, (place + 1) as f64 / n));
                }
            }
        }
        best
    }

    /// As [`Self::score`] of a shuffle, looking no further than there is hope.
    fn score_of(&self, shuffle: Shuffle, seed: u64) -> f64 {
        if shuffle != Shuffle::Torch {
            return self.score(&shuffle.permutation(self.n, seed));
        }
        let mut best = 0.0f64;
        for len in HEADS {
            best = best.max(self.score(&shuffle.head(self.n, seed, len.min(self.n / 2))));
            if best < HOPE_NATS || best >= self.needed(SEEDS as f64) || len >= self.n / 2 {
                break;
            }
        }
        best
    }

    /// The score that one of so many candidates needs to be believed.
    fn needed(&self, candidates: f64) -> f64 {
        CHANCE_NATS + candidates.ln() + f64::from(self.len().max(1)).ln()
    }
}

/// KL(a ‖ b) of two coins, in nats; 0 where a is not above b.
pub(crate) fn divergence(a: f64, b: f64) -> f64 {
    if a <= b || b <= 0.0 {
        return 0.0;
    }
    let tail = if a < 1.0 { (1.0 - a) * ((1.0 - a) / (1.0 - b)).ln() } else { 0.0 };
    a * (a / b).ln() + tail
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The samples that `ranks` of `world` read first, by so many loader
    /// workers with batches of so many samples, each worker one file at a time.
    pub(crate) fn interleaved(
        order: &[u32],
        world: u32,
        ranks: u32,
        workers: usize,
        batch: usize,
        count: usize,
    ) -> Vec<u32> {
        let mut lanes: Vec<Vec<u32>> = Vec::new();
        for r in 0..ranks {
            let share = crate::order::rank_share(order, world, r, false);
            for w in 0..workers {
                lanes.push(
                    share.chunks(batch).skip(w).step_by(workers).flatten().copied().collect(),
                );
            }
        }
        let most = lanes.iter().map(Vec::len).max().unwrap_or(0);
        let turns = (0..most).flat_map(|i| lanes.iter().filter_map(move |l| l.get(i).copied()));
        turns.take(count).collect()
    }

    #[test]
    fn the_right_seed_scores_and_wrong_ones_do_not() {
        let n = 20_000;
        let order = Shuffle::Torch.permutation(n, 42);
        let o = Observed::new(n, interleaved(&order, 1, 1, 4, 64, 64));
        let right = o.score_of(Shuffle::Torch, 42);
        let wrong = (1000..3000).map(|s| o.score_of(Shuffle::Torch, s)).fold(0.0, f64::max);
        assert!(right > o.needed(SEEDS as f64), "{right}");
        assert!(wrong < o.needed(2000.0), "{wrong}");
    }

    #[test]
    fn noise_and_skipped_samples_are_borne() {
        let n = 50_000;
        let order = Shuffle::Torch.permutation(n, 7);
        let mut seen = interleaved(&order, 8, 2, 4, 32, 200);
        // A fifth is somebody else's; a tenth of ours is skipped.
        let others = Shuffle::Python.permutation(n, 99);
        for (i, s) in seen.iter_mut().enumerate() {
            if i % 5 == 0 {
                *s = others[i];
            }
        }
        let mut i = 0;
        seen.retain(|_| {
            i += 1;
            i % 10 != 0
        });
        let o = Observed::new(n, seen);
        assert!(o.score_of(Shuffle::Torch, 7) > o.needed(SEEDS as f64));
    }
}

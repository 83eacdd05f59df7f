//! The scan of all 2^32 seeds of `torch.randperm`.
//!
//! The first outputs of a seed give the first samples of its permutation at a
//! fraction of the cost of the whole state (413 of 1,248 words); a seed whose
//! first samples are among the observed is looked at closely.

use std::ops::Range;

use super::lanes::{Divisor, LANES, OUTPUTS, fourth, hits};
use super::{Found, Observed};
use crate::order::{Mt19937, Recipe, Shuffle};

/// Seeds of a generator of PyTorch on the CPU.
pub const SEEDS: u64 = 1 << 32;

/// Observed samples that the first look uses: more would let chance through.
const MOST: usize = 512;
/// And no larger a part of the dataset (a divisor), for the same reason.
const PART: u32 = 16;
/// The part of wrong seeds that the first look may let through.
const LET_THROUGH: f64 = 1e-3;
/// Places of the second look.
const ROUGH: usize = 256;
/// And the score that it asks for: millions get that far.
const ROUGH_NATS: f64 = 10.0;

/// A scan. Pieces may be run in any order and by several threads.
pub struct Scan {
    observed: Observed,
    marks: Observed,
    divisors: [Divisor; OUTPUTS],
    /// Hits that the first look asks for.
    ask: u32,
}

impl Scan {
    /// For what was observed from an epoch's beginning on; none if the dataset
    /// is too small or too little was observed for a scan to tell seeds apart.
    #[must_use]
    pub fn new(observed: Observed) -> Option<Self> {
        let n = observed.of();
        let marks = observed.first(MOST.min((n / PART) as usize));
        if n < 512 || marks.len() < 32 {
            return None;
        }
        let p = f64::from(marks.len()) / f64::from(n);
        let ask = (1..=OUTPUTS as u32).find(|h| at_least(*h, p) <= LET_THROUGH)?;
        let divisors = std::array::from_fn(|i| Divisor::new(n - i as u32));
        Some(Self { observed, marks, divisors, ask })
    }

    /// Looks at the seeds of a range, widened to whole vectors.
    #[must_use]
    pub fn run(&self, seeds: Range<u64>) -> Option<Found> {
        let needed = self.observed.needed(SEEDS as f64);
        for first in (seeds.start..seeds.end.min(SEEDS)).step_by(LANES) {
            let counts = hits(first as u32, &self.divisors, &self.marks.bits);
            if counts.iter().all(|c| *c < self.ask) {
                continue;
            }
            for (l, _) in counts.iter().enumerate().filter(|(_, c)| **c >= self.ask) {
                let seed = (first as u32).wrapping_add(l as u32);
                if self.rough(seed) < ROUGH_NATS {
                    continue;
                }
                let nats = self.observed.score_of(Shuffle::Torch, seed.into());
                if nats >= needed {
                    return Some(Found { recipe: Recipe::Alone { seed }, epoch: 0, nats });
                }
            }
        }
        None
    }

    /// The score of the first places, as if no swap met another.
    fn rough(&self, seed: u32) -> f64 {
        let mut g = Mt19937::new(seed);
        let n = self.observed.of();
        let head: [u32; ROUGH] = std::array::from_fn(|i| {
            let i = i as u32;
            i + g.next_u32() % (n - i)
        });
        self.observed.score(&head)
    }
}

/// The chance of at least `h` hits of [`OUTPUTS`], each with chance `p`.
fn at_least(h: u32, p: f64) -> f64 {
    let n = OUTPUTS as u32;
    let mut term = (1.0 - p).powi(n as i32);
    let mut below = 0.0;
    for i in 0..h {
        below += term;
        term *= f64::from(n - i) / f64::from(i + 1) * p / (1.0 - p);
    }
    1.0 - below
}

/// The scan for the global generator that gave an epoch's seed as its first
/// epoch's draw: then the seeds of the next epochs are known too.
pub struct GlobalScan {
    /// The seed of the epoch.
    pub seed: u32,
}

impl GlobalScan {
    /// The global seeds of a range that give it; of all 2^32 about one does by
    /// chance.
    pub fn run(&self, seeds: Range<u64>) -> impl Iterator<Item = u32> {
        (seeds.start..seeds.end.min(SEEDS)).step_by(LANES).flat_map(|first| {
            let out = fourth(first as u32);
            let l = out.iter().position(|v| *v == self.seed);
            l.map(|l| (first as u32).wrapping_add(l as u32))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::interleaved;
    use super::*;

    #[test]
    fn an_unlikely_seed_is_found_wherever_it_is() {
        for (n, world, ranks, seed) in [
            (20_000u32, 1u32, 1u32, 3_141_592_653u32),
            (20_000, 2, 1, 2_718_281_828),
            (1_281_167, 8, 8, 77_777_777),
            (1000, 1, 1, u32::MAX),
        ] {
            let order = Shuffle::Torch.permutation(n, seed.into());
            let o = Observed::new(n, interleaved(&order, world, ranks, 4, 32, 600));
            let scan = Scan::new(o).expect("enough");
            let around = u64::from(seed).saturating_sub(20_000)..u64::from(seed) + 20_000;
            let found = scan.run(around).expect("found");
            assert_eq!(found.recipe, Recipe::Alone { seed }, "{n} {world}");
        }
    }

    /// `cargo test --release -p kspeed-prefetch -- --ignored --nocapture whole`
    #[test]
    #[ignore = "prints how long the whole scan takes; `bench` has it as a row"]
    fn whole() {
        let n = 20_000;
        let order = Shuffle::Torch.permutation(n, 3_141_592_653);
        let o = Observed::new(n, interleaved(&order, 1, 1, 4, 64, 600));
        let scan = Scan::new(o).expect("enough");
        let t = std::time::Instant::now();
        let part = 1u64 << 26;
        let f = scan.run(0..part);
        println!("ask {} {:?} {f:?} whole {:?}", scan.ask, t.elapsed(), t.elapsed() * 64);
    }

    #[test]
    fn the_global_generators_seed_is_found() {
        let seed = Recipe::next_of_global(&mut Mt19937::new(987_654_321));
        let scan = GlobalScan { seed };
        let found: Vec<u32> = scan.run(987_600_000..987_700_000).collect();
        assert_eq!(found, [987_654_321]);
    }
}

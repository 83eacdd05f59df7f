//! The seeds that people use, tried first.

use super::{Found, Observed};
use crate::order::{Mt19937, Recipe, Shuffle};

/// Favourites beside the small numbers.
const FAVOURITES: [u32; 20] = [
    1234,
    1337,
    2019,
    2020,
    2021,
    2022,
    2023,
    2024,
    2025,
    2026,
    3407,
    4242,
    9176,
    12345,
    31_337,
    65_537,
    123_456,
    1_234_567,
    12_345_678,
    123_456_789,
];
/// Seeds from 0 to here are tried as seed + epoch.
const SMALL: u32 = 2048;
/// Epochs after each favourite, or after each small seed where an epoch's own
/// number does not make another small seed.
const EPOCHS: u32 = 64;
/// Epochs of a global generator.
const GLOBAL_EPOCHS: u64 = 16;
/// Small seeds of a global generator, and of the shuffles whose permutations
/// must be made whole.
const SMALL_GLOBAL: u32 = 256;
const SMALL_WHOLE: u32 = 100;
/// Steps of whole permutations that may be spent: a few seconds.
const WHOLE_STEPS: u64 = 600_000_000;

/// At most so many candidates are tried: what a score must be better than
/// chance by.
pub const LIKELY_CANDIDATES: u32 = 32_768;

/// The likely seed that explains what was observed, if one does. Takes up to a
/// few seconds of computing on large datasets.
#[must_use]
pub fn likely(o: &Observed) -> Option<Found> {
    let needed = o.needed(f64::from(LIKELY_CANDIDATES));
    let believed = |recipe: Recipe, epoch: u64, nats: f64| {
        (nats >= needed).then_some(Found { recipe, epoch, nats })
    };
    let after = |seed: u32| (0..EPOCHS).map(move |e| (seed, e));
    let sums = (0..SMALL).map(|s| (s, 0)).chain(FAVOURITES.into_iter().flat_map(after));
    for (seed, epoch) in sums {
        let nats = o.score_of(Shuffle::Torch, u64::from(seed + epoch));
        let recipe = Recipe::SeedPlusEpoch { shuffle: Shuffle::Torch, seed: seed.into() };
        if let Some(f) = believed(recipe, epoch.into(), nats) {
            return Some(f);
        }
    }
    for seed in (0..SMALL_GLOBAL).chain(FAVOURITES) {
        let mut g = Mt19937::new(seed);
        for epoch in 0..GLOBAL_EPOCHS {
            let seed_of_epoch = u64::from(Recipe::next_of_global(&mut g));
            let nats = o.score_of(Shuffle::Torch, seed_of_epoch);
            if let Some(f) = believed(Recipe::TorchGlobal { seed }, epoch, nats) {
                return Some(f);
            }
        }
    }
    let mut steps = 0;
    for seed in FAVOURITES.into_iter().chain(0..SMALL_WHOLE) {
        steps += u64::from(o.of());
        if steps > WHOLE_STEPS / 4 {
            break;
        }
        let recipe = Recipe::TorchGenerator { seed };
        let order = recipe.order(o.of(), 0).unwrap_or_default();
        if let Some(f) = believed(recipe, 0, o.score(&order)) {
            return Some(f);
        }
    }
    let mut steps = 0;
    let favourites = [0, 42, 1234, 1337].into_iter().chain(FAVOURITES);
    let seeds = favourites.chain(0..SMALL_WHOLE);
    for seed in seeds {
        for shuffle in [Shuffle::NumpyGenerator, Shuffle::NumpyLegacy, Shuffle::Python] {
            steps += u64::from(o.of());
            if steps > WHOLE_STEPS {
                return None;
            }
            let recipe = Recipe::SeedPlusEpoch { shuffle, seed: seed.into() };
            if let Some(f) = believed(recipe, 0, o.score_of(shuffle, seed.into())) {
                return Some(f);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::tests::interleaved;
    use super::*;

    fn finds(n: u32, order: &[u32], count: usize) -> Option<Found> {
        likely(&Observed::new(n, interleaved(order, 2, 2, 4, 64, count)))
    }

    #[test]
    fn likely_seeds_are_found_after_64_opens() {
        let n = 20_000;
        for recipe in [
            Recipe::SeedPlusEpoch { shuffle: Shuffle::Torch, seed: 0 },
            Recipe::SeedPlusEpoch { shuffle: Shuffle::Torch, seed: 1337 },
            Recipe::SeedPlusEpoch { shuffle: Shuffle::NumpyLegacy, seed: 42 },
            Recipe::SeedPlusEpoch { shuffle: Shuffle::NumpyGenerator, seed: 7 },
            Recipe::SeedPlusEpoch { shuffle: Shuffle::Python, seed: 42 },
            Recipe::TorchGlobal { seed: 42 },
            Recipe::TorchGenerator { seed: 42 },
        ] {
            let f = finds(n, &recipe.order(n, 0).expect("known"), 64).expect("found");
            assert_eq!((f.recipe, f.epoch), (recipe, 0));
            if let Some(f) = finds(n, &recipe.order(n, 3).expect("known"), 64) {
                assert_eq!(f.recipe.order(n, f.epoch + 1), recipe.order(n, 4), "{recipe:?}");
            }
        }
    }

    #[test]
    fn what_no_seed_explains_is_not_explained() {
        let n = 20_000;
        let order = Shuffle::Torch.permutation(n, 3_141_592_653);
        assert_eq!(finds(n, &order, 64), None);
        assert_eq!(finds(n, &(0..n).collect::<Vec<_>>(), 64), None);
    }
}

//! The orders that samplers make: which sample comes at which place of an epoch.
//!
//! Each is the library's own algorithm, held against orders made by the real
//! libraries (`tests/golden/make.py`).

mod mt19937;
mod pcg64;

pub use mt19937::Mt19937;
pub(crate) use mt19937::{M, SEED_MULTIPLIER, temper, twist};
pub use pcg64::Pcg64;

use std::collections::HashMap;

/// How a permutation is made of a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shuffle {
    /// `torch.randperm` on the CPU with a generator of that seed, of which
    /// PyTorch uses the low 32 bits (ATen `randperm_cpu`, n < 2^32 / 20).
    Torch,
    /// `numpy.random.RandomState(seed).permutation(n)`, also `np.random.seed`
    /// and `np.random.shuffle` of a range.
    NumpyLegacy,
    /// `numpy.random.default_rng(seed).permutation(n)`; MosaicML's `naive`.
    NumpyGenerator,
    /// `random.Random(seed).shuffle(list(range(n)))`.
    Python,
}

impl Shuffle {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Torch, Self::NumpyLegacy, Self::NumpyGenerator, Self::Python];

    /// As users know it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Torch => "torch.randperm",
            Self::NumpyLegacy => "numpy.random.RandomState",
            Self::NumpyGenerator => "numpy.random.default_rng",
            Self::Python => "random.shuffle",
        }
    }

    /// The permutation of `0..n`: the sample at each place.
    #[must_use]
    pub fn permutation(self, n: u32, seed: u64) -> Vec<u32> {
        let mut items: Vec<u32> = (0..n).collect();
        match self {
            Self::Torch => torch(&mut items, &mut Mt19937::new(seed as u32)),
            Self::NumpyLegacy => {
                let mut g = Mt19937::new(seed as u32);
                for i in (1..n).rev() {
                    let mask = u32::MAX >> i.leading_zeros();
                    let j = loop {
                        let v = g.next_u32() & mask;
                        if v <= i {
                            break v;
                        }
                    };
                    items.swap(i as usize, j as usize);
                }
            }
            Self::NumpyGenerator => {
                let mut g = Pcg64::new(seed);
                for i in (1..n).rev() {
                    items.swap(i as usize, g.up_to(i) as usize);
                }
            }
            Self::Python => {
                let mut g = Mt19937::by_array(&words(seed));
                for i in (1..n).rev() {
                    // Bits of i + 1, which fits: n is a u32.
                    let bits = u64::BITS - (u64::from(i) + 1).leading_zeros();
                    let j = loop {
                        let v = u64::from(g.next_u32()) >> 32u32.saturating_sub(bits);
                        if v <= u64::from(i) {
                            break v;
                        }
                    };
                    items.swap(i as usize, j as usize);
                }
            }
        }
        items
    }

    /// The first `len` items of the permutation; for [`Self::Torch`] at a cost
    /// that does not grow with `n`.
    #[must_use]
    pub fn head(self, n: u32, seed: u64, len: u32) -> Vec<u32> {
        if self != Self::Torch || len >= n / 4 {
            let mut all = self.permutation(n, seed);
            all.truncate(len as usize);
            return all;
        }
        let mut g = Mt19937::new(seed as u32);
        let mut moved: HashMap<u32, u32> = HashMap::with_capacity(len as usize);
        (0..len)
            .map(|i| {
                let from = i + g.next_u32() % (n - i);
                let here = moved.remove(&i).unwrap_or(i);
                if from == i {
                    return here;
                }
                moved.insert(from, here).unwrap_or(from)
            })
            .collect()
    }
}

/// `torch.randperm`: the items are 0, 1, 2…
fn torch(items: &mut [u32], g: &mut Mt19937) {
    let n = items.len() as u32;
    for i in 0..n.saturating_sub(1) {
        let z = g.next_u32() % (n - i);
        items.swap(i as usize, (i + z) as usize);
    }
}

/// A number's 32-bit words, the lowest first, without leading zeros but never
/// none: how Python and numpy feed integers to their generators.
fn words(seed: u64) -> Vec<u32> {
    let (low, high) = (seed as u32, (seed >> 32) as u32);
    if high == 0 { vec![low] } else { vec![low, high] }
}

/// Where the permutations of successive epochs come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Recipe {
    /// Seed + epoch: `DistributedSampler` with `set_epoch`, and what most
    /// trainers do with numpy.
    SeedPlusEpoch {
        /// The shuffle.
        shuffle: Shuffle,
        /// The seed of epoch 0.
        seed: u64,
    },
    /// `DataLoader(shuffle=True)` after `torch.manual_seed(seed)`, when nothing
    /// else draws from the global generator: two int64 draws an epoch, the
    /// second of which seeds the permutation.
    TorchGlobal {
        /// The global generator's seed.
        seed: u32,
    },
    /// `DataLoader(shuffle=True, generator=g)` after `g.manual_seed(seed)`: one
    /// int64 draw an epoch, then the permutation, and at the epoch's end another
    /// that is thrown away.
    TorchGenerator {
        /// The generator's seed.
        seed: u32,
    },
    /// The epoch's own seed, found by the scan; that of the next is not known.
    Alone {
        /// The seed of this one permutation.
        seed: u32,
    },
}

impl Recipe {
    /// The order of `n` samples in an epoch (0 is the first); none: not known.
    #[must_use]
    pub fn order(self, n: u32, epoch: u64) -> Option<Vec<u32>> {
        Some(match self {
            Self::SeedPlusEpoch { shuffle, seed } => {
                shuffle.permutation(n, seed.wrapping_add(epoch))
            }
            Self::TorchGlobal { seed } => {
                let mut g = Mt19937::new(seed);
                for _ in 0..epoch {
                    Self::next_of_global(&mut g);
                }
                Shuffle::Torch.permutation(n, Self::next_of_global(&mut g).into())
            }
            Self::TorchGenerator { seed } => {
                let mut g = Mt19937::new(seed);
                for _ in 0..epoch * (2 + 2 * u64::from(n.saturating_sub(1))) + 2 {
                    g.next_u32();
                }
                let mut items: Vec<u32> = (0..n).collect();
                torch(&mut items, &mut g);
                items
            }
            Self::Alone { .. } if epoch > 0 => return None,
            Self::Alone { seed } => Shuffle::Torch.permutation(n, seed.into()),
        })
    }

    /// The seed that the next epoch of a `DataLoader` draws from the global
    /// generator. A draw of an int64 takes two outputs, the high half first;
    /// the workers' base seed is drawn before, and of the epoch's seed the low
    /// half is all that matters.
    pub(crate) fn next_of_global(g: &mut Mt19937) -> u32 {
        for _ in 0..3 {
            g.next_u32();
        }
        g.next_u32()
    }

    /// In words.
    #[must_use]
    pub fn describe(self) -> String {
        match self {
            Self::SeedPlusEpoch { shuffle, seed } => {
                format!("{}, seed {seed} + epoch", shuffle.name())
            }
            Self::TorchGlobal { seed } => {
                format!("DataLoader(shuffle=True) after torch.manual_seed({seed})")
            }
            Self::TorchGenerator { seed } => {
                format!("DataLoader(shuffle=True, generator=…) with seed {seed}")
            }
            Self::Alone { seed } => format!("torch.randperm, seed {seed}"),
        }
    }
}

/// The part of an epoch that one rank reads, as PyTorch's `DistributedSampler`
/// divides it: padded from its start, or cut, to a multiple of the ranks, then
/// every `world`-th.
#[must_use]
pub fn rank_share(order: &[u32], world: u32, rank: u32, drop_last: bool) -> Vec<u32> {
    let (n, world) = (order.len(), world.max(1) as usize);
    let each = if drop_last && n % world != 0 { n / world } else { n.div_ceil(world) };
    let place = |k: usize| k * world + rank as usize;
    (0..each).filter(|_| n > 0).map(|k| order[place(k) % n]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    fn golden() -> Value {
        serde_json::from_str(include_str!("../../tests/golden/orders.json")).expect("JSON")
    }

    /// CRC-32 (IEEE), as zlib computes it.
    fn crc32(bytes: impl Iterator<Item = u8>) -> u32 {
        !bytes.fold(u32::MAX, |c, b| {
            (0..8).fold(c ^ u32::from(b), |c, _| (c >> 1) ^ (0xEDB8_8320 & (c & 1).wrapping_neg()))
        })
    }

    fn holds(ours: &[u32], row: &Value, what: &str) {
        let order = &row["order"];
        let head: Vec<u32> = order["head"]
            .as_array()
            .expect("head")
            .iter()
            .map(|v| v.as_u64().expect("n") as u32)
            .collect();
        assert_eq!(ours.len() as u64, order["len"].as_u64().expect("len"), "{what} {row}");
        assert_eq!(&ours[..head.len()], head, "{what} {row}");
        let crc = crc32(ours.iter().flat_map(|v| v.to_le_bytes()));
        assert_eq!(u64::from(crc), order["crc"].as_u64().expect("crc"), "{what} {row}");
    }

    fn n(row: &Value, key: &str) -> u64 {
        row[key].as_u64().expect("a number")
    }

    #[test]
    fn permutations_are_those_of_torch_numpy_and_python() {
        let golden = golden();
        for (name, shuffle) in [
            ("torch_randperm", Shuffle::Torch),
            ("numpy_legacy", Shuffle::NumpyLegacy),
            ("numpy_generator", Shuffle::NumpyGenerator),
            ("python_random", Shuffle::Python),
        ] {
            let rows = golden[name].as_array().expect("rows");
            assert!(rows.len() >= 40, "{name}");
            for row in rows {
                holds(&shuffle.permutation(n(row, "n") as u32, n(row, "seed")), row, name);
            }
        }
    }

    #[test]
    fn epochs_of_a_dataloader_are_those_of_torch() {
        let golden = golden();
        for (name, recipe) in [
            ("dataloader_shuffle", (|seed| Recipe::TorchGlobal { seed }) as fn(u32) -> Recipe),
            ("dataloader_generator", |seed| Recipe::TorchGenerator { seed }),
        ] {
            let rows = golden[name].as_array().expect("rows");
            assert!(rows.len() >= 20);
            for row in rows {
                let order =
                    recipe(n(row, "seed") as u32).order(n(row, "n") as u32, n(row, "epoch"));
                holds(&order.expect("known"), row, name);
            }
        }
    }

    #[test]
    fn shares_of_ranks_are_those_of_distributed_sampler() {
        let golden = golden();
        let rows = golden["distributed_sampler"].as_array().expect("rows");
        assert!(rows.len() >= 40);
        for row in rows {
            let recipe = Recipe::SeedPlusEpoch { shuffle: Shuffle::Torch, seed: n(row, "seed") };
            let order = recipe.order(n(row, "n") as u32, n(row, "epoch")).expect("known");
            let drop_last = row["drop_last"].as_bool().expect("bool");
            let ours = rank_share(&order, n(row, "world") as u32, n(row, "rank") as u32, drop_last);
            holds(&ours, row, "DistributedSampler");
        }
    }

    proptest! {
        #[test]
        fn the_head_is_the_permutations(count in 1u32..3000, seed: u64, len in 0u32..400) {
            for s in Shuffle::ALL {
                let whole = s.permutation(count, seed);
                prop_assert_eq!(&s.head(count, seed, len)[..], &whole[..len.min(count) as usize]);
            }
        }

        #[test]
        fn each_is_a_permutation(count in 0u32..2000, seed: u64) {
            for s in Shuffle::ALL {
                let mut all = s.permutation(count, seed);
                all.sort_unstable();
                prop_assert!(all.into_iter().eq(0..count));
            }
        }
    }
}

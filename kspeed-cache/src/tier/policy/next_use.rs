//! Eviction by next use, where it is known.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

use super::{EvictionPolicy, Expected, Sieve};

/// The unit whose next use is furthest goes first (Belady, "A study of replacement
/// algorithms for a virtual-storage computer", 1966), which is optimal where all
/// next uses are known. In all: first what was used and will not be for long, then
/// what nobody knows anything of, by SIEVE; what will be used for certain goes
/// last, the furthest first. So data that streams through does not displace what
/// an order says will be read.
pub struct NextUse<U> {
    unknown: Sieve<U>,
    /// By next use; the latest is [`LATE`].
    known: BTreeSet<(u64, U)>,
    at: HashMap<U, u64>,
}

const LATE: u64 = u64::MAX;

impl<U: Clone + Eq + Hash + Ord> Default for NextUse<U> {
    fn default() -> Self {
        Self { unknown: Sieve::new(), known: BTreeSet::new(), at: HashMap::new() }
    }
}

impl<U: Clone + Eq + Hash + Ord + Send> NextUse<U> {
    /// Knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn furthest(&mut self, at_least: u64, may_go: &mut dyn FnMut(&U) -> bool) -> Option<U> {
        let late = self.known.iter().rev().take_while(|(t, _)| *t >= at_least);
        let unit = late.map(|(_, u)| u).find(|u| may_go(u)).cloned()?;
        self.remove(&unit);
        Some(unit)
    }
}

impl<U: Clone + Eq + Hash + Ord + Send> EvictionPolicy<U> for NextUse<U> {
    fn insert(&mut self, unit: U) {
        if !self.at.contains_key(&unit) {
            self.unknown.insert(unit);
        }
    }

    fn touch(&mut self, unit: &U) {
        self.unknown.touch(unit);
    }

    fn expect(&mut self, unit: &U, next: Expected) {
        let old = self.at.remove(unit);
        if let Some(t) = old {
            self.known.remove(&(t, unit.clone()));
        }
        let t = match next {
            Expected::At(t) => t.min(LATE - 1),
            Expected::Late => LATE,
            Expected::Unknown => {
                if old.is_some() {
                    self.unknown.insert(unit.clone());
                }
                return;
            }
        };
        self.unknown.remove(unit);
        self.at.insert(unit.clone(), t);
        self.known.insert((t, unit.clone()));
    }

    fn remove(&mut self, unit: &U) {
        match self.at.remove(unit) {
            Some(t) => drop(self.known.remove(&(t, unit.clone()))),
            None => self.unknown.remove(unit),
        }
    }

    fn victim(&mut self, may_go: &mut dyn FnMut(&U) -> bool) -> Option<U> {
        self.furthest(LATE, may_go)
            .or_else(|| self.unknown.victim(may_go))
            .or_else(|| self.furthest(0, may_go))
    }

    fn len(&self) -> usize {
        self.unknown.len() + self.at.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_order_in_which_units_go() {
        let mut p = NextUse::new();
        for u in 0..6 {
            p.insert(u);
        }
        p.expect(&0, Expected::At(10));
        p.expect(&1, Expected::At(20));
        p.expect(&2, Expected::Late);
        p.expect(&3, Expected::At(5));
        p.expect(&3, Expected::Unknown);
        p.touch(&4);
        let gone: Vec<i32> = std::iter::from_fn(|| p.victim(&mut |_| true)).collect();
        assert_eq!(gone[0], 2, "used, and not for long");
        assert_eq!(gone[1..4].iter().copied().max(), Some(5), "the unknown: {gone:?}");
        assert_eq!(gone[4..], [1, 0], "the furthest first");
    }

    proptest! {
        /// Against a plain map: the victim is one with the latest use.
        #[test]
        fn the_furthest_goes(ops in proptest::collection::vec((0u8..3, 0u16..20, 0u64..50), 0..200)) {
            let mut p = NextUse::new();
            let mut model: HashMap<u16, u64> = HashMap::new();
            for (op, u, t) in ops {
                match op {
                    0 => {
                        p.insert(u);
                        p.expect(&u, Expected::At(t));
                        model.insert(u, t);
                    }
                    1 => {
                        p.remove(&u);
                        model.remove(&u);
                    }
                    _ => {
                        let most = model.values().copied().max();
                        let gone = p.victim(&mut |_| true);
                        prop_assert_eq!(gone.and_then(|g| model.remove(&g)), most);
                    }
                }
                prop_assert_eq!(p.len(), model.len());
            }
        }
    }
}

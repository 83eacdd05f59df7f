//! What to evict next, behind one trait, with no I/O in it.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Orders units by how soon they should go.
pub trait EvictionPolicy<U>: Send {
    /// `unit` came in.
    fn insert(&mut self, unit: U);
    /// `unit` was used.
    fn touch(&mut self, unit: &U);
    /// `unit` went away on its own.
    fn remove(&mut self, unit: &U);
    /// Takes out the unit that should go first among those that `may_go`.
    fn victim(&mut self, may_go: &mut dyn FnMut(&U) -> bool) -> Option<U>;
    /// Units known.
    fn len(&self) -> usize;
    /// Whether none is known.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Least recently used.
#[derive(Default)]
pub struct Lru<U> {
    clock: u64,
    by_age: BTreeMap<u64, U>,
    ages: HashMap<U, u64>,
}

impl<U: Clone + Eq + Hash> Lru<U> {
    /// Knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self { clock: 0, by_age: BTreeMap::new(), ages: HashMap::new() }
    }
}

impl<U: Clone + Eq + Hash + Send> EvictionPolicy<U> for Lru<U> {
    fn insert(&mut self, unit: U) {
        self.remove(&unit);
        self.clock += 1;
        self.ages.insert(unit.clone(), self.clock);
        self.by_age.insert(self.clock, unit);
    }

    fn touch(&mut self, unit: &U) {
        if self.ages.contains_key(unit) {
            self.insert(unit.clone());
        }
    }

    fn remove(&mut self, unit: &U) {
        if let Some(age) = self.ages.remove(unit) {
            self.by_age.remove(&age);
        }
    }

    fn victim(&mut self, may_go: &mut dyn FnMut(&U) -> bool) -> Option<U> {
        let unit = self.by_age.values().find(|u| may_go(u)).cloned()?;
        self.remove(&unit);
        Some(unit)
    }

    fn len(&self) -> usize {
        self.ages.len()
    }
}

/// SIEVE (Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024): a queue in
/// order of arrival and a hand that moves from old to new, sparing what was used
/// since it last passed. Data that is read once, such as a scan, leaves soon and does not
/// flush what is used again, as it does with LRU.
#[derive(Default)]
pub struct Sieve<U> {
    clock: u64,
    queue: BTreeMap<u64, (U, bool)>,
    places: HashMap<U, u64>,
    hand: u64,
}

impl<U: Clone + Eq + Hash> Sieve<U> {
    /// Knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self { clock: 0, queue: BTreeMap::new(), places: HashMap::new(), hand: 0 }
    }
}

impl<U: Clone + Eq + Hash + Send> EvictionPolicy<U> for Sieve<U> {
    fn insert(&mut self, unit: U) {
        if self.places.contains_key(&unit) {
            self.touch(&unit);
            return;
        }
        self.clock += 1;
        self.places.insert(unit.clone(), self.clock);
        self.queue.insert(self.clock, (unit, false));
    }

    fn touch(&mut self, unit: &U) {
        if let Some(e) = self.places.get(unit).and_then(|p| self.queue.get_mut(p)) {
            e.1 = true;
        }
    }

    fn remove(&mut self, unit: &U) {
        if let Some(p) = self.places.remove(unit) {
            self.queue.remove(&p);
        }
    }

    fn victim(&mut self, may_go: &mut dyn FnMut(&U) -> bool) -> Option<U> {
        // Twice round at the most: the first round clears every mark.
        for _ in 0..2 * self.queue.len() {
            let place = match self.queue.range(self.hand..).next() {
                Some((p, _)) => *p,
                None => {
                    self.hand = 0;
                    *self.queue.keys().next()?
                }
            };
            self.hand = place + 1;
            let entry = self.queue.get_mut(&place)?;
            if entry.1 {
                entry.1 = false;
            } else if may_go(&entry.0) {
                let unit = entry.0.clone();
                self.remove(&unit);
                // Past the newest the hand starts again at the oldest, even if
                // others arrive before it moves.
                if self.queue.range(self.hand..).next().is_none() {
                    self.hand = 0;
                }
                return Some(unit);
            }
        }
        None
    }

    fn len(&self) -> usize {
        self.places.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// LRU as a list: the reference.
    #[derive(Default)]
    struct ListLru(Vec<u8>);

    impl ListLru {
        fn insert(&mut self, u: u8) {
            self.0.retain(|x| *x != u);
            self.0.push(u);
        }
        fn victim(&mut self, pinned: u8) -> Option<u8> {
            let i = self.0.iter().position(|x| *x != pinned)?;
            Some(self.0.remove(i))
        }
    }

    /// SIEVE as the paper's pseudo code, on a list with the newest first.
    #[derive(Default)]
    struct ListSieve {
        list: Vec<(u8, bool)>,
        hand: Option<u8>,
    }

    impl ListSieve {
        fn victim(&mut self) -> Option<u8> {
            if self.list.is_empty() {
                return None;
            }
            let last = self.list.len() - 1;
            let mut i =
                self.hand.and_then(|h| self.list.iter().position(|x| x.0 == h)).unwrap_or(last);
            while self.list[i].1 {
                self.list[i].1 = false;
                i = if i == 0 { self.list.len() - 1 } else { i - 1 };
            }
            self.hand = if i == 0 { None } else { Some(self.list[i - 1].0) };
            Some(self.list.remove(i).0)
        }
    }

    proptest! {
        #[test]
        fn lru_is_the_list(ops in proptest::collection::vec((0u8..4, 0u8..12), 0..300)) {
            let (mut a, mut b) = (Lru::new(), ListLru::default());
            for (op, u) in ops {
                match op {
                    0 => { a.insert(u); b.insert(u); }
                    1 => { a.touch(&u); if b.0.contains(&u) { b.insert(u); } }
                    2 => { a.remove(&u); b.0.retain(|x| *x != u); }
                    _ => prop_assert_eq!(a.victim(&mut |x| *x != u), b.victim(u)),
                }
                prop_assert_eq!(a.len(), b.0.len());
            }
        }

        #[test]
        fn sieve_is_the_papers(ops in proptest::collection::vec((0u8..3, 0u8..12), 0..300)) {
            let (mut a, mut b) = (Sieve::new(), ListSieve::default());
            for (op, u) in ops {
                match op {
                    0 => {
                        a.insert(u);
                        if let Some(e) = b.list.iter_mut().find(|e| e.0 == u) { e.1 = true; }
                        else { b.list.insert(0, (u, false)); }
                    }
                    1 => {
                        a.touch(&u);
                        if let Some(e) = b.list.iter_mut().find(|e| e.0 == u) { e.1 = true; }
                    }
                    _ => prop_assert_eq!(a.victim(&mut |_| true), b.victim()),
                }
                prop_assert_eq!(a.len(), b.list.len());
            }
        }
    }

    #[test]
    fn what_may_not_go_stays() {
        let mut s = Sieve::new();
        for u in 0..5 {
            s.insert(u);
        }
        assert_eq!(s.victim(&mut |_| false), None);
        assert_eq!(s.len(), 5);
        assert_eq!(s.victim(&mut |u| *u == 3), Some(3));
    }

    /// Why SIEVE: a hot set beside a scan of things used once.
    #[test]
    fn a_scan_does_not_flush_what_is_used_again_with_sieve_as_it_does_with_lru() {
        fn hits(mut p: impl EvictionPolicy<u32>) -> u32 {
            let mut hits = 0;
            let mut inside = std::collections::HashSet::new();
            let mut access = |u: u32| {
                if inside.contains(&u) {
                    hits += 1;
                    p.touch(&u);
                    return;
                }
                if inside.len() == 100
                    && let Some(v) = p.victim(&mut |_| true)
                {
                    inside.remove(&v);
                }
                inside.insert(u);
                p.insert(u);
            };
            for round in 0..50u32 {
                for n in 0..120 {
                    access(n % 60);
                }
                for n in 0..200 {
                    access(1000 + round * 200 + n);
                }
            }
            hits
        }
        let (lru, sieve) = (hits(Lru::new()), hits(Sieve::new()));
        assert_eq!(lru, 50 * 60, "only the second touch of each round");
        assert!(sieve > lru + 1000, "{sieve} against {lru}");
    }
}

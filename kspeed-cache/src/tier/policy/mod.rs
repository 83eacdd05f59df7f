//! What to evict next, behind one trait, with no I/O in it.

mod lru;
mod next_use;
mod sieve;
pub mod simulation;

pub use lru::Lru;
pub use next_use::NextUse;
pub use sieve::Sieve;

/// When a unit will be used next, as far as somebody knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Nobody does.
    Unknown,
    /// At this time, on a clock that counts reads.
    At(u64),
    /// Not for long: it was used, and everything else comes before it again.
    Late,
}

/// Orders units by how soon they should go.
pub trait EvictionPolicy<U>: Send {
    /// `unit` came in.
    fn insert(&mut self, unit: U);
    /// `unit` was used.
    fn touch(&mut self, unit: &U);
    /// When `unit`, which is known, will be used next. Most policies don't care.
    fn expect(&mut self, _unit: &U, _next: Expected) {}
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

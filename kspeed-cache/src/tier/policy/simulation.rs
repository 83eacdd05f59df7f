//! Policies side by side on a trace, with the optimum: pure, for tests and for
//! `kspeed-bench run policies`.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::{EvictionPolicy, Expected};

/// An access, and what is known of the unit's next one after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The unit.
    pub unit: u32,
    /// Its next use.
    pub next: Expected,
}

/// Hits of a policy with room for so many units, all of one size.
pub fn hits(policy: &mut dyn EvictionPolicy<u32>, trace: &[Access], capacity: usize) -> usize {
    let mut inside = HashSet::new();
    let mut hits = 0;
    for a in trace {
        if inside.contains(&a.unit) {
            hits += 1;
            policy.touch(&a.unit);
        } else {
            inside.insert(a.unit);
            policy.insert(a.unit);
        }
        if a.next != Expected::Unknown {
            policy.expect(&a.unit, a.next);
        }
        if inside.len() > capacity
            && let Some(v) = policy.victim(&mut |_| true)
        {
            inside.remove(&v);
        }
    }
    hits
}

/// Hits of Belady's optimum, which knows the future and may keep nothing of an
/// access.
#[must_use]
pub fn optimum(trace: &[Access], capacity: usize) -> usize {
    let mut next = vec![usize::MAX; trace.len()];
    let mut last: HashMap<u32, usize> = HashMap::new();
    for (i, a) in trace.iter().enumerate().rev() {
        if let Some(later) = last.insert(a.unit, i) {
            next[i] = later;
        }
    }
    let mut inside: HashMap<u32, usize> = HashMap::new();
    let mut by_use: BTreeSet<(usize, u32)> = BTreeSet::new();
    let mut hits = 0;
    for (i, a) in trace.iter().enumerate() {
        if let Some(t) = inside.remove(&a.unit) {
            by_use.remove(&(t, a.unit));
            hits += 1;
        }
        inside.insert(a.unit, next[i]);
        by_use.insert((next[i], a.unit));
        if inside.len() > capacity
            && let Some((_, v)) = by_use.pop_last()
        {
            inside.remove(&v);
        }
    }
    hits
}

#[cfg(test)]
mod tests {
    use super::super::{Lru, NextUse, Sieve};
    use super::*;

    /// Epochs of a set, each shuffled; what is known: all, or only that a unit
    /// does not come again within its epoch.
    fn epochs(n: u32, count: usize, known: bool) -> Vec<Access> {
        let mut x = 7u64;
        let orders: Vec<Vec<u32>> = (0..count)
            .map(|_| {
                let mut o: Vec<u32> = (0..n).collect();
                for i in (1..n as usize).rev() {
                    x = x
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    o.swap(i, ((x >> 33) % (i as u64 + 1)) as usize);
                }
                o
            })
            .collect();
        let mut trace = Vec::new();
        for (e, o) in orders.iter().enumerate() {
            let places: Option<HashMap<u32, u64>> = orders
                .get(e + 1)
                .filter(|_| known)
                .map(|o| o.iter().enumerate().map(|(p, u)| (*u, p as u64)).collect());
            for u in o {
                let start = (e as u64 + 1) * u64::from(n);
                let next = match &places {
                    Some(p) => Expected::At(start + p[u]),
                    None => Expected::Late,
                };
                trace.push(Access { unit: *u, next });
            }
        }
        trace
    }

    #[test]
    fn a_known_order_reaches_the_optimum_and_lru_does_not() {
        let trace = epochs(2000, 5, true);
        let best = optimum(&trace, 1000);
        let ours = hits(&mut NextUse::new(), &trace, 1000);
        assert!(ours * 100 >= best * 99, "{ours} of {best}");
        let lru = hits(&mut Lru::new(), &trace, 1000);
        assert!(lru * 2 < best, "{lru} of {best}");
    }

    #[test]
    fn an_unknown_order_without_replacement_beats_lru_and_sieve() {
        let trace = epochs(2000, 5, false);
        let ours = hits(&mut NextUse::new(), &trace, 1000);
        for other in [hits(&mut Lru::new(), &trace, 1000), hits(&mut Sieve::new(), &trace, 1000)] {
            assert!(ours > other, "{ours} against {other}");
        }
        assert!(ours <= optimum(&trace, 1000));
    }
}

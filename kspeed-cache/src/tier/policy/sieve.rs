//! SIEVE.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use super::EvictionPolicy;

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

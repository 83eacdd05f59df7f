//! Least recently used.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use super::EvictionPolicy;

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

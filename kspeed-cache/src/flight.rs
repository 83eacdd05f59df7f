//! Single flight: however many readers want a block, one fetches it.
//!
//! A [`Flights`] maps keys to flights. [`Flights::claim`] makes the caller the
//! leader of a new flight or a follower of a running one. The leader ends it by
//! [`Lead::finish`]; if it is dropped before that (cancelled, panicked), every
//! follower gets [`Outcome::Abandoned`] and may claim again.
//!
//! Invariants: at most one leader a key; a key is free again before its
//! followers hear of the end, so that one that claims anew never joins the dead
//! flight; each follower hears of the end exactly once.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use futures::channel::oneshot;

use super::sync::Mutex;

/// How a flight ended, for its followers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome<V, E> {
    /// The leader has the value.
    Done(V),
    /// The leader failed.
    Failed(E),
    /// The leader went away; claim again.
    Abandoned,
}

type Followers<V, E> = Vec<oneshot::Sender<Outcome<V, E>>>;

/// The running flights, by key.
pub struct Flights<K, V, E> {
    running: Arc<Mutex<HashMap<K, Followers<V, E>>>>,
}

/// What [`Flights::claim`] made of the caller.
pub enum Claim<K: Hash + Eq, V, E> {
    /// Fetch it, then call [`Lead::finish`].
    Lead(Lead<K, V, E>),
    /// Await this.
    Follow(Wait<V, E>),
}

/// The duty to end a flight.
pub struct Lead<K: Hash + Eq, V, E> {
    running: Arc<Mutex<HashMap<K, Followers<V, E>>>>,
    key: Option<K>,
}

/// A follower's end of a flight.
pub struct Wait<V, E>(oneshot::Receiver<Outcome<V, E>>);

impl<V, E> Wait<V, E> {
    /// Waits for the end. Cancel-safe: dropping it leaves the flight alone.
    pub async fn outcome(self) -> Outcome<V, E> {
        self.0.await.unwrap_or(Outcome::Abandoned)
    }
}

impl<K: Hash + Eq + Clone, V: Clone, E: Clone> Flights<K, V, E> {
    /// No flights.
    #[must_use]
    pub fn new() -> Self {
        Self { running: Arc::new(Mutex::new(HashMap::new())) }
    }

    /// Joins the flight of `key`, or starts it.
    #[must_use]
    pub fn claim(&self, key: &K) -> Claim<K, V, E> {
        let mut running = self.running.lock();
        if let Some(followers) = running.get_mut(key) {
            // Followers that gave up are swept here, so that a flight that
            // lasts long does not collect them without bound.
            followers.retain(|f| !f.is_canceled());
            let (tell, wait) = oneshot::channel();
            followers.push(tell);
            return Claim::Follow(Wait(wait));
        }
        running.insert(key.clone(), Vec::new());
        Claim::Lead(Lead { running: self.running.clone(), key: Some(key.clone()) })
    }

    /// Starts the flight of `key` unless it runs already.
    #[must_use]
    pub fn lead(&self, key: &K) -> Option<Lead<K, V, E>> {
        let mut running = self.running.lock();
        if running.contains_key(key) {
            return None;
        }
        running.insert(key.clone(), Vec::new());
        Some(Lead { running: self.running.clone(), key: Some(key.clone()) })
    }

    /// Flights running now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.running.lock().len()
    }

    /// Whether none runs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<K: Hash + Eq + Clone, V: Clone, E: Clone> Default for Flights<K, V, E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Hash + Eq, V, E> Lead<K, V, E> {
    /// Ends the flight: the key is free, then the followers hear of it.
    pub fn finish(mut self, result: Result<V, E>)
    where
        V: Clone,
        E: Clone,
    {
        let outcome = match result {
            Ok(v) => Outcome::Done(v),
            Err(e) => Outcome::Failed(e),
        };
        for f in self.land() {
            let _ = f.send(outcome.clone());
        }
    }

    fn land(&mut self) -> Followers<V, E> {
        self.key.take().and_then(|k| self.running.lock().remove(&k)).unwrap_or_default()
    }
}

impl<K: Hash + Eq, V, E> Drop for Lead<K, V, E> {
    fn drop(&mut self) {
        for f in self.land() {
            let _ = f.send(Outcome::Abandoned);
        }
    }
}

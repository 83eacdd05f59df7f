//! What the origin is to have, and has not yet: the pure part of write-back.
//!
//! Not a log of operations but, for each key, the state that this mount has
//! promised. A rename, a directory's too, is one set of changes that is applied
//! whole. The uploader makes the origin as it is wished, key by key, and then
//! the wish is settled: the key is as the origin has it again.
//!
//! ```text
//!              set                       begin                 settle
//!  (nothing) ───────► wished, not acked ─────────────────────────────┐
//!      ▲                   │ set, acked                              │ closed
//!      │                   ▼              begin                      │ unchanged
//!      │             wished, acked ─────────────► wished, sent ──────┤
//!      │                   ▲                         │   │           │
//!      │                   └───── another wish ──────┘   │ done      │
//!      └─────────────────────────────────────────────────┴───────────┘
//! ```
//!
//! Wishes for different keys are independent but for four rules, which
//! [`Wishes::is_blocked`] knows: nothing changes a key from which another is to be
//! copied; a directory's marker goes after all that is below it; a file comes when
//! the directory that had its name has gone, and the other way round; one request
//! at a time for a key.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Bound;

use kspeed_cache::origin::{Attributes, Condition};
use kspeed_cache::{Key, ObjectMeta, Version};
use serde::{Deserialize, Serialize};

/// Number of a stage file; never used twice.
pub type StageId = u64;

/// What a key is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wish {
    /// The bytes of a stage file.
    File {
        /// Its number.
        stage: StageId,
        /// Attributes of the object.
        #[serde(default)]
        attributes: Attributes,
        /// The bytes are on the disk, not only in the page cache.
        durable: bool,
    },
    /// A directory's marker; the key ends with `/`.
    Directory,
    /// The bytes of another object, or the same with other attributes.
    Copy {
        /// The object.
        from: ObjectMeta,
        /// Attributes of the copy.
        #[serde(default)]
        attributes: Attributes,
    },
    /// Nothing.
    Absent,
}

/// A key's wish from now on; none: as the origin has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The key.
    pub key: Key,
    /// Its wish.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub wish: Option<Wish>,
    /// What the origin has there, as far as known.
    #[serde(skip_serializing_if = "is_any", default)]
    pub base: Condition,
}

fn is_any(c: &Condition) -> bool {
    *c == Condition::Any
}

/// A wish and what is known of it.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What is to be.
    pub wish: Wish,
    /// What the origin has, as far as known.
    pub base: Condition,
    /// Tells this wish from earlier ones for the key.
    pub seq: u64,
    /// In the journal, so the uploader may go by it.
    pub acked: bool,
    /// A request may have reached the origin, so it may have something there
    /// even if `base` says that it has nothing.
    sent: bool,
}

impl Entry {
    /// Whether the origin may have an object there.
    #[must_use]
    pub fn is_occupied(&self) -> bool {
        self.sent || self.base != Condition::Absent
    }
}

/// What the wishes make of a name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Child {
    /// A directory.
    Directory,
    /// A file with these bytes.
    Staged(StageId),
    /// A file with an object's bytes.
    Copied(ObjectMeta),
    /// No file, whatever the origin has; a directory of the name, if it has one.
    NoFile,
    /// No directory, whatever the origin has; a file of the name, if it has one.
    NoDirectory,
    /// Nothing, whatever the origin has.
    Nothing,
}

/// All wishes of a mount.
#[derive(Default, Debug)]
pub struct Wishes {
    entries: BTreeMap<Key, Entry>,
    by_stage: HashMap<StageId, Key>,
    /// Keys that others are to be copied from, and by how many.
    sources: HashMap<Key, u32>,
    in_flight: HashSet<Key>,
    /// Prefixes below which nothing goes out, as somebody looks at the whole.
    held: Vec<Key>,
    seq: u64,
}

fn key_after_subtree(prefix: &[u8]) -> Vec<u8> {
    // `prefix` ends with '/', and no key sorts between its subtree and '0'.
    let mut end = prefix.to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

/// A copy that came back to where it is to be copied from: it is there.
fn unless_there(key: &Key, wish: Wish) -> Option<Wish> {
    match &wish {
        Wish::Copy { from, attributes }
            if from.key == *key && *attributes == Attributes::default() =>
        {
            None
        }
        _ => Some(wish),
    }
}

fn child_of(wish: &Wish) -> Child {
    match wish {
        Wish::File { stage, .. } => Child::Staged(*stage),
        Wish::Copy { from, .. } => Child::Copied(from.clone()),
        Wish::Directory => Child::Directory,
        Wish::Absent => Child::NoFile,
    }
}

impl Wishes {
    /// A key's wish.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&Entry> {
        self.entries.get(key)
    }

    /// Number of wishes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All, in order of keys.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Entry)> {
        self.entries.iter()
    }

    /// The key at which a stage is wished.
    #[must_use]
    pub fn key_of(&self, stage: StageId) -> Option<&Key> {
        self.by_stage.get(&stage)
    }

    /// Wishes below a prefix that ends with `/`, its marker's too; all for "".
    pub fn below<'a>(&'a self, prefix: &[u8]) -> impl Iterator<Item = (&'a Key, &'a Entry)> {
        let from = Bound::Included(Key::from(prefix));
        let to = match prefix {
            [] => Bound::Unbounded,
            p => Bound::Excluded(Key::from(key_after_subtree(p))),
        };
        self.entries.range((from, to))
    }

    /// Applies changes whole. With `acked` they are in the journal. Returns the
    /// sequence number of the last.
    pub fn apply(&mut self, changes: &[Change], acked: bool) -> u64 {
        for c in changes {
            let old = self.remove(&c.key);
            let Some(wish) = &c.wish else { continue };
            self.seq += 1;
            if let Wish::File { stage, .. } = wish {
                self.by_stage.insert(*stage, c.key.clone());
            }
            if let Wish::Copy { from, .. } = wish
                && from.key != c.key
            {
                *self.sources.entry(from.key.clone()).or_default() += 1;
            }
            let sent = self.in_flight.contains(&c.key) || old.is_some_and(|o| o.sent);
            let entry =
                Entry { wish: wish.clone(), base: c.base.clone(), seq: self.seq, acked, sent };
            self.entries.insert(c.key.clone(), entry);
        }
        self.seq
    }

    fn remove(&mut self, key: &Key) -> Option<Entry> {
        let old = self.entries.remove(key)?;
        match &old.wish {
            Wish::File { stage, .. } if self.by_stage.get(stage) == Some(key) => {
                self.by_stage.remove(stage);
            }
            Wish::Copy { from, .. } if from.key != *key => {
                if let Some(n) = self.sources.get_mut(&from.key) {
                    *n -= 1;
                    if *n == 0 {
                        self.sources.remove(&from.key);
                    }
                }
            }
            _ => {}
        }
        Some(old)
    }

    /// After a restart: what was begun may have reached the origin.
    pub fn recovered(&mut self) {
        for e in self.entries.values_mut() {
            e.sent = true;
        }
    }

    /// Whether other keys are to be copied from this one.
    #[must_use]
    pub fn is_source(&self, key: &Key) -> bool {
        self.sources.contains_key(key)
    }

    /// Whether a wish has to wait for others.
    #[must_use]
    pub fn is_blocked(&self, key: &Key) -> bool {
        let is_held = |h: &Key| key.as_bytes().starts_with(h.as_bytes());
        if self.in_flight.contains(key) || self.is_source(key) || self.held.iter().any(is_held) {
            return true;
        }
        let Some(e) = self.entries.get(key) else { return true };
        if e.wish != Wish::Absent && self.is_in_the_way_of(key) {
            return true;
        }
        match &e.wish {
            Wish::Absent if key.as_bytes().ends_with(b"/") => {
                self.below(key.as_bytes()).any(|(k, _)| k != key) || self.is_busy_below(key)
            }
            Wish::Copy { from, .. } => from.key != *key && self.in_flight.contains(&from.key),
            _ => false,
        }
    }

    /// Whether something of a directory that is to go is where a file is to be, or a
    /// file where a directory is to be: to go first, since listings show both as one.
    #[must_use]
    pub fn is_in_the_way_of(&self, key: &Key) -> bool {
        let k = key.as_bytes();
        if !k.ends_with(b"/") {
            let below = Key::from([k, b"/"].concat());
            if self.below(below.as_bytes()).next().is_some() || self.is_busy_below(&below) {
                return true;
            }
        }
        k.iter().enumerate().filter(|(_, b)| **b == b'/').any(|(i, _)| {
            let above = Key::from(&k[..i]);
            let goes = self.entries.get(&above).is_some_and(|e| e.wish == Wish::Absent);
            goes || self.in_flight.contains(&above)
        })
    }

    /// Nothing below a prefix goes out until [`Self::release`].
    pub fn hold(&mut self, prefix: &Key) {
        self.held.push(prefix.clone());
    }

    /// The end of one [`Self::hold`].
    pub fn release(&mut self, prefix: &Key) {
        if let Some(i) = self.held.iter().position(|h| h == prefix) {
            self.held.swap_remove(i);
        }
    }

    /// Whether a request for a key below a prefix is on its way.
    #[must_use]
    pub fn is_busy_below(&self, prefix: &Key) -> bool {
        self.in_flight.iter().any(|k| k.as_bytes().starts_with(prefix.as_bytes()))
    }

    /// A request for a key goes out now.
    pub fn begin(&mut self, key: &Key) {
        self.in_flight.insert(key.clone());
        if let Some(e) = self.entries.get_mut(key) {
            e.sent = true;
        }
    }

    /// The request has ended without a known result.
    pub fn gave_up(&mut self, key: &Key) {
        self.in_flight.remove(key);
    }

    /// The request has ended well, and the origin has this there now. Returns the
    /// change to be journalled: the wish of `seq` is settled, or a later one
    /// knows what it is to replace.
    pub fn settle(&mut self, key: &Key, seq: u64, has: Option<&Version>) -> Option<Change> {
        self.in_flight.remove(key);
        let base = has.map_or(Condition::Absent, |v| Condition::Version(v.clone()));
        let e = self.entries.get_mut(key)?;
        e.base = base.clone();
        e.sent = false;
        if e.seq == seq {
            self.remove(key);
            return Some(Change { key: key.clone(), wish: None, base });
        }
        if e.wish == Wish::Absent && has.is_none() {
            self.remove(key);
            return Some(Change { key: key.clone(), wish: None, base });
        }
        let e = self.entries.get(key)?;
        e.acked.then(|| Change { key: key.clone(), wish: Some(e.wish.clone()), base })
    }

    /// What is to be told to a key's wish by the origin's refusal: another base.
    pub fn rebase(&mut self, key: &Key, base: Condition) {
        if let Some(e) = self.entries.get_mut(key) {
            e.base = base;
            e.sent = false;
        }
    }

    /// The change that takes a name away: nothing is left to do where the origin
    /// never had it.
    #[must_use]
    pub fn removal(&self, key: &Key, origin_has: &Condition) -> Change {
        let (base, occupied) = match self.entries.get(key) {
            Some(e) => (e.base.clone(), e.is_occupied()),
            None => (origin_has.clone(), *origin_has != Condition::Absent),
        };
        let occupied = occupied || self.in_flight.contains(key);
        Change { key: key.clone(), wish: occupied.then_some(Wish::Absent), base }
    }

    /// The changes that move one key's wish, or the origin's object there, to
    /// another key. `replaced`: what the origin has at `to`, where there is no
    /// wish for it.
    #[must_use]
    pub fn moving(
        &self,
        from: &Key,
        object: Option<&ObjectMeta>,
        to: &Key,
        replaced: &Condition,
    ) -> Vec<Change> {
        let base = match self.entries.get(to) {
            Some(e) => e.base.clone(),
            None => replaced.clone(),
        };
        let (wish, there) = match (self.entries.get(from), object) {
            (Some(e), _) => (e.wish.clone(), Condition::Any),
            (None, Some(m)) => (
                Wish::Copy { from: m.clone(), attributes: Attributes::default() },
                Condition::Version(m.version.clone()),
            ),
            (None, None) => return Vec::new(),
        };
        vec![
            Change { key: to.clone(), wish: unless_there(to, wish), base },
            self.removal(from, &there),
        ]
    }

    /// The changes that move all that is below one prefix to another; both end
    /// with `/`. `objects`: what the origin has below the first. `replaces`: there
    /// is an empty directory at the second.
    #[must_use]
    pub fn moving_tree(
        &self,
        from: &Key,
        objects: &[ObjectMeta],
        to: &Key,
        replaces: bool,
    ) -> Vec<Change> {
        let moved = |k: &Key| -> Key {
            [to.as_bytes(), &k.as_bytes()[from.as_bytes().len()..]].concat().into()
        };
        let base = |k: &Key| match self.entries.get(k) {
            Some(e) => e.base.clone(),
            // The marker of an empty directory that is replaced may be there.
            None if replaces && k == to => Condition::Any,
            None => Condition::Absent,
        };
        let mut changes = Vec::new();
        for (k, e) in self.below(from.as_bytes()).filter(|(_, e)| e.wish != Wish::Absent) {
            let to = moved(k);
            let wish = unless_there(&to, e.wish.clone());
            changes.push(Change { base: base(&to), key: to, wish });
            changes.push(self.removal(k, &Condition::Absent));
        }
        for o in objects.iter().filter(|o| !self.entries.contains_key(&o.key)) {
            let there = Condition::Version(o.version.clone());
            let to = moved(&o.key);
            let is_marker = o.key.as_bytes().ends_with(b"/") && o.size == 0;
            let wish = if is_marker {
                Wish::Directory
            } else {
                Wish::Copy { from: o.clone(), attributes: Attributes::default() }
            };
            changes.push(Change { base: base(&to), key: to, wish: Some(wish) });
            changes.push(self.removal(&o.key, &there));
        }
        if !changes.is_empty() && !changes.iter().any(|c| c.key == *from) {
            // A directory without a marker: it is gone at once all the same.
            changes.push(self.removal(from, &Condition::Any));
        }
        changes
    }

    /// What the wishes make of a name below a prefix, if anything.
    #[must_use]
    pub fn child(&self, prefix: &[u8], name: &[u8]) -> Option<Child> {
        if self.entries.is_empty() {
            return None;
        }
        let file = Key::from([prefix, name].concat());
        let below = [prefix, name, b"/"].concat();
        let mut absent = false;
        for (k, e) in self.below(&below) {
            if e.wish != Wish::Absent {
                return Some(Child::Directory);
            }
            absent |= k.as_bytes() == below;
        }
        match self.entries.get(&file) {
            Some(e) if e.wish == Wish::Absent && absent => Some(Child::Nothing),
            Some(e) => Some(child_of(&e.wish)),
            None => absent.then_some(Child::NoDirectory),
        }
    }

    /// All names below a prefix of which the wishes make something.
    #[must_use]
    pub fn children(&self, prefix: &[u8]) -> Vec<(Box<[u8]>, Child)> {
        let mut names: Vec<Box<[u8]>> = Vec::new();
        let mut at = Key::from(prefix);
        // From name to name, not from key to key: a subtree may be large.
        while let Some((k, _)) =
            self.entries.range((Bound::Included(at.clone()), Bound::Unbounded)).next()
        {
            let Some(rest) = k.as_bytes().strip_prefix(prefix) else { break };
            if rest.is_empty() {
                // The directory's own marker.
                at = Key::from([k.as_bytes(), b"\0"].concat());
                continue;
            }
            let end = rest.iter().position(|b| *b == b'/');
            let name = &rest[..end.unwrap_or(rest.len())];
            names.push(name.into());
            at = match end {
                Some(_) => Key::from(key_after_subtree(&[prefix, name, b"/"].concat())),
                None => Key::from([k.as_bytes(), b"\0"].concat()),
            };
        }
        // `a`, `a.b`, `a/`: a name may come twice.
        names.sort_unstable();
        names.dedup();
        let child = |n: Box<[u8]>| self.child(prefix, &n).map(|c| (n, c));
        names.into_iter().filter_map(child).collect()
    }

    /// Whether a directory was made here and the origin knows nothing of it: what
    /// is in it is what is wished.
    #[must_use]
    pub fn is_new_directory(&self, prefix: &[u8]) -> bool {
        self.entries
            .get(&Key::from(prefix))
            .is_some_and(|e| e.wish == Wish::Directory && e.base == Condition::Absent && !e.sent)
    }
}

#[cfg(test)]
mod tests;

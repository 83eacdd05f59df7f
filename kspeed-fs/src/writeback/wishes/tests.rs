//! Wishes and journal against a model: a mount on which things are written, moved
//! and removed, an uploader that does anything that is not blocked in any order
//! and whose answers get lost, and a machine that loses what was not synced.

use std::collections::BTreeMap;
use std::sync::Arc;

use kspeed_cache::ObjectKind;
use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use crate::writeback::journal::{Journal, Log, Record, Writer, replay};

/// A log whose tail that was not synced may be lost.
#[derive(Clone, Default)]
struct Lossy(Arc<Mutex<(Vec<u8>, usize)>>);

impl Log for Lossy {
    fn append(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.0.lock().0.extend_from_slice(bytes);
        Ok(())
    }

    fn syncer(&self) -> std::io::Result<Box<dyn FnOnce() -> std::io::Result<()> + Send>> {
        let log = self.0.clone();
        Ok(Box::new(move || {
            let mut l = log.lock();
            l.1 = l.0.len();
            Ok(())
        }))
    }

    fn replace(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        *self.0.lock() = (bytes.to_vec(), bytes.len());
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Op {
    Write(u8),
    Remove(u8),
    Rename(u8, u8),
    RenameTree(bool),
    /// Begins one that is not blocked.
    Begin(u8),
    /// Ends one: done, and told; done, and not told; not done.
    End(u8, u8),
    Sync,
    /// Loses so many per cent of what is not synced.
    Crash(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let key = 0u8..8;
    prop_oneof![
        4 => key.clone().prop_map(Op::Write),
        2 => key.clone().prop_map(Op::Remove),
        3 => (key.clone(), key).prop_map(|(a, b)| Op::Rename(a, b)),
        1 => any::<bool>().prop_map(Op::RenameTree),
        4 => any::<u8>().prop_map(Op::Begin),
        4 => (any::<u8>(), 0u8..4).prop_map(|(a, b)| Op::End(a, b)),
        1 => Just(Op::Sync),
        1 => (0u8..=100).prop_map(Op::Crash),
    ]
}

/// Four keys in each of two trees.
fn key(n: u8) -> Key {
    format!("{}/{}", if n < 4 { "d" } else { "e" }, n % 4).into()
}

/// What is at a key: the number of a write.
type Contents = BTreeMap<Key, u64>;

struct World {
    log: Lossy,
    journal: Journal,
    wishes: Wishes,
    /// The bucket: content and version of each key.
    origin: BTreeMap<Key, (u64, u64)>,
    /// Stage files: all bytes are durable before they are promised.
    stages: BTreeMap<StageId, u64>,
    in_flight: Vec<(Key, Entry)>,
    /// What the user must see.
    view: Contents,
    /// The view after each record, by the length of the log.
    history: Vec<(usize, Contents)>,
    count: u64,
}

fn journal(log: &Lossy, replayed: &crate::writeback::journal::Replayed) -> Journal {
    let writer = Writer { origin: "o".into(), id: "j".into(), boot: "b".into() };
    Journal::begin(Box::new(log.clone()), writer, replayed).expect("journal")
}

impl World {
    fn new() -> Self {
        let log = Lossy::default();
        let journal = journal(&log, &Default::default());
        let origin: BTreeMap<Key, (u64, u64)> =
            (0..6).map(|n| (key(n), (u64::from(n), u64::from(n)))).collect();
        let view: Contents = origin.iter().map(|(k, (c, _))| (k.clone(), *c)).collect();
        let mut w = Self {
            log,
            journal,
            wishes: Wishes::default(),
            origin,
            stages: BTreeMap::new(),
            in_flight: Vec::new(),
            view,
            history: Vec::new(),
            count: 100,
        };
        w.remember();
        w
    }

    fn remember(&mut self) {
        self.history.push((self.log.0.lock().0.len(), self.view.clone()));
    }

    fn meta(&self, k: &Key) -> Option<ObjectMeta> {
        let (_, version) = self.origin.get(k)?;
        Some(ObjectMeta {
            key: k.clone(),
            size: 1,
            mtime_ns: 0,
            version: format!("v{version}").into(),
            kind: ObjectKind::File,
            mode: None,
        })
    }

    /// What the mount believes is in the origin: no wish stands for it.
    fn base(&self, k: &Key) -> Condition {
        self.meta(k).map_or(Condition::Absent, |m| Condition::Version(m.version))
    }

    fn change(&mut self, changes: &[Change]) {
        if changes.is_empty() {
            return;
        }
        self.journal.append(&Record::Set(changes.to_vec())).expect("append");
        self.wishes.apply(changes, true);
    }

    fn seen(&self) -> Contents {
        let mut out: Contents = self.origin.iter().map(|(k, (c, _))| (k.clone(), *c)).collect();
        for (k, e) in self.wishes.iter() {
            match &e.wish {
                Wish::File { stage, .. } => out.insert(k.clone(), self.stages[stage]),
                Wish::Copy { from, .. } => {
                    let (c, v) = self.origin[&from.key];
                    assert_eq!(*from.version.as_str(), format!("v{v}"), "copied from what it was");
                    out.insert(k.clone(), c)
                }
                Wish::Absent => out.remove(k),
                Wish::Directory => None,
            };
        }
        out
    }

    fn rename(&mut self, from: &Key, to: &Key) {
        // What the file system does: no copy to where another copies from.
        let staged = self.wishes.get(from).is_some_and(|e| matches!(e.wish, Wish::File { .. }));
        if from == to || !self.view.contains_key(from) || (!staged && self.wishes.is_source(to)) {
            return;
        }
        let base = self.base(to);
        let changes = self.wishes.moving(from, self.meta(from).as_ref(), to, &base);
        self.change(&changes);
        let content = self.view.remove(from).expect("it is there");
        self.view.insert(to.clone(), content);
    }

    fn rename_tree(&mut self, from: &str, to: &str) {
        let (from, to) = (Key::from(from), Key::from(to));
        if self.view.keys().any(|k| k.as_bytes().starts_with(to.as_bytes())) {
            return;
        }
        let objects: Vec<_> = self
            .origin
            .keys()
            .filter(|k| k.as_bytes().starts_with(from.as_bytes()))
            .filter_map(|k| self.meta(k))
            .collect();
        let mut changes = self.wishes.moving_tree(&from, &objects, &to, false);
        if changes
            .iter()
            .any(|c| matches!(c.wish, Some(Wish::Copy { .. })) && self.wishes.is_source(&c.key))
        {
            return;
        }
        // The origin may have something where only an absence is wished.
        for c in &mut changes {
            if self.wishes.get(&c.key).is_none()
                && c.wish.as_ref().is_some_and(|w| *w != Wish::Absent)
            {
                c.base = self.base(&c.key);
            }
        }
        self.change(&changes);
        for n in 0..4 {
            let name = |d: &Key| Key::from([d.as_bytes(), n.to_string().as_bytes()].concat());
            if let Some(c) = self.view.remove(&name(&from)) {
                self.view.insert(name(&to), c);
            }
        }
    }

    fn begin(&mut self, pick: u8) {
        let free: Vec<Key> = self
            .wishes
            .iter()
            .map(|(k, _)| k.clone())
            .filter(|k| !self.wishes.is_blocked(k))
            .collect();
        let Some(k) = free.get(usize::from(pick) % free.len().max(1)) else { return };
        let e = self.wishes.get(k).expect("it is there").clone();
        // As the uploader does: no effect before its promise is durable.
        self.journal.sync_all().expect("sync");
        self.wishes.begin(k);
        self.in_flight.push((k.clone(), e));
    }

    /// The origin does what is asked; its answer: the version there, if any.
    fn serve(&mut self, k: &Key, e: &Entry) -> Option<u64> {
        self.count += 1;
        let content = match &e.wish {
            Wish::File { stage, .. } => self.stages.get(stage).copied(),
            Wish::Copy { from, .. } => {
                let source = self.origin.get(&from.key);
                let as_it_was = source.filter(|(_, v)| *from.version.as_str() == format!("v{v}"));
                let Some((c, _)) = as_it_was else {
                    let current = self.wishes.get(k).is_some_and(|now| now.seq == e.seq);
                    assert!(!current, "the source of a copy that is wished is as it was");
                    return self.origin.get(k).map(|(_, v)| *v);
                };
                Some(*c)
            }
            Wish::Directory | Wish::Absent => None,
        };
        match content {
            Some(c) => {
                self.origin.insert(k.clone(), (c, self.count));
                Some(self.count)
            }
            None => {
                self.origin.remove(k);
                None
            }
        }
    }

    fn end(&mut self, pick: u8, how: u8) {
        if self.in_flight.is_empty() {
            return;
        }
        let n = usize::from(pick) % self.in_flight.len();
        let (k, e) = self.in_flight.swap_remove(n);
        match how {
            0 | 1 => {
                let version = self.serve(&k, &e).map(|v| Version::from(format!("v{v}")));
                if let Some(c) = self.wishes.settle(&k, e.seq, version.as_ref()) {
                    self.journal.append(&Record::Set(vec![c])).expect("append");
                }
            }
            2 => {
                self.serve(&k, &e);
                self.wishes.gave_up(&k);
            }
            _ => self.wishes.gave_up(&k),
        }
    }

    fn crash(&mut self, percent: u8) {
        // Requests on their way arrive or not.
        for (k, e) in std::mem::take(&mut self.in_flight) {
            if percent.is_multiple_of(2) {
                self.serve(&k, &e);
            }
        }
        let (bytes, synced) = self.log.0.lock().clone();
        let lost = (bytes.len() - synced) * usize::from(percent) / 100;
        let kept = &bytes[..bytes.len() - lost];
        let replayed = replay(kept, "b").expect("only the end is torn");
        // The last state whose record is there whole.
        let at = self.history.iter().rposition(|(len, _)| *len <= kept.len()).expect("the first");
        self.view = self.history[at].1.clone();
        self.journal = journal(&self.log, &replayed);
        self.wishes = replayed.wishes;
        self.history.clear();
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Write(n) => {
                let k = key(*n);
                self.count += 1;
                let stage = self.count;
                self.stages.insert(stage, self.count);
                let base = self.wishes.get(&k).map_or_else(|| self.base(&k), |e| e.base.clone());
                let wish = Wish::File { stage, attributes: Attributes::default(), durable: true };
                self.change(&[Change { key: k.clone(), wish: Some(wish), base }]);
                self.view.insert(k, self.count);
            }
            Op::Remove(n) => {
                let k = key(*n);
                if self.view.remove(&k).is_some() {
                    let change = self.wishes.removal(&k, &self.base(&k));
                    self.change(&[change]);
                }
            }
            Op::Rename(a, b) => self.rename(&key(*a), &key(*b)),
            Op::RenameTree(back) => {
                let (a, b) = if *back { ("e/", "d/") } else { ("d/", "e/") };
                self.rename_tree(a, b);
            }
            Op::Begin(n) => self.begin(*n),
            Op::End(n, how) => self.end(*n, *how),
            Op::Sync => self.journal.sync_all().expect("sync"),
            Op::Crash(percent) => self.crash(*percent),
        }
        self.remember();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Through the mount everything is seen as it was done, at each moment, also
    /// after a crash (of which only what was not synced is missing, from the end
    /// on); and in the end the origin has just that.
    #[test]
    fn the_origin_becomes_what_the_user_sees(ops in prop::collection::vec(op(), 1..80)) {
        let mut w = World::new();
        for op in &ops {
            w.apply(op);
            prop_assert_eq!(w.seen(), w.view.clone(), "after {:?}", op);
        }
        for round in 0.. {
            if w.wishes.is_empty() && w.in_flight.is_empty() {
                break;
            }
            prop_assert!(round < 1000, "nothing gets on: {:?}", w.wishes);
            w.begin(round as u8);
            w.end(round as u8, 0);
        }
        let origin: Contents = w.origin.iter().map(|(k, (c, _))| (k.clone(), *c)).collect();
        prop_assert_eq!(origin, w.view);
    }

    /// Names are those that a walk over all keys finds.
    #[test]
    fn children_are_what_a_walk_over_all_keys_finds(
        keys in prop::collection::btree_map("[ab./]{1,6}", any::<bool>(), 0..12),
    ) {
        let mut w = Wishes::default();
        for (k, absent) in &keys {
            let wish = match (*absent, k.ends_with('/')) {
                (true, _) => Wish::Absent,
                (_, true) => Wish::Directory,
                _ => Wish::File { stage: w.seq, attributes: Attributes::default(), durable: true },
            };
            let key = k.as_str().into();
            w.apply(&[Change { key, wish: Some(wish), base: Condition::Any }], true);
        }
        for prefix in ["", "a/", "a/b/", "b/"] {
            let mut names: Vec<&str> = keys
                .keys()
                .filter_map(|k| k.strip_prefix(prefix))
                .filter(|rest| !rest.is_empty())
                .map(|rest| rest.split('/').next().unwrap_or(rest))
                .collect();
            names.sort_unstable();
            names.dedup();
            let want: Vec<_> = names
                .iter()
                .filter_map(|n| Some((*n, w.child(prefix.as_bytes(), n.as_bytes())?)))
                .collect();
            let got = w.children(prefix.as_bytes());
            let got: Vec<_> = got
                .iter()
                .map(|(n, c)| (std::str::from_utf8(n).expect("text"), c.clone()))
                .collect();
            prop_assert_eq!(got, want);
        }
    }
}

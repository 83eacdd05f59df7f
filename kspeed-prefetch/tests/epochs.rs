//! Whole epochs against a simulated store: loaders with workers read, what is
//! asked for comes after the store's latency, and a read that finds its sample
//! there is a hit.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};

use kspeed_prefetch::order::{Recipe, Shuffle, rank_share};
use kspeed_prefetch::seed::{Found, Scan};
use kspeed_prefetch::{Conditions, Follower, Samples, Want};

const LATENCY_US: u64 = 21_000;
const IN_FLIGHT: usize = 192;
const BYTES: u64 = 110_000;
/// What a search for likely seeds takes.
const SEARCH_US: u64 = 300_000;
/// And a scan of all, where one is lucky.
const SCAN_US: u64 = 1_000_000;

/// Uses that the cache remembers.
const KEPT: usize = 6000;
/// Reading a file that is there.
const READ_US: u64 = 100;
/// Batches that PyTorch's workers are ahead of the trainer, each.
const PREFETCH_FACTOR: usize = 2;

/// A PyTorch DataLoader: batches are dealt out to the workers in turn, as far
/// ahead of the trainer as the prefetch factor allows; the trainer takes them in
/// order, and an epoch begins when the last has ended.
struct Loader {
    /// Batches of each epoch.
    epochs: Vec<Vec<Vec<u32>>>,
    workers: Vec<Turn>,
    epoch: usize,
    /// When each batch of the epoch was read, and when it was consumed.
    read: Vec<Option<u64>>,
    consumed: Vec<u64>,
    trainer_us: u64,
    interval_us: u64,
}

/// Where a worker is.
#[derive(Clone)]
struct Turn {
    batch: usize,
    at: usize,
    free_us: u64,
}

impl Loader {
    /// When each worker's next read may begin; none: it waits for the trainer.
    fn next(&self) -> Option<(u64, usize)> {
        let batches = self.epochs.get(self.epoch)?;
        let ahead = self.workers.len() * PREFETCH_FACTOR;
        let begins = |t: &Turn| match t.batch.checked_sub(ahead).filter(|_| t.at == 0) {
            None => Some(t.free_us),
            Some(i) => self.consumed.get(i).map(|c| t.free_us.max(*c)),
        };
        let ready = self.workers.iter().enumerate().filter(|(_, t)| t.batch < batches.len());
        ready.filter_map(|(i, t)| Some((begins(t)?, i))).min()
    }

    fn sample(&self, worker: usize) -> u32 {
        let t = &self.workers[worker];
        self.epochs[self.epoch][t.batch][t.at]
    }

    /// A worker has read its sample at `t`.
    fn done(&mut self, worker: usize, t: u64) {
        let count = self.workers.len();
        let turn = &mut self.workers[worker];
        turn.free_us = t + READ_US;
        turn.at += 1;
        if turn.at < self.epochs[self.epoch][turn.batch].len() {
            return;
        }
        self.read[turn.batch] = Some(turn.free_us);
        (turn.batch, turn.at) = (turn.batch + count, 0);
        while let Some(Some(there)) = self.read.get(self.consumed.len()) {
            let len = self.epochs[self.epoch][self.consumed.len()].len() as u64;
            self.trainer_us = self.trainer_us.max(*there) + len * self.interval_us;
            self.consumed.push(self.trainer_us);
        }
        if self.consumed.len() == self.read.len() {
            self.start(self.epoch + 1);
        }
    }

    fn start(&mut self, epoch: usize) {
        self.epoch = epoch;
        self.consumed.clear();
        self.read = vec![None; self.epochs.get(epoch).map_or(0, Vec::len)];
        for (i, t) in self.workers.iter_mut().enumerate() {
            *t = Turn { batch: i, at: 0, free_us: self.trainer_us };
        }
    }
}

struct World {
    samples: Samples,
    now: Conditions,
    /// When each sample was or will be there.
    ready: HashMap<u32, u64>,
    /// The cache: samples in the order of use, and each one's last.
    kept: VecDeque<(u32, u64)>,
    used: HashMap<u32, u64>,
    uses: u64,
    /// Orders followed at once.
    most: usize,
    slots: BinaryHeap<Reverse<u64>>,
    /// When each search ends, whether it is a scan, and what it finds.
    searches: Vec<(u64, bool, Option<Follower>)>,
    /// An unlikely seed that a deep search is told, so that a test need not scan.
    hidden: Option<u32>,
    /// Fetched ahead, once each time that it was not there.
    asked: usize,
    reads: usize,
    hits: usize,
    /// (reads, hits) since an order was followed.
    followed: (usize, usize),
}

impl World {
    fn new(n: u32) -> Self {
        Self {
            samples: Samples::new(n, BYTES, vec![None]),
            now: Conditions {
                latency_us: LATENCY_US,
                stream_bytes_per_s: 100_000_000,
                cache_bytes: u64::MAX,
                pressed: false,
            },
            ready: HashMap::new(),
            kept: VecDeque::new(),
            used: HashMap::new(),
            uses: 0,
            most: 0,
            slots: (0..IN_FLIGHT).map(|_| Reverse(0)).collect(),
            searches: Vec::new(),
            hidden: None,
            asked: 0,
            reads: 0,
            hits: 0,
            followed: (0, 0),
        }
    }

    fn carry_out(&mut self, wants: Vec<Want>, t: u64) {
        for w in wants {
            match w {
                Want::Bring(a) => {
                    if self.ready.contains_key(&a.sample) {
                        self.keep(a.sample);
                        continue;
                    }
                    self.asked += 1;
                    let Reverse(free) = self.slots.pop().expect("a slot");
                    let done = free.max(t) + LATENCY_US;
                    self.slots.push(Reverse(done));
                    self.ready.insert(a.sample, done);
                    self.keep(a.sample);
                }
                Want::Search(s) => {
                    let n = self.samples.len();
                    let follower = s.likely().and_then(|(_, f)| Follower::of(n, None, f));
                    self.searches.push((t + SEARCH_US, false, follower));
                }
                Want::Scan(s) => {
                    let found = self.hidden.and_then(|seed| {
                        let near = u64::from(seed) / 64 * 64;
                        Scan::new(s.observed[0].clone())?.run(near..near + 64)
                    });
                    let follower = found.and_then(|f| Follower::of(self.samples.len(), None, f));
                    self.searches.push((t + SCAN_US, true, follower));
                }
                Want::Global(_) | Want::Expect(_) | Want::ExpectAll => {}
            }
        }
    }

    fn keep(&mut self, sample: u32) {
        self.uses += 1;
        self.kept.push_back((sample, self.uses));
        self.used.insert(sample, self.uses);
        if self.kept.len() > KEPT
            && let Some((old, use_of)) = self.kept.pop_front()
            && self.used.get(&old) == Some(&use_of)
        {
            self.ready.remove(&old);
        }
    }

    fn read(&mut self, sample: u32, t: u64) -> u64 {
        for i in (0..self.searches.len()).rev() {
            if self.searches[i].0 <= t {
                let (_, scan, f) = self.searches.remove(i);
                let wants = match scan {
                    true => self.samples.scanned(f, t, self.now),
                    false => self.samples.found(f, t, self.now),
                };
                self.carry_out(wants, t);
            }
        }
        let following = self.samples.is_following();
        let ready = self.ready.get(&sample).copied();
        let hit = ready.is_some_and(|r| r <= t);
        self.keep(sample);
        self.most = self.most.max(self.samples.outlook().len());
        self.reads += 1;
        self.hits += usize::from(hit);
        if following {
            self.followed.0 += 1;
            self.followed.1 += usize::from(hit);
        }
        let wants = self.samples.read(sample, t, self.now);
        self.carry_out(wants, t);
        ready.map_or(t + LATENCY_US, |r| r.max(t))
    }

    /// Until all have ended; when the last did.
    fn run(&mut self, mut loaders: Vec<Loader>) -> u64 {
        let turn = |l: &[Loader]| {
            let next = l.iter().enumerate().filter_map(|(i, l)| Some((l.next()?, i)));
            next.min().map(|((t, w), i)| (t, i, w))
        };
        while let Some((t, i, w)) = turn(&loaders) {
            let there = self.read(loaders[i].sample(w), t);
            loaders[i].done(w, there);
        }
        loaders.iter().map(|l| l.trainer_us).max().unwrap_or(0)
    }

    fn rate_following(&self) -> f64 {
        self.followed.1 as f64 / self.followed.0.max(1) as f64
    }
}

/// The loader of a rank over some epochs. `interval_us`: what the trainer takes
/// for a sample.
fn loader(
    orders: &[Vec<u32>],
    world: u32,
    rank: u32,
    workers: usize,
    batch: usize,
    interval_us: u64,
) -> Loader {
    let share = |o: &Vec<u32>| -> Vec<Vec<u32>> {
        rank_share(o, world, rank, false).chunks(batch).map(<[u32]>::to_vec).collect()
    };
    let mut l = Loader {
        epochs: orders.iter().map(share).collect(),
        workers: vec![Turn { batch: 0, at: 0, free_us: 0 }; workers],
        epoch: 0,
        read: Vec::new(),
        consumed: Vec::new(),
        trainer_us: 0,
        interval_us,
    };
    l.start(0);
    l
}

fn epochs(n: u32, recipe: Recipe, count: u64) -> Vec<Vec<u32>> {
    (0..count).map(|e| recipe.order(n, e).expect("known")).collect()
}

fn seeded(seed: u64) -> Recipe {
    Recipe::SeedPlusEpoch { shuffle: Shuffle::Torch, seed }
}

#[test]
fn an_epoch_with_a_likely_seed_is_there_before_it_is_read() {
    for (recipe, workers) in [(seeded(42), 4), (Recipe::TorchGlobal { seed: 0 }, 8), (seeded(0), 1)]
    {
        let n = 20_000;
        let mut w = World::new(n);
        let took = w.run(vec![loader(&epochs(n, recipe, 2), 1, 0, workers, 64, 230)]);
        let ideal = 230 * 40_000;
        assert!(w.rate_following() > 0.97, "{recipe:?}: {}", w.rate_following());
        assert!(took < ideal * 11 / 10, "{recipe:?}: {took} of {ideal}");
        // And half a window of an epoch that does not come.
        assert!(w.asked < 42_000, "{}", w.asked);
    }
}

#[test]
fn ranks_on_one_node_of_several_are_told_apart() {
    let n = 40_000;
    let mut w = World::new(n);
    let orders = epochs(n, seeded(7), 2);
    w.run(vec![loader(&orders, 8, 2, 4, 32, 460), loader(&orders, 8, 3, 4, 32, 460)]);
    assert!(w.rate_following() > 0.97, "{}", w.rate_following());
    let o = &w.samples.outlook()[0];
    assert_eq!((o.ranks_here, o.world), (2, 8), "{o:?}");
    // Before the ranks are known some places of others are fetched.
    assert!(w.asked < w.reads * 13 / 10, "{} of {}", w.asked, w.reads);
}

#[test]
fn a_scanned_seed_is_followed_to_its_end() {
    let n = 20_000;
    let recipe = Recipe::Alone { seed: 3_141_592_653 };
    let mut w = World::new(n);
    w.hidden = Some(3_141_592_653);
    w.run(vec![loader(&epochs(n, recipe, 1), 1, 0, 4, 64, 230)]);
    assert!(w.rate_following() > 0.97, "{}", w.rate_following());
}

#[test]
fn a_told_order_is_there_from_the_first_sample_on() {
    let n = 20_000;
    let order = Shuffle::Python.permutation(n, 123_456_789_000);
    let mut w = World::new(n);
    let wants = w.samples.told("job", Follower::told(n, order.clone()), w.now);
    w.carry_out(wants, 0);
    w.run(vec![loader(&[order], 1, 0, 4, 64, 230)]);
    assert!(w.rate_following() > 0.97, "{}", w.rate_following());
    assert!(w.asked <= n as usize);
}

#[test]
fn two_jobs_on_one_dataset_are_both_followed() {
    let n = 20_000;
    let mut w = World::new(n);
    let jobs = [1, 1234].map(|s| loader(&epochs(n, seeded(s), 2), 1, 0, 4, 64, 460));
    w.run(jobs.into());
    assert_eq!(w.most, 2);
    assert!(w.rate_following() > 0.9, "{}", w.rate_following());
    assert!(w.asked < w.reads * 11 / 10, "{} of {}", w.asked, w.reads);
}

#[test]
fn skipped_samples_are_borne() {
    let n = 20_000;
    let mut w = World::new(n);
    // An augmentation that leaves out every seventh sample.
    let orders: Vec<Vec<u32>> = epochs(n, seeded(42), 2)
        .into_iter()
        .map(|o| o.into_iter().filter(|s| s % 7 != 3).collect())
        .collect();
    w.run(vec![loader(&orders, 1, 0, 4, 64, 230)]);
    assert!(w.rate_following() > 0.97, "{}", w.rate_following());
}

#[test]
fn an_order_that_changes_in_mid_epoch_is_left_at_once() {
    let n = 20_000;
    let mut w = World::new(n);
    let mut order = epochs(n, seeded(42), 1).remove(0);
    let other = Shuffle::Torch.permutation(n, 2_718_281_828);
    let read: HashSet<u32> = order[..5000].iter().copied().collect();
    order.truncate(5000);
    order.extend(other.into_iter().filter(|s| !read.contains(s)));
    w.run(vec![loader(&[order], 1, 0, 4, 64, 230)]);
    assert!(!w.samples.is_following());
    let window = (256 << 20) / BYTES as usize;
    assert!(w.asked < 5000 + window + 500, "{}", w.asked);
}

#[test]
fn random_and_sequential_readers_are_not_predicted() {
    let n = 20_000u32;
    let mut w = World::new(n);
    let mut x = 1u64;
    let random: Vec<u32> = (0..40_000)
        .map(|_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((x >> 33) % u64::from(n)) as u32
        })
        .collect();
    w.hidden = Some(1);
    w.run(vec![loader(&[random], 1, 0, 1, 64, 230)]);
    assert_eq!(w.asked, 0);
    let mut w = World::new(n);
    w.run(vec![loader(&[(0..n).collect()], 1, 0, 4, 64, 230)]);
    assert_eq!(w.asked, 0);
}

#[test]
fn an_order_found_by_a_recipe_goes_on_into_the_next_epochs() {
    let n = 5000;
    let found = Found { recipe: Recipe::TorchGenerator { seed: 9 }, epoch: 0, nats: 50.0 };
    let mut w = World::new(n);
    let f = Follower::of(n, None, found).expect("an order");
    let wants = w.samples.found(Some(f), 0, w.now);
    w.carry_out(wants, 0);
    w.run(vec![loader(&epochs(n, found.recipe, 4), 1, 0, 2, 32, 400)]);
    assert!(w.rate_following() > 0.98, "{}", w.rate_following());
    assert!(w.samples.outlook()[0].predictor.contains("epoch 3"), "{:?}", w.samples.outlook());
}

//! Datasets of a mount: finds out which directory is being read in a shuffled
//! order, numbers its files, and carries out what their predictor wants.
//!
//! Lock order: `inner` → a dataset's `samples`. Neither is held across an await.

mod catalog;
mod search;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kspeed_cache::origin::Origin;
use kspeed_cache::tier::Expected;
use kspeed_cache::{Cache, CachedObject};
use kspeed_prefetch::order::Recipe;
use kspeed_prefetch::seed::Found;
use kspeed_prefetch::{Ahead, Conditions, Follower, Samples, Search, Want};
use parking_lot::{Mutex, RwLock};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use catalog::{Catalog, CatalogError};
pub use search::CpuShare;

use crate::errno::FsError;
use crate::namespace::{Ino, Namespace, ROOT};
use crate::push::Pusher;

/// Files whose first bytes were read, by which a dataset is recognised.
const RECENT: usize = 64;
const ENOUGH: usize = 16;
/// So many of them in a hundred must be below the directory.
const BELOW_PERCENT: usize = 90;
/// Files read next to each other in a directory: a sequential reader.
const NEIGHBOURS: u64 = 16;
/// Datasets followed in one mount.
const MAX_DATASETS: usize = 8;
/// Directories that are numbered in vain before no more is tried.
const MAX_BUILDS: u32 = 32;
/// Reads remembered while a dataset is numbered.
const MAX_PENDING: usize = 65_536;
/// Of larger files only the beginning is fetched, and only if they were told.
pub const SAMPLE_MAX_BYTES: u64 = 64 << 20;
const SHARD_HEAD_BYTES: u64 = 16 << 20;
/// A pushed file whose read reaches us was dropped by the kernel: so many files
/// are not pushed then.
const RECLAIMED_PAUSE: u32 = 1024;
const RECLAIMED_AFTER: Duration = Duration::from_millis(500);
/// Pushes that fail because the kernel does not know the inode, after which only
/// one in so many is tried.
const REFUSED: u32 = 16;
const RETRY_EVERY: u32 = 64;

/// What a mount's datasets work with.
pub struct Parts {
    /// Names.
    pub names: Namespace,
    /// Cache.
    pub cache: Cache,
    /// Origin.
    pub origin: Arc<dyn Origin>,
    /// Pushes into the page cache, on read-only mounts.
    pub pusher: Option<Arc<Pusher>>,
    /// Where tasks run.
    pub runtime: Handle,
    /// Memory that numbers and orders may take, in bytes.
    pub memory_bytes: u64,
    /// What scans may take.
    pub share: CpuShare,
}

/// One dataset.
struct Dataset {
    catalog: Catalog,
    samples: Mutex<Samples>,
    /// Reads while an order was followed, and those whose bytes were there.
    reads: AtomicU64,
    ready: AtomicU64,
    fetched: AtomicU64,
    /// When each was pushed that was not seen since.
    pushed: Mutex<HashMap<u32, Instant>>,
    pause: AtomicU32,
    refused: AtomicU32,
}

#[derive(Default)]
struct Inner {
    recent: VecDeque<(Ino, Ino)>,
    pending: Vec<(Ino, bool)>,
    building: bool,
    builds: u32,
    /// Directories that could not be numbered: listing them again would cost the
    /// same and fail again.
    failed: HashSet<Ino>,
}

/// A dataset's state, as `kspeed status` shows it.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct DatasetStatus {
    /// Path below the mountpoint.
    pub path: String,
    /// Files.
    pub files: u64,
    /// What steers.
    pub predictor: String,
    /// How much better than chance it explained the reads when it was found, in
    /// nats.
    pub confidence_nats: Option<f64>,
    /// Of the last reads, the part that was where it was expected, 0 to 1.
    pub fits: f64,
    /// Part of the epoch that is over, 0 to 1.
    pub epoch_done: f64,
    /// Ranks reading here, and in all, as far as known.
    pub ranks_here: u32,
    /// Ranks in all.
    pub world: u32,
    /// Reads since an order is followed: those that reached the daemon, and those
    /// of pushed files by the reader's progress.
    pub reads: u64,
    /// Of these, the part that did not wait for the origin, 0 to 1.
    pub hit_rate: f64,
}

/// Counters of all datasets of a mount.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Reads while an order was followed.
    pub reads: u64,
    /// Of these, with their bytes on this node.
    pub ready: u64,
    /// Files fetched ahead.
    pub fetched: u64,
}

/// An order told by a trainer.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Told {
    /// Places in the list of files, in the order of reading; empty: as listed.
    Order(Vec<u32>),
    /// torch.randperm of the list with seed + epoch, as `DistributedSampler` has
    /// it; the next epochs follow by themselves.
    Seed {
        /// Seed of epoch 0.
        seed: u64,
        /// The epoch that begins.
        epoch: u64,
    },
}

struct Shared {
    parts: Parts,
    tasks: TaskTracker,
    stop: CancellationToken,
    known: RwLock<Vec<Arc<Dataset>>>,
    inner: Mutex<Inner>,
    bring: mpsc::UnboundedSender<(Arc<Dataset>, Ahead)>,
    began: Instant,
    /// No more directories are numbered: too many were in vain.
    off: AtomicBool,
}

/// See the module. Clones share it.
#[derive(Clone)]
pub struct Datasets(Arc<Shared>);

impl Datasets {
    /// Watches nothing yet.
    #[must_use]
    pub fn new(parts: Parts, tasks: TaskTracker, stop: CancellationToken) -> Self {
        let (bring, asked) = mpsc::unbounded_channel();
        let this = Self(Arc::new(Shared {
            parts,
            tasks,
            stop,
            known: RwLock::default(),
            inner: Mutex::default(),
            bring,
            began: Instant::now(),
            off: AtomicBool::new(false),
        }));
        this.spawn(bring_in_turn(Arc::downgrade(&this.0), asked));
        this
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let stop = self.0.stop.clone();
        let work = async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = work => {}
            }
        };
        self.0.tasks.spawn_on(work, &self.0.parts.runtime);
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.0.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// The first bytes of a file were read, or the file was opened; `ready`: they
    /// were on this node.
    pub fn on_sample(&self, ino: Ino, ready: bool) {
        if self.0.off.load(Ordering::Relaxed) && self.0.known.read().is_empty() {
            return;
        }
        if self.known(ino, ready) {
            return;
        }
        let Some((parent, _)) = self.0.parts.names.parent_and_name(ino) else { return };
        let root = {
            let mut inner = self.0.inner.lock();
            if inner.building {
                if inner.pending.len() < MAX_PENDING {
                    inner.pending.push((ino, ready));
                }
                return;
            }
            inner.recent.push_back((ino, parent));
            if inner.recent.len() > RECENT {
                inner.recent.pop_front();
            }
            if inner.recent.len() < ENOUGH {
                return;
            }
            if self.is_sequential(&inner.recent) {
                // Looked at again after as many: a look costs something.
                inner.recent.clear();
                return;
            }
            let Some(root) = self.root_of(&inner.recent) else { return };
            if inner.failed.contains(&root) {
                inner.recent.clear();
                return;
            }
            inner.builds += 1;
            if inner.builds > MAX_BUILDS {
                self.0.off.store(true, Ordering::Relaxed);
                inner.recent.clear();
                return;
            }
            inner.building = true;
            inner.pending = inner.recent.drain(..).map(|(i, _)| (i, ready)).collect();
            root
        };
        let this = self.clone();
        self.spawn(async move {
            let built = this.build(root).await;
            if let Err(e) = &built {
                tracing::info!(error = %e, "a shuffled dataset is not followed");
            }
            let pending = {
                let mut inner = this.0.inner.lock();
                inner.building = false;
                if built.is_err() {
                    inner.failed.insert(root);
                }
                std::mem::take(&mut inner.pending)
            };
            for (ino, ready) in pending {
                this.known(ino, ready);
            }
        });
    }

    /// Whether the file is a known dataset's; then its predictor is told.
    fn known(&self, ino: Ino, ready: bool) -> bool {
        let known = self.0.known.read().clone();
        for d in known {
            if let Some(n) = d.catalog.number(&self.0.parts.names, ino) {
                self.read(&d, n, ready);
                return true;
            }
        }
        false
    }

    /// Whether an order is followed in the dataset that the file is of.
    #[must_use]
    pub fn steers(&self, ino: Ino) -> bool {
        let known = self.0.known.read();
        known.iter().any(|d| {
            d.samples.lock().is_following() && d.catalog.number(&self.0.parts.names, ino).is_some()
        })
    }

    fn read(&self, d: &Arc<Dataset>, n: u32, ready: bool) {
        // One on its way while it was pushed is no sign.
        if d.pushed.lock().remove(&n).is_some_and(|t| t.elapsed() > RECLAIMED_AFTER) {
            d.pause.store(RECLAIMED_PAUSE, Ordering::Relaxed);
        }
        let (now_us, now) = (self.now_us(), self.conditions());
        let wants = {
            let mut s = d.samples.lock();
            if s.is_following() {
                d.reads.fetch_add(1, Ordering::Relaxed);
                d.ready.fetch_add(u64::from(ready), Ordering::Relaxed);
            }
            s.read(n, now_us, now)
        };
        self.carry_out(d, wants);
    }

    fn conditions(&self) -> Conditions {
        self.0.parts.conditions()
    }

    /// Whether the files follow each other in their directories.
    fn is_sequential(&self, recent: &VecDeque<(Ino, Ino)>) -> bool {
        let places: Vec<_> =
            recent.iter().filter_map(|(i, _)| self.0.parts.names.place(*i)).collect();
        let near = places
            .windows(2)
            .filter(|w| w[0].0 == w[1].0 && w[0].1.abs_diff(w[1].1) <= NEIGHBOURS)
            .count();
        near * 2 > recent.len()
    }

    /// The deepest directory that most of these files are below.
    fn root_of(&self, recent: &VecDeque<(Ino, Ino)>) -> Option<Ino> {
        let mut below: HashMap<Ino, (usize, usize)> = HashMap::new();
        for (_, parent) in recent {
            let mut chain = vec![*parent];
            while let Some(last) = chain.last().filter(|i| **i != ROOT)
                && let Some((up, _)) = self.0.parts.names.parent_and_name(*last)
            {
                chain.push(up);
            }
            for (depth, dir) in chain.iter().rev().enumerate() {
                let slot = below.entry(*dir).or_insert((0, depth));
                slot.0 += 1;
            }
        }
        below
            .into_iter()
            .filter(|(_, (count, _))| count * 100 >= recent.len() * BELOW_PERCENT)
            .max_by_key(|(_, (_, depth))| *depth)
            .map(|(dir, _)| dir)
    }

    /// Numbers the files below a directory, and watches them from then on.
    async fn build(&self, root: Ino) -> Result<Arc<Dataset>, CatalogError> {
        let parts = &self.0.parts;
        if let Some(d) = self.0.known.read().iter().find(|d| d.catalog.root == root) {
            return Ok(d.clone());
        }
        let began = Instant::now();
        let catalog = Catalog::build(&parts.names, root, parts.memory_bytes).await?;
        tracing::info!(
            path = catalog.path,
            files = catalog.len(),
            took = ?began.elapsed(),
            "a dataset is watched"
        );
        let d = Arc::new(Dataset {
            samples: Mutex::new(Samples::new(catalog.len(), catalog.mean_bytes(), catalog.views())),
            catalog,
            reads: AtomicU64::new(0),
            ready: AtomicU64::new(0),
            fetched: AtomicU64::new(0),
            pushed: Mutex::default(),
            pause: AtomicU32::new(0),
            refused: AtomicU32::new(0),
        });
        let mut known = self.0.known.write();
        // What lies in the new one is part of it; the oldest goes.
        known.retain(|k| !self.is_below(k.catalog.root, root));
        if known.len() >= MAX_DATASETS {
            known.remove(0);
        }
        known.push(d.clone());
        Ok(d)
    }

    fn is_below(&self, dir: Ino, root: Ino) -> bool {
        let mut at = dir;
        while at != root {
            match self.0.parts.names.parent_and_name(at) {
                Some((up, _)) if at != ROOT => at = up,
                _ => return false,
            }
        }
        true
    }

    fn carry_out(&self, d: &Arc<Dataset>, wants: Vec<Want>) {
        for w in wants {
            match w {
                Want::Bring(a) => drop(self.0.bring.send((d.clone(), a))),
                Want::Expect(p) => {
                    self.expect(d, p.sample, p.next.map_or(Expected::Late, Expected::At));
                }
                Want::ExpectAll => self.search(d, "kspeed-expect", |this, d| {
                    for n in 0..d.catalog.len() {
                        if this.0.stop.is_cancelled() {
                            return;
                        }
                        let next = {
                            let s = d.samples.lock();
                            match (s.is_following(), s.when(n)) {
                                (false, _) => Expected::Unknown,
                                (true, None) => Expected::Late,
                                (true, Some(t)) => Expected::At(t),
                            }
                        };
                        this.expect(d, n, next);
                    }
                }),
                Want::Search(s) => self.search(d, "kspeed-seeds", move |this, d| {
                    let (n, views) = (d.catalog.len(), d.catalog.views());
                    let f = search::likely(&s, n, &views);
                    this.found(d, f, Samples::found);
                }),
                Want::Scan(s) => self.search(d, "kspeed-scan", move |this, d| this.scan(d, s)),
                Want::Global(seed) => self.search(d, "kspeed-scan", move |this, d| {
                    let globals = search::globals(seed, this.0.parts.share, &this.0.stop);
                    d.samples.lock().inherits(seed, &globals);
                }),
            }
        }
    }

    fn expect(&self, d: &Dataset, sample: u32, next: Expected) {
        let parts = &self.0.parts;
        if let Some((_, meta)) = d.catalog.file(&parts.names, sample) {
            parts.cache.expect(&parts.origin, &meta, next);
        }
    }

    fn scan(&self, d: &Arc<Dataset>, s: Search) {
        let began = Instant::now();
        tracing::info!(path = d.catalog.path, "no likely seed explains the reads: all are scanned");
        let (n, views) = (d.catalog.len(), d.catalog.views());
        let f = search::scan(s, n, &views, self.0.parts.share, &self.0.stop);
        tracing::info!(path = d.catalog.path, found = f.is_some(), took = ?began.elapsed(), "scanned");
        self.found(d, f, Samples::scanned);
    }

    fn found(
        &self,
        d: &Arc<Dataset>,
        f: Option<Follower>,
        tell: fn(&mut Samples, Option<Follower>, u64, Conditions) -> Vec<Want>,
    ) {
        if let Some(f) = &f {
            tracing::info!(path = d.catalog.path, order = f.describe(), "an order is followed");
        }
        let wants = tell(&mut d.samples.lock(), f, self.now_us(), self.conditions());
        self.carry_out(d, wants);
    }

    /// Runs in a thread of its own: it computes for long, and its priority is
    /// lowered for good.
    fn search(
        &self,
        d: &Arc<Dataset>,
        name: &str,
        work: impl FnOnce(&Self, &Arc<Dataset>) + Send + 'static,
    ) {
        let (this, dataset) = (self.clone(), d.clone());
        // Counted with the tasks, so that shutdown waits for it.
        let token = self.0.tasks.token();
        let spawned = std::thread::Builder::new().name(name.into()).spawn(move || {
            work(&this, &dataset);
            drop(token);
        });
        if let Err(e) = spawned {
            tracing::warn!(error = %e, "no thread for a search");
        }
    }

    /// An order is told: of files below the mountpoint, in the list's order or as
    /// `told` says. It replaces the order told before under this name. Returns
    /// how many of the files are known.
    ///
    /// # Errors
    /// A directory can't be listed, or has too many files.
    pub async fn hint(
        &self,
        id: &str,
        files: &[String],
        told: &Told,
    ) -> Result<usize, CatalogError> {
        let prefix = common_directory(files);
        let root = self.resolve(prefix.as_bytes()).await?;
        let d = self.build(root).await?;
        let names = &self.0.parts.names;
        let numbers: Vec<Option<u32>> = files
            .iter()
            .map(|f| d.catalog.number_of_path(names, &f.as_bytes()[prefix.len()..]))
            .collect();
        let found = numbers.iter().flatten().count();
        let n = d.catalog.len();
        let follower = match told {
            Told::Order(places) if places.is_empty() => {
                Some(Follower::told(n, numbers.into_iter().flatten().collect()))
            }
            Told::Order(places) => {
                let at = |p: &u32| numbers.get(*p as usize).copied().flatten();
                Some(Follower::told(n, places.iter().filter_map(at).collect()))
            }
            Told::Seed { seed, epoch } => {
                let view = numbers.into_iter().map(|n| n.unwrap_or(u32::MAX)).collect();
                let recipe = Recipe::SeedPlusEpoch {
                    shuffle: kspeed_prefetch::order::Shuffle::Torch,
                    seed: *seed,
                };
                let found = Found { recipe, epoch: *epoch, nats: f64::INFINITY };
                Follower::of(n, Some(view), found)
            }
        };
        if let Some(f) = follower {
            let wants = d.samples.lock().told(id, f, self.conditions());
            self.carry_out(&d, wants);
        }
        Ok(found)
    }

    async fn resolve(&self, path: &[u8]) -> Result<Ino, FsError> {
        let mut at = ROOT;
        for name in path.split(|b| *b == b'/').filter(|c| !c.is_empty()) {
            let next = self.0.parts.names.lookup(at, name).await?.attr.ino;
            self.0.parts.names.forget(next, 0);
            at = next;
        }
        Ok(at)
    }

    /// For `kspeed status`.
    #[must_use]
    pub fn status(&self) -> Vec<DatasetStatus> {
        let known = self.0.known.read().clone();
        known
            .iter()
            .flat_map(|d| {
                let outlooks = d.samples.lock().outlook();
                let (reads, ready) = d.judged(outlooks.iter().map(|o| o.passed).sum());
                outlooks.into_iter().map(move |o| DatasetStatus {
                    path: d.catalog.path.clone(),
                    files: d.catalog.len().into(),
                    predictor: o.predictor,
                    confidence_nats: o.nats,
                    fits: o.fits,
                    epoch_done: o.done,
                    ranks_here: o.ranks_here,
                    world: o.world,
                    reads,
                    hit_rate: ready as f64 / reads.max(1) as f64,
                })
            })
            .collect()
    }

    /// Sums over all datasets.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let known = self.0.known.read();
        known.iter().fold(Counts::default(), |c, d| {
            let (reads, ready) = d.judged(d.samples.lock().passed());
            Counts {
                reads: c.reads + reads,
                ready: c.ready + ready,
                fetched: c.fetched + d.fetched.load(Ordering::Relaxed),
            }
        })
    }
}

impl Parts {
    fn conditions(&self) -> Conditions {
        let stats = self.cache.stats().snapshot();
        Conditions {
            latency_us: stats.latency_us,
            stream_bytes_per_s: stats.stream_bytes_per_s,
            cache_bytes: self.cache.capacity_bytes(),
            pressed: self.cache.is_pressed(),
        }
    }
}

/// Brings in what is asked for, in that order: each fetch waits for a request
/// slot, and the next for it.
async fn bring_in_turn(
    shared: std::sync::Weak<Shared>,
    mut asked: mpsc::UnboundedReceiver<(Arc<Dataset>, Ahead)>,
) {
    while let Some((d, a)) = asked.recv().await {
        let Some(s) = shared.upgrade() else { return };
        let Some((ino, meta)) = d.catalog.file(&s.parts.names, a.sample) else { continue };
        // Of a shard its beginning: from there on it is a stream.
        let end = if meta.size > SAMPLE_MAX_BYTES { SHARD_HEAD_BYTES } else { meta.size };
        let o = s.parts.cache.object(&s.parts.origin, &meta);
        s.parts.cache.expect(&s.parts.origin, &meta, Expected::At(a.at));
        if !o.has(0..end) {
            d.fetched.fetch_add(1, Ordering::Relaxed);
            o.prefetch(0..end).await;
        }
        if a.push && end == meta.size && d.may_push(a.sample) && is_known(&s.parts.names, ino) {
            let this = Datasets(s.clone());
            this.spawn(push(d, ino, a.sample, o, s));
        }
    }
}

async fn push(d: Arc<Dataset>, ino: Ino, sample: u32, o: Arc<CachedObject>, s: Arc<Shared>) {
    let Some(p) = &s.parts.pusher else { return };
    if p.push(ino, &o).await {
        d.pushed.lock().insert(sample, Instant::now());
        d.refused.store(0, Ordering::Relaxed);
    } else {
        d.refused.fetch_add(1, Ordering::Relaxed);
    }
}

/// Whether the kernel may have looked an inode up.
fn is_known(names: &Namespace, ino: Ino) -> bool {
    match names {
        Namespace::Live(_) => names.attr(ino).is_ok(),
        Namespace::Snapshot(_) => true,
    }
}

impl Dataset {
    /// Reads since an order is followed, and those that did not wait; `passed`:
    /// samples by the reader's progress.
    fn judged(&self, passed: u64) -> (u64, u64) {
        let reads = self.reads.load(Ordering::Relaxed);
        let late = reads - self.ready.load(Ordering::Relaxed).min(reads);
        let all = reads.max(passed);
        (all, all - late)
    }

    /// Not what is in the page cache still, as far as we know; not while the
    /// kernel drops what was pushed, and hardly where it does not know the inodes.
    fn may_push(&self, sample: u32) -> bool {
        if self.pushed.lock().contains_key(&sample) {
            return false;
        }
        let paused = self
            .pause
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |p| p.checked_sub(1))
            .is_ok();
        let refused = self.refused.load(Ordering::Relaxed);
        if refused >= REFUSED && !refused.is_multiple_of(RETRY_EVERY) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        !paused
    }
}

/// The longest directory prefix of all paths, with its `/`.
fn common_directory(files: &[String]) -> String {
    let Some(first) = files.first() else { return String::new() };
    let mut len = first.rfind('/').map_or(0, |i| i + 1);
    for f in files {
        while !f.as_bytes().starts_with(&first.as_bytes()[..len]) {
            len = first[..len.saturating_sub(1)].rfind('/').map_or(0, |i| i + 1);
        }
    }
    first[..len].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_common_directory_of_paths() {
        let of = |paths: &[&str]| {
            common_directory(&paths.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(of(&["train/a/1", "train/b/2"]), "train/");
        assert_eq!(of(&["train/a/1", "train/a/2"]), "train/a/");
        assert_eq!(of(&["train/a1/x", "train/a2/x"]), "train/");
        assert_eq!(of(&["1", "train/b"]), "");
        assert_eq!(of(&[]), "");
    }
}

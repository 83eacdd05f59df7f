//! Shuffled epochs from a far store: the order is recovered, or told.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kspeed_cache::tier::policy::simulation::{Access, hits as policy_hits, optimum};
use kspeed_cache::tier::{EvictionPolicy, Expected, Lru, NextUse, Sieve};
use kspeed_prefetch::order::{Recipe, Shuffle};

use super::cold::{parallel_gets, runtime};
use crate::Result;
use crate::loader::Loader;
use crate::measure::{files, median};
use crate::report::Row;
use crate::world::{Mount, Server, Setup, Shape, small_files};

const WORKERS: usize = 4;
const BATCH: usize = 64;
/// What a cached file takes beside its bytes.
const RECORD_BYTES: f64 = 52.0;
/// GETs at once that the store's rate for these files is measured with.
const GETS: usize = 192;
/// 20 ms, 100 MB/s a connection, 800 MB/s.
const SHAPE: Shape =
    Shape { latency_ms: 20, connection_rate: Some(100_000_000), total_rate: Some(800_000_000) };

struct Bench {
    server: Server,
    dir: tempfile::TempDir,
    count: u32,
    bytes: u64,
    /// Files a second that GETs reach.
    gets: f64,
}

impl Bench {
    fn new(setup: &Setup) -> Result<Self> {
        let dir = setup.scratch()?;
        let count = setup.of(20_000);
        let s3 = dir.path().join("s3");
        let bytes = small_files(&s3.join(crate::world::BUCKET).join("train"), count)?;
        let server = Server::start(&s3, SHAPE)?;
        let (mut reached, runtime) = (Vec::new(), runtime()?);
        for _ in 0..3 {
            let (mbs, _, n) = runtime.block_on(parallel_gets(&server.endpoint, "train/", GETS))?;
            reached.push(mbs * 1e6 / (bytes as f64 / n as f64));
        }
        Ok(Self { server, dir, count: count as u32, bytes, gets: median(&reached) })
    }

    /// What the trainer computes, that it consumes this part of what GETs reach.
    fn compute(&self, part: f64) -> Duration {
        Duration::from_secs_f64(1.0 / (self.gets * part))
    }

    fn mounted<T>(
        &self,
        args: &[&str],
        work: impl FnOnce(&Mount, &[PathBuf]) -> Result<T>,
    ) -> Result<T> {
        let cache = self.dir.path().join("cache");
        let r = {
            let args = [&["--read-only"], args].concat();
            let m = Mount::new(&self.server, &self.dir.path().join("mnt"), &cache, &args)?;
            let list = files(&m.path.join("train"))?;
            work(&m, &list)
        };
        std::fs::remove_dir_all(&cache)?;
        r
    }

    fn loader(&self, part: f64) -> Loader {
        let compute = if part > 0.0 { self.compute(part) } else { Duration::ZERO };
        Loader { workers: WORKERS, batch: BATCH, compute, forgetful: false }
    }
}

/// Reads while an order was followed, and the part whose bytes were there.
fn hits(m: &Mount) -> Result<(u64, f64, String)> {
    let s = m.status()?;
    let mount = s.mounts.first().ok_or("no mount")?;
    let predictor = mount.datasets.first().map_or_else(String::new, |d| d.predictor.clone());
    let ready = mount.predicted_ready as f64 / mount.predicted_reads.max(1) as f64;
    Ok((mount.predicted_reads, ready, predictor))
}

fn order_of(n: u32, recipe: Recipe, epoch: u64) -> Result<Vec<u32>> {
    recipe.order(n, epoch).ok_or_else(|| "no order".into())
}

fn seeded(seed: u64) -> Recipe {
    Recipe::SeedPlusEpoch { shuffle: Shuffle::Torch, seed }
}

/// An epoch with a likely seed, with a told order, and without prediction.
pub fn epoch(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let b = Bench::new(setup)?;
    let order = order_of(b.count, seeded(0), 0)?;
    let ideal = b.compute(0.6).as_secs_f64() * f64::from(b.count);
    let note = format!("(GETs reach {:.0} files/s)", b.gets);
    for (told, name, hit, time) in
        [(false, "likely seed", 0.97, 1.1), (true, "order told", 0.99, 1.05)]
    {
        let (mut ready, mut seconds, mut judged) = (Vec::new(), Vec::new(), String::new());
        for _ in 0..setup.rounds.min(3) {
            b.mounted(&[], |m, list| {
                if told {
                    hint(m, list, &order)?;
                }
                seconds.push(b.loader(0.6).epoch(list, &order)?);
                let (reads, part, predictor) = hits(m)?;
                ready.push(part * 100.0);
                judged = format!("({predictor}; {reads} of {} reads judged)", b.count);
                Ok(())
            })?;
        }
        let row = format!("shuffled, {name}: reads that do not wait for the store");
        out(Row::ratio(&row, median(&ready), "all", 100.0, "%", hit).with(judged));
        let row = "  epoch time over compute time, at 60 % of the GETs";
        out(Row::bounded(row, median(&seconds) / ideal, "x", time).with(note.clone()));
    }
    let rate = |args: &[&str], told: bool| -> Result<f64> {
        let mut rates = Vec::new();
        for _ in 0..setup.rounds.min(3) {
            b.mounted(args, |m, list| {
                if told {
                    hint(m, list, &order)?;
                }
                rates.push(f64::from(b.count) / b.loader(0.0).epoch(list, &order)?);
                Ok(())
            })?;
        }
        Ok(median(&rates))
    };
    let (told, likely) = (rate(&[], true)?, rate(&[], false)?);
    let name = "shuffled, order told, consumed without limit";
    out(Row::ratio(name, told, "192 parallel GETs", b.gets, "files/s", 0.9));
    // Its pace is even: a quarter of the epoch is enough.
    let quarter = &order[..order.len() / 4];
    let off = b.mounted(&["--predict", "off"], |_, list| {
        Ok(quarter.len() as f64 / b.loader(0.0).epoch(list, quarter)?)
    })?;
    let name = "shuffled, likely seed, consumed without limit";
    out(Row::ratio(name, likely, "--predict off", off, "files/s", 5.0));
    Ok(())
}

/// An unlikely seed: the scan.
pub fn scan(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let b = Bench::new(setup)?;
    let order = order_of(b.count, Recipe::Alone { seed: 3_141_592_653 }, 0)?;
    b.mounted(&["--scan-cpu", "100"], |m, list| {
        // The trainer is slow enough that the epoch outlasts the scan.
        let compute = Duration::from_secs_f64(300.0 / f64::from(b.count));
        let loader = Loader { workers: WORKERS, batch: BATCH, compute, forgetful: false };
        let began = Instant::now();
        let found = std::thread::scope(|s| {
            let watch = s.spawn(|| -> Option<f64> {
                while began.elapsed() < Duration::from_secs(600) {
                    let d = m.status().ok()?.mounts.first()?.datasets.first().cloned();
                    if d.is_some_and(|d| d.predictor.contains("3141592653")) {
                        return Some(began.elapsed().as_secs_f64());
                    }
                    std::thread::sleep(Duration::from_millis(500));
                }
                None
            });
            let e = loader.epoch(list, &order);
            let found = watch.join().ok().flatten();
            e.map(|_| found)
        })?;
        let (reads, ready, predictor) = hits(m)?;
        let name = "an unlikely seed of 32 bits: found after";
        out(Row::bounded(name, found.unwrap_or(f64::INFINITY), "s", 300.0)
            .with(format!("({predictor})")));
        let name = "  then reads that find their file";
        out(Row::ratio(name, ready * 100.0, "all", 100.0, "%", 0.97)
            .with(format!("({reads} of {} reads judged)", b.count)));
        Ok(())
    })
}

/// Three epochs with a cache of half the dataset, and a kernel without memory.
pub fn half(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let b = Bench::new(setup)?;
    let orders: Vec<Vec<u32>> =
        (0..3).map(|e| order_of(b.count, seeded(0), e)).collect::<Result<_>>()?;
    let trace = trace(&orders);
    let size = b.bytes / 2;
    let room = (size as f64 / (b.bytes as f64 / f64::from(b.count) + RECORD_BYTES)) as usize;
    // The first epoch finds nothing, whatever the policy.
    let after = &trace[b.count as usize..];
    let rate = |hits: usize| hits as f64 * 100.0 / after.len() as f64;
    let best = rate(optimum(&trace, room));
    let other = |p: &mut dyn EvictionPolicy<u32>| rate(policy_hits(p, &trace, room));
    let unknown: Vec<Access> =
        trace.iter().map(|a| Access { next: Expected::Late, ..*a }).collect();
    let note = format!(
        "(simulated: LRU {:.1} %, SIEVE {:.1} %, order unknown but without replacement {:.1} %)",
        other(&mut Lru::new()),
        other(&mut Sieve::new()),
        rate(policy_hits(&mut NextUse::new(), &unknown, room))
    );
    let size_text = size.to_string();
    let args = ["--cache-size", &size_text, "--ram-size", "8MiB"];
    let ours = b.mounted(&args, |m, list| {
        let loader = Loader { forgetful: true, ..b.loader(0.5) };
        let mut gets = Vec::new();
        for o in &orders {
            loader.epoch(list, o)?;
            gets.push(m.status()?.cache.origin_gets as f64);
        }
        // What an epoch fetches ahead of the next counts in it: the last one's
        // stands for that of the first.
        Ok(100.0 - (gets[2] - gets[0]) * 100.0 / after.len() as f64)
    })?;
    let name = "half the dataset cached, epochs 2 and 3: hits";
    out(Row::ratio(name, ours, "Belady's optimum", best, "%", 0.98).with(note));
    Ok(())
}

/// The accesses of epochs, and when each sample comes again.
fn trace(orders: &[Vec<u32>]) -> Vec<Access> {
    let n = orders.first().map_or(0, Vec::len);
    let mut out = Vec::with_capacity(n * orders.len());
    let mut places = vec![0u64; n];
    for (e, o) in orders.iter().enumerate() {
        if let Some(next) = orders.get(e + 1) {
            for (p, s) in next.iter().enumerate() {
                places[*s as usize] = ((e + 1) * n + p) as u64;
            }
        }
        let known = e + 1 < orders.len();
        out.extend(o.iter().map(|s| {
            let next = if known { Expected::At(places[*s as usize]) } else { Expected::Late };
            Access { unit: *s, next }
        }));
    }
    out
}

/// A reader that no predictor fits.
pub fn random(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let b = Bench::new(setup)?;
    let count = b.count / 4;
    let mut x = 1u64;
    let order: Vec<u32> = (0..count)
        .map(|_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((x >> 33) % u64::from(b.count)) as u32
        })
        .collect();
    let run = |predict: &str| {
        b.mounted(&["--predict", predict], |m, list| {
            let seconds = b.loader(0.0).epoch(list, &order)?;
            Ok((seconds, m.status()?.cache.origin_bytes as f64))
        })
    };
    let (mut times, mut bytes) = (Vec::new(), Vec::new());
    for _ in 0..setup.rounds.min(3) {
        let (off, auto) = (run("off")?, run("auto")?);
        times.push(auto.0 / off.0);
        bytes.push(auto.1 / off.1);
    }
    out(Row::bounded("a random reader: time over --predict off", median(&times), "x", 1.1));
    out(Row::bounded("  bytes over --predict off", median(&bytes), "x", 1.1));
    Ok(())
}

/// Tells the mount an order.
fn hint(m: &Mount, list: &[PathBuf], order: &[u32]) -> Result<()> {
    let below = |p: &Path| -> Result<String> {
        let below = p.strip_prefix(&m.path)?;
        Ok(below.to_str().ok_or("a path that is not UTF-8")?.to_owned())
    };
    let files: Vec<String> = list.iter().map(|p| below(p)).collect::<Result<_>>()?;
    m.hint(&files, order)
}

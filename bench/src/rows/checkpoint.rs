//! Checkpoints: written, uploaded behind the writer's back, read back.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt, stream};
use kspeed_cache::origin::{Origin, PutBody, PutOptions, S3Config, S3Origin};
use rand::{Rng, SeedableRng};

use super::cold::runtime;
use crate::Result;
use crate::measure::{median, paired, sequential};
use crate::report::Row;
use crate::world::{BUCKET, Mount, Noise, Server, Setup, Shape, drop_caches, kspeed_do};

const GIB: u64 = 1 << 30;
const WRITE_BYTES: usize = 1 << 20;
/// Files stay staged, so that no upload takes part.
const LATER: &[&str] = &["--upload-delay", "10h"];

/// Writes noise by the MiB, and fsyncs if `sync`: MB/s until close has returned.
fn write(path: &Path, size: u64, sync: bool) -> Result<f64> {
    let mut buf = vec![0; WRITE_BYTES];
    Noise::new(size).fill(&mut buf);
    let began = Instant::now();
    let mut f = File::create(path)?;
    for _ in 0..size / WRITE_BYTES as u64 {
        f.write_all(&buf)?;
    }
    if sync {
        f.sync_all()?;
    }
    drop(f);
    Ok(size as f64 / began.elapsed().as_secs_f64() / 1e6)
}

/// The two directories that are compared, and one writer's turn in each.
struct Sides {
    ours: PathBuf,
    native: PathBuf,
}

impl Sides {
    /// Both by turns, each on a disk that has nothing else to write.
    fn paired(&self, rounds: usize, one: impl Fn(&Path) -> Result<f64>) -> Result<(f64, f64)> {
        let turn = |dir: &Path| {
            let at = dir.join("w");
            fs::create_dir_all(&at)?;
            rustix::fs::sync();
            let reached = one(&at)?;
            fs::remove_dir_all(&at)?;
            Ok(reached)
        };
        paired(rounds, || turn(&self.ours), || turn(&self.native))
    }
}

pub fn write_rows(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let dir = setup.scratch()?;
    let server = Server::start(&dir.path().join("s3"), Shape::default())?;
    let native = dir.path().join("native");
    fs::create_dir_all(&native)?;
    let size = setup.of(2 * GIB).next_multiple_of(4 * WRITE_BYTES as u64);
    let small = setup.of(10_000);
    for durable in [true, false] {
        let cache = dir.path().join(format!("cache-{durable}"));
        let off = ["--sync-on-close", "false"];
        let args = [LATER, if durable { &[] } else { &off[..] }].concat();
        let m = Mount::new(&server, &dir.path().join("mnt"), &cache, &args)?;
        let sides = Sides { ours: m.path.clone(), native: native.clone() };
        if durable {
            let (a, b) = sides.paired(setup.rounds, |d| write(&d.join("f"), size, true))?;
            let name = "write 2 GiB in 1 MiB writes, fsync, close";
            out(Row::ratio(name, a, "ext4, the same", b, "MB/s", 0.9));
            let (a, b) = sides.paired(setup.rounds, |d| four(d, size))?;
            let name = "4 writers at once, 512 MiB each, fsync, close";
            out(Row::ratio(name, a, "ext4, the same", b, "MB/s", 0.9));
            let (a, b) = sides.paired(setup.rounds, |d| overwrite(d, size / 2))?;
            let name = "overwrite in place, random 1 MiB in 1 GiB, fsync";
            out(Row::ratio(name, a, "ext4, the same", b, "MB/s", 0.8));
            let (a, b) = sides.paired(setup.rounds, |d| create(d, small / 10, true))?;
            let name = "create 1,000 files of 4 KiB, fsync and close each";
            out(Row::ratio(name, a, "ext4, the same", b, "files/s", 0.0));
        } else {
            let (a, b) = sides.paired(setup.rounds, |d| write(&d.join("f"), size, false))?;
            let name = "write 2 GiB in 1 MiB writes, close, --sync-on-close false";
            out(Row::ratio(name, a, "ext4 without fsync", b, "MB/s", 0.9));
            let (a, b) = sides.paired(setup.rounds, |d| create(d, small, false))?;
            let name = "create 10,000 files of 4 KiB, --sync-on-close false";
            out(Row::ratio(name, a, "ext4 without fsync", b, "files/s", 0.3));
        }
    }
    Ok(())
}

fn four(dir: &Path, size: u64) -> Result<f64> {
    let began = Instant::now();
    let each = |i: u64| write(&dir.join(i.to_string()), size / 4, true).map_err(|e| e.to_string());
    std::thread::scope(|s| {
        let all: Vec<_> = (0..4).map(|i| s.spawn(move || each(i))).collect();
        all.into_iter().try_for_each(|t| match t.join() {
            Ok(r) => r.map(drop),
            Err(_) => Err("a writer panicked".into()),
        })
    })?;
    Ok(size as f64 / began.elapsed().as_secs_f64() / 1e6)
}

fn overwrite(dir: &Path, size: u64) -> Result<f64> {
    let path = dir.join("f");
    write(&path, size, true)?;
    let f = OpenOptions::new().write(true).open(&path)?;
    let buf = vec![7; WRITE_BYTES];
    let blocks = size / WRITE_BYTES as u64;
    let mut r = rand::rngs::StdRng::seed_from_u64(5);
    let began = Instant::now();
    for _ in 0..blocks / 2 {
        f.write_all_at(&buf, r.random_range(0..blocks) * WRITE_BYTES as u64)?;
    }
    f.sync_all()?;
    Ok((blocks / 2) as f64 * WRITE_BYTES as f64 / began.elapsed().as_secs_f64() / 1e6)
}

fn create(dir: &Path, count: u64, sync: bool) -> Result<f64> {
    let began = Instant::now();
    for i in 0..count {
        let mut f = File::create(dir.join(format!("{i:05}")))?;
        f.write_all(&[1; 4096])?;
        if sync {
            f.sync_all()?;
        }
    }
    Ok(count as f64 / began.elapsed().as_secs_f64())
}

/// What 8 parallel PUTs of 16 MiB reach, and nothing else: MB/s.
async fn parallel_puts(endpoint: &str, size: u64) -> Result<f64> {
    const PUT_BYTES: u64 = 16 << 20;
    let origin: Arc<dyn Origin> = Arc::new(
        S3Origin::new(S3Config {
            bucket: BUCKET.into(),
            endpoint: Some(endpoint.into()),
            region: Some("us-east-1".into()),
            ..S3Config::default()
        })
        .await,
    );
    let mut body = vec![0; PUT_BYTES as usize];
    Noise::new(9).fill(&mut body);
    let body = PutBody::Bytes(body.into());
    let puts = size / PUT_BYTES;
    let began = Instant::now();
    stream::iter(0..puts)
        .map(|i| {
            let (origin, body) = (origin.clone(), body.clone());
            async move {
                let key = format!("reference/{i}").into();
                origin.put(&key, body, &PutOptions::default()).await
            }
        })
        .buffer_unordered(8)
        .try_for_each(|_| async { Ok(()) })
        .await?;
    let reached = (puts * PUT_BYTES) as f64 / began.elapsed().as_secs_f64() / 1e6;
    for i in 0..puts {
        origin.delete(&format!("reference/{i}").into()).await?;
    }
    Ok(reached)
}

pub fn upload_rows(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let dir = setup.scratch()?;
    let server = Server::start(&dir.path().join("s3"), Shape::default())?;
    let (mnt, cache) = (dir.path().join("mnt"), dir.path().join("cache"));
    let size = setup.of(2 * GIB).next_multiple_of(64 << 20);
    let runtime = runtime()?;
    let native = dir.path().join("native");
    write(&native, size, true)?;
    {
        let m = Mount::new(&server, &mnt, &cache, LATER)?;
        let mut n = 0;
        let (a, b) = paired(
            setup.rounds,
            || {
                n += 1;
                let path = m.path.join(format!("f{n}"));
                write(&path, size, true)?;
                rustix::fs::sync();
                let began = Instant::now();
                kspeed_do(&server, &["sync"], &path)?;
                Ok(size as f64 / began.elapsed().as_secs_f64() / 1e6)
            },
            || {
                rustix::fs::sync();
                runtime.block_on(parallel_puts(&server.endpoint, size))
            },
        )?;
        let name = "upload of 2 GiB that are staged";
        out(Row::ratio(name, a, "8 parallel PUTs", b, "MB/s", 0.8));
        for i in 2..=n {
            fs::remove_file(m.path.join(format!("f{i}")))?;
        }
        kspeed_do(&server, &["sync"], &m.path)?;
    }
    let m = Mount::new(&server, &mnt, &cache, LATER)?;
    let read = |path: &Path| {
        drop_caches()?;
        sequential(path)
    };
    let ours = m.path.join("f1");
    let (a, b) = paired(setup.rounds, || read(&ours), || read(&native))?;
    let name = "read back after a restart, 2 GiB, page cache dropped";
    out(Row::ratio(name, a, "ext4", b, "MB/s", 0.9));
    let gets = m.status()?.cache.origin_gets;
    if gets > 0 {
        return Err(format!("{gets} GETs: it was not read back from here").into());
    }
    Ok(())
}

/// A trainer's loop: compute, save; seconds that a save took.
fn stall(dir: &Path, size: u64) -> Result<f64> {
    const SAVES: usize = 6;
    let mut took = Vec::new();
    for i in 0..SAVES {
        std::thread::sleep(Duration::from_secs(1));
        let began = Instant::now();
        let tmp = dir.join("ckpt.tmp");
        write(&tmp, size, true)?;
        fs::rename(&tmp, dir.join(format!("ckpt-{}", i % 2)))?;
        took.push(began.elapsed().as_secs_f64());
    }
    Ok(median(&took))
}

pub fn stall_row(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let dir = setup.scratch()?;
    // A store that takes the uploads for as long as the loop runs.
    let shape = Shape { total_rate: Some(200_000_000), ..Shape::default() };
    let server = Server::start(&dir.path().join("s3"), shape)?;
    let m = Mount::new(&server, &dir.path().join("mnt"), &dir.path().join("cache"), &[])?;
    let native = dir.path().join("native");
    fs::create_dir_all(&native)?;
    let size = setup.of(256 << 20).next_multiple_of(WRITE_BYTES as u64);
    let (a, b) = paired(setup.rounds, || stall(&m.path, size), || stall(&native, size))?;
    let name = "stall of a save of 256 MiB each second, uploads running: times ext4's";
    let uploaded = m.status()?.mounts[0].uploaded_bytes;
    out(Row::bounded(name, a / b, "x", 1.1).with(format!(
        "({a:.2} s, ext4 {b:.2} s; {} MB uploaded meanwhile)",
        uploaded / 1_000_000
    )));
    Ok(())
}

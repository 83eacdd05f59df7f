//! `make demo`: a real data set in a real bucket, mounted and read as a trainer
//! does, and a checkpoint written.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::Result;
use crate::measure::{read_files, shuffled};
use crate::world::{BUCKET, Mount, Noise, Server, Setup, Shape, kspeed_do, noise_file};

/// Files of the demo's data set at the most.
const MAX_FILES: usize = 4000;
const MIN_FILE_BYTES: u64 = 4 << 10;
const WORKERS: usize = 4;
const CHECKPOINT_BYTES: u64 = 256 << 20;
/// The store of the demo: 5 ms away, so that the difference shows.
const STORE: Shape = Shape { latency_ms: 5, connection_rate: None, total_rate: None };

/// The sources of the programs that cargo has just built: a text corpus that
/// every machine that can run the demo has.
fn corpus() -> Result<Vec<PathBuf>> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cargo")));
    let root = home.ok_or("neither CARGO_HOME nor HOME is set")?.join("registry/src");
    let mut found = Vec::new();
    let mut todo = vec![root];
    while let Some(dir) = todo.pop() {
        for e in fs::read_dir(dir)?.flatten() {
            let path = e.path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|x| x == "rs")
                && e.metadata().is_ok_and(|m| m.len() >= MIN_FILE_BYTES)
            {
                found.push(path);
            }
        }
    }
    found.sort();
    let step = found.len().div_ceil(MAX_FILES).max(1);
    Ok(found.into_iter().step_by(step).collect())
}

fn same(list: &[PathBuf], root: &Path) -> Vec<PathBuf> {
    list.iter().filter_map(|p| p.file_name()).map(|n| root.join(n)).collect()
}

struct Line<'a> {
    what: &'a str,
    files_per_s: f64,
    mean_bytes: f64,
    gets: Option<u64>,
}

impl Line<'_> {
    fn print(&self) {
        let gets = self.gets.map_or_else(|| "-".into(), |g| g.to_string());
        println!(
            "{:<34} {:>9.0} {:>9.1} {:>15}",
            self.what,
            self.files_per_s,
            self.files_per_s * self.mean_bytes / 1e6,
            gets
        );
    }
}

/// Runs the demo.
pub fn run(setup: &Setup) -> Result<()> {
    let dir = setup.scratch()?;
    let (s3, native) = (dir.path().join("s3"), dir.path().join("native"));
    let data = s3.join(BUCKET).join("corpus");
    fs::create_dir_all(&data)?;
    fs::create_dir_all(&native)?;
    let sources = corpus()?;
    let mut bytes = 0;
    let mut names = Vec::new();
    for (i, path) in sources.iter().enumerate() {
        let name = format!("{i:05}.rs");
        bytes += fs::copy(path, data.join(&name))?;
        fs::copy(path, native.join(&name))?;
        names.push(PathBuf::from(name));
    }
    let mean_bytes = bytes as f64 / names.len().max(1) as f64;
    println!(
        "data set: {} Rust sources, {:.1} MB, in s3://{BUCKET}/corpus, 5 ms away",
        names.len(),
        bytes as f64 / 1e6
    );
    let server = Server::start(&s3, STORE)?;
    let cache = dir.path().join("cache");
    println!(
        "\n{:<34} {:>9} {:>9} {:>15}",
        "shuffled, 4 workers", "files/s", "MB/s", "origin requests"
    );
    {
        let m = Mount::new(&server, &dir.path().join("data"), &cache, &["--read-only"])?;
        let root = m.path.join("corpus");
        let _ = fs::read_dir(&root)?.count();
        let mut gets = 0;
        for (epoch, what) in ["epoch 1 (cold)", "epoch 2", "epoch 3"].into_iter().enumerate() {
            let order = shuffled(names.clone(), epoch as u64);
            let files_per_s = read_files(&same(&order, &root), WORKERS)?;
            let now = m.status()?.cache.origin_gets;
            Line { what, files_per_s, mean_bytes, gets: Some(now - gets) }.print();
            gets = now;
        }
    }
    let order = shuffled(names.clone(), 9);
    read_files(&same(&order, &native), WORKERS)?;
    let files_per_s = read_files(&same(&order, &native), WORKERS)?;
    Line { what: "the local disk, page cache warm", files_per_s, mean_bytes, gets: None }.print();
    checkpoint(setup, &server, dir.path(), &cache)
}

/// Writes a checkpoint as trainers do (temporary name, fsync, rename) through a
/// writable mount, and compares what is in the bucket.
fn checkpoint(setup: &Setup, server: &Server, dir: &Path, cache: &Path) -> Result<()> {
    let size = setup.of(CHECKPOINT_BYTES);
    let m = Mount::new(server, &dir.join("ckpt"), cache, &[])?;
    let began = Instant::now();
    let temp = m.path.join("step100.pt.tmp");
    let mut f = fs::File::create(&temp)?;
    let mut noise = Noise::new(5);
    let mut buf = vec![0; 1 << 20];
    for _ in 0..size / buf.len() as u64 {
        noise.fill(&mut buf);
        f.write_all(&buf)?;
    }
    f.sync_all()?;
    drop(f);
    fs::rename(&temp, m.path.join("step100.pt"))?;
    let ours = size as f64 / began.elapsed().as_secs_f64() / 1e6;
    let native = dir.join("native.pt");
    let began = Instant::now();
    noise_file(&native, size / (1 << 20) * (1 << 20), 5)?;
    let theirs = size as f64 / began.elapsed().as_secs_f64() / 1e6;
    let began = Instant::now();
    kspeed_do(server, &["sync"], &m.path.join("step100.pt"))?;
    let waited = began.elapsed().as_secs_f64();
    let stored = fs::metadata(dir.join("s3").join(BUCKET).join("step100.pt"))?.len();
    println!(
        "\ncheckpoint of {} MiB, fsync and rename: {ours:.0} MB/s; local disk {theirs:.0} MB/s; in the bucket ({stored} bytes) after another {waited:.1} s",
        size >> 20
    );
    Ok(())
}

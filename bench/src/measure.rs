//! Ways of reading that are timed, and the clock of CPU time.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::Result;

const READ_BYTES: usize = 1 << 20;

pub fn median(v: &[f64]) -> f64 {
    let mut v = v.to_vec();
    v.sort_by(f64::total_cmp);
    v.get(v.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Measures two things by turns, each first in every second round, and returns
/// the medians.
pub fn paired(
    rounds: usize,
    mut a: impl FnMut() -> Result<f64>,
    mut b: impl FnMut() -> Result<f64>,
) -> Result<(f64, f64)> {
    let (mut va, mut vb) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        if round % 2 == 0 {
            va.push(a()?);
            vb.push(b()?);
        } else {
            vb.push(b()?);
            va.push(a()?);
        }
    }
    Ok((median(&va), median(&vb)))
}

/// Reads a file from its start to its end: MB/s.
pub fn sequential(path: &Path) -> Result<f64> {
    let mut f = File::open(path)?;
    let mut buf = vec![0; READ_BYTES];
    let began = Instant::now();
    let mut n = 0;
    loop {
        match f.read(&mut buf)? {
            0 => break,
            k => n += k,
        }
    }
    Ok(n as f64 / began.elapsed().as_secs_f64() / 1e6)
}

/// Copies a mapped file out, a MiB at a time: MB/s.
pub fn mapped(path: &Path) -> Result<f64> {
    let f = File::open(path)?;
    // SAFETY: the benchmark's own file, which nobody cuts meanwhile.
    let map = unsafe { memmap2::Mmap::map(&f) }?;
    let mut buf = vec![0; READ_BYTES];
    let began = Instant::now();
    for c in map.chunks(READ_BYTES) {
        buf[..c.len()].copy_from_slice(c);
        std::hint::black_box(&buf);
    }
    Ok(map.len() as f64 / began.elapsed().as_secs_f64() / 1e6)
}

/// The files of a directory, sorted.
pub fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut v: Vec<PathBuf> =
        fs::read_dir(dir)?.map(|e| e.map(|e| e.path())).collect::<std::io::Result<_>>()?;
    v.sort();
    Ok(v)
}

pub fn shuffled(mut v: Vec<PathBuf>, seed: u64) -> Vec<PathBuf> {
    v.shuffle(&mut rand::rngs::StdRng::seed_from_u64(seed));
    v
}

/// Opens, reads and closes each file; readers take every n-th: files/s.
pub fn read_files(files: &[PathBuf], readers: usize) -> Result<f64> {
    let began = Instant::now();
    std::thread::scope(|s| {
        let threads: Vec<_> = (0..readers)
            .map(|r| {
                s.spawn(move || -> std::io::Result<u64> {
                    let mut buf = vec![0; 256 << 10];
                    let mut n = 0;
                    for f in files.iter().skip(r).step_by(readers) {
                        let mut f = File::open(f)?;
                        loop {
                            match f.read(&mut buf)? {
                                0 => break,
                                k => n += k as u64,
                            }
                        }
                    }
                    Ok(n)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|t| t.join().map_err(|_| "a reader panicked")?.map_err(Into::into))
            .collect::<Result<Vec<u64>>>()
    })?;
    Ok(files.len() as f64 / began.elapsed().as_secs_f64())
}

/// Random reads of `len` bytes in files of equal size: reads/s.
pub fn random(
    files: &[PathBuf],
    readers: usize,
    reads: usize,
    len: usize,
    seed: u64,
) -> Result<f64> {
    let began = Instant::now();
    std::thread::scope(|s| {
        let threads: Vec<_> = (0..readers)
            .map(|r| {
                s.spawn(move || -> std::io::Result<()> {
                    let open: Vec<File> =
                        files.iter().map(File::open).collect::<std::io::Result<_>>()?;
                    let mut rng = rand::rngs::StdRng::seed_from_u64(seed + r as u64);
                    let mut buf = vec![0; len];
                    for _ in 0..reads / readers {
                        let f = &open[rng.random_range(0..open.len())];
                        let blocks = f.metadata()?.len() / len as u64;
                        f.read_exact_at(&mut buf, rng.random_range(0..blocks) * len as u64)?;
                    }
                    Ok(())
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|t| t.join().map_err(|_| "a reader panicked")?.map_err(Into::into))
            .collect::<Result<Vec<()>>>()
    })?;
    Ok(reads as f64 / began.elapsed().as_secs_f64())
}

/// scandir and stat of each entry: entries/s.
pub fn scan(dir: &Path) -> Result<f64> {
    let began = Instant::now();
    let mut n = 0;
    for e in fs::read_dir(dir)? {
        let e = e?;
        std::hint::black_box(e.metadata()?.len());
        n += 1;
    }
    Ok(f64::from(n) / began.elapsed().as_secs_f64())
}

/// `find -type f | wc -l`: files found, files/s.
pub fn find(dir: &Path) -> Result<(u64, f64)> {
    let began = Instant::now();
    let out = std::process::Command::new("find")
        .arg(dir)
        .args(["-type", "f", "-printf", "x"])
        .output()?;
    let n = out.stdout.len() as u64;
    Ok((n, n as f64 / began.elapsed().as_secs_f64()))
}

/// CPU time of a process so far, user and system.
pub fn cpu(pid: u32) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let rest = stat.rsplit(')').next().ok_or("stat")?;
    let mut f = rest.split_whitespace().skip(11);
    let ticks: u64 =
        f.next().ok_or("utime")?.parse::<u64>()? + f.next().ok_or("stime")?.parse::<u64>()?;
    // USER_HZ is 100 on every Linux that there is.
    Ok(Duration::from_millis(ticks * 10))
}

/// Tells the kernel to drop a file's pages.
pub fn forget_pages(path: &Path) -> Result<()> {
    let f = File::open(path)?;
    rustix::fs::fadvise(&f, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

//! `kspeed bench`: a quick measure of a mount against its own cache disk.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Instant;

use super::Failure;
use crate::config::{parse_size, size_text};
use crate::control::Client;

const ROUNDS: usize = 3;
const CHUNK_BYTES: usize = 1 << 20;

fn read_all(path: &Path) -> std::io::Result<f64> {
    let mut f = File::open(path)?;
    let mut buf = vec![0; CHUNK_BYTES];
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

fn write_all(path: &Path, size: u64) -> std::io::Result<f64> {
    let mut f = File::create(path)?;
    let mut buf = vec![0u8; CHUNK_BYTES];
    let began = Instant::now();
    let mut x = 88_172_645_463_325_252u64;
    for at in (0..size).step_by(CHUNK_BYTES) {
        // Not compressible, nor equal in any two chunks.
        for w in buf.chunks_exact_mut(8) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            w.copy_from_slice(&x.to_le_bytes());
        }
        let n = (size - at).min(CHUNK_BYTES as u64) as usize;
        f.write_all(&buf[..n])?;
    }
    f.sync_all()?;
    drop(f);
    Ok(size as f64 / began.elapsed().as_secs_f64() / 1e6)
}

fn drop_pages(path: &Path) -> std::io::Result<()> {
    let f = File::open(path)?;
    rustix::fs::fadvise(&f, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

pub(super) fn bench(mountpoint: &Path, size: &str) -> Result<(), Failure> {
    let size = parse_size(size)
        .ok_or_else(|| Failure::usage(format!("--size: {size:?} is not a size")))?;
    let (mountpoint, _) = crate::control::daemon_of(mountpoint)?;
    let client = Client::of_mount(&mountpoint)?;
    let text = super::small_runtime()?.block_on(client.get("/status"))?;
    let status: crate::telemetry::ProcessStatus = serde_json::from_str(&text)?;
    let disk =
        status.disks.first().ok_or_else(|| Failure::failed("the mount has no cache disk"))?;
    let name = format!("kspeed-bench-{}", std::process::id());
    let (ours, native) = (mountpoint.join(&name), disk.dir.join("stage").join(&name));
    let result = measure(&ours, &native, size);
    let _ = std::fs::remove_file(&ours);
    let _ = std::fs::remove_file(&native);
    result
}

fn measure(ours: &Path, native: &Path, size: u64) -> Result<(), Failure> {
    println!("{} of incompressible data, medians of {ROUNDS}, MB/s", size_text(size));
    let row = |what: &str, a: f64, b: f64| println!("{what:<34} {a:>9.0} {b:>9.0}   {:.2}", a / b);
    println!("{:<34} {:>9} {:>9}   ratio", "", "mount", "disk");
    let n = write_all(native, size)?;
    let o = write_all(ours, size).map_err(|e| {
        Failure::failed(format!("{}: {e} (a writable mount is needed)", ours.display()))
    })?;
    row("write until it is in the origin", o, n);
    row("first read (from the origin)", read_all(ours)?, {
        drop_pages(native)?;
        read_all(native)?
    });
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        a.push(read_all(ours)?);
        b.push(read_all(native)?);
    }
    row("read again, page cache warm", median(a), median(b));
    Ok(())
}

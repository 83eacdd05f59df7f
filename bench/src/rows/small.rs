//! Small files on a dataset mount against the same files on ext4, warm.

use crate::Result;
use crate::measure::{files, median, read_files, shuffled};
use crate::report::Row;
use crate::world::{BUCKET, Mount, Server, Setup, Shape, kspeed_do, small_files};

pub fn small(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let dir = setup.scratch()?;
    let count = setup.of(10_000);
    let s3 = dir.path().join("s3");
    small_files(&s3.join(BUCKET).join("d"), count)?;
    let native_dir = dir.path().join("native");
    small_files(&native_dir, count)?;
    let native = files(&native_dir)?;
    read_files(&native, 4)?;
    let server = Server::start(&s3, Shape::default())?;
    let cache = dir.path().join("cache");
    for readers in [1usize, 4] {
        let (mut first, mut second, mut theirs, mut requests) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for round in 0..setup.rounds as u64 {
            let m = Mount::new(
                &server,
                &dir.path().join("mnt"),
                &cache,
                &["--read-only", "--metadata-ttl", "1h"],
            )?;
            kspeed_do(&server, &["warm"], &m.path)?;
            let ours = files(&m.path.join("d"))?;
            let before = m.status()?.mounts[0].requests;
            first.push(read_files(&shuffled(ours.clone(), round), readers)?);
            // The status itself costs a few requests.
            requests.push((m.status()?.mounts[0].requests - before) as f64 / count as f64);
            theirs.push(read_files(&shuffled(native.clone(), round), readers)?);
            second.push(read_files(&shuffled(ours, round + 1000), readers)?);
            theirs.push(read_files(&shuffled(native.clone(), round + 1000), readers)?);
        }
        let b = median(&theirs);
        let name = format!("small files, first read after warm, {readers} readers");
        out(Row::ratio(&name, median(&first), "ext4 warm", b, "files/s", 0.65));
        let name = format!("  FUSE requests a file, {readers} readers");
        out(Row::bounded(&name, median(&requests), "requests", 0.05));
        let name = format!("small files, second epoch, {readers} readers");
        out(Row::ratio(&name, median(&second), "ext4 warm", b, "files/s", 0.8));
    }
    Ok(())
}

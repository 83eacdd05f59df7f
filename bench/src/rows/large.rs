//! Large files in the disk cache against the same bytes on ext4.

use std::fs;

use crate::Result;
use crate::measure::{forget_pages, mapped, paired, random as random_reads, sequential};
use crate::report::Row;
use crate::world::{BUCKET, Mount, Server, Setup, Shape, drop_caches, kspeed_do, noise_file};

const GIB: u64 = 1 << 30;

pub fn large(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let dir = setup.scratch()?;
    let size = setup.of(2 * GIB);
    let s3 = dir.path().join("s3");
    noise_file(&s3.join(BUCKET).join("f"), size, 1)?;
    let native = dir.path().join("native");
    noise_file(&native, size, 1)?;
    let server = Server::start(&s3, Shape::default())?;
    let cache = dir.path().join("cache");
    {
        let m = Mount::new(&server, &dir.path().join("mnt"), &cache, &[])?;
        kspeed_do(&server, &["warm"], &m.path)?;
        let ours = m.path.join("f");
        let (a, b) = paired(
            setup.rounds,
            || {
                drop_caches()?;
                sequential(&ours)
            },
            || {
                drop_caches()?;
                sequential(&native)
            },
        )?;
        let through = m.status()?.mounts[0].passthrough_opens;
        out(Row::ratio(
            "2 GiB sequential, passthrough, page cache dropped",
            a,
            "ext4",
            b,
            "MB/s",
            0.9,
        )
        .with(format!("({through} passthrough opens)")));
        sequential(&ours)?;
        sequential(&native)?;
        let (a, b) = paired(setup.rounds, || sequential(&ours), || sequential(&native))?;
        out(Row::ratio("2 GiB sequential, passthrough, warm", a, "ext4", b, "MB/s", 0.9));
        let (a, b) = paired(setup.rounds, || mapped(&ours), || mapped(&native))?;
        out(Row::ratio("2 GiB mmap copy, passthrough, warm", a, "ext4", b, "MB/s", 0.9));
    }
    let m = Mount::new(&server, &dir.path().join("mnt"), &cache, &["--no-passthrough"])?;
    let ours = m.path.join("f");
    // Checked and in the page cache, as the cache file's; the mount's own pages
    // are dropped before each round.
    sequential(&ours)?;
    let (a, b) = paired(
        setup.rounds,
        || {
            forget_pages(&ours)?;
            sequential(&ours)
        },
        || sequential(&native),
    )?;
    out(Row::ratio(
        "2 GiB sequential, through the daemon, warm cache file",
        a,
        "ext4 warm",
        b,
        "MB/s",
        0.4,
    ));
    Ok(())
}

pub fn random(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    const SHARDS: u64 = 8;
    const READ_BYTES: usize = 128 << 10;
    let dir = setup.scratch()?;
    let size = setup.of(256 << 20).next_multiple_of(READ_BYTES as u64);
    let s3 = dir.path().join("s3");
    let native = dir.path().join("native");
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    for i in 0..SHARDS {
        noise_file(&s3.join(BUCKET).join(format!("shard{i}")), size, i)?;
        theirs.push(native.join(format!("shard{i}")));
        fs::create_dir_all(&native)?;
        noise_file(&native.join(format!("shard{i}")), size, i)?;
    }
    let server = Server::start(&s3, Shape::default())?;
    for (args, how, least) in
        [(&[][..], "passthrough", 0.8), (&["--no-passthrough"][..], "through the daemon", 0.0)]
    {
        let m = Mount::new(&server, &dir.path().join("mnt"), &dir.path().join("cache"), args)?;
        kspeed_do(&server, &["warm"], &m.path)?;
        ours.clear();
        ours.extend((0..SHARDS).map(|i| m.path.join(format!("shard{i}"))));
        let reads = setup.of(8000) as usize;
        let mut seed = 0;
        let mut one = |files: &[std::path::PathBuf]| {
            seed += 100;
            drop_caches()?;
            random_reads(files, 4, reads, READ_BYTES, seed)
        };
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..setup.rounds {
            a.push(one(&ours)?);
            b.push(one(&theirs)?);
        }
        let (a, b) = (crate::measure::median(&a), crate::measure::median(&b));
        let name = format!("random 128 KiB, 8 shards, 4 readers, dropped, {how}");
        out(Row::ratio(&name, a, "ext4", b, "reads/s", least));
    }
    Ok(())
}

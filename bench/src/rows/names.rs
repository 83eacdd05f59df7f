//! Names: listings, find, the snapshot index.

use std::fs;
use std::time::Instant;

use kspeed_cache::{ObjectKind, ObjectMeta};
use kspeed_fs::namespace::{SnapshotBuilder, SnapshotIndex};

use crate::Result;
use crate::measure::{find, paired, scan};
use crate::report::Row;
use crate::world::{BUCKET, Mount, Server, Setup, Shape};

/// Files of a real data set (ImageNet's validation and a part of train).
const FIND_FILES: u64 = 354_714;

fn tree(dir: &std::path::Path, count: u64) -> Result<()> {
    for i in 0..count {
        let d = dir.join(format!("n{:04}", i / 1300));
        if i % 1300 == 0 {
            fs::create_dir_all(&d)?;
        }
        fs::File::create(d.join(format!("n{:04}_{i:07}.JPEG", i / 1300)))?;
    }
    Ok(())
}

pub fn names(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let dir = setup.scratch()?;
    let count = setup.of(10_000);
    let s3 = dir.path().join("s3");
    let native = dir.path().join("native");
    let flat = s3.join(BUCKET).join("flat");
    for d in [&flat, &native.join("flat")] {
        fs::create_dir_all(d)?;
        for i in 0..count {
            fs::write(d.join(format!("{i:06}")), "x")?;
        }
    }
    let found = setup.of(FIND_FILES);
    tree(&s3.join(BUCKET).join("tree"), found)?;
    tree(&native.join("tree"), found)?;
    let server = Server::start(&s3, Shape::default())?;
    let cache = dir.path().join("cache");
    for (args, how) in [
        (&["--metadata-ttl", "1h"][..], "writable"),
        (&["--metadata-ttl", "1h", "--read-only"][..], "dataset"),
    ] {
        let m = Mount::new(&server, &dir.path().join("mnt"), &cache, args)?;
        let ours = m.path.join("flat");
        scan(&ours)?;
        scan(&native.join("flat"))?;
        let (a, b) = paired(setup.rounds, || scan(&ours), || scan(&native.join("flat")))?;
        let name = format!("scandir + stat of 10,000, warm, {how} mount");
        out(Row::ratio(&name, a, "ext4", b, "entries/s", 0.5));
    }
    let began = Instant::now();
    let m = Mount::new(&server, &dir.path().join("mnt"), &cache, &["--read-only", "--snapshot"])?;
    let built = began.elapsed().as_secs_f64();
    let ours = m.path.join("tree");
    let theirs = native.join("tree");
    for d in [&ours, &theirs] {
        let (n, _) = find(d)?;
        if n != found {
            return Err(format!("find found {n} of {found}").into());
        }
    }
    let (a, b) = paired(setup.rounds, || Ok(find(&ours)?.1), || Ok(find(&theirs)?.1))?;
    out(Row::ratio(
        "find over 354,714 keys from the snapshot index",
        a,
        "ext4 warm",
        b,
        "files/s",
        0.5,
    )
    .with(format!("(mounted and indexed in {built:.1} s)")));
    drop(m);
    index(setup, out)
}

/// An index of ten million entries as ImageNet-like data sets have them.
fn index(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let dir = setup.scratch()?;
    let n = setup.of(10_000_000);
    let path = dir.path().join("s.idx");
    let mut b = SnapshotBuilder::new(&path)?;
    let mut x = 1u128;
    for i in 0..n {
        x = x.wrapping_mul(0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645).wrapping_add(1);
        b.push(&ObjectMeta {
            key: format!("train/n{:05}/n{:05}_{i:08}.JPEG", i / 1300, i / 1300).into(),
            size: 60_000 + (x >> 100) as u64 % 100_000,
            mtime_ns: (1_600_000_000 + (x >> 64) as i64 % 10_000_000) * 1_000_000_000,
            version: format!("{x:032x}").into(),
            kind: ObjectKind::File,
            mode: None,
        })?;
    }
    drop(b.finish("bench", 0)?);
    let began = Instant::now();
    let index = SnapshotIndex::open(&path, "bench")?;
    let loaded = began.elapsed().as_secs_f64();
    out(Row::bounded("snapshot index of 10 million: load", loaded, "s", 1.0));
    let each = index.bytes() as f64 / n as f64;
    out(Row::bounded("  bytes an entry, all of it resident", each, "bytes", 64.0));
    Ok(())
}

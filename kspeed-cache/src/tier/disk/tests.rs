//! The disk tier against a model: what was stored comes back or is absent, and
//! is never anything else, over restarts, cuts and flipped bytes.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;

use proptest::prelude::*;

use super::*;
use crate::io::PlainIo;
use crate::object::ObjectKind;

const BLOCK: u64 = 4096;

fn config(dir: &Path, max_bytes: u64) -> DiskConfig {
    DiskConfig { dir: dir.to_path_buf(), max_bytes, min_free_bytes: 0, compress: None }
}

fn open(dir: &Path, max_bytes: u64) -> DiskTier {
    DiskTier::open(config(dir, max_bytes), Arc::new(PlainIo)).expect("open")
}

fn object(n: u32, size: u64) -> (ObjectId, ObjectMeta, Blocks) {
    let meta = ObjectMeta {
        key: format!("k{n}").into(),
        size,
        mtime_ns: 0,
        version: "v".into(),
        kind: ObjectKind::File,
        mode: None,
    };
    (ObjectId::new("t", &meta), meta, Blocks { size, block_bytes: BLOCK })
}

fn bytes(n: u32, block: u32, len: usize) -> Bytes {
    (0..len).map(|i| (i as u32 ^ n ^ (block * 7)) as u8).collect::<Vec<_>>().into()
}

fn read(file: &LargeFile, b: &Blocks, i: u32) -> Vec<u8> {
    let (_gate, data) = file.serve();
    let mut v = vec![0; b.len(i)];
    data.read_exact_at(&mut v, b.range(i).start).expect("read");
    v
}

async fn fill(t: &DiskTier, n: u32, size: u64) -> Arc<LargeFile> {
    let (id, meta, b) = object(n, size);
    let f = t.large(id, "t", &meta, b, true).expect("large").expect("file");
    for i in 0..b.count() {
        t.put_block(&f, i, bytes(n, i, b.len(i))).await.expect("put");
    }
    f
}

#[tokio::test]
async fn a_second_process_is_refused_with_the_first_ones_pid() {
    let dir = tempfile::tempdir().expect("tempdir");
    let first = open(dir.path(), 1 << 30);
    let e = DiskTier::open(config(dir.path(), 1), Arc::new(PlainIo)).err().expect("refused");
    assert!(
        matches!(&e, DiskError::InUse { pid, .. } if *pid == std::process::id().to_string()),
        "{e}"
    );
    drop(first);
    open(dir.path(), 1 << 30);
}

#[tokio::test]
async fn a_directory_with_other_things_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().expect("tempdir");
    fs::write(dir.path().join("thesis.tex"), "x").expect("write");
    let e = DiskTier::open(config(dir.path(), 1), Arc::new(PlainIo)).err().expect("refused");
    assert!(matches!(e, DiskError::Format { .. }), "{e}");
    assert!(dir.path().join("thesis.tex").exists());
}

/// F4: flipped bytes and a cut file are found at the first touch after a
/// restart; the good blocks are kept.
#[tokio::test]
async fn f4_damage_while_we_were_away_is_found_and_the_rest_is_kept() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (id, meta, b) = object(1, 10 * BLOCK + 5);
    {
        let t = open(dir.path(), 1 << 30);
        let f = fill(&t, 1, meta.size).await;
        assert!(f.is_complete());
        t.put_small(ObjectId(77), b"small and good").expect("put");
        t.put_small(ObjectId(78), b"small and bad!").expect("put");
    }
    let name = id.to_string();
    let data = dir.path().join(format!("large/{}/{name}.data", &name[..2]));
    let f = File::options().write(true).open(&data).expect("open");
    f.write_all_at(b"\xff", 3 * BLOCK + 9).expect("flip");
    f.set_len(9 * BLOCK + 1).expect("cut");
    let seg = dir.path().join("small/0.seg");
    let text = fs::read(&seg).expect("read");
    let at = text.windows(4).position(|w| w == b"bad!");
    let f = File::options().write(true).open(&seg).expect("open");
    f.write_all_at(b"B", at.expect("found") as u64).expect("flip");

    let t = open(dir.path(), 1 << 30);
    let f = t.large(id, "t", &meta, b, false).expect("large").expect("file");
    assert!((0..b.count()).all(|i| !f.is_ready(i) && f.is_unchecked(i)), "nothing is trusted yet");
    for i in 0..b.count() {
        let good = t.verify_block(&f, i).await.expect("verify").is_some();
        assert_eq!(good, ![3, 9, 10].contains(&i), "block {i}");
        if good {
            assert!(read(&f, &b, i) == bytes(1, i, b.len(i)));
        }
    }
    assert!(f.passthrough().is_none(), "incomplete");
    assert_eq!(t.small(ObjectId(77)).as_deref(), Some(b"small and good".as_slice()));
    assert_eq!(t.small(ObjectId(78)), None);
}

/// F4: a change behind our back while we run is found at the next open.
#[tokio::test]
async fn f4_damage_while_we_run_is_found_at_the_next_open() {
    let dir = tempfile::tempdir().expect("tempdir");
    let t = open(dir.path(), 1 << 30);
    let (id, meta, b) = object(1, 4 * BLOCK);
    let f = fill(&t, 1, meta.size).await;
    assert!(f.passthrough().is_some());
    let name = id.to_string();
    let data = dir.path().join(format!("large/{}/{name}.data", &name[..2]));
    std::thread::sleep(std::time::Duration::from_millis(20));
    let w = File::options().write(true).open(&data).expect("open");
    w.write_all_at(b"\xff", BLOCK).expect("flip");
    assert!(f.passthrough().is_none());
    let f = t.large(id, "t", &meta, b, false).expect("large").expect("file");
    assert!(!f.is_ready(1));
    assert!(t.verify_block(&f, 0).await.expect("verify").is_some());
    assert!(t.verify_block(&f, 1).await.expect("verify").is_none());
}

#[tokio::test]
async fn eviction_keeps_the_limit_spares_pins_and_what_is_open_by_passthrough() {
    let dir = tempfile::tempdir().expect("tempdir");
    let limit = 40 * BLOCK;
    let t = open(dir.path(), limit);
    let pinned = fill(&t, 0, 10 * BLOCK).await;
    t.pin(object(0, 10 * BLOCK).0, true).expect("pin");
    let through = fill(&t, 1, 10 * BLOCK).await.passthrough().expect("complete");
    for n in 2..30 {
        fill(&t, n, 10 * BLOCK).await;
        assert!(t.used_bytes() <= limit, "{} > {limit}", t.used_bytes());
    }
    assert!(pinned.is_complete());
    let mut v = vec![0; BLOCK as usize];
    through.file().read_exact_at(&mut v, 0).expect("read");
    assert!(v == bytes(1, 0, v.len()));
    assert!(t.evicted_bytes() >= 200 * BLOCK);
    drop(through);
    drop(t);
    let t = open(dir.path(), limit);
    assert!(t.is_pinned(object(0, 10 * BLOCK).0), "pins last");
    assert!(t.used_bytes() <= limit);
}

/// A part of an object larger than the cache goes chunk by chunk; what is gone
/// is not served as zeros.
#[tokio::test]
async fn an_object_larger_than_the_cache_loses_chunks_not_truth() {
    let dir = tempfile::tempdir().expect("tempdir");
    let t = open(dir.path(), 130 * BLOCK);
    let size = 300 * BLOCK;
    let (_, _, b) = object(1, size);
    let f = fill(&t, 1, size).await;
    assert!(t.used_bytes() <= 130 * BLOCK);
    let ready: Vec<u32> = (0..b.count()).filter(|i| f.is_ready(*i)).collect();
    assert!(!ready.is_empty() && ready.len() < 140);
    for i in ready {
        assert!(read(&f, &b, i) == bytes(1, i, BLOCK as usize));
    }
}

/// A real full file system: writes fail, nothing wrong is ever served, and the
/// disk stays in service.
#[tokio::test]
async fn a_full_disk_fails_writes_but_stays_in_service() {
    let dir = tempfile::tempdir().expect("tempdir");
    let mount = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "kspeed-test"])
        .arg(dir.path())
        .status();
    if !mount.is_ok_and(|s| s.success()) {
        eprintln!("skipped: no right to mount a tmpfs");
        return;
    }
    let t = open(dir.path(), 1 << 30);
    let (id, meta, b) = object(1, 400 * BLOCK);
    let f = t.large(id, "t", &meta, b, true).expect("large").expect("file");
    let mut full = 0;
    for i in 0..b.count() {
        if t.put_block(&f, i, bytes(1, i, b.len(i))).await.is_err() {
            full += 1;
        }
    }
    let right =
        (0..b.count()).filter(|i| f.is_ready(*i)).all(|i| read(&f, &b, i) == bytes(1, i, b.len(i)));
    let out = t.is_out_of_service();
    drop((t, f));
    let umount = std::process::Command::new("umount").arg("-l").arg(dir.path()).status();
    assert!(umount.is_ok_and(|s| s.success()));
    assert!(right && full > 0 && !out, "right {right}, full {full}, out {out}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Random stores, restarts, evictions and reads against a model.
    #[test]
    fn what_comes_back_is_what_was_stored(
        ops in proptest::collection::vec((0u8..9, 0u32..6, 0u32..8), 1..80),
        compress in proptest::bool::ANY,
    ) {
        let rt = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
        let dir = tempfile::tempdir().expect("tempdir");
        let cfg = DiskConfig {
            compress: compress.then_some(3),
            ..config(dir.path(), 40 * BLOCK)
        };
        let mut tier = Some(DiskTier::open(cfg.clone(), Arc::new(PlainIo)).expect("open"));
        let mut small: HashMap<u32, Bytes> = HashMap::new();
        let size = 8 * BLOCK - 100;
        for (op, n, i) in ops {
            let t = tier.as_ref().expect("open");
            prop_assert_eq!(t.sizes.lock().values().sum::<u64>(), t.used_bytes());
            let (id, meta, b) = object(n, size);
            match op {
                0..=2 => {
                    let f = t.large(id, "t", &meta, b, true).expect("large").expect("file");
                    rt.block_on(t.put_block(&f, i, bytes(n, i, b.len(i)))).expect("put");
                }
                3 => {
                    // An id stands for its bytes.
                    let data = bytes(n, 0, 500 + 10_000 * n as usize);
                    t.put_small(ObjectId(u128::from(n)), &data).expect("put");
                    small.insert(n, data);
                }
                4 => t.forget(id),
                5 => {
                    drop(tier.take());
                    tier = Some(DiskTier::open(cfg.clone(), Arc::new(PlainIo)).expect("open"));
                }
                8 => {
                    let next = match i {
                        0 => Expected::Unknown,
                        1 => Expected::Late,
                        t => Expected::At(t.into()),
                    };
                    t.expect(ObjectId(u128::from(n)), 0, next);
                    t.expect(id, b.count(), next);
                }
                6 => {
                    if let Some(data) = t.small(ObjectId(u128::from(n))) {
                        prop_assert_eq!(Some(&data), small.get(&n));
                    }
                }
                _ => {
                    if let Some(f) = t.large(id, "t", &meta, b, false).expect("large") {
                        for i in 0..b.count() {
                            if f.is_unchecked(i) {
                                rt.block_on(t.verify_block(&f, i)).expect("verify");
                            }
                            if f.is_ready(i) {
                                prop_assert!(read(&f, &b, i) == bytes(n, i, b.len(i)));
                            }
                        }
                    }
                }
            }
        }
    }
}

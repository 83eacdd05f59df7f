//! The cache over a memory origin: right bytes, one fetch, bounded memory.

use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use rand::Rng;

use super::*;
use crate::io::PlainIo;
use crate::origin::{Fault, FaultKind, FaultPlan, MemoryOrigin, PutBody, PutOptions};

const MIB: u64 = 1 << 20;

fn config(dir: Option<&std::path::Path>, cache_bytes: u64) -> CacheConfig {
    CacheConfig {
        disks: dir
            .map(|d| DiskConfig {
                dir: d.to_path_buf(),
                max_bytes: cache_bytes,
                min_free_bytes: 0,
                compress: None,
            })
            .into_iter()
            .collect(),
        ram_bytes: 4 * MIB,
        buffer_bytes: 16 * MIB,
        block_bytes: 64 << 10,
        max_prefetches: 8,
    }
}

fn cache(dir: Option<&std::path::Path>, cache_bytes: u64) -> Cache {
    let io: Arc<dyn FileIo> = Arc::new(PlainIo);
    Cache::open(config(dir, cache_bytes), &io, Handle::current()).expect("open")
}

fn pattern(len: usize, salt: u32) -> Bytes {
    (0..len as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13 ^ salt) as u8)
        .collect::<Vec<_>>()
        .into()
}

async fn stored(o: &MemoryOrigin, key: &str, data: &Bytes) -> ObjectMeta {
    o.put(&key.into(), PutBody::Bytes(data.clone()), &PutOptions::default()).await.expect("put")
}

async fn read(o: &Arc<CachedObject>, at: u64, len: usize) -> Bytes {
    for _ in 0..10 {
        match o.read(at, len).await.expect("read").to_bytes() {
            Ok(b) => return b,
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
        }
    }
    panic!("evicted ten times");
}

#[tokio::test(flavor = "multi_thread")]
async fn random_reads_return_the_objects_bytes_with_and_without_a_disk() {
    let dir = tempfile::tempdir().expect("tempdir");
    for disk in [Some(dir.path()), None] {
        // Smaller than the data: eviction runs all the while.
        let c = cache(disk, 2 * MIB);
        let memory = Arc::new(MemoryOrigin::new("memory://t/"));
        let mut objects = Vec::new();
        for (n, len) in [0usize, 1, 1000, 65_536, 65_537, 3_000_001].into_iter().enumerate() {
            let data = pattern(len, n as u32);
            let meta = stored(&memory, &format!("k{n}"), &data).await;
            let origin: Arc<dyn Origin> = memory.clone();
            objects.push((c.object(&origin, &meta), data));
        }
        let objects = Arc::new(objects);
        let readers = (0..4).map(|_| {
            let objects = objects.clone();
            tokio::spawn(async move {
                for _ in 0..200 {
                    let (n, at, len) = {
                        let mut r = rand::rng();
                        (
                            r.random_range(0..objects.len()),
                            r.random_range(0..3_100_000u64),
                            r.random_range(0..400_000usize),
                        )
                    };
                    let (o, data) = &objects[n];
                    let got = read(o, at, len).await;
                    let from = (at as usize).min(data.len());
                    let to = (at as usize + len).min(data.len());
                    assert!(got == data.slice(from..to), "object {n}, {len} bytes at {at}");
                }
            })
        });
        for r in join_all(readers).await {
            r.expect("reader");
        }
        c.shutdown().await;
        assert_eq!(c.tasks(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_readers_of_one_block_cost_one_get() {
    let c = cache(None, 0);
    let memory = Arc::new(MemoryOrigin::new("memory://t/"));
    let data = pattern(50_000, 1);
    let meta = stored(&memory, "k", &data).await;
    let origin: Arc<dyn Origin> = memory.clone();
    let o = c.object(&origin, &meta);
    let reads = (0..100).map(|_| {
        let o = o.clone();
        tokio::spawn(async move { read(&o, 0, 50_000).await })
    });
    for r in join_all(reads).await {
        assert_eq!(r.expect("reader"), data);
    }
    assert_eq!(memory.gets(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_gives_up_cancels_nothing() {
    let c = cache(None, 0);
    let memory = Arc::new(MemoryOrigin::new("memory://t/"));
    let data = pattern(50_000, 1);
    let meta = stored(&memory, "k", &data).await;
    let origin: Arc<dyn Origin> = memory.clone();
    let o = c.object(&origin, &meta);
    let gone = tokio::time::timeout(Duration::ZERO, o.read(0, 10)).await;
    assert_eq!(read(&o, 0, 50_000).await, data);
    drop(gone);
    assert!(memory.gets() <= 1);
}

/// The cache survives a restart: no request to the origin, same bytes.
#[tokio::test(flavor = "multi_thread")]
async fn the_cache_survives_a_restart() {
    let dir = tempfile::tempdir().expect("tempdir");
    let memory = Arc::new(MemoryOrigin::new("memory://t/"));
    let origin: Arc<dyn Origin> = memory.clone();
    let (large, small) = (pattern(900_000, 1), pattern(5000, 2));
    let (ml, ms) = (stored(&memory, "l", &large).await, stored(&memory, "s", &small).await);
    {
        let c = cache(Some(dir.path()), 100 * MIB);
        c.object(&origin, &ml).warm().await.expect("warm");
        c.object(&origin, &ms).warm().await.expect("warm");
        assert!(c.object(&origin, &ml).passthrough().is_some());
        c.shutdown().await;
    }
    let gets = memory.gets();
    let c = cache(Some(dir.path()), 100 * MIB);
    let o = c.object(&origin, &ml);
    assert!(o.has(0..900_000), "known before it is checked");
    assert!(o.passthrough().is_none(), "but not handed to the kernel unchecked");
    assert_eq!(read(&o, 0, 900_000).await, large);
    assert_eq!(read(&c.object(&origin, &ms), 0, 5000).await, small);
    assert!(o.passthrough().is_some());
    assert_eq!(memory.gets(), gets);
}

/// C1, C2: a replaced object is another object, same size or not; the old
/// version is served from the cache or not at all.
#[tokio::test(flavor = "multi_thread")]
async fn c1_c2_versions_never_mix() {
    let c = cache(None, 0);
    let memory = Arc::new(MemoryOrigin::new("memory://t/"));
    let origin: Arc<dyn Origin> = memory.clone();
    let (old, new) = (pattern(300_000, 1), pattern(300_000, 9));
    let m1 = stored(&memory, "k", &old).await;
    let o1 = c.object(&origin, &m1);
    assert_eq!(read(&o1, 0, 65_536).await, old.slice(0..65_536));
    let m2 = stored(&memory, "k", &new).await;
    assert_eq!(read(&o1, 0, 65_536).await, old.slice(0..65_536), "cached: still the old version");
    let e = o1.read(200_000, 10).await.err().expect("gone");
    assert!(matches!(e, CacheError::Origin(OriginError::Changed { .. })), "{e}");
    assert_eq!(read(&c.object(&origin, &m2), 0, 300_000).await, new);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_fetch_fails_its_readers_and_the_next_read_tries_again() {
    let c = cache(None, 0);
    let memory = Arc::new(MemoryOrigin::new("memory://t/"));
    let data = pattern(1000, 1);
    let meta = stored(&memory, "k", &data).await;
    let origin: Arc<dyn Origin> =
        Arc::new(Fault::new(memory, FaultPlan::every(2, FaultKind::Unavailable)));
    let o = c.object(&origin, &meta);
    assert!(o.read(0, 10).await.is_err());
    assert_eq!(read(&o, 0, 1000).await, data);
}

#[tokio::test(flavor = "multi_thread")]
async fn prefetch_makes_reads_hits_and_returns_its_memory() {
    let dir = tempfile::tempdir().expect("tempdir");
    let c = cache(Some(dir.path()), 100 * MIB);
    let memory = Arc::new(MemoryOrigin::new("memory://t/"));
    let origin: Arc<dyn Origin> = memory.clone();
    let data = pattern(6_000_000, 1);
    let meta = stored(&memory, "k", &data).await;
    let o = c.object(&origin, &meta);
    o.prefetch(0..6_000_000).await;
    while c.fetches_in_flight() > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let hit = o.try_read(1_000_000, 2_000_000).expect("at hand");
    assert_eq!(hit.to_bytes().expect("bytes"), data.slice(1_000_000..3_000_000));
    assert_eq!(c.stats().snapshot().misses, 0);
    let gets = memory.gets();
    o.prefetch(0..6_000_000).await;
    assert_eq!(memory.gets(), gets, "nothing is missing");
    c.shutdown().await;
    assert_eq!(c.buffers_used_bytes(), 0);
}

/// I4: with the origin hanging, shutdown ends every task and every reader.
#[tokio::test(flavor = "multi_thread")]
async fn shutdown_ends_readers_of_a_hanging_origin() {
    let c = cache(None, 0);
    let memory = Arc::new(MemoryOrigin::new("memory://t/"));
    let meta = stored(&memory, "k", &pattern(1000, 1)).await;
    let origin: Arc<dyn Origin> =
        Arc::new(Fault::new(memory, FaultPlan::every(1, FaultKind::Hang)));
    let o = c.object(&origin, &meta);
    let reader = tokio::spawn({
        let o = o.clone();
        async move { o.read(0, 10).await.err() }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    c.shutdown().await;
    let e = reader.await.expect("reader").expect("failed");
    assert!(matches!(e, CacheError::ShuttingDown), "{e}");
}

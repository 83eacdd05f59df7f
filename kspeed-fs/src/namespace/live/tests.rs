//! The live namespace over a memory origin.

use bytes::Bytes;
use kspeed_cache::origin::{Fault, FaultKind, FaultPlan, MemoryOrigin, PutBody, PutOptions};

use super::*;

fn config(ttl_ms: u64) -> LiveConfig {
    LiveConfig {
        ttl: Duration::from_millis(ttl_ms),
        negative_ttl: Duration::from_millis(ttl_ms),
        max_inodes: 1_000_000,
        listing_bytes: 64 << 20,
    }
}

async fn put(o: &MemoryOrigin, key: &str, data: &str) -> ObjectMeta {
    o.put(&key.into(), PutBody::Bytes(Bytes::from(data.to_owned())), &PutOptions::default())
        .await
        .expect("put")
}

async fn walk(l: &Live, path: &str) -> Result<Attr, FsError> {
    let mut ino = ROOT;
    let mut attr = l.attr(ROOT)?.attr;
    for c in path.split('/') {
        attr = l.lookup(ino, c.as_bytes()).await?.attr;
        ino = attr.ino;
    }
    Ok(attr)
}

async fn names(l: &Live, ino: Ino) -> Vec<String> {
    let listing = l.listing(ino).await.expect("listing");
    listing.entries.iter().map(|e| String::from_utf8_lossy(&e.name).into_owned()).collect()
}

/// N1, N2, N8: odd keys follow the rules, in lookup and listing alike.
#[tokio::test]
async fn n1_n2_n8_odd_keys_follow_the_rules() {
    let o = Arc::new(MemoryOrigin::new("memory://t/"));
    for k in ["a//b", "/lead", "a/./b", "a/../b", "blue", "blue/x.jpg", "blue-2", "empty/", "a/ok"]
    {
        put(&o, k, "data").await;
    }
    put(&o, &format!("{}/x", "n".repeat(256)), "x").await;
    for whole_first in [false, true] {
        let l = Live::new(o.clone(), config(10_000));
        if whole_first {
            l.listing(ROOT).await.expect("listing");
        }
        assert_eq!(walk(&l, "blue").await.expect("blue").kind, Kind::Directory);
        assert_eq!(walk(&l, "blue/x.jpg").await.expect("x").kind, Kind::File);
        assert_eq!(walk(&l, "empty").await.expect("empty").kind, Kind::Directory);
        assert!(matches!(walk(&l, "lead").await, Err(FsError::NotFound)));
        assert_eq!(names(&l, ROOT).await, ["a", "blue", "blue-2", "empty"]);
        let a = walk(&l, "a").await.expect("a").ino;
        assert_eq!(names(&l, a).await, ["ok"]);
        let empty = walk(&l, "empty").await.expect("empty").ino;
        assert!(names(&l, empty).await.is_empty());
        assert!(l.hidden() >= 5, "{}", l.hidden());
    }
}

/// C2: another version is another inode; the old inode keeps its object.
#[tokio::test]
async fn c2_a_new_version_is_a_new_inode() {
    let o = Arc::new(MemoryOrigin::new("memory://t/"));
    put(&o, "f", "old").await;
    let l = Live::new(o.clone(), config(20));
    let old = walk(&l, "f").await.expect("f");
    put(&o, "f", "new").await;
    assert_eq!(walk(&l, "f").await.expect("f").ino, old.ino, "within the lifetime");
    tokio::time::sleep(Duration::from_millis(30)).await;
    let new = walk(&l, "f").await.expect("f");
    assert_ne!(new.ino, old.ino);
    assert_ne!(l.object(old.ino).expect("old").version, l.object(new.ino).expect("new").version);
    l.forget(old.ino, 2);
    assert!(l.object(old.ino).is_err());
    assert!(l.object(new.ino).is_ok());
}

#[tokio::test]
async fn absence_is_believed_for_its_lifetime_and_no_longer() {
    let o = Arc::new(MemoryOrigin::new("memory://t/"));
    let l = Live::new(o.clone(), config(20));
    assert!(matches!(walk(&l, "f").await, Err(FsError::NotFound)));
    put(&o, "f", "x").await;
    assert!(matches!(walk(&l, "f").await, Err(FsError::NotFound)));
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert!(walk(&l, "f").await.is_ok());
}

#[tokio::test]
async fn what_this_mount_makes_and_removes_is_seen_at_once() {
    let o = Arc::new(MemoryOrigin::new("memory://t/"));
    put(&o, "old", "x").await;
    let l = Live::new(o.clone(), config(10_000));
    assert_eq!(names(&l, ROOT).await, ["old"]);
    let wishes = Arc::new(parking_lot::Mutex::new(crate::writeback::Wishes::default()));
    l.overlay(wishes.clone());
    let wish = |key: &str, wish, base| crate::writeback::Change { key: key.into(), wish, base };
    use crate::writeback::Wish;
    use kspeed_cache::origin::{Attributes, Condition};
    let file = Wish::File { stage: 5, attributes: Attributes::default(), durable: true };
    let changes = [
        wish("new", Some(file), Condition::Absent),
        wish("old", Some(Wish::Absent), Condition::Any),
    ];
    wishes.lock().apply(&changes, true);
    let ino = walk(&l, "new").await.expect("wished").ino;
    assert_eq!(l.stage_of(ino), Some(5));
    assert_eq!(names(&l, ROOT).await, ["new"]);
    // Settled: the same inode, with the object that is there now.
    let meta = put(&o, "new", "y").await;
    o.delete(&"old".into()).await.expect("delete");
    let settled = [wish("new", None, Condition::Any), wish("old", None, Condition::Any)];
    wishes.lock().apply(&settled, true);
    l.settled(&"new".into(), Some(&meta));
    l.settled(&"old".into(), None);
    assert_eq!(walk(&l, "new").await.expect("settled").ino, ino);
    assert_eq!(l.object(ino).expect("object"), meta);
    assert_eq!(names(&l, ROOT).await, ["new"]);
    assert!(walk(&l, "new").await.is_ok());
    assert!(matches!(walk(&l, "old").await, Err(FsError::NotFound)));
}

/// F7: what is known is listed while the origin is away.
#[tokio::test]
async fn f7_an_expired_listing_is_served_while_the_origin_is_away() {
    let o = Arc::new(MemoryOrigin::new("memory://t/"));
    put(&o, "f", "x").await;
    let fault = Arc::new(Fault::new(o, FaultPlan::every(2, FaultKind::Unavailable)));
    fault.head(&"f".into()).await.expect_err("the plan's first call fails");
    let l = Live::new(fault, config(1));
    assert_eq!(names(&l, ROOT).await, ["f"]);
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(names(&l, ROOT).await, ["f"]);
}

/// F6: inodes and listings stay within their limits.
#[tokio::test]
async fn f6_memory_is_bounded() {
    let o = Arc::new(MemoryOrigin::new("memory://t/"));
    for d in 0..50 {
        for f in 0..20 {
            put(&o, &format!("d{d:02}/f{f:02}"), "x").await;
        }
    }
    let l = Arc::new(Live::new(
        o,
        LiveConfig { max_inodes: 100, listing_bytes: 20_000, ..config(10_000) },
    ));
    // A kernel that forgets a name when it is told to.
    type Slot = (Ino, Box<[u8]>);
    let mut kernel: HashMap<Slot, (Ino, u64)> = HashMap::new();
    let (told, tell) = std::sync::mpsc::channel();
    l.on_stale(Box::new(move |p, n| {
        let _ = told.send((p, Box::from(n)));
    }));
    for d in 0..50 {
        let dir = walk(&l, &format!("d{d:02}")).await.expect("dir").ino;
        for e in &l.listing(dir).await.expect("listing").entries {
            let a = l.adopt_listed(dir, e, 1).expect("adopt").attr;
            kernel.entry((dir, e.name.clone())).or_insert((a.ino, 0)).1 += 1;
        }
        while let Ok(slot) = tell.try_recv() {
            if let Some((ino, n)) = kernel.remove(&slot) {
                l.forget(ino, n);
            }
        }
    }
    assert!(l.inodes() <= 200, "{} inodes", l.inodes());
    assert!(l.listings_bytes() <= 40_000, "{} bytes", l.listings_bytes());
}

#[tokio::test]
async fn the_place_of_a_file_is_known_after_a_listing() {
    let o = Arc::new(MemoryOrigin::new("memory://t/"));
    for f in 0..10 {
        put(&o, &format!("d/f{f}"), "abcd").await;
    }
    let l = Live::new(o, config(10_000));
    let d = walk(&l, "d").await.expect("d").ino;
    l.listing(d).await.expect("listing");
    let f = walk(&l, "d/f3").await.expect("f3").ino;
    assert_eq!(l.place(f), Some((d, 3, 10, 4)));
    let next = l.files_at(d, 4..6);
    assert_eq!(next.len(), 2);
    assert_eq!(next[0].0, walk(&l, "d/f4").await.expect("f4").ino);
}

/// A forked name stays forked, even when the kernel forgets the new inode between
/// two lookups, as it does when it revalidates.
#[tokio::test]
async fn a_forked_name_never_falls_back_to_the_old_inode() {
    let o = Arc::new(MemoryOrigin::new("memory://t/"));
    put(&o, "f", "x").await;
    let l = Live::new(o, config(10_000));
    let old = walk(&l, "f").await.expect("f").ino;
    l.fork(old);
    let first = walk(&l, "f").await.expect("f").ino;
    assert_ne!(first, old);
    l.forget(first, 1);
    let second = walk(&l, "f").await.expect("f").ino;
    assert_ne!(second, old);
    assert_eq!(l.object(second).expect("new").version, l.object(old).expect("old").version);
}

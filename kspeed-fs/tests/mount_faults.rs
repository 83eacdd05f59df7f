//! What stores, networks and users do to a mount.

mod common;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{World, pattern, wait_until};
use kspeed_s3_server::{FaultKind, Shape};

/// F1: wrong answers of all kinds are tried again and never served.
#[test]
fn f1_a_misbehaving_store_is_never_believed() {
    for kind in [
        FaultKind::InternalError,
        FaultKind::SlowDown,
        FaultKind::CutBody,
        FaultKind::ShortBody,
        FaultKind::WrongRange,
        FaultKind::XmlAsData,
    ] {
        let w = World::new();
        let data = pattern(25_000_000, 1);
        w.put("f", &data);
        w.put("small", &data[..70_000]);
        let m = w.mount(&["--no-passthrough"]);
        w.server.faults().every_get(2, kind);
        assert!(m.read("f").expect("read") == data, "{kind:?}");
        assert!(m.read("small").expect("read") == data[..70_000], "{kind:?}");
        w.server.faults().heal();
    }
}

/// F2: SlowDown for a while: the reader waits, then goes on.
#[test]
fn f2_slow_down_makes_readers_wait_not_fail() {
    let w = World::new();
    let data = pattern(5_000_000, 1);
    w.put("f", &data);
    let m = w.mount(&[]);
    w.server.faults().every(1, FaultKind::SlowDown);
    std::thread::scope(|s| {
        let reader = s.spawn(|| m.read("f"));
        std::thread::sleep(Duration::from_secs(4));
        assert!(!reader.is_finished());
        let before = w.server.requests().total();
        std::thread::sleep(Duration::from_secs(1));
        assert!(w.server.requests().total() - before < 100, "backs off");
        w.server.faults().heal();
        assert!(reader.join().expect("reader").expect("read") == data);
    });
}

/// F3: credentials expire during a long read: read again from their source.
#[test]
fn f3_credentials_that_expire_in_mid_read_are_refreshed() {
    let w = World::new();
    let data = pattern(60_000_000, 1);
    w.put("f", &data);
    let file = w.dir.path().join("credentials");
    let write = |k: &str, s: &str| {
        fs::write(
            &file,
            format!("[default]\naws_access_key_id = {k}\naws_secret_access_key = {s}\n"),
        )
        .expect("write");
    };
    write("kspeed", "kspeed-secret");
    let child = w
        .kspeed()
        .env_remove("AWS_ACCESS_KEY_ID")
        .env_remove("AWS_SECRET_ACCESS_KEY")
        .env("AWS_SHARED_CREDENTIALS_FILE", &file)
        .args(["mount", "s3://bucket"])
        .arg(w.mnt())
        .args(["--foreground", "--predict", "off"])
        .spawn()
        .expect("spawn");
    let m = common::Mount { child, mnt: w.mnt() };
    wait_until("mounted", || m.path(".kspeed/status").exists());
    let mut f = File::open(m.path("f")).expect("open");
    let mut got = vec![0; 10_000_000];
    f.read_exact(&mut got).expect("read");
    write("other", "other-secret");
    w.server.rotate_credentials("other", "other-secret");
    f.read_to_end(&mut got).expect("read on");
    assert!(got == data);
}

/// F5: 20,000 stats, then 200 in parallel: every request is answered.
#[test]
fn f5_thousands_of_stats_are_all_answered() {
    let w = World::new();
    w.server
        .store()
        .put_names(common::BUCKET, (0..2000).map(|i| format!("d{}/f{i}", i % 20)))
        .expect("names");
    let m = w.mount(&["--metadata-ttl", "0s"]);
    for i in 0..20_000 {
        let i = i % 2000;
        fs::metadata(m.path(&format!("d{}/f{i}", i % 20))).expect("stat");
    }
    std::thread::scope(|s| {
        for t in 0..200 {
            let m = &m;
            s.spawn(move || {
                for i in 0..20 {
                    let i = (t * 20 + i) % 2000;
                    fs::metadata(m.path(&format!("d{}/f{i}", i % 20))).expect("stat");
                }
            });
        }
    });
    assert_eq!(m.counter("errors"), 0);
    assert!(m.umount().success());
}

/// F6: hundreds of descriptors with KiB-sized random reads stay within the
/// memory limit.
#[test]
fn f6_memory_stays_within_its_limit() {
    let w = World::new();
    let data = pattern(64_000_000, 1);
    for i in 0..4 {
        w.put(&format!("f{i}"), &data);
    }
    let m = w.mount(&["--no-passthrough", "--memory-limit", "192MiB"]);
    let limit = m.status()["memory_limit_bytes"].as_u64().expect("limit");
    let mut most = 0;
    std::thread::scope(|s| {
        let threads: Vec<_> = (0..4usize)
            .map(|t| {
                let (m, data) = (&m, &data);
                s.spawn(move || {
                    let files: Vec<File> = (0..75)
                        .map(|i| File::open(m.path(&format!("f{}", i % 4))).expect("open"))
                        .collect();
                    let mut x = t as u64 + 1;
                    let mut buf = vec![0; 4096];
                    for i in 0..6000 {
                        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let at = (x >> 30) as usize % (data.len() - buf.len());
                        files[i % files.len()].read_exact_at(&mut buf, at as u64).expect("read");
                        assert!(buf == data[at..at + buf.len()]);
                    }
                })
            })
            .collect();
        while threads.iter().any(|t| !t.is_finished()) {
            most = most.max(m.status()["resident_bytes"].as_u64().expect("resident"));
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    assert!(most <= limit, "{most} > {limit}");
}

/// F7: the network is cut while reading, listing and closing: calls end by their
/// deadline, `ls` of what is known goes on, a reader can be killed, and all works
/// again when the network does.
#[test]
fn f7_a_cut_network_hangs_nothing() {
    let w = World::new();
    let data = pattern(30_000_000, 1);
    w.put("d/f", &data);
    w.put("d/known", "x");
    w.put("e/unknown", "x");
    let m = w.mount(&[
        "--ack",
        "origin",
        "--io-timeout",
        "4s",
        "--metadata-ttl",
        "1s",
        "--predict",
        "off",
    ]);
    assert_eq!(m.names("d"), ["f", "known"]);
    let f = File::open(m.path("d/f")).expect("open");
    let mut buf = vec![0; 4096];
    f.read_exact_at(&mut buf, 0).expect("read");
    let mut open_for_write = File::create(m.path("d/new")).expect("create");
    std::io::Write::write_all(&mut open_for_write, b"new").expect("write");
    w.server.faults().every(1, FaultKind::Hang);

    let ended =
        |e: &std::io::Error| [Some(libc::EIO), Some(libc::ETIMEDOUT)].contains(&e.raw_os_error());
    let began = Instant::now();
    let e = f.read_exact_at(&mut buf, 20_000_000).expect_err("cut");
    assert!(ended(&e), "read: {e}");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let e = fs::read_dir(m.path("e")).map(drop).expect_err("cut");
    assert!(ended(&e), "ls of what is not known: {e}");
    assert!(m.names("d").contains(&"known".to_owned()), "ls of what is known");
    let began = Instant::now();
    let e = open_for_write.sync_all().expect_err("cut");
    assert!(ended(&e), "fsync: {e}");
    assert!(began.elapsed() < Duration::from_secs(40), "{:?}", began.elapsed());

    // A reader that is killed is gone at once, not at its deadline.
    let mut reader = Command::new("dd")
        .arg(format!("if={}", m.path("d/f").display()))
        .args(["of=/dev/null", "bs=4096", "skip=6000", "count=1", "status=none"])
        .spawn()
        .expect("dd");
    std::thread::sleep(Duration::from_millis(500));
    let began = Instant::now();
    reader.kill().expect("kill");
    reader.wait().expect("wait");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());

    w.server.faults().heal();
    wait_until("reads work again", || f.read_exact_at(&mut buf, 20_000_000).is_ok());
    assert!(buf == data[20_000_000..20_004_096]);
    open_for_write.sync_all().expect("fsync works again");
    drop(open_for_write);
    assert_eq!(w.object("d/new").as_deref(), Some(b"new".as_slice()));
}

/// F7, at the end: a daemon whose store hangs can be told to go, and goes.
#[test]
fn f7_sigterm_ends_a_daemon_whose_store_hangs() {
    let w = World::new();
    w.put("f", pattern(10_000_000, 1));
    let mut m = w.mount(&["--predict", "off"]);
    let f = File::open(m.path("f")).expect("open");
    w.server.faults().every(1, FaultKind::Hang);
    let reader = std::thread::spawn(move || {
        let mut buf = [0; 10];
        f.read_exact_at(&mut buf, 0)
    });
    std::thread::sleep(Duration::from_millis(300));
    Command::new("kill").arg(m.child.id().to_string()).status().expect("kill");
    let began = Instant::now();
    while m.child.try_wait().expect("wait").is_none() {
        assert!(began.elapsed() < Duration::from_secs(15), "it does not go");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(reader.join().expect("reader").is_err());
}

/// A slow store does not make others wait: a hit is served while misses hang.
#[test]
fn a_slow_store_does_not_block_hits() {
    let w = World::new();
    w.put("warm", pattern(50_000, 1));
    for i in 0..40 {
        w.put(&format!("cold{i}"), pattern(50_000, 2));
    }
    let m = w.mount(&["--predict", "off"]);
    m.read("warm").expect("read");
    m.names("");
    w.server.set_shape(Shape { latency: Duration::from_secs(3), ..Shape::default() });
    std::thread::scope(|s| {
        for i in 0..40 {
            let m = &m;
            s.spawn(move || m.read(&format!("cold{i}")).expect("read"));
        }
        std::thread::sleep(Duration::from_millis(500));
        let began = Instant::now();
        for _ in 0..100 {
            m.read("warm").expect("read");
        }
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    });
}

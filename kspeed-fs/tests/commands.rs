//! The program as a user runs it.

mod common;

use std::fs;
use std::process::{Command, Output};

use common::{World, is_mounted, pattern};

fn text(o: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr))
}

#[test]
fn mount_returns_when_it_serves_and_umount_when_the_daemon_has_ended() {
    let w = World::new();
    w.put("f", "bytes");
    let out = w.kspeed().args(["mount", "s3://bucket"]).arg(w.mnt()).output().expect("mount");
    assert!(out.status.success(), "{}", text(&out));
    assert_eq!(fs::read(w.mnt().join("f")).expect("read"), b"bytes");
    let out = w.kspeed().args(["status", "--json"]).arg(w.mnt()).output().expect("status");
    let status: serde_json::Value = serde_json::from_slice(&out.stdout).expect("json");
    let pid = status[0]["pid"].as_u64().expect("pid");
    let out = w.kspeed().arg("status").arg(w.mnt()).output().expect("status");
    assert!(text(&out).contains("s3://bucket on "), "{}", text(&out));
    let out = w.kspeed().arg("stats").arg(w.mnt()).output().expect("stats");
    assert!(text(&out).contains("\nkspeed_origin_gets_total "), "{}", text(&out));
    let out = w.kspeed().arg("umount").arg(w.mnt()).output().expect("umount");
    assert!(out.status.success(), "{}", text(&out));
    assert!(!is_mounted(&w.mnt()));
    let alive = fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z "));
    assert!(!alive, "the daemon lives on");
}

#[test]
fn warm_evict_pin_and_ls_cache() {
    let w = World::new();
    w.put("d/a", pattern(3_000_000, 1));
    w.put("d/b", pattern(70_000, 2));
    let m = w.mount(&[]);
    let run = |args: &[&str]| {
        let out = w
            .kspeed()
            .args(&args[..1])
            .args(&args[1..args.len() - 1])
            .arg(m.path(args[args.len() - 1]))
            .output()
            .expect("run");
        assert!(out.status.success(), "{args:?}: {}", text(&out));
        text(&out)
    };
    let cached = || -> Vec<(String, u64, bool)> {
        run(&["ls-cache", "--json", "d"])
            .lines()
            .map(|l| {
                let v: serde_json::Value = serde_json::from_str(l).expect("json");
                (
                    v["path"].as_str().expect("path").into(),
                    v["cached"].as_u64().expect("cached"),
                    v["pinned"].as_bool().expect("pinned"),
                )
            })
            .collect()
    };
    assert_eq!(cached(), [("d/a".into(), 0, false), ("d/b".into(), 0, false)]);
    assert!(run(&["warm", "--pin", "d"]).contains("2 files"));
    assert_eq!(cached(), [("d/a".into(), 3_000_000, true), ("d/b".into(), 70_000, true)]);
    let gets = w.gets();
    assert!(m.read("d/a").expect("read") == pattern(3_000_000, 1));
    assert_eq!(w.gets(), gets);
    run(&["unpin", "d"]);
    run(&["evict", "d/a"]);
    assert_eq!(cached(), [("d/a".into(), 0, false), ("d/b".into(), 70_000, false)]);
    assert!(m.read("d/a").expect("read") == pattern(3_000_000, 1));
    // A list from a file; what fails is told, and so is the exit code.
    let list = w.dir.path().join("list");
    fs::write(&list, format!("{}\n{}\n", m.path("d/a").display(), m.path("d/none").display()))
        .expect("write");
    let out = w.kspeed().args(["warm", "--list"]).arg(&list).output().expect("warm");
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out).contains("d/none"), "{}", text(&out));
}

#[test]
fn wrong_usage_ends_at_once_with_the_allowed_values() {
    let w = World::new();
    for (args, code, says) in [
        (&["mount", "gs://b", "/mnt"][..], 2, "s3://BUCKET"),
        (&["mount", "s3://b", "/mnt", "--predict", "always"], 2, "off, sequential or auto"),
        (&["mount", "s3://b", "/mnt", "--memory-limit", "lots"], 2, "512MiB"),
        (&["mount", "s3://b", "/mnt", "--no-such-flag"], 2, "--no-such-flag"),
        (&["mount"], 2, "the source is missing"),
        (&["status", "/"], 1, "not in a KSpeed mount"),
    ] {
        let out = w.kspeed().args(args).output().expect("run");
        assert_eq!(out.status.code(), Some(code), "{args:?}: {}", text(&out));
        assert!(text(&out).contains(says), "{args:?}: {}", text(&out));
    }
}

#[test]
fn a_mount_that_can_not_be_is_explained() {
    let w = World::new();
    let try_mount = |source: &str, secret: &str, mnt: &std::path::Path| {
        let out = w
            .kspeed()
            .env("AWS_SECRET_ACCESS_KEY", secret)
            .args(["mount", source, "--io-timeout", "3s"])
            .arg(mnt)
            .output()
            .expect("run");
        assert_eq!(out.status.code(), Some(1), "{}", text(&out));
        text(&out)
    };
    let t = try_mount("s3://nosuchbucket", "kspeed-secret", &w.mnt());
    assert!(t.contains("bucket") && t.contains("not there"), "{t}");
    let t = try_mount("s3://bucket", "wrong", &w.mnt());
    assert!(t.contains("access denied") && t.contains("credentials"), "{t}");
    let t = try_mount("s3://bucket", "kspeed-secret", &w.dir.path().join("nowhere"));
    assert!(t.contains("existing directory"), "{t}");
    let _m = w.mount(&[]);
    let t = try_mount("s3://bucket", "kspeed-secret", &w.dir.path().join("s3"));
    assert!(t.contains("in use by process"), "{t}");
}

#[test]
fn doctor_explains() {
    let w = World::new();
    let doctor = |change: &dyn Fn(&mut Command)| {
        let mut c = w.kspeed();
        c.args(["doctor", "s3://bucket"]);
        change(&mut c);
        text(&c.output().expect("doctor"))
    };
    let t = doctor(&|_| {});
    for line in [
        "ok    FUSE device",
        "ok    credentials",
        "ok    clock",
        "ok    origin",
        "ok    cache disk",
    ] {
        assert!(t.contains(line), "{line}: {t}");
    }
    let t = doctor(&|c| {
        c.env("AWS_SECRET_ACCESS_KEY", "wrong");
    });
    assert!(t.contains("FAIL  credentials"), "{t}");
    let t = doctor(&|c| {
        c.env("KSPEED_ENDPOINT_URL", "http://127.0.0.1:1");
    });
    assert!(t.contains("FAIL  origin") && t.contains("not available"), "{t}");
    // A full disk, for real.
    let full = w.dir.path().join("full");
    fs::create_dir(&full).expect("mkdir");
    let s = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=512k", "t"])
        .arg(&full)
        .status()
        .expect("mount");
    assert!(s.success());
    let t = doctor(&|c| {
        c.env("KSPEED_CACHE_DIR", &full);
    });
    Command::new("umount").arg(&full).status().expect("umount");
    assert!(t.contains("FAIL  cache disk") && t.contains("the disk is full"), "{t}");
}

#[test]
fn one_process_serves_several_mounts_over_one_cache() {
    let w = World::new();
    w.put("x/f", "X");
    w.put("y/f", "Y");
    let (a, b) = (w.dir.path().join("a"), w.dir.path().join("b"));
    fs::create_dir(&a).expect("mkdir");
    fs::create_dir(&b).expect("mkdir");
    let config = w.dir.path().join("kspeed.toml");
    fs::write(
        &config,
        format!(
            "[[mount]]\nsource = \"s3://bucket/x\"\nmountpoint = {a:?}\n[[mount]]\nsource = \"s3://bucket/y\"\nmountpoint = {b:?}\nread-only = true\n"
        ),
    )
    .expect("write");
    let out = w.kspeed().args(["mount", "--config"]).arg(&config).output().expect("mount");
    assert!(out.status.success(), "{}", text(&out));
    assert_eq!(fs::read(a.join("f")).expect("read"), b"X");
    assert_eq!(fs::read(b.join("f")).expect("read"), b"Y");
    assert!(fs::write(b.join("g"), "x").is_err());
    for m in [&a, &b] {
        let out = w.kspeed().arg("umount").arg(m).output().expect("umount");
        assert!(out.status.success(), "{}", text(&out));
    }
}

#[test]
fn metrics_are_served_to_prometheus() {
    use std::io::{Read, Write};
    let w = World::new();
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("bind")
        .local_addr()
        .expect("addr")
        .port();
    let m = w.mount(&["--metrics", &format!("127.0.0.1:{port}")]);
    let mut s = std::net::TcpStream::connect(("127.0.0.1", port)).expect("connect");
    s.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("write");
    let mut t = String::new();
    s.read_to_string(&mut t).expect("read");
    assert!(t.contains("# TYPE kspeed_mount_reads_total counter"), "{t}");
    assert!(t.contains(&format!("kspeed_mount_reads_total{{mountpoint=\"{}\"}}", m.mnt.display())));
}

#[test]
fn version_and_completions() {
    let w = World::new();
    let t = text(&w.kspeed().arg("version").output().expect("run"));
    assert_eq!(t.trim(), concat!("kspeed ", env!("CARGO_PKG_VERSION")));
    let t = text(&w.kspeed().args(["completions", "bash"]).output().expect("run"));
    assert!(t.contains("complete -F _kspeed"));
}

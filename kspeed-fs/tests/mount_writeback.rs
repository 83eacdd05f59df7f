//! Write-back through real mounts: close returns when the cache disk has it, the
//! bucket has it later, and nothing that was acknowledged is lost.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::process::Command;
use std::time::{Duration, Instant};

use common::{BUCKET, Mount, World, pattern, wait_until};
use kspeed_s3_server::FaultKind;

const FAST: &[&str] = &["--upload-delay", "0s"];

fn pending(m: &Mount) -> u64 {
    m.status()["mounts"][0]["pending"]["changes"].as_u64().expect("changes")
}

fn settled(m: &Mount) {
    wait_until("uploaded", || pending(m) == 0);
}

/// `kspeed sync` of a path.
fn sync(w: &World, m: &Mount, path: &str) -> std::process::Output {
    w.kspeed().arg("sync").arg(m.path(path)).output().expect("sync")
}

/// Close, rename, mkdir and unlink wait for no network; what they did is seen at
/// once, and in the bucket when the network is there.
#[test]
fn nothing_waits_for_a_store_that_hangs() {
    for kind in [&[][..], &["--no-passthrough"]] {
        let w = World::new();
        w.put("ckpt/old", "old");
        let args = [FAST, kind, &["--io-timeout", "3s"]].concat();
        let m = w.mount(&args);
        assert_eq!(m.names("ckpt"), ["old"]);
        w.server.faults().every(1, FaultKind::Hang);
        let began = Instant::now();
        fs::create_dir(m.path("ckpt/step1")).expect("mkdir");
        for i in 0..20 {
            let tmp = m.path(&format!("ckpt/step1/{i}.tmp"));
            fs::write(&tmp, pattern(300_000, i)).expect("write");
            File::open(&tmp).expect("open").sync_all().expect("fsync");
            fs::rename(&tmp, m.path(&format!("ckpt/step1/{i}.pt"))).expect("rename");
        }
        fs::remove_file(m.path("ckpt/old")).expect("unlink");
        let took = began.elapsed();
        assert!(took < Duration::from_secs(3), "{took:?}");
        assert_eq!(m.names("ckpt"), ["step1"]);
        assert_eq!(m.names("ckpt/step1").len(), 20);
        assert!(m.read("ckpt/step1/7.pt").expect("read") == pattern(300_000, 7));
        assert!(pending(&m) >= 20);
        assert!(w.object("ckpt/step1/7.pt").is_none());
        w.server.faults().heal();
        settled(&m);
        let keys = w.server.store().keys(BUCKET);
        assert_eq!(keys.len(), 21, "{kind:?}: {keys:?}");
        for i in 0..20 {
            let key = format!("ckpt/step1/{i}.pt");
            assert!(w.object(&key).expect("object") == pattern(300_000, i));
            assert!(m.read(&key).expect("read") == pattern(300_000, i));
        }
        assert!(m.umount().success());
    }
}

/// W1: a file moved into a directory while it is uploaded.
#[test]
fn w1_a_file_that_is_moved_while_it_is_uploaded() {
    for size in [1000, 40_000_000] {
        let w = World::new();
        let m = w.mount(FAST);
        let data = pattern(size, 1);
        fs::write(m.path("t"), &data).expect("write");
        fs::create_dir(m.path("d")).expect("mkdir");
        std::thread::sleep(Duration::from_millis(30));
        fs::rename(m.path("t"), m.path("d/t")).expect("mv");
        assert!(m.read("d/t").expect("read") == data);
        assert!(sync(&w, &m, "").status.success());
        assert_eq!(w.server.store().keys(BUCKET), ["d/", "d/t"]);
        assert!(w.object("d/t").expect("object") == data);
        assert_eq!(m.names(""), ["d"]);
        assert_eq!(w.server.store().uploads(BUCKET), 0, "no upload is left behind");
    }
}

/// W2: made, filled, moved and removed within the delay: nothing comes back.
#[test]
fn w2_nothing_that_was_removed_comes_back() {
    let w = World::new();
    let m = w.mount(&["--upload-delay", "300ms", "--metadata-ttl", "0s"]);
    let script = "mkdir old; touch old/f; mv old new; rm -rf new";
    let s = Command::new("sh").args(["-ec", script]).current_dir(&m.mnt).status().expect("sh");
    assert!(s.success());
    settled(&m);
    std::thread::sleep(Duration::from_millis(600));
    assert!(w.server.store().keys(BUCKET).is_empty(), "{:?}", w.server.store().keys(BUCKET));
    assert!(m.names("").is_empty());
    assert_eq!(m.counter("uploads"), 0, "what is deleted before it is sent is never sent");
}

/// W3, W15: a temporary name, attributes, a rename: uploaded once, under the final
/// name, with its attributes as user metadata.
#[test]
fn w3_w15_uploaded_once_under_the_final_name_with_its_attributes() {
    let w = World::new();
    let m = w.mount(&["--upload-delay", "500ms"]);
    let tmp = m.path(".f.XYZ");
    fs::write(&tmp, "data").expect("write");
    fs::set_permissions(&tmp, fs::Permissions::from_mode(0o640)).expect("chmod");
    std::os::unix::fs::chown(&tmp, Some(1234), Some(5678)).expect("chown");
    let t = std::time::UNIX_EPOCH + Duration::new(1_500_000_000, 123_000_000);
    File::options().write(true).open(&tmp).expect("open").set_modified(t).expect("utimes");
    fs::rename(&tmp, m.path("f")).expect("rename");
    let look = |m: &Mount| {
        let a = fs::metadata(m.path("f")).expect("stat");
        (a.mode() & 0o7777, a.uid(), a.gid(), a.mtime(), a.mtime_nsec())
    };
    let want = (0o640, 1234, 5678, 1_500_000_000, 123_000_000);
    assert_eq!(look(&m), want);
    settled(&m);
    assert_eq!(look(&m), want, "uploading changes nothing");
    assert_eq!(w.server.store().keys(BUCKET), ["f"]);
    assert_eq!(m.counter("uploads"), 1);
    let told = w.server.store().metadata(BUCKET, "f").expect("metadata");
    let has = |name: &str, value: &str| told.get(name).is_some_and(|v| v == value);
    assert!(has("mode", &0o100_640.to_string()) && has("uid", "1234") && has("gid", "5678"));
    assert!(has("mtime", "1500000000.123000000"), "{told:?}");
    // Of an object that is there already, too.
    fs::set_permissions(m.path("f"), fs::Permissions::from_mode(0o600)).expect("chmod");
    settled(&m);
    let told = w.server.store().metadata(BUCKET, "f").expect("metadata");
    assert_eq!(told.get("mode"), Some(&0o100_600.to_string()), "{told:?}");
    assert_eq!(look(&m).0, 0o600);
    assert_eq!(w.object("f").as_deref(), Some(b"data".as_slice()));
}

/// W4: written again while it is uploaded: the last bytes are what stays.
#[test]
fn w4_the_bucket_ends_with_the_last_bytes() {
    let w = World::new();
    let m = w.mount(FAST);
    for round in 0..4u32 {
        for (name, size) in [("small", 5000), ("large", 20_000_000)] {
            fs::write(m.path(name), pattern(size, round)).expect("write");
        }
        std::thread::sleep(Duration::from_millis(20));
        let f = OpenOptions::new().write(true).open(m.path("large")).expect("open");
        f.write_all_at(b"patched", 10_000_000).expect("write");
    }
    assert!(sync(&w, &m, "").status.success());
    let mut large = pattern(20_000_000, 3);
    large[10_000_000..10_000_007].copy_from_slice(b"patched");
    assert!(w.object("large").expect("object") == large);
    assert!(w.object("small").expect("object") == pattern(5000, 3));
    assert!(m.read("large").expect("read") == large);
    assert_eq!(w.server.store().uploads(BUCKET), 0);
    assert_eq!(m.counter("conflicts"), 0);
}

/// W5: unlinked or replaced while open: the old bytes stay readable through the
/// old descriptor, also those that were not fetched yet.
#[test]
fn w5_open_files_outlive_their_names() {
    for kind in [FAST, &["--upload-delay", "0s", "--no-passthrough"]] {
        let w = World::new();
        let old = pattern(9_000_000, 1);
        w.put("gone", &old);
        w.put("replaced", &old);
        let m = w.mount(kind);
        let readers = ["gone", "replaced"].map(|n| File::open(m.path(n)).expect("open"));
        let mut writer = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(m.path("mine"))
            .expect("create");
        writer.write_all(b"mine").expect("write");
        fs::remove_file(m.path("gone")).expect("unlink");
        fs::write(m.path("new"), "new").expect("write");
        fs::rename(m.path("new"), m.path("replaced")).expect("rename");
        fs::remove_file(m.path("mine")).expect("unlink");
        settled(&m);
        assert_eq!(w.server.store().keys(BUCKET), ["replaced"]);
        for r in &readers {
            let mut all = vec![0; old.len()];
            r.read_exact_at(&mut all, 0).expect("read");
            assert!(all == old, "{kind:?}");
        }
        writer.write_all(b" still").expect("write");
        writer.seek(SeekFrom::Start(0)).expect("seek");
        let mut text = String::new();
        writer.read_to_string(&mut text).expect("read");
        assert_eq!(text, "mine still");
        drop(writer);
        assert_eq!(m.read("replaced").expect("read"), b"new");
        settled(&m);
        assert_eq!(w.server.store().keys(BUCKET), ["replaced"]);
    }
}

/// W6, W8: sparse and extended files.
#[test]
fn w6_a_sparse_file_is_sparse_here() {
    let w = World::new();
    let m = w.mount(&["--upload-delay", "1h"]);
    let f = File::create(m.path("f")).expect("create");
    f.set_len(5_368_709_120).expect("truncate");
    f.write_all_at(b"x", 5_368_709_119).expect("write");
    drop(f);
    let a = fs::metadata(m.path("f")).expect("stat");
    assert_eq!(a.len(), 5_368_709_120);
    let mut b = [1; 10];
    let f = File::open(m.path("f")).expect("open");
    f.read_exact_at(&mut b, 5_368_709_110).expect("read");
    assert_eq!(&b, b"\0\0\0\0\0\0\0\0\0x");
    drop(f);
    fs::remove_file(m.path("f")).expect("unlink");
    assert_eq!(pending(&m), 0);
}

/// W9: appends of several processes are whole and none is lost.
#[test]
fn w9_appends_of_several_processes_are_whole() {
    let w = World::new();
    let m = w.mount(FAST);
    let one = |i: u32| {
        let line = format!("{i}").repeat(200);
        let script = format!("for n in $(seq 100); do echo {line} >> log; done");
        Command::new("sh").args(["-c", &script]).current_dir(&m.mnt).spawn().expect("sh")
    };
    for mut c in (0..4).map(one).collect::<Vec<_>>() {
        assert!(c.wait().expect("wait").success());
    }
    assert!(sync(&w, &m, "log").status.success());
    let text = String::from_utf8(w.object("log").expect("object")).expect("text");
    assert_eq!(text.lines().count(), 400);
    for i in 0..4 {
        let line = format!("{i}").repeat(200);
        assert_eq!(text.lines().filter(|l| **l == line).count(), 100);
    }
}

/// W10, W11, W14: sizes at every edge, reopened at once, right at each fsync.
#[test]
fn w14_sizes_at_the_edges_of_parts() {
    let w = World::new();
    let m = w.mount(FAST);
    let mib = 1 << 20;
    let sizes =
        [0, 1, 5 * mib - 1, 5 * mib, 5 * mib + 1, 16 * mib, 32 * mib, 32 * mib + 1, 48 * mib];
    for size in sizes {
        let name = format!("f{size}");
        let data = pattern(size, size as u32);
        let mut f = File::create(m.path(&name)).expect("create");
        f.write_all(&data).expect("write");
        f.sync_all().expect("fsync");
        assert_eq!(f.metadata().expect("fstat").len(), size as u64);
        drop(f);
        for _ in 0..5 {
            drop(OpenOptions::new().append(true).open(m.path(&name)).expect("open again"));
        }
    }
    assert!(sync(&w, &m, "").status.success());
    for size in sizes {
        let name = format!("f{size}");
        let (got, want) = (w.object(&name).expect("object"), pattern(size, size as u32));
        let differs = (0..size).find(|i| got.get(*i) != want.get(*i));
        assert!(got == want, "{size}: {} from {differs:?}", got.len());
        assert!(m.read(&name).expect("read") == pattern(size, size as u32), "{size}");
    }
    assert_eq!(w.server.store().uploads(BUCKET), 0);
}

/// W16: no room: ENOSPC for the next writer, and nothing acknowledged is lost.
#[test]
fn w16_writers_wait_for_room_and_then_get_enospc() {
    let w = World::new();
    let m = w.mount(&["--upload-delay", "0s", "--stage-size", "1MiB", "--io-timeout", "2s"]);
    assert!(m.names("").is_empty());
    w.server.faults().every(1, FaultKind::Hang);
    fs::create_dir(m.path("d")).expect("mkdir");
    fs::write(m.path("d/a"), pattern(2_000_000, 1)).expect("the first fits");
    let e = fs::write(m.path("d/b"), "x").expect_err("no room");
    assert_eq!(e.raw_os_error(), Some(libc::ENOSPC));
    w.server.faults().heal();
    // Room comes while a writer waits.
    let late = std::thread::spawn({
        let path = m.path("d/c");
        move || fs::write(path, "y")
    });
    late.join().expect("join").expect("written once there is room");
    settled(&m);
    assert!(w.object("d/a").expect("object") == pattern(2_000_000, 1));
    assert!(w.object("d/b").is_none());
}

/// A directory moves whole, with what is in the bucket and what is not.
#[test]
fn a_directory_moves_whole() {
    let w = World::new();
    w.put("a/x", "X");
    w.put("a/sub/y", pattern(3_000_000, 2));
    w.put("a/sub/marked/", "");
    w.put("b/other", "O");
    let m = w.mount(FAST);
    w.server.faults().heal();
    let inside = File::open(m.path("a/sub/y")).expect("open");
    fs::write(m.path("a/staged"), "S").expect("write");
    fs::rename(m.path("a"), m.path("b/moved")).expect("rename");
    assert!(fs::metadata(m.path("a")).is_err());
    assert_eq!(m.names("b/moved"), ["staged", "sub", "x"]);
    assert_eq!(m.names("b/moved/sub"), ["marked", "y"]);
    assert!(m.read("b/moved/sub/y").expect("read") == pattern(3_000_000, 2));
    let mut all = vec![0; 3_000_000];
    inside.read_exact_at(&mut all, 0).expect("the open file");
    // And back, and under a third name, before the first is done.
    fs::rename(m.path("b/moved"), m.path("a")).expect("back");
    fs::rename(m.path("a"), m.path("c")).expect("again");
    assert!(sync(&w, &m, "").status.success());
    let keys = w.server.store().keys(BUCKET);
    assert_eq!(keys, ["b/other", "c/staged", "c/sub/marked/", "c/sub/y", "c/x"]);
    assert!(w.object("c/sub/y").expect("object") == pattern(3_000_000, 2));
    assert_eq!(m.names(""), ["b", "c"]);
    let e = fs::rename(m.path("b"), m.path("c")).expect_err("not empty");
    assert_eq!(e.raw_os_error(), Some(libc::ENOTEMPTY));
    fs::create_dir(m.path("empty")).expect("mkdir");
    fs::rename(m.path("c"), m.path("empty")).expect("over an empty directory");
    settled(&m);
    assert_eq!(m.read("empty/x").expect("read"), b"X");
}

/// Swapped by three renames: no copy waits for another for ever.
#[test]
fn names_are_swapped() {
    let w = World::new();
    w.put("a", "A");
    w.put("b", "B");
    let m = w.mount(&["--upload-delay", "200ms"]);
    for (from, to) in [("a", "t"), ("b", "a"), ("t", "b")] {
        fs::rename(m.path(from), m.path(to)).expect("rename");
    }
    assert_eq!((m.read("a").expect("a"), m.read("b").expect("b")), (b"B".into(), b"A".into()));
    settled(&m);
    assert_eq!(w.object("a").as_deref(), Some(b"B".as_slice()));
    assert_eq!(w.object("b").as_deref(), Some(b"A".as_slice()));
    assert_eq!(w.server.store().keys(BUCKET).len(), 2);
}

/// Somebody else was there first: theirs keeps the name, ours is kept beside it.
#[test]
fn nothing_of_others_is_overwritten() {
    let w = World::new();
    w.put("both", "before");
    let m = w.mount(&["--upload-delay", "400ms"]);
    fs::write(m.path("new"), "ours").expect("write");
    let f = OpenOptions::new().append(true).open(m.path("both")).expect("open");
    (&f).write_all(b" ours").expect("write");
    drop(f);
    w.put("new", "theirs");
    w.put("both", "theirs");
    settled(&m);
    assert_eq!(w.object("new").as_deref(), Some(b"theirs".as_slice()));
    assert_eq!(w.object("both").as_deref(), Some(b"theirs".as_slice()));
    assert_eq!(m.counter("conflicts"), 2);
    let names = m.names("");
    for (name, ours) in [("new", "ours"), ("both", "before ours")] {
        assert_eq!(m.read(name).expect("read"), b"theirs");
        let aside = format!("{name}.kspeed-conflict-");
        let aside = names.iter().find(|n| n.starts_with(&aside)).expect("kept beside it");
        assert_eq!(m.read(aside).expect("read"), ours.as_bytes());
        assert_eq!(w.object(aside).as_deref(), Some(ours.as_bytes()));
    }
    // W12: deleted by others is no conflict.
    fs::write(m.path("f"), "1").expect("write");
    settled(&m);
    w.delete("f");
    fs::write(m.path("f"), "2").expect("write");
    settled(&m);
    assert_eq!(w.object("f").as_deref(), Some(b"2".as_slice()));
    assert_eq!(m.counter("conflicts"), 2);
}

/// Restore: a checkpoint that was uploaded is read back from this machine, also
/// after a restart.
#[test]
fn what_was_written_stays_in_the_cache() {
    let w = World::new();
    let m = w.mount(FAST);
    let data = pattern(25_000_000, 9);
    fs::write(m.path("ckpt.pt"), &data).expect("write");
    fs::write(m.path("small"), "s").expect("write");
    settled(&m);
    let gets = w.gets();
    assert!(m.read("ckpt.pt").expect("read") == data);
    assert!(m.umount().success());
    let m = w.mount(FAST);
    assert!(m.read("ckpt.pt").expect("read") == data);
    assert_eq!(m.read("small").expect("read"), b"s");
    assert_eq!(w.gets(), gets, "not one byte from the bucket");
}

/// Who works in a directory that was made here keeps it, whatever listings say
/// before and after it is in the bucket.
#[test]
fn a_working_directory_keeps_its_path() {
    let w = World::new();
    let m = w.mount(&["--upload-delay", "0s", "--metadata-ttl", "50ms", "--negative-ttl", "50ms"]);
    let script = "mkdir d; cd d; for i in $(seq 40); do ls .. >/dev/null; \
        /bin/pwd -P >/dev/null || exit 1; echo $i > f$i; sleep 0.01; done; ls | wc -l";
    let out = Command::new("sh").args(["-c", script]).current_dir(&m.mnt).output().expect("sh");
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.trim() == "40", "{text} {}", String::from_utf8_lossy(&out.stderr));
}

/// Commands: sync, status and `user.kspeed.state` tell what is where.
#[test]
fn sync_and_state_tell_what_is_where() {
    let w = World::new();
    let m = w.mount(&["--upload-delay", "1h"]);
    fs::create_dir(m.path("d")).expect("mkdir");
    fs::write(m.path("d/f"), "x").expect("write");
    let state = || {
        let out = Command::new("python3")
            .args([
                "-c",
                "import os,sys; print(os.getxattr(sys.argv[1], 'user.kspeed.state').decode())",
            ])
            .arg(m.path("d/f"))
            .output()
            .expect("python3");
        String::from_utf8_lossy(&out.stdout).trim().to_owned()
    };
    assert_eq!(state(), "staged");
    let out = w.kspeed().arg("status").arg(&m.mnt).output().expect("status");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(text.contains("not uploaded: 2"), "{text}");
    let out = sync(&w, &m, "d");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(state(), "clean");
    assert_eq!(w.server.store().keys(BUCKET), ["d/", "d/f"]);
    // It tells why it can't.
    fs::write(m.path("d/g"), "y").expect("write");
    w.server.faults().every(1, FaultKind::InternalError);
    let out = w
        .kspeed()
        .args(["umount"])
        .arg(&m.mnt)
        .env("KSPEED_DRAIN_PATIENCE", "1s")
        .output()
        .expect("umount");
    assert!(!out.status.success(), "still mounted, as something is not uploaded");
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(text.contains("--no-drain"), "{text}");
    w.server.faults().heal();
    assert!(w.kspeed().arg("umount").arg(&m.mnt).status().expect("umount").success());
    assert_eq!(w.object("d/g").as_deref(), Some(b"y".as_slice()));
}

/// A directory as the origin: names and attributes are native, renames too.
#[test]
fn a_directory_origin_is_written_behind() {
    let w = World::new();
    let dir = w.dir.path().join("native");
    fs::create_dir(&dir).expect("mkdir");
    let m = w.mount_source(&format!("file://{}", dir.display()), &w.mnt(), FAST);
    fs::create_dir(m.path("d")).expect("mkdir");
    fs::write(m.path("d/f"), pattern(30_000_000, 1)).expect("write");
    fs::set_permissions(m.path("d/f"), fs::Permissions::from_mode(0o640)).expect("chmod");
    fs::rename(m.path("d"), m.path("e")).expect("rename");
    assert!(m.read("e/f").expect("read") == pattern(30_000_000, 1));
    settled(&m);
    assert!(fs::read(dir.join("e/f")).expect("read") == pattern(30_000_000, 1));
    assert_eq!(fs::metadata(dir.join("e/f")).expect("stat").mode() & 0o7777, 0o640);
    assert!(!dir.join("d").exists());
    fs::remove_file(m.path("e/f")).expect("unlink");
    fs::remove_dir(m.path("e")).expect("rmdir");
    settled(&m);
    assert_eq!(fs::read_dir(&dir).expect("read_dir").count(), 0);
}

//! Names and listings through real mounts.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{World, wait_until};

const KINDS: [&[&str]; 3] = [&[], &["--read-only"], &["--read-only", "--snapshot"]];

/// N1, N2, N8: the rules of odd keys, in lookup and in readdir alike.
#[test]
fn n1_n2_n8_odd_keys_follow_the_rules_in_every_kind_of_mount() {
    let w = World::new();
    for k in ["a//b", "/lead", "a/./b", "a/../b", "marked/", "blue", "blue/x.jpg", "a/ok", "blue-2"]
    {
        w.put(k, "data");
    }
    for kind in KINDS {
        let m = w.mount(kind);
        assert_eq!(m.names(""), ["a", "blue", "blue-2", "marked"], "{kind:?}");
        assert_eq!(m.names("a"), ["ok"]);
        assert_eq!(m.names("blue"), ["x.jpg"]);
        assert!(m.names("marked").is_empty());
        assert!(fs::metadata(m.path("blue")).expect("stat").is_dir());
        assert_eq!(m.read("blue/x.jpg").expect("read"), b"data");
        assert_eq!(
            fs::metadata(m.path("lead")).expect_err("hidden").raw_os_error(),
            Some(libc::ENOENT)
        );
    }
}

/// N3: names that break URLs, XML or signatures.
#[test]
fn n3_odd_names_are_listed_and_opened_byte_for_byte() {
    let w = World::new();
    let mut names: Vec<String> = [
        "sp ace",
        "com,ma",
        "pl+us",
        "per%20cent",
        "ha#sh",
        "que?stion",
        "am&p",
        "eq=ual",
        "col:on",
        "quo\"te",
        "apos'trophe",
        "emoji-🦀",
        "accent-e\u{301}",
        "new\nline",
        "ctl-\u{13}",
        "back\\slash",
        "<xml>",
    ]
    .iter()
    .map(ToString::to_string)
    .collect();
    names.push("n".repeat(255));
    for n in &names {
        w.put(&format!("d/{n}"), n);
    }
    w.put(&format!("d/{}", "n".repeat(256)), "hidden");
    names.sort();
    for kind in KINDS {
        let m = w.mount(kind);
        assert_eq!(m.names("d"), names, "{kind:?}");
        for n in &names {
            assert_eq!(m.read(&format!("d/{n}")).expect("read"), n.as_bytes());
        }
        let e = fs::metadata(m.path(&format!("d/{}", "n".repeat(256)))).expect_err("too long");
        assert_eq!(e.raw_os_error(), Some(libc::ENAMETOOLONG));
    }
}

/// N4: a name that is not UTF-8 can't be a key: EILSEQ, for that name alone. On a
/// directory origin it is kept.
#[test]
fn n4_names_that_are_not_utf8() {
    let w = World::new();
    let bad = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    {
        let m = w.mount(&[]);
        let e = fs::write(m.mnt.join(bad), "x").expect_err("refused");
        assert_eq!(e.raw_os_error(), Some(libc::EILSEQ));
        fs::write(m.path("good"), "x").expect("write");
    }
    let dir = w.dir.path().join("native");
    fs::create_dir(&dir).expect("mkdir");
    fs::write(dir.join(bad), "native").expect("write");
    let m = w.mount_source(dir.to_str().expect("utf8"), &w.mnt(), &[]);
    assert_eq!(fs::read(m.mnt.join(bad)).expect("read"), b"native");
}

/// N5: `find` counts exactly, live and from a snapshot index; with the index it
/// asks the origin for nothing.
#[test]
fn n5_find_counts_354_714_keys_exactly() {
    let w = World::new();
    let mut left = 354_714u32;
    let mut keys = Vec::new();
    for a in 0.. {
        for b in 0..37 {
            for c in 0..211 {
                if left == 0 {
                    break;
                }
                left -= 1;
                keys.push(format!("train/{a:03}/{b:02}/{c:04}.jpg"));
            }
        }
        if left == 0 {
            break;
        }
    }
    w.server.store().put_names(common::BUCKET, keys.into_iter()).expect("names");
    let find = |m: &common::Mount| {
        let out = Command::new("sh")
            .arg("-c")
            .arg("find . -type f | wc -l")
            .current_dir(&m.mnt)
            .output()
            .expect("find");
        String::from_utf8_lossy(&out.stdout).trim().to_owned()
    };
    for kind in KINDS.into_iter().skip(1) {
        let m = w.mount(kind);
        let lists = w.server.requests().total();
        assert_eq!(find(&m), "354714", "{kind:?}");
        if kind.contains(&"--snapshot") {
            assert_eq!(w.server.requests().total(), lists);
        }
        let s = m.status();
        let resident = s["resident_bytes"].as_u64().expect("resident");
        assert!(resident <= s["memory_limit_bytes"].as_u64().expect("limit"), "{resident}");
    }
    // The index is reused: it costs the staleness check's few listings.
    let lists = w.server.requests().total();
    let m = w.mount(&["--read-only", "--snapshot"]);
    assert!(w.server.requests().total() - lists < 40);
    drop(m);
    // And it is built anew when it is stale.
    w.put("aaa", "new");
    let m = w.mount(&["--read-only", "--snapshot"]);
    assert_eq!(m.read("aaa").expect("read"), b"new");
}

/// N6: who reads a directory gets each entry that stays exactly once, while
/// others come and go; two readers at once.
#[test]
fn n6_each_entry_that_stays_is_listed_once_while_others_change() {
    for (count, kind) in [
        (2_500, &["--metadata-ttl", "0s"][..]),
        (2_500, &["--metadata-ttl", "0s", "--read-only"]),
        (100_000, &["--metadata-ttl", "1s"]),
    ] {
        let w = World::new();
        let stay: Vec<String> = (0..count).map(|i| format!("d/stay{i:06}")).collect();
        w.server.store().put_names(common::BUCKET, stay.into_iter()).expect("names");
        let m = w.mount(kind);
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            let read = || {
                for _ in 0..3 {
                    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
                    for e in fs::read_dir(m.path("d")).expect("read_dir") {
                        let name = e.expect("entry").file_name().to_string_lossy().into_owned();
                        *seen.entry(name).or_default() += 1;
                    }
                    let stayed = seen.keys().filter(|n| n.starts_with("stay")).count();
                    assert_eq!(stayed, count);
                    assert!(seen.values().all(|n| *n == 1));
                }
            };
            let readers = [s.spawn(read), s.spawn(read)];
            let changes = s.spawn(|| {
                let mut i = 0;
                while !stop.load(Ordering::Relaxed) {
                    w.put(&format!("d/come{i:05}"), "x");
                    w.delete(&format!("d/come{:05}", i / 2));
                    i += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let results: Vec<_> =
                readers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            stop.store(true, Ordering::Relaxed);
            changes.join().expect("changes");
            assert!(results.iter().all(Result::is_ok));
        });
    }
}

#[test]
fn remote_changes_are_seen_after_the_lifetime() {
    let w = World::new();
    w.put("old", "x");
    let m = w.mount(&["--metadata-ttl", "1s", "--negative-ttl", "1s"]);
    assert_eq!(m.names(""), ["old"]);
    assert!(fs::metadata(m.path("new")).is_err());
    w.put("new", "y");
    w.delete("old");
    wait_until("the listing", || m.names("") == ["new"]);
    wait_until("the new name", || m.read("new").is_ok_and(|b| b == b"y"));
    wait_until("the old name", || fs::metadata(m.path("old")).is_err());
}

#[test]
fn modes_owners_and_symbolic_links_are_as_documented() {
    let w = World::new();
    w.put("d/f", "x");
    use std::os::unix::fs::MetadataExt;
    {
        let m =
            w.mount(&["--uid", "1234", "--gid", "567", "--file-mode", "640", "--dir-mode", "750"]);
        let f = fs::metadata(m.path("d/f")).expect("stat");
        assert_eq!((f.uid(), f.gid(), f.mode() & 0o7777), (1234, 567, 0o640));
        assert_eq!(fs::metadata(m.path("d")).expect("stat").mode() & 0o7777, 0o750);
    }
    let dir = w.dir.path().join("native");
    fs::create_dir(&dir).expect("mkdir");
    fs::write(dir.join("target"), "bytes").expect("write");
    std::os::unix::fs::symlink("target", dir.join("link")).expect("symlink");
    let m = w.mount_source(&format!("file://{}", dir.display()), &w.mnt(), &["--read-only"]);
    assert_eq!(fs::read_link(m.path("link")).expect("readlink").to_str(), Some("target"));
    assert_eq!(m.read("link").expect("read"), b"bytes");
    let e = fs::write(m.path("new"), "x").expect_err("read-only");
    assert_eq!(e.raw_os_error(), Some(libc::EROFS));
}

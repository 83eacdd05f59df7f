//! Writing through real mounts: what close returns is in the bucket.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::process::Command;

use common::{World, pattern, wait_until};

const ORIGIN: &[&str] = &["--ack", "origin"];
const KINDS: [&[&str]; 2] = [ORIGIN, &["--ack", "origin", "--no-passthrough"]];

/// C4: what was written is read at once.
#[test]
fn c4_what_was_written_is_read_at_once() {
    for kind in KINDS {
        let w = World::new();
        let m = w.mount(kind);
        let out = Command::new("sh")
            .arg("-c")
            .arg("echo zz > a; cat a")
            .current_dir(&m.mnt)
            .output()
            .expect("sh");
        assert_eq!(out.stdout, b"zz\n", "{kind:?} {}", String::from_utf8_lossy(&out.stderr));
        assert_eq!(w.object("a").as_deref(), Some(b"zz\n".as_slice()));
        // Again, over what is there, longer and shorter.
        for text in ["longer than before\n", "s\n"] {
            fs::write(m.path("a"), text).expect("write");
            assert_eq!(m.read("a").expect("read"), text.as_bytes());
            assert_eq!(w.object("a").as_deref(), Some(text.as_bytes()));
        }
    }
}

/// C5: a second descriptor sees what the first has written and not flushed.
#[test]
fn c5_a_second_open_sees_what_is_not_flushed() {
    for kind in KINDS {
        let w = World::new();
        w.put("old", pattern(100_000, 1));
        let m = w.mount(kind);
        let mut f = File::create(m.path("new")).expect("create");
        f.write_all(b"not flushed").expect("write");
        assert_eq!(m.read("new").expect("read"), b"not flushed", "{kind:?}");
        let f = OpenOptions::new().write(true).open(m.path("old")).expect("open");
        f.write_all_at(b"patch", 50_000).expect("write");
        let mut want = pattern(100_000, 1);
        want[50_000..50_005].copy_from_slice(b"patch");
        assert!(m.read("old").expect("read") == want, "{kind:?}");
        drop(f);
        assert!(w.object("old").expect("object") == want);
        assert!(m.read("old").expect("read") == want);
    }
}

/// C6: another mount sees whole states only: never zeros where nothing was
/// written, and after fsync and a fresh open the same.
#[test]
fn c6_another_mount_sees_whole_states_only() {
    let w = World::new();
    let b = w.dir.path().join("b");
    fs::create_dir(&b).expect("mkdir");
    let cache_b = w.dir.path().join("cache-b");
    let ma = w.mount(ORIGIN);
    let mb = w.mount_at(
        &b,
        &[
            "--cache-dir",
            cache_b.to_str().expect("utf8"),
            "--metadata-ttl",
            "0s",
            "--negative-ttl",
            "0s",
        ],
    );
    let mut f = File::create(ma.path("log")).expect("create");
    let mut written = Vec::new();
    for i in 0..20u8 {
        let piece = vec![b'a' + i; 5000];
        f.write_all(&piece).expect("write");
        written.extend_from_slice(&piece);
        if i % 3 == 0 {
            f.sync_all().expect("fsync");
            assert!(mb.read("log").expect("read") == written);
        } else if let Ok(got) = mb.read("log") {
            assert!(!got.contains(&0), "zeros");
            assert!(written.starts_with(&got));
        }
    }
}

#[test]
fn large_files_go_up_in_parts_and_come_back() {
    for kind in KINDS {
        let w = World::new();
        let m = w.mount(kind);
        let data = pattern(70_000_000, 3);
        let mut f = File::create(m.path("big.pt.tmp")).expect("create");
        for c in data.chunks(1 << 20) {
            f.write_all(c).expect("write");
        }
        f.sync_all().expect("fsync");
        drop(f);
        fs::rename(m.path("big.pt.tmp"), m.path("big.pt")).expect("rename");
        assert!(w.object("big.pt").expect("object") == data, "{kind:?}");
        assert!(w.object("big.pt.tmp").is_none());
        assert!(m.read("big.pt").expect("read") == data);
        assert_eq!(m.names(""), ["big.pt"]);
    }
}

#[test]
fn append_truncate_and_sparse_writes() {
    for kind in KINDS {
        let w = World::new();
        w.put("f", "0123456789");
        let m = w.mount(kind);
        let mut f = OpenOptions::new().append(true).open(m.path("f")).expect("open");
        f.write_all(b"abc").expect("append");
        drop(f);
        assert_eq!(w.object("f").as_deref(), Some(b"0123456789abc".as_slice()), "{kind:?}");
        let f = OpenOptions::new().write(true).open(m.path("f")).expect("open");
        f.set_len(4).expect("truncate");
        assert_eq!(fs::metadata(m.path("f")).expect("stat").len(), 4);
        f.write_all_at(b"z", 9).expect("write");
        drop(f);
        assert_eq!(w.object("f").as_deref(), Some(b"0123\0\0\0\0\0z".as_slice()));
        assert_eq!(m.read("f").expect("read"), b"0123\0\0\0\0\0z");
        // By path, without a descriptor; and W7: cut to nothing, write nothing.
        let s =
            Command::new("truncate").args(["-s", "2"]).arg(m.path("f")).status().expect("truncate");
        assert!(s.success());
        assert_eq!(w.object("f").as_deref(), Some(b"01".as_slice()));
        drop(OpenOptions::new().write(true).truncate(true).open(m.path("f")).expect("open"));
        assert_eq!(w.object("f").as_deref(), Some(b"".as_slice()));
        assert_eq!(m.read("f").expect("read"), b"");
    }
}

#[test]
fn directories_are_made_listed_and_removed() {
    let w = World::new();
    let m = w.mount(ORIGIN);
    fs::create_dir(m.path("d")).expect("mkdir");
    assert_eq!(fs::create_dir(m.path("d")).expect_err("exists").raw_os_error(), Some(libc::EEXIST));
    assert!(m.names("d").is_empty());
    fs::write(m.path("d/f"), "x").expect("write");
    let e = fs::remove_dir(m.path("d")).expect_err("not empty");
    assert_eq!(e.raw_os_error(), Some(libc::ENOTEMPTY));
    fs::remove_file(m.path("d/f")).expect("unlink");
    assert!(w.object("d/f").is_none());
    fs::remove_dir(m.path("d")).expect("rmdir");
    assert!(m.names("").is_empty());
    assert!(w.server.store().keys(common::BUCKET).is_empty());
    // N8: a directory that somebody else marked.
    w.put("marked/", "");
    wait_until("listed", || fs::remove_dir(m.path("marked")).is_ok());
    assert!(w.server.store().keys(common::BUCKET).is_empty());
    // W12: created, deleted remotely, created again.
    fs::write(m.path("f"), "1").expect("write");
    w.delete("f");
    fs::write(m.path("f"), "2").expect("write again");
    assert_eq!(w.object("f").as_deref(), Some(b"2".as_slice()));
}

#[test]
fn renames_replace_and_directories_move_whole() {
    let w = World::new();
    w.put("a", "A");
    w.put("b", "B");
    w.put("dir/x", "X");
    w.put("dir/sub/y", "Y");
    let m = w.mount(ORIGIN);
    let old = File::open(m.path("b")).expect("open");
    fs::rename(m.path("a"), m.path("b")).expect("rename");
    assert_eq!(m.read("b").expect("read"), b"A");
    assert!(fs::metadata(m.path("a")).is_err());
    let mut text = String::new();
    // The replaced file's old descriptor: its bytes if cached, else ESTALE.
    match (&old).read_to_string(&mut text) {
        Ok(_) => assert_eq!(text, "B"),
        Err(e) => assert_eq!(e.raw_os_error(), Some(libc::ESTALE)),
    }
    fs::rename(m.path("dir"), m.path("moved")).expect("rename");
    assert_eq!(m.read("moved/sub/y").expect("read"), b"Y");
    assert!(w.object("dir/x").is_none() && w.object("moved/x").is_some());
}

/// W5 as far as it goes without the journal: an unlinked file that is open for
/// writing stays usable and never appears in the bucket again.
#[test]
fn w5_an_unlinked_open_file_stays_usable() {
    let w = World::new();
    let m = w.mount(ORIGIN);
    let mut f = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(m.path("f"))
        .expect("create");
    f.write_all(b"before").expect("write");
    fs::remove_file(m.path("f")).expect("unlink");
    f.write_all(b" after").expect("write");
    let mut s = String::new();
    f.seek(SeekFrom::Start(0)).expect("seek");
    f.read_to_string(&mut s).expect("read");
    assert_eq!(s, "before after");
    drop(f);
    assert!(w.object("f").is_none());
    assert!(m.names("").is_empty());
}

/// A directory as the origin: the same, with native files.
#[test]
fn a_directory_origin_is_written_natively() {
    let w = World::new();
    let dir = w.dir.path().join("native");
    fs::create_dir(&dir).expect("mkdir");
    let m = w.mount_source(&format!("file://{}", dir.display()), &w.mnt(), ORIGIN);
    fs::create_dir(m.path("d")).expect("mkdir");
    fs::write(m.path("d/f"), pattern(3_000_000, 1)).expect("write");
    assert!(fs::read(dir.join("d/f")).expect("read") == pattern(3_000_000, 1));
    assert!(m.read("d/f").expect("read") == pattern(3_000_000, 1));
    fs::rename(m.path("d/f"), m.path("g")).expect("rename");
    assert!(dir.join("g").exists() && !dir.join("d/f").exists());
    fs::remove_dir(m.path("d")).expect("rmdir");
    assert_eq!(fs::read_dir(&dir).expect("read_dir").count(), 1);
}

/// A reader has the file open by passthrough, from the cache file, while somebody
/// writes: the reader keeps its version, the writer writes, a new open sees it.
#[test]
fn a_writer_beside_a_passthrough_reader_harms_neither() {
    for kind in KINDS {
        let w = World::new();
        let old = pattern(5_000_000, 1);
        w.put("f", &old);
        let m = w.mount(kind);
        let out = w.kspeed().arg("warm").arg(m.path("f")).output().expect("warm");
        assert!(out.status.success());
        let reader = File::open(m.path("f")).expect("open");
        let mut head = vec![0; 1000];
        reader.read_exact_at(&mut head, 0).expect("read");
        let mut writer =
            OpenOptions::new().append(true).open(m.path("f")).expect("open for writing");
        writer.write_all(b"more").expect("write");
        drop(writer);
        let new = [&old[..], b"more"].concat();
        assert!(w.object("f").expect("object") == new, "{kind:?}");
        assert!(m.read("f").expect("read") == new);
        let mut all = vec![0; old.len()];
        reader.read_exact_at(&mut all, 0).expect("the old descriptor reads on");
        assert!(all == old);
    }
}

/// A file that is written for longer than listings live stays visible, and two
/// that open it at once share it.
#[test]
fn a_file_being_written_outlives_listings() {
    let w = World::new();
    w.put("d/other", "x");
    let m = w.mount(&["--ack", "origin", "--metadata-ttl", "0s", "--negative-ttl", "0s"]);
    let mut f = File::create(m.path("d/new")).expect("create");
    f.write_all(b"first").expect("write");
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(m.names("d"), ["new", "other"]);
    assert_eq!(fs::metadata(m.path("d/new")).expect("stat").len(), 5);
    let barrier = std::sync::Barrier::new(4);
    std::thread::scope(|s| {
        for i in 0..4u8 {
            let (m, barrier) = (&m, &barrier);
            s.spawn(move || {
                barrier.wait();
                let f = OpenOptions::new().write(true).open(m.path("d/other")).expect("open");
                f.write_all_at(&[b'a' + i], u64::from(i)).expect("write");
            });
        }
    });
    assert_eq!(w.object("d/other").as_deref(), Some(b"abcd".as_slice()));
    drop(f);
    assert_eq!(w.object("d/new").as_deref(), Some(b"first".as_slice()));
}

//! Reading through real mounts: passthrough, daemon-served, dataset mounts.

mod common;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use common::{World, pattern, wait_until};

#[test]
fn files_of_all_sizes_read_back_in_every_kind_of_mount() {
    let w = World::new();
    let sizes = [0usize, 1, 4095, 4096, 110_000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 20_000_003];
    for (i, n) in sizes.iter().enumerate() {
        w.put(&format!("d/f{n}"), pattern(*n, i as u32));
    }
    let kinds: [&[&str]; 4] =
        [&[], &["--no-passthrough"], &["--read-only"], &["--read-only", "--snapshot"]];
    for kind in kinds {
        let m = w.mount(kind);
        for round in 0..3 {
            for (i, n) in sizes.iter().enumerate() {
                let got = m.read(&format!("d/f{n}")).expect("read");
                assert!(got == pattern(*n, i as u32), "{kind:?} {n} bytes, round {round}");
            }
        }
        assert!(m.umount().success());
    }
}

/// The second open of a complete file is by passthrough, and says the same.
#[test]
fn a_complete_file_is_read_by_passthrough() {
    let w = World::new();
    let data = pattern(9_000_000, 1);
    w.put("f", &data);
    let m = w.mount(&[]);
    assert!(
        m.status()["mounts"][0]["passthrough"].as_bool().expect("bool"),
        "needs kernel 6.9 and root"
    );
    assert!(m.read("f").expect("read") == data);
    assert_eq!(m.counter("passthrough_opens"), 0);
    // The last blocks are written behind the reader's back.
    wait_until("passthrough", || {
        assert!(m.read("f").expect("read") == data);
        m.counter("passthrough_opens") == 1
    });
    let before = m.counter("reads");
    assert!(m.read("f").expect("read") == data);
    assert_eq!(m.counter("passthrough_opens"), 2);
    assert_eq!(m.counter("reads"), before, "no read reaches the daemon");
}

/// I1: a descriptor stays on its version; a new open sees the new one (C1, C2,
/// C3), in all kinds of mounts.
#[test]
fn c1_c2_c3_one_open_sees_one_version() {
    for (old_len, new_len) in
        [(5_000_000, 5_000_000), (5_000_000, 7_000_000), (10, 100), (300_000, 5)]
    {
        for kind in [&["--metadata-ttl", "1s"][..], &["--metadata-ttl", "1s", "--read-only"]] {
            let w = World::new();
            let (old, new) = (pattern(old_len, 1), pattern(new_len, 2));
            w.put("f", &old);
            let m = w.mount(kind);
            let mut f = File::open(m.path("f")).expect("open");
            let mut head = vec![0; old_len / 2];
            f.read_exact(&mut head).expect("read");
            assert!(head == old[..old_len / 2]);
            w.put("f", &new);
            std::thread::sleep(std::time::Duration::from_millis(1100));
            // The old descriptor: the old bytes, or an error; never others.
            let mut rest = Vec::new();
            match f.read_to_end(&mut rest) {
                Ok(_) => assert!(rest == old[old_len / 2..], "a mixture"),
                Err(e) => assert!(
                    [Some(libc::ESTALE), Some(libc::EIO)].contains(&e.raw_os_error()),
                    "{e}"
                ),
            }
            wait_until("the new version", || m.read("f").is_ok_and(|b| b == new));
            assert_eq!(fs::metadata(m.path("f")).expect("stat").len(), new_len as u64);
        }
    }
}

/// C7: an object that shrinks while it is streamed gives an error, not the
/// text of one.
#[test]
fn c7_an_object_that_shrinks_while_it_is_streamed() {
    let w = World::new();
    let data = pattern(200_000_000, 1);
    w.put("f", &data);
    let m = w.mount(&["--predict", "off"]);
    let mut f = File::open(m.path("f")).expect("open");
    let mut buf = vec![0; 1 << 20];
    f.read_exact(&mut buf).expect("read");
    w.put("f", b"short");
    let mut at = buf.len();
    let e = loop {
        match f.read(&mut buf) {
            Ok(0) => panic!("ended early at {at}"),
            Ok(n) => {
                assert!(buf[..n] == data[at..at + n], "wrong bytes at {at}");
                at += n;
            }
            Err(e) => break e,
        }
    };
    assert!([Some(libc::ESTALE), Some(libc::EIO)].contains(&e.raw_os_error()), "{e}");
}

/// N7: stored bytes, whatever their encoding says.
#[test]
fn n7_gzipped_bytes_stay_as_they_are() {
    let w = World::new();
    let gz = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    w.put("f.gz", gz);
    let m = w.mount(&[]);
    assert_eq!(m.read("f.gz").expect("read"), gz);
    assert_eq!(fs::metadata(m.path("f.gz")).expect("stat").len(), gz.len() as u64);
}

/// The cache survives kill -9: the same bytes, without the origin.
#[test]
fn the_cache_survives_kill_9() {
    let w = World::new();
    let (large, small) = (pattern(30_000_000, 1), pattern(50_000, 2));
    w.put("large", &large);
    w.put("small", &small);
    let m = w.mount(&[]);
    assert!(m.read("large").expect("read") == large);
    assert!(m.read("small").expect("read") == small);
    // Blocks are written behind the reader's back; warm waits for the disk.
    let out = w.kspeed().arg("warm").arg(&m.mnt).output().expect("warm");
    assert!(out.status.success());
    m.kill();
    let gets = w.gets();
    let m = w.mount(&[]);
    assert!(m.read("large").expect("read") == large);
    assert!(m.read("small").expect("read") == small);
    assert_eq!(w.gets(), gets);
    // Checked by now: the next open is by passthrough.
    assert!(m.read("large").expect("read") == large);
    assert_eq!(m.counter("passthrough_opens"), 1);
}

/// F4: a flipped byte, a cut file: found, fetched again.
#[test]
fn f4_a_damaged_cache_file_is_fetched_again() {
    let w = World::new();
    let data = pattern(6_000_000, 1);
    w.put("f", &data);
    // From RAM the block would be served without the disk.
    let m = w.mount(&["--ram-size", "0"]);
    assert!(m.read("f").expect("read") == data);
    let file = walk(&w.cache().join("large"))
        .into_iter()
        .find(|p| p.extension().is_some_and(|x| x == "data"))
        .expect("cache file");
    // While it runs.
    std::thread::sleep(std::time::Duration::from_millis(500));
    File::options()
        .write(true)
        .open(&file)
        .expect("open")
        .write_all_at(b"damage", 3_000_000)
        .expect("write");
    // Else the kernel's own pages of the first read answer.
    let f = File::open(m.path("f")).expect("open");
    rustix::fs::fadvise(&f, 0, None, rustix::fs::Advice::DontNeed).expect("fadvise");
    drop(f);
    assert!(m.read("f").expect("read") == data);
    assert_eq!(m.status()["cache"]["bad_blocks"], 1);
    m.kill();
    // While it is away.
    File::options().write(true).open(&file).expect("open").set_len(4_000_000).expect("cut");
    let m = w.mount(&[]);
    assert!(m.read("f").expect("read") == data);
}

fn walk(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut out = Vec::new();
    for e in fs::read_dir(dir).expect("read_dir").flatten() {
        if e.path().is_dir() {
            out.extend(walk(&e.path()));
        } else {
            out.push(e.path());
        }
    }
    out
}

/// Many readers at random offsets of one file, some through maps: right bytes.
#[test]
fn random_readers_and_maps_agree_with_the_object() {
    let w = World::new();
    let data = Arc::new(pattern(40_000_000, 5));
    w.put("f", &*data);
    for kind in [&["--no-passthrough"][..], &["--read-only"], &[]] {
        let m = w.mount(kind);
        let threads: Vec<_> = (0..4u64)
            .map(|t| {
                let (path, data) = (m.path("f"), data.clone());
                std::thread::spawn(move || {
                    let f = File::open(path).expect("open");
                    let mut x = t * 7919 + 1;
                    let mut buf = vec![0; 300_000];
                    for _ in 0..60 {
                        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let at = (x >> 33) as usize % data.len();
                        let n = (x >> 20) as usize % buf.len();
                        let n = n.min(data.len() - at);
                        f.read_exact_at(&mut buf[..n], at as u64).expect("read");
                        assert!(buf[..n] == data[at..at + n]);
                    }
                })
            })
            .collect();
        for t in threads {
            t.join().expect("reader");
        }
        let f = File::open(m.path("f")).expect("open");
        // SAFETY: nobody changes the object during this test.
        let map = unsafe { memmap2::Mmap::map(&f) }.expect("mmap");
        assert!(map[..] == data[..]);
        drop((map, f));
        assert!(m.umount().success());
    }
}

/// Pages pushed by `kspeed warm` are those of the object, byte for byte, and the
/// first read asks nobody.
#[test]
fn warm_pushes_the_right_bytes_into_the_page_cache() {
    let w = World::new();
    let n = 200;
    for i in 0..n {
        w.put(&format!("d/f{i:03}"), pattern(60_000 + i * 401, i as u32));
    }
    let m = w.mount(&["--read-only", "--metadata-ttl", "1h", "--predict", "off"]);
    let out = w.kspeed().arg("warm").arg(m.path("d")).output().expect("warm");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(m.counter("pushed_files"), n as u64);
    let (gets, reads) = (w.gets(), m.counter("reads"));
    for i in 0..n {
        assert!(
            m.read(&format!("d/f{i:03}")).expect("read") == pattern(60_000 + i * 401, i as u32),
            "{i}"
        );
    }
    assert_eq!(w.gets(), gets);
    // Pushed pages are not pinned: the kernel may drop some. The promise is 0.05
    // requests a file.
    let reached = m.counter("reads") - reads;
    assert!(reached <= n as u64 / 20, "{reached} of {n} reads reached the daemon");
}

/// A run of files in directory order is fetched and pushed ahead.
#[test]
fn files_in_directory_order_are_pushed_ahead() {
    let w = World::new();
    let n = 300;
    for i in 0..n {
        w.put(&format!("d/f{i:03}"), pattern(50_000, i as u32));
    }
    let m = w.mount(&["--read-only", "--metadata-ttl", "1h"]);
    assert_eq!(m.names("d").len(), n);
    for i in 0..n {
        assert!(m.read(&format!("d/f{i:03}")).expect("read") == pattern(50_000, i as u32));
    }
    assert!(m.counter("pushed_files") > 100, "{}", m.counter("pushed_files"));
    assert!(
        m.counter("reads") < 250,
        "{} of {n} files read through the daemon",
        m.counter("reads")
    );
}

#[test]
fn extended_attributes_tell_the_cache() {
    let w = World::new();
    let data = pattern(3_000_000, 1);
    w.put("f", &data);
    let m = w.mount(&[]);
    let get = |name: &str| -> Option<String> {
        let mut buf = vec![0u8; 100];
        let n = rustix::fs::getxattr(m.path("f"), name, &mut buf).ok()?;
        String::from_utf8(buf[..n].to_vec()).ok()
    };
    assert_eq!(get("user.kspeed.cached").as_deref(), Some("0"));
    assert_eq!(get("user.kspeed.state").as_deref(), Some("clean"));
    assert!(get("user.kspeed.etag").is_some_and(|e| e.len() == 32));
    assert!(get("user.other").is_none());
    m.read("f").expect("read");
    assert_eq!(get("user.kspeed.cached").as_deref(), Some("3000000"));
    rustix::fs::setxattr(m.path("f"), "user.kspeed.pin", b"1", rustix::fs::XattrFlags::empty())
        .expect("pin");
    assert_eq!(get("user.kspeed.pin").as_deref(), Some("1"));
}

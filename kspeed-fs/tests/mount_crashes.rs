//! The daemon dies: at each step of a promise and of keeping it, and at random
//! moments. After each restart every acknowledged byte is there, in the mount and
//! in the end in the bucket; nothing half-written is ever in the bucket, and no
//! upload in parts is left behind.

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{BUCKET, Mount, World, pattern, wait_until};

const FAST: &[&str] = &["--upload-delay", "0s"];

/// What was acknowledged: none, removed.
type Acked = BTreeMap<String, Option<Vec<u8>>>;

fn mount_that_dies(w: &World, at: &str) -> Mount {
    w.mount_with("s3://bucket", &w.mnt(), FAST, &[("KSPEED_CRASH_AT", at)])
}

/// Is told what was acknowledged, and first what may have been.
type Saw<'a> = &'a mut dyn FnMut(&str, Option<Vec<u8>>, bool);

/// What a trainer does between two checkpoints, until the daemon is gone.
fn work(m: &Mount, round: u32, saw: Saw<'_>) -> std::io::Result<()> {
    let name = |n: &str| format!("r{round}/{n}");
    fs::create_dir(m.path(&format!("r{round}")))?;
    for (n, size) in [("small", 5000), ("medium", 3_000_000), ("large", 35_000_000)] {
        let data = pattern(size, round);
        let (tmp, end) = (name(&format!("{n}.tmp")), name(n));
        let mut f = File::create(m.path(&tmp))?;
        f.write_all(&data)?;
        saw(&tmp, Some(data.clone()), false);
        f.sync_all()?;
        saw(&tmp, Some(data.clone()), true);
        drop(f);
        saw(&end, Some(data.clone()), false);
        saw(&tmp, None, false);
        fs::rename(m.path(&tmp), m.path(&end))?;
        saw(&tmp, None, true);
        saw(&end, Some(data), true);
    }
    // In place, and appended.
    let mut data = pattern(3_000_000, round);
    data[1000..1005].copy_from_slice(b"patch");
    let f = OpenOptions::new().write(true).open(m.path(&name("medium")))?;
    f.write_all_at(b"patch", 1000)?;
    saw(&name("medium"), Some(data.clone()), false);
    f.sync_all()?;
    saw(&name("medium"), Some(data), true);
    saw(&name("small"), None, false);
    fs::remove_file(m.path(&name("small")))?;
    saw(&name("small"), None, true);
    Ok(())
}

/// Acknowledged states, and those that a call that did not return may have made.
#[derive(Default)]
struct Ledger {
    acked: Acked,
    maybe: Vec<(String, Option<Vec<u8>>)>,
    /// Of rounds long ago: read back only at the end.
    old: Acked,
}

impl Ledger {
    fn run(&mut self, m: &Mount, round: u32) -> std::io::Result<()> {
        let (acked, maybe) = (&mut self.acked, &mut self.maybe);
        work(m, round, &mut |name, data, is_acked| {
            if is_acked {
                maybe.retain(|(n, _)| n != name);
                acked.insert(name.to_owned(), data);
            } else {
                maybe.push((name.to_owned(), data));
            }
        })
    }

    /// Whether a name may have this content; what is found is what holds.
    fn allows(&self, name: &str, found: &Option<Vec<u8>>) -> bool {
        self.acked.get(name).cloned().unwrap_or_default() == *found
            || self.maybe.iter().any(|(n, d)| n == name && d == found)
    }

    fn names(&self) -> Vec<String> {
        let mut all: Vec<String> =
            self.acked.keys().chain(self.maybe.iter().map(|(n, _)| n)).cloned().collect();
        all.sort();
        all.dedup();
        all
    }

    /// After a restart: all as acknowledged, or as the call that was cut made it.
    fn check(&mut self, m: &Mount, what: &str) {
        for name in self.names() {
            let found = m.read(&name).ok();
            let len = found.as_ref().map(Vec::len);
            assert!(self.allows(&name, &found), "{what}: {name} is {len:?}");
            self.acked.insert(name, found);
        }
        self.maybe.clear();
    }

    /// Leaves what is not of these rounds for the end.
    fn rest(&mut self, before: u32) {
        let is_old = |n: &str| {
            let round = n.strip_prefix('r').and_then(|n| n.split('/').next());
            round.and_then(|r| r.parse::<u32>().ok()).is_some_and(|r| r < before)
        };
        let (old, acked) =
            std::mem::take(&mut self.acked).into_iter().partition(|(n, _)| is_old(n));
        self.acked = acked;
        self.old.extend::<Acked>(old);
    }

    /// The bucket has just this.
    fn check_bucket(&mut self, w: &World, what: &str) {
        self.acked.append(&mut self.old);
        for (name, data) in &self.acked {
            let found = w.object(name);
            let len = found.as_ref().map(Vec::len);
            assert!(found == *data, "{what}: {name} is {len:?} in the bucket");
        }
        let keys = w.server.store().keys(BUCKET);
        for k in keys.iter().filter(|k| !k.ends_with('/')) {
            assert!(self.acked.get(k).is_some_and(Option::is_some), "{what}: {k} is too much");
        }
    }

    /// At a step that is known: no upload in parts is left. (At a random moment one
    /// may be that the store has begun and has not told of; docs/semantics.md.)
    fn check_uploads(w: &World, what: &str) {
        assert_eq!(w.server.store().uploads(BUCKET), 0, "{what}: an upload is left behind");
    }

    /// Objects that are there are whole, at any moment.
    fn check_whole(&self, w: &World, what: &str) {
        for k in w.server.store().keys(BUCKET).iter().filter(|k| !k.ends_with('/')) {
            let found = w.object(k);
            let len = found.as_ref().map(Vec::len);
            let past = self.acked.get(k).is_some_and(Option::is_none) || self.old.contains_key(k);
            let small = k.ends_with("medium") || k.ends_with(".tmp") || past;
            assert!(small || self.allows(k, &found), "{what}: {k} is {len:?}: half-written");
        }
    }
}

fn gone(m: Mount) {
    let mut m = m;
    wait_until("dead", || matches!(m.child.try_wait(), Ok(Some(_))));
    drop(m);
}

/// A fault point at each step, passed the first and a later time.
#[test]
fn a_kill_at_each_step_loses_nothing() {
    for point in kspeed_fs::writeback::CRASH_POINTS {
        for n in [1, 4] {
            let w = World::new();
            let what = format!("{point} #{n}");
            let mut ledger = Ledger::default();
            let m = mount_that_dies(&w, &what.replace(" #", "#"));
            let done = ledger.run(&m, 0);
            if done.is_ok() {
                // It dies while it uploads, or the step is passed less often.
                for _ in 0..100 {
                    if fs::read_to_string(m.path(".kspeed/status"))
                        .is_ok_and(|s| !s.contains("\"changes\": 0"))
                    {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                }
            }
            m.kill();
            ledger.check_whole(&w, &what);
            let m = w.mount(FAST);
            ledger.check(&m, &what);
            ledger.run(&m, 1).expect("it goes on");
            wait_until("uploaded", || m.is_idle());
            ledger.check(&m, &what);
            ledger.check_bucket(&w, &what);
            Ledger::check_uploads(&w, &what);
            assert!(m.umount().success());
        }
    }
}

/// Random moments. KSPEED_TEST_CRASH_ROUNDS for more of them.
#[test]
fn a_kill_at_any_moment_loses_nothing() {
    let rounds = std::env::var("KSPEED_TEST_CRASH_ROUNDS").ok().and_then(|n| n.parse().ok());
    let w = World::new();
    let mut ledger = Ledger::default();
    let mut x = 12345u64;
    for round in 0..rounds.unwrap_or(12u32) {
        let m = w.mount(FAST);
        ledger.check(&m, &format!("round {round}"));
        ledger.rest(round.saturating_sub(3));
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let after = Duration::from_millis((x >> 33) % 400);
        let pid = m.child.id();
        let killer = std::thread::spawn(move || {
            std::thread::sleep(after);
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        });
        let _ = ledger.run(&m, round);
        killer.join().expect("join");
        gone(m);
        ledger.check_whole(&w, &format!("round {round}, killed after {after:?}"));
    }
    let m = w.mount(FAST);
    ledger.check(&m, "at last");
    wait_until("uploaded", || m.is_idle());
    ledger.check_bucket(&w, "at last");
}

/// F8: many small writes with an fsync each hundred.
#[test]
fn f8_each_fsynced_byte_is_there() {
    let w = World::new();
    let m = w.mount(FAST);
    let pid = m.child.id();
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(700));
        let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
    });
    let mut synced = 0;
    let write = || -> std::io::Result<()> {
        let mut f = File::create(m.path("log"))?;
        for i in 0..100_000u32 {
            f.write_all(&pattern(4096, i))?;
            if i % 100 == 99 {
                f.sync_all()?;
                synced = i + 1;
            }
        }
        Ok(())
    };
    let mut write = write;
    assert!(write().is_err(), "killed before it ends");
    killer.join().expect("join");
    gone(m);
    assert!(synced > 0);
    assert!(w.object("log").is_none(), "not closed: not half-written in the bucket");
    let m = w.mount(FAST);
    let got = m.read("log").expect("read");
    for i in 0..synced {
        let at = i as usize * 4096;
        assert!(got[at..at + 4096] == pattern(4096, i), "write {i} of {synced} that are synced");
    }
    wait_until("uploaded", || m.is_idle());
    assert!(w.object("log").expect("uploaded") == got);
}

/// An upload in parts goes on after a restart with the parts that are there.
#[test]
fn an_upload_goes_on_where_it_ended() {
    let w = World::new();
    let m = mount_that_dies(&w, "upload: a part is there#4");
    let data = pattern(150_000_000, 1);
    fs::write(m.path("big"), &data).expect("write");
    gone(m);
    assert_eq!(w.server.store().uploads(BUCKET), 1);
    let parts = w.server.requests().parts.load(Ordering::Relaxed);
    let m = w.mount(FAST);
    wait_until("uploaded", || m.is_idle());
    assert!(w.object("big").expect("object") == data);
    let more = w.server.requests().parts.load(Ordering::Relaxed) - parts;
    assert!(more <= 9 - 3, "{more} of 9 parts are sent again after 4 were there");
    assert_eq!(w.server.store().uploads(BUCKET), 0);
    // One that nobody wants any more is aborted.
    m.kill();
    let m = mount_that_dies(&w, "upload: a part is there#2");
    fs::write(m.path("other"), &data).expect("write");
    gone(m);
    let m = w.mount(&["--upload-delay", "1h"]);
    assert_eq!(w.server.store().uploads(BUCKET), 1);
    fs::remove_file(m.path("other")).expect("unlink");
    wait_until("aborted", || w.server.store().uploads(BUCKET) == 0);
    assert!(w.object("other").is_none());
    assert!(m.umount().success());
}

/// A directory rename that is cut is done or undone as a whole.
#[test]
fn a_directory_rename_is_whole_over_a_crash() {
    for at in ["change: appended#1", "upload: before the request#3", "upload: object complete#4"] {
        let w = World::new();
        for i in 0..10 {
            w.put(&format!("old/{i}"), pattern(1000, i));
        }
        let m = mount_that_dies(&w, at);
        let done = fs::rename(m.path("old"), m.path("new"));
        gone(m);
        let m = w.mount(FAST);
        let (old, new) = (m.path("old").exists(), m.path("new").exists());
        assert!(old != new, "{at}: one of them");
        assert!(done.is_err() || new, "{at}: what returned is done");
        let name = if new { "new" } else { "old" };
        assert_eq!(m.names(name).len(), 10, "{at}");
        for i in 0..10 {
            assert!(m.read(&format!("{name}/{i}")).expect("read") == pattern(1000, i), "{at}");
        }
        wait_until("settled", || m.is_idle());
        assert_eq!(w.server.store().keys(BUCKET).len(), 10, "{at}");
    }
}

/// Another source's files in the cache directory are not forgotten.
#[test]
fn files_of_another_source_are_not_forgotten() {
    let w = World::new();
    let m = w.mount(&["--upload-delay", "1h"]);
    fs::create_dir(m.path("d")).expect("mkdir");
    fs::write(m.path("d/f"), "precious").expect("write");
    m.kill();
    let fsck = || {
        let out = w.kspeed().arg("fsck").arg(w.cache()).output().expect("fsck");
        (out.status.success(), String::from_utf8_lossy(&out.stdout).into_owned())
    };
    let (ok, text) = fsck();
    assert!(ok && text.contains("to upload  d/f"), "{text}");
    let out = w
        .kspeed()
        .args(["mount", "s3://bucket/other"])
        .arg(w.mnt())
        .arg("--foreground")
        .stdin(Stdio::null())
        .output()
        .expect("mount");
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success() && text.contains("--recover"), "{text}");
    let m = w.mount_source("s3://bucket/other", &w.mnt(), &["--recover", "--upload-delay", "0s"]);
    assert_eq!(m.read("d/f").expect("read"), b"precious");
    wait_until("uploaded", || m.is_idle());
    assert_eq!(w.object("other/d/f").as_deref(), Some(b"precious".as_slice()));
    assert!(m.umount().success());
    // A damaged journal is told, and repaired as far as it is whole.
    let m = w.mount(&["--upload-delay", "1h"]);
    fs::write(m.path("a"), "A").expect("write");
    fs::write(m.path("b"), "B").expect("write");
    m.kill();
    let journal = find(&w.cache().join("stage"), "journal");
    let mut text = fs::read(&journal).expect("journal");
    let at = text.windows(9).position(|p| p == b"\"key\":\"a\"").expect("a's record");
    text[at + 7] = b'x';
    fs::write(&journal, &text).expect("damage");
    let (ok, text) = fsck();
    assert!(!ok && text.contains("damaged"), "{text}");
    let repaired =
        w.kspeed().args(["fsck", "--repair"]).arg(w.cache()).output().expect("fsck --repair");
    assert!(repaired.status.success(), "{}", String::from_utf8_lossy(&repaired.stdout));
    let m = w.mount(FAST);
    assert!(m.umount().success());
    let aside = journal.parent().expect("dir").join("unnamed");
    assert_eq!(fs::read_dir(aside).expect("set aside").count(), 2);
}

fn find(dir: &Path, name: &str) -> std::path::PathBuf {
    let dirs = fs::read_dir(dir).expect("read_dir").flatten().map(|e| e.path().join(name));
    dirs.filter(|p| fs::metadata(p).is_ok_and(|m| m.len() > 200))
        .max_by_key(|p| fs::metadata(p).and_then(|m| m.modified()).expect("mtime"))
        .expect("a journal")
}

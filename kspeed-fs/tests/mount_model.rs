//! Random operations on a mount and on a native directory beside it, which is the
//! model: after each some, and after each restart, both have the same tree with
//! the same bytes, and in the end so has the bucket.

mod common;

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use common::{BUCKET, Mount, World, pattern, wait_until};

/// Path relative to the root, and bytes of a file, or none.
type Tree = BTreeMap<String, Option<Vec<u8>>>;

fn tree(root: &Path) -> Tree {
    let mut out = Tree::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(dir) = todo.pop() {
        for e in fs::read_dir(&dir).expect("read_dir") {
            let path = e.expect("entry").path();
            let name = path.strip_prefix(root).expect("below").to_string_lossy().into_owned();
            if path.is_dir() {
                out.insert(name, None);
                todo.push(path);
            } else {
                if !name.contains(".kspeed-put-") {
                    // What a killed upload into a directory left.
                    out.insert(name, Some(fs::read(&path).expect("read")));
                }
            }
        }
    }
    out
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    fn path(&mut self) -> String {
        let parts = 1 + self.below(3);
        let names: Vec<String> = (0..parts).map(|_| format!("n{}", self.below(4))).collect();
        names.join("/")
    }
}

/// One operation, the same on any root.
enum Op {
    Write(String, Vec<u8>),
    Patch(String, u64, Vec<u8>),
    Append(String, Vec<u8>),
    Truncate(String, u64),
    Mkdir(String),
    Unlink(String),
    Rmdir(String),
    Rename(String, String),
    Chmod(String, u32),
    Copy(String, String),
}

impl Op {
    fn random(r: &mut Random) -> Self {
        let (a, b) = (r.path(), r.path());
        let size = [0, 10, 4096, 100_000, 2_500_000][r.below(5) as usize];
        let data = pattern(size, r.below(1000) as u32);
        match r.below(14) {
            0..3 => Self::Write(a, data),
            3 => Self::Patch(a, r.below(200_000), pattern(3000, 7)),
            4 => Self::Append(a, pattern(500, 9)),
            5 => Self::Truncate(a, r.below(150_000)),
            6 | 7 => Self::Mkdir(a),
            8 => Self::Unlink(a),
            9 => Self::Rmdir(a),
            10 | 11 => Self::Rename(a, b),
            12 => Self::Chmod(a, 0o600 | r.below(0o100) as u32),
            _ => Self::Copy(a, b),
        }
    }

    fn run(&self, root: &Path) -> io::Result<()> {
        let at = |p: &str| root.join(p);
        match self {
            Self::Write(p, data) => fs::write(at(p), data),
            Self::Patch(p, offset, data) => {
                let f = OpenOptions::new().write(true).open(at(p))?;
                f.write_all_at(data, *offset)
            }
            Self::Append(p, data) => OpenOptions::new().append(true).open(at(p))?.write_all(data),
            Self::Truncate(p, size) => OpenOptions::new().write(true).open(at(p))?.set_len(*size),
            Self::Mkdir(p) => fs::create_dir(at(p)),
            Self::Unlink(p) => fs::remove_file(at(p)),
            Self::Rmdir(p) => fs::remove_dir(at(p)),
            Self::Rename(a, b) => fs::rename(at(a), at(b)),
            Self::Chmod(p, mode) => {
                if at(p).is_dir() {
                    return Ok(());
                }
                fs::set_permissions(at(p), fs::Permissions::from_mode(*mode))
            }
            Self::Copy(a, b) => fs::copy(at(a), at(b)).map(drop),
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Write(p, d) => format!("write {p}, {} bytes", d.len()),
            Self::Patch(p, o, _) => format!("patch {p} at {o}"),
            Self::Append(p, _) => format!("append {p}"),
            Self::Truncate(p, n) => format!("truncate {p} to {n}"),
            Self::Mkdir(p) => format!("mkdir {p}"),
            Self::Unlink(p) => format!("unlink {p}"),
            Self::Rmdir(p) => format!("rmdir {p}"),
            Self::Rename(a, b) => format!("rename {a} {b}"),
            Self::Chmod(p, m) => format!("chmod {p} {m:o}"),
            Self::Copy(a, b) => format!("copy {a} {b}"),
        }
    }
}

fn same(m: &Mount, model: &Path, done: &[String]) {
    let (got, want) = (tree(&m.mnt), tree(model));
    let last = &done[done.len().saturating_sub(25)..];
    for (k, v) in &want {
        let found = got.get(k).map(|v| v.as_ref().map(Vec::len));
        assert!(got.get(k) == Some(v), "{k}: {found:?}\n{}", last.join("\n"));
    }
    for k in got.keys() {
        assert!(want.contains_key(k), "{k} is too much\n{}", last.join("\n"));
    }
}

fn compare(args: &[&str], seed: u64, ops: usize, kills: bool, source: Option<&str>) {
    let w = World::new();
    let model = w.dir.path().join("model");
    fs::create_dir(&model).expect("mkdir");
    let native = w.dir.path().join("native");
    fs::create_dir(&native).expect("mkdir");
    let source = match source {
        Some(_) => format!("file://{}", native.display()),
        None => format!("s3://{BUCKET}"),
    };
    let mut m = w.mount_source(&source, &w.mnt(), args);
    let mut r = Random(seed);
    let mut done = Vec::new();
    for n in 0..ops {
        let op = Op::random(&mut r);
        let (got, want) = (op.run(&m.mnt), op.run(&model));
        done.push(format!("{}: {want:?}", op.text()));
        assert_eq!(
            got.as_ref().err().and_then(io::Error::raw_os_error),
            want.as_ref().err().and_then(io::Error::raw_os_error),
            "{}\n{}",
            op.text(),
            done[done.len().saturating_sub(25)..].join("\n")
        );
        if n % 60 == 59 {
            same(&m, &model, &done);
        }
        if kills && n % 150 == 149 {
            m.kill();
            done.push("kill".into());
            m = w.mount_source(&source, &w.mnt(), args);
            same(&m, &model, &done);
            done.push("remounted".into());
        }
    }
    same(&m, &model, &done);
    wait_until("uploaded", || m.is_idle());
    same(&m, &model, &done);
    assert_eq!(m.counter("conflicts"), 0);
    assert!(m.umount().success());
    if source.starts_with("s3") {
        let files: Vec<String> =
            tree(&model).into_iter().filter(|(_, v)| v.is_some()).map(|(k, _)| k).collect();
        let keys = w.server.store().keys(BUCKET);
        let objects: Vec<&String> = keys.iter().filter(|k| !k.ends_with('/')).collect();
        assert_eq!(objects, files.iter().collect::<Vec<_>>());
        for k in &files {
            assert!(w.object(k).expect("object") == fs::read(model.join(k)).expect("read"), "{k}");
        }
    } else {
        assert_eq!(tree(&native), tree(&model));
    }
}

#[test]
fn a_mount_is_as_a_native_directory() {
    compare(&["--upload-delay", "0s"], 1, 600, false, None);
    compare(
        &["--upload-delay", "20ms", "--no-passthrough", "--metadata-ttl", "0s"],
        2,
        600,
        false,
        None,
    );
}

#[test]
fn a_mount_is_as_a_native_directory_over_kills() {
    compare(&["--upload-delay", "10ms", "--sync-on-close", "false"], 3, 900, true, None);
}

#[test]
fn a_mount_of_a_directory_is_as_that() {
    compare(&["--upload-delay", "5ms"], 4, 500, true, Some("file"));
}

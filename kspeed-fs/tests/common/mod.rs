//! A real mount of a real S3 server for tests: the `kspeed` program as a user
//! starts it, a server on loopback, a temporary cache directory. Everything is
//! taken down when it is dropped, even when a test fails.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::panic, reason = "a test that can not begin ends")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kspeed_s3_server::{Options, Server};
use tempfile::TempDir;

pub const BUCKET: &str = "bucket";

/// A server, and the directories of a test.
pub struct World {
    pub server: Server,
    pub runtime: tokio::runtime::Runtime,
    pub dir: TempDir,
}

impl World {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("runtime");
        let root = dir.path().join("s3");
        let server = Server::start_on(runtime.handle(), Options::loopback(root)).expect("server");
        server.store().create_bucket(BUCKET).expect("bucket");
        fs::create_dir(dir.path().join("mnt")).expect("mkdir");
        Self { server, runtime, dir }
    }

    pub fn mnt(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    pub fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    pub fn put(&self, key: &str, data: impl AsRef<[u8]>) {
        self.server.store().put(BUCKET, key, data.as_ref()).expect("put");
    }

    pub fn delete(&self, key: &str) {
        self.server.store().delete(BUCKET, key);
    }

    pub fn object(&self, key: &str) -> Option<Vec<u8>> {
        self.server.store().read(BUCKET, key).map(|b| b.to_vec())
    }

    /// `kspeed` with the server's credentials.
    pub fn kspeed(&self) -> Command {
        let mut c = Command::new(env!("CARGO_BIN_EXE_kspeed"));
        c.env("AWS_ACCESS_KEY_ID", "kspeed")
            .env("AWS_SECRET_ACCESS_KEY", "kspeed-secret")
            .env("AWS_REGION", "us-east-1")
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .env("KSPEED_ENDPOINT_URL", self.server.endpoint())
            .env("KSPEED_CACHE_DIR", self.cache())
            .env("KSPEED_MIN_FREE", "0");
        c
    }

    /// Mounts the bucket.
    pub fn mount(&self, args: &[&str]) -> Mount {
        self.mount_at(&self.mnt(), args)
    }

    pub fn mount_at(&self, mnt: &Path, args: &[&str]) -> Mount {
        self.mount_source(&format!("s3://{BUCKET}"), mnt, args)
    }

    pub fn mount_source(&self, source: &str, mnt: &Path, args: &[&str]) -> Mount {
        self.mount_with(source, mnt, args, &[])
    }

    pub fn mount_with(
        &self,
        source: &str,
        mnt: &Path,
        args: &[&str],
        env: &[(&str, &str)],
    ) -> Mount {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.path().join("log"))
            .expect("log");
        let child = self
            .kspeed()
            .args(["mount", source])
            .arg(mnt)
            .args(["--foreground", "--log", "debug"])
            .args(args)
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("spawn");
        let mut m = Mount { child, mnt: mnt.to_path_buf() };
        let began = Instant::now();
        while !is_mounted(mnt) || !m.serves() {
            let ended = m.child.try_wait().expect("wait");
            if ended.is_some() || began.elapsed() > Duration::from_secs(20) {
                let log = self.log();
                let told: Vec<&str> = log.lines().filter(|l| !l.contains("DEBUG")).collect();
                panic!("not mounted ({ended:?}):\n{}", told.join("\n"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        m
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub fn gets(&self) -> u64 {
        self.server.requests().gets.load(std::sync::atomic::Ordering::Relaxed)
    }
}

pub fn is_mounted(mnt: &Path) -> bool {
    fs::read_to_string("/proc/self/mounts")
        .unwrap_or_default()
        .lines()
        .any(|l| l.split(' ').nth(1) == mnt.to_str())
}

/// A mount; gone when dropped.
pub struct Mount {
    pub child: Child,
    pub mnt: PathBuf,
}

impl Mount {
    pub fn path(&self, p: &str) -> PathBuf {
        self.mnt.join(p)
    }

    pub fn read(&self, p: &str) -> std::io::Result<Vec<u8>> {
        fs::read(self.path(p))
    }

    pub fn names(&self, p: &str) -> Vec<String> {
        let mut v: Vec<String> = fs::read_dir(self.path(p))
            .expect("read_dir")
            .map(|e| e.expect("entry").file_name().to_string_lossy().into_owned())
            .collect();
        v.sort();
        v
    }

    pub fn status(&self) -> serde_json::Value {
        let text = fs::read_to_string(self.path(".kspeed/status")).expect("status");
        serde_json::from_str(&text).expect("json")
    }

    /// Whether the daemon knows the mount as one of its own.
    fn serves(&self) -> bool {
        let text = fs::read_to_string(self.path(".kspeed/status")).unwrap_or_default();
        serde_json::from_str::<serde_json::Value>(&text)
            .is_ok_and(|v| v["mounts"].as_array().is_some_and(|m| !m.is_empty()))
    }

    /// A counter of the first mount.
    pub fn counter(&self, name: &str) -> u64 {
        self.status()["mounts"][0][name].as_u64().expect("counter")
    }

    /// Whether all that was written is in the origin.
    pub fn is_idle(&self) -> bool {
        self.status()["mounts"][0]["pending"]["changes"].as_u64().expect("changes") == 0
    }

    /// kill -9.
    pub fn kill(mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
        // Drop unmounts what is left.
    }

    /// Unmounts and waits for the process: its exit status.
    pub fn umount(mut self) -> std::process::ExitStatus {
        let s = Command::new("umount").arg(&self.mnt).status().expect("umount");
        assert!(s.success(), "umount: busy?");
        let began = Instant::now();
        loop {
            if let Some(s) = self.child.try_wait().expect("wait") {
                return s;
            }
            assert!(began.elapsed() < Duration::from_secs(30), "the daemon does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if is_mounted(&self.mnt) {
            let _ = Command::new("umount").arg("-l").arg(&self.mnt).status();
        }
        let began = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if began.elapsed() > Duration::from_secs(10) {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.wait();
    }
}

/// Bytes that differ everywhere and between salts.
pub fn pattern(len: usize, salt: u32) -> Vec<u8> {
    (0..len as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 11 ^ salt.wrapping_mul(97)) as u8)
        .collect()
}

pub fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < Duration::from_secs(20), "{what}: not within 20 s");
        std::thread::sleep(Duration::from_millis(20));
    }
}

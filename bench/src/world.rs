//! The S3 server, the mounts and the data of a benchmark: real processes, as a
//! user starts them. All of it is gone when dropped.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kspeed_fs::control::{Client, HintRequest};
use kspeed_fs::dataset::Told;
use kspeed_fs::telemetry::ProcessStatus;

use crate::Result;

pub const BUCKET: &str = "bench";
pub const KEY: &str = "kspeed";
pub const SECRET: &str = "kspeed-secret";

/// How benchmarks are run.
#[derive(Clone)]
pub struct Setup {
    pub dir: PathBuf,
    pub rounds: usize,
    pub shrink: u64,
}

impl Setup {
    /// A size or count, shrunk.
    pub fn of(&self, n: u64) -> u64 {
        (n / self.shrink).max(1)
    }

    /// A directory of its own on the measured disk.
    pub fn scratch(&self) -> Result<tempfile::TempDir> {
        Ok(tempfile::Builder::new().prefix("kspeed-bench-").tempdir_in(&self.dir)?)
    }
}

/// A program that was built beside this one.
pub fn sibling(name: &str) -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name(name);
    if path.exists() {
        Ok(path)
    } else {
        Err(format!("{} is missing: cargo build --release --workspace", path.display()).into())
    }
}

/// Latency and rates of a server.
#[derive(Clone, Copy, Default)]
pub struct Shape {
    pub latency_ms: u64,
    pub connection_rate: Option<u64>,
    pub total_rate: Option<u64>,
}

impl Shape {
    /// What the cold rows are measured on: 20 ms, 100 MB/s, 400 MB/s.
    pub const FAR: Self =
        Self { latency_ms: 20, connection_rate: Some(100_000_000), total_rate: Some(400_000_000) };
}

/// Our S3 server as a process of its own.
pub struct Server {
    child: Child,
    pub endpoint: String,
}

impl Server {
    pub fn start(root: &Path, shape: Shape) -> Result<Self> {
        let mut c = Command::new(sibling("kspeed-s3d")?);
        c.arg(root).args(["--listen", "127.0.0.1:0", "--bucket", BUCKET]);
        c.args(["--latency", &format!("{}ms", shape.latency_ms)]);
        if let Some(r) = shape.connection_rate {
            c.args(["--connection-rate", &r.to_string()]);
        }
        if let Some(r) = shape.total_rate {
            c.args(["--total-rate", &r.to_string()]);
        }
        let mut child = c.stdout(Stdio::piped()).spawn()?;
        let out = child.stdout.take().ok_or("no pipe")?;
        let mut endpoint = String::new();
        BufReader::new(out).read_line(&mut endpoint)?;
        Ok(Self { child, endpoint: endpoint.trim().to_owned() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A KSpeed mount.
pub struct Mount {
    child: Child,
    pub path: PathBuf,
}

impl Mount {
    pub fn new(server: &Server, path: &Path, cache: &Path, args: &[&str]) -> Result<Self> {
        fs::create_dir_all(path)?;
        fs::create_dir_all(cache)?;
        let log = File::create(cache.with_extension("log"))?;
        let child = kspeed(server)?
            .args(["mount", &format!("s3://{BUCKET}")])
            .arg(path)
            .args(["--foreground", "--log", "warn", "--min-free", "0", "--cache-dir"])
            .arg(cache)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        let mut m = Self { child, path: path.to_path_buf() };
        let began = Instant::now();
        while !m.status().is_ok_and(|s| !s.mounts.is_empty()) {
            if m.child.try_wait()?.is_some() || began.elapsed() > Duration::from_secs(120) {
                let log = fs::read_to_string(cache.with_extension("log")).unwrap_or_default();
                return Err(format!("not mounted: {log}").into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(m)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells the order in which files will be read, as the Python package does.
    pub fn hint(&self, files: &[String], order: &[u32]) -> Result<()> {
        let request = HintRequest {
            mountpoint: self.path.clone(),
            id: "bench".into(),
            files: files.to_vec(),
            told: Told::Order(order.to_vec()),
        };
        let client = Client::of_mount(&self.path)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let known = runtime.block_on(client.hint(&request))?.known;
        if known == files.len() { Ok(()) } else { Err(format!("{known} files known").into()) }
    }

    pub fn status(&self) -> Result<ProcessStatus> {
        let text = fs::read_to_string(self.path.join(".kspeed/status"))?;
        Ok(serde_json::from_str(&text)?)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
        let began = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if began.elapsed() > Duration::from_secs(10) {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// `kspeed` with the server's endpoint and credentials.
pub fn kspeed(server: &Server) -> Result<Command> {
    let mut c = Command::new(sibling("kspeed")?);
    c.env("AWS_ACCESS_KEY_ID", KEY)
        .env("AWS_SECRET_ACCESS_KEY", SECRET)
        .env("AWS_REGION", "us-east-1")
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .env("KSPEED_ENDPOINT_URL", &server.endpoint);
    Ok(c)
}

/// Runs `kspeed` to its end.
pub fn kspeed_do(server: &Server, args: &[&str], path: &Path) -> Result<()> {
    let out = kspeed(server)?.args(args).arg(path).output()?;
    if out.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&out.stderr).into_owned().into())
    }
}

/// Bytes that no compression and no deduplication helps with.
pub struct Noise(u64);

impl Noise {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub fn fill(&mut self, buf: &mut [u8]) {
        for w in buf.chunks_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            let n = w.len();
            w.copy_from_slice(&self.0.to_le_bytes()[..n]);
        }
    }
}

/// Writes a file of noise and syncs it.
pub fn noise_file(path: &Path, size: u64, seed: u64) -> Result<()> {
    if let Some(d) = path.parent() {
        fs::create_dir_all(d)?;
    }
    let mut f = File::create(path)?;
    let mut noise = Noise::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut buf = vec![0; 1 << 20];
    let mut left = size;
    while left > 0 {
        let n = left.min(buf.len() as u64) as usize;
        noise.fill(&mut buf[..n]);
        f.write_all(&buf[..n])?;
        left -= n as u64;
    }
    f.sync_all()?;
    Ok(())
}

/// `count` files of 60 to 160 KB.
pub fn small_files(dir: &Path, count: u64) -> Result<u64> {
    fs::create_dir_all(dir)?;
    let mut total = 0;
    let mut noise = Noise::new(77);
    let mut buf = vec![0; 160_000];
    for i in 0..count {
        let n = 60_000 + (i * 7919 % 100_001) as usize;
        noise.fill(&mut buf[..n]);
        fs::write(dir.join(format!("{i:06}.jpg")), &buf[..n])?;
        total += n as u64;
    }
    rustix::fs::sync();
    Ok(total)
}

/// Drops the page cache of the whole machine; needs root.
pub fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3")?;
    Ok(())
}

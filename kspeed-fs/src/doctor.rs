//! `kspeed doctor`: what this machine allows, and what to do about the rest.

use std::path::Path;
use std::time::{Duration, SystemTime};

use kspeed_cache::origin::{ListRequest, OriginError};
use kspeed_cache::{FileIo, UringIo};
use serde::Serialize;

use crate::config::{MountConfig, ProcessConfig, Source, size_text};
use crate::mount::open_origin;

/// Passthrough came with this kernel.
const PASSTHROUGH_KERNEL: (u32, u32) = (6, 9);
/// S3 refuses signatures whose clock is off by more than 15 minutes.
const MAX_SKEW: Duration = Duration::from_secs(15 * 60);
const PROBE_DEADLINE: Duration = Duration::from_secs(10);

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Good.
    Ok,
    /// Works, slower or with less.
    Warn,
    /// Does not work.
    Fail,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it ended.
    pub verdict: Verdict,
    /// What was found, and what to do.
    pub detail: String,
}

fn check(name: &'static str, verdict: Verdict, detail: impl Into<String>) -> Check {
    Check { name, verdict, detail: detail.into() }
}

/// Looks at the machine, and at the source if there is one.
pub async fn examine(process: &ProcessConfig, source: Option<&MountConfig>) -> Vec<Check> {
    let mut all =
        vec![fuse_device(Path::new("/dev/fuse")), kernel(), rights(), io_engine(), limits()];
    for d in &process.disks {
        all.push(cache_disk(&d.dir, d.min_free_bytes));
    }
    if let Some(m) = source {
        all.extend(origin(m).await);
        if let Source::S3(c) = &m.source {
            let url = c.endpoint.clone().unwrap_or_else(|| "https://s3.amazonaws.com".into());
            all.push(clock(&url).await);
        }
    }
    all
}

/// /dev/fuse.
#[must_use]
pub fn fuse_device(path: &Path) -> Check {
    const NAME: &str = "FUSE device";
    match std::fs::File::options().read(true).write(true).open(path) {
        Ok(_) => check(NAME, Verdict::Ok, format!("{} can be opened", path.display())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => check(
            NAME,
            Verdict::Fail,
            format!(
                "{} is missing: load the module (`modprobe fuse`); in a container add `--device /dev/fuse --cap-add SYS_ADMIN`",
                path.display()
            ),
        ),
        Err(e) => check(
            NAME,
            Verdict::Fail,
            format!("{}: {e}: run as root, or join the group that may open it", path.display()),
        ),
    }
}

/// Major and minor of a kernel release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut n = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((n.next()?.ok()?, n.next()?.ok()?))
}

/// Whether a kernel has passthrough.
#[must_use]
pub fn kernel_check(release: &str) -> Check {
    const NAME: &str = "kernel";
    match version(release) {
        Some(v) if v >= PASSTHROUGH_KERNEL => {
            check(NAME, Verdict::Ok, format!("{release}: has FUSE passthrough"))
        }
        Some(_) => check(
            NAME,
            Verdict::Warn,
            format!(
                "{release}: no FUSE passthrough (it came with 6.9): writable mounts read through the daemon, at about half the speed of the page cache; --read-only mounts lose nothing"
            ),
        ),
        None => check(NAME, Verdict::Warn, format!("{release}: not understood")),
    }
}

fn kernel() -> Check {
    kernel_check(&rustix::system::uname().release().to_string_lossy())
}

fn rights() -> Check {
    const NAME: &str = "rights";
    let helper = std::env::var_os("PATH")
        .is_some_and(|p| std::env::split_paths(&p).any(|d| d.join("fusermount3").exists()));
    let root = rustix::process::geteuid().is_root();
    match (root, helper) {
        (true, _) => check(
            NAME,
            Verdict::Ok,
            "root: mounts directly, passthrough and large readahead are allowed",
        ),
        (false, true) => check(
            NAME,
            Verdict::Warn,
            "not root: mounts by fusermount3, without passthrough and with readahead of 128 KiB",
        ),
        (false, false) => check(
            NAME,
            Verdict::Fail,
            "not root, and fusermount3 is missing: install the package fuse3",
        ),
    }
}

fn io_engine() -> Check {
    match UringIo::new() {
        Ok(u) => check("cache I/O", Verdict::Ok, u.name()),
        Err(e) => check(
            "cache I/O",
            Verdict::Warn,
            format!(
                "no io_uring ({e}): plain reads and writes are used; in a container its seccomp profile must allow io_uring"
            ),
        ),
    }
}

fn limits() -> Check {
    const NAME: &str = "open files";
    const WANTED: u64 = 8192;
    let l = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    match l.maximum {
        Some(m) if m < WANTED => check(
            NAME,
            Verdict::Warn,
            format!("at most {m}: raise it to {WANTED} (`ulimit -n`, LimitNOFILE in systemd)"),
        ),
        _ => check(NAME, Verdict::Ok, "enough"),
    }
}

/// A cache directory and its disk.
#[must_use]
pub fn cache_disk(dir: &Path, min_free_bytes: u64) -> Check {
    const NAME: &str = "cache disk";
    let at = |what: String| format!("{}: {what}", dir.display());
    if let Err(e) = std::fs::create_dir_all(dir) {
        return check(NAME, Verdict::Fail, at(format!("{e}: name another --cache-dir")));
    }
    let probe = dir.join(format!(".kspeed-doctor-{}", std::process::id()));
    let written = std::fs::write(&probe, vec![0u8; 1 << 20]);
    let _ = std::fs::remove_file(&probe);
    match written {
        Err(e) if e.kind() == std::io::ErrorKind::StorageFull => {
            return check(
                NAME,
                Verdict::Fail,
                at("the disk is full: free some space, or name another --cache-dir".into()),
            );
        }
        Err(e) => {
            return check(
                NAME,
                Verdict::Fail,
                at(format!("{e}: check the disk and its permissions")),
            );
        }
        Ok(()) => {}
    }
    match rustix::fs::statvfs(dir) {
        Ok(s) => {
            let free = s.f_bavail * s.f_frsize;
            let text = at(format!("{} free", size_text(free)));
            if free < min_free_bytes {
                check(
                    NAME,
                    Verdict::Warn,
                    format!(
                        "{text}, less than --min-free {}: nothing more is cached",
                        size_text(min_free_bytes)
                    ),
                )
            } else {
                check(NAME, Verdict::Ok, text)
            }
        }
        Err(e) => check(NAME, Verdict::Warn, at(e.to_string())),
    }
}

async fn origin(m: &MountConfig) -> Vec<Check> {
    let mut quick = m.clone();
    quick.io_timeout = PROBE_DEADLINE;
    if let Source::S3(c) = &mut quick.source {
        c.request_timeout = PROBE_DEADLINE / 2;
    }
    let asked = std::time::Instant::now();
    let probe = ListRequest { max_keys: 1, delimited: true, ..ListRequest::default() };
    let result = match open_origin(&quick).await {
        Ok(o) => o.list(&probe).await.map_err(|e| (verdict_of(&e), e.to_string())),
        Err(e) => Err(("origin", e.to_string())),
    };
    match result {
        Ok(_) => {
            let ms = asked.elapsed().as_millis();
            vec![
                check("origin", Verdict::Ok, format!("{} answers in {ms} ms", m.source_text)),
                check("credentials", Verdict::Ok, "accepted"),
            ]
        }
        Err((name, detail)) => vec![check(name, Verdict::Fail, detail)],
    }
}

/// Which check an origin's error belongs to.
fn verdict_of(e: &OriginError) -> &'static str {
    match e {
        OriginError::Denied { .. } | OriginError::Expired { .. } => "credentials",
        _ => "origin",
    }
}

/// Compares this machine's clock with the Date that a server tells.
async fn clock(url: &str) -> Check {
    const NAME: &str = "clock";
    let answer = tokio::time::timeout(PROBE_DEADLINE, server_date(url)).await;
    let date = match answer {
        Ok(Ok(d)) => d,
        Ok(Err(e)) => return check(NAME, Verdict::Warn, format!("not compared: {e}")),
        Err(_) => return check(NAME, Verdict::Warn, "not compared: no answer within 10 s"),
    };
    clock_check(SystemTime::now(), date)
}

/// The verdict on a clock.
#[must_use]
pub fn clock_check(here: SystemTime, there: SystemTime) -> Check {
    const NAME: &str = "clock";
    let off = here.duration_since(there).unwrap_or_else(|e| e.duration());
    let text = format!("{} s from the store's", off.as_secs());
    if off > MAX_SKEW {
        check(
            NAME,
            Verdict::Fail,
            format!("{text}: S3 refuses more than 900 s; set the clock (NTP)"),
        )
    } else if off > MAX_SKEW / 5 {
        check(NAME, Verdict::Warn, format!("{text}: set the clock (NTP) before it is refused"))
    } else {
        check(NAME, Verdict::Ok, text)
    }
}

async fn server_date(url: &str) -> Result<SystemTime, String> {
    use http_body_util::Empty;
    use tokio::net::TcpStream;
    let Some(host) = url.strip_prefix("http://") else {
        // Over TLS the store itself tells: a skewed request is refused by name.
        return Err(
            "an https endpoint; a wrong clock shows as RequestTimeTooSkewed under credentials"
                .into(),
        );
    };
    let host = host.split('/').next().unwrap_or(host);
    let address = if host.contains(':') { host.to_owned() } else { format!("{host}:80") };
    let stream = TcpStream::connect(&address).await.map_err(|e| e.to_string())?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream))
            .await
            .map_err(|e| e.to_string())?;
    tokio::spawn(connection);
    let request = hyper::Request::builder()
        .uri("/")
        .header("host", host)
        .body(Empty::<bytes::Bytes>::new())
        .map_err(|e| e.to_string())?;
    let response = sender.send_request(request).await.map_err(|e| e.to_string())?;
    let date = response.headers().get("date").and_then(|d| d.to_str().ok());
    let date = date.ok_or("the server tells no date")?;
    httpdate::parse_http_date(date).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_fuse_device_is_explained() {
        let c = fuse_device(Path::new("/nonexistent/fuse"));
        assert_eq!(c.verdict, Verdict::Fail);
        assert!(c.detail.contains("modprobe fuse") && c.detail.contains("--device /dev/fuse"));
    }

    #[test]
    fn a_kernel_without_passthrough_is_explained() {
        assert_eq!(kernel_check("6.18.44-generic").verdict, Verdict::Ok);
        let c = kernel_check("5.15.0-91-generic");
        assert_eq!(c.verdict, Verdict::Warn);
        assert!(c.detail.contains("6.9"));
    }

    #[test]
    fn a_wrong_clock_is_explained() {
        let now = SystemTime::now();
        assert_eq!(clock_check(now, now + Duration::from_secs(5)).verdict, Verdict::Ok);
        assert_eq!(clock_check(now, now - Duration::from_secs(400)).verdict, Verdict::Warn);
        let c = clock_check(now, now + Duration::from_secs(3600));
        assert_eq!(c.verdict, Verdict::Fail);
        assert!(c.detail.contains("NTP"));
    }

    #[test]
    fn a_disk_that_can_not_be_written_is_explained() {
        let c = cache_disk(Path::new("/proc/nowhere"), 0);
        assert_eq!(c.verdict, Verdict::Fail);
        assert!(c.detail.contains("--cache-dir"));
    }
}

//! `kspeed mount` and `kspeed umount`.

use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::Failure;
use crate::config::{MountConfig, ProcessConfig, RawFile, RawMount};
use crate::control::{Client, Control, serve_metrics};
use crate::mount::{Process, unmount};

/// In the daemon's environment: it tells its parent on standard output when it
/// serves.
const DAEMON: &str = "KSPEED_INTERNAL_DAEMON";
const READY: &str = "ready";
const PROGRESS: &str = "indexed ";
/// Worker threads at the least; else one a core.
const MIN_WORKERS: usize = 2;
/// After the last request a daemon ends within this.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(30);
/// umount gives up when no upload ends for so long.
const DRAIN_PATIENCE: Duration = Duration::from_secs(120);
const UMOUNT_DEADLINE: Duration = Duration::from_secs(60);

fn checked(
    raw: RawMount,
    file: Option<&Path>,
) -> Result<(ProcessConfig, Vec<MountConfig>), Failure> {
    let file = match file {
        Some(p) => RawFile::read(p).map_err(Failure::usage)?,
        None => RawFile::default(),
    };
    let process = ProcessConfig::check(&raw.clone().or(&file.defaults)).map_err(Failure::usage)?;
    let raws: Vec<RawMount> = if raw.source.is_some() || file.mount.is_empty() {
        vec![raw.or(&file.defaults)]
    } else {
        file.mount.iter().map(|m| raw.clone().or(m).or(&file.defaults)).collect()
    };
    let mounts =
        raws.iter().map(MountConfig::check).collect::<Result<_, _>>().map_err(Failure::usage)?;
    Ok((process, mounts))
}

pub(super) fn mount(raw: RawMount, file: Option<&Path>, foreground: bool) -> Result<(), Failure> {
    let (process, mounts) = checked(raw, file)?;
    if foreground || std::env::var_os(DAEMON).is_some() {
        return serve(process, mounts);
    }
    // Again, in a session of its own; the parent waits until it serves.
    let log = process.disks.first().map(|d| d.dir.join("kspeed.log"));
    let stderr = match &log {
        Some(path) => {
            if let Some(d) = path.parent() {
                std::fs::create_dir_all(d)
                    .map_err(|e| Failure::failed(format!("{}: {e}", d.display())))?;
            }
            let f = std::fs::File::options().create(true).append(true).open(path);
            Stdio::from(f.map_err(|e| Failure::failed(format!("{}: {e}", path.display())))?)
        }
        None => Stdio::null(),
    };
    let mut child = Command::new(std::env::current_exe()?);
    child
        .args(std::env::args_os().skip(1))
        .env(DAEMON, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(stderr)
        .process_group(0);
    let mut child = child.spawn()?;
    let Some(out) = child.stdout.take() else { return Err(Failure::failed("no pipe")) };
    let mut last = String::new();
    for line in BufReader::new(out).lines() {
        let line = line?;
        if line == READY {
            return Ok(());
        }
        if let Some(n) = line.strip_prefix(PROGRESS) {
            if std::io::stderr().is_terminal() {
                eprint!("\rindexing: {n} keys ");
            }
        } else {
            last = line;
        }
    }
    let _ = child.wait();
    if last.is_empty() {
        let log = log.map_or_else(String::new, |l| format!("; see {}", l.display()));
        last = format!("the daemon ended before the mount served{log}");
    }
    Err(Failure::failed(last))
}

fn serve(config: ProcessConfig, mounts: Vec<MountConfig>) -> Result<(), Failure> {
    let filter = tracing_subscriber::EnvFilter::try_new(&config.log).map_err(|_| {
        Failure::usage(format!(
            "--log: {:?} is not allowed: error, warn, info, debug, trace, or a filter",
            config.log
        ))
    })?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A second subscriber in one process only happens in tests.
    let _ = log.with_ansi(std::io::stderr().is_terminal()).try_init();
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, {
        let mut l = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        l.current = l.maximum;
        l
    });
    let cores = std::thread::available_parallelism().map_or(MIN_WORKERS, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cores.max(MIN_WORKERS))
        .thread_name("kspeed-worker")
        .enable_all()
        .build()?;
    let daemon = std::env::var_os(DAEMON).is_some();
    let result = runtime.block_on(run(config, mounts, daemon));
    // What is left are blocking calls to a disk or network that hangs.
    runtime.shutdown_timeout(Duration::from_secs(2));
    match result {
        Ok(()) => Ok(()),
        Err(f) if daemon => {
            println!("{}", f.message);
            Err(f)
        }
        Err(f) => Err(f),
    }
}

async fn run(config: ProcessConfig, mounts: Vec<MountConfig>, daemon: bool) -> Result<(), Failure> {
    let process = Process::start(config.clone(), tokio::runtime::Handle::current())?;
    let control = Control::start(process.clone(), config.control_socket())
        .map_err(|e| Failure::failed(format!("{}: {e}", config.control_socket().display())))?;
    let stop = CancellationToken::new();
    let metrics = match config.metrics {
        Some(a) => Some(
            serve_metrics(process.clone(), a, stop.clone())
                .await
                .map_err(|e| Failure::failed(format!("--metrics {a}: {e}")))?,
        ),
        None => None,
    };
    let progress = move |n: u64| {
        if daemon {
            println!("{PROGRESS}{n}");
        }
    };
    let share = mounts.len() as u64;
    let mut failed = None;
    for m in mounts {
        if let Err(e) = process.mount(m, share, &progress).await {
            failed = Some(Failure::failed(e));
            break;
        }
    }
    if failed.is_none() {
        if daemon {
            println!("{READY}");
            let _ = std::io::stdout().flush();
        }
        tracing::info!(version = env!("CARGO_PKG_VERSION"), "serving");
        until_over(&process).await?;
        process.drain().await;
    } else {
        process.unmount_all();
    }
    stop.cancel();
    let ended = tokio::time::timeout(SHUTDOWN_DEADLINE, process.shutdown()).await;
    match ended {
        Ok(0) => tracing::info!("ended"),
        Ok(n) => tracing::error!(tasks = n, "tasks live on"),
        Err(_) => tracing::error!("shutdown took too long"),
    }
    control.stop().await;
    if let Some(m) = metrics {
        let _ = m.await;
    }
    failed.map_or(Ok(()), Err)
}

/// Until all mounts are gone; SIGTERM and SIGINT unmount, SIGHUP reads
/// credentials again.
async fn until_over(process: &Arc<Process>) -> Result<(), Failure> {
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    let mut hup = signal(SignalKind::hangup())?;
    let gone = process.wait();
    tokio::pin!(gone);
    loop {
        tokio::select! {
            () = &mut gone => return Ok(()),
            _ = term.recv() => break,
            _ = int.recv() => break,
            _ = hup.recv() => {
                let mounts: Vec<_> = process.mounts.lock().clone();
                for m in mounts {
                    if let Err(e) = m.fs.origin().reload().await {
                        tracing::warn!(error = %e, "credentials could not be read again");
                    }
                }
            }
        }
    }
    process.detach().await;
    Ok(())
}

pub(super) fn umount(mountpoint: &Path, no_drain: bool) -> Result<(), Failure> {
    let mountpoint = std::path::absolute(mountpoint)?;
    // Asked for before: afterwards there is nobody to ask.
    let pid = status_pid(&mountpoint);
    if !no_drain && pid.is_some() {
        let patience = match std::env::var("KSPEED_DRAIN_PATIENCE") {
            Ok(p) => crate::config::parse_duration(&p).ok_or_else(|| {
                Failure::usage(format!("KSPEED_DRAIN_PATIENCE: {p:?} is not a duration like 30s"))
            })?,
            Err(_) => DRAIN_PATIENCE,
        };
        super::paths::drain(&mountpoint, patience).map_err(|f| {
            Failure::failed(format!(
                "{}: {}; it stays mounted, or use --no-drain: what is not uploaded stays in the cache directory for the next mount",
                mountpoint.display(),
                f.message
            ))
        })?;
    }
    unmount(&mountpoint, no_drain).map_err(|e| {
        let hint = match e.raw_os_error() {
            Some(libc::EBUSY) => "; close what is open there (`fuser -vm`), or use --no-drain",
            Some(libc::EINVAL) => "; nothing is mounted there",
            _ => "",
        };
        Failure::failed(format!("{}: {e}{hint}", mountpoint.display()))
    })?;
    let began = Instant::now();
    while let Some(pid) = pid
        && Path::new(&format!("/proc/{pid}")).exists()
        && !is_zombie(pid)
        && serves_nothing_else(&mountpoint, pid)
        && !no_drain
    {
        if began.elapsed() > UMOUNT_DEADLINE {
            return Err(Failure::failed(format!(
                "unmounted, but process {pid} has not ended within 60 s"
            )));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn status_pid(mountpoint: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(mountpoint.join(".kspeed/status")).ok()?;
    serde_json::from_str::<crate::telemetry::ProcessStatus>(&text).ok().map(|s| s.pid)
}

fn is_zombie(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|s| s.rsplit(')').next().is_some_and(|r| r.trim_start().starts_with('Z')))
}

/// Whether the daemon has no other mount that keeps it alive.
fn serves_nothing_else(mountpoint: &Path, pid: u32) -> bool {
    !crate::control::mounts().iter().any(|m| m != mountpoint && status_pid(m) == Some(pid))
}

/// For commands that take a mountpoint or none: all of them.
pub(super) fn clients(mountpoint: Option<&Path>) -> Result<Vec<Client>, Failure> {
    let mountpoints = match mountpoint {
        Some(m) => vec![crate::control::daemon_of(m)?.0],
        None => crate::control::mounts(),
    };
    mountpoints.iter().map(|m| Client::of_mount(m).map_err(Failure::from)).collect()
}

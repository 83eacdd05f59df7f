//! Commands on paths: warm, evict, pin, unpin, sync, ls-cache.

use std::collections::BTreeMap;
use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::{Failure, small_runtime};
use crate::config::size_text;
use crate::control::{Client, PathsAction, PathsLine, PathsRequest, daemon_of};

fn requests(action: PathsAction, paths: Vec<PathBuf>) -> Result<Vec<PathsRequest>, Failure> {
    let mut by_mount: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
    for p in paths {
        let (mountpoint, relative) = daemon_of(&p)?;
        by_mount.entry(mountpoint).or_default().push(relative);
    }
    Ok(by_mount
        .into_iter()
        .map(|(mountpoint, paths)| PathsRequest { action, mountpoint, paths, patience_ms: None })
        .collect())
}

pub(super) fn warm(mut paths: Vec<PathBuf>, list: Option<&Path>, pin: bool) -> Result<(), Failure> {
    if let Some(list) = list {
        let lines: Box<dyn BufRead> = if list == Path::new("-") {
            Box::new(std::io::stdin().lock())
        } else {
            let f = std::fs::File::open(list)
                .map_err(|e| Failure::failed(format!("{}: {e}", list.display())))?;
            Box::new(std::io::BufReader::new(f))
        };
        for l in lines.lines() {
            paths.push(l?.into());
        }
    }
    let action = if pin { PathsAction::WarmAndPin } else { PathsAction::Warm };
    // The kernel takes pushed pages only for names that it knows: look at them
    // all once, by which a dataset mount primes names and attributes.
    for p in &paths {
        prime(p);
    }
    run(action, paths)
}

/// Lists a directory and all below, so that the kernel knows the names.
fn prime(path: &Path) {
    let Ok(entries) = std::fs::read_dir(path) else {
        let _ = path.symlink_metadata();
        return;
    };
    for e in entries.flatten() {
        if e.file_type().is_ok_and(|t| t.is_dir()) {
            prime(&e.path());
        }
    }
}

pub(super) fn each(action: PathsAction, paths: Vec<PathBuf>) -> Result<(), Failure> {
    run(action, paths)
}

fn run(action: PathsAction, paths: Vec<PathBuf>) -> Result<(), Failure> {
    let runtime = small_runtime()?;
    let mut failures = 0;
    for r in requests(action, paths)? {
        let client = Client::of_mount(&r.mountpoint)?;
        let bar = progress_bar();
        runtime.block_on(client.paths(&r, |line| match line {
            PathsLine::Progress { files, bytes, total_files, total_bytes } => {
                bar.set_length(total_bytes);
                bar.set_position(bytes);
                bar.set_message(format!("{files}/{total_files} files"));
            }
            PathsLine::Failed { path, error } => {
                bar.suspend(|| eprintln!("kspeed: {path}: {error}"));
            }
            PathsLine::Done { files, bytes, pushed_bytes, failed } => {
                bar.finish_and_clear();
                failures += failed;
                if matches!(action, PathsAction::Warm | PathsAction::WarmAndPin) {
                    println!(
                        "{files} files, {} in the cache, {} in the page cache",
                        size_text(bytes),
                        size_text(pushed_bytes)
                    );
                }
            }
            PathsLine::File { .. } => {}
        }))?;
    }
    if failures > 0 {
        return Err(Failure::failed(format!("{failures} files or paths failed")));
    }
    Ok(())
}

/// Waits until a whole mount is uploaded, or nothing gets on for `patience`.
pub(super) fn drain(mountpoint: &Path, patience: Duration) -> Result<(), Failure> {
    let client = Client::of_mount(mountpoint)?;
    let r = PathsRequest {
        action: PathsAction::Sync,
        mountpoint: mountpoint.to_path_buf(),
        paths: vec![PathBuf::new()],
        patience_ms: u64::try_from(patience.as_millis()).ok(),
    };
    let mut why = None;
    small_runtime()?.block_on(client.paths(&r, |line| match line {
        PathsLine::Progress { files, total_files, .. } if std::io::stderr().is_terminal() => {
            eprint!("\ruploading: {files} of {total_files} changes ");
        }
        PathsLine::Failed { error, .. } => why = Some(error),
        _ => {}
    }))?;
    why.map_or(Ok(()), |w| Err(Failure::failed(w)))
}

fn progress_bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(
        "{bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec} {msg}, {eta} left",
    );
    let bar = ProgressBar::new(0);
    if let Ok(s) = style {
        bar.set_style(s);
    }
    bar
}

pub(super) fn list(path: &Path, json: bool) -> Result<(), Failure> {
    let runtime = small_runtime()?;
    let mut failures = Vec::new();
    if !json {
        println!("{:>12} {:>12} {:>12}  pin  path", "size", "cached", "in RAM");
    }
    for r in requests(PathsAction::List, vec![path.to_path_buf()])? {
        let client = Client::of_mount(&r.mountpoint)?;
        runtime.block_on(client.paths(&r, |line| match &line {
            PathsLine::File { path, size, cached, ram, pinned } => {
                if json {
                    println!("{}", serde_json::to_string(&line).unwrap_or_default());
                } else {
                    let pin = if *pinned { "yes" } else { "-" };
                    println!("{size:>12} {cached:>12} {ram:>12}  {pin:<3}  {path}");
                }
            }
            PathsLine::Failed { path, error } => failures.push(format!("{path}: {error}")),
            _ => {}
        }))?;
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(Failure::failed(failures.join("\n"))),
    }
}

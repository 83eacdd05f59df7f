//! The daemon's side.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::StreamExt;
use kspeed_cache::ObjectMeta;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{HintAnswer, HintRequest, PathsAction, PathsLine, PathsRequest};
use crate::errno::FsError;
use crate::mount::{Mounted, Process};
use crate::namespace::Ino;
use crate::telemetry::prometheus;

/// Files worked on at once: small ones wait for latency, not for bandwidth.
const PARALLEL_FILES: usize = 48;
const PROGRESS_EVERY: Duration = Duration::from_millis(200);
/// A hint of four million paths fits.
const MAX_HINT_BYTES: usize = 512 << 20;
const HINT_DEADLINE: Duration = Duration::from_secs(100);
/// Lines that wait for a slow reader; then the work waits.
const MAX_LINES: usize = 256;

/// A control socket that serves; it is removed at [`Self::stop`].
pub struct Control {
    path: PathBuf,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Control {
    /// Listens.
    ///
    /// # Errors
    /// The socket can't be made.
    pub fn start(process: Arc<Process>, path: PathBuf) -> std::io::Result<Self> {
        // A socket that a killed daemon left: ours, since we hold the cache's lock.
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        let stop = CancellationToken::new();
        let router = Router::new()
            .route("/status", get(status))
            .route("/metrics", get(metrics))
            .route("/paths", post(paths))
            .route("/hint", post(hint).layer(DefaultBodyLimit::max(MAX_HINT_BYTES)))
            .with_state(process);
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let serve = axum::serve(listener, router);
            tokio::select! {
                r = serve => {
                    if let Err(e) = r {
                        tracing::error!(error = %e, "the control socket failed");
                    }
                }
                () = stopped.cancelled() => {}
            }
        });
        Ok(Self { path, stop, task })
    }

    /// Stops and removes the socket.
    pub async fn stop(self) {
        self.stop.cancel();
        let _ = self.task.await;
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Serves Prometheus metrics until `stop`.
///
/// # Errors
/// The address is taken.
pub async fn serve_metrics(
    process: Arc<Process>,
    address: SocketAddr,
    stop: CancellationToken,
) -> std::io::Result<tokio::task::JoinHandle<()>> {
    let listener = TcpListener::bind(address).await?;
    let router = Router::new().route("/metrics", get(metrics)).with_state(process);
    Ok(tokio::spawn(async move {
        tokio::select! {
            _ = axum::serve(listener, router) => {}
            () = stop.cancelled() => {}
        }
    }))
}

async fn status(State(p): State<Arc<Process>>) -> Response {
    axum::Json(p.status()).into_response()
}

async fn metrics(State(p): State<Arc<Process>>) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4");
    ([(header::CONTENT_TYPE, kind)], prometheus(&p.status())).into_response()
}

async fn paths(
    State(p): State<Arc<Process>>,
    axum::Json(mut r): axum::Json<PathsRequest>,
) -> Response {
    for path in &mut r.paths {
        // The mountpoint itself is `.`, as seen from there.
        *path = path.components().filter(|c| *c != Component::CurDir).collect();
    }
    let Some(mount) = p.find(&r.mountpoint) else {
        let text = format!("{} is not mounted by this process", r.mountpoint.display());
        return (StatusCode::NOT_FOUND, text).into_response();
    };
    let (tell, told) = mpsc::channel::<PathsLine>(MAX_LINES);
    // Ends when the work is done, or when the client is gone and `tell` fails.
    tokio::spawn(work(mount, r, tell));
    let lines = futures::stream::unfold(told, |mut told| async move {
        let line = told.recv().await?;
        let mut text = serde_json::to_string(&line).unwrap_or_default();
        text.push('\n');
        Some((Ok::<_, std::convert::Infallible>(text), told))
    });
    Body::from_stream(lines).into_response()
}

async fn hint(State(p): State<Arc<Process>>, axum::Json(r): axum::Json<HintRequest>) -> Response {
    let Some(mount) = p.find(&r.mountpoint) else {
        let text = format!("{} is not mounted by this process", r.mountpoint.display());
        return (StatusCode::NOT_FOUND, text).into_response();
    };
    let Some(datasets) = mount.fs.pipeline.datasets() else {
        let text = "this mount follows no orders: it was mounted with --predict off or sequential";
        return (StatusCode::CONFLICT, text).into_response();
    };
    match tokio::time::timeout(HINT_DEADLINE, datasets.hint(&r.id, &r.files, &r.told)).await {
        Ok(Ok(known)) => axum::Json(HintAnswer { known }).into_response(),
        Ok(Err(e)) => (StatusCode::UNPROCESSABLE_ENTITY, e.to_string()).into_response(),
        Err(_) => {
            let text = "the files could not be listed in time; is the origin away?";
            (StatusCode::GATEWAY_TIMEOUT, text).into_response()
        }
    }
}

struct Counts {
    files: AtomicU64,
    bytes: AtomicU64,
    pushed: AtomicU64,
    failed: AtomicU64,
}

async fn resolve(m: &Mounted, path: &Path) -> Result<Vec<(Ino, ObjectMeta)>, FsError> {
    use std::os::unix::ffi::OsStrExt;
    let attr = m.fs.resolve(path.as_os_str().as_bytes()).await?;
    m.fs.files_below(attr.ino).await
}

/// Waits until the origin has what was written below some paths.
async fn sync(m: &Mounted, r: &PathsRequest, tell: &mpsc::Sender<PathsLine>) {
    use std::os::unix::ffi::OsStrExt;
    let (mut done, mut failed) = (0, 0);
    let patience = r.patience_ms.map(Duration::from_millis);
    let before = m.fs.writeback().map_or(0, |w| w.pending().changes);
    let progress = |left: u64, bytes: u64| {
        let files = before.saturating_sub(left);
        let line = PathsLine::Progress { files, bytes: 0, total_files: before, total_bytes: bytes };
        // A reader that is slow hears of the next.
        let _ = tell.try_send(line);
    };
    for path in &r.paths {
        let Some(w) = m.fs.writeback() else { break };
        match w.drain(path.as_os_str().as_bytes(), patience, &progress).await {
            Ok(()) => done += 1,
            Err(e) => {
                failed += 1;
                let path = path.display().to_string();
                let _ = tell.send(PathsLine::Failed { path, error: e.to_string() }).await;
            }
        }
    }
    let line = PathsLine::Done { files: done, bytes: 0, pushed_bytes: 0, failed };
    let _ = tell.send(line).await;
}

async fn work(m: Arc<Mounted>, r: PathsRequest, tell: mpsc::Sender<PathsLine>) {
    if r.action == PathsAction::Sync {
        tokio::select! {
            () = sync(&m, &r, &tell) => {}
            () = tell.closed() => {}
        }
        return;
    }
    let counts = Counts { files: 0.into(), bytes: 0.into(), pushed: 0.into(), failed: 0.into() };
    let mut files = Vec::new();
    for path in &r.paths {
        match resolve(&m, path).await {
            Ok(found) => files.extend(found),
            Err(e) => {
                counts.failed.fetch_add(1, Ordering::Relaxed);
                let line =
                    PathsLine::Failed { path: path.display().to_string(), error: e.to_string() };
                if tell.send(line).await.is_err() {
                    return;
                }
            }
        }
    }
    let total_files = files.len() as u64;
    let total_bytes = files.iter().map(|(_, o)| o.size).sum();
    let progress = |c: &Counts| PathsLine::Progress {
        files: c.files.load(Ordering::Relaxed),
        bytes: c.bytes.load(Ordering::Relaxed),
        total_files,
        total_bytes,
    };
    let parallel = if r.action == PathsAction::List { 1 } else { PARALLEL_FILES };
    let mut results = futures::stream::iter(files)
        .map(|(ino, meta)| one(&m, r.action, ino, meta, &counts))
        .buffered(parallel);
    let mut told = Instant::now();
    while let Some(line) = results.next().await {
        if let Some(line) = line
            && tell.send(line).await.is_err()
        {
            return;
        }
        if told.elapsed() >= PROGRESS_EVERY {
            told = Instant::now();
            if tell.send(progress(&counts)).await.is_err() {
                return;
            }
        }
    }
    let done = PathsLine::Done {
        files: counts.files.load(Ordering::Relaxed),
        bytes: counts.bytes.load(Ordering::Relaxed),
        pushed_bytes: counts.pushed.load(Ordering::Relaxed),
        failed: counts.failed.load(Ordering::Relaxed),
    };
    let _ = tell.send(done).await;
}

async fn one(
    m: &Mounted,
    action: PathsAction,
    ino: Ino,
    meta: ObjectMeta,
    counts: &Counts,
) -> Option<PathsLine> {
    let o = m.fs.cache().object(m.fs.origin(), &meta);
    let path = meta.key.to_string();
    let result = match action {
        PathsAction::Warm | PathsAction::WarmAndPin => match o.warm().await {
            Ok(()) => {
                if let Some(p) = m.fs.pipeline.pusher()
                    && p.push(ino, &o).await
                {
                    counts.pushed.fetch_add(meta.size, Ordering::Relaxed);
                }
                if action == PathsAction::WarmAndPin {
                    o.pin(true).map_err(|e| e.to_string())
                } else {
                    Ok(())
                }
            }
            Err(e) => Err(e.to_string()),
        },
        PathsAction::Evict => {
            o.evict();
            Ok(())
        }
        PathsAction::Pin => o.pin(true).map_err(|e| e.to_string()),
        PathsAction::Unpin => o.pin(false).map_err(|e| e.to_string()),
        PathsAction::Sync => Ok(()),
        PathsAction::List => {
            return Some(PathsLine::File {
                path,
                size: meta.size,
                cached: o.cached_bytes(),
                ram: o.ram_bytes(),
                pinned: o.is_pinned(),
            });
        }
    };
    match result {
        Ok(()) => {
            counts.files.fetch_add(1, Ordering::Relaxed);
            counts.bytes.fetch_add(meta.size, Ordering::Relaxed);
            None
        }
        Err(error) => {
            counts.failed.fetch_add(1, Ordering::Relaxed);
            Some(PathsLine::Failed { path, error })
        }
    }
}

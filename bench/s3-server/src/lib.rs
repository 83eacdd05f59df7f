//! A small S3 server over a directory, for tests, demo and benchmarks: real
//! HTTP, SigV4, listings with pages, multipart uploads, conditional requests;
//! with shaping (latency, rates) and faults.
//!
//! It keeps all keys in memory and serves large objects from memory maps, so
//! that it is not what a benchmark measures. ETags are not MD5: they name
//! inode, size and time of the file, and so last over restarts.

mod faults;
mod mapped;
mod s3;
mod shape;
mod store;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::RwLock;
use s3s::auth::{S3Auth, SecretKey};
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{Body, S3Error, S3ErrorCode, S3Result};
use tokio::net::TcpListener;
use tokio::runtime::Handle;

pub use faults::{FaultKind, Faults};
pub use shape::Shape;
pub use store::Store;

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Directory whose subdirectories are buckets.
    pub root: PathBuf,
    /// Address to listen on; port 0 picks one.
    pub listen: SocketAddr,
    /// Access key and secret that are accepted.
    pub credentials: (String, String),
    /// Latency and rates.
    pub shape: Shape,
}

impl Options {
    /// Loopback, a free port, `kspeed` / `kspeed-secret`, unshaped.
    #[must_use]
    pub fn loopback(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            credentials: ("kspeed".into(), "kspeed-secret".into()),
            shape: Shape::default(),
        }
    }
}

/// What was asked of a server.
#[derive(Default, Debug)]
pub struct Requests {
    /// GET of objects.
    pub gets: AtomicU64,
    /// Listings.
    pub lists: AtomicU64,
    /// HEAD.
    pub heads: AtomicU64,
    /// PUT, POST and DELETE.
    pub writes: AtomicU64,
    /// Of these, PUTs of a part.
    pub parts: AtomicU64,
    /// Bytes of object bodies sent.
    pub sent_bytes: AtomicU64,
}

impl Requests {
    /// All requests together.
    #[must_use]
    pub fn total(&self) -> u64 {
        [&self.gets, &self.lists, &self.heads, &self.writes]
            .iter()
            .map(|c| c.load(Ordering::Relaxed))
            .sum()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum KeyState {
    Valid,
    Expired,
}

#[derive(Default)]
struct Keys(RwLock<Vec<(String, String, KeyState)>>);

struct Auth(Arc<Keys>);

#[async_trait::async_trait]
impl S3Auth for Auth {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        match self.0.0.read().iter().find(|k| k.0 == access_key) {
            Some((_, secret, KeyState::Valid)) => Ok(SecretKey::from(secret.clone())),
            Some(_) => {
                let mut e = S3Error::with_message(
                    S3ErrorCode::ExpiredToken,
                    "The provided token has expired.",
                );
                e.set_status_code(StatusCode::BAD_REQUEST);
                Err(e)
            }
            None => Err(S3Error::with_message(
                S3ErrorCode::InvalidAccessKeyId,
                "The AWS Access Key Id you provided does not exist in our records.",
            )),
        }
    }
}

struct Shared {
    service: S3Service,
    shape: RwLock<Arc<shape::Shaper>>,
    faults: Faults,
    requests: Requests,
    keys: Arc<Keys>,
    store: Arc<Store>,
}

/// A running server; it stops when dropped.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    /// Scans the directory and starts to listen, on tokio's current runtime.
    ///
    /// # Errors
    /// The directory can't be read, or the address is taken.
    pub async fn start(options: Options) -> std::io::Result<Self> {
        let store = Arc::new(Store::open(&options.root)?);
        let keys = Arc::new(Keys::default());
        let (key, secret) = options.credentials;
        keys.0.write().push((key, secret, KeyState::Valid));
        let mut builder = S3ServiceBuilder::new(s3::Api(store.clone()));
        builder.set_auth(Auth(keys.clone()));
        let shared = Arc::new(Shared {
            service: builder.build(),
            shape: RwLock::new(Arc::new(shape::Shaper::new(options.shape))),
            faults: Faults::default(),
            requests: Requests::default(),
            keys,
            store,
        });
        let listener = TcpListener::bind(options.listen).await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(accept(listener, shared.clone()));
        Ok(Self { shared, address, task })
    }

    /// Starts a server on a runtime and threads of its own, for callers that
    /// are not asynchronous.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_on(handle: &Handle, options: Options) -> std::io::Result<Self> {
        let (tell, wait) = std::sync::mpsc::channel();
        handle.spawn(async move {
            let _ = tell.send(Self::start(options).await);
        });
        wait.recv().map_err(std::io::Error::other)?
    }

    /// `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What was asked so far.
    #[must_use]
    pub fn requests(&self) -> &Requests {
        &self.shared.requests
    }

    /// Faults to inject from now on.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// Changes latency and rates from the next request on.
    pub fn set_shape(&self, shape: Shape) {
        *self.shared.shape.write() = Arc::new(shape::Shaper::new(shape));
    }

    /// The objects, to change them behind everybody's back.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.shared.store
    }

    /// Lets an access key expire and accepts another one.
    pub fn rotate_credentials(&self, key: &str, secret: &str) {
        let mut keys = self.shared.keys.0.write();
        for k in keys.iter_mut() {
            k.2 = KeyState::Expired;
        }
        keys.retain(|k| k.0 != key);
        keys.push((key.into(), secret.into(), KeyState::Valid));
    }

    /// Waits for ever (or until the task fails).
    pub async fn serve(mut self) {
        let _ = (&mut self.task).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let stream = tokio::select! {
            a = listener.accept() => match a {
                Ok((s, _)) => s,
                Err(_) => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                }
            },
            Some(_) = connections.join_next() => continue,
        };
        let _ = stream.set_nodelay(true);
        let shared = shared.clone();
        connections.spawn(async move {
            let service = service_fn(move |r| answer(r, shared.clone()));
            let _ = hyper::server::conn::http1::Builder::new()
                .max_buf_size(1 << 20)
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    shared: Arc<Shared>,
) -> Result<Response<Body>, Infallible> {
    let requests = &shared.requests;
    let is_get = request.method() == hyper::Method::GET;
    let query = request.uri().query().unwrap_or_default();
    let is_list = is_get && query.contains("list-type=2");
    let is_object = is_get && !is_list;
    let counter = if is_list {
        &requests.lists
    } else if is_get {
        &requests.gets
    } else if request.method() == hyper::Method::HEAD {
        &requests.heads
    } else {
        &requests.writes
    };
    counter.fetch_add(1, Ordering::Relaxed);
    if request.method() == hyper::Method::PUT && query.contains("partNumber=") {
        requests.parts.fetch_add(1, Ordering::Relaxed);
    }
    let fault = shared.faults.next(is_object);
    if fault == Some(FaultKind::Hang) {
        shared.faults.until_healed().await;
    }
    let shaper = shared.shape.read().clone();
    shaper.first_byte().await;
    if let Some(response) = fault.and_then(faults::refusal) {
        return Ok(response);
    }
    let response = match shared.service.call(request.map(Body::from)).await {
        Ok(r) => r,
        Err(e) => {
            tracing::warn!(error = ?e, "request failed");
            let mut r = Response::new(Body::empty());
            *r.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            return Ok(r);
        }
    };
    if !is_object || !response.status().is_success() {
        return Ok(response);
    }
    Ok(shape::body(response, shaper, fault, shared))
}

//! Latency and rates, as a far-away store has them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper::header::{CONTENT_LENGTH, CONTENT_RANGE, HeaderValue};
use hyper::{Response, StatusCode};
use parking_lot::Mutex;
use s3s::Body;
use tokio::time::Instant;

use crate::Shared;
use crate::faults::FaultKind;

/// Pieces that are paid for at once when a rate is set, in bytes.
const PIECE_BYTES: usize = 64 << 10;

/// What a server is slowed down to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shape {
    /// Time before the first byte of each answer.
    pub latency: Duration,
    /// Bytes per second of one body, that is of one connection.
    pub connection_rate: Option<u64>,
    /// Bytes per second of all bodies together.
    pub total_rate: Option<u64>,
}

/// When the next byte is due, at a rate.
struct Pace {
    rate: f64,
    due: Instant,
}

impl Pace {
    fn new(rate: u64) -> Self {
        Self { rate: rate as f64, due: Instant::now() }
    }

    /// Books `bytes` and says when they may go.
    fn book(&mut self, bytes: usize) -> Instant {
        let now = Instant::now();
        // Unused time is not saved up beyond 10 ms of it.
        self.due = self.due.max(now - Duration::from_millis(10));
        self.due += Duration::from_secs_f64(bytes as f64 / self.rate);
        self.due
    }
}

pub(crate) struct Shaper {
    shape: Shape,
    total: Option<Mutex<Pace>>,
}

impl Shaper {
    pub(crate) fn new(shape: Shape) -> Self {
        Self { shape, total: shape.total_rate.map(|r| Mutex::new(Pace::new(r))) }
    }

    pub(crate) async fn first_byte(&self) {
        if !self.shape.latency.is_zero() {
            tokio::time::sleep(self.shape.latency).await;
        }
    }

    fn is_plain(&self) -> bool {
        self.total.is_none() && self.shape.connection_rate.is_none()
    }
}

type Pieces = Pin<Box<dyn Stream<Item = Result<Bytes, s3s::StdError>> + Send>>;

/// Shapes a successful body and lets it fail as planned.
pub(crate) fn body(
    mut response: Response<Body>,
    shaper: Arc<Shaper>,
    fault: Option<FaultKind>,
    shared: Arc<Shared>,
) -> Response<Body> {
    let length: u64 = response
        .headers()
        .get(CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.parse().ok())
        .unwrap_or(0);
    shared.requests.sent_bytes.fetch_add(length, Ordering::Relaxed);
    match fault {
        Some(FaultKind::ShortBody) if length > 1 => {
            response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length - 1));
            return response.map(|b| rebuild(cut(pieces(b), length - 1, false)));
        }
        Some(FaultKind::CutBody) => {
            return response.map(|b| rebuild(cut(pieces(b), length / 2, true)));
        }
        Some(FaultKind::WrongRange) => {
            *response.status_mut() = StatusCode::OK;
            response.headers_mut().remove(CONTENT_RANGE);
            response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length + 1));
            let extra = stream::iter([Ok(Bytes::from_static(b"!"))]);
            return response.map(|b| rebuild(pieces(b).chain(extra).boxed()));
        }
        Some(FaultKind::XmlAsData) => {
            let xml = b"<?xml version=\"1.0\"?><Error><Code>InternalError</Code></Error>";
            response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(xml.len()));
            return response.map(|_| Body::from(Bytes::from_static(xml)));
        }
        _ => {}
    }
    if shaper.is_plain() && !shared.faults.is_hanging() {
        return response;
    }
    response.map(|b| rebuild(paced(pieces(b), shaper, shared)))
}

fn pieces(body: Body) -> Pieces {
    body.into_data_stream().boxed()
}

fn rebuild(pieces: Pieces) -> Body {
    Body::http_body_unsync(StreamBody::new(pieces.map(|r| r.map(Frame::data))))
}

/// The first `len` bytes, then an error or the end.
fn cut(from: Pieces, len: u64, breaks: bool) -> Pieces {
    let kept = from.scan(len, |left, item| {
        let next = match item {
            Ok(mut b) => {
                b.truncate((*left).min(b.len() as u64) as usize);
                *left -= b.len() as u64;
                (!b.is_empty()).then_some(Ok(b))
            }
            e => Some(e),
        };
        std::future::ready(next)
    });
    if breaks {
        let broken: s3s::StdError = io::Error::other("cut as planned").into();
        kept.chain(stream::iter([Err(broken)])).boxed()
    } else {
        kept.boxed()
    }
}

struct Paced {
    from: Pieces,
    rest: Bytes,
    own: Option<Pace>,
    shaper: Arc<Shaper>,
    shared: Arc<Shared>,
}

fn paced(from: Pieces, shaper: Arc<Shaper>, shared: Arc<Shared>) -> Pieces {
    let own = shaper.shape.connection_rate.map(Pace::new);
    let state = Paced { from, rest: Bytes::new(), own, shaper, shared };
    stream::try_unfold(state, |mut p| async move {
        if p.rest.is_empty() {
            match p.from.next().await {
                Some(b) => p.rest = b?,
                None => return Ok(None),
            }
        }
        p.shared.faults.until_healed().await;
        let piece = p.rest.split_to(p.rest.len().min(PIECE_BYTES));
        let own = p.own.as_mut().map(|o| o.book(piece.len()));
        let total = p.shaper.total.as_ref().map(|t| t.lock().book(piece.len()));
        if let Some(due) = own.max(total)
            && due > Instant::now()
        {
            tokio::time::sleep_until(due).await;
        }
        Ok(Some((piece, p)))
    })
    .boxed()
}

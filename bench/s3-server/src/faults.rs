//! Faults that real stores and networks show.

use std::time::Duration;

use hyper::{Response, StatusCode};
use parking_lot::Mutex;
use s3s::Body;

/// What goes wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// 503 SlowDown, with its XML.
    SlowDown,
    /// 500 InternalError, with its XML.
    InternalError,
    /// The connection breaks in the middle of the body.
    CutBody,
    /// A body one byte shorter than the range asked for, and so announced.
    ShortBody,
    /// A whole object, status 200, where a range was asked for.
    WrongRange,
    /// 206 and an XML error as the body, with the length of the range.
    XmlAsData,
    /// The request is taken and never answered, until healed. Bodies on their
    /// way stop too.
    Hang,
}

#[derive(Default)]
struct Plan {
    kind: Option<FaultKind>,
    every: u64,
    seen: u64,
    only_objects: bool,
}

/// The faults of a server; none at first.
#[derive(Default)]
pub struct Faults(Mutex<Plan>);

impl Faults {
    /// Every `n`-th request fails with `kind`, the next one first.
    pub fn every(&self, n: u64, kind: FaultKind) {
        *self.0.lock() = Plan { kind: Some(kind), every: n.max(1), seen: 0, only_objects: false };
    }

    /// As [`Self::every`], but only GETs of objects fail.
    pub fn every_get(&self, n: u64, kind: FaultKind) {
        *self.0.lock() = Plan { kind: Some(kind), every: n.max(1), seen: 0, only_objects: true };
    }

    /// No more faults; what hangs goes on.
    pub fn heal(&self) {
        *self.0.lock() = Plan::default();
    }

    pub(crate) fn next(&self, is_object: bool) -> Option<FaultKind> {
        let mut p = self.0.lock();
        let kind = p.kind?;
        if p.only_objects && !is_object {
            return None;
        }
        let n = p.seen;
        p.seen += 1;
        n.is_multiple_of(p.every).then_some(kind)
    }

    pub(crate) fn is_hanging(&self) -> bool {
        self.0.lock().kind == Some(FaultKind::Hang)
    }

    pub(crate) async fn until_healed(&self) {
        while self.is_hanging() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The whole answer, for faults that need no object.
pub(crate) fn refusal(kind: FaultKind) -> Option<Response<Body>> {
    let (status, code, message) = match kind {
        FaultKind::SlowDown => {
            (StatusCode::SERVICE_UNAVAILABLE, "SlowDown", "Please reduce your request rate.")
        }
        FaultKind::InternalError => (
            StatusCode::INTERNAL_SERVER_ERROR,
            "InternalError",
            "We encountered an internal error. Please try again.",
        ),
        _ => return None,
    };
    let xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    );
    let mut r = Response::new(Body::from(xml));
    *r.status_mut() = status;
    Some(r)
}

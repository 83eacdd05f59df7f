//! Points at which a test lets the daemon die: `KSPEED_CRASH_AT=NAME` or
//! `NAME#N` ends the process, as kill -9 does, when a point is passed the N-th
//! time. Nobody else sets it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

struct Plan {
    point: String,
    left: AtomicU64,
}

static PLAN: OnceLock<Option<Plan>> = OnceLock::new();

/// All points, in the order in which a file passes them.
pub const POINTS: [&str; 12] = [
    "ack: before the bytes are synced",
    "ack: bytes synced",
    "ack: wish appended",
    "ack: journal synced",
    "change: appended",
    "upload: before the request",
    "upload: begun in parts",
    "upload: a part is there",
    "upload: object complete",
    "settle: appended",
    "retire: before the cache has it",
    "retire: the cache has it",
];

/// Passes a point.
pub fn point(name: &'static str) {
    let plan = PLAN.get_or_init(|| {
        let text = std::env::var("KSPEED_CRASH_AT").ok()?;
        let (point, n) = match text.rsplit_once('#') {
            Some((p, n)) => (p.to_owned(), n.parse().ok()?),
            None => (text, 1),
        };
        Some(Plan { point, left: AtomicU64::new(n) })
    });
    if let Some(p) = plan
        && p.point == name
        && p.left.fetch_sub(1, Ordering::AcqRel) == 1
    {
        tracing::error!(name, "KSPEED_CRASH_AT");
        let me = rustix::process::getpid();
        let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
        // The signal is on its way.
        std::thread::sleep(std::time::Duration::from_secs(10));
    }
}

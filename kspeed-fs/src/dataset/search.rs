//! Searches for seeds, in threads of their own: of the lowest priority, and for
//! no more than a share of the processors.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kspeed_prefetch::seed::{Found, GlobalScan, SEEDS, Scan};
use kspeed_prefetch::{Follower, Search, View};
use tokio_util::sync::CancellationToken;

/// Seeds of a piece: some 40 ms of work, between which a scan rests.
const PIECE: u64 = 1 << 20;
/// The lowest priority, so that whoever else wants the processor has it.
const NICE: i32 = 19;
/// One scan at a time: several would only take longer each.
static ONE: Mutex<()> = Mutex::new(());

/// How much of the processors a scan may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuShare {
    /// Threads.
    pub threads: usize,
    /// Of each thread's time, in a hundred.
    pub percent: u32,
}

impl CpuShare {
    /// A share of all processors, in a hundred.
    #[must_use]
    pub fn of_all(percent: u32) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let share = cores * percent as usize;
        let threads = share.div_ceil(100).max(1);
        Self { threads, percent: (share / threads).clamp(1, 100) as u32 }
    }
}

/// The likely seeds.
#[must_use]
pub fn likely(s: &Search, n: u32, views: &[View]) -> Option<Follower> {
    lower_priority();
    let (view, found) = s.likely()?;
    Follower::of(n, views.get(view).cloned().flatten(), found)
}

/// All seeds of `torch.randperm`.
#[must_use]
pub fn scan(
    s: Search,
    n: u32,
    views: &[View],
    share: CpuShare,
    stop: &CancellationToken,
) -> Option<Follower> {
    let _one = ONE.lock();
    for (i, observed) in s.observed.into_iter().enumerate() {
        let Some(scan) = Scan::new(observed) else { continue };
        let found: Mutex<Option<Found>> = Mutex::default();
        let done = CancellationToken::new();
        pieces(share, stop, &done, &|seeds| {
            if let Some(f) = scan.run(seeds) {
                if let Ok(mut slot) = found.lock() {
                    *slot = Some(f);
                }
                done.cancel();
            }
        });
        if let Some(f) = found.into_inner().ok().flatten() {
            return Follower::of(n, views.get(i).cloned().flatten(), f);
        }
    }
    None
}

/// The global generators whose first epoch has this seed.
#[must_use]
pub fn globals(seed: u32, share: CpuShare, stop: &CancellationToken) -> Vec<u32> {
    let _one = ONE.lock();
    let scan = GlobalScan { seed };
    let found: Mutex<Vec<u32>> = Mutex::default();
    pieces(share, stop, &CancellationToken::new(), &|seeds| {
        let some: Vec<u32> = scan.run(seeds).collect();
        if let Ok(mut all) = found.lock() {
            all.extend(some);
        }
    });
    found.into_inner().unwrap_or_default()
}

/// Runs all seeds in pieces, on the threads and for the part of their time that
/// the share allows, until `stop` or `done`.
fn pieces(
    share: CpuShare,
    stop: &CancellationToken,
    done: &CancellationToken,
    run: &(dyn Fn(std::ops::Range<u64>) + Sync),
) {
    let next = AtomicU64::new(0);
    std::thread::scope(|s| {
        for _ in 0..share.threads {
            s.spawn(|| {
                lower_priority();
                loop {
                    let first = next.fetch_add(PIECE, Ordering::Relaxed);
                    if first >= SEEDS || stop.is_cancelled() || done.is_cancelled() {
                        return;
                    }
                    let began = Instant::now();
                    run(first..(first + PIECE).min(SEEDS));
                    std::thread::sleep(rest(began.elapsed(), share.percent));
                }
            });
        }
    });
}

/// How long to rest after working so long, to have worked only part of the time.
fn rest(worked: Duration, percent: u32) -> Duration {
    worked * (100 - percent.clamp(1, 100)) / percent.clamp(1, 100)
}

/// For this thread; where that is refused, the share alone must do.
fn lower_priority() {
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_kept() {
        assert_eq!(rest(Duration::from_millis(40), 50), Duration::from_millis(40));
        assert_eq!(rest(Duration::from_millis(40), 100), Duration::ZERO);
        assert_eq!(rest(Duration::from_millis(10), 25), Duration::from_millis(30));
        let s = CpuShare::of_all(100);
        assert_eq!(s.percent, 100);
    }

    #[test]
    fn a_scan_ends_when_it_is_told_to() {
        let stop = CancellationToken::new();
        stop.cancel();
        assert_eq!(globals(1, CpuShare::of_all(50), &stop), Vec::<u32>::new());
    }
}

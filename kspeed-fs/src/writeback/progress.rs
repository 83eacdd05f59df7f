//! What waits, why, and waiting for it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kspeed_cache::Key;
use kspeed_cache::origin::OriginError;

use super::{Stage, Writeback};
use crate::errno::FsError;

/// Why a wish is not settled yet.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Failure {
    /// The path.
    pub path: String,
    /// The last error.
    pub reason: String,
    /// How often it was tried.
    pub tries: u32,
    /// Trying again helps only after somebody has changed something.
    pub permanent: bool,
}

pub(super) struct Retry {
    pub(super) failure: Failure,
    pub(super) at: Instant,
}

/// What waits, as `kspeed status` shows it.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Pending {
    /// Files and directories that are not as wished in the origin.
    pub changes: u64,
    /// Bytes in stage files.
    pub staged_bytes: u64,
    /// How long the oldest change has waited, in seconds.
    pub oldest_s: f64,
    /// Upload rate since the first change that waits, in bytes per second.
    pub rate: u64,
    /// Estimated time until all is uploaded, in seconds.
    pub left_s: Option<f64>,
    /// Uploads in flight.
    pub in_flight: u64,
    /// What failed and is tried again, at most 20 of them.
    pub failed: Vec<Failure>,
}

impl Writeback {
    /// The key of a stage whose promise is not kept yet. It is tried at once.
    #[must_use]
    pub fn unkept(&self, s: &Stage) -> Option<Key> {
        let key = {
            let wishes = self.wishes.lock();
            let key = wishes.key_of(s.id())?;
            wishes.get(key).filter(|e| e.acked)?;
            key.clone()
        };
        self.retries.lock().remove(&key);
        Some(key)
    }

    /// Waits until nothing is wished for a key any more.
    ///
    /// # Errors
    /// A try of it failed. It is tried again all the same.
    pub async fn settle(&self, key: &Key) -> Result<(), FsError> {
        loop {
            self.queue.urge(key.clone());
            let woken = self.settled.notified();
            tokio::pin!(woken);
            woken.as_mut().enable();
            if !self.wishes.lock().get(key).is_some_and(|e| e.acked) {
                return Ok(());
            }
            if let Some(r) = self.retries.lock().get(key) {
                return Err(FsError::NotStored(r.failure.reason.clone()));
            }
            // Another upload of the key that ends now may take the urgency away.
            let _ = tokio::time::timeout(Duration::from_millis(100), woken).await;
        }
    }

    /// Waits until all that is promised below a path is in the origin; `progress`
    /// is told what waits, now and then.
    ///
    /// # Errors
    /// Something failed for good, or (with `patience`) did not get on for so long.
    pub async fn drain(
        &self,
        below: &[u8],
        patience: Option<Duration>,
        progress: &(dyn Fn(u64, u64) + Send + Sync),
    ) -> Result<(), FsError> {
        let mut last = (u64::MAX, Instant::now());
        self.queue.set_draining(true);
        self.retries.lock().clear();
        let result = loop {
            let keys: Vec<Key> = {
                let wishes = self.wishes.lock();
                let dir = [below, b"/"].concat();
                let all = wishes.iter().filter(|(k, e)| {
                    e.acked
                        && (below.is_empty()
                            || k.as_bytes() == below
                            || k.as_bytes().starts_with(&dir))
                });
                all.map(|(k, _)| k.clone()).collect()
            };
            if keys.is_empty() {
                break Ok(());
            }
            for k in &keys {
                self.queue.urge(k.clone());
            }
            let left = keys.len() as u64;
            if left != last.0 {
                last = (left, Instant::now());
                progress(left, self.stages.bytes());
            }
            let failed = {
                let retries = self.retries.lock();
                let all = keys.iter().all(|k| retries.get(k).is_some_and(|r| r.failure.permanent));
                all.then(|| keys.first().and_then(|k| retries.get(k)).map(|r| r.failure.clone()))
            };
            if let Some(Some(f)) = failed {
                break Err(FsError::NotStored(format!("{}: {}", f.path, f.reason)));
            }
            if patience.is_some_and(|p| last.1.elapsed() > p) {
                let why = self.pending().failed.first().map(|f| f.reason.clone());
                let why = why.unwrap_or_else(|| "files are still open for writing".into());
                break Err(FsError::NotStored(format!("{left} changes are left: {why}")));
            }
            let _ = tokio::time::timeout(Duration::from_millis(200), self.settled.notified()).await;
        };
        self.queue.set_draining(false);
        result
    }

    /// What waits.
    #[must_use]
    pub fn pending(&self) -> Pending {
        let changes = self.wishes.lock().iter().filter(|(_, e)| e.acked).count() as u64;
        let oldest = self.since.lock().values().map(Instant::elapsed).max().unwrap_or_default();
        let staged_bytes = if self.stages.count() == 0 { 0 } else { self.stages.bytes() };
        let rate = self.queue.rate(self.stats.uploaded_bytes.load(Ordering::Relaxed));
        let failed = self.retries.lock().values().take(20).map(|r| r.failure.clone()).collect();
        Pending {
            changes,
            staged_bytes,
            oldest_s: if changes == 0 { 0.0 } else { oldest.as_secs_f64() },
            rate,
            left_s: (rate > 0 && changes > 0).then(|| staged_bytes as f64 / rate as f64),
            in_flight: self.queue.in_flight(),
            failed,
        }
    }

    /// The state of a file as `user.kspeed.state` tells it.
    #[must_use]
    pub fn state_of(&self, s: &Stage) -> &'static str {
        let key = self.wishes.lock().key_of(s.id()).cloned();
        match key {
            None => "clean",
            Some(k) if self.retries.lock().contains_key(&k) => "failed",
            Some(k) if self.queue.is_in_flight(&k) => "uploading",
            Some(_) => "staged",
        }
    }

    pub(super) fn failed(&self, key: &Key, e: &OriginError) {
        self.stats.failures.fetch_add(1, Ordering::Relaxed);
        let mut retries = self.retries.lock();
        let tries = retries.get(key).map_or(0, |r| r.failure.tries) + 1;
        let pause = Duration::from_secs(1 << tries.min(8)).min(Duration::from_secs(300));
        tracing::warn!(error = %e, %key, tries, again_s = pause.as_secs(), "not stored in the origin yet");
        let failure = Failure {
            path: key.to_string(),
            reason: e.to_string(),
            tries,
            permanent: !e.is_transient(),
        };
        let at = Instant::now() + pause;
        retries.insert(key.clone(), Retry { failure, at });
        drop(retries);
        self.queue.push_at(key.clone(), at);
        self.settled.notify_waiters();
    }
}

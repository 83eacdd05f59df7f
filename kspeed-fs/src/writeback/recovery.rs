//! What a former process left: found, taken up, or taken over.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use kspeed_cache::Cache;
use kspeed_cache::origin::{Condition, Origin};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

use super::journal::{self, FileLog, Journal, JournalError, Writer, replay};
use super::queue::Queue;
use super::stage::{self, Stages};
use super::wishes::{Change, StageId, Wish};
use super::{Writeback, WritebackConfig, WritebackError, WritebackStats};
use crate::namespace::Live;

const JOURNAL: &str = "journal";
const OWNER: &str = "owner";

/// The directory of an origin's stages below a cache disk's.
#[must_use]
pub fn dir_of(stage_dir: &Path, origin: &str) -> PathBuf {
    stage_dir.join(format!("{:032x}", xxhash_rust::xxh3::xxh3_128(origin.as_bytes())))
}

/// What a stage directory holds.
#[derive(Debug)]
pub struct Found {
    /// The directory.
    pub dir: PathBuf,
    /// Whose stages they are.
    pub origin: String,
    /// Its journal.
    pub journal: Result<journal::Replayed, JournalError>,
}

/// Reads the machine's boot id; empty where it has none.
#[must_use]
pub fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    text.map(|t| t.trim().to_owned()).unwrap_or_default()
}

fn read_journal(dir: &Path, boot: &str) -> Result<journal::Replayed, JournalError> {
    let path = dir.join(JOURNAL);
    let bytes = match std::fs::read(&path) {
        Ok(b) => b,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(source) => return Err(JournalError::Io { path, source }),
    };
    replay(&bytes, boot).map_err(|(line, detail)| JournalError::Damaged { path, line, detail })
}

/// All stage directories below a cache disk's, whoever they are of.
///
/// # Errors
/// The disk fails.
pub fn find_all(stage_dir: &Path) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    let boot = boot_id();
    for e in std::fs::read_dir(stage_dir)? {
        let dir = e?.path();
        if !dir.is_dir() {
            continue;
        }
        let origin = std::fs::read_to_string(dir.join(OWNER)).unwrap_or_default();
        let journal = read_journal(&dir, &boot);
        found.push(Found { dir, origin: origin.trim().to_owned(), journal });
    }
    Ok(found)
}

/// Stage files of a directory, by number.
///
/// # Errors
/// The disk fails.
pub fn stage_files(dir: &Path) -> io::Result<Vec<StageId>> {
    let mut ids = Vec::new();
    for e in std::fs::read_dir(dir)? {
        if let Some(id) = e?.file_name().to_str().and_then(stage::id_of) {
            ids.push(id);
        }
    }
    Ok(ids)
}

/// Moves what another origin's mount has not uploaded into this origin's
/// directory, under the same paths.
///
/// # Errors
/// The disk fails, or this origin has wishes of its own.
pub fn take_over(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::create_dir_all(to)?;
    let own = std::fs::metadata(to.join(JOURNAL)).map_or(0, |m| m.len());
    if own > 0 && !read_journal(to, "").is_ok_and(|r| r.wishes.is_empty()) {
        return Err(io::Error::other(
            "this source has files of its own that are not uploaded: mount without --recover first",
        ));
    }
    // The journal last: until it is there, the files belong to the other one.
    for id in stage_files(from)? {
        std::fs::rename(stage::path_of(from, id), stage::path_of(to, id))?;
    }
    journal::sync_dir(to)?;
    std::fs::rename(from.join(JOURNAL), to.join(JOURNAL))?;
    journal::sync_dir(to)?;
    let _ = std::fs::remove_dir_all(from);
    Ok(())
}

impl Writeback {
    /// Opens the stage directory of an origin and takes up what is in it.
    ///
    /// # Errors
    /// The journal is damaged, or the disk fails.
    pub fn open(
        config: WritebackConfig,
        origin: Arc<dyn Origin>,
        cache: Cache,
        live: Arc<Live>,
    ) -> Result<Arc<Self>, WritebackError> {
        let dir = config.dir.clone();
        let io = |source| JournalError::Io { path: dir.clone(), source };
        std::fs::create_dir_all(&dir).map_err(io)?;
        let boot = boot_id();
        let mut replayed = read_journal(&dir, &boot)?;
        if replayed.torn_bytes > 0 {
            tracing::warn!(
                bytes = replayed.torn_bytes,
                "the journal's end was never synced and is torn; it was not acknowledged"
            );
        }
        for (key, stage) in std::mem::take(&mut replayed.lost) {
            tracing::error!(%key, stage, "written but not synced when the machine went down: dropped (--sync-on-close false)");
            replayed.wishes.apply(&[Change { key, wish: None, base: Condition::Any }], true);
        }
        let mut recovered = HashMap::new();
        let mut gone = Vec::new();
        for (key, e) in replayed.wishes.iter() {
            if let Wish::File { stage, attributes, .. } = &e.wish {
                if stage::path_of(&dir, *stage).exists() {
                    recovered.insert(*stage, *attributes);
                } else {
                    gone.push(Change { key: key.clone(), wish: None, base: Condition::Any });
                }
            }
        }
        for c in &gone {
            tracing::info!(key = %c.key, "its stage file is gone: it was uploaded or removed");
        }
        replayed.wishes.apply(&gone, true);
        for id in stage_files(&dir).map_err(io)? {
            if !recovered.contains_key(&id) {
                // Never acknowledged, or settled.
                let _ = std::fs::remove_file(stage::path_of(&dir, id));
            }
        }
        let id = match &*replayed.writer.id {
            "" => format!("{:016x}", rand::random::<u64>()),
            id => id.to_owned(),
        };
        let writer = Writer { origin: origin.name().to_owned(), id, boot };
        std::fs::write(dir.join(OWNER), origin.name()).map_err(io)?;
        let log = FileLog::open(&dir.join(JOURNAL)).map_err(io)?;
        let journal = Journal::begin(Box::new(log), writer, &replayed).map_err(io)?;
        let journal::Replayed { wishes, uploads, .. } = replayed;
        if !wishes.is_empty() {
            tracing::info!(changes = wishes.len(), "what was not uploaded is taken up");
        }
        let now = Instant::now();
        let since = wishes.iter().map(|(k, _)| (k.clone(), now)).collect();
        let queue = Queue::default();
        for (k, _) in wishes.iter() {
            queue.push(k.clone());
        }
        let wishes = Arc::new(Mutex::new(wishes));
        live.overlay(wishes.clone());
        Ok(Arc::new(Self {
            stages: Stages::new(dir, recovered),
            config,
            origin,
            cache,
            live,
            wishes,
            uploads: Mutex::new(uploads),
            journal,
            queue,
            retries: Mutex::default(),
            since: Mutex::new(since),
            settled: Notify::new(),
            staged: Mutex::new((now, 0)),
            stats: WritebackStats::default(),
            tasks: TaskTracker::new(),
            run: rand::random(),
        }))
    }
}

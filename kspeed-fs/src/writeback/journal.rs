//! The journal: what was promised, so that a process that was killed, or a
//! machine that lost power, keeps it.
//!
//! ```text
//! journal   "KSPEEDJ1\n"
//!           one line a record:  XXH3-64 of the JSON, 16 hex digits | ' ' | JSON | '\n'
//!
//!           {"mount":{"origin":…,"id":…,"boot":…}}   who writes from here on
//!           {"set":[{"key":…,"wish":…,"base":…},…]}  changes, whole or not at all
//!           {"upload":{"stage":…,"key":…,"upload":{"id":…,"part_bytes":…,"parts":{}}}}
//!           {"part":{"stage":…,"number":…,"etag":…}}
//!           {"ended":{"stage":…}}                    the upload in parts is no more
//! ```
//! Lines that people can read, as journals are read in bad hours. A record that
//! is appended survives the process; one that is synced survives the machine.
//! The records that were not synced may be lost from the end on, or their last
//! be torn: a bad line with good ones behind it is not that, and is an error.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use kspeed_cache::origin::PartialUpload;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::wishes::{Change, StageId, Wish, Wishes};

const MAGIC: &[u8] = b"KSPEEDJ1\n";
/// A journal that is larger than this, and mostly settled, is written anew.
const COMPACT_BYTES: u64 = 4 << 20;

/// One record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Record {
    /// Who writes from here on.
    Mount(Writer),
    /// Changes of wishes.
    Set(Vec<Change>),
    /// An upload in parts has begun.
    Upload {
        /// Of this stage.
        stage: StageId,
        /// Key for which it is.
        key: kspeed_cache::Key,
        /// What to go on with.
        upload: PartialUpload,
    },
    /// The store has a part.
    Part {
        /// Of this stage's upload.
        stage: StageId,
        /// From 1 on.
        number: u32,
        /// Its ETag.
        etag: String,
    },
    /// An upload in parts was completed or aborted.
    Ended {
        /// Its stage.
        stage: StageId,
    },
}

/// A process that writes a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Writer {
    /// The origin, as its name.
    pub origin: String,
    /// The journal's own name: part of the tokens of its puts.
    pub id: String,
    /// The machine's boot: what was not synced before another one is not there.
    pub boot: String,
}

/// Why a journal can't be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The disk fails.
    #[error("{path}: {source}; free space on that disk or replace it")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It is not what was written.
    #[error(
        "{path}: line {line} is damaged ({detail}); `kspeed fsck CACHE_DIR` tells what can be kept"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Line, from 1 on.
        line: usize,
        /// How.
        detail: String,
    },
}

/// What a journal says.
#[derive(Debug, Default)]
pub struct Replayed {
    /// Its last writer.
    pub writer: Writer,
    /// Wishes that are not settled.
    pub wishes: Wishes,
    /// Uploads in parts that have not ended: key and upload, by stage.
    pub uploads: HashMap<StageId, (kspeed_cache::Key, PartialUpload)>,
    /// Stages whose bytes may have been lost with the machine's memory, and were.
    pub lost: Vec<(kspeed_cache::Key, StageId)>,
    /// Bytes at the end that were torn.
    pub torn_bytes: u64,
}

/// Where records go. The real one is a file; tests have one that loses what was
/// not synced.
pub trait Log: Send {
    /// Adds bytes at the end.
    ///
    /// # Errors
    /// The disk fails.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Something on which to wait until all that was appended is durable.
    ///
    /// # Errors
    /// The disk fails.
    fn syncer(&self) -> io::Result<Box<dyn FnOnce() -> io::Result<()> + Send>>;
    /// Puts this in the place of all, durably, whole or not at all.
    ///
    /// # Errors
    /// The disk fails.
    fn replace(&mut self, bytes: &[u8]) -> io::Result<()>;
}

/// A file that records are appended to.
pub struct FileLog {
    path: PathBuf,
    file: File,
}

impl FileLog {
    /// Opens, or makes, a file.
    ///
    /// # Errors
    /// The disk fails.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::options().append(true).create(true).open(path)?;
        Ok(Self { path: path.to_path_buf(), file })
    }
}

impl Log for FileLog {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    fn syncer(&self) -> io::Result<Box<dyn FnOnce() -> io::Result<()> + Send>> {
        let f = self.file.try_clone()?;
        Ok(Box::new(move || f.sync_data()))
    }

    fn replace(&mut self, bytes: &[u8]) -> io::Result<()> {
        let new = self.path.with_extension("new");
        let mut f = File::create(&new)?;
        f.write_all(bytes)?;
        f.sync_all()?;
        fs::rename(&new, &self.path)?;
        sync_dir(self.path.parent().unwrap_or(Path::new("/")))?;
        self.file = File::options().append(true).open(&self.path)?;
        Ok(())
    }
}

/// Makes the names in a directory durable.
///
/// # Errors
/// The disk fails.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn line_of(r: &Record) -> io::Result<Vec<u8>> {
    let json = serde_json::to_string(r)?;
    Ok(format!("{:016x} {json}\n", xxh3_64(json.as_bytes())).into_bytes())
}

fn record_of(line: &[u8]) -> Result<Record, String> {
    let text = std::str::from_utf8(line).map_err(|_| "not text".to_owned())?;
    let (sum, json) = text.split_once(' ').ok_or("no checksum")?;
    if u64::from_str_radix(sum, 16).ok() != Some(xxh3_64(json.as_bytes())) {
        return Err("the checksum does not fit".into());
    }
    serde_json::from_str(json).map_err(|e| e.to_string())
}

/// Reads a journal's bytes; `boot` is the machine's boot now.
///
/// # Errors
/// A bad line with good ones behind it: its number and how it is bad.
pub fn replay(bytes: &[u8], boot: &str) -> Result<Replayed, (usize, String)> {
    let mut out = Replayed::default();
    if bytes.is_empty() || MAGIC.starts_with(bytes) {
        return Ok(out);
    }
    let body = bytes.strip_prefix(MAGIC).ok_or((1, "not a journal".to_owned()))?;
    // Wishes whose bytes a former boot has not synced.
    let mut at_risk: Vec<(String, StageId)> = Vec::new();
    let mut bad: Option<(usize, String)> = None;
    for (i, line) in body.split_inclusive(|b| *b == b'\n').enumerate() {
        let record = match line.strip_suffix(b"\n") {
            Some(l) => record_of(l),
            None => Err("cut short".into()),
        };
        let record = match record {
            Ok(_) if let Some(b) = bad => return Err(b),
            Ok(r) => r,
            Err(e) => {
                out.torn_bytes += line.len() as u64;
                bad.get_or_insert((i + 2, e));
                continue;
            }
        };
        match record {
            Record::Mount(w) => out.writer = w,
            Record::Set(changes) => {
                for c in &changes {
                    if let Some(Wish::File { stage, durable, .. }) = &c.wish {
                        at_risk.retain(|(_, s)| s != stage);
                        if !durable {
                            at_risk.push((out.writer.boot.clone(), *stage));
                        }
                    }
                }
                out.wishes.apply(&changes, true);
            }
            Record::Upload { stage, key, upload } => {
                out.uploads.insert(stage, (key, upload));
            }
            Record::Part { stage, number, etag } => {
                if let Some((_, u)) = out.uploads.get_mut(&stage) {
                    u.parts.insert(number, etag);
                }
            }
            Record::Ended { stage } => {
                out.uploads.remove(&stage);
            }
        }
    }
    for (then, stage) in at_risk {
        if then != boot
            && let Some(key) = out.wishes.key_of(stage).cloned()
        {
            out.lost.push((key, stage));
        }
    }
    out.wishes.recovered();
    Ok(out)
}

struct State {
    log: Box<dyn Log>,
    /// Bytes appended since the journal was opened.
    end: u64,
    /// Bytes in the journal.
    size: u64,
    compacted_size: u64,
    failed: bool,
}

/// The journal of a mount, open for writing.
pub struct Journal {
    state: Mutex<State>,
    synced: Mutex<u64>,
    writer: Writer,
}

/// Up to where a journal was written: what [`Journal::sync`] waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position(u64);

fn poisoned() -> io::Error {
    io::Error::other(
        "the journal could not be written before; what was acknowledged is safe, mount again",
    )
}

impl Journal {
    /// Begins to write, after all that `replayed` says; it is written anew.
    ///
    /// # Errors
    /// The disk fails.
    pub fn begin(mut log: Box<dyn Log>, writer: Writer, replayed: &Replayed) -> io::Result<Self> {
        let bytes = Self::image(&writer, &replayed.wishes, &replayed.uploads)?;
        log.replace(&bytes)?;
        let size = bytes.len() as u64;
        let state = State { log, end: 0, size, compacted_size: size, failed: false };
        Ok(Self { state: Mutex::new(state), synced: Mutex::new(0), writer })
    }

    fn image(
        writer: &Writer,
        wishes: &Wishes,
        uploads: &HashMap<StageId, (kspeed_cache::Key, PartialUpload)>,
    ) -> io::Result<Vec<u8>> {
        let mut out = MAGIC.to_vec();
        out.extend(line_of(&Record::Mount(writer.clone()))?);
        for (key, e) in wishes.iter().filter(|(_, e)| e.acked) {
            let (key, wish) = (key.clone(), Some(e.wish.clone()));
            out.extend(line_of(&Record::Set(vec![Change { key, wish, base: e.base.clone() }]))?);
        }
        for (stage, (key, upload)) in uploads {
            let (stage, key, upload) = (*stage, key.clone(), upload.clone());
            out.extend(line_of(&Record::Upload { stage, key, upload })?);
        }
        Ok(out)
    }

    /// The journal's own name.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.writer.id
    }

    /// Appends a record: it survives the process from here on.
    ///
    /// # Errors
    /// The disk fails or failed before: nothing is written any more, since
    /// nobody knows what is there.
    pub fn append(&self, r: &Record) -> io::Result<Position> {
        let line = line_of(r)?;
        let mut s = self.state.lock();
        if s.failed {
            return Err(poisoned());
        }
        if let Err(e) = s.log.append(&line) {
            s.failed = true;
            return Err(e);
        }
        s.end += line.len() as u64;
        s.size += line.len() as u64;
        Ok(Position(s.end))
    }

    /// Returns when all up to `to` survives the machine. Callers that come while
    /// one waits for the disk share the next wait.
    ///
    /// # Errors
    /// The disk fails; the journal is not written any more then.
    pub fn sync(&self, to: Position) -> io::Result<()> {
        let mut synced = self.synced.lock();
        if *synced >= to.0 {
            return Ok(());
        }
        let (end, sync) = {
            let s = self.state.lock();
            if s.failed {
                return Err(poisoned());
            }
            (s.end, s.log.syncer()?)
        };
        if let Err(e) = sync() {
            // What a failed fsync has not written is dropped by the kernel: a
            // second one would lie.
            self.state.lock().failed = true;
            return Err(e);
        }
        *synced = end;
        Ok(())
    }

    /// As [`Self::sync`], of all that was appended so far.
    ///
    /// # Errors
    /// As [`Self::sync`].
    pub fn sync_all(&self) -> io::Result<()> {
        let end = self.state.lock().end;
        self.sync(Position(end))
    }

    /// Whether it is worth writing anew.
    #[must_use]
    pub fn is_bloated(&self) -> bool {
        let s = self.state.lock();
        s.size > COMPACT_BYTES && s.size > s.compacted_size.saturating_mul(4)
    }

    /// Writes it anew with only what is not settled. The caller lets nobody
    /// append meanwhile.
    ///
    /// # Errors
    /// The disk fails; the old journal is there still.
    pub fn compact(
        &self,
        wishes: &Wishes,
        uploads: &HashMap<StageId, (kspeed_cache::Key, PartialUpload)>,
    ) -> io::Result<()> {
        let bytes = Self::image(&self.writer, wishes, uploads)?;
        let mut synced = self.synced.lock();
        let mut s = self.state.lock();
        if s.failed {
            return Err(poisoned());
        }
        s.log.replace(&bytes)?;
        s.size = bytes.len() as u64;
        s.compacted_size = s.size;
        *synced = s.end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kspeed_cache::origin::Condition;

    fn set(key: &str, wish: Option<Wish>) -> Record {
        Record::Set(vec![Change { key: key.into(), wish, base: Condition::Absent }])
    }

    fn file(stage: StageId, durable: bool) -> Option<Wish> {
        Some(Wish::File { stage, attributes: kspeed_cache::origin::Attributes::default(), durable })
    }

    fn journal_of(dir: &Path) -> Journal {
        let log = FileLog::open(&dir.join("j")).expect("log");
        let writer = Writer { origin: "o".into(), id: "1".into(), boot: "b1".into() };
        Journal::begin(Box::new(log), writer, &Replayed::default()).expect("journal")
    }

    #[test]
    fn what_is_appended_is_replayed() {
        let dir = tempfile::tempdir().expect("tempdir");
        let j = journal_of(dir.path());
        j.append(&set("a\n\u{e9}%", file(7, true))).expect("append");
        j.append(&set("gone", file(8, true))).expect("append");
        let at = j.append(&set("gone", None)).expect("append");
        let parts = [(1, "d".to_owned())].into();
        let upload = PartialUpload { id: "u".into(), part_bytes: 5, parts };
        j.append(&Record::Upload { stage: 7, key: "a".into(), upload }).expect("append");
        j.append(&Record::Part { stage: 7, number: 2, etag: "e".into() }).expect("append");
        j.sync(at).expect("sync");
        let bytes = fs::read(dir.path().join("j")).expect("read");
        let r = replay(&bytes, "b1").expect("replay");
        assert_eq!((r.wishes.len(), &*r.writer.id), (1, "1"));
        assert_eq!(r.wishes.key_of(7), Some(&"a\n\u{e9}%".into()));
        let parts = &r.uploads[&7].1.parts;
        assert_eq!((&*parts[&1], &*parts[&2]), ("d", "e"));
        // Key bytes that are not UTF-8 come back too.
        let raw = kspeed_cache::Key::from(&[0xff, b'%', b'/', 0][..]);
        let change = Change { key: raw.clone(), wish: Some(Wish::Absent), base: Condition::Any };
        j.append(&Record::Set(vec![change])).expect("append");
        let bytes = fs::read(dir.path().join("j")).expect("read");
        assert!(replay(&bytes, "b1").expect("replay").wishes.get(&raw).is_some());
    }

    #[test]
    fn a_torn_end_is_dropped_and_damage_before_it_is_told() {
        let dir = tempfile::tempdir().expect("tempdir");
        let j = journal_of(dir.path());
        for i in 0..5 {
            j.append(&set(&format!("k{i}"), file(i, true))).expect("append");
        }
        let whole = fs::read(dir.path().join("j")).expect("read");
        let mut last = 0;
        for end in 0..whole.len() {
            let r = replay(&whole[..end], "b1").expect("any end is the end of some crash");
            assert!(r.wishes.len() >= last, "longer, and less in it");
            last = r.wishes.len();
        }
        for at in [MAGIC.len() + 3, whole.len() / 2] {
            let mut bad = whole.clone();
            bad[at] ^= 1;
            let (line, _) = replay(&bad, "b1").expect_err("damage with good lines behind it");
            assert!(line >= 2);
        }
        assert!(replay(b"something else\n", "b1").is_err());
    }

    #[test]
    fn what_another_boot_did_not_sync_is_lost_and_said_so() {
        let dir = tempfile::tempdir().expect("tempdir");
        let j = journal_of(dir.path());
        j.append(&set("soft", file(1, false))).expect("append");
        j.append(&set("hard", file(2, false))).expect("append");
        j.append(&set("hard", file(2, true))).expect("append");
        let bytes = fs::read(dir.path().join("j")).expect("read");
        assert!(replay(&bytes, "b1").expect("replay").lost.is_empty());
        let lost = replay(&bytes, "b2").expect("replay").lost;
        assert_eq!(lost, [("soft".into(), 1)]);
    }

    #[test]
    fn it_is_written_anew_when_most_is_settled() {
        let dir = tempfile::tempdir().expect("tempdir");
        let j = journal_of(dir.path());
        let mut wishes = Wishes::default();
        let keep = [Change { key: "keep".into(), wish: file(1, true), base: Condition::Absent }];
        j.append(&Record::Set(keep.to_vec())).expect("append");
        wishes.apply(&keep, true);
        let long = "x".repeat(1000);
        while !j.is_bloated() {
            j.append(&set(&long, file(2, true))).expect("append");
            j.append(&set(&long, None)).expect("append");
        }
        j.compact(&wishes, &HashMap::new()).expect("compact");
        j.append(&set("after", file(3, true))).expect("append");
        j.sync_all().expect("sync");
        let bytes = fs::read(dir.path().join("j")).expect("read");
        assert!(bytes.len() < 2000);
        let r = replay(&bytes, "b1").expect("replay");
        assert!(r.wishes.key_of(1).is_some() && r.wishes.key_of(3).is_some());
        assert!(!j.is_bloated());
    }
}

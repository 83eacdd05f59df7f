//! Makes the origin as it is wished: which key next, and the request for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kspeed_cache::origin::{
    Attributes, Condition, OriginError, PartialUpload, PutBody, PutOptions, UploadLog,
};
use kspeed_cache::{Key, ObjectMeta};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::crash;
use super::journal::Record;
use super::stage::{Look, Stage};
use super::wishes::{Change, Entry, StageId, Wish, Wishes};
use super::{Ack, Writeback};
use crate::errno::FsError;

/// Requests of the uploader at once; each large file has several of its own.
const PARALLEL: usize = 16;
/// Files up to this are read into memory first, so that a writer need not wait
/// for their upload.
const IN_MEMORY_BYTES: u64 = 8 << 20;
/// And so much of them at once.
const BODIES_BYTES: u64 = 64 << 20;
/// Requests under way when the mount ends have this long.
const LAST_REQUESTS: Duration = Duration::from_secs(5);
/// A wish that waits for another is looked at again after this.
const BLOCKED_PAUSE: Duration = Duration::from_millis(30);

enum Turn {
    Now(Entry),
    At(Instant),
    /// Somebody pushes the key again when its time has come.
    Not,
}

/// How a request ended.
enum Ended {
    /// The origin has this there now.
    Has(Option<ObjectMeta>, Option<(Arc<Stage>, Look)>),
    /// Not, but there is something to be tried at once.
    Again,
    /// Somebody else's object is there.
    Conflict(ObjectMeta),
    /// What is to be copied is no more.
    Lost,
}

/// Remembers the parts of a stage's upload in the journal.
struct PartLog {
    writeback: Arc<Writeback>,
    stage: StageId,
    key: Key,
}

impl PartLog {
    fn write(&self, r: &Record, durably: bool) {
        let written = self.writeback.journal.append(r);
        let done = written.and_then(|at| match durably {
            true => self.writeback.journal.sync(at),
            false => Ok(()),
        });
        if let Err(e) = done {
            tracing::warn!(error = %e, "an upload's progress is not remembered");
        }
    }
}

impl UploadLog for PartLog {
    fn resume(&self) -> Option<PartialUpload> {
        let uploads = self.writeback.uploads.lock();
        uploads.get(&self.stage).filter(|(k, _)| *k == self.key).map(|(_, u)| u.clone())
    }

    fn began(&self, id: &str, part_bytes: u64) {
        let upload = PartialUpload { id: id.into(), part_bytes, ..PartialUpload::default() };
        let (stage, key) = (self.stage, self.key.clone());
        self.writeback.uploads.lock().insert(stage, (key.clone(), upload.clone()));
        // Durably: an upload that nobody knows of is paid for for ever.
        self.write(&Record::Upload { stage, key, upload }, true);
        crash::point("upload: begun in parts");
    }

    fn part(&self, number: u32, etag: &str) {
        if let Some((_, u)) = self.writeback.uploads.lock().get_mut(&self.stage) {
            u.parts.insert(number, etag.into());
        }
        self.write(&Record::Part { stage: self.stage, number, etag: etag.into() }, false);
        crash::point("upload: a part is there");
    }

    fn ended(&self) {
        self.writeback.uploads.lock().remove(&self.stage);
        self.write(&Record::Ended { stage: self.stage }, false);
    }
}

impl Writeback {
    /// Makes the origin as it is wished until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        self.abort_orphans().await;
        let (tasks, cut) = (self.tasks.clone(), CancellationToken::new());
        let slots = Arc::new(Semaphore::new(PARALLEL));
        let bodies = Arc::new(Semaphore::new((BODIES_BYTES >> 10) as usize));
        loop {
            let next = async {
                let slot = slots.clone().acquire_owned().await;
                (slot, self.queue.next().await)
            };
            let (slot, key) = tokio::select! {
                next = next => next,
                () = stop.cancelled() => break,
            };
            match self.turn(&key) {
                Turn::Now(entry) => {
                    let (this, stop, bodies) = (self.clone(), stop.clone(), bodies.clone());
                    let cut = cut.clone();
                    tasks.spawn(async move {
                        tokio::select! {
                            () = this.make_so(key, entry, &stop, &bodies) => {}
                            () = cut.cancelled() => {}
                        }
                        drop(slot);
                    });
                }
                Turn::At(at) => self.queue.push_at(key, at),
                Turn::Not => {}
            }
        }
        tasks.close();
        // What takes longer is taken up by the next process.
        if tokio::time::timeout(LAST_REQUESTS, tasks.wait()).await.is_err() {
            cut.cancel();
            tasks.wait().await;
        }
    }

    /// Uploads in parts that a former process began and that nobody goes on with.
    async fn abort_orphans(&self) {
        let orphans: Vec<(StageId, Key, String)> = {
            let uploads = self.uploads.lock();
            let wishes = self.wishes.lock();
            let of = uploads.iter().filter(|(s, (k, _))| wishes.key_of(**s) != Some(k));
            of.map(|(s, (k, u))| (*s, k.clone(), u.id.clone())).collect()
        };
        for (stage, key, id) in orphans {
            self.abort(stage, &key, &id).await;
        }
    }

    pub(super) async fn abort(&self, stage: StageId, key: &Key, id: &str) {
        match self.origin.abort_upload(key, id).await {
            Ok(()) => {
                self.uploads.lock().remove(&stage);
                if let Err(e) = self.journal.append(&Record::Ended { stage }) {
                    tracing::warn!(error = %e, "an aborted upload is aborted again at the next start");
                }
            }
            Err(e) => {
                tracing::warn!(error = %e, %key, "an upload in parts is aborted at the next start");
            }
        }
    }

    fn turn(&self, key: &Key) -> Turn {
        let now = Instant::now();
        let (urgent, hurries) = self.queue.hurries(key);
        let mut wishes = self.wishes.lock();
        let Some(e) = wishes.get(key).filter(|e| e.acked) else { return Turn::Not };
        if let Some(r) = self.retries.lock().get(key)
            && r.at > now
        {
            return Turn::At(r.at);
        }
        if wishes.is_blocked(key) {
            return Turn::At(now + BLOCKED_PAUSE);
        }
        let waited = match &e.wish {
            Wish::File { stage, .. } => {
                let Some(s) = self.stages.by_id(*stage) else {
                    return Turn::At(now + Duration::from_secs(5));
                };
                if s.has_writers() && !(urgent && self.config.ack == Ack::Origin) {
                    return Turn::Not;
                }
                s.closed_for()
            }
            _ => self.since.lock().get(key).map_or(Duration::MAX, Instant::elapsed),
        };
        let left = self.config.delay.saturating_sub(waited);
        if !hurries && !left.is_zero() {
            return Turn::At(now + left);
        }
        let entry = e.clone();
        wishes.begin(key);
        self.queue.begin(key);
        Turn::Now(entry)
    }

    async fn make_so(
        self: &Arc<Self>,
        key: Key,
        e: Entry,
        stop: &CancellationToken,
        bodies: &Semaphore,
    ) {
        let request = async {
            // Write-ahead: no effect in the origin before its promise is durable,
            // else a crash could leave half of a rename.
            let this = self.clone();
            let synced = tokio::task::spawn_blocking(move || this.journal.sync_all()).await;
            if let Err(e) = synced.map_err(std::io::Error::other).and_then(|r| r) {
                let what = self.config.dir.display().to_string();
                return Err(OriginError::Io { what, source: Arc::new(e) });
            }
            crash::point("upload: before the request");
            match &e.wish {
                Wish::File { stage, .. } => self.upload(&key, *stage, &e, bodies).await,
                Wish::Directory => {
                    let body = PutBody::Bytes(Bytes::new());
                    let m = self.origin.put(&key, body, &PutOptions::default()).await?;
                    Ok(Ended::Has(Some(m), None))
                }
                Wish::Copy { from, attributes } => self.copy(&key, from, attributes).await,
                Wish::Absent => {
                    self.origin.delete(&key).await?;
                    Ok(Ended::Has(None, None))
                }
            }
        };
        match request.await {
            Ok(Ended::Has(meta, stage)) => self.settled(&key, e.seq, meta, stage).await,
            Ok(Ended::Again) => self.wishes.lock().gave_up(&key),
            Ok(Ended::Conflict(theirs)) => {
                self.wishes.lock().gave_up(&key);
                self.step_aside(&key, &e, &theirs);
            }
            Ok(Ended::Lost) if self.wishes.lock().get(&key).is_none_or(|n| n.seq != e.seq) => {
                // Nobody wishes the copy any more, so its source could go.
                self.wishes.lock().gave_up(&key);
            }
            Ok(Ended::Lost) => {
                tracing::error!(%key, "the object that was renamed here was changed or deleted in the origin by somebody else meanwhile");
                self.stats.conflicts.fetch_add(1, Ordering::Relaxed);
                self.settled(&key, e.seq, None, None).await;
            }
            Err(error) => {
                self.wishes.lock().gave_up(&key);
                self.failed(&key, &error);
                self.queue.end(&key, false);
                return;
            }
        }
        let is_done = self.wishes.lock().get(&key).is_none_or(|e| !e.acked);
        self.queue.end(&key, is_done);
        if !stop.is_cancelled() && self.wishes.lock().get(&key).is_some() {
            self.queue.push(key);
        }
    }

    async fn upload(
        self: &Arc<Self>,
        key: &Key,
        id: StageId,
        e: &Entry,
        bodies: &Semaphore,
    ) -> Result<Ended, OriginError> {
        let Some(stage) = self.stages.by_id(id) else { return Ok(Ended::Again) };
        if !stage.is_durable() {
            // What is in the origin before it is durable here could be taken
            // back by a crash of the machine.
            let (this, s) = (self.clone(), stage.clone());
            let synced = tokio::task::spawn_blocking(move || this.ack(&s, true)).await;
            return match synced {
                Ok(Ok(_)) => Ok(Ended::Again),
                Ok(Err(e)) => Err(disk_error(&stage, e)),
                Err(e) => Err(disk_error(&stage, std::io::Error::other(e))),
            };
        }
        let other = self.uploads.lock().get(&id).filter(|(k, _)| k != key).cloned();
        if let Some((old, upload)) = other {
            // Renamed since its parts were sent.
            self.abort(id, &old, &upload.id).await;
        }
        let token = stage.upload_token();
        let reading = stage.uploading.lock().await;
        if stage.has_writers() && self.config.ack == Ack::Local {
            return Ok(Ended::Again);
        }
        let look = stage.look().map_err(|e| disk_error(&stage, e))?;
        let mut how = PutOptions {
            condition: e.base.clone(),
            attributes: Attributes { mtime_ns: Some(look.mtime_ns()), ..*stage.attributes.lock() },
            token: Some(format!("{}-{:x}-{id:x}-{:x}", self.journal.id(), self.run, e.seq)),
            log: None,
            cancel: None,
        };
        let len = look.size();
        let put = if len <= IN_MEMORY_BYTES {
            let kib = u32::try_from(len.div_ceil(1024)).unwrap_or(u32::MAX);
            let room = bodies.acquire_many(kib).await;
            let (s, n) = (stage.clone(), len as usize);
            let read = tokio::task::spawn_blocking(move || s.read(0, n)).await;
            drop(reading);
            let body = read.map_err(std::io::Error::other).and_then(|r| r);
            let body = PutBody::Bytes(body.map_err(|e| disk_error(&stage, e))?);
            let r = self.origin.put(key, body, &how).await;
            drop(room);
            r
        } else {
            how.log =
                Some(Arc::new(PartLog { writeback: self.clone(), stage: id, key: key.clone() }));
            let body = PutBody::File { path: stage.path().to_path_buf(), len };
            how.cancel = Some(token);
            let r = self.origin.put(key, body, &how).await;
            drop(reading);
            r
        };
        match put {
            Ok(meta) => {
                self.stats.uploaded_bytes.fetch_add(len, Ordering::Relaxed);
                self.stats.uploads.fetch_add(1, Ordering::Relaxed);
                Ok(Ended::Has(Some(meta), Some((stage, look))))
            }
            Err(OriginError::Cancelled { .. }) => Ok(Ended::Again),
            Err(OriginError::Changed { .. } | OriginError::NotFound { .. })
                if how.condition != Condition::Any =>
            {
                self.judge(key, &how.condition).await
            }
            Err(OriginError::Unsupported { .. }) if how.condition != Condition::Any => {
                // A store without conditional puts: as sharp as looking first is.
                self.judge(key, &how.condition).await.map(|ended| {
                    if matches!(ended, Ended::Again) {
                        self.wishes.lock().rebase(key, Condition::Any);
                    }
                    ended
                })
            }
            Err(e) => Err(e),
        }
    }

    /// A put was refused for what is there: whose is it?
    async fn judge(&self, key: &Key, wanted: &Condition) -> Result<Ended, OriginError> {
        match self.origin.owner(key).await {
            Ok((meta, token)) => {
                let own = token.is_some_and(|t| t.starts_with(&format!("{}-", self.journal.id())));
                if own || *wanted == Condition::Version(meta.version.clone()) {
                    self.wishes.lock().rebase(key, Condition::Version(meta.version));
                    return Ok(Ended::Again);
                }
                Ok(Ended::Conflict(meta))
            }
            // Deleted by somebody: that is overwritten by what is new here.
            Err(OriginError::NotFound { .. }) => {
                self.wishes.lock().rebase(key, Condition::Absent);
                Ok(Ended::Again)
            }
            Err(e) => Err(e),
        }
    }

    async fn copy(
        &self,
        key: &Key,
        from: &ObjectMeta,
        attributes: &Attributes,
    ) -> Result<Ended, OriginError> {
        match self.origin.copy(from, key, attributes).await {
            Ok(m) => Ok(Ended::Has(Some(m), None)),
            Err(OriginError::Changed { .. } | OriginError::NotFound { .. }) => {
                // An earlier try may have done it, onto itself.
                match self.origin.head(key).await {
                    Ok(m) if from.key == *key => Ok(Ended::Has(Some(m), None)),
                    Err(e) if e.is_transient() => Err(e),
                    _ => Ok(Ended::Lost),
                }
            }
            Err(e) => Err(e),
        }
    }

    async fn settled(
        self: &Arc<Self>,
        key: &Key,
        seq: u64,
        meta: Option<ObjectMeta>,
        stage: Option<(Arc<Stage>, Look)>,
    ) {
        crash::point("upload: object complete");
        let is_settled = {
            let mut wishes = self.wishes.lock();
            let change = wishes.settle(key, seq, meta.as_ref().map(|m| &m.version));
            let is_settled = change.as_ref().is_some_and(|c| c.wish.is_none());
            if let Some(c) = change
                && let Err(e) = self.journal.append(&Record::Set(vec![c]))
            {
                tracing::error!(error = %e, "the journal can't be written: it is uploaded again after the next start");
            }
            crash::point("settle: appended");
            let mut is_open = false;
            if is_settled && let (Some(m), Some((s, look))) = (&meta, &stage) {
                // Written to meanwhile, it is dirty, and whoever has it open
                // acknowledges that later.
                if s.is_as(*look) {
                    s.set_published(m.clone());
                }
                if s.has_writers() {
                    is_open = true;
                    let attributes = *s.attributes.lock();
                    let wish = Wish::File { stage: s.id(), attributes, durable: false };
                    let base = Condition::Version(m.version.clone());
                    let again = Change { key: key.clone(), wish: Some(wish), base };
                    wishes.apply(&[again], false);
                }
            }
            if is_settled && !is_open {
                if let (Some(m), Some((s, look))) = (&meta, &stage) {
                    let attributes =
                        Attributes { mtime_ns: Some(look.mtime_ns()), ..*s.attributes.lock() };
                    self.live.settled_as(key, m, attributes);
                } else {
                    self.live.settled(key, meta.as_ref());
                }
            }
            is_settled
        };
        if is_settled {
            self.retries.lock().remove(key);
            self.note(key, false);
        }
        if let Some((s, _)) = stage
            && !s.is_open()
        {
            self.retire(&s).await;
        }
        if self.journal.is_bloated() {
            let this = self.clone();
            let compacted = tokio::task::spawn_blocking(move || {
                let uploads = this.uploads.lock();
                let wishes = this.wishes.lock();
                this.journal.compact(&wishes, &uploads)
            });
            if let Ok(Err(e)) = compacted.await {
                tracing::warn!(error = %e, "the journal stays long");
            }
        }
    }

    /// Somebody else has stored an object where this mount wrote a file: theirs
    /// keeps the name, ours gets one that tells what happened.
    fn step_aside(&self, key: &Key, e: &Entry, theirs: &ObjectMeta) {
        self.stats.conflicts.fetch_add(1, Ordering::Relaxed);
        let suffix = format!(".kspeed-conflict-{}-{:x}", self.journal.id(), e.seq);
        let aside = Key::from([key.as_bytes(), suffix.as_bytes()].concat());
        tracing::error!(%key, %aside, "somebody else has changed the object in the origin: theirs keeps the name, what was written here is kept beside it");
        let compute = |w: &Wishes| {
            if w.get(key).is_none_or(|now| now.seq != e.seq) {
                // Written to again, and judged again.
                return Err(FsError::Interrupted);
            }
            let wish = Some(e.wish.clone());
            Ok(vec![
                Change { key: aside.clone(), wish, base: Condition::Absent },
                Change { key: key.clone(), wish: None, base: Condition::Any },
            ])
        };
        match self.change(compute, || self.live.replaced(key, theirs)) {
            Ok(_) | Err(FsError::Interrupted) => {}
            Err(e) => tracing::error!(error = %e, "the journal can't be written"),
        }
    }
}

fn disk_error(s: &Stage, e: std::io::Error) -> OriginError {
    OriginError::Io { what: s.path().display().to_string(), source: Arc::new(e) }
}

//! Names made, moved and removed: promised in the journal, done in the origin
//! later.

use std::sync::Arc;

use kspeed_cache::origin::{Condition, ListRequest};
use kspeed_cache::{Key, ObjectMeta};

use super::write::Maker;
use super::{FileSystem, Stage};
use crate::errno::FsError;
use crate::namespace::{Attr, Entry, Ino, Kind, Listed};
use crate::writeback::{Change, Child, Wish, Wishes, Writeback};

/// A directory with more objects below it is not renamed but refused (EXDEV).
const RENAME_MAX_OBJECTS: usize = 100_000;
/// What a store copies in one request.
const MAX_COPY_BYTES: u64 = 5 << 30;

/// A directory, and a name in it.
type Place<'a> = (Ino, &'a [u8]);

fn marker(key: &Key) -> Key {
    [key.as_bytes(), b"/"].concat().into()
}

impl FileSystem {
    /// Before an object goes or is replaced: those that have it open keep its
    /// bytes, which are all brought into the cache for that (W5).
    async fn keep_for_readers(&self, ino: Ino) {
        if self.stage(ino).is_some() || !self.modes.is_open(ino) {
            return;
        }
        let Ok(object) = self.object(ino) else { return };
        if object.has(0..object.meta().size) {
            return;
        }
        if self.within(async { Ok(object.warm().await?) }).await.is_err() {
            tracing::warn!(key = %object.meta().key, "removed while open, and not whole in the cache: its readers get ESTALE for the rest");
        }
    }

    /// What the origin has at a name, for the wishes.
    fn base_of(&self, ino: Ino) -> Condition {
        match self.stage(ino) {
            Some(s) => Writeback::base_of(s.published().or_else(|| s.original.clone()).as_ref()),
            None => Writeback::base_of(self.namespace.object(ino).ok().as_ref()),
        }
    }

    /// The name of a stage went: its upload is of no use, and if nobody has it
    /// open, nor is the file.
    fn unnamed(&self, s: Option<Arc<Stage>>) {
        let (Some(s), Ok((_, w))) = (s, self.writer()) else { return };
        s.cancel_upload();
        w.retire_soon(s);
    }

    /// Removes a file.
    ///
    /// # Errors
    /// No such file, or the journal can't be written.
    pub async fn unlink(&self, parent: Ino, name: &[u8]) -> Result<(), FsError> {
        let (live, w) = self.writer()?;
        let e = self.within(self.lookup(parent, name)).await?;
        self.forget(e.attr.ino, 1);
        let ino = e.attr.ino;
        if e.attr.kind == Kind::Directory {
            return Err(FsError::IsADirectory);
        }
        self.keep_for_readers(ino).await;
        let key = live.key_of(parent, name)?;
        let stage = self.stage(ino);
        w.change(|w| Ok(vec![w.removal(&key, &self.base_of(ino))]), || live.remove(parent, name))?;
        self.unnamed(stage);
        self.stored(&[key]).await
    }

    /// Makes a directory: a marker.
    ///
    /// # Errors
    /// The name is taken.
    pub async fn mkdir(&self, parent: Ino, name: &[u8], by: Maker) -> Result<Entry, FsError> {
        let (live, w) = self.writer()?;
        let key = live.key_of(parent, name)?;
        match self.within(self.lookup(parent, name)).await {
            Ok(e) => {
                self.forget(e.attr.ino, 1);
                return Err(FsError::Exists);
            }
            Err(FsError::NotFound) => {}
            Err(e) => return Err(e),
        }
        let key = marker(&key);
        let mut entry = Err(FsError::NotFound);
        let compute = |w: &Wishes| {
            let base = w.get(&key).map_or(Condition::Absent, |e| e.base.clone());
            Ok(vec![Change { key: key.clone(), wish: Some(Wish::Directory), base }])
        };
        w.change(compute, || entry = live.adopt_made(parent, name, Child::Directory))?;
        let entry = entry?;
        live.is_empty_now(entry.attr.ino);
        live.set_attributes(entry.attr.ino, &self.attributes_of(by, self.options.dir_mode));
        self.stored(&[key]).await?;
        self.attr(entry.attr.ino)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// It isn't empty, or the origin failed.
    pub async fn rmdir(&self, parent: Ino, name: &[u8]) -> Result<(), FsError> {
        let (live, w) = self.writer()?;
        let e = self.within(self.lookup(parent, name)).await?;
        self.forget(e.attr.ino, 1);
        if e.attr.kind != Kind::Directory {
            return Err(FsError::NotADirectory);
        }
        self.check_empty(e.attr.ino).await?;
        let key = marker(&live.key_of(parent, name)?);
        w.change(|w| Ok(vec![w.removal(&key, &Condition::Any)]), || live.remove(parent, name))?;
        self.stored(&[key]).await
    }

    /// Asks the origin, not a listing that may be old.
    async fn check_empty(&self, ino: Ino) -> Result<(), FsError> {
        let (live, _) = self.writer()?;
        let listing = self.within(live.listing_anew(ino)).await?;
        if listing.entries.is_empty() { Ok(()) } else { Err(FsError::NotEmpty) }
    }

    /// Renames a file or a directory with all that is below it. Seen through the
    /// mount it is done whole or not at all, also over a crash; the origin
    /// follows.
    ///
    /// # Errors
    /// As rename(2) has them; EXDEV for a directory of over 100,000 objects, or
    /// with one over 5 GiB, in a bucket.
    pub async fn rename(
        &self,
        parent: Ino,
        name: &[u8],
        to_parent: Ino,
        to_name: &[u8],
        no_replace: bool,
    ) -> Result<(), FsError> {
        let (live, _) = self.writer()?;
        let from = self.within(self.lookup(parent, name)).await?.attr;
        self.forget(from.ino, 1);
        let key = live.key_of(parent, name)?;
        let to_key = live.key_of(to_parent, to_name)?;
        let replaced: Option<Attr> = match self.within(self.lookup(to_parent, to_name)).await {
            Ok(e) => {
                self.forget(e.attr.ino, 1);
                Some(e.attr)
            }
            Err(FsError::NotFound) => None,
            Err(e) => return Err(e),
        };
        if let Some(r) = replaced {
            if no_replace {
                return Err(FsError::Exists);
            }
            if r.ino == from.ino {
                return Ok(());
            }
            match (from.kind, r.kind) {
                (Kind::Directory, Kind::Directory) => self.check_empty(r.ino).await?,
                (Kind::Directory, _) => return Err(FsError::NotADirectory),
                (_, Kind::Directory) => return Err(FsError::IsADirectory),
                _ => self.keep_for_readers(r.ino).await,
            }
        }
        let places = ((parent, name), (to_parent, to_name));
        if self.origin.local_path(&key).is_some()
            && (from.kind == Kind::Directory || self.stage(from.ino).is_none())
        {
            return self.rename_natively(&from, replaced, key, to_key, places).await;
        }
        let old = replaced.and_then(|r| self.stage(r.ino));
        let tell = || {
            if let Err(e) = live.rename(places.0, places.1, None) {
                tracing::warn!(error = %e, "a directory was forgotten while a name was moved");
            }
        };
        let moved = if from.kind == Kind::Directory {
            self.rename_directory(from.ino, &key, &to_key, replaced.is_some(), tell).await?
        } else {
            self.rename_file(from.ino, replaced, &key, &to_key, tell).await?
        };
        self.unnamed(old);
        self.stored(&moved).await
    }

    async fn rename_file(
        &self,
        ino: Ino,
        replaced: Option<Attr>,
        key: &Key,
        to_key: &Key,
        tell: impl FnOnce(),
    ) -> Result<Vec<Key>, FsError> {
        let (_, w) = self.writer()?;
        let object = match self.stage(ino) {
            Some(_) => None,
            None => Some(self.namespace.object(ino)?),
        };
        let must_have_bytes = w.with_wishes(|w| w.is_source(to_key) || w.is_in_the_way_of(to_key))
            || object.as_ref().is_some_and(|o| o.size > MAX_COPY_BYTES);
        if object.is_some() && must_have_bytes {
            // A copy that waits for others that wait for it, or one that the
            // store can't make: its bytes come here first.
            self.bring_into_stage(ino).await?;
        }
        let stage = self.stage(ino);
        if let Some(s) = &stage {
            // What takes the place of a promise is promised.
            if s.is_dirty() || w.with_wishes(|w| w.get(key).is_some_and(|e| !e.acked)) {
                self.acknowledge(s, w.syncs_on_close()).await?;
            }
            s.cancel_upload();
        }
        let compute = |w: &Wishes| {
            let object = match &stage {
                Some(s) => s.published(),
                None => self.namespace.object(ino).ok(),
            };
            let base = replaced.map_or(Condition::Absent, |r| self.base_of(r.ino));
            Ok(w.moving(key, object.as_ref(), to_key, &base))
        };
        w.change(compute, tell)?;
        Ok(vec![to_key.clone(), key.clone()])
    }

    /// Promises an object's bytes as a stage's.
    async fn bring_into_stage(&self, ino: Ino) -> Result<(), FsError> {
        let opened = self.open_write(ino, false).await?;
        let super::OpenKind::Stage(s, _) = &opened.kind else { return Err(FsError::BadHandle) };
        let acked = self.acknowledge(s, true).await;
        self.handles.remove(opened.handle);
        self.leave(s, true).await;
        acked.map(drop)
    }

    async fn rename_directory(
        &self,
        ino: Ino,
        key: &Key,
        to_key: &Key,
        replaces: bool,
        tell: impl FnOnce(),
    ) -> Result<Vec<Key>, FsError> {
        let (live, w) = self.writer()?;
        let prefix = marker(key);
        let open: Vec<_> = w.with_wishes(|all| {
            let unacked = all.below(prefix.as_bytes()).filter(|(_, e)| !e.acked);
            unacked
                .filter_map(|(_, e)| match &e.wish {
                    Wish::File { stage, .. } => w.stages().by_id(*stage),
                    _ => None,
                })
                .collect()
        });
        for s in open {
            self.acknowledge(&s, w.syncs_on_close()).await?;
        }
        let target = marker(to_key);
        if w.with_wishes(|w| {
            w.below(target.as_bytes()).next().is_some() || w.is_in_the_way_of(&target)
        }) {
            // What goes there goes first, so that no copy waits for another that
            // waits for it.
            w.drain(to_key.as_bytes(), Some(self.options.io_timeout), &|_, _| {}).await?;
        }
        let _held = self.within(async { Ok(w.hold(&prefix).await) }).await?;
        let objects = if live.is_new_directory(ino) {
            Vec::new()
        } else {
            self.within(self.objects_below(&prefix)).await?
        };
        if objects.iter().any(|o| o.size > MAX_COPY_BYTES) {
            return Err(FsError::CrossDevice);
        }
        let compute = |w: &Wishes| {
            let changes = w.moving_tree(&prefix, &objects, &marker(to_key), replaces);
            let is_cyclic =
                |c: &Change| matches!(c.wish, Some(Wish::Copy { .. })) && w.is_source(&c.key);
            if changes.iter().any(is_cyclic) {
                return Err(FsError::CrossDevice);
            }
            Ok(changes)
        };
        let changes = w.change(compute, tell)?;
        Ok(changes.into_iter().map(|c| c.key).collect())
    }

    /// All objects below a prefix, markers too.
    async fn objects_below(&self, prefix: &Key) -> Result<Vec<ObjectMeta>, FsError> {
        let mut request =
            ListRequest { prefix: prefix.as_bytes().to_vec(), ..ListRequest::default() };
        let mut all = Vec::new();
        loop {
            let page = self.origin.list(&request).await?;
            all.extend(page.objects);
            if all.len() > RENAME_MAX_OBJECTS {
                return Err(FsError::CrossDevice);
            }
            match page.next {
                Some(t) => request.token = Some(t),
                None => return Ok(all),
            }
        }
    }

    /// On a directory's file system: what is wished there is done first, then it
    /// renames, at once and whole.
    async fn rename_natively(
        &self,
        from: &Attr,
        replaced: Option<Attr>,
        key: Key,
        to_key: Key,
        places: (Place<'_>, Place<'_>),
    ) -> Result<(), FsError> {
        let (live, w) = self.writer()?;
        for k in [&key, &to_key] {
            w.drain(k.as_bytes(), Some(self.options.io_timeout), &|_, _| {}).await?;
        }
        let old = replaced.and_then(|r| self.stage(r.ino));
        let meta = self.origin.rename(&key, &to_key).await?;
        let meta = (from.kind != Kind::Directory).then_some(meta);
        let listed = Listed { name: places.1.1.into(), kind: from.kind, meta };
        self.recent.invalidate(&from.ino);
        live.rename(places.0, places.1, Some(&listed))?;
        self.unnamed(old);
        Ok(())
    }
}

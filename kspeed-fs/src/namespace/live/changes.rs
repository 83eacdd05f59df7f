//! What this mount itself does to names: the overlay of its wishes, and what the
//! namespace is told when a wish is set, moved or settled.

use super::{
    Attributes, BTreeMap, Content, Directory, Duration, Entry, FsError, Instant, Key, Kind, Listed,
    Listing, Live, Local, Node, ROOT, now_ns,
};
use crate::namespace::Ino;
use crate::writeback::{Child, StageId, Wishes};
use kspeed_cache::{ObjectKind, ObjectMeta};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Prefix of the version of files that are not in the origin yet; the number of
/// their stage follows.
const LOCAL_VERSION: &str = "kspeed-local-";

/// The stand-in for an object whose bytes are in a stage. Its size is the stage's
/// to tell.
fn local_meta(key: Key, stage: StageId) -> ObjectMeta {
    ObjectMeta {
        key,
        size: 0,
        mtime_ns: 0,
        version: format!("{LOCAL_VERSION}{stage:016x}").into(),
        kind: ObjectKind::File,
        mode: None,
    }
}

fn stage_of(meta: &ObjectMeta) -> Option<StageId> {
    StageId::from_str_radix(meta.version.as_str().strip_prefix(LOCAL_VERSION)?, 16).ok()
}

/// Directory and name of a key: a marker's name is its directory's.
fn split(key: &Key) -> (&[u8], &[u8], Kind) {
    let bytes = key.as_bytes();
    let (bare, kind) = match bytes.strip_suffix(b"/") {
        Some(b) => (b, Kind::Directory),
        None => (bytes, Kind::File),
    };
    let at = bare.iter().rposition(|b| *b == b'/').map_or(0, |i| i + 1);
    (&bare[..at], &bare[at..], kind)
}

impl Live {
    /// What is laid over the origin's listings from now on.
    pub fn overlay(&self, wishes: Arc<Mutex<Wishes>>) {
        // Only a second write-back of one mount could find it set.
        let _ = self.wishes.set(wishes);
    }

    /// What the wishes make of a name: an entry, or none at all.
    fn wished(&self, prefix: &[u8], name: &[u8]) -> Wished {
        let Some(wishes) = self.wishes.get() else { return Wished::Open };
        let child = wishes.lock().child(prefix, name);
        child.map_or(Wished::Open, |c| Wished::of(prefix, name, c))
    }

    /// Whether the origin knows nothing of a directory that was made here.
    fn is_new(&self, prefix: &[u8]) -> bool {
        self.wishes.get().is_some_and(|w| w.lock().is_new_directory(prefix))
    }

    pub(super) fn known(&self, d: &Directory, name: &[u8]) -> Option<(Option<Listed>, Duration)> {
        let prefix = d.prefix();
        match self.wished(&prefix, name) {
            Wished::Entry(l) => Some((Some(l), self.config.ttl)),
            Wished::Nothing => Some((None, Duration::ZERO)),
            _ if self.is_new(&prefix) => Some((None, Duration::ZERO)),
            Wished::Unless(kind) => {
                let (l, ttl) = d.known(name, &self.config)?;
                Some((l.filter(|l| (l.kind == Kind::Directory) != (kind == Kind::Directory)), ttl))
            }
            Wished::Open => d.known(name, &self.config),
        }
    }

    pub(super) fn newest(&self, d: &Directory, name: &[u8]) -> Option<Listed> {
        match self.wished(&d.prefix(), name) {
            Wished::Entry(l) => Some(l),
            Wished::Nothing => None,
            Wished::Unless(kind) => {
                d.newest(name).filter(|l| (l.kind == Kind::Directory) != (kind == Kind::Directory))
            }
            Wished::Open => d.newest(name),
        }
    }

    /// An entry of a listing as it is now, if this mount had to do with its name
    /// since: a reader of the directory may hold an old one. None: it is gone.
    pub(super) fn current(&self, d: &Directory, l: &Listed) -> Option<Listed> {
        let stand_in = l.meta.as_ref().is_some_and(|m| stage_of(m).is_some());
        let ours = stand_in
            || d.state.lock().local.contains_key(&l.name)
            || !matches!(self.wished(&d.prefix(), &l.name), Wished::Open);
        if ours { self.newest(d, &l.name) } else { Some(l.clone()) }
    }

    /// The listing with this mount's own changes laid over; none if it is older
    /// than `ttl`.
    pub(super) fn merged(&self, d: &Directory, ttl: Option<Duration>) -> Option<Arc<Listing>> {
        let prefix = d.prefix();
        let wished = self.wishes.get().map(|w| w.lock().children(&prefix)).unwrap_or_default();
        let is_new = self.is_new(&prefix);
        let s = d.state.lock();
        let fresh = s.fresh.as_ref().filter(|f| ttl.is_none_or(|t| f.at.elapsed() < t));
        let (base, hidden) = match fresh {
            Some(f) if s.local.is_empty() && wished.is_empty() => return Some(f.listing.clone()),
            Some(f) => (&*f.listing.entries, f.listing.hidden),
            None if is_new => (&[] as &[Listed], 0),
            None => return None,
        };
        let mut all: BTreeMap<&[u8], Listed> = base.iter().map(|e| (&*e.name, e.clone())).collect();
        for (name, l) in &s.local {
            match l {
                Local::Present(l, _) => all.insert(name, l.clone()),
                Local::Absent(_) => all.remove(&**name),
            };
        }
        for (name, child) in &wished {
            match Wished::of(&prefix, name, child.clone()) {
                Wished::Entry(l) => {
                    all.insert(name, l);
                }
                Wished::Nothing => {
                    all.remove(&**name);
                }
                Wished::Unless(kind) => {
                    let is_dir = kind == Kind::Directory;
                    if all.get(&**name).is_some_and(|l| (l.kind == Kind::Directory) == is_dir) {
                        all.remove(&**name);
                    }
                }
                Wished::Open => {}
            }
        }
        Some(Arc::new(Listing {
            entries: all.into_values().collect(),
            changed_ns: s.changed_ns,
            hidden,
        }))
    }

    /// Whether the origin knows nothing of a directory that was made here.
    #[must_use]
    pub fn is_new_directory(&self, ino: Ino) -> bool {
        self.prefix_of(ino).is_ok_and(|p| self.is_new(&p))
    }

    /// A directory was made now: there is nothing in it.
    pub fn is_empty_now(&self, ino: Ino) {
        let Ok(d) = self.directory(ino) else { return };
        let mut s = d.state.lock();
        if s.fresh.is_none() {
            let (listing, at) = (Arc::default(), Instant::now());
            s.fresh = Some(super::Fresh { listing, at, bytes: 0, files: 0, file_bytes: 0 });
        }
    }

    /// A directory as the origin has it now, with this mount's changes.
    ///
    /// # Errors
    /// The origin failed.
    pub async fn listing_anew(&self, ino: Ino) -> Result<Arc<Listing>, FsError> {
        let d = self.directory(ino)?;
        if !self.is_new(&d.prefix()) {
            self.refresh(&d).await?;
        }
        self.merged(&d, None).ok_or(FsError::NotFound)
    }

    /// The stage of an inode whose bytes are not in the origin.
    #[must_use]
    pub fn stage_of(&self, ino: Ino) -> Option<StageId> {
        match &self.table.read().nodes.get(&ino)?.content {
            Content::File(m) => stage_of(m),
            Content::Directory(_) => None,
        }
    }

    /// The key that an inode's name has now; none if the name is another's.
    #[must_use]
    pub fn key_of_ino(&self, ino: Ino) -> Option<Key> {
        let (parent, name) = {
            let t = self.table.read();
            let n = t.nodes.get(&ino)?;
            let own = t.by_name.get(&(n.parent, n.name.clone())) == Some(&ino);
            own.then(|| (n.parent, n.name.clone()))?
        };
        self.key_of(parent, &name).ok()
    }

    /// A directory's key prefix: empty, or ending with `/`.
    ///
    /// # Errors
    /// It is none.
    pub fn prefix_of(&self, ino: Ino) -> Result<Arc<[u8]>, FsError> {
        Ok(self.directory(ino)?.prefix())
    }

    /// The inode's bytes are in a stage from now on.
    pub fn bind(&self, ino: Ino, key: &Key, stage: StageId) {
        if let Some(n) = self.table.write().nodes.get_mut(&ino) {
            n.content = Content::File(local_meta(key.clone(), stage));
        }
        self.changed(key);
    }

    /// A directory's content has changed now.
    fn changed(&self, key: &Key) {
        if let Some(d) = self.directory_at(split(key).0) {
            d.state.lock().changed_ns = now_ns();
        }
    }

    /// The entry of a name that is made now, counted as one lookup.
    ///
    /// # Errors
    /// The directory is gone.
    pub fn adopt_made(&self, parent: Ino, name: &[u8], made: Child) -> Result<Entry, FsError> {
        let d = self.directory(parent)?;
        let Wished::Entry(l) = Wished::of(&d.prefix(), name, made) else {
            return Err(FsError::NotFound);
        };
        d.state.lock().changed_ns = now_ns();
        Ok(Entry { attr: self.adopt(&d, &l, 1), ttl: self.config.ttl })
    }

    /// Attributes set through this mount are told by it while it knows the inode.
    pub fn set_attributes(&self, ino: Ino, a: &Attributes) {
        if let Some(n) = self.table.write().nodes.get_mut(&ino) {
            n.set(a);
        }
    }

    /// The directory at a prefix, if it is known.
    fn directory_at(&self, prefix: &[u8]) -> Option<Arc<Directory>> {
        let t = self.table.read();
        let mut ino = ROOT;
        for name in prefix.split(|b| *b == b'/').filter(|c| !c.is_empty()) {
            ino = *t.by_name.get(&(ino, name.into()))?;
        }
        match &t.nodes.get(&ino)?.content {
            Content::Directory(d) => Some(d.clone()),
            Content::File(_) => None,
        }
    }

    /// A key's wish is settled: the origin has this there.
    pub fn settled(&self, key: &Key, meta: Option<&ObjectMeta>) {
        let (prefix, name, kind) = split(key);
        let Some(d) = self.directory_at(prefix) else { return };
        let local = match meta {
            Some(m) => {
                let meta = (kind != Kind::Directory).then(|| m.clone());
                if let Some(m) = &meta {
                    self.become_object(&d, name, m);
                }
                Local::Present(Listed { name: name.into(), kind, meta }, Instant::now())
            }
            None => Local::Absent(Instant::now()),
        };
        d.state.lock().local.insert(name.into(), local);
        if meta.is_some() {
            self.implies(prefix);
        }
    }

    /// Something is below a prefix now, so its directories are, whatever a listing
    /// said that began before.
    fn implies(&self, mut prefix: &[u8]) {
        while !prefix.is_empty() {
            let directory = Key::from(prefix);
            let (parent, name, kind) = split(&directory);
            if let Some(d) = self.directory_at(parent) {
                let mut s = d.state.lock();
                s.probed.remove(name);
                let is_listed = s.fresh.as_ref().is_none_or(|f| f.listing.find(name).is_some());
                if !is_listed || matches!(s.local.get(name), Some(Local::Absent(_))) {
                    let l = Listed { name: name.into(), kind, meta: None };
                    s.local.insert(name.into(), Local::Present(l, Instant::now()));
                }
            }
            prefix = &prefix[..parent.len()];
        }
    }

    /// As [`Self::settled`], of a file that keeps these attributes here.
    pub fn settled_as(&self, key: &Key, meta: &ObjectMeta, attributes: Attributes) {
        self.settled(key, Some(meta));
        let (prefix, name, _) = split(key);
        let Some(d) = self.directory_at(prefix) else { return };
        let mut t = self.table.write();
        let ino = t.by_name.get(&(d.ino, name.into())).copied();
        if let Some(n) = ino.and_then(|i| t.nodes.get_mut(&i)) {
            n.set(&attributes);
        }
    }

    /// The inode of a name keeps its number and has this object from now on: the
    /// bytes are the same.
    fn become_object(&self, d: &Directory, name: &[u8], meta: &ObjectMeta) {
        let mut t = self.table.write();
        let Some(ino) = t.by_name.get(&(d.ino, name.into())).copied() else { return };
        if let Some(n) = t.nodes.get_mut(&ino)
            && matches!(n.content, Content::File(_))
        {
            n.content = Content::File(meta.clone());
        }
    }

    /// Somebody else's object has the name now: it gets another inode.
    pub fn replaced(&self, key: &Key, meta: &ObjectMeta) {
        let (prefix, name, kind) = split(key);
        let Some(d) = self.directory_at(prefix) else { return };
        let l = Listed { name: name.into(), kind, meta: Some(meta.clone()) };
        d.state.lock().local.insert(name.into(), Local::Present(l, Instant::now()));
        self.table.write().by_name.remove(&(d.ino, name.into()));
        if let Some(tell) = &*self.on_stale.read() {
            tell(d.ino, name);
        }
    }

    /// A name was removed through this mount.
    pub fn remove(&self, parent: Ino, name: &[u8]) {
        if let Ok(d) = self.directory(parent) {
            let mut s = d.state.lock();
            s.changed_ns = now_ns();
            // Also before the origin has removed it: a listing of before may have
            // something else of this name that was here once.
            s.local.insert(name.into(), Local::Absent(Instant::now()));
        }
        self.table.write().by_name.remove(&(parent, name.into()));
    }

    /// What is at a name, as it is listed under another; none if its bytes are in a
    /// stage, which the wishes tell.
    fn listed_as(&self, from: (Ino, &[u8]), name: &[u8]) -> Option<Listed> {
        let t = self.table.read();
        let n = t.nodes.get(t.by_name.get(&(from.0, from.1.into()))?)?;
        let meta = match &n.content {
            Content::Directory(_) => None,
            Content::File(m) if stage_of(m).is_some() => return None,
            Content::File(m) => Some(m.clone()),
        };
        let kind = meta.as_ref().map_or(Kind::Directory, |m| Kind::of(m.kind));
        Some(Listed { name: name.into(), kind, meta })
    }

    /// A name was moved through this mount, and replaced what was there. What is
    /// below a directory moves with it.
    ///
    /// # Errors
    /// A directory is gone.
    pub fn rename(
        &self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        settled: Option<&Listed>,
    ) -> Result<(), FsError> {
        let (old_parent, new_parent) = (self.directory(from.0)?, self.directory(to.0)?);
        let old_prefix = [&old_parent.prefix(), from.1, b"/"].concat();
        let new_prefix = [&new_parent.prefix(), to.1, b"/"].concat();
        let now = Instant::now();
        let there = settled.cloned().or_else(|| self.listed_as(from, to.1));
        {
            let mut s = old_parent.state.lock();
            s.changed_ns = now_ns();
            s.local.insert(from.1.into(), Local::Absent(now));
        }
        {
            let mut s = new_parent.state.lock();
            s.changed_ns = now_ns();
            match there {
                Some(l) => s.local.insert(to.1.into(), Local::Present(l, now)),
                None => s.local.remove(to.1),
            };
        }
        let mut moved = Vec::new();
        {
            let mut t = self.table.write();
            t.by_name.remove(&(to.0, to.1.into()));
            let Some(ino) = t.by_name.remove(&(from.0, from.1.into())) else { return Ok(()) };
            let Some(n) = t.nodes.get_mut(&ino) else { return Ok(()) };
            n.parent = to.0;
            n.name = to.1.into();
            let is_directory = matches!(n.content, Content::Directory(_));
            if let (Content::File(m), Some(Listed { meta: Some(now), .. })) =
                (&mut n.content, settled)
            {
                *m = now.clone();
            }
            t.by_name.insert((to.0, to.1.into()), ino);
            if is_directory {
                for n in t.nodes.values_mut() {
                    match &mut n.content {
                        Content::Directory(d) if d.prefix().starts_with(&old_prefix) => {
                            moved.push(d.clone());
                        }
                        // The origin has moved them too.
                        Content::File(m) if settled.is_some() => {
                            if let Some(rest) = m.key.as_bytes().strip_prefix(&*old_prefix) {
                                m.key = [&*new_prefix, rest].concat().into();
                            }
                        }
                        _ => {}
                    }
                }
            }
        }
        for d in moved {
            let prefix = [&*new_prefix, &d.prefix()[old_prefix.len()..]].concat();
            *d.prefix.write() = prefix.into();
            // What the origin said of the old place is not believed of the new.
            d.drop_listing(&self.listings_bytes);
            let mut s = d.state.lock();
            s.local.clear();
            s.probed.clear();
            s.probes = 0;
        }
        Ok(())
    }

    /// Gives a file's name another inode with the same object.
    pub fn fork(&self, ino: Ino) {
        let mut t = self.table.write();
        let Some(n) = t.nodes.get_mut(&ino) else { return };
        let Content::File(meta) = &n.content else { return };
        // The kernel may forget the new inode before it looks the name up for
        // good: the name must not fall back to this one.
        n.retired = true;
        let slot = (n.parent, n.name.clone());
        let node = Node {
            parent: n.parent,
            name: n.name.clone(),
            content: Content::File(meta.clone()),
            lookups: 0,
            set: n.set,
            retired: false,
        };
        let mut fresh = ino.wrapping_add(1).max(ROOT + 1);
        while t.nodes.contains_key(&fresh) {
            fresh = fresh.wrapping_add(1).max(ROOT + 1);
        }
        t.nodes.insert(fresh, node);
        t.by_name.insert(slot, fresh);
        t.order.push_back(fresh);
    }

    /// What is known of a directory is not believed any longer.
    pub fn expire(&self, ino: Ino) {
        if let Ok(d) = self.directory(ino) {
            let mut s = d.state.lock();
            if let Some(f) = s.fresh.take() {
                self.listings_bytes.fetch_sub(f.bytes, Ordering::Relaxed);
            }
            s.probed.clear();
        }
    }
}

impl Node {
    fn set(&mut self, a: &Attributes) {
        let s = &mut self.set;
        s.mode = a.mode.or(s.mode);
        s.uid = a.uid.or(s.uid);
        s.gid = a.gid.or(s.gid);
        s.mtime_ns = a.mtime_ns.or(s.mtime_ns);
    }
}

/// What the wishes say of a name.
enum Wished {
    /// This entry.
    Entry(Listed),
    /// That there is nothing.
    Nothing,
    /// That nothing of this kind is there; what the origin has of another may be.
    Unless(Kind),
    /// Nothing.
    Open,
}

impl Wished {
    fn of(prefix: &[u8], name: &[u8], child: Child) -> Self {
        let key = || Key::from([prefix, name].concat());
        let (kind, meta) = match child {
            Child::Nothing => return Self::Nothing,
            Child::NoFile => return Self::Unless(Kind::File),
            Child::NoDirectory => return Self::Unless(Kind::Directory),
            Child::Directory => (Kind::Directory, None),
            Child::Staged(id) => (Kind::File, Some(local_meta(key(), id))),
            Child::Copied(m) => (Kind::of(m.kind), Some(m)),
        };
        Self::Entry(Listed { name: name.into(), kind, meta })
    }
}

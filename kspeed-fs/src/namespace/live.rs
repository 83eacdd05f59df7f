//! The namespace that asks the origin, and believes the answer for the metadata
//! lifetime.
//!
//! A directory is known by its listing. The first lookups in a directory probe
//! for the one name (two listings of one key each, side by side); a directory in
//! which a third name is wanted is listed whole, since siblings follow. What this
//! mount wishes the origin to have is laid over what the origin says; and what
//! it has made so, until a listing that began later says the same.
//!
//! Memory: inodes and listings are each bounded. Beyond its limit the oldest
//! listing is dropped; for inodes the kernel is asked to forget the oldest names.
//!
//! Lock order: a directory's `refresh` (asynchronous) → its `state` → `table`,
//! `wishes`.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant, SystemTime};

use kspeed_cache::origin::{Attributes, ListRequest, Origin, OriginError};
use kspeed_cache::{Key, ObjectKind, ObjectMeta};
use parking_lot::{Mutex, RwLock};
use xxhash_rust::xxh3::Xxh3;

use super::{Attr, Entry, Ino, Kind, Listed, Listing, ROOT, names};
use crate::errno::FsError;
use crate::writeback::Wishes;

/// From the third name on a directory is listed whole.
const PROBES_BEFORE_LISTING: u32 = 2;
/// A directory that large is not listed anew for one name.
const RELIST_MAX_ENTRIES: usize = 20_000;
/// Estimated memory of an inode: node, two map entries, name, version.
pub const INODE_BYTES: u64 = 400;
/// Estimated memory of a listed entry, beside its name.
const LISTED_BYTES: u64 = 140;
/// After the origin could not be reached, what is known is served at once for
/// this long, before it is asked again.
const AWAY: Duration = Duration::from_secs(5);
/// Lifetime of an answer that has expired and is served because the origin is
/// away.
const AWAY_TTL: Duration = Duration::from_secs(1);
/// Pages of one directory are followed to this number of entries; more is an
/// error that names the cure.
const MAX_ENTRIES: usize = 20_000_000;

/// How a live namespace behaves.
#[derive(Clone, Copy, Debug)]
pub struct LiveConfig {
    /// How long a listing is believed.
    pub ttl: Duration,
    /// How long the absence of a name is believed.
    pub negative_ttl: Duration,
    /// Inodes beyond which the kernel is asked to forget.
    pub max_inodes: u64,
    /// Bytes that listings may take.
    pub listing_bytes: u64,
}

/// Told of names whose inode the kernel should drop.
pub type OnStale = Box<dyn Fn(Ino, &[u8]) + Send + Sync>;

struct Node {
    parent: Ino,
    name: Box<[u8]>,
    content: Content,
    lookups: u64,
    /// Set through this mount, and told by it while it knows the inode.
    set: Attributes,
    /// The name has another inode now, of the same version: never found again.
    retired: bool,
}

enum Content {
    Directory(Arc<Directory>),
    File(ObjectMeta),
}

#[derive(Clone)]
struct Fresh {
    listing: Arc<Listing>,
    at: Instant,
    bytes: u64,
    files: u64,
    file_bytes: u64,
}

/// What this mount did to a name since the last listing began.
#[derive(Clone)]
enum Local {
    Present(Listed, Instant),
    Absent(Instant),
}

impl Local {
    /// Whether an answer of the origin that was asked for at `asked` does not
    /// cover it.
    fn is_newer_than(&self, asked: Instant) -> bool {
        match self {
            Self::Present(_, t) | Self::Absent(t) => *t >= asked,
        }
    }
}

#[derive(Default)]
struct State {
    fresh: Option<Fresh>,
    local: BTreeMap<Box<[u8]>, Local>,
    /// Answers of probes: negative ones too.
    probed: HashMap<Box<[u8]>, (Option<Listed>, Instant)>,
    probes: u32,
    changed_ns: i64,
}

struct Directory {
    ino: Ino,
    /// Key prefix: empty, or ending with `/`.
    prefix: RwLock<Arc<[u8]>>,
    state: Mutex<State>,
    refresh: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Table {
    nodes: HashMap<Ino, Node>,
    by_name: HashMap<(Ino, Box<[u8]>), Ino>,
    order: VecDeque<Ino>,
}

/// See the module.
pub struct Live {
    origin: Arc<dyn Origin>,
    config: LiveConfig,
    table: RwLock<Table>,
    listings: Mutex<VecDeque<Weak<Directory>>>,
    listings_bytes: AtomicU64,
    hidden: AtomicU64,
    away_until: Mutex<Option<Instant>>,
    on_stale: RwLock<Option<OnStale>>,
    /// What this mount has promised and the origin has not yet.
    wishes: OnceLock<Arc<Mutex<Wishes>>>,
}

fn now_ns() -> i64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX))
}

impl Live {
    /// Over an origin; asks it nothing yet.
    #[must_use]
    pub fn new(origin: Arc<dyn Origin>, config: LiveConfig) -> Self {
        let root = Directory::new(ROOT, Vec::new());
        let mut table = Table::default();
        table.nodes.insert(
            ROOT,
            Node {
                parent: ROOT,
                name: Box::default(),
                content: Content::Directory(Arc::new(root)),
                lookups: 1,
                set: Attributes::default(),
                retired: false,
            },
        );
        Self {
            origin,
            config,
            table: RwLock::new(table),
            listings: Mutex::default(),
            listings_bytes: AtomicU64::new(0),
            hidden: AtomicU64::new(0),
            away_until: Mutex::new(None),
            on_stale: RwLock::new(None),
            wishes: OnceLock::new(),
        }
    }

    /// Who is told of names that the kernel should drop.
    pub fn on_stale(&self, tell: OnStale) {
        *self.on_stale.write() = Some(tell);
    }

    /// Inodes held.
    #[must_use]
    pub fn inodes(&self) -> u64 {
        self.table.read().nodes.len() as u64
    }

    /// Bytes that listings take, as estimated.
    #[must_use]
    pub fn listings_bytes(&self) -> u64 {
        self.listings_bytes.load(Ordering::Relaxed)
    }

    /// Keys seen that have no path.
    #[must_use]
    pub fn hidden(&self) -> u64 {
        self.hidden.load(Ordering::Relaxed)
    }

    fn directory(&self, ino: Ino) -> Result<Arc<Directory>, FsError> {
        match self.table.read().nodes.get(&ino).map(|n| &n.content) {
            Some(Content::Directory(d)) => Ok(d.clone()),
            Some(Content::File(_)) => Err(FsError::NotADirectory),
            None => Err(FsError::NotFound),
        }
    }

    /// The key of a name in a directory.
    ///
    /// # Errors
    /// The name can't be a key here.
    pub fn key_of(&self, parent: Ino, name: &[u8]) -> Result<Key, FsError> {
        if !names::is_visible(name) {
            return Err(if name.len() > names::NAME_MAX {
                FsError::NameTooLong
            } else {
                FsError::Invalid("no file has this name")
            });
        }
        let d = self.directory(parent)?;
        let key = [&d.prefix(), name].concat();
        if self.origin.local_path(&Key::from("x")).is_none() {
            if std::str::from_utf8(&key).is_err() {
                return Err(FsError::NotUtf8);
            }
            if key.len() > names::KEY_MAX {
                return Err(FsError::NameTooLong);
            }
        }
        Ok(key.into())
    }

    /// Attributes of an inode.
    ///
    /// # Errors
    /// There is none.
    pub fn attr(&self, ino: Ino) -> Result<Entry, FsError> {
        let table = self.table.read();
        let node = table.nodes.get(&ino).ok_or(FsError::NotFound)?;
        Ok(Entry { attr: node.attr(ino), ttl: self.config.ttl })
    }

    /// The object behind a file.
    ///
    /// # Errors
    /// There is none, or it is a directory.
    pub fn object(&self, ino: Ino) -> Result<ObjectMeta, FsError> {
        match self.table.read().nodes.get(&ino).map(|n| &n.content) {
            Some(Content::File(m)) => Ok(m.clone()),
            Some(Content::Directory(_)) => Err(FsError::IsADirectory),
            None => Err(FsError::NotFound),
        }
    }

    /// Parent and name of an inode, as last known.
    #[must_use]
    pub fn name_of(&self, ino: Ino) -> Option<(Ino, Box<[u8]>)> {
        self.table.read().nodes.get(&ino).map(|n| (n.parent, n.name.clone()))
    }

    /// Answers from memory.
    #[must_use]
    pub fn lookup_now(&self, parent: Ino, name: &[u8]) -> Option<Result<Entry, FsError>> {
        let d = match self.directory(parent) {
            Ok(d) => d,
            Err(e) => return Some(Err(e)),
        };
        if !names::is_visible(name) {
            let long = name.len() > names::NAME_MAX;
            return Some(Err(if long { FsError::NameTooLong } else { FsError::NotFound }));
        }
        let (listed, ttl) = self.known(&d, name)?;
        Some(match listed {
            None => Err(FsError::NotFound),
            Some(l) => Ok(Entry { attr: self.adopt(&d, &l, 1), ttl }),
        })
    }

    /// Answers from memory or from the origin.
    ///
    /// # Errors
    /// No such name, or the origin failed.
    pub async fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Entry, FsError> {
        if let Some(r) = self.lookup_now(parent, name) {
            return r;
        }
        let d = self.directory(parent)?;
        let whole = {
            let mut s = d.state.lock();
            s.probes += 1;
            match &s.fresh {
                Some(f) => f.listing.entries.len() <= RELIST_MAX_ENTRIES,
                None => s.probes > PROBES_BEFORE_LISTING,
            }
        };
        if self.is_away()
            && let Some(l) = self.newest(&d, name)
        {
            return Ok(Entry { attr: self.adopt(&d, &l, 1), ttl: AWAY_TTL });
        }
        let local = self.origin.local_path(&Key::from("x")).is_some();
        let asked = if whole || local {
            self.refresh(&d).await
        } else {
            self.probe_and_keep(&d, name).await
        };
        if let Err(e) = asked {
            self.note_away(&e);
            return match self.newest(&d, name) {
                Some(l) if is_away(&e) => Ok(Entry { attr: self.adopt(&d, &l, 1), ttl: AWAY_TTL }),
                // What a listing did not have is believed not to be there, so
                // that new files can be made while the origin is away.
                None if is_away(&e) && d.state.lock().fresh.is_some() => Err(FsError::NotFound),
                _ => Err(e),
            };
        }
        // The answer is younger than any lifetime, unless that is zero.
        match self.newest(&d, name) {
            Some(l) => Ok(Entry { attr: self.adopt(&d, &l, 1), ttl: self.config.ttl }),
            None => Err(FsError::NotFound),
        }
    }

    /// Whether the origin could not be reached a moment ago.
    fn is_away(&self) -> bool {
        self.away_until.lock().is_some_and(|t| Instant::now() < t)
    }

    fn note_away(&self, e: &FsError) {
        if is_away(e) {
            tracing::warn!(error = %e, "the origin is away: what is known is served");
            *self.away_until.lock() = Some(Instant::now() + AWAY);
        }
    }

    async fn probe_and_keep(&self, d: &Directory, name: &[u8]) -> Result<(), FsError> {
        let began = Instant::now();
        let found = self.probe(d, name).await?;
        let mut s = d.state.lock();
        if s.local.get(name).is_some_and(|l| !l.is_newer_than(began)) {
            s.local.remove(name);
        }
        if s.probed.len() >= 1024 {
            s.probed.clear();
        }
        s.probed.insert(name.into(), (found, Instant::now()));
        Ok(())
    }

    async fn probe(&self, d: &Directory, name: &[u8]) -> Result<Option<Listed>, OriginError> {
        let key = [&d.prefix(), name].concat();
        if self.origin.local_path(&Key::from("x")).is_none() && std::str::from_utf8(&key).is_err() {
            return Ok(None);
        }
        let one = |prefix: Vec<u8>| ListRequest { prefix, max_keys: 1, ..ListRequest::default() };
        let exact = one(key.clone());
        let below = one([&key, b"/".as_slice()].concat());
        let (exact, below) =
            futures::try_join!(self.origin.list(&exact), self.origin.list(&below))?;
        if !below.objects.is_empty() || !below.prefixes.is_empty() {
            return Ok(Some(Listed { name: name.into(), kind: Kind::Directory, meta: None }));
        }
        let found = exact.objects.into_iter().find(|m| m.key.as_bytes() == key);
        Ok(found.map(|m| Listed { name: name.into(), kind: Kind::of(m.kind), meta: Some(m) }))
    }

    /// Lists a directory, now or not longer ago than the metadata lifetime.
    ///
    /// # Errors
    /// The origin failed; a listing that has merely expired is served then, so
    /// that `ls` of what is known works while the origin is away.
    pub async fn listing(&self, ino: Ino) -> Result<Arc<Listing>, FsError> {
        let d = self.directory(ino)?;
        if let Some(l) = self.merged(&d, Some(self.config.ttl)) {
            return Ok(l);
        }
        if self.is_away()
            && let Some(l) = self.merged(&d, None)
        {
            return Ok(l);
        }
        match self.refresh(&d).await {
            Ok(()) => self.merged(&d, None).ok_or(FsError::NotFound),
            Err(e) => {
                self.note_away(&e);
                match self.merged(&d, None) {
                    Some(l) if is_away(&e) => Ok(l),
                    _ => Err(e),
                }
            }
        }
    }

    /// A listing that is at hand.
    #[must_use]
    pub fn listing_now(&self, ino: Ino) -> Option<Arc<Listing>> {
        self.merged(&*self.directory(ino).ok()?, Some(self.config.ttl))
    }

    async fn refresh(&self, d: &Arc<Directory>) -> Result<(), FsError> {
        let asked = Instant::now();
        let _one = d.refresh.lock().await;
        // Somebody else's listing that began after we asked will do.
        if d.state.lock().fresh.as_ref().is_some_and(|f| f.at >= asked) {
            return Ok(());
        }
        let began = Instant::now();
        let mut listing = self.list(&d.prefix()).await?;
        let mut stale: Vec<Box<[u8]>> = Vec::new();
        {
            let mut s = d.state.lock();
            let old = s.fresh.take();
            let changed = old.as_ref().is_none_or(|o| o.listing.entries != listing.entries);
            if changed {
                s.changed_ns = now_ns();
                if let Some(o) = &old {
                    stale = differing(&o.listing, &listing);
                }
            }
            listing.changed_ns = s.changed_ns;
            // What this mount did before the listing began is in it.
            s.local.retain(|_, l| l.is_newer_than(began));
            s.probed.clear();
            let prefix_bytes = d.prefix().len() as u64;
            let bytes: u64 = listing
                .entries
                .iter()
                .map(|e| LISTED_BYTES + e.name.len() as u64 + prefix_bytes)
                .sum();
            let (mut files, mut file_bytes) = (0, 0);
            for e in &listing.entries {
                if let Some(m) = &e.meta {
                    files += 1;
                    file_bytes += m.size;
                }
            }
            let freed = old.map_or(0, |o| o.bytes);
            self.listings_bytes.fetch_add(bytes, Ordering::Relaxed);
            self.listings_bytes.fetch_sub(freed, Ordering::Relaxed);
            s.fresh =
                Some(Fresh { listing: Arc::new(listing), at: began, bytes, files, file_bytes });
        }
        self.listings.lock().push_back(Arc::downgrade(d));
        self.drop_old_listings(d);
        if let Some(tell) = &*self.on_stale.read() {
            for name in stale.iter().filter(|n| !self.is_as_before(d, n)) {
                tell(d.ino, name);
            }
        }
        Ok(())
    }

    /// Whether a name that a listing has anew or otherwise still has the inode that
    /// the kernel knows: what was made here and is in the origin now. Who works in
    /// a directory whose name the kernel drops has no path any more.
    fn is_as_before(&self, d: &Directory, name: &[u8]) -> bool {
        let Some(l) = self.newest(d, name) else { return false };
        let t = self.table.read();
        let ino = t.by_name.get(&(d.ino, name.into()));
        ino.and_then(|i| t.nodes.get(i)).is_some_and(|n| n.is(&l))
    }

    fn drop_old_listings(&self, keep: &Arc<Directory>) {
        let mut q = self.listings.lock();
        while self.listings_bytes.load(Ordering::Relaxed) > self.config.listing_bytes && q.len() > 1
        {
            let Some(d) = q.pop_front().and_then(|w| w.upgrade()) else { continue };
            if !Arc::ptr_eq(&d, keep) {
                d.drop_listing(&self.listings_bytes);
            }
        }
        if q.len() > 100_000 {
            q.retain(|w| w.strong_count() > 0);
        }
    }

    async fn list(&self, prefix: &[u8]) -> Result<Listing, FsError> {
        let mut request =
            ListRequest { prefix: prefix.to_vec(), delimited: true, ..ListRequest::default() };
        let mut out = Listing::default();
        let mut exists = prefix.is_empty();
        loop {
            let page = self.origin.list(&request).await?;
            exists |= !page.objects.is_empty() || !page.prefixes.is_empty();
            for p in page.prefixes {
                let name = &p.as_bytes()[prefix.len()..p.as_bytes().len().saturating_sub(1)];
                if names::is_visible(name) {
                    out.entries.push(Listed {
                        name: name.into(),
                        kind: Kind::Directory,
                        meta: None,
                    });
                } else {
                    out.hidden += 1;
                }
            }
            for m in page.objects {
                let name = &m.key.as_bytes()[prefix.len()..];
                if name.is_empty() {
                    continue;
                }
                if names::is_visible(name) {
                    let (name, kind) = (name.into(), Kind::of(m.kind));
                    out.entries.push(Listed { name, kind, meta: Some(m) });
                } else {
                    out.hidden += 1;
                }
            }
            if out.entries.len() > MAX_ENTRIES {
                return Err(FsError::Unsupported(
                    "a directory of over 20 million entries; mount a snapshot (--snapshot)",
                ));
            }
            match page.next {
                Some(t) => request.token = Some(t),
                None => break,
            }
        }
        // By name, a directory before a file of its name, which it hides.
        out.entries.sort_by(|a, b| {
            a.name.cmp(&b.name).then((a.kind != Kind::Directory).cmp(&(b.kind != Kind::Directory)))
        });
        let before = out.entries.len();
        out.entries.dedup_by(|b, a| a.name == b.name);
        out.hidden += (before - out.entries.len()) as u64;
        self.hidden.fetch_add(out.hidden, Ordering::Relaxed);
        if !exists && self.origin.local_path(&Key::from("x")).is_none() {
            // Nothing below the prefix any more; an empty listing says so.
            tracing::debug!(prefix = %prefix.escape_ascii(), "empty directory");
        }
        Ok(out)
    }

    /// The inode of an entry, made if need be, with so many lookups added.
    fn adopt(&self, d: &Directory, l: &Listed, lookups: u64) -> Attr {
        let mut t = self.table.write();
        let slot = (d.ino, l.name.clone());
        if let Some(ino) = t.by_name.get(&slot).copied()
            && let Some(n) = t.nodes.get_mut(&ino)
            && n.is(l)
        {
            n.lookups += lookups;
            return n.attr(ino);
        }
        // The name has another version now: it gets another inode. The old one
        // stays for those who hold it.
        let mut ino = number(d, l);
        while let Some(n) = t.nodes.get_mut(&ino) {
            if n.parent == d.ino && *n.name == *l.name && n.is(l) {
                n.lookups += lookups;
                let attr = n.attr(ino);
                t.by_name.insert(slot, ino);
                return attr;
            }
            ino = ino.wrapping_add(1).max(ROOT + 1);
        }
        let content = match &l.meta {
            Some(m) => Content::File(m.clone()),
            None => {
                let prefix = [&d.prefix(), &*l.name, b"/"].concat();
                Content::Directory(Arc::new(Directory::new(ino, prefix)))
            }
        };
        let node = Node {
            parent: d.ino,
            name: l.name.clone(),
            content,
            lookups,
            set: Attributes::default(),
            retired: false,
        };
        let attr = node.attr(ino);
        t.nodes.insert(ino, node);
        t.by_name.insert(slot, ino);
        t.order.push_back(ino);
        let excess = (t.nodes.len() as u64).saturating_sub(self.config.max_inodes);
        let mut old: Vec<(Ino, Box<[u8]>)> = Vec::new();
        for _ in 0..excess.min(64) {
            let Some(i) = t.order.pop_front() else { break };
            if let Some(n) = t.nodes.get(&i) {
                old.push((n.parent, n.name.clone()));
                t.order.push_back(i);
            }
        }
        drop(t);
        if let Some(tell) = &*self.on_stale.read() {
            for (parent, name) in old {
                tell(parent, &name);
            }
        }
        attr
    }

    /// The inode of a listed entry, for readdirplus: counts as a lookup.
    ///
    /// # Errors
    /// The directory is gone.
    pub fn adopt_listed(&self, parent: Ino, l: &Listed, lookups: u64) -> Result<Entry, FsError> {
        let d = self.directory(parent)?;
        let l = self.current(&d, l).ok_or(FsError::NotFound)?;
        Ok(Entry { attr: self.adopt(&d, &l, lookups), ttl: self.config.ttl })
    }

    /// The number that an entry's inode has or will have, without making it.
    ///
    /// # Errors
    /// The directory is gone.
    pub fn number_of(&self, parent: Ino, l: &Listed) -> Result<Ino, FsError> {
        let d = self.directory(parent)?;
        let t = self.table.read();
        let known = t.by_name.get(&(parent, l.name.clone())).copied();
        Ok(known
            .filter(|i| t.nodes.get(i).is_some_and(|n| n.is(l)))
            .unwrap_or_else(|| number(&d, l)))
    }

    /// The kernel gives lookups back.
    pub fn forget(&self, ino: Ino, lookups: u64) {
        if ino == ROOT {
            return;
        }
        let mut t = self.table.write();
        let Some(n) = t.nodes.get_mut(&ino) else { return };
        n.lookups = n.lookups.saturating_sub(lookups);
        if n.lookups > 0 {
            return;
        }
        let slot = (n.parent, n.name.clone());
        if let Content::Directory(d) = &n.content {
            d.drop_listing(&self.listings_bytes);
        }
        t.nodes.remove(&ino);
        if t.by_name.get(&slot) == Some(&ino) {
            t.by_name.remove(&slot);
        }
        if t.order.len() > 1024 && t.order.len() > t.nodes.len() * 2 {
            let Table { nodes, order, .. } = &mut *t;
            order.retain(|i| nodes.contains_key(i));
        }
    }

    /// See [`super::Namespace::place`].
    #[must_use]
    pub fn place(&self, ino: Ino) -> Option<(Ino, u64, u64, u64)> {
        let (parent, name) = self.name_of(ino)?;
        let d = self.directory(parent).ok()?;
        let s = d.state.lock();
        let f = s.fresh.as_ref()?;
        let at = f.listing.find(&name)?;
        let mean = f.file_bytes / f.files.max(1);
        Some((parent, at as u64, f.listing.entries.len() as u64, mean))
    }

    /// See [`super::Namespace::files_at`].
    #[must_use]
    pub fn files_at(&self, directory: Ino, places: std::ops::Range<u64>) -> Vec<(Ino, ObjectMeta)> {
        let Ok(d) = self.directory(directory) else { return Vec::new() };
        let Some(listing) = d.state.lock().fresh.as_ref().map(|f| f.listing.clone()) else {
            return Vec::new();
        };
        let end = (places.end as usize).min(listing.entries.len());
        let start = (places.start as usize).min(end);
        listing.entries[start..end]
            .iter()
            .filter(|l| l.kind == Kind::File)
            .filter_map(|l| Some((self.number_of(directory, l).ok()?, l.meta.clone()?)))
            .collect()
    }
}

/// Whether an error means that the origin can't be reached, rather than that it
/// said no.
fn is_away(e: &FsError) -> bool {
    matches!(e.errno(), libc::EIO | libc::ETIMEDOUT)
}

/// A stable number: of the path, and of the version for files.
fn number(d: &Directory, l: &Listed) -> Ino {
    let mut h = Xxh3::new();
    h.update(&d.prefix());
    h.update(&l.name);
    match &l.meta {
        Some(m) => {
            h.update(b"\0f");
            h.update(m.version.as_str().as_bytes());
            h.update(&m.size.to_le_bytes());
        }
        None => h.update(b"\0d"),
    }
    h.digest().max(ROOT + 1)
}

/// Names that are in one listing only, or with another content.
fn differing(old: &Listing, new: &Listing) -> Vec<Box<[u8]>> {
    let mut out = Vec::new();
    for e in &old.entries {
        match new.find(&e.name) {
            Some(i) if new.entries[i] == *e => {}
            _ => out.push(e.name.clone()),
        }
    }
    for e in &new.entries {
        if old.find(&e.name).is_none() {
            out.push(e.name.clone());
        }
    }
    out
}

impl Node {
    fn attr(&self, ino: Ino) -> Attr {
        match &self.content {
            Content::Directory(d) => Attr {
                ino,
                kind: Kind::Directory,
                size: 0,
                mtime_ns: self.set.mtime_ns.unwrap_or_else(|| d.state.lock().changed_ns),
                mode: self.set.mode,
                uid: self.set.uid,
                gid: self.set.gid,
            },
            Content::File(m) => Attr {
                ino,
                kind: if m.kind == ObjectKind::Symlink { Kind::Symlink } else { Kind::File },
                size: m.size,
                mtime_ns: self.set.mtime_ns.unwrap_or(m.mtime_ns),
                mode: self.set.mode.or(m.mode),
                uid: self.set.uid,
                gid: self.set.gid,
            },
        }
    }

    /// Whether it is this entry: a directory, or a file of the same version.
    fn is(&self, l: &Listed) -> bool {
        match (&self.content, &l.meta) {
            _ if self.retired => false,
            (Content::Directory(_), None) => true,
            (Content::File(m), Some(n)) => m.version == n.version && m.size == n.size,
            _ => false,
        }
    }
}

impl Directory {
    fn new(ino: Ino, prefix: Vec<u8>) -> Self {
        let state = State { changed_ns: now_ns(), ..State::default() };
        let prefix = RwLock::new(prefix.into());
        Self { ino, prefix, state: Mutex::new(state), refresh: tokio::sync::Mutex::new(()) }
    }

    fn prefix(&self) -> Arc<[u8]> {
        self.prefix.read().clone()
    }

    fn drop_listing(&self, total: &AtomicU64) {
        if let Some(f) = self.state.lock().fresh.take() {
            total.fetch_sub(f.bytes, Ordering::Relaxed);
        }
    }

    /// What is known and still believed: the entry or its absence, and for how
    /// much longer.
    fn known(&self, name: &[u8], c: &LiveConfig) -> Option<(Option<Listed>, Duration)> {
        let s = self.state.lock();
        match s.local.get(name) {
            Some(Local::Present(l, t)) => {
                let left = c.ttl.saturating_sub(t.elapsed());
                if !left.is_zero() {
                    return Some((Some(l.clone()), left));
                }
                return None;
            }
            Some(Local::Absent(t)) if t.elapsed() < c.ttl => return Some((None, Duration::ZERO)),
            Some(Local::Absent(_)) => return None,
            None => {}
        }
        if let Some(f) = &s.fresh {
            let age = f.at.elapsed();
            if let Some(i) = f.listing.find(name) {
                let left = c.ttl.checked_sub(age).filter(|l| !l.is_zero())?;
                return Some((Some(f.listing.entries[i].clone()), left));
            }
            let left = c.negative_ttl.checked_sub(age).filter(|l| !l.is_zero());
            if let Some(left) = left {
                return Some((None, left));
            }
        }
        let (l, t) = s.probed.get(name)?;
        let ttl = if l.is_some() { c.ttl } else { c.negative_ttl };
        let left = ttl.checked_sub(t.elapsed()).filter(|l| !l.is_zero())?;
        Some((l.clone(), left))
    }

    /// The newest that is known, however old.
    fn newest(&self, name: &[u8]) -> Option<Listed> {
        let s = self.state.lock();
        match s.local.get(name) {
            Some(Local::Present(l, _)) => return Some(l.clone()),
            Some(Local::Absent(_)) => return None,
            None => {}
        }
        if let Some((l, _)) = s.probed.get(name) {
            return l.clone();
        }
        let f = s.fresh.as_ref()?;
        f.listing.find(name).map(|i| f.listing.entries[i].clone())
    }
}

mod changes;
#[cfg(test)]
mod tests;

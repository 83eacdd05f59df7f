//! The files of a dataset, numbered as loaders number them.
//!
//! torchvision's `ImageFolder` takes the top directories in the order of names as
//! classes, walks each in the order of paths, and takes its files in the order of
//! names. `sorted(glob("**"))` orders whole paths. Both may leave out files of
//! other kinds. The numbers here are those of the first way over all files; the
//! other ways are views on them.

use std::collections::HashMap;
use std::sync::Arc;

use futures::StreamExt;
use kspeed_cache::ObjectMeta;
use kspeed_prefetch::View;

use crate::errno::FsError;
use crate::namespace::{Ino, Kind, Listing, Namespace};

/// Largest dataset that is numbered, whatever the memory.
pub const MAX_FILES: usize = 4_000_000;
/// Listings asked for at once.
const PARALLEL_LISTS: usize = 32;
/// Estimated memory of a numbered file, beside a live listing's own.
const FILE_BYTES: u64 = 8;
/// And of what is known of it: two orders, places, next use.
const ORDER_BYTES: u64 = 200;
/// Estimated memory of a listed entry.
const LISTED_BYTES: u64 = 200;
/// Kinds of files that may be the samples: so many, of at least such a part (a
/// divisor) of all files.
const MAX_KINDS: usize = 3;
const KIND_DIVISOR: u32 = 8;
/// What torchvision takes for images.
const IMAGES: [&[u8]; 9] =
    [b"jpg", b"jpeg", b"png", b"ppm", b"bmp", b"pgm", b"tif", b"tiff", b"webp"];

/// Files of one directory, in the order of names.
enum Files {
    /// Places in a listing.
    Listed(Arc<Listing>, Vec<u32>),
    /// Inodes of a snapshot, ascending.
    Indexed(Vec<Ino>),
}

impl Files {
    fn len(&self) -> usize {
        match self {
            Self::Listed(_, v) => v.len(),
            Self::Indexed(v) => v.len(),
        }
    }
}

struct Folder {
    ino: Ino,
    /// Relative to the dataset; empty, or ending with `/`.
    path: Vec<u8>,
    /// Number of the first file.
    first: u32,
    files: Files,
}

/// A directory listed for the catalog: its files' kinds, and its directories.
struct Walked {
    folder: Folder,
    kinds: Vec<Vec<u8>>,
    below: Vec<(Ino, Vec<u8>)>,
}

/// See the module.
pub struct Catalog {
    /// The directory.
    pub root: Ino,
    /// Its path below the mountpoint.
    pub path: String,
    folders: Vec<Folder>,
    by_ino: HashMap<Ino, usize>,
    by_path: HashMap<Vec<u8>, usize>,
    files: u32,
    bytes: u64,
    views: Vec<View>,
}

/// Why there is no catalog.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// The origin failed.
    #[error(transparent)]
    List(#[from] FsError),
    /// It does not fit.
    #[error(
        "more than {0} files fit into the memory for orders: mount with --snapshot or a larger --memory-limit"
    )]
    TooLarge(usize),
}

impl Catalog {
    /// Lists all below a directory; `memory`: what it may take, in bytes.
    ///
    /// # Errors
    /// The origin failed, or there are too many files.
    pub async fn build(names: &Namespace, root: Ino, memory: u64) -> Result<Self, CatalogError> {
        let per_file = match names {
            Namespace::Live(_) => LISTED_BYTES + FILE_BYTES,
            Namespace::Snapshot(_) => FILE_BYTES,
        };
        let most =
            usize::try_from(memory / (per_file + ORDER_BYTES)).unwrap_or(MAX_FILES).min(MAX_FILES);
        let mut walked = Vec::new();
        let mut level = vec![(root, Vec::new())];
        let mut files = 0;
        while !level.is_empty() {
            let mut lists = futures::stream::iter(level)
                .map(|(ino, path)| walk(names, ino, path))
                .buffered(PARALLEL_LISTS);
            let mut below = Vec::new();
            while let Some(w) = lists.next().await {
                let mut w = w?;
                files += w.folder.files.len();
                if files > most {
                    return Err(CatalogError::TooLarge(most));
                }
                below.append(&mut w.below);
                walked.push(w);
            }
            level = below;
        }
        walked.sort_by(|a, b| class_order(&a.folder.path).cmp(&class_order(&b.folder.path)));
        let mut kinds: Vec<Vec<u8>> = Vec::with_capacity(files);
        let mut folders = Vec::with_capacity(walked.len());
        let mut first = 0;
        for w in walked {
            let mut folder = w.folder;
            folder.first = first;
            first += folder.files.len() as u32;
            kinds.extend(w.kinds);
            if folder.files.len() > 0 {
                folders.push(folder);
            }
        }
        let mut c = Self {
            root,
            path: path_of(names, root),
            by_ino: folders.iter().enumerate().map(|(i, f)| (f.ino, i)).collect(),
            by_path: folders.iter().enumerate().map(|(i, f)| (f.path.clone(), i)).collect(),
            folders,
            files: first,
            bytes: 0,
            views: Vec::new(),
        };
        c.bytes = c.sample_bytes(names);
        c.views = c.make_views(names, &kinds);
        Ok(c)
    }

    /// Files.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.files
    }

    /// None.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.files == 0
    }

    /// Mean size of a file in bytes, estimated from some.
    #[must_use]
    pub fn mean_bytes(&self) -> u64 {
        self.bytes
    }

    /// How loaders may number the files.
    #[must_use]
    pub fn views(&self) -> Vec<View> {
        self.views.clone()
    }

    /// A file's number.
    #[must_use]
    pub fn number(&self, names: &Namespace, ino: Ino) -> Option<u32> {
        let (parent, name) = names.parent_and_name(ino)?;
        let f = &self.folders[*self.by_ino.get(&parent)?];
        f.place(ino, name.as_deref()).map(|p| f.first + p)
    }

    /// A file's number, by its path below the dataset.
    #[must_use]
    pub fn number_of_path(&self, names: &Namespace, path: &[u8]) -> Option<u32> {
        let cut = path.iter().rposition(|b| *b == b'/').map_or(0, |i| i + 1);
        let f = &self.folders[*self.by_path.get(&path[..cut])?];
        let name = &path[cut..];
        let ino = match names {
            Namespace::Snapshot(s) => s.lookup(f.ino, name).ok()?.attr.ino,
            Namespace::Live(_) => 0,
        };
        f.place(ino, Some(name)).map(|p| f.first + p)
    }

    /// The file of a number: inode and object.
    #[must_use]
    pub fn file(&self, names: &Namespace, number: u32) -> Option<(Ino, ObjectMeta)> {
        let i = self.folders.partition_point(|f| f.first <= number).checked_sub(1)?;
        let f = &self.folders[i];
        let at = (number - f.first) as usize;
        match (&f.files, names) {
            (Files::Listed(l, places), Namespace::Live(live)) => {
                let e = l.entries.get(*places.get(at)? as usize)?;
                Some((live.number_of(f.ino, e).ok()?, e.meta.clone()?))
            }
            (Files::Indexed(inos), Namespace::Snapshot(s)) => {
                let ino = *inos.get(at)?;
                Some((ino, s.object(ino).ok()?))
            }
            _ => None,
        }
    }

    /// The mean size of up to a thousand files spread over all.
    fn sample_bytes(&self, names: &Namespace) -> u64 {
        let step = (self.files / 1000).max(1) as usize;
        let sizes: Vec<u64> = (0..self.files)
            .step_by(step)
            .filter_map(|i| self.file(names, i).map(|(_, m)| m.size))
            .collect();
        sizes.iter().sum::<u64>() / (sizes.len() as u64).max(1)
    }

    fn make_views(&self, names: &Namespace, kinds: &[Vec<u8>]) -> Vec<View> {
        let mut counts: HashMap<&[u8], u32> = HashMap::new();
        for k in kinds {
            *counts.entry(k).or_default() += 1;
        }
        let mut kinds_here: Vec<(&[u8], u32)> = counts.into_iter().collect();
        kinds_here.sort_by_key(|(k, c)| (std::cmp::Reverse(*c), k.to_vec()));
        let several = kinds_here.len() > 1;
        kinds_here.retain(|(_, c)| several && c.saturating_mul(KIND_DIVISOR) >= self.files);
        kinds_here.truncate(MAX_KINDS);
        let mut views = vec![None];
        let mut add = |order: &mut dyn Iterator<Item = u32>| views.push(Some(order.collect()));
        for (k, _) in &kinds_here {
            add(&mut (0..self.files).filter(|i| kinds[*i as usize] == *k));
        }
        if let Some(paths) = self.by_whole_path(names) {
            add(&mut paths.iter().copied());
            for (k, _) in &kinds_here {
                add(&mut paths.iter().copied().filter(|i| kinds[*i as usize] == *k));
            }
        }
        views
    }

    /// The files in the order of whole paths, if that is another.
    fn by_whole_path(&self, names: &Namespace) -> Option<Vec<u32>> {
        let differs = self.folders.windows(2).any(|w| {
            // Where a directory's path begins another's, or nearly so.
            let stem = w[0].path.strip_suffix(b"/").unwrap_or_default();
            w[1].path.starts_with(stem) || w[0].path > w[1].path
        });
        if !differs || self.folders.len() < 2 {
            return None;
        }
        let mut all: Vec<(Vec<u8>, u32)> = Vec::with_capacity(self.files as usize);
        for f in &self.folders {
            for p in 0..f.files.len() as u32 {
                all.push(([&f.path, &*f.name(names, p)].concat(), f.first + p));
            }
        }
        all.sort();
        let order: Vec<u32> = all.into_iter().map(|(_, n)| n).collect();
        (!order.iter().copied().eq(0..self.files)).then_some(order)
    }
}

impl Folder {
    fn place(&self, ino: Ino, name: Option<&[u8]>) -> Option<u32> {
        let place = match &self.files {
            Files::Listed(l, places) => {
                let at = u32::try_from(l.find(name?)?).ok()?;
                places.binary_search(&at).ok()?
            }
            Files::Indexed(inos) => inos.binary_search(&ino).ok()?,
        };
        Some(place as u32)
    }

    fn name(&self, names: &Namespace, place: u32) -> Vec<u8> {
        match (&self.files, names) {
            (Files::Listed(l, places), _) => {
                l.entries[places[place as usize] as usize].name.to_vec()
            }
            (Files::Indexed(inos), Namespace::Snapshot(s)) => {
                let key = s.object(inos[place as usize]).map(|m| m.key.as_bytes().to_vec());
                let key = key.unwrap_or_default();
                key.rsplit(|b| *b == b'/').next().unwrap_or_default().to_vec()
            }
            _ => Vec::new(),
        }
    }
}

/// By the first component, then by the whole path.
fn class_order(path: &[u8]) -> (&[u8], &[u8]) {
    (path.split(|b| *b == b'/').next().unwrap_or_default(), path)
}

/// What kind of file a name says: its extension, and one for all images.
fn kind(name: &[u8]) -> Vec<u8> {
    let extension = match name.iter().rposition(|b| *b == b'.') {
        Some(i) => name[i + 1..].to_ascii_lowercase(),
        None => Vec::new(),
    };
    if IMAGES.contains(&&*extension) { b"image".to_vec() } else { extension }
}

async fn walk(names: &Namespace, ino: Ino, path: Vec<u8>) -> Result<Walked, FsError> {
    let mut kinds = Vec::new();
    let mut below = Vec::new();
    let sub = |name: &[u8]| [&path, name, b"/"].concat();
    let files = match names {
        Namespace::Live(l) => {
            let listing = l.listing(ino).await?;
            let mut places = Vec::new();
            for (i, e) in listing.entries.iter().enumerate() {
                match e.kind {
                    Kind::File => {
                        places.push(i as u32);
                        kinds.push(kind(&e.name));
                    }
                    Kind::Directory => {
                        below.push((l.adopt_listed(ino, e, 0)?.attr.ino, sub(&e.name)));
                    }
                    Kind::Symlink => {}
                }
            }
            Files::Listed(listing, places)
        }
        Namespace::Snapshot(s) => {
            let mut inos = Vec::new();
            s.children(ino, 0, &mut |c| {
                if c.attr.kind == Kind::Directory {
                    below.push((c.attr.ino, sub(c.name)));
                } else {
                    inos.push(c.attr.ino);
                    kinds.push(kind(c.name));
                }
                inos.len() <= MAX_FILES
            })?;
            Files::Indexed(inos)
        }
    };
    Ok(Walked { folder: Folder { ino, path, first: 0, files }, kinds, below })
}

/// A directory's path below the mountpoint.
fn path_of(names: &Namespace, ino: Ino) -> String {
    match names {
        Namespace::Snapshot(s) => s.path(ino),
        Namespace::Live(l) => {
            let mut parts = Vec::new();
            let mut at = ino;
            while let Some((parent, name)) = l.name_of(at).filter(|(p, _)| *p != at) {
                parts.push(String::from_utf8_lossy(&name).into_owned());
                at = parent;
            }
            parts.reverse();
            parts.join("/")
        }
    }
}

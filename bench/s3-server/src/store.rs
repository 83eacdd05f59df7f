//! Objects in a directory, and all their keys in memory.
//!
//! A bucket is a subdirectory; a file in it is an object with its path as the
//! key. Keys that no path can have (`a//b`, `/lead`, names over 255 bytes, an
//! object beside a prefix of its name) go to `.kspeed-s3d/` under the bucket,
//! named by a hash, with the key in a file beside.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Bound;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use xxhash_rust::xxh3::xxh3_128;

use crate::mapped;

const PRIVATE: &str = ".kspeed-s3d";
/// Objects from this size on are served from a map, smaller ones are read.
const MAP_FROM_BYTES: u64 = 1 << 20;

/// One object.
pub(crate) struct Object {
    path: PathBuf,
    pub(crate) size: u64,
    pub(crate) modified: SystemTime,
    pub(crate) etag: String,
    /// User metadata; not kept over a restart.
    pub(crate) metadata: Metadata,
    map: Mutex<Option<Bytes>>,
}

impl Object {
    fn look(path: PathBuf, metadata: Metadata) -> io::Result<Self> {
        let m = fs::metadata(&path)?;
        let tag = format!("{}-{}-{}-{}", m.ino(), m.size(), m.mtime(), m.mtime_nsec());
        Ok(Self {
            path,
            size: m.size(),
            modified: m.modified()?,
            etag: format!("{:032x}", xxh3_128(tag.as_bytes())),
            metadata,
            map: Mutex::new(None),
        })
    }

    /// The bytes of a range, without a copy if it is large.
    pub(crate) fn bytes(&self, start: u64, end: u64) -> io::Result<Bytes> {
        if self.size >= MAP_FROM_BYTES {
            let mut map = self.map.lock();
            let whole = match &*map {
                Some(m) => m.clone(),
                None => map.insert(mapped::map(&self.path)?).clone(),
            };
            drop(map);
            return Ok(whole.slice(start as usize..end as usize));
        }
        use std::os::unix::fs::FileExt;
        let mut buf = vec![0; (end - start) as usize];
        File::open(&self.path)?.read_exact_at(&mut buf, start)?;
        Ok(buf.into())
    }
}

/// User metadata of an object: names without their prefix.
pub type Metadata = Option<HashMap<String, String>>;

type Bucket = BTreeMap<String, Arc<Object>>;

/// A page of keys.
#[derive(Default)]
pub(crate) struct Page {
    pub(crate) objects: Vec<(String, Arc<Object>)>,
    pub(crate) prefixes: Vec<String>,
    pub(crate) next: Option<String>,
}

/// All buckets.
pub struct Store {
    root: PathBuf,
    buckets: RwLock<BTreeMap<String, Bucket>>,
    names: AtomicU64,
}

impl Store {
    /// Scans the directory.
    ///
    /// # Errors
    /// It can't be read.
    pub fn open(root: &Path) -> io::Result<Self> {
        fs::create_dir_all(root)?;
        let mut buckets = BTreeMap::new();
        for e in fs::read_dir(root)? {
            let e = e?;
            if let Some(name) = e.file_name().to_str()
                && e.path().is_dir()
                && name != PRIVATE
            {
                let mut b = Bucket::new();
                scan(&e.path(), "", &mut b)?;
                buckets.insert(name.to_owned(), b);
            }
        }
        Ok(Self {
            root: root.to_path_buf(),
            buckets: RwLock::new(buckets),
            names: AtomicU64::new(0),
        })
    }

    /// Makes a bucket; one that exists is no error.
    ///
    /// # Errors
    /// The directory can't be made.
    pub fn create_bucket(&self, bucket: &str) -> io::Result<()> {
        fs::create_dir_all(self.root.join(bucket))?;
        self.buckets.write().entry(bucket.to_owned()).or_default();
        Ok(())
    }

    /// Stores an object, as if another client did.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn put(&self, bucket: &str, key: &str, data: &[u8]) -> io::Result<()> {
        self.create_bucket(bucket)?;
        let temp = self.temp(bucket)?;
        fs::write(&temp, data)?;
        self.put_file(bucket, key, &temp, None, &|_| true)?.ok_or(io::ErrorKind::AlreadyExists)?;
        Ok(())
    }

    /// Stores many empty-bodied keys at once, for listings: all share one file.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn put_names(&self, bucket: &str, keys: impl Iterator<Item = String>) -> io::Result<()> {
        self.create_bucket(bucket)?;
        let path = self.temp(bucket)?;
        fs::write(&path, b"")?;
        let object = Arc::new(Object::look(path, None)?);
        let mut buckets = self.buckets.write();
        let b = buckets.entry(bucket.to_owned()).or_default();
        b.extend(keys.map(|k| (k, object.clone())));
        Ok(())
    }

    /// Removes an object, as if another client did.
    pub fn delete(&self, bucket: &str, key: &str) {
        let gone = self.buckets.write().get_mut(bucket).and_then(|b| b.remove(key));
        if let Some(o) = gone {
            let _ = fs::remove_file(&o.path);
            let _ = fs::remove_file(o.path.with_extension("key"));
        }
    }

    /// An object's bytes.
    #[must_use]
    pub fn read(&self, bucket: &str, key: &str) -> Option<Bytes> {
        let o = self.get(bucket, key)?;
        o.bytes(0, o.size).ok()
    }

    /// All keys of a bucket.
    #[must_use]
    pub fn keys(&self, bucket: &str) -> Vec<String> {
        self.buckets.read().get(bucket).map(|b| b.keys().cloned().collect()).unwrap_or_default()
    }

    pub(crate) fn has_bucket(&self, bucket: &str) -> bool {
        self.buckets.read().contains_key(bucket)
    }

    pub(crate) fn get(&self, bucket: &str, key: &str) -> Option<Arc<Object>> {
        self.buckets.read().get(bucket)?.get(key).cloned()
    }

    /// A path for a file that becomes an object.
    pub(crate) fn temp(&self, bucket: &str) -> io::Result<PathBuf> {
        let dir = self.root.join(bucket).join(PRIVATE);
        fs::create_dir_all(&dir)?;
        let n = self.names.fetch_add(1, Ordering::Relaxed);
        Ok(dir.join(format!("tmp-{}-{n}", std::process::id())))
    }

    /// An object's user metadata.
    #[must_use]
    pub fn metadata(&self, bucket: &str, key: &str) -> Metadata {
        self.get(bucket, key)?.metadata.clone()
    }

    /// Uploads in parts that were begun and neither completed nor aborted.
    #[must_use]
    pub fn uploads(&self, bucket: &str) -> usize {
        let dir = fs::read_dir(self.root.join(bucket).join(PRIVATE));
        dir.map_or(0, |d| {
            d.flatten()
                .filter(|e| e.file_name().to_string_lossy().starts_with("tmp-upload-"))
                .count()
        })
    }

    /// Makes a finished file the object of a key; none if what is there is not
    /// as `may` wants it.
    pub(crate) fn put_file(
        &self,
        bucket: &str,
        key: &str,
        temp: &Path,
        metadata: Metadata,
        may: &dyn Fn(Option<&Object>) -> bool,
    ) -> io::Result<Option<Arc<Object>>> {
        let mut buckets = self.buckets.write();
        let b = buckets.get_mut(bucket).ok_or(io::ErrorKind::NotFound)?;
        if !may(b.get(key).map(|o| &**o)) {
            let _ = fs::remove_file(temp);
            return Ok(None);
        }
        let dir = self.root.join(bucket);
        let path = match b.get(key) {
            Some(old) => old.path.clone(),
            None => natural(&dir, key).unwrap_or_else(|| {
                dir.join(PRIVATE).join(format!("{:032x}", xxh3_128(key.as_bytes())))
            }),
        };
        if path.starts_with(dir.join(PRIVATE)) {
            File::create(path.with_extension("key"))?.write_all(key.as_bytes())?;
        }
        fs::rename(temp, &path)?;
        let o = Arc::new(Object::look(path, metadata)?);
        b.insert(key.to_owned(), o.clone());
        Ok(Some(o))
    }

    pub(crate) fn list(
        &self,
        bucket: &str,
        prefix: &str,
        delimiter: Option<&str>,
        after: Option<&str>,
        max: usize,
    ) -> Option<Page> {
        let buckets = self.buckets.read();
        let b = buckets.get(bucket)?;
        let mut page = Page::default();
        let mut from = match after {
            Some(a) if a >= prefix => Bound::Excluded(a.to_owned()),
            _ => Bound::Included(prefix.to_owned()),
        };
        let mut last = String::new();
        'keys: loop {
            let mut skip_to = None;
            for (k, o) in b.range::<String, _>((from.clone(), Bound::Unbounded)) {
                let Some(rest) = k.strip_prefix(prefix) else { break 'keys };
                let folded =
                    delimiter.and_then(|d| rest.find(d).map(|i| &k[..prefix.len() + i + d.len()]));
                if let Some(p) = folded
                    && after.is_some_and(|a| a.starts_with(p))
                {
                    skip_to = Some(p.to_owned());
                    break;
                }
                if page.objects.len() + page.prefixes.len() == max {
                    page.next = Some(last);
                    break 'keys;
                }
                match folded {
                    Some(p) => {
                        page.prefixes.push(p.to_owned());
                        last = p.to_owned();
                        skip_to = Some(p.to_owned());
                        break;
                    }
                    None => {
                        page.objects.push((k.clone(), o.clone()));
                        last.clone_from(k);
                    }
                }
            }
            // Jump over all that lies below a folded prefix.
            match skip_to {
                Some(mut p) => {
                    p.push(char::MAX);
                    from = Bound::Excluded(p);
                }
                None => break,
            }
        }
        Some(page)
    }
}

/// The path that a key has of itself, if it can be made and clashes with none.
fn natural(dir: &Path, key: &str) -> Option<PathBuf> {
    let fits = |c: &str| !c.is_empty() && c != "." && c != ".." && c.len() <= 255 && c != PRIVATE;
    if key.contains('\0') || !key.split('/').all(fits) {
        return None;
    }
    let path = dir.join(key);
    if path.is_dir() || fs::create_dir_all(path.parent()?).is_err() {
        return None;
    }
    Some(path)
}

fn scan(dir: &Path, prefix: &str, into: &mut Bucket) -> io::Result<()> {
    for e in fs::read_dir(dir)? {
        let e = e?;
        let name = e.file_name();
        let Some(name) = name.to_str() else { continue };
        if name == PRIVATE && prefix.is_empty() {
            scan_private(&e.path(), into)?;
        } else if e.file_type()?.is_dir() {
            scan(&e.path(), &format!("{prefix}{name}/"), into)?;
        } else {
            into.insert(format!("{prefix}{name}"), Arc::new(Object::look(e.path(), None)?));
        }
    }
    Ok(())
}

fn scan_private(dir: &Path, into: &mut Bucket) -> io::Result<()> {
    for e in fs::read_dir(dir)? {
        let path = e?.path();
        if path.extension().is_some_and(|x| x == "key") {
            let key = fs::read_to_string(&path)?;
            if let Ok(o) = Object::look(path.with_extension(""), None) {
                into.insert(key, Arc::new(o));
            }
        } else if path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("tmp-")) {
            let _ = fs::remove_file(path);
        }
    }
    Ok(())
}

//! A directory as an origin: CPFS, NAS, Lustre, or a local disk.
//!
//! A file's version is its inode, mtime and size: a file rewritten in place
//! within the clock's granularity with the same size would go unseen, which is
//! the assumption that rsync and make share. Names need not be UTF-8.

use std::cmp::Ordering;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream};

use super::{
    Attributes, Condition, ListPage, ListRequest, ObjectBody, Origin, OriginError, PutBody,
    PutOptions,
};
use crate::object::{Key, ObjectKind, ObjectMeta, Version};
use xxhash_rust::xxh3::xxh3_64;

const PAGE_KEYS: usize = 10_000;
/// Pieces large enough that a parallel file system streams.
const CHUNK_BYTES: u64 = 1 << 20;
/// A put writes beside its target under this prefix, then renames.
const TEMP_PREFIX: &str = ".kspeed-put-";
/// Extended attribute that holds [`PutOptions::token`].
const TOKEN_NAME: &str = "user.kspeed-put";

/// An origin over a directory.
pub struct PosixOrigin {
    root: PathBuf,
    name: String,
}

impl PosixOrigin {
    /// Over `root`, which must be a directory.
    ///
    /// # Errors
    /// It can't be reached or is no directory.
    pub fn new(root: &Path) -> Result<Self, OriginError> {
        let root =
            fs::canonicalize(root).map_err(|e| OriginError::io(root.display().to_string(), e))?;
        if !root.is_dir() {
            return Err(OriginError::Invalid {
                what: root.display().to_string(),
                detail: "not a directory".into(),
            });
        }
        let name = format!("file://{}/", root.display());
        Ok(Self { root, name })
    }

    fn path(&self, key: &[u8]) -> Result<PathBuf, OriginError> {
        path_in(&self.root, key)
    }
}

fn path_in(root: &Path, key: &[u8]) -> Result<PathBuf, OriginError> {
    let bad = key.split(|b| *b == b'/').any(|c| c.is_empty() || c == b"." || c == b"..");
    if bad || key.contains(&0) {
        return Err(OriginError::Invalid {
            what: key.escape_ascii().to_string(),
            detail: "no path has this name".into(),
        });
    }
    Ok(root.join(OsStr::from_bytes(key)))
}

fn version_of(m: &fs::Metadata) -> Version {
    format!("{:x}-{:x}.{:09}-{:x}", m.ino(), m.mtime(), m.mtime_nsec(), m.size()).into()
}

fn meta_of(key: &[u8], m: &fs::Metadata) -> ObjectMeta {
    ObjectMeta {
        key: key.into(),
        size: m.size(),
        mtime_ns: m.mtime().saturating_mul(1_000_000_000).saturating_add(m.mtime_nsec()),
        version: version_of(m),
        kind: if m.is_symlink() { ObjectKind::Symlink } else { ObjectKind::File },
        mode: Some(m.mode() & 0o7777),
    }
}

fn set_attributes(path: &Path, a: &Attributes) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    if a.uid.is_some() || a.gid.is_some() {
        std::os::unix::fs::chown(path, a.uid, a.gid)?;
    }
    if let Some(m) = a.mode {
        fs::set_permissions(path, fs::Permissions::from_mode(m & 0o7777))?;
    }
    if let Some(t) = a.mtime_ns {
        let d = std::time::Duration::from_nanos(t.unsigned_abs());
        let epoch = std::time::SystemTime::UNIX_EPOCH;
        File::open(path)?.set_modified(if t >= 0 { epoch + d } else { epoch - d })?;
    }
    Ok(())
}

/// Renames, if the condition holds; else `AlreadyExists`.
fn put_in_place(temp: &Path, path: &Path, condition: &Condition) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    match condition {
        Condition::Any => {}
        Condition::Absent => {
            return match renameat_with(CWD, temp, CWD, path, RenameFlags::NOREPLACE) {
                // Not every network file system can.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) if !path.exists() => {
                    fs::rename(temp, path)
                }
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                    Err(std::io::ErrorKind::AlreadyExists.into())
                }
                r => Ok(r?),
            };
        }
        Condition::Version(v) => {
            // As sharp as a directory can: it has no compare-and-swap.
            let now = fs::symlink_metadata(path).map(|m| version_of(&m)).ok();
            if now.as_ref() != Some(v) {
                return Err(std::io::ErrorKind::AlreadyExists.into());
            }
        }
    }
    fs::rename(temp, path)
}

/// Whether a file has exactly these bytes.
fn holds(path: &Path, body: &PutBody) -> std::io::Result<bool> {
    let mut there = std::io::BufReader::new(File::open(path)?);
    if there.get_ref().metadata()?.len() != body.len() {
        return Ok(false);
    }
    let mut here: Box<dyn Read> = match body {
        PutBody::Bytes(b) => Box::new(&b[..]),
        PutBody::File { path, len } => {
            Box::new(std::io::BufReader::new(File::open(path)?.take(*len)))
        }
    };
    let (mut a, mut b) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    loop {
        let n = here.read(&mut a)?;
        if n == 0 {
            return Ok(true);
        }
        there.read_exact(&mut b[..n])?;
        if a[..n] != b[..n] {
            return Ok(false);
        }
    }
}

/// Children of the directory of `key_prefix` (which ends with `/` or is empty),
/// in the bytewise order of their keys: directories count as `name/`.
fn children(root: &Path, key_prefix: &[u8]) -> Result<Vec<(Vec<u8>, bool)>, OriginError> {
    let dir = match key_prefix.strip_suffix(b"/") {
        None => root.to_path_buf(),
        Some(p) => path_in(root, p)?,
    };
    let what = || dir.display().to_string();
    let entries = match fs::read_dir(&dir) {
        Ok(e) => e,
        Err(e) => match OriginError::io(what(), e) {
            OriginError::NotFound { .. } => return Ok(Vec::new()),
            e => return Err(e),
        },
    };
    let mut out = Vec::new();
    for e in entries {
        let e = e.map_err(|e| OriginError::io(what(), e))?;
        let name = e.file_name();
        if name.as_bytes().starts_with(TEMP_PREFIX.as_bytes()) {
            continue;
        }
        let kind = e.file_type().map_err(|e| OriginError::io(what(), e))?;
        let mut key = [key_prefix, name.as_bytes()].concat();
        if kind.is_dir() {
            key.push(b'/');
            out.push((key, true));
        } else if kind.is_file() || kind.is_symlink() {
            out.push((key, false));
        }
    }
    out.sort_unstable();
    Ok(out)
}

struct Lister<'a> {
    root: &'a Path,
    prefix: &'a [u8],
    after: Option<Vec<u8>>,
    delimited: bool,
    max: usize,
    page: ListPage,
    last: Vec<u8>,
    full: bool,
}

impl Lister<'_> {
    fn walk(&mut self, dir: &[u8]) -> Result<(), OriginError> {
        for (key, is_dir) in children(self.root, dir)? {
            if self.full {
                return Ok(());
            }
            let common = key.len().min(self.prefix.len());
            if key[..common] != self.prefix[..common] {
                continue;
            }
            if !is_dir && key.len() < self.prefix.len() {
                continue;
            }
            if is_dir && (key.len() < self.prefix.len() || !self.delimited) {
                // Skip subtrees that lie before the start whole.
                let before = self.after.as_ref().is_some_and(|a| {
                    a.as_slice().cmp(&key) == Ordering::Greater && !a.starts_with(&key)
                });
                if !before {
                    self.walk(&key)?;
                }
                continue;
            }
            if self.after.as_ref().is_some_and(|a| *a >= key || (is_dir && a.starts_with(&key))) {
                continue;
            }
            if is_dir && key == self.prefix {
                self.walk(&key)?;
                continue;
            }
            if self.page.objects.len() + self.page.prefixes.len() == self.max {
                self.full = true;
                self.page.next = Some(hex(&self.last));
                return Ok(());
            }
            if is_dir {
                self.page.prefixes.push(key.as_slice().into());
            } else {
                match fs::symlink_metadata(path_in(self.root, &key)?) {
                    Ok(m) => self.page.objects.push(meta_of(&key, &m)),
                    // Gone since the directory was read.
                    Err(_) => continue,
                }
            }
            self.last = key;
        }
        Ok(())
    }
}

/// Tokens are text, names need not be.
fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

fn unhex(s: &str) -> Option<Vec<u8>> {
    (0..s.len()).step_by(2).map(|i| u8::from_str_radix(s.get(i..i + 2)?, 16).ok()).collect()
}

async fn blocking<T: Send + 'static>(
    f: impl FnOnce() -> Result<T, OriginError> + Send + 'static,
) -> Result<T, OriginError> {
    match tokio::task::spawn_blocking(f).await {
        Ok(r) => r,
        Err(e) => Err(OriginError::Unavailable { what: "file".into(), detail: e.to_string() }),
    }
}

#[async_trait]
impl Origin for PosixOrigin {
    fn name(&self) -> &str {
        &self.name
    }

    async fn list(&self, r: &ListRequest) -> Result<ListPage, OriginError> {
        let root = self.root.clone();
        let r = r.clone();
        blocking(move || {
            let after = match &r.token {
                Some(t) => Some(unhex(t).ok_or_else(|| OriginError::Invalid {
                    what: "continuation token".into(),
                    detail: "not one of ours".into(),
                })?),
                None => r.start_after.as_ref().map(|k| k.as_bytes().to_vec()),
            };
            let dir_len = r.prefix.iter().rposition(|b| *b == b'/').map_or(0, |i| i + 1);
            let mut l = Lister {
                root: &root,
                prefix: &r.prefix,
                after,
                delimited: r.delimited,
                max: if r.max_keys == 0 { PAGE_KEYS } else { r.max_keys as usize },
                page: ListPage::default(),
                last: Vec::new(),
                full: false,
            };
            l.walk(&r.prefix[..dir_len])?;
            Ok(l.page)
        })
        .await
    }

    async fn head(&self, key: &Key) -> Result<ObjectMeta, OriginError> {
        let path = self.path(key.as_bytes())?;
        let key = key.clone();
        blocking(move || {
            let m = fs::symlink_metadata(&path)
                .map_err(|e| OriginError::io(path.display().to_string(), e))?;
            if m.is_file() || m.is_symlink() {
                Ok(meta_of(key.as_bytes(), &m))
            } else {
                Err(OriginError::NotFound { what: path.display().to_string() })
            }
        })
        .await
    }

    async fn get(&self, meta: &ObjectMeta, range: Range<u64>) -> Result<ObjectBody, OriginError> {
        let path = self.path(meta.key.as_bytes())?;
        let meta = meta.clone();
        let what = path.display().to_string();
        let opened = blocking(move || {
            let what = path.display().to_string();
            if meta.kind == ObjectKind::Symlink {
                let target = fs::read_link(&path).map_err(|e| OriginError::io(&what, e))?;
                return Ok((None, Bytes::copy_from_slice(target.as_os_str().as_bytes()), meta));
            }
            let f = File::open(&path).map_err(|e| OriginError::io(&what, e))?;
            let m = f.metadata().map_err(|e| OriginError::io(&what, e))?;
            if version_of(&m) != meta.version {
                return Err(OriginError::Changed { what });
            }
            Ok((Some(Arc::new(f)), Bytes::new(), meta))
        })
        .await?;
        let (file, target, meta) = opened;
        let size = meta.size;
        if range.is_empty() || range.end > size {
            return Err(OriginError::Invalid { what, detail: format!("no bytes {range:?}") });
        }
        let version = meta.version.clone();
        let Some(file) = file else {
            let b = target.slice(range.start as usize..(range.end as usize).min(target.len()));
            return Ok(ObjectBody { version, size, stream: stream::iter([Ok(b)]).boxed() });
        };
        let stream = stream::try_unfold(range.start, move |at| {
            let (file, what, version) = (file.clone(), what.clone(), meta.version.clone());
            let end = range.end;
            async move {
                if at == end {
                    return Ok(None);
                }
                let len = (end - at).min(CHUNK_BYTES) as usize;
                let b = blocking(move || {
                    let mut buf = vec![0u8; len];
                    file.read_exact_at(&mut buf, at).map_err(|e| match e.kind() {
                        std::io::ErrorKind::UnexpectedEof => {
                            OriginError::Changed { what: what.clone() }
                        }
                        _ => OriginError::io(&what, e),
                    })?;
                    // After the read: bytes of a file that changed meanwhile
                    // are not handed on (I1).
                    let m = file.metadata().map_err(|e| OriginError::io(&what, e))?;
                    if version_of(&m) != version {
                        return Err(OriginError::Changed { what });
                    }
                    Ok(Bytes::from(buf))
                })
                .await?;
                Ok(Some((b, at + len as u64)))
            }
        });
        Ok(ObjectBody { version, size, stream: stream.boxed() })
    }

    async fn put(
        &self,
        key: &Key,
        body: PutBody,
        how: &PutOptions,
    ) -> Result<ObjectMeta, OriginError> {
        let marker = key.as_bytes().last() == Some(&b'/');
        let bare = key.as_bytes().strip_suffix(b"/").unwrap_or(key.as_bytes());
        let path = self.path(bare)?;
        let (key, how) = (key.clone(), how.clone());
        blocking(move || {
            let what = path.display().to_string();
            let err = |e| OriginError::io(&what, e);
            if marker {
                fs::create_dir_all(&path).map_err(err)?;
                let mut m = meta_of(key.as_bytes(), &fs::metadata(&path).map_err(err)?);
                m.size = 0;
                return Ok(m);
            }
            let parent = path.parent().unwrap_or(Path::new("/"));
            fs::create_dir_all(parent).map_err(err)?;
            // Of one writer's puts of one key always the same, so that what a killed
            // process left is used again.
            let own = how.token.as_deref().and_then(|t| t.split('-').next());
            let number = match own {
                Some(o) => xxh3_64(&[key.as_bytes(), o.as_bytes()].concat()),
                None => rand::random(),
            };
            let temp = parent.join(format!("{TEMP_PREFIX}{number:016x}"));
            let write = || -> std::io::Result<()> {
                match &body {
                    PutBody::Bytes(b) => fs::write(&temp, b)?,
                    PutBody::File { path: from, len } => {
                        let mut out = File::create(&temp)?;
                        std::io::copy(&mut File::open(from)?.take(*len), &mut out)?;
                    }
                }
                if let Ok(old) = fs::metadata(&path) {
                    fs::set_permissions(&temp, old.permissions())?;
                }
                if let Some(t) = &how.token {
                    // Not every file system has them: then equal bytes tell.
                    let flags = rustix::fs::XattrFlags::empty();
                    let _ = rustix::fs::setxattr(&temp, TOKEN_NAME, t.as_bytes(), flags);
                }
                set_attributes(&temp, &how.attributes)?;
                File::open(&temp)?.sync_all()?;
                put_in_place(&temp, &path, &how.condition)?;
                File::open(parent)?.sync_all()
            };
            if let Err(e) = write() {
                let _ = fs::remove_file(&temp);
                if e.kind() != std::io::ErrorKind::AlreadyExists {
                    return Err(err(e));
                }
                // In the way is what an earlier try of this put left, or
                // something else.
                if how.token.is_none() || !holds(&path, &body).unwrap_or(false) {
                    return Err(OriginError::Changed { what });
                }
            }
            Ok(meta_of(key.as_bytes(), &fs::symlink_metadata(&path).map_err(err)?))
        })
        .await
    }

    async fn delete(&self, key: &Key) -> Result<(), OriginError> {
        let marker = key.as_bytes().last() == Some(&b'/');
        let path = self.path(key.as_bytes().strip_suffix(b"/").unwrap_or(key.as_bytes()))?;
        blocking(move || {
            let r = if marker { fs::remove_dir(&path) } else { fs::remove_file(&path) };
            match r.map_err(|e| OriginError::io(path.display().to_string(), e)) {
                Ok(()) | Err(OriginError::NotFound { .. }) => Ok(()),
                Err(e) => Err(e),
            }
        })
        .await
    }

    async fn copy(
        &self,
        from: &ObjectMeta,
        to: &Key,
        attributes: &Attributes,
    ) -> Result<ObjectMeta, OriginError> {
        let path = self.path(from.key.as_bytes())?;
        if from.key == *to {
            let (key, attributes) = (to.clone(), *attributes);
            return blocking(move || {
                let what = path.display().to_string();
                let changed = || -> std::io::Result<ObjectMeta> {
                    set_attributes(&path, &attributes)?;
                    Ok(meta_of(key.as_bytes(), &fs::symlink_metadata(&path)?))
                };
                changed().map_err(|e| OriginError::io(&what, e))
            })
            .await;
        }
        let how = PutOptions { attributes: *attributes, ..PutOptions::default() };
        self.put(to, PutBody::File { path, len: from.size }, &how).await
    }

    async fn owner(&self, key: &Key) -> Result<(ObjectMeta, Option<String>), OriginError> {
        let meta = self.head(key).await?;
        let path = self.path(key.as_bytes())?;
        let token = blocking(move || {
            let mut buf = [0; 256];
            let read = rustix::fs::getxattr(&path, TOKEN_NAME, &mut buf[..]);
            Ok(read.ok().and_then(|n| String::from_utf8(buf[..n].to_vec()).ok()))
        });
        Ok((meta, token.await?))
    }

    async fn rename(&self, from: &Key, to: &Key) -> Result<ObjectMeta, OriginError> {
        let (old, new) = (self.path(from.as_bytes())?, self.path(to.as_bytes())?);
        let to = to.clone();
        blocking(move || {
            let what = old.display().to_string();
            let renamed = || -> std::io::Result<ObjectMeta> {
                fs::rename(&old, &new)?;
                File::open(new.parent().unwrap_or(Path::new("/")))?.sync_all()?;
                Ok(meta_of(to.as_bytes(), &fs::symlink_metadata(&new)?))
            };
            renamed().map_err(|e| OriginError::io(&what, e))
        })
        .await
    }

    fn local_path(&self, key: &Key) -> Option<PathBuf> {
        self.path(key.as_bytes()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::origin::{collect, conformance};

    #[tokio::test]
    async fn conforms() {
        let dir = tempfile::tempdir().expect("tempdir");
        let o = PosixOrigin::new(dir.path()).expect("origin");
        conformance::run_on(
            Arc::new(o),
            conformance::Traits { directories: true, ..Default::default() },
        )
        .await;
    }

    #[tokio::test]
    async fn symlinks_and_names_that_are_not_utf8_are_listed() {
        let dir = tempfile::tempdir().expect("tempdir");
        std::os::unix::fs::symlink("there", dir.path().join("link")).expect("symlink");
        fs::write(dir.path().join(OsStr::from_bytes(b"\xff\xfe")), "x").expect("write");
        let o = PosixOrigin::new(dir.path()).expect("origin");
        let page =
            o.list(&ListRequest { delimited: true, ..ListRequest::default() }).await.expect("list");
        let keys: Vec<_> = page.objects.iter().map(|m| m.key.as_bytes().to_vec()).collect();
        assert_eq!(keys, [b"link".to_vec(), b"\xff\xfe".to_vec()]);
        assert_eq!(page.objects[0].kind, ObjectKind::Symlink);
        let target = collect(o.get(&page.objects[0], 0..5).await.expect("get")).await;
        assert_eq!(target.expect("target"), "there");
    }

    /// C7 for a directory origin: a file that shrinks while it is streamed.
    #[tokio::test]
    async fn c7_a_file_that_shrinks_while_streamed_is_changed() {
        let dir = tempfile::tempdir().expect("tempdir");
        fs::write(dir.path().join("f"), vec![1u8; 3 << 20]).expect("write");
        let o = PosixOrigin::new(dir.path()).expect("origin");
        let meta = o.head(&"f".into()).await.expect("head");
        let mut body = o.get(&meta, 0..3 << 20).await.expect("get");
        assert!(body.stream.next().await.is_some_and(|b| b.is_ok()));
        File::options()
            .write(true)
            .open(dir.path().join("f"))
            .expect("open")
            .set_len(10)
            .expect("cut");
        let e = body.stream.next().await.expect("item").expect_err("changed");
        assert!(matches!(e, OriginError::Changed { .. }), "{e}");
    }
}

//! An origin in memory: the reference that the conformance suite is held
//! against, and the store of tests that need none.

use std::collections::BTreeMap;
use std::ops::{Bound, Range};
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream};
use parking_lot::RwLock;

use super::{
    Attributes, Condition, ListPage, ListRequest, ObjectBody, Origin, OriginError, PutBody,
    PutOptions,
};
use crate::object::{Key, ObjectKind, ObjectMeta, Version};

const PAGE_KEYS: u32 = 1000;
/// Bodies arrive in pieces, as from a network.
const CHUNK_BYTES: usize = 64 << 10;

struct Entry {
    data: Bytes,
    version: Version,
    mtime_ns: i64,
    token: Option<String>,
}

/// Objects in a map.
pub struct MemoryOrigin {
    name: String,
    objects: RwLock<BTreeMap<Vec<u8>, Entry>>,
    clock: AtomicU64,
    gets: AtomicU64,
}

impl MemoryOrigin {
    /// An empty origin with this name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            objects: RwLock::default(),
            clock: AtomicU64::new(1),
            gets: AtomicU64::new(0),
        }
    }

    /// How many GETs were served.
    #[must_use]
    pub fn gets(&self) -> u64 {
        self.gets.load(Ordering::Relaxed)
    }

    fn meta(key: &[u8], e: &Entry) -> ObjectMeta {
        ObjectMeta {
            key: key.into(),
            size: e.data.len() as u64,
            mtime_ns: e.mtime_ns,
            version: e.version.clone(),
            kind: ObjectKind::File,
            mode: None,
        }
    }

    fn insert(&self, key: &Key, data: Bytes, token: Option<String>) -> ObjectMeta {
        let tick = self.clock.fetch_add(1, Ordering::Relaxed);
        let e = Entry {
            data,
            version: format!("v{tick}").into(),
            mtime_ns: tick as i64 * 1_000_000_000,
            token,
        };
        let meta = Self::meta(key.as_bytes(), &e);
        self.objects.write().insert(key.as_bytes().to_vec(), e);
        meta
    }

    fn not_found(&self, key: &Key) -> OriginError {
        OriginError::NotFound { what: format!("{}{key}", self.name) }
    }
}

#[async_trait]
impl Origin for MemoryOrigin {
    fn name(&self) -> &str {
        &self.name
    }

    async fn list(&self, r: &ListRequest) -> Result<ListPage, OriginError> {
        let max = if r.max_keys == 0 { PAGE_KEYS } else { r.max_keys } as usize;
        let after = match &r.token {
            Some(t) => Some(t.as_bytes().to_vec()),
            None => r.start_after.as_ref().map(|k| k.as_bytes().to_vec()),
        };
        let objects = self.objects.read();
        let from = match &after {
            Some(a) if *a >= r.prefix => Bound::Excluded(a.clone()),
            _ => Bound::Included(r.prefix.clone()),
        };
        let mut page = ListPage::default();
        let mut last: Option<Vec<u8>> = None;
        for (k, e) in objects.range((from, Bound::Unbounded)) {
            if !k.starts_with(&r.prefix) {
                break;
            }
            let slash = k[r.prefix.len()..].iter().position(|b| *b == b'/');
            let folded = match slash {
                Some(i) if r.delimited => Some(&k[..=r.prefix.len() + i]),
                _ => None,
            };
            if let Some(p) = folded
                && (page.prefixes.last().is_some_and(|l| l.as_bytes() == p)
                    || after.as_ref().is_some_and(|a| a.starts_with(p)))
            {
                continue;
            }
            if page.objects.len() + page.prefixes.len() == max {
                page.next = last.map(|l| String::from_utf8_lossy(&l).into_owned());
                break;
            }
            match folded {
                Some(p) => {
                    page.prefixes.push(p.into());
                    last = Some(p.to_vec());
                }
                None => {
                    page.objects.push(Self::meta(k, e));
                    last = Some(k.clone());
                }
            }
        }
        Ok(page)
    }

    async fn head(&self, key: &Key) -> Result<ObjectMeta, OriginError> {
        let objects = self.objects.read();
        let e = objects.get(key.as_bytes()).ok_or_else(|| self.not_found(key))?;
        Ok(Self::meta(key.as_bytes(), e))
    }

    async fn get(&self, meta: &ObjectMeta, range: Range<u64>) -> Result<ObjectBody, OriginError> {
        self.gets.fetch_add(1, Ordering::Relaxed);
        let objects = self.objects.read();
        let e = objects.get(meta.key.as_bytes()).ok_or_else(|| self.not_found(&meta.key))?;
        let what = format!("{}{}", self.name, meta.key);
        if e.version != meta.version {
            return Err(OriginError::Changed { what });
        }
        let size = e.data.len() as u64;
        if range.is_empty() || range.end > size {
            return Err(OriginError::Invalid { what, detail: format!("no bytes {range:?}") });
        }
        let mut rest = e.data.slice(range.start as usize..range.end as usize);
        let mut chunks = Vec::new();
        while !rest.is_empty() {
            chunks.push(Ok(rest.split_to(rest.len().min(CHUNK_BYTES))));
        }
        Ok(ObjectBody { version: e.version.clone(), size, stream: stream::iter(chunks).boxed() })
    }

    async fn put(
        &self,
        key: &Key,
        body: PutBody,
        how: &PutOptions,
    ) -> Result<ObjectMeta, OriginError> {
        let data = match body {
            PutBody::Bytes(b) => b,
            PutBody::File { path, len } => {
                let what = path.display().to_string();
                let mut data =
                    tokio::fs::read(&path).await.map_err(|e| OriginError::io(&what, e))?;
                data.truncate(len as usize);
                data.into()
            }
        };
        let what = format!("{}{key}", self.name);
        {
            let objects = self.objects.read();
            let old = objects.get(key.as_bytes());
            let holds = match (&how.condition, old) {
                (Condition::Any, _) | (Condition::Absent, None) => true,
                (Condition::Version(v), Some(o)) => o.version == *v,
                (Condition::Absent, Some(_)) | (Condition::Version(_), None) => false,
            };
            if !holds {
                let own = old.filter(|o| how.token.is_some() && o.token == how.token);
                return match own {
                    Some(o) => Ok(Self::meta(key.as_bytes(), o)),
                    None => Err(OriginError::Changed { what }),
                };
            }
        }
        Ok(self.insert(key, data, how.token.clone()))
    }

    async fn delete(&self, key: &Key) -> Result<(), OriginError> {
        self.objects.write().remove(key.as_bytes());
        Ok(())
    }

    async fn copy(
        &self,
        from: &ObjectMeta,
        to: &Key,
        _attributes: &Attributes,
    ) -> Result<ObjectMeta, OriginError> {
        let data = {
            let objects = self.objects.read();
            objects
                .get(from.key.as_bytes())
                .map(|e| e.data.clone())
                .ok_or_else(|| self.not_found(&from.key))?
        };
        Ok(self.insert(to, data, None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::origin::conformance;
    use std::sync::Arc;

    #[tokio::test]
    async fn conforms() {
        conformance::run(Arc::new(MemoryOrigin::new("memory://t/"))).await;
    }
}

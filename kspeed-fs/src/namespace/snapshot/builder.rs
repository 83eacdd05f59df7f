//! Building an index by parallel listings, and asking whether one is stale.
//!
//! The prefix is split at its directories, from the top, until there are enough
//! parts to list side by side; each part's listing goes to a run file of its own
//! as it arrives, and the runs, which are disjoint ranges of keys, are joined in
//! order. Memory does not grow with the number of keys.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use futures::{StreamExt, TryStreamExt, stream};
use kspeed_cache::ObjectMeta;
use kspeed_cache::origin::{ListRequest, Origin, OriginError};

use super::format::{SnapshotBuilder, SnapshotError, SnapshotIndex};

/// Listings side by side: more does not help below 1,000 requests/s.
const PARALLEL_LISTINGS: usize = 32;
/// Split until there are so many parts, or no more directories.
const ENOUGH_PARTS: usize = 64;
/// Directories split one level further at the most so often.
const MAX_SPLITS: usize = 256;
/// Places in the index that the staleness check compares with the origin; each
/// costs one listing of [`SAMPLE_KEYS`].
const SAMPLES: u64 = 16;
const SAMPLE_KEYS: u32 = 250;

enum Part {
    /// An object listed while splitting.
    Object(ObjectMeta),
    /// A prefix to list flat.
    Prefix,
}

async fn pages(
    origin: &dyn Origin,
    mut request: ListRequest,
    mut each: impl FnMut(Vec<ObjectMeta>, Vec<kspeed_cache::Key>) -> Result<(), SnapshotError>,
) -> Result<(), SnapshotError> {
    loop {
        let page = origin.list(&request).await?;
        each(page.objects, page.prefixes)?;
        match page.next {
            Some(t) => request.token = Some(t),
            None => return Ok(()),
        }
    }
}

/// Splits the prefix into parts, by key: objects, and prefixes to be listed flat.
async fn split(origin: &dyn Origin) -> Result<BTreeMap<Vec<u8>, Part>, SnapshotError> {
    let mut parts = BTreeMap::from([(Vec::new(), Part::Prefix)]);
    for _ in 0..MAX_SPLITS {
        let prefixes = parts.values().filter(|p| matches!(p, Part::Prefix)).count();
        if prefixes >= ENOUGH_PARTS {
            break;
        }
        // The shallowest first: they are likely the largest.
        let next = parts
            .iter()
            .filter(|(_, p)| matches!(p, Part::Prefix))
            .map(|(k, _)| (k.iter().filter(|b| **b == b'/').count(), k.clone()))
            .min();
        let Some((_, prefix)) = next else { break };
        let request =
            ListRequest { prefix: prefix.clone(), delimited: true, ..ListRequest::default() };
        let mut found = Vec::new();
        let mut below = 0usize;
        pages(origin, request, |objects, prefixes| {
            below += prefixes.len();
            found.extend(objects.into_iter().map(|m| (m.key.as_bytes().to_vec(), Part::Object(m))));
            found.extend(prefixes.into_iter().map(|p| (p.as_bytes().to_vec(), Part::Prefix)));
            Ok(())
        })
        .await?;
        parts.remove(&prefix);
        // A marker has its prefix's own name: the prefix's listing has it.
        for (k, p) in found {
            if k != prefix || matches!(p, Part::Object(_)) {
                parts.entry(k).or_insert(p);
            }
        }
        if below == 0 && !parts.values().any(|p| matches!(p, Part::Prefix)) {
            break;
        }
    }
    Ok(parts)
}

/// Lists everything below the origin's prefix into an index at `path`.
///
/// # Errors
/// The origin or the disk failed.
pub async fn build(
    origin: &Arc<dyn Origin>,
    path: &Path,
    progress: &(dyn Fn(u64) + Send + Sync),
) -> Result<SnapshotIndex, SnapshotError> {
    // From before the first listing on: what changes while we list is newer.
    let built_ns = SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX));
    let parts = split(&**origin).await?;
    let total = std::sync::atomic::AtomicU64::new(0);
    let runs: Vec<(usize, Vec<u8>)> = parts
        .iter()
        .filter(|(_, p)| matches!(p, Part::Prefix))
        .map(|(k, _)| k.clone())
        .enumerate()
        .collect();
    let listed: BTreeMap<Vec<u8>, SnapshotIndex> = stream::iter(runs)
        .map(|(n, prefix)| {
            let (origin, total) = (origin.clone(), &total);
            let run = path.with_extension(format!("run{n}"));
            async move {
                let mut b = SnapshotBuilder::new(&run)?;
                let request = ListRequest { prefix: prefix.clone(), ..ListRequest::default() };
                pages(&*origin, request, |objects, _| {
                    for m in &objects {
                        b.push(m)?;
                    }
                    let n = objects.len() as u64;
                    progress(total.fetch_add(n, std::sync::atomic::Ordering::Relaxed) + n);
                    Ok(())
                })
                .await?;
                let index = b.finish("run", built_ns);
                // Mapped already: the name is not needed any more.
                let _ = std::fs::remove_file(&run);
                Ok::<_, SnapshotError>((prefix, index?))
            }
        })
        .buffer_unordered(PARALLEL_LISTINGS)
        .try_collect()
        .await?;
    let mut all = SnapshotBuilder::new(path)?;
    for (key, part) in &parts {
        match part {
            Part::Object(m) => all.push(m)?,
            Part::Prefix => {
                let Some(run) = listed.get(key) else { continue };
                let mut c = run.from(0);
                while let Some(raw) = c.advance() {
                    all.push(&c.meta(&raw))?;
                }
            }
        }
    }
    all.finish(origin.name(), built_ns)
}

/// Compares samples of an index with the origin: places spread over it and its
/// end. Finds any change in what it looks at, and misses what lies between;
/// reads of a changed object fail with ESTALE in any case, so a stale index
/// shows old names but never wrong bytes.
///
/// # Errors
/// The origin failed.
pub async fn is_stale(
    origin: &Arc<dyn Origin>,
    index: &SnapshotIndex,
) -> Result<bool, OriginError> {
    let n = index.len();
    let mut starts: Vec<u64> = (0..SAMPLES).map(|i| n * i / SAMPLES).collect();
    starts.push(n.saturating_sub(u64::from(SAMPLE_KEYS) / 2));
    starts.dedup();
    let answers = stream::iter(starts).map(|start| async move {
        let after = match start.checked_sub(1) {
            None => None,
            Some(before) => {
                let mut c = index.from(before);
                c.advance();
                Some(c.key().into())
            }
        };
        let request =
            ListRequest { start_after: after, max_keys: SAMPLE_KEYS, ..ListRequest::default() };
        let page = origin.list(&request).await?;
        let mut c = index.from(start);
        for m in &page.objects {
            if !crate::namespace::names::is_path(m.key.as_bytes()) {
                continue;
            }
            let same = c.advance().is_some_and(|raw| {
                c.key() == m.key.as_bytes() && raw.version == m.version && raw.size == m.size
            });
            if !same {
                return Ok(true);
            }
        }
        // The origin has no more: nor may the index.
        Ok(page.next.is_none() && c.advance().is_some())
    });
    let answers: Vec<bool> = answers.buffer_unordered(8).try_collect().await?;
    Ok(answers.into_iter().any(|stale| stale))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use kspeed_cache::origin::{MemoryOrigin, PutBody, PutOptions};

    async fn origin(keys: impl Iterator<Item = String>) -> (Arc<MemoryOrigin>, Arc<dyn Origin>) {
        let o = Arc::new(MemoryOrigin::new("memory://t/"));
        for k in keys {
            o.put(&k.into(), PutBody::Bytes(Bytes::from_static(b"x")), &PutOptions::default())
                .await
                .expect("put");
        }
        (o.clone(), o)
    }

    #[tokio::test]
    async fn a_parallel_build_has_every_key_once_in_order() {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut keys: Vec<String> = Vec::new();
        for a in 0..10 {
            for b in 0..30 {
                for c in 0..7 {
                    keys.push(format!("a{a}/b{b}/c{c}"));
                }
            }
            keys.push(format!("a{a}.txt"));
            keys.push(format!("a{a}/"));
        }
        keys.push("top".into());
        let (_, o) = origin(keys.clone().into_iter()).await;
        let s = build(&o, &dir.path().join("s.idx"), &|_| {}).await.expect("build");
        keys.sort();
        let mut c = s.from(0);
        for k in &keys {
            assert!(c.advance().is_some());
            assert_eq!(c.key(), k.as_bytes());
        }
        assert!(c.advance().is_none());
        let files = std::fs::read_dir(dir.path()).expect("dir").count();
        assert_eq!(files, 1, "no run files are left");
    }

    #[tokio::test]
    async fn an_empty_prefix_is_an_empty_index() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (_, o) = origin(std::iter::empty()).await;
        let s = build(&o, &dir.path().join("s.idx"), &|_| {}).await.expect("build");
        assert!(s.is_empty());
        assert_eq!(s.lower_bound(b"x"), 0);
        assert!(!is_stale(&o, &s).await.expect("asked"));
    }

    #[tokio::test]
    async fn staleness_is_found_by_samples() {
        let dir = tempfile::tempdir().expect("tempdir");
        let (m, o) = origin((0..3000).map(|i| format!("k{i:05}"))).await;
        let s = build(&o, &dir.path().join("s.idx"), &|_| {}).await.expect("build");
        assert!(!is_stale(&o, &s).await.expect("asked"));
        let put = async |k: &str| {
            m.put(&k.into(), PutBody::Bytes(Bytes::from_static(b"y")), &PutOptions::default())
                .await
                .map(drop)
        };
        put("k02999").await.expect("put");
        assert!(is_stale(&o, &s).await.expect("asked"), "a changed object at the end");
        let s = build(&o, &dir.path().join("s.idx"), &|_| {}).await.expect("build");
        put("z").await.expect("put");
        assert!(is_stale(&o, &s).await.expect("asked"), "an object more");
        m.delete(&"z".into()).await.expect("delete");
        assert!(!is_stale(&o, &s).await.expect("asked"));
        m.delete(&"k00000".into()).await.expect("delete");
        assert!(is_stale(&o, &s).await.expect("asked"), "an object less");
    }
}

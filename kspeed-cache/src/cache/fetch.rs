//! Bringing blocks in: from a former process's file if its checksum holds,
//! else from the origin, an extent of adjacent blocks a request.
//!
//! Each block's flight ends as soon as its own bytes are stored, while the rest
//! of the extent still streams.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::StreamExt;
use tokio::sync::OwnedSemaphorePermit;

use super::object::CachedObject;
use super::{CacheError, CacheStats};
use crate::flight::Lead;
use crate::object::ObjectId;
use crate::origin::OriginError;
use crate::permits::{Permit, Priority};
use crate::pool::{Buffer, Pool};
use crate::tier::LargeFile;

/// Adjacent blocks fetched by one request, in bytes: at 100 MB/s a connection
/// and 20 ms to the first byte, 8 MiB spend four fifths of the time moving
/// bytes; more would make the memory in flight coarse.
pub const EXTENT_BYTES: u64 = 8 << 20;

/// What a flight brings: a block. It is in the RAM tier too, and on its way to
/// the disk.
#[derive(Clone, Debug)]
pub struct Ready(pub Bytes);

pub(super) type BlockLead = Lead<(ObjectId, u32), Ready, CacheError>;

/// Starts tasks for the claimed blocks. Prefetch brings its permit along.
pub(super) fn start(
    object: &Arc<CachedObject>,
    leads: Vec<(u32, BlockLead)>,
    priority: Priority,
    mut prepaid: Option<(Permit, OwnedSemaphorePermit)>,
) {
    let inner = &object.cache.0;
    let per_extent = (EXTENT_BYTES / object.blocks.block_bytes).max(1) as usize;
    let mut run: Vec<(u32, BlockLead)> = Vec::new();
    let mut spawn = |run: Vec<(u32, BlockLead)>| {
        // In order, and before the tasks race: so that a stream lies in order on
        // the disk too.
        if let (Some((first, _)), Some((last, _))) = (run.first(), run.last())
            && first < last
            && let Some(file) = object.file(true)
        {
            file.reserve(*first..*last + 1);
        }
        let object = object.clone();
        let paid = prepaid.take();
        let stop = inner.stop.clone();
        inner.tasks.spawn_on(
            async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = bring(object, run, priority, paid) => {}
                }
            },
            &inner.runtime,
        );
    };
    for (i, lead) in leads {
        let adjacent = run.last().is_none_or(|(last, _)| last + 1 == i);
        if !adjacent || run.len() == per_extent {
            spawn(std::mem::take(&mut run));
        }
        run.push((i, lead));
    }
    if !run.is_empty() {
        spawn(run);
    }
}

async fn bring(
    object: Arc<CachedObject>,
    run: Vec<(u32, BlockLead)>,
    priority: Priority,
    prepaid: Option<(Permit, OwnedSemaphorePermit)>,
) {
    // Another flight may have brought a block since its claimant looked.
    let run = run
        .into_iter()
        .filter_map(|(i, lead)| match object.at_hand(i) {
            Some(Some(b)) => {
                lead.finish(Ok(Ready(b)));
                None
            }
            _ => Some((i, lead)),
        })
        .collect();
    let run = match object.file(false) {
        Some(f) if !object.is_small() => verify(&object, &f, run).await,
        _ => run,
    };
    // Blocks that were only unchecked leave gaps: each part is an extent.
    let mut parts: Vec<Vec<(u32, BlockLead)>> = Vec::new();
    for (i, lead) in run {
        match parts.last_mut() {
            Some(p) if p.last().is_some_and(|(l, _)| l + 1 == i) => p.push((i, lead)),
            _ => parts.push(vec![(i, lead)]),
        }
    }
    let (mut permit, _slot) = match prepaid {
        Some((p, s)) => (Some(p), Some(s)),
        None => (None, None),
    };
    for part in parts {
        let bytes: u64 = part.iter().map(|(i, _)| object.blocks.len(*i) as u64).sum();
        let permit = match permit.as_mut() {
            Some(p) => p.split(bytes),
            None => object.cache.0.permits.acquire(bytes, priority).await,
        };
        fetch(&object, part, priority, permit).await;
    }
}

/// Ends the flights of those blocks that a former process stored well.
async fn verify(
    object: &Arc<CachedObject>,
    file: &Arc<LargeFile>,
    run: Vec<(u32, BlockLead)>,
) -> Vec<(u32, BlockLead)> {
    let mut missing = Vec::with_capacity(run.len());
    for (i, lead) in run {
        if file.is_unchecked(i)
            && let Some(disk) = object.cache.0.disk(object.id)
        {
            match disk.verify_block(file, i).await {
                Ok(Some(data)) => {
                    lead.finish(Ok(Ready(data)));
                    continue;
                }
                Ok(None) => {
                    CacheStats::add(&object.cache.0.stats.bad_blocks, 1);
                    tracing::warn!(key = %object.meta.key, block = i, "a cached block has a bad checksum: it is fetched again");
                }
                Err(_) => object.drop_file(),
            }
        }
        missing.push((i, lead));
    }
    missing
}

async fn fetch(
    object: &Arc<CachedObject>,
    part: Vec<(u32, BlockLead)>,
    priority: Priority,
    mut permit: Permit,
) {
    let (Some(first), Some(last)) = (part.first().map(|p| p.0), part.last().map(|p| p.0)) else {
        return;
    };
    let range = object.blocks.range(first).start..object.blocks.range(last).end;
    let stats = &object.cache.0.stats;
    let mut leads = part.into_iter();
    let result = stream(object, range, priority, &mut |i, data| {
        let Some((n, lead)) = leads.next() else { return };
        debug_assert_eq!(n, i);
        let share = permit.split(data.len() as u64);
        store(object, i, data, share, lead);
    })
    .await;
    if let Err(e) = result {
        CacheStats::add(&stats.fetch_errors, 1);
        tracing::debug!(key = %object.meta.key, error = %e, "fetch failed");
        let e = CacheError::from(e);
        for (_, lead) in leads {
            lead.finish(Err(e.clone()));
        }
    }
}

/// Streams a range and hands on each block as it is whole.
async fn stream(
    object: &Arc<CachedObject>,
    range: Range<u64>,
    priority: Priority,
    on_block: &mut (dyn FnMut(u32, Bytes) + Send),
) -> Result<(), OriginError> {
    let stats = &object.cache.0.stats;
    CacheStats::add(&stats.origin_gets, 1);
    let asked = Instant::now();
    let mut first_byte = None;
    let total = range.end - range.start;
    let pool = object.cache.0.pool.clone();
    let mut body = object.origin.get(&object.meta, range.clone()).await?;
    let mut block = (range.start / object.blocks.block_bytes) as u32;
    let mut buffer = Filling::new(object, block, &pool)?;
    let mut got = 0u64;
    while got < total {
        let Some(piece) = body.stream.next().await else {
            return Err(OriginError::Corrupt {
                what: object.meta.key.to_string(),
                detail: format!("the body ended {} bytes early", total - got),
            });
        };
        let mut piece = piece?;
        first_byte.get_or_insert_with(Instant::now);
        got += piece.len() as u64;
        CacheStats::add(&stats.origin_bytes, piece.len() as u64);
        while !piece.is_empty() && got <= total {
            buffer.take_from(&mut piece);
            if buffer.is_full() {
                let last = block;
                block += 1;
                let more = block < object.blocks.count() && (got < total || !piece.is_empty());
                let next = if more { Some(Filling::new(object, block, &pool)?) } else { None };
                on_block(last, buffer.finish());
                match next {
                    Some(n) => buffer = n,
                    None => return done(object, asked, first_byte, total, priority),
                }
            }
        }
    }
    done(object, asked, first_byte, total, priority)
}

fn done(
    object: &CachedObject,
    asked: Instant,
    first_byte: Option<Instant>,
    total: u64,
    priority: Priority,
) -> Result<(), OriginError> {
    let stats = &object.cache.0.stats;
    if priority == Priority::Prefetch {
        CacheStats::add(&stats.prefetched_bytes, total);
    }
    if let Some(f) = first_byte {
        stats.learn(f - asked, total, f.elapsed());
    }
    Ok(())
}

/// A block on its way in: a buffer of the pool, or, for a small object, one of
/// its own size.
enum Filling {
    Pooled(Buffer, usize),
    Own(Vec<u8>, usize),
}

impl Filling {
    fn new(object: &CachedObject, block: u32, pool: &Pool) -> Result<Self, OriginError> {
        let want = object.blocks.len(block);
        if object.is_small() {
            return Ok(Self::Own(Vec::with_capacity(want), want));
        }
        let buffer = pool.take().map_err(|e| OriginError::io("memory for a block", e))?;
        Ok(Self::Pooled(buffer, want))
    }

    fn take_from(&mut self, piece: &mut Bytes) {
        let n = match self {
            Self::Pooled(b, want) => b.extend(piece, *want),
            Self::Own(v, want) => {
                let n = piece.len().min(*want - v.len());
                v.extend_from_slice(&piece[..n]);
                n
            }
        };
        bytes::Buf::advance(piece, n);
    }

    fn is_full(&self) -> bool {
        match self {
            Self::Pooled(b, want) => b.len() == *want,
            Self::Own(v, want) => v.len() == *want,
        }
    }

    fn finish(self) -> Bytes {
        match self {
            Self::Pooled(b, _) => b.freeze(),
            Self::Own(v, _) => v.into(),
        }
    }
}

/// Hands a block to those who wait for it, and puts it where it is kept.
fn store(object: &Arc<CachedObject>, i: u32, data: Bytes, permit: Permit, lead: BlockLead) {
    let inner = &object.cache.0;
    // Readers come soon: from here they are served without the disk.
    inner.ram.put(object.id, i, data.clone());
    if object.is_small() {
        inner.packer.put(object, &data, permit);
        lead.finish(Ok(Ready(data)));
        return;
    }
    let Some(file) = object.file(true) else {
        lead.finish(Ok(Ready(data)));
        return;
    };
    // Found here until it is on disk, even if the RAM tier drops it before.
    object.writes.send_modify(|w| drop(w.insert(i, data.clone())));
    lead.finish(Ok(Ready(data.clone())));
    let object = object.clone();
    // Written beside the stream, which goes on meanwhile; the permit bounds how
    // far ahead it gets.
    let task = async move {
        let inner = &object.cache.0;
        if let Some(disk) = inner.disk(object.id)
            && disk.put_block(&file, i, data).await.is_err()
        {
            CacheStats::add(&inner.stats.disk_write_errors, 1);
            if disk.is_out_of_service() {
                object.drop_file();
            }
        }
        object.writes.send_modify(|w| drop(w.remove(&i)));
        drop(permit);
    };
    inner.tasks.spawn_on(task, &inner.runtime);
}

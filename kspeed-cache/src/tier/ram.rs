//! Blocks in this process's memory: small objects just fetched, and all blocks
//! while no cache disk takes them. (Large objects on disk are in the page
//! cache already; a second copy here would only cost memory.)

use bytes::Bytes;

use crate::object::ObjectId;

/// Bytes that an entry costs beside its data: moka's node, key and `Bytes`.
const ENTRY_OVERHEAD_BYTES: u32 = 160;

pub(crate) struct RamTier(moka::sync::Cache<(ObjectId, u32), Bytes>);

impl RamTier {
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        let cache = moka::sync::Cache::builder()
            .max_capacity(capacity_bytes)
            .weigher(|_, b: &Bytes| {
                u32::try_from(b.len()).unwrap_or(u32::MAX).saturating_add(ENTRY_OVERHEAD_BYTES)
            })
            .build();
        Self(cache)
    }

    pub(crate) fn get(&self, id: ObjectId, block: u32) -> Option<Bytes> {
        self.0.get(&(id, block))
    }

    pub(crate) fn put(&self, id: ObjectId, block: u32, data: Bytes) {
        self.0.insert((id, block), data);
    }

    pub(crate) fn remove(&self, id: ObjectId, blocks: u32) {
        for b in 0..blocks {
            self.0.invalidate(&(id, b));
        }
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.0.weighted_size()
    }
}

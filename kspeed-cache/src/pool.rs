//! Buffers of blocks, used again: a fresh buffer costs a page fault and a cleared
//! page for every 4 KiB, as much as receiving the bytes.

use std::sync::Arc;

use bytes::Bytes;
use memmap2::MmapMut;
use parking_lot::Mutex;

/// A pool of buffers of one size. Clones share it.
#[derive(Clone)]
pub(crate) struct Pool(Arc<Inner>);

struct Inner {
    buffer_bytes: usize,
    max_idle: usize,
    idle: Mutex<Vec<MmapMut>>,
}

/// A buffer that returns to its pool.
pub(crate) struct Buffer {
    memory: Option<MmapMut>,
    len: usize,
    pool: Pool,
}

impl Pool {
    /// Of buffers of `buffer_bytes`, of which at most `max_idle_bytes` lie idle.
    pub(crate) fn new(buffer_bytes: u64, max_idle_bytes: u64) -> Self {
        Self(Arc::new(Inner {
            buffer_bytes: buffer_bytes as usize,
            max_idle: (max_idle_bytes / buffer_bytes.max(1)) as usize,
            idle: Mutex::default(),
        }))
    }

    /// An empty buffer; none if there is no memory.
    pub(crate) fn take(&self) -> std::io::Result<Buffer> {
        let idle = self.0.idle.lock().pop();
        let memory = match idle {
            Some(m) => m,
            None => MmapMut::map_anon(self.0.buffer_bytes)?,
        };
        Ok(Buffer { memory: Some(memory), len: 0, pool: self.clone() })
    }
}

impl Buffer {
    /// Bytes in it.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Appends as much of `data` as fits up to `limit` bytes in all; how much.
    pub(crate) fn extend(&mut self, data: &[u8], limit: usize) -> usize {
        let Some(m) = &mut self.memory else { return 0 };
        let n = data.len().min(limit.min(m.len()) - self.len);
        m[self.len..self.len + n].copy_from_slice(&data[..n]);
        self.len += n;
        n
    }

    /// For readers; the memory returns when the last of them is done.
    pub(crate) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.memory.as_deref().map_or(&[], |m| &m[..self.len])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(m) = self.memory.take() {
            let mut idle = self.pool.0.idle.lock();
            if idle.len() < self.pool.0.max_idle {
                idle.push(m);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_after_its_last_reader() {
        let pool = Pool::new(8192, 8192);
        let mut b = pool.take().expect("memory");
        assert_eq!(b.extend(&[7; 5000], 6000), 5000);
        assert_eq!(b.extend(&[8; 5000], 6000), 1000);
        let bytes = b.freeze();
        let slice = bytes.slice(4999..5001);
        drop(bytes);
        assert_eq!(&slice[..], &[7, 8]);
        assert!(pool.0.idle.lock().is_empty());
        drop(slice);
        assert_eq!(pool.0.idle.lock().len(), 1);
        let again = pool.take().expect("memory");
        assert_eq!(again.len(), 0);
        assert!(pool.0.idle.lock().is_empty());
    }
}

//! Files as `Bytes` without a copy.

use std::fs::File;
use std::io;
use std::path::Path;

use bytes::Bytes;

struct Map {
    at: *mut core::ffi::c_void,
    len: usize,
}

// SAFETY: the mapping is read-only and belongs to this value alone; any thread
// may read it and any thread may unmap it.
unsafe impl Send for Map {}
// SAFETY: as above, shared reads of read-only memory.
unsafe impl Sync for Map {}

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `len` bytes are mapped at `at` until drop. Objects are
        // replaced by rename and never cut, so the file keeps its length; who
        // cuts a served file by hand gets a SIGBUS, which a test server may.
        unsafe { std::slice::from_raw_parts(self.at.cast::<u8>(), self.len) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `map`.
        let _ = unsafe { rustix::mm::munmap(self.at, self.len) };
    }
}

/// Maps a file whole.
pub(crate) fn map(path: &Path) -> io::Result<Bytes> {
    use rustix::mm::{MapFlags, ProtFlags};
    let f = File::open(path)?;
    let len = usize::try_from(f.metadata()?.len()).map_err(io::Error::other)?;
    if len == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: a fresh read-only mapping at an address that the kernel picks.
    let at = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, &f, 0)?
    };
    Ok(Bytes::from_owner(Map { at, len }))
}

//! Windows of files mapped for as long as a reply takes.
//!
//! A reply from a mapping saves the copy into a buffer of ours. The window is
//! populated first (`MADV_POPULATE_READ`, Linux 5.14), which reports a cut file
//! or a failing disk as an error here, where a later fault would be a signal.

use std::fs::File;
use std::io;
use std::ptr;

use rustix::mm::{Advice, MapFlags, ProtFlags};

struct Window {
    start: *mut core::ffi::c_void,
    len: usize,
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: `start` and `len` are of a mapping made by us, which nobody
        // else refers to: slices of it do not outlive `with_mapped`.
        let _ = unsafe { rustix::mm::munmap(self.start, self.len) };
    }
}

/// Calls `f` with the `len` bytes of `file` at `offset`.
///
/// # Errors
/// The file is shorter, or its disk fails.
pub(crate) fn with_mapped<R>(
    file: &File,
    offset: u64,
    len: usize,
    f: impl FnOnce(&[u8]) -> R,
) -> io::Result<R> {
    let page = rustix::param::page_size() as u64;
    let start = offset / page * page;
    let lead = (offset - start) as usize;
    let mapped = lead + len;
    // SAFETY: a fresh read-only mapping at an address that the kernel picks.
    let at = unsafe {
        rustix::mm::mmap(ptr::null_mut(), mapped, ProtFlags::READ, MapFlags::SHARED, file, start)?
    };
    let window = Window { start: at, len: mapped };
    // SAFETY: exactly the mapping above.
    unsafe { rustix::mm::madvise(window.start, window.len, Advice::LinuxPopulateRead) }?;
    // The last page may be there although the file ends before our last byte.
    if file.metadata()?.len() < offset + len as u64 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    // SAFETY: mapped and populated for `mapped` bytes. The bytes are those of a
    // cache file that nobody but us writes, and never where a block is
    // complete; the caller holds the file's gate against hole punching.
    let bytes = unsafe { std::slice::from_raw_parts(window.start.cast::<u8>(), mapped) };
    Ok(f(&bytes[lead..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn maps_any_offset_and_refuses_a_cut_file() {
        let f = tempfile::tempfile().expect("tempfile");
        let data: Vec<u8> = (0..20_000u32).map(|i| (i % 241) as u8).collect();
        f.write_all_at(&data, 0).expect("write");
        let got = with_mapped(&f, 4097, 10_000, <[u8]>::to_vec).expect("map");
        assert!(got == data[4097..14_097]);
        f.set_len(9000).expect("cut");
        assert!(with_mapped(&f, 4097, 10_000, <[u8]>::len).is_err());
        assert!(with_mapped(&f, 8192, 809, <[u8]>::len).is_err());
    }
}

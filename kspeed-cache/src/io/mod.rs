//! File I/O of the cache disk: io_uring where the kernel allows it, plain
//! calls on the blocking pool otherwise, behind one trait with one suite.

mod map;
mod plain;
mod uring;

use std::fs::File;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;

pub(crate) use map::with_mapped;
pub use plain::PlainIo;
pub use uring::UringIo;

/// Reads and writes of whole ranges: short ones are continued, so that a
/// result is all or an error.
pub trait FileIo: Send + Sync {
    /// `len` bytes at `offset`; `UnexpectedEof` if the file is shorter.
    fn read(
        &self,
        file: Arc<File>,
        offset: u64,
        len: usize,
    ) -> BoxFuture<'static, io::Result<Bytes>>;

    /// All of `data` at `offset`.
    fn write(
        &self,
        file: Arc<File>,
        offset: u64,
        data: Bytes,
    ) -> BoxFuture<'static, io::Result<()>>;

    /// Its name, for `kspeed doctor`.
    fn name(&self) -> &'static str;
}

/// io_uring if this kernel and its seccomp filter let us, else plain calls.
#[must_use]
pub fn best_io() -> Arc<dyn FileIo> {
    match UringIo::new() {
        Ok(u) => Arc::new(u),
        Err(e) => {
            tracing::info!(error = %e, "io_uring is not available, plain file I/O is used");
            Arc::new(PlainIo)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn suite(io: Arc<dyn FileIo>) {
        let f = Arc::new(tempfile::tempfile().expect("tempfile"));
        let data: Bytes = (0..3_000_000u32).map(|i| (i % 253) as u8).collect::<Vec<_>>().into();
        let writes: Vec<_> = (0..3usize)
            .map(|i| {
                io.write(
                    f.clone(),
                    i as u64 * 1_000_000,
                    data.slice(i * 1_000_000..(i + 1) * 1_000_000),
                )
            })
            .collect();
        for w in futures::future::join_all(writes).await {
            w.expect("write");
        }
        let reads: Vec<_> =
            (0..300usize).map(|i| io.read(f.clone(), i as u64 * 10_000, 10_000)).collect();
        for (i, r) in futures::future::join_all(reads).await.into_iter().enumerate() {
            assert!(r.expect("read") == data.slice(i * 10_000..(i + 1) * 10_000));
        }
        let e = io.read(f.clone(), 2_999_999, 2).await.expect_err("past the end");
        assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof);
        let ro = Arc::new(File::open("/dev/null").expect("open"));
        assert!(io.write(ro, 0, Bytes::from_static(b"x")).await.is_err());
        drop(io.read(f, 0, 1_000_000));
    }

    #[tokio::test]
    async fn plain_io_conforms() {
        suite(Arc::new(PlainIo)).await;
    }

    #[tokio::test]
    async fn uring_io_conforms() {
        match UringIo::new() {
            Ok(u) => suite(Arc::new(u)).await,
            Err(e) => eprintln!("skipped: no io_uring here: {e}"),
        }
    }
}

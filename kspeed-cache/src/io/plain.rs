//! File I/O by `pread` and `pwrite` on tokio's blocking pool.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;

use super::FileIo;

/// Plain calls.
pub struct PlainIo;

impl FileIo for PlainIo {
    fn read(
        &self,
        file: Arc<File>,
        offset: u64,
        len: usize,
    ) -> BoxFuture<'static, io::Result<Bytes>> {
        async move {
            tokio::task::spawn_blocking(move || {
                let mut buf = vec![0u8; len];
                file.read_exact_at(&mut buf, offset)?;
                Ok(Bytes::from(buf))
            })
            .await
            .map_err(io::Error::other)?
        }
        .boxed()
    }

    fn write(
        &self,
        file: Arc<File>,
        offset: u64,
        data: Bytes,
    ) -> BoxFuture<'static, io::Result<()>> {
        async move {
            tokio::task::spawn_blocking(move || file.write_all_at(&data, offset))
                .await
                .map_err(io::Error::other)?
        }
        .boxed()
    }

    fn name(&self) -> &'static str {
        "pread/pwrite"
    }
}

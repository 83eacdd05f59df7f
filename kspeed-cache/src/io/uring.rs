//! File I/O by io_uring (`io_uring(7)`): one thread owns one ring.
//!
//! Requests reach the thread by a channel; an eventfd, read through the ring
//! itself, wakes it. The thread owns file and buffer of each operation until
//! its completion, so a future that is dropped early leaves nothing dangling.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use bytes::Bytes;
use futures::FutureExt;
use futures::channel::oneshot;
use futures::future::BoxFuture;
use io_uring::{IoUring, opcode, types};
use rustix::event::EventfdFlags;

use super::FileIo;

/// Operations in the ring at once; more wait in the channel.
const RING_ENTRIES: u32 = 128;
/// `user_data` of the eventfd's read.
const WAKE: u64 = u64::MAX;

enum Buffer {
    Read(Vec<u8>, oneshot::Sender<io::Result<Bytes>>),
    Write(Bytes, oneshot::Sender<io::Result<()>>),
}

struct Operation {
    file: Arc<File>,
    offset: u64,
    done: usize,
    buffer: Buffer,
}

impl Operation {
    fn len(&self) -> usize {
        match &self.buffer {
            Buffer::Read(b, _) => b.len(),
            Buffer::Write(b, _) => b.len(),
        }
    }

    fn entry(&mut self, id: u64) -> io_uring::squeue::Entry {
        let fd = types::Fd(self.file.as_raw_fd());
        let at = self.offset + self.done as u64;
        let len = u32::try_from(self.len() - self.done).unwrap_or(u32::MAX);
        match &mut self.buffer {
            Buffer::Read(b, _) => {
                opcode::Read::new(fd, b[self.done..].as_mut_ptr(), len).offset(at).build()
            }
            Buffer::Write(b, _) => {
                opcode::Write::new(fd, b[self.done..].as_ptr(), len).offset(at).build()
            }
        }
        .user_data(id)
    }

    fn finish(self, result: io::Result<()>) {
        // The one who asked may have gone: nothing to tell then.
        match self.buffer {
            Buffer::Read(b, tell) => drop(tell.send(result.map(|()| Bytes::from(b)))),
            Buffer::Write(_, tell) => drop(tell.send(result)),
        }
    }
}

/// io_uring.
pub struct UringIo {
    requests: Option<Sender<Operation>>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl UringIo {
    /// Makes the ring and its thread.
    ///
    /// # Errors
    /// The kernel has no io_uring, or forbids it.
    pub fn new() -> io::Result<Self> {
        let ring = IoUring::new(RING_ENTRIES)?;
        let wake = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let (requests, inbox) = channel();
        let thread = std::thread::Builder::new().name("kspeed-uring".into()).spawn({
            let wake = wake.clone();
            move || Driver { ring, inbox, wake, running: HashMap::new(), next: 0 }.run()
        })?;
        Ok(Self { requests: Some(requests), wake, thread: Some(thread) })
    }

    fn submit(&self, op: Operation) {
        if let Some(r) = &self.requests
            && r.send(op).is_ok()
        {
            // The counter of an eventfd overflows at 2^64: cannot fail here.
            let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        }
    }
}

impl Drop for UringIo {
    fn drop(&mut self) {
        self.requests = None;
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}

impl FileIo for UringIo {
    fn read(
        &self,
        file: Arc<File>,
        offset: u64,
        len: usize,
    ) -> BoxFuture<'static, io::Result<Bytes>> {
        let (tell, wait) = oneshot::channel();
        let buffer = Buffer::Read(vec![0; len], tell);
        self.submit(Operation { file, offset, done: 0, buffer });
        async move { wait.await.unwrap_or_else(|_| Err(stopped())) }.boxed()
    }

    fn write(
        &self,
        file: Arc<File>,
        offset: u64,
        data: Bytes,
    ) -> BoxFuture<'static, io::Result<()>> {
        let (tell, wait) = oneshot::channel();
        self.submit(Operation { file, offset, done: 0, buffer: Buffer::Write(data, tell) });
        async move { wait.await.unwrap_or_else(|_| Err(stopped())) }.boxed()
    }

    fn name(&self) -> &'static str {
        "io_uring"
    }
}

fn stopped() -> io::Error {
    io::Error::other("the io_uring thread has stopped")
}

struct Driver {
    ring: IoUring,
    inbox: Receiver<Operation>,
    wake: Arc<OwnedFd>,
    running: HashMap<u64, Operation>,
    next: u64,
}

impl Driver {
    fn run(mut self) {
        let mut counter = Box::new([0u8; 8]);
        let mut armed = false;
        let mut closed = false;
        loop {
            while !closed && self.running.len() < RING_ENTRIES as usize - 1 {
                match self.inbox.try_recv() {
                    Ok(op) => self.start(op),
                    Err(std::sync::mpsc::TryRecvError::Empty) => break,
                    Err(std::sync::mpsc::TryRecvError::Disconnected) => closed = true,
                }
            }
            if closed && self.running.is_empty() {
                // The counter's box must outlive an armed read of it: the ring
                // is torn down first.
                drop(self.ring);
                drop(counter);
                return;
            }
            if !armed {
                let fd = types::Fd(self.wake.as_raw_fd());
                let read = opcode::Read::new(fd, counter.as_mut_ptr(), 8).build().user_data(WAKE);
                self.push(&read);
                armed = true;
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => continue,
                Err(e) => {
                    tracing::error!(error = %e, "io_uring failed; its operations fail");
                    for (_, op) in self.running.drain() {
                        // The kernel may still write to these buffers.
                        std::mem::forget(op);
                    }
                    return;
                }
            }
            let ended: Vec<(u64, i32)> =
                self.ring.completion().map(|c| (c.user_data(), c.result())).collect();
            for (id, result) in ended {
                if id == WAKE {
                    armed = false;
                } else {
                    self.end(id, result);
                }
            }
        }
    }

    fn start(&mut self, op: Operation) {
        if op.len() == 0 {
            op.finish(Ok(()));
            return;
        }
        let id = self.next;
        self.next = (self.next + 1) % WAKE;
        self.resume(id, op);
    }

    fn resume(&mut self, id: u64, mut op: Operation) {
        let entry = op.entry(id);
        self.running.insert(id, op);
        self.push(&entry);
    }

    fn push(&mut self, entry: &io_uring::squeue::Entry) {
        loop {
            // SAFETY: the entry's file and buffer live in `running` (or are the
            // eventfd and its boxed counter) until its completion is seen;
            // neither moves, as both are heap allocations that stay put.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            // Full: hand what is queued to the kernel.
            let _ = self.ring.submit();
        }
    }

    fn end(&mut self, id: u64, result: i32) {
        let Some(mut op) = self.running.remove(&id) else { return };
        match result {
            r if r > 0 => {
                op.done += r as usize;
                if op.done >= op.len() {
                    op.finish(Ok(()));
                } else {
                    self.resume(id, op);
                }
            }
            0 => op.finish(Err(io::ErrorKind::UnexpectedEof.into())),
            e if e == -libc::EINTR || e == -libc::EAGAIN => self.resume(id, op),
            e => op.finish(Err(io::Error::from_raw_os_error(-e))),
        }
    }
}

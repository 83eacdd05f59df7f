//! A data loader as PyTorch has it: batches are dealt out to the workers in turn,
//! each of them reads up to two ahead, and the trainer takes them in order.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use crate::Result;

/// How a trainer reads.
#[derive(Clone, Copy)]
pub struct Loader {
    pub workers: usize,
    pub batch: usize,
    /// What the trainer computes for a sample; zero: it takes what comes.
    pub compute: Duration,
    /// Tells the kernel to drop the pages of each file that was read, as one does
    /// that has no memory for them.
    pub forgetful: bool,
}

impl Loader {
    /// Reads the files in this order: seconds.
    pub fn epoch(&self, files: &[PathBuf], order: &[u32]) -> Result<f64> {
        let batches: Vec<&[u32]> = order.chunks(self.batch).collect();
        let began = Instant::now();
        std::thread::scope(|s| -> Result<()> {
            let mut queues: Vec<Receiver<std::io::Result<u64>>> = Vec::new();
            for w in 0..self.workers {
                // One batch waits here while the next is read: two ahead.
                let (done, taken) = sync_channel(1);
                queues.push(taken);
                let forgetful = self.forgetful;
                let mine: Vec<&[u32]> =
                    batches.iter().copied().skip(w).step_by(self.workers).collect();
                s.spawn(move || {
                    for batch in mine {
                        if done.send(read_batch(files, batch, forgetful)).is_err() {
                            return;
                        }
                    }
                });
            }
            let mut due = Instant::now();
            for (i, batch) in batches.iter().enumerate() {
                queues[i % self.workers].recv()??;
                due = due.max(Instant::now()) + self.compute * batch.len() as u32;
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
            Ok(())
        })?;
        Ok(began.elapsed().as_secs_f64())
    }
}

fn read_batch(files: &[PathBuf], batch: &[u32], forgetful: bool) -> std::io::Result<u64> {
    let mut buf = vec![0; 256 << 10];
    let mut n = 0;
    for s in batch {
        let mut f = File::open(&files[*s as usize])?;
        loop {
            match f.read(&mut buf)? {
                0 => break,
                k => n += k as u64,
            }
        }
        if forgetful {
            rustix::fs::fadvise(&f, 0, None, rustix::fs::Advice::DontNeed)?;
        }
    }
    Ok(n)
}

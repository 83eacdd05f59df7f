//! Joins the decisions of kspeed-prefetch with the cache: what the kernel asks
//! becomes events, actions become fetches and pushes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::StreamExt;
use kspeed_cache::CachedObject;
use kspeed_prefetch::{Action, Conditions, Event, Readahead};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::dataset::{Datasets, Parts, SAMPLE_MAX_BYTES};
use crate::fs::FileSystem;
use crate::namespace::Ino;
use crate::push::Pusher;

/// Objects up to this size are read whole: they count as files of a run.
const RUN_FILE_MAX_BYTES: u64 = 8 << 20;
/// Actions carried out at once; more are dropped, as their reader is far behind.
const MAX_ACTIONS: usize = 64;
/// Files of a run in flight.
const RUN_PARALLEL: usize = 48;

/// What `--predict` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predict {
    /// Fetch only what is asked for.
    Off,
    /// Sequential streams in files, and runs of files in directories.
    Sequential,
    /// And shuffled epochs: their order is recovered, or told.
    Auto,
}

struct Shared {
    runtime: Handle,
    tasks: TaskTracker,
    stop: CancellationToken,
    actions: AtomicUsize,
    pusher: Option<Arc<Pusher>>,
}

/// The pipeline of a mount.
pub struct Pipeline {
    predict: Predict,
    readahead: Mutex<Readahead>,
    datasets: Option<Datasets>,
    shared: Arc<Shared>,
}

impl Pipeline {
    /// With what its predictions work with.
    #[must_use]
    pub fn new(predict: Predict, parts: Parts) -> Self {
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let shared = Shared {
            runtime: parts.runtime.clone(),
            tasks: tasks.clone(),
            stop: stop.clone(),
            actions: AtomicUsize::new(0),
            pusher: parts.pusher.clone(),
        };
        Self {
            predict,
            readahead: Mutex::new(Readahead::new()),
            datasets: (predict == Predict::Auto).then(|| Datasets::new(parts, tasks, stop)),
            shared: Arc::new(shared),
        }
    }

    /// The datasets that are followed; none unless `--predict auto`.
    #[must_use]
    pub fn datasets(&self) -> Option<&Datasets> {
        self.datasets.as_ref()
    }

    /// The pusher, if there is one.
    #[must_use]
    pub fn pusher(&self) -> Option<&Arc<Pusher>> {
        self.shared.pusher.as_ref()
    }

    /// Ends all that runs; no task of the pipeline lives afterwards.
    pub async fn shutdown(&self) {
        self.shared.stop.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }

    /// A file was opened on a mount whose reads may not reach us.
    pub(crate) fn on_open(&self, ino: Ino, o: &CachedObject) {
        let size = o.meta().size;
        if let Some(d) = &self.datasets
            && size <= SAMPLE_MAX_BYTES
        {
            d.on_sample(ino, o.has(0..size));
        }
    }

    /// A read reached us; `ready`: it was answered at once.
    pub(crate) fn on_read(
        &self,
        fs: &FileSystem,
        ino: Ino,
        o: &Arc<CachedObject>,
        offset: u64,
        len: u64,
        ready: bool,
    ) {
        if self.predict == Predict::Off {
            return;
        }
        let size = o.meta().size;
        let stats = fs.cache().stats().snapshot();
        let now = Conditions {
            latency_us: stats.latency_us,
            stream_bytes_per_s: stats.stream_bytes_per_s,
            cache_bytes: fs.cache().capacity_bytes(),
            pressed: fs.cache().is_pressed(),
        };
        if !o.is_small() {
            let event = Event::Read { file: ino, size, offset, len };
            if let Some(Action::Fetch { start, end, .. }) = self.readahead.lock().apply(event, now)
            {
                let o = o.clone();
                self.start(async move { o.prefetch(start..end).await });
            }
        }
        if offset != 0 {
            return;
        }
        if let Some(d) = &self.datasets
            && fs.options().read_only
            && size <= SAMPLE_MAX_BYTES
        {
            d.on_sample(ino, ready);
        }
        // Whose order is known is in no run.
        if size > RUN_FILE_MAX_BYTES || self.datasets.as_ref().is_some_and(|d| d.steers(ino)) {
            return;
        }
        let Some((directory, index, count, mean_bytes)) = fs.namespace().place(ino) else { return };
        let event = Event::Entered { directory, index, count, mean_bytes };
        let Some(Action::FetchFiles { start, end, beacon, .. }) =
            self.readahead.lock().apply(event, now)
        else {
            return;
        };
        let files = fs.namespace().files_at(directory, start..end);
        let files: Vec<_> = files
            .into_iter()
            .enumerate()
            .filter(|(_, (_, m))| m.size <= RUN_FILE_MAX_BYTES)
            .map(|(i, (ino, meta))| {
                let is_beacon = start + i as u64 == beacon;
                (ino, is_beacon, fs.cache().object(fs.origin(), &meta))
            })
            .collect();
        let pusher = self.shared.pusher.clone();
        self.start(async move {
            futures::stream::iter(files)
                .for_each_concurrent(RUN_PARALLEL, |(ino, is_beacon, o)| {
                    let pusher = pusher.clone();
                    async move {
                        o.prefetch(0..o.meta().size).await;
                        if let Some(p) = pusher.filter(|_| !is_beacon) {
                            p.push(ino, &o).await;
                        }
                    }
                })
                .await;
        });
    }

    /// Nobody has the inode open any more.
    pub(crate) fn forget(&self, ino: Ino) {
        if self.predict != Predict::Off {
            self.readahead.lock().apply(
                Event::Forgotten { file: ino },
                Conditions { latency_us: 0, stream_bytes_per_s: 0, cache_bytes: 0, pressed: false },
            );
        }
    }

    fn start(&self, action: impl Future<Output = ()> + Send + 'static) {
        let shared = self.shared.clone();
        if shared.actions.fetch_add(1, Ordering::AcqRel) >= MAX_ACTIONS {
            shared.actions.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let runtime = shared.runtime.clone();
        let tasks = shared.tasks.clone();
        tasks.spawn_on(
            async move {
                tokio::select! {
                    () = shared.stop.cancelled() => {}
                    () = action => {}
                }
                shared.actions.fetch_sub(1, Ordering::AcqRel);
            },
            &runtime,
        );
    }
}

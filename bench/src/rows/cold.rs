//! First touch: as fast as the store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt, stream};
use kspeed_cache::origin::{ListRequest, Origin, S3Config, S3Origin};

use crate::Result;
use crate::measure::{cpu, files, median, read_files, sequential};
use crate::report::Row;
use crate::world::{
    BUCKET, KEY, Mount, SECRET, Server, Setup, Shape, drop_caches, noise_file, small_files,
};

const GIB: u64 = 1 << 30;
const GET_BYTES: u64 = 8 << 20;

/// What parallel GETs by the same SDK reach, and nothing else: MB/s, CPU time.
pub(super) async fn parallel_gets(
    endpoint: &str,
    prefix: &str,
    parallel: usize,
) -> Result<(f64, Duration, u64)> {
    let origin: Arc<dyn Origin> = Arc::new(
        S3Origin::new(S3Config {
            bucket: BUCKET.into(),
            endpoint: Some(endpoint.into()),
            region: Some("us-east-1".into()),
            ..S3Config::default()
        })
        .await,
    );
    let mut request = ListRequest { prefix: prefix.as_bytes().to_vec(), ..ListRequest::default() };
    let mut objects = Vec::new();
    loop {
        let page = origin.list(&request).await?;
        objects.extend(page.objects);
        match page.next {
            Some(t) => request.token = Some(t),
            None => break,
        }
    }
    let count = objects.len() as u64;
    let ranges = objects.into_iter().flat_map(|m| {
        (0..m.size)
            .step_by(GET_BYTES as usize)
            .map(move |at| (m.clone(), at..(at + GET_BYTES).min(m.size)))
            .collect::<Vec<_>>()
    });
    let began = Instant::now();
    let cpu_before = cpu(std::process::id())?;
    let bytes = stream::iter(ranges)
        .map(|(m, range)| {
            let origin = origin.clone();
            async move {
                let mut body = origin.get(&m, range).await?;
                let mut n = 0u64;
                while let Some(b) = body.stream.try_next().await? {
                    n += b.len() as u64;
                }
                Ok::<u64, kspeed_cache::origin::OriginError>(n)
            }
        })
        .buffer_unordered(parallel)
        .try_fold(0u64, |a, n| async move { Ok(a + n) })
        .await?;
    let seconds = began.elapsed().as_secs_f64();
    Ok((bytes as f64 / seconds / 1e6, cpu(std::process::id())? - cpu_before, count))
}

pub(super) fn runtime() -> Result<tokio::runtime::Runtime> {
    // SAFETY: no thread but this one runs yet; the SDK reads these later.
    unsafe {
        std::env::set_var("AWS_ACCESS_KEY_ID", KEY);
        std::env::set_var("AWS_SECRET_ACCESS_KEY", SECRET);
    }
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

pub fn large(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let dir = setup.scratch()?;
    let size = setup.of(2 * GIB);
    let gib = size as f64 / GIB as f64;
    let s3 = dir.path().join("s3");
    noise_file(&s3.join(BUCKET).join("f"), size, 1)?;
    let runtime = runtime()?;
    for (shape, how) in [(Shape::FAR, "far"), (Shape::default(), "near")] {
        let (mut ours, mut theirs, mut our_cpu, mut their_cpu) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for round in 0..setup.rounds {
            let server = Server::start(&s3, shape)?;
            if how == "near" || round == 0 {
                let (mbs, c, _) = runtime.block_on(parallel_gets(&server.endpoint, "f", 16))?;
                theirs.push(mbs);
                their_cpu.push(c.as_secs_f64() / gib);
            }
            let cache = dir.path().join(format!("cache-{how}-{round}"));
            {
                let m = Mount::new(&server, &dir.path().join("mnt"), &cache, &[])?;
                let before = cpu(m.pid())?;
                ours.push(sequential(&m.path.join("f"))?);
                our_cpu.push((cpu(m.pid())? - before).as_secs_f64() / gib);
            }
            std::fs::remove_dir_all(&cache)?;
            drop_caches()?;
        }
        let note =
            format!("(CPU s/GiB: KSpeed {:.2}, GETs {:.2})", median(&our_cpu), median(&their_cpu));
        if how == "far" {
            let rate = shape.total_rate.map_or(f64::NAN, |r| r as f64 / 1e6);
            out(Row::ratio(
                "2 GiB cold, 20 ms, 100 MB/s a connection, 400 MB/s",
                median(&ours),
                "the store's rate",
                rate,
                "MB/s",
                0.9,
            )
            .with(format!("{note} (GETs reach {:.0} MB/s)", median(&theirs))));
            out(Row::bounded("  daemon CPU for a cold GiB", median(&our_cpu), "s", 1.5));
        } else {
            out(Row::ratio(
                "2 GiB cold, unshaped",
                median(&ours),
                "16 parallel GETs",
                median(&theirs),
                "MB/s",
                0.5,
            )
            .with(note));
        }
    }
    Ok(())
}

pub fn small(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    let dir = setup.scratch()?;
    let count = setup.of(10_000);
    let s3 = dir.path().join("s3");
    let bytes = small_files(&s3.join(BUCKET).join("d"), count)?;
    let runtime = runtime()?;
    let server = Server::start(&s3, Shape::FAR)?;
    for (args, how) in [(&["--read-only"][..], "dataset mount"), (&[][..], "writable mount")] {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..setup.rounds.min(3) {
            let (mbs, _, n) = runtime.block_on(parallel_gets(&server.endpoint, "d/", 32))?;
            theirs.push(mbs * 1e6 / (bytes as f64 / n as f64));
            let cache = dir.path().join(format!("cache-{round}"));
            {
                let m = Mount::new(&server, &dir.path().join("mnt"), &cache, args)?;
                let list = files(&m.path.join("d"))?;
                ours.push(read_files(&list, 4)?);
            }
            std::fs::remove_dir_all(&cache)?;
        }
        let name = format!("small files cold, directory order, 4 readers, {how}");
        out(Row::ratio(&name, median(&ours), "32 parallel GETs", median(&theirs), "files/s", 0.8));
    }
    Ok(())
}

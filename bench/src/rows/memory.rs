//! Resident memory under many descriptors and small random reads.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};

use crate::Result;
use crate::report::Row;
use crate::world::{BUCKET, Mount, Server, Setup, Shape, noise_file};

pub fn memory(setup: &Setup, out: &mut dyn FnMut(Row)) -> Result<()> {
    const DESCRIPTORS: usize = 500;
    const LIMIT_MIB: u64 = 512;
    let dir = setup.scratch()?;
    let s3 = dir.path().join("s3");
    for i in 0..8 {
        noise_file(&s3.join(BUCKET).join(format!("f{i}")), setup.of(256 << 20), i)?;
    }
    let server = Server::start(&s3, Shape::default())?;
    for args in [&["--no-passthrough"][..], &["--read-only"][..]] {
        let cache = dir.path().join(args[0].trim_matches('-'));
        let limit = format!("{LIMIT_MIB}MiB");
        let args = [args, &["--memory-limit", &limit]].concat();
        let m = Mount::new(&server, &dir.path().join("mnt"), &cache, &args)?;
        let until = Instant::now() + Duration::from_secs((60 / setup.shrink).max(5));
        let mut most = 0;
        let mut reads = 0u64;
        std::thread::scope(|s| -> Result<()> {
            let threads: Vec<_> = (0..4u64)
                .map(|t| {
                    let path = &m.path;
                    s.spawn(move || -> std::io::Result<u64> {
                        let files: Vec<File> = (0..DESCRIPTORS / 4)
                            .map(|i| File::open(path.join(format!("f{}", i % 8))))
                            .collect::<std::io::Result<_>>()?;
                        let mut rng = rand::rngs::StdRng::seed_from_u64(t);
                        let mut buf = [0; 1024];
                        let mut n = 0;
                        while Instant::now() < until {
                            let f = &files[rng.random_range(0..files.len())];
                            let size = f.metadata()?.len();
                            f.read_exact_at(&mut buf, rng.random_range(0..size - 1024))?;
                            n += 1;
                        }
                        Ok(n)
                    })
                })
                .collect();
            while Instant::now() < until {
                most = most.max(m.status()?.resident_bytes);
                std::thread::sleep(Duration::from_millis(200));
            }
            for t in threads {
                reads += t.join().map_err(|_| "a reader panicked")??;
            }
            Ok(())
        })?;
        let name = format!("resident, 500 descriptors, random KiB, {}", args[0]);
        out(Row::bounded(&name, most as f64 / (1 << 20) as f64, "MiB", LIMIT_MIB as f64)
            .with(format!("({reads} reads)")));
    }
    Ok(())
}

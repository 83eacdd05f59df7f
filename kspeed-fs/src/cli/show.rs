//! Commands that only show: status, stats, doctor.

use std::path::Path;

use super::{Failure, small_runtime};
use crate::config::{MountConfig, ProcessConfig, RawMount, size_text};
use crate::doctor::{Verdict, examine};
use crate::telemetry::ProcessStatus;

pub(super) fn status(mountpoint: Option<&Path>, json: bool) -> Result<(), Failure> {
    let clients = super::mount::clients(mountpoint)?;
    let runtime = small_runtime()?;
    let mut all: Vec<ProcessStatus> = Vec::new();
    for c in clients {
        let text = runtime.block_on(c.get("/status"))?;
        let s: ProcessStatus = serde_json::from_str(&text)?;
        if !all.iter().any(|a| a.pid == s.pid) {
            all.push(s);
        }
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    if all.is_empty() {
        println!("nothing is mounted");
    }
    for s in &all {
        print_status(s);
    }
    Ok(())
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

fn print_status(s: &ProcessStatus) {
    println!("process {} (kspeed {})", s.pid, s.version);
    println!(
        "  memory    {} of {}; RAM tier {}, buffers {}",
        size_text(s.resident_bytes),
        size_text(s.memory_limit_bytes),
        size_text(s.ram_used_bytes),
        size_text(s.buffers_used_bytes)
    );
    for d in &s.disks {
        println!(
            "  cache     {}: {} of {}{}",
            d.dir.display(),
            size_text(d.used_bytes),
            size_text(d.max_bytes),
            if d.out_of_service { ", OUT OF SERVICE" } else { "" }
        );
    }
    let c = &s.cache;
    let reads = c.ram_hits + c.disk_hits + c.misses;
    println!(
        "  reads     {reads}: RAM {:.1} %, disk {:.1} %, origin {:.1} %",
        percent(c.ram_hits, reads),
        percent(c.disk_hits, reads),
        percent(c.misses, reads)
    );
    println!(
        "  origin    {} GETs, {} received, first byte after {:.1} ms",
        c.origin_gets,
        size_text(c.origin_bytes),
        c.latency_us as f64 / 1000.0
    );
    for m in &s.mounts {
        println!("  mount     {} on {}", m.source, m.mountpoint.display());
        let way = match (m.read_only, m.passthrough) {
            (true, _) => "dataset mount (no-open, pushed)",
            (false, true) => "passthrough",
            (false, false) => "through the daemon",
        };
        println!(
            "            {way}; {} FUSE requests, {} reads, {} pushed, {} errors",
            m.requests,
            m.reads,
            size_text(m.pushed_bytes),
            m.errors
        );
    }
    for m in &s.mounts {
        let p = &m.pending;
        if p.changes == 0 {
            continue;
        }
        let left = p.left_s.map_or_else(String::new, |s| format!(", about {s:.0} s left"));
        println!(
            "  write-back {}: not uploaded: {} changes, {} staged, the oldest for {:.0} s; {}/s{left}",
            m.mountpoint.display(),
            p.changes,
            size_text(p.staged_bytes),
            p.oldest_s,
            size_text(p.rate)
        );
        for f in &p.failed {
            println!("            {}: {} (tried {} times)", f.path, f.reason, f.tries);
        }
    }
    for m in &s.mounts {
        for d in &m.datasets {
            let path = if d.path.is_empty() { "." } else { &d.path };
            println!("  dataset   {} of {}: {} files", path, m.mountpoint.display(), d.files);
            let nats = d.confidence_nats.map_or_else(String::new, |n| {
                format!("; {n:.0} nats better than chance when it was found")
            });
            println!("            {}{nats}", d.predictor);
            if d.reads > 0 {
                println!(
                    "            epoch {:.0} % done, {:.0} % of the last reads as expected, ranks {} of {}; {:.1} % of {} reads did not wait",
                    d.epoch_done * 100.0,
                    d.fits * 100.0,
                    d.ranks_here,
                    d.world,
                    d.hit_rate * 100.0,
                    d.reads
                );
            }
        }
    }
    for d in &s.degraded {
        println!("  degraded  {d}");
    }
}

pub(super) fn stats(mountpoint: Option<&Path>) -> Result<(), Failure> {
    let runtime = small_runtime()?;
    for c in super::mount::clients(mountpoint)? {
        print!("{}", runtime.block_on(c.get("/metrics"))?);
    }
    Ok(())
}

pub(super) fn doctor(mut raw: RawMount, json: bool) -> Result<(), Failure> {
    let process = ProcessConfig::check(&raw).map_err(Failure::usage)?;
    let source = match raw.source.is_some() {
        true => {
            raw.mountpoint.get_or_insert_with(|| "/".into());
            Some(MountConfig::check(&raw).map_err(Failure::usage)?)
        }
        false => None,
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let checks = runtime.block_on(examine(&process, source.as_ref()));
    if json {
        println!("{}", serde_json::to_string_pretty(&checks)?);
    } else {
        for c in &checks {
            let mark = match c.verdict {
                Verdict::Ok => "ok  ",
                Verdict::Warn => "warn",
                Verdict::Fail => "FAIL",
            };
            println!("{mark}  {:<12} {}", c.name, c.detail);
        }
    }
    if checks.iter().any(|c| c.verdict == Verdict::Fail) {
        return Err(Failure::failed("something does not work; see above"));
    }
    Ok(())
}

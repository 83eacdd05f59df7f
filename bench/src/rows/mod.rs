//! The rows, by name.

mod checkpoint;
mod cold;
mod large;
mod memory;
mod names;
mod server;
mod shuffled;
mod small;

use std::path::Path;

use crate::Result;
use crate::report::{Row, head};
use crate::world::Setup;

/// Measures one or several rows.
type Measure = fn(&Setup, &mut dyn FnMut(Row)) -> Result<()>;

const ROWS: &[(&str, &str, Measure)] = &[
    ("large", "2 GiB in the disk cache: passthrough, mmap, through the daemon", large::large),
    ("random", "random 128 KiB in eight shards, page cache dropped", large::random),
    ("small", "10,000 small files on a dataset mount: after warm, second epoch", small::small),
    ("cold-large", "2 GiB from a far store, and from a near one, with CPU time", cold::large),
    ("cold-small", "small files from a far store in directory order", cold::small),
    (
        "shuffled",
        "a shuffled epoch from a far store: likely seed, told, without limit",
        shuffled::epoch,
    ),
    ("scan", "an epoch with an unlikely seed: the scan of all 2^32", shuffled::scan),
    ("half", "three epochs with a cache of half the dataset, and the optimum", shuffled::half),
    ("unpredicted", "a random reader that no predictor fits", shuffled::random),
    ("write", "checkpoints: written, overwritten, small files", checkpoint::write_rows),
    (
        "upload",
        "2 GiB uploaded behind the writer, read back after a restart",
        checkpoint::upload_rows,
    ),
    ("stall", "a save each second while uploads run", checkpoint::stall_row),
    ("names", "scandir + stat, find over a snapshot index, index of 10 million", names::names),
    ("memory", "500 descriptors with KiB-sized random reads for a minute", memory::memory),
    ("server", "the S3 server by itself, so that it is not what is measured", server::server),
];

pub fn list() {
    for (name, what, _) in ROWS {
        println!("{name:<12} {what}");
    }
}

/// Measures; false if the gate is set and a row is below its promise.
pub fn run(setup: &Setup, names: &[String], gate: bool, json: Option<&Path>) -> Result<bool> {
    if let Some(n) = names.iter().find(|n| !ROWS.iter().any(|r| r.0 == **n)) {
        return Err(format!("no row {n:?}; `kspeed-bench list` lists them").into());
    }
    let mut all: Vec<Row> = Vec::new();
    head();
    for (name, _, measure) in ROWS {
        if names.is_empty() || names.iter().any(|n| n == name) {
            measure(setup, &mut |r| {
                r.print();
                all.push(r);
            })?;
        }
    }
    if let Some(path) = json {
        std::fs::write(path, serde_json::to_string_pretty(&all)?)?;
    }
    let below: Vec<&Row> = all.iter().filter(|r| !r.holds()).collect();
    if !below.is_empty() {
        println!("{} of {} below their promise", below.len(), all.len());
    }
    Ok(!gate || below.is_empty())
}

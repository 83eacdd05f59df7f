//! KSpeed's benchmarks. Each row measures KSpeed and something real (the native
//! disk, the page cache, parallel GETs) by turns in the same run, and prints the
//! ratio of medians beside the ratio that is promised.
//!
//! `kspeed-bench run` measures all rows or those named; with `--gate` it fails if
//! one is below its promise. `kspeed-bench compare` runs the same work on other
//! mounts that are installed. `kspeed-bench demo` is `make demo`.

mod compare;
mod demo;
mod loader;
mod measure;
mod report;
mod rows;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Errors of a benchmark end it: there is nobody to handle them.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// KSpeed's benchmarks.
#[derive(Parser)]
struct Cli {
    /// Directory for data and caches, on the disk that is measured.
    #[arg(long, default_value = "/var/tmp", global = true)]
    dir: PathBuf,
    /// Rounds of each measurement; the median counts.
    #[arg(long, default_value_t = 5, global = true)]
    rounds: usize,
    /// Divides sizes and counts, for a quick look.
    #[arg(long, default_value_t = 1, global = true)]
    shrink: u64,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measures rows: all, or those named.
    Run {
        /// Names of rows; none: all.
        rows: Vec<String>,
        /// Fails if a row is below its promise.
        #[arg(long)]
        gate: bool,
        /// Writes the results here, as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Lists the rows.
    List,
    /// Runs the same work on KSpeed, other mounts on the PATH, and the disk.
    Compare {
        /// Writes table.md and plot.svg here.
        #[arg(long, default_value = ".")]
        out: PathBuf,
    },
    /// Mounts a real data set, reads three shuffled epochs, writes a checkpoint.
    Demo,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let setup = world::Setup { dir: cli.dir, rounds: cli.rounds.max(1), shrink: cli.shrink.max(1) };
    let result = match cli.command {
        Command::Run { rows, gate, json } => rows::run(&setup, &rows, gate, json.as_deref()),
        Command::List => {
            rows::list();
            Ok(true)
        }
        Command::Compare { out } => compare::run(&setup, &out).map(|()| true),
        Command::Demo => demo::run(&setup).map(|()| true),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("kspeed-bench: {e}");
            ExitCode::FAILURE
        }
    }
}

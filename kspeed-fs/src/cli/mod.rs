//! The commands.

mod bench;
mod fsck;
mod mount;
mod paths;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::config::RawMount;

/// Mounts a bucket as a directory that reads at the speed of the local disk.
#[derive(Parser)]
#[command(name = "kspeed", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Mounts SOURCE on MOUNTPOINT; returns when the mount serves.
    Mount(MountArgs),
    /// Waits until all is uploaded, unmounts, and waits until the daemon has ended.
    Umount {
        /// Where it is mounted.
        mountpoint: PathBuf,
        /// Detaches the mount even if it is in use or something is not uploaded; that stays
        /// in the cache directory.
        #[arg(long)]
        no_drain: bool,
    },
    /// Shows mounts, tiers, hit rates, and what is degraded and why.
    Status {
        /// One mount only.
        mountpoint: Option<PathBuf>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Shows the counters in Prometheus format.
    Stats {
        /// Where it is mounted.
        mountpoint: Option<PathBuf>,
    },
    /// Brings paths into the cache (and, on dataset mounts, into the page cache).
    Warm {
        /// Files or directories.
        #[arg(required_unless_present = "list")]
        paths: Vec<PathBuf>,
        /// A file with a path a line; `-` for standard input.
        #[arg(long, value_name = "FILE")]
        list: Option<PathBuf>,
        /// Spares them from eviction.
        #[arg(long)]
        pin: bool,
    },
    /// Drops paths from the cache.
    Evict {
        /// Files or directories.
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
    /// Spares paths from eviction.
    Pin {
        /// Files or directories.
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
    /// Lets paths be evicted again.
    Unpin {
        /// Files or directories.
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
    /// Returns when what was written at the paths is in the origin.
    Sync {
        /// Files or directories.
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
    /// Checks what a cache directory holds that is not uploaded.
    Fsck {
        /// The cache directory.
        cache_dir: PathBuf,
        /// Cuts a journal before its first damaged line, and sets the rest aside.
        #[arg(long)]
        repair: bool,
    },
    /// Shows how much of each file is cached where.
    LsCache {
        /// File or directory.
        path: PathBuf,
        /// As JSON, an object a line.
        #[arg(long)]
        json: bool,
    },
    /// Looks at kernel, rights, limits, credentials, clock, origin and cache disk.
    Doctor {
        #[command(flatten)]
        options: Box<DoctorArgs>,
    },
    /// Measures a mount against its own cache disk, as ratios.
    Bench {
        /// Where it is mounted (writable).
        mountpoint: PathBuf,
        /// Bytes of the test file.
        #[arg(long, default_value = "256MiB")]
        size: String,
    },
    /// Prints the version.
    Version,
    /// Prints completions for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Args)]
struct MountArgs {
    #[command(flatten)]
    raw: Box<RawMount>,
    /// Stays in the foreground.
    #[arg(long)]
    foreground: bool,
    /// TOML file with [defaults] and several [[mount]] sections.
    #[arg(long, env = "KSPEED_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Args)]
struct DoctorArgs {
    #[command(flatten)]
    raw: RawMount,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Ends a command: what to print to standard error, and the exit code.
pub(crate) struct Failure {
    message: String,
    code: u8,
}

impl Failure {
    /// It failed.
    fn failed(e: impl std::fmt::Display) -> Self {
        Self { message: e.to_string(), code: 1 }
    }

    /// It was used wrongly.
    fn usage(e: impl std::fmt::Display) -> Self {
        Self { message: e.to_string(), code: 2 }
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(e: E) -> Self {
        Self::failed(e)
    }
}

/// Runs the program. Exit codes: 0 ok, 1 failed, 2 wrong usage.
#[must_use]
pub fn run() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Mount(a) => mount::mount(*a.raw, a.config.as_deref(), a.foreground),
        Command::Umount { mountpoint, no_drain } => mount::umount(&mountpoint, no_drain),
        Command::Status { mountpoint, json } => show::status(mountpoint.as_deref(), json),
        Command::Stats { mountpoint } => show::stats(mountpoint.as_deref()),
        Command::Warm { paths, list, pin } => paths::warm(paths, list.as_deref(), pin),
        Command::Evict { paths } => paths::each(crate::control::PathsAction::Evict, paths),
        Command::Pin { paths } => paths::each(crate::control::PathsAction::Pin, paths),
        Command::Unpin { paths } => paths::each(crate::control::PathsAction::Unpin, paths),
        Command::Sync { paths } => paths::each(crate::control::PathsAction::Sync, paths),
        Command::Fsck { cache_dir, repair } => fsck::fsck(&cache_dir, repair),
        Command::LsCache { path, json } => paths::list(&path, json),
        Command::Doctor { options } => show::doctor(options.raw, options.json),
        Command::Bench { mountpoint, size } => bench::bench(&mountpoint, &size),
        Command::Version => {
            println!("kspeed {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "kspeed", &mut std::io::stdout());
            Ok(())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(f) => {
            if !f.message.is_empty() {
                eprintln!("kspeed: {}", f.message);
            }
            ExitCode::from(f.code)
        }
    }
}

/// A runtime for commands that talk to a daemon.
fn small_runtime() -> Result<tokio::runtime::Runtime, Failure> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every flag stands in docs/operations.md, and no other does.
    #[test]
    fn every_flag_is_documented() {
        let docs = include_str!("../../../docs/operations.md");
        let command = Cli::command();
        let mount = command.find_subcommand("mount").expect("mount");
        for a in mount.get_arguments() {
            let Some(long) = a.get_long() else { continue };
            if long == "help" || long == "version" {
                continue;
            }
            assert!(docs.contains(&format!("`--{long}`")), "--{long} is not in docs/operations.md");
        }
        for c in command.get_subcommands() {
            let name = c.get_name();
            assert!(
                docs.contains(&format!("kspeed {name}")),
                "{name} is not in docs/operations.md"
            );
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}

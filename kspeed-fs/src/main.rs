//! The `kspeed` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    kspeed_fs::cli::run()
}

//! The `meridian` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    meridian_cli::run(std::env::args_os())
}

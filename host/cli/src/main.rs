//! The `meridian` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(meridian_cli::run(std::env::args_os()))
}

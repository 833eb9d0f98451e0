//! The `meridian` binary.

use std::process::ExitCode;

use meridian_engine::{CompileCommand, set_compile_command};

fn main() -> ExitCode {
    // This very program, even when its file was replaced meanwhile.
    set_compile_command(CompileCommand::new("/proc/self/exe", [meridian_cli::COMPILE_COMPONENT]));
    ExitCode::from(meridian_cli::run(std::env::args_os()))
}

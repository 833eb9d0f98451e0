//! Runs the command as a user does.

use std::path::Path;
use std::process::Command;

/// What a run printed, and how it ended.
pub struct Done {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// Run the command in `folder`, which is also its home.
#[allow(dead_code, reason = "not every test runs it so")]
pub fn meridian(folder: &Path, args: &[&str]) -> Done {
    meridian_with(folder, &[], args)
}

/// Run the command in `folder`, with additional environment variables.
pub fn meridian_with(folder: &Path, environment: &[(&str, &str)], args: &[&str]) -> Done {
    let output = Command::new(env!("CARGO_BIN_EXE_meridian"))
        .args(args)
        .current_dir(folder)
        .env("HOME", folder)
        .env_remove("XDG_RUNTIME_DIR")
        .env_remove("MERIDIAN_CONFIG")
        .envs(environment.iter().copied())
        .output()
        .expect("the command was built");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the command prints UTF-8");
    Done {
        code: output.status.code().expect("no signal ended it"),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

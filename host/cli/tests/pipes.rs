//! A pipe in place of a file is refused at once: opening it would wait for its other end.

use std::path::{Path, PathBuf};
use std::process::Command;

use support::meridian;

use crate::support;

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("pipes-{name}"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn make_pipe(path: &Path) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

fn assert_refused(folder: &Path, args: &[&str]) {
    let done = meridian(folder, args);
    assert!(done.code != 0 && done.stderr.contains("not a regular file"), "{args:?}: {}", done.stderr);
    assert_eq!((done.stdout.as_str(), done.stderr.lines().count()), ("", 1), "{args:?}: {}", done.stderr);
}

#[test]
fn the_state_of_a_roll_out_is_a_regular_file() {
    let folder = folder("rollout");
    make_pipe(&folder.join("kept/state.json"));
    for command in ["status", "pause", "resume", "abort"] {
        assert_refused(&folder, &["rollout", command, "--folder", "kept"]);
    }
}

#[test]
fn the_files_of_a_policy_are_regular_files() {
    let folder = folder("policy");
    make_pipe(&folder.join("mine/policy.toml"));
    assert_refused(&folder, &["policy", "build", "mine"]);
    make_pipe(&folder.join("cases/one.toml"));
    assert_refused(&folder, &["policy", "test", "native:fcfs", "--cases", "cases"]);
}

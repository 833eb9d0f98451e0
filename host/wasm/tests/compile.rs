//! A process that compiles and misbehaves is ended and reaped, and the component refused with the reason. The processes
//! here are shell scripts; `host/cli/tests/compile.rs` has the real one.

#![cfg(target_os = "linux")]
use std::time::Duration;

use meridian_wasm::{CompileCommand, CompileLimits, LoadError, Runtime};
use sha2::{Digest, Sha256};

use crate::support;

/// A deadline that only an endless script misses.
const PATIENT: CompileLimits =
    CompileLimits { time: Duration::from_secs(600), memory_bytes: 1 << 30, artifact_bytes: 1 << 20 };
const IMPATIENT: CompileLimits = CompileLimits { time: Duration::from_millis(50), ..PATIENT };

/// Load a component, compiled by a shell script, and return the refusal.
fn refusal(script: &str, limits: CompileLimits) -> LoadError {
    load(CompileCommand::new("/bin/sh", ["-c", script]).with_limits(limits))
}

fn load(command: CompileCommand) -> LoadError {
    let runtime = Runtime::new(None).unwrap().with_compiler(command);
    let refused = runtime.load(&support::HOSTILE[0].component()).err().expect("no script is a compiler");
    let children = std::fs::read_to_string("/proc/thread-self/children").unwrap();
    assert_eq!(children, "", "a process is left, or not reaped");
    refused
}

/// Why no result can be used.
fn problem(script: &str) -> String {
    match refusal(script, PATIENT) {
        LoadError::CompileFailed { problem } => problem,
        other => panic!("{script}: {other}"),
    }
}

#[test]
fn one_that_never_ends_is_killed() {
    for script in ["while :; do :; done", "trap '' TERM XCPU; while :; do :; done", "exec sleep 1000", "kill -STOP $$"]
    {
        let late = refusal(script, IMPATIENT);
        assert!(matches!(late, LoadError::CompileDeadline { limit } if limit == IMPATIENT.time), "{script}: {late}");
    }
    assert_eq!(refusal("exec sleep 1000", IMPATIENT).to_string(), "compiling took longer than 0.05 s");
    // With its pipes closed it cannot answer any more.
    assert_eq!(problem("exec >&- 2>&-; while :; do :; done"), "it was killed");
}

#[test]
fn one_that_writes_for_ever_is_killed() {
    assert_eq!(problem("exec cat /dev/zero"), "it wrote more than 1064960 bytes");
    // Standard error is read, and only its end is kept.
    let late = refusal("exec cat /dev/zero >&2", IMPATIENT);
    assert!(matches!(late, LoadError::CompileDeadline { .. }), "{late}");
    let told = problem("head -c 1000000 /dev/zero | tr '\\0' x >&2; echo >&2; echo the end >&2; exit 3");
    assert_eq!(told, "it ended with code 3: the end");
}

#[test]
fn what_is_no_answer_is_refused() {
    for script in [":", "echo", "echo garbage", "printf '{\"compiled\":{\"bytes\":0'", "head -c 20000 /dev/zero", "cat"]
    {
        assert_eq!(problem(script), "it gave no answer", "{script}");
    }
    assert_eq!(problem("exit 7"), "it ended with code 7");
}

/// A script that answers with a compiled form.
fn answering(announced: usize, sha256: &str, artifact: &str) -> String {
    format!(r#"echo '{{"compiled":{{"bytes":{announced},"sha256":"{sha256}"}}}}'; printf %s '{artifact}'"#)
}

#[test]
fn a_result_that_is_not_whole_is_refused() {
    let artifact = "not what wasmtime writes";
    let sha256: String = Sha256::digest(artifact).iter().map(|byte| format!("{byte:02x}")).collect();
    let length = artifact.len();
    assert_eq!(problem(&answering(length + 1, &sha256, artifact)), "it announced 25 bytes and wrote 24");
    assert_eq!(problem(&answering(length - 1, &sha256, artifact)), "it announced 23 bytes and wrote 24");
    let altered = artifact.replace('w', "v");
    assert_eq!(problem(&answering(length, &sha256, &altered)), "the digest of its result does not match");
    // Half a result has a cause.
    let ended = format!("{}; kill -SEGV $$", answering(length + 1, &sha256, artifact));
    assert_eq!(problem(&ended), "it ended with signal 11");
    // Whole, and not of this program: wasmtime says what it is not.
    let foreign = problem(&answering(length, &sha256, artifact));
    assert!(foreign.len() < 1024 && !foreign.contains('\n'), "{foreign}");
}

#[test]
fn a_signal_is_named_by_its_cause() {
    assert_eq!(problem("kill -SEGV $$"), "it ended with signal 11");
    assert_eq!(problem("echo stack overflow >&2; kill -ABRT $$"), "it ended with signal 6: stack overflow");
    assert_eq!(problem("kill -KILL $$"), "it was killed");
    let late = refusal("kill -XCPU $$", PATIENT);
    assert!(matches!(late, LoadError::CompileDeadline { .. }), "{late}");
    let full = refusal("echo memory allocation of 4096 bytes failed >&2; kill -ABRT $$", PATIENT);
    assert_eq!(full.to_string(), "compiling needs more than 1024 MiB of memory");
}

#[test]
fn a_refusal_of_the_process_is_one_bounded_line() {
    let refused = refusal(r#"printf '%s\n' '{"unknown-import":{"import":"wasi:io\n\u001b[31m"}}'"#, PATIENT);
    assert_eq!(refused.to_string(), "unknown import `wasi:io[31m`: a policy component may import nothing");
    let refused = refusal(r#"echo '{"too-complex":{"what":"loops","found":3,"limit":2}}'"#, PATIENT);
    assert_eq!(refused.to_string(), "too complex: loops: 3, expected at most 2");
    let refused = refusal("echo '\"out-of-memory\"'", PATIENT);
    assert!(matches!(refused, LoadError::CompileMemory { limit_bytes } if limit_bytes == 1 << 30), "{refused}");
    assert_eq!(problem(r#"printf '{"invalid":{"detail":"%020000d"}}\n' 0"#), "it gave no answer");
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let missing = load(CompileCommand::new("/nowhere/meridian", [""; 0]));
    assert!(matches!(missing, LoadError::Setup { .. }), "{missing}");
    assert!(missing.to_string().contains("cannot start /nowhere/meridian to compile: No such file"), "{missing}");
}

#[test]
fn it_gets_the_component_and_nothing_else() {
    // The request is a line; the component follows.
    let script = "read line; echo \"$line\" >&2; exit $(tail -c +1 | head -c 4 | od -An -tu1 | wc -w)";
    let told = problem(script);
    let request = format!("it ended with code 4: {{\"parent\":{},\"cpu_s\":601,", std::process::id());
    assert!(told.starts_with(&request), "{told}");
    assert_eq!(problem("pwd >&2; exit 1"), "it ended with code 1: /");
    assert_eq!(problem("exit $(tr '\\0' '\\n' < /proc/$$/environ | grep -vc ^LD_LIBRARY_PATH=)"), "it gave no answer");
}

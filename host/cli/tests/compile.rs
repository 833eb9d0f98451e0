//! The process that compiles a component: the `meridian` binary, started by a runtime.

#![cfg(target_os = "linux")]
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use bombs::{bombs, core, doubling, times};
use meridian_wasm::{CompileCommand, CompileLimits, LoadError, Runtime};

use crate::bombs;

const MERIDIAN: &str = env!("CARGO_BIN_EXE_meridian");

fn command() -> CompileCommand {
    CompileCommand::new(MERIDIAN, ["compile-component"])
}

fn runtime(limits: CompileLimits) -> Runtime {
    Runtime::new(None).unwrap().with_compiler(command().with_limits(limits))
}

/// Processes that this thread started, ended ones that were not reaped included.
fn children() -> String {
    std::fs::read_to_string("/proc/thread-self/children").unwrap()
}

/// An empty folder of a test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

fn shipped(name: &str) -> Vec<u8> {
    let path = format!("{}/../../target/policies/{name}.wasm", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}: run `make policies` first"))
}

#[test]
fn the_result_is_that_of_this_process_byte_for_byte() {
    let compiled = |runtime: Runtime, dir: &Path| {
        for name in ["balanced", "tiered-lru", "eat-rpdi"] {
            runtime.load(&shipped(name)).unwrap();
        }
        let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
            .iter()
            .map(|file| (file.file_name().unwrap().to_owned(), std::fs::read(file).unwrap()))
            .collect::<Vec<_>>()
    };
    let (here, there) = (folder("compiled-here"), folder("compiled-there"));
    let in_process = compiled(Runtime::new(Some(here.clone())).unwrap(), &here);
    let in_child = compiled(Runtime::new(Some(there.clone())).unwrap().with_compiler(command()), &there);
    assert_eq!(in_process.len(), 3);
    assert!(in_process == in_child, "the compiled forms differ");
    // With a compiled form in the cache, nothing is started.
    let nowhere = CompileCommand::new("/nowhere/meridian", [""; 0]);
    Runtime::new(Some(there)).unwrap().with_compiler(nowhere).load(&shipped("balanced")).unwrap();
}

#[test]
fn a_component_is_refused_as_in_this_process() {
    let texts = [
        core(&times(40_001, "(func)")),
        doubling(40),
        core("(func (result i32))"),
        String::from("(component)"),
        String::from(r#"(component (import "wasi:clocks/wall-clock@0.2.0" (instance)))"#),
        format!("{}{}", times(9, "(component "), times(9, ")")),
    ];
    let (in_process, in_child) = (Runtime::new(None).unwrap(), runtime(CompileLimits::default()));
    let mut refused: Vec<Vec<u8>> = texts.iter().map(|text| wat::parse_str(text).unwrap()).collect();
    refused.push(b"\0asm\x0d\0\x01\0\xff".to_vec());
    for bytes in refused {
        let refusal = |runtime: &Runtime| runtime.load(&bytes).err().unwrap().to_string();
        assert_eq!(refusal(&in_child), refusal(&in_process));
    }
}

#[test]
fn a_caller_with_a_small_stack_compiles() {
    let runtime = runtime(CompileLimits::default());
    let load = move || runtime.load(&shipped("balanced")).map(drop);
    std::thread::Builder::new().stack_size(128 << 10).spawn(load).unwrap().join().unwrap().unwrap();
}

#[test]
fn too_much_memory_is_refused_as_such() {
    let limits = CompileLimits { memory_bytes: 128 << 20, ..CompileLimits::default() };
    let straight = bombs().into_iter().find(|bomb| bomb.name == "straight code").unwrap();
    let refused = runtime(limits).load(&straight.bytes).err().unwrap();
    assert!(matches!(refused, LoadError::CompileMemory { limit_bytes } if limit_bytes == 128 << 20), "{refused}");
    assert_eq!(refused.to_string(), "compiling needs more than 128 MiB of memory");
    assert_eq!(children(), "");
}

#[test]
fn every_bomb_ends() {
    let patient = runtime(CompileLimits::default());
    let impatient = runtime(CompileLimits { time: Duration::from_secs(1), ..CompileLimits::default() });
    let left = Mutex::new(bombs());
    assert!(left.lock().unwrap().len() >= 20);
    let next = || left.lock().unwrap().pop();
    let explode = || {
        while let Some(bomb) = next() {
            let runtime = if bomb.is_within { &impatient } else { &patient };
            let refused = runtime.load(&bomb.bytes).err().expect("no bomb is a policy");
            let is_expected = match &refused {
                LoadError::TooComplex { .. } => !bomb.is_within,
                // It was compiled, and exports nothing.
                LoadError::MissingExport { .. } => bomb.is_within,
                LoadError::CompileDeadline { .. } | LoadError::CompileMemory { .. } => bomb.is_within,
                _ => false,
            };
            assert!(is_expected, "{}: {refused}", bomb.name);
            assert_eq!(children(), "", "{}", bomb.name);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(explode);
        scope.spawn(explode);
    });
}

#[test]
fn it_ends_with_the_process_that_started_it() {
    // Not replaced by the command, because it has one more.
    let script = "\"$0\" compile-component; :";
    let mut parent = Command::new("/bin/sh")
        .args(["-c", script, MERIDIAN])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = parent.stdin.take().unwrap();
    // More than a pipe holds: it has begun to read, and waits for the end, which does not come.
    input.write_all(&vec![b' '; 256 << 10]).unwrap();
    parent.kill().unwrap();
    parent.wait().unwrap();
    // The end of this pipe is the end of every process that has it.
    let mut output = Vec::new();
    parent.stdout.take().unwrap().read_to_end(&mut output).unwrap();
    assert_eq!(output, b"");
    drop(input);
}

#[test]
fn the_command_starts_itself() {
    let folder = folder("bomb");
    std::fs::create_dir_all(&folder).unwrap();
    let bomb = bombs().into_iter().find(|bomb| bomb.is_within && bomb.name == "blocks that carry locals").unwrap();
    std::fs::write(folder.join("bomb.wasm"), bomb.bytes).unwrap();
    let mut command = Command::new(MERIDIAN);
    let mut checking = command.args(["policy", "check", "bomb.wasm"]).current_dir(&folder).spawn().unwrap();
    let id = checking.id();
    let started = loop {
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        let line = |child: &str| std::fs::read_to_string(format!("/proc/{child}/cmdline")).unwrap_or_default();
        let lines: Vec<String> = children.split_whitespace().map(line).collect();
        match lines.into_iter().find(|line| line.ends_with("compile-component\0")) {
            Some(line) => break line,
            None => assert!(checking.try_wait().unwrap().is_none(), "it ended without a process that compiles"),
        }
        std::thread::yield_now();
    };
    assert_eq!(started, "/proc/self/exe\0compile-component\0");
    checking.kill().unwrap();
    checking.wait().unwrap();
}

/// Run it with this on standard input; returns the exit code, standard output and standard error.
fn run_with(input: &[u8]) -> (Option<i32>, Vec<u8>, String) {
    let mut process = Command::new(MERIDIAN)
        .arg("compile-component")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    process.stdin.take().unwrap().write_all(input).unwrap();
    let output = process.wait_with_output().unwrap();
    (output.status.code(), output.stdout, String::from_utf8(output.stderr).unwrap())
}

#[test]
fn it_works_for_the_process_that_started_it() {
    let request = |parent: u32| format!("{{\"parent\":{parent},\"cpu_s\":9,\"memory_bytes\":1073741824}}\n");
    let component = wat::parse_str("(component)").unwrap();
    let ask = |parent| run_with(&[request(parent).as_bytes(), &component].concat());
    let (code, stdout, stderr) = ask(std::process::id());
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(stdout.starts_with(b"{\"compiled\":{\"bytes\":"), "an answer");
    let (code, stdout, stderr) = ask(std::process::id() + 1);
    assert_eq!((code, stdout.as_slice()), (Some(2), b"".as_slice()));
    assert_eq!(stderr, "error: the process that wants the component has ended\n");
    let (code, _, stderr) = run_with(b"\0asm");
    assert_eq!(code, Some(2));
    assert_eq!(stderr, "error: standard input: expected a request of the process that compiles a component\n");
}

#[test]
fn the_help_does_not_name_it() {
    let output = Command::new(MERIDIAN).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(help.contains("policy") && !help.contains("compile-component"), "{help}");
}

//! Measures what hostile components cost the process that has them compiled, and what a process of its own adds to the
//! time to compile; one JSON object a line.
//!
//!     cargo build --release --workspace --examples
//!     target/release/examples/compile_figures bombs|overhead [COUNT]
//!
//! `overhead` needs the components: `make policies`.

#[path = "../tests/support/mod.rs"]
mod support;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use meridian_wasm::{COMPILE_DEADLINE, CompileCommand, LoadError, Runtime, compile_child};
use support::bombs::{Bomb, bombs};

/// The argument with which this program starts itself to compile.
const COMPILE: &str = "compile";

fn main() {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_default();
    let count = args.next().map(|count| count.parse().expect("COUNT is a number"));
    match what.as_str() {
        COMPILE => std::process::exit(compile_child().into()),
        "bombs" => explode(),
        "overhead" => overhead(count.unwrap_or(30)),
        other => {
            eprintln!("error: {other:?}: expected bombs or overhead");
            std::process::exit(2);
        }
    }
}

fn print(name: &str, value: f64, unit: &str) {
    println!("{}", serde_json::json!({ "name": name, "value": value, "unit": unit }));
}

fn in_processes() -> Runtime {
    let command = CompileCommand::new("/proc/self/exe", [COMPILE]);
    Runtime::new(None).expect("wasmtime starts").with_compiler(command)
}

/// How a bomb ended.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Refused,
    Compiled,
    OutOfTime,
    OutOfMemory,
}

/// Compile every bomb with the limits of an engine, two at a time.
fn explode() {
    let bombs = bombs();
    let (here, runtime) = (Runtime::new(None).expect("wasmtime starts"), in_processes());
    // What the first component needs for good is no growth.
    for runtime in [&here, &runtime] {
        assert!(runtime.load(&wat::parse_str("(component)").expect("text")).is_err(), "it is no policy");
    }
    reset_peak();
    let before_mib = memory_mib("VmRSS:");
    let (next, ends) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let worker = || {
        while let Some(bomb) = bombs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (end, took) = compile(&runtime, bomb);
            let limits = if bomb.is_within { "within" } else { "beyond" };
            eprintln!("  {}, {limits} the limits: {end:?} after {:.2} s", bomb.name, took.as_secs_f64());
            ends.lock().expect("no worker panics").push((end, took));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(worker);
        scope.spawn(worker);
    });
    let (peak_mib, after_mib) = (memory_mib("VmHWM:"), memory_mib("VmRSS:"));
    let ends = ends.into_inner().expect("no worker panics");
    let count = |wanted| ends.iter().filter(|(end, _)| *end == wanted).count() as f64;
    let longest = ends.iter().map(|(_, took)| *took).max().unwrap_or_default();
    print("bombs", ends.len() as f64, "components");
    print("bombs refused by the survey", count(End::Refused), "components");
    print("bombs compiled within the limits", count(End::Compiled), "components");
    print("bombs ended at the limit of time", count(End::OutOfTime), "components");
    print("bombs ended at the limit of memory", count(End::OutOfMemory), "components");
    print("limit of time", COMPILE_DEADLINE.as_secs_f64(), "s");
    print("longest time of a bomb", longest.as_secs_f64(), "s");
    print("processes left", children() as f64, "processes");
    print("resident memory before the bombs", before_mib, "MiB");
    print("resident memory during the bombs, most over before", peak_mib - before_mib, "MiB");
    print("resident memory after the bombs, over before", after_mib - before_mib, "MiB");
    // The same by one of them, without a process of its own.
    let straight = bombs.iter().find(|bomb| bomb.name == "straight code").expect("it is there");
    reset_peak();
    let before_mib = memory_mib("VmRSS:");
    compile(&here, straight);
    let growth_mib = memory_mib("VmHWM:") - before_mib;
    print("resident memory during straight code compiled on a thread, most over before", growth_mib, "MiB");
}

fn compile(runtime: &Runtime, bomb: &Bomb) -> (End, Duration) {
    let started = Instant::now();
    let loaded = runtime.load(&bomb.bytes);
    let took = started.elapsed();
    let end = match loaded.err().expect("no bomb is a policy") {
        LoadError::TooComplex { .. } => End::Refused,
        // It has no world.
        LoadError::MissingExport { .. } => End::Compiled,
        LoadError::CompileDeadline { .. } => End::OutOfTime,
        LoadError::CompileMemory { .. } => End::OutOfMemory,
        other => panic!("{}: {other}", bomb.name),
    };
    (end, took)
}

/// The time to load a shipped component, compiled here and in a process of its own, in turn.
fn overhead(count: usize) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/policies/balanced.wasm");
    let component = std::fs::read(path).unwrap_or_else(|error| panic!("{path}: {error}: run `make policies` first"));
    let runtimes = [Runtime::new(None).expect("wasmtime starts"), in_processes()];
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..count {
        for (runtime, times) in runtimes.iter().zip(&mut times) {
            let started = Instant::now();
            runtime.load(&component).expect("a shipped policy is one");
            times.push(started.elapsed().as_secs_f64() * 1e3);
        }
    }
    let [here, there] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    print("compiling balanced in this process, median", here, "ms");
    print("compiling balanced in a process of its own, median", there, "ms");
}

/// Memory of this process, from a line of its status.
fn memory_mib(line: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux tells");
    let line = status.lines().find(|text| text.starts_with(line)).expect("it has the line");
    let kib: f64 = line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number of KiB");
    kib / 1024.0
}

/// Measure the peak of the resident memory from now on.
fn reset_peak() {
    std::fs::write("/proc/self/clear_refs", "5").expect("Linux lets a process do so");
}

/// Processes that threads of this one started, ended ones that were not reaped included.
fn children() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").expect("Linux tells");
    let of = |thread: std::path::PathBuf| std::fs::read_to_string(thread.join("children")).unwrap_or_default();
    threads.flatten().map(|thread| of(thread.path()).split_whitespace().count()).sum()
}

//! Measures the longest decision of components whose time goes into what nothing stops, and what bounding it costs; one
//! JSON object a line.
//!
//!     cargo build --release --workspace --examples
//!     target/release/examples/bulk_figures decisions|stack|imports [COUNT]

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use meridian_core::slot::{Contender, DispatchSlot, StrikeLimits};
use meridian_core::{
    Batch, Decision, EngineFacts, FaultKind, Markers, MeridianConfig, MeridianScheduler, NewRequest, Policy, RowId,
    Step, Targets,
};
use meridian_wasm::{EPOCH_TICK, LoadError, PolicyComponent, PolicyLimits, Runtime, WasmPolicy};
use support::bulk::{Bulk, corpus};

/// Calls of a policy that faults in every one: each is followed by a new start.
const FAULTING_CALLS: usize = 300;
/// Most time for one measurement; what it did until then is what it says.
const LONGEST: Duration = Duration::from_millis(400);
/// Runs of an engine for each component. The machine may stop any step for milliseconds, but hardly at the same place of
/// most runs, so the median of the longest steps is what the component costs.
const RUNS: usize = 5;

fn main() {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_default();
    let count = args.next().map(|count| count.parse().expect("COUNT is a number")).unwrap_or(10_000);
    match what.as_str() {
        "decisions" => decisions(count),
        "stack" => stack(),
        "imports" => imports(),
        other => {
            eprintln!("error: {other:?}: expected decisions, stack or imports");
            std::process::exit(2);
        }
    }
}

fn targets() -> Targets {
    MeridianConfig::default().scheduler.targets()
}

fn print(name: &str, value: f64, unit: &str) {
    println!("{}", serde_json::json!({ "name": name, "value": value, "unit": unit }));
}

fn start(component: &PolicyComponent, memory_mib: usize) -> WasmPolicy {
    let limits = PolicyLimits { memory_bytes: memory_mib << 20, ..PolicyLimits::default() };
    component.dispatch_policy(limits, targets(), "{}").expect("it starts")
}

/// Longest call and longest step of every component, by kind and memory.
fn decisions(count: usize) {
    let runtime = Runtime::new(None).expect("wasmtime starts");
    let deadline = PolicyLimits::default().deadline;
    print("deadline", deadline.as_secs_f64() * 1e3, "ms");
    print("deadline and its grain", (deadline + EPOCH_TICK * 2).as_secs_f64() * 1e3, "ms");
    for memory_mib in [64, 1024] {
        for bulk in corpus(memory_mib) {
            let component = runtime.load(&bulk.component()).expect("it is a component");
            let mut calls = calls(&bulk, &component, count);
            let runs: Vec<Measured> = (0..RUNS).map(|_| steps(&bulk, &component, count)).collect();
            let mut longest_steps: Vec<f64> =
                runs.iter().map(|run| run.ms.iter().copied().fold(0.0, f64::max)).collect();
            let name = |what: &str| format!("{} of {memory_mib} MiB: {what}", bulk.name);
            print(&name("calls"), calls.ms.len() as f64, "calls");
            print(&name("calls that faulted"), calls.faults as f64, "calls");
            print(&name("longest call"), longest(&mut calls.ms), "ms");
            print(&name("median call"), percentile(&mut calls.ms, 0.5), "ms");
            print(&name("p99 of the calls"), percentile(&mut calls.ms, 0.99), "ms");
            print(&name("longest start after a fault"), longest(&mut calls.recoveries_ms), "ms");
            print(&name("median start after a fault"), percentile(&mut calls.recoveries_ms, 0.5), "ms");
            print(&name("steps"), runs.iter().map(|run| run.ms.len()).sum::<usize>() as f64, "steps");
            print(&name("faults of the steps"), runs.iter().map(|run| run.faults).sum::<u64>() as f64, "faults");
            print(&name("longest step"), longest(&mut longest_steps), "ms");
            print(&name("longest step, median of runs"), percentile(&mut longest_steps, 0.5), "ms");
        }
    }
}

#[derive(Default)]
struct Measured {
    ms: Vec<f64>,
    recoveries_ms: Vec<f64>,
    faults: u64,
}

/// The policy alone, called again and again.
fn calls(bulk: &Bulk, component: &PolicyComponent, count: usize) -> Measured {
    let mut policy = start(component, bulk.memory_mib);
    let facts = Step { token_budget: 512, ..Step::default() };
    let batch = Batch { facts: &facts, candidates: 0, columns: &[], finished: &[] };
    let mut decision = Decision::default();
    let mut measured = Measured::default();
    let begun = Instant::now();
    while measured.ms.len() < count && begun.elapsed() < LONGEST && measured.faults < FAULTING_CALLS as u64 {
        let started = Instant::now();
        let decided = policy.decide(&batch, &mut decision);
        measured.ms.push(started.elapsed().as_secs_f64() * 1e3);
        if decided.is_err() {
            measured.faults += 1;
            let started = Instant::now();
            let recovered = policy.recover();
            measured.recoveries_ms.push(started.elapsed().as_secs_f64() * 1e3);
            if recovered.is_err() {
                // It took too long. An engine would try again later.
                policy = start(component, bulk.memory_mib);
            }
        }
    }
    measured
}

/// Steps of an engine whose dispatch policy it is, with strikes and quarantine as configured by default.
fn steps(bulk: &Bulk, component: &PolicyComponent, count: usize) -> Measured {
    let config = MeridianConfig::default();
    let candidate = Contender::new(Box::new(start(component, bulk.memory_mib)), "", "figures");
    let slot = DispatchSlot::with_version(candidate, targets(), StrikeLimits::default());
    let markers = Markers::new(vec![vec![1]], vec![vec![2]], vec![]).expect("usable markers");
    let mut engine = MeridianScheduler::for_engine(slot, markers, &config.scheduler, 16);
    let slots: Vec<RowId> = (0..4)
        .map(|_| {
            let request = NewRequest { prompt: &[0, 1], ..NewRequest::default() };
            engine.mirror().table.insert(&request).expect("finite times")
        })
        .collect();
    let mut measured = Measured::default();
    for step in 0..count {
        let facts = EngineFacts {
            now_ms: step as f64 * 5.0,
            token_budget: 512,
            total_blocks: 64,
            free_blocks: 8,
            decode_tokens: 1,
            ..EngineFacts::default()
        };
        let started = Instant::now();
        engine.plan(&facts, &slots, &[]);
        measured.ms.push(started.elapsed().as_secs_f64() * 1e3);
    }
    measured.faults = FaultKind::ALL.into_iter().map(|kind| engine.slot().stats().faults(kind)).sum();
    measured
}

fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (values.len() as f64 * share).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

fn longest(values: &mut [f64]) -> f64 {
    percentile(values, 1.0)
}

/// A recursive component on threads with stacks of several sizes.
fn stack() {
    let runtime = Runtime::new(None).expect("wasmtime starts");
    let recursive = support::HOSTILE.iter().find(|hostile| hostile.name == "deep-recursion").expect("it is there");
    let component = runtime.load(&recursive.component()).expect("it is a component");
    for stack_kib in [128, 256, 512, 8192] {
        // Whether it survives is the question, not how fast this machine is.
        let mut policy = component.dispatch_policy(PolicyLimits::UNHURRIED, targets(), "{}").expect("it starts");
        let thread = std::thread::Builder::new().stack_size(stack_kib << 10).spawn(move || {
            let facts = Step::default();
            let batch = Batch { facts: &facts, candidates: 0, columns: &[], finished: &[] };
            (0..100)
                .filter(|_| {
                    let fault = policy.decide(&batch, &mut Decision::default()).expect_err("it recurses");
                    policy.recover().expect("it starts again");
                    fault.kind == FaultKind::Trap
                })
                .count()
        });
        let traps = thread.expect("a thread starts").join().expect("it does not panic");
        print(&format!("recursions without end that trapped, of 100, stack of {stack_kib} KiB"), traps as f64, "calls");
    }
}

/// How long a component with an import keeps the loader, beside the same one without.
fn imports() {
    let runtime = Runtime::new(None).expect("wasmtime starts");
    let module = format!("(core module {})", "(func)".repeat(20_000));
    for (name, import) in [("with an import", "(import \"wasi:clocks/wall-clock@0.2.0\" (instance))"), ("without", "")]
    {
        let bytes = wat::parse_str(format!("(component {import} {module})")).expect("it is WebAssembly text");
        let started = Instant::now();
        let refused = runtime.load(&bytes).err().expect("it is no policy");
        print(&format!("refusing 20,000 functions {name}"), started.elapsed().as_secs_f64() * 1e3, "ms");
        let by_import = matches!(refused, LoadError::UnknownImport { .. });
        assert_eq!(by_import, !import.is_empty(), "{refused}");
    }
}

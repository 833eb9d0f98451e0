//! Faults of a good policy on a machine that gives it little time, and the processor time of one that never ends; one JSON
//! object a line. `checks/areas/operations.py` stops and continues the process, so that it gets a share of a core.
//!
//!     cargo build --release --workspace --examples
//!     target/release/examples/quota_figures good COMPONENT SECONDS
//!     target/release/examples/quota_figures endless

#[path = "../tests/support/mod.rs"]
mod support;
#[path = "../src/thread_time.rs"]
mod thread_time;

use std::time::{Duration, Instant};

use meridian_core::slot::{Contender, DispatchSlot, StrikeLimits};
use meridian_core::{Batch, Decision, MeridianConfig, NewRequest, Policy, RequestTable, RowId, Step};
use meridian_wasm::{PolicyLimits, Runtime};

/// Requests that each step ranks.
const REQUESTS: usize = 1024;
/// Calls of the endless component.
const ENDLESS_CALLS: usize = 100;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["good", component, seconds] => good(component, seconds.parse().expect("SECONDS is a number")),
        ["endless"] => endless(),
        _ => {
            eprintln!("error: {args:?}: expected good COMPONENT SECONDS, or endless");
            std::process::exit(2);
        }
    }
}

fn print(name: &str, value: f64, unit: &str) {
    println!("{}", serde_json::json!({ "name": name, "value": value, "unit": unit }));
}

/// Steps one after the other, with the same policy in shadow.
fn good(component: &str, seconds: u64) {
    let targets = MeridianConfig::default().scheduler.targets();
    let runtime = Runtime::new(None).expect("wasmtime starts");
    let loaded = runtime.load_file(component.as_ref()).expect("it is a component");
    let contender = || {
        let policy = loaded.dispatch_policy(PolicyLimits::default(), targets, "{}").expect("it starts");
        Contender::new(Box::new(policy), loaded.sha256(), component)
    };
    let mut slot = DispatchSlot::with_version(contender(), targets, StrikeLimits::default());
    let control = slot.control();
    control.shadow(contender()).expect("a thread for the shadow");
    let mut table = RequestTable::default();
    let rows: Vec<RowId> = (0..REQUESTS).map(|_| table.insert(&NewRequest::default()).expect("finite times")).collect();
    let (started, mut steps, mut longest, mut quarantines, mut is_in) = (Instant::now(), 0_u64, 0.0_f64, 0, false);
    while started.elapsed() < Duration::from_secs(seconds) {
        let now_ms = started.elapsed().as_secs_f64() * 1e3;
        let begin = Instant::now();
        slot.decide(&Step { now_ms, ..Step::default() }, &table, &rows, 16);
        longest = longest.max(begin.elapsed().as_secs_f64() * 1e3);
        steps += 1;
        if steps.is_multiple_of(16) {
            let is_now = control.status().quarantine.is_some();
            quarantines += u32::from(is_now && !is_in);
            is_in = is_now;
        }
    }
    let status = control.status();
    print("steps", steps as f64, "steps");
    print("longest decision", longest, "ms");
    print("faults", status.faults.iter().map(|(_, count)| *count as f64).sum(), "faults");
    print("faults in shadow", status.shadow.map_or(0.0, |shadow| shadow.faults as f64), "faults");
    print("quarantines", f64::from(quarantines), "quarantines");
}

/// Processor time of each decision of a component that never ends: from its first call on, and after a long calm.
fn endless() {
    let targets = MeridianConfig::default().scheduler.targets();
    let runtime = Runtime::new(None).expect("wasmtime starts");
    let limits = PolicyLimits::default();
    print("deadline", limits.deadline.as_secs_f64() * 1e3, "ms");
    for (name, calm) in [("endless from the first call", 0), ("endless after 1,000 calls", 1000)] {
        let decide = format!(
            "(if (i32.gt_s (global.get $calls) (i32.const {calm})) (then (loop $l (br $l))))
             (call $answer (i32.const 4096) (local.get $candidates) (i32.const 0) (i32.const 0))"
        );
        let component = runtime.load(&support::component(&support::module("", &decide))).expect("it is a component");
        let mut policy = component.dispatch_policy(limits, targets, "{}").expect("it starts");
        let mut longest = Duration::ZERO;
        let (facts, mut decision) = (Step::default(), Decision::default());
        for _ in 0..ENDLESS_CALLS {
            let batch = Batch { facts: &facts, candidates: 0, columns: &[], finished: &[] };
            for _ in 0..calm {
                policy.decide(&batch, &mut decision).expect("it answers so far");
            }
            let before = thread_time::thread_time().expect("Linux has the clock");
            policy.decide(&batch, &mut decision).expect_err("it never ends");
            longest = longest.max(thread_time::thread_time().expect("it was there") - before);
            policy.start_anew().expect("it starts again");
        }
        print(&format!("{name}: longest decision, processor time"), longest.as_secs_f64() * 1e3, "ms");
    }
}

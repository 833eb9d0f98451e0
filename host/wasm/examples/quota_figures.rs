//! The processor time of decisions of a policy that never ends, a JSON object a figure.

#[path = "../tests/support/mod.rs"]
mod support;
#[path = "../src/thread_time.rs"]
mod thread_time;

use std::time::Duration;

use meridian_core::{Batch, Decision, MeridianConfig, Policy, Step};
use meridian_wasm::{PolicyLimits, Runtime};

/// Calls of the endless component.
const ENDLESS_CALLS: usize = 100;

fn print(name: &str, value: f64, unit: &str) {
    println!("{}", serde_json::json!({ "name": name, "value": value, "unit": unit }));
}

/// Processor time of each decision of a component that never ends: from its first call on, and after a long calm.
fn main() {
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

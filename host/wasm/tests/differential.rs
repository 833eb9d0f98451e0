//! The shipped policies decide the same natively and as components, bit for bit.
//!
//! Needs the components: `make policies`, or MERIDIAN_POLICIES naming their folder.

use std::cell::RefCell;
use std::path::PathBuf;

use meridian_core::{Batch, Decision, Dispatch, MeridianConfig, Policy, SlotKind, Step, native};
use meridian_wasm::Runtime;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::support;

fn component_path(name: &str) -> PathBuf {
    let folder = std::env::var_os("MERIDIAN_POLICIES")
        .map_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/policies")), PathBuf::from);
    let path = folder.join(format!("{name}.wasm"));
    assert!(path.is_file(), "{} is missing: run `make policies` first", path.display());
    path
}

/// Mostly plausible values, sometimes any bits at all.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => (0u32..4).prop_map(|v| v as f32),
        4 => 0.0f32..1.0e6,
        1 => any::<u32>().prop_map(f32::from_bits),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let counts = (1u32..100_000, 0u32..2000, 0u32..2000, 0u32..2000, 1u32..9);
    let times = (
        prop_oneof![Just(0.0f32), 0.0f32..50.0],
        prop_oneof![Just(0.0f32), 1e-6f32..10.0],
        prop_oneof![Just(0.0f32), 1e-6f32..1.0],
    );
    (counts, times, any::<u32>()).prop_map(|((token_budget, think, output, waiting, decode_tokens), times, blocks)| {
        Step {
            now_ms: f64::from(blocks),
            token_budget,
            free_blocks: blocks / 2,
            total_blocks: blocks,
            running: think + output,
            running_think: think,
            running_output: output,
            waiting,
            decode_tokens,
            fixed_ms: times.0,
            decode_token_ms: times.1,
            prefill_token_ms: times.2,
            decode_context_tokens: u64::from(blocks) * 16,
        }
    })
}

/// Keys, token budget, token caps, keys of victims.
type Bits = (Vec<u32>, Option<u32>, Vec<u32>, Vec<u32>);

fn bits(decision: &Decision) -> Bits {
    // A NaN's payload is not part of the contract: the host only asks whether a key is NaN.
    let key = |key: &f32| if key.is_nan() { u32::MAX } else { key.to_bits() };
    let keys = |keys: &[f32]| -> Vec<u32> { keys.iter().map(key).collect() };
    (keys(&decision.keys), decision.token_budget, decision.token_caps.clone(), keys(&decision.victim_keys))
}

/// Options that change what a policy does with a batch.
const WITH_OPTIONS: [(&str, &str); 6] = [
    ("pascal", r#"{"quantum_tokens": 1, "demote_tokens": 3, "lead_tokens": 0, "tpot_ms": 0.5}"#),
    ("srpt", r#"{"forecast": "attained"}"#),
    ("mlfq", r#"{"quantum_tokens": 7}"#),
    ("fair-share", r#"{"input_weight": 0.5, "output_weight": 0}"#),
    ("qoe", r#"{"reading_tok_s": 900.5}"#),
    ("qoserve", r#"{"alpha_ms": 0.5}"#),
];

fn has_options(name: &str) -> bool {
    WITH_OPTIONS.iter().any(|(with, _)| *with == name)
}

/// Policies that keep a state too: both builds see the same batches in the same order.
#[test]
fn native_and_component_agree_on_random_batches() {
    let runtime = Runtime::new(None).unwrap();
    for (name, config) in Dispatch::NATIVES.iter().map(|name| (*name, "{}")).chain(WITH_OPTIONS) {
        let component = runtime.load_file(&component_path(name)).unwrap();
        let targets = MeridianConfig::default().scheduler.targets();
        let wasm = component.dispatch_policy(support::LIMITS, targets, config).unwrap();
        let native = native::policy(name, targets, config).unwrap();
        assert_eq!(native.inputs(), wasm.inputs());
        assert_eq!(native.description(), wasm.description());
        let width = native.inputs().len();
        // The runner takes a closure that it may call through a shared reference.
        let (native, wasm) = (RefCell::new(native), RefCell::new(wasm));
        let batches =
            (0usize..300).prop_flat_map(move |n| (Just(n), proptest::collection::vec(value(), n * width), step()));
        let mut runner = TestRunner::new(Config { cases: 2000, failure_persistence: None, ..Config::default() });
        let outcome = runner.run(&batches, |(candidates, columns, step)| {
            let batch = Batch { facts: &step, candidates, columns: &columns, finished: &[] };
            let (mut a, mut b) = (Decision::default(), Decision::default());
            native.borrow_mut().decide(&batch, &mut a).unwrap();
            wasm.borrow_mut().decide(&batch, &mut b).unwrap();
            prop_assert_eq!(bits(&a), bits(&b));
            Ok(())
        });
        outcome.unwrap_or_else(|error| panic!("{name} {config}: {error}"));
        assert_eq!(native.into_inner().snapshot().unwrap(), wasm.into_inner().snapshot().unwrap(), "{name} {config}");
    }
}

#[test]
fn components_are_small_and_import_nothing() {
    for name in Dispatch::NATIVES {
        let bytes = std::fs::metadata(component_path(name)).unwrap().len();
        // A parser of numbers is as large as all the rest.
        let most = if has_options(name) { 128 << 10 } else { 72 << 10 };
        assert!(bytes < most, "{name}: {bytes} bytes");
        // Loading refuses any import.
        Runtime::new(None).unwrap().load_file(&component_path(name)).unwrap();
    }
}

#[test]
fn unknown_options_are_refused() {
    let runtime = Runtime::new(None).unwrap();
    let targets = MeridianConfig::default().scheduler.targets();
    for name in Dispatch::NATIVES {
        let component = runtime.load_file(&component_path(name)).unwrap();
        let refused = component.dispatch_policy(support::LIMITS, targets, r#"{"speed": 9}"#).err().unwrap();
        assert_eq!(refused.to_string().contains("takes no options"), !has_options(name), "{name}: {refused}");
        assert!(native::policy::<Dispatch>(name, targets, r#"{"speed": 9}"#).is_err());
    }
}

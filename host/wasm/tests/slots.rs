//! The eviction and budget slots: shipped policies, natively and as components, on random batches; components that fill
//! several slots; hostile ones. Needs the components: `make policies`.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use meridian_core::budget::{BudgetCandidate, BudgetDecider, Load, Observed, Point, Thresholds, Verdict};
use meridian_core::slot::{BudgetSlot, EvictionSlot, Source};
use meridian_core::{
    Batch, BlockId, BlockTier, Budget, BudgetDecision, Column, Decision, Dispatch, Eviction, EvictionCandidate,
    EvictionSubject, FaultKind, Memory, MeridianConfig, Policy, Ranking, SlotKind, SlotName, Step, Subject, Targets,
    native,
};
use meridian_wasm::{LoadError, Runtime, WasmPolicy};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use support::{LIMITS, SHORT_LIMITS};

use crate::support;

fn targets() -> Targets {
    MeridianConfig::default().scheduler.targets()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A shipped policy of slot `K`, natively and as a component.
fn both<K: meridian_wasm::GuestKind>(runtime: &Runtime, name: &str) -> [Box<dyn Policy<K>>; 2] {
    let component = runtime.load_file(&root().join(format!("target/policies/{name}.wasm"))).unwrap();
    let wasm: WasmPolicy<K> = component.policy(LIMITS, targets(), "{}").unwrap();
    [native::policy::<K>(name, targets(), "{}").unwrap(), Box::new(wasm)]
}

/// A block, by the tokens that would have to be computed again.
fn block(computed_tokens: u32) -> EvictionCandidate {
    EvictionCandidate {
        subject: EvictionSubject::Block(BlockId(0)),
        tier: BlockTier::ThinkComplete,
        computed_tokens,
        ..EvictionCandidate::default()
    }
}

/// Mostly plausible values, sometimes any bits at all.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => (0u32..4).prop_map(|v| v as f32),
        4 => 0.0f32..1.0e3,
        1 => any::<u32>().prop_map(f32::from_bits),
    ]
}

/// Ask both builds of a policy about random batches.
fn agree<K: meridian_wasm::GuestKind>(
    name: &str,
    facts: impl Strategy<Value = K::Facts> + Clone,
    same: impl Fn(&K::Decision, &K::Decision) -> bool,
) {
    let [native, wasm] = both::<K>(&Runtime::new(None).unwrap(), name);
    assert_eq!((native.inputs(), native.description()), (wasm.inputs(), wasm.description()));
    let width = native.inputs().len();
    // The runner takes a closure that it may call through a shared reference.
    let (native, wasm) = (RefCell::new(native), RefCell::new(wasm));
    let batches =
        (0usize..200).prop_flat_map(move |n| (Just(n), proptest::collection::vec(value(), n * width), facts.clone()));
    let mut runner = TestRunner::new(Config { cases: 1000, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&batches, |(candidates, columns, facts)| {
        let batch = Batch { facts: &facts, candidates, columns: &columns, finished: &[] };
        let (mut a, mut b) = (K::Decision::default(), K::Decision::default());
        native.borrow_mut().decide(&batch, &mut a).unwrap();
        wasm.borrow_mut().decide(&batch, &mut b).unwrap();
        prop_assert!(same(&a, &b), "{:?} and {:?}", a, b);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
}

#[test]
fn native_and_component_agree_on_random_batches() {
    let memory = (any::<bool>(), any::<u32>(), any::<u32>()).prop_map(|(blocks, free_blocks, cached_blocks)| Memory {
        now_ms: f64::from(free_blocks),
        subject: if blocks { Subject::Blocks } else { Subject::Requests },
        free_blocks,
        cached_blocks,
        total_blocks: free_blocks.saturating_add(cached_blocks),
    });
    let bits = |keys: &[f32]| -> Vec<u32> {
        keys.iter().map(|key| if key.is_nan() { u32::MAX } else { key.to_bits() }).collect()
    };
    for name in Eviction::NATIVES {
        agree::<Eviction>(name, memory.clone(), move |a, b| {
            bits(&a.keys) == bits(&b.keys) && bits(&a.keep_ms) == bits(&b.keep_ms)
        });
    }
    let counts = (any::<u32>(), prop_oneof![0u32..100, any::<u32>()], prop_oneof![0u32..100, any::<u32>()]);
    let load = (any::<bool>(), counts, 0.0..4.0f64, 0.1..4.0f64).prop_map(|(starts, counts, variance, index)| {
        let (now, thinking, waiting) = counts;
        let configured =
            Thresholds { eat_variance_threshold: variance, rpdi_threshold: index, ..Thresholds::default() };
        let point = if starts { Point::Start } else { Point::Probe };
        Load { now_ms: f64::from(now), point, thinking, waiting, configured, ..Load::default() }
    });
    for name in Budget::NATIVES {
        agree::<Budget>(name, load.clone(), |a: &BudgetDecision, b| a == b);
    }
}

#[test]
fn a_component_may_fill_several_slots_each_with_an_instance_of_its_own() {
    let runtime = Runtime::new(None).unwrap();
    let load = |name: &str| runtime.load_file(&root().join(format!("target/policies/{name}.wasm"))).unwrap();
    assert_eq!(load("noop").slots(), SlotName::ALL);
    assert_eq!(load("tiered-lru").slots(), [SlotName::Eviction]);
    let error = load("tiered-lru").policy::<Dispatch>(LIMITS, targets(), "{}").err().unwrap();
    assert!(matches!(error, LoadError::NotFilled { .. }));
    assert_eq!(error.to_string(), "does not fill slot dispatch, only eviction");
    let noop = load("noop");
    let mut eviction = EvictionSlot::new(Box::new(noop.policy(LIMITS, targets(), "{}").unwrap()), targets());
    let mut budget = BudgetSlot::new(Box::new(noop.policy(LIMITS, targets(), "{}").unwrap()), targets());
    let block = block(7);
    let requests = Memory { subject: Subject::Requests, ..Memory::default() };
    let (source, Ranking { keys, .. }) = eviction.decide(&requests, &[block]);
    assert_eq!((source, &keys[..]), (Source::Default, &[7.0][..]), "tiered-lru decides in its place");
    assert_eq!(budget.probe(&Load::default(), &[BudgetCandidate::default()]), [Verdict::KeepThinking]);
    assert_eq!(budget.stats().default, 1);
}

/// What a hostile component does, and the fault it is counted as.
const HOSTILE: [(&str, FaultKind); 5] = [
    ("unreachable", FaultKind::Trap),
    ("(loop $l (br $l)) unreachable", FaultKind::Deadline),
    ("(loop $l (br_if $l (i32.ge_s (memory.grow (i32.const 64)) (i32.const 0)))) unreachable", FaultKind::Memory),
    ("(call $list (i32.const 4096) (i32.add (local.get $candidates) (i32.const 1)))", FaultKind::BadAnswer),
    ("(call $list (i32.const 4096) (i32.const 0x3fffffff))", FaultKind::BadAnswer),
];

#[test]
fn hostile_components_cost_a_decision_in_every_slot() {
    let runtime = Runtime::new(None).unwrap();
    let candidates = [block(7); 3];
    let requests = Memory { subject: Subject::Requests, ..Memory::default() };
    for (body, kind) in HOSTILE {
        let limits = if kind == FaultKind::Deadline { SHORT_LIMITS } else { LIMITS };
        let component = runtime.load(&support::filling("eviction-policy", &support::RANK, body)).unwrap();
        let policy: WasmPolicy<Eviction> = component.policy(limits, targets(), "{}").unwrap();
        let mut slot = EvictionSlot::new(Box::new(policy), targets());
        let (source, Ranking { keys, .. }) = slot.decide(&requests, &candidates);
        assert_eq!((source, &keys[..]), (Source::Fallback, &[7.0; 3][..]), "{body}");
        assert_eq!(slot.stats().faults(kind), 1, "{body}");

        let component = runtime.load(&support::filling("budget-policy", &support::PROBE, body)).unwrap();
        let policy: WasmPolicy<Budget> = component.policy(limits, targets(), "{}").unwrap();
        let mut slot = BudgetSlot::new(Box::new(policy), targets());
        let observed = Observed {
            think_tokens: 100,
            is_probed: true,
            probes: 9,
            eat_bits: Some(0.0),
            eat_variance_bits2: Some(0.0),
            ..Observed::default()
        };
        let settled = BudgetCandidate { prompt_tokens: 10, observed, ..BudgetCandidate::default() };
        let verdicts = slot.probe(&Load::default(), &[settled, BudgetCandidate::default()]);
        assert_eq!(verdicts, [Verdict::EndNow, Verdict::KeepThinking], "{body}: native:eat-rpdi decides");
        assert_eq!(slot.stats().faults(kind), 1, "{body}");
        assert_eq!(slot.stats().fallback, 1, "{body}");
    }
}

#[test]
fn odd_verdicts_and_thresholds_are_bad_answers() {
    let runtime = Runtime::new(None).unwrap();
    let ask = |body: &str| {
        let component = runtime.load(&support::filling("budget-policy", &support::PROBE, body)).unwrap();
        let policy: WasmPolicy<Budget> = component.policy(LIMITS, targets(), "{}").unwrap();
        let mut slot = BudgetSlot::new(Box::new(policy), targets());
        slot.probe(&Load::default(), &[BudgetCandidate::default(); 2]);
        slot.last_fault().map(|fault| fault.kind)
    };
    // 0, 1 and 2 are verdicts, 3 is none.
    assert_eq!(
        ask("(i32.store16 (i32.const 4096) (i32.const 0x0201)) (call $list (i32.const 4096) (i32.const 2))"),
        None
    );
    assert_eq!(
        ask("(i32.store16 (i32.const 4096) (i32.const 0x0301)) (call $list (i32.const 4096) (i32.const 2))"),
        Some(FaultKind::BadAnswer)
    );
    let odd = |change: fn(&mut Thresholds)| {
        let mut thresholds = Thresholds::default();
        change(&mut thresholds);
        let decision = BudgetDecision { thresholds: vec![thresholds], verdicts: Vec::new() };
        Budget::check(&Load::default(), &decision, 1).err().map(|fault| fault.kind)
    };
    assert_eq!(odd(|_| {}), None);
    assert_eq!(odd(|given| given.ema_alpha = f64::NAN), Some(FaultKind::BadAnswer));
    assert_eq!(odd(|given| given.eat_probe_interval_tokens = 0), Some(FaultKind::BadAnswer));
    assert_eq!(odd(|given| given.max_think_tokens = 1), Some(FaultKind::BadAnswer));
    assert_eq!(odd(|given| given.rpdi_threshold = 0.0), Some(FaultKind::BadAnswer));
    let misplaced = BudgetDecision { thresholds: Vec::new(), verdicts: vec![Verdict::EndNow] };
    assert!(Budget::check(&Load { point: Point::Start, ..Load::default() }, &misplaced, 1).is_err());
}

#[test]
fn a_component_is_told_which_requests_have_ended() {
    let component = Runtime::new(None).unwrap().load(&support::counting_ended()).unwrap();
    let mut policy = component.dispatch_policy(LIMITS, targets(), "{}").unwrap();
    assert_eq!(policy.inputs(), [Column::Request]);
    let mut keys = |finished: &[u32]| {
        let mut decision = Decision::default();
        let batch = Batch { facts: &Step::default(), candidates: 2, columns: &[1.0, 2.0], finished };
        policy.decide(&batch, &mut decision).unwrap();
        decision.keys
    };
    assert_eq!(keys(&[]), [0.0, 0.0]);
    assert_eq!(keys(&[4, 9, 7]), [3.0, 3.0]);
    assert_eq!(keys(&[1]), [4.0, 4.0]);
    assert_eq!(keys(&[]), [4.0, 4.0]);
}

//! No decision of a component costs more than its deadline, whatever its instructions are.

use std::sync::LazyLock;
use std::time::Duration;

use meridian_core::slot::Contender;
use meridian_core::{Batch, Decision, FaultKind, MeridianConfig, Policy, Step};
use meridian_wasm::{BULK_BYTES_PER_TICK, LoadError, PolicyLimits, Runtime, WasmPolicy};
use support::LIMITS;
use support::bulk::corpus;

use crate::support;

/// The bytes of an engine's deadline, and all the time in the world: nothing here depends on a clock.
const BYTES_OF_2_MS: PolicyLimits = PolicyLimits { deadline: Duration::from_millis(2), ..LIMITS };

fn start(component: &[u8], limits: PolicyLimits) -> WasmPolicy {
    let targets = MeridianConfig::default().scheduler.targets();
    let runtime = Runtime::new(None).expect("a runtime");
    let component = runtime.load(component).expect("a component");
    component.dispatch_policy(limits, targets, "{}").expect("a policy")
}

fn batch(columns: &[f32]) -> Batch<'_> {
    static FACTS: LazyLock<Step> = LazyLock::new(Step::default);
    Batch { facts: &FACTS, candidates: 0, columns, finished: &[] }
}

#[test]
fn bulk_instructions_are_bounded_by_the_deadline() {
    for bulk in corpus(64) {
        let limits = PolicyLimits { memory_bytes: bulk.memory_mib << 20, ..BYTES_OF_2_MS };
        let mut policy = start(&bulk.component(), limits);
        let decided = policy.try_out(&batch(&[]), &mut Decision::default());
        match decided {
            Err(fault) if bulk.is_too_much => {
                assert_eq!(fault.kind, FaultKind::Deadline, "{}: {fault}", bulk.name);
                let bytes = 5 * BULK_BYTES_PER_TICK;
                let says =
                    format!("bulk instructions of more than {bytes} bytes in one call, the most for its deadline");
                assert_eq!(fault.detail, says, "{}", bulk.name);
            }
            Err(fault) => assert_eq!(fault.kind, FaultKind::Trap, "{}: {fault}", bulk.name),
            Ok(()) => assert!(!bulk.is_too_much, "{}", bulk.name),
        }
    }
}

#[test]
fn a_longer_deadline_allows_more() {
    let corpus = corpus(64);
    let fill = corpus.iter().find(|bulk| bulk.name == "memory.fill 64 MiB").unwrap();
    let limits = PolicyLimits { deadline: Duration::from_millis(64), ..LIMITS };
    start(&fill.component(), limits).try_out(&batch(&[]), &mut Decision::default()).unwrap();
}

#[test]
fn a_run_that_waits_refuses_what_an_engine_would() {
    let corpus = corpus(64);
    let fill = corpus.iter().find(|bulk| bulk.name == "memory.fill 64 MiB").unwrap().component();
    let limits = PolicyLimits { bulk: Some(Duration::from_millis(2)), ..LIMITS };
    let fault = Policy::decide(&mut start(&fill, limits), &batch(&[]), &mut Decision::default()).unwrap_err();
    let bytes = 5 * BULK_BYTES_PER_TICK;
    assert!(fault.detail.contains(&format!("more than {bytes} bytes")), "{fault}");
    Policy::decide(&mut start(&fill, LIMITS), &batch(&[]), &mut Decision::default()).unwrap();
}

#[test]
fn segments_are_bounded_by_the_time_to_start_again() {
    let corpus = corpus(64);
    let find = |name: &str| corpus.iter().find(|bulk| bulk.name == name).unwrap().component();
    let limits = PolicyLimits { recovery: Duration::from_millis(5), ..LIMITS };
    let mut copied = start(&find("data segment without an image 16 MiB"), limits);
    let fault = copied.recover().unwrap_err();
    assert_eq!(fault.kind, FaultKind::Init);
    assert!(fault.detail.contains("bulk instructions of more than 5767168 bytes"), "{fault}");
    // A busy machine may take longer than 5 ms over what the bound allows; the bound itself knows no clock.
    let allowed = start(&find("data segment without an image 4 MiB"), limits).recover();
    assert!(allowed.as_ref().err().is_none_or(|fault| !fault.detail.contains("bulk instructions")), "{allowed:?}");
    start(&find("data segment 16 MiB"), LIMITS).recover().unwrap();
}

#[test]
fn a_late_answer_is_a_missed_deadline() {
    // The host copies an answer of 200 MB: no machine does that in a millisecond, and no instruction of the guest is left
    // that could find it late.
    let candidates = 50 << 20;
    let text = support::module("", "(call $answer (i32.const 0) (local.get $candidates) (i32.const 0) (i32.const 0))");
    let text = text.replacen("32)", "4096)", 1);
    let limits = PolicyLimits { deadline: Duration::ZERO, memory_bytes: 256 << 20, ..LIMITS };
    let mut policy = start(&support::component(&text), limits);
    // A machine that stops for a millisecond before the guest begins gives the other fault.
    let late = (0..100).find_map(|_| {
        let mut decision = Decision::default();
        let fault = policy.decide(&Batch { candidates, ..batch(&[]) }, &mut decision).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Deadline, "{fault}");
        policy.recover().unwrap();
        (fault.detail != "wasm trap: interrupt").then_some(fault.detail)
    });
    let late = late.unwrap();
    assert!(late.starts_with("answered after ") && late.ends_with(" ms, expected at most 0 ms"), "{late}");
}

#[test]
fn a_trial_has_its_own_deadline() {
    // 50 million rounds take some 20 ms.
    let rounds = "(local $left i32) (local.set $left (i32.const 50000000))
        (loop $l (br_if $l (local.tee $left (i32.sub (local.get $left) (i32.const 1)))))
        (call $answer (i32.const 4096) (local.get $candidates) (i32.const 0) (i32.const 0))";
    let (local, rounds) = rounds.split_once(") ").unwrap();
    let text = support::module("", rounds)
        .replace("(result i32)\n    (global.set $calls", &format!("(result i32) {local})\n    (global.set $calls"));
    let mut policy = start(&support::component(&text), BYTES_OF_2_MS);
    let late = policy.decide(&batch(&[]), &mut Decision::default()).unwrap_err();
    assert_eq!(late.kind, FaultKind::Deadline, "{late}");
    policy.recover().unwrap();
    assert!(Contender::new(Box::new(policy), "", "test").warm_up().unwrap().decides);
}

#[test]
fn a_recursive_component_on_a_small_stack_traps() {
    let recursive = support::HOSTILE.iter().find(|hostile| hostile.name == "deep-recursion").unwrap();
    for stack_bytes in [128 << 10, 256 << 10, 512 << 10, 8 << 20] {
        let mut policy = start(&recursive.component(), LIMITS);
        let thread = std::thread::Builder::new().stack_size(stack_bytes).spawn(move || {
            let fault = policy.decide(&batch(&[]), &mut Decision::default()).unwrap_err();
            policy.recover().unwrap();
            fault
        });
        let fault = thread.unwrap().join().unwrap();
        assert_eq!(fault.kind, FaultKind::Trap, "{stack_bytes}: {fault}");
    }
}

#[test]
fn arrays_are_refused() {
    let text = support::module("", "(call $answer (i32.const 4096) (i32.const 0) (i32.const 0) (i32.const 0))");
    let with_array = text.replacen(
        "(module\n",
        "(module (type $a (array (mut i8)))\n (func (drop (array.new $a (i32.const 0) (i32.const 1000000))))\n",
        1,
    );
    let core = wat::parse_str(with_array).unwrap();
    let component = wat::parse_str("(component)").unwrap();
    // A section of one core module: wit-component would refuse it.
    let mut bytes = component;
    bytes.push(1);
    let mut length = core.len();
    while length >= 0x80 {
        bytes.push(length as u8 | 0x80);
        length >>= 7;
    }
    bytes.push(length as u8);
    bytes.extend(core);
    let error = Runtime::new(None).unwrap().load(&bytes).err().unwrap();
    assert!(matches!(&error, LoadError::Invalid { .. }), "{error}");
}

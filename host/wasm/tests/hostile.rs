//! A hostile component costs one decision at a time, never a request or the host.

use meridian_core::slot::{Contender, DispatchSlot, Source, StrikeLimits};
use meridian_core::{
    EngineFacts, FaultKind, Markers, MeridianConfig, MeridianScheduler, NewRequest, Policy, RowId, native,
};
use meridian_wasm::{LoadError, PolicyLimits, Runtime};
use support::{LIMITS, SHORT_LIMITS};

use crate::support;

const REQUESTS: usize = 4;

fn engine(policy: Box<dyn Policy>) -> (MeridianScheduler, Vec<RowId>) {
    let config = MeridianConfig::default();
    // Every fault is to be seen, so no number of them is too many.
    let limits = StrikeLimits { max_strikes: u32::MAX, ..StrikeLimits::default() };
    let slot = DispatchSlot::with_version(Contender::new(policy, "", "test"), config.scheduler.targets(), limits);
    let mut engine = MeridianScheduler::for_engine(
        slot,
        Markers::new(vec![vec![1]], vec![vec![2]], vec![]).expect("usable markers"),
        &config.scheduler,
        16,
    );
    let slots = (0..REQUESTS).map(|i| {
        let request = NewRequest { prompt: &[0, 1], ..NewRequest::default() };
        let slot = engine.mirror().table.insert(&request).expect("finite times");
        engine.mirror().table.scheduled(slot, 2, 0.0);
        // The last request is in its output phase, so the default has something to reorder.
        engine.mirror().table.generated(slot, if i + 1 == REQUESTS { &[2] } else { &[5] }, &mut Vec::new());
        slot
    });
    let slots = slots.collect();
    (engine, slots)
}

fn facts() -> EngineFacts {
    EngineFacts {
        now_ms: 10.0,
        token_budget: 512,
        total_blocks: 64,
        free_blocks: 8,
        decode_tokens: 1,
        ..Default::default()
    }
}

#[test]
fn every_fault_is_counted_and_the_default_decides_the_same_step() {
    let runtime = Runtime::new(None).unwrap();
    let targets = MeridianConfig::default().scheduler.targets();
    let (mut reference, slots) = engine(native::default_policy(targets));
    let expected = reference.plan(&facts(), &slots, &[]).clone();
    assert_eq!(expected.running_order, [3, 0, 1, 2]);
    for hostile in support::HOSTILE {
        let Some(fault) = hostile.fault else { continue };
        let component = runtime.load(&hostile.component()).unwrap();
        let limits = if fault == "deadline" { SHORT_LIMITS } else { LIMITS };
        let policy = component.dispatch_policy(limits, targets, "{}").unwrap();
        let (mut engine, slots) = engine(Box::new(policy));
        let mut fallbacks = 0;
        for _ in 0..9 {
            let plan = engine.plan(&facts(), &slots, &[]).clone();
            if engine.last_source() == Some(Source::Fallback) {
                fallbacks += 1;
                assert_eq!(plan, expected, "{}: the default decides the step", hostile.name);
            }
        }
        let expected_faults = if hostile.name == "trap-on-third-call" { 3 } else { 9 };
        for kind in FaultKind::ALL {
            let count = engine.slot().stats().faults(kind);
            let right = if kind.label() == fault { expected_faults } else { 0 };
            assert_eq!(count, right, "{}: faults of kind {}", hostile.name, kind.label());
        }
        assert_eq!(fallbacks, expected_faults, "{}", hostile.name);
        assert_eq!(engine.slot().stats().decisions(), 9, "{}", hostile.name);
    }
}

#[test]
fn odd_keys_are_an_order() {
    let runtime = Runtime::new(None).unwrap();
    let nan = support::HOSTILE.iter().find(|hostile| hostile.name == "nan-keys").unwrap();
    let targets = MeridianConfig::default().scheduler.targets();
    let policy = runtime.load(&nan.component()).unwrap().dispatch_policy(LIMITS, targets, "{}").unwrap();
    let (mut engine, slots) = engine(Box::new(policy));
    let plan = engine.plan(&facts(), &slots, &[]);
    // Keys NaN, +inf, NaN, -inf and a budget of 0.
    assert_eq!(plan.running_order, [3, 1, 0, 2]);
    assert_eq!(plan.token_budget, 1);
    assert_eq!(engine.last_source(), Some(Source::Active));
}

#[test]
fn a_component_that_will_not_start_is_refused() {
    let runtime = Runtime::new(None).unwrap();
    let targets = MeridianConfig::default().scheduler.targets();
    let start_within = |limits, init: &str| {
        let component = runtime.load(&support::with_init(init)).unwrap();
        component.dispatch_policy(limits, targets, "{}").err().expect("the component must be refused")
    };
    let start = |init| start_within(LIMITS, init);
    let trapped = start("unreachable");
    assert!(matches!(&trapped, LoadError::Start { fault } if fault.detail.contains("unreachable")), "{trapped}");
    let looped = start_within(PolicyLimits { start: SHORT_LIMITS.deadline, ..LIMITS }, "(loop $l (br $l))");
    assert!(looped.to_string().contains("deadline"), "{looped}");
    // result::err with the text "no".
    let refused = start(
        "(i32.store8 (i32.const 300) (i32.const 1)) (i32.store (i32.const 304) (i32.const 320))
         (i32.store (i32.const 308) (i32.const 2)) (i32.store16 (i32.const 320) (i32.const 0x6f6e)) (return (i32.const 300))",
    );
    assert_eq!(refused.to_string(), "the policy refused its configuration {}: no");
    // The same with a line break and an escape, which a terminal would follow.
    let refused = start(
        "(i32.store8 (i32.const 300) (i32.const 1)) (i32.store (i32.const 304) (i32.const 320))
         (i32.store (i32.const 308) (i32.const 4)) (i32.store (i32.const 320) (i32.const 0x6f1b0a6e)) (return (i32.const 300))",
    );
    assert_eq!(refused.to_string(), "the policy refused its configuration {}: no");
}

#[test]
fn a_policy_that_cannot_recover_is_retried_ever_less_often() {
    /// Faults always, and cannot be made anew.
    struct Broken(Vec<meridian_core::Column>, meridian_core::Description);
    impl Policy for Broken {
        fn description(&self) -> &meridian_core::Description {
            &self.1
        }
        fn inputs(&self) -> &[meridian_core::Column] {
            &self.0
        }
        fn decide(
            &mut self,
            _: &meridian_core::Batch<'_>,
            _: &mut meridian_core::Decision,
        ) -> Result<(), meridian_core::Fault> {
            Err(meridian_core::Fault::new(FaultKind::Trap, "always"))
        }
        fn recover(&mut self) -> Result<(), meridian_core::Fault> {
            Err(meridian_core::Fault::new(FaultKind::Init, "never"))
        }
    }
    let (mut engine, slots) = engine(Box::new(Broken(Vec::new(), meridian_core::Description::default())));
    for _ in 0..1000 {
        engine.plan(&facts(), &slots, &[]);
    }
    assert_eq!(engine.slot().stats().fallback, 1000);
    assert_eq!(engine.slot().stats().faults(FaultKind::Trap), 1);
    assert!(engine.slot().stats().faults(FaultKind::Init) <= 11, "recovery backs off");
}

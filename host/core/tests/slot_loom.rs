//! Every interleaving of a decision with what other threads do to the slot. Built with `--cfg loom` (`make test-all`).
#![cfg(loom)]

mod made;

use loom::thread;
use made::{Made, TARGETS, faulting, step, table};
use meridian_core::FaultKind;
use meridian_core::slot::{DispatchSlot, Source, StrikeLimits};

const LIMITS: StrikeLimits = StrikeLimits { max_strikes: 1, window_ms: 1000.0 };

fn decide(slot: &mut DispatchSlot, now_ms: f64) -> (Source, u32) {
    let (table, slots) = table(2);
    let (source, decision) = slot.decide(&step(now_ms, 2), &table, &slots, 16);
    assert_eq!(decision.keys.len(), 2, "every step is decided");
    (source, decision.token_budget.unwrap_or(0))
}

#[test]
fn a_swap_comes_before_a_decision_or_after() {
    loom::model(|| {
        let mut slot = DispatchSlot::with_version(Made::new(1).contender(), TARGETS, LIMITS);
        let control = slot.control();
        let swapper = thread::spawn(move || {
            let report = control.swap(Made::new(2).contender());
            assert_eq!(report.previous.name, "made-1");
            control.rollback().unwrap();
        });
        for now_ms in [0.0, 1.0] {
            let (source, number) = decide(&mut slot, now_ms);
            assert!(source == Source::Active && (number == 1 || number == 2));
        }
        swapper.join().unwrap();
        assert_eq!(decide(&mut slot, 2.0), (Source::Active, 1));
    });
}

/// The deciding thread never knows less than its latest decision did, and after a swap it knows the new version.
#[test]
fn what_is_known_without_the_lock_follows_a_swap() {
    loom::model(|| {
        let mut slot = DispatchSlot::with_version(Made::new(1).contender(), TARGETS, LIMITS);
        let control = slot.control();
        let swapper = thread::spawn(move || {
            control.swap(Made::new(2).contender());
        });
        let before = slot.version().name;
        let (_, number) = decide(&mut slot, 0.0);
        let after = slot.version().name;
        assert!(before == "made-1" || number == 2);
        assert!(after == "made-2" || number == 1);
        swapper.join().unwrap();
        assert_eq!(slot.version().name, "made-2");
    });
}

#[test]
fn a_quarantine_meets_a_swap() {
    loom::model(|| {
        let mut slot = DispatchSlot::with_version(faulting(1, FaultKind::Trap).contender(), TARGETS, LIMITS);
        let control = slot.control();
        let swapper = thread::spawn(move || {
            control.swap(Made::new(2).contender());
        });
        decide(&mut slot, 0.0);
        swapper.join().unwrap();
        assert_eq!(decide(&mut slot, 1.0), (Source::Active, 2));
        assert!(slot.control().status().quarantine.is_none(), "the new version ends it");
    });
}

#[test]
fn two_changes_at_once_happen_one_after_the_other() {
    loom::model(|| {
        let mut slot = DispatchSlot::with_version(Made::new(1).contender(), TARGETS, LIMITS);
        let threads = [2, 3].map(|number| {
            let control = slot.control();
            thread::spawn(move || control.swap(Made::new(number).contender()).previous.name)
        });
        let previous = threads.map(|thread| thread.join().unwrap());
        let (_, number) = decide(&mut slot, 0.0);
        let first = if number == 2 { "made-3" } else { "made-2" };
        assert!(previous.contains(&"made-1".to_owned()) && previous.contains(&first.to_owned()), "{previous:?}");
    });
}

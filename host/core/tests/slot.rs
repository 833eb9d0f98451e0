//! The slot: faults, strikes, quarantine, swaps, rollback, shadow. No clock but the one the steps tell.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use made::{Made, TARGETS, faulting, step, table};
use meridian_core::slot::{Contender, ControlError, DispatchSlot, FaultEntry, Source, StateHandover, StrikeLimits};
use meridian_core::{Column, Decision, Fault, FaultKind, native};

use crate::made;

const LIMITS: StrikeLimits = StrikeLimits { max_strikes: 3, window_ms: 1000.0 };

fn slot(active: Made) -> DispatchSlot {
    DispatchSlot::with_version(active.contender(), TARGETS, LIMITS)
}

/// Who decides the first step, and how.
fn first(mut slot: DispatchSlot) -> (Source, Decision) {
    let (table, slots) = table(3);
    let (source, decision) = slot.decide(&step(0.0, 3), &table, &slots, 16);
    (source, decision.clone())
}

/// Who decides a step at `now_ms`: a made-up policy's number, or 0 for the default.
fn decide(slot: &mut DispatchSlot, now_ms: f64) -> (Source, u32) {
    let (table, slots) = table(3);
    let (source, decision) = slot.decide(&step(now_ms, 3), &table, &slots, 16);
    (source, decision.token_budget.unwrap_or(0))
}

#[test]
fn too_many_faults_put_a_version_into_quarantine_and_it_returns() {
    let faulty = Arc::new(AtomicBool::new(true));
    let is_faulty = Arc::clone(&faulty);
    let made = Made::behaving(7, move |batch, decision| {
        if is_faulty.load(Ordering::Relaxed) {
            return Err(Fault::new(FaultKind::Trap, "unreachable"));
        }
        decision.keys = vec![0.0; batch.candidates];
        decision.token_budget = Some(7);
        Ok(())
    });
    let mut slot = slot(made);
    let control = slot.control();
    for now_ms in [0.0, 1.0] {
        assert_eq!(decide(&mut slot, now_ms), (Source::Fallback, 0));
        assert!(control.status().quarantine.is_none());
    }
    assert_eq!(decide(&mut slot, 2.0), (Source::Fallback, 0));
    let status = control.status();
    assert_eq!(status.active.name, "balanced", "the native default stands in");
    let (version, left_ms) = status.quarantine.unwrap();
    assert_eq!((version.name.as_str(), left_ms), ("made-7", 1000.0));

    // Tried again after the quarantine, it faults at once and goes back for twice as long.
    assert_eq!(decide(&mut slot, 500.0).0, Source::Active);
    assert_eq!(decide(&mut slot, 1003.0), (Source::Fallback, 0));
    assert_eq!(control.status().quarantine.unwrap().1, 2000.0);

    faulty.store(false, Ordering::Relaxed);
    assert_eq!(decide(&mut slot, 3100.0), (Source::Active, 7));
    assert!(control.status().quarantine.is_none());
    assert_eq!(control.status().faults.iter().map(|(_, count)| count).sum::<u64>(), 4);
}

#[test]
fn the_step_of_a_fault_is_decided_by_the_default_whatever_the_policy_left() {
    let leaves = Made::behaving(7, |batch, decision| {
        decision.keys = vec![1.0; batch.candidates];
        decision.token_budget = Some(7);
        Err(Fault::new(FaultKind::Trap, "unreachable"))
    });
    let (source, default) = first(DispatchSlot::new(native::default_policy(TARGETS), TARGETS));
    assert_eq!((source, default.keys.len()), (Source::Active, 3));
    for faulty in [leaves, faulting(7, FaultKind::Trap)] {
        assert_eq!(first(slot(faulty)), (Source::Fallback, default.clone()));
    }
}

#[test]
fn faults_far_apart_are_no_reason_for_quarantine() {
    let mut slot = slot(faulting(7, FaultKind::Deadline));
    for i in 0..20 {
        assert_eq!(decide(&mut slot, f64::from(i) * 501.0).0, Source::Fallback);
    }
    assert!(slot.control().status().quarantine.is_none());
    assert_eq!(slot.control().status().strikes, 2);
}

#[test]
fn the_last_good_version_decides_during_quarantine() {
    let mut slot = slot(Made::new(1));
    let control = slot.control();
    assert_eq!(decide(&mut slot, 0.0), (Source::Active, 1));
    control.swap(faulting(2, FaultKind::BadAnswer).contender());
    for now_ms in [1.0, 2.0, 3.0] {
        assert_eq!(decide(&mut slot, now_ms), (Source::Fallback, 0), "the default decides the step of the fault");
    }
    assert_eq!(decide(&mut slot, 4.0), (Source::Active, 1));
    assert_eq!(control.release().unwrap().active.name, "made-2");
    assert_eq!(decide(&mut slot, 5.0), (Source::Fallback, 0));
    assert_eq!(decide(&mut slot, 6.0), (Source::Active, 1), "one more fault sent it back");
    assert!(matches!(control.swap(Made::new(3).contender()).active.name.as_str(), "made-3"));
    assert!(control.status().quarantine.is_none(), "a new version ends it");
    assert!(matches!(control.release(), Err(ControlError::Nothing { .. })));
}

#[test]
fn a_rollback_in_quarantine_keeps_the_stand_in_and_forgets_the_quarantine() {
    let mut slot = slot(Made::new(1));
    let control = slot.control();
    control.swap(faulting(2, FaultKind::BadAnswer).contender());
    for now_ms in [1.0, 2.0, 3.0] {
        decide(&mut slot, now_ms);
    }
    assert_eq!(control.status().quarantine.unwrap().0.name, "made-2");
    let report = control.rollback().unwrap();
    assert_eq!((report.active.name.as_str(), report.action.as_str()), ("made-1", "rollback"));
    let status = control.status();
    assert_eq!((status.quarantine, status.previous.unwrap().name.as_str()), (None, "made-2"));
    assert_eq!(decide(&mut slot, 1e9), (Source::Active, 1), "it does not come back");
}

#[test]
fn what_cannot_be_started_stays_in_quarantine() {
    let mut slot = slot(Made { cannot_recover: true, ..faulting(7, FaultKind::Trap) });
    decide(&mut slot, 0.0);
    // One step is left out, then it is tried, and fails: a strike for each.
    for now_ms in [1.0, 2.0, 3.0, 4.0, 5.0] {
        decide(&mut slot, now_ms);
    }
    let control = slot.control();
    assert_eq!(control.status().quarantine.unwrap().0.name, "made-7");
    assert!(matches!(control.release(), Err(ControlError::Refused(why)) if why.contains("it cannot start")));
    assert_eq!(decide(&mut slot, 6.0).0, Source::Active, "the native default");
}

#[test]
fn state_is_handed_over_where_both_sides_know_how() {
    let mut slot = slot(Made::new(1));
    let control = slot.control();
    for now_ms in 0..5 {
        decide(&mut slot, f64::from(now_ms));
    }
    let report = control.swap(Made::new(2).contender());
    assert_eq!((report.active.name.as_str(), report.previous.name.as_str()), ("made-2", "made-1"));
    assert_eq!(report.state, StateHandover::Restored);
    assert_eq!(decide(&mut slot, 5.0), (Source::Active, 2));
    let report = control.swap(Made { refuses_state: true, ..Made::new(3) }.contender());
    assert_eq!(report.state, StateHandover::Reset("another kind of state".into()));
    let report = control.swap(Made { stateless: true, ..Made::new(4) }.contender());
    assert_eq!(report.state, StateHandover::Restored);
    assert_eq!(control.swap(Made::new(5).contender()).state, StateHandover::Stateless);
    assert_eq!(control.status().swaps, 4);
}

#[test]
fn the_deciding_thread_knows_each_change_at_once() {
    let mut slot = slot(Made::new(1));
    let control = slot.control();
    assert!(!slot.is_watched() && !slot.reads(Column::Eat));
    control.shadow(Made { inputs: &[Column::Eat], ..Made::new(2) }.contender()).unwrap();
    assert!(slot.is_watched() && slot.reads(Column::Eat));
    control.stop_shadow().unwrap();
    assert!(!slot.is_watched() && !slot.reads(Column::Eat));
    let fcfs = native::policy("fcfs", TARGETS, "{}").unwrap();
    control.swap(Contender::new(fcfs, "", "native:fcfs"));
    assert!(slot.is_decided_by("native:fcfs"));
    control.rollback().unwrap();
    assert!(!slot.is_decided_by("native:fcfs"));
    control.swap(faulting(3, FaultKind::Trap).contender());
    for now_ms in [0.0, 1.0, 2.0] {
        decide(&mut slot, now_ms);
    }
    assert!(slot.reads(Column::Eat), "the version that returns from quarantine may read it");
    assert_eq!(slot.version().name, "made-1");
}

#[test]
fn a_rollback_returns_and_returns_again() {
    let mut slot = slot(Made::new(1));
    let control = slot.control();
    assert!(matches!(control.rollback(), Err(ControlError::Nothing { .. })));
    control.swap(Made::new(2).contender());
    assert_eq!(decide(&mut slot, 0.0).1, 2);
    assert_eq!(control.rollback().unwrap().active.name, "made-1");
    assert_eq!(decide(&mut slot, 1.0).1, 1);
    assert_eq!(control.rollback().unwrap().active.name, "made-2");
    assert_eq!(decide(&mut slot, 2.0).1, 2);
}

#[test]
fn a_shadow_is_compared_and_changes_nothing_until_it_is_promoted() {
    let mut slot = slot(Made::new(1));
    let control = slot.control();
    assert!(matches!(control.promote(), Err(ControlError::Nothing { .. })));
    let (seen, sees) = mpsc::channel();
    let mut calls = 0;
    let shadow = Made::behaving(2, move |batch, decision| {
        calls += 1;
        decision.keys = (0..batch.candidates).map(|i| -(i as f32)).collect();
        decision.token_budget = Some(2);
        let faults = calls == 3;
        seen.send(calls).unwrap();
        if faults { Err(Fault::new(FaultKind::Memory, "too much")) } else { Ok(()) }
    });
    control.shadow(shadow.contender()).unwrap();
    for now_ms in 0..3 {
        assert_eq!(decide(&mut slot, f64::from(now_ms)), (Source::Active, 1));
        sees.recv().unwrap();
    }
    let report = control.promote().unwrap();
    assert_eq!((report.active.name.as_str(), report.state), ("made-2", StateHandover::Own));
    assert_eq!(decide(&mut slot, 3.0), (Source::Active, 2));
    let faults = control.faults();
    assert_eq!(faults.len(), 1);
    assert!(faults[0].shadow && faults[0].kind == "memory" && faults[0].batch.is_some());
    assert_eq!(control.status().faults.iter().map(|(_, count)| count).sum::<u64>(), 0, "no fault of an active policy");
}

#[test]
fn a_shadow_that_hangs_delays_no_step() {
    let mut slot = slot(Made::new(1));
    let control = slot.control();
    let (leave, stay) = mpsc::channel::<()>();
    let shadow = Made::behaving(2, move |batch, decision| {
        let _ = stay.recv();
        decision.keys = vec![0.0; batch.candidates];
        Ok(())
    });
    control.shadow(shadow.contender()).unwrap();
    for now_ms in 0..100 {
        assert_eq!(decide(&mut slot, f64::from(now_ms)), (Source::Active, 1));
    }
    let status = control.status().shadow.unwrap();
    assert!(status.skipped >= 90, "{status:?}");
    drop(leave);
    assert_eq!(control.stop_shadow().unwrap().action, "stop-shadow");
    assert!(control.stop_shadow().is_err());
}

#[test]
fn a_fault_keeps_what_reproduces_it() {
    let mut slot = slot(faulting(7, FaultKind::BadAnswer));
    let (table, slots) = table(3);
    for i in 0..300 {
        slot.decide(&step(f64::from(i) * 2000.0, 3), &table, &slots, 16);
    }
    let faults = slot.control().faults();
    assert_eq!(faults.len(), 256, "bounded");
    assert_eq!(faults.iter().filter(|fault| fault.batch.is_some()).count(), 8);
    let last = faults.last().unwrap();
    let batch = last.batch.as_ref().unwrap();
    assert_eq!((last.now_ms, last.candidates, last.kind.as_str()), (598_000.0, 3, "bad-answer"));
    assert_eq!((batch.inputs.clone(), batch.columns_bits.len()), (vec!["Phase".to_owned()], 3));
    assert_eq!(batch.facts["now_ms"], 598_000.0);
}

#[test]
fn a_candidate_that_faults_on_a_trial_is_refused_with_the_batch() {
    let trial = Made::new(1).contender().warm_up().unwrap();
    assert!(trial.decides);
    let fault = faulting(1, FaultKind::Trap).contender().warm_up().unwrap_err();
    assert_eq!(fault.to_string(), "faulted on a trial batch of 0 candidates (batch 1 of 4): trap: as made");
    let large = Made::behaving(1, |batch, _| match batch.candidates {
        1024 => Err(Fault::new(FaultKind::Deadline, "interrupt")),
        _ => Ok(()),
    });
    let fault = large.contender().warm_up().unwrap_err();
    assert_eq!(fault.to_string(), "faulted on a trial batch of 1024 candidates (batch 4 of 4): deadline: interrupt");
}

#[test]
fn swaps_from_another_thread_lose_no_decision() {
    let mut slot = slot(Made::new(1));
    let control = slot.control();
    let done = Arc::new(AtomicBool::new(false));
    let is_done = Arc::clone(&done);
    let (table, slots) = table(8);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for number in 0..2000 {
                control.swap(Made::new(1 + number % 5).contender());
            }
            is_done.store(true, Ordering::Release);
        });
        let mut steps = 0.0;
        while !done.load(Ordering::Acquire) {
            steps += 1.0;
            let (source, decision) = slot.decide(&step(steps, 8), &table, &slots, 16);
            assert_eq!(source, Source::Active);
            assert_eq!(decision.keys.len(), 8);
            assert!((1..=5).contains(&decision.token_budget.unwrap()));
        }
    });
    let status = slot.control().status();
    assert_eq!(status.swaps, 2000);
    assert_eq!(status.decisions[1..], [0, 0]);
}

#[test]
fn a_stand_in_that_faults_too_steps_back_and_the_first_is_tried_again() {
    let limits = StrikeLimits { max_strikes: 2, window_ms: 60_000.0 };
    let mut slot = DispatchSlot::with_version(faulting(1, FaultKind::Trap).contender(), TARGETS, limits);
    let control = slot.control();
    control.swap(faulting(2, FaultKind::Trap).contender());
    let (table, slots) = table(3);
    let mut deciding = |now_ms: f64| {
        slot.decide(&step(now_ms, 3), &table, &slots, 16);
        slot.version().name
    };
    deciding(0.0);
    assert_eq!(deciding(1.0), "made-1", "2 is in quarantine, the version before it stands in");
    deciding(2.0);
    assert_eq!(deciding(3.0), "balanced", "1 steps back");
    let status = control.status();
    assert_eq!(status.quarantine.map(|(version, _)| version.name).as_deref(), Some("made-2"));
    assert_eq!(status.previous.map(|version| version.name).as_deref(), Some("made-1"));
    // Its time is over; it faults once more, and the version before it stands in again.
    assert_eq!(deciding(1_002.0), "made-1");
    assert_eq!(control.status().quarantine.map(|(version, _)| version.name).as_deref(), Some("made-2"));
    assert_eq!(control.release().unwrap().active.name, "made-2");
}

#[test]
fn a_candidate_forgets_its_trial() {
    let mut contender = Made::new(1).contender();
    contender.warm_up().unwrap();
    assert_eq!(contender.policy.snapshot().unwrap(), 0u64.to_le_bytes(), "no decision was made yet");
}

#[test]
fn a_trial_makes_every_call_that_an_engine_makes() {
    let (made, heard) = told(&[Column::Request]);
    made.contender().warm_up().unwrap();
    let told_of: Vec<usize> = heard.try_iter().map(|requests| requests.len()).collect();
    assert_eq!(told_of, [0, 16, 1024, 1 << 14], "requests that have ended");
    let (made, heard) = told(&[Column::Phase]);
    made.contender().warm_up().unwrap();
    assert!(heard.try_iter().all(|requests| requests.is_empty()), "an engine does not tell this one");
    let fault = |kind| {
        Made { snapshot_fault: Some(kind), ..Made::new(1) }.contender().warm_up().map_err(|fault| fault.to_string())
    };
    let expected = "faulted on a handover of its state after its trial: trap: as made";
    assert_eq!(fault(FaultKind::Trap).unwrap_err(), expected);
    assert!(fault(FaultKind::Deadline).is_ok(), "a swap goes on without the state");
    assert!(Made { refuses_state: true, ..Made::new(1) }.contender().warm_up().is_ok());
}

/// A policy that reads these columns, and the requests that it is told have ended, in order.
fn told(inputs: &'static [Column]) -> (Made, mpsc::Receiver<Vec<u32>>) {
    let (told, heard) = mpsc::channel();
    let made = Made::behaving(1, move |batch, decision| {
        decision.keys = vec![0.0; batch.candidates];
        told.send(batch.finished.to_vec()).map_err(|_| Fault::new(FaultKind::Trap, "nobody hears"))
    });
    (Made { inputs, ..made }, heard)
}

#[test]
fn a_policy_that_tells_requests_apart_is_told_which_have_ended() {
    let (made, heard) = told(&[Column::Request]);
    let mut slot = slot(made);
    slot.note_finished(&[3]);
    slot.note_finished(&[1, 2]);
    for now_ms in [0.0, 1.0] {
        decide(&mut slot, now_ms);
    }
    assert_eq!(heard.try_iter().collect::<Vec<_>>(), [vec![3, 1, 2], vec![]], "once");
    // One that cannot use it is not told, and nothing is kept for the next one.
    let (made, heard_other) = told(&[Column::Phase]);
    slot.control().swap(made.contender());
    slot.note_finished(&[4]);
    decide(&mut slot, 2.0);
    assert_eq!(heard_other.try_iter().collect::<Vec<_>>(), [Vec::<u32>::new()]);
    let (made, heard_third) = told(&[Column::Request]);
    slot.control().swap(made.contender());
    decide(&mut slot, 3.0);
    assert_eq!(heard_third.try_iter().collect::<Vec<_>>(), [Vec::<u32>::new()]);
}

#[test]
fn of_very_many_ended_requests_the_last_are_told() {
    let (made, heard) = told(&[Column::Request]);
    let mut slot = slot(made);
    slot.note_finished(&[7]);
    slot.note_finished(&(0..40_000).collect::<Vec<_>>());
    decide(&mut slot, 0.0);
    assert_eq!(heard.try_iter().next(), Some((40_000 - (1 << 14)..40_000).collect::<Vec<_>>()));
}

#[test]
fn a_shadow_is_told_of_requests_that_ended_in_steps_it_did_not_see() {
    let (made, heard) = told(&[Column::Request]);
    let mut slot = slot(Made::new(7));
    slot.control().shadow(made.contender()).unwrap();
    let mut ended = Vec::new();
    for request in 1..=200 {
        slot.note_finished(&[request]);
        decide(&mut slot, f64::from(request));
        ended.push(request);
    }
    // It ends when it has seen its queue.
    let skipped = slot.control().status().shadow.unwrap().skipped;
    slot.control().stop_shadow().unwrap();
    let told: Vec<u32> = heard.try_iter().flatten().collect();
    assert_eq!(told, ended[..told.len()], "in order, each once, whatever it skipped ({skipped})");
    assert!(skipped > 0 || told.len() == ended.len());
}

#[test]
fn other_limits_of_strikes_hold_from_the_next_fault_on() {
    let mut slot = slot(faulting(7, FaultKind::Trap));
    let control = slot.control();
    control.set_strike_limits(StrikeLimits { max_strikes: 5, ..LIMITS });
    for now_ms in [0.0, 1.0, 2.0, 3.0] {
        decide(&mut slot, now_ms);
        assert!(control.status().quarantine.is_none());
    }
    decide(&mut slot, 4.0);
    assert!(control.status().quarantine.is_some());
}

#[test]
fn a_refusal_before_the_first_step_reads_back() {
    let slot = slot(Made::new(1));
    slot.control().refused("edf.wasm", "it does not fill the slot");
    let faults = slot.control().faults();
    let text = serde_json::to_string(&faults).unwrap();
    assert_eq!(serde_json::from_str::<Vec<FaultEntry>>(&text).unwrap(), faults);
    assert_eq!(faults[0].now_ms, 0.0);
}

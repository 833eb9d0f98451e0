//! Roll-outs of fleets that are played in memory, on a clock of their own.

mod hanging;
mod world;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use self::world::{Killed, NEW, OLD, Play, Played, World, ended, lock, only, play, played, settings, version};
use super::*;

#[test]
fn an_equal_policy_reaches_every_engine() {
    let world = World::new(10);
    let play = play(&world, "equal");
    assert_eq!(ended(play.begin(settings())), Outcome::Completed);
    assert_eq!((world.actives(), world.has_shadows()), (only(NEW), false));
    let events = play.events();
    for line in [
        "native:srpt in shadow on 10 engines",
        "step 20%: 2 of 10",
        "step 50%: 5 of 10",
        "step 100%: 9 of 10",
        "completed",
    ] {
        assert!(events.contains(line), "{line}: {events}");
    }
    let state = play.state();
    assert_eq!(state.messages, world.messages.load(Ordering::SeqCst), "every call is counted");
    assert!(state.findings.iter().all(|finding| finding.verdict == GuardVerdict::Kept), "{:?}", state.findings);
}

#[test]
fn a_bad_policy_goes_back_within_three_intervals() {
    let world = World::new(10);
    *lock(&world.effect) = 1.6;
    let play = play(&world, "bad");
    let Outcome::RolledBack { why } = ended(play.begin(settings())) else { panic!("{}", play.events()) };
    assert!(why.starts_with("output_itl_p90<=1.05x is exceeded: 1."), "{why}");
    assert_eq!((world.actives(), world.has_shadows()), (only(OLD), false));
    let events = play.events();
    assert!(!events.contains("step 50%"), "{events}");
    // Of the first step, three intervals at most are measured after those of the shadow.
    assert!(play.state().lines <= 13, "{}", play.state().lines);
}

#[test]
fn a_clock_that_is_set_forward_or_back_changes_nothing() {
    let told = |effect: f64, jumps: &[(f64, f64)]| {
        let world = World::new(10);
        *lock(&world.effect) = effect;
        for &(at_s, by_s) in jumps {
            world.at(at_s, move |world| *lock(&world.set_by_s) += by_s);
        }
        let play = play(&world, "clock");
        let outcome = ended(play.begin(settings()));
        (outcome, play.events(), play.state().lines)
    };
    for effect in [1.0, 1.6] {
        let steady = told(effect, &[]);
        for jumps in [[(5.0, 86_400.0), (31.0, -86_400.0)], [(1.0, -1e9), (25.0, 3600.0)]] {
            assert_eq!(told(effect, &jumps), steady, "{jumps:?}");
        }
    }
}

#[test]
fn faults_and_quarantine_on_one_engine_send_all_back() {
    type Happens = fn(&Played);
    let cases: [(&str, Happens, &str); 3] = [
        ("fault", Played::fault, "faults of the new policy: 1 (trap)"),
        ("quarantine", Played::quarantine, "the new policy is in quarantine"),
        (
            "shadow",
            |engine| {
                if let Some(shadow) = &mut lock(&engine.inner).shadow {
                    shadow.1 = 3
                }
            },
            "faults of the new policy in shadow: 3",
        ),
    ];
    for (name, happens, expected) in cases {
        let world = World::new(6);
        let at_s = if name == "shadow" { 9.5 } else { 35.5 };
        world.at(at_s, move |world| {
            let engines = lock(&world.engines);
            let chosen = engines.iter().find(|engine| {
                let inner = lock(&engine.inner);
                inner.active.source == NEW || (name == "shadow" && inner.shadow.is_some())
            });
            happens(chosen.expect("an engine that has it"));
        });
        let play = play(&world, name);
        let Outcome::RolledBack { why } = ended(play.begin(settings())) else { panic!("{name}: {}", play.events()) };
        assert!(why.contains(expected), "{name}: {why}");
        assert_eq!((world.actives(), world.has_shadows()), (only(OLD), false), "{name}");
        let is_quarantined = lock(&world.engines).iter().any(|engine| lock(&engine.inner).quarantine.is_some());
        assert!(!is_quarantined, "{name}: it would come back");
    }
}

#[test]
fn faults_of_the_old_policy_are_no_alarm() {
    let world = World::new(6);
    world.at(5.5, |world| world.engine("e0").fault());
    world.at(35.5, |world| {
        lock(&world.engines)
            .iter()
            .filter(|engine| lock(&engine.inner).active.source == OLD)
            .for_each(|engine| engine.fault());
    });
    assert_eq!(ended(play(&world, "old-faults").begin(settings())), Outcome::Completed);
}

/// Kill the controller at each of its calls in turn; another goes on, and the end is the same.
fn killed_at_each_call(name: &str, effect: f64, expected: &str) {
    let mut settings = settings();
    settings.steps = vec![0.4, 1.0];
    (settings.hold_s, settings.interval_s, settings.settle_s) = (8.0, 2.0, 1.0);
    let mut killed_in = BTreeSet::new();
    for killed_at in (9_u64..).step_by(5) {
        let world = World::new(4);
        *lock(&world.effect) = effect;
        world.killed_at.store(killed_at, Ordering::SeqCst);
        let play = play(&world, &format!("{name}-{killed_at}"));
        match catch_unwind(AssertUnwindSafe(|| play.begin(settings.clone()))) {
            // It was over before.
            Ok(outcome) => {
                ended(outcome);
                break;
            }
            Err(_) => assert!(world.is_killed.load(Ordering::SeqCst), "it panicked by itself"),
        }
        killed_in.insert(format!("{:?}", std::mem::discriminant(&play.state().phase)));
        world.killed_at.store(0, Ordering::SeqCst);
        world.is_killed.store(false, Ordering::SeqCst);
        // Time passes before somebody notices.
        world.pass(30.0);
        let outcome = ended(play.reopen());
        assert_eq!(outcome == Outcome::Completed, expected == NEW, "{killed_at}: {outcome:?}: {}", play.events());
        assert_eq!((world.actives(), world.has_shadows()), (only(expected), false), "{killed_at}: {}", play.events());
    }
    assert!(killed_in.len() >= 3, "in several phases: {killed_in:?}");
}

#[test]
fn a_controller_killed_at_any_call_completes() {
    killed_at_each_call("killed", 1.0, NEW);
}

#[test]
fn a_controller_killed_at_any_call_goes_back() {
    killed_at_each_call("killed-bad", 3.0, OLD);
}

#[test]
fn an_engine_that_restarts_gets_its_policy_again() {
    for at_s in [5.5, 15.5, 31.5, 50.5, 75.5, 86.5] {
        let world = World::new(10);
        world.at(at_s, |world| lock(&world.engines).iter().take(2).for_each(|engine| engine.restart()));
        let play = play(&world, &format!("restart-{at_s}"));
        assert_eq!(ended(play.begin(settings())), Outcome::Completed, "{at_s}: {}", play.events());
        assert_eq!((world.actives(), world.has_shadows()), (only(NEW), false), "{at_s}");
        assert!(play.events().contains("e0 has restarted"), "{at_s}: {}", play.events());
    }
}

#[test]
fn engines_that_join_get_the_policy_and_those_that_vanish_are_no_obstacle() {
    let world = World::new(8);
    world.at(30.5, |world| {
        let fleet = Arc::clone(&lock(&world.engines)[0].fleet);
        lock(&world.engines).push(played(&fleet, "late", 77));
    });
    world.at(40.5, |world| {
        lock(&world.hidden).insert("e3".into());
    });
    let play = play(&world, "changing");
    assert_eq!(ended(play.begin(settings())), Outcome::Completed, "{}", play.events());
    assert_eq!(lock(&world.engine("late").inner).active.source, NEW);
    assert!(play.events().contains("late joins the fleet"), "{}", play.events());
    assert_eq!(play.state().left_behind().count(), 0);
}

#[test]
fn a_policy_that_kills_its_engines_goes_back() {
    let world = World::new(12);
    world.at(50.5, |world| {
        let engines = lock(&world.engines);
        engines.iter().filter(|engine| lock(&engine.inner).active.source == NEW).for_each(|engine| engine.restart());
    });
    let play = play(&world, "killer");
    let Outcome::RolledBack { why } = ended(play.begin(settings())) else { panic!("{}", play.events()) };
    assert_eq!(why, "6 of 6 engines with the new policy restarted or vanished, and 0 of 6 others");
    assert_eq!(world.actives(), only(OLD));
}

#[test]
fn the_operator_pauses_resumes_and_aborts() {
    let world = World::new(6);
    let play = play(&world, "wishes");
    let dir = play.dir.clone();
    world.at(10.0, move |_| wish(&dir, Wish::Pause).expect("a wish"));
    let dir = play.dir.clone();
    world.at(60.0, move |world| {
        assert_eq!(world.actives(), only(OLD), "paused in shadow");
        assert_eq!(read(&dir).expect("a state").paused.as_deref(), Some("by the operator"));
        wish(&dir, Wish::Resume).expect("a wish");
    });
    let dir = play.dir.clone();
    world.at(75.0, move |world| {
        assert!(world.actives().contains(NEW), "the first step");
        assert!(matches!(Store::lock(&dir), Err(StoreError::Led(_))), "a second controller");
        wish(&dir, Wish::Abort).expect("a wish");
    });
    assert_eq!(ended(play.begin(settings())), Outcome::Aborted);
    assert_eq!((world.actives(), world.has_shadows()), (only(OLD), false));
    // Over: the folder is free for another one.
    assert_eq!(ended(play.begin(settings())), Outcome::Completed);
    assert_eq!(
        std::fs::read_dir(&play.dir)
            .expect("a folder")
            .filter_map(Result::ok)
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("ended-"))
            .count(),
        1
    );
}

#[test]
fn unclear_guards_wait_for_the_operator() {
    let world = World::new(6);
    *lock(&world.effect) = 1.08;
    let mut settings = settings();
    settings.false_alarm = 1e-9;
    let play = play(&world, "unclear");
    let dir = play.dir.clone();
    world.at(110.0, move |_| {
        let paused = read(&dir).expect("a state").paused.expect("paused");
        assert!(paused.starts_with("output_itl_p90<=1.05x is not yet clear: 1.0"), "{paused}");
        wish(&dir, Wish::Abort).expect("a wish");
    });
    assert_eq!(ended(play.begin(settings)), Outcome::Aborted, "{}", play.events());
    assert!(play.events().contains("the step goes on: output_itl_p90<=1.05x is not yet clear"), "{}", play.events());
}

#[test]
fn an_engine_that_somebody_else_changed_is_left_alone() {
    let world = World::new(6);
    world.at(5.5, |world| lock(&world.engine("e2").inner).install(version("native:edf")));
    let play = play(&world, "foreign");
    assert_eq!(ended(play.begin(settings())), Outcome::Completed, "{}", play.events());
    assert_eq!(lock(&world.engine("e2").inner).active.source, "native:edf");
    assert!(play.events().contains("e2: decides by edf 1, which somebody else has put there"), "{}", play.events());
    assert_eq!(world.actives(), BTreeSet::from([NEW.to_owned(), "native:edf".to_owned()]));
}

#[test]
fn a_policy_that_one_engine_refuses_decides_on_none() {
    let world = World::new(5);
    lock(&world.engine("e4").inner).refuses = true;
    let play = play(&world, "refused");
    let Outcome::RolledBack { why } = ended(play.begin(settings())) else { panic!("{}", play.events()) };
    assert_eq!(why, "the new policy was refused: e: not a policy");
    assert_eq!((world.actives(), world.has_shadows()), (only(OLD), false));
    assert!(!play.events().contains("step 20%"));
}

#[test]
fn an_engine_that_does_not_answer_is_waited_for_and_then_named() {
    for comes_back in [true, false] {
        let world = World::new(6);
        *lock(&world.effect) = 3.0;
        // Just before the alarm.
        world.at(24.5, |world| {
            let engines = lock(&world.engines);
            let chosen = engines.iter().find(|engine| lock(&engine.inner).active.source == NEW);
            lock(&chosen.expect("the first step").inner).is_up = false;
        });
        if comes_back {
            world.at(45.5, |world| {
                let engines = lock(&world.engines);
                engines.iter().for_each(|engine| lock(&engine.inner).is_up = true);
            });
        }
        let play = play(&world, &format!("silent-{comes_back}"));
        let outcome = ended(play.begin(settings()));
        assert!(matches!(outcome, Outcome::RolledBack { .. }), "{}", play.events());
        let state = play.state();
        if comes_back {
            assert_eq!((world.actives(), state.left_behind().count()), (only(OLD), 0), "{}", play.events());
        } else {
            let left: Vec<_> = state.left_behind().map(|(_, why)| why).collect();
            assert_eq!(left, ["does not answer"]);
            assert!(play.events().contains("1 engines may still have the new one"), "{}", play.events());
        }
    }
}

#[test]
fn a_fleet_that_cannot_be_compared_is_refused_and_left_alone() {
    type Prepare = fn(&World);
    let cases: [(&str, usize, Prepare, &str); 5] = [
        ("one", 1, |_| {}, "1 engines: a roll-out compares engines and needs at least two"),
        ("none", 0, |_| {}, "0 engines"),
        (
            "mixed",
            3,
            |world| lock(&world.engine("e1").inner).active = version("native:edf"),
            "several versions: fcfs 1 (2), edf 1 (1)",
        ),
        ("silent", 3, |world| lock(&world.engine("e1").inner).is_up = false, "e1: does not answer"),
        (
            "has-it",
            2,
            |world| lock(&world.engines).iter().for_each(|e| lock(&e.inner).active = version(NEW)),
            "native:srpt: every engine decides by it already",
        ),
    ];
    for (name, engines, prepare, expected) in cases {
        let world = World::new(engines);
        prepare(&world);
        let play = play(&world, name);
        let error = play.begin(settings()).expect_err(name).to_string();
        assert!(error.contains(expected), "{name}: {error}");
        assert!(!world.has_shadows(), "{name}");
        assert!(matches!(read(&play.dir), Err(StoreError::None(_))), "{name}: nothing has begun");
    }
}

#[test]
fn files_that_no_roll_out_wrote_are_refused_by_name() {
    let world = World::new(4);
    let play = play(&world, "files");
    world.at(45.0, |_| panic_any(Killed));
    let mut settings = settings();
    settings.steps = vec![1.0];
    assert!(catch_unwind(AssertUnwindSafe(|| play.begin(settings))).is_err());
    let (state, lines) = (play.dir.join("state.json"), play.dir.join("intervals.jsonl"));
    let good = [std::fs::read_to_string(&state).expect("a state"), std::fs::read_to_string(&lines).expect("lines")];
    let error = |play: &Play<'_>| play.reopen().expect_err("malformed").to_string();
    for (from, to, expected) in [
        ("meridian-rollout/1", "meridian-rollout/9", "format: \"meridian-rollout/9\": expected \"meridian-rollout/1\""),
        ("\"hold_s\":20.0", "\"hold_s\":-1.0", "settings: hold: \"-1s\""),
        ("output_itl_p90<=1.05x", "output_itl_p90<=1.05", "expected METRIC<=RATIOx"),
        ("\"engines\":{", "\"engines\":[", "state.json: "),
    ] {
        assert!(good[0].contains(from), "{from}");
        std::fs::write(&state, good[0].replace(from, to)).expect("written");
        assert!(error(&play).contains(expected), "{}", error(&play));
    }
    std::fs::write(&state, &good[0]).expect("written");
    std::fs::write(&lines, &good[1][..good[1].len() / 2]).expect("written");
    assert!(error(&play).contains("intervals.jsonl: line "), "{}", error(&play));
    // Half a line after those that count is what a kill leaves behind.
    std::fs::write(&lines, format!("{}{{\"old\": {{", good[1])).expect("written");
    assert_eq!(ended(play.reopen()), Outcome::Completed);
}

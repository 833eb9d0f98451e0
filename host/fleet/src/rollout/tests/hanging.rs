//! Engines that hang, die, restart or refuse at any time: no other waits for them, and none is forgotten.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

use super::super::*;
use super::world::{NEW, OLD, World, ended, lock, only, play, settings, waits};

/// The names of the engines that decide by a policy.
fn with(world: &World, source: &str) -> BTreeSet<String> {
    let engines = lock(&world.engines);
    let found = engines.iter().filter(|engine| lock(&engine.inner).active.source == source);
    found.map(|engine| engine.name.clone()).collect()
}

fn left(state: &RolloutState) -> BTreeSet<String> {
    state.left_behind().map(|(name, _)| name.to_owned()).collect()
}

#[test]
fn an_abort_reaches_the_others_at_once_while_one_engine_hangs() {
    let world = World::new(4);
    let mut play = play(&world, "hangs");
    play.waits = waits(Duration::from_secs(1));
    let hanging = Arc::new(Mutex::new(String::new()));
    let chosen = Arc::clone(&hanging);
    // In the step with all engines but one.
    world.at(70.5, move |world| {
        let engines = lock(&world.engines);
        let engine = engines.iter().find(|engine| lock(&engine.inner).active.source == NEW).expect("the last step");
        engine.hang(true);
        engine.name.clone_into(&mut lock(&chosen));
    });
    let dir = play.dir.clone();
    world.at(75.5, move |_| wish(&dir, Wish::Abort).expect("a wish"));
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let after = Arc::clone(&seen);
    // One slice of waiting later.
    world.at(77.5, move |world| *lock(&after) = with(world, NEW));
    assert_eq!(ended(play.begin(settings())), Outcome::Aborted, "{}", play.events());
    let hanging = BTreeSet::from([lock(&hanging).clone()]);
    assert_eq!(*lock(&seen), hanging, "only the one that hangs still has it");
    let state = play.state();
    assert_eq!((left(&state), with(&world, NEW)), (hanging.clone(), hanging.clone()), "{}", play.events());
    let name = hanging.first().expect("one");
    let line = format!("1 engines may still have the new one: {name}; abort again");
    assert!(play.events().contains(&line), "{}", play.events());
    // It goes on, and the operator aborts again.
    world.engine(name).hang(false);
    assert_eq!(ended(play.reopen_and(|rollout| rollout.abort())), Outcome::Aborted);
    assert_eq!((world.actives(), left(&play.state()).len()), (only(OLD), 0));
}

#[test]
fn an_engine_that_answers_again_goes_back_with_the_rest() {
    let world = World::new(4);
    let mut play = play(&world, "answers-again");
    play.waits = waits(Duration::from_secs(1));
    world.at(70.5, |world| lock(&world.engines).iter().for_each(|engine| engine.hang(engine.name != "e0")));
    let dir = play.dir.clone();
    world.at(75.5, move |_| wish(&dir, Wish::Abort).expect("a wish"));
    world.at(90.5, |world| lock(&world.engines).iter().for_each(|engine| engine.hang(false)));
    assert_eq!(ended(play.begin(settings())), Outcome::Aborted, "{}", play.events());
    assert_eq!((world.actives(), left(&play.state()).len()), (only(OLD), 0), "{}", play.events());
    assert!(play.events().contains("every engine has the old policy again"), "{}", play.events());
}

/// What happens to an engine.
fn happens(world: &World, name: &str, what: u32) {
    let engine = world.engine(name);
    match what {
        0 | 1 => engine.hang(true),
        2 | 3 => engine.hang(false),
        4 => engine.restart(),
        5 => lock(&engine.inner).is_up = false,
        6 => lock(&engine.inner).is_up = true,
        _ => engine.fault(),
    }
}

#[test]
fn whatever_engines_do_those_that_answer_have_one_policy_and_the_others_are_named() {
    for seed in 0..40 {
        let mut random = Pcg64::seed_from_u64(seed);
        let world = World::new(4);
        *lock(&world.effect) = if random.random_bool(0.3) { 2.0 } else { 1.0 };
        for _ in 0..random.random_range(1..8) {
            let (at_s, name) = (random.random_range(1.0..110.0), format!("e{}", random.random_range(0..4)));
            let what = random.random_range(0..8);
            world.at(at_s, move |world| happens(world, &name, what));
        }
        let mut play = play(&world, &format!("any-{seed}"));
        // Dozens of rounds in which an engine hangs.
        let long = std::mem::replace(&mut play.waits, waits(Duration::from_millis(200)));
        if random.random_bool(0.7) {
            let dir = play.dir.clone();
            // Before the first state, there is nothing to abort.
            world.at(random.random_range(1.0..110.0), move |_| drop(wish(&dir, Wish::Abort)));
        }
        let dir = play.dir.clone();
        // A guard that stays unclear is for the operator.
        world.at(400.0, move |_| drop(wish(&dir, Wish::Abort)));
        let outcome = ended(play.begin(settings()));
        let (state, events) = (play.state(), play.events());
        let (wanted, other) = if outcome == Outcome::Completed { (NEW, OLD) } else { (OLD, NEW) };
        assert!(with(&world, other).is_subset(&left(&state)), "seed {seed}: {outcome:?}: {events}");
        play.waits = long;
        // In the end all answer, and the operator wants what is left done.
        for engine in lock(&world.engines).iter() {
            engine.hang(false);
            lock(&engine.inner).is_up = true;
        }
        if outcome != Outcome::Completed && state.left_behind().next().is_some() {
            assert_eq!(ended(play.reopen_and(|rollout| rollout.abort())), outcome, "seed {seed}");
            assert_eq!(left(&play.state()).len(), 0, "seed {seed}: {}", play.events());
            assert_eq!(with(&world, wanted).len(), 4, "seed {seed}: {}", play.events());
        }
    }
}

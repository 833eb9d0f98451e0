//! Experiments on a simulated engine: what they find, and that the old policy decides in the end whatever happens.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU32, Ordering};

use meridian_bench::policies::{Choice, Inject, Loader, Policies as EnginePolicies};
use meridian_bench::results::Slo;
use meridian_bench::sim::{EngineConfig, Simulation, StepModel};
use meridian_bench::switchback::{SimulatedMember, VirtualTime, member};
use meridian_bench::trace::{Generator, TraceRequest, Workload};
use meridian_core::{FaultKind, MeridianConfig, SlotName};
use meridian_engine::control::{LatencyReport, Mode, ProcessStatus, SwapReport};
use meridian_fleet::experiment::{
    ExperimentError, MetricVerdict, Policies, Report, Settings, Stage, State, Stop, StoreError, Surroundings, run,
};
use meridian_fleet::{Member, MemberError, NamedPolicy, PolicyOrigin};

const SLOT: SlotName = SlotName::Dispatch;
const OLD: &str = "native:balanced";
/// Leaves every step to the default, which is the same policy.
const NEW: &str = "native:noop";

fn loader() -> Loader {
    Loader::new(MeridianConfig::from_toml("[model]\nstrips_reasoning = true").expect("valid"))
}

/// An engine with some 20 running requests, in which `NEW` takes `drag` times as long.
fn engine(seed: u64, drag: f64) -> (SimulatedMember, VirtualTime<impl Iterator<Item = TraceRequest>>) {
    let config = EngineConfig {
        step: StepModel { fixed_ms: 12.0, request_ms: 0.2, token_ms: 0.04, ..StepModel::default() },
        max_num_seqs: 64,
        max_num_batched_tokens: 512,
        jitter: (0..64).map(|i| 0.9 + 0.2 * (i as f32) / 63.0).collect(),
        ..EngineConfig::default()
    };
    let workload = Workload { requests_per_s: 1.2, ..Workload::named("reasoning-chat").expect("known") };
    let choice = Choice { dispatch: OLD.parse().expect("a policy"), eviction: None, budget: None, inject: None };
    let policies = EnginePolicies::load(&mut loader(), &choice, 1).expect("loads");
    let simulation = Simulation::new(&config, vec![policies], Slo::default(), 100_000).with_drag(NEW, drag);
    let arrivals = Generator::new(&workload, seed).expect("valid").take(100_000).map(|request| request.clipped(1500));
    let (member, mut time) = member(simulation, arrivals, loader());
    // Full queues before it begins.
    time.pass(60.0);
    (member, time)
}

fn named(name: &str) -> NamedPolicy {
    NamedPolicy { source: PolicyOrigin::Named(name.into()), options: None }
}

fn policies() -> Policies {
    Policies { old: named(OLD), new: named(NEW) }
}

fn settings(pairs: u32) -> Settings {
    Settings { interval_s: 30.0, warm_up_s: 5.0, pairs, ..Settings::default() }
}

fn state(settings: Settings) -> State {
    State::new(settings, "simulated", Default::default())
}

fn decides(member: &SimulatedMember) -> String {
    member.dispatch().status().active.source
}

#[test]
fn a_known_difference_is_found_and_the_old_policy_decides_again() {
    let (member, mut time) = engine(1, 1.1);
    let mut state = state(settings(10));
    run(&mut state, &member, &policies(), &mut time).expect("runs");
    assert_eq!(decides(&member), OLD);
    assert!(state.restored && time.kept.as_ref() == Some(&state));
    let report = Report::of(&state);
    assert!(report.is_final() && report.pairs == 10 && report.void == 0, "{report:?}");
    let ratio = report.findings[0].ratio.expect("values");
    assert_eq!(report.findings[0].verdict, MetricVerdict::Worse, "{ratio:?}");
    assert!(ratio.low < 1.1 && 1.1 < ratio.high * 1.02, "{ratio:?}");
    assert!(report.findings[0].carry_over < 1e-9, "gaps do not last into the next interval");
}

#[test]
fn equal_policies_are_not_told_apart() {
    let (member, mut time) = engine(2, 1.0);
    let mut state = state(settings(10));
    run(&mut state, &member, &policies(), &mut time).expect("runs");
    let finding = &Report::of(&state).findings[0];
    assert!(matches!(finding.verdict, MetricVerdict::Same | MetricVerdict::Unclear { .. }), "{finding:?}");
}

/// What ends a process in the middle of its work.
struct Kill;

/// Kills the controller at one of its steps.
struct Mortal<'a, S> {
    time: &'a mut S,
    left: u32,
}

impl<S> Mortal<'_, S> {
    fn step(&mut self) {
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            // Without the message of a panic.
            None => resume_unwind(Box::new(Kill)),
        }
    }
}

impl<S: Surroundings> Surroundings for Mortal<'_, S> {
    fn wait(&mut self, seconds: f64) {
        self.step();
        self.time.wait(seconds);
    }

    fn save(&mut self, state: &State) -> Result<(), StoreError> {
        self.step();
        let saved = self.time.save(state);
        self.step();
        saved
    }

    fn stop_requested(&mut self) -> Option<Stop> {
        None
    }
}

#[test]
fn a_controller_killed_at_any_step_is_followed_by_one_that_ends_the_experiment() {
    let settings = Settings { interval_s: 4.0, warm_up_s: 1.0, pairs: 4, stop_above: 1e6, ..Settings::default() };
    let mut kills = 0;
    for step in 0.. {
        let (member, mut time) = engine(3, 1.0);
        let mut first = state(settings.clone());
        let killed = catch_unwind(AssertUnwindSafe(|| {
            run(&mut first, &member, &policies(), &mut Mortal { time: &mut time, left: step })
        }));
        match killed {
            Ok(ended) => {
                ended.expect("runs");
                break;
            }
            Err(payload) => assert!(payload.is::<Kill>()),
        }
        kills += 1;
        // All that is left of it.
        let mut second = time.kept.clone().unwrap_or_else(|| state(settings.clone()));
        run(&mut second, &member, &policies(), &mut time).unwrap_or_else(|error| panic!("step {step}: {error}"));
        assert_eq!(decides(&member), OLD, "step {step}");
        let report = Report::of(&second);
        assert!(report.is_final() && report.pairs == 4 && report.void <= 1, "step {step}: {report:?}");
        assert!(member.dispatch().status().shadow.is_none(), "step {step}");
    }
    assert!(kills > 40, "{kills}");
}

/// Something that happens once so many seconds have passed.
struct Later<'a, S, F> {
    time: &'a mut S,
    left_s: f64,
    event: Option<F>,
    stops: Option<Stop>,
}

impl<S: Surroundings, F: FnOnce(&mut S)> Surroundings for Later<'_, S, F> {
    fn wait(&mut self, seconds: f64) {
        self.time.wait(seconds);
        self.left_s -= seconds;
        if self.left_s <= 0.0
            && let Some(event) = self.event.take()
        {
            event(self.time);
        }
    }

    fn save(&mut self, state: &State) -> Result<(), StoreError> {
        self.time.save(state)
    }

    fn stop_requested(&mut self) -> Option<Stop> {
        self.stops.filter(|_| self.event.is_none())
    }
}

fn ended(state: &State) -> (&str, bool) {
    match &state.stage {
        Stage::Ended { why, complete } => (why, *complete),
        Stage::Running => panic!("it goes on"),
    }
}

#[test]
fn a_restart_of_the_engine_costs_one_pair() {
    let (member, mut time) = engine(4, 1.0);
    let mut state = state(settings(4));
    let mut around = Later { time: &mut time, left_s: 45.0, event: Some(VirtualTime::restart), stops: None };
    run(&mut state, &member, &policies(), &mut around).expect("runs");
    let report = Report::of(&state);
    assert_eq!((ended(&state), report.pairs, report.void), (("every pair was measured", true), 4, 1));
    assert_eq!(report.notes, ["pairs that do not count: the engine restarted"]);
}

#[test]
fn a_policy_that_somebody_else_put_there_stays() {
    let (member, mut time) = engine(5, 1.0);
    let mut state = state(settings(4));
    let event = |_: &mut _| {
        let put = member.put(SLOT, &named("native:srpt"), Default::default());
        put.expect("loads");
    };
    let mut around = Later { time: &mut time, left_s: 45.0, event: Some(event), stops: None };
    run(&mut state, &member, &policies(), &mut around).expect("runs");
    let (why, complete) = ended(&state);
    assert!(why.starts_with("srpt was put in place of") && !complete, "{why}");
    assert_eq!((decides(&member).as_str(), state.restored), ("native:srpt", true));
}

#[test]
fn a_stop_puts_the_old_policy_back() {
    let (member, mut time) = engine(6, 1.0);
    let mut state = state(settings(4));
    let mut around =
        Later { time: &mut time, left_s: 100.0, event: Some(|_: &mut _| ()), stops: Some(Stop::Experiment) };
    run(&mut state, &member, &policies(), &mut around).expect("runs");
    assert_eq!((ended(&state), decides(&member).as_str(), state.restored), (("stopped", false), OLD, true));
}

#[test]
fn a_controller_that_is_stopped_puts_the_old_policy_back_and_another_goes_on() {
    let (member, mut time) = engine(6, 1.0);
    let mut state = state(settings(4));
    for at_s in [20.0, 75.0] {
        let event = Some(|_: &mut _| ());
        let mut around = Later { time: &mut time, left_s: at_s, event, stops: Some(Stop::Controller) };
        run(&mut state, &member, &policies(), &mut around).expect("runs");
        assert_eq!((&state.stage, decides(&member).as_str(), state.restored), (&Stage::Running, OLD, true));
        assert_eq!(time.kept.as_ref(), Some(&state));
    }
    run(&mut state, &member, &policies(), &mut time).expect("goes on");
    let report = Report::of(&state);
    assert_eq!((ended(&state), report.pairs, report.void), (("every pair was measured", true), 4, 2));
    assert_eq!(report.notes, ["pairs that do not count: the controller was interrupted"]);
}

/// An engine that restarts right after one of its answers, with the policy that it was started with.
struct Restarts {
    member: SimulatedMember,
    answers: AtomicU32,
    at: u32,
}

impl Restarts {
    fn then<T>(&self, answer: Result<T, MemberError>) -> Result<T, MemberError> {
        if self.answers.fetch_add(1, Ordering::Relaxed) + 1 == self.at {
            self.member.put(SLOT, &named(OLD), Mode::Active).expect("loads");
        }
        answer
    }
}

impl Member for Restarts {
    fn name(&self) -> &str {
        self.member.name()
    }

    fn status(&self) -> Result<ProcessStatus, MemberError> {
        self.then(self.member.status())
    }

    fn latency(&self) -> Result<LatencyReport, MemberError> {
        let is_later = self.answers.load(Ordering::Relaxed) >= self.at;
        let answer = self.member.latency();
        self.then(answer.map(|of| LatencyReport { run: if is_later { "2".into() } else { of.run }, ..of }))
    }

    fn put(&self, slot: SlotName, policy: &NamedPolicy, mode: Mode) -> Result<SwapReport, MemberError> {
        self.then(self.member.put(slot, policy, mode))
    }

    fn promote(&self, slot: SlotName) -> Result<SwapReport, MemberError> {
        self.then(self.member.promote(slot))
    }

    fn rollback(&self, slot: SlotName) -> Result<SwapReport, MemberError> {
        self.then(self.member.rollback(slot))
    }

    fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, MemberError> {
        self.then(self.member.stop_shadow(slot))
    }
}

#[test]
fn an_engine_that_restarts_after_any_answer_costs_one_pair() {
    let settings = Settings { interval_s: 4.0, warm_up_s: 1.0, pairs: 4, stop_above: 1e6, ..Settings::default() };
    // From the first pair on: 4 answers come before it.
    for at in 5..60 {
        let (member, mut time) = engine(3, 1.0);
        let member = Restarts { member, answers: AtomicU32::new(0), at };
        let mut state = state(settings.clone());
        run(&mut state, &member, &policies(), &mut time).expect("runs");
        let report = Report::of(&state);
        assert_eq!((ended(&state), report.pairs), (("every pair was measured", true), 4), "{at}: {:?}", report.notes);
        assert!(report.void <= 1, "{at}: {report:?}");
        assert_eq!(decides(&member.member), OLD, "{at}");
    }
}

#[test]
fn a_policy_that_faults_ends_the_experiment() {
    for share in [0.01, 1.0] {
        let (member, mut time) = engine(7, 1.0);
        let inject = Inject { kind: FaultKind::Trap, share };
        let member = member.with_faulty(NEW, inject);
        let mut state = state(settings(4));
        run(&mut state, &member, &policies(), &mut time).expect("runs");
        let (why, complete) = ended(&state);
        assert!(["noop faulted", "noop went into quarantine"].contains(&why) && !complete, "{why}");
        time.pass(3600.0);
        let status = member.dispatch().status();
        assert_eq!((status.active.source.as_str(), status.quarantine), (OLD, None), "it does not come back");
    }
}

#[test]
fn a_policy_that_is_much_worse_ends_the_experiment_early() {
    let (member, mut time) = engine(8, 2.0);
    let mut state = state(settings(30));
    run(&mut state, &member, &policies(), &mut time).expect("runs");
    let (why, complete) = ended(&state);
    assert!(why.contains("certainly worse by more than 1.5x") && !complete, "{why}");
    assert!(state.pairs.len() < 10, "{} pairs", state.pairs.len());
    assert_eq!(decides(&member), OLD);
}

#[test]
fn an_experiment_does_not_begin_where_it_cannot() {
    let (member, mut time) = engine(9, 1.0);
    let mut begin = |policies: &Policies, settings: Settings| {
        let error = run(&mut state(settings), &member, policies, &mut time).expect_err("refused");
        (matches!(error, ExperimentError::NotNow(_)), error.to_string())
    };
    let same = Policies { old: named(OLD), new: named(OLD) };
    assert_eq!(begin(&same, settings(4)), (true, "dispatch: balanced decides already, with the same options".into()));
    let unknown = Policies { old: named(OLD), new: named("native:unknown") };
    assert!(begin(&unknown, settings(4)).1.contains("unknown"));
    assert!(begin(&policies(), settings(1)).1.starts_with("pairs: 1: expected"));
    assert_eq!(decides(&member), OLD);
    let status = member.dispatch().status();
    assert!(status.shadow.is_none() && status.swaps == 0, "nothing has changed");
}

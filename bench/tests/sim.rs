//! The simulator: what one request takes, what many leave behind, and that the policies decide as they do elsewhere.

use meridian_bench::policies::{Choice, Inject, Loader, Policies, PolicyArg};
use meridian_bench::results::Slo;
use meridian_bench::sim::{EngineConfig, Outcome, Router, Simulation, Swap};
use meridian_bench::trace::{Prefix, TraceRequest};
use meridian_core::{FaultKind, MeridianConfig};
use proptest::prelude::*;
use step::STEP;

use crate::step;

fn engine() -> EngineConfig {
    EngineConfig {
        step: STEP,
        max_num_seqs: 16,
        max_num_batched_tokens: 512,
        kv_blocks: 1025,
        block_tokens: 16,
        ..EngineConfig::default()
    }
}

fn config() -> MeridianConfig {
    MeridianConfig::from_toml("[model]\nstrips_reasoning = true").expect("valid")
}

fn policies(dispatch: &str, inject: Option<Inject>) -> Policies {
    let source: PolicyArg = dispatch.parse().expect("a source");
    let choice = Choice { dispatch: source, eviction: None, budget: None, inject };
    Policies::load(&mut Loader::new(config()), &choice, 1).expect("the policy loads")
}

fn simulate(engine: &EngineConfig, dispatch: &str, requests: &[TraceRequest]) -> Outcome {
    let simulation = Simulation::new(engine, vec![policies(dispatch, None)], Slo::default(), requests.len());
    simulation.keeping_times().run(requests.iter().cloned(), |_| {})
}

fn request(arrival_s: f64, prompt_tokens: u32, think_tokens: u32, output_tokens: u32) -> TraceRequest {
    TraceRequest { arrival_s, prompt_tokens, think_tokens, output_tokens, ..TraceRequest::default() }
}

/// A crowd of `count` requests, `per_s` of them a second.
fn crowd(count: u32, per_s: f64) -> Vec<TraceRequest> {
    let one = |i: u32| {
        let think = if i.is_multiple_of(5) { 0 } else { 40 + i * 37 % 200 };
        request(f64::from(i) / per_s, 20 + i * 91 % 700, think, 1 + i * 53 % 120)
    };
    (0..count).map(one).collect()
}

fn metric(outcome: &Outcome, key: &str) -> f64 {
    *outcome.run.metrics.get(key).unwrap_or_else(|| panic!("no {key} in {:?}", outcome.run.metrics.keys()))
}

#[test]
fn one_request_takes_what_its_steps_take() {
    // A prompt in chunks of 512 and 288 tokens, then 30 tokens of thinking, the end marker and 9 of the answer.
    let outcome = simulate(&engine(), "fcfs", &[request(1.0, 800, 30, 9)]);
    let first = 2.0 + 0.05 + 0.02 * 512.0 + 1e-5 * (512.0 * 513.0 / 2.0);
    let second = 2.0 + 0.05 + 0.02 * 288.0 + 1e-4 * 512.0 + 1e-5 * (288.0 * 512.0 + 288.0 * 289.0 / 2.0);
    let decode = |context: f64| 2.0 + 0.05 + 4.0 + 1e-4 * context;
    let ttft = first + second;
    // The token that the second chunk gives is the first of the thinking.
    let until = |tokens: u32| ttft + (0..tokens).map(|i| decode(800.0 + f64::from(i))).sum::<f64>();
    let times = outcome.times[0];
    assert!((times.ttft_ms - ttft).abs() < 1e-9, "{times:?}, expected {ttft}");
    assert!((times.ttfo_ms - until(31)).abs() < 1e-6, "{times:?}, expected {}", until(31));
    assert!((times.e2e_ms - until(39)).abs() < 1e-6, "{times:?}, expected {}", until(39));
    assert_eq!(outcome.steps, 2 + 39);
    let alone = STEP.alone_ms(800, 40, 512);
    assert!((times.e2e_ms / alone - 1.0).abs() < 1e-3, "{alone}");
}

#[test]
fn a_request_that_does_not_think_answers_at_once() {
    let outcome = simulate(&engine(), "output-first", &[request(0.0, 100, 0, 5)]);
    assert_eq!(outcome.times[0].ttft_ms, outcome.times[0].ttfo_ms);
    assert!(!outcome.run.metrics.contains_key("ttot_p50_ms"));
    assert_eq!(outcome.steps, 5);
}

#[test]
fn every_token_is_computed_once_unless_something_is_preempted() {
    let requests = crowd(200, 20.0);
    let planned: u64 = requests
        .iter()
        .map(|r| u64::from(r.prompt_tokens + r.think_tokens + u32::from(r.think_tokens > 0) + r.output_tokens) - 1)
        .sum();
    for policy in ["fcfs", "output-first", "noop"] {
        let outcome = simulate(&engine(), policy, &requests);
        let computed: u64 = outcome.works.iter().map(|work| u64::from(work.tokens)).sum();
        assert_eq!(metric(&outcome, "preemptions_think") + metric(&outcome, "preemptions_output"), 0.0, "{policy}");
        assert_eq!(computed, planned, "{policy}");
        assert!(outcome.works.iter().all(|work| work.tokens <= 512 && work.requests <= 16), "{policy}");
        assert_eq!(metric(&outcome, "requests"), 200.0);
    }
}

#[test]
fn the_same_run_twice_is_the_same() {
    let requests = crowd(300, 15.0);
    let (a, b) = (simulate(&engine(), "output-first", &requests), simulate(&engine(), "output-first", &requests));
    assert!((a.digest, &a.run) == (b.digest, &b.run));
    // As text: a request with one token has no gaps, and NaN is not equal to itself.
    assert!(format!("{:?}", a.times) == format!("{:?}", b.times));
    assert_ne!(a.digest, simulate(&engine(), "fcfs", &requests).digest);
}

#[test]
fn a_policy_that_always_faults_leaves_the_default() {
    let requests = crowd(300, 15.0);
    let plain = simulate(&engine(), "balanced", &requests);
    let inject = Inject { kind: FaultKind::Trap, share: 1.0 };
    let simulation = Simulation::new(&engine(), vec![policies("fcfs", Some(inject))], Slo::default(), 300);
    let faulty = simulation.run(requests.into_iter(), |_| {});
    assert_eq!(faulty.digest, plain.digest);
    assert!(metric(&faulty, "faults") > 0.0);
    assert_eq!(metric(&faulty, "requests"), 300.0);
    // Three strikes, and out.
    assert_eq!(faulty.run.events[0].what, "engine 0: fcfs in quarantine, balanced decides");
}

#[test]
fn a_share_of_faults_is_that_share() {
    let requests = crowd(600, 15.0);
    let inject = Inject { kind: FaultKind::BadAnswer, share: 0.02 };
    let mut config = config();
    // So that nothing is put into quarantine.
    config.policy.max_strikes = 1_000_000;
    let dispatch = "output-first".parse().expect("a source");
    let choice = Choice { dispatch, eviction: None, budget: None, inject: Some(inject) };
    let policies = Policies::load(&mut Loader::new(config), &choice, 1).expect("loads");
    let outcome = Simulation::new(&engine(), vec![policies], Slo::default(), 600).run(requests.into_iter(), |_| {});
    let share = metric(&outcome, "faults") / metric(&outcome, "decisions");
    assert!((0.015..0.025).contains(&share), "{share}");
}

#[test]
fn short_of_blocks_the_victims_come_back() {
    let small = EngineConfig { kv_blocks: 65, ..engine() };
    let requests = crowd(120, 100.0);
    for policy in ["fcfs", "output-first"] {
        let outcome = simulate(&small, policy, &requests);
        assert_eq!(metric(&outcome, "requests"), 120.0, "{policy}");
        let phases = ["prefill", "think", "output"];
        let preempted: f64 = phases.iter().map(|phase| metric(&outcome, &format!("preemptions_{phase}"))).sum();
        assert!(preempted > 0.0, "{policy}");
    }
    let answers = |policy| metric(&simulate(&small, policy, &requests), "preemptions_output");
    assert!(answers("output-first") < answers("fcfs"), "{} {}", answers("output-first"), answers("fcfs"));
}

/// Seen beside vLLM: whoever did not answer yet went before all that answered, so that the prompt was preempted again and again.
#[test]
fn a_long_prompt_beside_short_answers_keeps_its_blocks() {
    let small = EngineConfig { kv_blocks: 2049, max_num_batched_tokens: 256, max_num_seqs: 64, ..engine() };
    let mut requests = vec![request(0.0, 32_000, 0, 4)];
    requests.extend((0..50).map(|i| request(0.0, 20 + i, 0, 400)));
    // The same with the prompt behind the others, where stock computes it last.
    for (long, order) in [
        (0, requests.clone()),
        (50, {
            requests.rotate_left(1);
            requests
        }),
    ] {
        let run = |dispatch: &str| {
            let outcome = simulate(&small, dispatch, &order);
            (outcome.times[long].ttft_ms, metric(&outcome, "preemptions_prefill"))
        };
        let (stock, _) = run("native:fcfs");
        for policy in ["balanced", "fcfs", "output-first"] {
            let (ttft_ms, preemptions) = run(policy);
            assert_eq!(preemptions, 0.0, "{policy}");
            assert!(ttft_ms <= 1.1 * stock, "{policy}: {ttft_ms} ms, stock {stock}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// While nothing else grows, prompts that were admitted together are not preempted: they fit.
    #[test]
    fn prompts_are_admitted_beside_each_other_only_if_all_of_them_fit(
        prompts in proptest::collection::vec((1u32..6000, 0u32..400), 2..40),
        policy in prop_oneof![Just("balanced"), Just("fcfs"), Just("output-first"), Just("srpt")],
        seats in 2u32..32,
    ) {
        let small = EngineConfig { kv_blocks: 401, max_num_batched_tokens: 512, max_num_seqs: seats, ..engine() };
        let requests: Vec<_> =
            prompts.iter().map(|(tokens, at_ms)| request(f64::from(*at_ms) / 1e3, *tokens, 0, 1)).collect();
        let outcome = simulate(&small, policy, &requests);
        prop_assert_eq!(metric(&outcome, "preemptions_prefill"), 0.0);
        prop_assert_eq!(metric(&outcome, "requests"), requests.len() as f64);
    }
}

#[test]
fn what_never_fits_is_refused() {
    let outcome = simulate(&engine(), "fcfs", &[request(0.0, 16_000, 600, 10), request(0.0, 10, 0, 1)]);
    assert_eq!((metric(&outcome, "refused"), metric(&outcome, "requests")), (1.0, 1.0));
}

fn turn(arrival_s: f64, id: u64, turn: u32, prompt_tokens: u32, think_tokens: u32) -> TraceRequest {
    TraceRequest { prefix: Prefix::Session { id, turn }, ..request(arrival_s, prompt_tokens, think_tokens, 64) }
}

#[test]
fn a_turn_finds_what_was_said_and_waits_for_it() {
    let turns = [turn(0.0, 9, 0, 160, 0), turn(0.001, 9, 1, 160 + 64 + 32, 0)];
    let outcome = simulate(&engine(), "fcfs", &turns);
    // Of 256 tokens, all full blocks but the one that the last answer token is in: its KV was never computed.
    assert!((metric(&outcome, "hit_rate") - 208.0 / 416.0).abs() < 1e-9, "{}", metric(&outcome, "hit_rate"));
    let both = outcome.times[0].e2e_ms + outcome.times[1].e2e_ms;
    let makespan = outcome.run.metrics["makespan_s"] * 1e3;
    assert!((makespan - both).abs() < 1e-6, "the second begins when the first is over: {makespan} {both}");
}

#[test]
fn thinking_that_is_stripped_is_not_found_again() {
    let turns = [turn(0.0, 9, 0, 160, 200), turn(0.001, 9, 1, 160 + 64 + 32, 0)];
    let outcome = simulate(&engine(), "output-first", &turns);
    assert!((metric(&outcome, "hit_rate") - 160.0 / 416.0).abs() < 1e-9, "{}", metric(&outcome, "hit_rate"));
}

#[test]
fn a_prefix_is_found_by_whoever_comes_later() {
    let shared =
        |at: f64| TraceRequest { prefix: Prefix::Blocks { tokens: 512, ids: [7].into() }, ..request(at, 512, 0, 8) };
    // The first takes a whole step; both others find it, but for the last block, whose last token gives the first logits.
    let outcome = simulate(&engine(), "fcfs", &[shared(0.0), shared(0.0), shared(1.0)]);
    assert!((metric(&outcome, "hit_rate") - 992.0 / 1536.0).abs() < 1e-9, "{}", metric(&outcome, "hit_rate"));
}

#[test]
fn the_timeline_adds_engines_up() {
    let requests: Vec<TraceRequest> = (0..64).map(|_| request(0.0, 64, 0, 200)).collect();
    let run = |engines: usize| {
        let all = (0..engines).map(|_| policies("fcfs", None)).collect();
        Simulation::new(&engine(), all, Slo::default(), 64).run(requests.iter().cloned(), |_| {})
    };
    let (one, four) = (run(1), run(4));
    // The first step has tokens for eight prompts.
    assert_eq!((metric(&one, "waiting_max"), metric(&four, "waiting_max")), (56.0, 32.0));
    // 16 seats in one, 64 in four; all are taken until the end.
    assert!((metric(&one, "running_mean") - 16.0).abs() < 0.5, "{}", metric(&one, "running_mean"));
    assert!((metric(&four, "running_mean") - 64.0).abs() < 2.0, "{}", metric(&four, "running_mean"));
    let most = four.run.timeline.iter().map(|point| point.output).fold(0.0, f64::max);
    assert!((most - 64.0).abs() < 1e-6, "{most}");
}

#[test]
fn conversations_stay_with_their_engine() {
    // An odd number of conversations: one after the other, their turns land on both engines.
    let turn_of = |t: u32, id: u64| turn(f64::from(t) * 10.0 + id as f64 * 0.01, id, t, 160 + t * 224, 0);
    let turns: Vec<TraceRequest> = (0..3).flat_map(|t| (0..7).map(move |id| turn_of(t, id))).collect();
    let hits = |router| {
        let both = vec![policies("fcfs", None), policies("fcfs", None)];
        let simulation = Simulation::new(&engine(), both, Slo::default(), turns.len()).with_router(router);
        metric(&simulation.run(turns.iter().cloned(), |_| {}), "hit_rate")
    };
    assert!(hits(Router::Session) > hits(Router::RoundRobin), "{} {}", hits(Router::Session), hits(Router::RoundRobin));
}

#[test]
fn a_swap_takes_over_at_its_time() {
    let requests = crowd(300, 15.0);
    let mut loader = Loader::new(config());
    let source: PolicyArg = "fcfs".parse().expect("a source");
    let candidate = loader.dispatch(&source, None, 1).expect("loads");
    let swap = Swap { at_ms: 5000.0, candidates: vec![candidate], label: "fcfs".into() };
    let simulation =
        Simulation::new(&engine(), vec![policies("output-first", None)], Slo::default(), 300).with_swaps(vec![swap]);
    let outcome = simulation.run(requests.iter().cloned(), |_| {});
    assert_eq!(outcome.run.events.len(), 1);
    assert_eq!((outcome.run.events[0].t_s, metric(&outcome, "requests")), (5.0, 300.0));
    assert_ne!(outcome.digest, simulate(&engine(), "output-first", &requests).digest);
}

#[test]
fn a_budget_ends_thinking_early() {
    let requests: Vec<TraceRequest> = (0..40).map(|i| request(f64::from(i) * 0.2, 50, 900, 20)).collect();
    let run = |budget: Option<&str>| {
        let mut config = config();
        config.scheduler.min_think_tokens = 64;
        config.entropy.ema_alpha = 0.5;
        let choice = Choice {
            dispatch: "output-first".parse().expect("a source"),
            eviction: None,
            budget: budget.map(|name| name.parse().expect("a source")),
            inject: None,
        };
        let policies = Policies::load(&mut Loader::new(config), &choice, 1).expect("loads");
        Simulation::new(&engine(), vec![policies], Slo::default(), 40).run(requests.iter().cloned(), |_| {})
    };
    let (without, with) = (run(None), run(Some("eat-rpdi")));
    // Those whose thinking converges early enough for the variance of the probes to fall.
    assert!(metric(&with, "forced_ends") >= 12.0, "{}", metric(&with, "forced_ends"));
    assert!(metric(&with, "ttfo_mean_ms") < 0.95 * metric(&without, "ttfo_mean_ms"));
    assert!(!without.run.metrics.contains_key("forced_ends"));
}

/// Those that leave requests out of a step among them.
const POLICIES: [&str; 10] =
    ["fcfs", "output-first", "noop", "pascal", "qoe", "fair-share", "qoserve", "scorpio", "jitserve", "lpm"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_comes_everything_ends(
        rows in proptest::collection::vec((0u32..400, 1u32..600, 0u32..200, 1u32..100, 0u32..4), 1..60),
        seqs in 1u32..12,
        budget in 1u32..600,
        blocks in 20u32..400,
        policy in 0usize..POLICIES.len(),
        router in 0usize..3,
        caching in any::<bool>(),
    ) {
        let mut at = 0.0;
        let requests: Vec<TraceRequest> = rows
            .iter()
            .map(|(gap, prompt, think, output, session)| {
                at += f64::from(*gap) / 1e3;
                let prefix =
                    if *session == 0 { Prefix::None } else { Prefix::Session { id: u64::from(*session), turn: 9 } };
                TraceRequest { prefix, ..request(at, *prompt, *think, *output) }
            })
            .collect();
        let engine = EngineConfig {
            max_num_seqs: seqs,
            max_num_batched_tokens: budget,
            kv_blocks: blocks,
            prefix_caching: caching,
            ..engine()
        };
        let both = (0..2).map(|_| policies(POLICIES[policy], None)).collect();
        let simulation = Simulation::new(&engine, both, Slo::default(), requests.len()).with_router(Router::ALL[router].1);
        let outcome = simulation.keeping_times().run(requests.iter().cloned(), |_| {});
        prop_assert_eq!(metric(&outcome, "requests") + metric(&outcome, "refused"), requests.len() as f64);
        prop_assert!(outcome.works.iter().all(|work| work.tokens <= budget && work.requests <= seqs));
        for times in &outcome.times {
            prop_assert!(0.0 < times.ttft_ms && times.ttft_ms <= times.ttfo_ms && times.ttfo_ms <= times.e2e_ms);
        }
    }
}

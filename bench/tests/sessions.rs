//! Sessions in closed loop: when their requests arrive, what is counted, and what eviction policies make of them.

use std::sync::Arc;

use meridian_bench::policies::{Choice, Loader, Policies};
use meridian_bench::results::Slo;
use meridian_bench::sim::{Admitted, ClosedLoop, EngineConfig, Outcome, Simulation, StepModel};
use meridian_bench::trace::{Session, SessionRequest};
use meridian_core::MeridianConfig;
use proptest::prelude::*;

const STEP: StepModel = StepModel {
    fixed_ms: 2.0,
    request_ms: 0.05,
    weights_ms: 4.0,
    token_ms: 0.1,
    kv_token_ms: 1e-4,
    attention_ms: 1e-6,
    arrival_ms: 0.0,
    hides_host: false,
};

fn engine(kv_blocks: u32) -> EngineConfig {
    EngineConfig {
        step: STEP,
        max_num_seqs: 4,
        max_num_batched_tokens: 512,
        kv_blocks,
        block_tokens: 16,
        ..EngineConfig::default()
    }
}

/// Sessions of `turns` requests: each prompt is the one before and `blocks` new blocks of 16 tokens.
fn sessions(count: u32, turns: u32, blocks: u32, gap_s: f64) -> Arc<[Session]> {
    let request = |turn: u32| SessionRequest {
        gap_s: if turn == 0 { 0.0 } else { gap_s },
        prompt_tokens: (turn + 1) * blocks * 16 + 5,
        output_tokens: 3,
        stopped_for_tool: true,
        blocks: [[1, (turn + 1) * blocks]].into(),
        ..SessionRequest::default()
    };
    (0..count).map(|i| Session::new(format!("s{i}").into(), 16, (0..turns).map(request).collect())).collect()
}

fn simulate(engine: &EngineConfig, sessions: &Arc<[Session]>, at_once: u32, eviction: Option<&str>) -> Outcome {
    simulate_with(engine, ClosedLoop::new(Arc::clone(sessions), at_once, 1), "fcfs", eviction)
}

fn simulate_with(engine: &EngineConfig, closed_loop: ClosedLoop, dispatch: &str, eviction: Option<&str>) -> Outcome {
    let config = MeridianConfig::from_toml("[model]\nstrips_reasoning = true").expect("valid");
    let eviction = eviction.map(|name| name.parse().expect("a source"));
    let choice = Choice { dispatch: dispatch.parse().expect("a source"), eviction, budget: None, inject: None };
    let policies = Policies::load(&mut Loader::new(config), &choice, 1).expect("the policies load");
    let simulation = Simulation::new(engine, vec![policies], Slo::default(), closed_loop.requests());
    simulation.keeping_times().run_sessions(closed_loop, |_| {})
}

/// Tools answer after 0.3 s. Two of six sessions fit.
fn crowd() -> (EngineConfig, Arc<[Session]>) {
    (engine(700), sessions(12, 8, 40, 0.3))
}

#[test]
fn a_door_lets_in_so_many_sessions_and_the_wait_outside_counts() {
    let (engine, sessions) = crowd();
    let through = |admitted| {
        let closed_loop = ClosedLoop::new(Arc::clone(&sessions), 6, 1).admitting(admitted, 2000);
        simulate_with(&engine, closed_loop, "fcfs", None)
    };
    let (open, two) = (through(Admitted::All), through(Admitted::AtMost(2)));
    for outcome in [&open, &two] {
        assert_eq!((metric(outcome, "requests"), metric(outcome, "sessions")), (96.0, 12.0));
    }
    assert!(metric(&two, "computed_again_tokens") < 0.1 * metric(&open, "computed_again_tokens"));
    // The first turns wait outside.
    assert!(metric(&two, "ttft_turn_1_p99_ms") > 3_000.0, "{}", metric(&two, "ttft_turn_1_p99_ms"));
    assert!(metric(&two, "running_mean") < 2.0);
    assert_eq!(through(Admitted::AtMost(6)).digest, open.digest, "a door that is wide enough");
    // Three sessions begin with 645 tokens each in the 2,000 that the door knows of. They grow, and the next one waits until
    // they have ended.
    let pinned = through(Admitted::Pinned);
    assert_eq!((metric(&pinned, "requests"), metric(&pinned, "sessions")), (96.0, 12.0));
    let again = [&two, &pinned, &open].map(|outcome| metric(outcome, "computed_again_tokens"));
    assert!(again.is_sorted() && again[0] < again[1], "{again:?}");
    assert_ne!(pinned.digest, open.digest);
}

#[test]
fn the_default_admits_sessions_that_fit_and_all_of_them_in_the_end() {
    let (engine, sessions) = crowd();
    let stock = simulate(&engine, &sessions, 6, None);
    let ours = simulate_with(&engine, ClosedLoop::new(Arc::clone(&sessions), 6, 1), "balanced", None);
    assert_eq!((metric(&ours, "requests"), metric(&ours, "sessions")), (96.0, 12.0));
    let over = |key: &str| metric(&ours, key) / metric(&stock, key);
    assert!(over("computed_again_tokens") < 0.5, "{}", over("computed_again_tokens"));
    assert!(over("session_mean_s") < 1.0, "{}", over("session_mean_s"));
}

fn metric(outcome: &Outcome, key: &str) -> f64 {
    *outcome.run.metrics.get(key).unwrap_or_else(|| panic!("no {key} in {:?}", outcome.run.metrics.keys()))
}

#[test]
fn the_next_request_arrives_its_gap_after_the_last_one_ended() {
    let outcome = simulate(&engine(1025), &sessions(1, 3, 4, 7.0), 1, None);
    let served_ms: f64 = outcome.times.iter().map(|times| times.e2e_ms).sum();
    assert_eq!(outcome.times.len(), 3);
    assert!((metric(&outcome, "makespan_s") - (14.0 + served_ms / 1e3)).abs() < 1e-6, "{:?}", outcome.times);
    // Of a histogram of milliseconds with three digits.
    assert!((metric(&outcome, "session_p50_s") / metric(&outcome, "makespan_s") - 1.0).abs() < 2e-3);
    assert!((metric(&outcome, "session_served_p50_s") * 1e3 - served_ms).abs() < 2.0);
    assert!((metric(&outcome, "session_work_p50_s") * 1e3 - 14_000.0 - served_ms).abs() < 20.0);
}

#[test]
fn users_gaps_do_not_count_as_work() {
    let mut requests = sessions(1, 2, 4, 30.0)[0].requests.clone();
    requests[0].stopped_for_tool = false;
    let session: Arc<[Session]> = [Session::new("s".into(), 16, requests)].into();
    let outcome = simulate(&engine(1025), &session, 1, None);
    assert!(metric(&outcome, "session_work_p50_s") < 1.0 && metric(&outcome, "session_p50_s") > 30.0);
}

#[test]
fn no_more_sessions_are_under_way_than_were_asked_for() {
    // One at a time: the second begins when the first has ended.
    let outcome = simulate(&engine(1025), &sessions(2, 2, 4, 5.0), 1, None);
    assert!(metric(&outcome, "makespan_s") > 10.0 && metric(&outcome, "sessions") == 2.0);
    let outcome = simulate(&engine(1025), &sessions(2, 2, 4, 5.0), 2, None);
    assert!(metric(&outcome, "makespan_s") < 6.0);
}

#[test]
fn an_ample_cache_finds_what_an_unlimited_one_has() {
    for eviction in [None, Some("tiered-lru"), Some("next-use"), Some("belady")] {
        let outcome = simulate(&engine(2049), &sessions(6, 8, 4, 2.0), 3, eviction);
        assert_eq!(metric(&outcome, "hit_rate"), metric(&outcome, "hit_rate_unlimited"), "{eviction:?}");
        assert_eq!((metric(&outcome, "needed_blocks"), metric(&outcome, "computed_again_tokens")), (0.0, 0.0));
    }
}

#[test]
fn every_token_that_is_not_found_is_computed_once() {
    let sessions = sessions(8, 6, 6, 0.5);
    let asked: u64 =
        sessions.iter().flat_map(|session| &session.requests).map(|request| u64::from(request.prompt_tokens)).sum();
    for eviction in [None, Some("tiered-lru"), Some("next-use"), Some("belady")] {
        let outcome = simulate(&engine(120), &sessions, 6, eviction);
        let computed: u64 = outcome.works.iter().map(|work| u64::from(work.tokens)).sum();
        let preempted: f64 =
            ["preemptions_prefill", "preemptions_output"].map(|key| metric(&outcome, key)).iter().sum();
        assert_eq!(preempted, 0.0, "{eviction:?}");
        let found = (metric(&outcome, "hit_rate") * asked as f64).round() as u64;
        // The last token of each answer is not computed.
        assert_eq!(computed, asked - found + 2 * 48, "{eviction:?}");
        let needed = metric(&outcome, "needed_blocks") * 16.0 / asked as f64;
        assert!((metric(&outcome, "hit_rate") + needed - metric(&outcome, "hit_rate_unlimited")).abs() < 1e-9);
    }
}

#[test]
fn what_is_awaited_is_kept_and_the_bound_is_above() {
    // Twelve sessions of up to 60 blocks in turns, and room for four: the least recently used is the one needed next.
    let sessions = sessions(12, 12, 5, 0.2);
    let hits = |eviction| metric(&simulate(&engine(241), &sessions, 12, eviction), "hit_rate");
    let (lru, next_use, belady) = (hits(Some("tiered-lru")), hits(Some("next-use")), hits(Some("belady")));
    assert!(next_use > lru + 0.1, "{next_use} after {lru}");
    assert!(belady >= next_use - 0.02, "{belady}, {next_use}");
}

#[test]
fn a_request_that_does_not_fit_is_refused_and_its_session_goes_on() {
    let outcome = simulate(&engine(17), &sessions(2, 4, 6, 0.1), 2, Some("belady"));
    // Prompts of 101, 197, 293 and 389 tokens, and memory for 256.
    assert_eq!(
        (metric(&outcome, "refused"), metric(&outcome, "requests"), metric(&outcome, "sessions")),
        (4.0, 4.0, 2.0)
    );
}

fn any_session() -> impl Strategy<Value = Vec<(u32, u32, u32, bool, f64)>> {
    prop::collection::vec((0u32..40, 1u32..30, 1u32..20, any::<bool>(), 0.0..3.0f64), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_sessions_end_under_any_policy(given in prop::collection::vec(any_session(), 1..8), at_once in 1u32..9, kv in 40u32..300) {
        let sessions: Arc<[Session]> = given
            .iter()
            .enumerate()
            .map(|(number, requests)| {
                let mut next = 1;
                let requests = requests.iter().map(|(shared, new, output, tool, gap_s)| {
                    // A start of what was said before, and new blocks.
                    let shared = (*shared).min(next - 1);
                    let blocks: Vec<[u32; 2]> =
                        (shared > 0).then_some([1, shared]).into_iter().chain([[next + 100, next + 99 + new]]).collect();
                    next += 1;
                    SessionRequest {
                        gap_s: *gap_s,
                        prompt_tokens: (shared + new) * 16 + 3,
                        output_tokens: *output,
                        stopped_for_tool: *tool,
                        blocks: blocks.into(),
                        ..SessionRequest::default()
                    }
                });
                Session::new(number.to_string().into(), 16, requests.collect())
            })
            .collect();
        let count: usize = sessions.iter().map(|session| session.requests.len()).sum();
        for eviction in [None, Some("tiered-lru"), Some("next-use"), Some("belady")] {
            let outcome = simulate(&engine(kv), &sessions, at_once, eviction);
            prop_assert_eq!(metric(&outcome, "requests") + metric(&outcome, "refused"), count as f64);
            prop_assert_eq!(metric(&outcome, "sessions"), sessions.len() as f64);
            prop_assert!(metric(&outcome, "hit_rate") <= metric(&outcome, "hit_rate_unlimited") + 1e-9);
            prop_assert_eq!(outcome.digest, simulate(&engine(kv), &sessions, at_once, eviction).digest);
        }
    }
}

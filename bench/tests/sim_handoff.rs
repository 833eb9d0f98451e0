//! Engines that think and engines that answer, in the simulator.

use meridian_bench::policies::{Choice, Loader, Policies};
use meridian_bench::results::Slo;
use meridian_bench::sim::{EngineConfig, HandoffFleet, Outcome, Simulation, Transfer};
use meridian_bench::trace::TraceRequest;
use meridian_core::MeridianConfig;
use meridian_core::config::HandoffPolicyName;
use step::STEP;

use crate::step;

const TRANSFER: Transfer = Transfer { fixed_ms: 5.0, gb_s: 2.0 };

fn engine() -> EngineConfig {
    EngineConfig {
        step: STEP,
        max_num_seqs: 16,
        max_num_batched_tokens: 512,
        kv_blocks: 1025,
        block_tokens: 16,
        kv_token_bytes: 1e5,
        ..EngineConfig::default()
    }
}

fn policies(engines: usize, dispatch: &str) -> Vec<Policies> {
    let config = MeridianConfig::from_toml("[model]\nstrips_reasoning = true").expect("valid");
    let mut loader = Loader::new(config);
    let choice = Choice { dispatch: dispatch.parse().expect("a source"), eviction: None, budget: None, inject: None };
    (0..engines).map(|_| Policies::load(&mut loader, &choice, 1).expect("the policy loads")).collect()
}

/// Three engines, two of which think when `least_blocks` is given.
fn simulate(config: &EngineConfig, dispatch: &str, least_blocks: Option<u32>, requests: &[TraceRequest]) -> Outcome {
    simulate_by(HandoffPolicyName::Threshold, config, dispatch, least_blocks, requests)
}

fn simulate_by(
    policy: HandoffPolicyName,
    config: &EngineConfig,
    dispatch: &str,
    least_blocks: Option<u32>,
    requests: &[TraceRequest],
) -> Outcome {
    let mut simulation = Simulation::new(config, policies(3, dispatch), Slo::default(), requests.len());
    if let Some(least) = least_blocks {
        let fleet = HandoffFleet { think: 2, policy: policy.policy(least), transfer: TRANSFER };
        simulation = simulation.with_handoff(fleet);
    }
    simulation.keeping_times().run(requests.iter().cloned(), |_| {})
}

/// A crowd of `count` requests, `per_s` of them a second; every fifth does not think.
fn crowd(count: u32, per_s: f64) -> Vec<TraceRequest> {
    let one = |i: u32| TraceRequest {
        arrival_s: f64::from(i) / per_s,
        prompt_tokens: 20 + i * 91 % 700,
        think_tokens: if i.is_multiple_of(5) { 0 } else { 40 + i * 37 % 200 },
        output_tokens: 1 + i * 53 % 120,
        ..TraceRequest::default()
    };
    (0..count).map(one).collect()
}

fn metric(outcome: &Outcome, key: &str) -> f64 {
    *outcome.run.metrics.get(key).unwrap_or_else(|| panic!("no {key} in {:?}", outcome.run.metrics.keys()))
}

#[test]
fn one_request_takes_a_transfer_longer() {
    let request = TraceRequest { prompt_tokens: 800, think_tokens: 30, output_tokens: 9, ..TraceRequest::default() };
    let (one, both) = (
        simulate(&engine(), "fcfs", None, std::slice::from_ref(&request)),
        simulate(&engine(), "fcfs", Some(4), std::slice::from_ref(&request)),
    );
    // Of the prompt, 30 tokens and the end marker, all but the marker have KV: 83 MB at 2 GB/s.
    let transfer_ms = 5.0 + 830.0 * 1e5 / 2e6;
    assert_eq!(both.times[0].ttft_ms, one.times[0].ttft_ms);
    assert!((both.times[0].ttfo_ms - one.times[0].ttfo_ms - transfer_ms).abs() < 1e-6, "{:?}", both.times);
    assert!((both.times[0].e2e_ms - one.times[0].e2e_ms - transfer_ms).abs() < 1e-6, "{:?}", both.times);
    assert_eq!((metric(&both, "handed_over"), metric(&both, "hit_rate")), (1.0, 0.0));
    assert!((metric(&both, "transfer_mean_ms") - transfer_ms).abs() < 1e-6);
}

#[test]
fn every_token_is_computed_once() {
    let requests = crowd(200, 20.0);
    let thinking = requests.iter().filter(|request| request.think_tokens > 0).count();
    let planned: u64 = requests
        .iter()
        .map(|r| u64::from(r.prompt_tokens + r.think_tokens + u32::from(r.think_tokens > 0) + r.output_tokens) - 1)
        .sum();
    for policy in ["fcfs", "output-first", "balanced"] {
        let outcome = simulate(&engine(), policy, Some(1), &requests);
        let computed: u64 = outcome.works.iter().map(|work| u64::from(work.tokens)).sum();
        assert_eq!(computed, planned, "{policy}");
        assert_eq!(metric(&outcome, "handed_over"), thinking as f64, "{policy}");
        assert_eq!(metric(&outcome, "requests"), 200.0);
        assert_eq!(outcome.digest, simulate(&engine(), policy, Some(1), &requests).digest, "{policy}");
    }
}

#[test]
fn blocks_that_were_pulled_are_free_again() {
    // Each engine holds two or three requests: blocks that stayed taken would end the run within a few.
    let tight = EngineConfig { kv_blocks: 129, ..engine() };
    for policy in ["fcfs", "balanced"] {
        let outcome = simulate(&tight, policy, Some(1), &crowd(300, 50.0));
        assert_eq!(metric(&outcome, "requests"), 300.0, "{policy}");
        assert!(outcome.times.iter().all(|times| times.e2e_ms.is_finite()));
    }
}

#[test]
fn requests_with_few_blocks_stay() {
    let requests = crowd(100, 20.0);
    let all = simulate(&engine(), "balanced", Some(u32::MAX), &requests);
    assert_eq!(metric(&all, "handed_over"), 0.0);
    // At least 20 blocks: 320 tokens.
    let some = simulate(&engine(), "balanced", Some(20), &requests);
    let long = |r: &&TraceRequest| r.think_tokens > 0 && (r.prompt_tokens + r.think_tokens).div_ceil(16) >= 20;
    assert_eq!(metric(&some, "handed_over"), requests.iter().filter(long).count() as f64);
}

#[test]
fn a_link_that_is_too_slow_is_left_alone() {
    let requests = crowd(1000, 10.0);
    let slow = EngineConfig { kv_token_bytes: 1e7, ..engine() };
    let threshold = simulate_by(HandoffPolicyName::Threshold, &slow, "balanced", Some(1), &requests);
    let expected = simulate_by(HandoffPolicyName::ExpectedTime, &slow, "balanced", Some(1), &requests);
    // The first are measured before anything is known; later one in 128.
    assert!(metric(&expected, "handed_over") < 0.2 * metric(&threshold, "handed_over"));
    assert!(metric(&expected, "e2e_p50_ms") < metric(&threshold, "e2e_p50_ms"));
}

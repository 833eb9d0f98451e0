use meridian_policy_sdk::{Decision, decide};

use super::*;

/// A candidate, its columns in the order of `INPUTS`.
#[derive(Clone, Copy)]
struct Candidate {
    phase: f32,
    state: f32,
    since_progress_ms: f32,
    prompt_tokens: f32,
    computed_tokens: f32,
    think_tokens: f32,
    output_tokens: f32,
    eat: f32,
    eat_variance: f32,
}

fn thinking(think_tokens: f32) -> Candidate {
    Candidate {
        phase: 1.0,
        state: 1.0,
        since_progress_ms: 20.0,
        prompt_tokens: 100.0,
        computed_tokens: 99.0 + think_tokens,
        think_tokens,
        output_tokens: 0.0,
        eat: f32::NAN,
        eat_variance: f32::NAN,
    }
}

fn waiting(think_tokens: f32) -> Candidate {
    let state = if think_tokens > 0.0 { 2.0 } else { 0.0 };
    Candidate { phase: 0.0, state, computed_tokens: 0.0, ..thinking(think_tokens) }
}

fn made(config_json: &str) -> Result<Mlfq, String> {
    crate::made(config_json)
}

fn decided(policy: &mut Mlfq, step: &Step, candidates: &[Candidate]) -> Decision {
    let column = |of: fn(&Candidate) -> f32| candidates.iter().map(of).collect::<Vec<_>>();
    let columns = [
        column(|c| c.phase),
        column(|c| c.state),
        column(|c| c.since_progress_ms),
        column(|c| c.prompt_tokens),
        column(|c| c.computed_tokens),
        column(|c| c.think_tokens),
        column(|c| c.output_tokens),
        column(|c| c.eat),
        column(|c| c.eat_variance),
    ]
    .concat();
    let mut decision = Decision::default();
    decide(policy, step, candidates.len(), &columns, &mut decision);
    decision
}

fn keys(policy: &mut Mlfq, candidates: &[Candidate]) -> Vec<f32> {
    let running = candidates.iter().filter(|candidate| candidate.state == 1.0).count() as u32;
    let step = Step { now_ms: 1000.0, token_budget: 512, running, decode_tokens: 1, ..Step::default() };
    decided(policy, &step, candidates).keys
}

#[test]
fn options_have_ranges() {
    assert!(made("{}").is_ok());
    for (config, expected) in [
        ("{\"quantum_tokens\": -1}", "quantum_tokens: -1: must be in 0..=16777216, 0 to learn it"),
        ("{\"quantum_tokens\": 1e9}", "quantum_tokens: 1000000000: must be in 0..=16777216, 0 to learn it"),
    ] {
        assert_eq!(made(config).expect_err("out of range"), expected);
    }
    assert!(made("{\"quantum\": 1}").is_err());
}

#[test]
fn those_that_wait_stand_between_their_level_and_the_next() {
    let mut policy = made("{\"quantum_tokens\": 100}").expect("in range");
    let candidates = [
        thinking(99.0),
        thinking(100.0),
        thinking(200.0),
        thinking(400.0),
        waiting(0.0),
        waiting(150.0),
        waiting(300.0),
    ];
    assert_eq!(keys(&mut policy, &candidates), [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0]);
    let answering = Candidate { phase: 2.0, output_tokens: 9.0, computed_tokens: 5108.0, ..thinking(5000.0) };
    assert_eq!(keys(&mut policy, &[answering]), [-1.0]);
    assert_eq!(keys(&mut policy, &[thinking(1e7)]), [14.0], "there is a last level");
}

#[test]
fn prompts_stand_behind_all_decodes() {
    let mut policy = made("{\"quantum_tokens\": 100}").expect("in range");
    let prompt = |left: f32| Candidate { phase: 0.0, computed_tokens: 100.0 - left, ..thinking(0.0) };
    let keys = keys(&mut policy, &[prompt(90.0), thinking(1e7), prompt(30.0)]);
    assert!(keys[1] < keys[2] && keys[2] < keys[0], "{keys:?}");
}

#[test]
fn thinking_that_has_converged_is_a_level_nearer_to_its_end() {
    let mut policy = made("{\"quantum_tokens\": 100}").expect("in range");
    let settled = Candidate { eat: 0.1, eat_variance: 1e-5, ..thinking(250.0) };
    let unsettled = Candidate { eat: 1.5, eat_variance: 1e-5, ..thinking(250.0) };
    assert_eq!(keys(&mut policy, &[settled, unsettled, thinking(250.0)]), [2.0, 4.0, 4.0]);
    let settled_at_once = Candidate { eat: 0.0, eat_variance: 0.0, ..thinking(10.0) };
    assert_eq!(keys(&mut policy, &[settled_at_once]), [0.0]);
}

#[test]
fn the_quantum_is_what_requests_generate_on_average() {
    let mut policy = made("{}").expect("there are defaults");
    assert_eq!(policy.quantum(), FIRST_TOKENS);
    // 500 requests of 200 tokens, one after another.
    let mut now_ms = 0.0;
    for _ in 0..500 {
        for tokens in 1..=200 {
            let step = Step { now_ms, token_budget: 512, running: 1, decode_tokens: 1, ..Step::default() };
            decided(&mut policy, &step, &[thinking(tokens as f32)]);
            now_ms += 20.0;
        }
    }
    assert!((195.0..205.0).contains(&policy.quantum()), "{}", policy.quantum());

    let mut other = made("{}").expect("there are defaults");
    other.restore(&policy.snapshot()).expect("its own state");
    assert_eq!(other.quantum(), policy.quantum());
    assert!(other.restore(&[0; 7]).is_err() && other.restore(&f32::NAN.to_le_bytes().repeat(2)).is_err());
}

#[test]
fn every_decode_is_in_the_step_and_prompts_within_twice_the_budget() {
    let mut policy = made("{}").expect("there are defaults");
    let mut candidates = vec![thinking(50.0); 100];
    candidates.extend([waiting(0.0); 3]);
    let step = Step {
        token_budget: 8192,
        running: 100,
        decode_tokens: 1,
        fixed_ms: 5.0,
        decode_token_ms: 0.1,
        prefill_token_ms: 0.03,
        ..Step::default()
    };
    // 40 ms, of which the decodes take 15.
    let budget = decided(&mut policy, &step, &candidates).token_budget.expect("the step time is known");
    assert!((932..=934).contains(&budget), "{budget}");
    let slow = Step { fixed_ms: 5000.0, prefill_token_ms: 1e4, ..step };
    assert_eq!(decided(&mut policy, &slow, &candidates).token_budget, Some(100 + 128));
    let unknown = Step { decode_token_ms: 0.0, ..step };
    assert_eq!(decided(&mut policy, &unknown, &candidates).token_budget, None);
}

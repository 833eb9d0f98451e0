use meridian_policy_sdk::Decision;

use super::*;
use crate::step;

/// A candidate, its columns in the order of `INPUTS`.
#[derive(Clone, Copy)]
struct Candidate {
    phase: f32,
    state: f32,
    wait_ms: f32,
    slack_ms: f32,
    prompt_tokens: f32,
    computed_tokens: f32,
    think_tokens: f32,
    output_tokens: f32,
    output_ms: f32,
    think_left: f32,
    output_left: f32,
    level_slack_ms: f32,
    level_weight: f32,
    level_tpot_ms: f32,
}

/// It has 100 ms until its next token is due.
const DECODING: Candidate = Candidate {
    phase: 2.0,
    state: 1.0,
    wait_ms: 1000.0,
    slack_ms: f32::INFINITY,
    prompt_tokens: 100.0,
    computed_tokens: 149.0,
    think_tokens: 0.0,
    output_tokens: 50.0,
    output_ms: 2400.0,
    think_left: 0.0,
    output_left: 950.0,
    level_slack_ms: 5000.0,
    level_weight: 1.0,
    level_tpot_ms: 50.0,
};
const WAITING: Candidate = Candidate {
    phase: 0.0,
    state: 0.0,
    wait_ms: 50.0,
    prompt_tokens: 400.0,
    computed_tokens: 0.0,
    output_tokens: 0.0,
    output_ms: f32::NAN,
    think_left: 100.0,
    output_left: 100.0,
    ..DECODING
};
const FREE: Candidate = Candidate { level_slack_ms: f32::INFINITY, level_tpot_ms: f32::INFINITY, ..WAITING };

fn made(config_json: &str) -> Result<Qoserve, String> {
    crate::made(config_json)
}

fn decided(config_json: &str, step: &Step, candidates: &[Candidate]) -> Decision {
    let columns: &[fn(&Candidate) -> f32] = &[
        |c| c.phase,
        |c| c.state,
        |c| c.wait_ms,
        |c| c.slack_ms,
        |c| c.prompt_tokens,
        |c| c.computed_tokens,
        |c| c.think_tokens,
        |c| c.output_tokens,
        |c| c.output_ms,
        |c| c.think_left,
        |c| c.output_left,
        |c| c.level_slack_ms,
        |c| c.level_weight,
        |c| c.level_tpot_ms,
    ];
    crate::decided(&mut made(config_json).expect("valid"), step, candidates, columns)
}

/// Positions of the candidates, first to last.
fn order_with(config_json: &str, candidates: &[Candidate]) -> Vec<usize> {
    crate::order(&decided(config_json, &step(), candidates).keys)
}

fn order(candidates: &[Candidate]) -> Vec<usize> {
    order_with("{}", candidates)
}

/// Prompt tokens beside the decodes.
fn prompt_tokens(candidates: &[Candidate]) -> Option<u32> {
    let decodes = candidates.iter().filter(|c| c.state == 1.0 && c.computed_tokens > 0.0).count() as u32;
    Some(decided("{}", &step(), candidates).token_budget? - decodes)
}

#[test]
fn options_have_ranges() {
    assert_eq!(made("{}").expect("there are defaults").alpha_ms, 8.0, "the paper's");
    assert_eq!(made("{\"alpha_ms\": -1}").expect_err("out of range"), "alpha_ms: -1: must be in 0..=1000");
    assert!(made("{\"alpha\": 1}").is_err());
}

#[test]
fn work_is_weighed_against_the_deadline() {
    // 100 tokens less of a prompt are 800 ms.
    let short = Candidate { prompt_tokens: 300.0, level_slack_ms: 5799.0, ..WAITING };
    assert_eq!(order(&[WAITING, short]), [1, 0]);
    assert_eq!(order(&[WAITING, Candidate { level_slack_ms: 5810.0, ..short }]), [0, 1]);
    assert_eq!(order_with("{\"alpha_ms\": 0}", &[WAITING, short]), [0, 1], "the deadline alone");
    let thinks_less = Candidate { think_left: 0.0, level_slack_ms: 5700.0, ..WAITING };
    assert_eq!(order(&[WAITING, thinks_less]), [1, 0]);
    let answers_less = Candidate { output_left: 0.0, level_slack_ms: 5001.0, ..WAITING };
    assert_eq!(order(&[WAITING, answers_less]), [0, 1], "a level is due with the first token of the answer");
}

#[test]
fn who_is_late_goes_last_the_least_weight_behind() {
    let late = Candidate { level_slack_ms: -1.0, ..WAITING };
    let heavy = Candidate { level_weight: 4.0, level_slack_ms: -5000.0, ..late };
    let in_time = Candidate { level_slack_ms: 0.0, prompt_tokens: 100_000.0, ..WAITING };
    let lost_kv = Candidate { state: 2.0, phase: 1.0, ..late };
    assert_eq!(order(&[late, heavy, in_time, lost_kv, FREE]), [3, 4, 2, 1, 0]);
    let decoding = Candidate { level_slack_ms: -1.0, ..DECODING };
    let running = Candidate { state: 1.0, ..late };
    assert_eq!(
        order(&[running, Candidate { state: 1.0, ..WAITING }, decoding]),
        [2, 1, 0],
        "a decode is not relegated"
    );
}

#[test]
fn without_levels_deadlines_count_then_arrival() {
    let due = Candidate { slack_ms: 2000.0, ..FREE };
    let missed = Candidate { slack_ms: -2000.0, ..FREE };
    let cannot = Candidate { slack_ms: 500.0, ..FREE };
    let earlier = Candidate { wait_ms: 60.0, ..FREE };
    // 200 tokens at 5 ms and a prompt of 12 ms take longer than 500 ms.
    assert_eq!(order(&[missed, FREE, cannot, earlier, due]), [4, 3, 1, 0, 2]);
    assert_eq!(decided("{}", &step(), &[FREE]).token_budget, None, "nothing is promised");
    let patient = Candidate { wait_ms: 700_000.0, ..FREE };
    assert_eq!(order(&[FREE, patient]), [1, 0], "nobody waits for ever");
}

#[test]
fn prompts_take_what_the_least_slack_of_the_decodes_leaves() {
    assert_eq!(prompt_tokens(&[DECODING, WAITING]), Some(2552), "the most of the authors' code");
    // 60 ms / 1.2 are 50, less 5.1 ms.
    let due = Candidate { output_ms: 2440.0, ..DECODING };
    assert_eq!(prompt_tokens(&[DECODING, due, WAITING]), Some(1493));
    assert_eq!(prompt_tokens(&[Candidate { output_ms: 2600.0, ..DECODING }, WAITING]), Some(128), "it is behind");
    // One that is late has its pace: 50 ms / 1.2.
    let late = Candidate { output_ms: 90_000.0, level_slack_ms: -1.0, ..DECODING };
    assert_eq!(prompt_tokens(&[late, WAITING]), Some(1218));
    let thinks = Candidate { phase: 1.0, think_tokens: 50.0, output_tokens: 0.0, ..DECODING };
    assert_eq!(prompt_tokens(&[Candidate { level_slack_ms: 0.0, ..thinks }, WAITING]), Some(128));
    assert_eq!(prompt_tokens(&[Candidate { level_slack_ms: 1000.0, ..thinks }, WAITING]), Some(2552));
    assert_eq!(prompt_tokens(&[WAITING]), None, "nobody decodes");
    let unknown = Step { fixed_ms: 0.0, decode_token_ms: 0.0, prefill_token_ms: 0.0, ..step() };
    assert_eq!(decided("{}", &unknown, &[DECODING, WAITING]).token_budget, None);
}

#[test]
fn keys_are_finite_whatever_the_columns_say() {
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, 0.0, 3e38] {
        let candidate = Candidate {
            wait_ms: odd,
            slack_ms: odd,
            prompt_tokens: odd,
            computed_tokens: odd,
            think_tokens: odd,
            output_tokens: odd,
            output_ms: odd,
            think_left: odd,
            output_left: odd,
            level_slack_ms: odd,
            level_weight: odd,
            level_tpot_ms: odd,
            ..WAITING
        };
        let candidates = [candidate, Candidate { state: 1.0, ..candidate }, Candidate { state: 2.0, ..candidate }];
        let decision = decided("{}", &step(), &candidates);
        assert!(decision.keys.iter().all(|key| key.is_finite()), "{odd}: {:?}", decision.keys);
        assert!(decision.token_budget.is_none_or(|tokens| (1..=8192).contains(&tokens)), "{odd}");
        let late = Candidate { level_slack_ms: -1.0, level_weight: odd, ..WAITING };
        assert!(decided("{}", &step(), &[late]).keys[0].is_finite(), "a weight of {odd}");
    }
}

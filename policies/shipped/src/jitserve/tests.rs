use meridian_policy_sdk::Decision;

use super::*;
use crate::step;

/// A candidate, its columns in the order of `INPUTS`.
#[derive(Clone, Copy)]
struct Candidate {
    state: f32,
    slack_ms: f32,
    prompt_tokens: f32,
    computed_tokens: f32,
    think_tokens: f32,
    output_tokens: f32,
    think_left_high: f32,
    output_left: f32,
    level_slack_ms: f32,
    level_weight: f32,
    level_tpot_ms: f32,
}

const DECODING: Candidate = Candidate {
    state: 1.0,
    slack_ms: f32::INFINITY,
    prompt_tokens: 100.0,
    computed_tokens: 149.0,
    think_tokens: 0.0,
    output_tokens: 50.0,
    think_left_high: 0.0,
    output_left: 950.0,
    level_slack_ms: 5000.0,
    level_weight: 1.0,
    level_tpot_ms: 50.0,
};
const WAITING: Candidate = Candidate {
    state: 0.0,
    prompt_tokens: 400.0,
    computed_tokens: 0.0,
    output_tokens: 0.0,
    think_left_high: 500.0,
    output_left: 100.0,
    ..DECODING
};
const FREE: Candidate = Candidate { level_slack_ms: f32::INFINITY, level_tpot_ms: f32::INFINITY, ..WAITING };

fn made() -> Jitserve {
    crate::made("{}").expect("there are no options")
}

fn decided(step: &Step, candidates: &[Candidate]) -> Decision {
    let columns: &[fn(&Candidate) -> f32] = &[
        |c| c.state,
        |c| c.slack_ms,
        |c| c.prompt_tokens,
        |c| c.computed_tokens,
        |c| c.think_tokens,
        |c| c.output_tokens,
        |c| c.think_left_high,
        |c| c.output_left,
        |c| c.level_slack_ms,
        |c| c.level_weight,
        |c| c.level_tpot_ms,
    ];
    crate::decided(&mut made(), step, candidates, columns)
}

/// Positions of the candidates, first to last.
fn order(candidates: &[Candidate]) -> Vec<usize> {
    crate::order(&decided(&step(), candidates).keys)
}

#[test]
fn the_most_gained_for_the_time_it_takes_first() {
    let short = Candidate { think_left_high: 400.0, ..WAITING };
    assert_eq!(order(&[WAITING, short]), [1, 0]);
    let heavy = Candidate { level_weight: 2.0, ..WAITING };
    assert_eq!(order(&[short, heavy]), [1, 0], "twice the gain for a fifth more time");
    let answers_long = Candidate { output_left: 300.0, ..WAITING };
    assert_eq!(order(&[answers_long, WAITING]), [1, 0]);
    let has_time = Candidate { level_slack_ms: 90_000.0, ..short };
    assert_eq!(order(&[WAITING, has_time]), [1, 0], "the time that is left is in the gain and in the bandwidth");
}

#[test]
fn nothing_is_gained_by_who_is_late() {
    let late =
        Candidate { level_slack_ms: -1.0, think_left_high: 0.0, output_left: 1.0, level_weight: 100.0, ..WAITING };
    let lost_kv = Candidate { state: 2.0, ..late };
    assert_eq!(order(&[late, WAITING, lost_kv]), [2, 1, 0]);
    let running = Candidate { state: 1.0, ..late };
    assert_eq!(order(&[running, Candidate { state: 1.0, ..WAITING }, DECODING]), [2, 1, 0]);
}

#[test]
fn prompts_of_like_length_go_together_within_a_group() {
    // 601 tokens and 12 ms are 3017 ms at 5 ms a token; 3072 ms begin another group.
    let longer = Candidate { prompt_tokens: 1000.0, think_left_high: 495.0, ..WAITING };
    assert_eq!(order(&[longer, WAITING]), [1, 0], "1 % apart");
    assert_eq!(order(&[Candidate { think_left_high: 450.0, ..longer }, WAITING]), [0, 1], "7 % apart");
}

#[test]
fn without_levels_the_time_it_takes_decides() {
    let (short, missed) = (Candidate { think_left_high: 300.0, ..FREE }, Candidate { slack_ms: 10.0, ..FREE });
    let due = Candidate { slack_ms: 60_000.0, think_left_high: 200.0, ..FREE };
    assert_eq!(order(&[missed, FREE, short, due]), [3, 2, 1, 0]);
    let decision = decided(&step(), &[Candidate { state: 1.0, computed_tokens: 400.0, ..FREE }, FREE]);
    assert_eq!((decision.token_budget, decision.token_caps), (None, vec![]));
    let unknown = Step { fixed_ms: 0.0, decode_token_ms: 0.0, prefill_token_ms: 0.0, ..step() };
    let decision = decided(&unknown, &[FREE, short]);
    assert!(decision.keys[1] < decision.keys[0], "{:?}", decision.keys);
    assert_eq!(decided(&unknown, &[DECODING, WAITING]).token_budget, None);
}

#[test]
fn steps_are_within_the_tightest_pace() {
    // 0.9 of 50 ms, less 5.1 ms, at 0.03 ms.
    let tokens = decided(&step(), &[DECODING, WAITING]).token_budget.expect("a pace is promised");
    assert!((1329..=1331).contains(&tokens), "{tokens}");
    let loose = Candidate { level_tpot_ms: 500.0, ..DECODING };
    assert_eq!(decided(&step(), &[loose, WAITING]).token_budget, Some(8192));
    // 401 decodes take 45.1 ms.
    let full = [vec![DECODING; 401], vec![WAITING]].concat();
    let decision = decided(&step(), &full);
    assert_eq!(decision.token_budget, Some(401 + 128));
    assert_eq!(decision.token_caps[..401], [u32::MAX; 401], "a decode was capped");
    assert_eq!(decision.token_caps[401], 0);
    assert!(decided(&step(), &full[2..]).token_caps.is_empty());
    let hopeless = [DECODING, WAITING].map(|candidate| Candidate { level_tpot_ms: 5.0, ..candidate });
    assert!(decided(&step(), &hopeless).token_caps.is_empty(), "one decode alone takes longer");
}

#[test]
fn keys_are_exact_and_finite_whatever_the_columns_say() {
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, 0.0, 3e38] {
        let candidate = Candidate {
            slack_ms: odd,
            prompt_tokens: odd,
            computed_tokens: odd,
            think_tokens: odd,
            output_tokens: odd,
            think_left_high: odd,
            output_left: odd,
            level_slack_ms: odd,
            level_weight: odd,
            level_tpot_ms: odd,
            ..WAITING
        };
        let candidates = [candidate, Candidate { state: 1.0, ..candidate }, Candidate { state: 2.0, ..candidate }];
        let decision = decided(&step(), &candidates);
        assert!(decision.keys.iter().all(|key| key.abs() < 16_777_216.0), "{odd}: {:?}", decision.keys);
        assert!(decision.token_budget.is_none_or(|tokens| (1..=8192).contains(&tokens)), "{odd}");
        let one_odd = Candidate { level_weight: odd, ..WAITING };
        assert!(decided(&step(), &[one_odd]).keys[0].abs() < 16_777_216.0, "a weight of {odd}");
    }
}

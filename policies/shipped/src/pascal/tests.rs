use meridian_policy_sdk::{Decision, decide};

use super::*;

fn made(config_json: &str) -> Result<Pascal, String> {
    crate::made(config_json)
}

#[test]
fn options_have_ranges() {
    let policy = made("{}").expect("there are defaults");
    assert_eq!((policy.quantum_tokens, policy.demote_tokens, policy.lead_tokens), (500.0, 5000.0, 4.0));
    assert_eq!(policy.tpot_ms, 20.0, "the scheduler's target");
    assert_eq!(made("{\"tpot_ms\": 50}").expect("in range").tpot_ms, 50.0);
    for (config, expected) in [
        ("{\"quantum_tokens\": 0}", "quantum_tokens: 0: must be in 1..=16777216"),
        ("{\"demote_tokens\": 16777217}", "demote_tokens: 16777217: must be in 1..=16777216"),
        ("{\"lead_tokens\": -1}", "lead_tokens: -1: must be in 0..=1000000"),
        ("{\"tpot_ms\": 0}", "tpot_ms: 0: must be in 0.001..=1000000"),
    ] {
        assert_eq!(made(config).expect_err("out of range"), expected);
    }
    assert!(made("{\"quantum\": 1}").is_err());
}

/// Answers beside reasoning that never ends: steps of 10 ms, a token each for whoever is not left out, at 20 ms a token.
#[test]
fn answers_keep_their_pace_beside_endless_reasoning() {
    let mut policy = made("{}").expect("there are defaults");
    let mut decision = Decision::default();
    let (mut tokens, mut left_out) = (1u16, 0);
    for step in 0..1000u16 {
        let output_ms = f32::from(step) * 10.0;
        // An answer and a request that thinks: phase, wait, think tokens, output tokens, time since the first of them.
        let columns = [2.0, 1.0, 1e4, 1e4, 100.0, 100.0, f32::from(tokens), 0.0, output_ms, f32::NAN];
        decide(&mut policy, &Step::default(), 2, &columns, &mut decision);
        let lead = f32::from(tokens) - output_ms / 20.0;
        assert!((0.0..=6.0).contains(&lead), "step {step}: {lead} tokens ahead");
        if decision.token_caps[0] > 0 {
            tokens += 1;
        } else {
            left_out += 1;
        }
        assert_eq!(decision.token_caps[1], u32::MAX);
    }
    assert!((490..=500).contains(&left_out), "left out of {left_out} of 1000 steps");
}

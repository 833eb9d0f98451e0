use meridian_policy_sdk::{Decision, decide};

use super::*;

/// A candidate, its columns in the order of `INPUTS`.
#[derive(Clone, Copy)]
struct Candidate {
    phase: f32,
    state: f32,
    tenant: f32,
    wait_ms: f32,
    since_progress_ms: f32,
    prompt_tokens: f32,
    computed_tokens: f32,
    think_tokens: f32,
    output_tokens: f32,
}

const DECODING: Candidate = Candidate {
    phase: 2.0,
    state: 1.0,
    tenant: 1.0,
    wait_ms: 1000.0,
    since_progress_ms: 20.0,
    prompt_tokens: 100.0,
    computed_tokens: 149.0,
    think_tokens: 0.0,
    output_tokens: 50.0,
};
const WAITING: Candidate = Candidate {
    phase: 0.0,
    state: 0.0,
    wait_ms: 50.0,
    prompt_tokens: 400.0,
    computed_tokens: 0.0,
    output_tokens: 0.0,
    ..DECODING
};

fn made() -> Balanced {
    crate::made("{}").expect("there are no options")
}

/// 5 ms, 0.1 ms a decode, 0.03 ms for a token of a prompt.
fn step(candidates: &[Candidate]) -> Step {
    let count = |state: f32| candidates.iter().filter(|candidate| candidate.state == state).count() as u32;
    Step {
        now_ms: 1000.0,
        token_budget: 8192,
        free_blocks: 10_000,
        total_blocks: 20_000,
        running: count(1.0),
        waiting: count(0.0) + count(2.0),
        decode_tokens: 1,
        fixed_ms: 5.0,
        decode_token_ms: 0.1,
        prefill_token_ms: 0.03,
        ..Step::default()
    }
}

fn decided(policy: &mut Balanced, step: &Step, candidates: &[Candidate]) -> Decision {
    let column = |of: fn(&Candidate) -> f32| candidates.iter().map(of).collect::<Vec<_>>();
    let columns = [
        column(|c| c.phase),
        column(|c| c.state),
        column(|c| c.tenant),
        column(|c| c.wait_ms),
        column(|c| c.since_progress_ms),
        column(|c| c.prompt_tokens),
        column(|c| c.computed_tokens),
        column(|c| c.think_tokens),
        column(|c| c.output_tokens),
        column(|c| (c.computed_tokens / 16.0).ceil()),
        column(|_| 0.0),
        column(|_| f32::INFINITY),
    ]
    .concat();
    let mut decision = Decision::default();
    decide(policy, step, candidates.len(), &columns, &mut decision);
    decision
}

#[test]
fn a_long_prompt_leaves_tokens_to_prompts_that_wait() {
    let long = Candidate { state: 1.0, prompt_tokens: 50_000.0, computed_tokens: 1024.0, ..WAITING };
    let short = Candidate { state: 1.0, prompt_tokens: 90.0, ..WAITING };
    let decodes = [DECODING; 8];
    let of = |rest: &[Candidate]| [&decodes, rest].concat();

    let candidates = of(&[long, short, WAITING]);
    let found = decided(&mut made(), &step(&candidates), &candidates);
    let tokens = found.token_budget.expect("step times are known") - 8;
    assert_eq!(found.token_caps[..8], [u32::MAX; 8], "a decode was capped");
    assert_eq!(found.token_caps[8], (tokens / 3).max(64), "a third is left to each");
    assert_eq!(found.token_caps[9..], [u32::MAX; 2], "a prompt that ends in the step was capped, or one that waits");

    let alone = of(&[long, short]);
    assert!(decided(&mut made(), &step(&alone), &alone).token_caps.is_empty(), "nobody waits");
    let shut_out = Step { free_blocks: 0, ..step(&candidates) };
    assert!(decided(&mut made(), &shut_out, &candidates).token_caps.is_empty(), "nobody can be admitted");
    let unknown = Step { decode_token_ms: 0.0, prefill_token_ms: 0.0, fixed_ms: 0.0, ..step(&candidates) };
    assert!(decided(&mut made(), &unknown, &candidates).token_caps.is_empty(), "step times are unknown");
}

#[test]
fn every_decode_is_in_the_step_whatever_it_takes() {
    for decodes in [1, 7, 64, 300, 1000] {
        for prompts in [0, 1, 40] {
            let candidates = [vec![DECODING; decodes], vec![WAITING; prompts]].concat();
            for slower in [1.0, 10.0, 1000.0] {
                let mut step = step(&candidates);
                step.fixed_ms *= slower;
                step.decode_token_ms *= slower;
                let tokens = decided(&mut made(), &step, &candidates).token_budget.expect("the step time is known");
                assert!(tokens as usize >= decodes + 128, "{tokens} of {decodes} decodes, {slower} times slower");
            }
        }
    }
}

#[test]
fn without_a_step_time_the_budget_is_the_engines() {
    let candidates = [DECODING, WAITING];
    let unknown = Step { fixed_ms: 0.0, decode_token_ms: 0.0, prefill_token_ms: 0.0, ..step(&candidates) };
    let decision = decided(&mut made(), &unknown, &candidates);
    assert_eq!(decision.token_budget, None);
    assert!(decision.keys.iter().all(|key| key.is_finite()));
}

#[test]
fn prompts_are_held_to_twice_the_tpot_budget_while_requests_are_shut_out() {
    let mut candidates = vec![DECODING; 100];
    candidates.extend([Candidate { prompt_tokens: 4000.0, ..WAITING }; 50]);
    // 5 + 100 * 0.1 ms of decodes; at most 40 ms.
    let step = Step { free_blocks: 400, ..step(&candidates) };
    let tokens = decided(&mut made(), &step, &candidates).token_budget.expect("the step time is known");
    assert!((100 + 128..=100 + 834).contains(&tokens), "{tokens}");
}

#[test]
fn long_prompts_are_computed_at_once_while_that_is_rare() {
    let mut candidates = vec![DECODING; 50];
    candidates.push(Candidate { prompt_tokens: 8000.0, ..WAITING });
    let mut policy = made();
    let step = Step { token_budget: 16_384, ..step(&candidates) };
    let budgets: Vec<u32> = (0..1000)
        .map(|_| decided(&mut policy, &step, &candidates).token_budget.expect("the step time is known"))
        .collect();
    let long = budgets.iter().filter(|budget| **budget >= 8050).count();
    assert_eq!(budgets[0], 8050);
    assert!((8..=10).contains(&long), "{long} of 1000 steps");

    for candidate in &mut candidates[..50] {
        *candidate = Candidate { phase: 1.0, think_tokens: 50.0, output_tokens: 0.0, ..DECODING };
    }
    let step = Step { token_budget: 16_384, ..self::step(&candidates) };
    for _ in 0..1000 {
        let tokens = decided(&mut policy, &step, &candidates).token_budget;
        assert_eq!(tokens, Some(8050), "nobody reads, so there is no gap to keep short");
    }
}

#[test]
fn short_prompts_pass_long_ones_for_a_time() {
    let running = Candidate { state: 1.0, ..WAITING };
    let long = Candidate { prompt_tokens: 40_000.0, ..running };
    let almost_done = Candidate { computed_tokens: 39_800.0, ..long };
    let patient = Candidate { wait_ms: 60_000.0, ..long };
    let candidates = [long, running, almost_done, patient, DECODING];
    let keys = decided(&mut made(), &step(&candidates), &candidates).keys;
    let mut order: Vec<usize> = (0..5).collect();
    order.sort_by(|a, b| keys[*a].total_cmp(&keys[*b]));
    assert_eq!(order, [4, 3, 2, 1, 0]);
}

#[test]
fn the_wait_is_weighed_against_the_cost() {
    let short = Candidate { prompt_tokens: 100.0, ..WAITING };
    let long = Candidate { prompt_tokens: 10_000.0, ..WAITING };
    let patient = Candidate { wait_ms: 5000.0, ..long };
    let preempted = Candidate { state: 2.0, phase: 1.0, ..long };
    let candidates = [long, short, patient, preempted];
    let keys = decided(&mut made(), &step(&candidates), &candidates).keys;
    let mut order: Vec<usize> = (0..4).collect();
    order.sort_by(|a, b| keys[*a].total_cmp(&keys[*b]));
    assert_eq!(order, [3, 2, 1, 0]);
}

#[test]
fn a_tenant_of_short_answers_goes_first() {
    let mut policy = made();
    for length in [(1.0, 50), (2.0, 2000)] {
        for generated in 1..=length.1 {
            policy.forecast.served(length.0, generated == 1);
        }
    }
    let candidates = [Candidate { tenant: 2.0, ..WAITING }, Candidate { tenant: 1.0, ..WAITING }];
    let keys = decided(&mut policy, &step(&candidates), &candidates).keys;
    assert!(keys[1] < keys[0], "{keys:?}");

    let mut other = made();
    other.restore(&policy.snapshot()).expect("its own snapshot");
    assert_eq!(decided(&mut other, &step(&candidates), &candidates).keys, keys);
}

#[test]
fn lengths_are_learned_from_the_columns() {
    let mut policy = made();
    for generated in 1..=300u16 {
        let mut candidates = [DECODING, Candidate { tenant: 2.0, ..DECODING }];
        // The first goes on for 300 steps, the second is another request every 10.
        candidates[0].output_tokens = f32::from(generated);
        candidates[1].output_tokens = f32::from((generated - 1) % 10 + 1);
        for candidate in &mut candidates {
            candidate.computed_tokens = candidate.prompt_tokens + candidate.output_tokens - 1.0;
        }
        let step = Step { now_ms: 1000.0 + 20.0 * f64::from(generated), ..step(&candidates) };
        let _ = decided(&mut policy, &step, &candidates);
    }
    let (long, short) = (policy.forecast.tokens(1.0), policy.forecast.tokens(2.0));
    assert!(short < 50.0 && long > 2.0 * short, "{long} {short}");
}

#[test]
fn a_foreign_snapshot_is_refused() {
    let own = made().snapshot();
    let with = |at: usize, bytes: &[u8]| {
        let mut state = own.clone();
        state[at..at + bytes.len()].copy_from_slice(bytes);
        state
    };
    let nan = f32::NAN.to_le_bytes();
    let states =
        [vec![], own[..8].to_vec(), own[..11].to_vec(), with(0, &nan), with(4, &nan), with(8, &[2]), with(9, &nan)];
    for state in &states {
        let mut policy = made();
        assert!(policy.restore(state).is_err(), "{state:?}");
    }
}

#[test]
fn keys_are_exact_and_finite_whatever_the_columns_say() {
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, 0.0, 3e38] {
        let candidate = Candidate {
            tenant: odd,
            wait_ms: odd,
            since_progress_ms: odd,
            prompt_tokens: odd,
            computed_tokens: odd,
            think_tokens: odd,
            output_tokens: odd,
            ..WAITING
        };
        let candidates = [candidate, Candidate { state: 1.0, ..candidate }, Candidate { state: 2.0, ..candidate }];
        let keys = decided(&mut made(), &step(&candidates), &candidates).keys;
        assert!(keys.iter().all(|key| key.abs() < 16_777_216.0), "{odd}: {keys:?}");
    }
}

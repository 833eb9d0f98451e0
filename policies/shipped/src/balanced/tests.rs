use meridian_policy_sdk::Decision;

use super::*;

/// A candidate, its columns in the order of `INPUTS`.
#[derive(Clone, Copy)]
struct Candidate {
    phase: f32,
    state: f32,
    wait_ms: f32,
    since_progress_ms: f32,
    prompt_tokens: f32,
    computed_tokens: f32,
    priority: f32,
    think_tokens: f32,
    output_tokens: f32,
    think_left: f32,
    output_left: f32,
    level_slack_ms: f32,
    level_weight: f32,
    level_tpot_ms: f32,
    request: f32,
    session: f32,
    resident_tokens: f32,
    room_tokens: f32,
}

const DECODING: Candidate = Candidate {
    phase: 2.0,
    state: 1.0,
    wait_ms: 1000.0,
    since_progress_ms: 20.0,
    prompt_tokens: 100.0,
    computed_tokens: 149.0,
    priority: 0.0,
    think_tokens: 0.0,
    output_tokens: 50.0,
    think_left: 0.0,
    output_left: 950.0,
    level_slack_ms: f32::INFINITY,
    level_weight: 1.0,
    level_tpot_ms: f32::INFINITY,
    request: 0.0,
    session: 0.0,
    resident_tokens: 0.0,
    room_tokens: f32::INFINITY,
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

fn step(candidates: &[Candidate]) -> Step {
    let count = |state: f32| candidates.iter().filter(|candidate| candidate.state == state).count() as u32;
    Step {
        now_ms: 1000.0,
        free_blocks: 10_000,
        total_blocks: 20_000,
        running: count(1.0),
        waiting: count(0.0) + count(2.0),
        ..crate::step()
    }
}

fn decided(policy: &mut Balanced, step: &Step, candidates: &[Candidate]) -> Decision {
    let columns: &[fn(&Candidate) -> f32] = &[
        |c| c.phase,
        |c| c.state,
        |c| c.wait_ms,
        |c| c.since_progress_ms,
        |c| c.prompt_tokens,
        |c| c.computed_tokens,
        |c| c.think_tokens,
        |c| c.output_tokens,
        |c| (c.computed_tokens / 16.0).ceil(),
        |c| c.priority,
        |_| f32::INFINITY,
        |c| c.think_left,
        |c| c.output_left,
        |c| c.level_slack_ms,
        |c| c.level_weight,
        |c| c.level_tpot_ms,
        |c| c.request,
        |c| c.session,
        |c| c.resident_tokens,
        |c| c.room_tokens,
    ];
    crate::decided(policy, step, candidates, columns)
}

/// Positions of the candidates, first to last.
fn order(candidates: &[Candidate]) -> Vec<usize> {
    crate::order(&decided(&mut made(), &step(candidates), candidates).keys)
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

/// A turn whose session has lost its KV blocks.
const COLD: Candidate =
    Candidate { prompt_tokens: 50_000.0, session: 7.0, request: 1.0, room_tokens: 40_000.0, ..WAITING };

/// The caps of these candidates behind a decode.
fn caps(step_of: impl Fn(Step) -> Step, waiting: &[Candidate]) -> Vec<u32> {
    let candidates = [&[DECODING], waiting].concat();
    let mut caps = decided(&mut made(), &step_of(step(&candidates)), &candidates).token_caps;
    caps.resize(candidates.len(), u32::MAX);
    caps.split_off(1)
}

#[test]
fn a_session_without_kv_blocks_waits_until_it_fits_beside_warm_ones() {
    let same = |step: Step| step;
    assert_eq!(caps(same, &[COLD]), [0]);
    assert_eq!(caps(same, &[Candidate { room_tokens: 50_000.0, ..COLD }]), [u32::MAX], "it fits");
    assert_eq!(caps(same, &[Candidate { resident_tokens: 25_000.0, ..COLD }]), [u32::MAX], "it has half of its prompt");
    assert_eq!(caps(same, &[Candidate { session: 0.0, ..COLD }]), [u32::MAX], "it is of no session");
    assert_eq!(caps(same, &[Candidate { state: 2.0, ..COLD }]), [u32::MAX], "it was preempted");
    let short = Candidate { prompt_tokens: 2048.0, room_tokens: -1.0, ..COLD };
    assert_eq!(caps(same, &[short]), [u32::MAX], "its prompt is computed in a step");
    let unknown = [Candidate { room_tokens: f32::INFINITY, ..COLD }; 2];
    assert_eq!(caps(same, &unknown), [u32::MAX; 2], "Meridian does not manage KV memory");
}

#[test]
fn of_the_sessions_that_fit_the_one_that_has_waited_longest_comes_in() {
    let small = Candidate { prompt_tokens: 30_000.0, request: 2.0, ..COLD };
    let later = |candidate: Candidate, wait_ms: f32| Candidate { wait_ms, ..candidate };
    let other = Candidate { request: 3.0, ..small };
    let same = |step: Step| step;
    assert_eq!(caps(same, &[later(COLD, 900.0), later(small, 10.0), later(other, 20.0)]), [0, 0, u32::MAX]);
    let in_time = Candidate { level_slack_ms: 10.0, ..later(small, 10.0) };
    let late = Candidate { level_slack_ms: -1.0, ..later(other, 20.0) };
    assert_eq!(caps(same, &[in_time, late]), [u32::MAX, 0], "one can be in time");
    // Nothing runs.
    let candidates = [later(COLD, 900.0), later(small, 10.0)];
    let found = decided(&mut made(), &step(&candidates), &candidates);
    assert_eq!(found.token_caps, [u32::MAX, 0]);
}

#[test]
fn a_session_without_kv_blocks_leaves_their_tokens_to_preempted_requests() {
    let fits = Candidate { room_tokens: 60_000.0, ..COLD };
    let preempted = Candidate { state: 2.0, prompt_tokens: 20_000.0, request: 2.0, room_tokens: 60_000.0, ..WAITING };
    let same = |step: Step| step;
    assert_eq!(caps(same, &[fits, preempted]), [0, u32::MAX]);
    assert_eq!(caps(same, &[fits, Candidate { prompt_tokens: 10_000.0, ..preempted }]), [u32::MAX; 2], "both fit");
    assert_eq!(caps(same, &[fits, Candidate { level_slack_ms: -1.0, ..preempted }]), [u32::MAX; 2], "it is late");
    let urgent = Candidate { priority: -1.0, request: 3.0, ..fits };
    assert_eq!(caps(same, &[fits, urgent, preempted]), [0, u32::MAX, u32::MAX], "it is more urgent");
    let candidates = [fits, preempted];
    assert_eq!(decided(&mut made(), &step(&candidates), &candidates).token_caps, [0, u32::MAX], "nothing runs");
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

    // A step of 250 ms adds 2.25 ms to the mean gap.
    let first = |level_tpot_ms: f32| {
        let promised: Vec<_> = candidates.iter().map(|one| Candidate { level_tpot_ms, ..*one }).collect();
        decided(&mut made(), &step, &promised).token_budget.expect("the step time is known")
    };
    assert_eq!(first(25.0), 8050);
    assert!(first(22.0) < 300, "more than a tenth of what the level allows");

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
    assert_eq!(order(&candidates), [4, 3, 2, 1, 0]);
}

#[test]
fn the_wait_is_weighed_against_the_cost() {
    let short = Candidate { prompt_tokens: 100.0, ..WAITING };
    let long = Candidate { prompt_tokens: 10_000.0, ..WAITING };
    let patient = Candidate { wait_ms: 5000.0, ..long };
    let preempted = Candidate { state: 2.0, phase: 1.0, ..long };
    let candidates = [long, short, patient, preempted];
    assert_eq!(order(&candidates), [3, 2, 1, 0]);
}

#[test]
fn who_is_forecast_to_generate_little_goes_first() {
    let candidates = [Candidate { think_left: 4000.0, ..WAITING }, Candidate { think_left: 100.0, ..WAITING }];
    assert_eq!(order(&candidates), [1, 0]);
    let thinks = [Candidate { output_left: 4000.0, ..WAITING }, Candidate { think_left: 100.0, ..WAITING }];
    assert_eq!(order(&thinks), [1, 0]);
}

#[test]
fn who_is_late_goes_after_all_that_can_be_in_time() {
    let late = Candidate { wait_ms: 90_000.0, level_slack_ms: -1.0, ..WAITING };
    let in_time = Candidate { level_slack_ms: 1.0, ..WAITING };
    // At four fifths of 200 ms a token, it would not think fast enough.
    let slow = Candidate { level_tpot_ms: 200.0, think_left: 100.0, level_slack_ms: 10_000.0, ..WAITING };
    assert_eq!(order(&[slow, in_time]), [1, 0]);
    assert_eq!(order(&[Candidate { level_slack_ms: 20_000.0, ..slow }, late]), [0, 1]);
    let free = WAITING;
    let gave_way = Candidate { state: 2.0, phase: 1.0, ..late };
    assert_eq!(order(&[late, gave_way, in_time, Candidate { wait_ms: 60.0, ..free }]), [3, 2, 1, 0]);
    // Among those in time, and among those that are late, the order is the usual one.
    let longer = Candidate { wait_ms: 200_000.0, ..late };
    assert_eq!(order(&[late, longer]), [1, 0]);
    let heavy = Candidate { level_weight: 10.0, ..in_time };
    assert_eq!(order(&[in_time, heavy]), [1, 0]);
}

#[test]
fn nobody_is_admitted_while_the_decodes_take_as_long_as_a_level_allows() {
    // 5 ms, and 0.1 ms for each of 100 decodes.
    let of = |tpot_ms: f32| {
        let decodes = vec![Candidate { level_tpot_ms: tpot_ms, ..DECODING }; 100];
        let candidates = [decodes, vec![WAITING; 2]].concat();
        decided(&mut made(), &step(&candidates), &candidates)
    };
    let full = of(18.0);
    assert_eq!(full.token_caps[..100], [u32::MAX; 100], "a decode was capped");
    assert_eq!(full.token_caps[100..], [0, 0]);
    assert!(of(19.0).token_caps.iter().all(|cap| *cap == u32::MAX), "15 ms are within four fifths of 19");
    assert!(of(5.0).token_caps.is_empty(), "one decode alone takes longer than 4 ms");
    let waits = [Candidate { level_tpot_ms: 1.0, ..WAITING }];
    assert!(decided(&mut made(), &step(&waits), &waits).token_caps.is_empty(), "nothing runs");
}

#[test]
fn who_is_late_leaves_room_to_those_in_time() {
    let late = Candidate { level_slack_ms: -1.0, level_tpot_ms: 500.0, ..WAITING };
    let in_time = Candidate { level_slack_ms: 1e6, ..late };
    let candidates = [Candidate { level_tpot_ms: 500.0, ..DECODING }, late, in_time];
    let caps = |free_blocks: u32, candidates: &[Candidate]| {
        decided(&mut made(), &Step { free_blocks, ..step(candidates) }, candidates).token_caps
    };
    assert_eq!(caps(5999, &candidates), [u32::MAX, 0, u32::MAX], "less than 0.3 of 20,000 blocks");
    assert!(caps(6000, &candidates).is_empty());
    assert!(caps(100, &[DECODING, late]).is_empty(), "nobody runs who was promised anything");
    // 5.1 ms are more than 0.7 of four fifths of 9.1 ms.
    let of_time = |level_tpot_ms: f32| [Candidate { level_tpot_ms, ..DECODING }, late, in_time];
    assert_eq!(caps(6000, &of_time(9.1)), [u32::MAX, 0, u32::MAX]);
    assert!(caps(6000, &of_time(9.2)).is_empty());
    // 6,667 tokens of a prompt take 200 ms.
    let beside = |prompt_tokens: f32| {
        let prompt = Candidate { state: 1.0, prompt_tokens, level_tpot_ms: 500.0, ..WAITING };
        caps(6000, &[prompt, late, in_time])[1..].to_vec()
    };
    assert_eq!(beside(6700.0), [0, u32::MAX]);
    assert_eq!(beside(6600.0), [u32::MAX; 2]);
    // Once it has shown that ten may run at once, three seats are left too.
    let mut policy = made();
    let running = [Candidate { level_tpot_ms: 500.0, ..DECODING }; 10];
    let full = Step { waiting: 1, ..step(&running) };
    let _ = decided(&mut policy, &full, &running);
    let eight = [&running[..8], &[late, in_time]].concat();
    assert_eq!(decided(&mut policy, &step(&eight), &eight).token_caps[8..], [0, u32::MAX]);
    let seven = [&running[..7], &[late, in_time]].concat();
    assert!(decided(&mut policy, &step(&seven), &seven).token_caps.is_empty());
    // In a pause of vLLM, none that waits is shown although seats are free: it says nothing of the seats.
    let drained = Step { waiting: 1, ..step(&running[..4]) };
    let _ = decided(&mut policy, &drained, &running[..4]);
    assert!(decided(&mut policy, &step(&seven), &seven).token_caps.is_empty());
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
    let states = [vec![], own[..7].to_vec(), [own.clone(), vec![0]].concat(), with(0, &nan), with(4, &nan)];
    for state in &states {
        let mut policy = made();
        assert!(policy.restore(state).is_err(), "{state:?}");
    }
}

#[test]
fn keys_are_exact_and_finite_whatever_the_columns_say() {
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, 0.0, 3e38] {
        let candidate = Candidate {
            wait_ms: odd,
            since_progress_ms: odd,
            prompt_tokens: odd,
            computed_tokens: odd,
            think_tokens: odd,
            output_tokens: odd,
            think_left: odd,
            output_left: odd,
            level_slack_ms: odd,
            level_weight: odd,
            level_tpot_ms: odd,
            session: odd,
            resident_tokens: odd,
            room_tokens: odd,
            ..WAITING
        };
        let candidates = [candidate, Candidate { state: 1.0, ..candidate }, Candidate { state: 2.0, ..candidate }];
        let keys = decided(&mut made(), &step(&candidates), &candidates).keys;
        assert!(keys.iter().all(|key| key.abs() < 16_777_216.0), "{odd}: {keys:?}");
    }
}

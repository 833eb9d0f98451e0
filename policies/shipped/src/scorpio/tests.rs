use meridian_policy_sdk::Decision;

use super::*;

/// A candidate, its columns in the order of `INPUTS`.
#[derive(Clone, Copy)]
struct Candidate {
    request: f32,
    phase: f32,
    state: f32,
    wait_ms: f32,
    slack_ms: f32,
    prompt_tokens: f32,
    computed_tokens: f32,
    think_tokens: f32,
    output_tokens: f32,
    think_left: f32,
    level: f32,
    level_slack_ms: f32,
    level_tpot_ms: f32,
}

const DECODING: Candidate = Candidate {
    request: 1.0,
    phase: 2.0,
    state: 1.0,
    wait_ms: 1000.0,
    slack_ms: f32::INFINITY,
    prompt_tokens: 100.0,
    computed_tokens: 149.0,
    think_tokens: 0.0,
    output_tokens: 50.0,
    think_left: 0.0,
    level: 1.0,
    level_slack_ms: 5000.0,
    level_tpot_ms: 50.0,
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
const FREE: Candidate =
    Candidate { level: 0.0, level_slack_ms: f32::INFINITY, level_tpot_ms: f32::INFINITY, ..WAITING };

fn made() -> Scorpio {
    crate::made("{}").expect("there are no options")
}

fn step(candidates: &[Candidate]) -> Step {
    Step { running: candidates.iter().filter(|candidate| candidate.state == 1.0).count() as u32, ..crate::step() }
}

fn decided(policy: &mut Scorpio, step: &Step, candidates: &[Candidate]) -> Decision {
    let columns: &[fn(&Candidate) -> f32] = &[
        |c| c.request,
        |c| c.phase,
        |c| c.state,
        |c| c.wait_ms,
        |c| c.slack_ms,
        |c| c.prompt_tokens,
        |c| c.computed_tokens,
        |c| c.think_tokens,
        |c| c.output_tokens,
        |c| c.think_left,
        |c| c.level,
        |c| c.level_slack_ms,
        |c| c.level_tpot_ms,
    ];
    crate::decided(policy, step, candidates, columns)
}

fn decided_once(candidates: &[Candidate]) -> Decision {
    decided(&mut made(), &step(candidates), candidates)
}

/// Positions of the candidates, first to last.
fn order(candidates: &[Candidate]) -> Vec<usize> {
    crate::order(&decided_once(candidates).keys)
}

#[test]
fn the_least_deadline_first_none_by_arrival_late_ones_last() {
    let due = |level_slack_ms: f32| Candidate { level_slack_ms, ..WAITING };
    let earlier = Candidate { wait_ms: 60.0, ..FREE };
    let client = Candidate { slack_ms: 700.0, ..FREE };
    let lost_kv = Candidate { state: 2.0, ..due(-5.0) };
    let candidates = [due(40.0), FREE, due(900.0), earlier, lost_kv, client, due(600.0)];
    assert_eq!(order(&candidates), [4, 6, 5, 2, 3, 1, 0], "40 ms are less than the 50 to spare");
}

#[test]
fn who_would_be_late_behind_the_prompts_before_it_goes_last() {
    // 20 prompts of 10,000 tokens take 6 s, more with the decodes beside them.
    let mut candidates = vec![DECODING];
    candidates.extend([Candidate { prompt_tokens: 10_000.0, level_slack_ms: 3000.0, ..WAITING }; 20]);
    candidates.push(Candidate { level_slack_ms: 5000.0, ..WAITING });
    candidates.push(Candidate { level_slack_ms: 9000.0, ..WAITING });
    let keys = decided_once(&candidates).keys;
    assert!(keys[21] > keys[22], "5 s are too short, 9 are not: {keys:?}");
    assert!(keys[1..21].iter().all(|key| *key < keys[22]), "{keys:?}");
    // Those that are late themselves are not waited for.
    for candidate in &mut candidates[1..21] {
        candidate.level_slack_ms = 0.0;
    }
    let keys = decided_once(&candidates).keys;
    assert!(keys[21] < keys[22], "{keys:?}");
}

#[test]
fn thinking_goes_at_the_pace_of_the_steps() {
    let thinks = Candidate { think_left: 1000.0, ..WAITING };
    // A step with prompts takes 38 ms, that of the decode 5.1 ms: 33 s more than the host counted.
    assert_eq!(order(&[DECODING, thinks, Candidate { level_slack_ms: 6000.0, ..WAITING }]), [0, 2, 1]);
    assert_eq!(order(&[DECODING, Candidate { level_slack_ms: 38_000.0, ..thinks }, FREE]), [0, 1, 2]);
}

#[test]
fn the_virtual_batch_is_within_the_tightest_pace() {
    // 0.99 / 1.3 of 50 ms are 38.08 ms: 330.8 requests.
    let caps = |running: &[Candidate]| {
        let candidates = [running, &[WAITING]].concat();
        decided_once(&candidates).token_caps[candidates.len() - 1]
    };
    let loose = Candidate { level: 2.0, level_tpot_ms: 200.0, ..DECODING };
    assert_eq!(caps(&vec![DECODING; 329]), u32::MAX);
    assert_eq!(caps(&vec![DECODING; 330]), 0, "331 take longer");
    assert_eq!(caps(&[vec![DECODING; 230], vec![loose; 396]].concat()), u32::MAX, "four of them count as one");
    assert_eq!(caps(&[vec![DECODING; 230], vec![loose; 404]].concat()), 0);
    // Whatever is forecast of it.
    let thinks = Candidate { phase: 1.0, think_left: 0.0, ..loose };
    assert_eq!(caps(&[vec![DECODING; 230], vec![thinks; 101]].concat()), 0, "thinking is in every step");
    let free = |requests| vec![Candidate { state: 1.0, ..FREE }; requests];
    assert_eq!(caps(&[vec![DECODING; 230], free(99)].concat()), u32::MAX, "one without a level counts as a whole one");
    assert_eq!(caps(&[vec![DECODING; 230], free(101)].concat()), 0);

    // What is due before counts too.
    let before = Candidate { level_slack_ms: 1000.0, ..WAITING };
    let candidates = [vec![DECODING; 328], vec![WAITING; 3], vec![before; 2]].concat();
    assert_eq!(decided_once(&candidates).token_caps[328..], [0, 0, 0, u32::MAX, u32::MAX]);
}

#[test]
fn a_pace_that_one_decode_misses_keeps_nobody_out() {
    let candidates = [DECODING, WAITING].map(|candidate| Candidate { level_tpot_ms: 6.0, ..candidate });
    assert_eq!(decided_once(&candidates).token_caps, [u32::MAX; 2]);
    let waits = [Candidate { level_tpot_ms: 0.1, ..WAITING }];
    assert!(decided_once(&waits).token_caps.is_empty(), "nothing runs");
    let candidates = [Candidate { state: 1.0, computed_tokens: 400.0, ..FREE }, FREE];
    let decision = decided_once(&candidates);
    assert_eq!((decision.token_caps, decision.token_budget), (vec![], None), "nothing is promised");
}

#[test]
fn prompts_leave_the_decodes_their_pace() {
    // 38.08 ms less 5.1, at 0.03 ms.
    assert_eq!(decided_once(&[DECODING, WAITING]).token_budget, Some(1 + 1099));
    let full = [vec![DECODING; 1000], vec![WAITING]].concat();
    assert_eq!(decided_once(&full).token_budget, Some(1128), "never less than 128");
    let unknown = Step { fixed_ms: 0.0, decode_token_ms: 0.0, prefill_token_ms: 0.0, ..step(&full) };
    let decision = decided(&mut made(), &unknown, &full);
    assert_eq!((decision.token_budget, decision.token_caps[1000]), (None, u32::MAX));
}

/// One of 50 ms beside those of 120 ms: these take part in 5 of 12 steps each, and not all in the same.
#[test]
fn credits_give_each_its_part_of_the_steps() {
    let mut candidates = vec![DECODING];
    candidates.extend((2u16..=61).map(|request| Candidate {
        request: request.into(),
        level: 2.0,
        level_tpot_ms: 120.0,
        ..DECODING
    }));
    candidates.push(Candidate { request: 62.0, phase: 1.0, ..candidates[1] });
    let mut policy = made();
    let (mut steps, mut since, mut longest) = (vec![0u32; 62], vec![0u32; 62], 0);
    for _ in 0..1200 {
        let caps = decided(&mut policy, &step(&candidates), &candidates).token_caps;
        let takes_part = caps.iter().filter(|cap| **cap > 0).count();
        assert!((2 + 20..=2 + 30).contains(&takes_part), "{takes_part} of 60 beside the two");
        for (at, cap) in caps.iter().enumerate() {
            steps[at] += u32::from(*cap > 0);
            since[at] = if *cap > 0 { 0 } else { since[at] + 1 };
            longest = longest.max(since[at]);
        }
    }
    assert_eq!([steps[0], steps[61]], [1200; 2], "the tightest is in every step, and who thinks");
    assert!(steps[1..61].iter().all(|steps| (499..=501).contains(steps)), "{steps:?}");
    assert_eq!(longest, 2, "steps in a row without a token");
}

#[test]
fn keys_are_finite_whatever_the_columns_say() {
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, 0.0, 3e38] {
        let candidate = Candidate {
            request: odd,
            wait_ms: odd,
            slack_ms: odd,
            prompt_tokens: odd,
            computed_tokens: odd,
            think_tokens: odd,
            output_tokens: odd,
            think_left: odd,
            level: odd,
            level_slack_ms: odd,
            level_tpot_ms: odd,
            ..WAITING
        };
        let candidates =
            [candidate, Candidate { state: 1.0, ..candidate }, Candidate { state: 2.0, ..candidate }, WAITING];
        let mut policy = made();
        for _ in 0..3 {
            let decision = decided(&mut policy, &step(&candidates), &candidates);
            assert!(decision.keys.iter().all(|key| key.is_finite()), "{odd}: {:?}", decision.keys);
            assert!(decision.token_budget.is_none_or(|tokens| (1..=8192).contains(&tokens)), "{odd}");
        }
        let well = [DECODING, WAITING];
        let decision = decided(&mut policy, &step(&well), &well);
        assert_eq!(decision.token_caps, [u32::MAX; 2], "{odd}: nothing of it is kept");
    }
}

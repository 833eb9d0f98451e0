//! Who gives up its KV blocks, and who stands where in a step that may run short of them.

use meridian_core::{
    Decision, EngineFacts, EngineMirror, KvGrowth, Markers, Memory, NewRequest, OwnOrder, Plan, Planner, RowId, Subject,
};
use meridian_policy_sdk::Phase::{self, Output, Prefill, Think};
use proptest::prelude::*;

const STEP_TOKENS: u32 = 256;
const BLOCK_TOKENS: u32 = 16;

/// An engine whose running requests are described by prompt tokens, computed tokens and phase.
struct Engine {
    mirror: EngineMirror,
    running: Vec<RowId>,
}

fn engine(requests: &[(u32, u32, Phase)]) -> Engine {
    let mut mirror = EngineMirror::new(Markers::new(vec![vec![7]], vec![vec![8]], vec![]).expect("markers"));
    let running: Vec<RowId> = requests
        .iter()
        .enumerate()
        .map(|(i, (prompt_tokens, computed, phase))| {
            let new = NewRequest {
                prompt: &[7],
                prompt_tokens: *prompt_tokens,
                arrival_ms: i as f64,
                priority: i as i32 % 2,
                ..NewRequest::default()
            };
            let row = mirror.table.insert(&new).expect("finite times");
            mirror.admitted(row, 0);
            mirror.table.scheduled(row, *computed, 0.0);
            let tokens: &[u32] = match phase {
                Prefill => &[],
                Think => &[5],
                Output => &[8, 5],
            };
            mirror.table.generated(row, tokens, &mut Vec::new());
            // But for the latest token, all that it has is computed.
            mirror.table.scheduled(row, (tokens.len() as u32).saturating_sub(1), 0.0);
            row
        })
        .collect();
    let mut engine = Engine { mirror, running };
    let facts = EngineFacts { token_budget: STEP_TOKENS, ..EngineFacts::default() };
    engine.mirror.begin_step(&facts, &engine.running, &[]);
    engine
}

impl Engine {
    fn victim(&self, blocks: &[u32]) -> Option<usize> {
        let memory =
            Memory { now_ms: 9.0, subject: Subject::Requests, free_blocks: 0, cached_blocks: 0, total_blocks: 99 };
        self.mirror.victim(&mut OwnOrder, &memory, &self.running, blocks)
    }

    /// The plan of a step with so many free blocks; nothing is decided.
    fn plan(&self, free_blocks: u32, priority_first: bool) -> Plan {
        let mut planner = Planner::default().with_block_tokens(BLOCK_TOKENS);
        planner.keep_answers_ahead(KvGrowth::default());
        if priority_first {
            planner.put_priority_first();
        }
        let facts = EngineFacts { token_budget: STEP_TOKENS, free_blocks, decode_tokens: 1, ..EngineFacts::default() };
        planner.plan(&self.mirror.table, &facts, &self.running, &[], &Decision::default(), 1e9).clone()
    }
}

#[test]
fn a_request_that_would_lose_much_goes_last() {
    let long = (32_000, 20_000, Prefill);
    assert_eq!(engine(&[long, (100, 100, Output), (120, 120, Output)]).victim(&[]), Some(1), "the least is lost");
    assert_eq!(engine(&[long, (100, 100, Output), (900, 900, Think)]).victim(&[]), Some(2), "who answers goes later");
    assert_eq!(engine(&[(390, 390, Prefill), (100, 100, Output)]).victim(&[]), Some(0), "it is less than four others");
    assert_eq!(engine(&[(200, 200, Prefill), (10, 10, Output)]).victim(&[]), Some(0), "a step computes it again");
    let two = [long, (16_000, 15_000, Think), (100, 100, Output), (100, 100, Output), (80, 80, Output)];
    assert_eq!(engine(&two).victim(&[]), Some(4), "both are long");
    assert_eq!(engine(&[long]).victim(&[]), Some(0), "it is alone");
    assert_eq!(engine(&[]).victim(&[]), None);
}

#[test]
fn nobody_is_preempted_for_nothing_or_over_and_over() {
    let requests = [(500, 500, Think), (400, 400, Think), (300, 300, Output)];
    assert_eq!(engine(&requests).victim(&[31, 25, 18]), Some(1));
    assert_eq!(engine(&requests).victim(&[31, 0, 18]), Some(0), "others use all of its blocks");
    let mut engine = engine(&requests);
    for _ in 0..3 {
        for (i, row) in engine.running.clone().into_iter().take(2).enumerate() {
            engine.mirror.preempted(row);
            engine.mirror.admitted(row, 0);
            engine.mirror.table.scheduled(row, requests[i].1, 0.0);
        }
    }
    assert_eq!(engine.victim(&[]), Some(2), "the others have gone three times");
}

#[test]
fn the_long_prompt_stands_first_and_leaves_the_others_their_tokens() {
    let requests = [(100, 100, Think), (32_000, 20_000, Prefill), (100, 100, Output), (100, 100, Output)];
    let engine = engine(&requests);
    let enough = engine.plan(1000, false);
    assert_eq!((enough.running_order, enough.token_caps), (vec![], vec![]), "nothing is short");
    let short = engine.plan(3, false);
    assert_eq!(short.running_order, [1, 2, 3, 0]);
    assert_eq!(short.token_caps, [(engine.running[1], STEP_TOKENS - 3)]);
}

#[test]
fn a_request_that_is_left_out_stands_last_and_takes_no_tokens_of_others() {
    let engine = engine(&[(32_000, 20_000, Prefill), (100, 100, Output), (400, 96, Prefill), (100, 100, Output)]);
    for priority_first in [false, true] {
        let mut planner = Planner::default().with_block_tokens(BLOCK_TOKENS);
        planner.keep_answers_ahead(KvGrowth::default());
        if priority_first {
            planner.put_priority_first();
        }
        let facts =
            EngineFacts { token_budget: STEP_TOKENS, free_blocks: 3, decode_tokens: 1, ..EngineFacts::default() };
        let decision = Decision { keys: vec![0.0; 4], token_caps: vec![0, 1, 999, 1], ..Decision::default() };
        let plan = planner.plan(&engine.mirror.table, &facts, &engine.running, &[], &decision, 1e9);
        assert_eq!(plan.running_order.last(), Some(&0), "{plan:?}");
        assert!(plan.token_caps.contains(&(engine.running[0], 0)), "{plan:?}");
    }
}

#[test]
fn an_engine_with_priorities_finds_its_own_victim_last() {
    // Priorities 0, 1, 0, 1 by arrival: the last request is the engine's victim, and then the second.
    let engine = engine(&[(100, 96, Think), (100, 96, Output), (100, 96, Output), (100, 96, Think)]);
    assert_eq!(engine.plan(1, true).running_order, [0, 2, 1, 3]);
    assert!(engine.plan(99, true).running_order.is_empty());
}

#[test]
fn a_prompt_in_computation_keeps_the_blocks_it_has_yet_to_take() {
    let engine = engine(&[(32_000, 20_000, Prefill), (100, 100, Output), (64, 16, Prefill)]);
    let blocks = |growth: KvGrowth, waiting: &[RowId]| {
        let mut planner = Planner::default().with_block_tokens(BLOCK_TOKENS);
        planner.keep_answers_ahead(growth);
        let facts = EngineFacts { token_budget: STEP_TOKENS, free_blocks: 9, free_seats: 1, ..EngineFacts::default() };
        let running = &engine.running[..2];
        planner.plan(&engine.mirror.table, &facts, running, waiting, &Decision::default(), 1e9).prompt_blocks
    };
    assert_eq!(blocks(KvGrowth::default(), &engine.running[2..]), 750);
    assert_eq!(blocks(KvGrowth::default(), &[]), 0, "nobody asks for them");
    assert_eq!(blocks(KvGrowth { groups: 2, ..KvGrowth::default() }, &engine.running[2..]), 0);
}

proptest! {
    /// No request that would lose less is kept, unless it answers and the victim does not.
    #[test]
    fn the_victim_loses_no_more_than_it_must(
        requests in proptest::collection::vec((1u32..40_000, 0u32..40_000, 0usize..3), 1..40),
    ) {
        let requests: Vec<_> = requests
            .into_iter()
            .map(|(prompt, computed, phase)| {
                let phase = [Prefill, Think, Output][phase];
                (prompt, if phase == Prefill { computed.min(prompt - 1) } else { prompt }, phase)
            })
            .collect();
        let engine = engine(&requests);
        let victim = engine.victim(&[]).expect("somebody runs");
        let (_, lost, phase) = requests[victim];
        let is_better = |(_, other_lost, other): &(u32, u32, Phase)| *other_lost < lost && (*other != Output || phase == Output);
        prop_assert!(!requests.iter().any(is_better), "{requests:?}: {victim}");
    }
}

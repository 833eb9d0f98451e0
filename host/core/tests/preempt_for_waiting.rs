//! Waiting requests that take the places of running ones.

use meridian_core::slot::DispatchSlot;
use meridian_core::{
    Decision, Dispatch, EngineFacts, KvGrowth, Markers, MeridianScheduler, NewRequest, Plan, Planner, Queues,
    RequestTable, RowId, SchedulerConfig, TableStep, native,
};
use proptest::prelude::*;

const BLOCK_TOKENS: u32 = 16;
const FULL: EngineFacts = EngineFacts {
    now_ms: 1000.0,
    token_budget: 512,
    free_blocks: 1000,
    total_blocks: 1000,
    free_seats: 0,
    waiting: 1,
    decode_tokens: 1,
};

/// A table of running requests whose prompts are computed, then waiting ones; prompts have so many tokens.
fn table(running: &[u32], waiting: &[u32]) -> (RequestTable, Vec<RowId>, Vec<RowId>) {
    let mut table = RequestTable::default();
    let mut rows: Vec<RowId> = Vec::new();
    for prompt_tokens in running.iter().chain(waiting) {
        let new = NewRequest { prompt_tokens: *prompt_tokens, ..NewRequest::default() };
        let row = table.insert(&new).expect("finite times");
        if rows.len() < running.len() {
            table.admitted(row, 0);
            table.scheduled(row, *prompt_tokens, 0.0);
            table.generated(row, &[40], &mut Vec::new());
        }
        rows.push(row);
    }
    let waiting = rows.split_off(running.len());
    (table, rows, waiting)
}

fn planned(
    (table, running, waiting): &(RequestTable, Vec<RowId>, Vec<RowId>),
    facts: &EngineFacts,
    keys: &[f32],
) -> Plan {
    let mut planner = Planner::default().with_block_tokens(BLOCK_TOKENS);
    planner.preempt_for_waiting();
    let decision = Decision { keys: keys.to_vec(), ..Decision::default() };
    planner.plan(table, facts, running, waiting, &decision, 1e9).clone()
}

#[test]
fn the_highest_key_gives_way_when_no_seat_is_free() {
    let requests = table(&[32, 32, 32], &[32]);
    let rows = &requests.1;
    assert_eq!(planned(&requests, &FULL, &[5.0, 9.0, 2.0, 4.0]).preempted, [rows[1]]);
    assert_eq!(planned(&requests, &FULL, &[5.0, f32::NAN, 2.0, 4.0]).preempted, [rows[1]], "NaN is behind all");
    assert!(planned(&requests, &FULL, &[4.0, 4.0, 4.0, 4.0]).preempted.is_empty(), "equal keys preempt nobody");
    assert!(planned(&requests, &FULL, &[5.0, 9.0, 2.0, f32::NAN]).preempted.is_empty());
    let a_seat = EngineFacts { free_seats: 1, ..FULL };
    assert!(planned(&requests, &a_seat, &[5.0, 9.0, 2.0, 4.0]).preempted.is_empty(), "there is room");
    assert!(planned(&requests, &FULL, &[]).preempted.is_empty(), "no decision");
}

#[test]
fn nobody_gives_way_unless_that_makes_room() {
    // The waiting one needs 10 blocks; those that run hold 2 and 4.
    let requests = table(&[32, 64], &[160]);
    let rows = &requests.1;
    let free = |free_blocks| EngineFacts { free_blocks, ..FULL };
    let keys = [9.0, 8.0, 1.0];
    let seats = EngineFacts { free_seats: 3, ..free(4) };
    assert!(planned(&requests, &seats, &keys).preempted.is_empty(), "a seat is free, and memory preempts by itself");
    assert_eq!(planned(&requests, &free(8), &keys).preempted, [rows[0]]);
    assert_eq!(planned(&requests, &free(4), &keys).preempted, [rows[0], rows[1]]);
    assert!(planned(&requests, &free(3), &keys).preempted.is_empty());
    // Admission leaves blocks to grow into: four of them here.
    let mut planner = Planner::default().with_block_tokens(BLOCK_TOKENS);
    planner.preempt_for_waiting();
    planner.keep_answers_ahead(KvGrowth { blocks_per_request: 2.0, ..KvGrowth::default() });
    let decision = Decision { keys: keys.to_vec(), ..Decision::default() };
    let plan = planner.plan(&requests.0, &free(8), rows, &requests.2, &decision, 1e9);
    assert_eq!(plan.preempted, [rows[0], rows[1]]);
}

#[test]
fn a_policy_chooses_among_the_requests_that_are_behind() {
    let mut requests = table(&[32, 64, 96, 32], &[160]);
    let rows = requests.1.clone();
    let planned = |requests: &(RequestTable, Vec<RowId>, Vec<RowId>), facts: &EngineFacts, victim_keys: [f32; 5]| {
        let mut planner = Planner::default().with_block_tokens(BLOCK_TOKENS);
        planner.preempt_for_waiting();
        // The last of the running ones is not behind.
        let decision =
            Decision { keys: vec![9.0, 8.0, 7.0, 1.0, 2.0], victim_keys: victim_keys.to_vec(), ..Decision::default() };
        planner.plan(&requests.0, facts, &requests.1, &requests.2, &decision, 1e9).preempted.clone()
    };
    const NEVER: f32 = f32::NAN;
    assert_eq!(planned(&requests, &FULL, [3.0, 1.0, 2.0, 0.0, NEVER]), [rows[1]], "the lowest, not the highest key");
    assert_eq!(planned(&requests, &FULL, [3.0, 3.0, 3.0, 3.0, NEVER]), [rows[0]], "equal ones by the host's default");
    assert!(planned(&requests, &FULL, [NEVER, NEVER, NEVER, 1.0, 1.0]).is_empty());
    // For KV blocks alone too: it needs ten, and none is free.
    let memory = EngineFacts { free_seats: 3, free_blocks: 0, ..FULL };
    assert_eq!(planned(&requests, &memory, [3.0, 1.0, 2.0, 0.0, NEVER]), [rows[1], rows[2]]);
    let short = EngineFacts { free_blocks: 1, ..memory };
    assert!(planned(&requests, &short, [1.0, NEVER, NEVER, 0.0, NEVER]).is_empty(), "that does not make room");
    // While it computes its prompt, if the policy says so; three times at most.
    requests.0.preempted(rows[1]);
    requests.0.admitted(rows[1], 0);
    assert_eq!(planned(&requests, &FULL, [3.0, 1.0, 2.0, 0.0, NEVER]), [rows[1]]);
    for _ in 0..2 {
        requests.0.preempted(rows[1]);
        requests.0.admitted(rows[1], 0);
    }
    assert_eq!(planned(&requests, &FULL, [3.0, 1.0, 2.0, 0.0, NEVER]), [rows[2]], "it gave way three times");
}

#[test]
fn it_is_off_unless_asked_for() {
    let (table, running, waiting) = table(&[32], &[32]);
    let mut planner = Planner::default().with_block_tokens(BLOCK_TOKENS);
    let decision = Decision { keys: vec![9.0, 1.0], ..Decision::default() };
    assert!(planner.plan(&table, &FULL, &running, &waiting, &decision, 1e9).preempted.is_empty());
    assert!(!SchedulerConfig::default().preempt_for_waiting);
}

#[test]
fn a_prompt_that_is_computed_and_a_request_that_gave_way_three_times_stay() {
    let mut requests = table(&[32, 32], &[32]);
    let (first, second) = (requests.1[0], requests.1[1]);
    let keys = [9.0, 8.0, 1.0];
    for preemptions in 0..4 {
        let expected = if preemptions < 3 { first } else { second };
        assert_eq!(planned(&requests, &FULL, &keys).preempted, [expected]);
        requests.0.preempted(first);
        requests.0.admitted(first, 0);
        assert_eq!(planned(&requests, &FULL, &keys).preempted, [second], "its prompt is computed again");
        requests.0.scheduled(first, 33, 0.0);
    }
}

#[test]
fn room_is_made_once_for_a_request_that_the_engine_does_not_admit() {
    let (table, running, waiting) = table(&[32, 32], &[32, 32]);
    let mut planner = Planner::default().with_block_tokens(BLOCK_TOKENS);
    planner.preempt_for_waiting();
    let mut preempted = |keys: [f32; 4]| {
        let decision = Decision { keys: keys.to_vec(), ..Decision::default() };
        planner.plan(&table, &FULL, &running, &waiting, &decision, 1e9).preempted.clone()
    };
    assert_eq!(preempted([9.0, 8.0, 1.0, 2.0]), [running[0]]);
    assert!(preempted([9.0, 8.0, 1.0, 2.0]).is_empty());
    assert_eq!(preempted([9.0, 8.0, 2.0, 1.0]), [running[0]], "another comes first");
}

#[test]
fn priorities_come_before_keys_where_the_engine_schedules_by_them() {
    let mut table = RequestTable::default();
    let mut rows = Vec::new();
    for priority in [5, 0, -1] {
        let new = NewRequest { prompt_tokens: 32, priority, ..NewRequest::default() };
        rows.push(table.insert(&new).expect("finite times"));
    }
    for row in &rows[..2] {
        table.admitted(*row, 0);
        table.scheduled(*row, 32, 0.0);
    }
    let mut planner = Planner::default().with_block_tokens(BLOCK_TOKENS);
    planner.preempt_for_waiting();
    planner.put_priority_first();
    let decision = Decision { keys: vec![1.0, 2.0, 3.0], ..Decision::default() };
    let plan = planner.plan(&table, &FULL, &rows[..2], &rows[2..], &decision, 1e9);
    assert_eq!(plan.preempted, [rows[0]], "the least urgent, whatever its key");
    let mut planner = Planner::default().with_block_tokens(BLOCK_TOKENS);
    planner.preempt_for_waiting();
    planner.put_priority_first();
    let short = EngineFacts { free_seats: 1, free_blocks: 1, ..FULL };
    let plan = planner.plan(&table, &short, &rows[..2], &rows[2..], &decision, 1e9);
    assert_eq!(plan.preempted, [rows[0]], "for its KV blocks");
}

#[test]
fn who_gave_way_waits_behind_all_others_and_not_in_the_same_step() {
    let (table, running, waiting) = table(&[32, 32], &[32, 32]);
    let mut queues = Queues::default();
    queues.running.clone_from(&running);
    queues.waiting.extend(&waiting);
    let plan = Plan { token_budget: 128, preempted: vec![running[0]], ..Plan::default() };
    let mut step = TableStep::new(&table, 1);
    queues.carry_out(&plan, 2, &mut step);
    assert_eq!(step.preempted, [running[0]]);
    assert_eq!(step.given, [(running[1], 1), (waiting[0], 32)]);
    assert_eq!(queues.waiting, [waiting[1], running[0]]);
    let mut step = TableStep::new(&table, 1);
    queues.carry_out(&Plan { token_budget: 128, ..Plan::default() }, 5, &mut step);
    assert_eq!((step.preempted.len(), step.given.len(), queues.running.len()), (0, 4, 4));
}

/// Short requests keep coming to an engine with one seat: the long one that gave way to them is served again.
#[test]
fn who_gave_way_is_not_starved() {
    let config = SchedulerConfig { preempt_for_waiting: true, max_defer_ms: 50.0, ..SchedulerConfig::default() };
    let policy = native::policy::<Dispatch>("mlfq", config.targets(), r#"{"quantum_tokens": 4}"#).expect("native");
    let slot = DispatchSlot::new(policy, config.targets());
    let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![]).expect("usable markers");
    let mut scheduler = MeridianScheduler::for_engine(slot, markers, &config, BLOCK_TOKENS);
    let thinking = NewRequest { prompt: &[7], ..NewRequest::default() };
    let long = scheduler.mirror().table.insert(&thinking).expect("finite times");
    let mut queues = Queues::default();
    queues.waiting.push_back(long);
    let (mut gave_way, mut came_back) = (0, 0);
    for step in 1..400_u64 {
        let now_ms = step as f64 * 10.0;
        if step > 10 && step.is_multiple_of(2) {
            let new = NewRequest { arrival_ms: now_ms, ..NewRequest::default() };
            queues.waiting.push_back(scheduler.mirror().table.insert(&new).expect("finite times"));
        }
        let free_seats = 1 - queues.running.len() as u32;
        let facts = EngineFacts { now_ms, free_seats, waiting: queues.waiting.len() as u32, ..FULL };
        let plan = scheduler.plan(&facts, &queues.running, queues.waiting.make_contiguous()).clone();
        let ran = queues.running.first() == Some(&long);
        let mut served = TableStep::new(&scheduler.mirror().table, 1);
        queues.carry_out(&plan, 1, &mut served);
        let TableStep { admitted, preempted, given, .. } = served;
        for row in &preempted {
            gave_way += usize::from(*row == long);
            scheduler.mirror().preempted(*row);
        }
        came_back += usize::from(!ran && gave_way > 0 && queues.running.first() == Some(&long));
        admitted.into_iter().for_each(|row| scheduler.mirror().admitted(row, 0));
        scheduler.scheduled(now_ms, given.iter().copied());
        for (row, _) in given {
            scheduler.mirror().table.generated(row, &[40], &mut Vec::new());
            if row != long {
                // A short one: it is over after a token.
                queues.running.retain(|running| *running != row);
                scheduler.mirror().table.remove(row);
            }
        }
    }
    assert!(gave_way > 0, "it never gave way");
    assert!(came_back > 0, "it never came back");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn who_gives_way_runs_has_a_higher_key_and_makes_room(
        running in prop::collection::vec((1_u32..200, -4_i8..4), 0..12),
        waiting in prop::collection::vec((1_u32..200, -4_i8..4), 0..6),
        free_blocks in 0_u32..40,
        free_seats in 0_u32..2,
    ) {
        let of = |requests: &[(u32, i8)]| requests.iter().map(|(tokens, _)| *tokens).collect::<Vec<_>>();
        let keys: Vec<f32> = running.iter().chain(&waiting).map(|(_, key)| f32::from(*key)).collect();
        let requests = table(&of(&running), &of(&waiting));
        let facts = EngineFacts { free_blocks, free_seats, waiting: waiting.len() as u32, ..FULL };
        let plan = planned(&requests, &facts, &keys);
        let position = |row: &RowId| requests.1.iter().position(|running| running == row);
        let given: Option<Vec<usize>> = plan.preempted.iter().map(position).collect();
        let given = given.expect("only who runs gives way");
        let mut distinct = given.clone();
        distinct.sort_unstable();
        distinct.dedup();
        prop_assert_eq!(distinct.len(), given.len());
        let first = plan.waiting_order.first().map_or(0, |from| *from as usize);
        let Some((tokens, key)) = waiting.get(first) else {
            prop_assert!(given.is_empty());
            return Ok(());
        };
        let blocks = |i: &usize| running[*i].0.div_ceil(BLOCK_TOKENS);
        let room = free_blocks + given.iter().map(blocks).sum::<u32>();
        let needed = tokens.div_ceil(BLOCK_TOKENS);
        prop_assert!(given.iter().all(|i| running[*i].1 > *key));
        prop_assert!(given.is_empty() || free_seats == 0);
        prop_assert!(given.is_empty() || room >= needed);
        // And when nobody does, although somebody must, all that could would not have been enough.
        if given.is_empty() && free_seats == 0 {
            let all: Vec<usize> = (0..running.len()).filter(|i| running[*i].1 > *key).collect();
            let most = free_blocks + all.iter().map(blocks).sum::<u32>();
            prop_assert!(all.is_empty() || most < needed);
        }
    }
}

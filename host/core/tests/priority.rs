//! Plans of an engine that itself schedules by priority: a policy orders what is of one priority.

use meridian_core::{Decision, EngineFacts, NewRequest, Planner, RequestTable, RowId};

const MAX_DEFER_MS: f32 = 50.0;
const FACTS: EngineFacts = EngineFacts {
    now_ms: 0.0,
    token_budget: 512,
    free_blocks: 0,
    total_blocks: 0,
    free_seats: 8,
    waiting: 0,
    decode_tokens: 1,
};

/// Requests of these priorities, which arrive one millisecond after another.
fn requests(priorities: &[i32]) -> (RequestTable, Vec<RowId>) {
    let mut table = RequestTable::default();
    let insert = |(i, priority): (usize, &i32)| {
        let request =
            NewRequest { priority: *priority, prompt_tokens: 10, arrival_ms: i as f64, ..NewRequest::default() };
        table.insert(&request).expect("finite times")
    };
    let slots = priorities.iter().enumerate().map(insert).collect();
    (table, slots)
}

fn planner() -> Planner {
    let mut planner = Planner::default();
    planner.put_priority_first();
    planner
}

fn keys(keys: &[f32]) -> Decision {
    Decision { keys: keys.to_vec(), ..Decision::default() }
}

#[test]
fn keys_order_what_is_of_one_priority() {
    let (table, slots) = requests(&[0, 0, 1, 1]);
    let decision = keys(&[4.0, 3.0, 2.0, 1.0]);
    let plan = planner().plan(&table, &FACTS, &[], &slots, &decision, MAX_DEFER_MS).clone();
    assert_eq!(plan.waiting_order, [1, 0, 3, 2]);
    let plan = planner().plan(&table, &FACTS, &slots, &[], &decision, MAX_DEFER_MS).clone();
    assert_eq!(plan.running_order, [1, 0, 3, 2]);
    assert_eq!(
        Planner::default().plan(&table, &FACTS, &[], &slots, &decision, MAX_DEFER_MS).waiting_order,
        [3, 2, 1, 0]
    );
}

#[test]
fn keys_that_only_prefer_another_priority_change_nothing() {
    let (table, slots) = requests(&[0, 1, 2]);
    let plan = planner().plan(&table, &FACTS, &[], &slots, &keys(&[3.0, 2.0, 1.0]), MAX_DEFER_MS).clone();
    assert!(plan.waiting_order.is_empty());
}

#[test]
fn a_policy_that_keeps_the_order_keeps_that_of_running_requests_too() {
    let (table, slots) = requests(&[2, 0, 1]);
    let plan = planner().plan(&table, &FACTS, &slots, &[], &keys(&[0.0; 3]), MAX_DEFER_MS).clone();
    assert!(plan.running_order.is_empty());
}

#[test]
fn who_is_left_out_does_not_stand_before_others() {
    let (table, slots) = requests(&[0, 1, 1]);
    let decision = Decision { token_caps: vec![0, 10, 10], ..keys(&[1.0, 3.0, 2.0]) };
    let plan = planner().plan(&table, &FACTS, &[], &slots, &decision, MAX_DEFER_MS).clone();
    assert_eq!(plan.waiting_order, [2, 1, 0]);
}

/// The waiting order of two requests and a new one, whose key is the best, long after `admitted` was admitted before them.
fn order_after(waiting: i32, admitted: i32) -> Vec<u32> {
    let (mut table, slots) = requests(&[waiting, waiting, admitted, waiting]);
    let mut planner = planner();
    // The lowered budget makes the plan bind; the engine does not use all of it.
    let decision = Decision { token_budget: Some(100), ..keys(&[3.0, 2.0, 1.0]) };
    planner.plan(&table, &FACTS, &[], &slots[..3], &decision, MAX_DEFER_MS);
    table.admitted(slots[2], 0);
    planner.settle(&mut table, 10, 0.0);
    let later = EngineFacts { now_ms: 1e3, ..FACTS };
    let waiting = [slots[0], slots[1], slots[3]];
    planner.plan(&table, &later, &[], &waiting, &keys(&[3.0, 2.0, 1.0]), MAX_DEFER_MS).waiting_order.clone()
}

#[test]
fn only_being_overtaken_within_a_priority_is_the_policys_doing() {
    assert_eq!(order_after(0, 0), [1, 0, 2], "overdue requests come before the new one");
    assert_eq!(order_after(0, 1), [1, 0, 2], "a lower priority overtook them");
    assert_eq!(order_after(1, 0), [2, 1, 0], "a higher priority did, as the engine has it: the policy's order holds");
}

#[test]
fn one_that_a_policy_left_out_for_too_long_is_served_before_others_of_its_priority() {
    let (mut table, slots) = requests(&[0, 0, 0]);
    let decision =
        Decision { keys: vec![0.0, 2.0, 1.0], token_caps: vec![0, u32::MAX, u32::MAX], ..Decision::default() };
    let mut planner = planner();
    let plan = planner.plan(&table, &FACTS, &[], &slots, &decision, MAX_DEFER_MS).clone();
    assert_eq!(plan.waiting_order, [2, 1, 0]);
    planner.settle(&mut table, 10, 0.0);
    let later = EngineFacts { now_ms: 1000.0, ..FACTS };
    let plan = planner.plan(&table, &later, &[], &slots, &decision, MAX_DEFER_MS).clone();
    assert_eq!(plan.waiting_order, [0, 2, 1]);
    assert!(!plan.token_caps.contains(&(slots[0], 0)), "{:?}", plan.token_caps);
}

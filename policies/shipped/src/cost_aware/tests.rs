use meridian_policy_sdk::eviction::{Ranking, rank};

use super::*;

fn made(config_json: &str) -> Result<CostAware, String> {
    crate::made(config_json)
}

/// A block that its session leaves.
#[derive(Clone, Copy)]
struct Block {
    session: u32,
    turn: u32,
    last_gap_ms: f32,
    stopped_for_tool: bool,
    priority: i32,
    hits: u32,
}

const BLOCK: Block = Block { session: 1, turn: 1, last_gap_ms: f32::NAN, stopped_for_tool: true, priority: 0, hits: 0 };

fn keys(policy: &mut CostAware, now_ms: f64, blocks: &[Block]) -> Vec<f32> {
    let mut columns = Vec::new();
    let mut column = |value: &dyn Fn(&Block) -> f32| columns.extend(blocks.iter().map(value));
    for input in CostAware::INPUTS {
        match input {
            Column::Hits => column(&|block| block.hits as f32),
            Column::AgeMs => column(&|_| 60_000.0),
            Column::ComputedTokens => column(&|_| 64.0),
            Column::Session => column(&|block| block.session as f32),
            Column::Turn => column(&|block| block.turn as f32),
            Column::LastGapMs => column(&|block| block.last_gap_ms),
            Column::GapMs => column(&|_| f32::NAN),
            Column::StoppedForTool => column(&|block| f32::from(u8::from(block.stopped_for_tool))),
            Column::Priority => column(&|block| block.priority as f32),
            _ => column(&|_| 0.0),
        }
    }
    let memory = Memory { now_ms, total_blocks: 400, ..Memory::default() };
    let mut ranking = Ranking::default();
    rank(policy, &memory, blocks.len(), &columns, &mut ranking);
    assert!(ranking.keep_ms.is_empty());
    ranking.keys
}

/// Sessions return 3 s after a tool call, and never after an answer.
fn taught() -> (CostAware, f64) {
    let (mut policy, mut now_ms) = (made("{}").unwrap(), 0.0);
    for session in 1..=60 {
        keys(&mut policy, now_ms, &[Block { session, ..BLOCK }; 10]);
        now_ms += 3000.0;
        let answered = Block { session, turn: 2, last_gap_ms: 3000.0, stopped_for_tool: false, ..BLOCK };
        keys(&mut policy, now_ms, &[answered; 10]);
        now_ms += 500.0;
    }
    (policy, now_ms)
}

#[test]
fn weight_has_a_range() {
    assert_eq!(made("{}").unwrap().priority_weight, 2.0);
    assert_eq!(made("{\"priority_weight\": 0.5}").unwrap_err(), "priority_weight: 0.5: must be in 1..=16");
    assert!(made("{\"weight\": 1}").is_err());
}

#[test]
fn before_anything_is_learned_the_order_is_that_of_use() {
    let mut policy = made("{}").unwrap();
    let first = keys(&mut policy, 1000.0, &[BLOCK])[0];
    let second = keys(&mut policy, 2000.0, &[Block { session: 2, stopped_for_tool: false, ..BLOCK }])[0];
    assert!(first < second);
}

#[test]
fn who_waits_for_a_tool_outlasts_who_was_answered() {
    let (mut policy, now_ms) = taught();
    let tool = keys(&mut policy, now_ms, &[Block { session: 100, ..BLOCK }])[0];
    let answered = Block { session: 101, stopped_for_tool: false, ..BLOCK };
    let later = keys(&mut policy, now_ms + 2000.0, &[answered])[0];
    assert!(tool > later, "{tool} {later}");
    // Not for ever.
    let much_later = keys(&mut policy, now_ms + 1e6, &[answered])[0];
    assert!(tool < much_later);
}

#[test]
fn the_urgent_are_kept_longer_and_so_is_what_others_share() {
    let (mut policy, now_ms) = taught();
    let block = Block { session: 100, ..BLOCK };
    let alike = keys(
        &mut policy,
        now_ms,
        &[block, Block { priority: -1, ..block }, Block { priority: 2, ..block }, Block { hits: 4000, ..block }],
    );
    assert!(alike[2] < alike[0] && alike[0] < alike[1] && alike[0] < alike[3], "{alike:?}");
}

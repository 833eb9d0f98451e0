//! Sessions that have KV blocks and those that have lost them: what a dispatch policy is told of them, and how long the host
//! lets it hold the latter.

use meridian_core::slot::DispatchSlot;
use meridian_core::{
    CachedBlocks, ChainFacts, EngineFacts, EngineMirror, KvGrowth, LeavingBlock, Markers, MeridianScheduler,
    NewRequest, OwnOrder, RowId, SchedulerConfig, SessionFacts, Stop, native,
};

const BLOCK_TOKENS: u32 = 16;
const BLOCKS: u32 = 1000;
/// Tokens that a step may carry.
const STEP_TOKENS: u32 = 64;

/// A pool in which the session of this number has left so many blocks at 0, which are computed again in 1 ms a token.
fn pool(session: u32, blocks: u32) -> CachedBlocks {
    let mut cached = CachedBlocks::new(BLOCKS, BLOCK_TOKENS);
    cached.resync((0..BLOCKS).map(|block| (block, None)));
    leaves(&mut cached, session, 0, blocks, 0.0);
    cached
}

fn leaves(cached: &mut CachedBlocks, session: u32, first: u32, blocks: u32, now_ms: f64) {
    let chain: Vec<u32> = (first..first + blocks).collect();
    cached.taken(&chain, now_ms);
    let facts = ChainFacts {
        tokens: blocks * BLOCK_TOKENS,
        token_ms: 1.0,
        ended_ms: Some(now_ms),
        session: SessionFacts { session, is_named: true, ..SessionFacts::default() },
        ..ChainFacts::default()
    };
    cached.chain_ends(&chain, &facts);
    let leaving: Vec<LeavingBlock> =
        (0..blocks).rev().map(|at| LeavingBlock { block: first + at, tokens: Some((at + 1) * BLOCK_TOKENS) }).collect();
    cached.leaving(&mut OwnOrder, &leaving, now_ms);
}

#[test]
fn a_session_is_warm_for_five_times_what_its_tokens_take() {
    let mut cached = pool(3, 10);
    assert_eq!((cached.warm(799.0, |_| false), cached.of_session(3), cached.of_session(4)), (10, 10, 0));
    assert_eq!((cached.warm(800.0, |_| false), cached.of_session(3)), (0, 10), "160 tokens at 1 ms");

    let mut cached = pool(3, 10);
    cached.touched(&[0, 1, 2, 3]);
    assert_eq!((cached.warm(1.0, |_| false), cached.of_session(3)), (6, 10), "its next turn attends four");
    cached.taken(&[9, 8], 2.0);
    assert_eq!((cached.warm(2.0, |_| false), cached.of_session(3)), (4, 8), "two were evicted");
    // The turn ends, with two more blocks.
    leaves(&mut cached, 3, 0, 12, 5.0);
    assert_eq!((cached.warm(900.0, |_| false), cached.of_session(3)), (12, 12));
    assert_eq!(cached.warm(5.0 + 5.0 * 192.0, |_| false), 0);
    // One that is preempted keeps nothing warm.
    let session = SessionFacts { session: 4, is_named: true, ..SessionFacts::default() };
    let preempted = ChainFacts { tokens: 9, token_ms: 1.0, session, ..ChainFacts::default() };
    cached.chain_ends(&[200], &preempted);
    assert_eq!(cached.warm(1000.0, |_| false), 0);
}

#[test]
fn a_session_that_waits_for_a_sub_agent_stays_warm() {
    let mut cached = pool(3, 10);
    leaves(&mut cached, 4, 20, 10, 0.0);
    assert_eq!(cached.warm(800.0, |session| session == 3), 10, "the other is warm no longer");
    assert_eq!(cached.warm(5000.0, |session| session == 3), 10);
    assert_eq!(cached.warm(5799.0, |_| false), 10, "it has just come back, or has its time again");
    assert_eq!(cached.warm(5800.0, |_| false), 0);
    assert_eq!(cached.warm(5800.0, |_| true), 0, "what is cold stays cold");
}

#[test]
fn a_request_that_names_no_session_is_warm_when_it_was_a_second_turn() {
    let mut mirror = EngineMirror::default();
    let mut ends = |session: &str, continues: u32| {
        let new = NewRequest { prompt_tokens: 16, session, ..NewRequest::default() };
        let row = mirror.table.insert(&new).expect("finite times");
        mirror.continues(row, continues);
        let facts = mirror.chain_ends(row, Stop::Turn);
        mirror.table.remove(row);
        let mut cached = pool(0, 0);
        cached.taken(&[0], 0.0);
        cached.chain_ends(&[0], &ChainFacts { token_ms: 1.0, ..facts });
        cached.leaving(&mut OwnOrder, &[LeavingBlock { block: 0, tokens: Some(16) }], 0.0);
        (facts.session.session, cached.warm(0.0, |_| false))
    };
    let (found, warm) = ends("", 0);
    assert_eq!(warm, 0, "nobody may come back");
    assert_eq!(ends("", found), (found, 1));
    assert_eq!(ends("a", 0).1, 1);
}

#[test]
fn what_is_forgotten_is_forgotten_by_session_too() {
    let mut cached = pool(3, 10);
    cached.resync((0..BLOCKS).map(|block| (block, Some(16))));
    assert_eq!((cached.warm(1.0, |_| false), cached.of_session(3), cached.chains()), (0, 0, 0));
    // However many requests of one name end.
    for round in 0..10_000 {
        leaves(&mut cached, 5, 0, 2, f64::from(round));
    }
    assert_eq!((cached.warm(10_000.0, |_| false), cached.of_session(5)), (2, 2));
}

/// An engine under a policy with a request that decodes, one of session 1 and one of session 2, both with 8,000 tokens.
struct Engine {
    scheduler: MeridianScheduler,
    cached: CachedBlocks,
    decodes: RowId,
    warm: RowId,
    cold: RowId,
    free_blocks: u32,
}

impl Engine {
    fn new(policy: &str, session_wait_ms: f32) -> Self {
        let config = SchedulerConfig { session_wait_ms, ..SchedulerConfig::default() };
        let policy = native::policy(policy, config.targets(), "{}").expect("a native policy");
        let slot = DispatchSlot::new(policy, config.targets());
        let mut scheduler = MeridianScheduler::for_engine(slot, Markers::default(), &config, BLOCK_TOKENS);
        scheduler.keep_answers_ahead(KvGrowth::default());
        let mut arrives = |session: &str, prompt_tokens| {
            let new = NewRequest { prompt_tokens, max_tokens: 1000, session, ..NewRequest::default() };
            scheduler.mirror().table.insert(&new).expect("finite times")
        };
        let (warm, cold, decodes) = (arrives("warm", 8000), arrives("cold", 8000), arrives("", 1));
        scheduler.mirror().admitted(decodes, 0);
        scheduler.mirror().table.scheduled(decodes, 1, 0.0);
        Self { scheduler, cached: pool(1, 600), decodes, warm, cold, free_blocks: BLOCKS - 1 }
    }

    fn facts(&self, now_ms: f64, waiting: &[RowId]) -> EngineFacts {
        EngineFacts {
            now_ms,
            token_budget: STEP_TOKENS,
            free_blocks: self.free_blocks,
            total_blocks: BLOCKS,
            free_seats: 8,
            waiting: waiting.len() as u32,
            decode_tokens: 1,
        }
    }

    /// The order of these waiting requests while nothing runs.
    fn order(&mut self, waiting: &[RowId]) -> Vec<u32> {
        let facts = self.facts(1.0, waiting);
        self.scheduler.note_sessions(&mut self.cached, false, &facts, &[], waiting);
        self.scheduler.plan(&facts, &[], waiting).waiting_order.clone()
    }

    /// Learn what steps take, 0.1 ms for a token of a prompt.
    fn learn(&mut self) {
        let mut now_ms = self.scheduler.mirror().now_ms();
        let new = NewRequest { prompt_tokens: 1 << 20, ..NewRequest::default() };
        let prompt = self.scheduler.mirror().table.insert(&new).expect("finite times");
        self.scheduler.mirror().admitted(prompt, 0);
        for step in 0..100u32 {
            let tokens = if step % 4 == 0 { 60 } else { 0 };
            let facts = self.facts(now_ms, &[]);
            self.scheduler.plan(&facts, &[self.decodes, prompt], &[]);
            self.scheduler.scheduled(now_ms, [(self.decodes, 1), (prompt, tokens)]);
            now_ms += 10.0 + 0.1 * f64::from(tokens);
            self.scheduler.mirror().hold_time(now_ms);
            self.scheduler.mirror().table.generated(self.decodes, &[5], &mut Vec::new());
        }
        self.scheduler.mirror().table.remove(prompt);
    }

    fn token_ms(&self) -> f64 {
        self.scheduler.step_time().map_or(0.0, |learned| f64::from(learned.prefill_token_ms))
    }

    /// Which of these waiting requests the plan at this time leaves out; the step then takes a decode and admits nobody.
    fn left_out(&mut self, now_ms: f64, waiting: &[RowId], runs: bool) -> Vec<RowId> {
        self.step(now_ms, waiting, runs, None)
    }

    /// The same for a step in which one of them finds KV blocks.
    fn step(&mut self, now_ms: f64, waiting: &[RowId], runs: bool, admits: Option<RowId>) -> Vec<RowId> {
        let facts = self.facts(now_ms, waiting);
        let running = if runs { vec![self.decodes] } else { Vec::new() };
        self.scheduler.note_sessions(&mut self.cached, false, &facts, &running, waiting);
        let plan = self.scheduler.plan(&facts, &running, waiting);
        let left_out = plan.token_caps.iter().filter(|(_, cap)| *cap == 0).map(|(row, _)| *row).collect();
        if let Some(row) = admits {
            self.scheduler.mirror().admitted(row, 0);
        }
        if runs {
            self.scheduler.mirror().table.generated(self.decodes, &[5], &mut Vec::new());
            self.scheduler.scheduled(now_ms, [(self.decodes, 1)]);
        }
        left_out
    }
}

#[test]
fn a_cold_session_waits_while_a_warm_one_needs_the_memory() {
    let mut engine = Engine::new("balanced", 60_000.0);
    let (warm, cold) = (engine.warm, engine.cold);
    // 399 blocks are left beside the 600, and the prompt needs 500.
    assert_eq!(engine.left_out(1.0, &[cold, warm], true), [cold]);
    assert!(engine.left_out(2.0, &[cold], false).is_empty(), "nothing else runs");
    // 9,600 tokens keep it warm for 48 s.
    assert_eq!(engine.left_out(47_999.0, &[cold], true), [cold]);
    assert!(engine.left_out(48_000.0, &[cold], true).is_empty(), "nobody needs the memory");
}

#[test]
fn a_sub_agent_keeps_its_parent_warm_and_does_not_wait_for_it() {
    let mut engine = Engine::new("balanced", 600_000.0);
    let (warm, cold) = (engine.warm, engine.cold);
    engine.scheduler.mirror().table.remove(warm);
    let mut arrives = |session: &str| {
        let new = NewRequest { prompt_tokens: 8000, max_tokens: 1000, session, ..NewRequest::default() };
        engine.scheduler.mirror().table.insert(&new).expect("finite times")
    };
    let (sub, other) = (arrives("sub;parent=warm"), arrives("other;parent=cold"));
    assert_eq!(engine.left_out(1.0, &[cold, sub, other], true), [cold, other], "its parent has nothing");
    assert_eq!(engine.left_out(48_000.0, &[cold], true), [cold], "the sub-agent is at work");
    engine.scheduler.mirror().table.remove(sub);
    assert_eq!(engine.left_out(95_999.0, &[cold], true), [cold]);
    assert!(engine.left_out(96_000.0, &[cold], true).is_empty());
}

#[test]
fn the_host_bounds_the_wait_and_zero_is_none() {
    let mut engine = Engine::new("balanced", 10_000.0);
    let cold = engine.cold;
    assert_eq!(engine.left_out(5.0, &[cold], true), [cold], "from here it is held");
    assert_eq!(engine.left_out(10_005.0, &[cold], true), [cold]);
    assert!(engine.left_out(10_006.0, &[cold], true).is_empty());

    let mut engine = Engine::new("balanced", 0.0);
    let cold = engine.cold;
    assert!(engine.left_out(5.0, &[cold], true).is_empty());
    let mut engine = Engine::new("balanced", 10_000.0);
    let cold = engine.cold;
    engine.scheduler.set_session_wait_ms(0.0);
    assert!(engine.left_out(5.0, &[cold], true).is_empty());
}

/// Two sessions that a policy has held for longer than the bound, and when that is.
fn two_that_were_held(engine: &mut Engine) -> (RowId, RowId, f64) {
    engine.learn();
    let new = |session| NewRequest { prompt_tokens: 8000, max_tokens: 1000, session, ..NewRequest::default() };
    let mut arrives = |session| engine.scheduler.mirror().table.insert(&new(session)).expect("finite times");
    let (first, second) = (arrives("first"), arrives("second"));
    let begin_ms = engine.scheduler.mirror().now_ms() + 1.0;
    leaves(&mut engine.cached, 1, 0, 600, begin_ms);
    assert_eq!(engine.left_out(begin_ms, &[first, second], true), [first, second]);
    (first, second, begin_ms + 10_001.0)
}

#[test]
fn those_that_are_held_for_too_long_take_turns() {
    let mut engine = Engine::new("balanced", 10_000.0);
    let (first, second, over_ms) = two_that_were_held(&mut engine);
    assert_eq!(engine.step(over_ms, &[first, second], true, Some(first)), [second], "the first has its turn");
    let prefill_ms = 8000.0 * engine.token_ms();
    assert!((400.0..4000.0).contains(&prefill_ms), "{prefill_ms}");
    assert_eq!(engine.left_out(over_ms + 4.9 * prefill_ms, &[second], true), [second]);
    assert!(engine.left_out(over_ms + 5.1 * prefill_ms, &[second], true).is_empty());
}

#[test]
fn a_preempted_request_resumes_before_a_turn_for_as_long_as_one_may_be_held() {
    for (priority, later_ms, goes_first) in [(0, 0.0, true), (0, 9_998.0, true), (0, 10_000.0, false), (1, 0.0, false)]
    {
        let mut engine = Engine::new("balanced", 10_000.0);
        let (first, second, over_ms) = two_that_were_held(&mut engine);
        let new = NewRequest { prompt_tokens: 2_000, max_tokens: 1000, priority, ..NewRequest::default() };
        let preempted = engine.scheduler.mirror().table.insert(&new).expect("finite times");
        engine.scheduler.mirror().admitted(preempted, 0);
        engine.scheduler.mirror().preempted(preempted);
        let held = engine.left_out(over_ms + later_ms, &[first, second, preempted], true);
        let expected = if goes_first { vec![first, second] } else { vec![second] };
        assert_eq!(held, expected, "priority {priority}, {later_ms} ms later");
    }
}

#[test]
fn a_turn_is_not_over_before_there_are_kv_blocks_for_it() {
    let mut engine = Engine::new("balanced", 10_000.0);
    let (first, second, over_ms) = two_that_were_held(&mut engine);
    engine.free_blocks = 100;
    for step in 0..3 {
        assert_eq!(engine.left_out(over_ms + f64::from(step), &[first, second], true), [second], "step {step}");
    }
    assert_eq!(engine.step(over_ms + 3.0, &[first, second], true, Some(first)), [second]);
    assert_eq!(engine.left_out(over_ms + 4.0, &[second], true), [second], "the first had its turn");
}

#[test]
fn one_that_the_engine_cannot_admit_stands_in_nobodys_way() {
    let mut engine = Engine::new("balanced", 10_000.0);
    let (first, second, over_ms) = two_that_were_held(&mut engine);
    let new = NewRequest { prompt_tokens: 32, max_tokens: 10, ..NewRequest::default() };
    let short = engine.scheduler.mirror().table.insert(&new).expect("finite times");
    let waiting = [first, second, short];
    // Its prompt fits into the blocks of the sessions, but its adapter has no room.
    engine.cached.touched(&[0, 1, 2, 3]);
    let facts = engine.facts(over_ms, &waiting);
    engine.scheduler.note_sessions(&mut engine.cached, false, &facts, &[engine.decodes], &waiting);
    let plan = engine.scheduler.plan(&facts, &[engine.decodes], &waiting);
    assert_eq!(plan.waiting_order, [0, 2, 1], "the second of the held ones is behind those that may run");
    engine.scheduler.mirror().admitted(short, 0);
    engine.scheduler.scheduled(over_ms, [(engine.decodes, 1), (short, 32)]);
    // The next has its turn at once.
    assert_eq!(engine.left_out(over_ms + 1.0, &[first, second], true), [first]);
}

#[test]
fn nobody_waits_for_others_where_a_connector_loads_what_was_lost() {
    let mut engine = Engine::new("balanced", 60_000.0);
    let waiting = [engine.cold];
    let facts = engine.facts(1.0, &waiting);
    engine.scheduler.note_sessions(&mut engine.cached, true, &facts, &[engine.decodes], &waiting);
    assert!(engine.scheduler.plan(&facts, &[engine.decodes], &waiting).token_caps.is_empty());
    // What sessions have is told all the same.
    let mut engine = Engine::new("lpm", 60_000.0);
    let waiting = [engine.cold, engine.warm];
    engine.scheduler.note_sessions(&mut engine.cached, true, &facts, &[], &waiting);
    assert_eq!(engine.scheduler.plan(&facts, &[], &waiting).waiting_order, [1, 0]);
}

#[test]
fn other_rescues_are_no_turns() {
    let mut engine = Engine::new("balanced", 10_000.0);
    let (first, second, over_ms) = two_that_were_held(&mut engine);
    // Both run, one of them without tokens for so long that the host gives it some.
    let mut arrives = |session, prompt_tokens| {
        let new = NewRequest { prompt_tokens, max_tokens: 1000, session, ..NewRequest::default() };
        engine.scheduler.mirror().table.insert(&new).expect("finite times")
    };
    let (long, short) = (arrives("long", 8000), arrives("short", 32));
    engine.scheduler.mirror().admitted(long, 0);
    engine.scheduler.mirror().admitted(short, 0);
    let facts = engine.facts(over_ms, &[]);
    engine.scheduler.plan(&facts, &[engine.decodes, long, short], &[]);
    engine.scheduler.scheduled(over_ms, [(engine.decodes, 1), (long, 32), (short, 32)]);
    assert_eq!(engine.scheduler.mirror().table.get(long).map(|row| row.account().rescues()), Some(1));
    assert_eq!(engine.left_out(over_ms + 1.0, &[first, second], true), [second]);
}

/// Whether a policy may hold the cold request: after 60 s it could, after 2 s any policy has to let it in.
fn is_held_for_long(policy: &str) -> bool {
    let mut engine = Engine::new(policy, 60_000.0);
    let cold = engine.cold;
    let caps = |engine: &mut Engine, now_ms| engine.left_out(now_ms, &[cold], true);
    assert_eq!(caps(&mut engine, 5.0), [cold], "{policy} leaves it out");
    !caps(&mut engine, 3000.0).is_empty()
}

#[test]
fn only_a_policy_that_reads_the_room_may_hold_anybody_for_so_long() {
    // `noop` leaves every step to the default, which reads it. `output-first` leaves prompts out beside answers.
    assert_eq!(["balanced", "noop"].map(is_held_for_long), [true; 2]);
    let mut engine = Engine::new("lpm", 60_000.0);
    let (warm, cold) = (engine.warm, engine.cold);
    assert_eq!(engine.order(&[cold, warm]), [1, 0], "it reads what sessions have");
    let mut engine = Engine::new("fcfs", 60_000.0);
    let (warm, cold) = (engine.warm, engine.cold);
    assert!(engine.order(&[cold, warm]).is_empty());
    let mut engine = Engine::new("lpm", 0.0);
    let (warm, cold) = (engine.warm, engine.cold);
    assert_eq!(engine.order(&[cold, warm]), [1, 0], "no session waits for others, and it is told all the same");
}

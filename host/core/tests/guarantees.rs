//! What the host keeps whatever a policy answers, shown on a small model of an engine.

use meridian_core::{
    Admits, Decision, EngineFacts, KvGrowth, Markers, NewRequest, Planner, Queues, RequestTable, RowId, State,
    TableStep,
};
use proptest::prelude::*;

const MAX_DEFER_MS: f32 = 50.0;
const STEP_MS: f64 = 1.0;
const SEATS: usize = 4;

/// A small engine that carries plans out.
#[derive(Default)]
struct Engine {
    table: RequestTable,
    planner: Planner,
    queues: Queues,
    now_ms: f64,
    admits: Admits,
    seats: usize,
    decode_tokens: u32,
    /// The host lifted caps of the last decision.
    was_overruled: bool,
}

impl Engine {
    fn new() -> Self {
        Self { table: RequestTable::new(Markers::default()), seats: SEATS, decode_tokens: 1, ..Self::default() }
    }

    fn arrive(&mut self, prompt_tokens: u32) {
        let whole_prompt = self.admits == Admits::WholePrompts;
        let request = NewRequest { prompt_tokens, arrival_ms: self.now_ms, whole_prompt, ..NewRequest::default() };
        let slot = self.table.insert(&request).expect("finite times");
        self.queues.waiting.push_back(slot);
    }

    /// One step under `decision`; returns the tokens given.
    fn step(&mut self, engine_budget: u32, decision: &Decision) -> u32 {
        self.now_ms += STEP_MS;
        self.table.set_clock(self.now_ms);
        let Self { table, planner, queues, now_ms, admits, seats, decode_tokens, .. } = self;
        let facts = EngineFacts {
            now_ms: *now_ms,
            token_budget: engine_budget,
            free_seats: (*seats - queues.running.len()) as u32,
            decode_tokens: *decode_tokens,
            ..EngineFacts::default()
        };
        let waiting = queues.waiting.make_contiguous();
        let plan = planner.plan(table, &facts, &queues.running, waiting, decision, MAX_DEFER_MS).clone();
        assert!((1..=engine_budget).contains(&plan.token_budget));
        self.was_overruled = plan.overruled;
        for (order, length) in
            [(&plan.running_order, queues.running.len()), (&plan.waiting_order, queues.waiting.len())]
        {
            let mut positions = order.clone();
            positions.sort_unstable();
            let is_permutation = positions.iter().map(|position| *position as usize).eq(0..length);
            assert!(order.is_empty() || is_permutation, "an order is a permutation");
        }
        let mut step = TableStep::new(table, *decode_tokens).admitting(*admits);
        let tokens = queues.carry_out(&plan, *seats, &mut step);
        let TableStep { admitted, given, .. } = step;
        admitted.into_iter().for_each(|row| table.admitted(row, 0));
        for (row, tokens) in given {
            table.scheduled(row, tokens, *now_ms);
            if table[row].needed_tokens(0) == 1 && table[row].computed_tokens() > 0 {
                table.generated(row, &[1], &mut Vec::new());
            }
        }
        planner.settle(table, tokens, *now_ms);
        tokens
    }
}

/// A hostile answer for `candidates`: arbitrary bits as keys, budgets from nothing to enormous, caps of nothing.
fn hostile(candidates: usize, seed: u64) -> Decision {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let keys = (0..candidates).map(|_| f32::from_bits(next() as u32)).collect();
    let token_budget = match next() % 4 {
        0 => None,
        1 => Some(0),
        2 => Some(u32::MAX),
        _ => Some((next() % 8) as u32),
    };
    let token_caps = match next() % 3 {
        0 => Vec::new(),
        1 => vec![0; candidates],
        _ => (0..candidates).map(|_| (next() % 3) as u32).collect(),
    };
    let victim_keys = match next() % 2 {
        0 => Vec::new(),
        _ => (0..candidates).map(|_| if next() % 4 == 0 { f32::NAN } else { (next() % 8) as f32 }).collect(),
    };
    Decision { keys, token_budget, token_caps, victim_keys }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn hostile_policies_lose_nothing_and_exceed_nothing(
        seed in any::<u64>(),
        budget in 1u32..300,
        prompts in proptest::collection::vec(1u32..200, 1..12),
    ) {
        let mut engine = Engine::new();
        for prompt in &prompts {
            engine.arrive(*prompt);
        }
        for step in 0..200 {
            let decision = hostile(prompts.len(), seed.wrapping_add(step).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let given = engine.step(budget, &decision);
            prop_assert!(given <= budget);
            prop_assert_eq!(engine.queues.running.len() + engine.queues.waiting.len(), prompts.len());
        }
    }

    #[test]
    fn no_step_is_empty_while_something_could_run(
        seed in any::<u64>(),
        budget in 4u32..300,
        decode_tokens in 1u32..5,
        prompts in proptest::collection::vec(1u32..200, 1..12),
        caps_of_nothing in any::<bool>(),
    ) {
        let mut engine = Engine { decode_tokens, ..Engine::new() };
        for prompt in &prompts {
            engine.arrive(*prompt);
        }
        for step in 0..200u64 {
            let seed = seed.wrapping_add(step).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut decision = hostile(prompts.len(), seed);
            if caps_of_nothing {
                decision.token_caps = vec![0; prompts.len()];
            }
            // KV blocks come and go; whoever runs has theirs.
            engine.admits = if seed.is_multiple_of(3) { Admits::Nobody } else { Admits::Parts };
            let could_run = !engine.queues.running.is_empty() || engine.admits == Admits::Parts;
            let given = engine.step(budget, &decision);
            prop_assert!(given > 0 || !could_run, "step {step}");
        }
    }

    #[test]
    fn a_prompt_that_may_not_be_split_is_taken_whole_and_soon(
        seed in any::<u64>(),
        prompts in proptest::collection::vec(1u32..200, 1..SEATS),
        caps_of_nothing in any::<bool>(),
    ) {
        let mut engine = Engine { admits: Admits::WholePrompts, ..Engine::new() };
        for prompt in &prompts {
            engine.arrive(*prompt);
        }
        for step in 0..400u64 {
            let mut decision = hostile(prompts.len(), seed.wrapping_add(step).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            decision.token_budget = Some(step as u32 % 8);
            if caps_of_nothing {
                decision.token_caps = vec![0; prompts.len()];
            }
            prop_assert!(engine.step(256, &decision) > 0);
            for slot in &engine.queues.running {
                let row = &engine.table[*slot];
                prop_assert!(row.computed_tokens() >= row.prompt_tokens(), "step {step}");
            }
        }
        prop_assert!(engine.queues.waiting.is_empty(), "{} of {} wait", engine.queues.waiting.len(), prompts.len());
    }

    #[test]
    fn a_hybrid_model_computes_whole_blocks_of_prompts_and_soon(
        seed in any::<u64>(),
        block in 2u32..60,
        prompts in proptest::collection::vec(1u32..200, 1..SEATS),
        caps_of_nothing in any::<bool>(),
    ) {
        let mut engine = Engine { admits: Admits::StateBlocks(block), ..Engine::new() };
        engine.planner.compute_state_blocks(block);
        for prompt in &prompts {
            engine.arrive(*prompt);
        }
        let rows: Vec<RowId> = engine.queues.waiting.iter().copied().collect();
        let mut last_ms = vec![0.0; rows.len()];
        for step in 0..400u64 {
            let before: Vec<u32> = rows.iter().map(|row| engine.table[*row].computed_tokens()).collect();
            let mut decision = hostile(prompts.len(), seed.wrapping_add(step).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            // From too little for a block to a block and some decodes.
            decision.token_budget = Some((seed ^ step) as u32 % (block + SEATS as u32));
            if caps_of_nothing {
                decision.token_caps = vec![0; prompts.len()];
            }
            engine.step(64, &decision);
            for (i, row) in rows.iter().enumerate() {
                let row = &engine.table[*row];
                let (computed, is_prompt) = (row.computed_tokens(), row.computed_tokens() < row.prompt_tokens());
                prop_assert!(!is_prompt || computed.is_multiple_of(block), "step {step}: {computed} of {block}");
                if computed > before[i] || !is_prompt {
                    last_ms[i] = engine.now_ms;
                }
                // As many turns as there are prompts.
                let bound_ms = f64::from(MAX_DEFER_MS) * prompts.len() as f64 + 4.0 * STEP_MS;
                prop_assert!(engine.now_ms - last_ms[i] <= bound_ms, "step {step}: request {i} is not served");
            }
        }
    }

    #[test]
    fn no_running_request_is_put_off_past_the_bound(seed in any::<u64>(), budget in 8u32..64) {
        let mut engine = Engine::new();
        for _ in 0..SEATS {
            engine.arrive(3);
        }
        // An honest first step admits everyone; then the policy wants nobody to run.
        engine.step(64, &Decision { keys: vec![0.0; SEATS], ..Decision::default() });
        prop_assert_eq!(engine.queues.running.len(), SEATS);
        let mut last = [engine.now_ms; SEATS];
        let slots = engine.queues.running.clone();
        for step in 0..400 {
            let before: Vec<u32> = slots.iter().map(|s| engine.table[*s].computed_tokens()).collect();
            let mut decision = hostile(SEATS, seed.wrapping_add(step));
            decision.token_caps = vec![0; SEATS];
            engine.step(budget, &decision);
            for (i, slot) in slots.iter().enumerate() {
                if engine.table[*slot].computed_tokens() > before[i] {
                    last[i] = engine.now_ms;
                }
                prop_assert!(engine.now_ms - last[i] <= f64::from(MAX_DEFER_MS) + 2.0 * STEP_MS);
            }
        }
    }

    #[test]
    fn no_waiting_request_is_overtaken_past_the_bound(budget in 16u32..64, newest_first in any::<bool>()) {
        let mut engine = Engine::new();
        engine.arrive(4);
        let victim = engine.queues.waiting[0];
        let mut waited = 0.0;
        for _ in 0..200 {
            // Seats come free all the time, and the policy gives them to anyone but the first.
            while let Some(done) = engine.queues.running.iter().position(|slot| *slot != victim) {
                let slot = engine.queues.running.remove(done);
                engine.table.remove(slot);
            }
            if engine.table[victim].state() == State::Running {
                break;
            }
            engine.arrive(2);
            let n = engine.queues.waiting.len();
            let keys = (0..n).map(|i| if newest_first { -(i as f32) } else { f32::from(engine.queues.waiting[i] == victim) });
            let decision = Decision { keys: keys.collect(), ..Decision::default() };
            engine.step(budget, &decision);
            waited += STEP_MS;
        }
        prop_assert_eq!(engine.table[victim].state(), State::Running);
        prop_assert!(waited <= f64::from(MAX_DEFER_MS) + 3.0 * STEP_MS, "{}", waited);
    }
}

#[test]
fn a_waiting_request_gets_in_although_the_policy_leaves_it_no_tokens() {
    let mut engine = Engine::new();
    engine.arrive(4);
    engine.step(64, &Decision { keys: vec![0.0], ..Decision::default() });
    engine.arrive(4);
    let second = engine.queues.waiting[0];
    for _ in 0..60 {
        // A budget of one token: the running request takes it every time.
        engine.step(64, &Decision { keys: vec![0.0; 2], token_budget: Some(1), ..Decision::default() });
    }
    assert_eq!(engine.table[second].state(), State::Running);
}

/// Seen on the real engine: many waited past the bound, the engine had no KV blocks for the first of them, and those that
/// ran were left out of the step to make room.
#[test]
fn who_runs_goes_on_while_nobody_who_waits_fits() {
    for planner in [Planner::default(), Planner::default().with_block_tokens(16)] {
        let mut engine = Engine { planner, seats: 64, ..Engine::new() };
        (0..3).for_each(|_| engine.arrive(4));
        let decision = |n: usize| Decision { keys: vec![0.0; n], token_budget: Some(32), ..Decision::default() };
        engine.step(256, &decision(3));
        assert_eq!(engine.queues.running.len(), 3);
        (0..60).for_each(|_| engine.arrive(200));
        // They wait because of the policy first, and of the memory then.
        for _ in 0..5 {
            engine.step(256, &Decision { token_budget: Some(3), ..decision(63) });
        }
        engine.admits = Admits::Nobody;
        for _ in 0..200 {
            assert!(engine.step(256, &decision(63)) >= 3, "a decode for each that runs");
        }
    }
}

/// Seen in the simulator: a queue of prompts was overdue together, and every step of its rescue was a full one.
#[test]
fn the_rescue_of_a_queue_does_not_fill_the_steps_of_those_that_run() {
    const LONG: usize = 30;
    let mut engine = Engine { seats: 64, ..Engine::new() };
    engine.arrive(4);
    engine.step(256, &Decision { keys: vec![0.0], ..Decision::default() });
    (0..LONG).for_each(|_| engine.arrive(100));
    let (mut most, mut rescues) = (0, 0);
    for _ in 0..4 * LONG + 60 {
        // The policy prefers short prompts, which come and go, until everybody with a long one has been overtaken enough.
        engine.arrive(1);
        let is_long = |row: &RowId| engine.table[*row].prompt_tokens() > 4;
        let keys = engine.queues.running.iter().chain(&engine.queues.waiting).map(|row| f32::from(is_long(row)));
        let decision = Decision { keys: keys.collect(), token_budget: Some(8), ..Decision::default() };
        let given = engine.step(256, &decision);
        most = most.max(given);
        rescues += u32::from(given > 8);
        let Engine { table, queues, .. } = &mut engine;
        let (over, going): (Vec<_>, Vec<_>) =
            queues.running.drain(..).partition(|row| table[*row].prompt_tokens() == 1);
        queues.running = going;
        for row in over {
            table.remove(row);
        }
    }
    assert!(rescues > 10, "{rescues} steps served somebody overdue");
    assert!(most <= 8 + 256 / 8, "a step of {most} tokens");
}

#[test]
fn answers_stay_ahead_of_thinking_when_blocks_may_run_short() {
    let mut table = RequestTable::new(Markers::new(vec![vec![7]], vec![vec![8]], vec![]).expect("markers"));
    let mut add = |prompt: &[u32], tokens: &[u32]| {
        let slot = table.insert(&NewRequest { prompt, ..NewRequest::default() }).expect("finite times");
        table.scheduled(slot, 16, 0.0);
        table.generated(slot, tokens, &mut Vec::new());
        slot
    };
    let thinks = [add(&[1, 7], &[5]), add(&[1, 7], &[5])];
    let answers = [add(&[1, 7], &[5, 8, 5]), add(&[1, 7], &[5, 8, 5])];
    let running = [thinks[0], answers[0], thinks[1], answers[1]];
    let plan = |free_blocks: u32, keeps: bool| {
        let mut planner = Planner::default().with_block_tokens(16);
        if keeps {
            planner.keep_answers_ahead(KvGrowth::default());
        }
        // Thinking first, as a policy may well say.
        let decision = Decision { keys: vec![0.0, 1.0, 0.0, 1.0], ..Decision::default() };
        let facts = EngineFacts { token_budget: 64, free_blocks, decode_tokens: 1, ..EngineFacts::default() };
        planner.plan(&table, &facts, &running, &[], &decision, MAX_DEFER_MS).running_order.clone()
    };
    assert_eq!(plan(4, true), [0, 2, 1, 3], "a block for each: the policy's order");
    assert_eq!(plan(3, true), [1, 3, 0, 2], "one has to go: those who answer first, in the policy's order within");
    assert_eq!(plan(3, false), [0, 2, 1, 3]);
}

#[test]
fn a_policy_that_changes_nothing_is_left_alone() {
    let mut engine = Engine::new();
    for _ in 0..8 {
        engine.arrive(4);
    }
    engine.now_ms = 1.0e6;
    let facts = EngineFacts {
        now_ms: engine.now_ms,
        token_budget: 64,
        free_seats: 2,
        decode_tokens: 1,
        ..EngineFacts::default()
    };
    let decision = Decision { keys: vec![0.0; 8], ..Decision::default() };
    let waiting = engine.queues.waiting.make_contiguous();
    let plan = engine.planner.plan(&engine.table, &facts, &[], waiting, &decision, MAX_DEFER_MS);
    assert!(plan.running_order.is_empty() && plan.waiting_order.is_empty() && plan.token_caps.is_empty());
    assert_eq!(plan.token_budget, 64);
}

/// Seen on the real engine: answers were left out because a prompt waited, and the prompt had no KV blocks.
#[test]
fn what_runs_is_not_left_out_for_somebody_who_waits() {
    let mut engine = Engine::new();
    engine.arrive(4);
    engine.step(64, &Decision { keys: vec![0.0], ..Decision::default() });
    engine.admits = Admits::Nobody;
    engine.arrive(4);
    let leaves_out =
        |running: u32| Decision { keys: vec![0.0; 2], token_caps: vec![running, 9], ..Decision::default() };
    for _ in 0..20 {
        assert_eq!(engine.step(64, &leaves_out(0)), 1, "the one that runs has a token a step");
        assert!(engine.was_overruled, "and it is counted");
    }
    engine.admits = Admits::Parts;
    engine.step(64, &leaves_out(1));
    assert_eq!(engine.queues.running.len(), 2);
    assert!(!engine.was_overruled);
    // Another one runs now: what is left out stays out.
    let first = engine.queues.running[0];
    let computed = engine.table[first].computed_tokens();
    engine.step(64, &Decision { keys: vec![0.0; 2], token_caps: vec![0, 9], ..Decision::default() });
    assert_eq!((engine.table[first].computed_tokens(), engine.was_overruled), (computed, false));
}

/// Where everybody waits for longer than the bound, a policy still chooses whom to admit: the host steps in when four times as
/// many were admitted as stood before a request when it came, itself included.
#[test]
fn a_waiting_request_is_overtaken_as_often_as_its_place_in_the_queue_allows() {
    let mut engine = Engine { seats: 1, ..Engine::new() };
    for _ in 0..10 {
        engine.arrive(2);
    }
    let victim = engine.queues.waiting[9];
    let mut overtaken = 0;
    for step in 0..1000 {
        // One seat, which comes free every seven steps, and somebody new for it each time.
        if step % 7 == 0 {
            for row in std::mem::take(&mut engine.queues.running) {
                engine.table.remove(row);
                overtaken += 1;
            }
            engine.arrive(2);
        }
        let candidates = engine.queues.running.iter().chain(&engine.queues.waiting);
        let keys = candidates.map(|row| f32::from(u8::from(*row == victim))).collect();
        engine.step(64, &Decision { keys, ..Decision::default() });
        if engine.table[victim].state() == State::Running {
            break;
        }
    }
    assert!(engine.now_ms > 4.0 * f64::from(MAX_DEFER_MS), "the whole took {} ms", engine.now_ms);
    assert!((38..=42).contains(&overtaken), "{overtaken} were admitted before it, of four times ten");
}

/// The plan keeps the whole step for a request that is overdue, and for which there are no KV blocks.
#[test]
fn what_an_overdue_request_cannot_take_goes_to_others() {
    let mut engine = Engine { decode_tokens: 4, ..Engine::new() };
    engine.arrive(1);
    engine.arrive(1);
    for step in 0..200 {
        let token_caps = vec![u32::MAX, 0];
        let decision = Decision { keys: vec![0.0; 2], token_caps, ..Decision::default() };
        engine.admits = if step < 45 { Admits::Parts } else { Admits::Nobody };
        assert!(engine.step(4, &decision) > 0, "step {step}");
    }
}

#[test]
fn a_key_that_is_no_number_stands_before_those_that_are_left_out() {
    for prompts in [[1, 1], [54, 1]] {
        let mut engine = Engine { admits: Admits::WholePrompts, ..Engine::new() };
        prompts.into_iter().for_each(|tokens| engine.arrive(tokens));
        let decision = Decision {
            keys: vec![0.0, f32::NAN],
            token_budget: Some(0),
            token_caps: vec![0, 1],
            ..Decision::default()
        };
        assert_eq!(engine.step(256, &decision), 1);
        assert!(!engine.was_overruled, "the policy's own request runs");
    }
}

//! Where the time of a request goes: the parts add up to its latency, and each has the right cause.

use meridian_core::latency::{Latencies, LatencyKind, OTHER_TENANTS};
use meridian_core::{
    Admits, Decision, EngineFacts, EngineMirror, Markers, MeridianConfig, NewRequest, Part, Planner, Queues,
    RequestState, RowId, Rule, TableStep,
};
use proptest::prelude::*;

const ANY: u32 = 3;
const THINK_END: u32 = 8;

/// An engine of one mirror: steps of 10 ms, blocks of 16 tokens.
struct Engine {
    mirror: EngineMirror,
    planner: Planner,
    facts: EngineFacts,
    seats: usize,
    queues: Queues,
    admits: Admits,
}

impl Engine {
    fn new(seats: usize, token_budget: u32) -> Self {
        let markers = Markers::new(vec![vec![7]], vec![vec![THINK_END]], vec![]).unwrap();
        let facts = EngineFacts {
            token_budget,
            free_blocks: 1000,
            total_blocks: 1000,
            decode_tokens: 1,
            ..EngineFacts::default()
        };
        Self {
            mirror: EngineMirror::new(markers),
            planner: Planner::default().with_block_tokens(16),
            facts,
            seats,
            queues: Queues::default(),
            admits: Admits::default(),
        }
    }

    fn arrive(&mut self, arrival_ms: f64, prompt_tokens: u32, tenant: &str) -> RowId {
        let new = NewRequest { prompt: &[7], prompt_tokens, arrival_ms, tenant, ..NewRequest::default() };
        let row = self.mirror.table.insert(&new).unwrap();
        self.queues.waiting.push_back(row);
        row
    }

    /// A step at `now_ms` with these keys, by request; `left_out` get nothing.
    fn step(&mut self, now_ms: f64, key: impl Fn(&RequestState) -> f32, budget: Option<u32>, left_out: &[RowId]) {
        let now_ms = self.mirror.hold_time(now_ms);
        let free = self.seats.saturating_sub(self.queues.running.len());
        let Queues { running, waiting, .. } = &mut self.queues;
        self.facts = EngineFacts { now_ms, free_seats: free as u32, waiting: waiting.len() as u32, ..self.facts };
        let window = if free > 0 { &*waiting.make_contiguous() } else { &[] };
        self.mirror.begin_step(&self.facts, running, window);
        let candidates: Vec<RowId> = running.iter().chain(window).copied().collect();
        let keys = candidates.iter().map(|row| key(&self.mirror.table[*row])).collect();
        let token_caps = if left_out.is_empty() {
            Vec::new()
        } else {
            candidates.iter().map(|row| if left_out.contains(row) { 0 } else { u32::MAX }).collect()
        };
        let decision = Decision { keys, token_budget: budget, token_caps, ..Decision::default() };
        let table = &self.mirror.table;
        let plan = self.planner.plan(table, &self.facts, running, window, &decision, 2000.0).clone();
        let mut step = TableStep::new(table, 1).admitting(self.admits);
        self.queues.carry_out(&plan, self.seats, &mut step);
        let TableStep { admitted, given, .. } = step;
        admitted.into_iter().for_each(|row| self.mirror.admitted(row, 0));
        let tokens = self.mirror.scheduled(now_ms, given.iter().copied());
        self.planner.settle(&mut self.mirror.table, tokens, now_ms);
    }

    /// The step's tokens arrive: one for each running request that has computed all that it knows.
    fn tokens(&mut self, now_ms: f64, token: u32) {
        self.mirror.hold_time(now_ms);
        for row in &self.queues.running {
            let request = &self.mirror.table[*row];
            let known = request.prompt_tokens() + request.think_tokens() + request.output_tokens();
            if request.computed_tokens() >= known {
                self.mirror.table.generated(*row, &[token], &mut Vec::new());
            }
        }
    }

    fn preempt(&mut self, row: RowId) {
        self.mirror.preempted(row);
        self.queues.running.retain(|of| *of != row);
        self.queues.waiting.push_front(row);
    }

    fn part(&self, row: RowId, part: Part) -> f64 {
        let table = &self.mirror.table;
        table.parts(&table[row])[Part::ALL.iter().position(|of| *of == part).unwrap()]
    }

    fn sum(&self, row: RowId) -> f64 {
        self.mirror.table.parts(&self.mirror.table[row]).iter().sum()
    }
}

fn arrival(request: &RequestState) -> f32 {
    request.arrival_ms() as f32
}

#[test]
fn a_life_without_others_is_arrival_prefill_thinking_and_output() {
    let mut engine = Engine::new(4, 64);
    let row = engine.arrive(3.0, 100, "");
    engine.step(10.0, arrival, None, &[]);
    engine.step(20.0, arrival, None, &[]);
    engine.tokens(30.0, ANY);
    engine.step(31.0, arrival, None, &[]);
    engine.tokens(40.0, THINK_END);
    engine.step(41.0, arrival, None, &[]);
    engine.tokens(50.0, ANY);
    let parts = [Part::Arrival, Part::Prefill, Part::Think, Part::Output].map(|part| engine.part(row, part));
    assert_eq!(parts, [7.0, 20.0, 10.0, 10.0]);
    assert!((engine.sum(row) - 47.0).abs() < 1e-9);
}

#[test]
fn a_wait_has_the_causes_of_its_steps() {
    let mut engine = Engine::new(1, 64);
    let first = engine.arrive(0.0, 64, "");
    let second = engine.arrive(0.0, 10, "");
    engine.step(10.0, arrival, None, &[]);
    engine.tokens(20.0, ANY);
    engine.step(20.0, arrival, None, &[]);
    // The seat is taken for 20 ms; then one is free, but the step's tokens are used up, then KV blocks are short.
    engine.seats = 2;
    engine.facts.token_budget = 1;
    engine.step(30.0, arrival, None, &[]);
    engine.facts.token_budget = 64;
    engine.facts.free_blocks = 0;
    engine.admits = Admits::Nobody;
    engine.step(40.0, arrival, None, &[]);
    engine.admits = Admits::Parts;
    engine.facts.free_blocks = 1000;
    assert_eq!(engine.queues.waiting, [second]);
    engine.step(50.0, arrival, None, &[]);
    let causes = [Part::Arrival, Part::Seat, Part::Budget, Part::Blocks].map(|part| engine.part(second, part));
    assert_eq!(causes, [10.0, 20.0, 10.0, 10.0]);
    assert!((engine.sum(second) - 50.0).abs() < 1e-9);
    assert_eq!(engine.part(first, Part::Seat), 0.0);
}

#[test]
fn a_request_that_was_overtaken_waits_for_the_policy_and_knows_the_key() {
    let mut engine = Engine::new(1, 64);
    let long = engine.arrive(0.0, 60, "");
    let short = engine.arrive(1.0, 4, "");
    let by_length = |request: &RequestState| request.prompt_tokens() as f32;
    engine.step(10.0, by_length, None, &[]);
    engine.step(20.0, by_length, None, &[]);
    assert_eq!((engine.part(long, Part::Policy), engine.part(long, Part::Seat)), (10.0, 0.0));
    let table = &engine.mirror.table;
    let account = table[long].account();
    let overtaking = account.overtakings()[0];
    assert_eq!((overtaking.by, overtaking.rule), (table[short].number(), Rule::Key));
    assert_eq!((overtaking.own_key, overtaking.other_key), (Some(60.0), Some(4.0)));
    assert_eq!(table.admissions().next().map(|admission| admission.rule), Some(Rule::Key));
}

#[test]
fn a_late_request_knows_that_it_was_passed_over_for_those_who_can_be_in_time() {
    let mut engine = Engine::new(1, 64);
    let levels =
        "[service_levels.short]\nttfo_ms = 1\nprompt_ms_per_token = 0\nthink_ms_per_token = 0\ntenants = ['late']
        [service_levels.long]\ntenants = ['web']";
    engine.mirror.table.promise(&MeridianConfig::from_toml(levels).expect("valid").service_levels);
    let late = engine.arrive(0.0, 4, "late");
    let in_time = engine.arrive(1.0, 4, "web");
    let last_first = |request: &RequestState| -request.arrival_ms() as f32;
    engine.step(10.0, last_first, None, &[]);
    engine.step(20.0, last_first, None, &[]);
    let table = &engine.mirror.table;
    let account = table[late].account();
    assert_eq!((account.overtaken(), account.passed_over()), (1, 1));
    assert_eq!((account.overtakings()[0].by, account.overtakings()[0].rule), (table[in_time].number(), Rule::Level));
    assert_eq!(table.level_name(&table[late]), Some("short"));
}

#[test]
fn a_running_request_that_the_policy_leaves_out_is_stalled_by_it() {
    let mut engine = Engine::new(2, 64);
    let rows = [engine.arrive(0.0, 4, ""), engine.arrive(0.0, 4, "")];
    engine.step(0.0, arrival, None, &[]);
    engine.tokens(10.0, ANY);
    engine.step(10.0, arrival, None, &rows[1..]);
    engine.tokens(20.0, ANY);
    engine.step(20.0, arrival, None, &rows[1..]);
    engine.tokens(30.0, ANY);
    engine.step(30.0, arrival, None, &[]);
    assert_eq!([Part::Prefill, Part::Policy].map(|part| engine.part(rows[1], part)), [10.0, 20.0]);
    assert_eq!([Part::Prefill, Part::Policy].map(|part| engine.part(rows[0], part)), [10.0, 0.0]);
    assert!((engine.sum(rows[1]) - 30.0).abs() < 1e-9);
}

#[test]
fn a_preempted_request_waits_and_computes_again() {
    let mut engine = Engine::new(1, 64);
    let row = engine.arrive(0.0, 4, "");
    engine.step(0.0, arrival, None, &[]);
    engine.tokens(10.0, ANY);
    engine.step(10.0, arrival, None, &[]);
    engine.preempt(row);
    engine.seats = 0;
    engine.step(20.0, arrival, None, &[]);
    engine.seats = 1;
    engine.step(30.0, arrival, None, &[]);
    engine.tokens(45.0, ANY);
    // It lost its place in the step that began at 10 ms.
    assert_eq!([Part::Seat, Part::Recompute].map(|part| engine.part(row, part)), [20.0, 15.0]);
    assert!((engine.sum(row) - 45.0).abs() < 1e-9);
}

#[test]
fn the_probes_of_others_have_their_share_of_a_step() {
    let mut engine = Engine::new(2, 4096);
    let row = engine.arrive(0.0, 64, "");
    let mut now_ms = 0.0;
    // 10 ms a step, and 0.1 ms a prompt token more.
    for step in 0..64u32 {
        engine.step(now_ms, arrival, None, &[]);
        let probes = if step >= 32 && step % 2 == 0 { 50 } else { 0 };
        engine.mirror.scheduled_besides(probes);
        now_ms += 10.0 + 0.1 * f64::from(probes + if step == 0 { 64 } else { 0 });
        engine.tokens(now_ms, ANY);
    }
    engine.step(now_ms, arrival, None, &[]);
    let probes_ms = engine.part(row, Part::Probes);
    // 16 steps of 5 ms; the first ones teach the model what a token costs.
    assert!((40.0..=85.0).contains(&probes_ms), "{probes_ms}");
    assert!((engine.sum(row) - now_ms).abs() < 1e-6);
}

#[test]
fn tenants_beyond_the_limit_share_a_series() {
    let mut engine = Engine::new(8, 4096);
    engine.mirror.table.observe_latencies(Latencies::new(2));
    for (i, tenant) in ["a", "b", "c", "d", "", "a"].into_iter().enumerate() {
        engine.arrive(i as f64, 8, tenant);
    }
    engine.step(10.0, arrival, None, &[]);
    engine.tokens(20.0, ANY);
    engine.step(20.0, arrival, None, &[]);
    engine.tokens(35.0, ANY);
    let seen = engine.mirror.table.latencies().unwrap().tenants();
    let counts: Vec<_> =
        seen.iter().map(|of| (of.tenant.as_str(), of.ttft.count(), of.think_itl.count(), of.think_itl.sum)).collect();
    assert_eq!(counts, [("", 1, 1, 0.015), (OTHER_TENANTS, 2, 2, 0.03), ("a", 2, 2, 0.03), ("b", 1, 1, 0.015)]);
    let all = engine.mirror.table.latencies().unwrap().counts();
    assert_eq!((all.ttft.count(), all.think_itl.count(), all.think_itl.mean_ms()), (6, 6, Some(15.0)));
    assert_eq!((all.think_tokens, all.output_tokens, all.finished), (12, 0, 0));
}

#[test]
fn sketches_have_every_latency_of_a_request() {
    let mut engine = Engine::new(8, 4096);
    engine.mirror.table.observe_latencies(Latencies::new(0));
    let row = engine.arrive(0.0, 8, "");
    engine.step(10.0, arrival, None, &[]);
    for (now_ms, token) in [(20.0, ANY), (35.0, THINK_END), (40.0, ANY), (60.0, ANY)] {
        engine.tokens(now_ms, token);
        engine.step(now_ms, arrival, None, &[]);
    }
    let before = engine.mirror.table.latencies().unwrap().counts();
    engine.mirror.hold_time(70.0);
    engine.mirror.table.remove(row);
    let all = engine.mirror.table.latencies().unwrap().counts();
    let means = LatencyKind::ALL.map(|kind| all.of(kind).mean_ms());
    // Queue, TTFT, TTFO, TTOT, gaps of thinking, gaps of output, until the end.
    assert_eq!(means, [10.0, 20.0, 40.0, 5.0, 15.0, 20.0, 70.0].map(Some));
    assert_eq!((all.think_tokens, all.output_tokens, all.finished), (2, 2, 1));
    let since = all.since(&before).unwrap();
    assert_eq!((since.finished, since.e2e.count(), since.ttft.count()), (1, 1, 0));
}

proptest! {
    #[test]
    fn the_parts_add_up_to_the_latency(
        seats in 1..4usize,
        budget in 1..80u32,
        moves in prop::collection::vec((0..6u8, 0..200u32, 1..30u32), 1..80),
    ) {
        let mut engine = Engine::new(seats, budget);
        let mut now_ms = 0.0;
        let mut arrivals = Vec::new();
        for (what, number, ms) in moves {
            now_ms += f64::from(ms);
            match what {
                0 | 1 => {
                    let arrival_ms = now_ms - f64::from(number % 7);
                    arrivals.push((engine.arrive(arrival_ms, number + 1, ""), arrival_ms));
                }
                2 if !engine.queues.running.is_empty() => {
                    let row = engine.queues.running[number as usize % engine.queues.running.len()];
                    engine.preempt(row);
                }
                3 => {
                    let token = if number % 3 == 0 { THINK_END } else { ANY };
                    engine.tokens(now_ms, token);
                }
                4 => engine.step(now_ms, |request| -(request.number() as f32), Some(number % 40 + 1), &[]),
                5 if !engine.queues.running.is_empty() => {
                    let left_out = [engine.queues.running[number as usize % engine.queues.running.len()]];
                    engine.step(now_ms, arrival, None, &left_out);
                }
                _ => engine.step(now_ms, arrival, None, &[]),
            }
            let now_ms = engine.mirror.now_ms();
            for (row, arrival_ms) in &arrivals {
                let latency_ms = (now_ms - arrival_ms).max(0.0);
                prop_assert!((engine.sum(*row) - latency_ms).abs() < 1e-6, "{} of {latency_ms}", engine.sum(*row));
            }
        }
    }
}

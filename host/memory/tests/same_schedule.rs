//! The slot's native default inside an engine with its own queues, and `OwnQueues`, give
//! the same schedule: they are the same policy, mirror and planner.
//!
//! Where the two differ by intent is left out: vLLM serves running requests before waiting ones whatever their keys, so
//! nobody is preempted or more urgent here; and what vLLM puts off by itself is vLLM's, so the bound is far away.

use meridian_core::slot::DispatchSlot;
use meridian_core::{
    EngineFacts, Markers, MeridianScheduler, NewRequest, Queues, RowId, SchedulerConfig, TableStep, ThinkPhase, native,
};
use meridian_memory::{Grant, OwnQueues, RequestId, StepLimits};
use proptest::prelude::*;

const START: u32 = 7;
const END: u32 = 8;

struct Engine {
    scheduler: MeridianScheduler,
    queues: Queues,
}

impl Engine {
    fn new(config: &SchedulerConfig, markers: Markers) -> Self {
        let slot = DispatchSlot::new(native::default_policy(config.targets()), config.targets());
        let scheduler = MeridianScheduler::for_engine(slot, markers, config, 16);
        Self { scheduler, queues: Queues::default() }
    }

    fn step(&mut self, limits: &StepLimits) -> [Vec<Grant>; 2] {
        let Self { scheduler, queues } = self;
        let seats = (limits.max_running as usize).saturating_sub(queues.running.len());
        let candidates: Vec<RowId> = if seats > 0 { queues.waiting.iter().copied().collect() } else { Vec::new() };
        let facts = EngineFacts {
            now_ms: limits.now_ms,
            token_budget: limits.token_budget,
            free_seats: seats as u32,
            waiting: queues.waiting.len() as u32,
            decode_tokens: limits.decode_tokens,
            ..EngineFacts::default()
        };
        let plan = scheduler.plan(&facts, &queues.running, &candidates).clone();
        let table = &scheduler.mirror().table;
        let mut step = TableStep::new(table, limits.decode_tokens);
        // The scheduler's own queues keep the order of admission and arrival between steps; vLLM keeps the plan's.
        let (mut running, mut waiting) = (queues.running.clone(), queues.waiting.clone());
        queues.carry_out(&plan, limits.max_running as usize, &mut step);
        running.extend_from_slice(&queues.running[running.len()..]);
        waiting.retain(|row| queues.waiting.contains(row));
        (queues.running, queues.waiting) = (running, waiting);
        let given = step.given;
        let (mut output, mut think) = (Vec::new(), Vec::new());
        for (row, tokens) in &given {
            let request = &table[*row];
            let queue = if request.phase() == ThinkPhase::Output { &mut output } else { &mut think };
            // Both number the requests as they arrive, the table from 1.
            let id = RequestId(u64::from(request.number()) - 1);
            queue.push(Grant { request: id, tokens: *tokens });
        }
        let ran_dry = given.is_empty();
        scheduler.scheduled(limits.now_ms, given);
        if ran_dry {
            scheduler.mirror().idle();
        }
        [output, think]
    }
}

#[derive(Clone, Debug)]
enum Op {
    Submit { prompt_tokens: u32 },
    Step { token_budget: u32, max_running: u32, step_ms: f64 },
    Generate { of: prop::sample::Index, token: u32 },
    Finish { of: prop::sample::Index },
}

fn op() -> impl Strategy<Value = Op> {
    let of = any::<prop::sample::Index>;
    prop_oneof![
        2 => (1u32..300).prop_map(|prompt_tokens| Op::Submit { prompt_tokens }),
        4 => (1u32..200, 1u32..12, 0.1f64..30.0)
            .prop_map(|(token_budget, max_running, step_ms)| Op::Step { token_budget, max_running, step_ms }),
        3 => (of(), START..END + 2).prop_map(|(of, token)| Op::Generate { of, token }),
        1 => of().prop_map(|of| Op::Finish { of }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn slot_and_scheduler_agree(ops in proptest::collection::vec(op(), 1..800)) {
        let config = SchedulerConfig { max_defer_ms: 1e12, ..SchedulerConfig::default() };
        let markers = Markers::new(vec![vec![START]], vec![vec![END]], vec![]).expect("usable markers");
        let scheduler = OwnQueues::new(&config, markers.clone());
        let mut engine = Engine::new(&config, markers);
        let mut live: Vec<(RequestId, RowId)> = Vec::new();
        let (mut next, mut now_ms) = (0, 0.0);
        for op in ops {
            match op {
                Op::Submit { prompt_tokens } => {
                    let id = RequestId(next);
                    next += 1;
                    let prompt = &[START];
                    let request =
                        NewRequest { prompt, prompt_tokens, arrival_ms: now_ms, ..NewRequest::default() };
                    scheduler.submit(id, &request).unwrap();
                    let slot = engine.scheduler.mirror().table.insert(&request).unwrap();
                    engine.queues.waiting.push_back(slot);
                    live.push((id, slot));
                }
                Op::Step { token_budget, max_running, step_ms } => {
                    now_ms += step_ms;
                    let limits = StepLimits { now_ms, token_budget, max_running, ..StepLimits::default() };
                    let batch = scheduler.schedule_batch(&limits);
                    let [output, think] = engine.step(&limits);
                    prop_assert_eq!(batch.output, output);
                    prop_assert_eq!(batch.think, think);
                    prop_assert_eq!(scheduler.step_time(), engine.scheduler.step_time());
                }
                Op::Generate { of, token } if !live.is_empty() => {
                    let (id, slot) = live[of.index(live.len())];
                    if !engine.queues.running.contains(&slot) {
                        continue;
                    }
                    let [mut events, mut others] = [Vec::new(), Vec::new()];
                    scheduler.generated(id, &[token], &mut events);
                    engine.scheduler.mirror().table.generated(slot, &[token], &mut others);
                    prop_assert_eq!(events, others);
                }
                Op::Finish { of } if !live.is_empty() => {
                    let (id, slot) = live.swap_remove(of.index(live.len()));
                    scheduler.finish(id);
                    engine.scheduler.mirror().table.remove(slot);
                    engine.queues.running.retain(|other| *other != slot);
                    engine.queues.waiting.retain(|other| *other != slot);
                    if live.is_empty() {
                        engine.scheduler.mirror().idle();
                    }
                }
                Op::Generate { .. } | Op::Finish { .. } => {}
            }
        }
    }
}

//! The slot's native default inside an engine with its own queues, and `MeridianScheduler` with queues of its own, give
//! the same schedule: they are the same policy, mirror and planner.
//!
//! Where the two differ by intent is left out: vLLM serves running requests before waiting ones whatever their keys, so
//! nobody is preempted or more urgent here; and what vLLM puts off by itself is vLLM's, so the bound is far away.

use std::collections::VecDeque;

use meridian_core::types::RequestId;
use meridian_core::{
    EngineFacts, Grant, Markers, MeridianScheduler, NewRequest, RowId, SchedulerConfig, StepLimits, ThinkPhase,
};
use meridian_runtime::{DispatchEngine, DispatchSlot, native};
use proptest::prelude::*;

const START: u32 = 7;
const END: u32 = 8;

/// vLLM's use of a plan, reduced: running first, then waiting while a seat is free.
struct Engine {
    dispatch: DispatchEngine,
    running: Vec<RowId>,
    waiting: VecDeque<RowId>,
}

impl Engine {
    fn new(config: &SchedulerConfig, markers: Markers) -> Self {
        let slot = DispatchSlot::new(native::default_policy(config.targets()), config.targets());
        let dispatch = DispatchEngine::new(slot, markers, config, 16);
        Self { dispatch, running: Vec::new(), waiting: VecDeque::new() }
    }

    fn step(&mut self, limits: &StepLimits) -> [Vec<Grant>; 2] {
        let seats = (limits.max_running as usize).saturating_sub(self.running.len());
        let candidates: Vec<RowId> = if seats > 0 { self.waiting.iter().copied().collect() } else { Vec::new() };
        let facts = EngineFacts {
            now_ms: limits.now_ms,
            token_budget: limits.token_budget,
            free_seats: seats as u32,
            waiting: self.waiting.len() as u32,
            decode_tokens: limits.decode_tokens,
            ..EngineFacts::default()
        };
        let plan = self.dispatch.plan(&facts, &self.running, &candidates).clone();
        let ordered = |list: &[RowId], order: &[u32]| -> Vec<RowId> {
            (0..list.len()).map(|i| list[order.get(i).map_or(i, |from| *from as usize)]).collect()
        };
        let cap = |slot: RowId| plan.token_caps.iter().find(|(s, _)| *s == slot).map_or(u32::MAX, |(_, cap)| *cap);
        let mut left = plan.token_budget;
        let mut given = Vec::new();
        let mut queues = [Vec::new(), Vec::new()];
        let running = ordered(&self.running, &plan.running_order);
        let waiting = ordered(&candidates, &plan.waiting_order);
        let mut admitted = 0;
        for (i, slot) in running.iter().chain(&waiting).copied().enumerate() {
            let is_waiting = i >= running.len();
            if left == 0 || is_waiting && admitted == seats {
                break;
            }
            let row = &self.dispatch.table()[slot];
            let tokens = row.needed_tokens(limits.decode_tokens).min(cap(slot)).min(left);
            if tokens == 0 {
                continue;
            }
            left -= tokens;
            queues[usize::from(row.phase() != ThinkPhase::Output)].push(Grant { request: row.id(), tokens });
            given.push((slot, tokens));
            if is_waiting {
                admitted += 1;
                self.running.push(slot);
                self.waiting.retain(|waiting| *waiting != slot);
            }
        }
        if given.is_empty() {
            self.dispatch.scheduled(limits.now_ms, []);
            self.dispatch.idle();
        } else {
            self.dispatch.scheduled(limits.now_ms, given);
        }
        queues
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
        let scheduler = MeridianScheduler::new(&config, markers.clone());
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
                    let slot = engine.dispatch.table_mut().insert(id, &request).unwrap();
                    engine.waiting.push_back(slot);
                    live.push((id, slot));
                }
                Op::Step { token_budget, max_running, step_ms } => {
                    now_ms += step_ms;
                    let limits = StepLimits { now_ms, token_budget, max_running, ..StepLimits::default() };
                    let batch = scheduler.schedule_batch(&limits);
                    let [output, think] = engine.step(&limits);
                    prop_assert_eq!(batch.output, output);
                    prop_assert_eq!(batch.think, think);
                    prop_assert_eq!(scheduler.step_time(), engine.dispatch.step_time());
                }
                Op::Generate { of, token } if !live.is_empty() => {
                    let (id, slot) = live[of.index(live.len())];
                    if !engine.running.contains(&slot) {
                        continue;
                    }
                    let [mut events, mut others] = [Vec::new(), Vec::new()];
                    scheduler.generated(id, &[token], &mut events);
                    engine.dispatch.table_mut().generated(slot, &[token], &mut others);
                    prop_assert_eq!(events, others);
                }
                Op::Finish { of } if !live.is_empty() => {
                    let (id, slot) = live.swap_remove(of.index(live.len()));
                    scheduler.finish(id);
                    engine.dispatch.table_mut().remove(slot);
                    engine.running.retain(|other| *other != slot);
                    engine.waiting.retain(|other| *other != slot);
                    if live.is_empty() {
                        engine.dispatch.idle();
                    }
                }
                Op::Generate { .. } | Op::Finish { .. } => {}
            }
        }
    }
}

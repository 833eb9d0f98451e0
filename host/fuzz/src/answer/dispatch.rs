//! Whatever a policy answers, about whatever requests, a plan keeps the host's guarantees.

use meridian_core::{
    Asked, Batch, Decision, Dispatch, EngineFacts, EngineStep, FaultKind, GuardedPolicy, Markers, NewRequest, Plan,
    Planner, Queues, RequestTable, RowId, Step,
};
use std::collections::HashSet;

use super::{Scripted, length};
use crate::bytes::Bytes;

const MAX_STEPS: usize = 32;
const MAX_REQUESTS: usize = 48;

/// An engine: requests in two lists, and the clock.
struct Engine {
    table: RequestTable,
    queues: Queues,
    now_ms: f64,
}

/// Let `data` move requests about and answer for a policy, some steps long.
pub(super) fn run(mut bytes: Bytes<'_>, owns_queues: bool) {
    let mut planner = if owns_queues { Planner::owning_queues() } else { Planner::default() };
    let markers = Markers::new(vec![vec![1, 2]], vec![vec![3], vec![4, 5]], vec![6]).expect("usable markers");
    let mut engine =
        Engine { table: RequestTable::new(markers), queues: Queues::default(), now_ms: f64::from(bytes.f32()) };
    if !engine.now_ms.is_finite() {
        return;
    }
    let (answer, policy) = Scripted::<Dispatch>::boxed();
    let mut seat = GuardedPolicy::new(policy);
    for _ in 0..MAX_STEPS {
        if bytes.is_empty() {
            return;
        }
        for _ in 0..bytes.u8() % 16 {
            engine.change(&mut bytes);
        }
        let candidates = engine.queues.len();
        let given = decision(&mut bytes, candidates);
        let fits = |length: usize| length == candidates || length == 0;
        let expected_fault = !fits(given.keys.len()) || !fits(given.token_caps.len()) || !fits(given.victim_keys.len());
        answer.send(given).expect("the policy is there");
        let mut decision = Decision::default();
        let asked =
            seat.ask(&Batch { facts: &Step::default(), candidates, columns: &[], finished: &[] }, &mut decision);
        let faulted = match &asked {
            Asked::Faulted(faults) => faults.iter().any(|fault| fault.kind == FaultKind::BadAnswer),
            Asked::Decided | Asked::LeftToDefault => false,
        };
        assert_eq!(faulted, expected_fault, "{asked:?} for {candidates} candidates");
        if asked != Asked::Decided {
            decision.clear();
        }
        engine.step(&mut planner, &mut bytes, &decision);
    }
}

/// An answer: lists that fit more often than not, of any bits.
fn decision(bytes: &mut Bytes<'_>, candidates: usize) -> Decision {
    let (keys, caps, shape) = (length(bytes.u8(), candidates), length(bytes.u8(), candidates), bytes.u8());
    // A few values make ties; any bits make NaN, infinities and subnormals.
    let mut key = || if shape & 1 == 1 { f32::from(bytes.u8() % 4) } else { bytes.f32() };
    let keys = (0..keys).map(|_| key()).collect();
    let mut cap = || if shape & 2 == 2 { u32::from(bytes.u8() % 4) } else { bytes.u32() };
    let token_caps = (0..caps).map(|_| cap()).collect();
    let token_budget = match shape >> 2 & 3 {
        0 => None,
        1 => Some(0),
        2 => Some(u32::from(bytes.u8())),
        _ => Some(bytes.u32()),
    };
    let mut victim_key = || if shape & 16 == 16 { f32::from(bytes.u8() % 4) } else { bytes.f32() };
    let victim_keys = if shape & 32 == 32 { (0..candidates).map(|_| victim_key()).collect() } else { Vec::new() };
    Decision { keys, token_budget, token_caps, victim_keys }
}

impl Engine {
    /// Something happens to a request.
    fn change(&mut self, bytes: &mut Bytes<'_>) {
        let action = bytes.u8();
        let (live, place) = (self.queues.len(), bytes.u16());
        if action.is_multiple_of(8) || live == 0 {
            if live < MAX_REQUESTS {
                self.arrive(bytes);
            }
            return;
        }
        let place = usize::from(place) % live;
        let Queues { running, waiting, .. } = &mut self.queues;
        let is_running = place < running.len();
        let slot = if is_running { running[place] } else { waiting[place - running.len()] };
        match action % 8 {
            1 => {
                let was_live = self.table.get(slot).is_some();
                self.leave(slot);
                assert_eq!(self.table.remove(slot), was_live);
            }
            2 => {
                // Now and then the engine names a request that is over.
                self.table.remove(slot);
                assert!(self.table.get(slot).is_none());
            }
            3 => {
                self.table.preempted(slot);
                self.leave(slot);
                if is_running { self.queues.waiting.push_back(slot) } else { self.queues.running.push(slot) }
            }
            4 => self.table.admitted(slot, bytes.u32()),
            5 => self.table.set_computed(slot, bytes.u32()),
            6 => self.table.scheduled(slot, bytes.u32(), self.now_ms),
            _ => {
                let tokens: Vec<u32> = (0..bytes.u8() % 8).map(|_| u32::from(bytes.u8() % 8)).collect();
                self.table.generated(slot, &tokens, &mut Vec::new());
            }
        }
    }

    fn leave(&mut self, row: RowId) {
        self.queues.running.retain(|other| *other != row);
        self.queues.waiting.retain(|other| *other != row);
    }

    fn arrive(&mut self, bytes: &mut Bytes<'_>) {
        let prompt: Vec<u32> = (0..bytes.u8() % 8).map(|_| u32::from(bytes.u8() % 8)).collect();
        let request = NewRequest {
            prompt: &prompt,
            prompt_tokens: bytes.u32(),
            cached_tokens: bytes.u32(),
            max_tokens: bytes.u32(),
            max_think_tokens: bytes.u32(),
            arrival_ms: f64::from(bytes.f32()),
            deadline_ms: f64::from(bytes.f32()),
            priority: bytes.u32().cast_signed(),
            whole_prompt: bytes.u8() & 1 == 1,
            ..NewRequest::default()
        };
        match self.table.insert(&request) {
            Ok(slot) => self.queues.waiting.push_back(slot),
            Err(error) => crate::assert_one_line(&error.to_string()),
        }
    }

    /// Plan a step and carry it out.
    fn step(&mut self, planner: &mut Planner, bytes: &mut Bytes<'_>, decision: &Decision) {
        self.now_ms += f64::from(bytes.u16());
        let facts = EngineFacts {
            now_ms: self.now_ms,
            token_budget: bytes.u32(),
            free_seats: u32::from(bytes.u8()),
            decode_tokens: u32::from(bytes.u8()),
            ..EngineFacts::default()
        };
        let max_defer_ms = f32::from(bytes.u16()) + 1.0;
        let Queues { running, waiting, .. } = &mut self.queues;
        let waiting = waiting.make_contiguous();
        let plan = planner.plan(&self.table, &facts, running, waiting, decision, max_defer_ms).clone();
        assert_is_order(&plan.running_order, running.len());
        assert_is_order(&plan.waiting_order, waiting.len());
        self.check(&facts, &plan);
        let max_running = self.queues.running.len() + facts.free_seats as usize;
        let (now_ms, decode_tokens) = (self.now_ms, facts.decode_tokens);
        self.queues.carry_out(&plan, max_running, &mut Served { table: &mut self.table, bytes, now_ms, decode_tokens });
        planner.settle(&mut self.table, bytes.u32(), self.now_ms);
    }

    fn check(&self, facts: &EngineFacts, plan: &Plan) {
        assert!((1..=facts.token_budget.max(1)).contains(&plan.token_budget), "{plan:?} for {facts:?}");
        let mut capped = HashSet::new();
        for (slot, cap) in &plan.token_caps {
            let Queues { running, waiting, .. } = &self.queues;
            assert!(running.contains(slot) || waiting.contains(slot), "{slot:?} is no candidate");
            assert!(capped.insert(slot), "{slot:?} is capped twice");
            let needed = self.table.get(*slot).map(|row| row.needed_tokens(facts.decode_tokens));
            assert!(needed.is_none_or(|needed| *cap < needed), "a cap of {cap} does not bind: {needed:?}");
        }
    }
}

/// A step whose KV blocks run out when `bytes` says so.
struct Served<'a, 'b> {
    table: &'a mut RequestTable,
    bytes: &'a mut Bytes<'b>,
    now_ms: f64,
    decode_tokens: u32,
}

impl EngineStep for Served<'_, '_> {
    fn needed_tokens(&mut self, row: RowId) -> u32 {
        self.table.get(row).map_or(0, |request| request.needed_tokens(self.decode_tokens))
    }

    fn grow(&mut self, _: RowId, _: u32) -> bool {
        !self.bytes.u8().is_multiple_of(8) || self.bytes.is_empty()
    }

    fn victim(&mut self, running: &[RowId]) -> Option<usize> {
        let position = usize::from(self.bytes.u8());
        (position < running.len()).then_some(position)
    }

    fn preempted(&mut self, row: RowId) {
        self.table.preempted(row);
    }

    fn admit(&mut self, row: RowId, most: u32, _: &[RowId]) -> Option<u32> {
        (!self.bytes.u8().is_multiple_of(4)).then(|| self.needed_tokens(row).clamp(1, most))
    }

    fn give(&mut self, row: RowId, tokens: u32) {
        self.table.scheduled(row, tokens, self.now_ms);
    }
}

/// Positions before, in the new order; an empty one leaves it as it is.
fn assert_is_order(order: &[u32], length: usize) {
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    let is_permutation = sorted.iter().map(|position| *position as usize).eq(0..length);
    assert!(order.is_empty() || is_permutation, "{order:?} is no permutation");
}

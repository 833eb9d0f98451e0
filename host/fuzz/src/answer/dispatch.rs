//! Whatever a policy answers, about whatever requests, a plan keeps the host's guarantees.

use std::collections::HashSet;

use meridian_core::types::RequestId;
use meridian_core::{
    Asked, Batch, Decision, Dispatch, EngineFacts, FaultKind, GuardedPolicy, Markers, NewRequest, Plan, Planner,
    RequestTable, RowId, Step,
};

use super::{Scripted, length};
use crate::bytes::Bytes;

const MAX_STEPS: usize = 32;
const MAX_REQUESTS: usize = 48;

/// An engine: requests in two lists, and the clock.
struct Engine {
    table: RequestTable,
    running: Vec<RowId>,
    waiting: Vec<RowId>,
    now_ms: f64,
    arrivals: u64,
}

/// Let `data` move requests about and answer for a policy, some steps long.
pub(super) fn run(mut bytes: Bytes<'_>, owns_queues: bool) {
    let mut planner = if owns_queues { Planner::owning_queues() } else { Planner::default() };
    let markers = Markers::new(vec![vec![1, 2]], vec![vec![3], vec![4, 5]], vec![6]).expect("usable markers");
    let mut engine = Engine {
        table: RequestTable::new(markers),
        running: Vec::new(),
        waiting: Vec::new(),
        now_ms: f64::from(bytes.f32()),
        arrivals: 0,
    };
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
        let candidates = engine.running.len() + engine.waiting.len();
        let given = decision(&mut bytes, candidates);
        let fits = |length: usize| length == candidates || length == 0;
        let expected_fault = !fits(given.keys.len()) || !fits(given.token_caps.len());
        answer.send(given).expect("the policy is there");
        let mut decision = Decision::default();
        let asked = seat.ask(&Batch { facts: &Step::default(), candidates, columns: &[] }, &mut decision);
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
    Decision { keys, token_budget, token_caps }
}

impl Engine {
    /// Something happens to a request.
    fn change(&mut self, bytes: &mut Bytes<'_>) {
        let action = bytes.u8();
        let (live, place) = (self.running.len() + self.waiting.len(), bytes.u16());
        if action.is_multiple_of(8) || live == 0 {
            if live < MAX_REQUESTS {
                self.arrive(bytes);
            }
            return;
        }
        let place = usize::from(place) % live;
        let is_running = place < self.running.len();
        let place = if is_running { place } else { place - self.running.len() };
        let (list, other) =
            if is_running { (&mut self.running, &mut self.waiting) } else { (&mut self.waiting, &mut self.running) };
        let slot = list[place];
        match action % 8 {
            1 => {
                let was_live = self.table.get(slot).is_some();
                assert_eq!(self.table.remove(list.remove(place)), was_live);
            }
            2 => {
                // Now and then the engine names a request that is over.
                self.table.remove(slot);
                assert!(self.table.get(slot).is_none());
            }
            3 => {
                self.table.preempted(slot);
                other.push(list.remove(place));
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

    fn arrive(&mut self, bytes: &mut Bytes<'_>) {
        self.arrivals += 1;
        let prompt: Vec<u32> = (0..bytes.u8() % 8).map(|_| u32::from(bytes.u8() % 8)).collect();
        let request = NewRequest {
            prompt: &prompt,
            prompt_tokens: bytes.u32(),
            cached_tokens: bytes.u32(),
            max_tokens: bytes.u32(),
            arrival_ms: f64::from(bytes.f32()),
            deadline_ms: f64::from(bytes.f32()),
            priority: bytes.u32().cast_signed(),
            tenant: "",
            whole_prompt: bytes.u8() & 1 == 1,
        };
        match self.table.insert(RequestId(self.arrivals), &request) {
            Ok(slot) => self.waiting.push(slot),
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
        let plan = planner.plan(&self.table, &facts, &self.running, &self.waiting, decision, max_defer_ms).clone();
        self.check(&facts, &plan);
        reorder(&mut self.running, &plan.running_order);
        reorder(&mut self.waiting, &plan.waiting_order);
        let admitted = bytes.below(self.waiting.len() + 1).min(facts.free_seats as usize);
        for slot in self.waiting.drain(..admitted) {
            self.table.scheduled(slot, 1, self.now_ms);
            self.running.push(slot);
        }
        planner.settle(&mut self.table, bytes.u32(), self.now_ms);
    }

    fn check(&self, facts: &EngineFacts, plan: &Plan) {
        assert!((1..=facts.token_budget.max(1)).contains(&plan.token_budget), "{plan:?} for {facts:?}");
        let mut capped = HashSet::new();
        for (slot, cap) in &plan.token_caps {
            assert!(self.running.contains(slot) || self.waiting.contains(slot), "{slot:?} is no candidate");
            assert!(capped.insert(slot), "{slot:?} is capped twice");
            let needed = self.table.get(*slot).map(|row| row.needed_tokens(facts.decode_tokens));
            assert!(needed.is_none_or(|needed| *cap < needed), "a cap of {cap} does not bind: {needed:?}");
        }
    }
}

/// Positions in the new order -> those before.
fn reorder(list: &mut Vec<RowId>, order: &[u32]) {
    if order.is_empty() {
        return;
    }
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    assert!(sorted.iter().map(|position| *position as usize).eq(0..list.len()), "{order:?} is no permutation");
    *list = order.iter().map(|from| list[*from as usize]).collect();
}

//! Made-up policies and a table of requests for the tests of the slot.
#![allow(dead_code, reason = "each test file uses a part")]

use meridian_core::slot::Contender;
use meridian_core::{
    Batch, Column, Decision, Description, Fault, FaultKind, Markers, NewRequest, Policy, RequestTable, RowId, Step,
    Targets,
};

pub const TARGETS: Targets =
    Targets { output_tpot_budget_ms: 20.0, think_tpot_budget_ms: 80.0, think_batch_multiplier: 2.5, max_defer_ms: 2e3 };

/// What a made-up policy does at a call.
pub type Behaviour = Box<dyn FnMut(&Batch<'_>, &mut Decision) -> Result<(), Fault> + Send>;

/// A policy that counts its decisions as state, and sets its number as the token budget, so that one sees who decided.
pub struct Made {
    pub description: Description,
    pub number: u32,
    pub behaviour: Option<Behaviour>,
    pub decided: u64,
    /// Snapshot of nothing.
    pub stateless: bool,
    pub refuses_state: bool,
    /// The fault of every snapshot.
    pub snapshot_fault: Option<FaultKind>,
    pub cannot_recover: bool,
    pub inputs: &'static [Column],
}

impl Made {
    pub fn new(number: u32) -> Self {
        let description = Description { name: format!("made-{number}"), ..Description::default() };
        Self {
            description,
            number,
            behaviour: None,
            decided: 0,
            stateless: false,
            refuses_state: false,
            snapshot_fault: None,
            cannot_recover: false,
            inputs: &[Column::Phase],
        }
    }

    pub fn behaving(
        number: u32,
        behaviour: impl FnMut(&Batch<'_>, &mut Decision) -> Result<(), Fault> + Send + 'static,
    ) -> Self {
        Self { behaviour: Some(Box::new(behaviour)), ..Self::new(number) }
    }

    pub fn contender(self) -> Contender {
        let sha256 = format!("{:064x}", self.number);
        Contender::new(Box::new(self), &sha256, "test")
    }
}

impl Policy for Made {
    fn description(&self) -> &Description {
        &self.description
    }

    fn inputs(&self) -> &[Column] {
        self.inputs
    }

    fn decide(&mut self, batch: &Batch<'_>, decision: &mut Decision) -> Result<(), Fault> {
        if let Some(behaviour) = &mut self.behaviour {
            return behaviour(batch, decision);
        }
        self.decided += 1;
        decision.keys = vec![0.0; batch.candidates];
        decision.token_budget = Some(self.number);
        Ok(())
    }

    fn recover(&mut self) -> Result<(), Fault> {
        if self.cannot_recover {
            return Err(Fault::new(FaultKind::Init, "it cannot start"));
        }
        self.decided = 0;
        Ok(())
    }

    fn snapshot(&mut self) -> Result<Vec<u8>, Fault> {
        if let Some(kind) = self.snapshot_fault {
            return Err(Fault::new(kind, "as made"));
        }
        Ok(if self.stateless { Vec::new() } else { self.decided.to_le_bytes().to_vec() })
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Fault> {
        if self.refuses_state {
            return Err(Fault::new(FaultKind::Init, "another kind of state"));
        }
        let state = state.try_into().map_err(|_| Fault::new(FaultKind::Init, "8 bytes"))?;
        self.decided = u64::from_le_bytes(state);
        Ok(())
    }
}

/// A fault of the given kind at every call.
pub fn faulting(number: u32, kind: FaultKind) -> Made {
    Made::behaving(number, move |_, _| Err(Fault::new(kind, "as made")))
}

/// A table with `live` requests, all running.
pub fn table(live: usize) -> (RequestTable, Vec<RowId>) {
    let mut table = RequestTable::new(Markers::default());
    let slots = (0..live)
        .map(|_| {
            let request = NewRequest { prompt_tokens: 4, ..NewRequest::default() };
            let slot = table.insert(&request).expect("finite times");
            table.scheduled(slot, 4, 0.0);
            slot
        })
        .collect();
    (table, slots)
}

pub fn step(now_ms: f64, running: usize) -> Step {
    Step { now_ms, token_budget: 4096, running: running as u32, decode_tokens: 1, ..Step::default() }
}

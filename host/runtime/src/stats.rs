use std::collections::VecDeque;
use std::time::Duration;

use meridian_core::{Fault, FaultKind};

/// Who decided a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The active policy.
    Active,
    /// The native default, because the active policy left the step to it (an empty answer).
    Default,
    /// The native default, because the active policy faulted or has no instance.
    Fallback,
}

/// A fault as it is kept for the operator.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultRecord {
    /// The step's time on the host's clock, milliseconds.
    pub now_ms: f64,
    /// How many candidates the step had.
    pub candidates: usize,
    /// What happened.
    pub fault: Fault,
}

/// Faults kept in full; all are counted.
const KEPT_FAULTS: usize = 32;

/// What a slot has done since it was made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SlotStats {
    /// Steps decided by the active policy.
    pub active: u64,
    /// Steps the active policy left to the default.
    pub default: u64,
    /// Steps the default decided because of a fault.
    pub fallback: u64,
    /// Time spent deciding: columns, call, checks and, after a fault, the default and the recovery.
    pub deciding: Duration,
    /// Longest single decision.
    pub longest: Duration,
    faults: [u64; FaultKind::ALL.len()],
    recent: VecDeque<FaultRecord>,
}

impl SlotStats {
    /// Steps decided, by whomever.
    #[must_use]
    pub fn decisions(&self) -> u64 {
        self.active + self.default + self.fallback
    }

    /// Faults of a kind.
    #[must_use]
    pub fn faults(&self, kind: FaultKind) -> u64 {
        self.faults[kind as usize]
    }

    /// The latest faults, oldest first.
    pub fn recent_faults(&self) -> impl Iterator<Item = &FaultRecord> {
        self.recent.iter()
    }

    pub(crate) fn decided(&mut self, source: Source, took: Duration) {
        match source {
            Source::Active => self.active += 1,
            Source::Default => self.default += 1,
            Source::Fallback => self.fallback += 1,
        }
        self.deciding += took;
        self.longest = self.longest.max(took);
    }

    pub(crate) fn faulted(&mut self, record: FaultRecord) {
        self.faults[record.fault.kind as usize] += 1;
        if self.recent.len() == KEPT_FAULTS {
            self.recent.pop_front();
        }
        self.recent.push_back(record);
    }
}

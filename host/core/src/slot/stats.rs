use std::time::Duration;

use super::Source;
use super::report::DECIDING_BUCKETS_US;
use crate::FaultKind;

/// Counters of a slot since its start.
///
/// ```
/// use meridian_core::slot::DispatchSlot;
/// use meridian_core::{Markers, RequestTable, SchedulerConfig, Step, native};
///
/// let targets = SchedulerConfig::default().targets();
/// let mut slot = DispatchSlot::new(native::policy("fcfs", targets, "{}")?, targets);
/// slot.decide(&Step::default(), &RequestTable::new(Markers::default()), &[], 16);
/// assert_eq!((slot.stats().active, slot.stats().fault_count()), (1, 0));
/// # Ok::<(), native::NativeError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SlotStats {
    /// Steps that the active policy decided.
    pub active: u64,
    /// Steps that the active policy left to the default.
    pub default: u64,
    /// Steps that the default decided because of a fault.
    pub fallback: u64,
    /// Time of decisions: columns, call, checks and, after a fault, the default and the recovery.
    pub deciding: Duration,
    /// Time of decisions by [`Source`].
    pub deciding_by: [Duration; 3],
    /// Longest single decision.
    pub longest: Duration,
    /// Decisions by [`Source`] and duration, in the buckets of [`DECIDING_BUCKETS_US`] and one for the longer ones.
    pub buckets: [[u64; 13]; 3],
    faults: [u64; FaultKind::ALL.len()],
}

impl SlotStats {
    /// All decided steps.
    #[must_use]
    pub fn decisions(&self) -> u64 {
        self.active + self.default + self.fallback
    }

    /// Faults of one kind.
    #[must_use]
    pub fn faults(&self, kind: FaultKind) -> u64 {
        self.faults[kind as usize]
    }

    /// Faults of every kind.
    #[must_use]
    pub fn fault_count(&self) -> u64 {
        self.faults.iter().sum()
    }

    pub(super) fn decided(&mut self, source: Source, took: Duration) {
        match source {
            Source::Active => self.active += 1,
            Source::Default => self.default += 1,
            Source::Fallback => self.fallback += 1,
        }
        self.deciding += took;
        self.deciding_by[source as usize] += took;
        self.longest = self.longest.max(took);
        let us = took.as_secs_f64() * 1e6;
        let bucket = DECIDING_BUCKETS_US.iter().position(|bound| us <= *bound).unwrap_or(DECIDING_BUCKETS_US.len());
        self.buckets[source as usize][bucket] += 1;
    }

    pub(super) fn faulted(&mut self, kind: FaultKind) {
        self.faults[kind as usize] += 1;
    }
}

//! Gives a component up that goes on faulting: in a replay nothing else does, and one that loops costs seconds each time.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use meridian_core::{Batch, Description, Fault, FaultKind, Policy, SlotKind, SlotName};

/// Faults of its own, not injected, after which a component is given up.
pub const MOST_FAULTS: usize = 3;

/// The faults of a component, seen from outside.
#[derive(Clone)]
pub struct Watch {
    slot: SlotName,
    label: String,
    faults: Arc<Mutex<Vec<Fault>>>,
}

impl Watch {
    pub(crate) fn new(slot: SlotName, label: &str) -> Self {
        Self { slot, label: label.to_owned(), faults: Arc::default() }
    }

    /// The slot that the component decides.
    #[must_use]
    pub fn slot(&self) -> SlotName {
        self.slot
    }

    /// Why it was given up; `None` when it was not.
    #[must_use]
    pub fn given_up(&self) -> Option<String> {
        self.is_given_up().then(|| self.to_string())
    }

    fn is_given_up(&self) -> bool {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).len() >= MOST_FAULTS
    }

    fn note<R>(&self, result: Result<R, Fault>) -> Result<R, Fault> {
        if let Err(fault) = &result {
            self.faults.lock().unwrap_or_else(PoisonError::into_inner).push(fault.clone());
        }
        result
    }
}

impl fmt::Display for Watch {
    /// Each fault once, with how often.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        write!(formatter, "{}: given up after {} faults: ", self.label, faults.len())?;
        let mut told: Vec<(&Fault, usize)> = Vec::new();
        for fault in faults.iter() {
            match told.iter_mut().find(|(known, _)| *known == fault) {
                Some((_, count)) => *count += 1,
                None => told.push((fault, 1)),
            }
        }
        let told: Vec<String> = told
            .into_iter()
            .map(|(fault, count)| if count == 1 { fault.to_string() } else { format!("{fault} ({count} times)") })
            .collect();
        formatter.write_str(&told.join("; "))
    }
}

/// A component that is asked until it is given up; the slot decides by its default then, without waiting for it.
pub(crate) struct Watched<K: SlotKind> {
    pub(crate) policy: Box<dyn Policy<K>>,
    pub(crate) watch: Watch,
}

impl<K: SlotKind> Policy<K> for Watched<K> {
    fn description(&self) -> &Description {
        self.policy.description()
    }

    fn inputs(&self) -> &[K::Column] {
        self.policy.inputs()
    }

    fn decide(&mut self, batch: &Batch<'_, K>, decision: &mut K::Decision) -> Result<(), Fault> {
        if self.watch.is_given_up() {
            return Err(Fault::new(FaultKind::Init, "given up"));
        }
        let decided = self.policy.decide(batch, decision);
        self.watch.note(decided.and_then(|()| K::check(batch.facts, decision, batch.candidates)))
    }

    /// Refused where a trial is, so it counts for nothing.
    fn try_out(&mut self, batch: &Batch<'_, K>, decision: &mut K::Decision) -> Result<(), Fault> {
        self.policy.try_out(batch, decision)
    }

    fn recover(&mut self) -> Result<(), Fault> {
        if self.watch.is_given_up() {
            return Err(Fault::new(FaultKind::Init, "given up"));
        }
        self.watch.note(self.policy.recover())
    }

    fn start_anew(&mut self) -> Result<(), Fault> {
        self.policy.start_anew()
    }

    fn snapshot(&mut self) -> Result<Vec<u8>, Fault> {
        self.policy.snapshot()
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Fault> {
        self.policy.restore(state)
    }
}

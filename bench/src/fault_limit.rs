//! Gives a component up that goes on faulting: in a replay nothing else does, and one that loops costs seconds each time.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use meridian_core::{Batch, Description, Fault, FaultKind, Policy, SlotKind, SlotName};

/// Faults of its own, not injected, after which a component is given up.
pub const MOST_FAULTS: usize = 3;

/// How long a component may decide, all decisions together, before its mean is held against the deadline that an engine has.
const PATIENCE: Duration = Duration::from_secs(60);

/// The faults of a component, seen from outside.
#[derive(Clone)]
pub struct Watch {
    slot: SlotName,
    label: String,
    /// Of a decision in an engine.
    deadline: Duration,
    faults: Arc<Mutex<Vec<Fault>>>,
    spent: Arc<Mutex<Spent>>,
}

#[derive(Default)]
struct Spent {
    took: Duration,
    decisions: u32,
    /// Why that is too long.
    too_long: Option<String>,
}

impl Watch {
    pub(crate) fn new(slot: SlotName, label: &str, deadline: Duration) -> Self {
        Self { slot, label: label.to_owned(), deadline, faults: Arc::default(), spent: Arc::default() }
    }

    /// A decision took so long. A busy machine makes some of them late, and 60 seconds of decisions tell.
    fn spend(&self, took: Duration) {
        let mut spent = self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        spent.took += took;
        spent.decisions = spent.decisions.saturating_add(1);
        let mean = spent.took / spent.decisions;
        if spent.took > PATIENCE && mean > self.deadline && spent.too_long.is_none() {
            spent.too_long = Some(format!(
                "{} decisions took {:.0} s, {:.1} ms each, expected at most {} ms, the slot's deadline: an engine faults them",
                spent.decisions,
                spent.took.as_secs_f64(),
                1e3 * mean.as_secs_f64(),
                1e3 * self.deadline.as_secs_f64(),
            ));
        }
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
        let too_long = self.spent.lock().unwrap_or_else(PoisonError::into_inner).too_long.is_some();
        too_long || self.faults.lock().unwrap_or_else(PoisonError::into_inner).len() >= MOST_FAULTS
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
        if let Some(why) = &self.spent.lock().unwrap_or_else(PoisonError::into_inner).too_long {
            return write!(formatter, "{}: given up: {why}", self.label);
        }
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
        let started = Instant::now();
        let decided = self.policy.decide(batch, decision);
        self.watch.spend(started.elapsed());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_component_that_is_slow_on_the_whole_is_given_up() {
        let watch = |ms: u64| {
            let watch = Watch::new(SlotName::Dispatch, "slow.wasm", Duration::from_millis(2));
            (0..31_000).for_each(|_| watch.spend(Duration::from_millis(ms)));
            watch.given_up()
        };
        // More than 60 seconds in all, but each in time.
        assert_eq!(watch(2), None);
        let why = watch(3).expect("given up");
        assert_eq!(
            why,
            "slow.wasm: given up: 20001 decisions took 60 s, 3.0 ms each, expected at most 2 ms, the slot's deadline: \
             an engine faults them"
        );
    }

    #[test]
    fn a_few_late_decisions_are_no_judgement() {
        let watch = Watch::new(SlotName::Budget, "new.wasm", Duration::from_millis(2));
        (0..5).for_each(|_| watch.spend(Duration::from_secs(10)));
        assert_eq!(watch.given_up(), None);
    }
}

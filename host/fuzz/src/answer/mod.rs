//! Answers of a policy: whatever it says in whichever slot, what the host does with it keeps the host's guarantees.

mod budget;
mod dispatch;
mod eviction;

use std::sync::mpsc::{Receiver, Sender, channel};

use meridian_core::{
    Asked, Batch, Description, Fault, FaultKind, GuardedPolicy, MeridianConfig, Policy, SlotKind, Targets,
};

use crate::bytes::Bytes;

/// Have `data` answer for a policy, in the slot that its first byte names.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let first = bytes.u8();
    match first >> 1 & 3 {
        1 => eviction::run(bytes),
        2 => budget::run(bytes),
        _ => dispatch::run(bytes, first & 1 == 1),
    }
}

/// Gives the answers it is handed.
struct Scripted<K: SlotKind> {
    description: Description,
    answers: Receiver<K::Decision>,
}

impl<K: SlotKind> Scripted<K> {
    fn boxed() -> (Sender<K::Decision>, Box<Self>) {
        let (answer, answers) = channel();
        (answer, Box::new(Self { description: Description::default(), answers }))
    }
}

impl<K: SlotKind> Policy<K> for Scripted<K> {
    fn description(&self) -> &Description {
        &self.description
    }

    fn inputs(&self) -> &[K::Column] {
        &[]
    }

    fn decide(&mut self, _: &Batch<'_, K>, decision: &mut K::Decision) -> Result<(), Fault> {
        // The latest: while the policy is in quarantine nobody takes them.
        let given = self.answers.try_iter().last();
        *decision = given.ok_or_else(|| Fault::new(FaultKind::Trap, "no answer"))?;
        Ok(())
    }

    fn recover(&mut self) -> Result<(), Fault> {
        Ok(())
    }
}

fn targets() -> Targets {
    MeridianConfig::default().scheduler.targets()
}

/// Length of a list in an answer: one that fits more often than not.
fn length(kind: u8, candidates: usize) -> usize {
    match kind % 8 {
        0 => 0,
        1 => candidates + 1,
        2 => candidates.saturating_sub(1),
        _ => candidates,
    }
}

/// Whether the host takes the answer as the batch's decision; `fits` is what the contract says of it.
fn check_asked<K: SlotKind>(facts: &K::Facts, candidates: usize, given: &K::Decision, fits: bool) -> bool {
    let (answer, policy) = Scripted::<K>::boxed();
    let mut seat = GuardedPolicy::new(policy);
    answer.send(given.clone()).expect("the policy is there");
    let mut decision = K::Decision::default();
    let asked = seat.ask(&Batch { facts, candidates, columns: &[], finished: &[] }, &mut decision);
    match &asked {
        Asked::Faulted(faults) => {
            assert!(!fits, "{given:?} is refused for {candidates} candidates: {faults:?}");
            assert_eq!(faults.len(), 1, "{faults:?}");
            assert_eq!(faults[0].kind, FaultKind::BadAnswer);
            crate::assert_one_line(&faults[0].to_string());
        }
        Asked::Decided | Asked::LeftToDefault => assert!(fits, "{given:?} is taken for {candidates} candidates"),
    }
    asked == Asked::Decided
}

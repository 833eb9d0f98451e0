use crate::{Batch, Dispatch, Fault, Policy, SlotKind};

/// A policy, and whether it can be asked. After a fault, it is restarted at once. If that fails, the next attempt
/// follows after one step, then after two, then after twice as many, up to 4,096.
///
/// ```
/// use meridian_core::{Asked, Batch, Decision, GuardedPolicy, SchedulerConfig, Step, native};
///
/// let mut policy: GuardedPolicy = GuardedPolicy::new(native::policy("fcfs", SchedulerConfig::default().targets(), "{}").unwrap());
/// let mut decision = Decision::default();
/// let batch = Batch { facts: &Step::default(), candidates: 2, columns: &[], finished: &[] };
/// assert_eq!(policy.ask(&batch, &mut decision), Asked::Decided);
/// assert_eq!(decision.keys.len(), 2);
/// ```
pub struct GuardedPolicy<K: SlotKind = Dispatch> {
    policy: Box<dyn Policy<K>>,
    recovery: Recovery,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recovery {
    Ready,
    /// Its last recovery failed; the next attempt follows after `steps` steps.
    Failed {
        steps: u32,
        left: u32,
    },
}

const MAX_BACKOFF_STEPS: u32 = 4096;

/// The outcome of asking a policy about a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// It decided; the decision is checked.
    Decided,
    /// It leaves the step to the default.
    LeftToDefault,
    /// It faulted now (a second fault is that of its recovery), or it faulted earlier (empty) and cannot be asked yet.
    Faulted(Vec<Fault>),
}

impl<K: SlotKind> GuardedPolicy<K> {
    /// A started policy.
    #[must_use]
    pub fn new(policy: Box<dyn Policy<K>>) -> Self {
        Self { policy, recovery: Recovery::Ready }
    }

    /// Ask about one batch, into `decision`; after a fault, restart the policy.
    pub fn ask(&mut self, batch: &Batch<'_, K>, decision: &mut K::Decision) -> Asked {
        K::clear(decision);
        let mut faults = Vec::new();
        match &mut self.recovery {
            Recovery::Ready => {}
            Recovery::Failed { left: 0, .. } => faults.extend(self.recover().err()),
            Recovery::Failed { left, .. } => *left -= 1,
        }
        if self.recovery != Recovery::Ready {
            return Asked::Faulted(faults);
        }
        let decided =
            self.policy.decide(batch, decision).and_then(|()| K::check(batch.facts, decision, batch.candidates));
        match decided {
            Ok(()) if K::is_decided(decision, batch.candidates) => Asked::Decided,
            Ok(()) => Asked::LeftToDefault,
            Err(fault) => {
                faults.push(fault);
                faults.extend(self.recover().err());
                Asked::Faulted(faults)
            }
        }
    }

    /// Restart the policy.
    ///
    /// # Errors
    /// It cannot be started; the next attempt follows some steps later.
    pub fn recover(&mut self) -> Result<(), Fault> {
        let recovered = self.policy.recover();
        self.recovery = match (&recovered, self.recovery) {
            (Ok(()), _) => Recovery::Ready,
            (Err(_), Recovery::Ready) => Recovery::Failed { steps: 1, left: 1 },
            (Err(_), Recovery::Failed { steps, .. }) => {
                let steps = (steps * 2).min(MAX_BACKOFF_STEPS);
                Recovery::Failed { steps, left: steps }
            }
        };
        recovered
    }

    /// Whether the policy can be asked: its last recovery, if any, has succeeded.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.recovery == Recovery::Ready
    }

    /// The policy.
    #[must_use]
    pub fn policy(&self) -> &dyn Policy<K> {
        self.policy.as_ref()
    }

    /// The policy, for a handover of its state.
    pub fn policy_mut(&mut self) -> &mut dyn Policy<K> {
        self.policy.as_mut()
    }

    /// The policy, no longer guarded.
    #[must_use]
    pub fn into_policy(self) -> Box<dyn Policy<K>> {
        self.policy
    }
}

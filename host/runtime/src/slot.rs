use std::time::Instant;

use meridian_core::{
    Batch, Decision, Description, DispatchPolicy, Fault, RequestTable, Slot, Step, Targets, check_answer, columns,
    native,
};

use crate::stats::{FaultRecord, SlotStats, Source};

/// The dispatch slot: asks the active policy, and the native default in the same step when that one does not decide.
pub struct DispatchSlot {
    active: Box<dyn DispatchPolicy>,
    default: Box<dyn DispatchPolicy>,
    recovery: Recovery,
    columns: Vec<f32>,
    decision: Decision,
    stats: SlotStats,
}

/// Whether the active policy can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recovery {
    Ready,
    /// Its last recovery failed; tried again after `steps` steps, then after twice as many, up to [`MAX_BACKOFF_STEPS`].
    Failed {
        steps: u32,
        left: u32,
    },
}

const MAX_BACKOFF_STEPS: u32 = 4096;

impl DispatchSlot {
    /// A slot whose active policy is `active` and whose default is `native:output-first` with `targets`.
    #[must_use]
    pub fn new(active: Box<dyn DispatchPolicy>, targets: Targets) -> Self {
        Self {
            active,
            default: native::default_policy(targets),
            recovery: Recovery::Ready,
            columns: Vec::new(),
            decision: Decision::default(),
            stats: SlotStats::default(),
        }
    }

    /// What the active policy says of itself.
    #[must_use]
    pub fn description(&self) -> &Description {
        self.active.description()
    }

    /// What the slot has done.
    #[must_use]
    pub fn stats(&self) -> &SlotStats {
        &self.stats
    }

    /// Decide one step over `candidates`, running ones first. Always returns a checked decision.
    pub fn decide(
        &mut self,
        step: &Step,
        table: &RequestTable,
        candidates: &[Slot],
        block_tokens: u32,
    ) -> (Source, &Decision) {
        let started = Instant::now();
        let source = match self.ask_active(step, table, candidates, block_tokens) {
            Ok(true) => Source::Active,
            Ok(false) => Source::Default,
            Err(fault) => {
                if let Some(fault) = fault {
                    self.stats.faulted(FaultRecord { now_ms: step.now_ms, candidates: candidates.len(), fault });
                    self.recover(step, candidates.len());
                }
                Source::Fallback
            }
        };
        if source != Source::Active {
            let Self { default, columns, decision, .. } = self;
            let asked = ask(default.as_mut(), step, table, candidates, block_tokens, columns, decision);
            if asked.is_err() {
                // The native default cannot fault; if it ever did, the engine's own order is a decision too.
                decision.clear();
            }
        }
        self.stats.decided(source, started.elapsed());
        (source, &self.decision)
    }

    /// `Ok(false)` when the policy leaves the step to the default, `Err(None)` when it cannot be asked.
    fn ask_active(
        &mut self,
        step: &Step,
        table: &RequestTable,
        candidates: &[Slot],
        block_tokens: u32,
    ) -> Result<bool, Option<Fault>> {
        match &mut self.recovery {
            Recovery::Ready => {}
            Recovery::Failed { left: 0, .. } => {
                self.recover(step, candidates.len());
                if self.recovery != Recovery::Ready {
                    return Err(None);
                }
            }
            Recovery::Failed { left, .. } => {
                *left -= 1;
                return Err(None);
            }
        }
        let Self { active, columns, decision, .. } = self;
        ask(active.as_mut(), step, table, candidates, block_tokens, columns, decision)?;
        Ok(candidates.is_empty() || !decision.keys.is_empty())
    }

    fn recover(&mut self, step: &Step, candidates: usize) {
        self.recovery = match self.active.recover() {
            Ok(()) => Recovery::Ready,
            Err(fault) => {
                self.stats.faulted(FaultRecord { now_ms: step.now_ms, candidates, fault });
                let steps = match self.recovery {
                    Recovery::Ready => 1,
                    Recovery::Failed { steps, .. } => (steps * 2).min(MAX_BACKOFF_STEPS),
                };
                Recovery::Failed { steps, left: steps }
            }
        };
    }
}

/// Build the columns, call, check.
fn ask(
    policy: &mut dyn DispatchPolicy,
    step: &Step,
    table: &RequestTable,
    candidates: &[Slot],
    block_tokens: u32,
    columns: &mut Vec<f32>,
    decision: &mut Decision,
) -> Result<(), Fault> {
    columns::fill(policy.inputs(), table, candidates, step.now_ms, block_tokens, columns);
    decision.clear();
    policy.decide(&Batch { step, candidates: candidates.len(), columns }, decision)?;
    check_answer(decision, candidates.len())
}

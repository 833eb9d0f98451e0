use std::collections::VecDeque;

use meridian_core::{
    Batch, Decision, Description, DispatchPolicy, Fault, RequestTable, Slot, Step, Targets, check_answer, columns,
    native,
};

use crate::control::Version;

/// A policy that may decide, with what the slot remembers of it.
pub(super) struct Seat {
    pub(super) policy: Box<dyn DispatchPolicy>,
    pub(super) version: Version,
    recovery: Recovery,
    /// When it faulted, within the window, oldest first; milliseconds.
    strikes: VecDeque<f64>,
    /// It was in quarantine: one more strike sends it back.
    on_probation: bool,
    /// How long its next quarantine lasts, milliseconds.
    pub(super) quarantine_ms: f64,
}

/// Whether a policy can be asked.
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
/// First quarantine of a version, milliseconds; each further one lasts twice as long.
pub(super) const FIRST_QUARANTINE_MS: f64 = 1_000.0;
/// Longest quarantine, milliseconds.
pub(super) const LONGEST_QUARANTINE_MS: f64 = 600_000.0;

/// How many faults within how long put a version into quarantine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StrikeLimits {
    /// Faults, at least 1.
    pub max_strikes: u32,
    /// Milliseconds within which they count.
    pub window_ms: f64,
}

impl Default for StrikeLimits {
    fn default() -> Self {
        Self { max_strikes: 3, window_ms: 60_000.0 }
    }
}

/// The candidates of one step, and the room to ask about them.
pub(super) struct Question<'a> {
    pub(super) step: &'a Step,
    pub(super) table: &'a RequestTable,
    pub(super) candidates: &'a [Slot],
    pub(super) block_tokens: u32,
    pub(super) columns: &'a mut Vec<f32>,
    pub(super) decision: &'a mut Decision,
}

impl Question<'_> {
    /// Build the columns, call, check. The decision is the policy's answer.
    pub(super) fn put_to(&mut self, policy: &mut dyn DispatchPolicy) -> Result<(), Fault> {
        let Self { step, table, candidates, block_tokens, columns, decision } = self;
        decision.clear();
        columns::fill(policy.inputs(), table, candidates, step.now_ms, *block_tokens, columns);
        policy.decide(&Batch { step, candidates: candidates.len(), columns }, decision)?;
        check_answer(decision, candidates.len())
    }
}

/// What a seat made of a step.
pub(super) enum Asked {
    /// It decided.
    Decided,
    /// It leaves the step to the default.
    LeftToDefault,
    /// It faulted, now (one or two faults: the second of its recovery) or earlier and cannot be asked.
    Faulted(Vec<Fault>),
}

impl Seat {
    pub(super) fn new(policy: Box<dyn DispatchPolicy>, version: Version) -> Self {
        Self {
            policy,
            version,
            recovery: Recovery::Ready,
            strikes: VecDeque::new(),
            on_probation: false,
            quarantine_ms: FIRST_QUARANTINE_MS,
        }
    }

    /// Ask about one step; after a fault become able to be asked again.
    pub(super) fn ask(&mut self, question: &mut Question<'_>) -> Asked {
        let mut faults = Vec::new();
        match &mut self.recovery {
            Recovery::Ready => {}
            Recovery::Failed { left: 0, .. } => self.recover(&mut faults),
            Recovery::Failed { left, .. } => *left -= 1,
        }
        if self.recovery != Recovery::Ready {
            return Asked::Faulted(faults);
        }
        match question.put_to(self.policy.as_mut()) {
            Ok(()) if question.candidates.is_empty() || !question.decision.keys.is_empty() => Asked::Decided,
            Ok(()) => Asked::LeftToDefault,
            Err(fault) => {
                faults.push(fault);
                self.recover(&mut faults);
                Asked::Faulted(faults)
            }
        }
    }

    /// Make a new instance; a failure is a fault too.
    pub(super) fn recover(&mut self, faults: &mut Vec<Fault>) {
        self.recovery = match self.policy.recover() {
            Ok(()) => Recovery::Ready,
            Err(fault) => {
                faults.push(fault);
                let steps = match self.recovery {
                    Recovery::Ready => 1,
                    Recovery::Failed { steps, .. } => (steps * 2).min(MAX_BACKOFF_STEPS),
                };
                Recovery::Failed { steps, left: steps }
            }
        };
    }

    /// The native default, in the place of a policy.
    pub(super) fn native_default(targets: Targets) -> Self {
        let policy = native::default_policy(targets);
        let Description { name, version, summary: _ } = policy.description().clone();
        let source = format!("native:{name}");
        Self::new(policy, Version { name, version, sha256: String::new(), source })
    }

    /// Count a fault; true when there were too many.
    pub(super) fn strike(&mut self, now_ms: f64, limits: &StrikeLimits) -> bool {
        self.forget_strikes(now_ms, limits);
        self.strikes.push_back(now_ms);
        self.on_probation || self.strikes.len() >= limits.max_strikes as usize
    }

    /// Faults that count at `now_ms`.
    pub(super) fn strikes(&self) -> u32 {
        u32::try_from(self.strikes.len()).unwrap_or(u32::MAX)
    }

    /// Forget the faults that are out of the window; a probation ends with a window without any.
    pub(super) fn forget_strikes(&mut self, now_ms: f64, limits: &StrikeLimits) {
        while self.strikes.front().is_some_and(|then_ms| now_ms - then_ms > limits.window_ms) {
            self.strikes.pop_front();
        }
    }

    /// Leave quarantine: able to be asked, nothing counts against it, but the next fault sends it back.
    pub(super) fn on_parole(mut self) -> Result<Self, (Self, Fault)> {
        self.strikes.clear();
        self.on_probation = true;
        self.recovery = Recovery::Ready;
        match self.policy.recover() {
            Ok(()) => Ok(self),
            Err(fault) => Err((self, fault)),
        }
    }
}

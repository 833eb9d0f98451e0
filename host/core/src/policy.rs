use std::fmt;

use crate::{Dispatch, SlotKind};

/// A policy's description of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// Short name.
    pub name: String,
    /// Version, free form.
    pub version: String,
    /// One sentence.
    pub summary: String,
}

/// The candidates of one decision, as a policy sees them.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a, K: SlotKind = Dispatch> {
    /// Facts about the engine.
    pub facts: &'a K::Facts,
    /// Number of candidates.
    pub candidates: usize,
    /// The columns that the policy reads: `inputs().len()` rows of `candidates` values, one row after the other.
    pub columns: &'a [f32],
    /// Numbers of requests that have ended since the batch before. Told to policies that keep state of requests: those that
    /// read the column `request`.
    pub finished: &'a [u32],
}

/// A policy of a slot, native or WebAssembly; by default, of the dispatch slot.
///
/// The slot calls it from the thread that needs the decision: for the dispatch slot, the engine's scheduling thread,
/// once per step. It may take as long as its deadline allows and must not block on anything else. After an `Err`, the
/// native default decides, and the slot calls [`Policy::recover`] before it asks again.
///
/// ```
/// use meridian_core::{Batch, Column, Decision, Description, Fault, Policy};
///
/// /// Shortest prompt first.
/// struct ShortestPrompt(Description);
///
/// impl Policy for ShortestPrompt {
///     fn description(&self) -> &Description {
///         &self.0
///     }
///     fn inputs(&self) -> &[Column] {
///         &[Column::PromptTokens]
///     }
///     fn decide(&mut self, batch: &Batch<'_>, decision: &mut Decision) -> Result<(), Fault> {
///         decision.keys.extend_from_slice(batch.columns);
///         Ok(())
///     }
///     fn recover(&mut self) -> Result<(), Fault> {
///         Ok(())
///     }
/// }
/// ```
pub trait Policy<K: SlotKind = Dispatch>: Send {
    /// The policy's description of itself.
    fn description(&self) -> &Description;

    /// The columns that it reads; fixed for its life.
    fn inputs(&self) -> &[K::Column];

    /// For the budget slot: whether verdicts depend only on measurements (a probe, or an index at a boundary) and the
    /// thresholds in force. The slot does not ask such a policy at boundaries without a measurement, and the host
    /// measures no index for it while RPDI is off.
    fn weighs_signals_alone(&self) -> bool {
        false
    }

    /// Decide one batch into `decision`, which the slot has cleared.
    ///
    /// # Errors
    /// A fault costs this decision only.
    fn decide(&mut self, batch: &Batch<'_, K>, decision: &mut K::Decision) -> Result<(), Fault>;

    /// Decide one made-up batch, before the policy sees traffic and off the deciding thread. Like [`Policy::decide`],
    /// but with more time than any honest decision takes on a busy machine.
    ///
    /// # Errors
    /// As [`Policy::decide`].
    fn try_out(&mut self, batch: &Batch<'_, K>, decision: &mut K::Decision) -> Result<(), Fault> {
        self.decide(batch, decision)
    }

    /// Make the policy able to decide again after a fault.
    ///
    /// # Errors
    /// The policy cannot be asked any more.
    fn recover(&mut self) -> Result<(), Fault>;

    /// Forget everything, off the deciding thread. Like [`Policy::recover`], but it may take as long as a start.
    ///
    /// # Errors
    /// As [`Policy::recover`].
    fn start_anew(&mut self) -> Result<(), Fault> {
        self.recover()
    }

    /// The state to keep over a swap; empty for a policy that keeps none.
    ///
    /// # Errors
    /// As [`Policy::decide`]: the policy must recover before the slot asks it again.
    fn snapshot(&mut self) -> Result<Vec<u8>, Fault> {
        Ok(Vec::new())
    }

    /// Take over another policy's snapshot.
    ///
    /// # Errors
    /// The policy did not understand the state, or faulted. It must recover, and then starts fresh.
    fn restore(&mut self, _state: &[u8]) -> Result<(), Fault> {
        Err(Fault::new(FaultKind::Init, "it takes over no state"))
    }
}

/// The kinds of fault, which are counted separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// The component trapped: unreachable, out of bounds, stack overflow, division by zero.
    Trap,
    /// It took longer than its deadline.
    Deadline,
    /// It needed more memory than it may have.
    Memory,
    /// Its answer does not fit the batch.
    BadAnswer,
    /// It could not be instantiated or refused its configuration.
    Init,
    /// A contender could not be loaded: it is not a component, not signed, or was refused in its trial.
    Load,
}

impl FaultKind {
    /// Every kind, in the order of the discriminants.
    pub const ALL: [Self; 6] = [Self::Trap, Self::Deadline, Self::Memory, Self::BadAnswer, Self::Init, Self::Load];

    /// The kind as a metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Trap => "trap",
            Self::Deadline => "deadline",
            Self::Memory => "memory",
            Self::BadAnswer => "bad-answer",
            Self::Init => "init",
            Self::Load => "load",
        }
    }
}

/// The reason why a policy did not decide a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kind that it counts as.
    pub kind: FaultKind,
    /// One line for the operator.
    pub detail: String,
}

impl Fault {
    /// A fault of `kind`.
    #[must_use]
    pub fn new(kind: FaultKind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.label(), self.detail)
    }
}

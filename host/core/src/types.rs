//! The types that the engine's parts share.

use std::fmt;

use serde::{Deserialize, Serialize};

pub use meridian_policy_sdk::Phase as ThinkPhase;

/// The effect of a token, or of the registration of a prompt, on a request's thinking.
///
/// [`PhaseEvent::EnterThink`] and [`PhaseEvent::ExitThink`] alternate, beginning with the former: a request is thinking
/// exactly when it has entered once more than it has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PhaseEvent {
    /// Thinking began: the templated prompt ends inside it, or leaves open whether the model will think.
    EnterThink,
    /// Thinking ended: the end marker is complete, or the model answers without thinking.
    ExitThink,
    /// The request has reached its limit of thinking and should be made to end. It thinks until
    /// [`PhaseEvent::ExitThink`]. Reported once per turn.
    ForceBudget,
}

impl PhaseEvent {
    /// Every event, in the order of the discriminants.
    pub const ALL: [Self; 3] = [Self::EnterThink, Self::ExitThink, Self::ForceBudget];

    /// The event as a metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::EnterThink => "enter-think",
            Self::ExitThink => "exit-think",
            Self::ForceBudget => "force-budget",
        }
    }
}

/// Importance of a KV block; the least critical goes first.
///
/// ```
/// use meridian_core::BlockTier;
///
/// assert!(BlockTier::ThinkComplete < BlockTier::ThinkActive && BlockTier::ThinkActive < BlockTier::OutputCritical);
/// assert_eq!(BlockTier::ALL.map(BlockTier::label), ["think-complete", "think-active", "output-critical"]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum BlockTier {
    /// Thinking that has ended.
    ThinkComplete = 0,
    /// Active thinking or prefill, and the cache.
    ThinkActive = 1,
    /// An answer that a user reads.
    OutputCritical = 2,
}

impl BlockTier {
    /// Every tier, in order.
    pub const ALL: [Self; 3] = [Self::ThinkComplete, Self::ThinkActive, Self::OutputCritical];

    /// The tier as a metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::ThinkComplete => "think-complete",
            Self::ThinkActive => "think-active",
            Self::OutputCritical => "output-critical",
        }
    }
}

impl fmt::Display for BlockTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// Logical name of a KV block, by its contents, wherever they are. Never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockId(pub u64);

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An entropy: measured in nats, shown to operators and policies in bits.
///
/// ```
/// use meridian_core::EntropySignal;
///
/// let coin = EntropySignal::from_nats(std::f32::consts::LN_2);
/// assert!((coin.bits() - 1.0).abs() < 1e-7);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EntropySignal {
    nats: f32,
}

impl EntropySignal {
    /// An entropy in nats.
    #[must_use]
    pub fn from_nats(nats: f32) -> Self {
        Self { nats }
    }

    /// An entropy in bits.
    #[must_use]
    pub fn from_bits(bits: f32) -> Self {
        Self { nats: (f64::from(bits) * std::f64::consts::LN_2) as f32 }
    }

    /// The entropy in nats.
    #[must_use]
    pub fn nats(self) -> f32 {
        self.nats
    }

    /// The entropy in bits.
    #[must_use]
    pub fn bits(self) -> f64 {
        f64::from(self.nats) * std::f64::consts::LOG2_E
    }
}

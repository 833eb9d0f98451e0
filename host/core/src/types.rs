//! The types that the engine's parts share.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use meridian_policy_sdk::Phase as ThinkPhase;

/// The caller's number of a request. An engine with text ids counts its requests and keeps the map; a number may be
/// reused after its request is removed.
///
/// ```
/// assert_eq!(meridian_core::RequestId(7).to_string(), "7");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The effect of a token, or of the registration of a prompt, on a request's thinking.
///
/// [`PhaseEvent::EnterThink`] and [`PhaseEvent::ExitThink`] alternate, beginning with the former: a request is thinking
/// exactly when it has entered once more than it has left.
///
/// ```
/// assert_ne!(meridian_core::PhaseEvent::EnterThink, meridian_core::PhaseEvent::ExitThink);
/// ```
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
    ///
    /// ```
    /// use meridian_core::PhaseEvent;
    ///
    /// assert_eq!(PhaseEvent::ALL.map(PhaseEvent::label), ["enter-think", "exit-think", "force-budget"]);
    /// ```
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
///
/// ```
/// assert_eq!(meridian_core::BlockId(3).to_string(), "3");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockId(pub u64);

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The place of a KV block.
///
/// ```
/// use meridian_core::BlockLocation;
///
/// assert_ne!(BlockLocation::Device { index: 1 }, BlockLocation::Remote { handle: 1 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BlockLocation {
    /// In the accelerator's memory.
    Device {
        /// Number of the block on the device.
        index: u32,
    },
    /// In the storage of the fabric.
    Remote {
        /// The fabric's name of the block.
        handle: u64,
    },
}

/// Unit of an entropy.
///
/// ```
/// assert_ne!(meridian_core::EntropyUnit::Nats, meridian_core::EntropyUnit::Bits);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EntropyUnit {
    /// Natural logarithm.
    Nats,
    /// Logarithm to base 2; 1 bit is ln 2 nats.
    #[default]
    Bits,
}

impl EntropyUnit {
    /// Number of bits in one unit.
    #[must_use]
    pub fn in_bits(self) -> f64 {
        match self {
            Self::Nats => std::f64::consts::LOG2_E,
            Self::Bits => 1.0,
        }
    }
}

/// An entropy with its unit.
///
/// ```
/// use meridian_core::EntropySignal;
///
/// let coin = EntropySignal::from_nats(std::f32::consts::LN_2);
/// assert!((coin.bits() - 1.0).abs() < 1e-7);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EntropySignal {
    /// The entropy, in `unit`.
    pub value: f32,
    /// Unit of `value`.
    pub unit: EntropyUnit,
}

impl EntropySignal {
    /// An entropy in nats.
    #[must_use]
    pub fn from_nats(value: f32) -> Self {
        Self { value, unit: EntropyUnit::Nats }
    }

    /// An entropy in bits.
    #[must_use]
    pub fn from_bits(value: f32) -> Self {
        Self { value, unit: EntropyUnit::Bits }
    }

    /// The entropy in nats; exact if that is its unit.
    #[must_use]
    pub fn nats(self) -> f64 {
        match self.unit {
            EntropyUnit::Nats => f64::from(self.value),
            EntropyUnit::Bits => f64::from(self.value) * std::f64::consts::LN_2,
        }
    }

    /// The entropy in bits; exact if that is its unit.
    #[must_use]
    pub fn bits(self) -> f64 {
        match self.unit {
            EntropyUnit::Nats => f64::from(self.value) * std::f64::consts::LOG2_E,
            EntropyUnit::Bits => f64::from(self.value),
        }
    }

    /// The entropy in `unit`.
    #[must_use]
    pub fn in_unit(self, unit: EntropyUnit) -> f64 {
        match unit {
            EntropyUnit::Nats => self.nats(),
            EntropyUnit::Bits => self.bits(),
        }
    }
}

//! The words that the engine's parts share.

use std::fmt;

use serde::{Deserialize, Serialize};

pub use meridian_policy_sdk::Phase as ThinkPhase;

/// The caller's number of a request. An engine whose ids are text counts its requests up and keeps the map; a number
/// may be used again once its request is removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What a token, or the registration of a prompt, did to a request's thinking.
///
/// [`PhaseEvent::EnterThink`] and [`PhaseEvent::ExitThink`] alternate, beginning with the former: a request is thinking
/// exactly when it has entered once more than it has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PhaseEvent {
    /// Thinking began: the templated prompt ends inside it, or leaves it open whether the model will think.
    EnterThink,
    /// Thinking ended: the end marker is complete, or the model answers without having thought.
    ExitThink,
    /// The request has thought for its limit and should be made to end. Reported once a turn.
    ForceBudget,
}

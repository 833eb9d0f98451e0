//! Many engines: reaching them, staged roll-outs and experiments.

pub mod experiment;
mod member;
mod prediction;
pub mod stats;

pub use member::{Member, MemberError, Policy, PolicySource};
pub use prediction::{Basis, PREDICTION_FORMAT, PolicyName, PredictedRatio, Prediction, PredictionError};

//! Many engines: reaching them, staged roll-outs and experiments.

mod each;
mod member;
pub mod rollout;
pub mod stats;

pub use each::{AT_A_TIME, each};
pub use member::{Member, MemberError, Policy, PolicySource};

//! Many engines: reaching them, staged roll-outs and experiments.

mod member;
pub mod stats;

pub use member::{Member, MemberError, Policy, PolicySource};

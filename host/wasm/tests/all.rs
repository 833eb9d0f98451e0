//! The tests of this crate in one binary, which is compiled and linked once.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod bulk;
mod compile;
mod complexity;
mod differential;
mod hostile;
mod machine;
mod refusals;
mod slots;
mod support;
mod trust;

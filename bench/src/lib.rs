//! Measures policies.

pub mod micro;

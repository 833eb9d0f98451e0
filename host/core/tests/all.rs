//! The tests of this crate in one binary, which is compiled and linked once.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod account;
mod answers;
mod awaited_blocks;
mod budget;
mod cached_blocks;
mod config;
mod config_reference;
mod enforce;
mod families;
mod generated;
mod guarantees;
mod handoff;
mod kept_blocks;
mod loops;
mod made;
mod phases;
mod preempt_for_waiting;
mod priority;
mod python_tables;
mod repetition;
mod service_levels;
mod slot;
mod thinking;
mod victims;
mod warm_sessions;

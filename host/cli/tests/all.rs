//! The tests of this crate in one binary, which is compiled and linked once.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[expect(dead_code, reason = "helpers of the tests of the listeners")]
#[path = "../../admin/tests/support/mod.rs"]
mod admin_support;
mod bench_early_exit;
mod bench_replay;
mod bench_results;
mod bench_trace;
mod bench_vllm;
#[path = "../../wasm/tests/support/bombs.rs"]
mod bombs;
mod compile;
mod config_and_models;
mod contract;
mod ctl;
mod ctl_all;
mod ctl_budget;
mod experiment;
mod experiment_stopped;
mod handoff;
mod pipes;
mod policy_check;
mod policy_test;
mod replay;
mod rollout;
mod support;

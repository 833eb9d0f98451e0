//! Measures policies: a simulator of vLLM engines that drives the host's own code, readers of traces, reports, and timings
//! of single decisions.

pub mod advise;
pub mod bound;
pub mod calibrate;
pub mod cases;
pub mod compare;
pub mod exit;
pub mod fault_limit;
pub mod grid;
pub mod limits;
pub mod load;
pub mod metrics;
pub mod micro;
pub mod policies;
pub mod predict;
pub mod read;
pub mod replay;
pub mod report;
pub mod results;
pub mod rollout;
pub mod sim;
pub mod steady;
pub mod switchback;
pub mod trace;
pub mod tune;
pub mod vllm;

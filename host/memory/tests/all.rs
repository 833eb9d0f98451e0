//! The tests of this crate in one binary, which is compiled and linked once.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod blocks;
mod blocks_model;
mod dispatch_policies;
mod fabric_node;
mod fabric_path;
mod fabric_wire;
mod queues;
mod remote;
mod router;
mod same_schedule;
mod same_victims;
mod support;

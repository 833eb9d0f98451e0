//! The tests of this crate in one binary, which is compiled and linked once.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod config_file;
mod controller;
mod engine;
mod insight;
mod live;
#[path = "../../core/tests/made/mod.rs"]
mod made;
mod otlp;
mod recorded;
mod recording;
mod replay;
mod replay_components;
mod sampler;
mod support;
#[path = "../../wasm/tests/support/mod.rs"]
mod wasm_support;
mod watch;
mod watch_signature;

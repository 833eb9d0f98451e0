//! The tests of this crate in one binary, which is compiled and linked once.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod cases;
mod compare_errors;
mod compare_verdicts;
mod exit_recording;
mod exit_rules;
mod grid;
mod predict;
mod report_html;
mod report_text;
mod sessions;
mod sim;
mod sim_components;
mod sim_handoff;
#[path = "support/step.rs"]
mod step;
mod support;
mod switchback;
mod trace_errors;
mod trace_formats;
mod trace_generate;
mod trace_properties;
mod trace_read;
mod zoo;

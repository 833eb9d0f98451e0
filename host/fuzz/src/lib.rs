//! What a fuzzer feeds to the host, one module a target. Each `run` takes any bytes, returns, and panics when the host
//! does what it must not.
//!
//! The targets are ordinary functions: `tests/corpus.rs` runs each over its checked-in inputs in every test run, those
//! that once found something included. `make fuzz` runs them under libFuzzer, which looks for more.
//!
//! ```
//! meridian_fuzz::config::run(b"[scheduler]\nmax_defer_ms = 'soon'");
//! ```

pub mod admin;
pub mod answer;
mod bytes;
pub mod component;
pub mod config;
pub mod fabric;
pub mod files;
pub mod handoff;
pub mod recording;
pub mod trace;

/// A target: its name, which is that of its corpus, and what it does with an input.
pub type Target = (&'static str, fn(&[u8]));

/// Every target. A new one is added here, as a `[[bin]]` and with a folder under `corpus/`.
pub const TARGETS: &[Target] = &[
    ("component", component::run),
    ("answer", answer::run),
    ("admin", admin::run),
    ("config", config::run),
    ("recording", recording::run),
    ("fabric", fabric::run),
    ("files", files::run),
    ("handoff", handoff::run),
    ("trace", trace::run),
];

/// What an operator is shown is one line, and moves no cursor.
fn assert_one_line(text: &str) {
    assert!(!text.is_empty(), "an error says nothing");
    assert!(!text.chars().any(char::is_control), "an error with control characters: {text:?}");
}

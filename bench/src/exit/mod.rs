//! `meridian bench vllm --scenario early-exit`: accuracy against think tokens, for fixed budgets and for rules that end thinking
//! early.
//!
//! Python solves problems in the real engine and writes raw rows (`python/meridian/vllm/bench/early_exit_run.py`). One run ends
//! nothing and records every probe, so every setting of every rule can be evaluated on its thoughts. Each rule's setting is chosen
//! there; what is reported is measured in the engine on other problems, and compared problem by problem.
//!
//! A rule by hand, on one recorded thought:
//!
//! ```
//! use meridian_bench::exit::{ExitRule, Thought, ThoughtPoint, evaluate};
//!
//! let probe = |think_tokens, bits, answer| ThoughtPoint { think_tokens, bits: Some(bits), answer: Some(answer), ..ThoughtPoint::default() };
//! let thought = Thought::new(vec![probe(10, 4.0, 1), probe(20, 0.1, 7), probe(30, 0.0, 7)], 7, 90, true);
//!
//! let level = ExitRule::Eat { alpha: 1.0, delta: 1.0, min_probes: 1, max_bits: 0.5 };
//! let found = evaluate(&level, &[thought]);
//! assert_eq!((found.mean_tokens(), found.accuracy(), found.fired()), (20.0, 1.0, 1));
//! ```

mod choose;
mod claims;
mod configuration;
mod document;
mod entropies;
mod experiment;
#[cfg(test)]
mod made_up;
mod offline;
mod plot;
mod recording;
mod rules;
mod stats;
mod text;

use std::ops::RangeInclusive;

pub use choose::{ChoiceMargins, ChosenRule, choose};
pub use claims::Claim;
pub use document::ExitDocument;
pub use entropies::EntropyModel;
pub use experiment::{ExitComponent, Experiment};
pub use plot::svg;
pub use recording::{ExitRecording, Thought, ThoughtPoint};
pub use rules::{ExitFamily, ExitOutcome, ExitRule, evaluate, no_limit};
pub use text::{claims, markdown, notes, table};

/// Name of the scenario, and of its files.
pub const SCENARIO: &str = "early-exit";
/// Problems of one split.
pub const PROBLEMS: RangeInclusive<usize> = 1..=100_000;
/// Problems times samples of each.
pub const SAMPLES: RangeInclusive<usize> = 1..=1_000_000;
/// Fixed budgets, each a pass over all problems.
pub const BUDGETS: RangeInclusive<usize> = 1..=64;
/// Think tokens of a fixed budget.
pub const BUDGET_TOKENS: RangeInclusive<u32> = 1..=100_000;
/// The engines' own seeds are a thousand times as large, and 32 bits wide.
pub const SEEDS: RangeInclusive<u64> = 0..=4_000_000;
/// Temperature of sampling.
pub const TEMPERATURES: RangeInclusive<f64> = 0.0..=2.0;

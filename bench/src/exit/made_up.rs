//! Results of an engine that never ran, for tests.

use std::collections::BTreeMap;

use super::choose::tuned;
use super::configuration::{PROBES, reported};
use super::document::{ExitFacts, MeasuredSetting, NONE};
use super::recording::{PassCounters, ProbeCounters, SolvedPass};
use super::{ExitDocument, ExitFamily, Thought, ThoughtPoint};
use crate::vllm::{Dtype, Machine};

pub(super) const PROBLEMS: usize = 400;

/// Thoughts whose probes turn certain, and right, after three to eight lines.
pub(super) fn thoughts() -> Vec<Thought> {
    let thought = |at: u32| {
        let known = 3 + at % 6;
        let point = |line: u32| ThoughtPoint {
            think_tokens: 6 * line,
            bits: Some(if line < known { 4.5 } else { 0.01 }),
            answer: Some(if line < known { line % 5 } else { 7 }),
            rpdi: Some(1.0),
            confidence: Some(if line < known { 0.1 } else { 0.999 }),
        };
        Thought::new((1..=16).map(point).collect(), 7, 100, true)
    };
    (0..60).map(thought).collect()
}

/// A pass of about so many think tokens a problem, of which that share in a thousand is right.
fn pass(budget: Option<u32>, tokens: u32, right: usize, probes: u64) -> SolvedPass {
    // 7 and 400 have no common factor: every problem has another remainder.
    let place = |at: usize| (at * 7 + tokens as usize) % PROBLEMS;
    let tokens_of = |at: usize| budget.unwrap_or(999).min(tokens - 5 + (place(at) % 11) as u32);
    let think_tokens: Vec<Vec<u32>> = (0..PROBLEMS).map(|at| vec![tokens_of(at)]).collect();
    let all = think_tokens.iter().flatten().copied().map(u64::from).sum::<u64>();
    SolvedPass {
        budget,
        wall_s: all as f64 / 1e3 + probes as f64 / 1e4,
        think_tokens,
        right: (0..PROBLEMS).map(|at| vec![u8::from(1000 * place(at) < right * PROBLEMS)]).collect(),
        generated_tokens: all + 2 * PROBLEMS as u64,
        unended: 1,
        counters: PassCounters {
            forced: [("eat".to_owned(), 9)].into(),
            missed: 0,
            probes: ProbeCounters { asked: probes, done: probes, dropped: 0 },
            probe_tokens: 2 * probes,
        },
    }
}

pub(super) fn document() -> ExitDocument {
    let tuning = tuned(&thoughts()).expect("probes");
    let setting = |name: &str, title: &str, pass| MeasuredSetting { name: name.into(), title: title.into(), pass };
    let mut measured = vec![setting(NONE, "no limit", pass(None, 100, 950, 0))];
    for (tokens, right) in [(16, 200), (40, 600), (56, 930)] {
        measured.push(setting(
            &format!("fixed-{tokens}"),
            &format!("fixed budget {tokens}"),
            pass(Some(tokens), 100, right, 0),
        ));
    }
    measured.push(setting(PROBES, "probes, nothing ended", pass(None, 100, 950, 500)));
    for family in ExitFamily::ALL {
        let probes = if family == ExitFamily::Rpdi { 0 } else { 500 };
        measured.push(setting(family.key(), family.title(), pass(None, 40, 950, probes)));
    }
    let facts = ExitFacts {
        problems: PROBLEMS,
        tune: 60,
        repeats: 1,
        budgets: vec![16, 40, 56],
        temperature: 0.6,
        dtype: Dtype::Float32,
        seed: 1,
        machine: Machine { vllm: "0.0".into(), cpu: "a processor".into(), cores: 2, python: "3.0".into() },
        engine_settings: reported(&tuning.choices),
    };
    ExitDocument::new(facts, tuning, measured, BTreeMap::from([("trap".to_owned(), 0)])).expect("the same problems")
}

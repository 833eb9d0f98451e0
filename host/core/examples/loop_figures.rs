//! Where do planted loops end, which ordinary thoughts look like loops, and what does it cost to look? One JSON object a
//! line.
//!
//!     loop_figures THOUGHTS.jsonl
//!
//! A line of the file is a thought, `{"kind": "code", "tokens": [1, 2, 3]}`. Every thought, and every planted loop, goes
//! through the budgets of an engine token by token, as vLLM's would.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement, not a service")]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

use meridian_core::budget::{
    ClientBudget, EndRules, Load, Order, Repeated, Repetition, ThinkBudgets, ThinkSettings, Thresholds,
};
use meridian_core::slot::BudgetSlot;
use meridian_core::{Budget, Markers, MeridianConfig, NewRequest, RequestTable, native};
use serde::Deserialize;

const PLANTED: u32 = 500;
const LONGEST_PERIOD: u32 = 200;
const VOCABULARY: u32 = 150_000;
const ROUNDS: usize = 7;
/// Markers of the engine here: no thought has them.
const START: u32 = 1 << 30;
const END: u32 = START + 1;

#[derive(Deserialize)]
struct Thought {
    kind: String,
    tokens: Vec<u32>,
}

/// Numbers that look random (Knuth's MMIX).
struct Random(u64);

impl Random {
    fn below(&mut self, most: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(most)) as u32
    }

    fn tokens(&mut self, count: u32) -> Vec<u32> {
        (0..count).map(|_| self.below(VOCABULARY)).collect()
    }
}

/// Number of tokens of this thought after which its end is forced, if it is.
fn end_of(thought: impl Iterator<Item = u32>) -> Option<u32> {
    let markers = Markers::new(vec![vec![START]], vec![vec![END]], vec![]).unwrap();
    let targets = MeridianConfig::default().scheduler.targets();
    let mut slot = BudgetSlot::new(native::policy::<Budget>("eat-rpdi", targets, "{}").unwrap(), targets);
    let configured = Thresholds { min_think_tokens: 0, max_think_tokens: 1 << 24, ..Thresholds::default() };
    let rules = EndRules::new(markers.clone(), vec![]).unwrap();
    let settings = ThinkSettings { configured, ends_loops: true, ..ThinkSettings::new(rules) };
    let (mut table, mut budgets) = (RequestTable::new(markers), ThinkBudgets::new(settings));
    let request = NewRequest { prompt: &[START], max_tokens: u32::MAX, ..NewRequest::default() };
    let row = table.insert(&request).unwrap();
    budgets.enroll(&mut table, row, "thought", ClientBudget::default());
    let mut events = Vec::new();
    thought.into_iter().find_map(|token| {
        budgets.generated(&mut table, &[(row, token)], &mut events);
        let orders = budgets.decide(&mut table, &mut slot, Load::default());
        Order::read_all(orders).find_map(|order| match order {
            Order::Limit { from, max_think_tokens: 0, .. } => Some(from),
            _ => None,
        })
    })
}

fn say(name: &str, value: f64, unit: &str) {
    println!("{}", serde_json::json!({ "name": name, "value": value, "unit": unit }));
}

fn planted() {
    let mut random = Random(23);
    let (mut ended, mut early, mut worst) = (0, 0, 0);
    for _ in 0..PLANTED {
        let before = random.below(3000);
        let before = random.tokens(before);
        let period = 1 + random.below(LONGEST_PERIOD);
        let unit = random.tokens(period);
        let certain = before.len() as u32 + period + Repeated::LOOP_TOKENS.max(Repeated::LOOP_REPEATS * period);
        let end = end_of(before.iter().chain(unit.iter().cycle()).copied().take(10_000));
        early += u32::from(end.is_some_and(|end| end < certain));
        let late = end.map_or(u32::MAX, |end| end.saturating_sub(certain));
        ended += u32::from(late <= 64);
        worst = worst.max(late);
    }
    say("planted loops of 1 to 200 tokens: ended within 64 tokens of certainty", f64::from(ended), "of 500");
    say("planted loops: tokens from certainty to the forced end, worst", f64::from(worst), "tokens");
    say("planted loops: ended before certainty", f64::from(early), "of 500");
}

/// The longest repetition, over the one that makes a loop certain.
fn certainty(tokens: &[u32]) -> f64 {
    let mut repetition = Repetition::default();
    let parts = tokens.iter().map(|token| {
        repetition.push(*token);
        let Repeated { tokens, period } = repetition.found();
        f64::from(tokens) / f64::from(Repeated::LOOP_TOKENS.max(Repeated::LOOP_REPEATS * period))
    });
    parts.fold(0.0, f64::max)
}

fn false_alarms(thoughts: &[Thought]) {
    let mut kinds: BTreeMap<&str, (u32, u32, usize)> = BTreeMap::new();
    let mut nearest = 0.0_f64;
    for Thought { kind, tokens } in thoughts {
        let (count, alarms, longest) = kinds.entry(kind).or_default();
        *count += 1;
        *alarms += u32::from(end_of(tokens.iter().copied()).is_some());
        *longest = tokens.len().max(*longest);
        nearest = nearest.max(certainty(tokens));
    }
    let alarms: u32 = kinds.values().map(|(_, alarms, _)| alarms).sum();
    say("false alarms: ordinary thoughts", thoughts.len() as f64, "thoughts");
    say("false alarms: ended as a loop", f64::from(alarms), "thoughts");
    say("ordinary thoughts: longest repetition over that of a loop", nearest, "ratio");
    for (kind, (count, alarms, longest)) in kinds {
        say(&format!("false alarms: {count} of {kind}, up to {longest} tokens"), f64::from(alarms), "thoughts");
    }
}

/// Nanoseconds a token, the median of rounds, and the memory that is taken at the end.
fn cost(name: &str, streams: &[&[u32]]) {
    let (mut ns, mut bytes) = (Vec::new(), 0);
    let count: usize = streams.iter().map(|stream| stream.len()).sum();
    for _ in 0..ROUNDS {
        let started = Instant::now();
        for stream in streams {
            let mut repetition = Repetition::default();
            stream.iter().for_each(|token| repetition.push(*token));
            bytes = bytes.max(repetition.bytes() + size_of::<Repetition>());
            black_box(repetition.found());
        }
        ns.push(started.elapsed().as_secs_f64() * 1e9 / count as f64);
    }
    ns.sort_unstable_by(f64::total_cmp);
    say(&format!("looking for loops, {name}: cost"), ns[ROUNDS / 2], "ns a token");
    say(&format!("looking for loops, {name}: memory at most"), bytes as f64, "bytes a request");
}

fn main() {
    let path = std::env::args().nth(1).expect("loop_figures THOUGHTS.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    let thoughts: Vec<Thought> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    planted();
    false_alarms(&thoughts);
    let tokens: Vec<&[u32]> = thoughts.iter().map(|thought| &*thought.tokens).collect();
    cost("ordinary thoughts", &tokens);
    let mut random = Random(5);
    let unit = random.tokens(150);
    let looped: Vec<u32> = unit.iter().cycle().take(1 << 20).copied().collect();
    cost("a loop of 150 tokens", &[&looped]);
    let two: Vec<u32> = (0..1 << 20).map(|_| random.below(2)).collect();
    cost("random tokens of a vocabulary of two", &[&two]);
}

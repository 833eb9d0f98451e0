//! Repetitions at the end of a stream, against a naive search.

use meridian_core::budget::{ForceReason, OnLoops, Repeated, Repetition, ThinkBudget, Thresholds, Verdict};
use proptest::prelude::*;

const GRAM: usize = 24;
const REMEMBERED: usize = 1024;
const MAX_PERIOD: usize = 1000;

/// Numbers that look random (Knuth's MMIX).
struct Random(u64);

impl Random {
    fn below(&mut self, most: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(most)) as u32
    }

    fn tokens(&mut self, count: u32, vocabulary: u32) -> Vec<u32> {
        (0..count).map(|_| self.below(vocabulary)).collect()
    }
}

/// Tokens at the end of the stream that equal those `period` before, among the remembered ones.
fn equal(stream: &[u32], period: usize) -> usize {
    let most = stream.len().min(REMEMBERED) - period;
    let at = stream.len() - 1;
    (0..most).take_while(|i| stream[at - i] == stream[at - i - period]).count()
}

/// The repetition after the last token, by a search through all periods: O(n^2) for a stream.
fn naive(stream: &[u32], before: Repeated) -> Repeated {
    let at = stream.len() - 1;
    let period = before.period as usize;
    if period > 0 && stream[at] == stream[at - period] {
        return Repeated { tokens: before.tokens + 1, ..before };
    }
    let in_reach = 1..=MAX_PERIOD.min(stream.len().saturating_sub(GRAM));
    let found = in_reach.map(|period| (period, equal(stream, period))).find(|(_, tokens)| *tokens >= GRAM);
    found.map_or_else(Repeated::default, |(period, tokens)| Repeated { tokens: tokens as u32, period: period as u32 })
}

/// The shortest period of a unit that repeats back to back.
fn shortest(unit: &[u32]) -> u32 {
    let of = |period: &usize| {
        unit.len().is_multiple_of(*period) && (*period..unit.len()).all(|i| unit[i] == unit[i - period])
    };
    (1..=unit.len()).find(of).expect("its length is a period") as u32
}

/// A stream of random parts, each followed by a repetition of an earlier part of the stream.
fn streams() -> impl Strategy<Value = Vec<u32>> {
    (any::<u64>(), 2u32..6, 1usize..12).prop_map(|(seed, vocabulary, parts)| {
        let mut random = Random(seed);
        let mut stream = Vec::new();
        for _ in 0..parts {
            let count = random.below(300);
            stream.extend(random.tokens(count, vocabulary));
            let period = 1 + random.below(1100.min(stream.len() as u32).max(1)) as usize;
            for _ in 0..random.below(400) {
                let token = stream.len().checked_sub(period).map_or(0, |at| stream[at]);
                stream.push(token);
            }
        }
        stream
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn what_is_found_is_what_a_naive_search_finds(stream in streams()) {
        let (mut repetition, mut expected) = (Repetition::default(), Repeated::default());
        for (at, token) in stream.iter().enumerate() {
            repetition.push(*token);
            expected = naive(&stream[..=at], expected);
            prop_assert_eq!(repetition.found(), expected, "after {} tokens", at + 1);
        }
    }

    #[test]
    fn the_end_of_the_stream_has_the_period(stream in streams()) {
        let mut repetition = Repetition::default();
        for (at, token) in stream.iter().enumerate() {
            repetition.push(*token);
            let Repeated { tokens, period } = repetition.found();
            prop_assert!(tokens == 0 && period == 0 || tokens as usize >= GRAM && (1..=1000).contains(&period));
            prop_assert!((0..tokens as usize).all(|i| stream[at - i] == stream[at - i - period as usize]));
        }
    }

    #[test]
    fn memory_is_bounded(seed in any::<u64>(), vocabulary in 1u32..200_000, count in 0u32..20_000) {
        let mut repetition = Repetition::default();
        prop_assert_eq!(repetition.bytes(), 0);
        Random(seed).tokens(count, vocabulary).into_iter().for_each(|token| repetition.push(token));
        prop_assert!(repetition.bytes() <= 10 * 1024, "{}", repetition.bytes());
    }
}

#[test]
fn planted_loops_are_certain_at_once_and_no_earlier() {
    let mut random = Random(7);
    for planted in 0..500 {
        let vocabulary = [2, 10, 1000, 150_000][planted % 4];
        let count = random.below(2000);
        let mut stream = random.tokens(count, vocabulary);
        let start = stream.len();
        let unit = 1 + random.below(200);
        let unit = random.tokens(unit, vocabulary);
        stream.extend(unit.iter().cycle().take(6000));
        let period = shortest(&unit);
        let certain = start as u32 + period + Repeated::LOOP_TOKENS.max(Repeated::LOOP_REPEATS * period);
        let mut repetition = Repetition::default();
        let found = stream.iter().position(|token| {
            repetition.push(*token);
            repetition.found().is_loop()
        });
        let found = found.expect("it is a loop") as u32 + 1;
        // Random tokens before it may happen to fit.
        assert!((certain - 30..=certain + 64).contains(&found), "{found} for {certain}, period {period}");
    }
}

#[test]
fn lists_sums_and_tables_are_no_loops() {
    let number = |number: u32| [1000 + number / 100, 2000 + number / 10 % 10, 3000 + number % 10];
    // "1, 2, 3, ...", "1 + 2 = 3, 3 + 3 = 6, ...", rows of a table whose first cell counts.
    let list = (0..5000).flat_map(|n| [&number(n)[..], &[5, 6]].concat());
    let sum = (0..2000).flat_map(|n| [&number(n)[..], &[7], &number(n + 1), &[8], &number(2 * n + 1), &[5]].concat());
    let table = (0..500).flat_map(|n| [&[9][..], &number(n), &[9; 20], &[4]].concat());
    let border = [9, 10].into_iter().cycle().take(500);
    for stream in [list.collect::<Vec<_>>(), sum.collect(), table.collect(), border.collect()] {
        let mut repetition = Repetition::default();
        for token in stream {
            repetition.push(token);
            assert!(!repetition.found().is_loop());
        }
    }
}

fn looped(on_loops: OnLoops, thresholds: Thresholds, tokens: u32) -> ThinkBudget {
    let mut budget = ThinkBudget::new(thresholds, [].into()).expect("they are in range");
    budget.on_loops(on_loops);
    (0..tokens).for_each(|number| budget.on_token(number % 50, None, false));
    budget
}

#[test]
fn a_loop_ends_thinking_after_the_minimum_and_the_policys_own_end() {
    let thresholds = Thresholds { min_think_tokens: 2000, ..Thresholds::default() };
    assert_eq!(looped(OnLoops::End, thresholds, 1999).decide(Verdict::Default), None);
    assert!(!looped(OnLoops::End, thresholds, 1999).is_end_due());
    let mut budget = looped(OnLoops::End, thresholds, 2000);
    assert!(budget.is_end_due());
    assert_eq!(budget.end_if_due(), Some(ForceReason::Loop));
    for (verdict, reason) in [
        (Verdict::KeepThinking, ForceReason::Loop),
        (Verdict::Default, ForceReason::Loop),
        (Verdict::EndNow, ForceReason::Policy),
    ] {
        assert_eq!(looped(OnLoops::End, thresholds, 2000).decide(verdict), Some(reason));
    }
    for (on_loops, tokens) in [(OnLoops::Tell, 2950), (OnLoops::Ignore, 0)] {
        let mut budget = looped(on_loops, thresholds, 3000);
        assert_eq!((budget.decide(Verdict::Default), budget.observed().repeated.tokens), (None, tokens));
    }
}

#[test]
fn a_policy_is_asked_at_intervals_while_there_is_a_repetition() {
    let thresholds = Thresholds { eat_probe_interval_tokens: 10, ..Thresholds::default() };
    let mut budget = looped(OnLoops::Tell, thresholds, 73);
    assert!(!budget.on_repetition(), "23 tokens");
    let asked = (74..120u32).filter(|number| {
        budget.on_token((number - 1) % 50, None, false);
        let is_asked = budget.on_repetition();
        assert_eq!(is_asked, budget.observed().is_new());
        if is_asked {
            budget.decide(Verdict::Default);
        }
        is_asked
    });
    assert_eq!(asked.collect::<Vec<_>>(), [74, 84, 94, 104, 114]);
    budget.forget_repetition();
    assert_eq!(budget.observed().repeated, Repeated::default());
}

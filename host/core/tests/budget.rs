//! When thinking ends and how it is ended.

use meridian_core::budget::{Eat, Ending, ForceReason, Rpdi, ThinkBudget, Thresholds, Verdict, check_thresholds};
use meridian_core::{EntropySignal, MeridianConfig, Pattern};
use proptest::prelude::*;

fn thresholds() -> Thresholds {
    Thresholds {
        min_think_tokens: 4,
        max_think_tokens: 20,
        eat_probe_interval_tokens: 2,
        ema_alpha: 0.5,
        eat_variance_threshold: 0.01,
        eat_max_bits: 0.5,
        min_probes: 1,
        rpdi_window: 3,
        rpdi_threshold: 1.5,
    }
}

fn budget(thresholds: Thresholds) -> ThinkBudget {
    ThinkBudget::new(thresholds, [].into()).expect("the thresholds are in range")
}

fn pattern(tokens: &[u32]) -> Pattern {
    Pattern::new(tokens.to_vec()).expect("there are tokens")
}

fn think(budget: &mut ThinkBudget, tokens: u32) {
    (0..tokens).for_each(|token| budget.on_token(token, None, false));
}

#[test]
fn defaults_are_valid_and_mistakes_are_named() {
    check_thresholds(&Thresholds::default()).unwrap();
    let refusal = |thresholds: Thresholds| check_thresholds(&thresholds).unwrap_err().to_string();
    let alpha = Thresholds { ema_alpha: 0.0, ..Thresholds::default() };
    assert_eq!(refusal(alpha), "entropy.ema_alpha: 0: must be in (0, 1]");
    let delta = Thresholds { eat_variance_threshold: f64::NAN, ..Thresholds::default() };
    assert_eq!(refusal(delta), "entropy.eat_variance_threshold: NaN: must be at least 0");
    let window = Thresholds { rpdi_window: 0, ..Thresholds::default() };
    assert_eq!(refusal(window), "entropy.rpdi_window: 0: must be in 1..=65536");
    let lambda = Thresholds { rpdi_threshold: -1.0, ..Thresholds::default() };
    assert_eq!(refusal(lambda), "entropy.rpdi_threshold: -1: must be above 0");
    let interval = Thresholds { eat_probe_interval_tokens: 0, ..Thresholds::default() };
    assert_eq!(refusal(interval), "entropy.eat_probe_interval_tokens: 0: must be at least 1");
    let mut running = budget(thresholds());
    assert!(running.set_thresholds(alpha).is_err());
    assert_eq!(*running.thresholds(), thresholds());
}

#[test]
fn eat_fires_from_the_first_probe_that_may() {
    let thresholds = Thresholds { min_probes: 4, eat_variance_threshold: 1e-3, ..thresholds() };
    let mut eat = Eat::default();
    for i in 0..8 {
        eat.observe(0.2, thresholds.ema_alpha);
        assert_eq!(eat.fires(&thresholds), i >= 4, "probe {i}");
    }
    assert!(!eat.fires(&Thresholds { eat_variance_threshold: 0.0, ..thresholds }), "0 turns it off");
    eat.observe(f64::NAN, 0.5);
    assert_eq!(eat.probes(), 8, "not measured");
}

#[test]
fn eat_does_not_fire_while_the_model_is_stably_ignorant() {
    let thresholds = Thresholds { min_probes: 0, ..thresholds() };
    let mut eat = Eat::default();
    eat.observe(0.6, 0.5);
    assert!(!eat.fires(&thresholds));
    assert!(eat.fires(&Thresholds { eat_max_bits: f64::INFINITY, ..thresholds }));
}

#[test]
fn probes_are_due_at_the_interval_and_converted() {
    let mut budget = budget(thresholds());
    think(&mut budget, 1);
    assert!(!budget.probe_due());
    think(&mut budget, 1);
    assert!(budget.probe_due());
    budget.on_probe(EntropySignal::from_nats(std::f32::consts::LN_2), None);
    assert!(!budget.probe_due());
    assert!((budget.eat().mean().unwrap() - 1.0).abs() < 1e-7, "one bit");
}

#[test]
fn the_same_answer_is_counted_in_a_row() {
    let mut budget = budget(thresholds());
    assert_eq!(budget.same_answers(), 0);
    let (settled, failed) = (EntropySignal::from_bits(0.1), EntropySignal::from_bits(f32::NAN));
    for (entropy, answer, expected) in [
        (settled, Some(7), 1),
        (settled, Some(7), 2),
        (settled, Some(7), 3),
        (settled, Some(8), 1),
        (settled, Some(8), 2),
        // A probe that measured nothing is no signal, whatever it says.
        (failed, Some(9), 2),
        (failed, None, 2),
        (settled, Some(8), 3),
        (settled, None, 0),
        (settled, None, 0),
        (settled, Some(8), 1),
    ] {
        budget.on_probe(entropy, answer);
        assert_eq!((budget.same_answers(), budget.observed().same_answers), (expected, expected), "{answer:?}");
    }
    assert!(budget.observed().is_probed);
}

#[test]
fn the_confidence_is_that_of_the_latest_probe() {
    use meridian_core::budget::{BudgetCandidate, Observed};
    use meridian_core::{BudgetColumn as Column, columns};

    let mut budget = ThinkBudget::new(Thresholds::default(), [].into()).unwrap();
    assert_eq!(budget.observed().confidence, None);
    let mut probe = |confidence: Option<f32>| {
        assert!(budget.on_probe(EntropySignal::from_bits(1.0), Some(7)));
        if let Some(confidence) = confidence {
            budget.on_confidence(confidence);
        }
        budget.observed().confidence
    };
    assert_eq!(probe(Some(0.5)), Some(0.5));
    assert_eq!(probe(None), None, "that of an earlier probe does not stay");
    assert_eq!(probe(Some(1.0)), Some(1.0));
    for hostile in [f32::NAN, f32::INFINITY, -0.5, 0.0, 1.5] {
        assert_eq!(probe(Some(hostile)), None, "{hostile}");
    }
    assert!(!budget.on_probe(EntropySignal::from_nats(f32::NAN), Some(7)), "not measured");
    let observed = Observed { confidence: Some(0.25), ..Observed::default() };
    let candidates = [BudgetCandidate { observed, ..BudgetCandidate::default() }, BudgetCandidate::default()];
    let mut out = Vec::new();
    columns::fill_budget(&[Column::Confidence], &candidates, &mut out);
    assert!(out[0] == 0.25 && out[1].is_nan(), "{out:?}");
}

#[test]
fn columns_of_the_answers_and_the_deadline() {
    use meridian_core::budget::{BudgetCandidate, Observed};
    use meridian_policy_sdk::budget::Column;
    let observed = Observed { same_answers: 3, ..Observed::default() };
    let late = BudgetCandidate { slack_ms: -2.5, observed, ..BudgetCandidate::default() };
    let mut columns = Vec::new();
    let inputs = [Column::SlackMs, Column::SameAnswers];
    meridian_core::columns::fill_budget(&inputs, &[late, BudgetCandidate::default()], &mut columns);
    assert_eq!(columns, [-2.5, f32::INFINITY, 3.0, 0.0]);
}

#[test]
fn the_order_of_reasons() {
    let settled = |tokens: u32| {
        let mut budget = budget(thresholds());
        think(&mut budget, tokens);
        for _ in 0..3 {
            budget.on_probe(EntropySignal::from_bits(0.1), None);
        }
        budget
    };
    assert_eq!(settled(3).decide(Verdict::EndNow), None, "below the minimum");
    assert_eq!(settled(4).decide(Verdict::EndNow), Some(ForceReason::Policy));
    assert_eq!(settled(4).decide(Verdict::Default), Some(ForceReason::Eat));
    assert_eq!(settled(20).decide(Verdict::KeepThinking), Some(ForceReason::HardCap));
    let mut kept = settled(4);
    assert_eq!(kept.decide(Verdict::KeepThinking), None);
    assert_eq!(kept.decide(Verdict::Default), None, "the same probe does not count again");
    kept.on_probe(EntropySignal::from_bits(0.1), None);
    assert_eq!(kept.decide(Verdict::Default), Some(ForceReason::Eat));
    assert_eq!(kept.decide(Verdict::KeepThinking), Some(ForceReason::Eat), "decided");
    assert!(!kept.probe_due());
}

#[test]
fn what_was_not_measured_is_no_signal() {
    let mut budget = budget(thresholds());
    think(&mut budget, 4);
    (0..3).for_each(|_| assert!(budget.on_probe(EntropySignal::from_bits(0.1), None)));
    assert_eq!(budget.decide(Verdict::KeepThinking), None);
    for value in [f32::NAN, f32::INFINITY, -0.1] {
        budget.on_probe(EntropySignal::from_bits(value), None);
        assert_eq!(budget.decide(Verdict::Default), None, "{value}: the probes before were passed over");
    }
    assert_eq!(budget.eat().probes(), 3);
    assert!(!budget.probe_due(), "it was due, and failed");

    let mut strayed = ThinkBudget::new(thresholds(), [].into()).unwrap();
    for nats in [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 2.0, 2.0, 2.0] {
        strayed.on_token(0, Some(EntropySignal::from_nats(nats)), false);
    }
    assert!(strayed.rpdi().unwrap() > 1.5);
    for entropy in [None, Some(EntropySignal::from_nats(f32::NAN)), Some(EntropySignal::from_nats(-2.0))] {
        strayed.on_token(0, entropy, true);
        assert_eq!(strayed.decide(Verdict::Default), None);
    }
    strayed.on_token(0, Some(EntropySignal::from_nats(2.0)), true);
    assert_eq!(strayed.decide(Verdict::Default), Some(ForceReason::Rpdi));
}

#[test]
fn a_boundary_without_an_index_is_for_a_policy_alone_and_not_too_often() {
    let mut budget = budget(Thresholds { eat_probe_interval_tokens: 3, min_think_tokens: 0, ..thresholds() });
    let mut asked = Vec::new();
    for token in 1..=10 {
        think(&mut budget, 1);
        budget.on_boundary();
        if budget.observed().is_new() {
            assert!(budget.observed().is_at_boundary && !budget.has_boundary_index());
            assert_eq!(budget.decide(Verdict::Default), None, "no rule of the host's looks at it");
            asked.push(token);
        }
    }
    assert_eq!(asked, [3, 6, 9]);
    assert_eq!(budget.decide(Verdict::EndNow), Some(ForceReason::Policy));
}

#[test]
fn an_end_that_came_too_early_comes_at_the_minimum() {
    let early = |later: Verdict| {
        let mut budget = budget(thresholds());
        think(&mut budget, 1);
        assert_eq!(budget.decide(Verdict::EndNow), None);
        think(&mut budget, 1);
        assert_eq!(budget.decide(later), None);
        think(&mut budget, 2);
        budget.decide(Verdict::Default)
    };
    assert_eq!(early(Verdict::Default), Some(ForceReason::Policy));
    assert_eq!(early(Verdict::KeepThinking), None, "the policy thought better of it");
}

#[test]
fn rpdi_ends_at_a_boundary_only() {
    let mut budget = budget(thresholds());
    let mut token = |nats: f32, at_boundary: bool| {
        budget.on_token(0, Some(EntropySignal::from_nats(nats)), at_boundary);
        budget.decide(Verdict::Default)
    };
    for _ in 0..6 {
        assert_eq!(token(0.1, true), None);
    }
    for _ in 0..3 {
        assert_eq!(token(2.0, false), None);
    }
    assert_eq!(token(2.0, true), Some(ForceReason::Rpdi));
}

#[test]
fn a_pattern_interrupts_even_below_the_minimum() {
    let interrupts = [pattern(&[7, 7, 8]), pattern(&[9])].into();
    let mut budget = ThinkBudget::new(thresholds(), interrupts).unwrap();
    for token in [7, 7, 7] {
        budget.on_token(token, None, false);
        assert_eq!(budget.decide(Verdict::KeepThinking), None);
    }
    budget.on_token(8, None, false);
    assert_eq!(budget.decide(Verdict::KeepThinking), Some(ForceReason::Pattern));
}

#[test]
fn a_window_can_change_while_it_runs() {
    let mut rpdi = Rpdi::new(4);
    (1..=6).for_each(|nats| _ = rpdi.push(nats as f32));
    rpdi.set_window(2);
    assert_eq!(rpdi.value(), Some(5.5 / 3.5));
    rpdi.set_window(3);
    assert_eq!(rpdi.value(), None, "not full yet");
    rpdi.push(0.0);
    assert_eq!(rpdi.value(), Some(11.0 / 3.0 / 3.0));
}

fn ending(forced: &[u32], ends: &[&[u32]]) -> Ending {
    Ending::new(forced.to_vec(), ends.iter().map(|end| pattern(end)).collect()).expect("there is an end marker")
}

/// All that is forced when the caller obeys.
fn forced(ending: &Ending, before: &[u32]) -> Vec<u32> {
    let ending = ending.after(before);
    let mut emitted = vec![];
    while let Some(token) = ending.next(&emitted) {
        emitted.push(token);
    }
    emitted
}

#[test]
fn an_ending_skips_its_phrase_when_the_model_is_ending() {
    let ending = ending(&[50, 51, 1, 2, 3, 60], &[&[1, 2, 3]]);
    assert_eq!(forced(&ending, &[9]), [50, 51, 1, 2, 3, 60], "the phrase, the marker and the tail");
    assert_eq!(forced(&ending, &[9, 1, 2]), [3], "it was ending by itself");
    assert_eq!(forced(&ending, &[9, 1]), [50, 51, 1, 2, 3, 60], "the first token alone says nothing");
    assert_eq!(forced(&ending, &[1, 2, 3]), [0u32; 0], "it has ended");
    let run = |before: &[u32], emitted: &[u32]| ending.after(before).next(emitted);
    assert_eq!(run(&[9], &[50, 7]), Some(1), "the phrase is given up");
    assert_eq!(run(&[9], &[50, 7, 1, 2, 3]), None, "and the tail with it");
    assert_eq!(run(&[9], &[50, 51, 1, 1]), Some(2), "the second 1 begins the marker anew");
    assert_eq!(run(&[9, 1, 2], &[7]), Some(1), "the model's own beginning came to nothing");
    assert_eq!(run(&[9], &[50, 51, 1, 2, 3, 7]), None, "the answer has begun");
}

#[test]
fn any_end_marker_ends() {
    let granite = ending(&[50, 1, 2, 3], &[&[1, 2, 3], &[1, 4, 3]]);
    let run = |before: &[u32], emitted: &[u32]| granite.after(before).next(emitted);
    assert_eq!(forced(&granite, &[9, 1, 4]), [3], "the alternative that was begun");
    assert_eq!(run(&[9], &[7, 1, 4, 3]), None, "the other is complete");
    assert_eq!(run(&[9], &[7, 1, 4]), Some(3));
    assert_eq!(run(&[1, 4, 3], &[]), None);
    assert_eq!(forced(&ending(&[], &[&[1, 2, 3], &[5]]), &[9]), [1, 2, 3], "the first marker");
}

#[test]
fn a_common_first_token_does_not_suppress_the_phrase() {
    let hunyuan = [198, 524, 27963, 397, 27, 9399, 397];
    let whole: Vec<u32> = [[40, 41].as_slice(), &hunyuan].concat();
    let ending = ending(&whole, &[&hunyuan]);
    assert_eq!(forced(&ending, &[5, 198]), whole, "a line break");
    assert_eq!(forced(&ending, &[5, 198, 524]), hunyuan[2..]);
}

#[test]
fn what_ends_nothing_is_refused() {
    let refusal = |forced: &[u32], ends: Vec<Pattern>| Ending::new(forced.to_vec(), ends).unwrap_err().to_string();
    assert_eq!(refusal(&[], vec![]), "markers: no end marker to force");
    assert!(refusal(&[50], vec![pattern(&[1])]).starts_with("markers: the tokens to force have no end marker"));
}

proptest! {
    #[test]
    fn eat_is_the_recurrence(values in proptest::collection::vec(0.0f64..20.0, 1..300), alpha in 0.01f64..=1.0) {
        let mut eat = Eat::default();
        for i in 0..values.len() {
            eat.observe(values[i], alpha);
            // The mean in closed form: weights instead of the recurrence.
            let tail: f64 = (1..=i).map(|j| alpha * (1.0 - alpha).powi((i - j) as i32) * values[j]).sum();
            let mean = (1.0 - alpha).powi(i as i32) * values[0] + tail;
            prop_assert!((eat.mean().unwrap() - mean).abs() < 1e-9);
            prop_assert!(eat.variance().unwrap() >= 0.0);
        }
    }

    #[test]
    fn rpdi_is_the_ratio_of_means(values in proptest::collection::vec(0.001f32..13.0, 1..600), window in 1u32..64) {
        let mut rpdi = Rpdi::new(window);
        for t in 1..=values.len() {
            rpdi.push(values[t - 1]);
            let mean = |part: &[f32]| part.iter().copied().map(f64::from).sum::<f64>() / part.len() as f64;
            match rpdi.value() {
                None => prop_assert!(t < window as usize),
                Some(value) => {
                    let expected = mean(&values[t - window as usize..t]) / mean(&values[..t]);
                    prop_assert!((value - expected).abs() < 1e-9, "{} {}", value, expected);
                }
            }
        }
    }

    #[test]
    fn decisions_keep_the_cap_and_the_minimum(
        min in 0u32..40, more in 0u32..40, seed in any::<u64>(), interrupts in any::<bool>(),
    ) {
        let thresholds = Thresholds { min_think_tokens: min, max_think_tokens: min + more, ..thresholds() };
        let patterns: Vec<Pattern> = if interrupts { vec![pattern(&[3, 3])] } else { vec![] };
        let mut budget = ThinkBudget::new(thresholds, patterns.into()).expect("in range");
        let mut state = seed;
        for tokens in 1..=100u32 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bits = state >> 32;
            // Raw bits cover what is not a number.
            let entropy = EntropySignal::from_bits(f32::from_bits(bits as u32));
            let entropy = if bits % 3 == 0 { EntropySignal::from_nats(0.01) } else { entropy };
            budget.on_token((bits % 5) as u32, Some(entropy), bits % 2 == 0);
            if budget.probe_due() {
                budget.on_probe(entropy, Some((bits % 7) as u32));
            }
            let verdict = [Verdict::Default, Verdict::KeepThinking, Verdict::EndNow][(bits >> 8) as usize % 3];
            match budget.decide(verdict) {
                Some(reason) => {
                    let may_end = matches!(reason, ForceReason::HardCap | ForceReason::Pattern);
                    prop_assert!(tokens >= min || may_end);
                    prop_assert!(tokens <= (min + more).max(1));
                    prop_assert!(reason != ForceReason::HardCap || tokens >= min + more);
                    break;
                }
                None => prop_assert!(tokens < min + more),
            }
        }
    }

    #[test]
    fn an_ending_completes_a_marker_and_forces_nothing_but_its_tail_after(
        phrase in proptest::collection::vec(0u32..4, 0..6),
        tail in proptest::collection::vec(0u32..4, 0..3),
        ends in proptest::collection::vec(proptest::collection::vec(0u32..4, 1..6), 1..4),
        which in any::<prop::sample::Index>(),
        before in proptest::collection::vec(0u32..4, 0..12),
        strange in proptest::collection::vec(0u32..4, 0..12),
        obeyed in 0usize..12,
    ) {
        let whole = [phrase, ends[which.index(ends.len())].clone(), tail].concat();
        let ends: Vec<&[u32]> = ends.iter().map(Vec::as_slice).collect();
        let ending = ending(&whole, &ends).after(&before);
        // The first place at which the stream is complete, in tokens emitted.
        let complete = |emitted: &[u32]| {
            (0..=emitted.len()).find(|at| {
                let stream = [before.as_slice(), &emitted[..*at]].concat();
                ends.iter().any(|end| stream.ends_with(end))
            })
        };
        let mut emitted = vec![];
        for _ in 0..obeyed {
            emitted.extend(ending.next(&emitted));
        }
        // Nothing was strange in half of the cases.
        if obeyed % 2 == 0 {
            emitted.extend(&strange);
        }
        let mut asked = 0;
        while let Some(token) = ending.next(&emitted) {
            if let Some(at) = complete(&emitted) {
                prop_assert!(whole.starts_with(&emitted) && token == whole[emitted.len()], "only the tail");
                prop_assert_eq!(complete(&whole), Some(at), "of a sequence that was emitted in full");
            }
            emitted.push(token);
            asked += 1;
            prop_assert!(asked <= ends.iter().map(|end| end.len()).max().unwrap().max(whole.len()));
        }
        prop_assert!(complete(&emitted).is_some());
        // The phrase is left out exactly when a marker was distinctly begun.
        let begun = |end: &&[u32]| (1..end.len()).any(|n| before.ends_with(&end[..n]) && (n >= 2 || n + 1 == end.len()));
        let first = ending.next(&[]);
        if complete(&[]).is_some() {
            prop_assert_eq!(first, None);
        } else if ends.iter().any(begun) {
            prop_assert!(ends.iter().any(|end| (1..end.len()).any(|n| before.ends_with(&end[..n]) && first == Some(end[n]))));
        } else {
            prop_assert_eq!(first, Some(whole[0]));
        }
    }
}

#[test]
fn rpdi_does_not_drift() {
    let (mut rpdi, mut values, mut state) = (Rpdi::new(512), Vec::new(), 1u64);
    for t in 1..=100_000usize {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Some enormous values, whose loss in a plain running sum would stay for good.
        let nats = if t % 10_007 == 0 { 1.0e12 } else { (state >> 40) as f32 / 2.0f32.powi(22) };
        rpdi.push(nats);
        values.push(f64::from(nats));
        if t % 997 == 0 && t >= 512 {
            let local: f64 = values[t - 512..].iter().sum::<f64>() / 512.0;
            let global: f64 = values.iter().sum::<f64>() / t as f64;
            let error = (rpdi.value().unwrap() - local / global).abs();
            assert!(error < 1e-9, "{error} after {t} tokens");
        }
    }
}

#[test]
fn the_defaults_are_those_of_the_configuration() {
    assert_eq!(MeridianConfig::default().thresholds(), Thresholds::default());
}

//! Rules that end thinking early, on hand-made thoughts: where each ends them, how right, and which setting is chosen.

use meridian_bench::exit::{
    ChoiceMargins, ExitFamily, ExitOutcome, ExitRule, Thought, ThoughtPoint, choose, evaluate, no_limit,
};
use proptest::prelude::*;

const TRUTH: u32 = 7;

/// Probes after 10, 20, ... think tokens.
fn thought(bits: &[f64], answers: &[Option<u32>], end: (u32, bool)) -> Thought {
    let probes = bits.iter().zip(answers).enumerate();
    let point = |(at, (bits, answer)): (usize, (&f64, &Option<u32>))| ThoughtPoint {
        think_tokens: 10 * (at as u32 + 1),
        bits: Some(*bits),
        answer: *answer,
        ..ThoughtPoint::default()
    };
    Thought::new(probes.map(point).collect(), TRUTH, end.0, end.1)
}

fn all(answers: &[u32]) -> Vec<Option<u32>> {
    answers.iter().copied().map(Some).collect()
}

/// Ignorant and flat for three probes, then certain of the right answer.
fn learns() -> Thought {
    thought(&[4.0, 4.0, 4.0, 1.0, 0.0, 0.0, 0.0], &all(&[1, 2, 3, 7, 7, 7, 7]), (100, true))
}

fn eat(alpha: f64, delta: f64, min_probes: u32, max_bits: f64) -> ExitRule {
    ExitRule::Eat { alpha, delta, min_probes, max_bits }
}

/// Think tokens at the end of each thought.
fn ends(rule: &ExitRule, thoughts: &[Thought]) -> Vec<u32> {
    thoughts.iter().map(|of| rule.exit(of).map_or(of.end_tokens(), |point| point.think_tokens)).collect()
}

fn found(outcome: &ExitOutcome) -> (f64, f64, u64) {
    (outcome.mean_tokens(), outcome.accuracy(), outcome.fired())
}

#[test]
fn the_published_rule_takes_flat_ignorance_for_certainty_and_the_guard_does_not() {
    let of = [learns()];
    assert_eq!(found(&evaluate(&ExitRule::published_eat(0.5, 0.1, 1), &of)), (20.0, 0.0, 1));
    // Means 4, 4, 4, 2.5, 1.25, 0.625, 0.3125; variances 0, 0, 0, 1.125, 1.34375, 0.8671875, 0.482421875.
    assert_eq!(found(&evaluate(&eat(0.5, 0.5, 1, 0.5), &of)), (70.0, 1.0, 1));
    assert_eq!(ends(&eat(0.5, 2.0, 1, 1.25), &of), [50], "not above: equal is enough");
    assert_eq!(ends(&eat(0.5, 1.34375, 1, 2.5), &of), [40]);
    assert_eq!(ends(&eat(0.5, 1.125, 1, 2.5), &of), [60], "below: equal is not");
}

#[test]
fn probes_pass_before_the_first_that_may_end_thinking() {
    let of = [learns()];
    let at = |min_probes| ends(&ExitRule::published_eat(0.5, 0.1, min_probes), &of)[0];
    assert_eq!([0, 1, 2].map(at), [10, 20, 30]);
    assert_eq!(ends(&ExitRule::published_eat(0.5, 9.0, 7), &of), [100]);
}

#[test]
fn with_alpha_1_the_level_of_the_latest_probe_decides() {
    assert_eq!(ends(&eat(1.0, 1.0, 1, 1.0), &[learns()]), [40]);
    let alphas = |family: ExitFamily| {
        let alpha = |rule| if let ExitRule::Eat { alpha, .. } = rule { alpha } else { f64::NAN };
        family.rules().into_iter().map(alpha).collect::<Vec<_>>()
    };
    assert!(alphas(ExitFamily::Level).into_iter().all(|alpha| alpha == 1.0));
    assert!(alphas(ExitFamily::Eat).into_iter().all(|alpha| alpha < 1.0));
    assert_eq!(ExitFamily::ALL.map(|family| family.rules().len()), [2940, 420, 42, 10, 8, 10, 360]);
}

#[test]
fn patience_counts_equal_answers_in_a_row() {
    let answers = [Some(7), Some(7), Some(3), Some(3), None, Some(3)];
    let of = [thought(&[1.0; 6], &answers, (100, true)), thought(&[1.0; 3], &all(&[7; 3]), (100, true))];
    assert_eq!(ends(&ExitRule::Patience { answers: 2 }, &of), [20, 20]);
    assert_eq!(found(&evaluate(&ExitRule::Patience { answers: 3 }, &of)), (65.0, 1.0, 1));
    let unknown = [thought(&[1.0; 3], &[None; 3], (50, true))];
    assert_eq!(ends(&ExitRule::Patience { answers: 2 }, &unknown), [50], "an unknown answer equals none");
}

#[test]
fn rpdi_is_above_its_threshold_at_a_boundary() {
    let boundary = |think_tokens, rpdi| ThoughtPoint { think_tokens, answer: Some(7), rpdi, ..Default::default() };
    let of = [
        Thought::new(vec![boundary(10, None), boundary(20, Some(1.5)), boundary(30, Some(2.5))], TRUTH, 100, true),
        Thought::new(vec![boundary(10, None)], TRUTH, 30, false),
    ];
    let rpdi = |threshold| ExitRule::Rpdi { threshold, window: 16 };
    assert_eq!(ends(&rpdi(1.5), &of), [30, 30]);
    assert_eq!(found(&evaluate(&rpdi(1.4), &of)), (25.0, 0.5, 1));
    assert_eq!(evaluate(&rpdi(3.0), &of).fired(), 0);
}

#[test]
fn a_boundary_borrows_the_answer_of_the_probe_at_its_place() {
    let boundary = |think_tokens| ThoughtPoint { think_tokens, rpdi: Some(3.0), ..Default::default() };
    let probe = ThoughtPoint { think_tokens: 10, bits: Some(0.5), answer: Some(7), ..Default::default() };
    let whole = Thought::new(vec![boundary(20), boundary(10), probe], TRUTH, 40, true);
    let answers: Vec<_> = whole.points().iter().map(|point| (point.think_tokens, point.answer)).collect();
    assert_eq!(answers, [(10, Some(7)), (10, Some(7)), (20, None)], "in order");
    let rule = ExitRule::Rpdi { threshold: 2.0, window: 16 };
    assert_eq!(evaluate(&rule, &[whole]).accuracy(), 1.0);
    let bare = Thought::new(vec![boundary(20)], TRUTH, 40, true);
    assert_eq!(evaluate(&rule, &[bare]).accuracy(), 0.0, "without an answer an exit counts as wrong");
}

#[test]
fn thoughts_without_points_end_by_themselves() {
    let of = [Thought::new(Vec::new(), TRUTH, 12, true), Thought::new(Vec::new(), TRUTH, 8, false)];
    for rule in
        [eat(0.5, 1.0, 1, 9.0), ExitRule::Patience { answers: 2 }, ExitRule::Rpdi { threshold: 1.0, window: 16 }]
    {
        assert_eq!(evaluate(&rule, &of), no_limit(&of));
    }
    assert_eq!(found(&no_limit(&of)), (10.0, 0.5, 0));
}

#[test]
fn what_the_engine_would_not_count_as_a_probe_is_none() {
    let of = [thought(&[f64::NAN, -0.5, f64::INFINITY, 0.0], &all(&[7; 4]), (100, true))];
    assert_eq!(ends(&eat(0.5, 1.0, 0, 9.0), &of), [40]);
    assert_eq!(ends(&ExitRule::Patience { answers: 2 }, &of), [100]);
}

fn chosen(rules: &[u32], of: &[Thought], margins: ChoiceMargins) -> (u32, bool, f64, f64) {
    let rules: Vec<ExitRule> = rules.iter().map(|answers| ExitRule::Patience { answers: *answers }).collect();
    let found = choose(&rules, of, margins).expect("settings and thoughts");
    assert_eq!(found.settings_tried, rules.len());
    let ExitRule::Patience { answers } = found.rule else { panic!("{:?}", found.rule) };
    (answers, found.within_margin, found.tokens, found.accuracy)
}

#[test]
fn the_cheapest_within_the_margin_is_chosen() {
    let mut of = vec![learns(); 199];
    of.push(thought(&[4.0, 0.0, 0.0, 0.0], &all(&[7, 3, 3, 3]), (100, true)));
    // Patience 2 and 3 end the last one wrong: 0.5 point of 200.
    let margins = |accuracy| ChoiceMargins { accuracy, ..ChoiceMargins::default() };
    assert_eq!(chosen(&[2, 3, 5], &of, margins(0.005)), (2, true, (199.0 * 50.0 + 30.0) / 200.0, 0.995));
    assert_eq!(chosen(&[2, 3, 4], &of, margins(0.004)).0, 4);
}

#[test]
fn the_more_accurate_of_what_costs_as_much_is_chosen() {
    // Patience 2 ends the last one wrong, patience 3 right, for half as many tokens again.
    let mut of = vec![thought(&[0.0; 4], &all(&[7; 4]), (100, true)); 199];
    of.push(thought(&[4.0, 0.0, 0.0, 0.0, 0.0], &all(&[3, 3, 7, 7, 7]), (100, true)));
    assert_eq!(chosen(&[2, 3], &of, ChoiceMargins::default()).0, 2);
    assert_eq!(chosen(&[2, 3], &of, ChoiceMargins { tokens: 0.6, ..ChoiceMargins::default() }).0, 3);
}

#[test]
fn the_most_accurate_is_chosen_if_none_is_within_the_margin() {
    let mut of = vec![thought(&[0.0; 3], &all(&[3; 3]), (100, true)); 2];
    of.push(thought(&[0.0; 3], &all(&[7; 3]), (100, true)));
    let (answers, within_margin, _, accuracy) = chosen(&[3, 2], &of, ChoiceMargins::default());
    assert_eq!((answers, within_margin), (2, false));
    assert!((accuracy - 1.0 / 3.0).abs() < 1e-12);
    let of_nothing = choose(&[], &of, ChoiceMargins::default()).expect_err("no settings").to_string();
    assert_eq!(of_nothing, "no settings to choose from: expected at least one");
    let rules = ExitFamily::Patience.rules();
    assert!(
        choose(&rules, &[], ChoiceMargins::default()).expect_err("no thoughts").to_string().contains("no recorded")
    );
}

prop_compose! {
    fn some_thought()(
        points in proptest::collection::vec((0.0..5.0, proptest::option::of(0_u32..3)), 0..30),
        end in (0_u32..400, any::<bool>()),
    ) -> Thought {
        let (bits, answers): (Vec<f64>, Vec<Option<u32>>) = points.into_iter().unzip();
        thought(&bits, &answers, end)
    }
}

proptest! {
    #[test]
    fn patience_is_what_a_look_back_finds(of in some_thought(), answers in 1_u32..6) {
        let given: Vec<_> = of.points().iter().map(|point| point.answer).collect();
        let is_end = |at: &usize| {
            let row = (at + 1).checked_sub(answers as usize).map(|from| &given[from..=*at]);
            row.is_some_and(|row| row[0].is_some() && row.iter().all(|answer| *answer == row[0]))
        };
        let expected = (0..given.len()).find(is_end).map(|at| 10 * (at as u32 + 1));
        let rule = ExitRule::Patience { answers };
        prop_assert_eq!(rule.exit(&of).map(|point| point.think_tokens), expected);
    }

    #[test]
    fn eat_is_the_recurrence_of_the_paper(of in some_thought(), alpha in 0.05..1.0, delta in 0.0..4.0, least in 0_u32..6) {
        let (mut mean, mut variance, mut expected) = (0.0, 0.0, None);
        for (at, (point, bits)) in of.probes().enumerate() {
            let weight = if at == 0 { 1.0 } else { alpha };
            mean = weight * bits + (1.0 - weight) * mean;
            variance = if at == 0 { 0.0 } else { alpha * (bits - mean) * (bits - mean) + (1.0 - alpha) * variance };
            if expected.is_none() && at as u32 >= least && variance < delta && mean <= 2.0 {
                expected = Some(point.think_tokens);
            }
        }
        prop_assert_eq!(eat(alpha, delta, least, 2.0).exit(&of).map(|point| point.think_tokens), expected);
    }

    #[test]
    fn a_chosen_setting_is_cheap_and_accurate_enough(of in proptest::collection::vec(some_thought(), 1..20)) {
        let rules = ExitFamily::Level.rules();
        let found = choose(&rules, &of, ChoiceMargins::default()).expect("settings and thoughts");
        let outcome = evaluate(&found.rule, &of);
        prop_assert_eq!((outcome.mean_tokens(), outcome.accuracy()), (found.tokens, found.accuracy));
        let least = no_limit(&of).accuracy() - 0.005 - 1e-9;
        prop_assert_eq!(found.within_margin, found.accuracy >= least);
        for other in rules.iter().map(|rule| evaluate(rule, &of)).filter(|other| other.accuracy() >= least) {
            prop_assert!(found.within_margin && found.tokens <= 1.01 * other.mean_tokens() + 1e-9);
        }
    }
}

/// Probes after 10, 20, ... think tokens, with these confidences.
fn confident(confidences: &[f64]) -> Thought {
    let point = |(at, confidence): (usize, &f64)| ThoughtPoint {
        think_tokens: 10 * (at as u32 + 1),
        bits: Some(1.0),
        answer: Some(TRUTH),
        confidence: Some(*confidence),
        rpdi: None,
    };
    Thought::new(confidences.iter().enumerate().map(point).collect(), TRUTH, 100, true)
}

#[test]
fn deer_ends_at_the_first_confident_probe() {
    let of = [confident(&[0.2, 0.9, 0.96, 1.0]), confident(&[0.1, 0.95]), learns()];
    assert_eq!(ends(&ExitRule::Deer { confidence: 0.95 }, &of), [30, 100, 100]);
    assert_eq!(ends(&ExitRule::Deer { confidence: 0.5 }, &of), [20, 20, 100]);
}

#[test]
fn code_stop_ends_certain_thoughts_and_those_that_keep_doubting() {
    let rule = |degeneration| ExitRule::CodeStop { low: 0.9, high: 0.95, ramp: 2, degeneration };
    // The threshold is 0.9, 0.925, 0.95; drops after 20, 30 and 40 tokens weigh 1 + ln(40 / 20), 1 + ln(40 / 30) and 1.
    let of = [confident(&[0.91]), confident(&[0.5, 0.92, 0.94, 0.96]), confident(&[0.5, 0.4, 0.3, 0.2, 0.1])];
    assert_eq!(ends(&rule(1e9), &of), [10, 40, 100]);
    assert_eq!(ends(&rule(3.9), &of), [10, 40, 40]);
    assert_eq!(ends(&rule(4.0), &of), [10, 40, 50]);
}

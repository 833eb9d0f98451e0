//! Answers after thinking: the guard against empty ones, the room that is kept for them, and thinking that begins again.

use std::sync::Arc;

use meridian_core::budget::{
    AnswerRules, Ban, ClientBudget, Demand, EndRules, Enforcer, ForceReason, SamplerLimits, ThinkBudgets, ThinkEnd,
    ThinkSettings,
};
use meridian_core::{Markers, NewRequest, RequestTable};
use proptest::prelude::*;

const START: u32 = 7;
const END: u32 = 8;
const BLANK: u32 = 3;

fn rules(min_tokens: u32, resumes: bool) -> EndRules {
    let markers = Markers::new(vec![vec![START]], vec![vec![END]], vec![]).expect("markers").with_resuming(resumes);
    let blank = Arc::new([BLANK, START, END].into_iter().collect());
    let answers = AnswerRules { min_tokens, reserve_tokens: 20, blank };
    EndRules::new(markers, vec![40, END, BLANK]).expect("an end marker").with_answers(answers)
}

/// The demands on each of `tokens` and on the one after them.
fn demands(rules: &EndRules, limits: SamplerLimits, tokens: &[u32]) -> (Enforcer, Vec<Demand>) {
    let mut request = Enforcer::new(rules, &[1, START], limits);
    let mut found = vec![request.demand(rules)];
    for token in tokens {
        request.push(rules, *token);
        found.push(request.demand(rules));
    }
    (request, found)
}

#[test]
fn an_answer_after_a_forced_end_cannot_be_empty() {
    let rules = rules(2, false);
    let limits = SamplerLimits { max_think_tokens: 1, ..SamplerLimits::default() };
    // One token of thinking, the forced ending, white space, and an answer of two tokens.
    let (request, found) = demands(&rules, limits, &[30, 40, END, BLANK, BLANK, 50, BLANK, 51]);
    let due = Demand::Answer(Ban::Ends);
    assert_eq!(found[1..4], [Demand::Force(40), Demand::Force(END), Demand::Force(BLANK)]);
    assert_eq!(found[4..], [due, due, due, due, Demand::Free], "white space does not count");
    assert_eq!(request.openers(&rules).collect::<Vec<_>>(), [START]);
}

#[test]
fn an_answer_after_a_natural_end_is_guarded_only_beside_a_budget() {
    let rules = rules(1, false);
    for guards_answer in [false, true] {
        let limits = SamplerLimits { guards_answer, ..SamplerLimits::default() };
        let (_, found) = demands(&rules, limits, &[30, END, 50]);
        let first = if guards_answer { Demand::Answer(Ban::Ends) } else { Demand::Free };
        assert_eq!(found[2..], [first, Demand::Free]);
    }
    let off = self::rules(0, false);
    let limits = SamplerLimits { max_think_tokens: 1, guards_answer: true, ..SamplerLimits::default() };
    let (_, found) = demands(&off, limits, &[30, 40, END, BLANK]);
    assert_eq!(found[4], Demand::Free, "0 turns the guard off");
}

#[test]
fn a_prompt_without_thinking_is_not_guarded() {
    let rules = rules(1, false);
    let limits = SamplerLimits { guards_answer: true, ..SamplerLimits::default() };
    assert_eq!(Enforcer::new(&rules, &[START, END], limits).demand(&rules), Demand::Free);
}

#[test]
fn thinking_that_begins_again_spends_the_same_budget() {
    let rules = rules(1, true);
    let limits = SamplerLimits { max_think_tokens: 3, guards_answer: true, ..SamplerLimits::default() };
    // Two tokens of three with the end marker, an answer, and again.
    let (request, found) = demands(&rules, limits, &[30, END, 50, START, 31]);
    assert_eq!(found[3], Demand::Free, "the budget is not spent");
    assert_eq!(found[4], Demand::Guarded);
    assert_eq!((found[5], request.forced()), (Demand::Force(40), None), "it has not begun");
}

#[test]
fn thinking_cannot_begin_again_once_its_budget_is_spent() {
    let rules = rules(1, true);
    let limits = SamplerLimits { max_think_tokens: 1, ..SamplerLimits::default() };
    let (_, found) = demands(&rules, limits, &[30, 40, END, BLANK, 50, 51]);
    assert_eq!(found[4..], [Demand::Answer(Ban::Ends), Demand::Answer(Ban::Starts), Demand::Answer(Ban::Starts)]);
}

#[test]
fn a_start_marker_of_several_tokens_is_stopped_before_it_is_complete() {
    let markers = Markers::new(vec![vec![5, 6, 7]], vec![vec![END]], vec![]).expect("markers").with_resuming(true);
    let answers = AnswerRules { min_tokens: 9, ..AnswerRules::default() };
    let rules = EndRules::new(markers, vec![]).expect("an end marker").with_answers(answers);
    let limits = SamplerLimits { max_think_tokens: 1, ..SamplerLimits::default() };
    let mut request = Enforcer::new(&rules, &[1, 5, 6, 7], limits);
    let mut openers = Vec::new();
    for token in [30, END, 50, 5, 50, 5, 6] {
        request.demand(&rules);
        request.push(&rules, token);
        openers.push(request.openers(&rules).collect::<Vec<_>>());
    }
    assert_eq!(openers[1..], [vec![], vec![], vec![6], vec![], vec![6], vec![7]]);
}

#[test]
fn the_reserve_leaves_room_for_the_answer() {
    let rules = rules(1, false);
    // Three tokens of the ending.
    assert_eq!(rules.reserve_from(100), 77);
    let limits = SamplerLimits { reserve_from: 2, ..SamplerLimits::default() };
    let (request, found) = demands(&rules, limits, &[30, 31]);
    assert_eq!(found[2], Demand::Force(40));
    assert!(request.is_forcing());
}

#[test]
fn a_followed_request_says_how_its_thinking_ended() {
    let add = |client: ClientBudget, max_tokens: u32, tokens: &[u32]| {
        let mut table = RequestTable::new(
            Markers::new(vec![vec![START]], vec![vec![END]], vec![]).expect("markers").with_resuming(true),
        );
        let mut budgets = ThinkBudgets::new(ThinkSettings::new(rules(1, true)));
        let request = NewRequest { prompt: &[1, START], max_tokens, ..NewRequest::default() };
        let row = table.insert(&request).expect("finite times");
        let enrolled = budgets.enroll(&mut table, row, "a", client).expect("a live row");
        let tokens: Vec<_> = tokens.iter().map(|token| (row, *token)).collect();
        budgets.generated(&mut table, &tokens, &mut Vec::new());
        let status = budgets.status();
        assert_eq!(status.missed, 0);
        (enrolled, table.get(row).expect("live").think_course(), status)
    };
    let two = || ClientBudget { max_think_tokens: Some(2), ..ClientBudget::default() };
    let (enrolled, course, _) = add(two(), 100, &[30, 31, 40, END]);
    assert_eq!((enrolled.limits.reserve_from, enrolled.limits.guards_answer), (77, true));
    assert_eq!(course, (Some(ThinkEnd::Forced(ForceReason::HardCap)), 0, 0));
    // Long enough for the reserve, not for the budget.
    let wide = ClientBudget { max_think_tokens: Some(500), ..ClientBudget::default() };
    let (_, course, status) = add(wide, 11, &[30, 31, 32, 33, 34, 35, 40, END, BLANK, 50]);
    assert_eq!(course, (Some(ThinkEnd::Forced(ForceReason::Reserve)), 0, 0));
    assert_eq!(status.forced[ForceReason::Reserve as usize], 1);
    let reported = || ClientBudget { reports: true, ..ClientBudget::default() };
    let (enrolled, course, status) = add(reported(), 100, &[30, END, 50, START, 31]);
    assert_eq!((enrolled.limits.reserve_from, enrolled.limits.guards_answer), (u32::MAX, false), "no budget");
    assert_eq!((course, status.reopened), ((None, 1, 0), 1), "it thinks again");
    let (_, course, _) = add(reported(), 100, &[30, END, 50, START, 31, END]);
    assert_eq!(course, (Some(ThinkEnd::Natural), 1, 0));
    let fixed = ClientBudget { ignores_eos: true, ..two() };
    assert_eq!(add(fixed, 100, &[]).0.limits.reserve_from, u32::MAX, "its length is fixed");
}

proptest! {
    /// Whatever the model samples among the tokens that are not banned, an answer of a token follows the thinking, and
    /// replayed tokens give the same demands.
    #[test]
    fn no_answer_is_empty(cap in 0u32..12, reserve_from in 0u32..20, sampled in prop::collection::vec(0u32..10, 60)) {
        const EOS: u32 = 2;
        let rules = rules(1, true);
        let limits = SamplerLimits { max_think_tokens: cap, reserve_from, guards_answer: true, ..SamplerLimits::default() };
        let mut request = Enforcer::new(&rules, &[1, START], limits.clone());
        // Number of tokens at the latest end of thinking: an end marker inside an answer is text.
        let (mut tokens, mut thought) = (Vec::new(), 0);
        for wish in sampled {
            let openers: Vec<u32> = request.openers(&rules).collect();
            let token = match request.demand(&rules) {
                Demand::Force(token) => token,
                Demand::Guarded if wish == EOS => END,
                Demand::Answer(Ban::Ends) if wish == EOS || openers.contains(&wish) => 9,
                Demand::Answer(Ban::Starts) if openers.contains(&wish) => 9,
                _ => wish,
            };
            let was_thinking = request.is_thinking();
            request.push(&rules, token);
            tokens.push(token);
            if was_thinking && !request.is_thinking() {
                thought = tokens.len();
            }
            if token == EOS {
                break;
            }
        }
        if tokens.last() == Some(&EOS) {
            let shown = tokens[thought..tokens.len() - 1].iter().any(|token| ![BLANK, START, END].contains(token));
            prop_assert!(shown, "{:?}", tokens);
        }
        let mut replayed = Enforcer::new(&rules, &[1, START], limits);
        replayed.replay(&rules, tokens.iter().copied());
        prop_assert_eq!(replayed.demand(&rules), request.demand(&rules));
    }
}

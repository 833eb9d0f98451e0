//! Markers: where thinking starts and ends, and what must not move it.

use meridian_core::{Markers, NewRequest, PhaseTracker, RequestTable, ThinkPhase as Phase};
use proptest::prelude::*;

const START: u32 = 7;
const END: u32 = 8;
const NEWLINE: u32 = 9;
const USER_END: u32 = 5;

fn markers() -> Markers {
    Markers::new(vec![vec![START]], vec![vec![END]], vec![NEWLINE]).expect("usable markers")
}

/// Think and output tokens, and the phase, after `prompt` and `generated`.
fn run(markers: Markers, prompt: &[u32], generated: &[u32]) -> (u32, u32, Phase) {
    let mut table = RequestTable::new(markers);
    let slot = table.insert(&NewRequest { prompt, ..NewRequest::default() }).expect("finite times");
    assert_eq!(table[slot].phase(), Phase::Prefill);
    table.scheduled(slot, prompt.len() as u32, 0.0);
    for token in generated {
        table.generated(slot, &[*token], &mut Vec::new());
    }
    (table[slot].think_tokens(), table[slot].output_tokens(), table[slot].phase())
}

#[test]
fn template_opens_thinking() {
    assert_eq!(run(markers(), &[1, START, NEWLINE], &[20, 21, END, 22]), (3, 1, Phase::Output));
}

#[test]
fn template_closes_thinking() {
    // Qwen3 with enable_thinking=false: "<think>\n\n</think>\n\n".
    assert_eq!(run(markers(), &[1, START, NEWLINE, END, NEWLINE], &[20]), (0, 1, Phase::Output));
}

#[test]
fn model_opens_thinking_itself() {
    assert_eq!(run(markers(), &[1, 2], &[START, 20, END, 21]), (3, 1, Phase::Output));
    assert_eq!(run(markers(), &[1, 2], &[NEWLINE, START, 20]), (3, 0, Phase::Think));
    assert_eq!(run(markers(), &[1, 2], &[20, START, 21]), (2, 1, Phase::Think), "after some text");
}

#[test]
fn marker_in_user_text_never_counts() {
    let bounded = || markers().with_boundaries(vec![USER_END]);
    assert_eq!(run(bounded(), &[1, START, 2, USER_END], &[20, 21]), (0, 2, Phase::Output));
    assert_eq!(run(bounded(), &[1, START, 2, END, USER_END, START, NEWLINE], &[20]), (1, 0, Phase::Think));
}

#[test]
fn a_prompt_may_end_inside_a_thought() {
    let bounded = || markers().with_boundaries(vec![USER_END]);
    assert_eq!(run(bounded(), &[1, USER_END, START, NEWLINE, 20, 21], &[22, END, 23]), (2, 1, Phase::Output));
    // A turn with a thought, a text and a second thought.
    assert_eq!(run(bounded(), &[USER_END, START, 20, END, 21, START, 22], &[23]), (1, 0, Phase::Think));
    assert_eq!(run(bounded(), &[USER_END, START, 20, END, 21], &[23]), (0, 1, Phase::Output));
    // A template that closes thinking without opening it.
    assert_eq!(run(bounded(), &[1, USER_END, END], &[23]), (0, 1, Phase::Output));
}

#[test]
fn a_model_that_thinks_once_never_returns_to_thinking() {
    let once = || markers().with_resuming(false);
    assert_eq!(run(once(), &[START], &[END, START, 20, END, 21]), (1, 4, Phase::Output));
    assert_eq!(run(once(), &[1], &[20, START, 21]), (2, 1, Phase::Think), "its first thought");
}

#[test]
fn marker_of_several_tokens_and_alternatives() {
    let granite = || Markers::new(vec![vec![10, 11, 12], vec![10, 13]], vec![vec![14, 14, 15]], vec![]).unwrap();
    assert_eq!(run(granite(), &[1], &[10, 11, 12, 20, 14, 14, 14, 15, 21]), (8, 1, Phase::Output));
    assert_eq!(run(granite(), &[1], &[10, 13, 20]), (3, 0, Phase::Think));
    assert_eq!(run(granite(), &[1], &[10, 11, 20]), (2, 1, Phase::Output));
}

#[test]
fn no_markers_means_output() {
    assert_eq!(run(Markers::default(), &[1, START], &[END, 20]), (0, 2, Phase::Output));
    assert_eq!(run(Markers::new(vec![], vec![], vec![]).unwrap(), &[START], &[20]), (0, 1, Phase::Output));
}

#[test]
fn unusable_markers_are_refused() {
    let refusal = |starts, ends| Markers::new(starts, ends, vec![]).unwrap_err().to_string();
    assert_eq!(refusal(vec![vec![START]], vec![]), "markers: a marker to start thinking and none to end it");
    assert_eq!(refusal(vec![], vec![vec![END]]), "markers: a marker to end thinking and none to start it");
    assert_eq!(refusal(vec![vec![START]], vec![vec![]]), "markers: a marker of 0 tokens, expected 1 to 64");
    assert_eq!(refusal(vec![vec![1; 65]], vec![vec![END]]), "markers: a marker of 65 tokens, expected 1 to 64");
    assert_eq!(refusal(vec![vec![1]; 9], vec![vec![END]]), "markers: 9 alternatives, expected at most 8");
}

#[test]
fn thinking_resumes_unless_the_model_thinks_once() {
    assert_eq!(run(markers(), &[START], &[20, END, 21, START, 22]), (4, 1, Phase::Think));
    assert_eq!(run(markers(), &[START], &[20, END, 21, START, 22, END, 23]), (5, 2, Phase::Output));
    assert_eq!(run(markers().with_resuming(false), &[START], &[20, END, 21, START, 22]), (2, 3, Phase::Output));
}

const CALL: u32 = 12;
const CALLED: u32 = 13;

#[test]
fn a_tool_call_belongs_to_the_thinking_or_ends_it() {
    let with = |ends| markers().with_calls(vec![(vec![CALL], vec![CALLED])], ends).expect("usable markers");
    let standing = |ends: bool, tokens: &[u32]| {
        let markers = with(ends);
        let mut tracker = PhaseTracker::new(&markers, &[1, START]);
        tokens.iter().for_each(|token| _ = tracker.token(&markers, *token));
        let at = tracker.standing(&markers);
        (at.is_open, at.is_in_call, at.has_called)
    };
    assert_eq!(standing(false, &[20]), (true, false, false));
    assert_eq!(standing(false, &[20, CALL]), (true, true, true));
    assert_eq!(standing(false, &[20, CALL, 21, CALLED]), (true, false, true));
    assert_eq!(standing(false, &[20, CALL, 21, END]), (false, false, true), "the end of thinking ends it too");
    assert_eq!(standing(false, &[CALL, CALLED, END, START]), (true, false, false), "another thought");
    assert_eq!(standing(true, &[20, CALL]), (false, false, true));
    // A call without an end marker lasts as long as the thinking.
    let endless = markers().with_calls(vec![(vec![CALL, 14, 15], vec![])], false).expect("usable markers");
    let mut tracker = PhaseTracker::new(&endless, &[START]);
    for (token, is_in_call) in
        [(CALL, false), (14, true), (20, false), (CALL, false), (14, true), (15, true), (20, true)]
    {
        tracker.token(&endless, token);
        assert_eq!(tracker.standing(&endless).is_in_call, is_in_call, "{token}");
    }
}

#[test]
fn tool_calls_with_unusable_markers_are_refused() {
    let refusal = |calls| markers().with_calls(calls, false).unwrap_err().to_string();
    assert_eq!(refusal(vec![(vec![], vec![1])]), "markers: a tool call's marker of 0 tokens, expected 1 to 64");
    assert_eq!(refusal(vec![(vec![1; 65], vec![])]), "markers: a tool call's marker of 65 tokens, expected 1 to 64");
    assert_eq!(refusal(vec![(vec![1], vec![]); 9]), "markers: 9 tool calls, expected at most 8");
}

#[test]
fn nested_and_repeated_markers_count_once() {
    assert_eq!(run(markers(), &[START], &[START, 20, START, END, END, 21]), (4, 2, Phase::Output));
}

#[test]
fn it_stays_undecided_before_an_opening_marker() {
    let granite = || Markers::new(vec![vec![10, 11, 12]], vec![vec![14]], vec![3]).expect("usable markers");
    assert_eq!(run(granite(), &[1], &[3, 3, 10, 11, 12, 20]), (6, 0, Phase::Think));
    assert_eq!(run(granite(), &[1], &[10, 11, 10, 11, 12, 20]), (6, 0, Phase::Think));
    assert_eq!(run(granite(), &[1], &[10, 3, 10, 11, 12]), (5, 0, Phase::Think));
    // Half a marker and then something else is the answer.
    assert_eq!(run(granite(), &[1], &[10, 11, 20, 10]), (2, 2, Phase::Output));
    let repeated = || Markers::new(vec![vec![1, 1, 2]], vec![vec![14]], vec![]).expect("usable markers");
    assert_eq!(run(repeated(), &[9], &[1, 1, 1, 1, 2]), (5, 0, Phase::Think));
    // A marker that begins with padding.
    let padded = || Markers::new(vec![vec![3, 10]], vec![vec![14]], vec![3]).expect("usable markers");
    assert_eq!(run(padded(), &[1], &[3, 3, 10, 20]), (4, 0, Phase::Think));
    assert_eq!(run(padded(), &[1], &[3, 20]), (1, 1, Phase::Output));
}

#[test]
fn preemption_keeps_the_phase() {
    let mut table = RequestTable::new(markers());
    let slot = table.insert(&NewRequest { prompt: &[1, START], ..NewRequest::default() }).unwrap();
    table.scheduled(slot, 2, 0.0);
    table.generated(slot, &[20, END, 21], &mut Vec::new());
    table.preempted(slot);
    assert_eq!(table[slot].phase(), Phase::Output);
    assert_eq!(table[slot].needed_tokens(1), 5);
}

proptest! {
    /// Wherever the prompt ends and generation begins, thinking is open after the same tokens of a turn.
    #[test]
    fn following_a_turn_at_once_and_token_by_token_gives_the_same(
        turn in proptest::collection::vec(0u32..6, 0..40),
        cut in 0usize..40,
        start in proptest::collection::vec(0u32..4, 1..4),
        end in proptest::collection::vec(0u32..4, 1..4),
        call in proptest::collection::vec(0u32..6, 1..3),
        call_ends in any::<bool>(),
        resumes in any::<bool>(),
    ) {
        prop_assume!(start != end);
        let markers = Markers::new(vec![start], vec![end.clone()], vec![5]).unwrap().with_resuming(resumes);
        let markers = markers.with_calls(vec![(call, vec![4])], call_ends).unwrap();
        let (prompt, generated) = turn.split_at(cut.min(turn.len()));
        // An end without a beginning closes a prompt for a model that thinks once.
        prop_assume!(resumes || !turn.windows(end.len()).any(|tokens| tokens == end));
        let mut tracker = PhaseTracker::new(&markers, prompt);
        generated.iter().for_each(|token| _ = tracker.token(&markers, *token));
        let whole = PhaseTracker::new(&markers, &turn);
        prop_assert_eq!(tracker.is_open(), whole.is_open());
        prop_assert_eq!(tracker.standing(&markers).is_in_call, whole.standing(&markers).is_in_call);
    }

    /// The matcher against the obvious definition: the end marker is a substring of what was generated.
    #[test]
    fn matcher_finds_what_a_search_finds(
        end in proptest::collection::vec(0u32..3, 1..6),
        generated in proptest::collection::vec(0u32..3, 0..60),
    ) {
        let markers = Markers::new(vec![vec![START]], vec![end.clone()], vec![]).unwrap();
        let (_, output, phase) = run(markers, &[START], &generated);
        let found = generated.windows(end.len()).position(|window| window == end);
        prop_assert_eq!(phase == Phase::Output, found.is_some());
        prop_assert_eq!(output as usize, found.map_or(0, |at| generated.len() - at - end.len()));
    }
}

#[test]
fn the_first_of_each_kind_of_token_has_its_time() {
    let mut table = RequestTable::new(markers());
    let request = NewRequest { prompt: &[1, START], arrival_ms: 100.0, ..NewRequest::default() };
    let slot = table.insert(&request).unwrap();
    let times = |table: &RequestTable| {
        let row = &table[slot];
        (row.first_token_ms(), row.end_of_thinking_ms(), row.first_output_ms())
    };
    let mut generate = |now_ms: f64, tokens: &[u32]| {
        table.set_clock(now_ms);
        table.generated(slot, tokens, &mut Vec::new());
        times(&table)
    };
    assert_eq!(generate(120.0, &[]), (None, None, None));
    assert_eq!(generate(150.0, &[20]), (Some(150.0), None, None));
    assert_eq!(generate(160.0, &[21]), (Some(150.0), None, None));
    assert_eq!(generate(170.0, &[END]), (Some(150.0), Some(170.0), None));
    assert_eq!(generate(180.5, &[22]), (Some(150.0), Some(170.0), Some(180.5)));
    assert_eq!(generate(200.0, &[23, 24]), (Some(150.0), Some(170.0), Some(180.5)));
    // One that does not think has no end of thinking.
    let slot = table.insert(&NewRequest { arrival_ms: 200.0, ..NewRequest::default() }).unwrap();
    table.generated(slot, &[20], &mut Vec::new());
    assert_eq!((table[slot].first_token_ms(), table[slot].end_of_thinking_ms()), (Some(200.0), None));
    assert_eq!(table[slot].first_output_ms(), Some(200.0));
}

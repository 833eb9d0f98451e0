//! The plan of a step that verifies drafts.

use meridian_core::Markers;
use meridian_engine::sampler::{Arriving, Outputs, SamplerRows, SamplerStep};

/// Lists of tokens that a test pushes by itself.
struct Pushed;

impl Outputs for Pushed {
    type Access<'a> = ();

    fn count(&self, (): ()) -> usize {
        0
    }

    fn token(&self, (): (), _at: usize) -> Option<u32> {
        None
    }
}

fn rows(end: &[u32], max_think_tokens: &[u32]) -> SamplerRows<Pushed> {
    let mut rows = SamplerRows::default();
    let markers = Markers::new(vec![vec![7]], vec![end.to_vec()], vec![]).expect("markers");
    rows.configure(Some(markers), Vec::new()).expect("the ending ends thinking");
    for (row, most) in max_think_tokens.iter().enumerate() {
        let arriving = Arriving {
            key: Some(row as u64),
            prompt_tail: &[1, 7],
            outputs: None,
            max_think_tokens: *most,
            interrupts: Vec::new(),
            guards_eos: true,
            is_measured: row == 1,
            reserve_from: u32::MAX,
            guards_answer: false,
        };
        rows.add((), row, arriving);
    }
    rows
}

#[test]
fn rows_follow_their_drafts_up_to_one_that_must_be_rejected() {
    let mut rows = rows(&[8], &[2, 9]);
    let step = rows.step_drafts((), &[0, 1], &[&[30, 31, 32], &[33, 8, 34]], &[]);
    // The first request has rows 0 to 3 of the logits, the second 4 to 7. It has ended its thinking after row 5.
    let expected = SamplerStep {
        forced: vec![2],
        tokens: vec![8],
        guarded: vec![0, 1, 4, 5],
        measured: vec![4, 5],
        ..SamplerStep::default()
    };
    assert_eq!(step, expected);
    // Rejected drafts leave no trace.
    rows.push(0, &[40], false);
    assert_eq!(rows.tokens(0), Some(1));
    let step = rows.step((), 2, None);
    assert_eq!((step.forced, step.guarded), (vec![], vec![0, 1]));
}

#[test]
fn a_marker_that_begins_where_the_sequence_would_end_is_completed() {
    let mut rows = rows(&[8, 9], &[50]);
    let drafts: &[&[u32]] = &[&[30, 8, 9]];
    let step = rows.step_drafts((), &[0], drafts, &[]);
    assert_eq!((step.forced, step.guarded), (vec![], vec![0, 1, 2]));
    let step = rows.step_drafts((), &[0], drafts, &[1]);
    assert_eq!((step.forced, step.tokens, step.guarded), (vec![2], vec![9], vec![0, 1]));
    rows.guard(&[1]);
    assert!(rows.told().is_some());
    // The first draft was rejected, so the second row sampled nothing.
    rows.push(0, &[40], false);
    let step = rows.step((), 1, None);
    assert_eq!((step.forced, step.guarded), (vec![], vec![0]));
    rows.push(0, &[8], false);
    let step = rows.step((), 1, None);
    assert!(step.forced.is_empty(), "the model meant its own token");
}

#[test]
fn every_row_without_a_request_has_its_place() {
    let mut rows = rows(&[8], &[0]);
    rows.move_row(0, 2, false);
    let step = rows.step_drafts((), &[0, 1, 2], &[&[30, 31], &[], &[8]], &[]);
    assert_eq!((step.forced, step.tokens), (vec![4], vec![8]));
}

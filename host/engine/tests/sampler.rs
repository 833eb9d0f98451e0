//! The plan of a step that verifies drafts.

use meridian_core::Markers;
use meridian_core::budget::{Order, SamplerLimits};
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
            limits: SamplerLimits { max_think_tokens: *most, is_measured: row == 1, ..SamplerLimits::default() },
        };
        rows.add((), row, arriving);
    }
    rows
}

#[test]
fn rows_follow_their_drafts_also_past_one_that_a_mask_may_save() {
    let mut rows = rows(&[8], &[2, 9]);
    let step = rows.step_drafts((), &[0, 1], &[&[30, 31, 32], &[33, 8, 34]], &[]);
    // The first request has rows 0 to 3 of the logits, the second 4 to 7. It has ended its thinking after row 5. Where the
    // client forbids the token of row 2, the draft there may stay, and the end is due in row 3.
    let expected = SamplerStep {
        forced: vec![2, 3],
        tokens: vec![8, 8],
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

#[test]
fn an_idle_row_costs_nothing_until_an_order_wakes_it() {
    let mut rows = SamplerRows::<Pushed>::default();
    let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![]).expect("markers");
    rows.configure(Some(markers), Vec::new()).expect("the ending ends thinking");
    let idle = || Arriving { key: Some(5), prompt_tail: &[1, 7], outputs: None, limits: SamplerLimits::idle() };
    rows.add((), 0, idle());
    assert!(rows.is_idle());
    assert_eq!(rows.step((), 1, None), SamplerStep::default());
    let mut order = Vec::new();
    Order::Limit { key: 5, from: 1, max_think_tokens: 0 }.write(&mut order);
    rows.receive(&order);
    assert!(!rows.is_idle());
    rows.push(0, &[30], false);
    let step = rows.step((), 1, None);
    assert_eq!((step.forced, step.tokens), (vec![0], vec![8]));
    // One that left and comes back begins anew; an order that came between is not lost.
    let mut rows = SamplerRows::<Pushed>::default();
    let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![]).expect("markers");
    rows.configure(Some(markers), Vec::new()).expect("the ending ends thinking");
    rows.add((), 0, idle());
    rows.remove(0);
    rows.receive(&order);
    assert!(rows.is_awaited(5));
    rows.add((), 1, idle());
    rows.push(1, &[30], false);
    assert_eq!(rows.step((), 2, None).forced, [1]);
}

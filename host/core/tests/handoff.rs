//! Handoffs: the account of engines that answer, and the two policies.

use std::ops::RangeInclusive;

use meridian_core::config::HandoffPolicyName;
use meridian_core::handoff::{Answered, HandoffFacts, HandoffPolicy, Handoffs, Stays};
use proptest::prelude::*;

fn threshold(targets: usize) -> Handoffs {
    Handoffs::new(HandoffPolicyName::Threshold.policy(4), targets)
}

fn expected_time(targets: usize) -> Handoffs {
    Handoffs::new(HandoffPolicyName::ExpectedTime.policy(4), targets)
}

fn answered(begin_ms: f64, itl_ms: f64) -> Answered {
    Answered { begin_ms, tokens: 101, writing_ms: 100.0 * itl_ms }
}

/// An answer of 101 tokens of a request with 10 blocks, by this engine.
fn answer(handoffs: &mut Handoffs, target: usize, begin_ms: f64, itl_ms: f64) {
    // The account counts an answer only while it is asked for.
    while handoffs.target(10, 0.0) != Some(target) {}
    handoffs.answered(target, 10, &answered(begin_ms, itl_ms));
}

#[test]
fn the_engine_with_the_fewest_requests_answers() {
    let mut handoffs = threshold(3);
    assert_eq!([(); 4].map(|()| handoffs.target(10, 0.0)), [Some(0), Some(1), Some(2), Some(0)]);
    handoffs.dropped(1, 10);
    assert_eq!(handoffs.target(10, 0.0), Some(1));
    assert_eq!(handoffs.targets(0.0)[0].requests, 2);
    assert_eq!(handoffs.targets(0.0)[0].blocks, 20);
}

#[test]
fn a_failing_engine_is_left_out_for_twice_as_long_each_time() {
    let mut handoffs = threshold(1);
    let mut now_ms = 0.0;
    for wait_ms in [1e3, 2e3, 4e3, 8e3, 16e3, 32e3, 60e3, 60e3] {
        assert_eq!(handoffs.target(10, now_ms), Some(0));
        assert_eq!(handoffs.target(10, now_ms), Some(0));
        // Two that broke off together are one failure.
        handoffs.failed(0, 10, now_ms);
        handoffs.failed(0, 10, now_ms);
        assert_eq!(handoffs.offer(now_ms + wait_ms - 1.0), Err(Stays::Failing));
        assert_eq!(handoffs.target(10, now_ms + wait_ms - 1.0), None);
        now_ms += wait_ms;
        assert_eq!(handoffs.offer(now_ms), Ok(4..=u32::MAX));
    }
    // An answer ends the row.
    assert_eq!(handoffs.target(10, now_ms), Some(0));
    handoffs.answered(0, 10, &answered(10.0, 10.0));
    assert_eq!(handoffs.target(10, now_ms), Some(0));
    handoffs.failed(0, 10, now_ms);
    assert_eq!(handoffs.offer(now_ms + 1e3), Ok(4..=u32::MAX));
}

#[test]
fn what_would_end_later_stays() {
    let mut handoffs = expected_time(1);
    // Nothing is known yet: everything moves.
    assert_eq!(handoffs.offer(0.0), Ok(4..=u32::MAX));
    handoffs.thought(1000, 30_000.0);
    answer(&mut handoffs, 0, 1000.0, 40.0);
    assert_eq!(handoffs.offer(0.0), Err(Stays::Policy), "slower there");
    // It is measured again now and then.
    let measured = (0..256).filter(|_| handoffs.offer(0.0).is_ok()).count();
    assert_eq!(measured, 2);
}

#[test]
fn the_engine_where_an_answer_ends_first_is_chosen() {
    let mut handoffs = expected_time(3);
    handoffs.thought(1000, 50_000.0);
    // The third is not measured yet, and comes first.
    answer(&mut handoffs, 0, 100.0, 30.0);
    answer(&mut handoffs, 1, 2000.0, 20.0);
    assert_eq!(handoffs.target(10, 0.0), Some(2));
    handoffs.answered(2, 10, &answered(9000.0, 90.0));
    // 101 tokens of 30 ms are 3.1 s, those of 20 ms with the wait 4.0 s, or 2.2 s for a tenth of the blocks.
    assert_eq!(handoffs.target(10, 0.0), Some(0));
    handoffs.dropped(0, 10);
    assert_eq!(handoffs.target(1, 0.0), Some(1));
}

struct Wrong;

impl HandoffPolicy for Wrong {
    fn offer(&mut self, _: &HandoffFacts<'_>) -> Option<RangeInclusive<u32>> {
        #[expect(clippy::reversed_empty_ranges, reason = "the wrong answer")]
        Some(9..=3)
    }

    fn target(&mut self, _: u32, _: &HandoffFacts<'_>) -> usize {
        usize::MAX
    }
}

#[test]
fn a_wrong_answer_is_replaced() {
    let mut handoffs = Handoffs::new(Box::new(Wrong), 2);
    assert_eq!(handoffs.offer(0.0), Err(Stays::Policy));
    assert_eq!([(); 2].map(|()| handoffs.target(10, 0.0)), [Some(0), Some(1)]);
}

proptest! {
    /// Whatever is told, in whatever order: an engine that fails is not chosen, and counts do not wrap.
    #[test]
    fn any_order_of_calls(
        calls in prop::collection::vec((0..6u8, 0..3usize, 0..100u32, -1e9..1e9f64), 0..200),
        by_time: bool,
    ) {
        let mut handoffs = if by_time { expected_time(2) } else { threshold(2) };
        let mut now_ms = 0.0;
        for (call, target, number, value) in calls {
            now_ms += 100.0;
            match call {
                0 => {
                    let able = handoffs.targets(now_ms).iter().any(|target| !target.is_failing);
                    let chosen = handoffs.target(number, now_ms);
                    prop_assert_eq!(chosen.is_some(), able);
                    prop_assert!(chosen.is_none_or(|chosen| !handoffs.targets(now_ms)[chosen].is_failing));
                }
                1 => handoffs.failed(target, number, now_ms),
                2 => handoffs.dropped(target, number),
                3 => handoffs.thought(number, value),
                4 => {
                    handoffs.answered(target, number, &Answered { begin_ms: value, tokens: number, writing_ms: value })
                }
                _ => {
                    let _ = handoffs.offer(now_ms);
                }
            }
            prop_assert!(handoffs.targets(now_ms).iter().all(|target| target.requests < 1000 && target.blocks < 100_000));
        }
    }
}

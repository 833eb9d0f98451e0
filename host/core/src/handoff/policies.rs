//! The two policies.

use std::ops::RangeInclusive;

use super::{HandoffFacts, HandoffPolicy, TargetFacts, fewest};

/// One request in so many is handed over against the expectation, so that it is measured again.
const MEASURE_EVERY: u64 = 128;

/// Hands over every request with enough KV blocks, to the engine with the fewest requests.
///
/// ```
/// use meridian_core::handoff::{HandoffFacts, HandoffPolicy, ThresholdHandoff};
///
/// let facts = HandoffFacts { think_itl_ms: 20.0, answer_tokens: 300.0, arrivals: 1, targets: &[] };
/// assert_eq!(ThresholdHandoff { least_blocks: 4 }.offer(&facts), Some(4..=u32::MAX));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ThresholdHandoff {
    /// Fewest KV blocks of a request that is handed over.
    pub least_blocks: u32,
}

impl HandoffPolicy for ThresholdHandoff {
    fn offer(&mut self, _: &HandoffFacts<'_>) -> Option<RangeInclusive<u32>> {
        Some(self.least_blocks..=u32::MAX)
    }

    fn target(&mut self, _: u32, facts: &HandoffFacts<'_>) -> usize {
        fewest(facts.targets).unwrap_or(0)
    }
}

/// Hands a request over if its answer is then expected to end sooner, to the engine where it is expected to end first.
///
/// An answer that stays takes `answer_tokens * think_itl_ms`. One that moves takes
/// `begin_ms * blocks / begin_blocks + answer_tokens * itl_ms * load`, where `load` is the requests of the engine over those
/// that it had when `itl_ms` was measured, from 1/2 to 2. While an engine was not measured, every request with enough blocks
/// is handed over.
///
/// ```
/// use meridian_core::config::HandoffPolicyName;
/// use meridian_core::handoff::{Answered, Handoffs};
///
/// let mut handoffs = Handoffs::new(HandoffPolicyName::ExpectedTime.policy(4), 1);
/// handoffs.thought(1000, 30_000.0);
/// let target = handoffs.target(10, 0.0).unwrap();
/// // 101 tokens take 3,030 ms in the engine that thinks; here 1,010 ms, and 100 ms for each block.
/// handoffs.answered(target, 10, &Answered { begin_ms: 1000.0, tokens: 101, writing_ms: 1000.0 });
/// assert_eq!(handoffs.offer(0.0), Ok(4..=20));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ExpectedTimeHandoff {
    /// Fewest KV blocks of a request that is handed over.
    pub least_blocks: u32,
}

impl ExpectedTimeHandoff {
    /// What writing an answer there takes after its first token, milliseconds; NaN before it was measured.
    fn writing_ms(facts: &HandoffFacts<'_>, target: &TargetFacts) -> f64 {
        let load = f64::from(target.requests + 1) / target.itl_requests;
        facts.answer_tokens * target.itl_ms * load.clamp(0.5, 2.0)
    }

    /// Most blocks with which an answer is expected to end there no later than here; NaN before it was measured.
    fn most_blocks(facts: &HandoffFacts<'_>, target: &TargetFacts) -> f64 {
        let gain_ms = facts.answer_tokens * facts.think_itl_ms - Self::writing_ms(facts, target);
        target.begin_blocks * gain_ms / target.begin_ms
    }
}

impl HandoffPolicy for ExpectedTimeHandoff {
    fn offer(&mut self, facts: &HandoffFacts<'_>) -> Option<RangeInclusive<u32>> {
        let all = self.least_blocks..=u32::MAX;
        if facts.arrivals.is_multiple_of(MEASURE_EVERY) {
            return Some(all);
        }
        let mut most = f64::NEG_INFINITY;
        for target in facts.targets.iter().filter(|target| !target.is_failing) {
            let blocks = Self::most_blocks(facts, target);
            if blocks.is_nan() {
                return Some(all);
            }
            most = most.max(blocks);
        }
        // A number above the range becomes its end.
        let most = most as u32;
        (most >= self.least_blocks).then_some(self.least_blocks..=most)
    }

    fn target(&mut self, blocks: u32, facts: &HandoffFacts<'_>) -> usize {
        let time = |target: &TargetFacts| {
            let begin_ms = target.begin_ms * f64::from(blocks) / target.begin_blocks;
            let ms = begin_ms + Self::writing_ms(facts, target);
            // One that was not measured is measured now.
            if ms.is_nan() { f64::NEG_INFINITY } else { ms }
        };
        let able = facts.targets.iter().enumerate().filter(|(_, target)| !target.is_failing);
        let first = able.min_by(|(_, a), (_, b)| time(a).total_cmp(&time(b)).then((a.requests).cmp(&b.requests)));
        first.map_or(0, |(position, _)| position)
    }
}

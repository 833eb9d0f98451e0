//! The eviction of SAGA (arXiv 2605.00528): recency, the chance of a return and size in one sum (WA-LRU), and a time for which
//! the blocks of a session that waits for a tool are kept.
//!
//! What the paper takes from an agent's graph of calls, the chance of a return and the time of a tool, is learned from the
//! pauses that the host reports. Blocks that a waiting request has matched count as any others.

use meridian_policy_sdk::eviction::{Candidate, Candidates, Column, EvictionPolicy, Memory, Subject};
use meridian_policy_sdk::{Init, PauseKind, Policy, Returns, Turnover, export_policy, reads_pauses};
use serde::Deserialize;

/// Standard deviations from the mean to the 95th percentile of a tool's times.
const P95: f32 = 1.645;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    recency: f32,
    reuse: f32,
    size: f32,
    new_tokens: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { recency: 0.3, reuse: 0.5, size: 0.2, new_tokens: 512 }
    }
}

/// The policy.
#[derive(Clone, Debug)]
pub struct WaLru {
    /// Weights of the three parts.
    recency: f32,
    reuse: f32,
    size: f32,
    /// Tokens that a next turn adds to its prompt.
    new_tokens: f32,
    returns: Returns,
    turnover: Turnover,
    /// Within a turnover of the pool: the chance that each kind of pause ends.
    chances: [f32; PauseKind::COUNT],
    turnover_ms: f32,
    /// The longest chain so far.
    most_tokens: f32,
}

impl Policy for WaLru {
    const NAME: &'static str = "wa-lru";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Recency, the chance of a return and size in one sum, as SAGA does.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { recency, reuse, size, new_tokens } = init.config()?;
        for (name, weight) in [("recency", recency), ("reuse", reuse), ("size", size)] {
            if !(0.0..=1.0).contains(&weight) {
                return Err(format!("{name}: {weight}: must be in 0..=1"));
            }
        }
        let (returns, turnover) = (Returns::default(), Turnover::default());
        let chances = [0.0; PauseKind::COUNT];
        let new_tokens = new_tokens as f32;
        Ok(Self { recency, reuse, size, new_tokens, returns, turnover, chances, turnover_ms: 0.0, most_tokens: 1.0 })
    }
}

reads_pauses!(WaLru);

impl EvictionPolicy for WaLru {
    const INPUTS: &'static [Column] = &[
        Column::Hits,
        Column::ComputedTokens,
        Column::ChainTokens,
        Column::Session,
        Column::Turn,
        Column::IdleMs,
        Column::LastGapMs,
        Column::GapMs,
        Column::GapSpreadMs,
        Column::Gaps,
        Column::StoppedForTool,
    ];

    fn observe(&mut self, memory: &Memory, batch: &Candidates<'_, Self>) {
        if memory.subject != Subject::Blocks {
            return;
        }
        self.returns.observe(memory, batch);
        self.turnover.note(memory, batch.iter().filter(|block| block.hits() < 1.0).count());
        self.turnover_ms = self.turnover.ms(memory);
        self.chances = PauseKind::ALL.map(|kind| self.returns.chance(kind, 0.0, self.turnover_ms));
        self.most_tokens = batch.iter().map(|block| block.chain_tokens()).fold(self.most_tokens, f32::max);
    }

    fn key(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        if memory.subject == Subject::Requests {
            return candidate.computed_tokens();
        }
        // Ages are compared at one time, so the time of the last use says the same; by the age of what is evicted.
        let used_ms = memory.now_ms - f64::from(candidate.idle_ms());
        let recency = if self.turnover_ms > 0.0 { (used_ms / f64::from(self.turnover_ms)) as f32 } else { 0.0 };
        let tokens = candidate.chain_tokens();
        let comes_back =
            if candidate.session() > 0.0 { self.chances[PauseKind::of_candidate(candidate).index()] } else { 0.0 };
        let overlap = if tokens > 0.0 { tokens / (tokens + self.new_tokens) } else { 0.0 };
        self.recency * recency + self.reuse * comes_back * overlap - self.size * tokens / self.most_tokens
    }

    fn keep_ms(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        let waits = candidate.stopped_for_tool() > 0.0 && candidate.session() > 0.0;
        if memory.subject == Subject::Requests || !waits {
            return 0.0;
        }
        let left_ms = candidate.gap_ms() + P95 * candidate.gap_spread_ms() - candidate.idle_ms();
        if left_ms > 0.0 { left_ms } else { 0.0 }
    }
}

export_policy!(eviction: WaLru);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_have_a_range() {
        let made = crate::made::<WaLru>;
        assert_eq!(made("{}").unwrap().reuse, 0.5);
        assert_eq!(made("{\"size\": 1.5}").unwrap_err(), "size: 1.5: must be in 0..=1");
        assert!(made("{\"alpha\": 1}").is_err());
    }
}

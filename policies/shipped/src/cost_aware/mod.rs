//! Keeps what saves the most recomputation for each block and second.
//!
//! A block is worth the milliseconds that computing it again takes, times its chance to be matched for each millisecond that
//! it stays. The chance falls as its session pauses, and how fast depends on the session: it waits for a tool or for a
//! person, its gaps were short or long. A block's key is the time at which its worth falls below that of the average block
//! which least-recently-used would evict, so the one whose time is over longest goes first, and keys of different batches
//! compare. What a waiting request needs is kept until it is admitted. Until enough pauses were seen that is the order of use.

use meridian_policy_sdk::eviction::{Candidate, Candidates, Column, EvictionPolicy, Memory, Subject};
use meridian_policy_sdk::{
    Init, PauseKind, Policy, Returns, Turnover, awaited_since, clamped, export_policy, reads_pauses,
};
use serde::Deserialize;

/// Pauses that must have been seen before they say anything.
const ENOUGH: f32 = 32.0;
/// No block is worth more than so many turnovers of the pool.
const MOST_TURNOVERS: f32 = 16.0;
/// The marginal block is worth at least this share of one that was just used.
const LEAST_MARGINAL: f32 = 0.01;
/// A match this soon after the block was computed says little about the next, milliseconds.
const LEAST_AGE_MS: f32 = 1_000.0;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    priority_weight: f32,
}

impl Default for Options {
    fn default() -> Self {
        Self { priority_weight: 2.0 }
    }
}

/// The policy.
#[derive(Clone, Debug)]
pub struct CostAware {
    /// A request that is one more urgent is worth so many times as much.
    priority_weight: f32,
    returns: Returns,
    turnover: Turnover,
    /// Pauses seen of any kind.
    seen: f32,
    turnover_ms: f32,
    /// Returns for each millisecond of the average pause that lasts a turnover.
    marginal: f32,
    /// How long a pause of each kind is worth keeping for, milliseconds.
    worth_ms: [f32; PauseKind::COUNT],
}

impl Policy for CostAware {
    const NAME: &'static str = "cost-aware";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "Keeps what saves the most recomputation for each block and second, by when sessions return.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { priority_weight } = init.config()?;
        if !(1.0..=16.0).contains(&priority_weight) {
            return Err(format!("priority_weight: {priority_weight}: must be in 1..=16"));
        }
        Ok(Self {
            priority_weight,
            returns: Returns::default(),
            turnover: Turnover::default(),
            seen: 0.0,
            turnover_ms: 0.0,
            marginal: 0.0,
            worth_ms: [0.0; PauseKind::COUNT],
        })
    }
}

impl CostAware {
    /// Weight of a priority: lower is more urgent.
    fn weight(&self, priority: f32) -> f32 {
        let mut weight = 1.0;
        let mut levels = clamped(priority, -8.0, 8.0);
        while levels <= -1.0 {
            weight *= self.priority_weight;
            levels += 1.0;
        }
        while levels >= 1.0 {
            weight /= self.priority_weight;
            levels -= 1.0;
        }
        weight
    }

    fn learn(&mut self) {
        self.seen = PauseKind::ALL.iter().map(|kind| self.returns.seen(*kind)).sum();
        if self.seen < ENOUGH || self.turnover_ms <= 0.0 {
            return;
        }
        let average = |idle_ms: f32| {
            let outlook = |kind: &PauseKind| self.returns.seen(*kind) * self.returns.outlook(*kind, idle_ms).per_ms;
            PauseKind::ALL.iter().map(outlook).sum::<f32>() / self.seen
        };
        // Where all that return do so within a turnover, what does not any more is worth nothing.
        let (marginal, least) = (average(self.turnover_ms), LEAST_MARGINAL * average(0.0));
        self.marginal = if marginal > least { marginal } else { least };
        if self.marginal <= 0.0 {
            return;
        }
        let longest_ms = MOST_TURNOVERS * self.turnover_ms;
        self.worth_ms = PauseKind::ALL.map(|kind| {
            if self.returns.seen(kind) < ENOUGH {
                return self.turnover_ms;
            }
            clamped(self.returns.worth_ms(kind, self.marginal), 0.0, longest_ms)
        });
    }
}

reads_pauses!(CostAware);

impl EvictionPolicy for CostAware {
    const INPUTS: &'static [Column] = &[
        Column::Hits,
        Column::AgeMs,
        Column::ComputedTokens,
        Column::Session,
        Column::Turn,
        Column::IdleMs,
        Column::LastGapMs,
        Column::GapMs,
        Column::Gaps,
        Column::StoppedForTool,
        Column::Priority,
        Column::Preemptions,
        Column::Awaited,
    ];

    fn observe(&mut self, memory: &Memory, batch: &Candidates<'_, Self>) {
        if memory.subject == Subject::Blocks {
            self.returns.observe(memory, batch);
            self.turnover.note(memory, batch.iter().filter(|block| block.hits() < 1.0).count());
            self.turnover_ms = self.turnover.ms(memory);
            self.learn();
        }
    }

    fn key(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        if memory.subject == Subject::Requests {
            // What is computed again, more for the urgent and for those that gave way before.
            return candidate.computed_tokens() * self.weight(candidate.priority()) * (1.0 + candidate.preemptions());
        }
        if candidate.awaited() > 0.0 {
            return awaited_since(memory.now_ms).0;
        }
        let used_ms = memory.now_ms as f32 - candidate.idle_ms();
        if self.marginal <= 0.0 {
            return used_ms;
        }
        let mut worth_ms = match candidate.session() {
            session if session > 0.0 => self.worth_ms[PauseKind::of_candidate(candidate).index()],
            _ => self.turnover_ms,
        };
        // Matches that are not those of its own session's turns: other prompts begin with it too.
        let turns = candidate.turn();
        let others = candidate.hits() - if turns > 1.0 { turns - 1.0 } else { 0.0 };
        if others > 0.0 {
            let age_ms = candidate.age_ms();
            let per_ms = others / if age_ms > LEAST_AGE_MS { age_ms } else { LEAST_AGE_MS };
            let shared_ms = clamped(per_ms / self.marginal, 0.0, MOST_TURNOVERS) * self.turnover_ms;
            worth_ms = if shared_ms > worth_ms { shared_ms } else { worth_ms };
        }
        used_ms + worth_ms * self.weight(candidate.priority())
    }

    fn keep_ms(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        if candidate.awaited() > 0.0 { awaited_since(memory.now_ms).1 } else { 0.0 }
    }
}

export_policy!(eviction: CostAware);

#[cfg(test)]
mod tests;

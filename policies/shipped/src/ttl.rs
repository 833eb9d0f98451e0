//! Blocks of a session that waits for a tool are kept for a time, then go by use (Continuum's CacheTTL).
//!
//! The time is the one that pays best: keeping a chain for longer makes its return more likely, and takes the place of
//! another chain for as long. Blocks that a waiting request needs are kept until it is admitted. Until enough pauses were seen it is `ttl_ms`. Nothing is pinned: when only kept blocks are
//! left, they go by use too.

use meridian_policy_sdk::eviction::{Candidate, Candidates, Column, EvictionPolicy, Memory, Subject};
use meridian_policy_sdk::{Init, PauseKind, Policy, Returns, Turnover, awaited_since, export_policy, reads_pauses};
use serde::Deserialize;

/// Pauses of a kind that must have been seen before they choose a time.
const ENOUGH: f32 = 16.0;
/// Candidates for a time: `ttl_ms` times a power of two, from one 16th to 16 times.
const TIMES: [f32; 9] = [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0];

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    ttl_ms: f32,
    tools_only: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { ttl_ms: 30_000.0, tools_only: true }
    }
}

/// The policy.
#[derive(Clone, Debug)]
pub struct Ttl {
    ttl_ms: f32,
    tools_only: bool,
    returns: Returns,
    turnover: Turnover,
    /// The time for each kind of pause, milliseconds.
    best_ms: [f32; PauseKind::COUNT],
}

impl Policy for Ttl {
    const NAME: &'static str = "ttl";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "Keeps the blocks of sessions that wait for a tool for a time that pays, then least recently used.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { ttl_ms, tools_only } = init.config()?;
        if !(ttl_ms > 0.0 && ttl_ms <= 8.64e7) {
            return Err(format!("ttl_ms: {ttl_ms}: must be above 0 and at most 86400000"));
        }
        let (returns, turnover) = (Returns::default(), Turnover::default());
        Ok(Self { ttl_ms, tools_only, returns, turnover, best_ms: [ttl_ms; PauseKind::COUNT] })
    }
}

impl Ttl {
    fn best_ms(&self, turnover_ms: f32, kind: PauseKind) -> f32 {
        if self.returns.seen(kind) < ENOUGH || turnover_ms <= 0.0 {
            return self.ttl_ms;
        }
        let (mut best_ms, mut best) = (0.0, 0.0);
        for times in TIMES {
            let ms = self.ttl_ms * times;
            // In units of computing the chain again: what a return saves, and what the place is worth to others.
            let gain =
                self.returns.chance(kind, 0.0, ms) - ms / turnover_ms * self.returns.chance(kind, 0.0, turnover_ms);
            if gain > best {
                (best_ms, best) = (ms, gain);
            }
        }
        best_ms
    }
}

reads_pauses!(Ttl);

impl EvictionPolicy for Ttl {
    const INPUTS: &'static [Column] = &[
        Column::Hits,
        Column::ComputedTokens,
        Column::Session,
        Column::Turn,
        Column::IdleMs,
        Column::LastGapMs,
        Column::GapMs,
        Column::Gaps,
        Column::StoppedForTool,
        Column::Awaited,
    ];

    fn observe(&mut self, memory: &Memory, batch: &Candidates<'_, Self>) {
        if memory.subject == Subject::Blocks {
            self.returns.observe(memory, batch);
            self.turnover.note(memory, batch.iter().filter(|block| block.hits() < 1.0).count());
            let turnover_ms = self.turnover.ms(memory);
            self.best_ms = PauseKind::ALL.map(|kind| self.best_ms(turnover_ms, kind));
        }
    }

    fn key(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        match memory.subject {
            Subject::Blocks if candidate.awaited() > 0.0 => awaited_since(memory.now_ms).0,
            Subject::Blocks => 0.0,
            Subject::Requests => candidate.computed_tokens(),
        }
    }

    fn keep_ms(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        if candidate.awaited() > 0.0 {
            return awaited_since(memory.now_ms).1;
        }
        let waits = candidate.stopped_for_tool() > 0.0 || !self.tools_only;
        if candidate.session() <= 0.0 || !waits {
            return 0.0;
        }
        let left_ms = self.best_ms[PauseKind::of_candidate(candidate).index()] - candidate.idle_ms();
        if left_ms > 0.0 { left_ms } else { 0.0 }
    }
}

export_policy!(eviction: Ttl);

//! Keeps the blocks that are needed next.
//!
//! Blocks that the prompt of a waiting request has matched go last, and of these the earliest request's after all others:
//! it is admitted first. Before them go the others by their last use, the one used longest ago first. A session that stopped
//! for a tool's result comes back without its user, so its blocks count as used `tool_s` later. Of requests the one that
//! has computed the fewest tokens is preempted first.

use meridian_policy_sdk::eviction::{Candidate, Column, EvictionPolicy, Memory, Subject};
use meridian_policy_sdk::{Init, Policy, awaited_since, export_policy};
use serde::Deserialize;

const MAX_TOOL_S: f32 = 86_400.0;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    tool_s: f32,
}

impl Default for Options {
    fn default() -> Self {
        Self { tool_s: 60.0 }
    }
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct NextUse {
    /// How much later a block counts as used whose session waits for a tool.
    tool_s: f32,
}

impl Policy for NextUse {
    const NAME: &'static str = "next-use";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Keeps what waiting requests have matched, then what was used last.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { tool_s } = init.config()?;
        if !(0.0..=MAX_TOOL_S).contains(&tool_s) {
            return Err(format!("tool_s: {tool_s}: must be in 0..={MAX_TOOL_S}"));
        }
        Ok(Self { tool_s })
    }
}

impl EvictionPolicy for NextUse {
    const INPUTS: &'static [Column] =
        &[Column::ComputedTokens, Column::IdleMs, Column::StoppedForTool, Column::Awaited];

    fn key(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        if memory.subject == Subject::Requests {
            return candidate.computed_tokens();
        }
        if candidate.awaited() > 0.0 {
            return awaited_since(memory.now_ms).0;
        }
        // In seconds: an `f32` tells tenths of them apart for ten days, and all blocks of a chain have the same key.
        (memory.now_ms / 1000.0) as f32 - candidate.idle_ms() / 1000.0 + candidate.stopped_for_tool() * self.tool_s
    }

    fn keep_ms(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        if candidate.awaited() > 0.0 { awaited_since(memory.now_ms).1 } else { 0.0 }
    }
}

export_policy!(eviction: NextUse);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tool_s_has_a_range() {
        let made = crate::made::<NextUse>;
        assert_eq!(made("{}").unwrap().tool_s, 60.0);
        assert_eq!(made("{\"tool_s\": 0}").unwrap().tool_s, 0.0);
        assert_eq!(made("{\"tool_s\": -1}").unwrap_err(), "tool_s: -1: must be in 0..=86400");
        assert!(made("{\"tools\": 1}").is_err());
    }
}

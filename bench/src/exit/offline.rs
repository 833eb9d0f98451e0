//! Shipped policies on recorded thoughts: the rule that an engine would load decides, not a copy of it.

use meridian_core::budget::{BudgetCandidate, BudgetDecider, Load, Observed, Verdict};
use meridian_core::slot::BudgetSlot;
use meridian_core::{Budget, MeridianConfig, native};

use super::{Thought, ThoughtPoint};

/// Where the native policy `name` with these options ends a thought, asked at each of its probes.
///
/// # Panics
/// There is no such policy, or it refuses its options.
pub(super) fn exit<'a>(name: &str, options: &str, thought: &'a Thought) -> Option<&'a ThoughtPoint> {
    let targets = MeridianConfig::default().scheduler.targets();
    let policy = native::policy::<Budget>(name, targets, options).expect("a shipped policy and options in range");
    let mut slot = BudgetSlot::new(policy, targets);
    let load = Load { thinking: 1, ..Load::default() };
    let mut ends = |(number, (point, _)): &(usize, (&'a ThoughtPoint, f64))| {
        let observed = Observed {
            think_tokens: point.think_tokens,
            is_probed: true,
            probes: u32::try_from(number + 1).unwrap_or(u32::MAX),
            confidence: point.confidence,
            ..Observed::default()
        };
        let candidate = BudgetCandidate { request: 1, observed, ..BudgetCandidate::default() };
        slot.probe(&load, &[candidate]) == [Verdict::EndNow]
    };
    thought.probes().enumerate().find(|probe| ends(probe)).map(|(_, (point, _))| point)
}

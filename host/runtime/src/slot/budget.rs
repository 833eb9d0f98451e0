use meridian_core::budget::{BudgetCandidate, Load, Point, Thresholds, Verdict};
use meridian_core::{Budget, BudgetDecision, EntropyUnit, columns};

use super::PolicySlot;
use crate::stats::Source;

/// The budget slot, owned by whoever follows the thinking of the requests.
///
/// ```
/// use meridian_core::budget::{BudgetCandidate, Load, Observed, Thresholds, Verdict};
/// use meridian_core::{Budget, EntropyUnit, MeridianConfig, native};
/// use meridian_runtime::BudgetSlot;
///
/// let targets = MeridianConfig::default().scheduler.targets();
/// let mut slot = BudgetSlot::new(native::policy::<Budget>("eat-rpdi", targets, "{}").unwrap(), targets);
/// let configured = Thresholds::default();
/// let load = Load { configured: configured.for_policy(EntropyUnit::Bits), thinking: 1, ..Load::default() };
/// assert_eq!(slot.start(&load, EntropyUnit::Bits, &[BudgetCandidate::default()]), [configured]);
/// let observed = Observed { is_probed: true, probes: 9, eat_bits: Some(0.1), eat_variance_bits2: Some(0.0), ..Observed::default() };
/// let settled = BudgetCandidate { observed, ..BudgetCandidate::default() };
/// assert_eq!(slot.probe(&load, &[settled, BudgetCandidate::default()]), [Verdict::EndNow, Verdict::KeepThinking]);
/// ```
pub type BudgetSlot = PolicySlot<Budget>;

impl PolicySlot<Budget> {
    /// Requests begin to think: the thresholds of each, with variances in `unit` squared.
    pub fn start(&mut self, load: &Load, unit: EntropyUnit, candidates: &[BudgetCandidate]) -> Vec<Thresholds> {
        let load = Load { point: Point::Start, ..*load };
        let (_, decision) = self.ask(&load, candidates);
        let configured = Thresholds::from_policy(&load.configured, unit).unwrap_or_default();
        let mut answered = decision.thresholds.iter();
        candidates
            .iter()
            // Checked, so the conversion holds; only rounding at the edge of a range could make it fail.
            .map(|_| answered.next().and_then(|given| Thresholds::from_policy(given, unit).ok()).unwrap_or(configured))
            .collect()
    }

    /// Requests have something new to weigh: the verdict on each.
    pub fn probe(&mut self, load: &Load, candidates: &[BudgetCandidate]) -> Vec<Verdict> {
        let load = Load { point: Point::Probe, ..*load };
        let (_, decision) = self.ask(&load, candidates);
        let mut verdicts = decision.verdicts.clone();
        verdicts.resize(candidates.len(), Verdict::Default);
        verdicts
    }

    fn ask(&mut self, load: &Load, candidates: &[BudgetCandidate]) -> (Source, &BudgetDecision) {
        self.decide_by(load, candidates.len(), |inputs, out| columns::fill_budget(inputs, candidates, out))
    }
}

use meridian_core::budget::{BudgetCandidate, BudgetDecider, BudgetWants, Load, Point, ThinkThresholds, Verdict};
use meridian_core::{Budget, BudgetColumn as Column, BudgetDecision, EntropyUnit, SlotConfig, Source, columns};

use super::PolicySlot;
use crate::sync::lock;

/// The budget slot, owned by the thread that follows the thinking of the requests.
///
/// ```
/// use meridian_core::budget::{BudgetCandidate, BudgetDecider, Load, Observed, ThinkThresholds, Verdict};
/// use meridian_core::{Budget, EntropyUnit, MeridianConfig, native};
/// use meridian_runtime::BudgetSlot;
///
/// let targets = MeridianConfig::default().scheduler.targets();
/// let mut slot = BudgetSlot::new(native::policy::<Budget>("eat-rpdi", targets, "{}").unwrap(), targets);
/// let configured = ThinkThresholds::default();
/// let load = Load { configured: configured.for_policy(EntropyUnit::Bits), thinking: 1, ..Load::default() };
/// assert_eq!(slot.start(&load, EntropyUnit::Bits, &[BudgetCandidate::default()]), [configured]);
/// let observed = Observed { is_probed: true, probes: 9, eat_bits: Some(0.1), eat_variance_bits2: Some(0.0), ..Observed::default() };
/// let settled = BudgetCandidate { observed, ..BudgetCandidate::default() };
/// assert_eq!(slot.probe(&load, &[settled, BudgetCandidate::default()]), [Verdict::EndNow, Verdict::KeepThinking]);
/// ```
pub type BudgetSlot = PolicySlot<Budget>;

impl BudgetDecider for PolicySlot<Budget> {
    fn wants(&self) -> BudgetWants {
        let state = &*lock(&self.state);
        let active = state.active.policy.policy();
        let shadow = state.shadow.as_ref().map(|shadow| (shadow.inputs(), shadow.weighs_signals_alone()));
        let version = &state.active.version;
        let default = SlotConfig::budget().source;
        let is_default = version.source == default && version.sha256.is_empty();
        let decides = !is_default || state.shadow.is_some() || state.witness.is_some();
        let mut wants = BudgetWants { swaps: state.swaps, decides, ..BudgetWants::default() };
        for (inputs, by_signals) in
            [Some((active.inputs(), active.weighs_signals_alone())), shadow].into_iter().flatten()
        {
            wants.answers |= inputs.contains(&Column::SameAnswers) || inputs.contains(&Column::Confidence);
            wants.index |= inputs.contains(&Column::Rpdi) && !by_signals;
            wants.boundaries |= !by_signals;
            wants.repetition |= inputs.contains(&Column::Repetition) || inputs.contains(&Column::RepetitionPeriod);
        }
        wants
    }

    fn start(&mut self, load: &Load, unit: EntropyUnit, candidates: &[BudgetCandidate]) -> Vec<ThinkThresholds> {
        let load = Load { point: Point::Start, ..*load };
        let (_, decision) = self.ask(&load, candidates);
        let configured = ThinkThresholds::from_policy(&load.configured, unit).unwrap_or_default();
        let mut answered = decision.thresholds.iter();
        candidates
            .iter()
            // The values are checked, so the conversion succeeds; only rounding at the edge of a range could make it
            // fail.
            .map(|_| {
                answered.next().and_then(|given| ThinkThresholds::from_policy(given, unit).ok()).unwrap_or(configured)
            })
            .collect()
    }

    fn probe(&mut self, load: &Load, candidates: &[BudgetCandidate]) -> Vec<Verdict> {
        let load = Load { point: Point::Probe, ..*load };
        let (_, decision) = self.ask(&load, candidates);
        let mut verdicts = decision.verdicts.clone();
        verdicts.resize(candidates.len(), Verdict::Default);
        verdicts
    }

    fn finished(&mut self, requests: &[u32]) {
        self.note_finished(requests);
    }
}

impl PolicySlot<Budget> {
    fn ask(&mut self, load: &Load, candidates: &[BudgetCandidate]) -> (Source, &BudgetDecision) {
        self.decide_by(load, candidates.len(), |inputs, out| columns::fill_budget(inputs, candidates, out))
    }
}

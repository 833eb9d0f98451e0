use super::facts::Reader;
use super::{PolicySlot, Source};
use crate::budget::{BudgetCandidate, BudgetDecider, BudgetWants, Load, Point, Thresholds, Verdict, check_thresholds};
use crate::{Budget, BudgetColumn as Column, BudgetDecision, PolicySource, SlotKind, columns};

/// The budget slot, owned by the thread that follows the thinking of the requests.
///
/// ```
/// use meridian_core::budget::{BudgetCandidate, BudgetDecider, Load, Observed, Thresholds, Verdict};
/// use meridian_core::slot::BudgetSlot;
/// use meridian_core::{Budget, MeridianConfig, native};
///
/// let targets = MeridianConfig::default().scheduler.targets();
/// let mut slot = BudgetSlot::new(native::policy::<Budget>("eat-rpdi", targets, "{}").unwrap(), targets);
/// let configured = Thresholds::default();
/// let load = Load { configured, thinking: 1, ..Load::default() };
/// assert_eq!(slot.start(&load, &[BudgetCandidate::default()]), [configured]);
/// let observed = Observed { is_probed: true, probes: 9, eat_bits: Some(0.1), eat_variance_bits2: Some(0.0), ..Observed::default() };
/// let settled = BudgetCandidate { observed, ..BudgetCandidate::default() };
/// assert_eq!(slot.probe(&load, &[settled, BudgetCandidate::default()]), [Verdict::EndNow, Verdict::KeepThinking]);
/// ```
pub type BudgetSlot = PolicySlot<Budget>;

impl BudgetDecider for PolicySlot<Budget> {
    fn wants(&self) -> BudgetWants {
        let facts = &*self.facts();
        let version = &facts.version;
        let native = PolicySource::of(&version.source).native().filter(|_| version.sha256.is_empty());
        let is_default = native == Some(Budget::NATIVES[0]);
        let decides = !is_default || facts.is_watched();
        let mut wants = BudgetWants { swaps: facts.swaps, decides, ..BudgetWants::default() };
        for Reader { inputs, weighs_signals_alone: by_signals } in &facts.readers {
            wants.answers |= inputs.contains(&Column::SameAnswers) || inputs.contains(&Column::Confidence);
            wants.index |= inputs.contains(&Column::Rpdi) && !by_signals;
            wants.boundaries |= !by_signals;
            wants.repetition |= inputs.contains(&Column::Repetition) || inputs.contains(&Column::RepetitionPeriod);
        }
        wants
    }

    fn start(&mut self, load: &Load, candidates: &[BudgetCandidate]) -> Vec<Thresholds> {
        let load = Load { point: Point::Start, ..*load };
        let (_, decision) = self.ask(&load, candidates);
        let holds = |thresholds: &Thresholds| check_thresholds(thresholds).is_ok();
        let configured = if holds(&load.configured) { load.configured } else { Thresholds::default() };
        // The default's answer is not checked, and comes of a configuration that a caller may have made.
        let mut thresholds: Vec<_> =
            decision.thresholds.iter().map(|given| if holds(given) { *given } else { configured }).collect();
        thresholds.resize(candidates.len(), configured);
        thresholds
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

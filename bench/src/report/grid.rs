//! The runs by rate and policy.

use crate::compare::interval_of_ratios;
use crate::results::{Better, METRICS, Metric, Results, Run};

/// Mean and range over seeds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread {
    pub mean: f64,
    pub low: f64,
    pub high: f64,
    pub count: usize,
}

impl Spread {
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        let first = *values.first()?;
        let (low, high) = values.iter().fold((first, first), |(low, high), &v| (low.min(v), high.max(v)));
        let mean = (values.iter().sum::<f64>() / values.len() as f64).clamp(low, high);
        Some(Self { mean, low, high, count: values.len() })
    }
}

pub(super) struct Grid<'a> {
    pub results: &'a Results,
    /// The baseline first, the others as they appear.
    pub policies: Vec<&'a str>,
    /// Rising.
    pub rates: Vec<f64>,
}

impl<'a> Grid<'a> {
    pub(super) fn new(results: &'a Results) -> Self {
        let mut policies = Vec::<&str>::new();
        let mut rates = Vec::<f64>::new();
        for run in results.runs.iter().filter(|run| run.rate.is_finite()) {
            if !policies.contains(&run.policy.as_str()) {
                policies.push(&run.policy);
            }
            if !rates.contains(&run.rate) {
                rates.push(run.rate);
            }
        }
        policies.sort_by_key(|policy| *policy != results.baseline);
        rates.sort_by(f64::total_cmp);
        Self { results, policies, rates }
    }

    /// One a seed.
    pub(super) fn runs(&self, rate: f64, policy: usize) -> Vec<&'a Run> {
        let is_it = |run: &&Run| run.rate == rate && run.policy == self.policies[policy];
        self.results.runs.iter().filter(is_it).collect()
    }

    /// Who decided in a slot, by policy.
    pub(super) fn in_slot(&self, rate: f64, slot: &str) -> Vec<Option<&'a str>> {
        let name = |policy| self.runs(rate, policy).first().and_then(|run| run.slots.get(slot)).map(String::as_str);
        (0..self.policies.len()).map(name).collect()
    }

    pub(super) fn spread(&self, rate: f64, policy: usize, key: &str) -> Option<Spread> {
        Spread::of(self.runs(rate, policy).iter().filter_map(|run| run.metrics.get(key).copied()))
    }

    /// The policy that is better than all others, where the intervals of its ratios to them say so, or, for a metric that
    /// batches do not have, the values.
    fn best(&self, rate: f64, metric: &Metric, cells: &[Option<Spread>]) -> Option<usize> {
        let sign = match metric.better {
            Better::Lower => 1.0,
            Better::Higher => -1.0,
            Better::Neither => return None,
        };
        let value = |at: usize| cells[at].map(|cell| sign * cell.mean);
        let known = (0..cells.len()).filter(|at| value(*at).is_some());
        let best = known.clone().min_by(|a, b| value(*a).partial_cmp(&value(*b)).expect("finite"))?;
        let runs = |policy: usize| self.runs(rate, policy);
        let is_behind = |other: usize| {
            let pairs: Vec<(&Run, &Run)> = runs(best).into_iter().zip(runs(other)).collect();
            match interval_of_ratios(metric.key, &pairs) {
                Some([low, _]) if sign > 0.0 => low > 1.0,
                Some([_, high]) => high < 1.0,
                None => value(other) > value(best),
            }
        };
        known.filter(|other| *other != best).all(is_behind).then_some(best).filter(|_| cells.len() > 1)
    }

    /// The metrics that any run at the rate has, with a value a policy.
    pub(super) fn rows(&self, rate: f64) -> Vec<Row> {
        let row = |metric: &'static Metric| {
            let cells: Vec<_> = (0..self.policies.len()).map(|at| self.spread(rate, at, metric.key)).collect();
            let best = self.best(rate, metric, &cells);
            cells.iter().any(Option::is_some).then_some(Row { metric, cells, best })
        };
        METRICS.iter().filter_map(row).collect()
    }
}

/// One metric at one rate.
pub(super) struct Row {
    pub metric: &'static Metric,
    /// By policy.
    pub cells: Vec<Option<Spread>>,
    best: Option<usize>,
}

impl Row {
    /// To the baseline, of another policy; of metrics that can be better or worse.
    pub(super) fn ratio(&self, policy: usize) -> Option<f64> {
        let (base, value) = (self.cells[0]?.mean, self.cells[policy]?.mean);
        (policy > 0 && base != 0.0 && self.metric.better != Better::Neither).then_some(value / base)
    }

    /// Whether a policy is better than all others.
    pub(super) fn is_best(&self, policy: usize) -> bool {
        self.best == Some(policy)
    }
}

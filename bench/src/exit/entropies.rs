//! How the entropies of probes move in recorded thoughts, for thoughts that are simulated.

use std::sync::LazyLock;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::ExitRecording;

/// A probe below this entropy is settled, bits: in the recorded thoughts entropies are either well below or far above it.
const SETTLED_BELOW_BITS: f64 = 0.5;
/// Quantiles that are kept of each distribution, ends included.
const QUANTILES: usize = 21;
const RECORDED: &str = include_str!("../../results/entropies.json");

/// Distributions of recorded thoughts, as quantiles from the lowest to the highest value.
///
/// A thought settles at the first probe from which all later ones are settled. Where that is, and what probes find before and after,
/// are drawn independently of each other: the model has the levels and their order, and no correlation between probes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EntropyModel {
    /// What was recorded.
    pub source: String,
    /// Recorded thoughts.
    pub thoughts: usize,
    /// Part of a thought's tokens after which it has settled, 0 to 1; 1 for one that never does.
    pub settles: Vec<f64>,
    /// Entropies of probes before that, bits.
    pub unsettled_bits: Vec<f64>,
    /// Entropies of probes from there on, bits.
    pub settled_bits: Vec<f64>,
}

impl EntropyModel {
    /// The model in `bench/results/entropies.json`, fitted to thoughts of the bundled reasoner.
    ///
    /// # Panics
    /// Never: a test reads the file.
    #[must_use]
    pub fn recorded() -> &'static Self {
        static MODEL: LazyLock<EntropyModel> =
            LazyLock::new(|| serde_json::from_str(RECORDED).expect("bench/results/entropies.json is an entropy model"));
        &MODEL
    }

    /// Fit to recorded thoughts.
    ///
    /// # Errors
    /// No thought has probes both before and after it settles.
    pub fn fit(recording: &ExitRecording, source: &str) -> anyhow::Result<Self> {
        let (mut settles, mut unsettled, mut settled) = (Vec::new(), Vec::new(), Vec::new());
        for thought in &recording.thoughts {
            let probes: Vec<(u32, f64)> = thought.probes().map(|(point, bits)| (point.think_tokens, bits)).collect();
            if probes.is_empty() || thought.end_tokens() == 0 {
                continue;
            }
            let from = probes.iter().rposition(|(_, bits)| *bits >= SETTLED_BELOW_BITS).map_or(0, |last| last + 1);
            let at = probes.get(from).map_or(1.0, |probe| f64::from(probe.0) / f64::from(thought.end_tokens()));
            settles.push(at.min(1.0));
            unsettled.extend(probes[..from].iter().map(|probe| probe.1));
            settled.extend(probes[from..].iter().map(|probe| probe.1));
        }
        ensure!(
            !unsettled.is_empty() && !settled.is_empty(),
            "{} thoughts: expected probes above and below {SETTLED_BELOW_BITS} bits",
            recording.thoughts.len()
        );
        Ok(Self {
            source: source.to_owned(),
            thoughts: settles.len(),
            settles: quantiles(settles),
            unsettled_bits: quantiles(unsettled),
            settled_bits: quantiles(settled),
        })
    }

    /// Part of a thought after which it settles, for a draw from 0 to 1.
    pub(crate) fn settles_at(&self, draw: f64) -> f64 {
        at(&self.settles, draw)
    }

    /// Entropy of a probe, bits, for a draw from 0 to 1.
    pub(crate) fn bits(&self, is_settled: bool, draw: f64) -> f64 {
        at(if is_settled { &self.settled_bits } else { &self.unsettled_bits }, draw)
    }
}

fn quantiles(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    let rounded = |value: f64| (value * 1e4).round() / 1e4;
    (0..QUANTILES).map(|i| rounded(at(&values, i as f64 / (QUANTILES - 1) as f64))).collect()
}

/// Between sorted values, evenly spaced from 0 to 1; linear.
fn at(sorted: &[f64], part: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = part.clamp(0.0, 1.0) * last as f64;
    let below = place as usize;
    let above = sorted[(below + 1).min(last)];
    sorted[below] + (above - sorted[below]) * (place - below as f64)
}

#[cfg(test)]
mod tests {
    use super::super::{Thought, ThoughtPoint};
    use super::*;

    fn thought(bits: &[f64]) -> Thought {
        let point = |(i, bits): (usize, &f64)| ThoughtPoint {
            think_tokens: 10 * (i as u32 + 1),
            bits: Some(*bits),
            ..ThoughtPoint::default()
        };
        Thought::new(bits.iter().enumerate().map(point).collect(), 1, 10 * bits.len() as u32, true)
    }

    #[test]
    fn a_thought_settles_where_no_later_probe_is_open() {
        let recording = ExitRecording {
            thoughts: vec![thought(&[4.0, 0.1, 4.2, 0.01, 0.02]), thought(&[4.4, 4.4])],
            faults: std::collections::BTreeMap::new(),
        };
        let model = EntropyModel::fit(&recording, "made up").expect("probes on both sides");
        assert_eq!(model.thoughts, 2);
        assert_eq!((model.settles_at(0.0), model.settles_at(1.0)), (0.8, 1.0));
        assert_eq!((model.bits(false, 0.0), model.bits(false, 1.0)), (0.1, 4.4));
        assert_eq!((model.bits(true, 0.0), model.bits(true, 1.0)), (0.01, 0.02));
        assert!(model.settles.is_sorted() && model.settles.len() == QUANTILES);
    }

    #[test]
    fn without_probes_on_both_sides_nothing_is_fitted() {
        for thoughts in [vec![], vec![thought(&[4.0, 4.0])], vec![thought(&[0.0])]] {
            let recording = ExitRecording { thoughts, faults: std::collections::BTreeMap::new() };
            assert!(EntropyModel::fit(&recording, "").is_err());
        }
    }

    #[test]
    fn the_recorded_model_is_one() {
        let model = EntropyModel::recorded();
        assert!(model.thoughts >= 500);
        for of in [&model.settles, &model.unsettled_bits, &model.settled_bits] {
            assert!(of.len() == QUANTILES && of.is_sorted() && of[0] >= 0.0);
        }
        assert!(model.bits(false, 0.5) > SETTLED_BELOW_BITS && model.bits(true, 1.0) < SETTLED_BELOW_BITS);
    }
}

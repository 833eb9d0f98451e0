//! A predicted change, as `meridian bench predict` writes it and a roll-out or an experiment shows it beside its outcome.

use std::collections::BTreeMap;
use std::path::Path;

use meridian_core::file::read_regular;
use meridian_core::text::printable;
use meridian_engine::control::{SlotName, Version};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The version of the format.
pub const PREDICTION_FORMAT: &str = "meridian-prediction/1";
/// Largest file that is read, bytes.
const MAX_BYTES: u64 = 1 << 20;

/// A predicted change of policy.
///
/// ```
/// use meridian_fleet::Prediction;
///
/// let text = r#"{"format": "meridian-prediction/1", "slot": "dispatch", "old": {"name": "fcfs", "version": "1", "sha256": ""},
///     "new": {"name": "srpt", "version": "1", "sha256": ""}, "recording": "a.arrow", "seed": 1,
///     "metrics": {"output_itl_p99": {"ratio": 0.8, "low": 0.7, "high": 0.9}}}"#;
/// let prediction = Prediction::parse("p.json", text.as_bytes())?;
/// assert_eq!(prediction.metrics["output_itl_p99"].high, 0.9);
/// # Ok::<(), meridian_fleet::PredictionError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// [`PREDICTION_FORMAT`].
    pub format: String,
    /// The slot.
    pub slot: SlotName,
    /// The policy of the recording.
    pub old: PolicyName,
    /// The policy in its place.
    pub new: PolicyName,
    /// The predicted ratio of each metric, by its name.
    pub metrics: BTreeMap<String, PredictedRatio>,
    /// The recording, by the names of its files.
    pub recording: String,
    /// The seed of the prediction.
    pub seed: u64,
    /// The data behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub basis: Option<Basis>,
}

/// A policy by its identity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyName {
    /// The name that the policy gives itself.
    pub name: String,
    /// Its version.
    pub version: String,
    /// SHA-256 of its component; empty for a native policy.
    pub sha256: String,
    /// The options of its start, one JSON object.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub options: String,
}

impl From<&Version> for PolicyName {
    fn from(version: &Version) -> Self {
        let Version { name, version, sha256, source: _, options } = version.clone();
        Self { name, version, sha256, options }
    }
}

/// The predicted ratio of a metric, new over old.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PredictedRatio {
    /// The ratio.
    pub ratio: f64,
    /// Lower end of its interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// The data behind a prediction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Basis {
    /// Requests of the recording.
    pub requests: u64,
    /// Its length, seconds.
    pub seconds: f64,
    /// Resampled recordings that the intervals come from.
    pub replicates: u32,
    /// The share of measured ratios that the intervals are meant to hold.
    pub confidence: f64,
    /// Metrics of the old policy as recorded, milliseconds or tokens a second.
    pub recorded: BTreeMap<String, f64>,
    /// Metrics of the old policy as simulated; the difference from `recorded` is the error of the simulator.
    pub simulated: BTreeMap<String, f64>,
    /// Facts to know before trusting the prediction, a line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A file that is not a prediction.
#[derive(Debug, Error)]
#[error("{file}: {problem}", problem = printable(problem))]
pub struct PredictionError {
    /// The file.
    pub file: String,
    /// The problem and the expectation.
    pub problem: String,
    /// The cause, if there is one.
    pub source: Option<std::io::Error>,
}

impl Prediction {
    /// Read a file.
    ///
    /// # Errors
    /// The file, the field, the value and the expectation.
    pub fn read(path: &Path) -> Result<Self, PredictionError> {
        let file = path.display().to_string();
        match read_regular(path, MAX_BYTES) {
            Ok(Some(bytes)) => Self::parse(&file, &bytes),
            Ok(None) => Err(PredictionError { file, problem: "is larger than 1 MiB".into(), source: None }),
            Err(error) => Err(PredictionError { file, problem: "cannot be read".into(), source: Some(error) }),
        }
    }

    /// Read the bytes of a file; `file` is its name in errors.
    ///
    /// # Errors
    /// As [`Prediction::read`].
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self, PredictionError> {
        let failed = |problem: String| PredictionError { file: file.to_owned(), problem, source: None };
        let found: Self = serde_json::from_slice(bytes)
            .map_err(|error| failed(format!("expected what `meridian bench predict --out` writes: {error}")))?;
        if found.format != PREDICTION_FORMAT {
            return Err(failed(format!("format: {:?}: expected {PREDICTION_FORMAT:?}", found.format)));
        }
        for (name, PredictedRatio { ratio, low, high }) in &found.metrics {
            let is_interval = [low, ratio, high].iter().all(|value| value.is_finite() && **value > 0.0)
                && low <= ratio
                && ratio <= high;
            if !is_interval {
                let problem =
                    format!("metrics.{name}: {ratio} from {low} to {high}: expected 0 < low <= ratio <= high");
                return Err(failed(problem));
            }
        }
        Ok(found)
    }

    /// The metrics whose outcome has an interval that does not meet the predicted one.
    pub fn misses<'a>(
        &'a self,
        outcome: impl Fn(&str) -> Option<PredictedRatio> + 'a,
    ) -> impl Iterator<Item = &'a str> + 'a {
        self.metrics.iter().filter_map(move |(name, predicted)| {
            let measured = outcome(name)?;
            (measured.low > predicted.high || measured.high < predicted.low).then_some(name.as_str())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prediction(ratio: f64) -> Prediction {
        let interval = PredictedRatio { ratio, low: 0.5, high: 0.9 };
        Prediction {
            format: PREDICTION_FORMAT.into(),
            slot: SlotName::Dispatch,
            old: PolicyName::default(),
            new: PolicyName { options: "{\"a\":1}".into(), ..PolicyName::default() },
            metrics: [("ttft_p99".to_owned(), interval)].into(),
            recording: "a.arrow".into(),
            seed: 1,
            basis: Some(Basis { requests: 3, ..Basis::default() }),
        }
    }

    #[test]
    fn a_prediction_is_read_as_it_was_written() {
        let written = serde_json::to_vec(&prediction(0.7)).expect("plain data");
        assert_eq!(Prediction::parse("p", &written).expect("a prediction"), prediction(0.7));
    }

    #[test]
    fn what_is_no_prediction_is_refused_with_the_field() {
        let refused = |text: &[u8]| Prediction::parse("p.json", text).expect_err("refused").to_string();
        assert!(refused(b"{").starts_with("p.json: expected what `meridian bench predict --out` writes"));
        let wrong = serde_json::to_vec(&prediction(1.7)).expect("plain data");
        assert_eq!(refused(&wrong), "p.json: metrics.ttft_p99: 1.7 from 0.5 to 0.9: expected 0 < low <= ratio <= high");
        let other = Prediction { format: "meridian-prediction/9".into(), ..prediction(0.7) };
        let other = serde_json::to_vec(&other).expect("plain data");
        assert_eq!(refused(&other), "p.json: format: \"meridian-prediction/9\": expected \"meridian-prediction/1\"");
    }

    #[test]
    fn an_outcome_misses_where_the_intervals_do_not_meet() {
        let outcome = |low, high| move |_: &str| Some(PredictedRatio { ratio: low, low, high });
        assert_eq!(prediction(0.7).misses(outcome(0.85, 1.2)).count(), 0);
        assert_eq!(prediction(0.7).misses(outcome(0.95, 1.2)).collect::<Vec<_>>(), ["ttft_p99"]);
        assert_eq!(prediction(0.7).misses(|_| None).count(), 0);
    }
}

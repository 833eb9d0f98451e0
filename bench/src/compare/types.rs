//! What is asked, and what is found.

use serde::Serialize;

use crate::results::SCHEMA;
#[cfg(doc)]
use crate::results::{METRICS, Run};

/// Share of the intervals that hold the true change; 1 less this is the chance of any false verdict in a comparison.
pub const CONFIDENCE: f64 = 0.95;

/// What to compare, and when a change counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Only this policy of A. When just one of the two is named, it is meant in both.
    pub policy_a: Option<String>,
    /// Only this policy of B.
    pub policy_b: Option<String>,
    /// Smallest change that is not noise, as a share: 0.01 is 1 %.
    pub min_change: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self { policy_a: None, policy_b: None, min_change: 0.01 }
    }
}

/// Why two results cannot be compared.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CompareError {
    /// Results of another version of the format.
    #[error("schema of {side}: {found}: expected {SCHEMA}")]
    Schema {
        /// `A` or `B`.
        side: &'static str,
        /// Its version.
        found: u32,
    },
    /// The runs are not over the same requests.
    #[error("different traces: {what} is {a} in A and {b} in B")]
    Trace {
        /// The fact that differs.
        what: String,
        /// In A.
        a: String,
        /// In B.
        b: String,
    },
    /// A policy that was asked for is not there.
    #[error("{side} has no run of policy {policy:?}: expected one of {known}")]
    Policy {
        /// `A` or `B`.
        side: &'static str,
        /// As asked.
        policy: String,
        /// Those that are there.
        known: String,
    },
    /// Nothing to pair.
    #[error("no common runs: no policy, rate and seed of A is in B")]
    NoCommonRuns,
    /// [`Options::min_change`] is no share.
    #[error("min_change {0}: expected a share, 0 or more")]
    MinChange(f64),
}

/// What became of a metric from A to B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeVerdict {
    /// It is better in B.
    Better,
    /// It is worse in B.
    Worse,
    /// No change that counts.
    Noise,
    /// Too few batches and seeds to tell.
    Unknown,
}

/// How a change is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// Relative to A: 0.1 is 10 % more. Of values that are all positive.
    Ratio,
    /// B less A, in the metric's unit.
    Difference,
}

/// What a change was measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Groups of consecutive requests, [`Run::batches`].
    Batches,
    /// Whole runs, one a seed.
    Seeds,
}

/// One metric of one pair of policies.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// As in [`METRICS`].
    pub key: &'static str,
    /// For tables.
    pub title: &'static str,
    /// Of `a` and `b`.
    pub unit: &'static str,
    /// Value of the whole run, mean over seeds.
    pub a: f64,
    /// Value of the whole run of B, mean over seeds.
    pub b: f64,
    /// Of `change`, `low` and `high`.
    pub scale: Scale,
    /// Mean change over the batches; it need not be that of `a` and `b`.
    pub change: Option<f64>,
    /// 95 % interval of the change, from.
    pub low: Option<f64>,
    /// To.
    pub high: Option<f64>,
    /// Chance of such a change when there is none, after Holm's correction for the number of metrics.
    pub p: Option<f64>,
    /// What was paired.
    pub source: Source,
    /// How many means the interval comes from.
    pub pairs: usize,
    /// B against A.
    pub verdict: ChangeVerdict,
}

/// One policy of A with one of B, at one rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// Policy of A.
    pub policy_a: String,
    /// Policy of B.
    pub policy_b: String,
    /// Requests a second.
    pub rate: f64,
    /// Common seeds.
    pub seeds: Vec<u64>,
    /// In the order of [`METRICS`]; those without a better direction are left out.
    pub metrics: Vec<Change>,
}

/// The comparison of B with A.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// [`Options::min_change`].
    pub min_change: f64,
    /// [`CONFIDENCE`].
    pub confidence: f64,
    /// What a reader should know, a line each: engines that differ, runs without a partner.
    pub notes: Vec<String>,
    /// By rate, then policy.
    pub groups: Vec<Group>,
    /// Metrics that are worse.
    pub worse: usize,
    /// Metrics that are better.
    pub better: usize,
}

impl Comparison {
    /// 1 when anything is worse, else 0.
    pub fn exit_code(&self) -> u8 {
        u8::from(self.worse > 0)
    }
}

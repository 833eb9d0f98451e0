use meridian_core::config;
use serde::{Deserialize, Serialize};

use super::WorkloadError;

/// What to generate. Presets are in [`Workload::NAMES`]. What a TOML file leaves out is as in
/// [`Workload::reasoning_chat`], but for an `arrivals` section, which has a wave and a regime only where it says so.
///
/// ```
/// use meridian_bench::trace::{Generator, Workload};
///
/// let workload = Workload::from_toml("preset = 'plain-chat'\nrequests_per_s = 4.0\n[sessions]\nshare = 0.5\n")?;
/// let requests: Vec<_> = Generator::new(&workload, 1)?.take(100).collect();
/// assert!(requests.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s));
/// # Ok::<(), meridian_bench::trace::WorkloadError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Workload {
    /// Mean rate of requests, later turns included, per second.
    pub requests_per_s: f64,
    /// How they cluster.
    pub arrivals: Arrivals,
    /// Lengths of first prompts.
    pub prompt: Prompt,
    /// Kinds of generation: how long, and how much of it is thinking.
    pub modes: Vec<Mode>,
    /// Most generated tokens of a request, thinking and answer.
    pub most_generated_tokens: u32,
    /// Who sends them.
    pub tenants: Tenants,
    /// Priorities and deadlines; none means priority 0 without a deadline.
    pub classes: Vec<Class>,
    /// Conversations.
    pub sessions: Sessions,
}

/// How arrivals cluster. Gaps are Gamma with the given coefficient of variation, in a
/// time that the wave and the regime stretch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Arrivals {
    /// Standard deviation over mean of the gaps: 0 is a metronome, 1 a Poisson process, more is bursts.
    pub gap_cv: f64,
    /// A slow sine in the rate.
    pub wave: Option<Wave>,
    /// Random switches between a busy and a quiet rate.
    pub regime: Option<Regime>,
}

/// The rate times `1 + amplitude * sin(2 pi t / period_s)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wave {
    /// Below 1.
    pub amplitude: f64,
    /// Seconds.
    pub period_s: f64,
}

/// Busy and quiet stretches of exponential length; the mean rate stays.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Regime {
    /// Rate in a busy stretch over the mean rate, from 1 to below `1 / share`.
    pub factor: f64,
    /// Share of time that is busy.
    pub share: f64,
    /// Mean length of a busy and the following quiet stretch together, seconds; at least a mean gap between requests.
    pub cycle_s: f64,
}

/// Log-normal lengths with a bounded Pareto tail, tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Prompt {
    /// Median of the body.
    pub median: f64,
    /// Standard deviation of the body's logarithm.
    pub sigma: f64,
    /// Share of prompts in the tail.
    pub tail_share: f64,
    /// Where the tail starts.
    pub tail_from: f64,
    /// Where it ends.
    pub tail_to: f64,
    /// Exponent of the tail; near 0 all orders of magnitude are alike.
    pub tail_alpha: f64,
    /// Longest prompt, of body and tail.
    pub most_tokens: u32,
}

/// A kind of generation: reasoning traffic has two, in which thinking is most of the tokens or about half (ServeGen).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mode {
    /// Weight among the modes.
    pub weight: f64,
    /// Mean share of thinking in the generated tokens, 0 for none.
    pub think_share: f64,
    /// Sum of the parameters of the share's Beta distribution: more is narrower.
    pub concentration: f64,
    /// Median of generated tokens.
    pub generated_median: f64,
    /// Standard deviation of their logarithm.
    pub generated_sigma: f64,
}

/// Tenants `t1`, `t2`, ...: the r-th most frequent has a share in proportion to `r^-exponent`. One has no name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tenants {
    /// How many, at least 1.
    pub count: u32,
    /// Of Zipf's law; 0 makes them alike.
    pub exponent: f64,
    /// Each tenant's prompts and generations are longer or shorter by a log-normal factor with this sigma; the mean
    /// over requests stays.
    pub scale_sigma: f64,
}

/// A class of service; a conversation stays in one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// Weight among the classes.
    pub weight: f64,
    /// Lower is more urgent.
    pub priority: i32,
    /// Milliseconds after arrival; none without it.
    pub deadline_ms: Option<f64>,
}

/// Conversations. A later prompt is the prompt and the answer before, without the thinking, and new text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sessions {
    /// Share of first requests that may have a second turn.
    pub share: f64,
    /// Mean turns of those, geometric, at least 1.
    pub mean_turns: f64,
    /// Median seconds from the arrival of a turn to that of the next, log-normal.
    pub gap_median_s: f64,
    /// Standard deviation of its logarithm.
    pub gap_sigma: f64,
    /// Median tokens of new text in a later turn, log-normal.
    pub text_median: f64,
    /// Standard deviation of its logarithm.
    pub text_sigma: f64,
    /// A conversation ends where the next prompt would be longer.
    pub most_prompt_tokens: u32,
}

impl Workload {
    /// Reads TOML. `preset = "name"` sets what the file leaves out, field by field; lists are replaced whole. A
    /// preset's regime is switched off by `arrivals.regime.factor = 1.0`.
    ///
    /// # Errors
    /// [`WorkloadError`], with the dotted field.
    pub fn from_toml(text: &str) -> Result<Self, WorkloadError> {
        let wrong = |error: meridian_core::Error| WorkloadError::Toml(error.to_string());
        let mut given = config::table(text).map_err(wrong)?;
        let table = match given.remove("preset") {
            None => given,
            Some(toml::Value::String(name)) => {
                let preset =
                    toml::Table::try_from(Self::named(&name)?).map_err(|e| WorkloadError::Toml(e.to_string()))?;
                merged(preset, given)
            }
            Some(other) => {
                return Err(WorkloadError::Field {
                    field: "preset".to_owned(),
                    value: other.to_string(),
                    expected: "the name of a preset",
                });
            }
        };
        let workload: Self = config::from_table(table).map_err(wrong)?;
        workload.check()?;
        Ok(workload)
    }
}

fn merged(mut base: toml::Table, given: toml::Table) -> toml::Table {
    for (key, value) in given {
        let value = match (base.remove(&key), value) {
            (Some(toml::Value::Table(base)), toml::Value::Table(given)) => toml::Value::Table(merged(base, given)),
            (_, value) => value,
        };
        base.insert(key, value);
    }
    base
}

//! `[scheduler.reasoning_effort]`: what a client's `reasoning_effort` means in thresholds.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::check;
use super::values::Tokens;
use crate::Error;

/// The thresholds of each `reasoning_effort` that a client of the OpenAI API may name.
///
/// ```
/// use meridian_core::MeridianConfig;
///
/// let config = MeridianConfig::from_toml("[scheduler.reasoning_effort]\nlow.max_think_tokens = 1024")?;
/// assert_eq!(config.scheduler.reasoning_effort.low.max_think_tokens.get(), Some(1024));
/// let error = MeridianConfig::from_toml("[scheduler.reasoning_effort.lo]\nmax_think_tokens = 1").unwrap_err();
/// let suggestion = "scheduler.reasoning_effort.lo: unknown field, did you mean `scheduler.reasoning_effort.low`?";
/// assert_eq!(error.to_string(), suggestion);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ReasoningEfforts {
    /// `none`. vLLM itself also asks the chat template for no thinking.
    pub none: EffortThresholds,
    /// `minimal`.
    pub minimal: EffortThresholds,
    /// `low`.
    pub low: EffortThresholds,
    /// `medium`.
    pub medium: EffortThresholds,
    /// `high`.
    pub high: EffortThresholds,
    /// `xhigh`.
    pub xhigh: EffortThresholds,
    /// `max`, which is not of OpenAI.
    pub max: EffortThresholds,
}

/// The thresholds of requests with one `reasoning_effort`. A client's own `meridian_*` options win over them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct EffortThresholds {
    /// As `scheduler.max_think_tokens`, which holds as well.
    pub max_think_tokens: Tokens,
    /// As `scheduler.min_think_tokens`.
    pub min_think_tokens: Tokens,
}

impl ReasoningEfforts {
    pub(super) fn check(&self, most: u32) -> Result<(), Error> {
        let Self { none, minimal, low, medium, high, xhigh, max } = self;
        let rows = [
            ("none", none),
            ("minimal", minimal),
            ("low", low),
            ("medium", medium),
            ("high", high),
            ("xhigh", xhigh),
            ("max", max),
        ];
        for (name, row) in rows {
            let EffortThresholds { max_think_tokens, min_think_tokens } = row;
            let field = |name_of: &str| format!("scheduler.reasoning_effort.{name}.{name_of}");
            let own = max_think_tokens.get().unwrap_or(most);
            check(field("max_think_tokens"), own, own <= most, || {
                format!("must be at most scheduler.max_think_tokens, {most}")
            })?;
            let least = min_think_tokens.get().unwrap_or(0);
            check(field("min_think_tokens"), least, least <= own, || {
                format!("must be at most the effort's max_think_tokens, {own}")
            })?;
        }
        Ok(())
    }
}

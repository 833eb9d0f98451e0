use serde::{Deserialize, Serialize};

use crate::{EntropyConfig, Error, SchedulerConfig};

/// The thresholds that a budget policy may set, for each request and at any time; the names are those of
/// `meridian.toml`.
///
/// ```
/// use meridian_core::budget::ThinkThresholds;
///
/// let thresholds = ThinkThresholds { max_think_tokens: 100, ..ThinkThresholds::default() };
/// let error = thresholds.validate().unwrap_err();
/// assert_eq!(error.to_string(), "scheduler.max_think_tokens: 100: must be at least scheduler.min_think_tokens");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ThinkThresholds {
    /// Before this many think tokens, only the hard cap and an interrupt end thinking.
    pub min_think_tokens: u32,
    /// The hard cap: the end is forced at this many think tokens in any case. The ending comes on top.
    pub max_think_tokens: u32,
    /// Think tokens between two probes, at least 1.
    pub eat_probe_interval_tokens: u32,
    /// EAT: weight of the latest probe, in (0, 1].
    pub ema_alpha: f64,
    /// EAT: variance below which thinking may end, bits squared; 0 turns EAT off.
    pub eat_variance_threshold: f64,
    /// EAT: mean entropy above which thinking does not end, bits; may be infinite.
    pub eat_max_bits: f64,
    /// EAT: number (from 0) of the first probe that may end thinking.
    pub min_probes: u32,
    /// RPDI: tokens in the window, from 1 to 65536.
    pub rpdi_window: u32,
    /// RPDI: index above which thinking may end, above 0; infinite turns RPDI off.
    pub rpdi_threshold: f64,
}

impl Default for ThinkThresholds {
    fn default() -> Self {
        Self {
            min_think_tokens: 512,
            max_think_tokens: SchedulerConfig::NO_LIMIT,
            eat_probe_interval_tokens: 32,
            ema_alpha: 0.1,
            eat_variance_threshold: 1.0 / 1024.0,
            eat_max_bits: 0.5,
            min_probes: 4,
            rpdi_window: 512,
            rpdi_threshold: f64::INFINITY,
        }
    }
}

impl ThinkThresholds {
    /// The thresholds in `meridian.toml`.
    #[must_use]
    pub fn from_config(scheduler: &SchedulerConfig, entropy: &EntropyConfig) -> Self {
        let EntropyConfig {
            enabled: _,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            eat_probe_interval_tokens,
            min_probes,
            rpdi_window,
            rpdi_threshold,
            probe_at: _,
            probe_newline: _,
            probe_suffix: _,
        } = *entropy;
        Self {
            min_think_tokens: scheduler.min_think_tokens,
            max_think_tokens: scheduler.max_think_tokens,
            eat_probe_interval_tokens,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            min_probes,
            rpdi_window,
            rpdi_threshold,
        }
    }

    /// The form for a budget policy.
    #[must_use]
    pub fn for_policy(&self) -> meridian_policy_sdk::budget::Thresholds {
        let Self {
            min_think_tokens,
            max_think_tokens,
            eat_probe_interval_tokens,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            min_probes,
            rpdi_window,
            rpdi_threshold,
        } = *self;
        meridian_policy_sdk::budget::Thresholds {
            min_think_tokens,
            max_think_tokens,
            eat_probe_interval_tokens,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            min_probes,
            rpdi_window,
            rpdi_threshold,
        }
    }

    /// From the answer of a budget policy.
    ///
    /// # Errors
    /// [`Error::ConfigValidation`] for the first value out of range, as [`ThinkThresholds::validate`].
    pub fn from_policy(thresholds: &meridian_policy_sdk::budget::Thresholds) -> Result<Self, Error> {
        let meridian_policy_sdk::budget::Thresholds {
            min_think_tokens,
            max_think_tokens,
            eat_probe_interval_tokens,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            min_probes,
            rpdi_window,
            rpdi_threshold,
        } = *thresholds;
        let thresholds = Self {
            min_think_tokens,
            max_think_tokens,
            eat_probe_interval_tokens,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            min_probes,
            rpdi_window,
            rpdi_threshold,
        };
        thresholds.validate().map(|()| thresholds)
    }

    /// Check the ranges.
    ///
    /// # Errors
    /// [`Error::ConfigValidation`] for the first value out of range, by its name in `meridian.toml`.
    pub fn validate(&self) -> Result<(), Error> {
        let Self {
            min_think_tokens,
            max_think_tokens,
            eat_probe_interval_tokens,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            min_probes: _,
            rpdi_window,
            rpdi_threshold,
        } = *self;
        // NaN is in no range.
        check(
            "scheduler.max_think_tokens",
            max_think_tokens,
            max_think_tokens >= min_think_tokens,
            "must be at least scheduler.min_think_tokens",
        )?;
        let interval = eat_probe_interval_tokens;
        check("entropy.eat_probe_interval_tokens", interval, interval > 0, "must be at least 1")?;
        check("entropy.ema_alpha", ema_alpha, ema_alpha > 0.0 && ema_alpha <= 1.0, "must be in (0, 1]")?;
        check(
            "entropy.eat_variance_threshold",
            eat_variance_threshold,
            eat_variance_threshold >= 0.0,
            "must be at least 0",
        )?;
        check("entropy.eat_max_bits", eat_max_bits, eat_max_bits >= 0.0, "must be at least 0")?;
        check("entropy.rpdi_window", rpdi_window, (1..=65536).contains(&rpdi_window), "must be in 1..=65536")?;
        check("entropy.rpdi_threshold", rpdi_threshold, rpdi_threshold > 0.0, "must be above 0")
    }
}

fn check(field: &'static str, value: impl ToString, holds: bool, reason: &'static str) -> Result<(), Error> {
    if holds {
        Ok(())
    } else {
        Err(Error::ConfigValidation { field: field.into(), value: value.to_string(), reason: reason.into() })
    }
}

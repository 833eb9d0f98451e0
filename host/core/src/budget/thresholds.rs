use meridian_policy_sdk::budget::Thresholds;

use crate::{Error, MeridianConfig};

impl MeridianConfig {
    /// The thresholds of requests whose policy and client set none.
    #[must_use]
    pub fn thresholds(&self) -> Thresholds {
        let Self { scheduler, entropy, .. } = self;
        Thresholds {
            min_think_tokens: scheduler.min_think_tokens,
            max_think_tokens: scheduler.max_think_tokens,
            eat_probe_interval_tokens: entropy.eat_probe_interval_tokens,
            ema_alpha: entropy.ema_alpha,
            eat_variance_threshold: entropy.eat_variance_threshold,
            eat_max_bits: entropy.eat_max_bits,
            min_probes: entropy.min_probes,
            rpdi_window: entropy.rpdi_window,
            rpdi_threshold: entropy.rpdi_threshold,
        }
    }
}

/// Check the ranges of the thresholds that a policy or a client asks for.
///
/// ```
/// use meridian_core::budget::{Thresholds, check_thresholds};
///
/// let thresholds = Thresholds { max_think_tokens: 100, ..Thresholds::default() };
/// let error = check_thresholds(&thresholds).unwrap_err();
/// assert_eq!(error.to_string(), "scheduler.max_think_tokens: 100: must be at least scheduler.min_think_tokens");
/// ```
///
/// # Errors
/// [`Error::ConfigValidation`] for the first value out of range, by its name in `meridian.toml`.
pub fn check_thresholds(thresholds: &Thresholds) -> Result<(), Error> {
    let Thresholds {
        min_think_tokens,
        max_think_tokens,
        eat_probe_interval_tokens,
        ema_alpha,
        eat_variance_threshold,
        eat_max_bits,
        min_probes: _,
        rpdi_window,
        rpdi_threshold,
    } = *thresholds;
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
fn check(field: &'static str, value: impl ToString, holds: bool, reason: &'static str) -> Result<(), Error> {
    if holds {
        Ok(())
    } else {
        Err(Error::ConfigValidation { field: field.into(), value: value.to_string(), reason: reason.into() })
    }
}

//! Bounds of a workload, so that no sampler can fail and no time or length can overflow.

use super::rows::MAX_TOKENS;
use super::{Workload, WorkloadError};

impl Workload {
    /// Whether it can be generated.
    ///
    /// # Errors
    /// [`WorkloadError::Field`] for the first value out of range.
    pub fn check(&self) -> Result<(), WorkloadError> {
        let tokens = f64::from(MAX_TOKENS);
        within("requests_per_s", self.requests_per_s, 1e-6, 1e6, "requests per second from 1e-6 to 1e6")?;
        whole("most_generated_tokens", self.most_generated_tokens)?;
        within("arrivals.gap_cv", self.arrivals.gap_cv, 0.0, 100.0, CV)?;
        if let Some(wave) = &self.arrivals.wave {
            within("arrivals.wave.amplitude", wave.amplitude, 0.0, 0.99, "a share from 0 to 0.99")?;
            within("arrivals.wave.period_s", wave.period_s, 1e-3, 1e9, SECONDS)?;
        }
        if let Some(regime) = &self.arrivals.regime {
            within("arrivals.regime.share", regime.share, 0.01, 0.99, "a share from 0.01 to 0.99")?;
            let below = "a factor from 1 to 0.99 / share, so that quiet stretches have requests";
            within("arrivals.regime.factor", regime.factor, 1.0, 0.99 / regime.share, below)?;
            // The clock walks over all stretches of a gap: many in each would take for ever.
            let cycle = "seconds from 1 / requests_per_s to 1e9";
            within("arrivals.regime.cycle_s", regime.cycle_s, 1.0 / self.requests_per_s, 1e9, cycle)?;
        }
        let prompt = &self.prompt;
        within("prompt.median", prompt.median, 1.0, tokens, LENGTH)?;
        within("prompt.sigma", prompt.sigma, 0.0, 10.0, SIGMA)?;
        within("prompt.tail_share", prompt.tail_share, 0.0, 1.0, SHARE)?;
        within("prompt.tail_from", prompt.tail_from, 1.0, tokens, LENGTH)?;
        within("prompt.tail_to", prompt.tail_to, prompt.tail_from, tokens, "tokens from tail_from to 10000000")?;
        within("prompt.tail_alpha", prompt.tail_alpha, 1e-3, 100.0, "an exponent from 0.001 to 100")?;
        whole("prompt.most_tokens", prompt.most_tokens)?;
        if self.modes.is_empty() || self.modes.iter().map(|mode| mode.weight).sum::<f64>() <= 0.0 {
            return Err(out("modes", format!("{} modes", self.modes.len()), "at least one of positive weight"));
        }
        for (index, mode) in self.modes.iter().enumerate() {
            let field = |name: &str| format!("modes.{index}.{name}");
            within(field("weight"), mode.weight, 0.0, 1e9, WEIGHT)?;
            within(field("think_share"), mode.think_share, 0.0, 0.999, "a share from 0 to 0.999")?;
            within(field("concentration"), mode.concentration, 0.01, 1e6, "a number from 0.01 to 1e6")?;
            within(field("generated_median"), mode.generated_median, 1.0, tokens, LENGTH)?;
            within(field("generated_sigma"), mode.generated_sigma, 0.0, 10.0, SIGMA)?;
        }
        if !(1..=1_000_000).contains(&self.tenants.count) {
            return Err(out("tenants.count", self.tenants.count, "tenants from 1 to 1000000"));
        }
        within("tenants.exponent", self.tenants.exponent, 0.0, 10.0, "an exponent from 0 to 10")?;
        within("tenants.scale_sigma", self.tenants.scale_sigma, 0.0, 3.0, "a standard deviation from 0 to 3")?;
        if !self.classes.is_empty() && self.classes.iter().map(|class| class.weight).sum::<f64>() <= 0.0 {
            return Err(out("classes", "no weight", "at least one of positive weight"));
        }
        for (index, class) in self.classes.iter().enumerate() {
            within(format!("classes.{index}.weight"), class.weight, 0.0, 1e9, WEIGHT)?;
            let deadline_ms = class.deadline_ms.unwrap_or(0.0);
            within(format!("classes.{index}.deadline_ms"), deadline_ms, 0.0, 1e12, "milliseconds from 0 to 1e12")?;
        }
        let sessions = &self.sessions;
        within("sessions.share", sessions.share, 0.0, 1.0, SHARE)?;
        within("sessions.mean_turns", sessions.mean_turns, 1.0, 1e4, "turns from 1 to 1e4")?;
        within("sessions.gap_median_s", sessions.gap_median_s, 1e-3, 1e9, SECONDS)?;
        within("sessions.gap_sigma", sessions.gap_sigma, 0.0, 10.0, SIGMA)?;
        within("sessions.text_median", sessions.text_median, 1.0, tokens, LENGTH)?;
        within("sessions.text_sigma", sessions.text_sigma, 0.0, 10.0, SIGMA)?;
        whole("sessions.most_prompt_tokens", sessions.most_prompt_tokens)
    }
}

const CV: &str = "a coefficient of variation from 0 to 100";
const LENGTH: &str = "tokens from 1 to 10000000";
const SECONDS: &str = "seconds from 0.001 to 1e9";
const SHARE: &str = "a share from 0 to 1";
const SIGMA: &str = "a standard deviation from 0 to 10";
const WEIGHT: &str = "a weight from 0 to 1e9";

fn within(
    field: impl Into<String>,
    value: f64,
    least: f64,
    most: f64,
    expected: &'static str,
) -> Result<(), WorkloadError> {
    if (least..=most).contains(&value) { Ok(()) } else { Err(out(field, value, expected)) }
}

fn whole(field: &str, tokens: u32) -> Result<(), WorkloadError> {
    if (1..=MAX_TOKENS).contains(&tokens) { Ok(()) } else { Err(out(field, tokens, LENGTH)) }
}

fn out(field: impl Into<String>, value: impl std::fmt::Display, expected: &'static str) -> WorkloadError {
    WorkloadError::Field { field: field.into(), value: value.to_string(), expected }
}

//! EAT and RPDI that give way to those who wait.
//!
//! The more requests wait for each that thinks, the less may be thought and the sooner an answer counts as settled:
//!
//! ```text
//! pressure = min(1, waiting / max(1, thinking) / full_pressure)
//! max_think_tokens        = max(min_think_tokens, configured * (1 - pressure * (1 - least_share)))
//! eat_variance_threshold  = configured * (1 + pressure * (most_loosening - 1)), and eat_max_bits likewise
//! ```
//!
//! A request whose deadline is nearer than `slack_ms` ends now, and so does one whose service level is missed if it thinks for
//! longer than that. Linear, and all of it `+ - * /` and comparisons, so that
//! more waiting requests never allow more thinking, to the last bit.

use meridian_policy_sdk::budget::{BudgetPolicy, Column, Load, Request, Thresholds, Verdict};
use meridian_policy_sdk::{Init, Policy, export_policy};
use serde::Deserialize;

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    full_pressure: f64,
    least_share: f64,
    most_loosening: f64,
    slack_ms: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self { full_pressure: 1.0, least_share: 0.25, most_loosening: 4.0, slack_ms: 1000.0 }
    }
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct DeadlineAware {
    options: Options,
}

impl Policy for DeadlineAware {
    const NAME: &'static str = "deadline-aware";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "EAT and RPDI, tighter as the queue grows; ends thinking before a deadline or a level is missed.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let options: Options = init.config()?;
        let Options { full_pressure, least_share, most_loosening, slack_ms } = options;
        check("full_pressure", full_pressure, (0.001..=1e6).contains(&full_pressure), "in 0.001..=1000000")?;
        check("least_share", least_share, least_share > 0.0 && least_share <= 1.0, "in (0, 1]")?;
        check("most_loosening", most_loosening, (1.0..=1e6).contains(&most_loosening), "in 1..=1000000")?;
        check("slack_ms", slack_ms, (0.0..=1e9).contains(&slack_ms), "in 0..=1000000000")?;
        Ok(Self { options })
    }
}

impl DeadlineAware {
    /// What the operator configured, tightened to the load.
    fn tightened(&self, load: &Load) -> Thresholds {
        let Options { full_pressure, least_share, most_loosening, slack_ms: _ } = self.options;
        let thinking = if load.thinking > 1 { load.thinking } else { 1 };
        let pressure = f64::from(load.waiting) / f64::from(thinking) / full_pressure;
        let pressure = if pressure < 1.0 { pressure } else { 1.0 };
        let configured = load.configured;
        let share = 1.0 - pressure * (1.0 - least_share);
        let most = (f64::from(configured.max_think_tokens) * share) as u32;
        let loosening = 1.0 + pressure * (most_loosening - 1.0);
        Thresholds {
            max_think_tokens: most.max(configured.min_think_tokens),
            eat_variance_threshold: configured.eat_variance_threshold * loosening,
            eat_max_bits: configured.eat_max_bits * loosening,
            ..configured
        }
    }
}

impl BudgetPolicy for DeadlineAware {
    const INPUTS: &'static [Column] = &[
        Column::ThinkTokens,
        Column::Signal,
        Column::Probes,
        Column::Eat,
        Column::EatVariance,
        Column::Rpdi,
        Column::SlackMs,
        Column::LevelSlackMs,
    ];

    fn thresholds(&self, load: &Load, request: &Request<'_, Self>) -> Thresholds {
        let tightened = self.tightened(load);
        // A deadline may come before the minimum, which then is for `verdict` to keep.
        let has_deadline = request.slack_ms() < f32::INFINITY;
        let least = if has_deadline { 0 } else { tightened.min_think_tokens };
        Thresholds { min_think_tokens: least, ..tightened }
    }

    fn verdict(&self, load: &Load, request: &Request<'_, Self>) -> Verdict {
        // The host still enforces `min_think_tokens`.
        let slack_ms = f64::from(request.slack_ms().min(request.level_slack_ms()));
        if slack_ms < self.options.slack_ms {
            return Verdict::EndNow;
        }
        let tightened = self.tightened(load);
        let tokens = f64::from(request.think_tokens());
        if tokens < f64::from(tightened.min_think_tokens) {
            return Verdict::KeepThinking;
        }
        let ends = tokens >= f64::from(tightened.max_think_tokens)
            || request.has_settled(&tightened)
            || request.has_strayed(&tightened);
        // Not the default: a request that began under another load is judged by this one.
        if ends { Verdict::EndNow } else { Verdict::KeepThinking }
    }
}

fn check(field: &str, value: f64, holds: bool, range: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(format!("{field}: {value}: must be {range}")) }
}

export_policy!(budget: DeadlineAware);

#[cfg(test)]
mod tests;

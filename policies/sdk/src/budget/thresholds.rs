use serde::{Deserialize, Serialize};

use crate::inputs::facts;

__budget_thresholds! {
    facts!
    /// When thinking may end, for one request; the fields are those of `meridian.toml`, and the default is its default.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
    Thresholds {}
}

impl Thresholds {
    /// `max_think_tokens` without a limit: longer than any context.
    pub const NO_LIMIT: u32 = 1 << 24;

    /// The same with EAT and RPDI off: only the hard cap, and verdicts, end thinking.
    ///
    /// ```
    /// use meridian_policy_sdk::budget::Thresholds;
    ///
    /// let thresholds = Thresholds::default().without_signals();
    /// assert_eq!((thresholds.eat_variance_threshold, thresholds.rpdi_threshold), (0.0, f64::INFINITY));
    /// ```
    #[must_use]
    pub fn without_signals(self) -> Self {
        Self { eat_variance_threshold: 0.0, rpdi_threshold: f64::INFINITY, ..self }
    }

    /// The same with a probe every `interval` think tokens, if the policy has an interval of its own.
    #[must_use]
    pub fn probed_every(self, interval: Option<u32>) -> Self {
        Self { eat_probe_interval_tokens: interval.unwrap_or(self.eat_probe_interval_tokens), ..self }
    }
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            min_think_tokens: 512,
            max_think_tokens: Self::NO_LIMIT,
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

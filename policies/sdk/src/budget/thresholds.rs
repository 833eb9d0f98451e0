use serde::{Deserialize, Serialize};

/// When thinking may end, for one request; `wit/budget.wit` gives the ranges. The default is that of `meridian.toml`.
///
/// ```
/// assert_eq!(meridian_policy_sdk::budget::Thresholds::default().max_think_tokens, 32768);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // documented in wit/budget.wit, the one place
pub struct Thresholds {
    pub min_think_tokens: u32,
    pub max_think_tokens: u32,
    pub eat_probe_interval_tokens: u32,
    pub ema_alpha: f64,
    pub eat_variance_threshold: f64,
    pub eat_max_bits: f64,
    pub min_probes: u32,
    pub rpdi_window: u32,
    pub rpdi_threshold: f64,
}

impl Thresholds {
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
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            min_think_tokens: 512,
            max_think_tokens: 32768,
            eat_probe_interval_tokens: 32,
            ema_alpha: 0.1,
            eat_variance_threshold: 1.0 / 1024.0,
            eat_max_bits: 0.5,
            min_probes: 4,
            rpdi_window: 512,
            rpdi_threshold: 2.0,
        }
    }
}

//! EAT and RPDI: the native default of the budget slot.
//!
//! Thinking ends at a probe after which the moving variance of the entropy after a forced end is below
//! `eat_variance_threshold` and its mean is not above `eat_max_bits` (EAT, arXiv 2509.26522; the guard on the mean is
//! ours: the variance is low for a model that is stably ignorant too), or at the end of a sentence whose path deviation
//! index is above `rpdi_threshold` (RPDI).

use meridian_policy_sdk::budget::{BudgetPolicy, Column, Load, Request, Verdict};
use meridian_policy_sdk::{Init, Policy, export_policy};

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct EatRpdi;

impl Policy for EatRpdi {
    const NAME: &'static str = "eat-rpdi";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "Ends thinking when the answer has settled (EAT) or the reasoning has strayed (RPDI).";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl BudgetPolicy for EatRpdi {
    const INPUTS: &'static [Column] = &[Column::Signal, Column::Probes, Column::Eat, Column::EatVariance, Column::Rpdi];
    const WEIGHS_SIGNALS_ALONE: bool = true;

    fn verdict(&self, load: &Load, request: &Request<'_, Self>) -> Verdict {
        let configured = &load.configured;
        if request.has_settled(configured) || request.has_strayed(configured) {
            return Verdict::EndNow;
        }
        // A boundary that no rule looks at does not take back an end that waits for the minimum.
        let has_index = request.rpdi() >= 0.0 && configured.rpdi_threshold < f64::INFINITY;
        let is_bare = request.is_at_boundary() && !request.is_probed() && !has_index;
        if is_bare { Verdict::Default } else { Verdict::KeepThinking }
    }
}

export_policy!(budget: EatRpdi);

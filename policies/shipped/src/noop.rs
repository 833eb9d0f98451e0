//! Decides nothing, in any slot: everything is left to the host's defaults. The floor of what a call costs, and a component
//! that fills several slots.

use meridian_policy_sdk::budget::{self, BudgetPolicy, Load, Verdict};
use meridian_policy_sdk::eviction::{self, EvictionPolicy, Memory};
use meridian_policy_sdk::{Column, DispatchPolicy, Init, Policy, Request, Step, export_policy};

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Noop;

impl Policy for Noop {
    const NAME: &'static str = "noop";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Leaves everything to the native defaults: the floor of what a call costs.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl DispatchPolicy for Noop {
    const INPUTS: &'static [Column] = &[];

    fn key(&self, _step: &Step, _request: &Request<'_, Self>) -> f32 {
        0.0
    }

    fn applies(&self, _step: &Step) -> bool {
        false
    }
}

impl EvictionPolicy for Noop {
    const INPUTS: &'static [eviction::Column] = &[];

    fn key(&self, _memory: &Memory, _candidate: &eviction::Candidate<'_, Self>) -> f32 {
        0.0
    }

    fn applies(&self, _memory: &Memory) -> bool {
        false
    }
}

impl BudgetPolicy for Noop {
    const INPUTS: &'static [budget::Column] = &[];
    const WEIGHS_SIGNALS_ALONE: bool = true;

    fn verdict(&self, _load: &Load, _request: &budget::Request<'_, Self>) -> Verdict {
        Verdict::Default
    }

    fn applies(&self, _load: &Load) -> bool {
        false
    }
}

export_policy!(dispatch: Noop, eviction: Noop, budget: Noop);

//! First come, first served: keeps the engine's own order, budget and caps, so that a run is identical to stock.

use meridian_policy_sdk::{Column, DispatchPolicy, Init, Policy, Request, Step, export_policy};

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Fcfs;

impl Policy for Fcfs {
    const NAME: &'static str = "fcfs";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "First come, first served: the engine's own order, identical to stock vLLM.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl DispatchPolicy for Fcfs {
    const INPUTS: &'static [Column] = &[];

    fn key(&self, _step: &Step, _request: &Request<'_, Self>) -> f32 {
        0.0
    }
}

export_policy!(dispatch: Fcfs);

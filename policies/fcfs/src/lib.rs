//! First come, first served: keeps the engine's own order, budget and caps, so that a run is identical to stock.

use meridian_policy_sdk::{Column, DispatchPolicy, Init, Request, Step, export_dispatch};

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Fcfs;

impl DispatchPolicy for Fcfs {
    const NAME: &'static str = "fcfs";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "First come, first served: the engine's own order, identical to stock vLLM.";
    const INPUTS: &'static [Column] = &[];

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }

    fn key(&self, _step: &Step, _request: &Request<'_, Self>) -> f32 {
        0.0
    }
}

export_dispatch!(Fcfs);

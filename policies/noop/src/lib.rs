//! Decides nothing: every step is left to the host's default. The floor of what a call costs.

use meridian_policy_sdk::{Column, DispatchPolicy, Init, Request, Step, export_dispatch};

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Noop;

impl DispatchPolicy for Noop {
    const NAME: &'static str = "noop";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Leaves every step to the native default: the floor of what a call costs.";
    const INPUTS: &'static [Column] = &[];

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }

    fn key(&self, _step: &Step, _request: &Request<'_, Self>) -> f32 {
        0.0
    }

    fn applies(&self, _step: &Step) -> bool {
        false
    }
}

export_dispatch!(Noop);

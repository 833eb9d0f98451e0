//! Longest prefix match first: of the waiting requests, the one whose session has left most of its prompt in the prefix cache.
//!
//! The order of SGLang's default scheduler, as far as sessions tell what the cache has: a request without one counts as if
//! nothing of its prompt were cached. Running requests keep their order, and equal ones that of arrival.

use meridian_policy_sdk::{Column, DispatchPolicy, Init, Policy, Request, Step, export_policy};

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Lpm;

impl Policy for Lpm {
    const NAME: &'static str = "lpm";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "Longest cached prefix first: fewer tokens computed again, unbounded waits for new sessions.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl DispatchPolicy for Lpm {
    const INPUTS: &'static [Column] = &[Column::ResidentTokens];

    #[inline(always)]
    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        -request.resident_tokens()
    }
}

export_policy!(dispatch: Lpm);

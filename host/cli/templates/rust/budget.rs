//! Long thoughts end while other requests wait.

use meridian_policy_sdk::budget::{BudgetPolicy, Column, Load, Point, Request, Verdict};
use meridian_policy_sdk::{Init, Policy, export_policy};

/// Thoughts up to this length go on.
const LONG_TOKENS: f32 = 2048.0;
/// More waiting requests than this end a long thought.
const QUEUE: u32 = 8;

/// The policy.
pub struct {{Type}};

impl Policy for {{Type}} {
    const NAME: &'static str = "{{name}}";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Ends thoughts of more than 2048 tokens while more than 8 requests wait.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl BudgetPolicy for {{Type}} {
    const INPUTS: &'static [Column] = &[Column::ThinkTokens];

    // Thresholds are the configured ones; only verdicts are this policy's.
    fn applies(&self, load: &Load) -> bool {
        load.point == Point::Probe
    }

    fn verdict(&self, load: &Load, request: &Request<'_, Self>) -> Verdict {
        if load.waiting > QUEUE && request.think_tokens() > LONG_TOKENS { Verdict::EndNow } else { Verdict::Default }
    }
}

export_policy!(budget: {{Type}});

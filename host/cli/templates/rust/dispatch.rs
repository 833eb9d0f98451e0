//! The request with the fewest prompt tokens left to compute goes first.

use meridian_policy_sdk::{Column, DispatchPolicy, Init, Policy, Request, Step, export_policy};

/// The policy.
pub struct {{Type}};

impl Policy for {{Type}} {
    const NAME: &'static str = "{{name}}";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Fewest prompt tokens to compute first: lowers mean TTFT, delays long prompts.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl DispatchPolicy for {{Type}} {
    const INPUTS: &'static [Column] = &[Column::PromptTokens, Column::CachedTokens];

    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        request.prompt_tokens() - request.cached_tokens()
    }
}

export_policy!(dispatch: {{Type}});

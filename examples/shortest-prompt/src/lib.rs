//! Shortest prompt first: a complete policy in one function.

use meridian_policy_sdk::{Column, DispatchPolicy, Init, Policy, Request, Step, export_policy};

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct ShortestPrompt;

impl Policy for ShortestPrompt {
    const NAME: &'static str = "shortest-prompt";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Shortest prompt first: lowers mean TTFT, delays long prompts.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl DispatchPolicy for ShortestPrompt {
    const INPUTS: &'static [Column] = &[Column::PromptTokens];

    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        request.prompt_tokens()
    }
}

export_policy!(dispatch: ShortestPrompt);

#[cfg(test)]
mod tests {
    use meridian_policy_sdk::{Decision, Targets, decide};

    use super::*;

    #[test]
    fn the_key_is_the_length_of_the_prompt() {
        let targets = Targets {
            output_tpot_budget_ms: 20.0,
            think_tpot_budget_ms: 80.0,
            think_batch_multiplier: 2.5,
            max_defer_ms: 2000.0,
        };
        let mut policy = ShortestPrompt::new(Init { targets, config_json: "{}" }).expect("there are no options");
        let mut decision = Decision::default();
        decide(&mut policy, &Step::default(), 3, &[900.0, 30.0, 200.0], &mut decision);
        assert_eq!(decision.keys, [900.0, 30.0, 200.0]);
        assert_eq!(decision.token_budget, None);
        assert!(decision.token_caps.is_empty());
    }
}

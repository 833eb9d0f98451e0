use crate::inputs::facts;

__dispatch_step! {
    facts!
    /// Facts about the engine at this step.
    #[derive(Clone, Copy, Debug, PartialEq, Default, serde::Serialize)]
    Step {}
}

impl Step {
    /// Whether the step-time model has been learned.
    #[must_use]
    pub fn has_step_time(&self) -> bool {
        self.decode_token_ms > 0.0 && self.prefill_token_ms > 0.0
    }

    /// Milliseconds since the previous decision, whose time `decided_ms` keeps; -1 before the second, or when the clock stood.
    /// A running request whose `since_progress_ms` is not above this made progress in the step before: the host computes
    /// both alike, to the bit.
    pub fn elapsed_ms(&self, decided_ms: &mut Option<f64>) -> f32 {
        let before_ms = decided_ms.replace(self.now_ms).filter(|before_ms| *before_ms < self.now_ms);
        before_ms.map_or(-1.0, |before_ms| (self.now_ms - before_ms) as f32)
    }

    /// The largest token budget whose predicted step time stays within `target_ms`, when output-phase decodes come
    /// first, then thinking decodes, then prefill. Output-phase decodes are always counted in whole, so the answer is
    /// never below them and may miss the target when they alone exceed it. At least 1, at most the engine's budget.
    ///
    /// Call it only with [`Step::has_step_time`].
    #[must_use]
    pub fn tokens_within(&self, target_ms: f32) -> u32 {
        let output = self.running_output.saturating_mul(self.decode_tokens);
        let think = self.running_think.saturating_mul(self.decode_tokens) as f32;
        let mut left_ms = target_ms - self.fixed_ms - output as f32 * self.decode_token_ms;
        let mut tokens = output as f32;
        if left_ms > 0.0 {
            let think_fit = think.min(left_ms / self.decode_token_ms);
            left_ms -= think_fit * self.decode_token_ms;
            tokens += think_fit + (left_ms / self.prefill_token_ms).max(0.0);
        }
        // `as` saturates, so an enormous or infinite count becomes the engine's budget.
        (tokens as u32).clamp(1, self.token_budget.max(1))
    }
}

use crate::inputs::candidate;
use crate::{Column, DispatchPolicy, Phase, State};

candidate! {
    /// One candidate of the batch, seen through the columns its policy asked for.
    Request for DispatchPolicy by Column;
    wait_ms WaitMs "Milliseconds since arrival.";
    since_progress_ms SinceProgressMs "Milliseconds since the request was last given tokens.";
    slack_ms SlackMs "Milliseconds until the deadline; infinite when there is none.";
    prompt_tokens PromptTokens "Tokens in the prompt.";
    cached_tokens CachedTokens "Prompt tokens found in the prefix cache at the last admission.";
    computed_tokens ComputedTokens "Tokens whose KV is computed.";
    think_tokens ThinkTokens "Tokens generated while thinking.";
    output_tokens OutputTokens "Tokens generated after thinking.";
    remaining_tokens RemainingTokens "Tokens the request may still generate.";
    kv_blocks KvBlocks "KV blocks the computed tokens fill.";
    priority Priority "The client's priority, lower is more urgent.";
    tenant Tenant "A small integer for each tenant.";
    preemptions Preemptions "Times the request was preempted.";
    eat Eat "Entropy after a forced end of thinking, moving average, bits; NaN when not measured.";
    eat_variance EatVariance "Moving variance of the same, bits squared; NaN when not measured.";
    rpdi Rpdi "Reasoning path deviation index; NaN when not measured.";
}

impl<P: DispatchPolicy> Request<'_, P> {
    /// Phase of the request.
    #[inline(always)]
    #[must_use]
    pub fn phase(&self) -> Phase {
        let value = self.rows[const { position::<P>(Column::Phase) }][self.index];
        if value >= 2.0 {
            Phase::Output
        } else if value >= 1.0 {
            Phase::Think
        } else {
            Phase::Prefill
        }
    }

    /// Where the request stands.
    #[inline(always)]
    #[must_use]
    pub fn state(&self) -> State {
        let value = self.rows[const { position::<P>(Column::State) }][self.index];
        if value >= 2.0 {
            State::Preempted
        } else if value >= 1.0 {
            State::Running
        } else {
            State::Waiting
        }
    }
}

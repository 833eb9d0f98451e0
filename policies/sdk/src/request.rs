use core::marker::PhantomData;

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
    output_ms OutputMs "Milliseconds since the first token of output; NaN before it.";
}

/// The candidates of a batch.
#[derive(Debug)]
pub struct Requests<'a, P> {
    rows: &'a [&'a [f32]; Column::COUNT],
    candidates: usize,
    policy: PhantomData<fn() -> P>,
}

impl<'a, P: DispatchPolicy> Requests<'a, P> {
    #[inline(always)]
    pub(crate) fn new(rows: &'a [&'a [f32]; Column::COUNT], candidates: usize) -> Self {
        Self { rows, candidates, policy: PhantomData }
    }

    /// How many candidates there are.
    #[inline(always)]
    #[must_use]
    pub fn len(&self) -> usize {
        self.candidates
    }

    /// Whether there is none.
    #[inline(always)]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.candidates == 0
    }

    /// The candidate at `index`, which is below [`Requests::len`]: beyond it every column panics.
    #[inline(always)]
    #[must_use]
    pub fn get(&self, index: usize) -> Request<'a, P> {
        Request::new(self.rows, index)
    }

    /// Every candidate, in the batch's order.
    #[inline(always)]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Request<'a, P>> + use<'a, P> {
        let rows = self.rows;
        (0..self.candidates).map(move |index| Request::new(rows, index))
    }
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

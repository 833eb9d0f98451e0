use crate::inputs::{candidate, rows};
use crate::{Column, DispatchPolicy, Phase, State, clamped};

__dispatch_columns! {
    candidate!
    /// One candidate of the batch, seen through the columns its policy asked for.
    Request in Requests for DispatchPolicy by Column
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

    /// Tokens that the request has generated: thinking and output.
    #[inline(always)]
    #[must_use]
    pub fn generated_tokens(&self) -> f32 {
        self.think_tokens() + self.output_tokens()
    }

    /// Tokens that it has to compute before it can generate another, at least 0: the rest of its prompt, and what a preemption
    /// has lost.
    #[inline(always)]
    #[must_use]
    pub fn missing_tokens(&self) -> f32 {
        clamped(self.prompt_tokens() + self.generated_tokens() - self.computed_tokens(), 0.0, f32::MAX)
    }
}

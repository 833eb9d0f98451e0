use crate::inputs::candidate;
use crate::{Column, DispatchPolicy, Phase, State};

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
}

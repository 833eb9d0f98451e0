/// A fact about each candidate that a policy may ask for; `wit/dispatch.wit` gives unit, range and absent case.
///
/// The discriminants are the order of the WIT enum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)] // documented in wit/dispatch.wit, the one place
pub enum Column {
    Phase,
    State,
    WaitMs,
    SinceProgressMs,
    SlackMs,
    PromptTokens,
    CachedTokens,
    ComputedTokens,
    ThinkTokens,
    OutputTokens,
    RemainingTokens,
    KvBlocks,
    Priority,
    Tenant,
    Preemptions,
    Eat,
    EatVariance,
    Rpdi,
}

impl Column {
    /// Every column, in the order of the WIT enum.
    pub const ALL: [Self; 18] = [
        Self::Phase,
        Self::State,
        Self::WaitMs,
        Self::SinceProgressMs,
        Self::SlackMs,
        Self::PromptTokens,
        Self::CachedTokens,
        Self::ComputedTokens,
        Self::ThinkTokens,
        Self::OutputTokens,
        Self::RemainingTokens,
        Self::KvBlocks,
        Self::Priority,
        Self::Tenant,
        Self::Preemptions,
        Self::Eat,
        Self::EatVariance,
        Self::Rpdi,
    ];

    /// How many columns there are.
    pub const COUNT: usize = Self::ALL.len();

    /// Where `self` stands in `inputs`, if it does.
    #[must_use]
    pub const fn position_in(self, inputs: &[Self]) -> Option<usize> {
        let mut i = 0;
        while i < inputs.len() {
            if inputs[i] as u8 == self as u8 {
                return Some(i);
            }
            i += 1;
        }
        None
    }
}

/// Phase of a request; in a column it is passed as its discriminant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(u8)]
pub enum Phase {
    /// The prompt was never computed to the end.
    #[default]
    Prefill = 0,
    /// Between the start and the end of thinking.
    Think = 1,
    /// After thinking; the whole generation for a model without thinking markers.
    Output = 2,
}

/// Where a request stands; in a column it is passed as its discriminant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum State {
    /// Never admitted.
    #[default]
    Waiting = 0,
    /// Admitted: holds KV blocks.
    Running = 1,
    /// Admitted before, lost its KV blocks, waits again.
    Preempted = 2,
}

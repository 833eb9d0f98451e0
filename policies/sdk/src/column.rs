use crate::inputs::column_enum;

__dispatch_columns! {
    column_enum!
    /// A fact about each candidate that a policy may ask for.
    ///
    /// The discriminants are the order of the WIT enum.
    Column
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

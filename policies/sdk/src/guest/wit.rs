//! The only place where WIT types become those of the SDK, and back. The fields and columns are those of the contract.

use super::{budget_wit, dispatch_wit, eviction_wit, lifecycle};
use crate::{Column, Step, Targets, budget, eviction};

/// A value of the contract as the same value of the SDK, or the other way round.
trait Same<T> {
    fn same(self) -> T;
}

macro_rules! numbers {
    ($($number:ident)*) => {$(
        impl Same<$number> for $number {
            fn same(self) -> $number {
                self
            }
        }
    )*};
}

numbers!(u32 u64 f32 f64);

/// The fields of one record as those of another; called by a table of the contract.
macro_rules! record {
    ($from:expr => $to:ident { $($also:ident)? } [$($field:ident $type:ident $doc:literal;)*]) => {{
        let from = $from;
        $to { $($also,)? $($field: Same::same(from.$field),)* }
    }};
}

/// The columns of one enum as those of another; called by a table of the contract.
macro_rules! columns {
    ($column:expr, $from:ident => $to:ident [$($variant:ident $method:ident $doc:literal;)*] $numbers:tt) => {
        match $column {
            $($from::$variant => $to::$variant,)*
        }
    };
}

pub(super) fn targets(targets: lifecycle::Targets) -> Targets {
    __lifecycle_targets!(record! targets => Targets {})
}

pub(super) fn step(step: dispatch_wit::Step) -> Step {
    __dispatch_step!(record! step => Step {})
}

pub(super) fn memory(memory: eviction_wit::Memory) -> eviction::Memory {
    use eviction::Memory;
    __eviction_memory!(record! memory => Memory {})
}

pub(super) fn load(load: budget_wit::Load, point: budget::Point) -> budget::Load {
    use budget::Load;
    __budget_load!(record! load => Load { point })
}

pub(super) fn thresholds(thresholds: budget::Thresholds) -> budget_wit::Thresholds {
    use budget_wit::Thresholds;
    __budget_thresholds!(record! thresholds => Thresholds {})
}

impl Same<eviction::Subject> for eviction_wit::Subject {
    fn same(self) -> eviction::Subject {
        match self {
            Self::Blocks => eviction::Subject::Blocks,
            Self::Requests => eviction::Subject::Requests,
        }
    }
}

impl Same<budget::Thresholds> for budget_wit::Thresholds {
    fn same(self) -> budget::Thresholds {
        use budget::Thresholds;
        __budget_thresholds!(record! self => Thresholds {})
    }
}

pub(super) fn verdict(verdict: budget::Verdict) -> budget_wit::Verdict {
    match verdict {
        budget::Verdict::Default => budget_wit::Verdict::Default,
        budget::Verdict::KeepThinking => budget_wit::Verdict::KeepThinking,
        budget::Verdict::EndNow => budget_wit::Verdict::EndNow,
    }
}

pub(super) fn dispatch_column(column: Column) -> dispatch_wit::Column {
    use dispatch_wit::Column as Wit;
    __dispatch_columns!(columns! column, Column => Wit)
}

pub(super) fn eviction_column(column: eviction::Column) -> eviction_wit::Column {
    use {eviction::Column, eviction_wit::Column as Wit};
    __eviction_columns!(columns! column, Column => Wit)
}

pub(super) fn budget_column(column: budget::Column) -> budget_wit::Column {
    use {budget::Column, budget_wit::Column as Wit};
    __budget_columns!(columns! column, Column => Wit)
}

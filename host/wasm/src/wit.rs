//! The bindings of the contract, and the only place where WIT types become host types. Fields and columns are those of the
//! contract's tables.

use meridian_core::budget::{Load, Thresholds, Verdict};
use meridian_core::text::is_printable;
use meridian_core::{Decision, Description, Memory, Ranking, Step, Subject, Targets};
use meridian_policy_sdk as sdk;

/// Of its world `policy` only the interfaces are used, each where a component exports it.
#[allow(dead_code)]
mod bindings {
    wasmtime::component::bindgen!({
        path: "../../wit",
        world: "policy",
    });
}

pub(crate) use bindings::exports::meridian::policy::{budget, dispatch, eviction, lifecycle};

/// A value of the host as one of the contract, or the other way round.
pub(crate) trait Same<T> {
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
    ($from:expr => $to:ident [$($field:ident $type:ident $doc:literal;)*]) => {{
        let from = $from;
        $to { $($field: Same::same(from.$field),)* }
    }};
}

impl Same<lifecycle::Targets> for Targets {
    fn same(self) -> lifecycle::Targets {
        use lifecycle::Targets;
        sdk::__lifecycle_targets!(record! self => Targets)
    }
}

impl Same<Description> for lifecycle::Description {
    fn same(self) -> Description {
        let Self { name, version, summary } = self;
        Description { name: clip(name, 64), version: clip(version, 64), summary: clip(summary, 512) }
    }
}

impl Same<dispatch::Step> for Step {
    fn same(self) -> dispatch::Step {
        use dispatch::Step;
        sdk::__dispatch_step!(record! self => Step)
    }
}

impl Same<eviction::Memory> for Memory {
    fn same(self) -> eviction::Memory {
        use eviction::Memory;
        sdk::__eviction_memory!(record! self => Memory)
    }
}

impl Same<eviction::Subject> for Subject {
    fn same(self) -> eviction::Subject {
        match self {
            Self::Blocks => eviction::Subject::Blocks,
            Self::Requests => eviction::Subject::Requests,
        }
    }
}

// The point is told by which function is called.
impl Same<budget::Load> for Load {
    fn same(self) -> budget::Load {
        use budget::Load;
        sdk::__budget_load!(record! self => Load)
    }
}

impl Same<budget::Thresholds> for Thresholds {
    fn same(self) -> budget::Thresholds {
        use budget::Thresholds;
        sdk::__budget_thresholds!(record! self => Thresholds)
    }
}

impl Same<Thresholds> for budget::Thresholds {
    fn same(self) -> Thresholds {
        sdk::__budget_thresholds!(record! self => Thresholds)
    }
}

impl Same<Verdict> for budget::Verdict {
    fn same(self) -> Verdict {
        match self {
            Self::Default => Verdict::Default,
            Self::KeepThinking => Verdict::KeepThinking,
            Self::EndNow => Verdict::EndNow,
        }
    }
}

impl Same<Decision> for dispatch::Decision {
    fn same(self) -> Decision {
        let Self { keys, token_budget, token_caps, victim_keys } = self;
        Decision { keys, token_budget, token_caps, victim_keys }
    }
}

impl Same<Ranking> for eviction::Ranking {
    fn same(self) -> Ranking {
        let Self { keys, keep_ms } = self;
        Ranking { keys, keep_ms }
    }
}

/// A guest's text is shown in terminals and logs: only what those show as it is, bounded length.
pub(crate) fn clip(text: String, max_chars: usize) -> String {
    text.chars().filter(|c| is_printable(*c)).take(max_chars).collect()
}

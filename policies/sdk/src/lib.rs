//! Write a Meridian policy as a per-request function.
//!
//! The SDK reads the columns, calls [`DispatchPolicy::key`] for each candidate and hands the keys back; the host sorts.
//! The other two slots are in [`eviction`] and [`budget`]; one component may fill several.
//! The same code compiles to a WebAssembly component (with [`export_policy!`]) and natively, where the host runs it as
//! a built-in default. Both give bit-identical keys as long as a policy keeps to `f32` and `f64` arithmetic
//! (`+ - * /`, `min`, `max`, comparisons): those are exact in both; `exp`, `powf` and the like are not.
//!
//! ```
//! use meridian_policy_sdk::{Column, DispatchPolicy, Init, Policy, Request, Step, export_policy};
//!
//! /// Shortest prompt first.
//! struct ShortestPrompt;
//!
//! impl Policy for ShortestPrompt {
//!     const NAME: &'static str = "shortest-prompt";
//!     const VERSION: &'static str = "0.1.0";
//!     const SUMMARY: &'static str = "Shortest prompt first: lowers mean TTFT, delays long prompts.";
//!
//!     fn new(init: Init<'_>) -> Result<Self, String> {
//!         init.no_config().map(|()| Self)
//!     }
//! }
//!
//! impl DispatchPolicy for ShortestPrompt {
//!     const INPUTS: &'static [Column] = &[Column::PromptTokens];
//!
//!     fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
//!         request.prompt_tokens()
//!     }
//! }
//!
//! export_policy!(dispatch: ShortestPrompt);
//! ```
//!
//! Reading a column that `INPUTS` does not name is a compile error.

#[macro_use]
mod contract;

mod awaited;
pub mod budget;
mod column;
mod config;
pub mod eviction;
mod inputs;
mod order;
mod policy;
mod request;
mod returns;
mod state;
mod step;
mod turnover;

#[cfg(target_arch = "wasm32")]
pub mod guest;

pub use awaited::awaited_since;
pub use column::{Column, Phase, State};
pub use config::{Init, Targets};
pub use contract::CONTRACT;
pub use order::clamped;
pub use policy::{Decision, DispatchPolicy, Policy, decide};
pub use request::{Request, Requests};
pub use returns::{Outlook, PauseKind, ReadsPauses, Returns};
pub use state::ByRequest;
pub use step::Step;
pub use turnover::Turnover;

/// Export policies of this crate as one component: `export_policy!(dispatch: A)`, or several slots,
/// `export_policy!(dispatch: A, eviction: B)`. Each slot has an instance of its own, with its own options; the first one
/// named describes the component. Does nothing in a native build.
#[macro_export]
macro_rules! export_policy {
    ($($slot:ident: $policy:ty),+ $(,)?) => {
        #[cfg(target_arch = "wasm32")]
        mod meridian_guest {
            use super::*;
            struct Component;
            $crate::__export_policy!(Component, $($slot: $policy),+);
        }
    };
}

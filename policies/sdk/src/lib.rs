//! Write a Meridian policy as a per-request function.
//!
//! The SDK reads the columns, calls [`DispatchPolicy::key`] for each candidate and hands the keys back; the host sorts.
//! The same code compiles to a WebAssembly component (with [`export_dispatch!`]) and natively, where the host runs it as
//! a built-in default. Both give bit-identical keys as long as a policy keeps to `f32` and `f64` arithmetic
//! (`+ - * /`, `min`, `max`, comparisons): those are exact in both; `exp`, `powf` and the like are not.
//!
//! ```
//! use meridian_policy_sdk::{Column, DispatchPolicy, Init, Request, Step, export_dispatch};
//!
//! /// Shortest prompt first.
//! struct ShortestPrompt;
//!
//! impl DispatchPolicy for ShortestPrompt {
//!     const NAME: &'static str = "shortest-prompt";
//!     const VERSION: &'static str = "0.1.0";
//!     const SUMMARY: &'static str = "Shortest prompt first: lowers mean TTFT, delays long prompts.";
//!     const INPUTS: &'static [Column] = &[Column::PromptTokens];
//!
//!     fn new(init: Init<'_>) -> Result<Self, String> {
//!         init.no_config().map(|()| Self)
//!     }
//!
//!     fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
//!         request.prompt_tokens()
//!     }
//! }
//!
//! export_dispatch!(ShortestPrompt);
//! ```
//!
//! Reading a column that `INPUTS` does not name is a compile error.

mod column;
mod config;
mod policy;
mod request;
mod step;

#[cfg(target_arch = "wasm32")]
pub mod guest;

pub use column::{Column, Phase, State};
pub use config::{Init, Targets};
pub use policy::{Decision, DispatchPolicy, decide};
pub use request::Request;
pub use step::Step;

/// Export `$policy` from this crate as a component of world `dispatch-policy`. Does nothing in a native build.
#[macro_export]
macro_rules! export_dispatch {
    ($policy:ty) => {
        #[cfg(target_arch = "wasm32")]
        mod meridian_guest {
            use super::*;
            ::std::thread_local! {
                static POLICY: ::std::cell::RefCell<::std::option::Option<$policy>> =
                    const { ::std::cell::RefCell::new(None) };
            }
            struct Component;
            impl $crate::guest::Instance for Component {
                type Policy = $policy;
                fn with<R>(f: impl FnOnce(&mut ::std::option::Option<$policy>) -> R) -> R {
                    POLICY.with_borrow_mut(f)
                }
            }
            $crate::guest::export!(Component with_types_in $crate::guest);
        }
    };
}

//! Loads, checks and calls policy components. The only crate that names wasmtime.
//!
//! ```no_run
//! use meridian_core::MeridianConfig;
//! use meridian_wasm::{PolicyLimits, Runtime};
//!
//! let config = MeridianConfig::default();
//! let runtime = Runtime::new(None)?;
//! let component = runtime.load_file("policy.wasm".as_ref())?;
//! let policy = component.dispatch_policy(PolicyLimits::default(), config.scheduler.targets(), "{}")?;
//! # Ok::<(), meridian_wasm::LoadError>(())
//! ```

mod artifact;
mod bulk;
mod cache;
mod check;
mod clock;
mod compile;
pub mod complexity;
mod component;
mod contract;
mod cosign;
mod error;
mod guest;
mod instance;
mod limiter;
mod operators;
mod runtime;
mod stack;
mod thread_time;
mod trust;
mod wit;

pub use bulk::BULK_BYTES_PER_TICK;
pub use compile::{COMPILE_DEADLINE, CompileCommand, CompileLimits, compile_child};
pub use component::{PolicyComponent, sha256_of};
pub use error::LoadError;
pub use guest::GuestKind;
pub use instance::{PolicyLimits, WasmPolicy};
pub use meridian_core::file::read_regular;
pub use runtime::{EPOCH_TICK, MAX_COMPONENT_BYTES, Runtime};
pub use trust::{KeyError, SignatureError, Signer, TrustedKeys, read_signature, signature_key_id};

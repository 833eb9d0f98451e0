//! The policies that are compiled into the host: the same logic as their components.

use meridian_policy_sdk::{DispatchPolicy as Logic, Init, decide};
use thiserror::Error;

use crate::{Batch, Column, Decision, Description, DispatchPolicy, Fault, FaultKind, Targets};

/// A native policy that cannot be made.
///
/// ```
/// use meridian_core::{SchedulerConfig, native};
///
/// let error = native::policy("outptu-first", SchedulerConfig::default().targets(), "{}").err().unwrap();
/// assert!(error.to_string().starts_with("native:outptu-first: unknown native policy, expected one of"));
/// ```
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NativeError {
    /// No such policy.
    #[error("native:{name}: unknown native policy, expected one of {}", NAMES.map(|name| format!("native:{name}")).join(", "))]
    Unknown {
        /// The name that was asked for.
        name: String,
    },
    /// It refused its configuration.
    #[error("native:{name} refused its configuration {config}: {reason}")]
    Refused {
        /// The policy.
        name: String,
        /// The options it was given, JSON.
        config: String,
        /// What it says.
        reason: String,
    },
}

/// Names of the native dispatch policies.
pub const NAMES: [&str; 3] = ["output-first", "fcfs", "noop"];

/// The native policy `name`, with its options as one JSON object.
///
/// # Errors
/// The name is unknown, or the policy refused its options.
pub fn policy(name: &str, targets: Targets, config_json: &str) -> Result<Box<dyn DispatchPolicy>, NativeError> {
    let init = Init { targets, config_json };
    let made = match name {
        "output-first" => Native::<output_first::OutputFirst>::boxed(init),
        "fcfs" => Native::<fcfs::Fcfs>::boxed(init),
        "noop" => Native::<noop::Noop>::boxed(init),
        _ => return Err(NativeError::Unknown { name: name.to_owned() }),
    };
    made.map_err(|reason| NativeError::Refused { name: name.to_owned(), config: config_json.to_owned(), reason })
}

/// The default of the dispatch slot: what decides when the active policy does not.
#[must_use]
pub fn default_policy(targets: Targets) -> Box<dyn DispatchPolicy> {
    policy("output-first", targets, "{}").expect("output-first takes every target")
}

/// A policy's logic, compiled natively.
struct Native<P> {
    logic: P,
    description: Description,
}

impl<P: Logic + Send + 'static> Native<P> {
    fn boxed(init: Init<'_>) -> Result<Box<dyn DispatchPolicy>, String> {
        let logic = P::new(init)?;
        let description = Description { name: P::NAME.into(), version: P::VERSION.into(), summary: P::SUMMARY.into() };
        Ok(Box::new(Self { logic, description }))
    }
}

impl<P: Logic + Send> DispatchPolicy for Native<P> {
    fn description(&self) -> &Description {
        &self.description
    }

    fn inputs(&self) -> &[Column] {
        P::INPUTS
    }

    fn decide(&mut self, batch: &Batch<'_>, decision: &mut Decision) -> Result<(), Fault> {
        decide(&self.logic, batch.step, batch.candidates, batch.columns, decision);
        Ok(())
    }

    fn recover(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn snapshot(&mut self) -> Result<Vec<u8>, Fault> {
        Ok(self.logic.snapshot())
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Fault> {
        self.logic.restore(state).map_err(|reason| Fault::new(FaultKind::Init, reason))
    }
}

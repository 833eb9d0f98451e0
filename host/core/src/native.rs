//! The policies that are compiled into the host. They share their logic with their components.

use meridian_policy_sdk::budget::{self, BudgetPolicy};
use meridian_policy_sdk::eviction::{self, EvictionPolicy};
use meridian_policy_sdk::{DispatchPolicy, Init, Policy as Logic};
use thiserror::Error;

use crate::{
    Batch, Budget, Column, Decision, Description, Dispatch, Eviction, Fault, FaultKind, Policy, PolicySource, SlotKind,
    Targets,
};

/// The reason why a native policy cannot start.
///
/// ```
/// use meridian_core::{Dispatch, SchedulerConfig, native};
///
/// let error = native::policy::<Dispatch>("outptu-first", SchedulerConfig::default().targets(), "{}").err().unwrap();
/// assert!(error.to_string().starts_with("native:outptu-first: unknown native policy, expected one of"));
/// ```
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NativeError {
    /// There is no such policy.
    #[error("{}: unknown native policy, expected one of {}", PolicySource::Native(name), sources(known))]
    Unknown {
        /// The requested name.
        name: String,
        /// The known names.
        known: Vec<&'static str>,
    },
    /// It refused its configuration.
    #[error("{} refused its configuration {config}: {reason}", PolicySource::Native(name))]
    Refused {
        /// The policy.
        name: String,
        /// Its options, JSON.
        config: String,
        /// Its reason.
        reason: String,
    },
}

/// `native:` and the name, for each policy.
pub(crate) fn sources(names: &[&str]) -> String {
    names.iter().map(|name| PolicySource::Native(name).to_string()).collect::<Vec<_>>().join(", ")
}

/// The native policy `name` of a slot, with its options as one JSON object.
///
/// # Errors
/// The name is unknown, or the policy refused its options.
pub fn policy<K: SlotKind>(name: &str, targets: Targets, config_json: &str) -> Result<Box<dyn Policy<K>>, NativeError> {
    match K::native(name, Init { targets, config_json }) {
        Some(made) => made.map_err(|reason| NativeError::Refused {
            name: name.to_owned(),
            config: config_json.to_owned(),
            reason,
        }),
        None => Err(NativeError::Unknown { name: name.to_owned(), known: K::NATIVES.to_vec() }),
    }
}

/// The default of a slot, which decides when the active policy does not.
#[must_use]
pub fn default_policy<K: SlotKind>(targets: Targets) -> Box<dyn Policy<K>> {
    policy(K::NATIVES[0], targets, "{}").expect("a native default takes every target")
}

/// A policy's logic, compiled natively.
pub(crate) struct Native<P> {
    logic: P,
    description: Description,
    targets: Targets,
    config_json: String,
}

impl<P: Logic> Native<P> {
    pub(crate) fn boxed<K: SlotKind>(init: Init<'_>) -> Result<Box<dyn Policy<K>>, String>
    where
        Self: Policy<K> + 'static,
    {
        let logic = P::new(init)?;
        let (targets, config_json) = (init.targets, init.config_json.to_owned());
        let description = Description { name: P::NAME.into(), version: P::VERSION.into(), summary: P::SUMMARY.into() };
        Ok(Box::new(Self { logic, description, targets, config_json }))
    }

    fn started_anew(&mut self) -> Result<(), Fault> {
        let init = Init { targets: self.targets, config_json: &self.config_json };
        self.logic = P::new(init).map_err(|reason| Fault::new(FaultKind::Init, reason))?;
        Ok(())
    }

    fn told(&mut self, finished: &[u32]) {
        if !finished.is_empty() {
            self.logic.finished(finished);
        }
    }

    fn restored(&mut self, state: &[u8]) -> Result<(), Fault> {
        self.logic.restore(state).map_err(|reason| Fault::new(FaultKind::Init, reason))
    }
}

/// The part of [`Policy`] that the logic of every slot shares.
macro_rules! as_native {
    () => {
        fn description(&self) -> &Description {
            &self.description
        }

        fn recover(&mut self) -> Result<(), Fault> {
            self.started_anew()
        }

        fn snapshot(&mut self) -> Result<Vec<u8>, Fault> {
            Ok(self.logic.snapshot())
        }

        fn restore(&mut self, state: &[u8]) -> Result<(), Fault> {
            self.restored(state)
        }
    };
}

impl<P: DispatchPolicy + Send> Policy<Dispatch> for Native<P> {
    as_native!();

    fn inputs(&self) -> &[Column] {
        P::INPUTS
    }

    fn decide(&mut self, batch: &Batch<'_>, decision: &mut Decision) -> Result<(), Fault> {
        self.told(batch.finished);
        meridian_policy_sdk::decide(&mut self.logic, batch.facts, batch.candidates, batch.columns, decision);
        Ok(())
    }
}

impl<P: EvictionPolicy + Send> Policy<Eviction> for Native<P> {
    as_native!();

    fn inputs(&self) -> &[eviction::Column] {
        P::INPUTS
    }

    fn decide(&mut self, batch: &Batch<'_, Eviction>, ranking: &mut eviction::Ranking) -> Result<(), Fault> {
        eviction::rank(&mut self.logic, batch.facts, batch.candidates, batch.columns, ranking);
        Ok(())
    }
}

impl<P: BudgetPolicy + Send> Policy<Budget> for Native<P> {
    as_native!();

    fn inputs(&self) -> &[budget::Column] {
        P::INPUTS
    }

    fn weighs_signals_alone(&self) -> bool {
        P::WEIGHS_SIGNALS_ALONE
    }

    fn decide(&mut self, batch: &Batch<'_, Budget>, decision: &mut budget::Decision) -> Result<(), Fault> {
        self.told(batch.finished);
        budget::decide(&mut self.logic, batch.facts, batch.candidates, batch.columns, decision);
        Ok(())
    }
}

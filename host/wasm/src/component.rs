use std::collections::HashSet;
use std::sync::Arc;

use meridian_core::{Policy, SlotName, Targets};
use sha2::{Digest, Sha256};
use wasmtime::component::{Instance, InstancePre};
use wasmtime::{Engine, Store};

use crate::cache::hex;
use crate::guest::{Filled, GuestKind, Lifecycle};
use crate::instance::{PolicyLimits, StoreState, WasmPolicy};
use crate::{LoadError, Signer};

/// What [`PolicyComponent::sha256`] says of a component with these bytes, which need not be one.
#[must_use]
pub fn sha256_of(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// A component that was read, checked and compiled, and can be instantiated in microseconds.
#[derive(Clone)]
pub struct PolicyComponent {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) engine: Engine,
    pub(crate) pre: InstancePre<StoreState>,
    filled: Filled,
    slots: Vec<SlotName>,
    sha256: String,
    bytes: usize,
    signer: Option<Signer>,
}

impl Shared {
    /// The functions of an instance; `None` when the component does not fill slot `K`.
    pub(crate) fn functions<K: GuestKind>(
        &self,
        store: &mut Store<StoreState>,
        instance: &Instance,
    ) -> wasmtime::Result<Option<(Lifecycle, K::Guest)>> {
        let Some(indices) = K::of(&self.filled) else { return Ok(None) };
        let lifecycle = self.filled.lifecycle(store, instance)?;
        Ok(Some((lifecycle, K::load(indices, store, instance)?)))
    }

    pub(crate) fn not_filled<K: GuestKind>(&self) -> LoadError {
        LoadError::NotFilled { slot: K::NAME.label(), fills: labels(&self.slots) }
    }
}

fn labels(slots: &[SlotName]) -> String {
    slots.iter().map(|slot| slot.label()).collect::<Vec<_>>().join(", ")
}

impl PolicyComponent {
    pub(crate) fn new(
        engine: Engine,
        pre: InstancePre<StoreState>,
        slots: Vec<SlotName>,
        bytes: &[u8],
        signer: Option<Signer>,
    ) -> wasmtime::Result<Self> {
        let (sha256, bytes) = (sha256_of(bytes), bytes.len());
        let filled = Filled::find(&pre, &slots)?;
        Ok(Self { shared: Arc::new(Shared { engine, pre, filled, slots, sha256, bytes, signer }) })
    }

    /// The slots it fills, at least one.
    #[must_use]
    pub fn slots(&self) -> Vec<SlotName> {
        self.shared.slots.clone()
    }

    /// SHA-256 of the component, lower-case hexadecimal.
    #[must_use]
    pub fn sha256(&self) -> &str {
        &self.shared.sha256
    }

    /// Size of the component in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.shared.bytes
    }

    /// Who signed the component; `None` when no keys are trusted, because nothing is verified then.
    #[must_use]
    pub fn signer(&self) -> Option<&Signer> {
        self.shared.signer.as_ref()
    }

    /// Instantiate and initialise the component as the policy of slot `K`. `config_json` is one JSON object.
    ///
    /// # Errors
    /// The component does not fill the slot, refused its configuration, faulted while starting, or asks for a column
    /// twice.
    pub fn policy<K: GuestKind>(
        &self,
        limits: PolicyLimits,
        targets: Targets,
        config_json: &str,
    ) -> Result<WasmPolicy<K>, LoadError> {
        let policy = WasmPolicy::start(Arc::clone(&self.shared), limits, targets, config_json)?;
        let mut seen = HashSet::new();
        match Policy::<K>::inputs(&policy).iter().find(|column| !seen.insert(**column)) {
            Some(column) => Err(LoadError::DuplicateInput { column: format!("{column:?}") }),
            None => Ok(policy),
        }
    }

    /// The same for the dispatch slot.
    ///
    /// # Errors
    /// As [`PolicyComponent::policy`].
    pub fn dispatch_policy(
        &self,
        limits: PolicyLimits,
        targets: Targets,
        config_json: &str,
    ) -> Result<WasmPolicy, LoadError> {
        self.policy(limits, targets, config_json)
    }
}

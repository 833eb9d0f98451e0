use std::collections::HashSet;
use std::sync::Arc;

use meridian_core::Targets;
use sha2::{Digest, Sha256};
use wasmtime::Engine;

use crate::LoadError;
use crate::cache::hex;
use crate::instance::{Limits, StoreState, WasmDispatch};
use crate::wit::DispatchPolicyPre;

/// A component that was read, checked and compiled, and can be instantiated in microseconds.
#[derive(Clone)]
pub struct PolicyComponent {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) engine: Engine,
    pub(crate) pre: DispatchPolicyPre<StoreState>,
    sha256: String,
    bytes: usize,
}

impl PolicyComponent {
    pub(crate) fn new(engine: Engine, pre: DispatchPolicyPre<StoreState>, bytes: &[u8]) -> Self {
        let sha256 = hex(&Sha256::digest(bytes));
        Self { shared: Arc::new(Shared { engine, pre, sha256, bytes: bytes.len() }) }
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

    /// Instantiate and initialise the component as a dispatch policy. `config_json` is one JSON object.
    ///
    /// # Errors
    /// The component refused its configuration, faulted while starting, or asks for a column twice.
    pub fn dispatch_policy(
        &self,
        limits: Limits,
        targets: Targets,
        config_json: &str,
    ) -> Result<WasmDispatch, LoadError> {
        let policy = WasmDispatch::start(Arc::clone(&self.shared), limits, targets, config_json)?;
        let mut seen = HashSet::new();
        match meridian_core::DispatchPolicy::inputs(&policy).iter().find(|column| !seen.insert(**column)) {
            Some(column) => Err(LoadError::DuplicateInput { column: format!("{column:?}") }),
            None => Ok(policy),
        }
    }
}

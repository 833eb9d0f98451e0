//! The wiring of what changes a policy while the engine runs: components, the file watch, the slot.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use meridian_core::{MeridianConfig, Targets, native};
use meridian_runtime::control::SlotName;
use meridian_runtime::{Candidate, Loader};
use meridian_wasm::{Limits, LoadError, Runtime};

use crate::cache_dir;

/// Loads components for the dispatch slot as `[policy]` says.
pub(crate) struct WasmLoader {
    /// Set up at the first component: an engine with native policies needs no wasmtime.
    runtime: Mutex<Option<Runtime>>,
    cache_dir: Option<PathBuf>,
    limits: Limits,
    targets: Targets,
    options: String,
}

impl WasmLoader {
    /// # Errors
    /// The policy's options cannot be written as JSON.
    pub(crate) fn new(config: &MeridianConfig, base_dir: &Path) -> Result<Self, String> {
        let dispatch = &config.policy.dispatch;
        let limits = Limits {
            deadline: Duration::from_secs_f32(dispatch.deadline_ms / 1e3),
            memory_bytes: (dispatch.memory_mib as usize) << 20,
        };
        let options = serde_json::to_string(&dispatch.config).map_err(|error| error.to_string())?;
        Ok(Self {
            runtime: Mutex::new(None),
            cache_dir: cache_dir(base_dir, &config.policy.cache_dir),
            limits,
            targets: config.scheduler.targets(),
            options,
        })
    }

    fn runtime(&self) -> Result<Runtime, LoadError> {
        let mut runtime = self.runtime.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = &*runtime {
            return Ok(runtime.clone());
        }
        let made = Runtime::new(self.cache_dir.clone())?;
        *runtime = Some(made.clone());
        Ok(made)
    }

    /// The policy that `source` names: `native:NAME`, or the path of a component.
    ///
    /// # Errors
    /// Why it is refused, in one line.
    pub(crate) fn load_source(&self, source: &str, base_dir: &Path) -> Result<Candidate, String> {
        if let Some(name) = source.strip_prefix("native:") {
            let policy = native::policy(name, self.targets, &self.options).map_err(|error| error.to_string())?;
            return Ok(Candidate::new(policy, "", source));
        }
        let path = base_dir.join(source);
        let load = || {
            let component = self.runtime()?.load_file(&path)?;
            let policy = component.dispatch_policy(self.limits, self.targets, &self.options)?;
            Ok(Candidate::new(Box::new(policy), component.sha256(), &path.display().to_string()))
        };
        load().map_err(|error: LoadError| format!("{}: {error}", path.display()))
    }
}

impl Loader for WasmLoader {
    fn load(&self, slot: SlotName, component: &[u8], source: &str) -> Result<Candidate, String> {
        if slot != SlotName::Dispatch {
            return Err(format!("{}: this engine has no such slot", slot.label()));
        }
        let load = || {
            let component = self.runtime()?.load(component)?;
            let policy = component.dispatch_policy(self.limits, self.targets, &self.options)?;
            Ok(Candidate::new(Box::new(policy), component.sha256(), source))
        };
        load().map_err(|error: LoadError| error.to_string())
    }
}

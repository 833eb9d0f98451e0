//! The wiring of the three slots of one engine: components, the file watch, who may change them.

use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use meridian_core::config::SlotMode;
use meridian_core::{Budget, Dispatch, Eviction, MeridianConfig, Policy, SlotConfig, SlotName, Targets, native};
use meridian_runtime::admin::Admin;
use meridian_runtime::control::{Control, Given, Mode, ProcessStatus, Upload};
use meridian_runtime::recording::{Recorder, RecorderSettings, SlotSetup};
use meridian_runtime::traces::Traces;
use meridian_runtime::watch::{FileWatch, WatchedFile};
use meridian_runtime::{
    BudgetSlot, Candidate, ControlledSlot, Controller, DispatchSlot, EvictionSlot, Loader, PolicySlot, Refusal,
    StrikeLimits,
};
use meridian_wasm::{GuestKind, Limits, LoadError, PolicyComponent, Runtime, TrustedKeys};

use crate::cache_dir;

/// wasmtime, set up at the first component: an engine with native policies needs none.
pub(crate) struct Components {
    runtime: Mutex<Option<Runtime>>,
    cache_dir: Option<PathBuf>,
    trusted_keys: TrustedKeys,
}

impl Components {
    fn runtime(&self) -> Result<Runtime, LoadError> {
        let mut runtime = self.runtime.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = &*runtime {
            return Ok(runtime.clone());
        }
        let made = Runtime::new(self.cache_dir.clone())?.with_trusted_keys(self.trusted_keys.clone());
        *runtime = Some(made.clone());
        Ok(made)
    }
}

/// Loads policies for slot `K` as its table in `[policy]` says.
struct SlotLoader<K> {
    components: Arc<Components>,
    limits: Limits,
    targets: Targets,
    source: String,
    options: String,
    kind: PhantomData<K>,
}

impl<K: GuestKind> SlotLoader<K> {
    fn new(slot: &SlotConfig, targets: Targets, components: &Arc<Components>) -> Result<Self, String> {
        Ok(Self {
            components: Arc::clone(components),
            limits: Limits {
                deadline: Duration::from_secs_f32(slot.deadline_ms / 1e3),
                memory_bytes: (slot.memory_mib as usize) << 20,
                ..Limits::default()
            },
            targets,
            source: slot.source.clone(),
            options: serde_json::to_string(&slot.config).map_err(|error| error.to_string())?,
            kind: PhantomData,
        })
    }

    /// The policy that `source` names, with the configured options: `native:NAME`, or the path of a component.
    fn load_source(&self, base_dir: &Path) -> Result<Candidate<K>, String> {
        let source = &self.source;
        if let Some(name) = source.strip_prefix("native:") {
            return self.native(name, &self.options);
        }
        let path = base_dir.join(source);
        let load = || {
            let component = self.components.runtime()?.load_file(&path)?;
            self.started(component, &self.options, &path.display().to_string())
        };
        load().map_err(|error: LoadError| format!("{}: {error}", path.display()))
    }

    fn native(&self, name: &str, options: &str) -> Result<Candidate<K>, String> {
        let policy = native::policy(name, self.targets, options).map_err(|error| error.to_string())?;
        Ok(Candidate::new(policy, "", &format!("native:{name}")).with_options(options))
    }

    fn started(&self, component: PolicyComponent, options: &str, source: &str) -> Result<Candidate<K>, LoadError> {
        let (limits, targets) = (self.limits, self.targets);
        let policy = component.policy::<K>(limits, targets, options)?;
        let candidate = Candidate::new(Box::new(policy), component.sha256(), source).with_options(options);
        Ok(candidate.with_remake(Arc::new(move |options: &str| {
            let policy = component.policy::<K>(limits, targets, options).map_err(|error| error.to_string())?;
            Ok(Box::new(policy) as Box<dyn Policy<K>>)
        })))
    }
}

impl<K: GuestKind> Loader<K> for SlotLoader<K> {
    fn load(&self, upload: &Upload<'_>) -> Result<Candidate<K>, Refusal> {
        let Upload { policy, options, source } = upload;
        let options = options.unwrap_or("{}");
        let (bytes, signature) = match policy {
            Given::Component { bytes, signature } => (bytes, signature),
            Given::Native(name) => return Ok(self.native(name, options)?),
            Given::Active => return Err(String::from("no policy is given").into()),
        };
        let load = || self.started(self.components.runtime()?.load_signed(bytes, *signature)?, options, source);
        load().map_err(|error: LoadError| Refusal { why: error.to_string(), is_transient: is_transient(&error) })
    }

    /// Those of the configuration belong to the policy that it names; components take its place.
    fn configured_options(&self, policy: &Given<'_>) -> String {
        match policy {
            Given::Native(name) if self.source.strip_prefix("native:") != Some(*name) => "{}".into(),
            Given::Native(_) | Given::Component { .. } | Given::Active => self.options.clone(),
        }
    }
}

/// Whether the machine is the reason, and not the component. A component that took too long to compile is not tried again by
/// itself: it would occupy the compiler for ever.
fn is_transient(error: &LoadError) -> bool {
    matches!(error, LoadError::CompilerBusy { .. } | LoadError::Setup { .. })
}

/// The slots of an engine, and what changes their policies.
pub(crate) struct Slots {
    pub(crate) dispatch: DispatchSlot,
    pub(crate) eviction: EvictionSlot,
    pub(crate) budget: BudgetSlot,
    pub(crate) controller: Controller,
    pub(crate) recorder: Option<Recorder>,
}

impl Slots {
    /// The policies that the configuration names, started. `status` tells facts about the engine.
    ///
    /// # Errors
    /// The slot's source, and why its policy is refused.
    pub(crate) fn new(
        config: &MeridianConfig,
        base_dir: &Path,
        trusted_keys: TrustedKeys,
        status: impl FnOnce() -> Box<dyn Fn() -> ProcessStatus + Send + Sync>,
    ) -> Result<Self, String> {
        let cache_dir = cache_dir(base_dir, &config.policy.cache_dir);
        let components = Arc::new(Components { runtime: Mutex::new(None), cache_dir, trusted_keys });
        let (dispatch, controlled) = slot::<Dispatch>(config, &config.policy.dispatch, base_dir, &components)?;
        let controller = Controller::new(controlled, status());
        let (eviction, controlled) = slot::<Eviction>(config, &config.policy.eviction, base_dir, &components)?;
        let controller = controller.with_eviction(controlled);
        let (budget, controlled) = slot::<Budget>(config, &config.policy.budget, base_dir, &components)?;
        let controller = controller.with_budget(controlled);
        let Some(recorder) = recorder(config, base_dir)? else {
            return Ok(Self { dispatch, eviction, budget, controller, recorder: None });
        };
        let policy = &config.policy;
        let setup = |slot: &SlotConfig| SlotSetup {
            targets: config.scheduler.targets(),
            deadline_ms: slot.deadline_ms,
            memory_mib: slot.memory_mib,
        };
        dispatch.control().record(&recorder, setup(&policy.dispatch));
        eviction.control().record(&recorder, setup(&policy.eviction));
        budget.control().record(&recorder, setup(&policy.budget));
        let watch = recorder.watch();
        let controller = controller.with_recording(Box::new(move || watch.status()));
        Ok(Self { dispatch, eviction, budget, controller, recorder: Some(recorder) })
    }
}

/// The recorder that the configuration asks for.
fn recorder(config: &MeridianConfig, base_dir: &Path) -> Result<Option<Recorder>, String> {
    let dir = &config.policy.record_dir;
    if dir.is_empty() {
        return Ok(None);
    }
    let settings = RecorderSettings::new(base_dir.join(dir), config.policy.record_max_mib);
    Recorder::start(settings).map(Some).map_err(|reason| format!("policy.record_dir: {reason}"))
}

fn slot<K: GuestKind>(
    config: &MeridianConfig,
    slot: &SlotConfig,
    base_dir: &Path,
    components: &Arc<Components>,
) -> Result<(PolicySlot<K>, ControlledSlot<K>), String> {
    let refused = |reason: String| format!("policy.{}.source: {reason}", K::NAME.label());
    let targets = config.scheduler.targets();
    let loader = SlotLoader::<K>::new(slot, targets, components).map_err(refused)?;
    let mut candidate = loader.load_source(base_dir).map_err(refused)?;
    // So that the first call, the slowest, is not in a step. There is no version before it that could decide, and a busy
    // machine at its start is no reason not to serve: strikes and quarantine see to one that goes on faulting.
    if let Err(trial) = candidate.warm_up() {
        tracing::warn!(slot = K::NAME.label(), source = slot.source, "the configured policy {trial}");
        let _ = candidate.policy.start_anew();
    }
    let (active, shadow) = match slot.mode {
        SlotMode::Active => (candidate, None),
        SlotMode::Shadow => {
            let source = format!("native:{}", K::NATIVES[0]);
            (Candidate::new(native::default_policy(targets), "", &source), Some(candidate))
        }
    };
    let limits = StrikeLimits {
        max_strikes: config.policy.max_strikes,
        window_ms: f64::from(config.policy.strike_window_s) * 1e3,
    };
    let slot = PolicySlot::with_version(active, targets, limits);
    let control = slot.control();
    if let Some(shadow) = shadow {
        control.shadow(shadow).map_err(|error| refused(error.to_string()))?;
    }
    Ok((slot, ControlledSlot { control, loader: Box::new(loader) }))
}

/// What has threads, ports or files. Dropped in this order: nobody may change a policy through a listener that is about
/// to end.
#[derive(Default)]
#[expect(dead_code, reason = "held for what ends with them")]
pub(crate) struct Services {
    admin: Option<Admin>,
    watches: Vec<FileWatch>,
    traces: Option<Arc<Traces>>,
    recorder: Option<Recorder>,
}

impl Services {
    /// Start what the configuration asks for: with `serves` the listeners and the traces, and a watch of each
    /// component's file. The recording goes on until they have ended.
    pub(crate) fn start(
        config: &MeridianConfig,
        base_dir: &Path,
        model: &str,
        control: &Arc<dyn Control>,
        serves: bool,
        recorder: Option<Recorder>,
    ) -> Self {
        // Before anybody can change what was loaded.
        let loaded = control.status().slots;
        let trace = || Traces::start(&config.telemetry, model, Some(Arc::clone(control)));
        let traces = if serves { trace() } else { Ok(None) };
        let traces = traces.inspect_err(|why| tracing::warn!("{why}")).ok().flatten().map(Arc::new);
        let admin = serves.then(|| Admin::start(Arc::clone(control), &config.admin, &config.telemetry, base_dir));
        let policy = &config.policy;
        let mut watches = Vec::new();
        for (name, slot) in SlotName::ALL.into_iter().zip([&policy.dispatch, &policy.eviction, &policy.budget]) {
            if !policy.watch || slot.source.starts_with("native:") {
                continue;
            }
            let loaded = loaded.iter().find(|slot| slot.slot == name);
            let (mode, version) = match slot.mode {
                SlotMode::Active => (Mode::Active, loaded.map(|slot| &slot.active)),
                SlotMode::Shadow => (Mode::Shadow, loaded.and_then(|slot| Some(&slot.shadow.as_ref()?.version))),
            };
            let sha256 = version.map_or("", |version| &version.sha256);
            let path = base_dir.join(&slot.source);
            let file = WatchedFile::new(&path, name, Arc::clone(control), sha256).with_mode(mode);
            match FileWatch::start(file) {
                Ok(watch) => watches.push(watch),
                Err(why) => tracing::warn!(slot = name.label(), why, "the policy's file is not watched"),
            }
        }
        Self { admin, watches, traces, recorder }
    }

    /// Who is to be told of requests that end.
    pub(crate) fn traces(&self) -> Option<Arc<Traces>> {
        self.traces.clone()
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        self.admin.take();
        self.watches.clear();
        // The engine holds it as well.
        if let Some(traces) = &self.traces {
            traces.close();
        }
    }
}

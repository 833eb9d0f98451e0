//! The three slots of one engine as its configuration defines them, and the control of their policies.

use std::path::Path;
use std::sync::Arc;

use meridian_core::config::SlotMode;
use meridian_core::oci::{OciReference, OciReferenceError};
use meridian_core::signature::FetchedComponent;
use meridian_core::slot::{BudgetSlot, Contender, DispatchSlot, EvictionSlot, PolicySlot, StrikeLimits};
use meridian_core::{Budget, Dispatch, Eviction, MeridianConfig, PolicySource, SlotConfig, native};
use meridian_wasm::GuestKind;

use crate::awaited::Awaited;
use crate::control::{Given, ProcessStatus, Upload};
use crate::recording::{Recorder, RecorderSettings, SlotSetup};
use crate::{Components, ControlledSlot, Controller, EngineError, Loader, Origin, PolicyError, Refusal, Terms};

/// Loads policies for a slot, with the limits of its table in `[policy]`.
struct SlotLoader {
    components: Arc<Components>,
    terms: Terms,
    source: String,
    options: String,
}

impl<K: GuestKind> Loader<K> for SlotLoader {
    fn load(&self, upload: &Upload<'_>) -> Result<Contender<K>, Refusal> {
        let Upload { policy, options, source } = upload;
        let origin = match policy {
            Given::Component { bytes, signature } => self.components.bytes(bytes, *signature, source),
            Given::Fetched(fetched) => self.components.fetched(fetched),
            Given::Native(name) => Ok(Origin::native(name)),
            Given::Remote(_) | Given::Active => return Err(String::from("no policy is given").into()),
        };
        let loaded = origin.and_then(|origin| origin.start(self.terms, options.unwrap_or("{}")));
        loaded.map_err(refusal)
    }

    fn fetch(&self, reference: &str) -> Result<FetchedComponent, Refusal> {
        let pinned = OciReference::pinned(reference).map_err(PolicyError::from);
        pinned.and_then(|reference| self.components.fetch(&reference)).map_err(refusal)
    }

    /// The configured options belong to the policy that the configuration names; components take its place.
    fn configured_options(&self, policy: &Given<'_>) -> String {
        match policy {
            Given::Native(name) if PolicySource::of(&self.source) != PolicySource::Native(name) => "{}".into(),
            Given::Native(_) | Given::Component { .. } | Given::Fetched(_) | Given::Remote(_) | Given::Active => {
                self.options.clone()
            }
        }
    }
}

fn refusal(error: PolicyError) -> Refusal {
    Refusal { why: error.to_string(), is_transient: error.is_transient() }
}

/// The slots of an engine, and the control of their policies.
pub(crate) struct Slots {
    pub(crate) dispatch: DispatchSlot,
    pub(crate) eviction: EvictionSlot,
    pub(crate) budget: BudgetSlot,
    pub(crate) controller: Controller,
    pub(crate) recorder: Option<Recorder>,
    /// The slots that wait for a registry.
    pub(crate) awaited: Vec<Awaited>,
}

impl Slots {
    /// Start the policies that the configuration names. `status` gives facts about the engine.
    pub(crate) fn new(
        config: &MeridianConfig,
        base_dir: &Path,
        components: Components,
        status: Box<dyn Fn() -> ProcessStatus + Send + Sync>,
    ) -> Result<Self, EngineError> {
        let components = Arc::new(components);
        let policy = &config.policy;
        let mut awaited = Vec::new();
        let (dispatch, controlled) = slot::<Dispatch>(config, &policy.dispatch, base_dir, &components, &mut awaited)?;
        let controller = Controller::new(controlled, status);
        let (eviction, controlled) = slot::<Eviction>(config, &policy.eviction, base_dir, &components, &mut awaited)?;
        let controller = controller.with_eviction(controlled);
        let (budget, controlled) = slot::<Budget>(config, &policy.budget, base_dir, &components, &mut awaited)?;
        let controller = controller.with_budget(controlled);
        let Some(recorder) = recorder(config, base_dir)? else {
            return Ok(Self { dispatch, eviction, budget, controller, recorder: None, awaited });
        };
        let setup = |slot: &SlotConfig| SlotSetup {
            targets: config.scheduler.targets(),
            deadline_ms: slot.deadline_ms,
            memory_mib: slot.memory_mib,
        };
        dispatch.control().record(recorder.tap(setup(&policy.dispatch)));
        eviction.control().record(recorder.tap(setup(&policy.eviction)));
        budget.control().record(recorder.tap(setup(&policy.budget)));
        let watch = recorder.watch();
        let controller = controller.with_recording(Box::new(move || watch.status()));
        Ok(Self { dispatch, eviction, budget, controller, recorder: Some(recorder), awaited })
    }
}

/// The recorder of the configuration.
fn recorder(config: &MeridianConfig, base_dir: &Path) -> Result<Option<Recorder>, EngineError> {
    let dir = &config.policy.record_dir;
    if dir.is_empty() {
        return Ok(None);
    }
    let settings = RecorderSettings::new(base_dir.join(dir), config.policy.record_max_mib);
    Recorder::start(settings).map(Some).map_err(|reason| EngineError::Recording { reason })
}

fn slot<K: GuestKind>(
    config: &MeridianConfig,
    slot: &SlotConfig,
    base_dir: &Path,
    components: &Arc<Components>,
    awaited: &mut Vec<Awaited>,
) -> Result<(PolicySlot<K>, ControlledSlot<K>), EngineError> {
    let refused = |reason: String| EngineError::Policy { slot: K::NAME, reason };
    let targets = config.scheduler.targets();
    let terms = Terms::of(slot, targets);
    let options = serde_json::to_string(&slot.config).expect("values of a TOML table");
    let own = |source: &str| {
        let name = PolicySource::of(source).native().expect("a native policy");
        Contender::new(native::policy::<K>(name, targets, "{}").expect("it needs no options"), "", source)
    };
    let opened = match remote(&slot.source).map_err(|error| refused(error.to_string()))? {
        Some(reference) => components.open_stored(&reference),
        None => Some(components.open(&slot.source, base_dir)),
    };
    let contender = match opened {
        Some(origin) => {
            let started = origin.and_then(|origin| origin.start::<K>(terms, &options));
            let mut contender = started.map_err(|error| refused(error.to_string()))?;
            // The first call is the slowest, so make it before the first step. No earlier version could decide, and a
            // busy machine is no reason not to start; strikes and quarantine handle a version that keeps faulting.
            if let Err(trial) = contender.warm_up() {
                tracing::warn!(slot = K::NAME.label(), source = slot.source, "the configured policy {trial}");
                let _ = contender.policy.start_anew();
            }
            Some(contender)
        }
        // No start waits for a registry.
        None => {
            awaited.push(Awaited::new(K::NAME, slot));
            None
        }
    };
    let (active, shadow) = match slot.mode {
        SlotMode::Active => (contender.unwrap_or_else(|| own(&PolicySource::Native(K::NATIVES[0]).to_string())), None),
        SlotMode::Shadow => (own(K::BESIDE_SHADOW), contender),
    };
    let made = PolicySlot::with_version(active, targets, strike_limits(config));
    let control = made.control();
    if let Some(shadow) = shadow {
        control.shadow(shadow).map_err(|error| refused(error.to_string()))?;
    }
    let components = Arc::clone(components);
    let loader = Box::new(SlotLoader { components, terms, source: slot.source.clone(), options });
    Ok((made, ControlledSlot { control, loader }))
}

/// The reference of a source that a registry has.
fn remote(source: &str) -> Result<Option<OciReference>, OciReferenceError> {
    PolicySource::of(source).registry().map(OciReference::pinned).transpose()
}

/// The number of faults that puts a version into quarantine.
#[must_use]
pub fn strike_limits(config: &MeridianConfig) -> StrikeLimits {
    StrikeLimits { max_strikes: config.policy.max_strikes, window_ms: f64::from(config.policy.strike_window_s) * 1e3 }
}

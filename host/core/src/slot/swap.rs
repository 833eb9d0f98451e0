use std::sync::Arc;
use std::time::Instant;

use super::faults::FaultLog;
use super::loaded::{self, LoadedPolicy, StrikeLimits};
use super::report::{ControlError, FaultEntry, Mode, SlotStatus, StateHandover, SwapReport, UNCHANGED, Version};
use super::shadow::{Progress, Shadow};
use super::{Quarantine, Shared, State, Witness};
use crate::sync::lock;
use crate::{Description, Dispatch, Fault, FaultKind, GuardedPolicy, Policy, SlotKind};

/// A policy that may become active, with its origin.
///
/// ```
/// use meridian_core::slot::Contender;
/// use meridian_core::{Dispatch, SchedulerConfig, native};
///
/// let policy = native::policy::<Dispatch>("fcfs", SchedulerConfig::default().targets(), "{}")?;
/// let mut contender = Contender::new(policy, "", "native:fcfs");
/// assert!(contender.warm_up().is_ok_and(|trial| trial.decides));
/// assert_eq!(contender.version.name, "fcfs");
/// # Ok::<(), native::NativeError>(())
/// ```
pub struct Contender<K: SlotKind = Dispatch> {
    /// The policy, started.
    pub policy: Box<dyn Policy<K>>,
    /// Its name, version and origin.
    pub version: Version,
    /// Starts the same component with other options; `None` where that is impossible.
    pub remake: Option<Remake<K>>,
}

/// Starts an already compiled component with the given options, one JSON object. Waits for the start.
pub type Remake<K> = Arc<dyn Fn(&str) -> Result<Box<dyn Policy<K>>, String> + Send + Sync>;

impl<K: SlotKind> Contender<K> {
    /// A contender of the given origin; name and version are the policy's own.
    #[must_use]
    pub fn new(policy: Box<dyn Policy<K>>, sha256: &str, source: &str) -> Self {
        let Description { name, version, summary: _ } = policy.description().clone();
        let (sha256, source) = (sha256.into(), source.into());
        Self { policy, version: Version { name, version, sha256, source, options: "{}".into() }, remake: None }
    }

    /// The same, with the options of the policy's start, one JSON object; a recording needs them to start it again.
    #[must_use]
    pub fn with_options(mut self, config_json: &str) -> Self {
        self.version.options = config_json.into();
        self
    }

    /// The same, with a way to restart its component with other options.
    #[must_use]
    pub fn with_remake(self, remake: Remake<K>) -> Self {
        Self { remake: Some(remake), ..self }
    }
}

/// A handle of a slot, for every thread but the deciding one. Clones share the slot.
///
/// ```
/// use meridian_core::slot::{Contender, DispatchSlot};
/// use meridian_core::{SchedulerConfig, native};
///
/// let targets = SchedulerConfig::default().targets();
/// let slot = DispatchSlot::new(native::policy("fcfs", targets, "{}")?, targets);
/// let control = slot.control();
/// let contender = Contender::new(native::policy("srpt", targets, "{}")?, "", "native:srpt");
/// std::thread::spawn(move || control.swap(contender)).join().expect("no panic");
/// assert_eq!(slot.version().name, "srpt");
/// # Ok::<(), native::NativeError>(())
/// ```
#[derive(Clone)]
pub struct SlotControl<K: SlotKind = Dispatch> {
    shared: Arc<Shared<K>>,
}

impl<K: SlotKind> SlotControl<K> {
    pub(super) fn new(shared: Arc<Shared<K>>) -> Self {
        Self { shared }
    }

    /// Make a contender active between two decisions. The state of the previous policy is handed over if both policies
    /// support it. A version in quarantine is forgotten.
    pub fn swap(&self, contender: Contender<K>) -> SwapReport {
        let loaded = LoadedPolicy::new(GuardedPolicy::new(contender.policy), contender.version, contender.remake);
        self.change("swap", |state, leftovers| {
            leftovers.extend(state.quarantine.take().map(|quarantine| quarantine.policy));
            Ok(state.install(loaded, true, leftovers))
        })
        .expect("installing a policy is not refused")
    }

    /// Put versions into quarantine by these limits from now on.
    pub fn set_strike_limits(&self, limits: StrikeLimits) {
        self.shared.change(|state| state.limits = limits);
    }

    /// Compare a contender with the active policy; an earlier shadow is dropped.
    ///
    /// # Errors
    /// [`ControlError::Refused`] when the system gives no thread.
    pub fn shadow(&self, contender: Contender<K>) -> Result<SwapReport, ControlError> {
        let faults = Arc::clone(&lock(&self.shared.state).faults);
        let shadow = Shadow::start(contender, faults)
            .map_err(|error| ControlError::Refused(format!("no thread for a shadow: {error}")))?;
        let (report, old) = self.shared.change(|state| {
            let old = state.shadow.replace(shadow);
            (state.unmoved("shadow"), old)
        });
        if let Some(old) = old {
            old.stop();
        }
        Ok(report)
    }

    /// Make the shadow active, with the state it has gathered.
    ///
    /// # Errors
    /// [`ControlError::Nothing`] without a shadow, [`ControlError::Refused`] when it panicked.
    pub fn promote(&self) -> Result<SwapReport, ControlError> {
        let shadow = self.shared.change(|state| state.shadow.take());
        let shadow = shadow.ok_or(nothing::<K>("there is no shadow to promote"))?;
        // Waits for the steps in its queue; meanwhile, the slot continues.
        let loaded = shadow.stop().ok_or_else(|| ControlError::Refused("the shadow panicked".into()))?;
        self.change("promote", |state, leftovers| {
            leftovers.extend(state.quarantine.take().map(|quarantine| quarantine.policy));
            state.install(loaded, false, leftovers);
            Ok(StateHandover::Own)
        })
    }

    /// Return to the previous version; a second call returns from there. A shadow stays. While the previous version stands
    /// in for one in quarantine, it keeps deciding, and the one in quarantine becomes the previous version: it does not
    /// come back by itself.
    ///
    /// # Errors
    /// [`ControlError::Nothing`] without a previous version.
    pub fn rollback(&self) -> Result<SwapReport, ControlError> {
        self.change("rollback", |state, leftovers| {
            if state.previous.is_none() && !state.active.is_stand_in && state.quarantine.is_some() {
                state.previous = state.quarantine.take().map(|quarantine| quarantine.policy);
                return Ok(StateHandover::Own);
            }
            let previous = state.previous.take().ok_or(nothing::<K>("there is no previous version"))?;
            leftovers.extend(state.quarantine.take().map(|quarantine| quarantine.policy));
            Ok(state.install(previous, true, leftovers))
        })
    }

    /// Retry the version in quarantine at once.
    ///
    /// # Errors
    /// [`ControlError::Nothing`] without a quarantine, [`ControlError::Refused`] when it cannot be started.
    pub fn release(&self) -> Result<SwapReport, ControlError> {
        let (quarantine, now_ms) = self.shared.change(|state| (state.quarantine.take(), state.now_ms));
        let loaded = quarantine.ok_or(nothing::<K>("no version is in quarantine"))?.policy;
        // The start takes longer than a step may wait.
        match loaded.on_parole(now_ms) {
            Ok(loaded) => self.change("release", |state, _| {
                state.resume(loaded);
                Ok(StateHandover::Own)
            }),
            Err((loaded, fault)) => {
                let why = format!("it cannot be started: {fault}");
                self.shared.change(|state| state.cannot_start(*loaded, fault));
                Err(ControlError::Refused(why))
            }
        }
    }

    /// Stop the shadow.
    ///
    /// # Errors
    /// [`ControlError::Nothing`] without a shadow.
    pub fn stop_shadow(&self) -> Result<SwapReport, ControlError> {
        let (shadow, report) = self.shared.change(|state| (state.shadow.take(), state.unmoved("stop-shadow")));
        let shadow = shadow.ok_or(nothing::<K>("there is no shadow to stop"))?;
        // Waits for the steps in its queue; meanwhile, the slot continues.
        shadow.stop();
        Ok(report)
    }

    /// The active version, and a way to start it with other options.
    #[must_use]
    pub fn active(&self) -> (Version, Option<Remake<K>>) {
        let state = &*lock(&self.shared.state);
        (state.active.version.clone(), state.active.remake.clone())
    }

    /// The version in `mode`. `None` during a quarantine, when a stand-in decides.
    #[must_use]
    pub fn present(&self, mode: Mode) -> Option<Version> {
        let state = &*lock(&self.shared.state);
        match mode {
            Mode::Active if state.quarantine.is_some() => None,
            Mode::Active => Some(state.active.version.clone()),
            Mode::Shadow => state.shadow.as_ref().map(|shadow| shadow.version().clone()),
        }
    }

    /// A report without a change.
    #[must_use]
    pub fn unchanged(&self) -> SwapReport {
        lock(&self.shared.state).unmoved(UNCHANGED)
    }

    /// Show the witness every decision of the slot from now on; an earlier one is dropped.
    pub fn record(&self, witness: impl Witness<K> + 'static) {
        let witness: Box<dyn Witness<K>> = Box::new(witness);
        // Dropped after the lock is released.
        let _before = self.shared.change(|state| state.witness.replace(witness));
    }

    /// Count a contender that was refused before it came here, and keep the refusal for the operator.
    pub fn refused(&self, source: &str, why: &str) {
        let state = &mut *lock(&self.shared.state);
        let fault = Fault::new(FaultKind::Load, why);
        let version = Version { source: source.into(), ..Version::default() };
        lock(&state.faults).push(K::NAME, &version, false, state.now_ms, 0, &fault, None);
        state.stats.faulted(fault.kind);
        state.last_refusal = Some(format!("{source}: {why}"));
    }

    /// The state of the slot.
    #[must_use]
    pub fn status(&self) -> SlotStatus {
        // Read after the slot is released: the shadow's thread may hold its sums.
        let (status, shadow) = self.status_and_shadow();
        SlotStatus { shadow: shadow.map(|progress| progress.status()), ..status }
    }

    fn status_and_shadow(&self) -> (SlotStatus, Option<Arc<Progress>>) {
        let state = &mut *lock(&self.shared.state);
        let (now_ms, limits) = (state.now_ms, state.limits);
        state.active.forget_strikes(now_ms, &limits);
        let stats = &state.stats;
        let status = SlotStatus {
            slot: K::NAME,
            active: state.active.version.clone(),
            previous: state.previous.as_ref().map(|loaded| loaded.version.clone()),
            shadow: None,
            quarantine: state
                .quarantine
                .as_ref()
                .map(|Quarantine { policy: loaded, until_ms }| (loaded.version.clone(), (until_ms - now_ms).max(0.0))),
            decisions: [stats.active, stats.default, stats.fallback],
            deciding_s: stats.deciding_by.map(|took| took.as_secs_f64()),
            deciding_buckets: stats.buckets,
            faults: FaultKind::ALL.iter().map(|kind| (kind.label().to_owned(), stats.faults(*kind))).collect(),
            strikes: state.active.strikes(),
            idle_plans: state.active.idle_plans,
            swaps: state.swaps,
            last_refusal: state.last_refusal.clone(),
        };
        (status, state.shadow.as_ref().map(Shadow::progress))
    }

    /// The latest faults, oldest first.
    #[must_use]
    pub fn faults(&self) -> Vec<FaultEntry> {
        let faults = Arc::clone(&lock(&self.shared.state).faults);
        let entries = FaultLog::entries(&lock(&faults));
        entries.into_iter().map(Arc::unwrap_or_clone).collect()
    }

    /// Make a change between two decisions, and report it.
    fn change(
        &self,
        action: &str,
        change: impl FnOnce(&mut State<K>, &mut Vec<LoadedPolicy<K>>) -> Result<StateHandover, ControlError>,
    ) -> Result<SwapReport, ControlError> {
        // Dropped after the lock is released: ending an instance takes longer than a step may wait.
        let mut leftovers = Vec::new();
        self.shared.change(|state| {
            let held = Instant::now();
            let before = state.active.version.clone();
            let handover = change(state, &mut leftovers)?;
            state.swaps += 1;
            Ok(state.report(action, handover, &before, held))
        })
    }
}

impl<K: SlotKind> State<K> {
    /// Put `loaded` in place of the active version, which becomes the previous one. Hands over the state if requested.
    fn install(
        &mut self,
        mut loaded: LoadedPolicy<K>,
        hand_over: bool,
        leftovers: &mut Vec<LoadedPolicy<K>>,
    ) -> StateHandover {
        let handover = if hand_over { hand_over_state(&mut self.active, &mut loaded) } else { StateHandover::Own };
        loaded.id = loaded::next_id();
        let replaced = std::mem::replace(&mut self.active, loaded);
        leftovers.extend(self.previous.replace(replaced));
        self.last_refusal = None;
        handover
    }

    /// A report of a change that leaves the active policy in place.
    fn unmoved(&self, action: &str) -> SwapReport {
        self.report(action, StateHandover::Stateless, &self.active.version, Instant::now())
    }

    fn report(&self, action: &str, state: StateHandover, previous: &Version, held: Instant) -> SwapReport {
        SwapReport {
            slot: K::NAME,
            action: action.into(),
            active: self.active.version.clone(),
            previous: previous.clone(),
            state,
            held_us: held.elapsed().as_secs_f64() * 1e6,
        }
    }
}

fn hand_over_state<K: SlotKind>(from: &mut LoadedPolicy<K>, to: &mut LoadedPolicy<K>) -> StateHandover {
    let snapshot = match from.policy.policy_mut().snapshot() {
        Ok(snapshot) => snapshot,
        Err(fault) => {
            // If it returns, it starts fresh.
            let _ = from.policy.recover();
            return StateHandover::Reset(format!("the policy before gave no state: {fault}"));
        }
    };
    if snapshot.is_empty() {
        return StateHandover::Stateless;
    }
    match to.policy.policy_mut().restore(&snapshot) {
        Ok(()) => StateHandover::Restored,
        Err(fault) => {
            let _ = to.policy.recover();
            StateHandover::Reset(fault.detail)
        }
    }
}

fn nothing<K: SlotKind>(what: &'static str) -> ControlError {
    ControlError::Nothing { slot: K::NAME, what }
}

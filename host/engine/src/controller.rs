use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use meridian_core::signature::FetchedComponent;
use meridian_core::slot::{Contender, SlotControl};
use meridian_core::{Budget, Dispatch, Eviction, PolicySource, SlotKind};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::budgets::LiveBudgets;
use crate::control::{
    Control, ControlError, FaultEntry, Given, Insight, MAX_OPTIONS_BYTES, Mode, ProcessStatus, RecordingStatus,
    SlotName, SlotStatus, SwapReport, Upload, Version,
};

/// The reason why a component is not loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// One line for the operator.
    pub why: String,
    /// A later load of the same component may succeed: this one found out nothing about it.
    pub is_transient: bool,
}

impl From<String> for Refusal {
    /// A permanent refusal.
    fn from(why: String) -> Self {
        Self { why, is_transient: false }
    }
}

/// Makes and starts policies of slot `K`. Not called on the deciding thread; takes as long as a compilation.
pub trait Loader<K: SlotKind>: Send + Sync {
    /// Make a native policy, or check, compile and start a component; with trusted keys, verify its signature first.
    /// The upload has its options, and is neither [`Given::Active`] nor [`Given::Remote`].
    ///
    /// # Errors
    /// The reason for the refusal, and whether it is permanent.
    fn load(&self, upload: &Upload<'_>) -> Result<Contender<K>, Refusal>;

    /// Fetch the component that a registry has under a reference with a digest. Compiles nothing, and takes as long as the
    /// limits of a fetch allow.
    ///
    /// # Errors
    /// The reason why there is none, and whether it may pass.
    fn fetch(&self, reference: &str) -> Result<FetchedComponent, Refusal> {
        Err(format!("{reference}: this engine fetches no components").into())
    }

    /// The default options of a policy, one JSON object.
    fn configured_options(&self, policy: &Given<'_>) -> String {
        let _ = policy;
        "{}".into()
    }
}

/// Facts about the engine for [`ProcessStatus`]; the controller fills in the slots. Takes microseconds.
pub type EngineStatus = Box<dyn Fn() -> ProcessStatus + Send + Sync>;

/// The state of the recording.
pub type RecordingStatusOf = Box<dyn Fn() -> RecordingStatus + Send + Sync>;

/// A slot and the loader of its policies.
pub struct ControlledSlot<K: SlotKind> {
    /// The slot.
    pub control: SlotControl<K>,
    /// The loader of its policies.
    pub loader: Box<dyn Loader<K>>,
}

/// [`Control`] over the slots of one engine.
pub struct Controller {
    dispatch: ControlledSlot<Dispatch>,
    eviction: Option<ControlledSlot<Eviction>>,
    budget: Option<ControlledSlot<Budget>>,
    engine: EngineStatus,
    recording: Option<RecordingStatusOf>,
    insight: Option<Box<dyn Insight>>,
    budgets: Option<Box<dyn LiveBudgets>>,
    /// One for each slot, in the order of [`SlotName::ALL`].
    orders: [Mutex<Order>; SlotName::ALL.len()],
    line: Mutex<Line>,
    /// A turn has ended, or all changes have.
    over: Condvar,
}

/// The queue for compilation: one component at a time, in order of arrival. Changes that compile nothing do not queue.
#[derive(Default)]
struct Line {
    /// Number of the next arrival.
    next: u64,
    /// Number whose turn it is.
    turn: u64,
    is_closed: bool,
}

/// Held during a compilation.
struct Turn<'a>(&'a Controller);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.line().turn += 1;
        self.0.over.notify_all();
    }
}

/// The changes of a slot in the order of their requests. The lock is held for the last part of each, which takes
/// milliseconds.
#[derive(Default)]
struct Order {
    /// Number of uploads so far; they are numbered from 1.
    uploads: u64,
    /// Uploads up to this number are too late: a change that was requested after them has been completed.
    overtaken: Overtaken,
}

#[derive(Default)]
struct Overtaken {
    active: u64,
    shadow: u64,
}

impl Overtaken {
    fn of(&mut self, mode: Mode) -> &mut u64 {
        match mode {
            Mode::Active => &mut self.active,
            Mode::Shadow => &mut self.shadow,
        }
    }
}

const ENDS: &str = "the engine ends";

impl Controller {
    /// A controller of an engine that has only a dispatch slot.
    #[must_use]
    pub fn new(dispatch: ControlledSlot<Dispatch>, engine: EngineStatus) -> Self {
        Self {
            dispatch,
            eviction: None,
            budget: None,
            engine,
            recording: None,
            insight: None,
            budgets: None,
            orders: Default::default(),
            line: Mutex::default(),
            over: Condvar::new(),
        }
    }

    /// Control this eviction slot too.
    #[must_use]
    pub fn with_eviction(self, slot: ControlledSlot<Eviction>) -> Self {
        Self { eviction: Some(slot), ..self }
    }

    /// Control this budget slot too.
    #[must_use]
    pub fn with_budget(self, slot: ControlledSlot<Budget>) -> Self {
        Self { budget: Some(slot), ..self }
    }

    /// Report the recording in the status. `status` takes microseconds.
    #[must_use]
    pub fn with_recording(self, status: RecordingStatusOf) -> Self {
        Self { recording: Some(status), ..self }
    }

    /// Show what the engine tells of its requests and steps.
    #[must_use]
    pub fn with_insight(self, insight: Box<dyn Insight>) -> Self {
        Self { insight: Some(insight), ..self }
    }

    /// Control the thinking budgets of live requests too.
    #[must_use]
    pub fn with_budgets(self, budgets: Box<dyn LiveBudgets>) -> Self {
        Self { budgets: Some(budgets), ..self }
    }

    /// Refuse every waiting and later change as [`ControlError::Busy`]. A change whose component is being compiled has
    /// no effect any more; its caller waits for the compiler. Takes microseconds.
    pub fn close(&self) {
        self.line().is_closed = true;
        self.over.notify_all();
    }

    /// The guarded data is consistent at any time.
    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self, slot: SlotName) -> MutexGuard<'_, Order> {
        self.orders[slot as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_open(&self) -> Result<(), ControlError> {
        if self.line().is_closed { Err(ControlError::Busy(ENDS.into())) } else { Ok(()) }
    }

    /// Wait for earlier arrivals.
    fn turn(&self) -> Result<Turn<'_>, ControlError> {
        let mut line = self.line();
        let own = line.next;
        line.next += 1;
        let waited = self.over.wait_while(line, |line| line.turn != own && !line.is_closed);
        if waited.unwrap_or_else(PoisonError::into_inner).is_closed {
            return Err(ControlError::Busy(ENDS.into()));
        }
        Ok(Turn(self))
    }

    /// Make a change that compiles nothing, at once, even during a compilation. With `overtakes`, a policy that is
    /// loading for the slot in that mode is discarded.
    fn at_once(
        &self,
        name: SlotName,
        overtakes: Option<Mode>,
        change: impl FnOnce(&dyn Changeable) -> Result<SwapReport, ControlError>,
    ) -> Result<SwapReport, ControlError> {
        let slot = self.slot(name)?;
        let mut order = self.order(name);
        self.check_open()?;
        let report = change(slot)?;
        let uploads = order.uploads;
        if let Some(mode) = overtakes {
            *order.overtaken.of(mode) = uploads;
        }
        Ok(told(report))
    }

    fn slots(&self) -> impl Iterator<Item = &dyn Changeable> {
        SlotName::ALL.into_iter().filter_map(|slot| self.slot(slot).ok())
    }

    fn slot(&self, slot: SlotName) -> Result<&dyn Changeable, ControlError> {
        let found: Option<&dyn Changeable> = match slot {
            SlotName::Dispatch => Some(&self.dispatch),
            SlotName::Eviction => self.eviction.as_ref().map(|slot| slot as _),
            SlotName::Budget => self.budget.as_ref().map(|slot| slot as _),
        };
        found.ok_or(ControlError::NoSuchSlot(slot))
    }
}

impl Control for Controller {
    fn status(&self) -> ProcessStatus {
        let recording = self.recording.as_ref().map(|status| status());
        ProcessStatus { slots: self.slots().map(Changeable::status).collect(), recording, ..(self.engine)() }
    }

    fn insight(&self) -> Option<&dyn Insight> {
        self.insight.as_deref()
    }

    fn budgets(&self) -> Option<&dyn LiveBudgets> {
        self.budgets.as_deref()
    }

    fn faults(&self) -> Vec<FaultEntry> {
        let mut faults: Vec<FaultEntry> = self.slots().flat_map(Changeable::faults).collect();
        // Each slot's faults are in order; a stable sort keeps them so at equal times.
        faults.sort_by(|one, other| one.now_ms.total_cmp(&other.now_ms));
        faults
    }

    fn put(&self, name: SlotName, upload: &Upload<'_>, mode: Mode) -> Result<SwapReport, ControlError> {
        let slot = self.slot(name)?;
        let number = {
            let mut order = self.order(name);
            order.uploads += 1;
            order.uploads
        };
        // Before it queues: a registry that does not answer must hold up no other change.
        let (fetched, fetched_upload);
        let upload = match upload.policy {
            Given::Remote(reference) => {
                fetched = slot.fetch(reference)?;
                fetched_upload = Upload { policy: Given::Fetched(&fetched), source: &fetched.source, ..*upload };
                &fetched_upload
            }
            _ => upload,
        };
        let wanted = slot.wanted(upload)?;
        // An upload of the present policy is an order all the same. It succeeds even if a later change put that policy there.
        let unchanged = |order: &mut Order| {
            self.check_open()?;
            let has = slot.has(&wanted, mode);
            let overtaken = order.overtaken.of(mode);
            if has {
                *overtaken = (number - 1).max(*overtaken);
                Ok(Some(slot.unchanged()))
            } else if *overtaken < number {
                Ok(None)
            } else {
                Err(ControlError::Overtaken(name))
            }
        };
        if let Some(report) = unchanged(&mut self.order(name))? {
            return Ok(report);
        }
        let _turn = match upload.policy {
            Given::Component { .. } | Given::Fetched(_) => Some(self.turn()?),
            Given::Native(_) | Given::Active | Given::Remote(_) => None,
        };
        // Another caller may have put it there while this one waited.
        if let Some(report) = unchanged(&mut self.order(name))? {
            return Ok(report);
        }
        let install = slot.load(upload, &wanted.options)?;
        let mut order = self.order(name);
        // Or while it was loaded.
        if let Some(report) = unchanged(&mut order)? {
            return Ok(report);
        }
        let report = install(mode)?;
        *order.overtaken.of(mode) = number - 1;
        Ok(told(report))
    }

    fn promote(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.at_once(slot, Some(Mode::Active), |slot| slot.promote())
    }

    fn rollback(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.at_once(slot, Some(Mode::Active), |slot| slot.rollback())
    }

    fn release(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.at_once(slot, None, |slot| slot.release())
    }

    fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.at_once(slot, Some(Mode::Shadow), |slot| slot.stop_shadow())
    }
}

/// The wanted policy, as far as it is known before it is loaded.
struct Wanted {
    /// For a component.
    sha256: Option<String>,
    /// For a native policy.
    source: Option<String>,
    options: String,
}

impl Wanted {
    fn component(bytes: &[u8], options: String) -> Self {
        let sha256 = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        Self { sha256: Some(sha256), source: None, options }
    }

    fn is(&self, version: &Version) -> bool {
        let Self { sha256, source, options } = self;
        let is_same = match (sha256, source) {
            (Some(sha256), _) => version.sha256 == *sha256,
            (None, Some(source)) => version.source == *source,
            (None, None) => false,
        };
        is_same && checked_options(&version.options).is_ok_and(|present| present == *options)
    }
}

/// Options in one form: equal options have equal texts.
///
/// # Errors
/// The options, and the expectation.
fn checked_options(options: &str) -> Result<String, String> {
    if options.is_empty() {
        return Ok("{}".into());
    }
    if options.len() > MAX_OPTIONS_BYTES {
        return Err(format!("config: {} bytes: must be at most {MAX_OPTIONS_BYTES}", options.len()));
    }
    let object: Result<Map<String, Value>, _> = serde_json::from_str(options);
    let mut object = Value::from(object.map_err(|error| format!("config: must be one JSON object: {error}"))?);
    object.sort_all_objects();
    Ok(object.to_string())
}

/// Puts the loaded policy into its slot; takes milliseconds.
type Install<'a> = Box<dyn FnOnce(Mode) -> Result<SwapReport, ControlError> + 'a>;

/// A slot of any kind.
trait Changeable {
    fn status(&self) -> SlotStatus;
    fn faults(&self) -> Vec<FaultEntry>;
    /// The component that a registry has.
    fn fetch(&self, reference: &str) -> Result<FetchedComponent, ControlError>;
    /// The policy that an upload asks for.
    fn wanted(&self, upload: &Upload<'_>) -> Result<Wanted, ControlError>;
    /// Whether the slot has it.
    fn has(&self, wanted: &Wanted, mode: Mode) -> bool;
    fn unchanged(&self) -> SwapReport;
    /// Load it with these options and try it. Nothing changes but the log of refusals.
    fn load(&self, upload: &Upload<'_>, options: &str) -> Result<Install<'_>, ControlError>;
    fn promote(&self) -> Result<SwapReport, ControlError>;
    fn rollback(&self) -> Result<SwapReport, ControlError>;
    fn release(&self) -> Result<SwapReport, ControlError>;
    fn stop_shadow(&self) -> Result<SwapReport, ControlError>;
}

impl<K: SlotKind> ControlledSlot<K> {
    fn loaded(&self, upload: &Upload<'_>, options: &str) -> Result<Contender<K>, Refusal> {
        let upload = Upload { options: Some(options), ..*upload };
        let mut contender = match upload.policy {
            Given::Component { .. } | Given::Fetched(_) | Given::Native(_) => self.loader.load(&upload)?,
            Given::Remote(reference) => {
                self.loader.load(&Upload { policy: Given::Fetched(&self.loader.fetch(reference)?), ..upload })?
            }
            Given::Active => self.active_with(options)?,
        };
        contender.warm_up().map_err(|trial| format!("it {trial}"))?;
        Ok(contender)
    }

    /// Log a refusal.
    fn refused(&self, source: &str, refusal: Refusal) -> ControlError {
        let Refusal { why, is_transient } = refusal;
        if is_transient {
            // This is no fault of the contender, and a caller that retries often must not fill the log of faults.
            tracing::warn!(slot = K::NAME.label(), source, why, "a contender cannot be loaded now");
            return ControlError::Busy(why);
        }
        self.control.refused(source, &why);
        tracing::warn!(slot = K::NAME.label(), source, why, "a contender was refused; the active policy stays");
        ControlError::Refused(why)
    }

    /// The active policy, started with other options.
    fn active_with(&self, options: &str) -> Result<Contender<K>, Refusal> {
        let (version, remake) = self.control.active();
        if let Some(name) = PolicySource::of(&version.source).native() {
            let upload = Upload { policy: Given::Native(name), options: Some(options), source: &version.source };
            return self.loader.load(&upload);
        }
        let remake = remake.ok_or_else(|| String::from("the active policy cannot be started with other options"))?;
        let contender = Contender::new(remake(options)?, &version.sha256, &version.source);
        Ok(contender.with_options(options).with_remake(remake))
    }
}

impl<K: SlotKind> Changeable for ControlledSlot<K> {
    fn status(&self) -> SlotStatus {
        self.control.status()
    }

    fn faults(&self) -> Vec<FaultEntry> {
        self.control.faults()
    }

    fn fetch(&self, reference: &str) -> Result<FetchedComponent, ControlError> {
        self.loader.fetch(reference).map_err(|refusal| self.refused(reference, refusal))
    }

    fn wanted(&self, upload: &Upload<'_>) -> Result<Wanted, ControlError> {
        let Upload { policy, options, source: _ } = upload;
        let configured = || self.loader.configured_options(policy);
        let options =
            checked_options(&options.map_or_else(configured, str::to_owned)).map_err(ControlError::Refused)?;
        Ok(match policy {
            Given::Component { bytes, signature: _ } => Wanted::component(bytes, options),
            Given::Fetched(FetchedComponent { bytes, .. }) => Wanted::component(bytes, options),
            Given::Native(name) => {
                Wanted { sha256: None, source: Some(PolicySource::Native(name).to_string()), options }
            }
            Given::Remote(reference) => Wanted { sha256: None, source: Some((*reference).to_owned()), options },
            Given::Active => {
                let Version { sha256, source, .. } = self.control.active().0;
                Wanted { sha256: Some(sha256).filter(|sha256| !sha256.is_empty()), source: Some(source), options }
            }
        })
    }

    fn has(&self, wanted: &Wanted, mode: Mode) -> bool {
        self.control.present(mode).is_some_and(|version| wanted.is(&version))
    }

    fn unchanged(&self) -> SwapReport {
        self.control.unchanged()
    }

    fn load(&self, upload: &Upload<'_>, options: &str) -> Result<Install<'_>, ControlError> {
        let contender = self.loaded(upload, options).map_err(|refusal| self.refused(upload.source, refusal))?;
        Ok(Box::new(|mode| match mode {
            Mode::Active => Ok(self.control.swap(contender)),
            Mode::Shadow => self.control.shadow(contender),
        }))
    }

    fn promote(&self) -> Result<SwapReport, ControlError> {
        self.control.promote()
    }

    fn rollback(&self) -> Result<SwapReport, ControlError> {
        self.control.rollback()
    }

    fn release(&self) -> Result<SwapReport, ControlError> {
        self.control.release()
    }

    fn stop_shadow(&self) -> Result<SwapReport, ControlError> {
        self.control.stop_shadow()
    }
}

/// Log every change.
fn told(report: SwapReport) -> SwapReport {
    let SwapReport { slot, action, active, previous, state, held_us } = &report;
    tracing::info!(
        slot = slot.label(),
        action,
        active = active.name,
        version = active.version,
        sha256 = active.sha256,
        previous = previous.name,
        state = ?state,
        held_us,
        "the policy of a slot was changed"
    );
    report
}

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use meridian_core::{Budget, Dispatch, Eviction, SlotKind};

use crate::control::{
    Control, ControlError, FaultEntry, Mode, ProcessStatus, RecordingStatus, SlotName, SlotStatus, SwapReport, Upload,
};
use crate::slot::{Candidate, SlotControl};

/// Why a component is not loaded.
///
/// ```
/// use meridian_runtime::Refusal;
///
/// assert!(!Refusal::from("not a component".to_owned()).is_transient);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// One line for the operator.
    pub why: String,
    /// The same component may be taken later: nothing was found out about it.
    pub is_transient: bool,
}

impl From<String> for Refusal {
    /// For good.
    fn from(why: String) -> Self {
        Self { why, is_transient: false }
    }
}

/// Turns the bytes of a component into a policy of slot `K` that has started. Called off the deciding thread; takes as long
/// as compiling takes.
pub trait Loader<K: SlotKind>: Send + Sync {
    /// Check, compile and start the component, after its signature where keys are trusted.
    ///
    /// # Errors
    /// Why it is refused, and whether for good.
    fn load(&self, upload: &Upload<'_>) -> Result<Candidate<K>, Refusal>;
}

/// Facts about the engine for [`ProcessStatus`]; the slots are filled in by the controller. Takes microseconds.
pub type EngineStatus = Box<dyn Fn() -> ProcessStatus + Send + Sync>;

/// How the recording is.
pub type RecordingStatusOf = Box<dyn Fn() -> RecordingStatus + Send + Sync>;

/// A slot and what loads its policies.
pub struct ControlledSlot<K: SlotKind> {
    /// The slot.
    pub control: SlotControl<K>,
    /// What loads its policies.
    pub loader: Box<dyn Loader<K>>,
}

/// [`Control`] over the slots of one engine.
pub struct Controller {
    dispatch: ControlledSlot<Dispatch>,
    eviction: Option<ControlledSlot<Eviction>>,
    budget: Option<ControlledSlot<Budget>>,
    engine: EngineStatus,
    recording: Option<RecordingStatusOf>,
    changes: Mutex<Changes>,
    /// Somebody's turn is over, or all changes are.
    over: Condvar,
}

/// Who may change something.
#[derive(Default)]
struct Changes {
    /// A change is being carried out; others wait, so that two callers do not compile at the same time.
    is_taken: bool,
    is_closed: bool,
}

/// Held for a whole change.
struct Turn<'a>(&'a Controller);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.changes().is_taken = false;
        self.0.over.notify_one();
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
            changes: Mutex::default(),
            over: Condvar::new(),
        }
    }

    /// The same with an eviction slot.
    #[must_use]
    pub fn with_eviction(self, slot: ControlledSlot<Eviction>) -> Self {
        Self { eviction: Some(slot), ..self }
    }

    /// The same with a budget slot.
    #[must_use]
    pub fn with_budget(self, slot: ControlledSlot<Budget>) -> Self {
        Self { budget: Some(slot), ..self }
    }

    /// The same with a recording, which `status` tells of. Takes microseconds.
    #[must_use]
    pub fn with_recording(self, status: RecordingStatusOf) -> Self {
        Self { recording: Some(status), ..self }
    }

    /// Have every change refused that waits or comes, as [`ControlError::Busy`]. One whose component is being compiled
    /// changes nothing any more; its caller waits for the compiler. Takes microseconds.
    pub fn close(&self) {
        self.changes().is_closed = true;
        self.over.notify_all();
    }

    /// What is guarded is consistent at any time.
    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wait for those who came before.
    fn turn(&self) -> Result<Turn<'_>, ControlError> {
        let is_to_wait = |changes: &mut Changes| changes.is_taken && !changes.is_closed;
        let waited = self.over.wait_while(self.changes(), is_to_wait);
        let mut changes = waited.unwrap_or_else(PoisonError::into_inner);
        if changes.is_closed {
            return Err(ControlError::Busy(ENDS.into()));
        }
        changes.is_taken = true;
        Ok(Turn(self))
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

    fn faults(&self) -> Vec<FaultEntry> {
        let mut faults: Vec<FaultEntry> = self.slots().flat_map(Changeable::faults).collect();
        // Each slot's are in order; so are those of one time.
        faults.sort_by(|one, other| one.now_ms.total_cmp(&other.now_ms));
        faults
    }

    fn put(&self, slot: SlotName, upload: &Upload<'_>, mode: Mode) -> Result<SwapReport, ControlError> {
        let slot = self.slot(slot)?;
        let _turn = self.turn()?;
        slot.put(upload, mode, &|| self.changes().is_closed).map(told)
    }

    fn promote(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        let _turn = self.turn()?;
        self.slot(slot)?.promote().map(told)
    }

    fn rollback(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        let _turn = self.turn()?;
        self.slot(slot)?.rollback().map(told)
    }

    fn release(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        let _turn = self.turn()?;
        self.slot(slot)?.release().map(told)
    }
}

/// A slot of any kind.
trait Changeable {
    fn status(&self) -> SlotStatus;
    fn faults(&self) -> Vec<FaultEntry>;
    /// Nothing is changed if `is_closed` once the component is loaded.
    fn put(&self, upload: &Upload<'_>, mode: Mode, is_closed: &dyn Fn() -> bool) -> Result<SwapReport, ControlError>;
    fn promote(&self) -> Result<SwapReport, ControlError>;
    fn rollback(&self) -> Result<SwapReport, ControlError>;
    fn release(&self) -> Result<SwapReport, ControlError>;
}

impl<K: SlotKind> Changeable for ControlledSlot<K> {
    fn status(&self) -> SlotStatus {
        self.control.status()
    }

    fn faults(&self) -> Vec<FaultEntry> {
        self.control.faults()
    }

    fn put(&self, upload: &Upload<'_>, mode: Mode, is_closed: &dyn Fn() -> bool) -> Result<SwapReport, ControlError> {
        let loaded = self.loader.load(upload).and_then(|mut candidate| {
            candidate.warm_up().map_err(|trial| format!("it {trial}"))?;
            Ok(candidate)
        });
        let candidate = loaded.map_err(|Refusal { why, is_transient }| {
            let source = upload.source;
            if is_transient {
                // No fault of the candidate's, and whoever tries again and again does not fill the log of faults.
                tracing::warn!(slot = K::NAME.label(), source, why, "a candidate cannot be loaded now");
                return ControlError::Busy(why);
            }
            self.control.refused(source, &why);
            tracing::warn!(slot = K::NAME.label(), source, why, "a candidate was refused; the active policy stays");
            ControlError::Refused(why)
        })?;
        if is_closed() {
            return Err(ControlError::Busy(ENDS.into()));
        }
        match mode {
            Mode::Active => Ok(self.control.swap(candidate)),
            Mode::Shadow => self.control.shadow(candidate),
        }
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
}

/// Every change is logged.
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

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use meridian_core::{MeridianConfig, native};

    use super::*;
    use crate::DispatchSlot;

    /// Says that it has begun, and waits to be told how it ends.
    struct Told {
        begun: Sender<()>,
        ends: Mutex<Receiver<Option<Refusal>>>,
    }

    fn candidate() -> Candidate<Dispatch> {
        let targets = MeridianConfig::default().scheduler.targets();
        Candidate::new(native::policy("noop", targets, "{}").unwrap(), "", "test")
    }

    impl Loader<Dispatch> for Told {
        fn load(&self, _: &Upload<'_>) -> Result<Candidate<Dispatch>, Refusal> {
            self.begun.send(()).unwrap();
            self.ends.lock().unwrap().recv().unwrap().map_or_else(|| Ok(candidate()), Err)
        }
    }

    fn controller() -> (Controller, Receiver<()>, Sender<Option<Refusal>>) {
        let targets = MeridianConfig::default().scheduler.targets();
        let slot = DispatchSlot::new(native::policy("fcfs", targets, "{}").unwrap(), targets);
        let (begun, has_begun) = channel();
        let (end, ends) = channel();
        let loader = Box::new(Told { begun, ends: Mutex::new(ends) });
        let dispatch = ControlledSlot { control: slot.control(), loader };
        (Controller::new(dispatch, Box::new(ProcessStatus::default)), has_begun, end)
    }

    fn put(controller: &Controller) -> Result<SwapReport, ControlError> {
        let upload = Upload { component: b"", signature: None, source: "test" };
        controller.put(SlotName::Dispatch, &upload, Mode::Active)
    }

    #[test]
    fn a_transient_refusal_is_no_fault_of_the_candidate() {
        let (controller, _has_begun, end) = controller();
        let why = String::from("the compiler is busy");
        end.send(Some(Refusal { why: why.clone(), is_transient: true })).unwrap();
        assert_eq!(put(&controller), Err(ControlError::Busy(why.clone())));
        assert_eq!((controller.faults().len(), &controller.status().slots[0].last_refusal), (0, &None));
        end.send(Some(why.clone().into())).unwrap();
        assert_eq!(put(&controller), Err(ControlError::Refused(why)));
        assert_eq!(controller.faults().len(), 1);
    }

    #[test]
    fn nothing_changes_after_the_end() {
        let (controller, has_begun, end) = controller();
        let ends = Err(ControlError::Busy(ENDS.into()));
        std::thread::scope(|scope| {
            let compiling = scope.spawn(|| put(&controller));
            has_begun.recv().unwrap();
            let waiting = scope.spawn(|| put(&controller));
            controller.close();
            assert_eq!(waiting.join().unwrap(), ends);
            assert_eq!(put(&controller), ends);
            end.send(None).unwrap();
            assert_eq!(compiling.join().unwrap(), ends);
        });
        assert_eq!(controller.status().slots[0].swaps, 0);
    }
}

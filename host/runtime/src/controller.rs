use crate::control::{Control, ControlError, FaultEntry, Mode, ProcessStatus, SlotName, SwapReport};
use crate::slot::{Candidate, SlotControl};
use crate::sync::{Mutex, lock};

/// Turns the bytes of a component into a policy that has started. Called off the scheduling thread; takes as long as
/// compiling takes.
pub trait Loader: Send + Sync {
    /// Check, compile and start `component` as the policy of `slot`.
    ///
    /// # Errors
    /// Why it is refused, in one line.
    fn load(&self, slot: SlotName, component: &[u8], source: &str) -> Result<Candidate, String>;
}

/// Facts about the engine for [`ProcessStatus`]; the slots are filled in by the controller. Takes microseconds.
pub type EngineStatus = Box<dyn Fn() -> ProcessStatus + Send + Sync>;

/// [`Control`] over the slots of one engine.
pub struct Controller {
    dispatch: SlotControl,
    loader: Box<dyn Loader>,
    engine: EngineStatus,
    /// Held for a whole change, so that two callers do not compile at the same time.
    changing: Mutex<()>,
}

impl Controller {
    /// A controller of the dispatch slot.
    #[must_use]
    pub fn new(dispatch: SlotControl, loader: Box<dyn Loader>, engine: EngineStatus) -> Self {
        Self { dispatch, loader, engine, changing: Mutex::new(()) }
    }

    fn slot(&self, slot: SlotName) -> Result<&SlotControl, ControlError> {
        match slot {
            SlotName::Dispatch => Ok(&self.dispatch),
            SlotName::Eviction | SlotName::Budget => Err(ControlError::NoSuchSlot(slot)),
        }
    }
}

impl Control for Controller {
    fn status(&self) -> ProcessStatus {
        ProcessStatus { slots: vec![self.dispatch.status()], ..(self.engine)() }
    }

    fn faults(&self) -> Vec<FaultEntry> {
        self.dispatch.faults()
    }

    fn put(&self, slot: SlotName, component: &[u8], mode: Mode, source: &str) -> Result<SwapReport, ControlError> {
        let control = self.slot(slot)?;
        let _changing = lock(&self.changing);
        let loaded = self.loader.load(slot, component, source).and_then(|mut candidate| {
            candidate.warm_up().map_err(|fault| format!("it faulted: {fault}"))?;
            Ok(candidate)
        });
        let candidate = loaded.map_err(|why| {
            control.refused(source, &why);
            tracing::warn!(slot = slot.label(), source, why, "a candidate was refused; the active policy stays");
            ControlError::Refused(why)
        })?;
        let report = match mode {
            Mode::Active => control.swap(candidate),
            Mode::Shadow => control.shadow(candidate)?,
        };
        Ok(told(report))
    }

    fn promote(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        let _changing = lock(&self.changing);
        self.slot(slot)?.promote().map(told)
    }

    fn rollback(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        let _changing = lock(&self.changing);
        self.slot(slot)?.rollback().map(told)
    }

    fn release(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        let _changing = lock(&self.changing);
        self.slot(slot)?.release().map(told)
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

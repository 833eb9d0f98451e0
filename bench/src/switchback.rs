//! Experiments on a simulated engine, in virtual time: the controller of `meridian experiment` switches the policies of an
//! engine of the simulator, and waits by simulating.

use std::sync::{Arc, Mutex, PoisonError};

use meridian_core::Dispatch;
use meridian_core::slot::SlotControl;
use meridian_engine::control::{ControlError, LatencyReport, Mode, ProcessStatus, SlotName, SwapReport, Version};
use meridian_fleet::experiment::{State, Stop, StoreError, Surroundings};
use meridian_fleet::{Member, MemberError, NamedPolicy, PolicyOrigin as Given};

use crate::policies::{Inject, Loader, PolicyArg};
use crate::sim::{Driven, Simulation};
use crate::trace::TraceRequest;

/// An engine of the simulator as a member of a fleet.
pub struct SimulatedMember {
    name: String,
    dispatch: SlotControl<Dispatch>,
    loader: Mutex<Loader>,
    report: Arc<Mutex<LatencyReport>>,
    /// A policy that faults, by its source, and how.
    faulty: Option<(String, Inject)>,
}

/// The time of a simulated engine.
pub struct VirtualTime<I: Iterator<Item = TraceRequest>> {
    driven: Driven<I>,
    report: Arc<Mutex<LatencyReport>>,
    /// The latest state that was kept.
    pub kept: Option<State>,
}

/// The first engine of a simulation, and its time. `loader` loads the policies that are put into it.
///
/// # Panics
/// The simulation has no engine.
pub fn member<I: Iterator<Item = TraceRequest>>(
    simulation: Simulation,
    arrivals: I,
    loader: Loader,
) -> (SimulatedMember, VirtualTime<I>) {
    let mut driven = Driven::new(simulation.observing(), arrivals);
    let report = Arc::new(Mutex::new(LatencyReport { run: "1".into(), ..LatencyReport::default() }));
    let dispatch = driven.control(0).expect("a simulation has an engine");
    let member = SimulatedMember {
        name: "simulated".into(),
        dispatch,
        loader: Mutex::new(loader),
        report: Arc::clone(&report),
        faulty: None,
    };
    (member, VirtualTime { driven, report, kept: None })
}

impl<I: Iterator<Item = TraceRequest>> VirtualTime<I> {
    /// Simulate so many seconds.
    pub fn pass(&mut self, seconds: f64) {
        self.driven.until(self.driven.now_ms() + 1e3 * seconds);
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        report.uptime_s = self.driven.now_ms() / 1e3;
        report.counts = self.driven.latency(0).unwrap_or_default();
    }

    /// Make it look as if the engine had restarted.
    pub fn restart(&mut self) {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).run.push('1');
    }

    /// Seconds since the start.
    #[must_use]
    pub fn now_s(&self) -> f64 {
        self.driven.now_ms() / 1e3
    }

    /// Whether requests are under way or to come.
    pub fn has_more(&mut self) -> bool {
        self.driven.has_more()
    }
}

impl<I: Iterator<Item = TraceRequest>> Surroundings for VirtualTime<I> {
    fn wait(&mut self, seconds: f64) {
        self.pass(seconds);
    }

    fn save(&mut self, state: &State) -> Result<(), StoreError> {
        self.kept = Some(state.clone());
        Ok(())
    }

    fn stop_requested(&mut self) -> Option<Stop> {
        None
    }
}

impl SimulatedMember {
    /// An engine whose slot and latencies the caller has.
    pub(crate) fn new(
        name: String,
        dispatch: SlotControl<Dispatch>,
        loader: Loader,
        report: Arc<Mutex<LatencyReport>>,
    ) -> Self {
        Self { name, dispatch, loader: Mutex::new(loader), report, faulty: None }
    }

    /// Its dispatch slot.
    #[must_use]
    pub fn dispatch(&self) -> &SlotControl<Dispatch> {
        &self.dispatch
    }

    /// Make a policy fault wherever it decides from now on.
    #[must_use]
    pub fn with_faulty(mut self, source: &str, inject: Inject) -> Self {
        self.faulty = Some((source.to_owned(), inject));
        self
    }

    fn refused(&self, error: impl std::fmt::Display) -> MemberError {
        MemberError::Refused(format!("{}: {error}", self.name))
    }

    fn of_dispatch(&self, slot: SlotName) -> Result<&SlotControl<Dispatch>, MemberError> {
        if slot == SlotName::Dispatch { Ok(&self.dispatch) } else { Err(self.refused(ControlError::NoSuchSlot(slot))) }
    }
}

impl Member for SimulatedMember {
    fn name(&self) -> &str {
        &self.name
    }

    fn status(&self) -> Result<ProcessStatus, MemberError> {
        let report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(ProcessStatus { uptime_s: report.uptime_s, slots: vec![self.dispatch.status()], ..ProcessStatus::default() })
    }

    fn latency(&self) -> Result<LatencyReport, MemberError> {
        Ok(self.report.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    fn put(&self, slot: SlotName, policy: &NamedPolicy, mode: Mode) -> Result<SwapReport, MemberError> {
        let control = self.of_dispatch(slot)?;
        let Given::Named(name) = &policy.source else {
            return Err(self.refused("a simulated engine loads policies by name"));
        };
        let options = policy.options.as_deref().filter(|options| *options != "{}").unwrap_or_default();
        let source: PolicyArg = format!("{name}{options}").parse().map_err(|error: String| self.refused(error))?;
        let mut loader = self.loader.lock().unwrap_or_else(PoisonError::into_inner);
        let inject = self.faulty.as_ref().filter(|(faulty, _)| *faulty == source.source).map(|(_, inject)| *inject);
        let contender = loader.dispatch(&source, inject, 0).map_err(|error| self.refused(format!("{error:#}")))?;
        // Without regard to where it came from.
        let is_there = control.present(mode).is_some_and(|present| {
            Version { source: contender.version.source.clone(), ..present } == contender.version
        });
        if is_there {
            return Ok(control.unchanged());
        }
        match mode {
            Mode::Active => Ok(control.swap(contender)),
            Mode::Shadow => control.shadow(contender).map_err(|error| self.refused(error)),
        }
    }

    fn promote(&self, slot: SlotName) -> Result<SwapReport, MemberError> {
        self.of_dispatch(slot)?.promote().map_err(|error| self.refused(error))
    }

    fn rollback(&self, slot: SlotName) -> Result<SwapReport, MemberError> {
        self.of_dispatch(slot)?.rollback().map_err(|error| self.refused(error))
    }

    fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, MemberError> {
        self.of_dispatch(slot)?.stop_shadow().map_err(|error| self.refused(error))
    }
}

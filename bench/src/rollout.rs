//! Roll-outs over simulated engines, in virtual time: the state machine of `meridian rollout` changes the policies of engines
//! of the simulator, and waits by simulating.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use meridian_engine::control::LatencyReport;
use meridian_fleet::Member;
use meridian_fleet::rollout::{Clock, Roster};

use crate::policies::Loader;
use crate::sim::{Driven, Simulation};
use crate::switchback::SimulatedMember;
use crate::trace::TraceRequest;

/// Engines of the simulator, each with traffic of its own, on one clock.
pub struct SimulatedFleet<I: Iterator<Item = TraceRequest>> {
    engines: Vec<Mutex<Driven<I>>>,
    reports: Vec<Arc<Mutex<LatencyReport>>>,
    members: Vec<Arc<SimulatedMember>>,
    /// Time that the simulation itself took, nanoseconds.
    simulating_ns: AtomicU64,
}

/// The begin of simulated time, seconds since 1970.
const BEGIN_S: f64 = 1e9;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<I: Iterator<Item = TraceRequest>> SimulatedFleet<I> {
    /// A fleet of simulations of one engine each, with the requests that arrive there. `loader` makes the loader of an
    /// engine's policies.
    ///
    /// # Panics
    /// A simulation has no engine.
    pub fn new(engines: impl IntoIterator<Item = (Simulation, I)>, loader: impl Fn() -> Loader) -> Self {
        let mut fleet =
            Self { engines: Vec::new(), reports: Vec::new(), members: Vec::new(), simulating_ns: AtomicU64::new(0) };
        for (number, (simulation, arrivals)) in engines.into_iter().enumerate() {
            let mut driven = Driven::new(simulation.observing(), arrivals);
            let dispatch = driven.control(0).expect("a simulation has an engine");
            let report = LatencyReport { run: "1".into(), ..LatencyReport::default() };
            let report = Arc::new(Mutex::new(report));
            let member = SimulatedMember::new(format!("engine-{number}"), dispatch, loader(), Arc::clone(&report));
            fleet.engines.push(Mutex::new(driven));
            fleet.reports.push(report);
            fleet.members.push(Arc::new(member));
        }
        fleet
    }

    /// Simulate so many seconds.
    pub fn pass(&self, seconds: f64) {
        let begun = Instant::now();
        for (driven, report) in self.engines.iter().zip(&self.reports) {
            let mut driven = lock(driven);
            let until_ms = driven.now_ms() + 1e3 * seconds;
            driven.until(until_ms);
            let mut report = lock(report);
            report.uptime_s = until_ms / 1e3;
            report.counts = driven.latency(0).unwrap_or_default();
        }
        let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.simulating_ns.fetch_add(took, Ordering::Relaxed);
    }

    /// The time that simulating took so far, of the machine's own.
    #[must_use]
    pub fn simulating(&self) -> Duration {
        Duration::from_nanos(self.simulating_ns.load(Ordering::Relaxed))
    }

    /// The sources of the policies that decide now, by engine.
    #[must_use]
    pub fn deciding(&self) -> Vec<String> {
        self.members.iter().map(|member| member.dispatch().status().active.source).collect()
    }

    /// Whether an engine still has a shadow or a quarantine.
    #[must_use]
    pub fn has_rests(&self) -> bool {
        let mut statuses = self.members.iter().map(|member| member.dispatch().status());
        statuses.any(|status| status.shadow.is_some() || status.quarantine.is_some())
    }
}

impl<I: Iterator<Item = TraceRequest>> Clock for SimulatedFleet<I> {
    fn now_s(&self) -> f64 {
        BEGIN_S + self.engines.first().map_or(0.0, |driven| lock(driven).now_ms() / 1e3)
    }

    fn wait(&self, seconds: f64) -> f64 {
        self.pass(seconds);
        seconds
    }
}

impl<I: Iterator<Item = TraceRequest>> Roster for SimulatedFleet<I> {
    fn members(&self) -> Result<Vec<Arc<dyn Member>>, String> {
        Ok(self.members.iter().map(|member| Arc::clone(member) as Arc<dyn Member>).collect())
    }
}

//! A run that goes on only as far as its caller says: what is changed in between is changed at that simulated time.

use std::iter::{Enumerate, Peekable};

use meridian_core::Dispatch;
use meridian_core::latency::LatencyCounts;
use meridian_core::slot::SlotControl;

use super::{Outcome, Simulation};
use crate::trace::TraceRequest;

/// A [`Simulation`] whose clock the caller drives.
///
/// ```
/// use meridian_bench::policies::{Choice, Loader, Policies};
/// use meridian_bench::results::Slo;
/// use meridian_bench::sim::{Driven, Simulation, preset};
/// use meridian_bench::trace::TraceRequest;
///
/// let choice = Choice { dispatch: "balanced".parse().unwrap(), eviction: None, budget: None, inject: None };
/// let policies = Policies::load(&mut Loader::new(Default::default()), &choice, 1).unwrap();
/// let engine = preset::named("7b-h100").unwrap();
/// let simulation = Simulation::new(&engine, vec![policies], Slo::default(), 1).observing();
/// let request = TraceRequest { arrival_s: 1.0, output_tokens: 5, ..TraceRequest::default() };
/// let mut driven = Driven::new(simulation, std::iter::once(request));
/// driven.until(500.0);
/// assert_eq!((driven.now_ms(), driven.latency(0).unwrap().output_tokens), (500.0, 0));
/// driven.until(60_000.0);
/// assert_eq!(driven.latency(0).unwrap().output_tokens, 5);
/// ```
pub struct Driven<I: Iterator<Item = TraceRequest>> {
    simulation: Simulation,
    arrivals: Peekable<Enumerate<I>>,
    now_ms: f64,
}

impl<I: Iterator<Item = TraceRequest>> Driven<I> {
    /// At time 0, with these arrivals to come.
    pub fn new(simulation: Simulation, arrivals: I) -> Self {
        Self { simulation, arrivals: arrivals.enumerate().peekable(), now_ms: 0.0 }
    }

    /// Simulate until that time, milliseconds. A time that is over changes nothing.
    pub fn until(&mut self, ms: f64) {
        self.simulation.advance(ms, &mut self.arrivals, &mut |_| ());
        self.now_ms = self.now_ms.max(ms);
    }

    /// The time until which it was simulated.
    #[must_use]
    pub fn now_ms(&self) -> f64 {
        self.now_ms
    }

    /// A handle of an engine's dispatch slot.
    pub fn control(&mut self, engine: usize) -> Option<SlotControl<Dispatch>> {
        Some(self.simulation.engine(engine)?.control())
    }

    /// Latencies of an engine since its start, if it [observes](Simulation::observing) them.
    pub fn latency(&mut self, engine: usize) -> Option<LatencyCounts> {
        self.simulation.engine(engine)?.latency()
    }

    /// Whether requests are under way or to come.
    pub fn has_more(&mut self) -> bool {
        self.arrivals.peek().is_some() || self.simulation.is_busy()
    }

    /// The run so far.
    #[must_use]
    pub fn outcome(self) -> Outcome {
        self.simulation.outcome()
    }
}

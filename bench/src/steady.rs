//! Steady loads, and the most that an engine serves in one.
//!
//! A run is a steady load when its start and its end are left out. How long both are depends on how long requests live: a
//! run that is short against that shows an engine that fills up. So each run is repeated, longer, until what is measured is
//! at least [`RESIDENCES`] times as long as a request lives (Little's law; Law, "Simulation Modeling and Analysis", 5th ed.,
//! section 9.5).

use serde::{Deserialize, Serialize};

use crate::load::Course;
use crate::replay::{Input, Options, Rate, own_rate, replay};
use crate::results::Run;

/// Mean residence times of a request that are measured, at least.
pub const RESIDENCES: f64 = 20.0;
/// Requests of a run from which on a load counts as one that has no steady state.
const MOST_REQUESTS: f64 = 40_000.0;
/// Requests of the first, short run, and those that are measured of the last, at least.
const FIRST_REQUESTS: f64 = 400.0;
const LEAST_MEASURED: f64 = 2000.0;
/// How far below the level a short run must be to tell that a long one is too.
const MARGIN: f64 = 0.1;
/// How much longer requests are taken to live than they were seen to, as longer runs have longer queues.
const LONGER: f64 = 1.15;
/// Factor between two rates of the search while no two rates enclose the capacity, and the factor between them at which
/// it ends.
const STRIDE: f64 = 2.0;
const NEAR: f64 = 1.01;
/// Strides up and down before a search gives up.
const MOST_STRIDES: usize = 16;
/// How much the capacity may move when runs are twice as long.
pub const CONVERGED: f64 = 0.02;

/// A run of the baseline under a steady load.
#[derive(Clone, Debug)]
pub struct Steady {
    /// What was offered.
    pub course: Course,
    /// Mean time from a request's arrival to its last token, seconds.
    pub residence_s: f64,
    /// At least [`RESIDENCES`] of that were measured.
    pub converged: bool,
    /// The run.
    pub run: Run,
}

impl Steady {
    fn of(&self, key: &str) -> f64 {
        self.run.metrics.get(key).copied().unwrap_or(0.0)
    }
}

/// The highest rate at which so many requests attain the service levels in a steady state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Capacity {
    /// Requests a second.
    pub rate: f64,
    /// The same, of runs that are twice as long.
    pub doubled: f64,
    /// The two differ by less than [`CONVERGED`].
    pub converged: bool,
    /// Mean time that a request lives at that rate, seconds.
    pub residence_s: f64,
    /// Requests of the longest run, and how often that repeats the trace.
    pub requests: f64,
    /// See `requests`; 1 for a workload that is generated.
    pub passes: f64,
    /// How full steps, seats or KV memory are at that rate, whichever is fullest, 0 to 1.
    pub busy: f64,
}

/// The baseline of `options` under a steady rate. A run in which fewer than `unless` attain the service levels is not repeated:
/// a longer one would have longer queues.
///
/// # Errors
/// Nothing to replay; the baseline faults.
pub fn steady(options: &Options, input: &Input, rate: f64, residences: f64, unless: f64) -> anyhow::Result<Steady> {
    let mut residence_s = FIRST_REQUESTS / (rate * Course::steady(1.0, residences).requests(1.0));
    loop {
        let course = Course::steady(residence_s, residences);
        let requests = course.requests(rate);
        let run = once(options, input, rate, Some(course.clone()))?;
        let found_s = run.metrics.get("e2e_mean_ms").copied().unwrap_or(f64::INFINITY) / 1e3;
        let is_long = residences * residence_s * rate >= LEAST_MEASURED;
        let mut found = Steady { course, residence_s: found_s, converged: is_long && found_s <= residence_s, run };
        let is_hopeless = found.of("slo_attainment") < unless - if is_long { 0.0 } else { MARGIN };
        if found.converged || is_hopeless || requests >= MOST_REQUESTS {
            found.residence_s = found_s.min(1e7);
            return Ok(found);
        }
        let of_requests = |requests: f64| requests / (rate * Course::steady(1.0, residences).requests(1.0));
        // One more than a rounding takes away.
        let least_s = 1.001 * LEAST_MEASURED / (residences * rate);
        residence_s = (LONGER * found_s).max(least_s).max(1.05 * residence_s).min(of_requests(MOST_REQUESTS + 1.0));
    }
}

/// A run of the baseline with the first seed.
fn once(options: &Options, input: &Input, rate: f64, course: Option<Course>) -> anyhow::Result<Run> {
    let options = Options {
        policies: Vec::new(),
        rates: vec![Rate::PerSecond(rate)],
        seeds: options.seeds[..1].to_vec(),
        course,
        budget: None,
        swaps: Vec::new(),
        ..options.clone()
    };
    let runs = replay(&options, input, &mut |_, _, _| {})?.runs;
    runs.into_iter().next().ok_or_else(|| anyhow::anyhow!("no run"))
}

/// The capacity of an engine under the baseline of `options`: the highest rate at which this share of the requests attains the
/// service levels; `None` where no rate is served.
///
/// # Errors
/// As [`steady`].
pub fn capacity(options: &Options, input: &Input, attained: f64) -> anyhow::Result<Option<Capacity>> {
    let serves = |rate: f64, residences: f64| -> anyhow::Result<Option<Steady>> {
        let found = steady(options, input, rate, residences, attained)?;
        Ok((found.converged && found.of("slo_attainment") >= attained).then_some(found))
    };
    let mut rate = own_rate(input)?;
    let (mut low, mut high) = (None, None);
    for _ in 0..MOST_STRIDES {
        match serves(rate, RESIDENCES)? {
            Some(_) => low = Some(rate),
            None => high = Some(rate),
        }
        match (low, high) {
            (Some(_), Some(_)) => break,
            (Some(_), None) => rate *= STRIDE,
            _ => rate /= STRIDE,
        }
    }
    let (Some(low), Some(high)) = (low, high) else { return Ok(None) };
    let between = |mut low: f64, mut high: f64, residences: f64| -> anyhow::Result<f64> {
        while high / low > NEAR {
            let middle = (low * high).sqrt();
            if serves(middle, residences)?.is_some() { low = middle } else { high = middle }
        }
        Ok(low)
    };
    let mut at = [between(low, high, RESIDENCES)?, 0.0];
    let mut residences = RESIDENCES;
    for _ in 0..2 {
        residences *= 2.0;
        // Longer runs have longer queues and less chance: the capacity moves little, or down.
        at[1] = between(0.7 * at[0], 1.1 * at[0], residences)?;
        if (at[1] / at[0] - 1.0).abs() < CONVERGED {
            break;
        }
        if residences < 4.0 * RESIDENCES {
            at[0] = at[1];
        }
    }
    let [rate, doubled] = at;
    let found = steady(options, input, doubled, residences, 0.0)?;
    let requests = found.course.requests(doubled);
    Ok(Some(Capacity {
        rate,
        doubled,
        converged: (doubled / rate - 1.0).abs() < CONVERGED,
        residence_s: found.residence_s,
        requests,
        passes: match input {
            Input::Trace { requests: own, .. } => (requests / own.len() as f64).max(1.0),
            _ => 1.0,
        },
        busy: found.of("busy"),
    }))
}

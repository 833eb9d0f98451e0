//! One engine, one kind of traffic, one load.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{FLOOR, OPPONENTS, Place, Row, SINGLE, STOCK};
use crate::compare::interval_of_ratios;
use crate::load::Course;
use crate::metrics::Measured;
use crate::results::{LevelPoint, Run};
use crate::tune::Flags;

/// Metrics that are kept of a run beside those of the floor.
const KEPT: [&str; 18] = [
    "slo_attainment",
    "burst_attainment",
    "burst_ttfo_p50_ms",
    "burst_ttfo_p99_ms",
    "recovery_s",
    "itl_output_p50_ms",
    "ttft_p99_ms",
    "e2e_mean_ms",
    "recomputed_tokens",
    "qoe_attainment",
    "hit_rate",
    "waiting_mean",
    "running_mean",
    "kv_used_mean",
    "busy",
    "turned_away",
    "computed_again_tokens",
    "session_mean_s",
];

/// One engine, one kind of traffic, one load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Name of the engine.
    pub engine: String,
    /// Name of the traffic.
    pub traffic: String,
    /// Name of the load.
    pub load: String,
    /// Part of the capacity, of a steady load.
    pub part: Option<f64>,
    /// Requests a second; of a day those of its factor 1.
    pub rate: f64,
    /// Of a day: when its burst begins and ends, seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst_s: Option<[f64; 2]>,
    /// Of a day: the share of the requests that any scheduler could serve in time, at most ([`crate::bound`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_in_time: Option<f64>,
    /// The run of stock vLLM was long enough for a steady state.
    pub converged: bool,
    /// By name: [`super::OPPONENTS`], and policies as they were named.
    pub contenders: BTreeMap<String, Contender>,
}

/// One scheduler in a cell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Contender {
    /// Flags that differ from stock vLLM's own.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub flags: String,
    /// By the keys of [`crate::results::METRICS`].
    pub metrics: BTreeMap<String, f64>,
    /// 95 % intervals of the ratio to stock vLLM, from the means of batches of requests. A day has none: its batches are not of
    /// one kind.
    pub over_stock: BTreeMap<String, [f64; 2]>,
    /// Of a day: what requests had, by when they arrived.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub levels: Vec<LevelPoint>,
    /// Of a day: requests that wait, at the same times.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<f64>,
}

impl Cell {
    pub(super) fn of(row: &Row, place: &Place, stock: &Run, runs: &[(&str, Flags, Run)], own: Flags) -> Self {
        let burst_s = match place.load.course {
            Some(Course { measured: Measured::Between { burst: Some(ends), .. }, .. }) => {
                Some(ends.map(|ms| rounded(ms / 1e3)))
            }
            _ => None,
        };
        let contender = |run: &Run, flags: Flags, is_drawn: bool| {
            let keys = FLOOR.iter().map(|floor| floor.key).chain(KEPT);
            let metrics = keys.filter_map(|key| Some((key.to_owned(), rounded(*run.metrics.get(key)?)))).collect();
            let is_steady = burst_s.is_none();
            let keys = FLOOR.iter().map(|floor| floor.key).chain(["slo_attainment"]);
            let over_stock = keys.filter(|_| is_steady).filter_map(|key| {
                // Of the same requests in the same time, the more attain their level the more the goodput.
                let of = if key == "goodput_rps" { "slo_attainment" } else { key };
                let [low, high] = interval_of_ratios(of, &[(stock, run)])?;
                Some((key.to_owned(), [rounded(low), rounded(high)]))
            });
            let levels = if is_drawn { run.levels.clone() } else { Vec::new() };
            let waiting = levels.iter().map(|level| rounded(waiting_at(run, level.t_s))).collect();
            let levels = levels.into_iter().map(|level| LevelPoint { t_s: rounded(level.t_s), ..level }).collect();
            Contender { flags: flags.over(own), metrics, over_stock: over_stock.collect(), levels, waiting }
        };
        let mut contenders = BTreeMap::from([(STOCK.to_owned(), contender(stock, own, true))]);
        let first_policy = runs.iter().map(|(name, ..)| *name).find(|name| !OPPONENTS.contains(name));
        for (name, flags, run) in runs {
            let is_drawn = *name == SINGLE || Some(*name) == first_policy;
            contenders.insert((*name).to_owned(), contender(run, *flags, is_drawn));
        }
        Self {
            engine: row.engine.clone(),
            traffic: row.traffic.clone(),
            load: place.load.name.clone(),
            part: place.part,
            rate: stock.rate,
            burst_s,
            most_in_time: None,
            converged: place.converged,
            contenders,
        }
    }

    /// As a line names it.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}, {}, {}", self.engine, self.traffic, self.load)
    }

    /// A steady load from 0.95 of the capacity on, a day, or sessions that share too small a cache.
    #[must_use]
    pub fn is_hard(&self) -> bool {
        self.part.is_none_or(|part| part >= 0.95)
    }

    /// A contender's metric over another's, where both have it.
    #[must_use]
    pub fn ratio(&self, contender: &str, against: &str, key: &str) -> Option<f64> {
        let (one, other) = (self.metric(contender, key)?, self.metric(against, key)?);
        if other > 0.0 { Some(one / other) } else { (one == 0.0).then_some(1.0) }
    }

    /// A contender's metric.
    #[must_use]
    pub fn metric(&self, contender: &str, key: &str) -> Option<f64> {
        self.contenders.get(contender)?.metrics.get(key).copied()
    }
}

/// Requests that wait at that time.
fn waiting_at(run: &Run, t_s: f64) -> f64 {
    let after = run.timeline.partition_point(|point| point.t_s <= t_s);
    run.timeline.get(after.saturating_sub(1)).map_or(0.0, |point| point.waiting)
}

/// To five digits: what a reader can use, and the same on every machine.
pub(super) fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

//! Policies over engines, traffic and load, held against stock vLLM and against stock vLLM with the best flags for the cell.

mod floor;
mod text;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context;
use serde::{Deserialize, Serialize};

pub use self::floor::{Broken, FLOOR, Floor, Gain, broken, gains};
pub use self::text::table;
use crate::replay::{Input, Options, Rate, replay};
use crate::results::{MadeBy, Slo};
use crate::sim::EngineConfig;
use crate::tune::{Flags, capacity, capacity_under, tune};

/// Stock vLLM with the engine's own flags.
pub const STOCK: &str = "stock";
/// Stock vLLM with the best flags for the cell.
pub const TUNED: &str = "tuned";

/// What the cells are made of.
pub struct Axes {
    /// Engines with their names.
    pub engines: Vec<(String, EngineConfig)>,
    /// Traffic with its name.
    pub traffic: Vec<(String, Input)>,
    /// Loads, parts of the [capacity] of the engine for the traffic.
    pub loads: Vec<f64>,
}

/// All cells.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Grid {
    /// Version of Meridian, the command, and the machine it ran on.
    pub made_by: MadeBy,
    /// Service levels that goodput and capacity are counted by.
    pub slo: Slo,
    /// Requests of a run, at most.
    pub requests: usize,
    /// Seeds of each contender.
    pub seeds: Vec<u64>,
    /// In the order of the axes: engines, then traffic.
    pub rows: Vec<Row>,
    /// In the order of the axes: engines, then traffic, then loads.
    pub cells: Vec<Cell>,
}

/// One engine and one kind of traffic.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Name of the engine.
    pub engine: String,
    /// Name of the traffic.
    pub traffic: String,
    /// The highest rate served, requests a second, by contender: [`TUNED`], and policies with the engine's own flags. Without
    /// [`TUNED`] no load is served, and there are no cells.
    pub capacity: BTreeMap<String, f64>,
}

/// One engine, one kind of traffic, one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Name of the engine.
    pub engine: String,
    /// Name of the traffic.
    pub traffic: String,
    /// Part of the capacity.
    pub load: f64,
    /// Requests a second.
    pub rate: f64,
    /// The best flags of stock vLLM at this rate, found with the first seed.
    pub flags: Flags,
    /// By contender: [`STOCK`], [`TUNED`], policies as they were named. The metrics of each seed.
    pub contenders: BTreeMap<String, Vec<BTreeMap<String, f64>>>,
}

impl Cell {
    /// As a line names it.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}, {}, load {}", self.engine, self.traffic, self.load)
    }

    /// A contender's metric over another's, seed by seed, where both have it.
    #[must_use]
    pub fn ratios(&self, contender: &str, against: &str, key: &str) -> Vec<f64> {
        let of = |name: &str| self.contenders.get(name).map_or(&[][..], Vec::as_slice);
        let pairs = of(contender).iter().zip(of(against));
        let ratio = |(one, other): (&BTreeMap<String, f64>, &BTreeMap<String, f64>)| {
            let (one, other) = (*one.get(key)?, *other.get(key)?);
            if other > 0.0 { Some(one / other) } else { (one == 0.0).then_some(1.0) }
        };
        pairs.filter_map(ratio).collect()
    }

    /// The median of a contender's metric over seeds.
    #[must_use]
    pub fn median(&self, contender: &str, key: &str) -> Option<f64> {
        let of = self.contenders.get(contender)?;
        median(of.iter().filter_map(|metrics| metrics.get(key).copied()).collect())
    }
}

/// The median; `None` of nothing.
#[must_use]
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.get(values.len().checked_sub(1)? / 2)?, values.get(values.len() / 2)?);
    Some((low + high) / 2.0)
}

impl Grid {
    /// Run all cells, on as many threads as the machine has cores. `options` has what is the same everywhere: policies, seeds,
    /// service levels; its engine and rates are not looked at. `progress` is told what has been done, of how much: a part for each
    /// capacity and each cell.
    ///
    /// # Errors
    /// A policy that does not load or goes on faulting; nothing to replay.
    pub fn run(axes: &Axes, options: &Options, progress: &(dyn Fn(usize, usize) + Sync)) -> anyhow::Result<Self> {
        let pairs: Vec<_> =
            axes.engines.iter().flat_map(|engine| axes.traffic.iter().map(move |traffic| (engine, traffic))).collect();
        let all = pairs.len() * (1 + axes.loads.len());
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let advance = || progress(done.fetch_add(1, Ordering::Relaxed) + 1, all);
        let found = Mutex::new(BTreeMap::new());
        let work = || -> anyhow::Result<()> {
            while let Some((engine, traffic)) = pairs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let at = (engine.0.as_str(), traffic.0.as_str());
                let cells = row(engine, traffic, &axes.loads, options, &advance)
                    .with_context(|| format!("{}, {}", at.0, at.1))?;
                found.lock().expect("no thread panics").insert(at, cells);
            }
            Ok(())
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(pairs.len());
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
        })?;
        let mut found = found.into_inner().expect("no thread panics");
        let mut grid = Self { slo: options.slo, seeds: options.seeds.clone(), ..Self::default() };
        for ((engine, _), (traffic, _)) in pairs {
            let (row, cells) = found.remove(&(engine.as_str(), traffic.as_str())).expect("every pair was run");
            grid.rows.push(row);
            grid.cells.extend(cells);
        }
        Ok(grid)
    }

    /// The contenders but stock vLLM, in the order of their names.
    #[must_use]
    pub fn policies(&self) -> Vec<&str> {
        let names = self.cells.first().into_iter().flat_map(|cell| cell.contenders.keys());
        names.map(String::as_str).filter(|name| ![STOCK, TUNED].contains(name)).collect()
    }
}

/// An engine and its traffic: its row and its cells.
fn row(
    (engine_name, engine): &(String, EngineConfig),
    (traffic, input): &(String, Input),
    loads: &[f64],
    options: &Options,
    advance: &dyn Fn(),
) -> anyhow::Result<(Row, Vec<Cell>)> {
    let first_seed = Options { engine: engine.clone(), seeds: options.seeds[..1].to_vec(), ..options.clone() };
    let mut row = Row { engine: engine_name.clone(), traffic: traffic.clone(), ..Row::default() };
    let served = capacity(&first_seed, input)?;
    row.capacity.extend(served.map(|rate| (TUNED.to_owned(), rate)));
    for policies in &options.policies {
        let rate = capacity_under(policies, &first_seed, input)?;
        row.capacity.extend(rate.map(|rate| (policies.label.clone(), rate)));
    }
    advance();
    let Some(capacity) = served else {
        loads.iter().for_each(|_| advance());
        return Ok((row, Vec::new()));
    };
    let mut cells = Vec::new();
    for &load in loads {
        let rate = Rate::PerSecond(capacity * load);
        let tuned = tune(&first_seed, input, rate, &mut || {})?;
        let mut contenders = BTreeMap::<String, Vec<_>>::new();
        let own = Flags::of(engine);
        for (flags, policies, baseline) in [(own, &options.policies[..], STOCK), (tuned.best, &[][..], TUNED)] {
            if flags == own && baseline == TUNED {
                continue;
            }
            let options = Options {
                engine: flags.set(engine),
                baseline: "fcfs".parse().map_err(anyhow::Error::msg)?,
                policies: policies.to_vec(),
                rates: vec![rate],
                ..options.clone()
            };
            let results = replay(&options, input, &mut |_, _, _| {})?;
            if let Some(given_up) = results.given_up.first() {
                anyhow::bail!("{}", given_up.why);
            }
            for run in results.runs {
                let name = if run.policy == results.baseline { baseline } else { run.policy.as_str() };
                contenders.entry(name.to_owned()).or_default().push(run.metrics);
            }
        }
        if tuned.best == own {
            let stock = contenders[STOCK].clone();
            contenders.insert(TUNED.to_owned(), stock);
        }
        let (engine, traffic) = (engine_name.clone(), traffic.clone());
        cells.push(Cell { engine, traffic, load, rate: tuned.rate, flags: tuned.best, contenders });
        advance();
    }
    Ok((row, cells))
}

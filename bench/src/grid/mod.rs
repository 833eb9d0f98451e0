//! Policies over engines, traffic and load, against the vLLM that people run: as it starts, with the best single set of flags
//! for the whole sweep, and with the best flags for each load alone, which nobody has. Two more are bounds from papers.

mod cell;
mod floor;
mod kept;
mod text;
mod zoo;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context;
use serde::{Deserialize, Serialize};

pub use self::cell::{Cell, Contender};
pub use self::floor::{Broken, FLOOR, Floor, Gain, broken, gains};
pub use self::kept::Kept;
pub use self::text::table;
pub use self::zoo::{below_floor, worst};
use crate::load::{Course, Stage};
use crate::metrics::HOLDS;
use crate::policies::PolicySet;
use crate::replay::{Input, MaxTokens, Options, Rate, bound, replay};
use crate::results::{MadeBy, Run, Slo};
use crate::sim::{Admitted, EngineConfig};
use crate::steady::{Capacity, RESIDENCES, capacity, steady};
use crate::tune::{Flags, Load, tune};

/// Stock vLLM as it starts.
pub const STOCK: &str = "stock";
/// Stock vLLM with the best single set of flags for all loads of an engine and its traffic.
pub const SINGLE: &str = "stock, best flags";
/// Stock vLLM with the best flags for each load: a bound, as nobody sets flags anew when the load changes.
pub const ORACLE: &str = "stock, oracle flags";
/// Stock vLLM in steps of 512 tokens, as Sarathi-Serve (arXiv 2403.02310) has them for strict levels.
pub const CHUNKS: &str = "stock, chunks of 512";
/// Earliest deadline first, deadlines from the service levels and the true length of each thought: a bound.
pub const EDF: &str = "EDF, lengths known";
/// Shortest remaining time first with true lengths: a bound.
pub const SRPT: &str = "SRPT, lengths known";
/// Every contender that is no policy of the user's.
pub const OPPONENTS: [&str; 6] = [STOCK, SINGLE, ORACLE, CHUNKS, EDF, SRPT];
const CHUNK_TOKENS: u32 = 512;

/// An engine that is less busy than this at its capacity never queues: nothing is scheduled there.
pub const IDLE_BELOW: f64 = 0.5;
/// Factors of the capacity in a day: before, in the burst, after.
const DAY: [f64; 3] = [0.6, 1.6, 0.6];
/// Times that a day has before its burst and after it, at least, seconds; and, after it, in lengths of the burst.
const BEFORE_S: f64 = 300.0;
const AFTER_S: f64 = 900.0;
const AFTER_BURSTS: f64 = 3.0;
/// Share of an unlimited cache's hits that stock vLLM has where sessions are just too many.
const HIT_SHARE: f64 = 0.5;
/// Sessions at a time that are tried, at most.
const MOST_SESSIONS: u32 = 512;

/// What the cells are made of.
pub struct Axes {
    /// Engines with their names.
    pub engines: Vec<(String, EngineConfig)>,
    /// Traffic with its name.
    pub traffic: Vec<(String, Input)>,
    /// Steady loads, parts of the [capacity] of the engine for the traffic.
    pub loads: Vec<f64>,
    /// Lengths of the bursts of days, minutes.
    pub bursts: Vec<f64>,
}

impl Axes {
    /// Parts of the work of one engine and its traffic: the capacity, the flags, and the cells.
    #[must_use]
    pub fn parts(&self) -> usize {
        2 + self.loads.len() + self.bursts.len()
    }
}

/// All cells.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Grid {
    /// Version of Meridian, the command, and the machine it ran on.
    pub made_by: MadeBy,
    /// Service levels that goodput and capacity are counted by.
    pub slo: Slo,
    /// In the order of the axes: engines, then traffic.
    pub rows: Vec<Row>,
    /// In the order of the axes: engines, then traffic, then loads and days.
    pub cells: Vec<Cell>,
}

/// One engine and one kind of traffic.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Name of the engine.
    pub engine: String,
    /// Name of the traffic.
    pub traffic: String,
    /// What stock vLLM as it starts can serve. Without it no load is served, and there are no cells; sessions in closed loop
    /// have none.
    pub capacity: Option<Capacity>,
    /// Flags of stock vLLM as it starts.
    pub own_flags: String,
    /// What the best single set changes of them.
    pub best_flags: String,
    /// Sessions at a time, of sessions in closed loop.
    pub at_once: Option<u32>,
}

impl Row {
    /// Why the cells of this row enter no median; `None` where they do.
    #[must_use]
    pub fn left_out(&self) -> Option<String> {
        let Some(capacity) = &self.capacity else {
            return self.at_once.is_none().then(|| "no rate is served".to_owned());
        };
        if !capacity.converged {
            let moved = 100.0 * (capacity.doubled / capacity.rate - 1.0);
            return Some(format!("not converged: twice as long a run moves the capacity by {moved:+.1} %"));
        }
        (capacity.busy < IDLE_BELOW).then(|| format!("idle: {:.2} busy at its capacity", capacity.busy))
    }
}

impl Grid {
    /// Run all cells, on as many threads as the machine has cores. `options` has what is the same everywhere: policies, the
    /// seed, service levels; its engine and rates are not looked at. Rows that `kept` has are not run again. `progress` is told
    /// what has been done, of how much, and of which row.
    ///
    /// # Errors
    /// A policy that does not load or goes on faulting; nothing to replay; rows that cannot be kept.
    pub fn run(
        axes: &Axes,
        options: &Options,
        kept: &Kept,
        progress: &(dyn Fn(usize, usize, &str) + Sync),
    ) -> anyhow::Result<Self> {
        let pairs: Vec<_> =
            axes.engines.iter().flat_map(|engine| axes.traffic.iter().map(move |traffic| (engine, traffic))).collect();
        let all = pairs.len() * axes.parts();
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let found = Mutex::new(BTreeMap::new());
        let work = || -> anyhow::Result<()> {
            while let Some((engine, traffic)) = pairs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let at = (engine.0.as_str(), traffic.0.as_str());
                let name = format!("{}, {}", at.0, at.1);
                let told = std::cell::Cell::new(0);
                let advance = |parts: usize| {
                    let parts = parts.min(axes.parts() - told.get());
                    told.set(told.get() + parts);
                    progress(done.fetch_add(parts, Ordering::Relaxed) + parts, all, &name);
                };
                let key = kept::key(engine, traffic, axes, options);
                let row = match kept.find(key) {
                    Some(row) => row,
                    None => {
                        let row = row(engine, traffic, axes, options, &advance).with_context(|| name.clone())?;
                        kept.keep(key, &row)?;
                        row
                    }
                };
                advance(axes.parts());
                found.lock().expect("no thread panics").insert(at, row);
            }
            Ok(())
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(pairs.len());
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
        })?;
        let mut found = found.into_inner().expect("no thread panics");
        let mut grid = Self { slo: options.slo, ..Self::default() };
        for ((engine, _), (traffic, _)) in pairs {
            let (row, cells) = found.remove(&(engine.as_str(), traffic.as_str())).expect("every pair was run");
            grid.rows.push(row);
            grid.cells.extend(cells);
        }
        Ok(grid)
    }

    /// The contenders that are policies, in the order of their names.
    #[must_use]
    pub fn policies(&self) -> Vec<&str> {
        let names = self.cells.first().into_iter().flat_map(|cell| cell.contenders.keys());
        names.map(String::as_str).filter(|name| !OPPONENTS.contains(name)).collect()
    }

    /// The row of a cell.
    #[must_use]
    pub fn row(&self, cell: &Cell) -> Option<&Row> {
        self.rows.iter().find(|row| row.engine == cell.engine && row.traffic == cell.traffic)
    }

    /// The cells that enter medians: neither idle nor without a steady state.
    pub fn counted(&self) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(|cell| cell.converged && self.row(cell).is_some_and(|row| row.left_out().is_none()))
    }
}

/// An engine and its traffic: its row and its cells.
fn row(
    (engine_name, engine): &(String, EngineConfig),
    (traffic, input): &(String, Input),
    axes: &Axes,
    options: &Options,
    advance: &dyn Fn(usize),
) -> anyhow::Result<(Row, Vec<Cell>)> {
    let options = Options { engine: engine.clone(), ..options.clone() };
    let own = Flags::of(engine);
    let mut row =
        Row { engine: engine_name.clone(), traffic: traffic.clone(), own_flags: own.to_string(), ..Row::default() };
    if let Input::Sessions { name, sessions, .. } = input {
        let at_once = sessions_at_once(&options, input)?;
        row.at_once = Some(at_once);
        advance(1);
        let input =
            Input::Sessions { name: name.clone(), sessions: sessions.clone(), at_once, admitted: Admitted::All };
        let load = Load { name: format!("{at_once} sessions at once"), rate: Rate::TimesItsOwn(1.0), course: None };
        let cells = cells(&mut row, &options, &input, &[Place::of(load)], advance)?;
        return Ok((row, cells));
    }
    row.capacity = capacity(&options, input, HOLDS)?;
    advance(1);
    let Some(Capacity { doubled: rate, residence_s, .. }) = row.capacity else { return Ok((row, Vec::new())) };
    let mut places = Vec::new();
    for part in &axes.loads {
        let at = steady(&options, input, rate * part, RESIDENCES, 0.0)?;
        let load = Load { name: format!("load {part}"), rate: Rate::PerSecond(rate * part), course: Some(at.course) };
        places.push(Place { load, part: Some(*part), converged: at.converged });
    }
    for minutes in &axes.bursts {
        let load = Load {
            name: format!("day, {minutes} min"),
            rate: Rate::PerSecond(rate),
            course: Some(day(60.0 * minutes, residence_s)),
        };
        places.push(Place { load, part: None, converged: true });
    }
    let cells = cells(&mut row, &options, input, &places, advance)?;
    Ok((row, cells))
}

/// A day with a burst of so many seconds, for an engine whose requests live so long.
#[must_use]
pub fn day(burst_s: f64, residence_s: f64) -> Course {
    let [before, burst, after] = DAY;
    let after_s = AFTER_S.max(AFTER_BURSTS * burst_s).max(AFTER_BURSTS * residence_s);
    Course::day(vec![
        Stage::flat(before, BEFORE_S.max(2.0 * residence_s)),
        Stage::flat(burst, burst_s),
        Stage::flat(after, after_s),
    ])
}

/// As many sessions that stock vLLM's cache has half of what an unlimited one would have.
fn sessions_at_once(options: &Options, input: &Input) -> anyhow::Result<u32> {
    let Input::Sessions { name, sessions, .. } = input else { return Ok(1) };
    let share = |at_once: u32| -> anyhow::Result<f64> {
        let input =
            Input::Sessions { name: name.clone(), sessions: sessions.clone(), at_once, admitted: Admitted::All };
        let load = Load { name: String::new(), rate: Rate::TimesItsOwn(1.0), course: None };
        let run = contend(options, &input, &load, Flags::of(&options.engine), None)?;
        let of = |key: &str| run.metrics.get(key).copied().unwrap_or(0.0);
        Ok(of("hit_rate") / of("hit_rate_unlimited").max(1e-9))
    };
    let (mut low, mut high) = (1, 2);
    while high < MOST_SESSIONS && share(high)? > HIT_SHARE {
        (low, high) = (high, high * 2);
    }
    while high - low > 1 + low / 8 {
        let middle = u32::midpoint(low, high);
        if share(middle)? > HIT_SHARE { low = middle } else { high = middle }
    }
    Ok(high)
}

/// Where contenders meet.
struct Place {
    load: Load,
    part: Option<f64>,
    converged: bool,
}

impl Place {
    fn of(load: Load) -> Self {
        Self { load, part: None, converged: true }
    }
}

/// Every contender at every place.
fn cells(
    row: &mut Row,
    options: &Options,
    input: &Input,
    places: &[Place],
    advance: &dyn Fn(usize),
) -> anyhow::Result<Vec<Cell>> {
    let own = Flags::of(&options.engine);
    let loads: Vec<Load> = places.iter().map(|place| place.load.clone()).collect();
    let first_seed = Options { seeds: options.seeds[..1].to_vec(), ..options.clone() };
    let tuned = tune(&first_seed, input, &loads, &mut || {})?;
    row.best_flags = tuned.best.over(own);
    advance(1);
    let mut cells = Vec::new();
    for place in places {
        let name = &place.load.name;
        let known = |policy: &str| -> anyhow::Result<(Options, PolicySet)> {
            let options = Options { max_tokens: MaxTokens::Exact, deadlines_of_slo: true, ..first_seed.clone() };
            Ok((options, policy.parse().map_err(anyhow::Error::msg)?))
        };
        let stock = contend(&first_seed, input, &place.load, own, None)?;
        let chunks = own.with_tokens(CHUNK_TOKENS.min(own.max_num_batched_tokens));
        let mut runs: Vec<(&str, Flags, Run)> = Vec::new();
        for (label, flags) in [(SINGLE, tuned.best), (ORACLE, tuned.best_of[name]), (CHUNKS, chunks)] {
            // The same flags give the same run.
            let known = runs.iter().find(|(_, known, _)| *known == flags).map(|(.., run)| run);
            let run = match known.or((flags == own).then_some(&stock)) {
                Some(run) => run.clone(),
                None => contend(&first_seed, input, &place.load, flags, None)?,
            };
            runs.push((label, flags, run));
        }
        for (label, policy) in [(EDF, "edf"), (SRPT, "srpt")] {
            let (options, policy) = known(policy)?;
            runs.push((label, own, contend(&options, input, &place.load, own, Some(&policy))?));
        }
        for policy in &options.policies {
            runs.push((&policy.label, own, contend(&first_seed, input, &place.load, own, Some(policy))?));
        }
        let mut cell = Cell::of(row, place, &stock, &runs, own);
        if cell.burst_s.is_some() {
            let load =
                Options { rates: vec![place.load.rate], course: place.load.course.clone(), ..first_seed.clone() };
            cell.most_in_time = bound(&load, input)?.map(cell::rounded);
        }
        cells.push(cell);
        advance(1);
    }
    Ok(cells)
}

/// One run: of stock vLLM with these flags, or of a policy.
pub(crate) fn contend(
    options: &Options,
    input: &Input,
    load: &Load,
    flags: Flags,
    policy: Option<&PolicySet>,
) -> anyhow::Result<Run> {
    let stock: PolicySet = "fcfs".parse().map_err(anyhow::Error::msg)?;
    let options = Options {
        engine: flags.set(&options.engine),
        baseline: policy.unwrap_or(&stock).clone(),
        policies: Vec::new(),
        rates: vec![load.rate],
        course: load.course.clone(),
        ..options.clone()
    };
    let runs = replay(&options, input, &mut |_, _, _| {})?.runs;
    runs.into_iter().next().context("no run")
}

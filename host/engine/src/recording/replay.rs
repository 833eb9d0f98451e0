//! Repeats the decisions of a recording.

use std::time::Instant;

use meridian_core::slot::Compare;
use meridian_core::{Batch, Fault, FaultKind, Policy};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::kinds::Recordable;
use super::read::{Recording, RecordingError};
use super::row::{Outcome, Recorded};

/// The reason why nothing could be replayed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReplayError {
    /// A file cannot be used.
    #[error(transparent)]
    Recording(#[from] RecordingError),
    /// The policy needs a column that was not recorded.
    #[error("{file}: the policy asks for the column {column}, which is not in this recording")]
    MissingColumn {
        /// The file.
        file: String,
        /// The column as it is named in files.
        column: String,
    },
    /// The policy cannot be started, now or after a fault; one line.
    #[error("the policy cannot be started: {0}")]
    Policy(String),
}

/// Limits of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayOptions {
    /// Most decisions.
    pub limit: u64,
    /// Most differences in the report.
    pub shown: usize,
}

impl Default for ReplayOptions {
    fn default() -> Self {
        Self { limit: u64::MAX, shown: 10 }
    }
}

/// A decision with a different result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The file.
    pub file: String,
    /// Number of the decision.
    pub seq: u64,
    /// The recorded result.
    pub recorded: String,
    /// The result of the replay.
    pub replayed: String,
}

/// The result of a replay.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplayReport {
    /// Decisions in the recordings, as far as they were read.
    pub decisions: u64,
    /// Candidates in them.
    pub candidates: u64,
    /// Decisions with the same result, bit for bit.
    pub identical: u64,
    /// Decisions with another result.
    pub different: u64,
    /// Decisions that were not compared: a deadline stopped the policy, or it could not be asked.
    pub not_compared: u64,
    /// Places where records are missing.
    pub gaps: u64,
    /// Faults in the recordings.
    pub recorded_faults: u64,
    /// Faults now.
    pub faults: u64,
    /// Text of the first fault now.
    pub first_fault: Option<String>,
    /// The reason why the rest was not replayed: too many decisions did not end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_up: Option<String>,
    /// Mean Spearman correlation of the two orders, from -1 to 1, of decisions with two candidates or more.
    pub rank_correlation: Option<f64>,
    /// Mean share of the first 8 that both put first.
    pub top_overlap: Option<f64>,
    /// Different answers other than keys: token budgets, thresholds, verdicts.
    pub differing_judgements: u64,
    /// Median time of a decision now, microseconds.
    pub median_us: f64,
    /// 99th percentile of the same.
    pub p99_us: f64,
    /// The first differences.
    pub differences: Vec<Difference>,
    /// Files that end too early, and the reason.
    pub cut: Vec<String>,
}

/// Decisions past the deadline after which a replay gives a policy up: its deadline has seconds, and it waits for each.
const MOST_MISSED: u32 = 3;

/// Starts a fresh policy: at the beginning, and wherever the recorded policy was fresh.
pub type Start<'a, K> = dyn FnMut() -> Result<Box<dyn Policy<K>>, String> + 'a;

/// Repeat the decisions in `recordings` with the policy that `start` makes, and compare. The recordings belong to one
/// slot and are in the order of their decisions. State is carried from one to the next unless a decision is missing in
/// between. `progress` receives the number of decisions so far.
///
/// ```
/// use meridian_core::{Dispatch, MeridianConfig, native};
/// use meridian_engine::recording::{ReplayOptions, replay};
///
/// let targets = MeridianConfig::default().scheduler.targets();
/// let mut start = || native::policy::<Dispatch>("fcfs", targets, "{}").map_err(|error| error.to_string());
/// let report = replay(&[], ReplayOptions::default(), &mut start, &mut |_| ())?;
/// assert_eq!((report.decisions, report.different), (0, 0));
/// # Ok::<(), meridian_engine::recording::ReplayError>(())
/// ```
///
/// # Errors
/// A file cannot be used, or the policy needs a missing column or cannot be started.
pub fn replay<K: Recordable>(
    recordings: &[Recording],
    options: ReplayOptions,
    start: &mut Start<'_, K>,
    progress: &mut dyn FnMut(u64),
) -> Result<ReplayReport, ReplayError> {
    let mut replay = Replay {
        policy: start().map_err(ReplayError::Policy)?,
        start,
        report: ReplayReport::default(),
        compare: Compare::default(),
        sums: [0.0; 2],
        ranked: 0,
        took_ns: Vec::new(),
        shown: options.shown,
        next: None,
        missed: 0,
        decision: K::Decision::default(),
        columns: Vec::new(),
    };
    let mut row = Recorded::default();
    for recording in recordings {
        let mut rows = recording.rows::<K>()?;
        replay.report.cut.extend(recording.cut().map(|why| format!("{}: {why}", recording.file())));
        let present: Vec<K::Column> = rows.columns().collect();
        let inputs = replay.positions(&present, recording.file())?;
        while replay.goes_on(options.limit) && rows.next_into(&mut row)? {
            replay.follow(&row, recording)?;
            replay.decide(&row, &inputs, recording.file())?;
            progress(replay.report.decisions);
        }
    }
    Ok(replay.finish())
}

struct Replay<'a, 'b, K: Recordable> {
    policy: Box<dyn Policy<K>>,
    start: &'a mut Start<'b, K>,
    report: ReplayReport,
    compare: Compare,
    /// Sums of rank correlations and overlaps.
    sums: [f64; 2],
    ranked: u64,
    took_ns: Vec<u64>,
    shown: usize,
    /// Run and number of the decision that follows the last one.
    next: Option<(String, u64)>,
    /// Number of missed deadlines.
    missed: u32,
    decision: K::Decision,
    columns: Vec<f32>,
}

impl<K: Recordable> Replay<'_, '_, K> {
    fn goes_on(&self, limit: u64) -> bool {
        self.report.given_up.is_none() && self.report.decisions < limit
    }

    /// The positions of the policy's inputs in a row's matrix.
    fn positions(&self, present: &[K::Column], file: &str) -> Result<Vec<usize>, ReplayError> {
        let position = |column: &K::Column| {
            present.iter().position(|found| found == column).ok_or_else(|| {
                let index = K::COLUMNS.iter().position(|known| known == column);
                let column = index.map_or_else(|| format!("{column:?}"), |index| K::COLUMN_NAMES[index].to_owned());
                ReplayError::MissingColumn { file: file.to_owned(), column }
            })
        };
        self.policy.inputs().iter().map(position).collect()
    }

    /// Put the policy into the state in which the recorded policy decided this row.
    fn follow(&mut self, row: &Recorded<K>, recording: &Recording) -> Result<(), ReplayError> {
        let run = &recording.header().run;
        let follows = self.next.as_ref().is_some_and(|(last, next)| last == run && *next == row.seq);
        let is_first = self.next.is_none();
        if !follows && !is_first {
            self.report.gaps += 1;
        }
        // No number follows the largest one, which a file may contain.
        let following = row.seq.saturating_add(1);
        match &mut self.next {
            Some((last, next)) if last == run => *next = following,
            next => *next = Some((run.clone(), following)),
        }
        let state = row.snapshot.as_deref().filter(|state| !state.is_empty());
        if row.restarted || state.is_some() || (!follows && !is_first) {
            self.policy = (self.start)().map_err(ReplayError::Policy)?;
        }
        if let Some(state) = state.filter(|_| !row.restarted)
            && let Err(fault) = self.policy.restore(state)
        {
            // Another policy may not understand the state, and starts fresh.
            tracing::info!(file = recording.file(), seq = row.seq, %fault, "the recorded state is not taken over");
            self.policy = (self.start)().map_err(ReplayError::Policy)?;
        }
        Ok(())
    }

    fn decide(&mut self, row: &Recorded<K>, inputs: &[usize], file: &str) -> Result<(), ReplayError> {
        self.report.decisions += 1;
        self.report.candidates += row.candidates as u64;
        self.report.recorded_faults += u64::from(matches!(row.outcome, Outcome::Faulted(_)));
        if row.outcome == Outcome::NotAsked {
            self.report.not_compared += 1;
            return Ok(());
        }
        self.columns.clear();
        for input in inputs {
            self.columns.extend_from_slice(&row.columns[input * row.candidates..][..row.candidates]);
        }
        let Recorded { facts, candidates, .. } = row;
        // What another policy cannot use, it is not told.
        let tells_apart = K::REQUEST.is_some_and(|request| self.policy.inputs().contains(&request));
        let finished = if tells_apart { row.finished.as_slice() } else { &[] };
        let batch = Batch { facts, candidates: *candidates, columns: &self.columns, finished };
        K::clear(&mut self.decision);
        let started = Instant::now();
        let answered = self
            .policy
            .decide(&batch, &mut self.decision)
            .and_then(|()| K::check(&row.facts, &self.decision, row.candidates));
        self.took_ns.push(u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX));
        self.compare(row, &answered, file);
        if let Err(fault) = answered {
            self.report.faults += 1;
            self.report.first_fault.get_or_insert_with(|| format!("{file}: decision {}: {fault}", row.seq));
            self.missed += u32::from(fault.kind == FaultKind::Deadline);
            if self.missed == MOST_MISSED {
                let why = format!("{file}: decision {}: the policy missed its deadline {MOST_MISSED} times", row.seq);
                self.report.given_up = Some(why);
            }
            self.policy = (self.start)().map_err(ReplayError::Policy)?;
        }
        Ok(())
    }

    fn compare(&mut self, row: &Recorded<K>, answered: &Result<(), Fault>, file: &str) {
        let (recorded, replayed) = match (row.outcome, answered) {
            // A missed deadline depends on the machine.
            (Outcome::Faulted(FaultKind::Deadline | FaultKind::Init), _) => {
                self.report.not_compared += 1;
                return;
            }
            (Outcome::Faulted(kind), Err(fault)) if kind == fault.kind => {
                self.report.identical += 1;
                return;
            }
            (Outcome::Faulted(kind), Err(fault)) => (format!("a fault: {}", kind.label()), format!("a fault: {fault}")),
            (Outcome::Faulted(kind), Ok(())) => (format!("a fault: {}", kind.label()), "an answer".into()),
            (_, Err(fault)) => ("an answer".into(), format!("a fault: {fault}")),
            (_, Ok(())) => {
                self.compare_orders(row);
                if K::same(&row.decision, &self.decision) {
                    self.report.identical += 1;
                    return;
                }
                (K::shown(&row.decision, &self.decision), K::shown(&self.decision, &row.decision))
            }
        };
        self.report.different += 1;
        if self.report.differences.len() < self.shown {
            self.report.differences.push(Difference { file: file.to_owned(), seq: row.seq, recorded, replayed });
        }
    }

    fn compare_orders(&mut self, row: &Recorded<K>) {
        self.report.differing_judgements += K::differences(&row.decision, &self.decision);
        let (one, other) = (K::keys(&row.decision), K::keys(&self.decision));
        if row.candidates > 1 && one.len() == row.candidates && other.len() == row.candidates {
            let (correlation, overlap) = self.compare.orders(one, other);
            self.sums = [self.sums[0] + correlation, self.sums[1] + overlap];
            self.ranked += 1;
        }
    }

    fn finish(self) -> ReplayReport {
        let Self { mut report, sums, ranked, mut took_ns, .. } = self;
        took_ns.sort_unstable();
        let at = |share: f64| {
            let index = (took_ns.len() as f64 * share) as usize;
            took_ns.get(index.min(took_ns.len().saturating_sub(1))).map_or(0.0, |ns| *ns as f64 / 1e3)
        };
        (report.median_us, report.p99_us) = (at(0.5), at(0.99));
        if ranked > 0 {
            (report.rank_correlation, report.top_overlap) =
                (Some(sums[0] / ranked as f64), Some(sums[1] / ranked as f64));
        }
        report
    }
}

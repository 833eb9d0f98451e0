use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::PROBLEMS;
use super::stats::ProblemMeans;
use crate::limits::within;
use crate::read::read_text;
use crate::trace::MAX_TOKENS;
use crate::vllm::Machine;

/// Largest file of a run that is read, bytes; a recorded point takes about 40.
const MAX_RUN_BYTES: u64 = 256 << 20;
/// Most points of a thought.
const MAX_POINTS: usize = 1 << 16;

/// A place in a thought where the engine measured something; `None` is what it did not measure there.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ThoughtPoint {
    /// Tokens of the thought so far.
    pub think_tokens: u32,
    /// Entropy after a forced end, bits.
    pub bits: Option<f64>,
    /// The answer that a forced end gets.
    pub answer: Option<u32>,
    /// The path deviation index.
    pub rpdi: Option<f64>,
    /// Probability of the likeliest answer.
    pub confidence: Option<f64>,
}

/// A thought that ran to its own end.
#[derive(Clone, Debug, PartialEq)]
pub struct Thought {
    points: Vec<ThoughtPoint>,
    truth: u32,
    end_tokens: u32,
    end_right: bool,
}

impl Thought {
    /// Of its points, the true answer, the tokens at its own end, and whether the answer then given was right. A boundary without
    /// a probe of its own has the answer of the probe at the same place.
    #[must_use]
    pub fn new(mut points: Vec<ThoughtPoint>, truth: u32, end_tokens: u32, end_right: bool) -> Self {
        points.sort_by_key(|point| point.think_tokens);
        let answers: BTreeMap<u32, u32> =
            points.iter().filter_map(|point| Some((point.think_tokens, point.answer?))).collect();
        for point in &mut points {
            point.answer = point.answer.or_else(|| answers.get(&point.think_tokens).copied());
        }
        Self { points, truth, end_tokens, end_right }
    }

    /// In order of think tokens.
    #[must_use]
    pub fn points(&self) -> &[ThoughtPoint] {
        &self.points
    }

    /// Points with an entropy. As in the engine, one that is negative or not finite was not measured.
    pub fn probes(&self) -> impl Iterator<Item = (&ThoughtPoint, f64)> {
        let measured = |point: &ThoughtPoint| point.bits.filter(|bits| *bits >= 0.0 && bits.is_finite());
        self.points.iter().filter_map(move |point| Some((point, measured(point)?)))
    }

    /// Tokens at its own end.
    #[must_use]
    pub fn end_tokens(&self) -> u32 {
        self.end_tokens
    }

    /// Whether the answer after its own end was right.
    #[must_use]
    pub fn end_right(&self) -> bool {
        self.end_right
    }

    /// Whether an end at this point gets the right answer; where none is known it counts as wrong.
    #[must_use]
    pub fn is_right_at(&self, point: &ThoughtPoint) -> bool {
        point.answer == Some(self.truth)
    }
}

/// Recorded thoughts, in which nothing was ended.
#[derive(Clone, Debug)]
pub struct ExitRecording {
    /// A thought a problem.
    pub thoughts: Vec<Thought>,
    /// Faults of Meridian's policies, by kind.
    pub faults: BTreeMap<String, u64>,
}

impl ExitRecording {
    /// Read what `early_exit_run --record` wrote.
    ///
    /// # Errors
    /// The file, the field, and what is wrong.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let (name, RecordingFile { recording, faults }) =
            parsed(path, "thoughts as `early_exit_run --record` writes them")?;
        let rows = recording.trajectories;
        within(&format!("{name}: recording.trajectories:"), rows.len(), &PROBLEMS)?;
        for (at, row) in rows.iter().enumerate() {
            let named = format!("{name}: recording.trajectories[{at}]");
            within(&format!("{named}.points:"), row.points.len(), &(0..=MAX_POINTS))?;
            let longest = row.points.iter().map(|point| point.0).chain([row.end_tokens]).max().unwrap_or(0);
            within(&format!("{named}: tokens"), longest, &(0..=MAX_TOKENS))?;
        }
        Ok(Self { thoughts: rows.into_iter().map(Thought::from).collect(), faults })
    }
}

#[derive(Deserialize)]
struct RecordingFile {
    recording: RecordingRows,
    #[serde(default)]
    faults: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct RecordingRows {
    trajectories: Vec<ThoughtRow>,
}

#[derive(Deserialize)]
struct ThoughtRow {
    truth: u32,
    end_tokens: u32,
    end_right: bool,
    points: Vec<PointRow>,
}

/// Think tokens, bits, answer, path deviation index, confidence; older recordings have no confidence.
#[derive(Deserialize)]
struct PointRow(u32, Option<f64>, Option<u32>, Option<f64>, #[serde(default)] Option<f64>);

impl From<ThoughtRow> for Thought {
    fn from(row: ThoughtRow) -> Self {
        let ThoughtRow { truth, end_tokens, end_right, points } = row;
        let point = |PointRow(think_tokens, bits, answer, rpdi, confidence)| ThoughtPoint {
            think_tokens,
            bits,
            answer,
            rpdi,
            confidence,
        };
        Self::new(points.into_iter().map(point).collect(), truth, end_tokens, end_right)
    }
}

/// Passes over the problems, as one engine made them.
#[derive(Debug, Deserialize)]
pub(super) struct SolvedRun {
    pub machine: Machine,
    pub passes: Vec<SolvedPass>,
    #[serde(default)]
    pub faults: BTreeMap<String, u64>,
}

/// Every problem, solved as often as was asked.
#[derive(Debug, Deserialize)]
pub(super) struct SolvedPass {
    /// `None` where the policy alone ends thinking.
    pub budget: Option<u32>,
    pub wall_s: f64,
    /// Of each problem's samples, as is `right`.
    pub think_tokens: Vec<Vec<u32>>,
    pub right: Vec<Vec<u8>>,
    pub generated_tokens: u64,
    /// Thoughts that the context ended.
    pub unended: u64,
    #[serde(default)]
    pub counters: PassCounters,
}

/// Of the budget slot, during one pass; empty where the scheduler has none.
#[derive(Clone, Debug, Default, Deserialize, serde::Serialize)]
#[serde(default)]
pub(super) struct PassCounters {
    pub forced: BTreeMap<String, u64>,
    pub missed: u64,
    pub probes: ProbeCounters,
    pub probe_tokens: u64,
}

/// Probes that were due, that ran, and that were given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, serde::Serialize)]
#[serde(default)]
pub(super) struct ProbeCounters {
    pub asked: u64,
    pub done: u64,
    pub dropped: u64,
}

impl SolvedRun {
    /// Read one that was asked for these passes, of so many problems and samples of each.
    pub(super) fn read(path: &Path, passes: &[Option<u32>], asked: PassShape) -> anyhow::Result<Self> {
        let (name, run): (_, Self) = parsed(path, "passes as `early_exit_run` writes them")?;
        let made: Vec<Option<u32>> = run.passes.iter().map(|pass| pass.budget).collect();
        ensure!(made == passes, "{name}: passes: budgets {}: expected {}", shown(&made), shown(passes));
        for (at, pass) in run.passes.iter().enumerate() {
            pass.check(&format!("{name}: passes[{at}]"), asked)?;
        }
        Ok(run)
    }
}

/// What a pass has to hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassShape {
    pub problems: usize,
    /// Of each problem.
    pub samples: usize,
}

impl SolvedPass {
    fn check(&self, named: &str, asked: PassShape) -> anyhow::Result<()> {
        let PassShape { problems, samples } = asked;
        let (think_tokens, right) = (&self.think_tokens, &self.right);
        for (field, rows) in [("think_tokens", think_tokens.len()), ("right", right.len())] {
            ensure!(rows == problems, "{named}.{field}: {rows} problems: expected {problems}");
        }
        let lengths = think_tokens.iter().map(Vec::len).zip(right.iter().map(Vec::len));
        let wrong = lengths.enumerate().find(|(_, lengths)| *lengths != (samples, samples));
        if let Some((at, (tokens, rights))) = wrong {
            let given = if tokens == samples { rights } else { tokens };
            anyhow::bail!("{named}: problem {at} has {given} samples: expected {samples}");
        }
        let longest = think_tokens.iter().flatten().copied().max().unwrap_or(0);
        within(&format!("{named}.think_tokens:"), longest, &(0..=MAX_TOKENS))?;
        within(&format!("{named}.right:"), right.iter().flatten().copied().max().unwrap_or(0), &(0..=1))?;
        ensure!(self.wall_s >= 0.0, "{named}.wall_s {}: expected a time of at least 0", self.wall_s);
        Ok(())
    }

    /// Means over the samples of each problem.
    pub(super) fn means(&self) -> ProblemMeans {
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
        ProblemMeans {
            tokens: self.think_tokens.iter().map(|of| mean(of.iter().copied().map(f64::from).collect())).collect(),
            right: self.right.iter().map(|of| mean(of.iter().copied().map(f64::from).collect())).collect(),
        }
    }
}

fn shown(budgets: &[Option<u32>]) -> String {
    let names = budgets.iter().map(|budget| budget.map_or_else(|| "none".to_owned(), |tokens| tokens.to_string()));
    names.collect::<Vec<_>>().join(", ")
}

/// The name of the file, and what it holds.
fn parsed<T: DeserializeOwned>(path: &Path, expected: &str) -> anyhow::Result<(String, T)> {
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let text = read_text(path, MAX_RUN_BYTES)?;
    let found = serde_json::from_str(&text).with_context(|| format!("{name}: expected {expected}"))?;
    Ok((name, found))
}

//! A policy that is asked with a tap on it, as a slot does it.
#![allow(dead_code, reason = "each test file uses a part")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use meridian_core::slot::{Version, Witness};
use meridian_core::{Asked, Batch, Dispatch, Fault, FaultKind, GuardedPolicy, Policy, Step, Targets, native};
use meridian_engine::recording::{
    Outcome, Recordable, Recorded, Recorder, RecorderSettings, Recording, SlotSetup, Tap,
};

pub const TARGETS: Targets =
    Targets { output_tpot_budget_ms: 20.0, think_tpot_budget_ms: 80.0, think_batch_multiplier: 2.5, max_defer_ms: 2e3 };
pub const SETUP: SlotSetup = SlotSetup { targets: TARGETS, deadline_ms: 2.0, memory_mib: 64 };

/// A name in the tests' folder at which there is nothing.
pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("recording-{name}"));
    let _ = fs::remove_dir_all(&folder);
    folder
}

/// Batches are written when a test says so.
pub fn settings(dir: &Path) -> RecorderSettings {
    RecorderSettings { batch_age: Duration::from_secs(3600), ..RecorderSettings::new(dir.into(), 64) }
}

/// Recordings in a folder, in the order of their numbers.
pub fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

pub fn open_all(dir: &Path) -> Vec<Recording> {
    files(dir).iter().map(|path| Recording::open(path).unwrap()).collect()
}

pub fn native<K: Recordable>(name: &str) -> Box<dyn Policy<K>> {
    native::policy(name, TARGETS, "{}").unwrap()
}

pub struct Drive<K: Recordable> {
    tap: Tap<K>,
    seat: GuardedPolicy<K>,
    id: u64,
    version: Version,
    decision: K::Decision,
    columns: Vec<f32>,
}

impl<K: Recordable> Drive<K> {
    pub fn new(recorder: &Recorder, policy: Box<dyn Policy<K>>, name: &str) -> Self {
        let version = version(name);
        let seat = GuardedPolicy::new(policy);
        Self { tap: recorder.tap(SETUP), seat, id: 0, version, decision: K::Decision::default(), columns: Vec::new() }
    }

    /// Put another policy in its place.
    pub fn change(&mut self, policy: Box<dyn Policy<K>>, name: &str) {
        self.seat = GuardedPolicy::new(policy);
        self.version = version(name);
        self.id += 1;
    }

    /// Ask the policy what `row` holds, and record it.
    pub fn decide(&mut self, row: &Recorded<K>) -> Asked {
        let Self { tap, seat, id, version, decision, columns } = self;
        let fill = |inputs: &[K::Column], out: &mut Vec<f32>| fill::<K>(row, inputs, out);
        tap.before(*id, version, seat);
        fill(seat.policy().inputs(), columns);
        let batch = Batch { facts: &row.facts, candidates: row.candidates, columns, finished: &row.finished };
        let asked = seat.ask(&batch, decision);
        tap.after(&batch, &fill, &asked, decision);
        asked
    }

    /// Record what `row` holds as if a policy had answered it.
    pub fn record_made_up(&mut self, row: &Recorded<K>) {
        let asked = match row.outcome {
            Outcome::Decided => Asked::Decided,
            Outcome::LeftToDefault => Asked::LeftToDefault,
            Outcome::Faulted(kind) => Asked::Faulted(vec![Fault::new(kind, "made up")]),
            Outcome::NotAsked => Asked::Faulted(Vec::new()),
        };
        self.tap.before(self.id, &self.version, &mut self.seat);
        let batch = Batch { facts: &row.facts, candidates: row.candidates, columns: &[], finished: &row.finished };
        self.tap.after(&batch, &|inputs, out| fill::<K>(row, inputs, out), &asked, &row.decision);
    }
}

pub fn version(name: &str) -> Version {
    Version { name: name.into(), version: "1".into(), source: format!("native:{name}"), ..Version::default() }
}

fn fill<K: Recordable>(row: &Recorded<K>, inputs: &[K::Column], out: &mut Vec<f32>) {
    out.clear();
    for input in inputs {
        let index = K::COLUMNS.iter().position(|column| column == input).unwrap();
        out.extend_from_slice(&row.columns[index * row.candidates..][..row.candidates]);
    }
}

/// A step that differs from the one before: made by a recurrence, so that it is the same in every run.
pub fn dispatch_row(seq: u64, candidates: usize) -> Recorded<Dispatch> {
    let mut state = seq.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut columns = Vec::new();
    for column in 0..Dispatch::COLUMNS.len() {
        let below = if column < 2 { 3 } else { 5000 };
        columns.extend((0..candidates).map(|_| next(below) as f32));
    }
    let facts = Step {
        now_ms: seq as f64 * 20.0,
        token_budget: 2048,
        running: candidates as u32,
        running_output: next(8) as u32,
        running_think: next(8) as u32,
        decode_tokens: 1,
        fixed_ms: 4.0,
        decode_token_ms: 0.02,
        prefill_token_ms: 0.01,
        ..Step::default()
    };
    Recorded { seq, facts, candidates, columns, ..Recorded::default() }
}

/// How a row of another slot is made of a step.
pub fn row_of<K: Recordable>(seq: u64, candidates: usize, facts: K::Facts) -> Recorded<K> {
    let Recorded { columns, .. } = dispatch_row(seq, candidates);
    let columns = columns.into_iter().cycle().take(K::COLUMNS.len() * candidates).collect();
    Recorded { seq, facts, candidates, columns, ..Recorded::default() }
}

pub fn fault(kind: FaultKind) -> Fault {
    Fault::new(kind, "as made")
}

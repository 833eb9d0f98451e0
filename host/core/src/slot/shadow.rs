//! A contender beside the active policy, on its own thread: it sees the same steps and changes nothing, however long it
//! takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use super::compare::Compare;
use super::faults::FaultLog;
use super::loaded::LoadedPolicy;
use super::report::{FaultBatch, ShadowStatus, Version};
use super::swap::{Contender, Remake};
use super::{MAX_FINISHED, told};
use crate::sync::{Mutex, lock};
use crate::{Asked, Batch, GuardedPolicy, SlotKind};

/// Steps that may wait for the shadow; a step that finds no room is skipped.
const QUEUE: usize = 4;

struct Job<K: SlotKind> {
    facts: K::Facts,
    candidates: usize,
    columns: Vec<f32>,
    finished: Vec<u32>,
    /// The active decision of the step.
    active: K::Decision,
}

/// The decision thread's end of a shadow.
pub(super) struct Shadow<K: SlotKind> {
    inputs: Vec<K::Column>,
    weighs_signals_alone: bool,
    /// Ended requests of steps that found no room.
    untold: Vec<u32>,
    jobs: SyncSender<Job<K>>,
    progress: Arc<Progress>,
    remake: Option<Remake<K>>,
    thread: JoinHandle<GuardedPolicy<K>>,
}

/// The state of a shadow that both threads and status requests share.
pub(super) struct Progress {
    version: Version,
    /// Counted by the deciding thread, without a lock.
    skipped: AtomicU64,
    sums: Mutex<Sums>,
}

#[derive(Default)]
struct Sums {
    compared: u64,
    ranked: u64,
    faults: u64,
    rank_correlation: f64,
    top_overlap: f64,
    differences: u64,
    deciding_us: f64,
}

impl<K: SlotKind> Shadow<K> {
    pub(super) fn start(contender: Contender<K>, faults: Arc<Mutex<FaultLog>>) -> std::io::Result<Self> {
        let Contender { policy, version, remake } = contender;
        let guarded = GuardedPolicy::new(policy);
        let (jobs, queue) = sync_channel(QUEUE);
        let progress = Arc::new(Progress { version, skipped: AtomicU64::new(0), sums: Mutex::new(Sums::default()) });
        let (inputs, weighs_signals_alone) =
            (guarded.policy().inputs().to_vec(), guarded.policy().weighs_signals_alone());
        let seen = Arc::clone(&progress);
        let thread = std::thread::Builder::new()
            .name("meridian-shadow".into())
            .spawn(move || compare_all(guarded, &queue, &seen, &faults))?;
        Ok(Self { inputs, weighs_signals_alone, untold: Vec::new(), jobs, progress, remake, thread })
    }

    /// The columns it reads.
    pub(super) fn inputs(&self) -> &[K::Column] {
        &self.inputs
    }

    /// See [`Policy::weighs_signals_alone`](crate::Policy::weighs_signals_alone).
    pub(super) fn weighs_signals_alone(&self) -> bool {
        self.weighs_signals_alone
    }

    /// Queue a batch with its decision for comparison. Copies a few kilobytes; never waits.
    pub(super) fn see(
        &mut self,
        facts: &K::Facts,
        candidates: usize,
        finished: &[u32],
        fill: impl Fn(&[K::Column], &mut Vec<f32>),
        active: &K::Decision,
    ) {
        let mut columns = Vec::new();
        fill(&self.inputs, &mut columns);
        let mut finished = told::<K>(&self.inputs, finished).to_vec();
        finished.splice(..0, self.untold.drain(..));
        let job = Job { facts: *facts, candidates, columns, finished, active: active.clone() };
        if let Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) = self.jobs.try_send(job) {
            self.progress.skipped.fetch_add(1, Ordering::Relaxed);
            self.untold = job.finished;
            let excess = self.untold.len().saturating_sub(MAX_FINISHED);
            self.untold.drain(..excess);
        }
    }

    pub(super) fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// Stop, and return the policy with the state it has gathered. Waits for the steps in its queue; `None` when the
    /// policy panicked.
    pub(super) fn stop(self) -> Option<LoadedPolicy<K>> {
        let Self { inputs: _, weighs_signals_alone: _, untold: _, jobs, progress, remake, thread } = self;
        drop(jobs);
        let guarded = thread.join().ok()?;
        Some(LoadedPolicy::new(guarded, progress.version.clone(), remake))
    }

    /// The version of the shadow.
    pub(super) fn version(&self) -> &Version {
        &self.progress.version
    }
}

impl Progress {
    pub(super) fn status(&self) -> ShadowStatus {
        let sums = lock(&self.sums);
        let mean = |sum: f64, count: u64| if count == 0 { 0.0 } else { sum / count as f64 };
        ShadowStatus {
            version: self.version.clone(),
            compared: sums.compared,
            skipped: self.skipped.load(Ordering::Relaxed),
            faults: sums.faults,
            rank_correlation: mean(sums.rank_correlation, sums.ranked),
            top_overlap: mean(sums.top_overlap, sums.ranked),
            differences: sums.differences,
            deciding_us: mean(sums.deciding_us, sums.compared),
        }
    }
}

fn compare_all<K: SlotKind>(
    mut guarded: GuardedPolicy<K>,
    queue: &Receiver<Job<K>>,
    progress: &Progress,
    faults: &Mutex<FaultLog>,
) -> GuardedPolicy<K> {
    let mut decision = K::Decision::default();
    let mut compare = Compare::default();
    for job in queue {
        let Job { facts, candidates, columns, finished, active } = job;
        let started = Instant::now();
        let asked =
            guarded.ask(&Batch { facts: &facts, candidates, columns: &columns, finished: &finished }, &mut decision);
        let took_us = started.elapsed().as_secs_f64() * 1e6;
        if let Asked::Faulted(now) = asked {
            lock(&progress.sums).faults += now.len() as u64;
            for (i, fault) in now.iter().enumerate() {
                let batch = (i == 0).then(|| FaultBatch::of::<K>(guarded.policy().inputs(), &columns, &facts));
                let version = &progress.version;
                lock(faults).push(K::NAME, version, true, K::now_ms(&facts), candidates, fault, batch);
            }
            continue;
        }
        let (one, other) = (K::keys(&active), K::keys(&decision));
        let ranks = candidates > 1 && one.len() == candidates && other.len() == candidates;
        let orders = ranks.then(|| compare.orders(one, other));
        let differences = K::differences(&active, &decision);
        let sums = &mut *lock(&progress.sums);
        sums.compared += 1;
        sums.deciding_us += took_us;
        sums.differences += differences;
        if let Some((correlation, overlap)) = orders {
            sums.ranked += 1;
            sums.rank_correlation += correlation;
            sums.top_overlap += overlap;
        }
    }
    guarded
}

//! A candidate beside the active policy, on a thread of its own: it sees the same steps and changes nothing, however long
//! it takes.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use meridian_core::{Asked, Batch, PolicySeat, SlotKind};

use super::faults::FaultLog;
use crate::compare::Compare;
use crate::control::{FaultBatch, ShadowStatus, Version};
use crate::sync::{Mutex, lock};

/// Steps that may wait for the shadow; a step that finds no room is not compared.
const QUEUE: usize = 4;

struct Job<K: SlotKind> {
    facts: K::Facts,
    candidates: usize,
    columns: Vec<f32>,
    /// What the step was decided by.
    active: K::Decision,
}

/// The decision thread's end of a shadow.
pub(super) struct Shadow<K: SlotKind> {
    inputs: Vec<K::Column>,
    jobs: SyncSender<Job<K>>,
    status: Arc<Mutex<Sums>>,
    thread: JoinHandle<PolicySeat<K>>,
}

#[derive(Default)]
struct Sums {
    version: Version,
    compared: u64,
    ranked: u64,
    skipped: u64,
    faults: u64,
    rank_correlation: f64,
    top_overlap: f64,
    differences: u64,
    deciding_us: f64,
}

impl<K: SlotKind> Shadow<K> {
    pub(super) fn start(seat: PolicySeat<K>, version: Version, faults: Arc<Mutex<FaultLog>>) -> std::io::Result<Self> {
        let (jobs, queue) = sync_channel(QUEUE);
        let status = Arc::new(Mutex::new(Sums { version, ..Sums::default() }));
        let inputs = seat.policy().inputs().to_vec();
        let sums = Arc::clone(&status);
        let thread = std::thread::Builder::new()
            .name("meridian-shadow".into())
            .spawn(move || compare_all(seat, &queue, &sums, &faults))?;
        Ok(Self { inputs, jobs, status, thread })
    }

    /// Have a batch compared with its decision. Copies a few kilobytes; never waits.
    pub(super) fn see(
        &self,
        facts: &K::Facts,
        candidates: usize,
        fill: impl Fn(&[K::Column], &mut Vec<f32>),
        active: &K::Decision,
    ) {
        let mut columns = Vec::new();
        fill(&self.inputs, &mut columns);
        let job = Job { facts: *facts, candidates, columns, active: active.clone() };
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.jobs.try_send(job) {
            lock(&self.status).skipped += 1;
        }
    }

    pub(super) fn status(&self) -> ShadowStatus {
        let sums = lock(&self.status);
        let mean = |sum: f64, count: u64| if count == 0 { 0.0 } else { sum / count as f64 };
        ShadowStatus {
            version: sums.version.clone(),
            compared: sums.compared,
            skipped: sums.skipped,
            faults: sums.faults,
            rank_correlation: mean(sums.rank_correlation, sums.ranked),
            top_overlap: mean(sums.top_overlap, sums.ranked),
            differences: sums.differences,
            deciding_us: mean(sums.deciding_us, sums.compared),
        }
    }

    /// Stop, and give the policy's seat back with the state it has gathered. Waits for the steps in its queue; `None` when the
    /// policy panicked.
    pub(super) fn stop(self) -> Option<(PolicySeat<K>, Version)> {
        let Self { inputs: _, jobs, status, thread } = self;
        drop(jobs);
        let seat = thread.join().ok()?;
        let version = lock(&status).version.clone();
        Some((seat, version))
    }
}

fn compare_all<K: SlotKind>(
    mut seat: PolicySeat<K>,
    queue: &Receiver<Job<K>>,
    sums: &Mutex<Sums>,
    faults: &Mutex<FaultLog>,
) -> PolicySeat<K> {
    let mut decision = K::Decision::default();
    let mut compare = Compare::default();
    for job in queue {
        let Job { facts, candidates, columns, active } = job;
        let started = Instant::now();
        let asked = seat.ask(&Batch { facts: &facts, candidates, columns: &columns }, &mut decision);
        let took_us = started.elapsed().as_secs_f64() * 1e6;
        let sums = &mut *lock(sums);
        if let Asked::Faulted(now) = asked {
            for (i, fault) in now.iter().enumerate() {
                sums.faults += 1;
                let batch = (i == 0).then(|| FaultBatch::of::<K>(seat.policy().inputs(), &columns, &facts));
                lock(faults).push(K::NAME, &sums.version, true, K::now_ms(&facts), candidates, fault, batch);
            }
            continue;
        }
        sums.compared += 1;
        sums.deciding_us += took_us;
        sums.differences += K::differences(&active, &decision);
        let (one, other) = (K::keys(&active), K::keys(&decision));
        if candidates > 1 && one.len() == candidates && other.len() == candidates {
            let (correlation, overlap) = compare.orders(one, other);
            sums.ranked += 1;
            sums.rank_correlation += correlation;
            sums.top_overlap += overlap;
        }
    }
    seat
}

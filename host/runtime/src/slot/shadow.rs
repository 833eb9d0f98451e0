//! A candidate beside the active policy, on a thread of its own: it sees the same steps and changes nothing, however long
//! it takes.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use meridian_core::{Asked, Batch, Column, Decision, PolicySeat, Ranker, RequestTable, Slot, Step, columns};

use super::faults::FaultLog;
use crate::control::{ShadowStatus, SlotName, Version};
use crate::sync::{Mutex, lock};

/// Steps that may wait for the shadow; a step that finds no room is not compared.
const QUEUE: usize = 4;
/// How many of the first candidates are compared as a set.
const TOP: usize = 8;

struct Job {
    step: Step,
    candidates: usize,
    columns: Vec<f32>,
    /// What the step was decided by.
    active: Decision,
}

/// The decision thread's end of a shadow.
pub(super) struct Shadow {
    inputs: Vec<Column>,
    jobs: SyncSender<Job>,
    status: Arc<Mutex<Sums>>,
    thread: JoinHandle<PolicySeat>,
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
    budget_differs: u64,
    deciding_us: f64,
}

impl Shadow {
    pub(super) fn start(seat: PolicySeat, version: Version, faults: Arc<Mutex<FaultLog>>) -> std::io::Result<Self> {
        let (jobs, queue) = sync_channel(QUEUE);
        let status = Arc::new(Mutex::new(Sums { version, ..Sums::default() }));
        let inputs = seat.policy().inputs().to_vec();
        let sums = Arc::clone(&status);
        let thread = std::thread::Builder::new()
            .name("meridian-shadow".into())
            .spawn(move || compare_all(seat, &queue, &sums, &faults))?;
        Ok(Self { inputs, jobs, status, thread })
    }

    /// Have a step compared with its decision. Copies a few kilobytes; never waits.
    pub(super) fn see(
        &self,
        step: &Step,
        table: &RequestTable,
        candidates: &[Slot],
        block_tokens: u32,
        active: &Decision,
    ) {
        let mut values = Vec::new();
        columns::fill(&self.inputs, table, candidates, step.now_ms, block_tokens, &mut values);
        let job = Job { step: *step, candidates: candidates.len(), columns: values, active: active.clone() };
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
            budget_differs: sums.budget_differs,
            deciding_us: mean(sums.deciding_us, sums.compared),
        }
    }

    /// Stop, and give the policy's seat back with the state it has gathered. Waits for the steps in its queue; `None` when the
    /// policy panicked.
    pub(super) fn stop(self) -> Option<(PolicySeat, Version)> {
        let Self { inputs: _, jobs, status, thread } = self;
        drop(jobs);
        let seat = thread.join().ok()?;
        let version = lock(&status).version.clone();
        Some((seat, version))
    }
}

fn compare_all(
    mut seat: PolicySeat,
    queue: &Receiver<Job>,
    sums: &Mutex<Sums>,
    faults: &Mutex<FaultLog>,
) -> PolicySeat {
    let mut decision = Decision::default();
    let mut compare = Compare::default();
    for job in queue {
        let Job { step, candidates, columns, active } = job;
        let started = Instant::now();
        let asked = seat.ask(&Batch { step: &step, candidates, columns: &columns }, &mut decision);
        let took_us = started.elapsed().as_secs_f64() * 1e6;
        let sums = &mut *lock(sums);
        if let Asked::Faulted(now) = asked {
            for (i, fault) in now.iter().enumerate() {
                sums.faults += 1;
                let batch = (i == 0).then_some((seat.policy().inputs(), &columns[..], &step));
                lock(faults).push(SlotName::Dispatch, &sums.version, true, step.now_ms, candidates, fault, batch);
            }
            continue;
        }
        sums.compared += 1;
        sums.deciding_us += took_us;
        sums.budget_differs += u64::from(decision.token_budget != active.token_budget);
        if candidates > 1 && decision.keys.len() == candidates && active.keys.len() == candidates {
            let (correlation, overlap) = compare.orders(&active.keys, &decision.keys);
            sums.ranked += 1;
            sums.rank_correlation += correlation;
            sums.top_overlap += overlap;
        }
    }
    seat
}

/// How far two sets of keys put the candidates in the same order.
#[derive(Default)]
struct Compare {
    ranker: Ranker,
    order: Vec<u32>,
    ranks: [Vec<u32>; 2],
}

impl Compare {
    /// Spearman's rank correlation of two orders of the same candidates (at least two), and the share of the first 8 that
    /// both put first.
    fn orders(&mut self, one: &[f32], other: &[f32]) -> (f64, f64) {
        let Self { ranker, order, ranks } = self;
        for (keys, ranks) in [one, other].into_iter().zip(ranks.iter_mut()) {
            ranks.clear();
            if ranker.rank(keys, &[], order) {
                ranks.resize(keys.len(), 0);
                for (rank, from) in (0..).zip(&*order) {
                    ranks[*from as usize] = rank;
                }
            } else {
                ranks.extend(0..u32::try_from(keys.len()).unwrap_or(u32::MAX));
            }
        }
        let [one, other] = &*ranks;
        let n = one.len() as f64;
        let squared: f64 = one.iter().zip(other).map(|(a, b)| f64::from(a.abs_diff(*b)).powi(2)).sum();
        let top = TOP.min(one.len());
        let both = one.iter().zip(other).filter(|(a, b)| (**a as usize) < top && (**b as usize) < top).count();
        (1.0 - 6.0 * squared / (n * (n * n - 1.0)), both as f64 / top as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_compared() {
        let mut compare = Compare::default();
        assert_eq!(compare.orders(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]), (1.0, 1.0));
        assert_eq!(compare.orders(&[1.0, 2.0, 3.0], &[6.0, 5.0, 4.0]), (-1.0, 1.0));
        let (one, other): (Vec<f32>, Vec<f32>) =
            ((0..16).map(|i| i as f32).collect(), (0..16).map(|i| -(i as f32)).collect());
        assert_eq!(compare.orders(&one, &other), (-1.0, 0.0));
        assert_eq!(compare.orders(&[f32::NAN, 1.0], &[2.0, 1.0]), (1.0, 1.0));
    }
}

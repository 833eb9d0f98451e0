//! The trial of a policy before it sees traffic.

use std::time::{Duration, Instant};

use thiserror::Error;

use super::{Contender, told};
use crate::{Batch, Fault, FaultKind, SlotKind};

/// Numbers of candidates in the trial batches: none, one, a small batch, a large one.
const SIZES: [u32; 4] = [0, 1, 64, 1024];
/// Requests that have ended before a trial batch, for each candidate: one that it has seen, and others. The largest batch has
/// as many as an engine tells at once.
const ENDED_PER_CANDIDATE: u32 = 16;

/// The result of the trial batches.
///
/// ```
/// use meridian_core::slot::Contender;
/// use meridian_core::{Dispatch, SchedulerConfig, native};
///
/// let policy = native::policy::<Dispatch>("noop", SchedulerConfig::default().targets(), "{}")?;
/// let trial = Contender::new(policy, "", "native:noop").try_out().expect("it does not fault");
/// assert!(!trial.decides, "it leaves every batch to the default");
/// # Ok::<(), native::NativeError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trial {
    /// Whether it decided any batch, or left every one to the default.
    pub decides: bool,
    /// Time of the slowest batch. No decision depends on it: other work on the machine makes it longer.
    pub slowest: Duration,
    /// Candidates of that batch.
    pub slowest_candidates: usize,
}

/// A contender faulted before it saw traffic.
///
/// ```
/// use meridian_core::slot::TrialFault;
/// use meridian_core::{Fault, FaultKind};
///
/// let fault = TrialFault::Restart(Fault::new(FaultKind::Init, "no memory"));
/// assert_eq!(fault.to_string(), "did not start again after its trial: init: no memory");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TrialFault {
    /// It did not decide a batch.
    #[error("faulted on a trial batch of {candidates} candidates (batch {number} of {batches}): {fault}")]
    Batch {
        /// Size of the batch.
        candidates: usize,
        /// Its number, from 1.
        number: usize,
        /// How many batches a trial has.
        batches: usize,
        /// The fault.
        fault: Fault,
    },
    /// It decided every batch, and then did not hand over its state, or take it over.
    #[error("faulted on a handover of its state after its trial: {0}")]
    Handover(Fault),
    /// It decided every batch, and then did not restart.
    #[error("did not start again after its trial: {0}")]
    Restart(Fault),
}

impl<K: SlotKind> Contender<K> {
    /// Make it decide a few made-up batches, and hand over its state: the first calls of an instance are its slowest, and a
    /// policy that fails here never sees traffic. Then it restarts, to forget the made-up facts.
    ///
    /// # Errors
    /// The fault, with the batch.
    pub fn warm_up(&mut self) -> Result<Trial, TrialFault> {
        let trial = self.try_out()?;
        let handover = self.policy.snapshot().and_then(|state| self.policy.restore(&state));
        // A swap goes on without the state of a policy that keeps none, or is slow.
        if let Err(fault) = handover
            && !matches!(fault.kind, FaultKind::Init | FaultKind::Deadline)
        {
            return Err(TrialFault::Handover(fault));
        }
        self.policy.start_anew().map_err(TrialFault::Restart)?;
        Ok(trial)
    }

    /// The same, without the restart: it keeps its state.
    ///
    /// # Errors
    /// As [`Contender::warm_up`].
    pub fn try_out(&mut self) -> Result<Trial, TrialFault> {
        let mut decision = K::Decision::default();
        let mut trial = Trial::default();
        let batches: Vec<_> =
            SIZES.into_iter().flat_map(|size| K::trials(size).into_iter().map(move |facts| (size, facts))).collect();
        for (i, (candidates, facts)) in batches.iter().enumerate() {
            let (ended, candidates) = (candidates * ENDED_PER_CANDIDATE, *candidates as usize);
            let columns = vec![1.0; candidates * self.policy.inputs().len()];
            let ended: Vec<u32> = (1..=ended).collect();
            let finished = told::<K>(self.policy.inputs(), &ended);
            let batch = Batch { facts, candidates, columns: &columns, finished };
            K::clear(&mut decision);
            let started = Instant::now();
            let decided = self.policy.try_out(&batch, &mut decision);
            let took = started.elapsed();
            decided.and_then(|()| K::check(batch.facts, &decision, candidates)).map_err(|fault| TrialFault::Batch {
                candidates,
                number: i + 1,
                batches: batches.len(),
                fault,
            })?;
            if took >= trial.slowest {
                (trial.slowest, trial.slowest_candidates) = (took, candidates);
            }
            trial.decides |= candidates > 0 && K::is_decided(&decision, candidates);
        }
        Ok(trial)
    }
}

//! The deciding thread's end of a recording.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use meridian_core::slot::{Fill, Version, Witness};
use meridian_core::{Asked, Batch, GuardedPolicy, SlotKind, Targets};

use super::kinds::Recordable;
use super::recorder::{Item, Progress, Queued};
use super::row::{Outcome, RecordedPolicy};

/// The settings that every policy of a slot starts with.
///
/// ```
/// use meridian_core::MeridianConfig;
/// use meridian_engine::recording::SlotSetup;
///
/// let config = MeridianConfig::default();
/// let setup = SlotSetup { targets: config.scheduler.targets(), deadline_ms: 2.0, memory_mib: 64 };
/// assert_eq!(setup.memory_mib, config.policy.dispatch.memory_mib);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlotSetup {
    /// The deployment's targets.
    pub targets: Targets,
    /// Longest time of one decision, milliseconds.
    pub deadline_ms: f32,
    /// Most linear memory, MiB.
    pub memory_mib: u32,
}

/// The state that a slot's tap and the writer share.
#[derive(Debug, Default)]
pub struct Shared {
    /// The writer wants to start a file, which needs the policy's state.
    pub(super) wants_snapshot: AtomicBool,
    /// Decisions that were not recorded.
    pub(super) dropped: AtomicU64,
}

/// Most candidates of a recorded decision; a larger one counts as dropped.
pub const MAX_CANDIDATES: usize = 16_384;
/// Decisions to skip after a record with a state above [`LARGE_STATE`] found no room, because each try copies the
/// state.
const PAUSE: u32 = 64;
/// Bytes.
const LARGE_STATE: usize = 4096;
/// Records whose memory is kept for the next ones.
const POOL: usize = 64;

/// Copies the decisions of a slot for the [`Recorder`](super::Recorder). It never waits: it drops and counts records
/// that find no room. [`SlotControl::record`](meridian_core::slot::SlotControl::record) puts it into a slot.
///
/// ```
/// use meridian_core::slot::{Version, Witness};
/// use meridian_core::{Batch, Decision, Dispatch, MeridianConfig, GuardedPolicy, Step, native};
/// use meridian_engine::recording::{Recorder, RecorderSettings, SlotSetup};
///
/// let dir = std::env::temp_dir().join(format!("tap-{}", std::process::id()));
/// let targets = MeridianConfig::default().scheduler.targets();
/// let recorder = Recorder::start(RecorderSettings::new(dir.clone(), 16))?;
/// let mut tap = recorder.tap::<Dispatch>(SlotSetup { targets, deadline_ms: 2.0, memory_mib: 64 });
/// let mut policy = GuardedPolicy::<Dispatch>::new(native::policy("fcfs", targets, "{}").unwrap());
///
/// let (step, mut decision) = (Step::default(), Decision::default());
/// tap.before(0, &Version { source: "native:fcfs".into(), ..Version::default() }, &mut policy);
/// let batch = Batch { facts: &step, candidates: 0, columns: &[], finished: &[] };
/// let asked = policy.ask(&batch, &mut decision);
/// tap.after(&batch, &|_, columns| columns.clear(), &asked, &decision);
/// recorder.close();
/// assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
/// # std::fs::remove_dir_all(&dir).unwrap();
/// # Ok::<(), String>(())
/// ```
pub struct Tap<K: Recordable> {
    queue: SyncSender<Item>,
    progress: Arc<Progress>,
    shared: Arc<Shared>,
    setup: SlotSetup,
    /// Written records return here.
    free: Receiver<Box<Queued<K>>>,
    home: SyncSender<Box<Queued<K>>>,
    /// Number of the next decision.
    seq: u64,
    /// The latest stay, and its policy.
    policy: Option<(u64, Arc<RecordedPolicy>)>,
    /// Decisions to skip before the next try.
    pause: u32,
    /// A record was dropped since the last record that was sent.
    has_gap: bool,
    /// The policy faulted since it last decided.
    has_faulted: bool,
    /// The policy has faulted when asked for its state.
    is_mute: bool,
    /// State for the current decision.
    snapshot: Option<Vec<u8>>,
}

impl<K: Recordable> Tap<K> {
    pub(super) fn new(queue: SyncSender<Item>, progress: Arc<Progress>, shared: Arc<Shared>, setup: SlotSetup) -> Self {
        let (home, free) = sync_channel(POOL);
        Self {
            queue,
            progress,
            shared,
            setup,
            free,
            home,
            seq: 0,
            policy: None,
            pause: 0,
            has_gap: false,
            has_faulted: false,
            is_mute: false,
            snapshot: None,
        }
    }

    fn recorded(&self, version: &Version, policy: &GuardedPolicy<K>) -> RecordedPolicy {
        let name = |column: &K::Column| {
            let index = K::COLUMNS.iter().position(|known| known == column);
            index.map_or_else(|| format!("{column:?}"), |index| K::COLUMN_NAMES[index].to_owned())
        };
        RecordedPolicy {
            version: version.clone(),
            inputs: policy.policy().inputs().iter().map(name).collect(),
            options: if version.options.is_empty() { "{}".into() } else { version.options.clone() },
            targets: self.setup.targets.into(),
            deadline_ms: self.setup.deadline_ms,
            memory_mib: self.setup.memory_mib,
        }
    }

    /// The policy's state; empty if it gives none. A policy that faults here loses its state as with any other fault,
    /// so it is asked only once.
    fn state_of(&mut self, policy: &mut GuardedPolicy<K>) -> Vec<u8> {
        if self.is_mute || !policy.is_ready() {
            return Vec::new();
        }
        policy.policy_mut().snapshot().unwrap_or_else(|fault| {
            tracing::warn!(slot = K::NAME.label(), %fault, "a policy faulted when its state was to be recorded");
            self.is_mute = true;
            self.has_faulted = true;
            // The slot meets a failure again, at the decision.
            let _ = policy.recover();
            Vec::new()
        })
    }

    fn drop_record(&mut self) {
        self.shared.dropped.fetch_add(1, Ordering::Relaxed);
        self.pause = self.pause.saturating_sub(1);
        self.has_gap = true;
    }
}

impl<K: Recordable> Witness<K> for Tap<K> {
    fn before(&mut self, stay: u64, version: &Version, policy: &mut GuardedPolicy<K>) {
        self.snapshot = None;
        if self.progress.closing.load(Ordering::Relaxed) || self.progress.broken.load(Ordering::Relaxed) {
            return;
        }
        let is_new = self.policy.as_ref().is_none_or(|(id, _)| *id != stay);
        if is_new {
            self.policy = Some((stay, Arc::new(self.recorded(version, policy))));
            self.has_faulted = false;
            self.is_mute = false;
        }
        if self.pause > 0 {
            return;
        }
        // If this races with the writer's wish, the other order costs one more snapshot.
        let wants = self.shared.wants_snapshot.load(Ordering::Relaxed)
            && self.shared.wants_snapshot.swap(false, Ordering::Relaxed);
        if is_new || wants || self.has_gap {
            self.snapshot = Some(self.state_of(policy));
        }
    }

    fn after(&mut self, batch: &Batch<'_, K>, fill: &Fill<'_, K>, asked: &Asked, decision: &K::Decision) {
        let Batch { facts, candidates, finished, .. } = *batch;
        let seq = self.seq;
        self.seq += 1;
        if self.progress.closing.load(Ordering::Relaxed) {
            return;
        }
        let outcome = match asked {
            Asked::Decided => Outcome::Decided,
            Asked::LeftToDefault => Outcome::LeftToDefault,
            Asked::Faulted(faults) => faults.first().map_or(Outcome::NotAsked, |fault| Outcome::Faulted(fault.kind)),
        };
        let was_asked = outcome != Outcome::NotAsked;
        let restarted = was_asked && std::mem::take(&mut self.has_faulted);
        self.has_faulted |= matches!(asked, Asked::Faulted(_));
        let can_send = self.pause == 0 && candidates <= MAX_CANDIDATES && !self.progress.broken.load(Ordering::Relaxed);
        let Some((_, policy)) = self.policy.as_ref().filter(|_| can_send) else { return self.drop_record() };
        let mut record = self.free.try_recv().unwrap_or_else(|_| Queued::boxed(self.home.clone(), Arc::clone(policy)));
        if !Arc::ptr_eq(&record.policy, policy) {
            record.policy = Arc::clone(policy);
        }
        let row = &mut record.row;
        row.seq = seq;
        row.outcome = outcome;
        row.restarted = restarted;
        row.snapshot = self.snapshot.take();
        row.facts = *facts;
        row.candidates = candidates;
        row.finished.clear();
        row.finished.extend_from_slice(finished);
        fill(K::COLUMNS, &mut row.columns);
        if matches!(outcome, Outcome::Decided | Outcome::LeftToDefault) {
            K::copy(decision, &mut row.decision);
        } else {
            K::clear(&mut row.decision);
        }
        let is_large = row.snapshot.as_ref().is_some_and(|state| state.len() > LARGE_STATE);
        match self.queue.try_send(K::item(record)) {
            Ok(()) => self.has_gap = false,
            Err(_) => {
                self.drop_record();
                self.pause = if is_large { PAUSE } else { 0 };
            }
        }
    }
}

impl<K: Recordable> std::fmt::Debug for Tap<K> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Tap({}, {})", <K as SlotKind>::NAME.label(), self.seq)
    }
}

#[cfg(test)]
mod tests {
    use meridian_core::{Batch, Decision, Dispatch, MeridianConfig, Step, native};

    use super::*;

    /// A queue that nobody empties is a writer that is held up for ever.
    #[test]
    fn a_full_queue_counts_drops_and_never_waits() {
        let targets = MeridianConfig::default().scheduler.targets();
        let setup = SlotSetup { targets, deadline_ms: 2.0, memory_mib: 64 };
        let (queue, items) = sync_channel(2);
        let shared = Arc::new(Shared::default());
        let mut tap = Tap::<Dispatch>::new(queue, Arc::default(), Arc::clone(&shared), setup);
        let mut policy = GuardedPolicy::new(native::policy::<Dispatch>("fcfs", targets, "{}").unwrap());
        let mut decision = Decision::default();
        let mut decide = |tap: &mut Tap<Dispatch>, candidates: usize| {
            tap.before(0, &Version::default(), &mut policy);
            let step = Step::default();
            let batch = Batch { facts: &step, candidates, columns: &[], finished: &[] };
            let asked = policy.ask(&batch, &mut decision);
            let fill = |inputs: &[_], out: &mut Vec<f32>| out.resize(inputs.len() * candidates, 0.0);
            tap.after(&batch, &fill, &asked, &decision);
        };
        for _ in 0..5 {
            decide(&mut tap, 3);
        }
        assert_eq!(shared.dropped.load(Ordering::Relaxed), 3);
        let take = || match items.try_recv() {
            Ok(Item::Dispatch(record)) => record,
            _ => panic!("a record of the dispatch slot"),
        };
        let (first, second) = (take(), take());
        assert_eq!((first.row.seq, first.row.snapshot.is_some()), (0, true));
        assert_eq!((second.row.seq, second.row.snapshot.is_some()), (1, false));
        first.go_home();
        second.go_home();

        // What follows on a gap says so, and has the state to go on from.
        decide(&mut tap, 3);
        let third = take();
        assert_eq!((third.row.seq, third.row.snapshot.is_some()), (5, true));
        decide(&mut tap, MAX_CANDIDATES + 1);
        assert_eq!(shared.dropped.load(Ordering::Relaxed), 4, "too many candidates");
        drop(items);
        decide(&mut tap, 3);
        assert_eq!(shared.dropped.load(Ordering::Relaxed), 5, "the writer is gone");
    }
}

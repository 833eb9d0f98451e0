//! A slot: the active policy decides, and the default replaces it when it does not. The same for dispatch, eviction and
//! budget.

mod budget;
mod compare;
mod dispatch;
mod eviction;
mod facts;
mod faults;
mod loaded;
mod report;
mod shadow;
mod stats;
mod swap;
mod trial;
mod witness;

use std::cell::{Ref, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::facts::SlotFacts;
use self::faults::FaultLog;
use self::loaded::{LONGEST_QUARANTINE_MS, LoadedPolicy};
use self::shadow::Shadow;
use crate::sync::{AtomicU64, Mutex, Ordering, lock};
use crate::{Asked, Batch, Fault, FaultKind, GuardedPolicy, Policy, SlotKind, Targets, native};

pub use self::budget::BudgetSlot;
pub use self::compare::Compare;
pub use self::dispatch::DispatchSlot;
pub use self::eviction::EvictionSlot;
pub use self::loaded::StrikeLimits;
pub use self::report::{
    ControlError, DECIDING_BUCKETS_US, FaultBatch, FaultEntry, Mode, ShadowStatus, SlotStatus, StateHandover,
    SwapReport, UNCHANGED, Version,
};
pub use self::stats::SlotStats;
pub use self::swap::{Contender, Remake, SlotControl};
pub use self::trial::{Trial, TrialFault};
pub use self::witness::{Fill, Witness};

/// The decider of a step.
///
/// ```
/// use meridian_core::slot::Source;
///
/// assert_ne!(Source::Active, Source::Fallback);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The active policy.
    Active,
    /// The native default, because the active policy left the step to it (an empty answer).
    Default,
    /// The native default, because the active policy faulted or has no instance.
    Fallback,
}

/// A slot: asks the active policy, and the native default for the same batch when the active policy does not decide.
///
/// The deciding thread owns it. [`PolicySlot::control`] gives a handle for other threads; changes through it happen
/// between two decisions. A version that faults too often goes into quarantine. Until its next trial, the previous
/// version decides, else the native default.
///
/// A decision takes the slot's lock once. The deciding thread learns without it which policy decides, what is read and
/// whether the decisions are watched.
///
/// ```
/// use meridian_core::slot::{DispatchSlot, Source};
/// use meridian_core::{Markers, NewRequest, RequestTable, SchedulerConfig, Step, native};
///
/// let targets = SchedulerConfig::default().targets();
/// let mut slot = DispatchSlot::new(native::policy("fcfs", targets, "{}")?, targets);
/// let mut table = RequestTable::new(Markers::default());
/// let row = table.insert(&NewRequest::default()).expect("finite times");
/// let (source, decision) = slot.decide(&Step::default(), &table, &[row], 16);
/// assert_eq!((source, decision.keys.len()), (Source::Active, 1));
/// # Ok::<(), native::NativeError>(())
/// ```
pub struct PolicySlot<K: SlotKind> {
    shared: Arc<Shared<K>>,
    /// Renewed when another thread has made a change, and by a decision that changes the active policy.
    facts: RefCell<SlotFacts<K>>,
    /// Requests that have ended since the last decision, for policies that keep state of them.
    finished: Vec<u32>,
    decision: K::Decision,
}

/// What the deciding thread and the handles share.
struct Shared<K: SlotKind> {
    /// Number of changes by other threads. It changes only under the lock.
    changes: AtomicU64,
    state: Mutex<State<K>>,
}

impl<K: SlotKind> Shared<K> {
    /// Make a change between two decisions.
    fn change<T>(&self, change: impl FnOnce(&mut State<K>) -> T) -> T {
        let state = &mut *lock(&self.state);
        let changed = change(state);
        self.changes.fetch_add(1, Ordering::Release);
        changed
    }
}

struct State<K: SlotKind> {
    active: LoadedPolicy<K>,
    /// The version that a rollback restores.
    previous: Option<LoadedPolicy<K>>,
    default: Box<dyn Policy<K>>,
    quarantine: Option<Quarantine<K>>,
    shadow: Option<Shadow<K>>,
    /// Records decisions.
    witness: Option<Box<dyn Witness<K>>>,
    targets: Targets,
    limits: StrikeLimits,
    columns: Vec<f32>,
    decision: K::Decision,
    /// For a timeline.
    marks: Option<Vec<DecisionMark>>,
    stats: SlotStats,
    faults: Arc<Mutex<FaultLog>>,
    /// Their number when a line was logged last.
    faults_logged: u64,
    last_fault: Option<Fault>,
    swaps: u64,
    last_refusal: Option<String>,
    /// The latest reported time; 0 before the first step.
    now_ms: f64,
}

/// Ended requests that wait to be told, at most; a recording has room for as many.
const MAX_FINISHED: usize = 1 << 14;

/// Most marks of decisions that wait for their timeline.
pub const MOST_MARKS: usize = 1 << 16;

/// One decision, for a timeline.
///
/// ```
/// use meridian_core::slot::DispatchSlot;
/// use meridian_core::{Markers, RequestTable, SchedulerConfig, Step, native};
///
/// let targets = SchedulerConfig::default().targets();
/// let mut slot = DispatchSlot::new(native::policy("fcfs", targets, "{}")?, targets);
/// slot.keep_marks(true);
/// slot.decide(&Step::default(), &RequestTable::new(Markers::default()), &[], 16);
/// let marks = slot.take_marks();
/// assert_eq!((marks.len(), marks[0].policy.as_str()), (1, "fcfs"));
/// # Ok::<(), native::NativeError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DecisionMark {
    /// Its begin.
    pub started: Instant,
    /// Its time, checks and fallback included.
    pub took: Duration,
    /// Who decided.
    pub source: Source,
    /// Candidates in the batch.
    pub candidates: usize,
    /// Name of the active policy.
    pub policy: String,
    /// Digest of its component; empty for a native policy.
    pub sha256: String,
    /// Its fault, if it had one.
    pub fault: Option<FaultKind>,
}

struct Quarantine<K: SlotKind> {
    policy: LoadedPolicy<K>,
    until_ms: f64,
}

impl<K: SlotKind> PolicySlot<K> {
    /// A slot whose active policy is `active` and whose default is the slot's native one with `targets`.
    #[must_use]
    pub fn new(active: Box<dyn Policy<K>>, targets: Targets) -> Self {
        let version = Version {
            name: active.description().name.clone(),
            version: active.description().version.clone(),
            ..Version::default()
        };
        Self::with_version(Contender { policy: active, version, remake: None }, targets, StrikeLimits::default())
    }

    /// The same, with the policy's origin, and the number of faults that puts a version into quarantine.
    #[must_use]
    pub fn with_version(active: Contender<K>, targets: Targets, limits: StrikeLimits) -> Self {
        let state = State {
            active: LoadedPolicy::new(GuardedPolicy::new(active.policy), active.version, active.remake),
            previous: None,
            default: native::default_policy(targets),
            quarantine: None,
            shadow: None,
            witness: None,
            targets,
            limits,
            columns: Vec::new(),
            decision: K::Decision::default(),
            marks: None,
            stats: SlotStats::default(),
            faults: Arc::default(),
            faults_logged: 0,
            last_fault: None,
            swaps: 0,
            last_refusal: None,
            // A change may be refused before the first step, and a fault of that time is read as JSON, which has no infinity.
            now_ms: 0.0,
        };
        let facts = RefCell::new(SlotFacts::new(&state, 0));
        let shared = Arc::new(Shared { changes: AtomicU64::new(0), state: Mutex::new(state) });
        Self { shared, facts, finished: Vec::new(), decision: K::Decision::default() }
    }

    /// A handle for other threads.
    #[must_use]
    pub fn control(&self) -> SlotControl<K> {
        SlotControl::new(Arc::clone(&self.shared))
    }

    /// The active version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.facts().version.clone()
    }

    /// Counters of the slot.
    #[must_use]
    pub fn stats(&self) -> SlotStats {
        lock(&self.shared.state).stats
    }

    /// Faults of every kind so far.
    #[must_use]
    pub fn fault_count(&self) -> u64 {
        lock(&self.shared.state).stats.fault_count()
    }

    /// The latest fault.
    #[must_use]
    pub fn last_fault(&self) -> Option<Fault> {
        lock(&self.shared.state).last_fault.clone()
    }

    /// Whether the next decision reads this column; otherwise a caller may omit an expensive one.
    #[must_use]
    pub fn reads(&self, column: K::Column) -> bool {
        self.facts().reads(column)
    }

    /// Whether the native policy of this source, such as `native:fcfs`, decides, and no other version is in quarantine.
    #[must_use]
    pub fn is_decided_by(&self, source: &str) -> bool {
        self.facts().is_decided_by(source)
    }

    /// Keep a mark of each decision from now on, for [`PolicySlot::take_marks`], or no longer.
    pub fn keep_marks(&mut self, keep: bool) {
        lock(&self.shared.state).marks = keep.then(Vec::new);
    }

    /// The marks of the decisions since the last call, at most [`MOST_MARKS`].
    pub fn take_marks(&mut self) -> Vec<DecisionMark> {
        lock(&self.shared.state).marks.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Whether a shadow or a recording sees the decisions.
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.facts().is_watched()
    }

    /// Report that these requests have ended: the next decision tells its policies.
    pub fn note_finished(&mut self, requests: &[u32]) {
        if !requests.is_empty() && self.facts().keeps_finished() {
            // A slot that is not asked for long forgets the first ones.
            self.finished.extend_from_slice(requests);
            let excess = self.finished.len().saturating_sub(MAX_FINISHED);
            self.finished.drain(..excess);
        }
    }

    /// What is known without the lock.
    fn facts(&self) -> Ref<'_, SlotFacts<K>> {
        let Shared { changes, state } = &*self.shared;
        if self.facts.borrow().changes != changes.load(Ordering::Acquire) {
            let state = lock(state);
            *self.facts.borrow_mut() = SlotFacts::new(&state, changes.load(Ordering::Acquire));
        }
        self.facts.borrow()
    }

    /// The latest decision.
    pub fn decision_mut(&mut self) -> &mut K::Decision {
        &mut self.decision
    }

    /// Decide one batch. `fill` writes the columns that it is given; the slot calls it once for each policy that it
    /// asks. Always returns a checked decision.
    pub fn decide_by(
        &mut self,
        facts: &K::Facts,
        candidates: usize,
        fill: impl Fn(&[K::Column], &mut Vec<f32>),
    ) -> (Source, &K::Decision) {
        let state = &mut *lock(&self.shared.state);
        let source = state.decide(facts, candidates, &self.finished, fill);
        self.finished.clear();
        std::mem::swap(&mut self.decision, &mut state.decision);
        let known = self.facts.get_mut();
        let changes = self.shared.changes.load(Ordering::Acquire);
        if (known.changes, known.stay) != (changes, state.active.id) {
            *known = SlotFacts::new(state, changes);
        }
        (source, &self.decision)
    }
}

/// What a policy with these inputs is told of ended requests: nothing, unless it can tell requests apart.
fn told<'a, K: SlotKind>(inputs: &[K::Column], finished: &'a [u32]) -> &'a [u32] {
    if K::REQUEST.is_some_and(|request| inputs.contains(&request)) { finished } else { &[] }
}

impl<K: SlotKind> State<K> {
    fn decide(
        &mut self,
        facts: &K::Facts,
        candidates: usize,
        finished: &[u32],
        fill: impl Fn(&[K::Column], &mut Vec<f32>),
    ) -> Source {
        let started = Instant::now();
        self.now_ms = K::now_ms(facts);
        if self.quarantine.as_ref().is_some_and(|quarantine| quarantine.until_ms <= self.now_ms) {
            self.end_quarantine();
        }
        let Self { active, columns, decision, witness, .. } = self;
        if let Some(witness) = witness {
            witness.before(active.id, &active.version, &mut active.policy);
        }
        fill(active.policy.policy().inputs(), columns);
        let told = told::<K>(active.policy.policy().inputs(), finished);
        let batch = Batch { facts, candidates, columns, finished: told };
        let asked = active.policy.ask(&batch, decision);
        if let Some(witness) = witness {
            witness.after(&Batch { finished, ..batch }, &fill, &asked, decision);
        }
        let mut is_out = false;
        let fault = match &asked {
            Asked::Faulted(faults) => faults.first().map(|fault| fault.kind),
            Asked::Decided | Asked::LeftToDefault => None,
        };
        let version = self.marks.is_some().then(|| self.active.version.clone());
        let source = match asked {
            Asked::Decided => Source::Active,
            Asked::LeftToDefault => Source::Default,
            Asked::Faulted(faults) => {
                is_out = self.faulted(&faults, facts, candidates);
                Source::Fallback
            }
        };
        if source != Source::Active {
            let Self { default, columns, decision, .. } = self;
            K::clear(decision);
            fill(default.inputs(), columns);
            if default.decide(&Batch { facts, candidates, columns, finished: &[] }, decision).is_err() {
                // The native default cannot fault; if it ever did, the engine's own way is a decision too.
                K::clear(decision);
            }
        }
        if is_out {
            // Only now: the default that decided this step is the one that stands in.
            self.quarantine();
        }
        if let Some(shadow) = &mut self.shadow {
            shadow.see(facts, candidates, finished, fill, &self.decision);
        }
        let took = started.elapsed();
        self.stats.decided(source, took);
        if let (Some(marks), Some(version)) = (&mut self.marks, version)
            && marks.len() < MOST_MARKS
        {
            marks.push(DecisionMark {
                started,
                took,
                source,
                candidates,
                policy: version.name,
                sha256: version.sha256,
                fault,
            });
        }
        source
    }

    /// Count the faults of one decision; true when there were too many.
    fn faulted(&mut self, faults: &[Fault], facts: &K::Facts, candidates: usize) -> bool {
        if faults.is_empty() {
            // It faulted earlier and cannot be asked.
            return false;
        }
        for (i, fault) in faults.iter().enumerate() {
            self.stats.faulted(fault.kind);
            // The columns still hold the batch of the first fault.
            let batch =
                (i == 0).then(|| FaultBatch::of::<K>(self.active.policy.policy().inputs(), &self.columns, facts));
            let version = &self.active.version;
            lock(&self.faults).push(K::NAME, version, false, self.now_ms, candidates, fault, batch);
        }
        self.last_fault = faults.last().cloned();
        let name = self.active.version.name.clone();
        self.log_faults(&name);
        self.active.strike(self.now_ms, &self.limits)
    }

    /// Log the first fault, then each doubling: a policy that faults in every step must not fill the log.
    fn log_faults(&mut self, policy: &str) {
        let count = self.stats.fault_count();
        if count >= 2 * self.faults_logged {
            self.faults_logged = count;
            tracing::warn!(
                slot = K::NAME.label(),
                policy,
                faults = count,
                last = self.last_fault.as_ref().map(tracing::field::display),
                "a policy faulted, and the native default decided in its place"
            );
        }
    }

    /// Put the active version into quarantine. The previous version stands in, else the native default. If the stand-in
    /// faults too, it steps back, and the default decides until the quarantine ends.
    fn quarantine(&mut self) {
        let previous = if self.quarantine.is_some() { None } else { self.previous.take() };
        let stand_in = previous.filter(|previous| !previous.is_stand_in).unwrap_or_else(|| self.default_stands_in());
        let loaded = std::mem::replace(&mut self.active, stand_in);
        tracing::warn!(
            slot = K::NAME.label(),
            policy = loaded.version.name,
            sha256 = loaded.version.sha256,
            seconds = loaded.quarantine_ms / 1e3,
            decides = self.active.version.name,
            "a policy that faults too often is put into quarantine"
        );
        match &self.quarantine {
            Some(_) => self.previous = Some(loaded),
            None => self.put_away(loaded),
        }
    }

    /// The native default as it is, with the state that it has gathered in the steps that it decided.
    fn default_stands_in(&mut self) -> LoadedPolicy<K> {
        let learned = std::mem::replace(&mut self.default, native::default_policy(self.targets));
        LoadedPolicy::stand_in(learned)
    }

    fn put_away(&mut self, mut loaded: LoadedPolicy<K>) {
        let until_ms = self.now_ms + loaded.quarantine_ms;
        loaded.quarantine_ms = (loaded.quarantine_ms * 2.0).min(LONGEST_QUARANTINE_MS);
        self.quarantine = Some(Quarantine { policy: loaded, until_ms });
    }

    /// Retry the version in quarantine.
    fn end_quarantine(&mut self) {
        let Some(Quarantine { policy: loaded, .. }) = self.quarantine.take() else { return };
        match loaded.on_parole(self.now_ms) {
            Ok(loaded) => self.resume(loaded),
            Err((loaded, fault)) => self.cannot_start(*loaded, fault),
        }
    }

    /// Make a version decide again after its quarantine. The stand-in becomes the previous version, unless it was the
    /// default in place of a version that had stepped back.
    fn resume(&mut self, loaded: LoadedPolicy<K>) {
        tracing::info!(slot = K::NAME.label(), policy = loaded.version.name, "a policy in quarantine is tried again");
        let mut stood_in = std::mem::replace(&mut self.active, loaded);
        if stood_in.is_stand_in {
            // It decides the steps in which the version faults, as the same instance.
            let fresh = LoadedPolicy::stand_in(native::default_policy(self.targets));
            self.default = std::mem::replace(&mut stood_in, fresh).policy.into_policy();
        }
        if self.previous.is_none() {
            self.previous = Some(stood_in);
        }
    }

    fn cannot_start(&mut self, loaded: LoadedPolicy<K>, fault: Fault) {
        self.stats.faulted(fault.kind);
        lock(&self.faults).push(K::NAME, &loaded.version, false, self.now_ms, 0, &fault, None);
        self.last_fault = Some(fault);
        self.log_faults(&loaded.version.name);
        self.put_away(loaded);
    }
}

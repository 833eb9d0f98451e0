use meridian_policy_sdk::{Column, Decision, Step};

use crate::{Asked, Batch, Fault, GuardedPolicy, Policy, SchedulerConfig, native};

/// The decider of a step.
///
/// ```
/// assert_ne!(meridian_core::Source::Active, meridian_core::Source::Fallback);
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

/// Writes the columns that it is given, one after another, each as long as the batch.
///
/// ```
/// use meridian_core::{Column, FillColumns};
///
/// let zeros = |inputs: &[Column], out: &mut Vec<f32>| out.resize(inputs.len() * 3, 0.0);
/// let fill: FillColumns<'_> = &zeros;
/// let mut columns = Vec::new();
/// fill(&[Column::Phase], &mut columns);
/// assert_eq!(columns.len(), 3);
/// ```
pub type FillColumns<'a> = &'a dyn Fn(&[Column], &mut Vec<f32>);

/// Decides the steps of a [`MeridianScheduler`](crate::MeridianScheduler): one policy ([`PolicyDecider`]), or a slot
/// whose policy can be swapped. The scheduling thread calls it once per step; it may take as long as a policy may.
///
/// ```
/// use meridian_core::{Decider, Decision, FillColumns, Source, Step};
///
/// /// Leaves every step as it is.
/// struct AsItIs(Decision);
///
/// impl Decider for AsItIs {
///     fn decide(&mut self, _: &Step, _: usize, _: FillColumns<'_>) -> (Source, &Decision) {
///         (Source::Default, &self.0)
///     }
/// }
///
/// assert!(AsItIs(Decision::default()).decide(&Step::default(), 3, &|_, _| ()).1.keys.is_empty());
/// ```
pub trait Decider: Send {
    /// Decide one step over `candidates` candidates. The decider calls `fill` once for each policy that it asks. The
    /// decision is checked: a policy that fails costs only its own answer.
    fn decide(&mut self, step: &Step, candidates: usize, fill: FillColumns<'_>) -> (Source, &Decision);

    /// These requests have ended; called before a decision. By default, it is told to nobody.
    fn finished(&mut self, _requests: &[u32]) {}
}

/// Decides for an engine with its own queues: the dispatch slot.
///
/// ```
/// use meridian_core::{
///     Decider, Decision, EngineDecider, FillColumns, Markers, MeridianScheduler, SchedulerConfig, Source, Step,
/// };
///
/// /// Leaves every step as it is.
/// struct AsItIs(Decision);
///
/// impl Decider for AsItIs {
///     fn decide(&mut self, _: &Step, _: usize, _: FillColumns<'_>) -> (Source, &Decision) {
///         (Source::Default, &self.0)
///     }
/// }
///
/// impl EngineDecider for AsItIs {
///     fn overruled(&mut self) {}
///     fn kept(&mut self, _: f64) {}
/// }
///
/// let decider = AsItIs(Decision::default());
/// let mut scheduler = MeridianScheduler::for_engine(decider, Markers::default(), &SchedulerConfig::default(), 16);
/// assert!(scheduler.mirror().table.is_empty());
/// ```
pub trait EngineDecider: Decider {
    /// Report that the plan of the latest decision left nothing to run, and was changed.
    fn overruled(&mut self);

    /// Report that the engine ran a step at `now_ms` its own way, which is also the decision of this decider's policy.
    fn kept(&mut self, now_ms: f64);
}

/// One policy; the native default decides the steps in which the policy faults or has no answer.
///
/// ```
/// use meridian_core::{Decider, Markers, PolicyDecider, SchedulerConfig, Source, Step, native};
///
/// let config = SchedulerConfig::default();
/// let policy = native::policy("fcfs", config.targets(), "{}")?;
/// let mut decider = PolicyDecider::new(&config, policy);
/// assert_eq!(decider.decide(&Step::default(), 2, &|_, columns| columns.clear()).0, Source::Active);
/// assert_eq!(decider.faults(), (0, None));
/// # Ok::<(), native::NativeError>(())
/// ```
pub struct PolicyDecider {
    policy: GuardedPolicy,
    default: Box<dyn Policy>,
    columns: Vec<f32>,
    finished: Vec<u32>,
    decision: Decision,
    faults: u64,
    last_fault: Option<Fault>,
}

impl PolicyDecider {
    /// A decider with this started policy.
    #[must_use]
    pub fn new(config: &SchedulerConfig, policy: Box<dyn Policy>) -> Self {
        Self {
            policy: GuardedPolicy::new(policy),
            default: native::default_policy(config.targets()),
            columns: Vec::new(),
            finished: Vec::new(),
            decision: Decision::default(),
            faults: 0,
            last_fault: None,
        }
    }

    /// The columns that the policy reads.
    pub(super) fn inputs(&self) -> &[Column] {
        self.policy.policy().inputs()
    }

    /// Faults of the policy so far, and the latest.
    #[must_use]
    pub fn faults(&self) -> (u64, Option<Fault>) {
        (self.faults, self.last_fault.clone())
    }
}

impl Decider for PolicyDecider {
    fn decide(&mut self, step: &Step, candidates: usize, fill: FillColumns<'_>) -> (Source, &Decision) {
        let Self { policy, default, columns, finished, decision, .. } = self;
        fill(policy.policy().inputs(), columns);
        let source = match policy.ask(&Batch { facts: step, candidates, columns, finished }, decision) {
            Asked::Decided => Source::Active,
            Asked::LeftToDefault => Source::Default,
            Asked::Faulted(faults) => {
                self.faults += faults.len() as u64;
                self.last_fault = faults.last().cloned().or(self.last_fault.take());
                Source::Fallback
            }
        };
        if source != Source::Active {
            decision.clear();
            fill(default.inputs(), columns);
            if default.decide(&Batch { facts: step, candidates, columns, finished: &[] }, decision).is_err() {
                // The native default cannot fault; if it ever did, arrival order is a decision too.
                decision.clear();
            }
        }
        finished.clear();
        (source, &self.decision)
    }

    fn finished(&mut self, requests: &[u32]) {
        if self.inputs().contains(&Column::Request) {
            self.finished.extend_from_slice(requests);
        }
    }
}

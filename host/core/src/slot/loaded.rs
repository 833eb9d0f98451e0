use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use super::report::Version;
use super::swap::Remake;
use crate::{Description, Fault, GuardedPolicy, Policy, PolicySource, SlotKind};

/// A policy that may decide, with the slot's data about it.
pub(super) struct LoadedPolicy<K: SlotKind> {
    /// Distinguishes this stay of the policy from every other in the process: a policy that returns has another state.
    pub(super) id: u64,
    pub(super) policy: GuardedPolicy<K>,
    pub(super) version: Version,
    /// Starts the same component with other options.
    pub(super) remake: Option<Remake<K>>,
    /// Times of its faults within the window, oldest first; milliseconds.
    strikes: VecDeque<f64>,
    /// When it left quarantine, milliseconds: one fault within the window sends it back.
    paroled_ms: Option<f64>,
    /// Length of its next quarantine, milliseconds.
    pub(super) quarantine_ms: f64,
    /// Its plans that left nothing to run, and that the host changed.
    pub(super) idle_plans: u64,
    /// Whether this is the slot's native default, in place of a policy in quarantine.
    pub(super) is_stand_in: bool,
}

/// First quarantine of a version, milliseconds; each further one lasts twice as long.
const FIRST_QUARANTINE_MS: f64 = 1_000.0;
/// Longest quarantine, milliseconds.
pub(super) const LONGEST_QUARANTINE_MS: f64 = 600_000.0;

/// The number of faults, and the time, that put a version into quarantine.
///
/// ```
/// let limits = meridian_core::slot::StrikeLimits { max_strikes: 1, ..Default::default() };
/// assert_eq!(limits.window_ms, 60_000.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StrikeLimits {
    /// Faults, at least 1.
    pub max_strikes: u32,
    /// Time within which they count, milliseconds.
    pub window_ms: f64,
}

impl Default for StrikeLimits {
    fn default() -> Self {
        Self { max_strikes: 3, window_ms: 60_000.0 }
    }
}

/// An id that no other policy has or had.
pub(super) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl<K: SlotKind> LoadedPolicy<K> {
    pub(super) fn new(policy: GuardedPolicy<K>, version: Version, remake: Option<Remake<K>>) -> Self {
        let (id, strikes) = (next_id(), VecDeque::new());
        let quarantine_ms = FIRST_QUARANTINE_MS;
        Self {
            id,
            policy,
            version,
            remake,
            strikes,
            paroled_ms: None,
            quarantine_ms,
            idle_plans: 0,
            is_stand_in: false,
        }
    }

    /// An instance of the native default, in place of a policy.
    pub(super) fn stand_in(policy: Box<dyn Policy<K>>) -> Self {
        let Description { name, version, summary: _ } = policy.description().clone();
        let source = PolicySource::Native(&name).to_string();
        let version = Version { name, version, source, options: "{}".into(), ..Version::default() };
        Self { is_stand_in: true, ..Self::new(GuardedPolicy::new(policy), version, None) }
    }

    /// Count a fault; true when there were too many.
    pub(super) fn strike(&mut self, now_ms: f64, limits: &StrikeLimits) -> bool {
        self.forget_strikes(now_ms, limits);
        self.strikes.push_back(now_ms);
        let is_on_probation = self.paroled_ms.is_some_and(|then_ms| now_ms - then_ms <= limits.window_ms);
        if !is_on_probation {
            self.paroled_ms = None;
            self.quarantine_ms = FIRST_QUARANTINE_MS;
        }
        is_on_probation || self.strikes.len() >= limits.max_strikes as usize
    }

    /// Faults that count.
    pub(super) fn strikes(&self) -> u32 {
        u32::try_from(self.strikes.len()).unwrap_or(u32::MAX)
    }

    /// Forget the faults outside the window.
    pub(super) fn forget_strikes(&mut self, now_ms: f64, limits: &StrikeLimits) {
        while self.strikes.front().is_some_and(|then_ms| now_ms - then_ms > limits.window_ms) {
            self.strikes.pop_front();
        }
    }

    /// Leave quarantine. Earlier faults no longer count, but a fault soon after sends it back. It was restarted after
    /// its last fault; if that failed, this call starts it.
    pub(super) fn on_parole(mut self, now_ms: f64) -> Result<Self, (Box<Self>, Fault)> {
        self.strikes.clear();
        self.paroled_ms = Some(now_ms);
        if self.policy.is_ready() {
            return Ok(self);
        }
        match self.policy.recover() {
            Ok(()) => Ok(self),
            Err(fault) => Err((Box::new(self), fault)),
        }
    }
}

//! Time, as the caller gives it.

use std::time::{Duration, Instant};

use crate::fabric::transfer::Signal;

/// The time of a thread that waits. Tests have a clock that advances by itself.
pub trait Clock: Send + Sync {
    /// The time since some moment.
    fn now(&self) -> Duration;

    /// Wait until the signal is set, at most for `most`.
    fn wait(&self, signal: &Signal, most: Duration);
}

/// The clock of the machine.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn wait(&self, signal: &Signal, most: Duration) {
        signal.wait(most);
    }
}

/// When to try again.
///
/// ```
/// use meridian_memory::fabric::Backoff;
/// use std::time::Duration;
///
/// let backoff = Backoff { tries: 5, first: Duration::from_millis(10), most: Duration::from_millis(50) };
/// let gaps: Vec<_> = backoff.gaps().map(|gap| gap.as_millis()).collect();
/// assert_eq!(gaps, [10, 20, 40, 50]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// How often a request is tried, at least once.
    pub tries: u32,
    /// The gap before the second try; each later one is twice as long.
    pub first: Duration,
    /// The longest gap.
    pub most: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { tries: 4, first: Duration::from_millis(20), most: Duration::from_secs(1) }
    }
}

impl Backoff {
    /// The gaps between the tries.
    pub fn gaps(self) -> impl Iterator<Item = Duration> {
        let next = move |gap: &Duration| Some(gap.saturating_mul(2));
        std::iter::successors(Some(self.first), next)
            .map(move |gap| gap.min(self.most))
            .take(self.tries.max(1) as usize - 1)
    }
}

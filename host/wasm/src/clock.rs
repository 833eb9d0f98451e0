//! The processor time of a call. A deadline bounds what a policy uses, so that a busy or throttled machine is no fault.

use std::time::Duration;

use crate::runtime::EPOCH_TICK;

/// Calls of a new instance, and calls after a late one, whose processor time is read at their begin. The others save the
/// system call.
const EXACT_CALLS: u32 = 256;

/// Measures the call under way. Its callers read the processor time of the thread; `None` where the system has no such
/// clock, and where wall time counts.
#[derive(Debug)]
pub(crate) struct CallClock {
    deadline: Duration,
    /// Processor time of the thread at the begin of the call, or when the epoch first reached its deadline.
    since: Option<Duration>,
    /// Calls that are still measured from their begin.
    exact_calls: u32,
}

impl CallClock {
    pub(crate) fn new() -> Self {
        Self { deadline: Duration::ZERO, since: None, exact_calls: EXACT_CALLS }
    }

    /// A call begins.
    pub(crate) fn begin(&mut self, deadline: Duration, now: impl FnOnce() -> Option<Duration>) {
        self.deadline = deadline;
        self.since = if self.exact_calls > 0 { now() } else { None };
        self.exact_calls = self.exact_calls.saturating_sub(1);
    }

    /// The epoch has reached the deadline: ticks that the call may go on for, or `None` when its time is used up. Without
    /// the time of its begin, a call may use one more deadline.
    pub(crate) fn tripped(&mut self, now: impl FnOnce() -> Option<Duration>) -> Option<u64> {
        self.exact_calls = EXACT_CALLS;
        let now = now()?;
        let used = now.saturating_sub(*self.since.get_or_insert(now));
        let left = self.deadline.checked_sub(used).filter(|left| !left.is_zero())?;
        Some(u64::try_from(left.as_nanos().div_ceil(EPOCH_TICK.as_nanos())).unwrap_or(u64::MAX / 2))
    }

    /// The time of an answer that came too late; `None` when it is in time. No epoch is checked inside a bulk instruction,
    /// nor after the last loop. An answer within two ticks of the deadline is in time, as it is by the epoch, and so is the
    /// first late one of a call that was not measured from its begin.
    pub(crate) fn late(&mut self, took: Duration, now: impl FnOnce() -> Option<Duration>) -> Option<Duration> {
        let limit = self.deadline.saturating_add(EPOCH_TICK * 2);
        if took <= limit {
            return None;
        }
        self.exact_calls = EXACT_CALLS;
        let used = match (now(), self.since) {
            (Some(now), Some(since)) => now.saturating_sub(since),
            (Some(_), None) => return None,
            (None, _) => took,
        };
        (used > limit).then_some(used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_millis(2);

    fn ms(ms: f64) -> Option<Duration> {
        Some(Duration::from_secs_f64(ms / 1e3))
    }

    /// A clock that no call has been late on for long.
    fn calm() -> CallClock {
        CallClock { exact_calls: 0, ..CallClock::new() }
    }

    #[test]
    fn a_call_on_a_throttled_machine_goes_on_until_it_has_used_its_deadline() {
        let mut clock = CallClock::new();
        clock.begin(DEADLINE, || ms(100.0));
        // 80 ms have passed, and the thread had 0.4 ms of them.
        assert_eq!(clock.tripped(|| ms(100.4)), Some(4));
        assert_eq!(clock.tripped(|| ms(101.9)), Some(1));
        assert_eq!(clock.tripped(|| ms(102.0)), None);
    }

    #[test]
    fn the_first_late_call_after_calm_may_use_one_more_deadline() {
        let mut clock = calm();
        clock.begin(DEADLINE, || unreachable!("a calm call reads no clock"));
        assert_eq!(clock.tripped(|| ms(102.5)), Some(4), "an endless loop is at 2.5 ms");
        assert_eq!(clock.tripped(|| ms(104.5)), None);
        clock.begin(DEADLINE, || ms(200.0));
        assert_eq!(clock.tripped(|| ms(202.5)), None, "now its begin is known");
    }

    #[test]
    fn calls_become_calm_again() {
        let mut clock = CallClock::new();
        for _ in 0..EXACT_CALLS {
            clock.begin(DEADLINE, || ms(1.0));
            assert_eq!(clock.since, ms(1.0));
        }
        clock.begin(DEADLINE, || unreachable!("it has been calm for long"));
        assert_eq!(clock.since, None);
    }

    #[test]
    fn an_answer_is_late_by_the_time_that_it_used() {
        let wall = Duration::from_millis(90);
        let mut clock = CallClock::new();
        clock.begin(DEADLINE, || ms(10.0));
        assert_eq!(clock.late(Duration::from_millis(3), || unreachable!("it is in time")), None);
        assert_eq!(clock.late(wall, || ms(12.9)), None);
        assert_eq!(clock.late(wall, || ms(13.5)), ms(3.5));
        let mut clock = calm();
        clock.begin(DEADLINE, || None);
        assert_eq!(clock.late(wall, || ms(99.0)), None, "nobody knows what it used");
        clock.begin(DEADLINE, || ms(100.0));
        assert_eq!(clock.late(wall, || ms(109.0)), ms(9.0), "the next ones are measured");
    }

    #[test]
    fn without_a_clock_of_the_thread_wall_time_counts() {
        let mut clock = CallClock::new();
        clock.begin(DEADLINE, || None);
        assert_eq!(clock.tripped(|| None), None);
        assert_eq!(clock.late(Duration::from_millis(4), || None), ms(4.0));
    }
}

use std::collections::BTreeMap;

use crate::eviction::{Candidate, Candidates, EvictionPolicy, Memory};

/// Bounds of the counted gaps: 0, 16 ms, 32 ms and so on, to 37 hours.
const BUCKETS: usize = 24;
/// Kinds of pauses that are counted apart: after a tool call or not, times how long the session's own gaps are.
const CLASSES: usize = 8;
/// Pauses of a class that weigh: beyond these, earlier ones count half.
const WEIGHED: f32 = 4096.0;
/// Sessions whose last pause is remembered, at most.
const MAX_SESSIONS: usize = 1 << 16;

/// When sessions come back, learned from the gaps that an eviction policy is shown: [`Returns::observe`] every batch, and ask
/// for the chance of a return within a time. Needs the columns `session`, `turn`, `last-gap-ms`, `gap-ms`, `gaps` and
/// `stopped-for-tool`.
///
/// Pauses after a tool call and after an answer are counted apart, and so are sessions with short and with long gaps.
#[derive(Clone, Debug)]
pub struct Returns {
    classes: [Pauses; CLASSES],
    /// The class of each session's pause that is under way, and the turn before it.
    under_way: BTreeMap<u32, (u8, u32)>,
}

/// A kind of pause, in [`Returns`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PauseKind(u8);

impl PauseKind {
    /// Number of kinds.
    pub const COUNT: usize = CLASSES;
    /// Every kind, by its index.
    pub const ALL: [Self; CLASSES] = [Self(0), Self(1), Self(2), Self(3), Self(4), Self(5), Self(6), Self(7)];
}

#[derive(Clone, Copy, Debug, Default)]
struct Pauses {
    /// Pauses that have begun.
    begun: f32,
    /// Those that ended, by their length.
    ended: [f32; BUCKETS],
}

/// The best time to keep something for its return.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Chance of a return for each millisecond of keeping, at the best time to stop.
    pub per_ms: f32,
    /// Milliseconds from now to the next change of it.
    pub holds_ms: f32,
}

impl Default for Returns {
    fn default() -> Self {
        Self { classes: [Pauses::default(); CLASSES], under_way: BTreeMap::new() }
    }
}

/// The lower bound of a bucket, milliseconds.
fn bound_ms(bucket: usize) -> f32 {
    if bucket == 0 { 0.0 } else { (8u32 << bucket.min(27)) as f32 }
}

fn bucket_of(ms: f32) -> usize {
    (1..BUCKETS).rev().find(|bucket| ms >= bound_ms(*bucket)).unwrap_or(0)
}

impl PauseKind {
    /// The kind of pause after a turn that stopped so, in a session with such a mean of so many gaps.
    #[must_use]
    pub fn of(stopped_for_tool: f32, gap_ms: f32, gaps: f32) -> Self {
        let length = if gaps < 2.0 {
            0
        } else if gap_ms < 8_000.0 {
            1
        } else if gap_ms < 64_000.0 {
            2
        } else {
            3
        };
        Self(if stopped_for_tool > 0.0 { 4 + length } else { length })
    }

    /// That of a candidate.
    #[must_use]
    pub fn of_candidate<P: EvictionPolicy + ReadsPauses>(candidate: &Candidate<'_, P>) -> Self {
        let (stopped_for_tool, gap_ms, gaps) = P::pause(candidate);
        Self::of(stopped_for_tool, gap_ms, gaps)
    }

    /// Its place in [`PauseKind::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0) % CLASSES
    }
}

/// A policy that reads the columns of pauses; a macro of one line: [`reads_pauses!`](crate::reads_pauses).
pub trait ReadsPauses: EvictionPolicy {
    /// `stopped-for-tool`, `gap-ms` and `gaps`.
    fn pause(candidate: &Candidate<'_, Self>) -> (f32, f32, f32);
    /// `session`, `turn` and `last-gap-ms`.
    fn place(candidate: &Candidate<'_, Self>) -> (f32, f32, f32);
}

/// Says that a policy reads the columns that [`Returns`] needs, which its `INPUTS` must name.
#[macro_export]
macro_rules! reads_pauses {
    ($policy:ty) => {
        impl $crate::ReadsPauses for $policy {
            fn pause(candidate: &$crate::eviction::Candidate<'_, Self>) -> (f32, f32, f32) {
                (candidate.stopped_for_tool(), candidate.gap_ms(), candidate.gaps())
            }

            fn place(candidate: &$crate::eviction::Candidate<'_, Self>) -> (f32, f32, f32) {
                (candidate.session(), candidate.turn(), candidate.last_gap_ms())
            }
        }
    };
}

impl Returns {
    /// Count the pauses that ended and began with the blocks of a batch: once for each turn of a session.
    pub fn observe<P: ReadsPauses>(&mut self, _memory: &Memory, batch: &Candidates<'_, P>) {
        let mut last = (0, 0);
        for candidate in batch.iter() {
            let (session, turn, last_gap_ms) = P::place(&candidate);
            let place = (session as u32, turn as u32);
            // A batch is the chain of one request, as a rule.
            if place.0 > 0 && place != last {
                last = place;
                self.note(place.0, place.1, last_gap_ms, PauseKind::of_candidate::<P>(&candidate));
            }
        }
    }

    /// A session paused for `last_gap_ms` (NaN: it did not) before `turn`, which has now ended; its next pause is of `kind`. A
    /// turn that was noted before is not noted again.
    pub fn note(&mut self, session: u32, turn: u32, last_gap_ms: f32, kind: PauseKind) {
        if self.under_way.get(&session).is_some_and(|(_, noted)| turn <= *noted) {
            return;
        }
        if self.under_way.len() >= MAX_SESSIONS
            && !self.under_way.contains_key(&session)
            && let Some(first) = self.under_way.keys().next().copied()
        {
            self.under_way.remove(&first);
        }
        let before = self.under_way.insert(session, (kind.0, turn));
        if let Some((class, _)) = before
            && last_gap_ms >= 0.0
        {
            self.classes[usize::from(class) % CLASSES].ended[bucket_of(last_gap_ms)] += 1.0;
        }
        let pauses = &mut self.classes[kind.index()];
        pauses.begun += 1.0;
        if pauses.begun > WEIGHED {
            pauses.begun /= 2.0;
            for count in &mut pauses.ended {
                *count /= 2.0;
            }
        }
    }

    /// Pauses of a kind that were seen to begin.
    #[must_use]
    pub fn seen(&self, kind: PauseKind) -> f32 {
        self.classes[kind.index()].begun
    }

    /// The chance that a pause of `kind`, which lasts since `idle_ms`, ends within `within_ms` more. 0 when none was seen.
    #[must_use]
    pub fn chance(&self, kind: PauseKind, idle_ms: f32, within_ms: f32) -> f32 {
        let Pauses { begun, ended } = &self.classes[kind.index()];
        let before = Self::ended_before(ended, idle_ms);
        let left = begun - before;
        if left <= 0.0 { 0.0 } else { (Self::ended_before(ended, idle_ms + within_ms) - before) / left }
    }

    /// How long a pause of `kind` may last, milliseconds, until its outlook is below `per_ms`: the longest of the times that
    /// are told apart. 0 when it is from the start.
    #[must_use]
    pub fn worth_ms(&self, kind: PauseKind, per_ms: f32) -> f32 {
        let worth = |bucket: &usize| self.outlook(kind, bound_ms(*bucket)).per_ms >= per_ms;
        (0..BUCKETS).rev().find(worth).map_or(0.0, |bucket| bound_ms(bucket + 1))
    }

    /// Of all times to keep something for the return of a pause of `kind`, which lasts since `idle_ms`, the one with the best
    /// chance for each millisecond: what a Gittins index is.
    #[must_use]
    pub fn outlook(&self, kind: PauseKind, idle_ms: f32) -> Outlook {
        let Pauses { begun, ended } = &self.classes[kind.index()];
        let first = bucket_of(idle_ms);
        let mut left = begun - Self::ended_before(ended, idle_ms);
        let holds_ms = bound_ms(first + 1) - idle_ms;
        let (mut returns, mut held_ms, mut best) = (0.0, 0.0, 0.0);
        let all = left;
        for (bucket, count) in ended.iter().enumerate().skip(first) {
            let from_ms = if bucket == first { idle_ms } else { bound_ms(bucket) };
            let width_ms = bound_ms(bucket + 1) - bound_ms(bucket);
            let within = (bound_ms(bucket + 1) - from_ms) / width_ms;
            let here = count * within;
            // Those that return here are held for half of it, the others for all.
            held_ms += (left - here / 2.0) * (bound_ms(bucket + 1) - from_ms);
            returns += here;
            left -= here;
            if held_ms > 0.0 && returns / held_ms > best {
                best = returns / held_ms;
            }
        }
        Outlook { per_ms: if all > 0.0 { best } else { 0.0 }, holds_ms }
    }

    /// Pauses that were shorter than this, as if evenly spread in their bucket.
    fn ended_before(ended: &[f32; BUCKETS], ms: f32) -> f32 {
        let last = bucket_of(ms);
        let whole: f32 = ended[..last].iter().sum();
        let within = (ms - bound_ms(last)) / (bound_ms(last + 1) - bound_ms(last));
        whole + ended[last] * if within < 1.0 { within } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_double() {
        assert_eq!([0.0, 15.9, 16.0, 31.0, 32.0, 1e9].map(bucket_of), [0, 0, 1, 1, 2, BUCKETS - 1]);
        assert_eq!((bound_ms(1), bound_ms(2), bound_ms(24)), (16.0, 32.0, 134_217_728.0));
    }

    #[test]
    fn chances_are_of_those_that_have_not_returned() {
        let (mut returns, tool) = (Returns::default(), PauseKind::of(1.0, f32::NAN, 0.0));
        assert_eq!(returns.chance(tool, 0.0, 1e6), 0.0);
        returns.note(1, 1, f32::NAN, tool);
        returns.note(1, 1, 5.0, tool);
        // Three of ten return after 24 ms, three after 2 s, the others never.
        for session in 2..=10 {
            returns.note(session, 1, f32::NAN, tool);
        }
        let never = PauseKind::of(0.0, f32::NAN, 0.0);
        for session in 1..=3 {
            returns.note(session, 2, 24.0, never);
        }
        for session in 4..=6 {
            returns.note(session, 2, 2000.0, never);
        }
        assert_eq!(returns.seen(tool), 10.0);
        assert!((returns.chance(tool, 0.0, 32.0) - 0.3).abs() < 1e-6);
        assert!((returns.chance(tool, 0.0, 1e5) - 0.6).abs() < 1e-6);
        assert!((returns.chance(tool, 32.0, 1e5) - 3.0 / 7.0).abs() < 1e-6);
        assert_eq!(returns.chance(never, 0.0, 1e6), 0.0);
        let (soon, later) = (returns.outlook(tool, 0.0), returns.outlook(tool, 3000.0));
        assert!(soon.per_ms > later.per_ms && soon.holds_ms == 16.0, "{soon:?} {later:?}");
        assert_eq!(returns.outlook(never, 0.0).per_ms, 0.0);
    }

    #[test]
    fn memory_is_bounded() {
        let (mut returns, kind) = (Returns::default(), PauseKind::of(0.0, 100.0, 9.0));
        for session in 0..3 * MAX_SESSIONS as u32 {
            returns.note(session, 1, 5.0, kind);
        }
        assert!(returns.under_way.len() <= MAX_SESSIONS);
        assert!(returns.seen(kind) <= WEIGHED);
    }
}

//! The service levels of the requests, how they were kept, and what is forecast of them.

use serde::{Deserialize, Serialize};

use meridian_policy_sdk::State;

use super::{RequestState, RequestTable};
use crate::RowId;
use crate::config::{Late, ServiceLevel, ServiceLevels};
use crate::forecast::Left;
use crate::levels::{Levels, Speed, is_kept, needs_ms, shown_slack_ms, slack_ms, think_slack_ms};

/// How a service level is kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LevelCounts {
    /// Its name.
    pub name: String,
    /// Ended requests whose level was kept, and those whose level was not.
    pub ended: [u64; 2],
    /// Requests that were refused because their level could not be kept. They are not among those that ended.
    #[serde(default)]
    pub refused: u64,
    /// Live requests whose level can still be kept, and those whose level cannot.
    pub live: [u64; 2],
}

/// Ended requests of a level.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LevelEnds {
    ended: [u64; 2],
    refused: u64,
}

/// Tokens that a level was given count half after so many milliseconds.
const HALF_LIFE_MS: f64 = 5000.0;
/// Most requests that a step looks at to refuse them.
const LOOKED_AT: usize = 256;

impl RequestTable {
    /// How each service level is kept, in the order of their names.
    #[must_use]
    pub fn level_counts(&self) -> Vec<LevelCounts> {
        let mut live = vec![[0; 2]; self.levels.names().len()];
        for row in self.iter() {
            if let Some(live) = usize::from(row.level).checked_sub(1).and_then(|at| live.get_mut(at)) {
                let slack_ms = self.level(row).map_or(0.0, |level| self.true_slack_ms(level, row, self.clock_ms));
                live[usize::from(slack_ms < 0.0)] += 1;
            }
        }
        let of = |((name, ends), live): ((&String, &LevelEnds), [u64; 2])| LevelCounts {
            name: name.clone(),
            ended: ends.ended,
            refused: ends.refused,
            live,
        };
        self.levels.names().iter().zip(&self.level_ends).zip(live).map(of).collect()
    }

    /// Requests with a level that was kept, and those with a level that was not, refused ones included.
    #[must_use]
    pub fn attained(&self) -> (u64, u64) {
        let sum = |of: fn(&LevelEnds) -> u64| self.level_ends.iter().map(of).sum();
        (sum(|ends| ends.ended[0]), sum(|ends| ends.ended[1] + ends.refused))
    }

    /// Count a request that ends, if it has a level. One that ends without an answer counts if its answer was due.
    pub(super) fn count_level(&mut self, row: &RequestState) {
        let is_kept = self.level(row).and_then(|level| is_kept(level, row, self.clock_ms));
        let Some(ends) = usize::from(row.level).checked_sub(1).and_then(|at| self.level_ends.get_mut(at)) else {
            return;
        };
        match is_kept {
            _ if row.is_refused && row.state == State::Waiting => ends.refused += 1,
            Some(is_kept) => ends.ended[usize::from(!is_kept)] += 1,
            None => {}
        }
    }

    /// Write into `refused` which requests end now: they were never admitted, their level cannot be kept, and its late
    /// requests are refused. The caller ends them; those of the step before that it could not end are live again. A step looks
    /// at a part of them, all take turns; where no others run, at none.
    pub(crate) fn refuse(&mut self, now_ms: f64, others_run: bool, refused: &mut Vec<RowId>) {
        for row_id in refused.drain(..) {
            if let Some(row) = self.row_mut(row_id) {
                row.is_refused = false;
            }
        }
        for _ in 0..self.refusable.len().min(if others_run { LOOKED_AT } else { 0 }) {
            let Some(row_id) = self.refusable.pop_front() else { break };
            let Some(row) = self.get(row_id).filter(|row| row.state == State::Waiting) else { continue };
            if self.level(row).is_some_and(|level| self.true_slack_ms(level, row, now_ms) < 0.0) {
                refused.push(row_id);
            }
            self.refusable.push_back(row_id);
        }
        for row_id in refused {
            if let Some(row) = self.row_mut(*row_id) {
                row.is_refused = true;
            }
        }
    }

    /// A request has arrived that may be refused.
    pub(super) fn may_refuse(&mut self, row_id: RowId, level: u8) {
        if self.levels.get(level).is_some_and(|level| level.late == Late::Refuse) {
            self.refusable.push_back(row_id);
        }
    }

    /// Promise these levels to the requests that arrive. Before the first of them: rows have numbers of levels.
    pub fn promise(&mut self, levels: &ServiceLevels) {
        self.levels = Levels::new(levels);
        self.level_ends = vec![LevelEnds::default(); levels.len()];
        let has_shares = levels.values().any(|level| level.least_share > 0.0);
        self.given = if has_shares { vec![0.0; levels.len() + 1] } else { Vec::new() };
    }

    /// Whether a level has a least share of the engine's tokens.
    pub(crate) fn guards_shares(&self) -> bool {
        !self.given.is_empty()
    }

    /// Positions among `waiting` of the requests that have waited longest of each level that was given less than its least share
    /// in the last seconds.
    pub(crate) fn owed(&self, waiting: &[RowId]) -> Vec<usize> {
        let all: f64 = self.given.iter().sum();
        let is_short = |(number, given): (u8, &f64)| {
            self.levels.get(number).is_some_and(|level| *given < f64::from(level.least_share) * all).then_some(number)
        };
        let mut owed: Vec<usize> = Vec::new();
        for number in (0..=u8::MAX).zip(&self.given).filter_map(is_short) {
            let rows = waiting.iter().enumerate().filter_map(|(at, row_id)| Some((at, self.get(*row_id)?)));
            let of_level = rows.filter(|(_, row)| row.level == number && !row.is_refused);
            owed.extend(of_level.min_by(|(_, a), (_, b)| a.arrival_ms.total_cmp(&b.arrival_ms)).map(|(at, _)| at));
        }
        owed
    }

    /// A step begins, and the engine is this fast.
    pub(crate) fn forecast_at(&mut self, speed: Speed, now_ms: f64) {
        let passed_ms = now_ms - std::mem::replace(&mut self.given_ms, now_ms);
        let kept = if self.given.is_empty() { 1.0 } else { 0.5f64.powf(passed_ms.max(0.0) / HALF_LIFE_MS) };
        self.given.iter_mut().for_each(|given| *given *= kept);
        self.speed = speed;
        self.forecast.refresh();
    }

    /// The service level of a request, if it has one.
    #[inline]
    #[must_use]
    pub fn level(&self, row: &RequestState) -> Option<&ServiceLevel> {
        self.levels.get(row.level)
    }

    /// Name of the service level of a request, if it has one.
    #[must_use]
    pub fn level_name(&self, row: &RequestState) -> Option<&str> {
        Some(self.levels.names().get(usize::from(row.level).checked_sub(1)?)?)
    }

    /// What a request will still generate.
    #[inline]
    pub(crate) fn left(&self, row: &RequestState) -> Left {
        self.forecast.left(row.tenant, row.course, row.think_tokens(), row.output_tokens())
    }

    /// Milliseconds that are left at `now_ms` to keep the level of a request, after what it still has to compute: negative
    /// where the level cannot be kept, infinite where the request has none, or late requests of its level keep their place.
    #[inline]
    #[must_use]
    pub fn level_slack_ms(&self, row: &RequestState, now_ms: f64) -> f32 {
        self.level(row).map_or(f32::INFINITY, |level| shown_slack_ms(level, self.true_slack_ms(level, row, now_ms)))
    }

    /// Milliseconds that are left at `now_ms` for more thinking, if the level of a request is to be kept: infinite where more
    /// thinking makes it no later.
    pub(crate) fn think_slack_ms(&self, row: &RequestState, now_ms: f64) -> f32 {
        let of = |level| shown_slack_ms(level, think_slack_ms(level, row, self.speed, now_ms));
        self.level(row).map_or(f32::INFINITY, of)
    }

    #[inline]
    fn true_slack_ms(&self, level: &ServiceLevel, row: &RequestState, now_ms: f64) -> f32 {
        slack_ms(level, row, self.left(row), self.speed, now_ms)
    }

    /// For how long the longest wait of its level is over for a request without an answer, when it still needs its own time;
    /// `None` without a level.
    pub(super) fn past_longest_wait_ms(&self, row: &RequestState, now_ms: f64) -> Option<f64> {
        let level = self.level(row).filter(|_| row.first_output_ms().is_none())?;
        // One that needs longer than it may wait must not go before all others from its arrival on.
        let needs_ms = needs_ms(row, self.left(row), self.speed).min(level.longest_wait_ms * 0.5);
        Some(now_ms - row.arrival_ms + f64::from(needs_ms) - f64::from(level.longest_wait_ms))
    }
}

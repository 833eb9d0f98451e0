//! The service levels of the requests, how they were kept, and what is forecast of them.

use serde::{Deserialize, Serialize};

use super::{RequestState, RequestTable};
use crate::config::{ServiceLevel, ServiceLevels};
use crate::forecast::Left;
use crate::levels::{Levels, Speed, is_kept, needs_ms, shown_slack_ms, slack_ms};

/// How a service level is kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LevelCounts {
    /// Its name.
    pub name: String,
    /// Ended requests whose level was kept, and those whose level was not.
    pub ended: [u64; 2],
    /// Live requests whose level can still be kept, and those whose level cannot.
    pub live: [u64; 2],
}

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
        let of = |((name, ended), live): ((&String, &[u64; 2]), [u64; 2])| LevelCounts {
            name: name.clone(),
            ended: *ended,
            live,
        };
        self.levels.names().iter().zip(&self.level_ends).zip(live).map(of).collect()
    }

    /// Count a request that ends, if it has a level. One that ends without an answer counts if its answer was due.
    pub(super) fn count_level(&mut self, row: &RequestState) {
        let Some(is_kept) = self.level(row).and_then(|level| is_kept(level, row, self.clock_ms)) else { return };
        if let Some(ended) = usize::from(row.level).checked_sub(1).and_then(|at| self.level_ends.get_mut(at)) {
            ended[usize::from(!is_kept)] += 1;
        }
    }

    /// Promise these levels to the requests that arrive. Before the first of them: rows have numbers of levels.
    pub fn promise(&mut self, levels: &ServiceLevels) {
        self.levels = Levels::new(levels);
        self.level_ends = vec![[0; 2]; levels.len()];
    }

    /// A step begins, and the engine is this fast.
    pub(crate) fn forecast_at(&mut self, speed: Speed) {
        self.speed = speed;
        self.forecast.refresh();
    }

    /// The service level of a request, if it has one.
    #[inline]
    #[must_use]
    pub fn level(&self, row: &RequestState) -> Option<&ServiceLevel> {
        self.levels.get(row.level)
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

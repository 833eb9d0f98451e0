//! Service levels: which one a request has, and how much time is left to keep it.

use std::collections::HashMap;

use crate::config::{Late, ServiceLevel, ServiceLevels};
use crate::forecast::Left;
use crate::{NewRequest, RequestState};

/// While its prompt is computed, a request shares the steps with those that decode: it takes so many times as long as alone.
/// The half of a step is what a policy that computes prompts beside decodes leaves them.
const PROMPT_SHARES: f32 = 2.0;
/// Of the time that is won by a level that allows more for a token of thinking than a step takes, the part that is counted
/// on: the request may think for less than was forecast.
const COUNTED_ON: f32 = 0.75;

/// The service levels of an engine, numbered from 1 in the order of their names.
#[derive(Clone, Debug, Default)]
pub(crate) struct Levels {
    names: Vec<String>,
    levels: Vec<ServiceLevel>,
    tenants: HashMap<String, u8>,
    models: HashMap<String, u8>,
    priorities: Vec<([i32; 2], u8)>,
    default: u8,
}

/// How fast the engine is at present, by its learned step time; 0 before it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Speed {
    /// Milliseconds for a token of a prompt.
    pub(crate) prefill_token_ms: f32,
    /// Milliseconds for a step with the decodes of all running requests.
    pub(crate) decode_step_ms: f32,
}

impl Levels {
    /// As configured, after its check.
    pub(crate) fn new(config: &ServiceLevels) -> Self {
        let mut out = Self::default();
        for (number, (name, level)) in (1..=u8::MAX).zip(config) {
            out.names.push(name.clone());
            out.tenants.extend(level.tenants.iter().map(|tenant| (tenant.clone(), number)));
            out.models.extend(level.models.iter().map(|model| (model.clone(), number)));
            if let [first, last] = level.priorities[..] {
                out.priorities.push(([first, last], number));
            }
            if level.default {
                out.default = number;
            }
            out.levels.push(level.clone());
        }
        out
    }

    /// The number of a request's level; 0 for none.
    pub(crate) fn of(&self, request: &NewRequest<'_>) -> u8 {
        if self.levels.is_empty() {
            return 0;
        }
        let claimed = self.names.iter().zip(&self.levels).zip(1u8..).find(|((name, level), _)| {
            level.claimable && !request.service_level.is_empty() && *name == request.service_level
        });
        let by_priority =
            || self.priorities.iter().find(|([first, last], _)| (*first..=*last).contains(&request.priority));
        (claimed.map(|(_, number)| number))
            .or_else(|| self.tenants.get(request.tenant).copied())
            .or_else(|| self.models.get(request.model).copied())
            .or_else(|| by_priority().map(|(_, number)| *number))
            .unwrap_or(self.default)
    }

    /// The names, in the order of the numbers.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// A level by its number.
    #[inline]
    pub(crate) fn get(&self, number: u8) -> Option<&ServiceLevel> {
        self.levels.get(usize::from(number).checked_sub(1)?)
    }
}

/// Longest time from the arrival of a request to the first token of its answer, milliseconds, after what it has thought.
#[inline]
fn due_ms(level: &ServiceLevel, row: &RequestState) -> f32 {
    level.ttfo_ms
        + level.prompt_ms_per_token * row.prompt_tokens() as f32
        + level.think_ms_per_token * row.think_tokens() as f32
}

/// Whether the level of a request that ends at `now_ms` was kept; `None` for one that ends without an answer in time.
pub(crate) fn is_kept(level: &ServiceLevel, row: &RequestState, now_ms: f64) -> Option<bool> {
    let due_ms = f64::from(due_ms(level, row));
    let Some(first_output_ms) = row.first_output_ms() else {
        return (now_ms - row.arrival_ms() > due_ms).then_some(false);
    };
    let gaps = row.output_tokens().saturating_sub(1);
    let answered_ms = row.last_token_ms() - first_output_ms;
    let is_paced = answered_ms <= f64::from(level.tpot_ms) * f64::from(gaps);
    Some(first_output_ms - row.arrival_ms() <= due_ms && (gaps == 0 || is_paced))
}

/// Milliseconds until a request generates the first token of its answer, if it gets tokens in every step from now on.
#[inline]
pub(crate) fn needs_ms(row: &RequestState, left: Left, speed: Speed) -> f32 {
    let prompt_tokens = row.needed_tokens(1) as f32;
    PROMPT_SHARES * prompt_tokens * speed.prefill_token_ms + (left.think + 1.0) * speed.decode_step_ms
}

/// Milliseconds that are left at `now_ms` to keep the level of a request: negative where it cannot be kept any more.
#[inline]
pub(crate) fn slack_ms(level: &ServiceLevel, row: &RequestState, left: Left, speed: Speed, now_ms: f64) -> f32 {
    // What the level allows for a token that is still to come is more than what it takes, or less.
    let gained_ms = |allowed_ms: f32, tokens: f32| {
        let ms = (allowed_ms - speed.decode_step_ms) * tokens;
        if ms > 0.0 { COUNTED_ON * ms } else { ms }
    };
    // Tokens to come are in what was gained.
    let needs_ms = needs_ms(row, Left::default(), speed);
    let due_ms = due_ms(level, row);
    match row.first_output_ms() {
        None => {
            let waited_ms = (now_ms - row.arrival_ms()) as f32;
            due_ms + gained_ms(level.think_ms_per_token, left.think) - waited_ms - needs_ms
        }
        Some(first_ms) => {
            let missed_ms = (first_ms - row.arrival_ms()) as f32 - due_ms;
            if missed_ms > 0.0 {
                return -missed_ms;
            }
            let allowed_ms = level.tpot_ms * row.output_tokens() as f32;
            allowed_ms + gained_ms(level.tpot_ms, left.output) - row.output_ms(now_ms) - needs_ms
        }
    }
}

/// Milliseconds that are left at `now_ms` for more thinking, if the level of a request is to be kept; infinite while thinking is
/// no slower than the level allows.
pub(crate) fn think_slack_ms(level: &ServiceLevel, row: &RequestState, speed: Speed, now_ms: f64) -> f32 {
    if speed.decode_step_ms <= level.think_ms_per_token {
        return f32::INFINITY;
    }
    due_ms(level, row) - (now_ms - row.arrival_ms()) as f32 - speed.decode_step_ms
}

/// Slack as policies see it: infinite where late requests keep their place, because the level decides nothing then.
#[inline]
pub(crate) fn shown_slack_ms(level: &ServiceLevel, slack_ms: f32) -> f32 {
    match level.late {
        Late::Last | Late::Refuse => slack_ms,
        Late::Serve => f32::INFINITY,
    }
}

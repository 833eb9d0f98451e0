//! A guard of the first token and a guard of the pace: SCORPIO (arXiv 2505.23022).
//!
//! **TTFT guard.** Requests wait in the order of their deadlines. A request whose deadline cannot be met behind the prompts that go
//! before it is put last. The paper rejects it; in Meridian the operator decides that, by `late = "refuse"` in the service level.
//!
//! **TPOT guard.** The TRP of a request is the tightest time between two tokens, of all that run, over its own.
//! *Credit-based batching*: a request earns its TRP in each step, and takes part when it has a whole credit. *Admission*: the sum
//! of the TRPs is the virtual batch size. No request is admitted if a step of that size would take longer than the tightest pace.
//!
//! The constants are those of the authors' code, since the paper's text was not available: 0.99 of the tightest pace, 50 ms to
//! spare before a deadline, and a factor of 1.3 on the predicted step for what prompts cost the pace, that of their experiments.
//! In their engine prompts have steps of their own. Here they share the steps, so their tokens are limited to the same pace.
//!
//! A level promises the pace of an answer. Thinking therefore takes part in every step and counts as a whole request, and so does a
//! request without a level. The deadline is that of the first token of the answer, and thinking takes as long as the steps. The
//! queue is divided into parts of a second by deadline and not sorted. The host forecasts lengths and learns the time of a step;
//! the paper has a classifier of prompts and profiles.

use meridian_policy_sdk::{
    Column, DispatchPolicy, Init, Phase, Policy, Request, Requests, State, Step, clamped, export_policy,
};

/// Of the tightest pace, what a step may take by the learned step time.
const OF_TPOT: f32 = 0.99 / 1.3;
/// Left to a deadline when the prompts before it are computed, at least, milliseconds.
const TO_SPARE_MS: f32 = 50.0;
/// Deadlines are told apart up to this, 70 minutes; requests without one come behind, by arrival.
const SPAN_MS: f32 = 4_194_304.0;
/// For the prompts before a deadline, deadlines are told apart in parts of so many milliseconds, up to so many.
const PART_MS: f32 = 125.0;
const PARTS: usize = 128;
/// Numbers of levels.
const LEVELS: usize = 256;
/// Requests start with parts of a credit, so that those of a level take turns: multiples of the golden ratio are spread evenly.
const TURN: u32 = 0x9e37_79b9;
/// A step has at least so many prompt tokens.
const LEAST_TOKENS: f32 = 128.0;

/// What waits before a deadline, as far as it can be in time.
#[derive(Clone, Copy, Debug, Default)]
struct Ahead {
    prompt_ms: f32,
    batch: f32,
}

/// The policy.
#[derive(Clone, Debug)]
pub struct Scorpio {
    /// Shortest time between two tokens that one that runs is promised; infinite without any.
    tightest_ms: f32,
    /// Virtual batch size of those that run.
    batch: f32,
    ahead: [Ahead; PARTS],
    /// What the prompts of this step take, milliseconds.
    chunk_ms: f32,
    /// Credits that a request of each level has earned, without whole ones, before this step.
    credits: [f32; LEVELS],
    earned: [f32; LEVELS],
    token_budget: Option<u32>,
}

impl Policy for Scorpio {
    const NAME: &'static str = "scorpio";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Least deadline first, admission by the pace that levels promise: keeps service levels in a burst, delays those that are late.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config()?;
        Ok(Self {
            tightest_ms: f32::INFINITY,
            batch: 0.0,
            ahead: [Ahead::default(); PARTS],
            chunk_ms: 0.0,
            credits: [0.0; LEVELS],
            earned: [0.0; LEVELS],
            token_budget: None,
        })
    }
}

/// Tokens of a decode.
#[inline(always)]
fn decode_tokens(step: &Step) -> f32 {
    step.decode_tokens.max(1) as f32
}

/// Which part of the queue a slack is in. `as` saturates.
#[inline(always)]
fn part(slack_ms: f32) -> usize {
    ((slack_ms / PART_MS) as usize).min(PARTS - 1)
}

/// Number of its level, below `LEVELS`.
#[inline(always)]
fn level(request: &Request<'_, Scorpio>) -> usize {
    (request.level() as usize).min(LEVELS - 1)
}

impl Scorpio {
    /// Part of the steps that a request takes part in (TRP), beside a pace of `tightest_ms`.
    #[inline(always)]
    fn share(request: &Request<'_, Self>, tightest_ms: f32) -> f32 {
        let tpot_ms = request.level_tpot_ms();
        let runs = request.state() == State::Running;
        let answers = if runs { request.phase() == Phase::Output } else { request.think_left() < 1.0 };
        let is_paced = tightest_ms < tpot_ms && tpot_ms < f32::INFINITY && answers;
        if is_paced { tightest_ms / tpot_ms } else { 1.0 }
    }

    /// Milliseconds that are left to the deadline; infinite without one. The host counts thinking at the pace of decodes alone.
    #[inline(always)]
    fn slack_ms(&self, step: &Step, request: &Request<'_, Self>) -> f32 {
        let level_ms = request.level_slack_ms();
        let slack_ms = if level_ms < f32::INFINITY {
            level_ms - self.chunk_ms * request.think_left()
        } else {
            request.slack_ms() - request.missing_tokens() * step.prefill_token_ms
        };
        if slack_ms.is_nan() { f32::INFINITY } else { slack_ms }
    }

    /// Whether the prompts before a request that waits leave it no time.
    #[inline(always)]
    fn is_late(&self, slack_ms: f32) -> bool {
        slack_ms < self.ahead[part(slack_ms)].prompt_ms + TO_SPARE_MS
    }

    /// Whether the virtual batch with a request that waits keeps the tightest pace; one that no decode alone can keep keeps
    /// nobody out.
    #[inline(always)]
    fn is_admitted(&self, step: &Step, request: &Request<'_, Self>) -> bool {
        let tpot_ms = request.level_tpot_ms();
        let tightest_ms = if tpot_ms < self.tightest_ms { tpot_ms } else { self.tightest_ms };
        let slack_ms = self.slack_ms(step, request);
        let last = if self.is_late(slack_ms) { PARTS - 1 } else { part(slack_ms) };
        let ahead = if request.state() == State::Preempted { 0.0 } else { self.ahead[last].batch };
        let batch = self.batch + ahead + Self::share(request, tightest_ms);
        let step_ms = |batch: f32| step.fixed_ms + batch * decode_tokens(step) * step.decode_token_ms;
        let most_ms = OF_TPOT * tightest_ms;
        // A NaN is no reason to keep anybody out.
        !(step_ms(batch) > most_ms && step_ms(1.0) <= most_ms)
    }

    /// What waits, by deadline.
    fn queue(&mut self, step: &Step, batch: &Requests<'_, Self>, running_ms: f32, token_ms: f32) {
        self.ahead = [Ahead::default(); PARTS];
        for request in batch.iter().filter(|request| request.state() != State::Running) {
            let slack_ms = self.slack_ms(step, &request);
            if slack_ms >= TO_SPARE_MS {
                let ahead = &mut self.ahead[part(slack_ms)];
                ahead.prompt_ms += request.missing_tokens() * token_ms;
                ahead.batch += Self::share(&request, self.tightest_ms);
            }
        }
        let mut before = Ahead { prompt_ms: running_ms, batch: 0.0 };
        for (ahead, part) in self.ahead.iter_mut().zip(1u16..) {
            let own = std::mem::replace(ahead, before);
            // Those that are late are not waited for.
            if before.prompt_ms < f32::from(part) * PART_MS {
                before = Ahead { prompt_ms: before.prompt_ms + own.prompt_ms, batch: before.batch + own.batch };
            }
        }
    }
}

impl DispatchPolicy for Scorpio {
    const INPUTS: &'static [Column] = &[
        Column::Request,
        Column::Phase,
        Column::State,
        Column::WaitMs,
        Column::SlackMs,
        Column::PromptTokens,
        Column::ComputedTokens,
        Column::ThinkTokens,
        Column::OutputTokens,
        Column::ThinkLeft,
        Column::Level,
        Column::LevelSlackMs,
        Column::LevelTpotMs,
    ];
    const CAPS_TOKENS: bool = true;

    fn observe(&mut self, step: &Step, batch: &Requests<'_, Self>) {
        let running = || batch.iter().filter(|request| request.state() == State::Running);
        self.tightest_ms = running().map(|request| request.level_tpot_ms()).fold(f32::INFINITY, f32::min);
        for (credits, earned) in self.credits.iter_mut().zip(&mut self.earned) {
            *credits += std::mem::take(earned);
            *credits -= (*credits as u32) as f32;
        }
        self.batch = 0.0;
        let (mut prompt_tokens, mut decodes) = (0.0, 0.0);
        for request in running() {
            let share = Self::share(&request, self.tightest_ms);
            self.batch += share;
            if share < 1.0 {
                self.earned[level(&request)] = share;
            }
            let missing = request.missing_tokens();
            if missing > decode_tokens(step) {
                prompt_tokens += missing;
            } else {
                decodes += decode_tokens(step);
            }
        }
        let decode_ms = step.fixed_ms + decodes * step.decode_token_ms;
        let most_ms = OF_TPOT * self.tightest_ms - decode_ms;
        let chunk = clamped(most_ms / step.prefill_token_ms, LEAST_TOKENS, step.token_budget.max(1) as f32);
        self.token_budget =
            (step.has_step_time() && self.tightest_ms < f32::INFINITY).then_some((decodes + chunk) as u32);
        // Without a promise, nothing says how long the steps of thinking will be.
        self.chunk_ms = if self.tightest_ms < f32::INFINITY { chunk * step.prefill_token_ms } else { 0.0 };
        let token_ms = step.prefill_token_ms + decode_ms / chunk;
        self.queue(step, batch, prompt_tokens * token_ms, token_ms);
    }

    #[inline(always)]
    fn key(&self, step: &Step, request: &Request<'_, Self>) -> f32 {
        let runs = request.state() == State::Running;
        if request.state() == State::Preempted || runs && request.missing_tokens() <= decode_tokens(step) {
            return -1.0;
        }
        let slack_ms = self.slack_ms(step, request);
        if !runs && self.is_late(slack_ms) || slack_ms < 0.0 {
            3.0 * SPAN_MS + clamped(slack_ms, -SPAN_MS, SPAN_MS)
        } else if slack_ms < SPAN_MS {
            slack_ms
        } else {
            2.0 * SPAN_MS - clamped(request.wait_ms(), 0.0, SPAN_MS - 1.0)
        }
    }

    fn has_caps(&self, _step: &Step) -> bool {
        self.tightest_ms < f32::INFINITY
    }

    #[inline(always)]
    fn token_cap(&self, step: &Step, request: &Request<'_, Self>) -> u32 {
        let takes_part = if request.state() != State::Running {
            self.is_admitted(step, request)
        } else if request.missing_tokens() > decode_tokens(step) {
            true
        } else {
            let turn = ((request.request() as u32).wrapping_mul(TURN) >> 8) as f32 / 16_777_216.0;
            let credits = self.credits[level(request)] + turn;
            (credits + Self::share(request, self.tightest_ms)) as u32 > credits as u32
        };
        if takes_part { u32::MAX } else { 0 }
    }

    fn token_budget(&self, step: &Step) -> Option<u32> {
        Some(self.token_budget?.clamp(1, step.token_budget.max(1)))
    }
}

export_policy!(dispatch: Scorpio);

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rand::RngExt;
use rand_distr::{Distribution, Exp1, Gamma, LogNormal};

use super::sample::{Choice, Crowd, Phases, Prompts, log_normal};
use super::streams::{Stream, Streams};
use super::{Prefix, Regime, TraceRequest, Wave, Workload, WorkloadError};

/// Times are whole microseconds inside, so that order does not hang on the last bit of a float.
const US: f64 = 1e6;
/// Longest single step of time, seconds: 64 bits of microseconds hold half a million of them.
const LONGEST_STEP_S: f64 = 3e7;

/// The requests of a workload, without end, in order of arrival. Memory grows with live conversations only. The same
/// seed gives the same requests; lengths are rounded to tokens and times to microseconds, which hides the last bit in
/// which the mathematics of platforms differ.
pub struct Generator {
    workload: Workload,
    streams: Streams,
    clock: Clock,
    prompts: Prompts,
    phases: Phases,
    crowd: Crowd,
    classes: Choice,
    turn_gap: LogNormal<f64>,
    text: LogNormal<f64>,
    /// Arrival of the next first turn, and which it is.
    next: (u64, u64),
    live: BinaryHeap<Reverse<Turn>>,
}

/// A later turn that is due. Ordered by time, then by conversation.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    at_us: u64,
    id: u64,
    turn: u32,
    /// Tokens of the prompt.
    prompt_tokens: u32,
}

impl Generator {
    /// Starts at the first request.
    ///
    /// # Errors
    /// [`WorkloadError::Field`] when the workload does not pass [`Workload::check`].
    pub fn new(workload: &Workload, seed: u64) -> Result<Self, WorkloadError> {
        workload.check()?;
        let streams = Streams::new(seed);
        let sessions = &workload.sessions;
        let requests_per_start = 1.0 + sessions.share * (sessions.mean_turns - 1.0);
        let mut clock = Clock::new(workload, streams, requests_per_start / workload.requests_per_s);
        let first_us = clock.step(0, 0);
        Ok(Self {
            streams,
            clock,
            prompts: Prompts::new(&workload.prompt),
            phases: Phases::new(&workload.modes, workload.most_generated_tokens),
            crowd: Crowd::new(&workload.tenants, streams),
            classes: Choice::new(workload.classes.iter().map(|class| class.weight)),
            turn_gap: log_normal(sessions.gap_median_s, sessions.gap_sigma),
            text: log_normal(sessions.text_median, sessions.text_sigma),
            next: (first_us, 0),
            live: BinaryHeap::new(),
            workload: workload.clone(),
        })
    }

    /// The next turn in order of time: a first one, unless a later one is due.
    fn due(&mut self) -> Turn {
        let (at_us, id) = self.next;
        if self.live.peek().is_some_and(|Reverse(turn)| turn.at_us <= at_us)
            && let Some(Reverse(turn)) = self.live.pop()
        {
            return turn;
        }
        self.next = (self.clock.step(at_us, id + 1), id + 1);
        let prompt_tokens = self.prompts.draw(&mut self.streams.rng(Stream::Prompt, id, 0), self.scale(id));
        Turn { at_us, id, turn: 0, prompt_tokens }
    }

    fn tenant(&self, id: u64) -> usize {
        self.crowd.draw(&mut self.streams.rng(Stream::Tenant, id, 0))
    }

    fn scale(&self, id: u64) -> f64 {
        self.crowd.scale(self.tenant(id))
    }

    /// Whether a first request may have a second turn.
    fn is_session(&self, id: u64) -> bool {
        let sessions = &self.workload.sessions;
        sessions.mean_turns > 1.0 && self.streams.rng(Stream::Turns, id, 0).random::<f64>() < sessions.share
    }

    /// Plans the turn that follows, unless the conversation ends.
    fn follow(&mut self, turn: &Turn, output_tokens: u32, scale: f64) {
        let sessions = &self.workload.sessions;
        let Some(next) = turn.turn.checked_add(1) else { return };
        let ends: f64 = self.streams.rng(Stream::Turns, turn.id, next).random();
        if ends < 1.0 / sessions.mean_turns {
            return;
        }
        let text = self.text.sample(&mut self.streams.rng(Stream::FollowUp, turn.id, next)) * scale;
        let prompt = f64::from(turn.prompt_tokens) + f64::from(output_tokens) + text.round().max(1.0);
        if prompt > f64::from(sessions.most_prompt_tokens) {
            return;
        }
        let gap_s = self.turn_gap.sample(&mut self.streams.rng(Stream::TurnGap, turn.id, next));
        self.live.push(Reverse(Turn {
            at_us: turn.at_us.saturating_add(microseconds(gap_s)),
            id: turn.id,
            turn: next,
            prompt_tokens: prompt as u32,
        }));
    }
}

impl Iterator for Generator {
    type Item = TraceRequest;

    fn next(&mut self) -> Option<TraceRequest> {
        let turn = self.due();
        let tenant = self.tenant(turn.id);
        let scale = self.crowd.scale(tenant);
        let mut rng = self.streams.rng(Stream::Phases, turn.id, turn.turn);
        let (think_tokens, output_tokens) = self.phases.draw(&mut rng, scale);
        let class = self.classes.draw(&mut self.streams.rng(Stream::Class, turn.id, 0));
        let class = self.workload.classes.get(class);
        let request = TraceRequest {
            arrival_s: turn.at_us as f64 / US,
            prompt_tokens: turn.prompt_tokens,
            think_tokens,
            output_tokens,
            tenant: self.crowd.name(tenant),
            priority: class.map_or(0, |class| class.priority),
            deadline_ms: class.and_then(|class| class.deadline_ms).unwrap_or(f64::INFINITY),
            prefix: Prefix::None,
        };
        if !self.is_session(turn.id) {
            return Some(request);
        }
        self.follow(&turn, output_tokens, scale);
        Some(TraceRequest { prefix: Prefix::Session { id: turn.id, turn: turn.turn }, ..request })
    }
}

/// When conversations and single requests start.
struct Clock {
    streams: Streams,
    mean_gap_s: f64,
    /// Of mean 1; `None` for equal gaps.
    gap: Option<Gamma<f64>>,
    wave: Option<Wave>,
    regime: Option<Regime>,
    /// Which stretch of the regime now is, even ones busy, and where it ends.
    stretch: (u64, f64),
}

impl Clock {
    fn new(workload: &Workload, streams: Streams, mean_gap_s: f64) -> Self {
        let variance = workload.arrivals.gap_cv.powi(2);
        Self {
            streams,
            mean_gap_s,
            gap: Gamma::new(1.0 / variance, variance).ok(),
            wave: workload.arrivals.wave.clone(),
            regime: workload.arrivals.regime.clone(),
            stretch: (u64::MAX, 0.0),
        }
    }

    /// The start after one at `now_us`, which is the `id`-th. The rate at `now_us` holds for the whole gap, which is
    /// exact when waves and stretches are long against gaps.
    fn step(&mut self, now_us: u64, id: u64) -> u64 {
        let gap = self.gap.map_or(1.0, |gap| gap.sample(&mut self.streams.rng(Stream::Gap, id, 0)));
        let factor = self.factor(now_us as f64 / US);
        now_us.saturating_add(microseconds(gap * self.mean_gap_s / factor))
    }

    /// Rate over mean rate.
    fn factor(&mut self, now_s: f64) -> f64 {
        let wave = self
            .wave
            .as_ref()
            .map_or(1.0, |wave| 1.0 + wave.amplitude * (std::f64::consts::TAU * (now_s / wave.period_s).fract()).sin());
        let Some(regime) = &self.regime else { return wave };
        let (index, ends_s) = &mut self.stretch;
        while *ends_s <= now_s {
            *index = index.wrapping_add(1);
            let share = if index.is_multiple_of(2) { regime.share } else { 1.0 - regime.share };
            let length: f64 = Exp1.sample(&mut self.streams.rng(Stream::Regime, *index, 0));
            // A stretch of no length at all would never end the loop.
            *ends_s += (length * share * regime.cycle_s).max(1e-6);
        }
        let quiet = (1.0 - regime.factor * regime.share) / (1.0 - regime.share);
        wave * if index.is_multiple_of(2) { regime.factor } else { quiet }
    }
}

fn microseconds(seconds: f64) -> u64 {
    (seconds.min(LONGEST_STEP_S) * US).round() as u64
}

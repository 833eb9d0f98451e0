//! Sessions in closed loop: the next request of a session arrives its gap after the last one ended.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use hdrhistogram::Histogram;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_pcg::Pcg64;

use super::live::{Facts, SessionTurn};
use super::recorder::Collector;
use crate::trace::{Session, TraceRequest};

/// Groups of turns that the time to first token is told of: the first, the next nine, the next forty, and the rest.
const TURN_GROUPS: [(&str, u32); 4] = [("turn_1", 1), ("turn_2_10", 10), ("turn_11_50", 50), ("turn_51_on", u32::MAX)];

/// Sessions to be played, so many at a time: when one ends, the next begins.
///
/// ```
/// use meridian_bench::sim::ClosedLoop;
/// use meridian_bench::trace::{Session, SessionRequest};
///
/// let request = SessionRequest { prompt_tokens: 9, output_tokens: 1, ..SessionRequest::default() };
/// let session = Session::new("a".into(), 64, vec![request.clone(), request]);
/// assert_eq!(ClosedLoop::new([session].into(), 8, 1).requests(), 2);
/// ```
pub struct ClosedLoop {
    sessions: Arc<[Session]>,
    /// The order in which they begin.
    order: Vec<usize>,
    /// How many of them have begun.
    begun: usize,
    /// Most at a time.
    at_once: usize,
    door: Door,
    /// Position of each session's first request among those of all.
    first: Vec<usize>,
    begun_ms: Vec<f64>,
    /// Milliseconds that the engine took for each session's requests.
    served_ms: Vec<f64>,
    /// Milliseconds of gaps after tools.
    tool_ms: Vec<f64>,
    completion: Histogram<u64>,
    served: Histogram<u64>,
    /// Without the gaps that users took.
    working: Histogram<u64>,
    ttft: Vec<Histogram<u64>>,
}

/// The next request of a session.
pub(super) struct Next {
    pub(super) at_ms: f64,
    pub(super) index: usize,
    pub(super) session: usize,
    pub(super) turn: usize,
}

impl ClosedLoop {
    /// `at_once` sessions at a time, in an order drawn from `seed`; with seed 1 in the order given.
    #[must_use]
    pub fn new(sessions: Arc<[Session]>, at_once: u32, seed: u64) -> Self {
        let mut order: Vec<usize> = (0..sessions.len()).collect();
        if seed != 1 {
            order.shuffle(&mut Pcg64::seed_from_u64(seed));
        }
        let starts = sessions.iter().scan(0, |next, session| {
            let first = *next;
            *next += session.requests.len();
            Some(first)
        });
        let histogram = || Histogram::new(3).expect("few digits");
        Self {
            first: starts.collect(),
            order,
            begun: 0,
            at_once: at_once.max(1) as usize,
            door: Door::default(),
            begun_ms: vec![0.0; sessions.len()],
            served_ms: vec![0.0; sessions.len()],
            tool_ms: vec![0.0; sessions.len()],
            sessions,
            completion: histogram(),
            served: histogram(),
            working: histogram(),
            ttft: TURN_GROUPS.iter().map(|_| histogram()).collect(),
        }
    }

    /// Let only these sessions into an engine with so many tokens of KV memory; the others wait outside, first come first
    /// served.
    #[must_use]
    pub fn admitting(mut self, admitted: Admitted, kv_tokens: u64) -> Self {
        (self.door.admitted, self.door.kv_tokens) = (admitted, kv_tokens);
        self
    }

    /// When the request at this place arrived, which comes in now; `None` where it has to wait.
    pub(super) fn comes_in(&mut self, index: usize, now_ms: f64) -> Option<f64> {
        let session = self.first.partition_point(|first| *first <= index) - 1;
        let turn = index - self.first[session];
        let tokens = u64::from(self.sessions[session].requests[turn].prompt_tokens);
        self.door.comes_in(Next { at_ms: now_ms, index, session, turn }, tokens)
    }

    /// The requests that waited outside and have room now.
    pub(super) fn let_in(&mut self, now_ms: f64) -> Vec<Next> {
        let mut let_in = Vec::new();
        while let Some(next) = self.door.next() {
            let_in.push(Next { at_ms: now_ms, ..next });
        }
        let_in
    }

    /// Requests of all sessions.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.sessions.iter().map(|session| session.requests.len()).sum()
    }

    /// The first requests of the sessions that begin at once.
    pub(super) fn begin(&mut self) -> Vec<Next> {
        (0..self.at_once).map_while(|_| self.begin_one(0.0)).collect()
    }

    fn begin_one(&mut self, now_ms: f64) -> Option<Next> {
        let session = *self.order.get(self.begun)?;
        self.begun += 1;
        self.begun_ms[session] = now_ms;
        Some(Next { at_ms: now_ms, index: self.first[session], session, turn: 0 })
    }

    /// What the session sends.
    pub(super) fn request(&self, next: &Next) -> TraceRequest {
        self.sessions[next.session].request(next.session as u64, next.turn)
    }

    /// The facts of the request at this place, beyond its tokens.
    pub(super) fn turn_of(&self, index: usize) -> SessionTurn {
        let session = self.first.partition_point(|first| *first <= index) - 1;
        let turn = index - self.first[session];
        let of = &self.sessions[session];
        let request = &of.requests[turn];
        SessionTurn {
            turn: turn as u32,
            stopped_for_tool: request.stopped_for_tool,
            known_tokens: request.known_blocks * of.block_tokens,
            next_tokens: request.next_blocks * of.block_tokens,
            next_gap_ms: of.requests.get(turn + 1).map_or(f64::INFINITY, |next| next.gap_s * 1e3),
        }
    }

    /// A request ended, or was refused: what arrives because of it.
    pub(super) fn ended(&mut self, facts: &Facts, first_token_ms: f64, now_ms: f64) -> Option<Next> {
        let (session, turn) = (facts.session? as usize, facts.turn?);
        let sent = &self.sessions[session].requests[turn.turn as usize];
        let tokens = [sent.prompt_tokens, sent.think_tokens, sent.output_tokens].map(u64::from).iter().sum();
        self.door.turn_ends(session, tokens, turn.stopped_for_tool, turn.next_gap_ms.is_infinite());
        self.served_ms[session] += now_ms - facts.arrival_ms;
        if first_token_ms.is_finite() {
            let group = TURN_GROUPS.iter().position(|(_, last)| turn.turn < *last).unwrap_or(0);
            note(&mut self.ttft[group], first_token_ms - facts.arrival_ms);
        }
        if turn.next_gap_ms.is_finite() {
            if turn.stopped_for_tool {
                self.tool_ms[session] += turn.next_gap_ms;
            }
            let turn = turn.turn as usize + 1;
            let index = self.first[session] + turn;
            let gap_ms = self.sessions[session].requests[turn].gap_s * 1e3;
            return Some(Next { at_ms: now_ms + gap_ms, index, session, turn });
        }
        note(&mut self.completion, now_ms - self.begun_ms[session]);
        note(&mut self.served, self.served_ms[session]);
        note(&mut self.working, self.served_ms[session] + self.tool_ms[session]);
        self.begin_one(now_ms)
    }

    /// What the sessions of a run were like.
    pub(super) fn metrics(&self, recorder: &Collector, block_tokens: u32) -> Vec<(String, f64)> {
        let seconds = |histogram: &Histogram<u64>, q: f64| histogram.value_at_quantile(q) as f64 / 1e3;
        let mut out = vec![("sessions".to_owned(), self.completion.len() as f64)];
        for (name, histogram) in
            [("session", &self.completion), ("session_work", &self.working), ("session_served", &self.served)]
        {
            out.push((format!("{name}_p50_s"), seconds(histogram, 0.5)));
            out.push((format!("{name}_p95_s"), seconds(histogram, 0.95)));
            out.push((format!("{name}_mean_s"), histogram.mean() / 1e3));
        }
        for ((name, _), histogram) in TURN_GROUPS.iter().zip(&self.ttft) {
            out.push((format!("ttft_{name}_p50_ms"), histogram.value_at_quantile(0.5) as f64));
            out.push((format!("ttft_{name}_p99_ms"), histogram.value_at_quantile(0.99) as f64));
        }
        let Kept { known, needed, asked, again } = recorder.kept_prefixes();
        out.push(("hit_rate_unlimited".to_owned(), known as f64 / asked.max(1) as f64));
        out.push(("needed_blocks".to_owned(), (needed / u64::from(block_tokens)) as f64));
        out.push(("computed_again_tokens".to_owned(), (needed + again) as f64));
        out
    }
}

/// Which sessions are let into the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admitted {
    /// All.
    #[default]
    All,
    /// So many at a time, each from a request of its until its user pauses or it ends.
    AtMost(u32),
    /// As many as fit, each from its first request until it ends: a session enters when its first prompt fits beside what
    /// those inside have (ConServe, arXiv 2606.01839, in one engine).
    Pinned,
}

/// Keeps sessions out of the engine.
#[derive(Default)]
struct Door {
    admitted: Admitted,
    kv_tokens: u64,
    /// The sessions that were let in, with the tokens of their latest request.
    inside: HashMap<usize, u64>,
    /// The sum of these.
    tokens_inside: u64,
    /// With the tokens of their prompts.
    outside: VecDeque<(Next, u64)>,
    /// When requests arrived that were outside, by their place.
    waited: HashMap<usize, f64>,
}

impl Door {
    fn has_room(&self, tokens: u64) -> bool {
        match self.admitted {
            Admitted::All => true,
            Admitted::AtMost(most) => self.inside.len() < most as usize,
            Admitted::Pinned => self.inside.is_empty() || self.tokens_inside + tokens <= self.kv_tokens,
        }
    }

    fn comes_in(&mut self, next: Next, tokens: u64) -> Option<f64> {
        let at_ms = self.waited.remove(&next.index);
        let is_inside = self.inside.contains_key(&next.session);
        if !is_inside && (!self.has_room(tokens) || !self.outside.is_empty()) {
            self.outside.push_back((next, tokens));
            return None;
        }
        self.holds(next.session, tokens);
        Some(at_ms.unwrap_or(next.at_ms))
    }

    fn next(&mut self) -> Option<Next> {
        let (_, tokens) = self.outside.front()?;
        if !self.has_room(*tokens) {
            return None;
        }
        let (next, tokens) = self.outside.pop_front()?;
        self.holds(next.session, tokens);
        self.waited.insert(next.index, next.at_ms);
        Some(next)
    }

    fn turn_ends(&mut self, session: usize, tokens: u64, stopped_for_tool: bool, is_last: bool) {
        if is_last || (!stopped_for_tool && self.admitted != Admitted::Pinned) {
            self.tokens_inside -= self.inside.remove(&session).unwrap_or(0);
        } else {
            self.holds(session, tokens);
        }
    }

    fn holds(&mut self, session: usize, tokens: u64) {
        self.tokens_inside += tokens;
        self.tokens_inside -= self.inside.insert(session, tokens).unwrap_or(0);
    }
}

/// Sums of a run.
pub(super) struct Kept {
    /// Tokens of prompts that an unlimited cache would have had.
    pub(super) known: u64,
    /// Those of them that this one had no longer.
    pub(super) needed: u64,
    /// Tokens of prompts.
    pub(super) asked: u64,
    /// Tokens that preempted requests computed again.
    pub(super) again: u64,
}

fn note(histogram: &mut Histogram<u64>, ms: f64) {
    histogram.record((ms as u64).max(1)).expect("it grows with what is recorded");
}

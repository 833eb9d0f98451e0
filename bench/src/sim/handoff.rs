//! Engines that think and engines that answer. At the end of its thinking, a request leaves its engine, its KV blocks travel,
//! and another engine writes the answer. The decisions are those of the front ([`Handoffs`]).
//!
//! Order of events: the blocks travel over the link of the engine that answers, one request after the other; then the request
//! joins the queue of that engine, which admits it when it has room for all of its blocks. In vLLM the request waits for room
//! first and its blocks travel then, so the sum is the same. The first engine keeps the blocks until the request is admitted.
//! A request that is preempted later is computed again. Not simulated: a part of the prompt that the second engine has in its
//! prefix cache travels all the same, and no lease ends.

use std::collections::HashMap;

use meridian_core::handoff::{Answered, HandoffPolicy, Handoffs};

use super::live::Live;
use crate::trace::TraceRequest;

/// How KV blocks travel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    /// Milliseconds that each takes beside its bytes: the request to the second engine, and the handshake.
    pub fixed_ms: f64,
    /// Bytes a second into one engine, in units of 10^9.
    pub gb_s: f64,
}

impl Default for Transfer {
    /// 20 GB/s: four fifths of a link of 200 Gb/s.
    fn default() -> Self {
        Self { fixed_ms: 5.0, gb_s: 20.0 }
    }
}

/// How the engines of a simulation are parted.
pub struct HandoffFleet {
    /// Engines that think: the first ones. The rest answers.
    pub think: usize,
    /// Which requests move, and where.
    pub policy: Box<dyn HandoffPolicy>,
    /// How their blocks travel.
    pub transfer: Transfer,
}

/// The part of a request that its engines need.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Move {
    /// Numbers of KV blocks with which it moves at the end of its thinking; fewest and most.
    pub(super) offered: Option<(u32, u32)>,
    /// It is to leave its engine now.
    pub(super) leaves: bool,
    /// The engine that thought, and the number of its kept blocks there, until the request is admitted elsewhere.
    pub(super) kept: Option<(usize, usize)>,
    /// The engine that answers, by its position among them, and the blocks that the request had.
    pub(super) target: Option<(usize, u32)>,
}

/// A request that leaves its engine; its blocks there have this number.
pub(super) struct Leaves {
    pub(super) live: Box<Live>,
    pub(super) blocks: u32,
    pub(super) kept: usize,
}

/// A request on its way.
pub(super) struct OnTheWay {
    pub(super) at_ms: f64,
    pub(super) engine: usize,
    pub(super) live: Box<Live>,
    pub(super) request: TraceRequest,
}

/// The front.
pub(super) struct Front {
    pub(super) think: usize,
    handoffs: Handoffs,
    transfer: Transfer,
    kv_token_bytes: f64,
    /// When the link of each engine that answers is free.
    free_ms: Vec<f64>,
    /// Requests that think, by their position in the trace.
    thinking: HashMap<usize, TraceRequest>,
    moved: u64,
    moved_ms: f64,
}

impl Front {
    pub(super) fn new(fleet: HandoffFleet, engines: usize, kv_token_bytes: f64) -> Self {
        let HandoffFleet { think, policy, transfer } = fleet;
        let answer = engines.saturating_sub(think);
        Self {
            think,
            handoffs: Handoffs::new(policy, answer),
            transfer,
            kv_token_bytes,
            free_ms: vec![0.0; answer],
            thinking: HashMap::new(),
            moved: 0,
            moved_ms: 0.0,
        }
    }

    /// A request arrives that thinks.
    pub(super) fn arrives(&mut self, index: usize, request: &TraceRequest, now_ms: f64) -> Move {
        self.thinking.insert(index, request.clone());
        let offered = self.handoffs.offer(now_ms).ok().map(|blocks| (*blocks.start(), *blocks.end()));
        Move { offered, ..Move::default() }
    }

    /// A request left engine `from`: where it goes, and when it is there.
    pub(super) fn leaves(&mut self, leaves: Leaves, from: usize, now_ms: f64) -> OnTheWay {
        let Leaves { mut live, blocks, kept } = leaves;
        // No simulated engine fails.
        let target = self.handoffs.target(blocks, now_ms).unwrap_or(0);
        let bytes = f64::from(live.known_tokens - 1) * self.kv_token_bytes;
        let at_ms = self.free_ms[target].max(now_ms) + self.transfer.fixed_ms + bytes / (self.transfer.gb_s * 1e6);
        self.free_ms[target] = at_ms;
        self.moved += 1;
        self.moved_ms += at_ms - now_ms;
        live.moves.kept = Some((from, kept));
        live.moves.target = Some((target, blocks));
        let request = self.thinking.remove(&live.facts.index).expect("it arrived, and leaves once");
        OnTheWay { at_ms, engine: self.think + target, live, request }
    }

    /// A request ended that thought.
    pub(super) fn ended(&mut self, live: &Live) {
        self.thinking.remove(&live.facts.index);
        let times = &live.times;
        let thought = live.think_tokens.saturating_sub(1);
        self.handoffs.thought(thought, times.think_end_ms - times.first_token_ms);
        match live.moves.target {
            None => self.handoffs.stayed(live.output_tokens),
            Some((target, blocks)) => {
                let answered = Answered {
                    begin_ms: times.first_output_ms - times.think_end_ms,
                    tokens: live.output_tokens,
                    writing_ms: times.last_token_ms - times.first_output_ms,
                };
                self.handoffs.answered(target, blocks, &answered);
            }
        }
    }

    /// Requests that moved, and the mean time that their blocks took, for the metrics.
    pub(super) fn metrics(&self) -> [(&'static str, f64); 2] {
        [("handed_over", self.moved as f64), ("transfer_mean_ms", self.moved_ms / self.moved.max(1) as f64)]
    }
}

//! Early exit in the simulator: the probes that a model would answer. A simulator has no model, so it draws where the thinking
//! of a request settles, and the result of a probe before and after, from quantiles of recorded thoughts ([`EntropyModel`]).

use std::collections::HashMap;

use foldhash::fast::FixedState;
use meridian_core::budget::{Measured, Order, Report};
use meridian_core::{EntropySignal, MeridianConfig, RowId};
use meridian_engine::{Driver, ThinkTokens};

use super::content::mix;
use super::live::{ANY_TOKEN, Live, THINK_END};
use super::pool::Pool;
use crate::exit::EntropyModel;

/// Tokens that a probe computes: the end marker and what is asked of it.
const PROBE_TOKENS: u32 = 2;
/// What is drawn: where a thought settles, and the entropy of a probe.
const SETTLES: u64 = 0x6561_726c_7965_7869;
const PROBED: u64 = 0x7072_6f62_6564_6269;

/// The probes of one engine.
#[derive(Default)]
pub(super) struct Probes {
    /// Probes since the last [`Probes::take`].
    run: u32,
    thoughts: HashMap<u64, Thought, FixedState>,
}

/// The thinking of the request with a key.
struct Thought {
    row: RowId,
    /// Number of the request in its engine, from 1.
    number: u64,
    settles_at: u32,
}

impl Probes {
    /// The configuration of an engine whose texts are made up: no loop can be found in them, and no answer needs room.
    pub(super) fn config(mut config: MeridianConfig) -> MeridianConfig {
        config.scheduler.end_loops = false;
        config.scheduler.answer_reserve_tokens = 0;
        config.model.eos_guard = false;
        config
    }

    /// Follow the thinking of the requests of this engine from now on.
    pub(super) fn begin(driver: &mut Driver) -> Self {
        let tokens = ThinkTokens { forced: vec![THINK_END], wakes: true, ..ThinkTokens::default() };
        driver.follow_thinking(tokens, true).expect("the forced token is the end marker");
        Self::default()
    }

    /// A request arrived, the engine's `number`th from 1, with so many tokens of thinking planned.
    pub(super) fn arrived(&mut self, row: RowId, key: u64, number: u32, think_tokens: u32) {
        let number = u64::from(number);
        let part = EntropyModel::recorded().settles_at(draw(SETTLES, number));
        let settles_at = (f64::from(think_tokens) * part) as u32;
        self.thoughts.insert(key, Thought { row, number, settles_at });
    }

    /// The request with this key is over.
    pub(super) fn finished(&mut self, key: u64) {
        self.thoughts.remove(&key);
    }

    /// Run the probes that are due, ask the budget slot, and carry its orders out.
    pub(super) fn decide(&mut self, now_ms: f64, driver: &mut Driver, pool: &Pool, live: &mut [Option<Box<Live>>]) {
        let Some((budgets, table)) = driver.thinking() else { return };
        let mut message = Vec::new();
        for (key, token) in budgets.due(table) {
            self.run += 1;
            budgets.probe_runs(table, key, PROBE_TOKENS);
            let Some(Thought { number, settles_at, .. }) = self.thoughts.get(&key) else { continue };
            let settled = token >= *settles_at;
            let bits = EntropyModel::recorded().bits(settled, draw(mix(PROBED, *number), u64::from(token)));
            let entropy_nats = EntropySignal::from_bits(bits as f32).nats();
            message.clear();
            // Recorded thoughts have entropies only.
            Report { key, token, ahead: 0, what: Measured::Probe, entropy_nats, confidence: f32::NAN }
                .write(&mut message);
            budgets.received(table, &message);
            budgets.probed(table, key, settled.then_some(ANY_TOKEN));
        }
        for order in Order::read_all(driver.judge_thinking(now_ms, pool.free(), pool.total())) {
            if let Order::Limit { key, max_think_tokens, .. } = order
                && let Some(Thought { row, .. }) = self.thoughts.get(&key)
                && let Some(live) = &mut live[row.index()]
            {
                live.think_limit = max_think_tokens;
            }
        }
    }

    /// Probes since the last call, and their tokens in the step.
    pub(super) fn take(&mut self) -> (u32, u32) {
        let run = std::mem::take(&mut self.run);
        (run, run * PROBE_TOKENS)
    }
}

/// From 0 to 1, evenly, by two numbers.
fn draw(of: u64, number: u64) -> f64 {
    (mix(of, number) >> 11) as f64 / (1u64 << 53) as f64
}

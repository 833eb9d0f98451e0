//! Early exit, optional: the budget slot and the host's own following of thinking ([`ThinkBudgets`]). A simulator knows no
//! model: where the thinking of a request settles, and what a probe finds before and after, it draws from a model that was
//! fitted to recorded thoughts ([`EntropyModel`]).

use meridian_core::budget::{
    BudgetStatus, ClientBudget, EndRules, Load, Measured, Order, Point, Report, ThinkBudgets, ThinkSettings,
    ThinkThresholds,
};
use meridian_core::{EngineMirror, EntropySignal, Markers, MeridianConfig, PhaseEvent, RequestTable, RowId};
use meridian_runtime::{BudgetSlot, SlotStats};

use super::content::mix;
use super::live::{ANY_TOKEN, Live, THINK_END, THINK_START};
use super::pool::Pool;
use crate::exit::EntropyModel;

/// Tokens that a probe computes: the end marker and what is asked of it.
const PROBE_TOKENS: u32 = 2;
/// What is drawn: where a thought settles, and the entropy of a probe.
const SETTLES: u64 = 0x6561_726c_7965_7869;
const PROBED: u64 = 0x7072_6f62_6564_6269;

pub(super) struct EarlyExit {
    slot: BudgetSlot,
    budgets: ThinkBudgets,
    report: Vec<u8>,
    probes: u32,
    /// Where each request's thinking settles, by number.
    settles: std::collections::HashMap<u64, u32, foldhash::fast::FixedState>,
}

impl EarlyExit {
    pub(super) fn new(slot: BudgetSlot, config: &MeridianConfig, block_tokens: u32) -> Self {
        let markers = Markers::new(vec![vec![THINK_START]], vec![vec![THINK_END]], vec![])
            .expect("two markers of one token are valid");
        let rules = EndRules::new(markers, vec![THINK_END]).expect("the forced tokens hold the end marker");
        let settings = ThinkSettings {
            configured: ThinkThresholds::from_config(&config.scheduler, &config.entropy),
            unit: config.entropy.unit,
            measures: config.entropy.enabled,
            can_probe: true,
            probe_at: config.entropy.probe_at,
            block_tokens,
            ..ThinkSettings::new(rules)
        };
        Self { slot, budgets: ThinkBudgets::new(settings), report: Vec::new(), probes: 0, settles: Default::default() }
    }

    pub(super) fn stats(&self) -> SlotStats {
        self.slot.stats()
    }

    pub(super) fn status(&self) -> BudgetStatus {
        self.budgets.status()
    }

    /// A request arrived in this row, with so many tokens of thinking planned; the most that it may think.
    pub(super) fn add(&mut self, table: &mut RequestTable, row: RowId, think_tokens: u32) -> u32 {
        let number = table[row].id().0;
        let part = EntropyModel::recorded().settles_at(draw(SETTLES, number));
        self.settles.insert(number, (f64::from(think_tokens) * part) as u32);
        let enrolled = self.budgets.enroll(table, row, "", ClientBudget::default());
        enrolled.map_or(u32::MAX, |enrolled| enrolled.max_think_tokens)
    }

    /// The tokens that a step has generated.
    pub(super) fn generated(
        &mut self,
        table: &mut RequestTable,
        tokens: &[(RowId, u32)],
        events: &mut Vec<(RowId, PhaseEvent)>,
    ) {
        self.budgets.generated(table, tokens, events);
    }

    /// The request in this row is over.
    pub(super) fn finished(&mut self, table: &RequestTable, row: RowId) {
        self.budgets.finished(table, row);
        self.settles.remove(&table[row].id().0);
    }

    /// Run the probes that are due, ask the slot, and hand its orders to the requests.
    pub(super) fn decide(
        &mut self,
        now_ms: f64,
        mirror: &mut EngineMirror,
        waiting: usize,
        pool: &Pool,
        live: &mut [Option<Box<Live>>],
    ) {
        let due = self.budgets.due(&mirror.table);
        self.probes += due.len() as u32;
        for (number, tokens) in due {
            self.budgets.probe_runs(&mut mirror.table, number, PROBE_TOKENS);
            let settled = self.settles.get(&number).is_some_and(|at| tokens >= *at);
            let bits = EntropyModel::recorded().bits(settled, draw(mix(PROBED, number), u64::from(tokens)));
            let entropy = EntropySignal::from_bits(bits as f32);
            self.report.clear();
            let report = Report {
                key: number,
                token: tokens,
                ahead: 0,
                what: Measured::Probe,
                entropy_nats: entropy.nats() as f32,
                // Recorded thoughts have entropies only.
                confidence: f32::NAN,
            };
            report.write(&mut self.report);
            self.budgets.received(&mut mirror.table, &self.report);
            self.budgets.probed(&mut mirror.table, number, settled.then_some(ANY_TOKEN));
        }
        let [_, thinking, answering] = mirror.phases();
        let load = Load {
            now_ms,
            point: Point::Start,
            thinking: thinking as u32,
            answering: answering as u32,
            waiting: waiting as u32,
            free_blocks: pool.free(),
            total_blocks: pool.total(),
            ..Load::default()
        };
        let orders = self.budgets.decide(&mut mirror.table, &mut self.slot, load);
        for order in Order::read_all(orders) {
            if let Order::Limit { key, max_think_tokens, .. } = order
                && let Some(slot) = mirror.table.find(meridian_core::RequestId(key))
                && let Some(live) = &mut live[slot.index()]
            {
                live.think_limit = max_think_tokens;
            }
        }
    }

    /// Requests and tokens that the probes since the last call add to a step.
    pub(super) fn take_probes(&mut self) -> (u32, u32) {
        let probes = std::mem::take(&mut self.probes);
        (probes, probes * PROBE_TOKENS)
    }
}

/// From 0 to 1, evenly, by two numbers.
fn draw(of: u64, number: u64) -> f64 {
    (mix(of, number) >> 11) as f64 / (1u64 << 53) as f64
}

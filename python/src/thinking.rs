use std::collections::HashSet;
use std::sync::Arc;

use meridian_core::budget::{BudgetStatus, ClientBudget, ForceReason, ThinkBudgets, ThinkEnd};
use meridian_core::{Pattern, RequestTable};
use meridian_engine::ThinkTokens;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::ConfigError;
use crate::engine::Engine;

#[pymethods]
impl Engine {
    /// Follow the thinking of the requests from here on: whoever samples can force its end. `forced` are the tokens of the
    /// forced ending, `line_ends` and `boundaries` the tokens that end a line, and a line, a sentence or a clause;
    /// `interrupts` end thinking when they are generated. `drafts` is the most draft tokens that a step verifies for a
    /// request; `wakes` says whether a sampler can begin to follow a request later than at its arrival.
    #[pyo3(signature = (forced, line_ends, boundaries, interrupts, can_probe, drafts = 0, wakes = true))]
    #[expect(clippy::too_many_arguments, reason = "one call an engine")]
    fn follow_thinking(
        &self,
        forced: Vec<u32>,
        line_ends: HashSet<u32>,
        boundaries: HashSet<u32>,
        interrupts: Vec<Vec<u32>>,
        can_probe: bool,
        drafts: u32,
        wakes: bool,
    ) -> PyResult<Thinking> {
        let interrupts = interrupts.into_iter().filter_map(Pattern::new).collect();
        let tokens = ThinkTokens { forced, line_ends, boundaries, interrupts, drafts, wakes };
        let followed = self.engine.drive().follow_thinking(tokens, can_probe);
        followed.map_err(|error| ConfigError::new_err(format!("model: {error}")))?;
        Ok(Thinking { engine: Arc::clone(&self.engine) })
    }
}

/// What follows the thinking of an engine's requests, for the thread that schedules.
#[pyclass(frozen, module = "meridian._native")]
pub(crate) struct Thinking {
    engine: Arc<meridian_engine::Engine>,
}

/// The attributes of a `meridian.vllm.xargs.RequestBudget`.
#[derive(FromPyObject)]
pub(crate) struct ClientRow {
    off: bool,
    max_think_tokens: Option<u32>,
    min_think_tokens: Option<u32>,
    eat_probe_interval_tokens: Option<u32>,
    ema_alpha: Option<f64>,
    eat_variance_threshold: Option<f64>,
    eat_max_bits: Option<f64>,
    min_probes: Option<u32>,
    rpdi_window: Option<u32>,
    rpdi_threshold: Option<f64>,
    report: bool,
}

impl ClientRow {
    /// With the client's own interrupts, in tokens.
    pub(crate) fn with_interrupts(self, interrupts: Vec<Vec<u32>>) -> ClientBudget {
        let Self {
            off,
            max_think_tokens,
            min_think_tokens,
            eat_probe_interval_tokens,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            min_probes,
            rpdi_window,
            rpdi_threshold,
            report,
        } = self;
        ClientBudget {
            is_off: off,
            max_think_tokens,
            reports: report,
            min_think_tokens,
            eat_probe_interval_tokens,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            min_probes,
            rpdi_window,
            rpdi_threshold,
            interrupts: interrupts.into_iter().filter_map(Pattern::new).collect(),
            ..ClientBudget::default()
        }
    }
}

#[pymethods]
impl Thinking {
    /// What a sampler has measured; see [`Report`](meridian_core::budget::Report).
    fn received(&self, message: &[u8]) {
        self.of(|budgets, table| budgets.received(table, message));
    }

    /// The scheduled step computes a part of the prompts of these requests, the last part for the second ones; what is to
    /// be told to the samplers before the step, None for nothing.
    fn chunks<'py>(&self, py: Python<'py>, parts: Vec<String>, last_parts: Vec<String>) -> Option<Bound<'py, PyBytes>> {
        let driver = &mut *self.engine.drive();
        let rows: Vec<_> = [(parts, true), (last_parts, false)]
            .into_iter()
            .flat_map(|(names, is_chunk)| names.into_iter().map(move |name| (name, is_chunk)))
            .filter_map(|(name, is_chunk)| Some((driver.find(&name)?, is_chunk)))
            .collect();
        let (budgets, table) = driver.thinking()?;
        let orders = budgets.chunks(table, &rows);
        (!orders.is_empty()).then(|| PyBytes::new(py, orders))
    }

    /// Probes that are due, the longest due first: request, its number, and of how many of its generated tokens.
    fn due(&self) -> Vec<(String, u64, u32)> {
        let due = |budgets: &mut ThinkBudgets, table: &mut RequestTable| {
            let due = budgets.due(table).into_iter();
            due.filter_map(|(key, cut)| Some((budgets.name(table, key)?.to_owned(), key, cut))).collect()
        };
        self.of(due).unwrap_or_default()
    }

    /// The due probe of the request runs, and computes so many tokens.
    fn probe_runs(&self, key: u64, tokens: u32) {
        self.of(|budgets, table| budgets.probe_runs(table, key, tokens));
    }

    /// The request's probe came back with the token that it found likeliest.
    fn probed(&self, key: u64, answer: Option<u32>) {
        self.of(|budgets, table| budgets.probed(table, key, answer));
    }

    /// The request's probe was given up.
    fn probe_dropped(&self, key: u64) {
        self.of(|budgets, table| budgets.probe_dropped(table, key));
    }

    /// Another limit of think tokens for a request that is under way; False when it is not known.
    fn limit(&self, request_id: &str, max_think_tokens: u32) -> bool {
        let driver = &mut *self.engine.drive();
        let Some(row) = driver.find(request_id) else { return false };
        driver.thinking().is_some_and(|(budgets, table)| {
            budgets.enroll_late(table, row, request_id);
            budgets.limit(table, row, max_think_tokens)
        })
    }

    /// The thinking of a live request, for its client: think tokens, how it ended (None without an end), how often it began
    /// again, and at how many tokens a forced end waited; None when the request is not known.
    fn course(&self, request_id: &str) -> Option<(u32, Option<&'static str>, u32, u32)> {
        let driver = &mut *self.engine.drive();
        let row = driver.find(request_id)?;
        let request = driver.request(row)?;
        let (end, reopened, waited) = request.think_course();
        Some((request.think_tokens(), end.map(ThinkEnd::label), reopened, waited))
    }

    /// Whether the request thinks, as far as its tokens are known.
    fn is_thinking(&self, key: u64) -> bool {
        self.of(|budgets, table| budgets.is_thinking(table, key)).unwrap_or(false)
    }

    /// Keep every signal for `take_signals`.
    fn record_signals(&self, keep: bool) {
        self.of(|budgets, _| budgets.record_signals(keep));
    }

    /// The signals since the last call: request, think tokens, bits, answer, path deviation index,
    /// confidence.
    #[expect(clippy::type_complexity, reason = "a row of a table")]
    fn take_signals(&self) -> Vec<(String, u32, Option<f64>, Option<u32>, Option<f64>, Option<f64>)> {
        let signals = self.of(|budgets, _| budgets.take_signals()).unwrap_or_default().into_iter();
        signals
            .map(|row| (row.id.to_string(), row.think_tokens, row.bits, row.answer, row.rpdi, row.confidence))
            .collect()
    }
}

impl Thinking {
    /// Something of the budgets, which are there as long as this is.
    fn of<R>(&self, call: impl FnOnce(&mut ThinkBudgets, &mut RequestTable) -> R) -> Option<R> {
        self.engine.drive().thinking().map(|(budgets, table)| call(budgets, table))
    }
}

/// The keys are those of `meridian.BudgetStats`.
pub(crate) fn to_dict<'py>(py: Python<'py>, status: &BudgetStatus) -> PyResult<Bound<'py, PyDict>> {
    let BudgetStatus {
        forced,
        missed,
        waited,
        probes_asked,
        probes_done,
        probes_dropped,
        probe_tokens,
        think_tokens,
        thought,
        reopened,
    } = *status;
    let dict = PyDict::new(py);
    let by_reason = PyDict::new(py);
    for (reason, count) in ForceReason::ALL.into_iter().zip(forced) {
        by_reason.set_item(reason.label(), count)?;
    }
    dict.set_item("forced", by_reason)?;
    dict.set_item("missed", missed)?;
    dict.set_item("waited", waited)?;
    let probes = PyDict::new(py);
    probes.set_item("asked", probes_asked)?;
    probes.set_item("done", probes_done)?;
    probes.set_item("dropped", probes_dropped)?;
    dict.set_item("probes", probes)?;
    dict.set_item("probe_tokens", probe_tokens)?;
    dict.set_item("think_tokens", think_tokens)?;
    dict.set_item("thought", thought)?;
    dict.set_item("reopened", reopened)?;
    Ok(dict)
}

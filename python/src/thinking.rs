use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use meridian_core::Pattern;
use meridian_core::budget::{ForceReason, Load};
use meridian_runtime::thinking::{BudgetStatus, ClientBudget, ThinkBudgets, ThinkSettings, Thinker};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::engine::Inner;
use crate::policies::Policies;

/// Numbers of requests are not used again in a process: a sampler may remember those of an engine that was taken out.
static NEXT_BASE: AtomicU64 = AtomicU64::new(1);

/// The thinking budgets of one engine, and where its numbers of requests begin.
pub(crate) struct Followed {
    base: u64,
    pub(crate) budgets: ThinkBudgets,
}

impl Followed {
    pub(crate) fn new(settings: ThinkSettings) -> Self {
        Self { base: NEXT_BASE.fetch_add(1, Ordering::Relaxed) << 40, budgets: ThinkBudgets::new(settings) }
    }

    /// What the sampler calls the request with this number in the mirror.
    pub(crate) fn key(&self, number: u64) -> u64 {
        self.base + number
    }
}

/// What follows the thinking of an engine's requests, for the thread that schedules.
#[pyclass(frozen, module = "meridian._native")]
pub(crate) struct Thinking {
    inner: Arc<Mutex<Inner>>,
    policies: Py<Policies>,
}

/// The attributes of a `meridian.vllm.xargs.RequestBudget`.
#[derive(FromPyObject)]
struct ClientRow {
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
}

#[pymethods]
impl Thinking {
    /// A request that `Engine.add` has taken in. Returns what its sampler is to know: its number, its limit of think tokens,
    /// and whether its entropies are wanted. None when it is not known.
    fn enroll(
        &self,
        request_id: &str,
        prompt_tail: Vec<u32>,
        max_tokens: u32,
        client: ClientRow,
        interrupts: Vec<Vec<u32>>,
    ) -> Option<(u64, u32, bool)> {
        let inner = &mut *self.lock();
        let slot = inner.find(request_id)?;
        let row = inner.engine.table().get(slot)?;
        let (number, prompt_tokens) = (row.id().0, row.prompt_tokens());
        let (priority, tenant, deadline_ms) = row.client_facts();
        let followed = inner.followed.as_mut()?;
        let key = followed.key(number);
        let ClientRow {
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
        } = client;
        let client = ClientBudget {
            is_off: off,
            max_think_tokens,
            min_think_tokens,
            eat_probe_interval_tokens,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            min_probes,
            rpdi_window,
            rpdi_threshold,
            interrupts: interrupts.into_iter().filter_map(Pattern::new).collect(),
        };
        let thinker = Thinker {
            id: request_id,
            prompt: &prompt_tail,
            prompt_tokens,
            max_tokens,
            priority,
            tenant,
            deadline_ms,
            client,
        };
        let enrolled = followed.budgets.add(key, &thinker);
        Some((key, enrolled.max_think_tokens, enrolled.is_measured))
    }

    /// What a sampler has measured: a datagram, from anybody.
    fn received(&self, datagram: &[u8]) {
        if let Some(followed) = &mut self.lock().followed {
            followed.budgets.received(datagram);
        }
    }

    /// Ask the budget slot about what is new; what is to be told to the samplers before the next step, None for nothing.
    fn decide<'py>(
        &self,
        py: Python<'py>,
        now_ms: f64,
        free_blocks: u32,
        total_blocks: u32,
    ) -> Option<Bound<'py, PyBytes>> {
        let inner = &mut *self.lock();
        let [_, thinking, answering] = inner.engine.phases().map(|count| u32::try_from(count).unwrap_or(u32::MAX));
        let waiting = inner.all_waiting;
        let load = Load { now_ms, thinking, answering, waiting, free_blocks, total_blocks, ..Load::default() };
        let policies = self.policies.borrow(py);
        let judges = &mut *policies.judges();
        let orders = inner.followed.as_mut()?.budgets.decide(&mut judges.budget, load);
        (!orders.is_empty()).then(|| PyBytes::new(py, orders))
    }

    /// Probes that are due, the longest due first: request, its number, and of how many of its generated tokens.
    fn due(&self) -> Vec<(String, u64, u32)> {
        let inner = self.lock();
        let Some(followed) = &inner.followed else { return Vec::new() };
        followed
            .budgets
            .due()
            .filter_map(|(key, cut)| Some((followed.budgets.name(key)?.to_owned(), key, cut)))
            .collect()
    }

    /// The due probe of the request runs, and computes so many tokens.
    fn probe_runs(&self, key: u64, tokens: u32) {
        if let Some(followed) = &mut self.lock().followed {
            followed.budgets.probe_runs(key, tokens);
        }
    }

    /// The request's probe came back with the token that it found likeliest.
    fn probed(&self, key: u64, answer: Option<u32>) {
        if let Some(followed) = &mut self.lock().followed {
            followed.budgets.probed(key, answer);
        }
    }

    /// The request's probe was given up.
    fn probe_dropped(&self, key: u64) {
        if let Some(followed) = &mut self.lock().followed {
            followed.budgets.probe_dropped(key);
        }
    }

    /// Another limit of think tokens for a request that is under way; False when it is not known.
    fn limit(&self, request_id: &str, max_think_tokens: u32) -> bool {
        let Some(followed) = &mut self.lock().followed else { return false };
        let Some(key) = followed.budgets.find(request_id) else { return false };
        followed.budgets.limit(key, max_think_tokens)
    }

    /// Whether the request thinks, as far as its tokens are known.
    fn is_thinking(&self, key: u64) -> bool {
        self.lock().followed.as_ref().is_some_and(|followed| followed.budgets.is_thinking(key))
    }

    /// Keep every signal for `take_signals`.
    fn record_signals(&self, keep: bool) {
        if let Some(followed) = &mut self.lock().followed {
            followed.budgets.record_signals(keep);
        }
    }

    /// The signals since the last call: request, think tokens, bits, answer, path deviation index.
    #[expect(clippy::type_complexity, reason = "a row of a table")]
    fn take_signals(&self) -> Vec<(String, u32, Option<f64>, Option<u32>, Option<f64>)> {
        let Some(followed) = &mut self.lock().followed else { return Vec::new() };
        let signals = followed.budgets.take_signals().into_iter();
        signals.map(|row| (row.id.to_string(), row.think_tokens, row.bits, row.answer, row.rpdi)).collect()
    }
}

impl Thinking {
    pub(crate) fn new(inner: Arc<Mutex<Inner>>, policies: Py<Policies>) -> Self {
        Self { inner, policies }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The keys are those of `meridian.BudgetStats`.
pub(crate) fn to_dict<'py>(py: Python<'py>, status: &BudgetStatus) -> PyResult<Bound<'py, PyDict>> {
    let BudgetStatus { forced, missed, probes_asked, probes_done, probes_dropped, probe_tokens, think_tokens, thought } =
        *status;
    let dict = PyDict::new(py);
    let by_reason = PyDict::new(py);
    for (reason, count) in ForceReason::ALL.into_iter().zip(forced) {
        by_reason.set_item(reason.label(), count)?;
    }
    dict.set_item("forced", by_reason)?;
    dict.set_item("missed", missed)?;
    let probes = PyDict::new(py);
    probes.set_item("asked", probes_asked)?;
    probes.set_item("done", probes_done)?;
    probes.set_item("dropped", probes_dropped)?;
    dict.set_item("probes", probes)?;
    dict.set_item("probe_tokens", probe_tokens)?;
    dict.set_item("think_tokens", think_tokens)?;
    dict.set_item("thought", thought)?;
    Ok(dict)
}

//! Where tokens are sampled: which rows of the logits have to be what.

use std::collections::HashMap;
use std::sync::Arc;

use meridian_core::budget::{Demand, EndRules, Enforcer, Limits, Measured, Order, Report};
use meridian_core::{Markers, Pattern};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::ConfigError;

/// Requests that left the batch and may come back; beyond these the ones longest away are forgotten, and begin again from
/// what their arrival told.
const PARKED: usize = 1 << 16;

/// The rows of a model runner's batch, as far as their thinking is concerned. One thread uses it.
#[pyclass(module = "meridian._native")]
pub(crate) struct BudgetRows {
    /// Of requests that come from now on; `None` while the model has no end of thinking.
    rules: Option<Arc<EndRules>>,
    rows: Vec<Option<Row>>,
    /// Requests that are away, without their lists.
    parked: HashMap<u64, Box<Request>>,
    /// Orders about requests that wait: they came before them.
    early: HashMap<u64, Early>,
    /// What the latest step measures, in the order of its rows.
    measured: Vec<(u64, u32, Measured)>,
}

#[derive(Default)]
struct Early {
    limits: Vec<(u32, u32)>,
    is_measured: Option<bool>,
}

struct Row {
    /// The scheduler's number of the request; `None` when nobody follows it there.
    key: Option<u64>,
    what: What,
}

enum What {
    /// The first and only token of a probe tells its entropy. The probe is known by the token that it was due at.
    Probe(u32),
    Request(Box<Request>),
}

struct Request {
    enforcer: Enforcer,
    /// Those that held when it came.
    rules: Arc<EndRules>,
    /// The model runner's own list of its output tokens; without one, tokens are told.
    outputs: Option<Py<PyList>>,
    is_measured: bool,
    /// Number of the token at which an end of sequence was likelier than the end marker.
    guarded: Option<u32>,
    /// Limits that no step has taken in yet: they are about tokens that the list may hold already.
    ordered: Vec<(u32, u32)>,
    is_gone: bool,
}

#[pymethods]
impl BudgetRows {
    /// Rows of nobody; the arguments are those of `configure`.
    #[new]
    fn new(
        starts: Vec<Vec<u32>>,
        ends: Vec<Vec<u32>>,
        padding: Vec<u32>,
        resumes: bool,
        forced: Vec<u32>,
    ) -> PyResult<Self> {
        let mut made =
            Self { rules: None, rows: Vec::new(), parked: HashMap::new(), early: HashMap::new(), measured: Vec::new() };
        made.configure(starts, ends, padding, resumes, forced)?;
        Ok(made)
    }

    /// How thinking ends for the requests that come from now on. `forced` is the phrase, an end marker, and what stands
    /// before the answer; empty for the first end marker. Without `ends` nothing is ended.
    fn configure(
        &mut self,
        starts: Vec<Vec<u32>>,
        ends: Vec<Vec<u32>>,
        padding: Vec<u32>,
        resumes: bool,
        forced: Vec<u32>,
    ) -> PyResult<()> {
        if ends.is_empty() {
            self.rules = None;
            return Ok(());
        }
        let rules = Markers::new(starts, ends, padding)
            .and_then(|markers| EndRules::new(markers.with_resuming(resumes), forced))
            .map_err(|error| ConfigError::new_err(format!("model: {error}")))?;
        self.rules = Some(Arc::new(rules));
        Ok(())
    }

    /// What an end of sequence inside thinking becomes; 0 while the model has no end of thinking, where nothing is guarded.
    #[getter]
    fn guard_token(&self) -> u32 {
        self.rules.as_ref().map_or(0, |rules| rules.guard_token())
    }

    /// Whether the end marker has more tokens than that one.
    #[getter]
    fn guard_continues(&self) -> bool {
        self.rules.as_ref().is_some_and(|rules| rules.guard_continues())
    }

    /// A request takes this row. `outputs` is the model runner's list of its tokens, which it goes on writing; None when
    /// they are told by `push`.
    #[expect(clippy::too_many_arguments, reason = "one call a request")]
    fn add(
        &mut self,
        py: Python<'_>,
        row: usize,
        key: Option<u64>,
        prompt_tail: Vec<u32>,
        outputs: Option<Py<PyList>>,
        max_think_tokens: u32,
        interrupts: Vec<Vec<u32>>,
        guards_eos: bool,
        is_measured: bool,
    ) -> PyResult<()> {
        let mut request = match (key.and_then(|key| self.take_out(key)), &self.rules) {
            (Some(known), _) => known,
            (None, None) => {
                self.remove(row);
                return Ok(());
            }
            (None, Some(rules)) => {
                let interrupts = interrupts.into_iter().filter_map(Pattern::new).collect();
                let limits = Limits { max_think_tokens, interrupts, guards_eos };
                let (rules, ordered) = (Arc::clone(rules), Vec::new());
                let enforcer = Enforcer::new(&rules, &prompt_tail, limits);
                Box::new(Request {
                    enforcer,
                    rules,
                    outputs: None,
                    is_measured,
                    guarded: None,
                    ordered,
                    is_gone: false,
                })
            }
        };
        if let Some(Early { limits, is_measured }) = key.and_then(|key| self.early.remove(&key)) {
            request.ordered.extend(limits);
            request.is_measured = is_measured.unwrap_or(request.is_measured);
        }
        request.outputs = outputs;
        request.catch_up(py)?;
        *self.seat(row) = Some(Row { key, what: What::Request(request) });
        Ok(())
    }

    /// The probe of a request, due after so many of its tokens, takes this row.
    fn add_probe(&mut self, row: usize, key: u64, at: u32) {
        *self.seat(row) = Some(Row { key: Some(key), what: What::Probe(at) });
    }

    /// The row is nobody's that matters.
    fn remove(&mut self, row: usize) {
        let Some(left) = self.rows.get_mut(row).and_then(Option::take) else { return };
        if let Row { key: Some(key), what: What::Request(mut request) } = left
            && !request.is_gone
            && self.parked.len() < PARKED
        {
            request.outputs = None;
            self.parked.insert(key, request);
        }
    }

    /// A request moves to another row, or two change places.
    fn move_row(&mut self, from: usize, to: usize, swaps: bool) {
        self.grow(from.max(to));
        if !swaps {
            self.remove(to);
        }
        self.rows.swap(from, to);
    }

    /// Tokens of a request that has no list: all that it has generated, when `from_start`, else what came since.
    fn push(&mut self, row: usize, tokens: Vec<u32>, from_start: bool) {
        let Some(Some(Row { what: What::Request(request), .. })) = self.rows.get_mut(row) else { return };
        if from_start {
            request.enforcer.replay(&request.rules, tokens);
        } else {
            tokens.into_iter().for_each(|token| request.take(token));
        }
    }

    /// Tokens that the request in this row has taken in; None when it is nobody's.
    fn tokens(&self, row: usize) -> Option<u32> {
        match self.rows.get(row)? {
            Some(Row { what: What::Request(request), .. }) => Some(request.enforcer.tokens()),
            _ => None,
        }
    }

    /// What the scheduler tells: a datagram, from anybody.
    fn receive(&mut self, datagram: &[u8]) {
        for order in Order::read_all(datagram) {
            match order {
                Order::Limit { key, from, max_think_tokens } => {
                    if let Some(request) = self.find(key) {
                        request.ordered.push((from, max_think_tokens));
                    } else if let Some(early) = self.early(key) {
                        // A policy changes its mind a few times at most; the latest counts.
                        early.limits.retain(|(at, _)| *at != from);
                        early.limits.push((from, max_think_tokens));
                    }
                }
                Order::Measure { key, on } => {
                    if let Some(request) = self.find(key) {
                        request.is_measured = on;
                    } else if let Some(early) = self.early(key) {
                        early.is_measured = Some(on);
                    }
                }
                Order::Gone { key } => {
                    self.early.remove(&key);
                    if self.parked.remove(&key).is_none()
                        && let Some(request) = self.find(key)
                    {
                        request.is_gone = true;
                    }
                }
            }
        }
    }

    /// A step is about to sample. Rows that are forced and their tokens, rows that are guarded, and rows whose entropy is
    /// wanted. `rows` are those that sample; without it the first `count` do.
    #[expect(clippy::type_complexity, reason = "four lists of rows")]
    #[pyo3(signature = (count, rows = None))]
    fn step(
        &mut self,
        py: Python<'_>,
        count: usize,
        rows: Option<Vec<usize>>,
    ) -> PyResult<(Vec<usize>, Vec<u32>, Vec<usize>, Vec<usize>)> {
        self.measured.clear();
        let (mut forced, mut tokens, mut guarded, mut measured) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let all = rows.unwrap_or_else(|| (0..count.min(self.rows.len())).collect());
        for index in all {
            let Some(Some(row)) = self.rows.get_mut(index) else { continue };
            let request = match &mut row.what {
                What::Probe(at) => {
                    if let Some(key) = row.key {
                        measured.push(index);
                        self.measured.push((key, *at, Measured::Probe));
                    }
                    continue;
                }
                What::Request(request) => request,
            };
            request.catch_up(py)?;
            for (from, max_think_tokens) in request.ordered.drain(..) {
                request.enforcer.limit_from(from, max_think_tokens);
            }
            match request.enforcer.demand(&request.rules) {
                Demand::Free => {}
                Demand::Guarded => {
                    // The whole step has one guard token: a request that came under other rules goes without.
                    if self.rules.as_ref().is_some_and(|rules| Arc::ptr_eq(rules, &request.rules)) {
                        guarded.push(index);
                    }
                }
                Demand::Force(token) => {
                    forced.push(index);
                    tokens.push(token);
                }
            }
            let is_open = request.enforcer.is_thinking() && !request.enforcer.is_forcing();
            if let Some(key) = row.key.filter(|_| request.is_measured && is_open) {
                measured.push(index);
                self.measured.push((key, request.enforcer.tokens(), Measured::Native));
            }
        }
        Ok((forced, tokens, guarded, measured))
    }

    /// At these rows of the step an end of sequence is likelier than the end marker that it becomes.
    fn guard(&mut self, rows: Vec<usize>) {
        for index in rows {
            let Some(Some(Row { key, what: What::Request(request) })) = self.rows.get_mut(index) else { continue };
            let token = request.enforcer.tokens();
            request.guarded = Some(token);
            let Some(key) = *key else { continue };
            let own = |entry: &&mut (u64, u32, Measured)| entry.0 == key && entry.2 != Measured::Probe;
            match self.measured.iter_mut().find(own) {
                Some(entry) => entry.2 = Measured::Guarded,
                None => self.measured.push((key, token, Measured::Guarded)),
            }
        }
    }

    /// What the step has to tell once its entropies are known, which may be after later steps; None for nothing.
    fn told(&mut self) -> Option<StepReport> {
        let measured = std::mem::take(&mut self.measured);
        (!measured.is_empty()).then_some(StepReport { measured })
    }
}

/// What one step measured, without the entropies.
#[pyclass(module = "meridian._native", frozen)]
pub(crate) struct StepReport {
    measured: Vec<(u64, u32, Measured)>,
}

#[pymethods]
impl StepReport {
    /// A datagram for the scheduler. `entropies` are in nats, in the order of the step's measured rows; those that are
    /// missing were not measured.
    fn datagram<'py>(&self, py: Python<'py>, entropies: Vec<f32>) -> Bound<'py, PyBytes> {
        let mut datagram = Vec::with_capacity(self.measured.len() * Report::BYTES);
        let entropies = entropies.into_iter().chain(std::iter::repeat(f32::NAN));
        for (&(key, token, what), entropy_nats) in self.measured.iter().zip(entropies) {
            Report { key, token, what, entropy_nats }.write(&mut datagram);
        }
        PyBytes::new(py, &datagram)
    }
}

impl BudgetRows {
    fn seat(&mut self, row: usize) -> &mut Option<Row> {
        self.grow(row);
        self.remove(row);
        &mut self.rows[row]
    }

    fn grow(&mut self, row: usize) {
        if self.rows.len() <= row {
            self.rows.resize_with(row + 1, || None);
        }
    }

    /// A request that is away, or still in a row: a model runner may let one in again without saying that it left.
    fn take_out(&mut self, key: u64) -> Option<Box<Request>> {
        if let Some(away) = self.parked.remove(&key) {
            return Some(away);
        }
        let is_it = |seat: &&mut Option<Row>| matches!(seat, Some(Row { key: Some(own), what: What::Request(_) }) if *own == key);
        match self.rows.iter_mut().find(is_it)?.take()?.what {
            What::Request(request) => Some(request),
            What::Probe(_) => None,
        }
    }

    /// `None` when there are too many: nobody but the scheduler knows so many requests.
    fn early(&mut self, key: u64) -> Option<&mut Early> {
        if self.early.len() == PARKED && !self.early.contains_key(&key) {
            return None;
        }
        Some(self.early.entry(key).or_default())
    }

    fn find(&mut self, key: u64) -> Option<&mut Request> {
        if let Some(away) = self.parked.get_mut(&key) {
            return Some(away);
        }
        self.rows.iter_mut().flatten().find_map(|row| match &mut row.what {
            What::Request(request) if row.key == Some(key) => Some(&mut **request),
            _ => None,
        })
    }
}

impl Request {
    /// Take in what the model runner has added to the list.
    fn catch_up(&mut self, py: Python<'_>) -> PyResult<()> {
        let Some(outputs) = &self.outputs else { return Ok(()) };
        let outputs = outputs.bind(py).clone();
        let mut at = self.enforcer.tokens() as usize;
        if at > outputs.len() {
            // Tokens were taken back: KV that could not be loaded.
            return self.begin_again(py);
        }
        while at < outputs.len() {
            // A placeholder: sampled, and not known yet.
            let Ok(token) = outputs.get_item(at)?.extract::<u32>() else { break };
            self.take(token);
            at += 1;
        }
        Ok(())
    }

    fn take(&mut self, token: u32) {
        let rules = &*self.rules;
        let stands_for_eos = self.guarded == Some(self.enforcer.tokens()) && token == rules.guard_token();
        // As whoever samples has done before this token.
        self.enforcer.demand(rules);
        if stands_for_eos && rules.guard_continues() {
            self.enforcer.push_guarded(rules, token);
        } else {
            self.enforcer.push(rules, token);
        }
    }

    fn begin_again(&mut self, py: Python<'_>) -> PyResult<()> {
        let Some(outputs) = &self.outputs else { return Ok(()) };
        let known = outputs.bind(py).iter().map_while(|token| token.extract::<u32>().ok());
        self.enforcer.replay(&self.rules, known);
        Ok(())
    }
}

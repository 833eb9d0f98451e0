//! Where tokens are sampled: which rows of the logits have to be what.

use std::sync::Arc;

use meridian_core::Pattern;
use meridian_core::budget::{AnswerRules, Enrolled, SamplerLimits};
use meridian_engine::sampler::{Answering, Arriving, Outputs, SamplerRows, SamplerStep};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::ConfigError;
use crate::markers::{TokenMarkers, last_turn};

/// The rows of a model runner's batch; `SamplerRows` of meridian-engine says more.
#[pyclass(module = "meridian._native")]
#[derive(Default)]
pub(crate) struct BudgetRows {
    rows: SamplerRows<List>,
    /// Of the latest step.
    answering: Answering,
}

/// The data of a `meridian.vllm.xargs.Row`, the same whether the scheduler writes it or the sampler reads it.
#[derive(FromPyObject, IntoPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct RowData {
    key: Option<u64>,
    limit: u32,
    interrupts: Vec<Vec<u32>>,
    measured: bool,
    reserve: u32,
    answers: bool,
    plain: bool,
    followed: bool,
}

impl RowData {
    pub(crate) fn of(enrolled: Enrolled) -> Self {
        let Enrolled { key, limits } = enrolled;
        let SamplerLimits {
            is_followed,
            is_measured,
            max_think_tokens,
            is_plain,
            interrupts,
            reserve_from,
            guards_answer,
            // The sampler knows this by itself.
            guards_eos: _,
        } = limits;
        Self {
            key: Some(key),
            limit: max_think_tokens,
            interrupts: interrupts.iter().map(|pattern| pattern.tokens().to_vec()).collect(),
            measured: is_measured,
            reserve: reserve_from,
            answers: guards_answer,
            plain: is_plain,
            followed: is_followed,
        }
    }
}

/// The model runner's list of a request's tokens.
struct List(Py<PyList>);

impl Outputs for List {
    type Access<'a> = Python<'a>;

    fn count(&self, py: Python<'_>) -> usize {
        self.0.bind(py).len()
    }

    fn token(&self, py: Python<'_>, at: usize) -> Option<u32> {
        self.0.bind(py).get_item(at).ok()?.extract().ok()
    }
}

#[pymethods]
impl BudgetRows {
    /// Rows of nobody, where nothing ends thinking.
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// How thinking ends for the requests that come from now on; `markers` is a `TokenMarkers`, whose `forced` is the
    /// phrase, an end marker, and what stands before the answer; empty for the first end marker. Without `ends` nothing is
    /// ended.
    fn configure(&mut self, markers: TokenMarkers, resumes: bool) -> PyResult<()> {
        let forced = markers.forced.clone();
        let markers = (!markers.ends.is_empty()).then(|| markers.into_markers(resumes)).transpose();
        let configured = markers.and_then(|markers| self.rows.configure(markers, forced));
        configured.map_err(|error| ConfigError::new_err(format!("model: {error}")))
    }

    /// What an end of sequence inside thinking becomes; 0 while the model has no end of thinking, where nothing is guarded.
    #[getter]
    fn guard_token(&self) -> u32 {
        self.rows.guard_token()
    }

    /// Whether the end marker has more tokens than that one.
    #[getter]
    fn guard_continues(&self) -> bool {
        self.rows.guard_continues()
    }

    /// The answers of the requests that come from now on, after `configure`: they do not end before `min_tokens` tokens
    /// that are not in `blank`, and the thinking leaves them `reserve_tokens`.
    fn configure_answers(&mut self, min_tokens: u32, reserve_tokens: u32, blank: Vec<u32>) {
        let blank = Arc::new(blank.into_iter().collect());
        self.rows.configure_answers(AnswerRules { min_tokens, reserve_tokens, blank });
    }

    /// Number of tokens at which the thinking of a request of `max_tokens` has to end for its answer.
    fn reserve_from(&self, max_tokens: u32) -> u32 {
        self.rows.reserve_from(max_tokens)
    }

    /// Of the latest step: rows of the logits that must not end the sequence, and rows with a token that would begin
    /// thinking.
    fn answering(&mut self) -> (Vec<usize>, Vec<(usize, u32)>) {
        let Answering { unended, openers } = std::mem::take(&mut self.answering);
        (unended, openers)
    }

    /// A request takes this row. `outputs` is the model runner's list of its tokens, which it goes on writing; None when
    /// they are told by `push`. `prompt` is the templated prompt, or its last turn; `data` has the keys of
    /// `meridian.vllm.xargs.Row`.
    fn add(
        &mut self,
        py: Python<'_>,
        row: usize,
        prompt: &Bound<'_, PyList>,
        outputs: Option<Py<PyList>>,
        data: RowData,
        guards_eos: bool,
    ) -> PyResult<()> {
        let Some(rules) = self.rows.rules() else { return Ok(()) };
        let prompt_tail = last_turn(rules.markers(), prompt)?;
        let limits = SamplerLimits {
            is_followed: data.followed,
            is_measured: data.measured,
            max_think_tokens: data.limit,
            is_plain: data.plain,
            interrupts: data.interrupts.into_iter().filter_map(Pattern::new).collect(),
            guards_eos,
            reserve_from: data.reserve,
            guards_answer: data.answers,
        };
        self.rows.add(
            py,
            row,
            Arriving { key: data.key, prompt_tail: &prompt_tail, outputs: outputs.map(List), limits },
        );
        Ok(())
    }

    /// The probe of a request, due after so many of its tokens, takes this row.
    fn add_probe(&mut self, row: usize, key: u64, at: u32) {
        self.rows.add_probe(row, key, at);
    }

    /// The row is nobody's that matters.
    fn remove(&mut self, row: usize) {
        self.rows.remove(row);
    }

    /// A request moves to another row, or two change places.
    fn move_row(&mut self, from: usize, to: usize, swaps: bool) {
        self.rows.move_row(from, to, swaps);
    }

    /// Tokens of a request that has no list: all that it has generated, when `from_start`, else what came since.
    fn push(&mut self, row: usize, tokens: Vec<u32>, from_start: bool) {
        self.rows.push(row, &tokens, from_start);
    }

    /// Tokens that the request in this row has taken in; None when it is nobody's.
    fn tokens(&self, row: usize) -> Option<u32> {
        self.rows.tokens(row)
    }

    /// What the scheduler tells; see [`Order`](meridian_core::budget::Order).
    fn receive(&mut self, message: &[u8]) {
        self.rows.receive(message);
    }

    /// A step is about to sample. Rows that are forced and their tokens, rows that are guarded, and rows whose entropy is
    /// wanted. `rows` are those that sample; without it the first `count` do.
    #[pyo3(signature = (count, rows = None))]
    fn step(
        &mut self,
        py: Python<'_>,
        count: usize,
        rows: Option<Vec<usize>>,
    ) -> (Vec<usize>, Vec<u32>, Vec<usize>, Vec<usize>) {
        let SamplerStep { forced, tokens, guarded, measured, answering } = self.rows.step(py, count, rows);
        self.answering = answering;
        (forced, tokens, guarded, measured)
    }

    /// The same for a step that verifies draft tokens: `drafts` of each of `rows`. The result's rows are rows of the
    /// logits, of which a row with k drafts has k + 1. `stood` are rows that a first call returned as guarded and whose
    /// end of sequence is likelier than the end marker.
    fn step_drafts(
        &mut self,
        py: Python<'_>,
        rows: Vec<usize>,
        drafts: Vec<Vec<u32>>,
        stood: Vec<usize>,
    ) -> (Vec<usize>, Vec<u32>, Vec<usize>, Vec<usize>) {
        let drafts: Vec<&[u32]> = drafts.iter().map(Vec::as_slice).collect();
        let SamplerStep { forced, tokens, guarded, measured, answering } =
            self.rows.step_drafts(py, &rows, &drafts, &stood);
        self.answering = answering;
        (forced, tokens, guarded, measured)
    }

    /// Whether no row holds a request that is followed, or a probe.
    #[getter]
    fn is_idle(&self) -> bool {
        self.rows.is_idle()
    }

    /// Whether an order has arrived for this request, which has not come into a row.
    fn is_awaited(&self, key: u64) -> bool {
        self.rows.is_awaited(key)
    }

    /// At these rows of the step's logits an end of sequence is likelier than the end marker that it becomes.
    fn guard(&mut self, rows: Vec<usize>) {
        self.rows.guard(&rows);
    }

    /// What the step has to tell once its entropies are known, which may be after later steps; None for nothing.
    fn told(&mut self) -> Option<StepReport> {
        self.rows.told().map(|report| StepReport { report })
    }
}

/// What one step measured, without the entropies.
#[pyclass(module = "meridian._native", frozen)]
pub(crate) struct StepReport {
    report: meridian_engine::sampler::StepReport,
}

#[pymethods]
impl StepReport {
    /// A message for the scheduler. `entropies` are in nats, in the order of the step's measured rows; those that are
    /// missing were not measured.
    #[pyo3(signature = (entropies, confidences = vec![]))]
    fn message<'py>(&self, py: Python<'py>, entropies: Vec<f32>, confidences: Vec<f32>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.report.message(&entropies, &confidences))
    }

    /// Whether a row of the step is a probe, whose confidence is wanted beside its entropy.
    #[getter]
    fn has_probes(&self) -> bool {
        self.report.has_probes()
    }
}

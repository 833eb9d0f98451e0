//! The engine as Python sees it: the calls of a step. What it tells of itself is in `facts`, its KV memory in `kv`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use meridian_core::budget::{ClientBudget, Enrolled};
use meridian_core::{EngineFacts, MeridianConfig, NewRequest, RowId};
use meridian_engine::{Arrived, DataParallel, Driver, EngineError, Settings};
use meridian_runtime::traces::TraceParent;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::handles::{Added, Handles, Planned, reorder, saturated, to_u32};
use crate::markers::{TokenMarkers, last_turn};
use crate::policies::Policies;
use crate::thinking::ClientRow;
use crate::{ConfigError, compile, config_error, log, policy_error};

/// The mirror, the slots and the step-time model of one engine.
///
/// Methods that follow a step take microseconds and are called from the thread that schedules, so none of them releases
/// the GIL: getting it back could cost a whole switch interval, far more than the call.
#[pyclass(frozen, module = "meridian._native")]
pub(crate) struct Engine {
    pub(crate) engine: Arc<meridian_engine::Engine>,
    handles: Mutex<Handles>,
    pub(crate) tool_calls: Vec<Vec<u32>>,
    policies: Py<Policies>,
}

#[pymethods]
impl Engine {
    /// `config_json` is the effective configuration, `base_dir` what a relative component path is relative to. With
    /// `serves` the admin listener and the metrics are started, as the configuration says. With `priority_first` the engine
    /// itself schedules by priority. `dp_rank` and `dp_size` are its place among data-parallel engines.
    #[new]
    #[pyo3(signature = (config_json, base_dir, *, markers, block_tokens, steps_ahead, model = "", serves = false, priority_first = false, dp_rank = None, dp_size = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python constructor")]
    fn new(
        py: Python<'_>,
        config_json: &str,
        base_dir: PathBuf,
        markers: TokenMarkers,
        block_tokens: u32,
        steps_ahead: usize,
        model: &str,
        serves: bool,
        priority_first: bool,
        dp_rank: Option<u32>,
        dp_size: Option<u32>,
    ) -> PyResult<Self> {
        let config = MeridianConfig::from_json(config_json).map_err(config_error)?;
        log::keep();
        compile::start_processes(py);
        let tool_calls = markers.tool_calls.iter().filter(|ids| !ids.is_empty()).cloned().collect();
        let markers = markers
            .into_markers(config.model.resumes)
            .map_err(|error| ConfigError::new_err(format!("model: {error}")))?;
        let settings = Settings {
            cache_dir: meridian_engine::user_cache_dir(),
            base_dir,
            markers,
            block_tokens,
            steps_ahead,
            model: model.to_owned(),
            dp: dp_rank.map(|rank| DataParallel { rank, size: dp_size }),
            serves,
            priority_first,
            ..Settings::default()
        };
        // Compiling a component takes tens of milliseconds.
        let engine = py.detach(|| meridian_engine::Engine::start(config, settings)).map_err(|error| match error {
            EngineError::TrustedKeys(error) => config_error(error),
            EngineError::Config(error) => config_error(error),
            error => policy_error(error),
        })?;
        let engine = Arc::new(engine);
        let policies = Py::new(py, Policies::new(Arc::clone(&engine)))?;
        Ok(Self { engine, handles: Mutex::default(), tool_calls, policies })
    }

    /// What changes its policies.
    #[getter]
    fn policies(&self, py: Python<'_>) -> Py<Policies> {
        self.policies.clone_ref(py)
    }

    /// A request arrived. `prompt` is the templated prompt, or its last turn. False when its id is already known. Any
    /// integers will do for `prompt_tokens`, `max_tokens` and `priority`: they are cut to 32 bits.
    /// With `whole_prompt` the engine may not split its prompt. With `client`, what its client asked for, its thinking is
    /// followed: then its sampler is to know what is returned: its number, whether it is followed from its first token on, its
    /// limits of think tokens and of the tokens of a thought, whether its entropies are wanted, from where its answer is
    /// reserved, and whether that is guarded. `interrupts` end its thinking as well, `has_mask` says that the client limits the
    /// tokens that may be sampled, and `plain` that no phrase may be forced. `traceparent` is the header of that name; any text will do.
    #[pyo3(signature = (handle, request_id, *, prompt, prompt_tokens, max_tokens, arrival_ms, deadline_ms, priority, tenant, session = "", whole_prompt = false, client = None, interrupts = vec![], traceparent = None, ignores_eos = false, has_mask = false, plain = false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn add(
        &self,
        handle: Py<PyAny>,
        request_id: &Bound<'_, PyString>,
        prompt: &Bound<'_, PyList>,
        #[pyo3(from_py_with = saturated)] prompt_tokens: i64,
        #[pyo3(from_py_with = saturated)] max_tokens: i64,
        arrival_ms: f64,
        deadline_ms: f64,
        #[pyo3(from_py_with = saturated)] priority: i64,
        tenant: &str,
        session: &str,
        whole_prompt: bool,
        client: Option<ClientRow>,
        interrupts: Vec<Vec<u32>>,
        traceparent: Option<&str>,
        ignores_eos: bool,
        has_mask: bool,
        plain: bool,
    ) -> PyResult<Added> {
        let prompt_tail = last_turn(&self.engine.drive().settings().markers, prompt)?;
        let request = NewRequest {
            prompt: &prompt_tail,
            prompt_tokens: to_u32(prompt_tokens),
            cached_tokens: 0,
            max_tokens: to_u32(max_tokens),
            max_think_tokens: u32::MAX,
            arrival_ms,
            deadline_ms,
            priority: priority.clamp(i32::MIN.into(), i32::MAX.into()) as i32,
            tenant,
            session,
            whole_prompt,
        };
        let client = client.map(|client| ClientBudget {
            ignores_eos,
            has_mask,
            is_plain: plain,
            ..client.with_interrupts(interrupts)
        });
        let driver = &mut *self.engine.drive();
        let arrived = driver.arrived(&request_id.to_cow()?, &request, client);
        let Ok(Arrived { row, sampler }) = arrived else { return Ok(Added::Plain(false)) };
        if let Some(parent) = traceparent.and_then(TraceParent::parse) {
            driver.join_trace(row, parent);
        }
        self.handles().insert(row, handle, request_id.clone().unbind());
        Ok(sampler.map_or(Added::Plain(true), |sampler| {
            let Enrolled {
                key,
                is_followed,
                max_think_tokens,
                max_thought_tokens,
                is_measured,
                reserve_from,
                guards_answer,
            } = sampler;
            Added::Followed(
                key,
                is_followed,
                max_think_tokens,
                max_thought_tokens,
                is_measured,
                reserve_from,
                guards_answer,
            )
        }))
    }

    /// The request is over; `reason` is the engine's word for why.
    #[pyo3(signature = (request_id, reason = ""))]
    fn remove(&self, request_id: &str, reason: &str) {
        let row = self.engine.drive().finished(request_id, reason);
        // Dropped when nothing is locked any more: an object's end may run any code.
        let live = row.and_then(|row| self.handles().remove(row));
        drop(live);
    }

    /// Plan one step: puts the two lists of handles into their new order, in place. Returns the step's token budget, a
    /// caps dictionary from request id to tokens (None when there are none), whether each list changed, and the handles of the
    /// running requests that give way to waiting ones.
    #[expect(clippy::too_many_arguments, reason = "one call a step")]
    fn plan<'py>(
        &self,
        py: Python<'py>,
        running: &Bound<'py, PyList>,
        waiting: Option<&Bound<'py, PyList>>,
        now_ms: f64,
        token_budget: u32,
        free_blocks: u32,
        total_blocks: u32,
        free_seats: u32,
        all_waiting: u32,
        decode_tokens: u32,
    ) -> PyResult<Planned<'py>> {
        let handles = &mut *self.handles();
        if !handles.find(running, waiting) {
            // A request that was never added: the engine's own order is right for a step like that.
            self.engine.drive().rekey_pools(now_ms);
            return Ok((token_budget, None, false, false, Vec::new()));
        }
        let facts = EngineFacts {
            now_ms,
            token_budget,
            free_blocks,
            total_blocks,
            free_seats,
            waiting: all_waiting,
            decode_tokens,
        };
        let driver = &mut *self.engine.drive();
        let plan = driver.plan(&facts, &handles.running, &handles.waiting);
        reorder(running, &plan.running_order)?;
        if let Some(waiting) = waiting {
            reorder(waiting, &plan.waiting_order)?;
        }
        let mut caps = None;
        for (row, cap) in &plan.token_caps {
            let caps = caps.get_or_insert_with(|| PyDict::new(py));
            if let Some(id) = handles.id(*row) {
                caps.set_item(id, cap)?;
            }
        }
        let preempted = plan.preempted.iter().filter_map(|row| handles.handle(py, *row)).collect();
        Ok((plan.token_budget, caps, !plan.running_order.is_empty(), !plan.waiting_order.is_empty(), preempted))
    }

    /// The engine scheduled the step that was planned at `now_ms`: request id -> tokens. What is not known is a probe.
    fn scheduled(&self, now_ms: f64, tokens: &Bound<'_, PyDict>) -> PyResult<()> {
        let (handles, driver) = (&mut *self.handles(), &mut *self.engine.drive());
        handles.given.clear();
        let mut probe_tokens = 0;
        for (id, count) in tokens {
            let id = id.cast::<PyString>()?;
            match driver.find(&id.to_cow()?) {
                Some(row) => handles.given.push((row, count.extract()?)),
                None => probe_tokens += count.extract::<u32>()?,
            }
        }
        driver.scheduled(now_ms, &handles.given, probe_tokens);
        Ok(())
    }

    /// The request was admitted with this many of its tokens already computed (prefix cache).
    fn admitted(&self, request_id: &str, cached_tokens: u32) {
        self.of(request_id, |driver, row| driver.admitted(row, cached_tokens));
    }

    /// The engine's own count of a request's computed tokens.
    fn set_computed(&self, request_id: &str, computed_tokens: u32) {
        self.of(request_id, |driver, row| driver.set_computed(row, computed_tokens));
    }

    /// Tokens were generated: objects with `request_id` and `new_token_ids`, as vLLM's `EngineCoreOutput`. They were there at
    /// `now_ms`, by default at the latest time that was told.
    #[pyo3(signature = (outputs, now_ms = None))]
    fn generated(&self, py: Python<'_>, outputs: &Bound<'_, PyList>, now_ms: Option<f64>) -> PyResult<()> {
        let (handles, driver) = (&mut *self.handles(), &mut *self.engine.drive());
        if let Some(now_ms) = now_ms {
            driver.set_clock(now_ms);
        }
        handles.generated.clear();
        for output in outputs {
            let id = output.getattr(intern!(py, "request_id"))?;
            let Some(row) = driver.find(&id.cast::<PyString>()?.to_cow()?) else { continue };
            for token in output.getattr(intern!(py, "new_token_ids"))?.cast::<PyList>()? {
                handles.generated.push((row, token.extract()?));
            }
        }
        driver.generated(&handles.generated);
        Ok(())
    }
}

impl Engine {
    pub(crate) fn handles(&self) -> MutexGuard<'_, Handles> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something of a live request; `None` when it is not live.
    pub(crate) fn of<R>(&self, request_id: &str, call: impl FnOnce(&mut Driver, RowId) -> R) -> Option<R> {
        let driver = &mut *self.engine.drive();
        let row = driver.find(request_id)?;
        Some(call(driver, row))
    }
}

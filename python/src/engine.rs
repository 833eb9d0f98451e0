//! The engine as Python sees it: the calls of a step. What it tells of itself is in `facts`, its KV memory in `kv`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use meridian_core::budget::ClientBudget;
use meridian_core::{EngineFacts, MeridianConfig, NewRequest, RowId};
use meridian_engine::otlp::TraceParent;
use meridian_engine::{Arrived, DataParallel, Driver, EngineError, Settings, StartListeners};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};

use crate::handles::{Added, Handles, StepPlan, reorder, saturated, to_u32};
use crate::markers::{TokenMarkers, last_turn};
use crate::policies::Policies;
use crate::rows::RowData;
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
    /// With `config_file`, the file that the configuration was read from, its changes are followed. `state_block` are the
    /// tokens of a state block, if vLLM computes prompts in whole ones.
    #[new]
    #[pyo3(signature = (config_json, base_dir, *, markers, block_tokens, steps_ahead, model = "", serves = false, priority_first = false, dp_rank = None, dp_size = None, config_file = None, state_block = None))]
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
        config_file: Option<PathBuf>,
        state_block: Option<u32>,
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
            config_file,
            markers,
            block_tokens,
            state_block,
            steps_ahead,
            model: model.to_owned(),
            dp: dp_rank.map(|rank| DataParallel { rank, size: dp_size }),
            serve: serves.then_some(meridian_admin::serve as StartListeners),
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
    /// `model` is that of the request, or its LoRA adapter, and `service_level` the one that its client asks for: both
    /// choose its service level. With `whole_prompt` the engine may not split its prompt. With `client`, what its client asked for, its thinking is
    /// followed: then its sampler is to know what is returned, the data of a `meridian.vllm.xargs.Row`. `interrupts` end its thinking as well, `has_mask` says that the client limits the
    /// tokens that may be sampled, and `plain` that no phrase may be forced. `traceparent` is the header of that name; any text will do.
    #[pyo3(signature = (handle, request_id, *, prompt, prompt_tokens, max_tokens, arrival_ms, deadline_ms, priority, tenant, session = "", model = "", service_level = "", whole_prompt = false, client = None, interrupts = vec![], traceparent = None, ignores_eos = false, has_mask = false, plain = false))]
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
        model: &str,
        service_level: &str,
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
            model,
            service_level,
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
        Ok(sampler.map_or(Added::Plain(true), |enrolled| Added::Followed(RowData::of(enrolled))))
    }

    /// The request is over; `reason` is the engine's word for why.
    #[pyo3(signature = (request_id, reason = ""))]
    fn remove(&self, request_id: &str, reason: &str) {
        let row = self.engine.drive().finished(request_id, reason);
        // Dropped when nothing is locked any more: an object's end may run any code.
        let live = row.and_then(|row| self.handles().remove(row));
        drop(live);
    }

    /// Begin a step: puts the two lists of handles into their new order, in place, and returns the plan. `stands_aside`
    /// says that the engine's own steps are kept: None when that is not the case any more, or when it has become the case;
    /// then nothing was planned. With `judges`, the budget slot is asked about new facts first.
    #[expect(clippy::too_many_arguments, reason = "one call a step")]
    fn begin(
        &self,
        py: Python<'_>,
        running: &Bound<'_, PyList>,
        waiting: Option<&Bound<'_, PyList>>,
        now_ms: f64,
        token_budget: u32,
        free_blocks: u32,
        total_blocks: u32,
        free_seats: u32,
        all_waiting: u32,
        decode_tokens: u32,
        stands_aside: bool,
        judges: bool,
    ) -> PyResult<Option<StepPlan>> {
        let (handles, driver) = (&mut *self.handles(), &mut *self.engine.drive());
        if driver.is_stock() != stands_aside {
            return Ok(None);
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
        let mut step = StepPlan {
            token_budget,
            caps: None,
            running_changed: false,
            waiting_changed: false,
            preempted: None,
            refused: None,
            overdue: None,
            has_units: false,
            prompt_blocks: 0,
            orders: None,
            follows_thinking: false,
        };
        if stands_aside && !driver.is_watched() {
            driver.keep(&facts);
            return Ok(Some(step));
        }
        if judges {
            let orders = driver.judge_thinking(now_ms, free_blocks, total_blocks);
            step.orders = (!orders.is_empty()).then(|| PyBytes::new(py, orders).unbind());
            step.follows_thinking = step.orders.is_some() || driver.follows_thinking();
        }
        if !handles.find(running, waiting) {
            // A request that was never added: the engine's own order is right for a step like that.
            driver.rekey_pools(now_ms);
            return Ok(Some(step));
        }
        let plan = driver.plan(&facts, &handles.running, &handles.waiting);
        reorder(running, &plan.running_order)?;
        if let Some(waiting) = waiting {
            reorder(waiting, &plan.waiting_order)?;
        }
        if !plan.token_caps.is_empty() {
            let caps = PyDict::new(py);
            for (row, cap) in &plan.token_caps {
                if let Some(id) = handles.id(*row) {
                    caps.set_item(id, cap)?;
                }
            }
            step.caps = Some(caps.unbind());
        }
        let requests = |rows: &[RowId]| -> PyResult<Option<Py<PyList>>> {
            let handles: Vec<_> = rows.iter().filter_map(|row| handles.handle(py, *row)).collect();
            if handles.is_empty() { Ok(None) } else { Ok(Some(PyList::new(py, handles)?.unbind())) }
        };
        step.preempted = requests(&plan.preempted)?;
        step.refused = requests(&plan.refused)?;
        step.overdue = requests(&plan.overdue)?;
        step.has_units = plan.has_units;
        step.token_budget = plan.token_budget;
        step.prompt_blocks = plan.prompt_blocks;
        step.running_changed = !plan.running_order.is_empty();
        step.waiting_changed = !plan.waiting_order.is_empty();
        Ok(Some(step))
    }

    /// The engine scheduled the step that began at `now_ms`: `output` is vLLM's `SchedulerOutput`, or has its attributes
    /// `scheduled_new_reqs`, `scheduled_cached_reqs` and `num_scheduled_tokens`. Of requests that are not known (probes)
    /// only the tokens count. With `corrects`, the engine's own counts of computed tokens replace this one's: rejected
    /// drafts lower them. `taken` are the blocks that pools, by their numbers, handed out since their last report.
    #[pyo3(signature = (output, now_ms, corrects, taken = vec![]))]
    fn end(
        &self,
        py: Python<'_>,
        output: &Bound<'_, PyAny>,
        now_ms: f64,
        corrects: bool,
        taken: Vec<(usize, Vec<u32>)>,
    ) -> PyResult<()> {
        let (handles, driver) = (&mut *self.handles(), &mut *self.engine.drive());
        for (pool, blocks) in taken {
            driver.taken(pool, &blocks, now_ms);
        }
        for new in output.getattr(intern!(py, "scheduled_new_reqs"))?.cast::<PyList>()? {
            if let Some(row) = row_of(handles, driver, &new.getattr(intern!(py, "req_id"))?)? {
                driver.admitted(row, new.getattr(intern!(py, "num_computed_tokens"))?.extract()?);
            }
        }
        let cached = output.getattr(intern!(py, "scheduled_cached_reqs"))?;
        let resumed = cached.getattr(intern!(py, "resumed_req_ids"))?;
        if corrects || resumed.len()? > 0 {
            let ids = cached.getattr(intern!(py, "req_ids"))?;
            let computed = cached.getattr(intern!(py, "num_computed_tokens"))?;
            for (id, computed) in ids.cast::<PyList>()?.iter().zip(computed.cast::<PyList>()?) {
                let Some(row) = row_of(handles, driver, &id)? else { continue };
                let computed = computed.extract()?;
                if resumed.contains(&id)? {
                    driver.admitted(row, computed);
                }
                if corrects {
                    driver.set_computed(row, computed);
                }
            }
        }
        handles.given.clear();
        let mut probe_tokens = 0;
        for (id, count) in output.getattr(intern!(py, "num_scheduled_tokens"))?.cast::<PyDict>()? {
            let count = count.extract()?;
            match row_of(handles, driver, &id)? {
                Some(row) => handles.given.push((row, count)),
                None => probe_tokens += count,
            }
        }
        driver.scheduled(now_ms, &handles.given, probe_tokens);
        Ok(())
    }

    /// Tokens were generated, at `now_ms`: `outputs` are lists of vLLM's `EngineCoreOutput`, or of objects with its
    /// `request_id` and `new_token_ids`. Returns what `take_log` would.
    fn tokens(&self, py: Python<'_>, outputs: &Bound<'_, PyList>, now_ms: f64) -> PyResult<Vec<(u8, String)>> {
        let (handles, driver) = (&mut *self.handles(), &mut *self.engine.drive());
        driver.set_clock(now_ms);
        handles.generated.clear();
        for output in outputs {
            for output in output.cast::<PyList>()? {
                let Some(row) = row_of(handles, driver, &output.getattr(intern!(py, "request_id"))?)? else { continue };
                for token in output.getattr(intern!(py, "new_token_ids"))?.cast::<PyList>()? {
                    handles.generated.push((row, token.extract()?));
                }
            }
        }
        driver.generated(&handles.generated);
        Ok(log::take())
    }
}

/// The row of a request by its id: by the object that it arrived with, or by the text.
fn row_of(handles: &Handles, driver: &Driver, id: &Bound<'_, PyAny>) -> PyResult<Option<RowId>> {
    Ok(match handles.row(id) {
        Some(row) => Some(row),
        None => driver.find(&id.cast::<PyString>()?.to_cow()?),
    })
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

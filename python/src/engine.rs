//! The engine as Python sees it. One class, whose methods pyo3 takes from one block: that is why the file is long.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use meridian_core::budget::{EndRules, Thresholds};
use meridian_core::config::STOCK;
use meridian_core::types::RequestId;
use meridian_core::{
    CachedBlocks, EngineFacts, EvictionColumn, FaultKind, KvGrowth, Markers, Memory, MeridianConfig, NewRequest,
    Pattern, PhaseEvent, Slot, Subject, ThinkPhase,
};
use meridian_runtime::control::{Control, KvStatus, ProcessStatus};
use meridian_runtime::thinking::ThinkSettings;
use meridian_runtime::traces::{FinishedRequest, Traces};
use meridian_runtime::{DispatchEngine, Source};
use meridian_wasm::TrustedKeys;
use pyo3::exceptions::PyOverflowError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::control::{Services, Slots};
use crate::kv::BlockPool;
use crate::policies::{Judges, Policies};
use crate::thinking::{Followed, Thinking};
use crate::{ConfigError, config_error, log, policy_error};

/// The mirror, the dispatch slot and the step-time model of one engine.
///
/// Methods that follow a step take microseconds and are called from the thread that schedules, so none of them releases
/// the GIL: getting it back could cost a whole switch interval, far more than the call.
#[pyclass(frozen, module = "meridian._native")]
pub(crate) struct Engine {
    inner: Arc<Mutex<Inner>>,
    /// The engine is stock as soon as the dispatch slot is.
    leaves_the_rest: bool,
    config: MeridianConfig,
    base_dir: String,
    markers: Markers,
    steps_ahead: usize,
    block_tokens: u32,
    evicts_dead_thinking: Option<bool>,
    tool_calls: Vec<Vec<u32>>,
    growth_blocks: f64,
    manages_kv: bool,
    policies: Py<Policies>,
}

pub(crate) struct Inner {
    pub(crate) engine: DispatchEngine,
    /// Identity of a handle -> its slot; `live` keeps the objects alive, so that an identity is not used again.
    slots: HashMap<usize, Slot>,
    /// The engine's text id -> slot.
    by_id: HashMap<Box<str>, Slot>,
    live: HashMap<Slot, Live>,
    /// Number of the next request; numbers are not used again.
    next_id: u64,
    running: Vec<Slot>,
    waiting: Vec<Slot>,
    given: Vec<(Slot, u32)>,
    tokens: Vec<u32>,
    events: Vec<PhaseEvent>,
    /// Requests that waited at the latest step.
    pub(crate) all_waiting: u32,
    /// Their thinking, where something can end it.
    pub(crate) followed: Option<Followed>,
    /// Told of every request that ends.
    traces: Option<Arc<Traces>>,
    /// Meridian has a say in the engine's KV memory.
    orders_kv: bool,
    /// A mirror of each of the engine's block pools.
    pools: Vec<Arc<Mutex<CachedBlocks>>>,
    /// The same of stores beside the engine's memory.
    stores: Vec<Arc<Mutex<CachedBlocks>>>,
    /// KV blocks that answers in progress have lost.
    output_critical_evictions: u64,
}

/// The Python side of a live request.
struct Live {
    handle: Py<PyAny>,
    id: Py<PyString>,
}

impl Inner {
    pub(crate) fn find(&self, id: &str) -> Option<Slot> {
        self.by_id.get(id).copied()
    }

    /// `None` where the engine's pools are its own affair.
    fn kv_status(&self) -> Option<KvStatus> {
        if !self.orders_kv && self.stores.is_empty() {
            return None;
        }
        let counts = self.engine.kv_counts();
        let mut status = KvStatus {
            hit_tokens: counts.hit_tokens,
            missed_tokens: counts.missed_tokens,
            recomputed_tokens: counts.recomputed_tokens,
            avoidable_output_preemptions: counts.avoidable_output_preemptions,
            ..KvStatus::default()
        };
        for pool in &self.pools {
            let stats = pool.lock().unwrap_or_else(PoisonError::into_inner).stats();
            for (total, count) in status.evictions.iter_mut().zip(stats.evictions) {
                *total += count;
            }
            status.moved_blocks += stats.moved;
            status.resyncs += stats.resyncs;
        }
        for store in &self.stores {
            let stats = store.lock().unwrap_or_else(PoisonError::into_inner).stats();
            for (total, count) in status.offload_evictions.iter_mut().zip(stats.evictions) {
                *total += count;
            }
        }
        status.evictions[2] += self.output_critical_evictions;
        Some(status)
    }
}

#[pymethods]
impl Engine {
    /// `config_json` is the effective configuration, `base_dir` what a relative component path is relative to. With
    /// `serves` the admin listener and the metrics are started, as the configuration says. With `priority_first` the engine
    /// itself schedules by priority.
    #[new]
    #[pyo3(signature = (config_json, base_dir, *, starts, ends, padding, block_tokens, steps_ahead, model = "", serves = false, tool_calls = vec![], priority_first = false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python constructor")]
    fn new(
        py: Python<'_>,
        config_json: &str,
        base_dir: &str,
        starts: Vec<Vec<u32>>,
        ends: Vec<Vec<u32>>,
        padding: Vec<u32>,
        block_tokens: u32,
        steps_ahead: usize,
        model: &str,
        serves: bool,
        tool_calls: Vec<Vec<u32>>,
        priority_first: bool,
    ) -> PyResult<Self> {
        let config = MeridianConfig::from_json(config_json).map_err(config_error)?;
        log::keep();
        let markers =
            Markers::new(starts, ends, padding).map_err(|error| ConfigError::new_err(format!("model: {error}")))?;
        let markers = markers.with_resuming(config.model.resumes);
        let base_dir = Path::new(base_dir);
        let trusted_keys =
            TrustedKeys::parse("policy.trusted_keys", &config.policy.trusted_keys, base_dir).map_err(config_error)?;
        // Filled once the engine is there: the slots come first.
        let status = Arc::new(OnceLock::new());
        let told = Arc::clone(&status);
        let named = model.to_owned();
        // Compiling a component takes tens of milliseconds.
        let slots = py
            .detach(|| Slots::new(&config, base_dir, trusted_keys, || Box::new(process_status(told, named))))
            .map_err(policy_error)?;
        let Slots { dispatch, eviction, budget, controller, recorder } = slots;
        let mut engine = DispatchEngine::new(dispatch, markers.clone(), &config.scheduler, block_tokens);
        engine.set_steps_ahead(steps_ahead);
        if priority_first {
            engine.put_priority_first();
        }
        let inner = Inner {
            engine,
            slots: HashMap::new(),
            by_id: HashMap::new(),
            live: HashMap::new(),
            next_id: 0,
            running: Vec::new(),
            waiting: Vec::new(),
            given: Vec::new(),
            tokens: Vec::new(),
            events: Vec::new(),
            all_waiting: 0,
            followed: None,
            traces: None,
            orders_kv: false,
            pools: Vec::new(),
            stores: Vec::new(),
            output_critical_evictions: 0,
        };
        let inner = Arc::new(Mutex::new(inner));
        // Nobody else has set it.
        let _ = status.set(Arc::downgrade(&inner));
        let controller = Arc::new(controller);
        let control = Arc::clone(&controller) as Arc<dyn Control>;
        let services = Services::start(&config, base_dir, model, &control, serves, recorder);
        inner.lock().unwrap_or_else(PoisonError::into_inner).traces = services.traces();
        let configured = Thresholds::from_config(&config.scheduler, &config.entropy);
        let unit = config.entropy.unit;
        let judges = Judges { eviction, budget, configured, unit };
        let policies = Py::new(py, Policies::new(controller, judges, services))?;
        let tool_calls = tool_calls.into_iter().filter(|ids| !ids.is_empty()).collect();
        Ok(Self {
            inner,
            leaves_the_rest: config.leaves_memory_and_thinking(),
            markers,
            steps_ahead,
            block_tokens,
            evicts_dead_thinking: config.evicts_dead_thinking(),
            tool_calls,
            growth_blocks: config.kv_memory.growth_blocks,
            manages_kv: config.kv_memory.enabled,
            policies,
            config,
            base_dir: base_dir.display().to_string(),
        })
    }

    /// Follow the thinking of the requests from here on: whoever samples can force its end. `forced` are the tokens of the
    /// forced ending, `line_ends` and `boundaries` the tokens that end a line, and a line, a sentence or a clause;
    /// `interrupts` end thinking when they are generated.
    fn follow_thinking(
        &self,
        py: Python<'_>,
        forced: Vec<u32>,
        line_ends: HashSet<u32>,
        boundaries: HashSet<u32>,
        interrupts: Vec<Vec<u32>>,
        can_probe: bool,
    ) -> PyResult<Thinking> {
        let rules = EndRules::new(self.markers.clone(), forced)
            .map_err(|error| ConfigError::new_err(format!("model: {error}")))?;
        let entropy = &self.config.entropy;
        let settings = ThinkSettings {
            rules,
            configured: Thresholds::from_config(&self.config.scheduler, entropy),
            unit: entropy.unit,
            measures: entropy.enabled,
            can_probe,
            probe_at: entropy.probe_at,
            block_tokens: self.block_tokens,
            line_ends,
            boundaries,
            interrupts: interrupts.into_iter().filter_map(Pattern::new).collect(),
            guards_eos: self.config.model.eos_guard,
            steps_ahead: u32::try_from(self.steps_ahead).unwrap_or(u32::MAX),
        };
        self.lock().followed = Some(Followed::new(settings));
        Ok(Thinking::new(Arc::clone(&self.inner), self.policies.clone_ref(py)))
    }

    /// Whether the next step is the engine's own: `native:fcfs` decides in the dispatch slot, and neither the configuration
    /// nor a swap has a say in KV memory or thinking. The engine is only followed then.
    #[getter]
    fn is_stock(&self, py: Python<'_>) -> bool {
        if !self.leaves_the_rest || !self.lock().engine.slot().is_decided_by(STOCK) {
            return false;
        }
        let policies = self.policies.borrow(py);
        let judges = &*policies.judges();
        (!self.manages_kv || judges.eviction.is_decided_by(&self.config.policy.eviction.source))
            && judges.budget.is_decided_by(&self.config.policy.budget.source)
    }

    /// Whether a shadow or a recording sees what the dispatch slot decides.
    #[getter]
    fn is_watched(&self) -> bool {
        self.lock().engine.slot().is_watched()
    }

    /// Whether the thinking of a request that ended can never be matched again: True when the model's template strips it
    /// from later prompts, None when it must not be looked at.
    #[getter]
    fn evicts_dead_thinking(&self) -> Option<bool> {
        self.evicts_dead_thinking
    }

    /// Whether the engine's KV memory is Meridian's to order.
    #[getter]
    fn manages_kv(&self) -> bool {
        self.manages_kv
    }

    /// Free KV blocks that admission leaves for each running request.
    #[getter]
    fn growth_blocks(&self) -> f64 {
        self.growth_blocks
    }

    /// The effective configuration it was made with, as JSON, and what relative paths in it are relative to.
    #[getter]
    fn config_json(&self) -> PyResult<String> {
        crate::to_json(&self.config)
    }

    #[getter]
    fn base_dir(&self) -> &str {
        &self.base_dir
    }

    /// Token sequences that begin a tool call, as they were given.
    #[getter]
    fn tool_calls(&self) -> Vec<Vec<u32>> {
        self.tool_calls.clone()
    }

    /// The engine preempts whoever is last in its running list: when a step may be short of KV blocks, plans put requests
    /// that answer before those that do not.
    fn keep_answers_ahead(&self, groups: u32, lookahead_tokens: u32) {
        let growth = KvGrowth { groups, lookahead_tokens, blocks_per_request: self.growth_blocks };
        let inner = &mut *self.lock();
        inner.orders_kv = true;
        inner.engine.keep_answers_ahead(growth);
    }

    /// The request has no KV blocks, and nobody chose it: all lost theirs, or it was so before this engine was there.
    fn lost_blocks(&self, request_id: &str) {
        let inner = &mut *self.lock();
        if let Some(slot) = inner.find(request_id) {
            inner.engine.lost_blocks(slot);
        }
    }

    /// Running and waiting requests that answer, and the learned step time: fixed, a decode token, a prefill token, in
    /// milliseconds; None until it is learned.
    #[getter]
    fn step_facts(&self) -> Option<(u64, (f32, f32, f32))> {
        let inner = self.lock();
        let fit = inner.engine.step_time()?;
        let answering = inner.engine.phases()[ThinkPhase::Output as usize];
        Some((answering, (fit.fixed_ms, fit.decode_token_ms, fit.prefill_token_ms)))
    }

    /// Preemptions of requests that answered.
    #[getter]
    fn output_preemptions(&self) -> u64 {
        self.lock().engine.preemptions()[ThinkPhase::Output as usize]
    }

    /// The mirror of a pool of `blocks` KV blocks, to be filled by `resync`.
    /// With `keeps_dead` what is dead stays in the cache and is the first to go.
    fn pool(&self, py: Python<'_>, blocks: u32, block_tokens: u32, keeps_dead: bool) -> BlockPool {
        let cached = CachedBlocks::new(blocks, block_tokens);
        let cached = Arc::new(Mutex::new(if keeps_dead { cached.keeping_dead() } else { cached }));
        self.lock().pools.push(Arc::clone(&cached));
        BlockPool::new(cached, self.policies.clone_ref(py))
    }

    /// The order of eviction of a store beside the engine's memory, of `chunks` chunks.
    fn store(&self, py: Python<'_>, chunks: u32, block_tokens: u32) -> BlockPool {
        let cached = Arc::new(Mutex::new(CachedBlocks::new(chunks, block_tokens).keeping_dead()));
        self.lock().stores.push(Arc::clone(&cached));
        BlockPool::new(cached, self.policies.clone_ref(py))
    }

    /// Position of a request's first token of thinking; None before it has thought, or when it is not known.
    fn think_from(&self, request_id: &str) -> Option<u32> {
        let inner = self.lock();
        inner.engine.table().get(inner.find(request_id)?)?.think_from()
    }

    /// Whether a policy reads how many KV blocks each request would free: they are dear to count.
    #[getter]
    fn reads_victim_blocks(&self, py: Python<'_>) -> bool {
        self.policies.borrow(py).judges().eviction.reads(EvictionColumn::Blocks)
    }

    /// Which of the handles in `running` gives up its KV blocks; `blocks` are those that only it attends, for each, or
    /// empty when nobody reads them. None when one of the handles is not known.
    fn victim(
        &self,
        py: Python<'_>,
        running: &Bound<'_, PyList>,
        blocks: Vec<u32>,
        memory: (f64, u32, u32, u32),
    ) -> Option<usize> {
        let (now_ms, free_blocks, cached_blocks, total_blocks) = memory;
        let memory = Memory { now_ms, subject: Subject::Requests, free_blocks, cached_blocks, total_blocks };
        let inner = &mut *self.lock();
        if !slots_of(&inner.slots, Some(running), &mut inner.running) {
            return None;
        }
        let policies = self.policies.borrow(py);
        let judges = &mut *policies.judges();
        inner.engine.victim(&mut judges.eviction, &memory, &inner.running, &blocks)
    }

    /// What changes its policies.
    #[getter]
    fn policies(&self, py: Python<'_>) -> Py<Policies> {
        self.policies.clone_ref(py)
    }

    /// A request arrived. `prompt_tail` is the end of the templated prompt. False when its id is already known. Any
    /// integers will do for `prompt_tokens`, `max_tokens` and `priority`: they are cut to 32 bits.
    /// With `whole_prompt` the engine may not split its prompt.
    #[pyo3(signature = (handle, request_id, *, prompt_tail, prompt_tokens, max_tokens, arrival_ms, deadline_ms, priority, tenant, whole_prompt = false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn add(
        &self,
        handle: Py<PyAny>,
        request_id: &Bound<'_, PyString>,
        prompt_tail: Vec<u32>,
        #[pyo3(from_py_with = saturated)] prompt_tokens: i64,
        #[pyo3(from_py_with = saturated)] max_tokens: i64,
        arrival_ms: f64,
        deadline_ms: f64,
        #[pyo3(from_py_with = saturated)] priority: i64,
        tenant: &str,
        whole_prompt: bool,
    ) -> PyResult<bool> {
        let text = request_id.to_cow()?;
        let inner = &mut *self.lock();
        let request = NewRequest {
            prompt: &prompt_tail,
            prompt_tokens: to_u32(prompt_tokens),
            cached_tokens: 0,
            max_tokens: to_u32(max_tokens),
            arrival_ms,
            deadline_ms,
            priority: priority.clamp(i32::MIN.into(), i32::MAX.into()) as i32,
            tenant,
            whole_prompt,
        };
        if inner.by_id.contains_key(&*text) {
            return Ok(false);
        }
        let Ok(slot) = inner.engine.table_mut().insert(RequestId(inner.next_id), &request) else { return Ok(false) };
        inner.next_id += 1;
        inner.slots.insert(handle.as_ptr() as usize, slot);
        inner.by_id.insert(text.into(), slot);
        inner.live.insert(slot, Live { handle, id: request_id.clone().unbind() });
        Ok(true)
    }

    /// The request is over; `reason` is the engine's word for why.
    #[pyo3(signature = (request_id, reason = ""))]
    fn remove(&self, request_id: &str, reason: &str) {
        let inner = &mut *self.lock();
        if let Some(slot) = inner.by_id.remove(request_id) {
            if let (Some(traces), Some(row)) = (&inner.traces, inner.engine.table().get(slot)) {
                let version = inner.engine.slot().version();
                traces.request(FinishedRequest {
                    reason: reason.to_owned(),
                    policy: (version.name.clone(), version.version.clone()),
                    ..FinishedRequest::of(row, request_id, inner.engine.now_ms())
                });
            }
            if let (Some(followed), Some(row)) = (&mut inner.followed, inner.engine.table().get(slot)) {
                followed.budgets.remove(followed.key(row.id().0));
            }
            inner.engine.table_mut().remove(slot);
            if let Some(live) = inner.live.remove(&slot) {
                inner.slots.remove(&(live.handle.as_ptr() as usize));
            }
        }
        if inner.engine.table().is_empty() {
            inner.engine.idle();
        }
    }

    /// Plan one step: puts the two lists of handles into their new order, in place. Returns the step's token budget, a
    /// caps dictionary from request id to tokens (None when there are none), and whether each list changed.
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
    ) -> PyResult<(u32, Option<Bound<'py, PyDict>>, bool, bool)> {
        let inner = &mut *self.lock();
        let known = slots_of(&inner.slots, Some(running), &mut inner.running)
            && slots_of(&inner.slots, waiting, &mut inner.waiting);
        if !known {
            // A request that was never added: the engine's own order is right for a step like that.
            return Ok((token_budget, None, false, false));
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
        inner.all_waiting = all_waiting;
        let plan = inner.engine.plan(&facts, &inner.running, &inner.waiting);
        let (running_changed, waiting_changed) = (!plan.running_order.is_empty(), !plan.waiting_order.is_empty());
        let step_budget = plan.token_budget;
        reorder(running, &plan.running_order)?;
        if let Some(waiting) = waiting {
            reorder(waiting, &plan.waiting_order)?;
        }
        let caps = if plan.token_caps.is_empty() {
            None
        } else {
            let dict = PyDict::new(py);
            for (slot, cap) in &plan.token_caps {
                if let Some(live) = inner.live.get(slot) {
                    dict.set_item(&live.id, cap)?;
                }
            }
            Some(dict)
        };
        Ok((step_budget, caps, running_changed, waiting_changed))
    }

    /// In the place of `plan`, for a step of an engine that `is_stock` and not `is_watched`: the engine keeps its own order
    /// and budget.
    fn keep(
        &self,
        now_ms: f64,
        token_budget: u32,
        free_blocks: u32,
        total_blocks: u32,
        all_waiting: u32,
        decode_tokens: u32,
    ) {
        let inner = &mut *self.lock();
        inner.all_waiting = all_waiting;
        inner.engine.keep(&EngineFacts {
            now_ms,
            token_budget,
            free_blocks,
            total_blocks,
            free_seats: 0,
            waiting: all_waiting,
            decode_tokens,
        });
    }

    /// The engine scheduled the step that was planned at `now_ms`: request id -> tokens. What is not known is a probe.
    fn scheduled(&self, now_ms: f64, tokens: &Bound<'_, PyDict>) -> PyResult<()> {
        let inner = &mut *self.lock();
        inner.given.clear();
        let mut probe_tokens = 0;
        for (id, count) in tokens {
            let id = id.cast::<PyString>()?;
            match inner.find(&id.to_cow()?) {
                Some(slot) => inner.given.push((slot, count.extract()?)),
                None => probe_tokens += count.extract::<u32>()?,
            }
        }
        inner.engine.scheduled(now_ms, inner.given.iter().copied());
        inner.engine.scheduled_besides(probe_tokens);
        Ok(())
    }

    /// The request was admitted with this many of its tokens already computed (prefix cache).
    fn admitted(&self, request_id: &str, cached_tokens: u32) {
        let inner = &mut *self.lock();
        if let Some(slot) = inner.find(request_id) {
            inner.engine.admitted(slot, cached_tokens);
        }
    }

    /// The engine's own count of a request's computed tokens.
    fn set_computed(&self, request_id: &str, computed_tokens: u32) {
        let inner = &mut *self.lock();
        if let Some(slot) = inner.find(request_id) {
            inner.engine.table_mut().set_computed(slot, computed_tokens);
        }
    }

    /// The request lost its KV blocks and waits again; `blocks` is how many that only it attended, for one that answers.
    /// True when it answers and one that does not could have gone instead.
    #[pyo3(signature = (request_id, blocks = 0))]
    fn preempted(&self, request_id: &str, blocks: u32) -> bool {
        let inner = &mut *self.lock();
        let Some(slot) = inner.find(request_id) else { return false };
        if inner.engine.table().get(slot).is_some_and(|row| row.phase() == ThinkPhase::Output) {
            inner.output_critical_evictions += u64::from(blocks);
        }
        inner.engine.preempted(slot)
    }

    /// Tokens were generated: objects with `request_id` and `new_token_ids`, as vLLM's `EngineCoreOutput`. They were there at
    /// `now_ms`, by default at the latest time that was told.
    #[pyo3(signature = (outputs, now_ms = None))]
    fn generated(&self, py: Python<'_>, outputs: &Bound<'_, PyList>, now_ms: Option<f64>) -> PyResult<()> {
        let inner = &mut *self.lock();
        if let Some(now_ms) = now_ms {
            inner.engine.set_clock(now_ms);
        }
        for output in outputs {
            let id = output.getattr(intern!(py, "request_id"))?;
            let Some(slot) = inner.find(&id.cast::<PyString>()?.to_cow()?) else { continue };
            inner.tokens.clear();
            for token in output.getattr(intern!(py, "new_token_ids"))?.cast::<PyList>()? {
                inner.tokens.push(token.extract()?);
            }
            let tokens = std::mem::take(&mut inner.tokens);
            inner.events.clear();
            inner.engine.table_mut().generated(slot, &tokens, &mut inner.events);
            if let (Some(followed), Some(row)) = (&mut inner.followed, inner.engine.table().get(slot)) {
                followed.budgets.generated(followed.key(row.id().0), &tokens, inner.engine.now_ms());
            }
            inner.tokens = tokens;
        }
        Ok(())
    }

    /// The engine ran dry: the time until the next step is not a step's.
    fn idle(&self) {
        self.lock().engine.idle();
    }

    /// What the latest plan left to run could not run, and the engine lifted its caps.
    fn overruled(&self) {
        self.lock().engine.overruled();
    }

    /// Faults of every kind so far.
    #[getter]
    fn fault_count(&self) -> u64 {
        self.lock().engine.slot().fault_count()
    }

    /// Phase of a request: "prefill", "think" or "output"; None when it is not known.
    fn phase(&self, request_id: &str) -> Option<&'static str> {
        let inner = self.lock();
        let slot = inner.find(request_id)?;
        Some(match inner.engine.table().get(slot)?.phase() {
            ThinkPhase::Prefill => "prefill",
            ThinkPhase::Think => "think",
            ThinkPhase::Output => "output",
        })
    }

    /// What the slot has done; the keys are those of `meridian.Stats`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let inner = self.lock();
        let (engine, stats) = (&inner.engine, inner.engine.stats());
        let dict = PyDict::new(py);
        let version = engine.slot().version();
        dict.set_item("policy", &version.name)?;
        dict.set_item("policy_version", &version.version)?;
        dict.set_item("policy_sha256", &version.sha256)?;
        dict.set_item("requests", engine.table().len())?;
        dict.set_item("decisions", stats.decisions())?;
        dict.set_item("decided_by_policy", stats.active)?;
        dict.set_item("left_to_default", stats.default)?;
        dict.set_item("decided_by_fallback", stats.fallback)?;
        dict.set_item("deciding_ms", milliseconds(stats.deciding))?;
        dict.set_item("longest_decision_ms", milliseconds(stats.longest))?;
        let faults = PyDict::new(py);
        for kind in FaultKind::ALL {
            faults.set_item(kind.label(), stats.faults(kind))?;
        }
        dict.set_item("faults", faults)?;
        dict.set_item("idle_plans", engine.slot().idle_plans())?;
        dict.set_item("last_fault", engine.slot().last_fault().map(|fault| fault.to_string()))?;
        let [prefill, think, output] = engine.preemptions();
        let preemptions = PyDict::new(py);
        preemptions.set_item("prefill", prefill)?;
        preemptions.set_item("think", think)?;
        preemptions.set_item("output", output)?;
        dict.set_item("preemptions", preemptions)?;
        dict.set_item("kv", inner.kv_status().map(|kv| crate::kv::to_dict(py, &kv)).transpose()?)?;
        let budget = inner.followed.as_ref().map(|followed| followed.budgets.status());
        dict.set_item("budget", budget.map(|budget| crate::thinking::to_dict(py, &budget)).transpose()?)?;
        let step_time = engine.step_time().map(|fit| (fit.fixed_ms, fit.decode_token_ms, fit.prefill_token_ms));
        dict.set_item("step_time_ms", step_time)?;
        dict.set_item(
            "last_source",
            engine.last_source().map(|source| match source {
                Source::Active => "policy",
                Source::Default => "default",
                Source::Fallback => "fallback",
            }),
        )?;
        Ok(dict)
    }
}

/// Facts about the engine, once it is there, for whoever asks from another thread.
fn process_status(inner: Arc<OnceLock<Weak<Mutex<Inner>>>>, model: String) -> impl Fn() -> ProcessStatus + Send + Sync {
    let started = Instant::now();
    move || {
        let mut status = ProcessStatus {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            model: model.clone(),
            uptime_s: started.elapsed().as_secs_f64(),
            ..ProcessStatus::default()
        };
        if let Some(inner) = inner.get().and_then(Weak::upgrade) {
            let inner = inner.lock().unwrap_or_else(PoisonError::into_inner);
            status.requests = inner.engine.phases();
            status.waiting = u64::from(inner.all_waiting);
            status.preemptions = inner.engine.preemptions();
            status.kv = inner.kv_status();
            status.budget = inner.followed.as_ref().map(|followed| followed.budgets.status());
            status.step_time_ms = inner
                .engine
                .step_time()
                .map(|fit| [fit.fixed_ms, fit.decode_token_ms, fit.prefill_token_ms].map(f64::from));
        }
        status
    }
}

impl Engine {
    /// A panic while the lock was held leaves counters at worst half updated; the engine goes on.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A Python integer of any size, cut to 64 bits: clients choose some of them, and none may end the engine.
fn saturated(number: &Bound<'_, PyAny>) -> PyResult<i64> {
    match number.extract::<i64>() {
        Err(error) if error.is_instance_of::<PyOverflowError>(number.py()) => {
            Ok(if number.lt(0)? { i64::MIN } else { i64::MAX })
        }
        extracted => extracted,
    }
}

fn to_u32(number: i64) -> u32 {
    number.clamp(0, u32::MAX.into()) as u32
}

/// Slots of the handles in `list`; false when one is not known.
fn slots_of(known: &HashMap<usize, Slot>, list: Option<&Bound<'_, PyList>>, out: &mut Vec<Slot>) -> bool {
    out.clear();
    let Some(list) = list else { return true };
    for handle in list {
        match known.get(&(handle.as_ptr() as usize)) {
            Some(slot) => out.push(*slot),
            None => return false,
        }
    }
    true
}

/// All at once: a list that is half in order has lost requests.
fn reorder(list: &Bound<'_, PyList>, order: &[u32]) -> PyResult<()> {
    if order.is_empty() {
        return Ok(());
    }
    let before: Vec<Bound<'_, PyAny>> = list.iter().collect();
    let after = PyList::new(list.py(), order.iter().map(|from| &before[*from as usize]))?;
    list.set_slice(0, list.len(), &after)
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

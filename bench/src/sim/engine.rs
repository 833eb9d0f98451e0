//! One simulated engine. A step follows vLLM's `Scheduler.schedule` ([`Queues`]), over the KV blocks of [`super::step`].
//! It calls its [`Driver`] as python/meridian/vllm does: the plan before the step, the victim, reports of the requests.

use meridian_core::budget::{BudgetStatus, ClientBudget};
use meridian_core::latency::LatencyCounts;
use meridian_core::slot::{Contender, SlotControl, SlotStats, Source};
use meridian_core::{
    Dispatch, EngineFacts, KvGrowth, Markers, NewRequest, Queues, RequestState, RowId, Stop, WAITING_WINDOW,
};
use meridian_engine::timeline::Timeline;
use meridian_engine::{Driver, Settings};

use super::content::{Chain, Content, mix};
use super::early_exit::Probes;
use super::handoff::{Leaves, Move};
use super::live::{Facts, Live, THINK_END, THINK_START};
use super::pool::Pool;
use super::recorder::Collector;
use super::step::{Serving, ranker};
use super::timeline::Sample;
use super::{Belady, EngineConfig, Policies, StepWork};
use crate::results::Event;
use crate::trace::{Prefix, TraceRequest};

/// A step that carries nothing, milliseconds at least: the engine's own loop.
const EMPTY_STEP_MS: f64 = 1.0;

pub(super) struct Engine {
    /// Its number.
    number: usize,
    config: EngineConfig,
    driver: Driver,
    /// It began as stock vLLM: no policy manages its KV memory.
    is_stock: bool,
    /// Meridian orders its KV blocks and chooses its victims.
    manages_kv: bool,
    evicts_dead_thinking: bool,
    preempts_for_waiting: bool,
    belady: Option<Belady>,
    /// Of an engine whose thinking a budget policy can end.
    probes: Option<Probes>,
    /// What admission leaves free.
    growth: KvGrowth,
    pool: Pool,
    live: Vec<Option<Box<Live>>>,
    /// Room for requests to come.
    spare: Vec<Vec<u32>>,
    /// Blocks of requests that have left, until the engine that answers has them; empty where there are none.
    kept: Vec<Vec<u32>>,
    /// Requests that left in the step that ended last.
    left: Vec<Leaves>,
    /// Requests whose blocks came from another engine: that engine, and the number of their blocks there.
    pulled: Vec<(usize, usize)>,
    /// Requests that the step that began last refused.
    refused: Vec<Facts>,
    queues: Queues,
    given: Vec<(RowId, u32)>,
    found: Vec<u32>,
    generated: Vec<(RowId, u32)>,
    /// Running requests in prefill, think and output.
    phases: [u32; 3],
    /// Number of the step.
    step: u64,
    arrivals: u32,
    /// Digest of every step's schedule, see [`Engine::digest`].
    digest: u64,
    /// The policy that is in quarantine.
    in_quarantine: Option<String>,
    /// See [`Engine::drag`].
    drag: Option<(String, f64)>,
    /// Names the timeline, if one is to be kept.
    timeline: Option<String>,
    /// When the step that is under way ends.
    pub(super) ends_ms: Option<f64>,
}

impl Engine {
    pub(super) fn new(number: usize, config: &EngineConfig, policies: Policies) -> Self {
        let Policies { dispatch, eviction, budget, belady, ends_thinking, is_stock, evicts_dead_thinking, .. } =
            policies;
        let meridian = Probes::config(policies.config);
        let markers = Markers::new(vec![vec![THINK_START]], vec![vec![THINK_END]], vec![])
            .expect("two markers of one token are valid");
        let manages_kv = !is_stock && meridian.kv_memory.enabled;
        let preempts_for_waiting = meridian.scheduler.preempt_for_waiting;
        let state_block = (config.state_blocks > 0).then_some(config.block_tokens);
        let settings = Settings {
            markers,
            block_tokens: config.block_tokens,
            state_block,
            simulates_time: true,
            ..Settings::default()
        };
        let mut driver = Driver::new(meridian, settings, dispatch, eviction, budget);
        let mut growth = KvGrowth::default();
        if manages_kv {
            growth.groups += u32::from(config.state_blocks > 0);
            growth.blocks_per_request = driver.growth_blocks();
            driver.keep_answers_ahead(growth);
        }
        // vLLM keeps one block for itself: what is not there points to it.
        let pool = Pool::new(config.kv_blocks - 1, config.block_tokens, manages_kv && config.prefix_caching);
        let probes = ends_thinking.then(|| Probes::begin(&mut driver));
        Self {
            number,
            config: config.clone(),
            driver,
            is_stock,
            manages_kv,
            evicts_dead_thinking,
            preempts_for_waiting,
            belady,
            probes,
            growth,
            pool,
            live: Vec::new(),
            spare: Vec::new(),
            kept: Vec::new(),
            left: Vec::new(),
            pulled: Vec::new(),
            refused: Vec::new(),
            queues: Queues::default(),
            given: Vec::new(),
            found: Vec::new(),
            generated: Vec::new(),
            phases: [0; 3],
            step: 0,
            arrivals: 0,
            digest: 0,
            in_quarantine: None,
            drag: None,
            timeline: None,
            ends_ms: None,
        }
    }

    /// What its dispatch slot has done; `None` for stock vLLM, whose decisions are its own.
    pub(super) fn dispatch_stats(&mut self) -> Option<SlotStats> {
        (!self.is_stock).then(|| self.driver.scheduler().slot().stats())
    }

    /// What its eviction slot has done, if one manages its KV memory.
    pub(super) fn eviction_stats(&mut self) -> Option<SlotStats> {
        self.manages_kv.then(|| self.driver.eviction().stats())
    }

    /// What its budget slot has done, and to whose thinking, if one can end it.
    pub(super) fn budget_stats(&mut self) -> Option<(SlotStats, BudgetStatus)> {
        let status = self.driver.thinking_status()?;
        Some((self.driver.budget().stats(), status))
    }

    /// The same for two runs whose steps gave the same requests the same numbers of tokens in the same order.
    pub(super) fn digest(&self) -> u64 {
        self.digest
    }

    pub(super) fn steps(&self) -> u64 {
        self.step
    }

    /// Requests that it has.
    pub(super) fn load(&self) -> usize {
        self.queues.len()
    }

    /// A request arrives.
    pub(super) fn add(&mut self, request: &TraceRequest, facts: Facts, content: Content, max_tokens: u32, moves: Move) {
        let mut live = Live::new(facts, content, request.prompt_tokens.max(1));
        live.moves = moves;
        self.take_over(request, Box::new(live), max_tokens, facts.arrival_ms);
    }

    /// A request arrives, maybe from another engine.
    pub(super) fn take_over(&mut self, request: &TraceRequest, mut live: Box<Live>, max_tokens: u32, now_ms: f64) {
        // Of a request that comes with its thinking, that is a part of the prompt.
        let (think_tokens, facts) =
            (request.think_tokens * u32::from(live.known_tokens == live.prompt_tokens), live.facts);
        let end_marker = u32::from(think_tokens > 0);
        let tail = if think_tokens > 0 { THINK_START } else { THINK_END };
        let session = match request.prefix {
            Prefix::Session { id: session, .. } | Prefix::Ranges { session, .. } => session.to_string(),
            Prefix::None | Prefix::Blocks { .. } => String::new(),
        };
        let new = NewRequest {
            prompt: &[tail],
            prompt_tokens: live.known_tokens,
            cached_tokens: 0,
            max_tokens: max_tokens
                .saturating_sub(live.think_tokens)
                .max(think_tokens + end_marker + request.output_tokens),
            max_think_tokens: u32::MAX,
            arrival_ms: now_ms,
            deadline_ms: facts.arrival_ms + request.deadline_ms,
            priority: request.priority,
            tenant: &request.tenant,
            session: &session,
            ..NewRequest::default()
        };
        let client = Some(ClientBudget::default());
        let arrived = self.driver.arrived(&id_of(facts.index), &new, client);
        let arrived = arrived.expect("a request is in an engine once, and times are finite");
        let row_id = arrived.row;
        live.blocks = self.spare.pop().unwrap_or_default();
        if self.manages_kv && self.driver.reads_awaited() {
            live.find_prefix(&self.pool, &self.config, &mut self.found);
            self.pool.awaited(ranker(&mut self.belady, &mut self.driver), &self.found, now_ms);
        }
        if let (Some(probes), Some(sampler)) = (&mut self.probes, arrived.sampler) {
            let number = self.driver.request(row_id).map_or(0, |request| request.number());
            probes.arrived(row_id, sampler.key, number, think_tokens);
            (live.think_key, live.think_limit) = (sampler.key, sampler.limits.max_think_tokens);
        }
        if row_id.index() >= self.live.len() {
            self.live.resize_with(row_id.index() + 1, || None);
        }
        self.live[row_id.index()] = Some(live);
        self.queues.waiting.push_back(row_id);
        self.arrivals += 1;
    }

    /// Begin a step at `now_ms`, when there is something to do.
    pub(super) fn begin(&mut self, now_ms: f64, recorder: &mut Collector) {
        if self.queues.is_empty() {
            return;
        }
        self.step += 1;
        self.given.clear();
        if self.manages_kv {
            self.pool.rekey(ranker(&mut self.belady, &mut self.driver), now_ms);
        }
        let budget = self.plan(now_ms, recorder);
        self.note_quarantine(now_ms, recorder);
        let watermark = (self.config.watermark * f64::from(self.config.kv_blocks)) as u32;
        let reserve = self.growth.reserve(self.queues.running.len(), self.config.kv_blocks).max(watermark);
        // One request alone starves nobody.
        let (limit, requests) = (self.config.long_prefill_token_threshold, self.queues.len() as u32);
        let fair = if self.config.long_prefill_token_threshold_adaptive { budget / requests.max(1) } else { 0 };
        let prompt_limit = if limit > 0 && requests > 1 { limit.max(fair) } else { u32::MAX };
        let Self { config, manages_kv, belady, driver, pool, live, found, phases, given, queues, pulled, .. } = self;
        let work = StepWork::default();
        let mut step = Serving {
            now_ms,
            reserve,
            config,
            manages_kv: *manages_kv,
            belady,
            driver,
            pool,
            live,
            token_budget: budget,
            prompt_limit,
            found,
            phases,
            given,
            pulled,
            work,
            recorder,
        };
        queues.serve(budget, step.config.seats() as usize, &mut step);
        let mut work = step.work;
        let (probes, probe_tokens) = self.probes.as_mut().map(Probes::take).unwrap_or_default();
        work.requests += probes;
        work.tokens += probe_tokens;
        self.driver.scheduled(now_ms, &self.given, probe_tokens);
        self.note_digest();
        let taken_in = f64::from(std::mem::take(&mut self.arrivals)) * self.config.step.arrival_ms;
        let model = self.config.step;
        let step_ms = if work.tokens == 0 { model.fixed_ms.max(EMPTY_STEP_MS) } else { model.step_ms(&work) };
        let step_ms = step_ms * self.factor();
        let step_ms = (step_ms + taken_in).max(1e-3);
        recorder.step(&self.sample(now_ms, step_ms), &work, &self.config);
        self.ends_ms = Some(now_ms + step_ms);
    }

    /// How much longer this step takes than the model says.
    fn factor(&mut self) -> f64 {
        let jitter = &self.config.jitter;
        // Without regard to what the step carries, so that two policies have the same steps late.
        let at = mix(self.number as u64, self.step).checked_rem(jitter.len() as u64);
        let jitter = at.map_or(1.0, |at| f64::from(jitter[at as usize]));
        let drag = match &self.drag {
            Some((source, factor)) if self.driver.scheduler().slot().is_decided_by(source) => *factor,
            _ => 1.0,
        };
        jitter * drag
    }

    /// Steps take `factor` times as long while the native policy `source` decides.
    pub(super) fn drag(&mut self, source: &str, factor: f64) {
        self.drag = Some((source.to_owned(), factor));
    }

    /// Observe latencies from now on, as an engine does.
    pub(super) fn observe(&mut self) {
        self.driver.observe(0);
    }

    /// Latencies since [`Engine::observe`].
    pub(super) fn latency(&mut self) -> Option<LatencyCounts> {
        self.driver.latency()
    }

    /// A handle of its dispatch slot.
    pub(super) fn control(&mut self) -> SlotControl<Dispatch> {
        self.driver.scheduler().slot().control()
    }

    /// The plan of the step, carried out on the queues; the tokens it may carry.
    fn plan(&mut self, now_ms: f64, recorder: &mut Collector) -> u32 {
        let own_budget = self.config.max_num_batched_tokens;
        if let Some(probes) = &mut self.probes {
            probes.decide(now_ms, &mut self.driver, &self.pool, &mut self.live);
        }
        let seats = (self.config.seats() as usize).saturating_sub(self.queues.running.len());
        let facts = EngineFacts {
            now_ms,
            token_budget: own_budget,
            free_blocks: self.pool.free(),
            total_blocks: self.config.kv_blocks,
            free_seats: seats as u32,
            waiting: self.queues.waiting.len() as u32,
            decode_tokens: 1,
        };
        if self.is_stock && self.driver.is_stock() && !self.driver.is_watched() {
            self.driver.keep(&facts);
            return own_budget;
        }
        // While no seat is free, those that wait matter only where they may take one.
        let sees_waiting = seats > 0 || self.preempts_for_waiting;
        let gathers = sees_waiting && self.driver.promises();
        if gathers {
            self.queues.gather(seats);
        }
        let Queues { running, waiting, .. } = &mut self.queues;
        let window = if sees_waiting { waiting.len().min(WAITING_WINDOW) } else { 0 };
        let waiting = &waiting.make_contiguous()[..window];
        if let Some(cached) = self.pool.mirror() {
            self.driver.scheduler().note_sessions(cached, false, &facts, running, waiting);
        }
        let plan = self.driver.plan(&facts, running, waiting);
        self.queues.arrange(plan);
        let token_budget = plan.token_budget;
        for row_id in plan.refused.clone() {
            self.refuse(row_id, recorder);
        }
        token_budget
    }

    /// A request that waits ends unserved.
    fn refuse(&mut self, row_id: RowId, recorder: &mut Collector) {
        let Some(live) = self.live[row_id.index()].take() else { return };
        self.pulled.extend(live.moves.kept);
        recorder.turned_away(live.facts.batch, live.facts.arrival_ms);
        if let Some(probes) = &mut self.probes {
            probes.finished(live.think_key);
        }
        self.driver.finished(&id_of(live.facts.index), "refused");
        self.refused.push(live.facts);
    }

    /// Requests that the step that began last refused.
    pub(super) fn take_refused(&mut self) -> Vec<Facts> {
        std::mem::take(&mut self.refused)
    }

    /// Keep a timeline from now on.
    pub(super) fn keep_timeline(&mut self, title: &str) {
        self.timeline = Some(title.to_owned());
        self.driver.begin_timeline();
    }

    /// The timeline so far, if one is kept.
    pub(super) fn take_timeline(&mut self) -> Option<Timeline> {
        let title = self.timeline.take()?;
        Some(self.driver.end_timeline()?.titled(&title))
    }

    /// After a fault another may decide, and for as long as that lasts.
    fn note_quarantine(&mut self, now_ms: f64, recorder: &mut Collector) {
        if self.driver.scheduler().last_source() != Some(Source::Fallback) && self.in_quarantine.is_none() {
            return;
        }
        let status = self.control().status();
        let in_quarantine = status.quarantine.map(|(version, _)| version.name);
        let number = self.number;
        let what = match (&self.in_quarantine, &in_quarantine) {
            (None, Some(name)) => format!("engine {number}: {name} in quarantine, {} decides", status.active.name),
            (Some(name), None) => format!("engine {number}: {name} is tried again"),
            _ => return,
        };
        recorder.events.push(Event { t_s: now_ms / 1e3, what });
        self.in_quarantine = in_quarantine;
    }

    /// Another policy takes over.
    pub(super) fn swap(&mut self, contender: Contender<Dispatch>) {
        self.control().swap(contender);
        self.in_quarantine = None;
    }

    /// The step that is under way ends: each request that has computed all it knows generates a token.
    pub(super) fn end(&mut self, recorder: &mut Collector, ended: &mut Vec<Live>) {
        let Some(ends_ms) = self.ends_ms.take() else { return };
        self.driver.set_clock(ends_ms);
        let given = std::mem::take(&mut self.given);
        let mut over = false;
        for (row_id, _) in &given {
            let live = self.live[row_id.index()].as_deref_mut().expect("whoever was given tokens is live");
            if live.computed_tokens < live.known_tokens {
                continue;
            }
            let token = live.next_token();
            let before = live.phase();
            live.known_tokens += 1;
            self.generated.push((*row_id, token));
            recorder.token(live, ends_ms, token == THINK_END);
            let after = live.phase();
            if before != after {
                self.phases[before] -= 1;
                self.phases[after] += 1;
            }
            if token == THINK_END {
                live.thought();
            }
            over |= live.is_over_here();
        }
        recorder.end_step();
        self.given = given;
        self.driver.generated(&self.generated);
        self.generated.clear();
        if over {
            self.remove_ended(ends_ms, recorder, ended);
        }
    }

    fn remove_ended(&mut self, now_ms: f64, recorder: &mut Collector, ended: &mut Vec<Live>) {
        let running = std::mem::take(&mut self.queues.running);
        for row_id in &running {
            if !self.live[row_id.index()].as_ref().is_some_and(|live| live.is_over_here()) {
                self.queues.running.push(*row_id);
                continue;
            }
            let mut live = self.live[row_id.index()].take().expect("checked above");
            let leaves = std::mem::take(&mut live.moves.leaves);
            if !leaves {
                recorder.finished(&live, &self.config);
            }
            self.phases[live.phase()] -= 1;
            if self.evicts_dead_thinking
                && let Some(from) = self.driver.request(*row_id).and_then(RequestState::think_from)
            {
                self.pool.mark_dead(&live.blocks, self.config.block_tokens, from);
            }
            let stop = if live.facts.turn.is_some_and(|turn| turn.stopped_for_tool) { Stop::Tool } else { Stop::Turn };
            let chain = self.driver.scheduler().mirror().chain_ends(*row_id, stop);
            self.pool.chain_ends(&live.blocks, &chain);
            if let (Some(belady), Some(turn)) = (&mut self.belady, live.facts.turn) {
                let kept = (turn.next_tokens / self.config.block_tokens) as usize;
                belady.note(&live.blocks, kept, now_ms + turn.next_gap_ms);
            }
            self.pool.release(ranker(&mut self.belady, &mut self.driver), &mut live.state, now_ms);
            let (id, think_key) = (id_of(live.facts.index), live.think_key);
            if leaves {
                let kept = self.keep(std::mem::take(&mut live.blocks));
                let blocks = self.kept[kept].len() as u32;
                (live.computed_tokens, live.chain) = (0, Chain::default());
                self.left.push(Leaves { live, blocks, kept });
            } else {
                self.pool.release(ranker(&mut self.belady, &mut self.driver), &mut live.blocks, now_ms);
                self.spare.push(std::mem::take(&mut live.blocks));
                ended.push(*live);
            }
            if let Some(probes) = &mut self.probes {
                probes.finished(think_key);
            }
            self.driver.finished(&id, "stop");
        }
    }

    /// Keep the blocks of a request that leaves; their number.
    fn keep(&mut self, blocks: Vec<u32>) -> usize {
        match self.kept.iter().position(Vec::is_empty) {
            Some(number) => {
                self.kept[number] = blocks;
                number
            }
            None => {
                self.kept.push(blocks);
                self.kept.len() - 1
            }
        }
    }

    /// The engine that answers has the blocks of this number.
    pub(super) fn release(&mut self, number: usize, now_ms: f64) {
        let mut blocks = std::mem::take(&mut self.kept[number]);
        self.pool.release(ranker(&mut self.belady, &mut self.driver), &mut blocks, now_ms);
        self.spare.push(blocks);
    }

    /// Requests that left in the step that ended last.
    pub(super) fn take_left(&mut self) -> Vec<Leaves> {
        std::mem::take(&mut self.left)
    }

    /// Requests whose blocks this engine has now: the engine that keeps them, and their number there.
    pub(super) fn take_pulled(&mut self) -> Vec<(usize, usize)> {
        std::mem::take(&mut self.pulled)
    }

    fn note_digest(&mut self) {
        let table = &self.driver.scheduler().mirror().table;
        for (row_id, tokens) in &self.given {
            let number = table.get(*row_id).map_or(0, |row| row.number());
            self.digest = (self.digest.rotate_left(5) ^ u64::from(number) ^ (u64::from(*tokens) << 40))
                .wrapping_mul(0x517c_c1b7_2722_0a95);
        }
        self.digest = self.digest.rotate_left(1) ^ self.step;
    }

    fn sample(&self, now_ms: f64, step_ms: f64) -> Sample {
        let [prefill, think, output] = self.phases;
        Sample {
            engine: self.number,
            now_ms,
            step_ms,
            waiting: self.queues.waiting.len() as u32,
            prefill,
            think,
            output,
            used_blocks: self.pool.total() - self.pool.free(),
            cached_blocks: self.pool.cached(),
            blocks: self.pool.total(),
        }
    }
}

/// A request's id in its engine.
fn id_of(index: usize) -> String {
    index.to_string()
}

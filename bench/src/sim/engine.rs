//! One simulated engine. A step follows vllm/v1/core/sched/scheduler.py, `Scheduler.schedule`: running requests in their order
//! while tokens are left, the last of them preempted when blocks are short; then waiting ones, unless something was preempted.
//! Around it stands what python/meridian/vllm puts around vLLM's: the plan before the step, the order of the KV blocks, the
//! victim, what is told to the mirror.

use std::collections::VecDeque;

use meridian_core::{
    Dispatch, EngineFacts, EvictionColumn, KvGrowth, Markers, Memory, NewRequest, PhaseEvent, RequestId, RowId, Subject,
};
use meridian_runtime::{Contender, DispatchEngine, Source};

use super::content::{Chain, Content};
use super::early_exit::EarlyExit;
use super::live::{Facts, Live, THINK_END, THINK_START};
use super::pool::Pool;
use super::recorder::Recorder;
use super::timeline::Sample;
use super::{EngineConfig, Policies, StepWork};
use crate::results::Event;
use crate::trace::TraceRequest;

/// Waiting requests that a policy sees in a step, as in python/meridian/vllm/scheduler.py.
const WAITING_WINDOW: usize = 4096;

/// A step that carries nothing, milliseconds at least: the engine's own loop.
const EMPTY_STEP_MS: f64 = 1.0;

pub(super) struct Engine {
    /// Its number.
    number: usize,
    config: EngineConfig,
    policies: Policies,
    dispatch: DispatchEngine,
    early_exit: Option<EarlyExit>,
    pool: Pool,
    live: Vec<Option<Box<Live>>>,
    /// Room for requests to come.
    spare: Vec<Vec<u32>>,
    running: Vec<RowId>,
    waiting: VecDeque<RowId>,
    given: Vec<(RowId, u32)>,
    reordered: Vec<RowId>,
    capped: Vec<RowId>,
    found: Vec<u32>,
    events: Vec<PhaseEvent>,
    /// Running requests in prefill, think and output.
    phases: [u32; 3],
    /// Number of the step.
    step: u64,
    arrivals: u32,
    next_id: u64,
    /// Digest of every step's schedule, see [`Engine::digest`].
    digest: u64,
    /// The policy that is in quarantine.
    in_quarantine: Option<String>,
    /// When the step that is under way ends.
    pub(super) ends_ms: Option<f64>,
}

/// A request that ended, for whoever plays its next turn.
pub(super) struct Ended {
    pub(super) session: Option<u64>,
    pub(super) content: Content,
    pub(super) think_tokens: u32,
    pub(super) output_tokens: u32,
}

impl Engine {
    pub(super) fn new(number: usize, config: &EngineConfig, mut policies: Policies) -> Self {
        let markers = Markers::new(vec![vec![THINK_START]], vec![vec![THINK_END]], vec![])
            .expect("two markers of one token are valid");
        let meridian = policies.config.clone();
        let slot = policies.take_dispatch();
        let mut dispatch = DispatchEngine::new(slot, markers, &meridian.scheduler, config.block_tokens);
        let manages_kv = policies.manages_kv();
        if manages_kv {
            let growth =
                KvGrowth { groups: 1, lookahead_tokens: 0, blocks_per_request: meridian.kv_memory.growth_blocks };
            dispatch.keep_answers_ahead(growth);
        }
        // vLLM keeps one block for itself: what is not there points to it.
        let pool = Pool::new(config.kv_blocks - 1, config.block_tokens, manages_kv && config.prefix_caching);
        let early_exit = policies.take_budget().map(|slot| EarlyExit::new(slot, &meridian, config.block_tokens));
        Self {
            number,
            config: config.clone(),
            policies,
            dispatch,
            early_exit,
            pool,
            live: Vec::new(),
            spare: Vec::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            given: Vec::new(),
            reordered: Vec::new(),
            capped: Vec::new(),
            found: Vec::new(),
            events: Vec::new(),
            phases: [0; 3],
            step: 0,
            arrivals: 0,
            next_id: 0,
            digest: 0,
            in_quarantine: None,
            ends_ms: None,
        }
    }

    pub(super) fn policies(&self) -> &Policies {
        &self.policies
    }

    pub(super) fn dispatch(&self) -> &DispatchEngine {
        &self.dispatch
    }

    /// The same for two runs whose steps gave the same requests the same numbers of tokens in the same order.
    pub(super) fn digest(&self) -> u64 {
        self.digest
    }

    pub(super) fn steps(&self) -> u64 {
        self.step
    }

    pub(super) fn early_exit(&self) -> Option<&EarlyExit> {
        self.early_exit.as_ref()
    }

    /// Requests that it has.
    pub(super) fn load(&self) -> usize {
        self.running.len() + self.waiting.len()
    }

    /// A request arrives.
    pub(super) fn add(&mut self, request: &TraceRequest, facts: Facts, content: Content, max_tokens: u32) {
        self.next_id += 1;
        let end_marker = u32::from(request.think_tokens > 0);
        let tail = if request.think_tokens > 0 { THINK_START } else { THINK_END };
        let new = NewRequest {
            prompt: &[tail],
            prompt_tokens: request.prompt_tokens,
            cached_tokens: 0,
            max_tokens: max_tokens.max(request.think_tokens + end_marker + request.output_tokens),
            arrival_ms: facts.arrival_ms,
            deadline_ms: facts.arrival_ms + request.deadline_ms,
            priority: request.priority,
            tenant: &request.tenant,
            whole_prompt: false,
        };
        let id = RequestId(self.next_id);
        let slot = self.dispatch.table_mut().insert(id, &new).expect("ids are counted up and times are finite");
        let mut live = Live::new(facts, content, request.prompt_tokens.max(1));
        live.blocks = self.spare.pop().unwrap_or_default();
        if let Some(early_exit) = &mut self.early_exit {
            live.think_limit = early_exit.add(self.next_id, &new, request.think_tokens);
        }
        if slot.index() >= self.live.len() {
            self.live.resize_with(slot.index() + 1, || None);
        }
        self.live[slot.index()] = Some(Box::new(live));
        self.waiting.push_back(slot);
        self.arrivals += 1;
    }

    /// Begin a step at `now_ms`, when there is something to do.
    pub(super) fn begin(&mut self, now_ms: f64, recorder: &mut Recorder) {
        if self.running.is_empty() && self.waiting.is_empty() {
            return;
        }
        self.step += 1;
        self.given.clear();
        let budget = self.plan(now_ms);
        self.note_quarantine(now_ms, recorder);
        let growth_blocks = if self.policies.manages_kv() { self.policies.config.kv_memory.growth_blocks } else { 0.0 };
        let reserve = (growth_blocks * self.running.len() as f64) as u32;
        let mut work = StepWork::default();
        let (left, preempted) = self.serve_running(budget, now_ms, &mut work, recorder);
        if !preempted {
            self.admit(left, reserve, now_ms, &mut work, recorder);
        }
        for slot in self.capped.drain(..) {
            if let Some(live) = &mut self.live[slot.index()] {
                live.cap = u32::MAX;
            }
        }
        if let Some((requests, tokens)) = self.early_exit.as_mut().map(EarlyExit::take_probes) {
            work.requests += requests;
            work.tokens += tokens;
        }
        self.dispatch.scheduled(now_ms, self.given.iter().copied());
        self.note_digest();
        let taken_in = f64::from(std::mem::take(&mut self.arrivals)) * self.config.step.arrival_ms;
        let model = self.config.step;
        let step_ms = if work.tokens == 0 { model.fixed_ms.max(EMPTY_STEP_MS) } else { model.step_ms(&work) };
        let step_ms = (step_ms + taken_in).max(1e-3);
        recorder.step(&self.sample(now_ms, step_ms), &work);
        self.ends_ms = Some(now_ms + step_ms);
    }

    /// The plan of the step, carried out on the queues; the tokens it may carry.
    fn plan(&mut self, now_ms: f64) -> u32 {
        let own_budget = self.config.max_num_batched_tokens;
        if let Some(early_exit) = &mut self.early_exit {
            early_exit.decide(now_ms, &self.dispatch, self.waiting.len(), &self.pool, &mut self.live);
        }
        if self.policies.is_stock {
            return own_budget;
        }
        let seats = (self.config.max_num_seqs as usize).saturating_sub(self.running.len());
        let facts = EngineFacts {
            now_ms,
            token_budget: own_budget,
            free_blocks: self.pool.free(),
            total_blocks: self.config.kv_blocks,
            free_seats: seats as u32,
            waiting: self.waiting.len() as u32,
            decode_tokens: 1,
        };
        let window = if seats > 0 { self.waiting.len().min(WAITING_WINDOW) } else { 0 };
        let waiting = if window > 0 { &mut self.waiting.make_contiguous()[..window] } else { &mut [] };
        if let Some(early_exit) = &self.early_exit {
            self.dispatch.refresh_signals(&self.running, waiting, |request| early_exit.signals(request.0));
        }
        let plan = self.dispatch.plan(&facts, &self.running, waiting);
        reorder(&mut self.running, &plan.running_order, &mut self.reordered);
        reorder(waiting, &plan.waiting_order, &mut self.reordered);
        for (slot, cap) in &plan.token_caps {
            if let Some(live) = &mut self.live[slot.index()] {
                live.cap = *cap;
                self.capped.push(*slot);
            }
        }
        plan.token_budget
    }

    /// After a fault another may decide, and for as long as that lasts.
    fn note_quarantine(&mut self, now_ms: f64, recorder: &mut Recorder) {
        if self.dispatch.last_source() != Some(Source::Fallback) && self.in_quarantine.is_none() {
            return;
        }
        let status = self.dispatch.slot().control().status();
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
    pub(super) fn swap(&mut self, candidate: Contender<Dispatch>) {
        self.dispatch.slot().control().swap(candidate);
        self.in_quarantine = None;
    }

    /// Give the running requests their tokens; what is left of the budget, and whether one was preempted.
    fn serve_running(
        &mut self,
        mut budget: u32,
        now_ms: f64,
        work: &mut StepWork,
        recorder: &mut Recorder,
    ) -> (u32, bool) {
        let block_tokens = self.config.block_tokens;
        let mut preempted = false;
        let mut position = 0;
        'requests: while position < self.running.len() && budget > 0 {
            let slot = self.running[position];
            let live = self.live[slot.index()].as_deref_mut().expect("a running request is live");
            let tokens = (live.known_tokens - live.computed_tokens).min(budget).min(live.cap);
            if tokens == 0 {
                position += 1;
                continue;
            }
            let end = live.computed_tokens + tokens;
            let needed = end.div_ceil(block_tokens) - live.blocks.len() as u32;
            if needed > 0 {
                while self.pool.free() < needed {
                    preempted = true;
                    if self.preempt(position, now_ms, recorder) == slot {
                        break 'requests;
                    }
                }
                let live = self.live[slot.index()].as_deref_mut().expect("it was not the victim");
                self.pool.take(needed, now_ms, &mut live.blocks);
            }
            self.give(slot, tokens, work);
            budget -= tokens;
            position += 1;
        }
        (budget, preempted)
    }

    /// Preempt one of the requests from `position` on: the last, or whom the host chooses.
    fn preempt(&mut self, position: usize, now_ms: f64, recorder: &mut Recorder) -> RowId {
        let candidates = &self.running[position..];
        if self.policies.manages_kv() && candidates.len() > 1 {
            let reads_blocks = self.policies.eviction.reads(EvictionColumn::Blocks);
            let held =
                |slot: &RowId| self.live[slot.index()].as_ref().map_or(0, |live| self.pool.unshared(&live.blocks));
            let blocks: Vec<u32> = if reads_blocks { candidates.iter().map(held).collect() } else { Vec::new() };
            let memory = Memory {
                now_ms,
                subject: Subject::Requests,
                free_blocks: self.pool.free() - self.pool.cached(),
                cached_blocks: self.pool.cached(),
                total_blocks: self.config.kv_blocks,
            };
            let victim = self.dispatch.victim(&mut self.policies.eviction, &memory, candidates, &blocks);
            if let Some(victim) = victim {
                let slot = self.running.remove(position + victim);
                self.running.push(slot);
            }
        }
        let slot = self.running.pop().expect("whoever lacks blocks runs");
        let live = self.live[slot.index()].as_deref_mut().expect("a running request is live");
        recorder.preempted(live);
        self.phases[live.phase()] -= 1;
        self.pool.release(&mut self.policies.eviction, &mut live.blocks, now_ms);
        live.computed_tokens = 0;
        live.chain = Chain::default();
        live.preemptions += 1;
        self.dispatch.preempted(slot);
        self.waiting.push_front(slot);
        slot
    }

    /// Admit waiting requests in their order while there are seats, tokens and blocks for all they know.
    fn admit(&mut self, mut budget: u32, reserve: u32, now_ms: f64, work: &mut StepWork, recorder: &mut Recorder) {
        let block_tokens = self.config.block_tokens;
        while budget > 0 && self.running.len() < self.config.max_num_seqs as usize {
            let Some(slot) = self.waiting.front().copied() else { break };
            let live = self.live[slot.index()].as_deref_mut().expect("a waiting request is live");
            if live.cap == 0 {
                break;
            }
            let mut chain = Chain::default();
            self.found.clear();
            if self.config.prefix_caching {
                // The last token is computed in any case: it gives the first logits.
                while (chain.blocks + 1) * block_tokens < live.known_tokens {
                    let mut next = chain;
                    let key = live.content.next(&mut next, block_tokens, live.think_tokens);
                    let Some(block) = self.pool.find(key) else { break };
                    self.found.push(block);
                    chain = next;
                }
            }
            let cached = chain.blocks * block_tokens;
            let tokens = (live.known_tokens - cached).min(budget).min(live.cap);
            let revived = self.found.iter().filter(|block| self.pool.is_free(**block)).count() as u32;
            let whole = live.known_tokens.div_ceil(block_tokens) - chain.blocks + revived;
            let watermark = if self.running.is_empty() { 0 } else { reserve };
            if whole + watermark > self.pool.free() {
                break;
            }
            self.pool.touch(&self.found);
            self.pool.matched(&self.found, live.preemptions > 0);
            live.blocks.extend_from_slice(&self.found);
            live.chain = chain;
            live.computed_tokens = cached;
            let needed = (cached + tokens).div_ceil(block_tokens) - chain.blocks;
            self.pool.take(needed, now_ms, &mut live.blocks);
            recorder.admitted(live);
            self.phases[live.phase()] += 1;
            self.waiting.pop_front();
            self.running.push(slot);
            self.dispatch.admitted(slot, cached);
            self.give(slot, tokens, work);
            budget -= tokens;
        }
    }

    /// The request computes `tokens` in this step.
    fn give(&mut self, slot: RowId, tokens: u32, work: &mut StepWork) {
        let live = self.live[slot.index()].as_deref_mut().expect("a running request is live");
        work.add(live.computed_tokens, tokens);
        live.computed_tokens += tokens;
        self.given.push((slot, tokens));
        let block_tokens = self.config.block_tokens;
        while self.config.prefix_caching && (live.chain.blocks + 1) * block_tokens <= live.computed_tokens {
            let key = live.content.next(&mut live.chain, block_tokens, live.think_tokens);
            let position = live.chain.blocks - 1;
            self.pool.fill(live.blocks[position as usize], key, live.chain.blocks * block_tokens);
        }
    }

    /// The step that is under way ends: each request that has computed all it knows generates a token.
    pub(super) fn end(&mut self, recorder: &mut Recorder, ended: &mut Vec<Ended>) {
        let Some(ends_ms) = self.ends_ms.take() else { return };
        self.dispatch.set_clock(ends_ms);
        let given = std::mem::take(&mut self.given);
        let mut over = false;
        for (slot, _) in &given {
            let live = self.live[slot.index()].as_deref_mut().expect("whoever was given tokens is live");
            if live.computed_tokens < live.known_tokens {
                continue;
            }
            let token = live.next_token();
            let before = live.phase();
            live.known_tokens += 1;
            self.dispatch.table_mut().generated(*slot, &[token], &mut self.events);
            recorder.token(live, ends_ms, token == THINK_END);
            let after = live.phase();
            if before != after {
                self.phases[before] -= 1;
                self.phases[after] += 1;
            }
            if let Some(early_exit) = &mut self.early_exit {
                early_exit.generated(live, self.dispatch.table()[*slot].id().0, token, ends_ms);
            }
            over |= live.is_over();
        }
        recorder.end_step();
        self.given = given;
        self.events.clear();
        if over {
            self.remove_ended(ends_ms, recorder, ended);
        }
    }

    fn remove_ended(&mut self, now_ms: f64, recorder: &mut Recorder, ended: &mut Vec<Ended>) {
        let running = std::mem::take(&mut self.running);
        for slot in &running {
            if !self.live[slot.index()].as_ref().is_some_and(|live| live.is_over()) {
                self.running.push(*slot);
                continue;
            }
            let mut live = self.live[slot.index()].take().expect("checked above");
            recorder.finished(&live, &self.config);
            self.phases[live.phase()] -= 1;
            if self.policies.evicts_dead_thinking
                && let Some(from) = self.dispatch.table()[*slot].think_from()
            {
                self.pool.mark_dead(&live.blocks, self.config.block_tokens, from);
            }
            self.pool.release(&mut self.policies.eviction, &mut live.blocks, now_ms);
            self.spare.push(std::mem::take(&mut live.blocks));
            if let Some(early_exit) = &mut self.early_exit {
                early_exit.remove(self.dispatch.table()[*slot].id().0);
            }
            self.dispatch.table_mut().remove(*slot);
            ended.push(Ended {
                session: live.facts.session,
                think_tokens: live.think_tokens,
                output_tokens: live.output_tokens,
                content: live.content,
            });
        }
        if self.dispatch.table().is_empty() {
            self.dispatch.idle();
        }
    }

    fn note_digest(&mut self) {
        let table = self.dispatch.table();
        for (slot, tokens) in &self.given {
            let id = table.get(*slot).map_or(0, |row| row.id().0);
            self.digest =
                (self.digest.rotate_left(5) ^ id ^ (u64::from(*tokens) << 40)).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
        self.digest = self.digest.rotate_left(1) ^ self.step;
    }

    fn sample(&self, now_ms: f64, step_ms: f64) -> Sample {
        let [prefill, think, output] = self.phases;
        Sample {
            engine: self.number,
            now_ms,
            step_ms,
            waiting: self.waiting.len() as u32,
            prefill,
            think,
            output,
            used_blocks: self.pool.total() - self.pool.free(),
            cached_blocks: self.pool.cached(),
            blocks: self.pool.total(),
        }
    }
}

/// Put `slots` into `order`; an empty one leaves them as they are.
fn reorder(slots: &mut [RowId], order: &[u32], scratch: &mut Vec<RowId>) {
    if !order.is_empty() {
        scratch.clear();
        scratch.extend(order.iter().map(|from| slots[*from as usize]));
        slots.copy_from_slice(scratch);
    }
}

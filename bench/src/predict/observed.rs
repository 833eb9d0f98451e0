//! The traffic, the steps and the latencies of an engine, read from its dispatch recording.
//!
//! The tokens of a step have the time of the row after it. The last step of a request is the one before the row that names it as finished.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use anyhow::{Context, ensure};
use meridian_core::latency::{LatencyCounts, Sketch};
use meridian_core::{Column, Dispatch, State, ThinkPhase};
use meridian_engine::recording::{Recorded, Recording, RowEngine, RowRequest, each_row};

use crate::limits::{BLOCK_TOKENS, KV_BLOCKS, NUM_SEQS, REQUESTS};
use crate::sim::{EngineConfig, StepModel, StepWork};
use crate::trace::{MAX_TOKENS, Prefix, TraceRequest};
use crate::vllm::RecordedSteps;

/// Running requests that are assumed possible where a recording never shows the engine's limit.
const ASSUMED_SEATS: u32 = 256;
/// Without these columns, no request can be followed.
const NEEDED: [Column; 7] = [
    Column::Request,
    Column::State,
    Column::WaitMs,
    Column::PromptTokens,
    Column::ComputedTokens,
    Column::ThinkTokens,
    Column::OutputTokens,
];
/// Fewest requests that ended: what the lengths of the others are drawn from.
const FEWEST_ENDED: usize = 20;

/// What a recording shows of its engine.
#[derive(Clone, Debug)]
pub struct Observed {
    /// Every request, by arrival. Requests that had not ended have the lengths they had reached.
    pub requests: Vec<TraceRequest>,
    /// Which of them ended in the recording.
    pub has_ended: Vec<bool>,
    /// Seconds from the first arrival to the last decision.
    pub seconds: f64,
    /// Decisions that the recording lacks between its first and its last.
    pub missing: u64,
    /// Tokens that clients asked for, the median.
    pub max_tokens: u32,
    /// The recorded latencies.
    pub measured: LatencyCounts,
    /// The least and the most tokens that a client asked for.
    pub(crate) asked: [u32; 2],
    pub(crate) steps: RecordedSteps,
    engine: RowEngine,
}

impl Observed {
    /// Read dispatch recordings, all of one process and in the order of writing.
    ///
    /// # Errors
    /// The file, and what it lacks.
    pub fn read(recordings: &[Recording]) -> anyhow::Result<Self> {
        let first = recordings.first().context("no recording is given")?;
        let mut reader = Reading::default();
        let engine = each_row(recordings, &NEEDED, |_, row, requests| {
            reader.row(row, requests).map_err(|error| format!("{error:#}"))
        })?;
        reader.end(engine).with_context(|| first.file().to_owned())
    }

    /// The engine, with step times of `step`.
    #[must_use]
    pub fn engine(&self, step: StepModel) -> EngineConfig {
        let RowEngine { seats, most_running, token_budget, total_blocks, block_tokens, .. } = self.engine;
        let seats = if seats > 0 { seats } else { ASSUMED_SEATS };
        EngineConfig {
            step,
            max_num_seqs: seats.max(most_running).clamp(*NUM_SEQS.start(), *NUM_SEQS.end()),
            max_num_batched_tokens: token_budget.max(1),
            kv_blocks: total_blocks,
            block_tokens,
            ..EngineConfig::default()
        }
    }

    /// How many requests had not ended.
    #[must_use]
    pub fn open(&self) -> usize {
        self.has_ended.iter().filter(|has_ended| !**has_ended).count()
    }

    /// What the recording lacks, one line.
    #[must_use]
    pub fn lack(&self) -> Option<String> {
        (self.missing > 0).then(|| format!("{} decisions are missing in the recording", self.missing))
    }

    /// Whether the recording shows how many requests the engine runs at most.
    #[must_use]
    pub fn knows_seats(&self) -> bool {
        self.engine.seats > 0
    }
}

/// A request as far as its rows tell.
#[derive(Clone, Debug)]
struct Known {
    arrival_ms: f64,
    /// It waited, ran or was preempted in the latest row, which is this one.
    seen_in: u64,
    is_running: bool,
    prompt_tokens: u32,
    /// Found in the prefix cache when it was first admitted.
    cached_tokens: Option<u32>,
    computed_tokens: u32,
    think_tokens: u32,
    output_tokens: u32,
    is_thinking: bool,
    max_tokens: u32,
    priority: i32,
    tenant: u32,
    deadline_ms: f64,
    session: u32,
    turn: u32,
    /// It arrived after the first row.
    is_whole: bool,
    has_ended: bool,
    admitted_ms: f64,
    first_token_ms: f64,
    think_end_ms: f64,
    first_output_ms: f64,
    last_token_ms: f64,
    /// Gaps of its thinking and of its answer.
    gaps_ms: [Vec<f32>; 2],
}

#[derive(Default)]
struct Reading {
    known: Vec<Known>,
    /// The place in `known` of each live request.
    live: HashMap<u32, usize>,
    row: u64,
    last_seq: Option<u64>,
    last_ms: f64,
    steps: RecordedSteps,
    /// The place in `known` of each request of the row.
    places: Vec<usize>,
}

impl Reading {
    fn row(&mut self, row: &Recorded<Dispatch>, requests: &[RowRequest]) -> anyhow::Result<()> {
        let facts = &row.facts;
        let now_ms = facts.now_ms;
        let is_later = self.last_seq.is_none() || now_ms >= self.last_ms;
        ensure!(now_ms.is_finite() && is_later, "row {}: now_ms: {now_ms}: expected a later time", row.seq);
        let is_next = self.last_seq.is_some_and(|last| last.checked_add(1) == Some(row.seq));
        self.row += 1;
        self.look(now_ms, requests)?;
        // A request of the row before still runs: then the engine was busy all the time between the two.
        let stayed = |(at, seen): (&usize, &RowRequest)| {
            let before = &self.known[*at];
            before.seen_in + 1 == self.row && (before.is_running || seen.state == State::Running)
        };
        let was_busy = self.places.iter().zip(requests).any(stayed);
        let mut work = StepWork::default();
        let end_ms = if was_busy { now_ms } else { self.step_end_ms(facts, now_ms) };
        self.finish(row, end_ms, &mut work);
        self.advance(requests, now_ms, &mut work);
        if is_next && was_busy && work.tokens > 0 {
            let steps = &mut self.steps;
            steps.ms.push(now_ms - self.last_ms);
            steps.requests.push(work.requests);
            steps.tokens.push(work.tokens);
            steps.context_tokens.push(work.context_tokens);
            steps.attention_pairs.push(work.attention_pairs);
            steps.arrivals.push(0);
            steps.arrivals_ms.push(0.0);
        }
        self.last_seq = Some(row.seq);
        self.last_ms = now_ms;
        Ok(())
    }

    /// Find each request, and take in those that are new.
    fn look(&mut self, now_ms: f64, requests: &[RowRequest]) -> anyhow::Result<()> {
        self.places.clear();
        for request in requests {
            let at = match self.live.get(&request.number) {
                Some(at) => *at,
                None => {
                    ensure!(self.known.len() < *REQUESTS.end(), "has more than {} requests", REQUESTS.end());
                    self.known.push(Known::new(request, now_ms, self.row > 1));
                    self.live.insert(request.number, self.known.len() - 1);
                    self.known.len() - 1
                }
            };
            self.places.push(at);
        }
        Ok(())
    }

    /// When the step before ended, of which nobody is left: the engine was idle until now. The engine's own estimate.
    fn step_end_ms(&self, facts: &meridian_core::Step, now_ms: f64) -> f64 {
        let ms = f64::from(facts.fixed_ms) + f64::from(facts.decode_token_ms);
        if ms > 0.0 && ms.is_finite() { (self.last_ms + ms).min(now_ms) } else { now_ms }
    }

    /// The requests that ended since the row before got their last token in the step before.
    fn finish(&mut self, row: &Recorded<Dispatch>, end_ms: f64, work: &mut StepWork) {
        for number in &row.finished {
            let Some(at) = self.live.remove(number) else { continue };
            let request = &mut self.known[at];
            let known_tokens = request.prompt_tokens + request.think_tokens + request.output_tokens;
            let left = known_tokens.saturating_sub(request.computed_tokens);
            if left > 0 {
                work.add(request.computed_tokens, left);
            }
            let has_begun =
                request.is_running || request.computed_tokens > 0 || request.think_tokens + request.output_tokens > 0;
            if !has_begun && request.seen_in + 1 < self.row {
                // It was given up while it waited.
                continue;
            }
            let tokens = [u32::from(request.is_thinking), u32::from(!request.is_thinking)];
            request.tokens(tokens, end_ms);
            request.has_ended = true;
        }
    }

    /// What the step before gave each request.
    fn advance(&mut self, requests: &[RowRequest], now_ms: f64, work: &mut StepWork) {
        for (at, seen) in self.places.iter().zip(requests) {
            let request = &mut self.known[*at];
            let was_seen = request.seen_in > 0;
            let is_running = seen.state == State::Running;
            let computed = seen.computed_tokens.saturating_sub(request.computed_tokens);
            let served = seen.served_tokens.unwrap_or(computed);
            if self.row > 1 && is_running && served > 0 {
                work.add(seen.computed_tokens.saturating_sub(served), served);
            }
            if is_running && request.cached_tokens.is_none() {
                // In the step that began at the row before.
                request.admitted_ms = self.last_ms.max(request.arrival_ms);
                request.cached_tokens = Some(seen.cached_tokens.min(request.prompt_tokens));
            }
            let [think_tokens, output_tokens] =
                [seen.think_tokens, seen.output_tokens].map(|tokens| tokens.min(MAX_TOKENS));
            if was_seen || request.is_whole {
                let think = think_tokens.saturating_sub(request.think_tokens);
                request.tokens([think, output_tokens.saturating_sub(request.output_tokens)], now_ms);
            }
            (request.think_tokens, request.output_tokens) = (think_tokens, output_tokens);
            request.computed_tokens = seen.computed_tokens;
            request.is_running = is_running;
            request.is_thinking = seen.phase == ThinkPhase::Think;
            request.seen_in = self.row;
        }
    }

    fn end(mut self, engine: RowEngine) -> anyhow::Result<Observed> {
        ensure!(self.last_seq.is_some(), "has no decision");
        ensure!(
            !engine.speculates,
            "decode_tokens: above 1: was recorded with speculative decoding, which the simulator does not have"
        );
        let blocks = &engine.total_blocks;
        ensure!(
            KV_BLOCKS.contains(blocks),
            "total_blocks: {blocks}: expected {} to {}",
            KV_BLOCKS.start(),
            KV_BLOCKS.end()
        );
        let tokens = engine.block_tokens.max(1).checked_next_power_of_two().unwrap_or(u32::MAX);
        ensure!(
            BLOCK_TOKENS.contains(&tokens),
            "kv_blocks: a block of {tokens} tokens: expected at most {}",
            BLOCK_TOKENS.end()
        );
        // Those of which nothing is known but that they waited and were given up.
        let live: HashSet<usize> = self.live.values().copied().collect();
        let mut known: Vec<Known> = std::mem::take(&mut self.known)
            .into_iter()
            .enumerate()
            .filter(|(at, request)| request.has_ended || live.contains(at))
            .map(|(_, request)| request)
            .collect();
        known.sort_by(|a, b| a.arrival_ms.total_cmp(&b.arrival_ms));
        let ended = known.iter().filter(|request| request.has_ended).count();
        ensure!(ended >= FEWEST_ENDED, "{ended} requests ended in it, expected at least {FEWEST_ENDED}");
        let first_ms = known.first().map_or(0.0, |request| request.arrival_ms);
        let measured = measured(&known);
        let mut asked: Vec<u32> = known.iter().map(|request| request.max_tokens).collect();
        asked.sort_unstable();
        let max_tokens = asked[asked.len() / 2].clamp(1, MAX_TOKENS);
        let requests = requests(&known, first_ms, tokens);
        Ok(Observed {
            has_ended: known.iter().map(|request| request.has_ended).collect(),
            requests,
            seconds: (self.last_ms - first_ms) / 1e3,
            missing: engine.missing,
            max_tokens,
            asked: [asked[0], asked[asked.len() - 1]],
            measured,
            steps: self.steps,
            engine: RowEngine { block_tokens: tokens, ..engine },
        })
    }
}

impl Known {
    /// A request in its first row. `is_later`: that is not the first of the recording.
    fn new(request: &RowRequest, now_ms: f64, is_later: bool) -> Self {
        let generated = [request.think_tokens, request.output_tokens];
        let wait_ms = f64::from(request.wait_ms);
        Self {
            arrival_ms: now_ms - wait_ms,
            seen_in: 0,
            is_running: false,
            prompt_tokens: request.prompt_tokens.clamp(1, MAX_TOKENS),
            cached_tokens: None,
            computed_tokens: 0,
            think_tokens: generated[0].min(MAX_TOKENS),
            output_tokens: generated[1].min(MAX_TOKENS),
            is_thinking: false,
            max_tokens: request.remaining_tokens + generated[0] + generated[1],
            priority: request.priority,
            tenant: request.tenant,
            deadline_ms: (f64::from(request.slack_ms) + wait_ms).max(0.0),
            session: request.session,
            turn: request.turn,
            is_whole: is_later && generated == [0, 0],
            has_ended: false,
            admitted_ms: f64::NAN,
            first_token_ms: f64::NAN,
            think_end_ms: f64::NAN,
            first_output_ms: f64::NAN,
            last_token_ms: f64::NAN,
            gaps_ms: [Vec::new(), Vec::new()],
        }
    }

    /// So many tokens of thinking and of the answer have come until now.
    fn tokens(&mut self, [think, output]: [u32; 2], now_ms: f64) {
        let count = think + output;
        if count == 0 {
            return;
        }
        if self.first_token_ms.is_nan() {
            self.first_token_ms = now_ms;
        } else if !self.last_token_ms.is_nan() {
            // Several tokens since the row before come from rows that are missing.
            let gap_ms = ((now_ms - self.last_token_ms) / f64::from(count)) as f32;
            let place = usize::from(output > 0);
            self.gaps_ms[place].push(gap_ms);
        }
        if think > 0 {
            self.think_end_ms = now_ms;
        }
        if output > 0 && self.first_output_ms.is_nan() {
            self.first_output_ms = now_ms;
        }
        self.last_token_ms = now_ms;
        // The rows to come have the counts, but for the last token.
        self.think_tokens += think;
        self.output_tokens += output;
    }
}

/// The requests as a trace.
fn requests(known: &[Known], first_ms: f64, block_tokens: u32) -> Vec<TraceRequest> {
    let overlapping = overlapping(known);
    let tenants: HashMap<u32, Arc<str>> = known
        .iter()
        .map(|request| {
            (request.tenant, if request.tenant == 0 { Arc::from("") } else { format!("t{}", request.tenant).into() })
        })
        .collect();
    known
        .iter()
        .map(|request| {
            let cached_tokens = request.cached_tokens.unwrap_or(0);
            let shared = |owner: u64| {
                let ids = (0..u64::from(cached_tokens / block_tokens)).map(|block| owner << 32 | block);
                Prefix::Blocks { tokens: block_tokens, ids: ids.collect() }
            };
            let prefix = match request.session {
                0 if cached_tokens >= block_tokens => shared(u64::from(request.tenant)),
                0 => Prefix::None,
                session if overlapping.contains(&session) => shared(1 << 31 | u64::from(session)),
                session => Prefix::Session { id: session.into(), turn: request.turn.saturating_sub(1) },
            };
            TraceRequest {
                arrival_s: (request.arrival_ms - first_ms) / 1e3,
                prompt_tokens: request.prompt_tokens,
                // The end marker counts as thinking in a recording, and is added by the simulator.
                think_tokens: request.think_tokens.saturating_sub(1),
                output_tokens: request.output_tokens.max(1),
                tenant: tenants[&request.tenant].clone(),
                priority: request.priority,
                deadline_ms: request.deadline_ms,
                prefix,
            }
        })
        .collect()
}

/// Sessions with a request that arrived before the one before it had ended: its turns do not wait for each other.
fn overlapping(known: &[Known]) -> HashSet<u32> {
    let mut ends: HashMap<u32, f64> = HashMap::new();
    let mut found = HashSet::new();
    for request in known.iter().filter(|request| request.session > 0) {
        let end_ms = if request.has_ended { request.last_token_ms } else { f64::INFINITY };
        if ends.insert(request.session, end_ms).is_some_and(|before| request.arrival_ms < before) {
            found.insert(request.session);
        }
    }
    found
}

/// The latencies of the requests that arrived and ended in the recording, and all gaps between tokens.
fn measured(known: &[Known]) -> LatencyCounts {
    let whole = || known.iter().filter(|request| request.has_ended && request.is_whole);
    let since_arrival = |of: fn(&Known) -> f64| {
        whole().map(|request| of(request) - request.arrival_ms).filter(|ms| ms.is_finite()).collect::<Sketch>()
    };
    // Of all: the gaps of requests that live long would be missing otherwise.
    let gaps =
        |place: usize| known.iter().flat_map(move |request| &request.gaps_ms[place]).copied().map(f64::from).collect();
    LatencyCounts {
        finished: whole().count() as u64,
        output_tokens: known.iter().map(|request| u64::from(request.output_tokens)).sum(),
        think_tokens: known.iter().map(|request| u64::from(request.think_tokens)).sum(),
        recomputed_tokens: 0,
        in_time: 0,
        missed: 0,
        queue: since_arrival(|request| request.admitted_ms),
        ttft: since_arrival(|request| request.first_token_ms),
        ttfo: since_arrival(|request| request.first_output_ms),
        ttot: whole()
            .map(|request| request.first_output_ms - request.think_end_ms)
            .filter(|ms| ms.is_finite())
            .collect(),
        think_itl: gaps(0),
        output_itl: gaps(1),
        e2e: since_arrival(|request| request.last_token_ms),
    }
}

//! What is kept of a simulated run: the metrics of its requests, counts and a timeline of fixed size, however long the run is.

use std::sync::Arc;

use super::live::Live;
use super::timeline::{Sample, Timeline};
use super::{EngineConfig, StepWork, sessions};
use crate::metrics::{Finished, Gap, Measured, Metrics, NOT_MEASURED, us};
use crate::results::{Event, Run, Slo};

/// Times of one request, for whoever compares request by request; milliseconds since its arrival.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestTimes {
    /// Position in the trace.
    pub index: usize,
    /// Arrival to first token of any kind.
    pub ttft_ms: f64,
    /// Arrival to first token of the answer.
    pub ttfo_ms: f64,
    /// Arrival to last token.
    pub e2e_ms: f64,
    /// Mean gap between two tokens, of thinking and of the answer; NaN for fewer than two.
    pub itl_ms: f64,
}

#[derive(Default)]
struct Kept {
    times: Vec<RequestTimes>,
    works: Vec<StepWork>,
}

/// Takes in what happens in every engine of a run.
pub(super) struct Collector {
    metrics: Metrics,
    engines: usize,
    /// Of each step the share of its time in which it computed, or of the seats or the KV memory that were taken, whichever is
    /// the most; times what it took.
    busy_ms: f64,
    turned_away: u64,
    /// Equal gaps of this step, counted: think and output.
    gaps: [Gaps; 2],
    timeline: Timeline,
    preemptions: [u64; 3],
    recomputed_tokens: u64,
    hit_tokens: u64,
    asked_tokens: u64,
    /// Of prompts, what an unlimited cache would have, and what of it was missing.
    known_tokens: u64,
    needed_tokens: u64,
    kept: Option<Kept>,
    pub(super) events: Vec<Event>,
    pub(super) refused: u64,
}

/// Tokens of one step that came as long after the one before, by group.
#[derive(Clone, Copy, Debug, Default)]
struct Gaps {
    us: u64,
    all: u64,
    /// The group of the latest, and how many of it in a row.
    batch: u16,
    in_row: u64,
}

const KINDS: [Gap; 2] = [Gap::Think, Gap::Output];

impl Collector {
    pub(super) fn new(slo: Slo, engines: usize, measured: Measured) -> Self {
        Self {
            metrics: Metrics::new(slo, measured),
            engines,
            busy_ms: 0.0,
            turned_away: 0,
            gaps: [Gaps::default(); 2],
            timeline: Timeline::new(engines),
            preemptions: [0; 3],
            recomputed_tokens: 0,
            hit_tokens: 0,
            asked_tokens: 0,
            known_tokens: 0,
            needed_tokens: 0,
            kept: None,
            events: Vec::new(),
            refused: 0,
        }
    }

    /// The number of a tenant.
    pub(super) fn tenant(&mut self, name: &Arc<str>) -> u32 {
        self.metrics.tenant(name)
    }

    /// The group that a request belongs to.
    pub(super) fn batch_of(&self, index: usize, arrival_ms: f64) -> u16 {
        self.metrics.batch_of(index, arrival_ms)
    }

    /// The engine turned a request away.
    pub(super) fn turned_away(&mut self, batch: u16, arrival_ms: f64) {
        self.turned_away += 1;
        self.metrics.turned_away(batch, arrival_ms);
    }

    pub(super) fn preempted(&mut self, live: &Live) {
        self.preemptions[live.phase()] += 1;
        self.recomputed_tokens += u64::from(live.computed_tokens);
    }

    /// The request was admitted; `computed_tokens` were found in the prefix cache.
    pub(super) fn admitted(&mut self, live: &Live, block_tokens: u32) {
        if live.preemptions == 0 {
            self.hit_tokens += u64::from(live.computed_tokens);
            self.asked_tokens += u64::from(live.prompt_tokens);
            if let Some(turn) = live.facts.turn {
                // In whole blocks of the engine, and not the last token: that is computed in any case.
                let known = turn.known_tokens.min(live.prompt_tokens - 1) / block_tokens * block_tokens;
                self.known_tokens += u64::from(known);
                self.needed_tokens += u64::from(known.saturating_sub(live.computed_tokens));
            }
        } else {
            self.recomputed_tokens = self.recomputed_tokens.saturating_sub(u64::from(live.computed_tokens));
        }
    }

    /// What sessions had in common, and what of it was found.
    pub(super) fn kept_prefixes(&self) -> sessions::Kept {
        sessions::Kept {
            known: self.known_tokens,
            needed: self.needed_tokens,
            asked: self.asked_tokens,
            again: self.recomputed_tokens,
        }
    }

    /// A token of the request is there.
    #[inline]
    pub(super) fn token(&mut self, live: &mut Live, now_ms: f64, is_end_marker: bool) {
        let was_thinking = live.thinks;
        let times = &mut live.times;
        if times.first_token_ms.is_nan() {
            times.first_token_ms = now_ms;
        } else {
            let gap_us = us(now_ms - times.last_token_ms);
            let kind = usize::from(!was_thinking);
            let batch = live.facts.batch;
            // Who was in the step before has the same gap, and neighbours are of the same group.
            if self.gaps[kind].us != gap_us || self.gaps[kind].batch != batch {
                let all = self.flush_batch(kind);
                if self.gaps[kind].us == gap_us {
                    self.gaps[kind].all = all;
                } else {
                    self.flush(kind, all);
                }
                (self.gaps[kind].us, self.gaps[kind].batch) = (gap_us, batch);
            }
            self.gaps[kind].in_row += 1;
        }
        times.last_token_ms = now_ms;
        if was_thinking {
            live.think_tokens += 1;
            if is_end_marker {
                live.thinks = false;
                times.think_end_ms = now_ms;
            }
            return;
        }
        live.output_tokens += 1;
        if live.output_tokens == 1 {
            times.first_output_ms = now_ms;
        }
        live.reader.token(now_ms, live.output_tokens == 1, &self.metrics.slo);
    }

    /// Note the latest in a row in their group; how many of the same gap that makes.
    fn flush_batch(&mut self, kind: usize) -> u64 {
        let Gaps { us, all, batch, in_row } = self.gaps[kind];
        if batch == NOT_MEASURED {
            self.gaps[kind].in_row = 0;
            return all;
        }
        if in_row > 0 {
            self.metrics.gaps_of_batch(KINDS[kind], batch, us, in_row);
            self.gaps[kind].in_row = 0;
        }
        all + in_row
    }

    fn flush(&mut self, kind: usize, count: u64) {
        if count > 0 {
            self.metrics.gaps_of_all(KINDS[kind], self.gaps[kind].us, count);
        }
        self.gaps[kind].all = 0;
    }

    /// Every token of the step was told.
    pub(super) fn end_step(&mut self) {
        for kind in 0..2 {
            let all = self.flush_batch(kind);
            self.flush(kind, all);
        }
    }

    /// A step begins.
    pub(super) fn step(&mut self, sample: &Sample, work: &StepWork, engine: &EngineConfig) {
        let [from_ms, to_ms] = self.metrics.measured().stretch_ms(f64::INFINITY);
        if (from_ms..to_ms).contains(&sample.now_ms) {
            let part = |of: u32, all: u32| f64::from(of) / f64::from(all.max(1));
            let running = sample.prefill + sample.think + sample.output;
            let fullest = (engine.step.compute_ms(work) / sample.step_ms)
                .max(part(running, engine.seats()))
                .max(part(sample.used_blocks, sample.blocks));
            self.busy_ms += fullest.min(1.0) * sample.step_ms;
        }
        if let Some(kept) = &mut self.kept {
            kept.works.push(*work);
        }
        self.timeline.step(sample);
    }

    /// The request generated its last token.
    pub(super) fn finished(&mut self, live: &Live, engine: &EngineConfig) {
        let &Live { facts, times, prompt_tokens, think_tokens, output_tokens, reader, .. } = live;
        let generated = think_tokens + output_tokens;
        self.metrics.finished(&Finished {
            batch: facts.batch,
            tenant: facts.tenant,
            arrival_ms: facts.arrival_ms,
            first_token_ms: times.first_token_ms,
            think_end_ms: times.think_end_ms,
            first_output_ms: times.first_output_ms,
            last_token_ms: times.last_token_ms,
            prompt_tokens,
            think_tokens,
            output_tokens,
            reader,
            alone_ms: engine.step.alone_ms(prompt_tokens, generated, engine.max_num_batched_tokens),
            alone_ttfo_ms: engine.step.alone_ms(prompt_tokens, think_tokens + 1, engine.max_num_batched_tokens),
        });
        if let Some(Kept { times: all, .. }) = &mut self.kept {
            let since = |ms: f64| ms - facts.arrival_ms;
            let itl_ms = (times.last_token_ms - times.first_token_ms) / f64::from(generated.max(2) - 1);
            let itl_ms = if generated > 1 { itl_ms } else { f64::NAN };
            all.push(RequestTimes {
                index: facts.index,
                ttft_ms: since(times.first_token_ms),
                ttfo_ms: since(times.first_output_ms),
                e2e_ms: since(times.last_token_ms),
                itl_ms,
            });
        }
    }

    /// From here on, keep what [`Collector::take_kept`] gives.
    pub(super) fn keep(&mut self) {
        self.kept = Some(Kept::default());
    }

    /// Times of every request, in the order of the trace, and the work of every step; empty unless they were to be kept.
    pub(super) fn take_kept(&mut self) -> (Vec<RequestTimes>, Vec<StepWork>) {
        let Kept { mut times, works } = self.kept.take().unwrap_or_default();
        times.sort_by_key(|request| request.index);
        (times, works)
    }

    /// The run so far; the caller adds what the engines know.
    pub(super) fn run(&mut self) -> Run {
        let last_ms = self.metrics.last_ms();
        let [from_ms, to_ms] = self.metrics.measured().stretch_ms(last_ms);
        let [waiting, running, kv_used] = self.timeline.means([from_ms, to_ms]);
        let mut run = self.metrics.run();
        let busy = self.busy_ms / ((to_ms - from_ms) * self.engines as f64).max(1e-9);
        let mut set = |key: &str, value: f64| run.metrics.insert(key.to_owned(), value);
        set("busy", busy);
        if self.turned_away > 0 {
            set("turned_away", self.turned_away as f64);
        }
        set("refused", self.refused as f64);
        set("preemptions_prefill", self.preemptions[0] as f64);
        set("preemptions_think", self.preemptions[1] as f64);
        set("preemptions_output", self.preemptions[2] as f64);
        set("recomputed_tokens", self.recomputed_tokens as f64);
        set("hit_rate", self.hit_tokens as f64 / self.asked_tokens.max(1) as f64);
        set("waiting_mean", waiting);
        set("waiting_max", f64::from(self.timeline.waiting_most()));
        set("running_mean", running);
        set("kv_used_mean", kv_used);
        run.timeline = self.timeline.points(last_ms);
        run.events = std::mem::take(&mut self.events);
        run
    }
}

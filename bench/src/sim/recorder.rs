//! What is kept of a run: distributions, counts and a timeline of fixed size, however long the run is.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use hdrhistogram::Histogram;

use super::live::Live;
use super::timeline::{Sample, Timeline};
use super::{EngineConfig, StepWork};
use crate::results::{Event, Run, Slo, TenantRow};

/// Groups of consecutive requests that metrics are kept of.
pub const BATCHES: u16 = 32;
/// Points of a curve.
const CURVE_POINTS: usize = 256;
/// Longest time that is told apart, microseconds: eleven days.
const LONGEST_US: u64 = 1_000_000_000_000;
/// Share of its tokens that a reader must have had in time: what tools call a good experience.
const GOOD_QOE: f64 = 0.95;
/// Digits that a histogram is right to.
const DIGITS: u8 = 3;
/// Tenants that are reported by name.
const TENANTS: usize = 64;

/// The distributions of a run or of a group of its requests.
struct Group {
    ttft: Histogram<u32>,
    ttfo: Histogram<u32>,
    ttot: Histogram<u32>,
    e2e: Histogram<u32>,
    itl_think: Histogram<u32>,
    itl_output: Histogram<u32>,
    requests: u64,
    attained: u64,
    good: u64,
    qoe: f64,
    tokens: u64,
}

impl Group {
    fn new() -> Self {
        // Grows with what is recorded.
        let histogram = || Histogram::new(DIGITS).expect("few digits");
        Self {
            ttft: histogram(),
            ttfo: histogram(),
            ttot: histogram(),
            e2e: histogram(),
            itl_think: histogram(),
            itl_output: histogram(),
            requests: 0,
            attained: 0,
            good: 0,
            qoe: 0.0,
            tokens: 0,
        }
    }

    fn curves(&self) -> [(&'static str, &Histogram<u32>); 6] {
        [
            ("ttft", &self.ttft),
            ("ttfo", &self.ttfo),
            ("ttot", &self.ttot),
            ("e2e", &self.e2e),
            ("itl_think", &self.itl_think),
            ("itl_output", &self.itl_output),
        ]
    }

    /// Percentiles and means in milliseconds, and shares of requests.
    fn metrics(&self) -> BTreeMap<String, f64> {
        let mut out = BTreeMap::new();
        for (name, histogram) in self.curves() {
            if histogram.is_empty() {
                continue;
            }
            for (suffix, q) in [("p50", 0.5), ("p95", 0.95), ("p99", 0.99)] {
                out.insert(format!("{name}_{suffix}_ms"), histogram.value_at_quantile(q) as f64 / 1e3);
            }
            out.insert(format!("{name}_mean_ms"), histogram.mean() / 1e3);
        }
        if self.requests > 0 {
            let requests = self.requests as f64;
            out.insert("slo_attainment".into(), self.attained as f64 / requests);
            out.insert("qoe_mean".into(), self.qoe / requests);
            out.insert("qoe_attainment".into(), self.good as f64 / requests);
        }
        out
    }
}

struct Tenant {
    name: Arc<str>,
    requests: u64,
    attained: u64,
    service_tokens: u64,
    /// Sum of the share of its time that each request would have taken alone.
    speed: f64,
    ttfo: Histogram<u32>,
}

/// Tenants that are told apart; further ones count as one.
const MAX_TENANTS: usize = 4096;
const OTHERS: &str = "(others)";

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
pub(super) struct Recorder {
    slo: Slo,
    whole: Group,
    batches: Vec<Group>,
    tenants: Vec<Tenant>,
    tenant_numbers: HashMap<Arc<str>, u32>,
    /// Equal gaps of this step, counted: think and output.
    gaps: [Gaps; 2],
    timeline: Timeline,
    preemptions: [u64; 3],
    recomputed_tokens: u64,
    hit_tokens: u64,
    asked_tokens: u64,
    last_ms: f64,
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

fn us(ms: f64) -> u64 {
    ((ms * 1e3 + 0.5) as u64).clamp(1, LONGEST_US)
}

fn note(histogram: &mut Histogram<u32>, value_us: u64, count: u64) {
    histogram.record_n(value_us, u32::try_from(count).unwrap_or(u32::MAX)).expect("it grows with what is recorded");
}

impl Recorder {
    pub(super) fn new(slo: Slo, engines: usize) -> Self {
        Self {
            slo,
            whole: Group::new(),
            batches: (0..BATCHES).map(|_| Group::new()).collect(),
            tenants: Vec::new(),
            tenant_numbers: HashMap::new(),
            gaps: [Gaps::default(); 2],
            timeline: Timeline::new(engines),
            preemptions: [0; 3],
            recomputed_tokens: 0,
            hit_tokens: 0,
            asked_tokens: 0,
            last_ms: 0.0,
            kept: None,
            events: Vec::new(),
            refused: 0,
        }
    }

    /// The number of a tenant.
    pub(super) fn tenant(&mut self, name: &Arc<str>) -> u32 {
        if let Some(number) = self.tenant_numbers.get(name) {
            return *number;
        }
        if self.tenants.len() > MAX_TENANTS && &**name != OTHERS {
            return self.tenant(&Arc::from(OTHERS));
        }
        let number = self.tenants.len() as u32;
        self.tenant_numbers.insert(Arc::clone(name), number);
        let ttfo = Histogram::new(2).expect("few digits");
        let name = Arc::clone(name);
        self.tenants.push(Tenant { name, requests: 0, attained: 0, service_tokens: 0, speed: 0.0, ttfo });
        number
    }

    pub(super) fn preempted(&mut self, live: &Live) {
        self.preemptions[live.phase()] += 1;
        self.recomputed_tokens += u64::from(live.computed_tokens);
    }

    /// The request was admitted; `computed_tokens` were found in the prefix cache.
    pub(super) fn admitted(&mut self, live: &Live) {
        if live.preemptions == 0 {
            self.hit_tokens += u64::from(live.computed_tokens);
            self.asked_tokens += u64::from(live.prompt_tokens);
        } else {
            self.recomputed_tokens = self.recomputed_tokens.saturating_sub(u64::from(live.computed_tokens));
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
            live.reader.last_ms = now_ms;
        } else {
            live.reader.last_ms = now_ms.max(live.reader.last_ms + 1e3 / self.slo.reading_tok_s);
        }
        live.reader.sum_ms += live.reader.last_ms;
    }

    /// Note the latest in a row in their group; how many of the same gap that makes.
    fn flush_batch(&mut self, kind: usize) -> u64 {
        let Gaps { us, all, batch, in_row } = self.gaps[kind];
        if in_row > 0 {
            let group = &mut self.batches[usize::from(batch)];
            note(if kind == 0 { &mut group.itl_think } else { &mut group.itl_output }, us, in_row);
            self.gaps[kind].in_row = 0;
        }
        all + in_row
    }

    fn flush(&mut self, kind: usize, count: u64) {
        if count > 0 {
            let us = self.gaps[kind].us;
            note(if kind == 0 { &mut self.whole.itl_think } else { &mut self.whole.itl_output }, us, count);
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
    pub(super) fn step(&mut self, sample: &Sample, work: &StepWork) {
        if let Some(kept) = &mut self.kept {
            kept.works.push(*work);
        }
        self.timeline.step(sample);
    }

    /// The request generated its last token.
    pub(super) fn finished(&mut self, live: &Live, engine: &EngineConfig) {
        let Live { facts, times, prompt_tokens, think_tokens, output_tokens, .. } = live;
        let end_ms = times.last_token_ms;
        self.last_ms = self.last_ms.max(end_ms);
        let since = |ms: f64| ms - facts.arrival_ms;
        let e2e_ms = since(end_ms);
        let ttfo_ms = since(times.first_output_ms);
        let gaps = output_tokens.saturating_sub(1);
        let tpot_ms = if gaps == 0 { 0.0 } else { (end_ms - times.first_output_ms) / f64::from(gaps) };
        let slo = self.slo;
        let due_ms = slo.ttfo_ms + slo.think_ms * f64::from(*think_tokens);
        let attained = ttfo_ms <= due_ms && tpot_ms <= slo.tpot_ms;
        let qoe = qoe(live, facts.arrival_ms + due_ms, slo.reading_tok_s);
        for group in [&mut self.whole, &mut self.batches[usize::from(facts.batch)]] {
            note(&mut group.ttft, us(since(times.first_token_ms)), 1);
            note(&mut group.ttfo, us(ttfo_ms), 1);
            note(&mut group.e2e, us(e2e_ms), 1);
            if !times.think_end_ms.is_nan() {
                note(&mut group.ttot, us(times.first_output_ms - times.think_end_ms), 1);
            }
            group.requests += 1;
            group.attained += u64::from(attained);
            group.good += u64::from(qoe >= GOOD_QOE);
            group.qoe += qoe;
            group.tokens += u64::from(think_tokens + output_tokens);
        }
        let alone_ms =
            engine.step.alone_ms(*prompt_tokens, think_tokens + output_tokens, engine.max_num_batched_tokens);
        let tenant = &mut self.tenants[facts.tenant as usize];
        tenant.requests += 1;
        tenant.attained += u64::from(attained);
        tenant.service_tokens += u64::from(prompt_tokens + think_tokens + output_tokens);
        tenant.speed += (alone_ms / e2e_ms).min(1.0);
        note(&mut tenant.ttfo, us(ttfo_ms), 1);
        if let Some(Kept { times: all, .. }) = &mut self.kept {
            let generated = think_tokens + output_tokens;
            let itl_ms = (end_ms - times.first_token_ms) / f64::from(generated.max(2) - 1);
            let itl_ms = if generated > 1 { itl_ms } else { f64::NAN };
            all.push(RequestTimes {
                index: facts.index,
                ttft_ms: since(times.first_token_ms),
                ttfo_ms,
                e2e_ms,
                itl_ms,
            });
        }
    }

    /// From here on, keep what [`Recorder::take_kept`] gives.
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
        let mut metrics = self.whole.metrics();
        let seconds = (self.last_ms / 1e3).max(1e-9);
        let [waiting, running, kv_used] = self.timeline.means(self.last_ms);
        let mut set = |key: &str, value: f64| metrics.insert(key.to_owned(), value);
        set("requests", self.whole.requests as f64);
        set("refused", self.refused as f64);
        set("makespan_s", seconds);
        set("throughput_tok_s", self.whole.tokens as f64 / seconds);
        set("goodput_rps", self.whole.attained as f64 / seconds);
        set("preemptions_prefill", self.preemptions[0] as f64);
        set("preemptions_think", self.preemptions[1] as f64);
        set("preemptions_output", self.preemptions[2] as f64);
        set("recomputed_tokens", self.recomputed_tokens as f64);
        set("hit_rate", self.hit_tokens as f64 / self.asked_tokens.max(1) as f64);
        set("waiting_mean", waiting);
        set("waiting_max", f64::from(self.timeline.waiting_most()));
        set("running_mean", running);
        set("kv_used_mean", kv_used);
        if let Some(fairness) = jain(&self.tenants) {
            set("fairness_jain", fairness);
        }
        self.tenants.sort_by_key(|tenant| std::cmp::Reverse(tenant.service_tokens));
        Run {
            metrics,
            batches: self.batches.iter().map(Group::metrics).collect(),
            curves: self.whole.curves().map(|(name, histogram)| (name.to_owned(), curve(histogram))).into(),
            timeline: self.timeline.points(self.last_ms),
            tenants: self.tenants.iter().filter(|tenant| tenant.requests > 0).take(TENANTS).map(row).collect(),
            events: std::mem::take(&mut self.events),
            ..Run::default()
        }
    }
}

/// Quality of experience (Andes, arXiv 2404.16283, equation 1): the area under the curve of tokens that the reader has had
/// over that of a delivery that begins at `due_ms` and never lags behind the reader, at most 1. The time looked at ends one
/// token's reading after the last, so that the last token counts as well.
fn qoe(live: &Live, due_ms: f64, reading_tok_s: f64) -> f64 {
    let tokens = f64::from(live.output_tokens);
    let pace_ms = 1e3 / reading_tok_s;
    let ideal_end_ms = due_ms + (tokens - 1.0) * pace_ms;
    let end_ms = live.reader.last_ms.max(ideal_end_ms) + pace_ms;
    let had = tokens * end_ms - live.reader.sum_ms;
    let ideal = tokens * (end_ms - due_ms) - pace_ms * tokens * (tokens - 1.0) / 2.0;
    if ideal <= 0.0 { 1.0 } else { (had / ideal).clamp(0.0, 1.0) }
}

/// Jain's index over how fast each tenant's requests went: the mean share of their time that they would have taken alone.
/// 1 when all tenants fared alike, 1/n when one of n had everything. None for fewer than two tenants.
fn jain(tenants: &[Tenant]) -> Option<f64> {
    let speeds: Vec<f64> =
        tenants.iter().filter(|tenant| tenant.requests > 0).map(|t| t.speed / t.requests as f64).collect();
    let (sum, squares) = (speeds.iter().sum::<f64>(), speeds.iter().map(|speed| speed * speed).sum::<f64>());
    (speeds.len() > 1 && squares > 0.0).then(|| sum * sum / (speeds.len() as f64 * squares))
}

fn row(tenant: &Tenant) -> TenantRow {
    TenantRow {
        name: tenant.name.to_string(),
        requests: tenant.requests,
        service_tokens: tenant.service_tokens,
        ttfo_p50_ms: tenant.ttfo.value_at_quantile(0.5) as f64 / 1e3,
        ttfo_p99_ms: tenant.ttfo.value_at_quantile(0.99) as f64 / 1e3,
        slo_attainment: tenant.attained as f64 / tenant.requests as f64,
    }
}

/// Evenly spaced shares, closer together at the tail.
fn curve(histogram: &Histogram<u32>) -> Vec<[f64; 2]> {
    if histogram.is_empty() {
        return Vec::new();
    }
    let tail = [0.992, 0.994, 0.996, 0.998, 0.999, 0.9999, 1.0];
    let shares = (0..CURVE_POINTS).map(|i| i as f64 / CURVE_POINTS as f64).chain(tail);
    let mut points: Vec<[f64; 2]> =
        shares.map(|share| [histogram.value_at_quantile(share) as f64 / 1e3, share]).collect();
    points.dedup();
    points
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::content::Contents;
    use crate::sim::live::Facts;
    use crate::trace::TraceRequest;

    /// QoE of an answer whose tokens come at these times, due from 1 s on, for a reader of 10 tokens a second.
    fn qoe_of(times_ms: &[f64]) -> f64 {
        let slo = Slo { reading_tok_s: 10.0, ..Slo::default() };
        let mut recorder = Recorder::new(slo, 1);
        let facts = Facts { output_tokens: times_ms.len() as u32, ..Facts::default() };
        let content = Contents::default().of(&TraceRequest::default());
        let mut live = Live::new(facts, content, 1);
        times_ms.iter().for_each(|ms| recorder.token(&mut live, *ms, false));
        qoe(&live, 1000.0, slo.reading_tok_s)
    }

    #[test]
    fn a_reader_who_never_waits_is_served_ideally() {
        assert_eq!(qoe_of(&[1000.0, 1100.0, 1200.0]), 1.0);
        // Tokens ahead of the reader gain nothing.
        assert_eq!(qoe_of(&[1000.0, 1001.0, 1002.0]), 1.0);
        assert_eq!(qoe_of(&[10.0]), 1.0);
    }

    #[test]
    fn lateness_costs_its_share_of_the_area() {
        // One token, due at 1.0 s, read at 1.1 s: of the 200 ms until its reading ends, 100 ms.
        assert!((qoe_of(&[1100.0]) - 0.5).abs() < 1e-9);
        // Read at 1.0 and 1.3 s instead of 1.0 and 1.1 s, until 1.4 s: 400 and 100 of 400 and 300 ms.
        assert!((qoe_of(&[1000.0, 1300.0]) - 500.0 / 700.0).abs() < 1e-9);
    }

    #[test]
    fn fairness_is_one_when_all_fare_alike_and_the_inverse_of_their_number_when_one_has_it_all() {
        let tenant = |speed: f64| Tenant {
            name: "t".into(),
            requests: 2,
            attained: 0,
            service_tokens: 0,
            speed,
            ttfo: Histogram::new(2).expect("few digits"),
        };
        assert_eq!(jain(&[tenant(1.0), tenant(1.0), tenant(1.0)]), Some(1.0));
        assert!(
            (jain(&[tenant(1.0), tenant(0.0), tenant(0.0), tenant(0.0)]).expect("four tenants") - 0.25).abs() < 1e-9
        );
        assert_eq!(jain(&[tenant(1.0)]), None);
    }
}

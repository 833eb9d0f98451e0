//! A run of the real engine, as it was recorded, and its metrics.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use statrs::statistics::{Data, OrderStatistics};

use crate::limits::{BATCHED_TOKENS, BLOCK_TOKENS, KV_BLOCKS, NUM_SEQS, within};
use crate::metrics::{Finished, Gap, Measured, Metrics, Reader, us};
use crate::read::read_text;
use crate::results::{Run, Slo};
use crate::sim::RequestTimes;
use crate::trace::{MAX_TOKENS, TraceRequest};

/// Largest file of a run that is read, bytes; a request takes about 8 bytes a token of its answer.
const MAX_RUN_BYTES: u64 = 256 << 20;

/// A recorded run.
#[derive(Clone, Debug, Deserialize)]
pub struct RecordedRun {
    /// `stock`, `native:NAME` or the path of a component.
    pub scheduler: String,
    pub(crate) engine: RecordedEngine,
    /// What it ran on; absent in what an earlier version wrote.
    #[serde(default)]
    pub machine: Machine,
    pub(crate) steps: RecordedSteps,
    #[serde(default)]
    pub(crate) counts: Counts,
    pub(crate) rows: Vec<RecordedRow>,
    /// What Meridian says of itself; `None` of stock vLLM.
    #[serde(default)]
    pub(crate) meridian: Option<MeridianStats>,
    /// The tokens of each request, in the order of the trace, where they were asked for.
    #[serde(default)]
    pub outputs: Option<Vec<Vec<u32>>>,
    /// File that it was read from.
    #[serde(skip)]
    pub name: String,
}

/// What a run ran on.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    /// Version of vLLM.
    pub vllm: String,
    /// The processor.
    pub cpu: String,
    /// Its cores.
    pub cores: u32,
    /// Version of Python.
    #[serde(default)]
    pub python: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct RecordedEngine {
    pub(crate) num_gpu_blocks: u32,
    pub(crate) block_size: u32,
    pub(crate) max_num_seqs: u32,
    pub(crate) max_num_batched_tokens: u32,
    pub(crate) settings: Vec<(String, String)>,
    /// False: every request was there from the start.
    pub(crate) realtime: bool,
}

/// One entry a step in each.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct RecordedSteps {
    pub(crate) ms: Vec<f64>,
    pub(crate) requests: Vec<u32>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) context_tokens: Vec<u64>,
    pub(crate) attention_pairs: Vec<u64>,
    /// Requests taken in before the step, and the time that took.
    pub(crate) arrivals: Vec<u32>,
    pub(crate) arrivals_ms: Vec<f64>,
    /// Time in the scheduler's `schedule`.
    #[serde(default)]
    pub(crate) schedule_us: Vec<f64>,
    /// Requests that ran.
    #[serde(default)]
    pub(crate) running: Vec<u32>,
}

/// What the scheduler was seen to do, by the phase of the request that it was done to.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Counts {
    pub(crate) preemptions: BTreeMap<String, u64>,
    /// Preemptions of a request that answered while one that did not held KV blocks.
    pub(crate) output_preempted_while_think_held: u64,
    /// Tokens that a preemption threw away and a resumption did not find in the prefix cache.
    pub(crate) recomputed_tokens: u64,
}

/// A part of `MeridianScheduler.meridian_stats()`, steps of the warm-up included.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct MeridianStats {
    pub(crate) decisions: u64,
    pub(crate) decided_by_policy: u64,
    pub(crate) decided_by_fallback: u64,
    pub(crate) faults: BTreeMap<String, u64>,
    pub(crate) deciding_ms: f64,
    /// Meridian's own time in `schedule`, nanoseconds a step.
    pub(crate) own_ns: Vec<f64>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct RecordedRow {
    pub(crate) arrival_s: f64,
    pub(crate) prompt_tokens: u32,
    /// Of its prompt, found in the prefix cache when it was first admitted.
    #[serde(default)]
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) think_tokens: u32,
    pub(crate) output_tokens: u32,
    pub(crate) delivered_tokens: u32,
    #[serde(default)]
    pub(crate) tenant: String,
    #[serde(default)]
    pub(crate) priority: i32,
    pub(crate) deadline_ms: Option<f64>,
    /// Which turn of a conversation, from 0.
    #[serde(default)]
    pub(crate) turn: Option<u32>,
    /// Its thinking ended where the trace says.
    #[serde(default)]
    pub(crate) think_forced_ok: bool,
    /// `None` of what was never reached, as in those below.
    pub(crate) ttft_ms: Option<f64>,
    #[serde(default)]
    pub(crate) think_end_ms: Option<f64>,
    pub(crate) ttfo_ms: Option<f64>,
    pub(crate) e2e_ms: Option<f64>,
    #[serde(default)]
    pub(crate) itl_think_ms: Vec<f64>,
    pub(crate) itl_output_ms: Vec<f64>,
}

impl RecordedRun {
    /// Read one.
    ///
    /// # Errors
    /// The file, the field, and what is wrong.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let text = read_text(path, MAX_RUN_BYTES)?;
        let mut run: Self = serde_json::from_str(&text)
            .with_context(|| format!("{name}: expected a run that `meridian bench vllm --out DIR` wrote"))?;
        run.name.clone_from(&name);
        let RecordedSteps { ms, requests, tokens, context_tokens, attention_pairs, arrivals, arrivals_ms, .. } =
            &run.steps;
        let lengths = [
            requests.len(),
            tokens.len(),
            context_tokens.len(),
            attention_pairs.len(),
            arrivals.len(),
            arrivals_ms.len(),
        ];
        ensure!(lengths.iter().all(|length| *length == ms.len()), "{name}: steps: lists of different lengths");
        ensure!(ms.iter().all(|ms| ms.is_finite() && *ms >= 0.0), "{name}: steps.ms: expected times of at least 0");
        ensure!(!run.rows.is_empty(), "{name}: rows: no requests");
        let RecordedEngine { num_gpu_blocks, block_size, max_num_seqs, max_num_batched_tokens, .. } = run.engine;
        for (field, value, range) in [
            ("num_gpu_blocks", num_gpu_blocks, &KV_BLOCKS),
            ("block_size", block_size, &BLOCK_TOKENS),
            ("max_num_seqs", max_num_seqs, &NUM_SEQS),
            ("max_num_batched_tokens", max_num_batched_tokens, &BATCHED_TOKENS),
        ] {
            within(&format!("{name}: engine.{field}:"), value, range)?;
        }
        let tokens = |row: &RecordedRow| [row.prompt_tokens, row.think_tokens, row.output_tokens, row.delivered_tokens];
        let most = run.rows.iter().flat_map(tokens).max().unwrap_or(0);
        ensure!(most <= MAX_TOKENS, "{name}: rows: {most} tokens: expected at most {MAX_TOKENS}");
        let times = |row: &RecordedRow| [Some(row.arrival_s), row.ttft_ms, row.think_end_ms, row.ttfo_ms, row.e2e_ms];
        let is_time = |time: &f64| time.is_finite() && *time >= 0.0;
        let are_times = |row: &RecordedRow| times(row).iter().flatten().all(is_time);
        ensure!(run.rows.iter().all(are_times), "{name}: rows: expected times of at least 0");
        let gaps = |row: &RecordedRow| row.itl_think_ms.iter().chain(&row.itl_output_ms).all(is_time);
        ensure!(run.rows.iter().all(gaps), "{name}: rows: expected gaps of at least 0");
        Ok(run)
    }

    /// These steps of stock vLLM, and no requests.
    #[cfg(test)]
    pub(crate) fn made_up(steps: RecordedSteps) -> Self {
        Self {
            scheduler: "stock".into(),
            engine: RecordedEngine {
                num_gpu_blocks: 1000,
                block_size: 16,
                max_num_seqs: 64,
                max_num_batched_tokens: 2048,
                settings: vec![],
                realtime: true,
            },
            machine: Machine::default(),
            steps,
            counts: Counts::default(),
            rows: vec![],
            meridian: None,
            outputs: None,
            name: "made-up".into(),
        }
    }

    /// Its requests.
    #[must_use]
    pub fn requests(&self) -> Vec<TraceRequest> {
        let request = |row: &RecordedRow| TraceRequest {
            arrival_s: if self.engine.realtime { row.arrival_s } else { 0.0 },
            prompt_tokens: row.prompt_tokens.max(1),
            think_tokens: row.think_tokens,
            output_tokens: row.output_tokens.max(1),
            tenant: row.tenant.as_str().into(),
            priority: row.priority,
            deadline_ms: row.deadline_ms.unwrap_or(f64::INFINITY),
            ..TraceRequest::default()
        };
        self.rows.iter().map(request).collect()
    }

    /// Times of the real run, in the measures of the simulator.
    #[must_use]
    pub fn times(&self) -> Vec<RequestTimes> {
        let of = |(index, row): (usize, &RecordedRow)| {
            let gaps = f64::from(row.delivered_tokens.saturating_sub(1));
            let [ttft_ms, ttfo_ms, e2e_ms] = [row.ttft_ms, row.ttfo_ms, row.e2e_ms].map(|ms| ms.unwrap_or(f64::NAN));
            let itl_ms = if gaps > 0.0 { (e2e_ms - ttft_ms) / gaps } else { f64::NAN };
            RequestTimes { index, ttft_ms, ttfo_ms, e2e_ms, itl_ms }
        };
        self.rows.iter().enumerate().map(of).collect()
    }

    /// Requests whose thinking did not end where the trace says.
    #[must_use]
    pub fn ended_elsewhere(&self) -> usize {
        self.rows.iter().filter(|row| !row.think_forced_ok).count()
    }

    /// Faults of Meridian's policies, by kind.
    #[must_use]
    pub fn faults(&self) -> u64 {
        self.meridian.as_ref().map_or(0, |stats| stats.faults.values().sum())
    }

    /// KV blocks of the engine.
    #[must_use]
    pub fn kv_blocks(&self) -> u32 {
        self.engine.num_gpu_blocks
    }

    /// The run by its metrics, as a simulated one.
    #[must_use]
    pub fn run(&self, slo: Slo) -> Run {
        let mut metrics = Metrics::new(slo, Measured::All(self.rows.len()));
        let mut order: Vec<usize> = (0..self.rows.len()).collect();
        let arrival_s = |row: &RecordedRow| if self.engine.realtime { row.arrival_s } else { 0.0 };
        order.sort_by(|a, b| arrival_s(&self.rows[*a]).total_cmp(&arrival_s(&self.rows[*b])));
        for (place, index) in order.into_iter().enumerate() {
            let row = &self.rows[index];
            let arrival_ms = 1e3 * arrival_s(row);
            let batch = metrics.batch_of(place, arrival_ms);
            take_in(&mut metrics, row, arrival_ms, batch);
        }
        let last_ms = metrics.last_ms();
        let mut run = metrics.run();
        let Counts { preemptions, output_preempted_while_think_held, recomputed_tokens } = &self.counts;
        let mut set = |key: &str, value: f64| run.metrics.insert(key.to_owned(), value);
        for phase in ["prefill", "think", "output"] {
            set(&format!("preemptions_{phase}"), preemptions.get(phase).copied().unwrap_or(0) as f64);
        }
        set("preempted_avoidably", *output_preempted_while_think_held as f64);
        set("recomputed_tokens", *recomputed_tokens as f64);
        set("steps", self.steps.ms.len() as f64);
        set("hit_rate", hit_rate(self.rows.iter()));
        if self.rows.iter().any(|row| row.turn.is_some()) {
            set("hit_rate_first", hit_rate(self.rows.iter().filter(|row| row.turn == Some(0))));
            set("hit_rate_later", hit_rate(self.rows.iter().filter(|row| row.turn > Some(0))));
        }
        let RecordedSteps { ms, schedule_us, running, .. } = &self.steps;
        if running.len() == ms.len() {
            let requests_ms: f64 = ms.iter().zip(running).map(|(ms, running)| ms * f64::from(*running)).sum();
            set("running_mean", requests_ms / last_ms.max(1e-9));
        }
        if !schedule_us.is_empty() {
            set("schedule_p50_us", quantile(schedule_us, 0.5));
            set("schedule_p99_us", quantile(schedule_us, 0.99));
        }
        if let Some(MeridianStats { decisions, decided_by_policy, decided_by_fallback, faults, deciding_ms, own_ns }) =
            &self.meridian
        {
            set("decisions", *decisions as f64);
            set("decided_by_policy", *decided_by_policy as f64);
            set("decided_by_fallback", *decided_by_fallback as f64);
            set("faults", faults.values().sum::<u64>() as f64);
            set("deciding_us", 1e3 * deciding_ms / (*decisions).max(1) as f64);
            if !own_ns.is_empty() {
                set("own_p50_us", quantile(own_ns, 0.5) / 1e3);
            }
        }
        run
    }
}

/// A request that never answered has no times; it is among those that ended elsewhere.
fn take_in(metrics: &mut Metrics, row: &RecordedRow, arrival_ms: f64, batch: u16) {
    let (Some(ttft_ms), Some(ttfo_ms), Some(e2e_ms)) = (row.ttft_ms, row.ttfo_ms, row.e2e_ms) else { return };
    // The first token has no gap before it.
    let think_tokens = row.itl_think_ms.len() as u32 + 1;
    let output_tokens = row.itl_output_ms.len() as u32;
    for (kind, gaps) in [(Gap::Think, &row.itl_think_ms), (Gap::Output, &row.itl_output_ms)] {
        for gap_ms in gaps {
            metrics.gaps_of_batch(kind, batch, us(*gap_ms), 1);
            metrics.gaps_of_all(kind, us(*gap_ms), 1);
        }
    }
    let mut reader = Reader::default();
    let mut now_ms = arrival_ms + ttfo_ms;
    for number in 0..output_tokens as usize {
        now_ms += if number == 0 { 0.0 } else { row.itl_output_ms[number] };
        reader.token(now_ms, number == 0, &metrics.slo);
    }
    let tenant = metrics.tenant(&Arc::from(row.tenant.as_str()));
    metrics.finished(&Finished {
        batch,
        tenant,
        arrival_ms,
        first_token_ms: arrival_ms + ttft_ms,
        think_end_ms: row.think_end_ms.map_or(f64::NAN, |ms| arrival_ms + ms),
        first_output_ms: arrival_ms + ttfo_ms,
        last_token_ms: arrival_ms + e2e_ms,
        prompt_tokens: row.prompt_tokens,
        think_tokens,
        output_tokens,
        reader,
        alone_ms: f64::NAN,
        alone_ttfo_ms: f64::NAN,
    });
}

fn hit_rate<'a>(rows: impl Iterator<Item = &'a RecordedRow>) -> f64 {
    let (found, asked) = rows.fold((0.0, 0.0), |(found, asked), row| {
        (found + f64::from(row.cached_tokens.unwrap_or(0)), asked + f64::from(row.prompt_tokens))
    });
    if asked > 0.0 { found / asked } else { 0.0 }
}

/// Of at least one value.
fn quantile(values: &[f64], share: f64) -> f64 {
    Data::new(values.to_vec()).quantile(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(arrival_s: f64, ttft_ms: f64, think: &[f64], output: &[f64]) -> RecordedRow {
        let think_end_ms = ttft_ms + think.iter().sum::<f64>();
        let ttfo_ms = think_end_ms + output[0];
        RecordedRow {
            arrival_s,
            prompt_tokens: 100,
            cached_tokens: Some(25),
            think_tokens: think.len() as u32,
            output_tokens: output.len() as u32,
            delivered_tokens: (1 + think.len() + output.len()) as u32,
            think_forced_ok: true,
            ttft_ms: Some(ttft_ms),
            think_end_ms: Some(think_end_ms),
            ttfo_ms: Some(ttfo_ms),
            e2e_ms: Some(think_end_ms + output.iter().sum::<f64>()),
            itl_think_ms: think.to_vec(),
            itl_output_ms: output.to_vec(),
            ..RecordedRow::default()
        }
    }

    fn recorded(rows: Vec<RecordedRow>) -> RecordedRun {
        let steps = RecordedSteps {
            ms: vec![10.0, 30.0],
            running: vec![1, 2],
            schedule_us: vec![100.0, 200.0],
            ..RecordedSteps::default()
        };
        let counts = Counts { preemptions: [("think".to_owned(), 3)].into(), ..Counts::default() };
        RecordedRun { rows, counts, ..RecordedRun::made_up(steps) }
    }

    #[test]
    fn a_run_has_the_metrics_of_its_rows() {
        let run = recorded(vec![row(0.0, 50.0, &[10.0, 10.0], &[20.0, 30.0]), row(1.0, 70.0, &[10.0], &[40.0, 30.0])]);
        let metrics = run.run(Slo::default()).metrics;
        let near = |key: &str, expected: f64| {
            let found = metrics[key];
            assert!((found - expected).abs() <= 1e-3 * expected.abs(), "{key}: {found}, expected {expected}");
        };
        near("ttft_p50_ms", 50.0);
        near("ttft_mean_ms", 60.0);
        near("ttfo_mean_ms", (50.0 + 20.0 + 20.0 + 70.0 + 10.0 + 40.0) / 2.0);
        near("ttot_p99_ms", 40.0);
        near("itl_think_p99_ms", 10.0);
        near("itl_output_mean_ms", 30.0);
        near("e2e_p99_ms", 150.0);
        near("throughput_tok_s", 9.0 / 1.15);
        near("goodput_rps", 2.0 / 1.15);
        near("hit_rate", 0.25);
        near("preemptions_think", 3.0);
        near("running_mean", (10.0 + 60.0) / 1150.0);
        near("schedule_p50_us", 150.0);
        assert!(!metrics.contains_key("fairness_jain"), "nobody knows how long a request would have taken alone");
        assert!(!metrics.contains_key("decisions"), "stock vLLM decides nothing of Meridian's");
    }

    #[test]
    fn a_request_that_never_answered_is_counted_and_has_no_times() {
        let mute = RecordedRow { ttfo_ms: None, think_forced_ok: false, ..row(0.0, 50.0, &[10.0], &[20.0]) };
        let run = recorded(vec![mute, row(0.0, 50.0, &[10.0], &[20.0, 30.0])]);
        assert_eq!(run.ended_elsewhere(), 1);
        assert_eq!(run.run(Slo::default()).metrics["requests"], 1.0);
        assert!(run.times()[0].ttfo_ms.is_nan());
    }

    #[test]
    fn requests_of_a_group_came_after_each_other() {
        let late = row(9.0, 500.0, &[10.0], &[20.0, 30.0]);
        let run = recorded(vec![late, row(0.0, 50.0, &[10.0], &[20.0, 30.0])]).run(Slo::default());
        assert!(run.batches[0]["ttft_p50_ms"] < 51.0);
        assert!(run.batches[16]["ttft_p50_ms"] > 499.0);
    }
}

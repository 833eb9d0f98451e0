//! A run of the real engine, as it was recorded.

use std::path::Path;

use anyhow::{Context, ensure};
use meridian_core::MeridianConfig;
use serde::Deserialize;

use crate::limits::{BATCHED_TOKENS, BLOCK_TOKENS, KV_BLOCKS, NUM_SEQS, within};
use crate::policies::{Choice, Loader, Policies, PolicySource};
use crate::read::read_text;
use crate::results::Slo;
use crate::sim::{EngineConfig, Outcome, RequestTimes, Simulation, StepModel, StepWork};
use crate::trace::{MAX_TOKENS, TraceRequest};

/// Largest file of a run that is read, bytes; a request takes about 8 bytes a token of its answer.
const MAX_RUN_BYTES: u64 = 256 << 20;

/// A recorded run.
#[derive(Clone, Debug, Deserialize)]
pub struct RecordedRun {
    /// `stock`, `native:NAME` or the path of a component.
    pub scheduler: String,
    pub(super) engine: RecordedEngine,
    pub(super) steps: RecordedSteps,
    pub(super) rows: Vec<RecordedRow>,
    /// File that it was read from.
    #[serde(skip)]
    pub name: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct RecordedEngine {
    pub(super) num_gpu_blocks: u32,
    pub(super) block_size: u32,
    pub(super) max_num_seqs: u32,
    pub(super) max_num_batched_tokens: u32,
    pub(super) settings: Vec<(String, String)>,
    /// False: every request was there from the start.
    pub(super) realtime: bool,
}

/// One entry a step in each.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct RecordedSteps {
    pub(super) ms: Vec<f64>,
    pub(super) requests: Vec<u32>,
    pub(super) tokens: Vec<u32>,
    pub(super) context_tokens: Vec<u64>,
    pub(super) attention_pairs: Vec<u64>,
    /// Requests taken in before the step, and the time that took.
    pub(super) arrivals: Vec<u32>,
    pub(super) arrivals_ms: Vec<f64>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct RecordedRow {
    pub(super) arrival_s: f64,
    pub(super) prompt_tokens: u32,
    pub(super) think_tokens: u32,
    pub(super) output_tokens: u32,
    pub(super) delivered_tokens: u32,
    #[serde(default)]
    pub(super) tenant: String,
    #[serde(default)]
    pub(super) priority: i32,
    pub(super) deadline_ms: Option<f64>,
    pub(super) ttft_ms: f64,
    pub(super) ttfo_ms: f64,
    e2e_ms: f64,
    pub(super) itl_output_ms: Vec<f64>,
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
            .with_context(|| format!("{name}: expected a run that `python -m meridian.bench.engine_run` wrote"))?;
        run.name.clone_from(&name);
        let RecordedSteps { ms, requests, tokens, context_tokens, attention_pairs, arrivals, arrivals_ms } = &run.steps;
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
        let tokens = |row: &RecordedRow| [row.prompt_tokens, row.think_tokens, row.output_tokens];
        let most = run.rows.iter().flat_map(tokens).max().unwrap_or(0);
        ensure!(most <= MAX_TOKENS, "{name}: rows: {most} tokens: expected at most {MAX_TOKENS}");
        let times = |row: &RecordedRow| [row.arrival_s, row.ttft_ms, row.ttfo_ms, row.e2e_ms];
        let is_time = |row: &RecordedRow| times(row).iter().all(|time| time.is_finite() && *time >= 0.0);
        ensure!(run.rows.iter().all(is_time), "{name}: rows: expected times of at least 0");
        Ok(run)
    }

    /// The engine it ran in, with step times of `step`.
    #[must_use]
    pub fn engine(&self, step: StepModel) -> EngineConfig {
        EngineConfig {
            step,
            max_num_seqs: self.engine.max_num_seqs,
            max_num_batched_tokens: self.engine.max_num_batched_tokens,
            kv_blocks: self.engine.num_gpu_blocks,
            block_tokens: self.engine.block_size,
            prefix_caching: true,
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

    /// The same measures of the real run that the simulator gives.
    #[must_use]
    pub fn times(&self) -> Vec<RequestTimes> {
        let times = |(index, row): (usize, &RecordedRow)| {
            let gaps = f64::from(row.delivered_tokens.saturating_sub(1));
            let itl_ms = if gaps > 0.0 { (row.e2e_ms - row.ttft_ms) / gaps } else { f64::NAN };
            RequestTimes { index, ttft_ms: row.ttft_ms, ttfo_ms: row.ttfo_ms, e2e_ms: row.e2e_ms, itl_ms }
        };
        self.rows.iter().enumerate().map(times).collect()
    }

    fn config(&self) -> anyhow::Result<MeridianConfig> {
        let mut text = String::from("[model]\nstrips_reasoning = true\n");
        for (field, value) in &self.engine.settings {
            let (table, key) = field.rsplit_once('.').with_context(|| format!("settings: {field}: not a field"))?;
            if table == "model" {
                continue;
            }
            let is_toml = value.parse::<f64>().is_ok()
                || value == "true"
                || value == "false"
                || value.starts_with(['"', '[', '{']);
            let value = if is_toml { value.clone() } else { serde_json::to_string(value)? };
            text += &format!("[{table}]\n{key} = {value}\n");
        }
        // Two settings of one table would open it twice.
        let mut tables: std::collections::BTreeMap<&str, Vec<&str>> = Default::default();
        let mut table = "";
        for line in text.lines() {
            match line.strip_prefix('[') {
                Some(_) => table = line,
                None => tables.entry(table).or_default().push(line),
            }
        }
        let text: Vec<String> =
            tables.iter().map(|(table, lines)| format!("{table}\n{}\n", lines.join("\n"))).collect();
        Ok(MeridianConfig::from_toml(&text.concat())?)
    }

    /// Simulate its requests under its own policy.
    ///
    /// # Errors
    /// The policy cannot be loaded.
    pub fn simulate(&self, step: StepModel) -> anyhow::Result<Outcome> {
        let source = if self.scheduler == "stock" { "native:fcfs" } else { &self.scheduler };
        let dispatch: PolicySource = source.parse().map_err(anyhow::Error::msg)?;
        let mut loader = Loader::new(self.config()?);
        let choice = Choice { dispatch, eviction: None, budget: None, inject: None };
        let policies = Policies::load(&mut loader, &choice, 0)?;
        let requests = self.requests();
        let simulation = Simulation::new(&self.engine(step), vec![policies], Slo::default(), requests.len());
        Ok(simulation.keeping_times().run(requests.into_iter(), |_| {}))
    }

    /// Steps of which the simulator's are the same: as many requests, tokens, tokens of context and pairs. Means something
    /// where time decides nothing: every request was there from the start, and the scheduler is vLLM's own.
    pub(super) fn same_steps(&self, works: &[StepWork]) -> u64 {
        let RecordedSteps { requests, tokens, context_tokens, attention_pairs, .. } = &self.steps;
        let real = (0..tokens.len()).map(|i| StepWork {
            requests: requests[i],
            tokens: tokens[i],
            context_tokens: context_tokens[i],
            attention_pairs: attention_pairs[i],
        });
        real.zip(works).filter(|(real, simulated)| real == *simulated).count() as u64
    }
}

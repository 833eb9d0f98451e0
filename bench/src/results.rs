//! What runs leave behind, of simulated engines and of the real one: the JSON that `meridian bench replay --json` prints, `--save` keeps,
//! `meridian bench compare` reads and the report shows.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Version of the format.
pub const SCHEMA: u32 = 1;

/// All runs of one `replay`: every policy at every rate with every seed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Version of Meridian, the command, and the machine it ran on.
    pub made_by: MadeBy,
    /// The requests.
    pub trace: TraceFacts,
    /// The simulated engines.
    pub engine: EngineFacts,
    /// Policy that the others are compared with.
    pub baseline: String,
    /// In the order: rates, then seeds, then policies, the baseline first.
    pub runs: Vec<Run>,
    /// Policies that have no runs because they went on faulting.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given_up: Vec<GivenUp>,
    /// With service levels: the share of the requests that any scheduler could have in time, at most, if it ends no thinking
    /// early; at the first rate with the first seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_in_time: Option<f64>,
    /// What a reader must know before believing them, a line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A policy that went on faulting.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GivenUp {
    /// The policy, as in [`Run::policy`].
    pub policy: String,
    /// Offered load of the run in which it was given up.
    pub rate: f64,
    /// Seed of that run.
    pub seed: u64,
    /// Its faults, one line.
    pub why: String,
}

/// Where results come from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MadeBy {
    /// Version of Meridian.
    pub version: String,
    /// The command line, without folders.
    pub command: String,
    /// Processor and cores.
    pub machine: String,
}

/// What was replayed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TraceFacts {
    /// File name or name of the generated workload.
    pub source: String,
    /// Requests.
    pub requests: u64,
    /// Seconds from the first arrival to the last, at the trace's own rate.
    pub duration_s: f64,
    /// Requests a second, the trace's own.
    pub rate: f64,
    /// Means: prompt, thinking, answer, in tokens.
    pub mean_tokens: [f64; 3],
}

/// What was simulated.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineFacts {
    /// Name of the preset or of the calibration.
    pub preset: String,
    /// Engines behind the router.
    pub engines: u32,
    /// How requests are routed to them.
    pub router: String,
    /// Parameters of the step-time model, by name.
    pub step_model: BTreeMap<String, f64>,
    /// Most running requests of an engine.
    pub max_num_seqs: u32,
    /// Most tokens of a step.
    pub max_num_batched_tokens: u32,
    /// KV blocks of an engine.
    pub kv_blocks: u32,
    /// Tokens of a KV block.
    pub block_tokens: u32,
    /// Service levels that goodput and attainment are counted by.
    pub slo: Slo,
}

/// Service levels of a request. It is attained when all of them are.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Slo {
    /// Arrival to first token of the answer, at most, milliseconds, plus [`Slo::prompt_ms`] for each token of the prompt and
    /// [`Slo::think_ms`] for each token of thinking: no scheduler can answer before the model has read and thought.
    pub ttfo_ms: f64,
    /// Allowance of [`Slo::ttfo_ms`] for each token of the prompt, milliseconds.
    pub prompt_ms: f64,
    /// Instead of these three: so many times what the request takes to its first answer token in an engine of its own
    /// (slowdown); 0 for none.
    pub alone: f64,
    /// Allowance of [`Slo::ttfo_ms`] for each token of thinking, milliseconds.
    pub think_ms: f64,
    /// Mean gap between two tokens of the answer, at most, milliseconds.
    pub tpot_ms: f64,
    /// Reading speed of QoE, tokens a second.
    pub reading_tok_s: f64,
}

impl Slo {
    /// Arrival to first token of the answer, at most, milliseconds, of a request with so many tokens.
    #[must_use]
    pub fn due_ms(&self, prompt_tokens: u32, think_tokens: u32) -> f64 {
        self.ttfo_ms + self.prompt_ms * f64::from(prompt_tokens) + self.think_ms * f64::from(think_tokens)
    }
}

impl Default for Slo {
    fn default() -> Self {
        Self { ttfo_ms: 5000.0, prompt_ms: 0.5, alone: 0.0, think_ms: 50.0, tpot_ms: 50.0, reading_tok_s: 10.0 }
    }
}

/// One policy at one rate with one seed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The policy as it was named on the command line, shortened to its file name.
    pub policy: String,
    /// Who decided in each slot, by its name; empty in results of a version that did not say.
    #[serde(default)]
    pub slots: BTreeMap<String, String>,
    /// Offered load, requests a second.
    pub rate: f64,
    /// Seed.
    pub seed: u64,
    /// By the keys of [`METRICS`]; one that has no value is absent.
    pub metrics: BTreeMap<String, f64>,
    /// Metrics of consecutive groups of requests, by order of arrival. Two runs over the same trace have the same groups,
    /// so that they can be compared in pairs.
    pub batches: Vec<BTreeMap<String, f64>>,
    /// Distributions by name (`ttft`, `ttfo`, `ttot`, `e2e`, `itl_think`, `itl_output`): points of (milliseconds, share of
    /// values at most that), share rising from 0 to 1.
    pub curves: BTreeMap<String, Vec<[f64; 2]>>,
    /// State of all engines together over time, at most 1,024 points.
    pub timeline: Vec<TimelinePoint>,
    /// By tenant, the largest first, at most 64.
    pub tenants: Vec<TenantRow>,
    /// What happened while it ran: swaps, quarantines.
    pub events: Vec<Event>,
    /// Of a day with a burst: what requests had, by when they arrived.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub levels: Vec<LevelPoint>,
}

/// What the requests had that arrived in a stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LevelPoint {
    /// Where the stretch begins, seconds since the first arrival.
    pub t_s: f64,
    /// Requests that arrived, and those of them that attained the service levels.
    pub arrived: u64,
    /// See `arrived`.
    pub attained: u64,
    /// Median TTFO, milliseconds.
    pub ttfo_p50_ms: f64,
    /// Median of the mean gap between two answer tokens of a request, milliseconds.
    pub tpot_p50_ms: f64,
}

/// State at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimelinePoint {
    /// Seconds since the first arrival.
    pub t_s: f64,
    /// Requests that wait.
    pub waiting: f64,
    /// Running requests in prefill.
    pub prefill: f64,
    /// Running requests that think.
    pub think: f64,
    /// Running requests that answer.
    pub output: f64,
    /// Share of KV blocks that requests hold, 0 to 1.
    pub kv_used: f64,
    /// Share of KV blocks that are free and still in the prefix cache, 0 to 1.
    pub kv_cached: f64,
}

/// One tenant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TenantRow {
    /// Name.
    pub name: String,
    /// Finished requests.
    pub requests: u64,
    /// Tokens computed for it, prompts included.
    pub service_tokens: u64,
    /// Time to first output token.
    pub ttfo_p50_ms: f64,
    /// Time to first output token, 99th percentile.
    pub ttfo_p99_ms: f64,
    /// Share of requests that attained the service levels.
    pub slo_attainment: f64,
}

/// Something that happened at a time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Seconds since the first arrival.
    pub t_s: f64,
    /// In words.
    pub what: String,
}

/// Which direction of a metric is the better one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Lower is better.
    Lower,
    /// Higher is better.
    Higher,
    /// It describes the run.
    Neither,
}

/// A metric of a run.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Key in [`Run::metrics`].
    pub key: &'static str,
    /// For tables.
    pub title: &'static str,
    /// Unit; empty for a count or a share.
    pub unit: &'static str,
    /// Which direction is better.
    pub better: Better,
}

const fn metric(key: &'static str, title: &'static str, unit: &'static str, better: Better) -> Metric {
    Metric { key, title, unit, better }
}

/// The metrics that a table begins with; sessions and days with a burst have their own.
pub const HEADLINES: [&str; 13] = [
    "itl_output_p99_ms",
    "ttfo_p50_ms",
    "ttfo_p99_ms",
    "ttft_p50_ms",
    "e2e_mean_ms",
    "throughput_tok_s",
    "goodput_rps",
    "slo_attainment",
    "burst_attainment",
    "recovery_s",
    "recomputed_tokens",
    "hit_rate",
    "session_mean_s",
];

/// Every metric, in the order of tables. Words as in `ARCHITECTURE.md`.
pub const METRICS: &[Metric] = &[
    metric("itl_output_p50_ms", "output ITL p50", "ms", Better::Lower),
    metric("itl_output_p95_ms", "output ITL p95", "ms", Better::Lower),
    metric("itl_output_p99_ms", "output ITL p99", "ms", Better::Lower),
    metric("itl_output_mean_ms", "output ITL mean", "ms", Better::Lower),
    metric("itl_think_p50_ms", "think ITL p50", "ms", Better::Lower),
    metric("itl_think_p99_ms", "think ITL p99", "ms", Better::Lower),
    metric("ttot_p50_ms", "TTOT p50", "ms", Better::Lower),
    metric("ttot_p99_ms", "TTOT p99", "ms", Better::Lower),
    metric("ttfo_p50_ms", "TTFO p50", "ms", Better::Lower),
    metric("ttfo_p95_ms", "TTFO p95", "ms", Better::Lower),
    metric("ttfo_p99_ms", "TTFO p99", "ms", Better::Lower),
    metric("ttfo_mean_ms", "TTFO mean", "ms", Better::Lower),
    metric("ttfo_beyond_p95_ms", "TTFO beyond allowances p95", "ms", Better::Lower),
    metric("tpot_p95_ms", "mean gap of an answer p95", "ms", Better::Lower),
    metric("ttft_p50_ms", "TTFT p50", "ms", Better::Lower),
    metric("ttft_p99_ms", "TTFT p99", "ms", Better::Lower),
    metric("ttft_mean_ms", "TTFT mean", "ms", Better::Lower),
    metric("e2e_p50_ms", "end to end p50", "ms", Better::Lower),
    metric("e2e_p99_ms", "end to end p99", "ms", Better::Lower),
    metric("e2e_mean_ms", "end to end mean", "ms", Better::Lower),
    metric("throughput_tok_s", "throughput", "tok/s", Better::Higher),
    metric("goodput_rps", "goodput", "req/s", Better::Higher),
    metric("slo_attainment", "SLO attainment", "", Better::Higher),
    metric("burst_attainment", "  of the burst", "", Better::Higher),
    metric("burst_ttfo_p50_ms", "  of the burst: TTFO p50", "ms", Better::Lower),
    metric("burst_ttfo_p99_ms", "  of the burst: TTFO p99", "ms", Better::Lower),
    metric("recovery_s", "  time until it holds again", "s", Better::Lower),
    metric("qoe_mean", "QoE mean", "", Better::Higher),
    metric("qoe_attainment", "QoE >= 0.95", "", Better::Higher),
    metric("fairness_jain", "fairness (Jain, tenants' speed)", "", Better::Higher),
    metric("preemptions_prefill", "preempted in prefill", "", Better::Lower),
    metric("preemptions_think", "preempted in think", "", Better::Lower),
    metric("preemptions_output", "preempted in output", "", Better::Lower),
    metric("preempted_avoidably", "  while thinking held KV", "", Better::Lower),
    metric("recomputed_tokens", "recomputed tokens", "tok", Better::Lower),
    metric("hit_rate", "prefix hit rate", "", Better::Higher),
    metric("hit_rate_first", "  of first turns", "", Better::Higher),
    metric("hit_rate_later", "  of later turns", "", Better::Higher),
    metric("hit_rate_unlimited", "  of an unlimited cache", "", Better::Neither),
    metric("needed_blocks", "evicted and needed blocks", "blocks", Better::Lower),
    metric("computed_again_tokens", "computed again: evicted, preempted", "tok", Better::Lower),
    metric("sessions", "sessions", "", Better::Neither),
    metric("session_p50_s", "session completion p50", "s", Better::Lower),
    metric("session_p95_s", "session completion p95", "s", Better::Lower),
    metric("session_mean_s", "session completion mean", "s", Better::Lower),
    metric("session_work_p50_s", "  without users' gaps p50", "s", Better::Lower),
    metric("session_work_p95_s", "  without users' gaps p95", "s", Better::Lower),
    metric("session_work_mean_s", "  without users' gaps mean", "s", Better::Lower),
    metric("session_served_p50_s", "  without any gaps p50", "s", Better::Lower),
    metric("session_served_p95_s", "  without any gaps p95", "s", Better::Lower),
    metric("session_served_mean_s", "  without any gaps mean", "s", Better::Lower),
    metric("ttft_turn_1_p50_ms", "TTFT of first turns p50", "ms", Better::Lower),
    metric("ttft_turn_1_p99_ms", "  p99", "ms", Better::Lower),
    metric("ttft_turn_2_10_p50_ms", "TTFT of turns 2 to 10 p50", "ms", Better::Lower),
    metric("ttft_turn_2_10_p99_ms", "  p99", "ms", Better::Lower),
    metric("ttft_turn_11_50_p50_ms", "TTFT of turns 11 to 50 p50", "ms", Better::Lower),
    metric("ttft_turn_11_50_p99_ms", "  p99", "ms", Better::Lower),
    metric("ttft_turn_51_on_p50_ms", "TTFT of turns from 51 on p50", "ms", Better::Lower),
    metric("ttft_turn_51_on_p99_ms", "  p99", "ms", Better::Lower),
    metric("outputs_differ", "outputs that differ", "", Better::Lower),
    metric("kv_used_mean", "KV used, mean", "", Better::Neither),
    metric("busy", "engine busy", "", Better::Neither),
    metric("running_mean", "running, mean", "", Better::Neither),
    metric("waiting_mean", "waiting, mean", "", Better::Lower),
    metric("waiting_max", "waiting, most", "", Better::Lower),
    metric("requests", "requests", "", Better::Neither),
    metric("refused", "refused: longer than KV memory", "", Better::Lower),
    metric("turned_away", "turned away: 503", "", Better::Lower),
    metric("forced_ends", "thinking ended early", "", Better::Neither),
    metric("handed_over", "handed over", "", Better::Neither),
    metric("transfer_mean_ms", "  transfer, mean", "ms", Better::Neither),
    metric("probes", "probes", "", Better::Neither),
    metric("steps", "steps", "", Better::Neither),
    metric("makespan_s", "makespan", "s", Better::Lower),
    metric("schedule_p50_us", "schedule() p50", "us", Better::Lower),
    metric("schedule_p99_us", "schedule() p99", "us", Better::Lower),
    metric("own_p50_us", "Meridian in schedule() p50", "us", Better::Neither),
    metric("deciding_us", "deciding, mean a step", "us", Better::Neither),
    metric("decisions", "dispatch decisions", "", Better::Neither),
    metric("decided_by_policy", "  by the policy", "", Better::Neither),
    metric("decided_by_fallback", "  by fallback", "", Better::Lower),
    metric("eviction_decisions", "eviction decisions", "", Better::Neither),
    metric("eviction_by_policy", "  by the policy", "", Better::Neither),
    metric("budget_decisions", "budget decisions", "", Better::Neither),
    metric("budget_by_policy", "  by the policy", "", Better::Neither),
    metric("faults", "policy faults", "", Better::Lower),
];

//! Metrics in the text format of Prometheus, read from the status at each scrape.

use std::collections::HashMap;
use std::sync::Arc;

use meridian_core::PhaseEvent;
use meridian_core::budget::ForceReason;
use meridian_core::latency::{self, STEP_BUCKETS_S, StepKind, TOKEN_BUCKETS, TenantLatency, WAIT_BUCKETS_S};
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};

use meridian_engine::control::{Control, DECIDING_BUCKETS_US, ProcessStatus, SlotName, SlotStatus};

const PHASES: [&str; 3] = ["prefill", "think", "output"];
const SOURCES: [&str; 3] = ["policy", "default", "fallback"];
const TIERS: [&str; 3] = ["think_complete", "think_active", "output_critical"];
const KEEP_OUTCOMES: [&str; 3] = ["hit", "evicted", "expired"];
const STEP_PARTS: [&str; 3] = ["fixed", "decode_token", "prefill_token"];

/// Receives the values of the labels, then the sample.
type Emit<'a> = dyn FnMut(&[&str], Metric) + 'a;

/// A metric: its name after `meridian_`, and the way to read it.
struct Family {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    labels: &'static [&'static str],
    read: fn(&ProcessStatus, &mut Emit<'_>),
}

/// Every metric, as docs/src/metrics.md lists them.
const FAMILIES: &[Family] = &[
    Family {
        name: "process_info",
        help: "1; version of Meridian and the served model",
        kind: MetricType::GAUGE,
        labels: &["version", "model"],
        read: |status, emit| emit(&[&status.version, &status.model], gauge(1.0)),
    },
    Family {
        name: "uptime_seconds",
        help: "Time since the engine was made",
        kind: MetricType::GAUGE,
        labels: &[],
        read: |status, emit| emit(&[], gauge(status.uptime_s)),
    },
    Family {
        name: "requests",
        help: "Live requests by phase",
        kind: MetricType::GAUGE,
        labels: &["phase"],
        read: |status, emit| {
            for (phase, count) in PHASES.iter().zip(status.requests) {
                emit(&[phase], gauge(float(count)));
            }
        },
    },
    Family {
        name: "phase_events_total",
        help: "Times that thinking began, ended, or reached the limit known at arrival",
        kind: MetricType::COUNTER,
        labels: &["event"],
        read: |status, emit| {
            for (event, count) in PhaseEvent::ALL.iter().zip(status.phase_events) {
                emit(&[&event.label().replace('-', "_")], counter(count));
            }
        },
    },
    Family {
        name: "waiting_requests",
        help: "Requests that wait for admission",
        kind: MetricType::GAUGE,
        labels: &[],
        read: |status, emit| emit(&[], gauge(float(status.waiting))),
    },
    Family {
        name: "preemptions_total",
        help: "Preemptions by the phase of the request",
        kind: MetricType::COUNTER,
        labels: &["phase"],
        read: |status, emit| {
            for (phase, count) in PHASES.iter().zip(status.preemptions) {
                emit(&[phase], counter(count));
            }
        },
    },
    Family {
        name: "step_time_seconds",
        help: "Learned step time: fixed, for a decode token, for a prefill token",
        kind: MetricType::GAUGE,
        labels: &["part"],
        read: |status, emit| {
            for (part, ms) in STEP_PARTS.iter().zip(status.step_time_ms.into_iter().flatten()) {
                emit(&[part], gauge(ms / 1e3));
            }
        },
    },
    Family {
        name: "step_duration_seconds",
        help: "Measured step time by what the step carries: decodes, prompts, both (mixed)",
        kind: MetricType::HISTOGRAM,
        labels: &["model", "kind"],
        read: |status, emit| {
            for ((_, kind), histogram) in StepKind::ALL.iter().zip(&status.steps) {
                emit(&[&status.model, kind], buckets(histogram, &STEP_BUCKETS_S));
            }
        },
    },
    Family {
        name: "queue_time_seconds",
        help: "Arrival to first admission",
        kind: MetricType::HISTOGRAM,
        labels: &["model", "tenant"],
        read: |status, emit| waits(status, emit, |of| &of.queue),
    },
    Family {
        name: "ttft_seconds",
        help: "Arrival to first token of any kind",
        kind: MetricType::HISTOGRAM,
        labels: &["model", "tenant"],
        read: |status, emit| waits(status, emit, |of| &of.ttft),
    },
    Family {
        name: "ttfo_seconds",
        help: "Arrival to first output token",
        kind: MetricType::HISTOGRAM,
        labels: &["model", "tenant"],
        read: |status, emit| waits(status, emit, |of| &of.ttfo),
    },
    Family {
        name: "ttot_seconds",
        help: "End of thinking to first output token",
        kind: MetricType::HISTOGRAM,
        labels: &["model", "tenant"],
        read: |status, emit| waits(status, emit, |of| &of.ttot),
    },
    Family {
        name: "request_duration_seconds",
        help: "Arrival to end",
        kind: MetricType::HISTOGRAM,
        labels: &["model", "tenant"],
        read: |status, emit| waits(status, emit, |of| &of.e2e),
    },
    Family {
        name: "itl_seconds",
        help: "Gaps between two tokens of one phase",
        kind: MetricType::HISTOGRAM,
        labels: &["model", "tenant", "phase"],
        read: |status, emit| {
            for of in &status.latency {
                emit(&[&status.model, &of.tenant, "think"], buckets(&of.think_itl, &STEP_BUCKETS_S));
                emit(&[&status.model, &of.tenant, "output"], buckets(&of.output_itl, &STEP_BUCKETS_S));
            }
        },
    },
    Family {
        name: "think_tokens",
        help: "Think tokens of ended requests that have thought",
        kind: MetricType::HISTOGRAM,
        labels: &["model", "tenant"],
        read: |status, emit| {
            for of in &status.latency {
                emit(&[&status.model, &of.tenant], buckets(&of.think_tokens, &TOKEN_BUCKETS));
            }
        },
    },
    Family {
        name: "service_level_requests_total",
        help: "Ended requests by whether their service level was kept",
        kind: MetricType::COUNTER,
        labels: &["level", "outcome"],
        read: |status, emit| {
            for of in &status.service_levels {
                emit(&[&of.name, "in_time"], counter(of.ended[0]));
                emit(&[&of.name, "late"], counter(of.ended[1]));
                emit(&[&of.name, "refused"], counter(of.refused));
            }
        },
    },
    Family {
        name: "service_level_live_requests",
        help: "Live requests by whether their service level can still be kept",
        kind: MetricType::GAUGE,
        labels: &["level", "outcome"],
        read: |status, emit| {
            for of in &status.service_levels {
                emit(&[&of.name, "in_time"], gauge(float(of.live[0])));
                emit(&[&of.name, "late"], gauge(float(of.live[1])));
            }
        },
    },
    Family {
        name: "sessions",
        help: "Conversations with a live request",
        kind: MetricType::GAUGE,
        labels: &[],
        read: |status, emit| emit(&[], gauge(float(status.sessions))),
    },
    Family {
        name: "kv_blocks",
        help: "KV blocks at the latest step: free, of these those that the eviction policy keeps for a time (kept), all (total)",
        kind: MetricType::GAUGE,
        labels: &["state"],
        read: |status, emit| {
            if let Some([free, total]) = status.blocks {
                emit(&["free"], gauge(float(free)));
                emit(&["total"], gauge(float(total)));
            }
            status.kv.iter().for_each(|kv| emit(&["kept"], gauge(float(kv.kept_blocks))));
        },
    },
    Family {
        name: "evictions_total",
        help: "KV blocks evicted by tier: dead thinking, other cached blocks, blocks of answers in progress",
        kind: MetricType::COUNTER,
        labels: &["tier"],
        read: |status, emit| {
            if let Some(kv) = &status.kv {
                TIERS.iter().zip(kv.evictions).for_each(|(tier, count)| emit(&[tier], counter(count)));
            }
        },
    },
    Family {
        name: "offload_evictions_total",
        help: "Chunks that the offloading connector's store gave up, by the same tiers",
        kind: MetricType::COUNTER,
        labels: &["tier"],
        read: |status, emit| {
            if let Some(kv) = &status.kv {
                TIERS.iter().zip(kv.offload_evictions).for_each(|(tier, count)| emit(&[tier], counter(count)));
            }
        },
    },
    Family {
        name: "dead_think_blocks_evicted_total",
        help: "KV blocks of thinking that no later prompt could match, evicted when their request ended",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.kv.iter().for_each(|kv| emit(&[], counter(kv.evictions[0]))),
    },
    Family {
        name: "output_critical_evictions_total",
        help: "KV blocks that answers in progress lost when their request was preempted",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.kv.iter().for_each(|kv| emit(&[], counter(kv.evictions[2]))),
    },
    Family {
        name: "avoidable_output_preemptions_total",
        help: "Preemptions of a request that answered while one that did not had KV blocks",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.kv.iter().for_each(|kv| emit(&[], counter(kv.avoidable_output_preemptions))),
    },
    Family {
        name: "prefix_cache_hit_tokens_total",
        help: "Tokens of admitted requests that were in the prefix cache, by the phase they are of",
        kind: MetricType::COUNTER,
        labels: &["phase"],
        read: |status, emit| {
            if let Some(kv) = &status.kv {
                PHASES.iter().zip(kv.hit_tokens).for_each(|(phase, count)| emit(&[phase], counter(count)));
            }
        },
    },
    Family {
        name: "prefix_cache_missed_tokens_total",
        help: "Tokens of admitted requests that were not in the prefix cache, by the phase they are of",
        kind: MetricType::COUNTER,
        labels: &["phase"],
        read: |status, emit| {
            if let Some(kv) = &status.kv {
                PHASES.iter().zip(kv.missed_tokens).for_each(|(phase, count)| emit(&[phase], counter(count)));
            }
        },
    },
    Family {
        name: "recomputed_tokens_total",
        help: "Tokens computed again because of a preemption",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.kv.iter().for_each(|kv| emit(&[], counter(kv.recomputed_tokens))),
    },
    Family {
        name: "kv_moved_blocks_total",
        help: "KV blocks that the eviction policy moved to the front of the engine's queue",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.kv.iter().for_each(|kv| emit(&[], counter(kv.moved_blocks))),
    },
    Family {
        name: "kv_keeps_total",
        help: "KV blocks that the eviction policy kept for a time, by outcome: used again (hit), evicted before, time over",
        kind: MetricType::COUNTER,
        labels: &["outcome"],
        read: |status, emit| {
            if let Some(kv) = &status.kv {
                KEEP_OUTCOMES.iter().zip(kv.keeps).for_each(|(outcome, count)| emit(&[outcome], counter(count)));
            }
        },
    },
    Family {
        name: "kv_resyncs_total",
        help: "Times that the mirror of the engine's free blocks was refilled; 1 for each pool at the start",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.kv.iter().for_each(|kv| emit(&[], counter(kv.resyncs))),
    },
    Family {
        name: "forced_ends_total",
        help: "Ends of thinking that were forced, by reason",
        kind: MetricType::COUNTER,
        labels: &["reason"],
        read: |status, emit| {
            if let Some(budget) = &status.budget {
                for (reason, count) in ForceReason::ALL.iter().zip(budget.forced) {
                    emit(&[&reason.label().replace('-', "_")], counter(count));
                }
            }
        },
    },
    Family {
        name: "missed_forced_tokens_total",
        help: "Tokens that were to be forced and came out otherwise",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.budget.iter().for_each(|budget| emit(&[], counter(budget.missed))),
    },
    Family {
        name: "waited_forced_tokens_total",
        help: "Tokens at which a forced end of thinking waited for a mask of the client or an open tool call",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.budget.iter().for_each(|budget| emit(&[], counter(budget.waited))),
    },
    Family {
        name: "probes_total",
        help: "Probes of the entropy after a forced end of thinking, by what became of them",
        kind: MetricType::COUNTER,
        labels: &["outcome"],
        read: |status, emit| {
            if let Some(budget) = &status.budget {
                emit(&["asked"], counter(budget.probes_asked));
                emit(&["done"], counter(budget.probes_done));
                emit(&["dropped"], counter(budget.probes_dropped));
            }
        },
    },
    Family {
        name: "probe_tokens_total",
        help: "Tokens that probes computed",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.budget.iter().for_each(|budget| emit(&[], counter(budget.probe_tokens))),
    },
    Family {
        name: "think_tokens_total",
        help: "Tokens thought by requests that are over",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.budget.iter().for_each(|budget| emit(&[], counter(budget.think_tokens))),
    },
    Family {
        name: "thought_requests_total",
        help: "Requests that have thought and are over",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.budget.iter().for_each(|budget| emit(&[], counter(budget.thought))),
    },
    Family {
        name: "reopened_thinking_total",
        help: "Times that a request began to think again after its thinking had ended",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.budget.iter().for_each(|budget| emit(&[], counter(budget.reopened))),
    },
    Family {
        name: "recorded_decisions_total",
        help: "Recorded decisions, of all slots",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.recording.iter().for_each(|recording| emit(&[], counter(recording.recorded))),
    },
    Family {
        name: "recording_dropped_total",
        help: "Decisions that were not recorded because the writer was behind or has stopped",
        kind: MetricType::COUNTER,
        labels: &[],
        read: |status, emit| status.recording.iter().for_each(|recording| emit(&[], counter(recording.dropped))),
    },
    Family {
        name: "recording_bytes",
        help: "Bytes of the recordings that are kept",
        kind: MetricType::GAUGE,
        labels: &[],
        read: |status, emit| status.recording.iter().for_each(|recording| emit(&[], gauge(float(recording.bytes)))),
    },
    Family {
        name: "traced_requests_total",
        help: "Requests whose spans the collector took (sent), and those whose spans were lost",
        kind: MetricType::COUNTER,
        labels: &["outcome"],
        read: |status, emit| {
            if let Some(traces) = &status.traces {
                emit(&["sent"], counter(traces.sent));
                emit(&["lost"], counter(traces.lost));
            }
        },
    },
    Family {
        name: "decisions_total",
        help: "Decisions by who made them",
        kind: MetricType::COUNTER,
        labels: &["slot", "source"],
        read: |status, emit| {
            for slot in &status.slots {
                for (source, count) in SOURCES.iter().zip(slot.decisions) {
                    emit(&[slot.slot.label(), source], counter(count));
                }
            }
        },
    },
    Family {
        name: "decision_duration_seconds",
        help: "Time of a decision, checks and fallback included",
        kind: MetricType::HISTOGRAM,
        labels: &["slot", "source"],
        read: |status, emit| {
            for slot in &status.slots {
                for (i, source) in SOURCES.iter().enumerate() {
                    emit(&[slot.slot.label(), source], durations(slot, i));
                }
            }
        },
    },
    Family {
        name: "faults_total",
        help: "Faults of the active policies by kind",
        kind: MetricType::COUNTER,
        labels: &["slot", "kind"],
        read: |status, emit| {
            for slot in &status.slots {
                for (kind, count) in &slot.faults {
                    emit(&[slot.slot.label(), kind], counter(*count));
                }
            }
        },
    },
    Family {
        name: "idle_plans_total",
        help: "Plans of the active version that left nothing to run; the host lifted their caps",
        kind: MetricType::COUNTER,
        labels: &["slot", "name"],
        read: |status, emit| {
            for slot in status.slots.iter().filter(|slot| slot.slot == SlotName::Dispatch) {
                emit(&[slot.slot.label(), &slot.active.name], counter(slot.idle_plans));
            }
        },
    },
    Family {
        name: "strikes",
        help: "Faults that count against the active version within the window",
        kind: MetricType::GAUGE,
        labels: &["slot"],
        read: |status, emit| {
            for slot in &status.slots {
                emit(&[slot.slot.label()], gauge(slot.strikes.into()));
            }
        },
    },
    Family {
        name: "quarantined",
        help: "Whether a version is in quarantine",
        kind: MetricType::GAUGE,
        labels: &["slot"],
        read: |status, emit| {
            for slot in &status.slots {
                emit(&[slot.slot.label()], gauge(f64::from(u8::from(slot.quarantine.is_some()))));
            }
        },
    },
    Family {
        name: "swaps_total",
        help: "Changes of the active policy, promotions and rollbacks included",
        kind: MetricType::COUNTER,
        labels: &["slot"],
        read: |status, emit| {
            for slot in &status.slots {
                emit(&[slot.slot.label()], counter(slot.swaps));
            }
        },
    },
    Family {
        name: "active_version_info",
        help: "1; who decides",
        kind: MetricType::GAUGE,
        labels: &["slot", "name", "version", "sha256"],
        read: |status, emit| {
            for SlotStatus { slot, active, .. } in &status.slots {
                emit(&[slot.label(), &active.name, &active.version, &active.sha256], gauge(1.0));
            }
        },
    },
    Family {
        name: "shadow_rank_correlation",
        help: "Mean Spearman correlation of the order of the shadow with that of the active policy",
        kind: MetricType::GAUGE,
        labels: &["slot"],
        read: |status, emit| {
            shadows(status, emit, |shadow| (shadow.compared > 0).then(|| gauge(shadow.rank_correlation)))
        },
    },
    Family {
        name: "shadow_top_overlap",
        help: "Mean share of the first 8 that shadow and active policy both put first",
        kind: MetricType::GAUGE,
        labels: &["slot"],
        read: |status, emit| shadows(status, emit, |shadow| (shadow.compared > 0).then(|| gauge(shadow.top_overlap))),
    },
    Family {
        name: "shadow_compared_total",
        help: "Steps in which the shadow was compared",
        kind: MetricType::COUNTER,
        labels: &["slot"],
        read: |status, emit| shadows(status, emit, |shadow| Some(counter(shadow.compared))),
    },
    Family {
        name: "shadow_skipped_total",
        help: "Steps in which the shadow was still at an earlier one",
        kind: MetricType::COUNTER,
        labels: &["slot"],
        read: |status, emit| shadows(status, emit, |shadow| Some(counter(shadow.skipped))),
    },
    Family {
        name: "shadow_differences_total",
        help: "Steps in which the token budget of the shadow differs",
        kind: MetricType::COUNTER,
        labels: &["slot"],
        read: |status, emit| shadows(status, emit, |shadow| Some(counter(shadow.differences))),
    },
    Family {
        name: "shadow_faults_total",
        help: "Faults of the shadow, which changed nothing",
        kind: MetricType::COUNTER,
        labels: &["slot"],
        read: |status, emit| shadows(status, emit, |shadow| Some(counter(shadow.faults))),
    },
];

fn shadows(
    status: &ProcessStatus,
    emit: &mut Emit<'_>,
    sample: fn(&meridian_engine::control::ShadowStatus) -> Option<Metric>,
) {
    for slot in &status.slots {
        if let Some(sample) = slot.shadow.as_ref().and_then(sample) {
            emit(&[slot.slot.label()], sample);
        }
    }
}

fn gauge(value: f64) -> Metric {
    let mut gauge = Gauge::default();
    gauge.set_value(value);
    Metric::from_gauge(gauge)
}

fn counter(count: u64) -> Metric {
    let mut counter = Counter::default();
    counter.set_value(float(count));
    let mut metric = Metric::default();
    metric.set_counter(counter);
    metric
}

fn waits(status: &ProcessStatus, emit: &mut Emit<'_>, of: fn(&TenantLatency) -> &latency::Histogram) {
    for tenant in &status.latency {
        emit(&[&status.model, &tenant.tenant], buckets(of(tenant), &WAIT_BUCKETS_S));
    }
}

fn buckets(histogram: &latency::Histogram, bounds: &[f64]) -> Metric {
    metric(&histogram.counts, bounds.iter().copied(), histogram.sum)
}

fn durations(slot: &SlotStatus, source: usize) -> Metric {
    let bounds_s = DECIDING_BUCKETS_US.iter().map(|bound_us| bound_us / 1e6);
    metric(&slot.deciding_buckets[source], bounds_s, slot.deciding_s[source])
}

/// A histogram of counts by bucket, the last of them without a bound.
fn metric(counts: &[u64], bounds: impl Iterator<Item = f64>, sum: f64) -> Metric {
    let mut so_far = 0;
    let bucket = |(count, bound): (&u64, f64)| {
        so_far += count;
        let mut bucket = Bucket::default();
        bucket.set_cumulative_count(so_far);
        bucket.set_upper_bound(bound);
        bucket
    };
    let buckets = counts.iter().zip(bounds).map(bucket).collect();
    let mut histogram = Histogram::default();
    histogram.set_bucket(buckets);
    histogram.set_sample_count(counts.iter().sum());
    histogram.set_sample_sum(sum);
    let mut metric = Metric::default();
    metric.set_histogram(histogram);
    metric
}

#[expect(clippy::cast_precision_loss, reason = "a sample is an f64")]
fn float(count: u64) -> f64 {
    count as f64
}

/// Reads [`Control::status`] once per scrape.
pub(super) struct StatusCollector {
    control: Arc<dyn Control>,
    descriptions: Vec<Desc>,
}

impl StatusCollector {
    pub(super) fn new(control: Arc<dyn Control>) -> Self {
        let description = |family: &Family| {
            let labels = family.labels.iter().map(|label| (*label).to_owned()).collect();
            Desc::new(full_name(family), family.help.into(), labels, HashMap::new())
                .expect("names and labels are valid")
        };
        Self { control, descriptions: FAMILIES.iter().map(description).collect() }
    }
}

fn full_name(family: &Family) -> String {
    format!("meridian_{}", family.name)
}

impl Collector for StatusCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descriptions.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let status = self.control.status();
        FAMILIES.iter().map(|family| read(family, &status)).collect()
    }
}

fn read(family: &Family, status: &ProcessStatus) -> MetricFamily {
    let mut samples = Vec::new();
    (family.read)(status, &mut |values, mut sample| {
        let label = |(name, value): (&&str, &&str)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value((*value).to_owned());
            pair
        };
        sample.set_label(family.labels.iter().zip(values).map(label).collect());
        samples.push(sample);
    });
    let mut read = MetricFamily::default();
    read.set_name(full_name(family));
    read.set_help(family.help.to_owned());
    read.set_field_type(family.kind);
    read.set_metric(samples);
    read
}

#[cfg(test)]
mod tests {
    use super::{FAMILIES, MetricType};

    #[test]
    fn every_metric_is_documented() {
        let docs = include_str!("../../../docs/src/metrics.md");
        for family in FAMILIES {
            let labels =
                if family.labels.is_empty() { String::new() } else { format!("{{{}}}", family.labels.join(",")) };
            let row = format!("| `meridian_{}{labels}` |", family.name);
            assert!(docs.contains(&row), "docs/src/metrics.md lacks {row}");
        }
    }

    #[test]
    fn the_dashboard_and_the_alert_rules_ask_for_metrics_that_exist() {
        let files = [
            ("meridian.json", include_str!("../../../deploy/grafana/meridian.json")),
            ("meridian.rules.yml", include_str!("../../../deploy/prometheus/meridian.rules.yml")),
        ];
        for (file, text) in files {
            for rest in text.split("meridian_").skip(1) {
                let name = rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default();
                let exists = FAMILIES.iter().any(|family| match name.strip_prefix(family.name) {
                    Some(suffix) if family.kind == MetricType::HISTOGRAM => {
                        ["_bucket", "_sum", "_count"].contains(&suffix)
                    }
                    suffix => suffix == Some(""),
                });
                assert!(exists, "{file}: meridian_{name} is no metric");
            }
        }
    }
}

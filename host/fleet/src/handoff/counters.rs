//! The metrics of `/metrics`. Everything about one engine that answers has its address as a label.

use std::collections::BTreeMap;

use meridian_core::handoff::TargetFacts;
use prometheus::core::Collector;
use prometheus::{
    Encoder, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Opts, Registry, TextEncoder,
};

pub(super) struct Counters {
    registry: Registry,
    /// Addresses of the engines that answer.
    engines: Vec<String>,
    pub(super) requests: IntCounter,
    handed_over: IntCounterVec,
    /// By the field that one engine must serve.
    pub(super) passed_through: IntCounterVec,
    /// By reason: at the arrival, and after the end of thinking.
    pub(super) went_on: IntCounterVec,
    /// From the request for an answer to its first token.
    transfer_s: HistogramVec,
    now: Gauges,
}

/// The facts of the policy.
struct Gauges {
    requests: IntGaugeVec,
    blocks: IntGaugeVec,
    itl_s: GaugeVec,
    is_failing: IntGaugeVec,
}

const BUCKETS: [f64; 12] = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0];

impl Counters {
    pub(super) fn new(engines: Vec<String>) -> prometheus::Result<Self> {
        let registry = Registry::new_custom(Some("meridian_handoff".into()), None)?;
        let by = |name: &str, help: &str, label: &str| IntCounterVec::new(Opts::new(name, help), &[label]);
        let gauge = |name: &str, help: &str| IntGaugeVec::new(Opts::new(name, help), &["engine"]);
        let seconds = "Time from the request for an answer to the first token of the engine that answers";
        let counters = Self {
            requests: IntCounter::new("requests_total", "Completions and chats")?,
            handed_over: by("handed_over_total", "Answers that an engine has begun", "engine")?,
            passed_through: by("passed_through_total", "Requests that one engine must serve, by field", "field")?,
            went_on: by("first_engine_total", "Answers that the first engine wrote, by reason", "reason")?,
            transfer_s: HistogramVec::new(
                HistogramOpts::new("transfer_seconds", seconds).buckets(BUCKETS.to_vec()),
                &["engine"],
            )?,
            now: Gauges {
                requests: gauge("answering", "Answers that an engine is writing, or about to")?,
                blocks: gauge("answering_blocks", "KV blocks that these had when they were handed over")?,
                itl_s: GaugeVec::new(
                    Opts::new("answer_itl_seconds", "Gap between two tokens of an answer, moving mean"),
                    &["engine"],
                )?,
                is_failing: gauge("failing", "1 while an engine is left out after a failure")?,
            },
            engines,
            registry,
        };
        let Gauges { requests, blocks, itl_s, is_failing } = &counters.now;
        let all: [Box<dyn Collector>; 9] = [
            Box::new(counters.requests.clone()),
            Box::new(counters.handed_over.clone()),
            Box::new(counters.passed_through.clone()),
            Box::new(counters.went_on.clone()),
            Box::new(counters.transfer_s.clone()),
            Box::new(requests.clone()),
            Box::new(blocks.clone()),
            Box::new(itl_s.clone()),
            Box::new(is_failing.clone()),
        ];
        all.into_iter().try_for_each(|collector| counters.registry.register(collector))?;
        // Engines that have not answered yet show as 0.
        for engine in &counters.engines {
            counters.handed_over.with_label_values(&[engine]);
        }
        Ok(counters)
    }

    /// The address of an engine.
    pub(super) fn engine(&self, engine: usize) -> &str {
        &self.engines[engine]
    }

    /// Answers that an engine has begun.
    pub(super) fn handed_over_to(&self, engine: usize) -> u64 {
        self.handed_over.with_label_values(&[&self.engines[engine]]).get()
    }

    /// Answers that the first engine wrote, by reason.
    pub(super) fn by_first_engine(&self) -> BTreeMap<String, u64> {
        let families = self.went_on.collect();
        let metrics = families.iter().flat_map(|family| family.get_metric());
        let counts = metrics.filter_map(|metric| {
            let reason = metric.get_label().first()?.value().to_owned();
            Some((reason, metric.get_counter().get_value() as u64))
        });
        counts.collect()
    }

    /// An engine has begun an answer, so many seconds after it was asked.
    pub(super) fn begun(&self, engine: usize, after_s: f64) {
        let engine = [self.engines[engine].as_str()];
        self.handed_over.with_label_values(&engine).inc();
        self.transfer_s.with_label_values(&engine).observe(after_s);
    }

    pub(super) fn text(&self, targets: &[TargetFacts]) -> Vec<u8> {
        for (engine, target) in self.engines.iter().zip(targets) {
            let engine = [engine.as_str()];
            self.now.requests.with_label_values(&engine).set(i64::from(target.requests));
            self.now.blocks.with_label_values(&engine).set(i64::try_from(target.blocks).unwrap_or(i64::MAX));
            self.now.is_failing.with_label_values(&engine).set(i64::from(target.is_failing));
            if target.itl_ms.is_finite() {
                self.now.itl_s.with_label_values(&engine).set(target.itl_ms / 1e3);
            }
        }
        let mut text = Vec::new();
        // A write to a vector does not fail.
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut text);
        text
    }
}

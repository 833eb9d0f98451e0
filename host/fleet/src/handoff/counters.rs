//! Counters for `/metrics`.

use prometheus::{Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry, TextEncoder};

pub(super) struct Counters {
    registry: Registry,
    pub(super) requests: IntCounter,
    pub(super) handed_over: IntCounter,
    /// By the field that one engine must serve.
    pub(super) passed_through: IntCounterVec,
    /// By reason: after the end of thinking.
    pub(super) went_on: IntCounterVec,
    /// From the request for an answer to its first token.
    pub(super) transfer_s: Histogram,
}

const BUCKETS: [f64; 12] = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0];

impl Counters {
    pub(super) fn new() -> prometheus::Result<Self> {
        let registry = Registry::new_custom(Some("meridian_handoff".into()), None)?;
        let counted = |name: &str, help: &str| IntCounter::new(name, help);
        let by = |name: &str, help: &str, label: &str| IntCounterVec::new(Opts::new(name, help), &[label]);
        let seconds = "Time from the request for an answer to the first token of the engine that answers";
        let counters = Self {
            requests: counted("requests_total", "Completions and chats")?,
            handed_over: counted("handed_over_total", "Answers that the second engine has begun")?,
            passed_through: by("passed_through_total", "Requests that one engine must serve, by field", "field")?,
            went_on: by("first_engine_total", "Answers that the first engine wrote on, by reason", "reason")?,
            transfer_s: Histogram::with_opts(
                HistogramOpts::new("transfer_seconds", seconds).buckets(BUCKETS.to_vec()),
            )?,
            registry,
        };
        counters.registry.register(Box::new(counters.requests.clone()))?;
        counters.registry.register(Box::new(counters.handed_over.clone()))?;
        counters.registry.register(Box::new(counters.passed_through.clone()))?;
        counters.registry.register(Box::new(counters.went_on.clone()))?;
        counters.registry.register(Box::new(counters.transfer_s.clone()))?;
        Ok(counters)
    }

    pub(super) fn text(&self) -> Vec<u8> {
        let mut text = Vec::new();
        // A write to a vector does not fail.
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut text);
        text
    }
}

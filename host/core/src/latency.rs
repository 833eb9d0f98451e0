//! Latency histograms by phase and tenant, and of step times. All memory is bounded: tenant names come from clients.

mod sketch;

use serde::{Deserialize, Serialize};

use self::sketch::{DenseCounts, bucket_of};
pub use self::sketch::{LatencyCounts, LatencyKind, SKETCH_BUCKETS, Sketch, quantile_ms};
use crate::table::RequestState;
use crate::{StepLoad, ThinkPhase};

/// Upper bounds of the buckets of times until a milestone, seconds.
pub const WAIT_BUCKETS_S: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
/// Upper bounds of the buckets of gaps between tokens and of steps, seconds.
pub const STEP_BUCKETS_S: [f64; 16] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0];
/// Upper bounds of the buckets of think tokens.
pub const TOKEN_BUCKETS: [f64; 14] =
    [16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0];

/// A histogram: counts by bucket, the last one for larger values, and the sum of the values.
///
/// ```
/// use meridian_core::latency::{Histogram, WAIT_BUCKETS_S};
///
/// let mut histogram = Histogram::new(WAIT_BUCKETS_S.len());
/// histogram.observe(&WAIT_BUCKETS_S, 0.2);
/// assert_eq!((histogram.count(), histogram.quantile(&WAIT_BUCKETS_S, 0.5)), (1, Some(0.175)));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Histogram {
    /// Values by bucket: at most each bound, and above the last one.
    pub counts: Vec<u64>,
    /// Sum of the values.
    pub sum: f64,
}

impl Histogram {
    /// An empty histogram with so many bounds.
    #[must_use]
    pub fn new(bounds: usize) -> Self {
        Self { counts: vec![0; bounds + 1], sum: 0.0 }
    }

    /// Add a value.
    pub fn observe(&mut self, bounds: &[f64], value: f64) {
        if value.is_finite() {
            self.add(bucket(bounds, value), value);
        }
    }

    #[inline]
    fn add(&mut self, bucket: usize, value: f64) {
        self.counts[bucket] += 1;
        self.sum += value;
    }

    /// Number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The value below which this share of the values is, linear within a bucket; `None` without values. Values above
    /// the last bound count as that bound.
    #[must_use]
    pub fn quantile(&self, bounds: &[f64], share: f64) -> Option<f64> {
        let wanted = self.count() as f64 * share;
        let mut below = 0.0;
        for (i, count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let count = *count as f64;
            let lower = i.checked_sub(1).and_then(|i| bounds.get(i)).copied().unwrap_or(0.0);
            let upper = bounds.get(i).copied().unwrap_or(lower);
            if below + count >= wanted {
                return Some(lower + (upper - lower) * ((wanted - below) / count));
            }
            below += count;
        }
        None
    }

    /// The values that `before` did not have yet.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let earlier = before.counts.iter().chain(std::iter::repeat(&0));
        let counts = self.counts.iter().zip(earlier).map(|(now, before)| now.saturating_sub(*before)).collect();
        Self { counts, sum: self.sum - before.sum }
    }

    /// Add the values of another histogram with the same bounds.
    pub fn merge(&mut self, other: &Self) {
        self.counts.resize(self.counts.len().max(other.counts.len()), 0);
        self.counts.iter_mut().zip(&other.counts).for_each(|(all, count)| *all += count);
        self.sum += other.sum;
    }
}

fn bucket(bounds: &[f64], value: f64) -> usize {
    bounds.partition_point(|bound| *bound < value)
}

/// The latencies of one tenant's requests. Times are seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TenantLatency {
    /// The tenant; empty for requests without one, [`OTHER_TENANTS`] for those beyond the limit.
    pub tenant: String,
    /// Arrival to first admission.
    pub queue: Histogram,
    /// Arrival to first token of any kind.
    pub ttft: Histogram,
    /// Arrival to first output token.
    pub ttfo: Histogram,
    /// End of thinking to first output token.
    pub ttot: Histogram,
    /// Gaps between two tokens of thinking.
    pub think_itl: Histogram,
    /// Gaps between two tokens of output.
    pub output_itl: Histogram,
    /// Arrival to end.
    pub e2e: Histogram,
    /// Think tokens of ended requests that have thought.
    pub think_tokens: Histogram,
}

impl TenantLatency {
    fn new(tenant: &str) -> Self {
        let waits = || Histogram::new(WAIT_BUCKETS_S.len());
        let gaps = || Histogram::new(STEP_BUCKETS_S.len());
        Self {
            tenant: tenant.to_owned(),
            queue: waits(),
            ttft: waits(),
            ttfo: waits(),
            ttot: waits(),
            think_itl: gaps(),
            output_itl: gaps(),
            e2e: waits(),
            think_tokens: Histogram::new(TOKEN_BUCKETS.len()),
        }
    }

    fn is_empty(&self) -> bool {
        self.queue.count() == 0 && self.ttft.count() == 0 && self.e2e.count() == 0
    }
}

/// The name of the series of all tenants beyond the limit.
pub const OTHER_TENANTS: &str = "other";

/// The kind of a step, by its tokens.
///
/// ```
/// use meridian_core::{StepLoad, latency::StepKind};
///
/// let load = StepLoad { decode_tokens: 32, prefill_tokens: 512, ..StepLoad::default() };
/// assert_eq!(StepKind::of(&load), Some(StepKind::Mixed));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Decodes only.
    Decode,
    /// Prompts only.
    Prefill,
    /// Both.
    Mixed,
}

impl StepKind {
    /// Every kind, with its label.
    pub const ALL: [(Self, &'static str); 3] =
        [(Self::Decode, "decode"), (Self::Prefill, "prefill"), (Self::Mixed, "mixed")];

    /// The kind of a step; `None` for a step without tokens.
    #[must_use]
    pub fn of(load: &StepLoad) -> Option<Self> {
        match (load.decode_tokens, load.prefill_tokens) {
            (0, 0) => None,
            (_, 0) => Some(Self::Decode),
            (0, _) => Some(Self::Prefill),
            _ => Some(Self::Mixed),
        }
    }
}

/// Observes the requests of a [`RequestTable`](crate::RequestTable) and the steps of an engine.
#[derive(Clone, Debug)]
pub struct Latencies {
    /// The tenant's number of each series from the third on.
    numbers: Vec<u32>,
    /// Without a tenant, of other tenants, then one each.
    tenants: Vec<TenantLatency>,
    most_tenants: usize,
    /// Of all tenants.
    all: DenseCounts,
    steps: [Histogram; StepKind::ALL.len()],
    gap: Gap,
}

/// The latest gap and its buckets: most tokens of a step have the same.
#[derive(Clone, Copy, Debug)]
struct Gap {
    ms: f64,
    bucket: usize,
    sketch_bucket: usize,
}

impl Latencies {
    /// At most `most_tenants` tenants have series of their own: those that come first.
    #[must_use]
    pub fn new(most_tenants: usize) -> Self {
        Self {
            numbers: Vec::new(),
            tenants: vec![TenantLatency::new(""), TenantLatency::new(OTHER_TENANTS)],
            most_tenants,
            all: DenseCounts::default(),
            steps: std::array::from_fn(|_| Histogram::new(STEP_BUCKETS_S.len())),
            gap: Gap { ms: f64::NAN, bucket: 0, sketch_bucket: 0 },
        }
    }

    /// The series of a tenant.
    pub(crate) fn series(&mut self, number: u32, name: &str) -> u16 {
        if number == 0 {
            return 0;
        }
        let position = self.numbers.iter().position(|known| *known == number).or_else(|| {
            (self.numbers.len() < self.most_tenants).then(|| {
                self.numbers.push(number);
                self.tenants.push(TenantLatency::new(name));
                self.numbers.len() - 1
            })
        });
        position.map_or(1, |position| u16::try_from(position + 2).unwrap_or(1))
    }

    /// Two tokens of one phase came this far apart.
    #[inline]
    pub(crate) fn gap(&mut self, series: u16, phase: ThinkPhase, gap_ms: f64) {
        if gap_ms.to_bits() != self.gap.ms.to_bits() {
            let bucket = bucket(&STEP_BUCKETS_S, gap_ms / 1e3);
            self.gap = Gap { ms: gap_ms, bucket, sketch_bucket: bucket_of(gap_ms) };
        }
        let kind = if phase == ThinkPhase::Output { LatencyKind::OutputItl } else { LatencyKind::ThinkItl };
        self.all.sketches[kind as usize].add(self.gap.sketch_bucket, gap_ms);
        let Some(of) = self.tenants.get_mut(usize::from(series)) else { return };
        let histogram = if phase == ThinkPhase::Output { &mut of.output_itl } else { &mut of.think_itl };
        histogram.add(self.gap.bucket, gap_ms / 1e3);
    }

    /// A request has another token of this phase.
    #[inline]
    pub(crate) fn token(&mut self, phase: ThinkPhase) {
        let is_output = phase == ThinkPhase::Output;
        self.all.output_tokens += u64::from(is_output);
        self.all.think_tokens += u64::from(!is_output);
    }

    pub(crate) fn queued(&mut self, series: u16, ms: f64) {
        self.all.observe(LatencyKind::Queue, ms);
        self.observe(series, |of| &mut of.queue, ms);
    }

    pub(crate) fn first_token(&mut self, series: u16, ms: f64) {
        self.all.observe(LatencyKind::Ttft, ms);
        self.observe(series, |of| &mut of.ttft, ms);
    }

    pub(crate) fn first_output(&mut self, series: u16, ms: f64, since_thinking_ms: Option<f64>) {
        self.all.observe(LatencyKind::Ttfo, ms);
        self.observe(series, |of| &mut of.ttfo, ms);
        if let Some(ms) = since_thinking_ms {
            self.all.observe(LatencyKind::Ttot, ms);
            self.observe(series, |of| &mut of.ttot, ms);
        }
    }

    /// A request ends at `now_ms`.
    pub(crate) fn ended(&mut self, request: &RequestState, now_ms: f64) {
        let e2e_ms = now_ms - request.arrival_ms();
        self.all.finished += 1;
        self.all.observe(LatencyKind::E2e, e2e_ms);
        self.observe(request.series, |of| &mut of.e2e, e2e_ms);
        if request.think_tokens() > 0
            && let Some(of) = self.tenants.get_mut(usize::from(request.series))
        {
            of.think_tokens.observe(&TOKEN_BUCKETS, f64::from(request.think_tokens()));
        }
    }

    fn observe(&mut self, series: u16, of: impl Fn(&mut TenantLatency) -> &mut Histogram, ms: f64) {
        if let Some(tenant) = self.tenants.get_mut(usize::from(series)) {
            of(tenant).observe(&WAIT_BUCKETS_S, ms.max(0.0) / 1e3);
        }
    }

    pub(crate) fn step(&mut self, load: &StepLoad, ms: f64) {
        if let Some(kind) = StepKind::of(load) {
            self.steps[kind as usize].observe(&STEP_BUCKETS_S, ms / 1e3);
        }
    }

    /// The series that have values.
    #[must_use]
    pub fn tenants(&self) -> Vec<TenantLatency> {
        self.tenants.iter().filter(|of| !of.is_empty()).cloned().collect()
    }

    /// Fine sketches and counts of all tenants, since the first observation. `recomputed_tokens` is 0: the mirror counts
    /// them.
    #[must_use]
    pub fn counts(&self) -> LatencyCounts {
        self.all.counts()
    }

    /// Step times by [`StepKind`].
    #[must_use]
    pub fn steps(&self) -> [Histogram; StepKind::ALL.len()] {
        self.steps.clone()
    }
}

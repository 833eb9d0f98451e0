//! Fine latency sketches of all tenants together, for comparisons of engines and of policies.
//!
//! The histograms of [`TenantLatency`](super::TenantLatency) have 16 buckets, which suits a dashboard; a guard that
//! allows 5 % more needs finer ones. A sketch has 64 buckets for each doubling, so a bucket is at most 1.6 % wide. The
//! bucket of a value is the upper bits of its `f32` (G. Tene's HdrHistogram and DDSketch, Masson et al., VLDB 2019, have
//! the same shape): constant time, no allocation.

use serde::{Deserialize, Deserializer, Serialize};

/// Buckets for each doubling: 2 to the power of the bits of the fraction that count.
const FRACTION_BITS: u32 = 6;
/// Smallest value with a bucket of its own, milliseconds, as a power of 2: about a microsecond.
const LEAST_EXPONENT: u32 = 127 - 10;
/// Doublings, up to 4.6 hours.
const DOUBLINGS: u32 = 34;
/// The upper bits of the smallest value with a bucket of its own.
const BASE: u32 = LEAST_EXPONENT << FRACTION_BITS;

/// Number of buckets of a [`Sketch`]. The first one is for smaller values, the last one for larger values.
pub const SKETCH_BUCKETS: u16 = ((DOUBLINGS << FRACTION_BITS) + 2) as u16;

/// The bucket of a value in milliseconds. A negative value and NaN count as 0.
#[inline]
pub(super) fn bucket_of(ms: f64) -> usize {
    // Not `max`, which may keep the sign of -0.
    let ms = if ms > 0.0 { ms } else { 0.0 };
    let bits = (ms as f32).to_bits() >> (23 - FRACTION_BITS);
    let bucket = (bits + 1).saturating_sub(BASE) as usize;
    bucket.min(usize::from(SKETCH_BUCKETS) - 1)
}

/// The smallest value of a bucket, milliseconds.
fn lower_ms(bucket: u16) -> f64 {
    if bucket == 0 {
        return 0.0;
    }
    let bucket = u32::from(bucket.min(SKETCH_BUCKETS - 1)) - 1;
    f64::from(f32::from_bits((BASE + bucket) << (23 - FRACTION_BITS)))
}

/// A sketch that takes values in constant time.
#[derive(Clone, Debug)]
pub(super) struct DenseSketch {
    counts: Box<[u64]>,
    sum_ms: f64,
}

impl Default for DenseSketch {
    fn default() -> Self {
        Self { counts: vec![0; usize::from(SKETCH_BUCKETS)].into(), sum_ms: 0.0 }
    }
}

impl DenseSketch {
    #[inline]
    pub(super) fn observe(&mut self, ms: f64) {
        self.add(bucket_of(ms), ms);
    }

    /// Add a value whose bucket is known.
    #[inline]
    pub(super) fn add(&mut self, bucket: usize, ms: f64) {
        self.counts[bucket] += 1;
        self.sum_ms += if ms > 0.0 { ms } else { 0.0 };
    }

    fn sparse(&self) -> Sketch {
        let counts = (0..).zip(&self.counts).filter(|(_, count)| **count > 0).map(|(i, count)| (i, *count));
        Sketch { sum_ms: self.sum_ms, counts: counts.collect() }
    }
}

/// The distribution of a latency, in buckets that are at most 1.6 % wide. Times are milliseconds.
///
/// ```
/// use meridian_core::latency::Sketch;
///
/// let sketch: Sketch = (1..=1000).map(f64::from).collect();
/// let p99 = sketch.quantile_ms(0.99).unwrap();
/// assert!((p99 / 990.0 - 1.0).abs() < 0.016);
/// assert_eq!((sketch.count(), sketch.mean_ms()), (1000, Some(500.5)));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sketch {
    /// Sum of the values.
    sum_ms: f64,
    /// Buckets that have values, in ascending order, and how many each has.
    counts: Vec<(u16, u64)>,
}

impl Sketch {
    /// Number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().map(|(_, count)| count).sum()
    }

    /// The mean of the values; `None` without values.
    #[must_use]
    pub fn mean_ms(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum_ms / count as f64)
    }

    /// The sum of the values.
    #[must_use]
    pub fn sum_ms(&self) -> f64 {
        self.sum_ms
    }

    /// Buckets that have values, in ascending order, and how many each has: for sums over many sketches. The buckets are
    /// less than [`SKETCH_BUCKETS`].
    #[must_use]
    pub fn buckets(&self) -> &[(u16, u64)] {
        &self.counts
    }

    /// The value below which this share of the values is, linear within a bucket; `None` without values.
    #[must_use]
    pub fn quantile_ms(&self, share: f64) -> Option<f64> {
        quantile_ms(self.counts.iter().map(|(bucket, count)| (*bucket, *count as f64)), share)
    }

    /// Add the values of another sketch.
    pub fn merge(&mut self, other: &Self) {
        self.sum_ms += other.sum_ms;
        if self.counts.is_empty() {
            self.counts.clone_from(&other.counts);
            return;
        }
        let mut merged = Vec::with_capacity(self.counts.len().max(other.counts.len()));
        let (mut ours, mut theirs) = (self.counts.iter().peekable(), other.counts.iter().peekable());
        while let (Some(&&(one, x)), Some(&&(two, y))) = (ours.peek(), theirs.peek()) {
            merged.push(match one.cmp(&two) {
                std::cmp::Ordering::Less => (one, x),
                std::cmp::Ordering::Equal => (one, x.saturating_add(y)),
                std::cmp::Ordering::Greater => (two, y),
            });
            if one <= two {
                ours.next();
            }
            if two <= one {
                theirs.next();
            }
        }
        merged.extend(ours);
        merged.extend(theirs);
        self.counts = merged;
    }

    /// The values that `before` did not have yet; `None` when `before` has values that this sketch does not have, so that
    /// it is not an earlier state of the same sketch.
    #[must_use]
    pub fn since(&self, before: &Self) -> Option<Self> {
        let mut earlier = before.counts.iter().peekable();
        let mut counts = Vec::with_capacity(self.counts.len());
        for (bucket, count) in &self.counts {
            let known = earlier.next_if(|(of, _)| of == bucket).map_or(0, |(_, count)| *count);
            match count.checked_sub(known)? {
                0 => {}
                more => counts.push((*bucket, more)),
            }
        }
        // Each bucket of `before` must have been met.
        earlier.peek().is_none().then_some(Self { sum_ms: (self.sum_ms - before.sum_ms).max(0.0), counts })
    }
}

/// [`Sketch::quantile_ms`] of counts that may be weighted: buckets in ascending order, and the weight of each.
///
/// ```
/// use meridian_core::latency::{Sketch, quantile_ms};
///
/// let sketch: Sketch = [10.0, 20.0, 40.0].into_iter().collect();
/// let twice = sketch.buckets().iter().map(|(bucket, count)| (*bucket, 2.0 * *count as f64));
/// assert_eq!(quantile_ms(twice, 0.5), sketch.quantile_ms(0.5));
/// ```
pub fn quantile_ms(buckets: impl Iterator<Item = (u16, f64)> + Clone, share: f64) -> Option<f64> {
    let wanted = buckets.clone().map(|(_, weight)| weight).sum::<f64>() * share.clamp(0.0, 1.0);
    let mut below = 0.0;
    let mut last = None;
    for (bucket, weight) in buckets.filter(|(_, weight)| *weight > 0.0) {
        let (lower, upper) = (lower_ms(bucket), lower_ms(bucket + 1));
        if below + weight >= wanted {
            return Some(lower + (upper - lower) * ((wanted - below) / weight).clamp(0.0, 1.0));
        }
        below += weight;
        // Where rounding leaves the share just above all weights.
        last = Some(upper);
    }
    last
}

impl FromIterator<f64> for Sketch {
    /// A sketch of values in milliseconds.
    fn from_iter<T: IntoIterator<Item = f64>>(values: T) -> Self {
        let mut dense = DenseSketch::default();
        values.into_iter().for_each(|ms| dense.observe(ms));
        dense.sparse()
    }
}

impl<'de> Deserialize<'de> for Sketch {
    /// Refuses what no sketch has: it comes from another process.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Sent {
            sum_ms: f64,
            counts: Vec<(u16, u64)>,
        }
        let Sent { sum_ms, counts } = Sent::deserialize(deserializer)?;
        let refuse = |what: String| Err(serde::de::Error::custom(what));
        if !(sum_ms.is_finite() && sum_ms >= 0.0) {
            return refuse(format!("sum_ms: {sum_ms}: expected a number of at least 0"));
        }
        if let Some((bucket, _)) = counts.iter().find(|(bucket, _)| *bucket >= SKETCH_BUCKETS) {
            return refuse(format!("counts: bucket {bucket}: expected at most {}", SKETCH_BUCKETS - 1));
        }
        if !counts.is_sorted_by(|(one, _), (next, _)| one < next) {
            return refuse("counts: expected buckets in ascending order, each once".into());
        }
        // 2^53: beyond it, a share of the values is no longer exact, and sums of sketches could overflow.
        if counts.iter().any(|(_, count)| *count == 0 || *count > 1 << 53) {
            return refuse("counts: expected numbers from 1 to 2^53".into());
        }
        Ok(Self { sum_ms, counts })
    }
}

/// A latency that has a [`Sketch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LatencyKind {
    /// Arrival to first admission.
    Queue,
    /// Arrival to first token of any kind.
    Ttft,
    /// Arrival to first output token.
    Ttfo,
    /// End of thinking to first output token.
    Ttot,
    /// Gaps between two tokens of thinking.
    ThinkItl,
    /// Gaps between two tokens of output.
    OutputItl,
    /// Arrival to end.
    E2e,
}

impl LatencyKind {
    /// Every kind.
    pub const ALL: [Self; 7] =
        [Self::Queue, Self::Ttft, Self::Ttfo, Self::Ttot, Self::ThinkItl, Self::OutputItl, Self::E2e];

    /// Its name in JSON and in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Ttft => "ttft",
            Self::Ttfo => "ttfo",
            Self::Ttot => "ttot",
            Self::ThinkItl => "think_itl",
            Self::OutputItl => "output_itl",
            Self::E2e => "e2e",
        }
    }
}

/// Latencies and counts of an engine, or of several, over all tenants: since a start, or in an interval.
///
/// ```
/// use meridian_core::latency::{LatencyCounts, LatencyKind};
///
/// let mut both = LatencyCounts { output_tokens: 2, ttft: [20.0].into_iter().collect(), ..LatencyCounts::default() };
/// both.merge(&LatencyCounts { ttft: [40.0].into_iter().collect(), ..LatencyCounts::default() });
/// assert_eq!((both.output_tokens, both.of(LatencyKind::Ttft).mean_ms()), (2, Some(30.0)));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LatencyCounts {
    /// Requests that ended.
    pub finished: u64,
    /// Tokens of output.
    pub output_tokens: u64,
    /// Tokens of thinking.
    pub think_tokens: u64,
    /// Tokens that were computed again because of preemptions.
    pub recomputed_tokens: u64,
    /// Requests with a service level that was kept.
    pub in_time: u64,
    /// Those with a level that was not kept, refused ones included.
    pub missed: u64,
    /// Arrival to first admission.
    pub queue: Sketch,
    /// Arrival to first token of any kind.
    pub ttft: Sketch,
    /// Arrival to first output token.
    pub ttfo: Sketch,
    /// End of thinking to first output token.
    pub ttot: Sketch,
    /// Gaps between two tokens of thinking.
    pub think_itl: Sketch,
    /// Gaps between two tokens of output.
    pub output_itl: Sketch,
    /// Arrival to end.
    pub e2e: Sketch,
}

impl LatencyCounts {
    /// The sketch of a latency.
    #[must_use]
    pub fn of(&self, kind: LatencyKind) -> &Sketch {
        match kind {
            LatencyKind::Queue => &self.queue,
            LatencyKind::Ttft => &self.ttft,
            LatencyKind::Ttfo => &self.ttfo,
            LatencyKind::Ttot => &self.ttot,
            LatencyKind::ThinkItl => &self.think_itl,
            LatencyKind::OutputItl => &self.output_itl,
            LatencyKind::E2e => &self.e2e,
        }
    }

    /// The sketch of a latency, to change it.
    pub fn of_mut(&mut self, kind: LatencyKind) -> &mut Sketch {
        match kind {
            LatencyKind::Queue => &mut self.queue,
            LatencyKind::Ttft => &mut self.ttft,
            LatencyKind::Ttfo => &mut self.ttfo,
            LatencyKind::Ttot => &mut self.ttot,
            LatencyKind::ThinkItl => &mut self.think_itl,
            LatencyKind::OutputItl => &mut self.output_itl,
            LatencyKind::E2e => &mut self.e2e,
        }
    }

    /// Add those of another engine or interval.
    pub fn merge(&mut self, other: &Self) {
        self.finished = self.finished.saturating_add(other.finished);
        self.output_tokens = self.output_tokens.saturating_add(other.output_tokens);
        self.think_tokens = self.think_tokens.saturating_add(other.think_tokens);
        self.recomputed_tokens = self.recomputed_tokens.saturating_add(other.recomputed_tokens);
        self.in_time = self.in_time.saturating_add(other.in_time);
        self.missed = self.missed.saturating_add(other.missed);
        for kind in LatencyKind::ALL {
            self.of_mut(kind).merge(other.of(kind));
        }
    }

    /// Those since an earlier state of the same engine; `None` when `before` is not one, because the engine restarted.
    #[must_use]
    pub fn since(&self, before: &Self) -> Option<Self> {
        let mut since = Self {
            finished: self.finished.checked_sub(before.finished)?,
            output_tokens: self.output_tokens.checked_sub(before.output_tokens)?,
            think_tokens: self.think_tokens.checked_sub(before.think_tokens)?,
            recomputed_tokens: self.recomputed_tokens.checked_sub(before.recomputed_tokens)?,
            in_time: self.in_time.checked_sub(before.in_time)?,
            missed: self.missed.checked_sub(before.missed)?,
            ..Self::default()
        };
        for kind in LatencyKind::ALL {
            *since.of_mut(kind) = self.of(kind).since(before.of(kind))?;
        }
        Some(since)
    }
}

/// What [`Latencies`](super::Latencies) observes over all tenants.
#[derive(Clone, Debug, Default)]
pub(super) struct DenseCounts {
    pub(super) finished: u64,
    pub(super) output_tokens: u64,
    pub(super) think_tokens: u64,
    /// In the order of [`LatencyKind::ALL`].
    pub(super) sketches: [DenseSketch; LatencyKind::ALL.len()],
}

impl DenseCounts {
    #[inline]
    pub(super) fn observe(&mut self, kind: LatencyKind, ms: f64) {
        self.sketches[kind as usize].observe(ms);
    }

    pub(super) fn counts(&self) -> LatencyCounts {
        let Self { finished, output_tokens, think_tokens, sketches } = self;
        let [queue, ttft, ttfo, ttot, think_itl, output_itl, e2e] = sketches.each_ref().map(DenseSketch::sparse);
        LatencyCounts {
            finished: *finished,
            output_tokens: *output_tokens,
            think_tokens: *think_tokens,
            // The mirror's: preemptions and service levels are none of a request's milestones.
            recomputed_tokens: 0,
            in_time: 0,
            missed: 0,
            queue,
            ttft,
            ttfo,
            ttot,
            think_itl,
            output_itl,
            e2e,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_narrow_and_meet() {
        assert_eq!((lower_ms(0), lower_ms(1)), (0.0, 1.0 / 1024.0));
        for bucket in 1..SKETCH_BUCKETS - 1 {
            let (lower, upper) = (lower_ms(bucket), lower_ms(bucket + 1));
            assert!(upper > lower && upper / lower < 1.016, "{bucket}: {lower} {upper}");
            assert_eq!(bucket_of(lower), usize::from(bucket));
            assert_eq!(bucket_of(f64::midpoint(lower, upper)), usize::from(bucket));
        }
        assert_eq!(bucket_of(lower_ms(SKETCH_BUCKETS - 1)), usize::from(SKETCH_BUCKETS) - 1);
    }

    #[test]
    fn extreme_values_have_buckets() {
        for ms in [f64::NAN, -1.0, -0.0, 0.0, 1e-9] {
            assert_eq!(bucket_of(ms), 0, "{ms}");
        }
        for ms in [1e9, f64::MAX, f64::INFINITY] {
            assert_eq!(bucket_of(ms), usize::from(SKETCH_BUCKETS) - 1, "{ms}");
        }
    }

    #[test]
    fn merged_is_the_sketch_of_all_values_and_since_takes_it_apart() {
        let (one, two): (Vec<f64>, Vec<f64>) =
            ((0..500).map(|i| f64::from(i) * 0.37).collect(), (0..300).map(|i| f64::from(i * i) * 0.01).collect());
        let both: Sketch = one.iter().chain(&two).copied().collect();
        let (one, two): (Sketch, Sketch) = (one.into_iter().collect(), two.into_iter().collect());
        let mut merged = one.clone();
        merged.merge(&two);
        assert_eq!(merged.buckets(), both.buckets());
        let since = merged.since(&one).expect("an earlier state");
        assert_eq!(since.buckets(), two.buckets());
        assert!((since.sum_ms() - two.sum_ms()).abs() < 1e-6);
        assert_eq!(one.since(&merged), None, "a restart: the values have gone");
        assert_eq!(one.since(&two), None);
    }

    #[test]
    fn quantiles_are_those_of_the_values() {
        let values: Vec<f64> = (0..10_000).map(|i| 1.001_f64.powi(i)).collect();
        let sketch: Sketch = values.iter().copied().collect();
        for share in [0.01, 0.5, 0.9, 0.99, 0.999] {
            let exact = values[(share * 10_000.0) as usize - 1];
            let found = sketch.quantile_ms(share).expect("values");
            assert!((found / exact - 1.0).abs() < 0.016, "{share}: {found} {exact}");
        }
        assert_eq!(Sketch::default().quantile_ms(0.5), None);
    }

    #[test]
    fn a_sketch_from_elsewhere_is_checked() {
        let sketch: Sketch = [3.0, 3.0, 80.0].into_iter().collect();
        let text = serde_json::to_string(&sketch).expect("JSON");
        assert_eq!(serde_json::from_str::<Sketch>(&text).expect("its own text"), sketch);
        for (text, why) in [
            (r#"{"sum_ms": -1, "counts": []}"#, "sum_ms: -1"),
            (r#"{"sum_ms": 1, "counts": [[2178, 1]]}"#, "bucket 2178: expected at most 2177"),
            (r#"{"sum_ms": 1, "counts": [[5, 1], [5, 1]]}"#, "ascending"),
            (r#"{"sum_ms": 1, "counts": [[5, 0]]}"#, "from 1"),
            (r#"{"sum_ms": 1, "counts": [[5, 18446744073709551615]]}"#, "2^53"),
            (r#"{"counts": []}"#, "sum_ms"),
        ] {
            let error = serde_json::from_str::<Sketch>(text).expect_err(text).to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}

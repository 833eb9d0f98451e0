//! The metrics of requests, one definition of each: whether an engine was simulated or real.

mod level;
mod measured;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use hdrhistogram::Histogram;

use self::level::Level;
pub use self::measured::Measured;
use crate::results::{LevelPoint, Run, Slo, TenantRow};

/// Groups of consecutive requests that metrics are kept of.
pub(crate) const BATCHES: u16 = 32;
/// The group of requests that are not measured.
pub(crate) const NOT_MEASURED: u16 = u16::MAX;
/// Stretches of a day that attainment is told of, and the fewest requests that tell whether the level holds.
const LEVELS: usize = 96;
const LEVEL_REQUESTS: u64 = 50;
/// Attainment from which on the level holds.
pub const HOLDS: f64 = 0.9;
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
/// Tenants that are told apart; further ones count as one.
const MAX_TENANTS: usize = 4096;
const OTHERS: &str = "(others)";

/// Which gaps between tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gap {
    /// Of thinking, the end marker included.
    Think,
    /// Of the answer.
    Output,
}

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
    /// Sum of the share of its time that each request would have taken alone; NaN where that is not known.
    speed: f64,
    ttfo: Histogram<u32>,
}

/// What a reader sees who reads at a constant speed (Andes, arXiv 2404.16283, section 3.1): when each token can be read at
/// the earliest, summed up.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reader {
    last_ms: f64,
    sum_ms: f64,
}

impl Reader {
    /// A token of the answer is there, of these the first or not.
    #[inline]
    pub(crate) fn token(&mut self, now_ms: f64, is_first: bool, slo: &Slo) {
        self.last_ms = if is_first { now_ms } else { now_ms.max(self.last_ms + 1e3 / slo.reading_tok_s) };
        self.sum_ms += self.last_ms;
    }
}

/// A request that has generated its last token. Times are milliseconds of the run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finished {
    /// Which group of consecutive requests it belongs to, below [`BATCHES`].
    pub(crate) batch: u16,
    /// Number of its tenant, as [`Metrics::tenant`] gave it.
    pub(crate) tenant: u32,
    pub(crate) arrival_ms: f64,
    pub(crate) first_token_ms: f64,
    /// NaN for a request that did not think.
    pub(crate) think_end_ms: f64,
    pub(crate) first_output_ms: f64,
    pub(crate) last_token_ms: f64,
    pub(crate) prompt_tokens: u32,
    /// With the end marker.
    pub(crate) think_tokens: u32,
    pub(crate) output_tokens: u32,
    pub(crate) reader: Reader,
    /// How long it would have taken in an engine of its own, and until its first answer token; NaN where that is not
    /// known.
    pub(crate) alone_ms: f64,
    pub(crate) alone_ttfo_ms: f64,
}

/// The metrics of a run as its requests go by: of fixed size, however long the run is.
pub(crate) struct Metrics {
    pub(crate) slo: Slo,
    measured: Measured,
    whole: Group,
    burst: Group,
    levels: Vec<Level>,
    batches: Vec<Group>,
    tenants: Vec<Tenant>,
    tenant_numbers: HashMap<Arc<str>, u32>,
    /// Of each request, the time to the first answer token beyond what the level adds for its prompt and thinking, and the mean gap
    /// between two answer tokens: what a level must allow to be attained.
    needed: [Histogram<u32>; 2],
    last_ms: f64,
}

pub(crate) fn us(ms: f64) -> u64 {
    ((ms * 1e3 + 0.5) as u64).clamp(1, LONGEST_US)
}

fn note(histogram: &mut Histogram<u32>, value_us: u64, count: u64) {
    histogram.record_n(value_us, u32::try_from(count).unwrap_or(u32::MAX)).expect("it grows with what is recorded");
}

impl Metrics {
    pub(crate) fn new(slo: Slo, measured: Measured) -> Self {
        let is_day = matches!(measured, Measured::Between { burst: Some(_), .. });
        Self {
            slo,
            measured,
            whole: Group::new(),
            burst: Group::new(),
            levels: (0..if is_day { LEVELS } else { 0 }).map(|_| Level::new()).collect(),
            batches: (0..BATCHES).map(|_| Group::new()).collect(),
            tenants: Vec::new(),
            tenant_numbers: HashMap::new(),
            needed: [(); 2].map(|()| Histogram::new(DIGITS).expect("few digits")),
            last_ms: 0.0,
        }
    }

    /// The group of consecutive requests that one belongs to.
    pub(crate) fn batch_of(&self, index: usize, arrival_ms: f64) -> u16 {
        self.measured.batch(index, arrival_ms)
    }

    /// Which requests are measured.
    pub(crate) fn measured(&self) -> Measured {
        self.measured
    }

    /// A request was turned away (503): it has attained nothing.
    pub(crate) fn turned_away(&mut self, batch: u16, arrival_ms: f64) {
        if batch == NOT_MEASURED {
            return;
        }
        self.whole.requests += 1;
        self.batches[usize::from(batch)].requests += 1;
        if self.is_of_burst(arrival_ms) {
            self.burst.requests += 1;
        }
        if let Some(level) = self.level(arrival_ms) {
            level.arrived += 1;
        }
    }

    fn is_of_burst(&self, arrival_ms: f64) -> bool {
        matches!(self.measured, Measured::Between { burst: Some([from, to]), .. } if (from..to).contains(&arrival_ms))
    }

    fn level(&mut self, arrival_ms: f64) -> Option<&mut Level> {
        let Measured::Between { from_ms, to_ms, .. } = self.measured else { return None };
        let share = (arrival_ms - from_ms) / (to_ms - from_ms);
        self.levels.get_mut((share * LEVELS as f64) as usize)
    }

    /// The number of a tenant.
    pub(crate) fn tenant(&mut self, name: &Arc<str>) -> u32 {
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

    /// So many equal gaps of requests of one group.
    #[inline]
    pub(crate) fn gaps_of_batch(&mut self, kind: Gap, batch: u16, gap_us: u64, count: u64) {
        let group = &mut self.batches[usize::from(batch)];
        note(if kind == Gap::Think { &mut group.itl_think } else { &mut group.itl_output }, gap_us, count);
    }

    /// So many equal gaps of all requests. They are counted apart from their groups, because neighbours in a step often
    /// have equal gaps.
    #[inline]
    pub(crate) fn gaps_of_all(&mut self, kind: Gap, gap_us: u64, count: u64) {
        let group = &mut self.whole;
        note(if kind == Gap::Think { &mut group.itl_think } else { &mut group.itl_output }, gap_us, count);
    }

    /// When the last token of all came.
    pub(crate) fn last_ms(&self) -> f64 {
        self.last_ms
    }

    /// The request generated its last token.
    pub(crate) fn finished(&mut self, request: &Finished) {
        let &Finished { batch, arrival_ms, think_tokens, output_tokens, .. } = request;
        let end_ms = request.last_token_ms;
        self.last_ms = self.last_ms.max(end_ms);
        if batch == NOT_MEASURED {
            return;
        }
        let since = |ms: f64| ms - arrival_ms;
        let (e2e_ms, ttfo_ms) = (since(end_ms), since(request.first_output_ms));
        let gaps = output_tokens.saturating_sub(1);
        let tpot_ms = if gaps == 0 { 0.0 } else { (end_ms - request.first_output_ms) / f64::from(gaps) };
        let slo = self.slo;
        let due_ms = if slo.alone > 0.0 && request.alone_ttfo_ms.is_finite() {
            slo.alone * request.alone_ttfo_ms
        } else {
            slo.due_ms(request.prompt_tokens, think_tokens)
        };
        let attained = ttfo_ms <= due_ms && tpot_ms <= slo.tpot_ms;
        let qoe = qoe(request.reader, output_tokens, arrival_ms + due_ms, slo.reading_tok_s);
        let allowed_ms = slo.due_ms(request.prompt_tokens, think_tokens) - slo.ttfo_ms;
        for (histogram, ms) in self.needed.iter_mut().zip([ttfo_ms - allowed_ms, tpot_ms]) {
            note(histogram, us(ms.max(0.0)), 1);
        }
        if let Some(level) = self.level(arrival_ms) {
            level.arrived += 1;
            level.attained += u64::from(attained);
            note(&mut level.ttfo, us(ttfo_ms), 1);
            note(&mut level.tpot, us(tpot_ms), 1);
        }
        let burst = self.is_of_burst(arrival_ms).then_some(&mut self.burst);
        for group in [&mut self.whole, &mut self.batches[usize::from(batch)]].into_iter().chain(burst) {
            note(&mut group.ttft, us(since(request.first_token_ms)), 1);
            note(&mut group.ttfo, us(ttfo_ms), 1);
            note(&mut group.e2e, us(e2e_ms), 1);
            if !request.think_end_ms.is_nan() {
                note(&mut group.ttot, us(request.first_output_ms - request.think_end_ms), 1);
            }
            group.requests += 1;
            group.attained += u64::from(attained);
            group.good += u64::from(qoe >= GOOD_QOE);
            group.qoe += qoe;
            group.tokens += u64::from(think_tokens + output_tokens);
        }
        let tenant = &mut self.tenants[request.tenant as usize];
        tenant.requests += 1;
        tenant.attained += u64::from(attained);
        tenant.service_tokens += u64::from(request.prompt_tokens + think_tokens + output_tokens);
        // Not `min` of a NaN, which would be 1.
        tenant.speed += if request.alone_ms > e2e_ms { 1.0 } else { request.alone_ms / e2e_ms };
        note(&mut tenant.ttfo, us(ttfo_ms), 1);
    }

    /// The run so far; the caller adds what only the engine knows.
    pub(crate) fn run(&mut self) -> Run {
        let mut metrics = self.whole.metrics();
        let seconds = (self.last_ms / 1e3).max(1e-9);
        // Below capacity, what a stretch of arrivals brings is served as fast as it arrives.
        let [from_ms, to_ms] = self.measured.stretch_ms(self.last_ms);
        let of_seconds = if self.levels.is_empty() { ((to_ms - from_ms) / 1e3).max(1e-9) } else { seconds };
        let recovery = self.recovery();
        let mut set = |key: &str, value: f64| metrics.insert(key.to_owned(), value);
        set("requests", self.whole.requests as f64);
        set("makespan_s", seconds);
        set("throughput_tok_s", self.whole.tokens as f64 / of_seconds);
        set("goodput_rps", self.whole.attained as f64 / of_seconds);
        if let Some(recovery_s) = recovery {
            set("recovery_s", recovery_s);
            let burst = self.burst.metrics();
            for (key, of) in [
                ("burst_attainment", "slo_attainment"),
                ("burst_ttfo_p50_ms", "ttfo_p50_ms"),
                ("burst_ttfo_p99_ms", "ttfo_p99_ms"),
            ] {
                burst.get(of).into_iter().for_each(|value| {
                    set(key, *value);
                });
            }
        }
        for (key, histogram) in ["ttfo_beyond_p95_ms", "tpot_p95_ms"].into_iter().zip(&self.needed) {
            if !histogram.is_empty() {
                set(key, histogram.value_at_quantile(0.95) as f64 / 1e3);
            }
        }
        if let Some(fairness) = jain(&self.tenants) {
            set("fairness_jain", fairness);
        }
        self.tenants.sort_by_key(|tenant| std::cmp::Reverse(tenant.service_tokens));
        Run {
            metrics,
            batches: self.batches.iter().map(Group::metrics).collect(),
            curves: self.whole.curves().map(|(name, histogram)| (name.to_owned(), curve(histogram))).into(),
            tenants: self.tenants.iter().filter(|tenant| tenant.requests > 0).take(TENANTS).map(row).collect(),
            levels: self.points(),
            ..Run::default()
        }
    }

    fn points(&self) -> Vec<LevelPoint> {
        let [from_ms, to_ms] = self.measured.stretch_ms(self.last_ms);
        let point = |(at, level): (usize, &Level)| LevelPoint {
            t_s: (from_ms + (to_ms - from_ms) * at as f64 / LEVELS as f64) / 1e3,
            arrived: level.arrived,
            attained: level.attained,
            ttfo_p50_ms: level.ttfo.value_at_quantile(0.5) as f64 / 1e3,
            tpot_p50_ms: level.tpot.value_at_quantile(0.5) as f64 / 1e3,
        };
        self.levels.iter().enumerate().map(point).collect()
    }

    /// Seconds from the end of the burst until the service level holds again, and goes on to hold, for those who arrive
    /// then. `None` without a burst; until the last arrival where it never holds again.
    fn recovery(&self) -> Option<f64> {
        let Measured::Between { from_ms, to_ms, burst: Some([_, burst_ends_ms]) } = self.measured else { return None };
        let start = |at: usize| from_ms + (to_ms - from_ms) * at as f64 / LEVELS as f64;
        let mut late_ms = burst_ends_ms;
        let (mut arrived, mut attained) = (0, 0);
        for at in (0..LEVELS).rev() {
            if start(at + 1) <= burst_ends_ms {
                break;
            }
            arrived += self.levels[at].arrived;
            attained += self.levels[at].attained;
            if arrived >= LEVEL_REQUESTS {
                if (attained as f64) < HOLDS * arrived as f64 {
                    late_ms = start(at + 1);
                    break;
                }
                (arrived, attained) = (0, 0);
            }
        }
        Some((late_ms - burst_ends_ms).max(0.0) / 1e3)
    }
}

/// Quality of experience (Andes, arXiv 2404.16283, equation 1): the area under the curve of tokens that the reader has had
/// over that of a delivery that begins at `due_ms` and never lags behind the reader, at most 1. The time looked at ends one
/// token's reading after the last, so that the last token counts as well.
fn qoe(reader: Reader, output_tokens: u32, due_ms: f64, reading_tok_s: f64) -> f64 {
    let tokens = f64::from(output_tokens);
    let pace_ms = 1e3 / reading_tok_s;
    let ideal_end_ms = due_ms + (tokens - 1.0) * pace_ms;
    let end_ms = reader.last_ms.max(ideal_end_ms) + pace_ms;
    let had = tokens * end_ms - reader.sum_ms;
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

    /// QoE of an answer whose tokens come at these times, due from 1 s on, for a reader of 10 tokens a second.
    fn qoe_of(times_ms: &[f64]) -> f64 {
        let slo = Slo { reading_tok_s: 10.0, ..Slo::default() };
        let mut reader = Reader::default();
        times_ms.iter().enumerate().for_each(|(number, ms)| reader.token(*ms, number == 0, &slo));
        qoe(reader, times_ms.len() as u32, 1000.0, slo.reading_tok_s)
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
        assert_eq!(jain(&[tenant(f64::NAN), tenant(1.0)]), None, "how fast a request went is not known");
    }
}

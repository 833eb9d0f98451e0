//! Load over time: steady, with a stretch in the middle that is measured, or a day with a burst.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_pcg::Pcg64;
use serde::{Deserialize, Serialize};

use crate::metrics::Measured;
use crate::trace::{Prefix, TraceRequest};

/// A stretch of a course.
///
/// ```
/// use meridian_bench::load::Stage;
///
/// assert_eq!("1.6x300".parse(), Ok(Stage { from: 1.6, to: 1.6, seconds: 300.0 }));
/// assert_eq!("0.6-1.6x900".parse(), Ok(Stage { from: 0.6, to: 1.6, seconds: 900.0 }));
/// assert!("1.6".parse::<Stage>().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Factor of the rate at its beginning.
    pub from: f64,
    /// And at its end: a ramp, where they differ.
    pub to: f64,
    /// How long it lasts.
    pub seconds: f64,
}

impl Stage {
    /// A factor that stays for so long.
    #[must_use]
    pub fn flat(factor: f64, seconds: f64) -> Self {
        Self { from: factor, to: factor, seconds }
    }

    /// The time at the factor 1 in which as many requests arrive.
    fn work_s(&self) -> f64 {
        f64::midpoint(self.from, self.to) * self.seconds
    }

    /// When as many requests have arrived as in `work_s` at the factor 1: the root of the integral of the rate.
    fn time_of(&self, work_s: f64) -> f64 {
        let slope = (self.to - self.from) / self.seconds;
        if slope == 0.0 {
            return work_s / self.from;
        }
        ((self.from.powi(2) + 2.0 * slope * work_s).max(0.0).sqrt() - self.from) / slope
    }
}

impl std::str::FromStr for Stage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<f64>().ok();
        let stage = || {
            let (factors, seconds) = text.split_once('x')?;
            let (from, to) = factors.split_once('-').unwrap_or((factors, factors));
            Some(Self { from: number(from)?, to: number(to)?, seconds: number(seconds)? })
        };
        let holds = |stage: &Self| {
            let factors = 0.0..=100.0;
            factors.contains(&stage.from) && factors.contains(&stage.to) && (1e-3..=1e7).contains(&stage.seconds)
        };
        stage().filter(holds).ok_or_else(|| {
            format!("{text}: expected FACTORxSECONDS or FROM-TOxSECONDS, for example 1.6x300, factors from 0 to 100")
        })
    }
}

/// Load over time: factors of a rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Course {
    /// One after the other.
    pub stages: Vec<Stage>,
    /// Which requests are measured.
    pub measured: Measured,
}

/// Residence times before the measured stretch and after it.
const WARM_UP: f64 = 3.0;
const TAIL: f64 = 1.0;

impl Course {
    /// A steady load: `residences` times `residence_s` are measured, three residences after the start. One more residence
    /// follows, so that the last measured requests are served under the same load as the first.
    #[must_use]
    pub fn steady(residence_s: f64, residences: f64) -> Self {
        let (from_s, for_s) = (WARM_UP * residence_s, residences * residence_s);
        let measured = Measured::Between { from_ms: from_s * 1e3, to_ms: (from_s + for_s) * 1e3, burst: None };
        Self { stages: vec![Stage::flat(1.0, from_s + for_s + TAIL * residence_s)], measured }
    }

    /// Everything that arrives in these stages. The burst is the stretch between the first and the last stage whose factor
    /// is above 1.
    #[must_use]
    pub fn day(stages: Vec<Stage>) -> Self {
        let ends: Vec<f64> = stages
            .iter()
            .scan(0.0, |at, stage| {
                *at += stage.seconds * 1e3;
                Some(*at)
            })
            .collect();
        let is_high = |stage: &Stage| stage.from.max(stage.to) > 1.0;
        let burst = stages.iter().position(is_high).zip(stages.iter().rposition(is_high));
        let burst = burst.map(|(first, last)| [ends[first] - stages[first].seconds * 1e3, ends[last]]);
        let to_ms = ends.last().copied().unwrap_or(0.0);
        Self { stages, measured: Measured::Between { from_ms: 0.0, to_ms, burst } }
    }

    /// How many requests arrive at that rate.
    #[must_use]
    pub fn requests(&self, rate: f64) -> f64 {
        rate * self.stages.iter().map(Stage::work_s).sum::<f64>()
    }

    /// When the request arrives that arrives at `at_s` under the factor 1; `None` after the last stage.
    #[must_use]
    pub fn time_of(&self, at_s: f64) -> Option<f64> {
        let (mut work_s, mut begins_s) = (at_s, 0.0);
        for stage in &self.stages {
            if work_s < stage.work_s() {
                return Some(begins_s + stage.time_of(work_s));
            }
            work_s -= stage.work_s();
            begins_s += stage.seconds;
        }
        None
    }
}

/// Requests of a trace that follow each other and stay together when it is repeated.
const BLOCK: usize = 64;

/// A trace without end and without a trend: blocks of requests in a drawn order, each stretched to the mean rate of the whole,
/// so that gaps within a block stay in proportion and hours of day do not. Where prompts share prefixes, whose order means
/// something, blocks stay in order. Prefixes of one pass are not those of another.
pub(crate) struct Endless {
    requests: Vec<TraceRequest>,
    order: Vec<usize>,
    shares_prefixes: bool,
    rng: Pcg64,
    at: usize,
    pass: u64,
    /// Arrival of the latest.
    now_s: f64,
    /// Of each request, the time since the one before it.
    gaps_s: Vec<f64>,
}

impl Endless {
    /// Of requests that are sorted by arrival, at least one.
    pub(crate) fn new(mut requests: Vec<TraceRequest>, seed: u64) -> Self {
        spread(&mut requests);
        let first_s = requests.first().map_or(0.0, |request| request.arrival_s);
        let last_s = requests.last().map_or(0.0, |request| request.arrival_s);
        let mean_gap_s = ((last_s - first_s) / (requests.len().max(2) - 1) as f64).max(1e-9);
        let mut gaps_s = Vec::with_capacity(requests.len());
        for (number, block) in requests.chunks(BLOCK).enumerate() {
            let before_s = if number == 0 { first_s } else { requests[number * BLOCK - 1].arrival_s };
            let of_block = std::iter::once(before_s).chain(block.iter().map(|request| request.arrival_s));
            let own: Vec<f64> = of_block.collect::<Vec<_>>().windows(2).map(|pair| pair[1] - pair[0]).collect();
            let sum_s: f64 = own.iter().sum();
            let mean = |gap_s: f64| if sum_s > 0.0 { gap_s / sum_s * block.len() as f64 } else { 1.0 };
            gaps_s.extend(own.into_iter().map(|gap_s| mean(gap_s) * mean_gap_s));
        }
        let mut endless = Self {
            order: (0..requests.len()).collect(),
            shares_prefixes: requests.iter().any(|request| request.prefix != Prefix::None),
            rng: Pcg64::seed_from_u64(seed),
            at: 0,
            pass: 0,
            now_s: 0.0,
            gaps_s,
            requests,
        };
        endless.shuffle();
        endless
    }

    fn shuffle(&mut self) {
        if !self.shares_prefixes {
            let all: Vec<usize> = (0..self.requests.len()).collect();
            let mut blocks: Vec<&[usize]> = all.chunks(BLOCK).collect();
            blocks.shuffle(&mut self.rng);
            self.order = blocks.concat();
        }
    }
}

/// Part the arrivals that a trace has at the same time, evenly until the next: its clock ticks (Mooncake's every three
/// seconds), its clients do not.
fn spread(requests: &mut [TraceRequest]) {
    let mut from = 0;
    while from < requests.len() {
        let at_s = requests[from].arrival_s;
        let until = from + requests[from..].iter().take_while(|request| request.arrival_s == at_s).count();
        if let Some(next_s) = requests.get(until).map(|next| next.arrival_s) {
            let step_s = (next_s - at_s) / (until - from) as f64;
            for (place, request) in requests[from..until].iter_mut().enumerate() {
                request.arrival_s += place as f64 * step_s;
            }
        }
        from = until;
    }
}

impl Iterator for Endless {
    type Item = TraceRequest;

    fn next(&mut self) -> Option<TraceRequest> {
        if self.at == self.order.len() {
            (self.at, self.pass) = (0, self.pass + 1);
            self.shuffle();
        }
        let index = self.order[self.at];
        let mut request = self.requests.get(index)?.clone();
        self.now_s += self.gaps_s[index];
        self.at += 1;
        request.arrival_s = self.now_s;
        // No content of one pass is that of another.
        let of_pass = |id: u64| id ^ self.pass.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if self.pass > 0 {
            request.prefix = match request.prefix {
                Prefix::None => Prefix::None,
                Prefix::Blocks { tokens, ids } => {
                    Prefix::Blocks { tokens, ids: ids.iter().map(|id| of_pass(*id)).collect() }
                }
                Prefix::Ranges { session, tokens, ranges } => {
                    Prefix::Ranges { session: of_pass(session), tokens, ranges }
                }
                Prefix::Session { id, turn } => Prefix::Session { id: of_pass(id), turn },
            };
        }
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_has_its_share_of_the_requests() {
        let course = Course::day(vec![Stage::flat(0.5, 100.0), Stage { from: 1.0, to: 3.0, seconds: 10.0 }]);
        assert_eq!(course.measured, Measured::Between { from_ms: 0.0, to_ms: 110e3, burst: Some([100e3, 110e3]) });
        assert!((course.requests(2.0) - 140.0).abs() < 1e-9);
        assert_eq!(course.time_of(25.0), Some(50.0));
        // Of the ramp's 20 seconds of work, 7.5 are done at half of its time, where the factor is 2.
        assert!((course.time_of(57.5).expect("in the ramp") - 105.0).abs() < 1e-9);
        assert_eq!(course.time_of(70.0), None);
        let times: Vec<f64> = (0..700).filter_map(|at| course.time_of(f64::from(at) / 10.0)).collect();
        assert!(times.is_sorted() && times.len() == 700);
    }

    #[test]
    fn a_steady_course_measures_its_middle() {
        let Measured::Between { from_ms, to_ms, burst } = Course::steady(10.0, 20.0).measured else { panic!() };
        assert_eq!((from_ms, to_ms, burst), (30e3, 230e3, None));
        assert_eq!(Course::steady(10.0, 20.0).requests(2.0), 480.0);
    }

    #[test]
    fn a_trace_comes_in_blocks_at_its_mean_rate_again_and_again() {
        // The second half comes four times as fast.
        let arrival_s = |i: u32| if i < 128 { f64::from(i) * 2.0 } else { 256.0 + f64::from(i - 128) * 0.5 };
        let trace: Vec<TraceRequest> = (0..256)
            .map(|i| TraceRequest { arrival_s: arrival_s(i), prompt_tokens: i + 1, ..TraceRequest::default() })
            .collect();
        let mean_s = arrival_s(255) / 255.0;
        let long: Vec<TraceRequest> = Endless::new(trace, 1).take(768).collect();
        assert!(long.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s));
        for block in long.chunks(64).collect::<Vec<_>>().windows(2) {
            let took_s = block[1][63].arrival_s - block[0][63].arrival_s;
            assert!((took_s - 64.0 * mean_s).abs() < 1e-6, "{took_s}");
        }
        for pass in 0..3 {
            let lengths: Vec<u32> = long[pass * 256..][..256].iter().map(|request| request.prompt_tokens).collect();
            let mut sorted = lengths.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (1..=256).collect::<Vec<u32>>());
            let apart = lengths.windows(2).filter(|pair| pair[0] + 1 != pair[1]).count();
            assert!((1..4).contains(&apart), "blocks stay together: {apart}");
        }
    }

    #[test]
    fn arrivals_at_a_tick_of_the_clock_are_spread() {
        let at = |arrival_s| TraceRequest { arrival_s, ..TraceRequest::default() };
        let mut requests = [0.0, 0.0, 0.0, 3.0, 4.0, 4.0].map(at);
        spread(&mut requests);
        assert_eq!(requests.map(|request| request.arrival_s), [0.0, 1.0, 2.0, 3.0, 4.0, 4.0]);
    }

    #[test]
    fn prefixes_of_one_pass_are_not_those_of_another() {
        let blocks = |ids: &[u64]| Prefix::Blocks { tokens: 16, ids: ids.into() };
        let trace = [blocks(&[1]), blocks(&[1, 2])].map(|prefix| TraceRequest { prefix, ..TraceRequest::default() });
        let long: Vec<Prefix> = Endless::new(trace.to_vec(), 1).take(4).map(|request| request.prefix).collect();
        let ids = |at: usize| match &long[at] {
            Prefix::Blocks { ids, .. } => ids.to_vec(),
            other => panic!("{other:?}"),
        };
        assert_eq!((ids(0), ids(1)), (vec![1], vec![1, 2]));
        assert_eq!(ids(2)[0], ids(3)[0], "the order within a pass stays");
        assert_ne!(ids(0)[0], ids(2)[0]);
    }
}

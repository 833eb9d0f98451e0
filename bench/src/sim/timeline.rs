//! The state of all engines over time, in a number of points that does not grow with the run.

use crate::results::TimelinePoint;

/// Points of a timeline.
const POINTS: usize = 1024;
/// What a point covers at first, milliseconds; doubled whenever there would be too many.
const FIRST_STRETCH_MS: f64 = 100.0;

/// State of an engine in one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) engine: usize,
    pub(super) now_ms: f64,
    pub(super) step_ms: f64,
    pub(super) waiting: u32,
    pub(super) prefill: u32,
    pub(super) think: u32,
    pub(super) output: u32,
    pub(super) used_blocks: u32,
    pub(super) cached_blocks: u32,
    pub(super) blocks: u32,
}

/// What each state of a timeline was in a stretch of time, times the milliseconds that it was so.
type Stretch = [f64; 6];

fn add(stretch: &mut Stretch, values: &Stretch, ms: f64) {
    stretch.iter_mut().zip(values).for_each(|(sum, value)| *sum += value * ms);
}

/// Takes in the steps of every engine.
pub(super) struct Timeline {
    stretches: Vec<Stretch>,
    stretch_ms: f64,
    /// Waiting requests of each engine now, and the most of all together.
    waiting: Vec<u32>,
    waiting_most: u32,
}

impl Timeline {
    pub(super) fn new(engines: usize) -> Self {
        Self { stretches: Vec::new(), stretch_ms: FIRST_STRETCH_MS, waiting: vec![0; engines], waiting_most: 0 }
    }

    /// An engine begins a step.
    pub(super) fn step(&mut self, sample: &Sample) {
        let Sample { engine, now_ms, step_ms, waiting, prefill, think, output, used_blocks, cached_blocks, blocks } =
            *sample;
        self.waiting[engine] = waiting;
        self.waiting_most = self.waiting_most.max(self.waiting.iter().sum());
        let end_ms = now_ms + step_ms;
        while end_ms / self.stretch_ms >= POINTS as f64 {
            let mut pairs = Vec::with_capacity(POINTS);
            for pair in self.stretches.chunks(2) {
                let mut sum = pair[0];
                pair[1..].iter().for_each(|other| add(&mut sum, other, 1.0));
                pairs.push(sum);
            }
            self.stretches = pairs;
            self.stretch_ms *= 2.0;
        }
        // Shares are of the KV blocks of all engines.
        let share = |count: u32| f64::from(count) / f64::from(blocks.max(1)) / self.waiting.len() as f64;
        let [waiting, prefill, think, output] = [waiting, prefill, think, output].map(f64::from);
        let values = [waiting, prefill, think, output, share(used_blocks), share(cached_blocks)];
        let (first, last) = ((now_ms / self.stretch_ms) as usize, (end_ms / self.stretch_ms) as usize);
        if last >= self.stretches.len() {
            self.stretches.resize(last + 1, Stretch::default());
        }
        for at in first..=last {
            let (from, to) = (at as f64 * self.stretch_ms, (at + 1) as f64 * self.stretch_ms);
            add(&mut self.stretches[at], &values, (end_ms.min(to) - now_ms.max(from)).max(0.0));
        }
    }

    /// The most requests that waited at a time.
    pub(super) fn waiting_most(&self) -> u32 {
        self.waiting_most
    }

    /// Means from one time to another: waiting, running and the share of KV blocks that requests held.
    pub(super) fn means(&self, [from_ms, to_ms]: [f64; 2]) -> [f64; 3] {
        let at = |ms: f64| ((ms / self.stretch_ms) as usize).min(self.stretches.len());
        // Whole stretches: of a long run these are thousandths.
        let chosen = &self.stretches[at(from_ms)..self.stretches.len().min(at(to_ms) + 1)];
        let mean = |i: usize| chosen.iter().map(|stretch| stretch[i]).sum::<f64>() / (to_ms - from_ms).max(1e-9);
        [mean(0), mean(1) + mean(2) + mean(3), mean(4)]
    }

    /// The points of a run that lasted until `last_ms`.
    pub(super) fn points(&self, last_ms: f64) -> Vec<TimelinePoint> {
        let point = |(i, stretch): (usize, &Stretch)| {
            let from_ms = i as f64 * self.stretch_ms;
            // The last one is not over when the run is.
            let ms = self.stretch_ms.min(last_ms - from_ms);
            let [waiting, prefill, think, output, kv_used, kv_cached] = stretch.map(|sum| sum / ms);
            TimelinePoint { t_s: from_ms / 1e3, waiting, prefill, think, output, kv_used, kv_cached }
        };
        let over = |(i, _): &(usize, &Stretch)| *i as f64 * self.stretch_ms + 1e-6 < last_ms;
        self.stretches.iter().enumerate().take_while(over).map(point).collect()
    }
}

//! Distributions of a checked workload, built once.

use rand::RngExt;
use rand_distr::{Beta, Distribution, LogNormal};
use rand_pcg::Pcg64;

use super::streams::{Stream, Streams};
use super::{Mode, Prompt, Tenants};

/// Where in cumulative weights a uniform draw falls. Own code because the weighted index of `rand` refuses what a
/// workload allows, a single entry of weight 0, and because tenants need the weights themselves as well.
pub(super) struct Choice {
    cumulative: Vec<f64>,
}

impl Choice {
    pub(super) fn new(weights: impl IntoIterator<Item = f64>) -> Self {
        let mut sum = 0.0;
        let cumulative = weights.into_iter().map(|weight| {
            sum += weight;
            sum
        });
        Self { cumulative: cumulative.collect() }
    }

    pub(super) fn draw(&self, rng: &mut Pcg64) -> usize {
        let last = self.cumulative.len().saturating_sub(1);
        let at = rng.random::<f64>() * self.cumulative.last().copied().unwrap_or(0.0);
        self.cumulative.partition_point(|sum| *sum <= at).min(last)
    }
}

/// Share of thinking in the generated tokens.
pub(super) struct Shares {
    choice: Choice,
    /// `None` for a mode that does not think.
    shares: Vec<Option<Beta<f64>>>,
}

impl Shares {
    pub(super) fn new(modes: &[Mode]) -> Self {
        Self {
            choice: Choice::new(modes.iter().map(|mode| mode.weight)),
            shares: modes
                .iter()
                .map(|mode| {
                    let (a, b) = (mode.think_share * mode.concentration, (1.0 - mode.think_share) * mode.concentration);
                    // Both are positive in a checked workload, but for a share of 0.
                    Beta::new(a, b).ok()
                })
                .collect(),
        }
    }

    pub(super) fn draw(&self, rng: &mut Pcg64) -> f64 {
        self.draw_with_mode(rng).1
    }

    fn draw_with_mode(&self, rng: &mut Pcg64) -> (usize, f64) {
        let mode = self.choice.draw(rng);
        (mode, self.shares.get(mode).copied().flatten().map_or(0.0, |beta| beta.sample(rng)))
    }
}

/// Thinking and answer of one request.
pub(super) struct Phases {
    shares: Shares,
    generated: Vec<LogNormal<f64>>,
    most: f64,
}

impl Phases {
    pub(super) fn new(modes: &[Mode], most: u32) -> Self {
        Self {
            shares: Shares::new(modes),
            generated: modes.iter().map(|mode| log_normal(mode.generated_median, mode.generated_sigma)).collect(),
            most: f64::from(most),
        }
    }

    /// (think, output), tokens; the output at least 1.
    pub(super) fn draw(&self, rng: &mut Pcg64, scale: f64) -> (u32, u32) {
        let (mode, share) = self.shares.draw_with_mode(rng);
        let generated = (self.generated[mode].sample(rng) * scale).round().clamp(1.0, self.most);
        let think = (generated * share).round().min(generated - 1.0);
        (think as u32, (generated - think) as u32)
    }
}

/// Log-normal body, bounded Pareto tail.
pub(super) struct Prompts {
    body: LogNormal<f64>,
    prompt: Prompt,
}

impl Prompts {
    pub(super) fn new(prompt: &Prompt) -> Self {
        Self { body: log_normal(prompt.median, prompt.sigma), prompt: prompt.clone() }
    }

    pub(super) fn draw(&self, rng: &mut Pcg64, scale: f64) -> u32 {
        let Prompt { tail_share, tail_from, tail_to, tail_alpha, most_tokens, .. } = self.prompt;
        let length = if rng.random::<f64>() < tail_share {
            // Inverse of the distribution function between the two ends.
            let ends = 1.0 - (tail_from / tail_to).powf(tail_alpha);
            tail_from * (1.0 - rng.random::<f64>() * ends).powf(-1.0 / tail_alpha)
        } else {
            self.body.sample(rng)
        };
        (length * scale).round().clamp(1.0, f64::from(most_tokens)) as u32
    }
}

/// Who sends a request, and how long this one's texts are.
pub(super) struct Crowd {
    choice: Choice,
    names: Vec<std::sync::Arc<str>>,
    scales: Vec<f64>,
}

impl Crowd {
    pub(super) fn new(tenants: &Tenants, streams: Streams) -> Self {
        let weights: Vec<f64> = (1..=tenants.count).map(|rank| f64::from(rank).powf(-tenants.exponent)).collect();
        let spread = log_normal(1.0, tenants.scale_sigma);
        let scale = |index| spread.sample(&mut streams.rng(Stream::TenantScale, index, 0));
        let mut scales: Vec<f64> = (0..u64::from(tenants.count)).map(scale).collect();
        // A few tenants send most requests: without this, their scales would move the mean of the whole trace.
        let sum: f64 = weights.iter().sum();
        let mean: f64 = weights.iter().zip(&scales).map(|(weight, scale)| weight * scale).sum::<f64>() / sum;
        scales.iter_mut().for_each(|scale| *scale /= mean);
        let names = match tenants.count {
            0 | 1 => vec!["".into(); tenants.count as usize],
            count => (1..=count).map(|rank| format!("t{rank}").into()).collect(),
        };
        Self { choice: Choice::new(weights), names, scales }
    }

    pub(super) fn draw(&self, rng: &mut Pcg64) -> usize {
        self.choice.draw(rng)
    }

    pub(super) fn name(&self, tenant: usize) -> std::sync::Arc<str> {
        self.names[tenant].clone()
    }

    pub(super) fn scale(&self, tenant: usize) -> f64 {
        self.scales[tenant]
    }
}

pub(super) fn log_normal(median: f64, sigma: f64) -> LogNormal<f64> {
    LogNormal::new(median.ln(), sigma).expect("a checked workload has a finite, non-negative sigma")
}

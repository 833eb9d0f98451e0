//! How many requests could be in time at all, with every arrival and every length known ahead: a bound for any scheduler.
//!
//! A relaxation. The engine is one machine whose time can be divided at will; a request needs at least its work, between its
//! arrival and the latest time at which it may end; part of a request counts for that part. The most that fits is then found by
//! taking requests in order of their work, the least first, each as far as it fits beside those before it: what fits together is
//! a polymatroid, because windows of time are intervals (Edmonds, "Submodular functions, matroids, and certain polyhedra", 1970).
//!
//! Requests whose prompts share anything, or that follow each other, have no bound: what they share is computed once.
//!
//! The work is what the request adds to the steps of the engine at least: its operations, the KV that it reads, and its share of
//! reading the weights, which a step does once. That share is least with every seat taken, or with all KV memory taken. How much
//! of a step is said to be weights and how much operations is free, as the longer of the two counts; each choice gives a bound,
//! and the least of them counts.

use crate::results::Slo;
use crate::sim::EngineConfig;
use crate::trace::{Prefix, TraceRequest};

/// Slots that time is divided into. Windows are widened to whole slots.
const SLOTS: usize = 256;
/// Slots of a block, by which a row of slots is searched.
const BLOCK: usize = 16;
/// Parts that are tried.
const PARTS: [f64; 3] = [0.0, 0.5, 1.0];

/// The most of these requests that any scheduler could serve within the service levels without cutting thoughts, as a share of
/// those that fit into KV memory; 1 without any. `None` where prompts share prefixes.
#[must_use]
pub fn most_in_time(engine: &EngineConfig, mut requests: Vec<TraceRequest>, slo: &Slo) -> Option<f64> {
    if requests.iter().any(|request| request.prefix != Prefix::None) {
        return None;
    }
    // The simulator refuses the others, and measures nothing of them.
    let most = u64::from(engine.kv_blocks - 1) * u64::from(engine.block_tokens);
    let tokens = |request: &TraceRequest| {
        let marker = u32::from(request.think_tokens > 0);
        let all = [request.prompt_tokens.max(1), request.think_tokens, marker, request.output_tokens.max(1)];
        all.into_iter().map(u64::from).sum::<u64>()
    };
    requests.retain(|request| tokens(request) <= most);
    let requests = requests.as_slice();
    let mut least = 1.0f64;
    for weights in PARTS {
        for seats in if weights > 0.0 { &PARTS[..] } else { &PARTS[..1] } {
            let parts = Parts { weights, seats: *seats };
            least = least.min(share(engine, requests, slo, parts));
        }
    }
    Some(least)
}

/// How a step is divided.
#[derive(Clone, Copy)]
struct Parts {
    /// The part of a step that is reading weights; the rest is operations.
    weights: f64,
    /// The part of the weights that is shared by seats; the rest is shared by KV memory.
    seats: f64,
}

struct Job {
    arrival_ms: f64,
    ends_ms: f64,
    work_ms: f64,
}

fn share(engine: &EngineConfig, requests: &[TraceRequest], slo: &Slo, parts: Parts) -> f64 {
    if requests.is_empty() {
        return 1.0;
    }
    let mut jobs: Vec<Job> = requests.iter().filter_map(|request| job(engine, request, slo, parts)).collect();
    jobs.sort_by(|a, b| a.work_ms.total_cmp(&b.work_ms));
    let begins_ms = jobs.iter().map(|job| job.arrival_ms).fold(f64::INFINITY, f64::min);
    let ends_ms = jobs.iter().map(|job| job.ends_ms).fold(0.0, f64::max);
    let slot_ms = ((ends_ms - begins_ms) / SLOTS as f64).max(1e-6);
    let mut room = Room::new(slot_ms);
    let slot_of = |ms: f64| (((ms - begins_ms) / slot_ms) as usize).min(SLOTS - 1);
    let fits: f64 = jobs
        .iter()
        .map(|job| {
            let taken_ms = room.take(slot_of(job.arrival_ms), slot_of(job.ends_ms), job.work_ms);
            if job.work_ms > 0.0 { taken_ms / job.work_ms } else { 1.0 }
        })
        .sum();
    fits / requests.len() as f64
}

/// The least work of a request and its window; `None` where it is late even alone.
fn job(engine: &EngineConfig, request: &TraceRequest, slo: &Slo, parts: Parts) -> Option<Job> {
    let step = &engine.step;
    let (prompt, think, output) = (request.prompt_tokens.max(1), request.think_tokens, request.output_tokens.max(1));
    let before_answer = think + u32::from(think > 0);
    // Steps that are faster than the model says.
    let fastest = engine.jitter.iter().fold(1.0f64, |least, factor| least.min(f64::from(*factor)));
    let chunk = engine.max_num_batched_tokens;
    let alone_ms = step.alone_ms(prompt, before_answer + 1, chunk);
    let due_ms = if slo.alone > 0.0 { slo.alone * alone_ms } else { slo.due_ms(prompt, before_answer) };
    if alone_ms * fastest > due_ms {
        return None;
    }
    let decodes = f64::from(before_answer + output - 1);
    let mean_context = f64::from(prompt) + decodes / 2.0;
    let kv_tokens = f64::from(engine.kv_blocks) * f64::from(engine.block_tokens);
    let share = parts.seats / f64::from(engine.seats().max(1)) + (1.0 - parts.seats) * mean_context / kv_tokens;
    let operations_ms = (1.0 - parts.weights) * step.token_ms;
    // With the host's time hidden, the device's is what counts.
    let (host_ms, host_request_ms) = if step.hides_host { (0.0, 0.0) } else { (step.fixed_ms, step.request_ms) };
    let decode_ms = (parts.weights * step.weights_ms + host_ms) * share
        + operations_ms
        + host_request_ms
        + step.kv_token_ms * mean_context;
    let pairs = if prompt > 1 { f64::from(prompt) * (f64::from(prompt) + 1.0) / 2.0 } else { 0.0 };
    let prompt_ms = operations_ms * f64::from(prompt) + step.attention_ms * pairs;
    let arrival_ms = request.arrival_s * 1e3;
    Some(Job {
        arrival_ms,
        ends_ms: arrival_ms + due_ms + slo.tpot_ms * f64::from(output - 1),
        work_ms: fastest * (prompt_ms + decodes * decode_ms),
    })
}

/// The time that is left in every interval of slots, milliseconds: from the first slot to the last, the whole blocks of a row
/// with what was taken of all their slots and the least that is left of any.
struct Room {
    left_ms: Vec<[f64; SLOTS]>,
    taken_ms: Vec<[f64; SLOTS / BLOCK]>,
    least_ms: Vec<[f64; SLOTS / BLOCK]>,
}

impl Room {
    fn new(slot_ms: f64) -> Self {
        let mut room = Self {
            left_ms: vec![[f64::INFINITY; SLOTS]; SLOTS],
            taken_ms: vec![[0.0; SLOTS / BLOCK]; SLOTS],
            least_ms: vec![[f64::INFINITY; SLOTS / BLOCK]; SLOTS],
        };
        for first in 0..SLOTS {
            for last in first..SLOTS {
                room.left_ms[first][last] = slot_ms * (last - first + 1) as f64;
            }
            for block in 0..SLOTS / BLOCK {
                room.find_least(first, block);
            }
        }
        room
    }

    fn find_least(&mut self, first: usize, block: usize) {
        let slots = &self.left_ms[first][block * BLOCK..(block + 1) * BLOCK];
        self.least_ms[first][block] = slots.iter().copied().fold(f64::INFINITY, f64::min) - self.taken_ms[first][block];
    }

    /// Take up to `work_ms` from these slots, as far as every interval around them has room. Returns what was taken.
    fn take(&mut self, from: usize, to: usize, work_ms: f64) -> f64 {
        let block = to / BLOCK;
        let mut most_ms = work_ms;
        for first in 0..=from {
            let own = &self.left_ms[first][to..(block + 1) * BLOCK];
            let own_ms = own.iter().copied().fold(f64::INFINITY, f64::min) - self.taken_ms[first][block];
            let others = self.least_ms[first][block + 1..].iter().copied().fold(f64::INFINITY, f64::min);
            most_ms = most_ms.min(own_ms).min(others);
        }
        let taken_ms = most_ms.max(0.0);
        if taken_ms > 0.0 {
            for first in 0..=from {
                self.left_ms[first][to..(block + 1) * BLOCK].iter_mut().for_each(|left| *left -= taken_ms);
                self.find_least(first, block);
                self.taken_ms[first][block + 1..].iter_mut().for_each(|taken| *taken += taken_ms);
                self.least_ms[first][block + 1..].iter_mut().for_each(|least| *least -= taken_ms);
            }
        }
        taken_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::StepModel;

    fn engine() -> EngineConfig {
        let step = StepModel { weights_ms: 10.0, token_ms: 0.1, ..StepModel::default() };
        EngineConfig { step: StepModel { hides_host: true, ..step }, max_num_seqs: 10, ..EngineConfig::default() }
    }

    fn request(arrival_s: f64, prompt_tokens: u32, output_tokens: u32) -> TraceRequest {
        TraceRequest { arrival_s, prompt_tokens, output_tokens, ..TraceRequest::default() }
    }

    #[test]
    fn few_requests_are_all_in_time() {
        let requests: Vec<_> = (0..50).map(|i| request(f64::from(i), 100, 20)).collect();
        assert_eq!(most_in_time(&engine(), requests, &Slo::default()), Some(1.0));
        assert_eq!(most_in_time(&engine(), Vec::new(), &Slo::default()), Some(1.0));
    }

    #[test]
    fn of_equal_requests_that_come_together_as_many_fit_as_the_time_has_room_for() {
        // Ten at a time take a step of 10 ms for each token: 101 steps, and they must end within 5 s and 100 gaps of 50 ms.
        let requests: Vec<_> = (0..2000).map(|_| request(0.0, 1, 101)).collect();
        let slo = Slo { prompt_ms: 0.0, ..Slo::default() };
        let bound = most_in_time(&engine(), requests, &slo).expect("no prefixes");
        let expected = 10.0 * (10_000.0 / 1000.0) / 2000.0;
        assert!((bound / expected - 1.0).abs() < 0.02, "{bound}, expected {expected}");
    }

    #[test]
    fn a_request_that_is_late_even_alone_is_none_that_could_be_in_time() {
        let requests = vec![request(0.0, 100_000, 2), request(0.0, 10, 2)];
        let slo = Slo { prompt_ms: 0.0, ..Slo::default() };
        assert_eq!(most_in_time(&engine(), requests, &slo), Some(0.5));
    }

    #[test]
    fn the_cheap_ones_are_served_in_a_burst_and_all_after_it() {
        let burst = (0..1000).map(|i| request(0.0, if i % 2 == 0 { 100 } else { 1000 }, 2));
        let after = (0..100).map(|i| request(100.0 + f64::from(i), 1000, 2));
        let requests: Vec<_> = burst.chain(after).collect();
        let slo = Slo { prompt_ms: 0.0, ..Slo::default() };
        let bound = most_in_time(&engine(), requests, &slo).expect("no prefixes");
        // 500 cheap ones need the whole of 5 s; windows are whole slots.
        assert!((600.0 / 1100.0..610.0 / 1100.0).contains(&bound), "{bound}");
    }

    #[test]
    fn no_scheduler_is_better_than_the_bound() {
        use crate::load::{Course, Stage};
        use crate::replay::{Input, MaxTokens, Options, Rate, bound, replay};
        use crate::trace::Workload;

        let levels = "[model]\nstrips_reasoning = true\n[service_levels.a]\ndefault = true";
        let config = meridian_core::MeridianConfig::from_toml(levels).expect("valid");
        let stages = vec![Stage::flat(0.6, 60.0), Stage::flat(2.5, 60.0), Stage::flat(0.6, 120.0)];
        let workload = Workload::from_toml("preset = 'reasoning-chat'\nsessions.share = 0.0").expect("a workload");
        let workload = Box::new(workload);
        let input = Input::Generated { name: "t".into(), workload, requests: 1 };
        for rate in [2.0, 6.0] {
            let policies = ["srpt", "edf", "balanced"].map(|name| name.parse().expect("a policy")).to_vec();
            let options = Options {
                engine: crate::sim::preset::named("8b-a100").expect("a preset"),
                policies,
                rates: vec![Rate::PerSecond(rate)],
                course: Some(Course::day(stages.clone())),
                max_tokens: MaxTokens::Exact,
                deadlines_of_slo: true,
                ..Options::stock(Slo::default(), vec![1], config.clone(), String::new())
            };
            let most = bound(&options, &input).expect("it has requests").expect("they arrive");
            for run in replay(&options, &input, &mut |_, _, _| ()).expect("it runs").runs {
                let found = run.metrics["slo_attainment"];
                assert!(found <= most + 1e-9, "{} at {rate}: {found}, bound {most}", run.policy);
            }
            assert!(rate < 5.0 || most < 1.0, "{most}");
        }
    }
}

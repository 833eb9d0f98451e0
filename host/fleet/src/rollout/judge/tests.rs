//! Guards on fleets whose truth is known.

use meridian_core::latency::LatencyCounts;
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use rand_pcg::Pcg64;

use super::*;

const BEFORE: usize = 10;

/// Engines that differ by 30 %, load that drifts, noise of each with some memory; the first `new` of ten change.
struct World {
    random: Pcg64,
    levels: Vec<f64>,
    memory: Vec<f64>,
    /// How noisy each is, as a factor.
    noise: Vec<f64>,
    tokens: u32,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Pcg64::seed_from_u64(seed);
        let levels = (0..10)
            .map(|_| {
                let z: f64 = StandardNormal.sample(&mut random);
                0.3 * z
            })
            .collect();
        Self { random, levels, memory: vec![0.0; 10], noise: vec![1.0; 10], tokens: 150 }
    }

    fn normal(&mut self) -> f64 {
        StandardNormal.sample(&mut self.random)
    }

    fn interval(&mut self, new: usize, effect: f64) -> Interval {
        let shared = 0.4 * self.normal();
        let mut interval = Interval::default();
        for i in 0..10 {
            self.memory[i] = 0.4 * self.memory[i] + 0.06 * self.noise[i] * self.normal();
            let factor = if i < new { effect } else { 1.0 };
            let level = (shared + self.levels[i] + self.memory[i]).exp() * 20.0 * factor;
            let gaps = (0..self.tokens).map(|_| level * (0.3 * self.normal()).exp()).collect();
            let counts =
                LatencyCounts { output_itl: gaps, output_tokens: u64::from(self.tokens), ..LatencyCounts::default() };
            let group = if i < new { &mut interval.new } else { &mut interval.old };
            group.insert(format!("engine-{i}"), Sample { counts, seconds: 30.0 });
        }
        interval
    }

    fn before(&mut self) -> Vec<Interval> {
        (0..BEFORE).map(|_| self.interval(0, 1.0)).collect()
    }
}

fn guard(text: &str) -> Guard {
    text.parse().expect("a guard")
}

/// The look at which a guard is exceeded, if one is within `looks`.
fn exceeded(mut world: World, new: usize, effect: f64, guard: Guard, looks: u32) -> Option<u32> {
    let before = world.before();
    let mut step = Vec::new();
    (1..=looks).find(|number| {
        step.push(world.interval(new, effect));
        let look = Look { number: *number, false_alarm: 0.01 / 6.0 };
        judge(guard.metric, Some(guard), &before, &step, look).verdict == GuardVerdict::Exceeded
    })
}

#[test]
fn equal_policies_raise_no_alarm_at_any_look() {
    // The strictest limit: the true ratio is the limit itself.
    for new in [1, 5, 9] {
        let p90 = guard("output_itl_p90<=1x");
        let alarms = (0..100).filter(|seed| exceeded(World::new(*seed), new, 1.0, p90, 30).is_some()).count();
        assert!(alarms <= 1, "{new} engines: {alarms} of 100");
    }
}

#[test]
fn engines_noisier_than_the_others_raise_no_alarm() {
    let noisy = |seed| World { noise: (0..10).map(|i| if i < 1 { 3.0 } else { 1.0 }).collect(), ..World::new(seed) };
    let alarms = (0..100).filter(|seed| exceeded(noisy(*seed), 1, 1.0, guard("output_itl_p90<=1x"), 30).is_some());
    let alarms = alarms.count();
    assert!(alarms <= 2, "{alarms} of 100");
}

#[test]
fn a_bad_policy_is_found_within_three_intervals() {
    for new in [1, 5, 9] {
        let found_at =
            |seed| exceeded(World::new(seed), new, 2.0, guard("output_itl_p90<=1.05x"), 8).unwrap_or(u32::MAX);
        let looks: Vec<u32> = (0..50).map(found_at).collect();
        assert!(looks.iter().all(|look| *look <= 3), "{new} engines: {looks:?}");
    }
}

#[test]
fn engines_that_differ_by_themselves_are_no_finding() {
    let mut world = World::new(5);
    world.levels = (0..10).map(|i| if i == 0 { 1.0 } else { 0.0 }).collect();
    let before = world.before();
    let step: Vec<Interval> = (0..10).map(|_| world.interval(1, 1.0)).collect();
    let look = Look { number: 10, false_alarm: 0.01 };
    let finding = judge(guard("output_itl_p50<=1.05x").metric, None, &before, &step, look);
    let measured = finding.measured.expect("an estimate");
    // Without the time before, it would be 2.7.
    assert!((0.85..1.15).contains(&measured.ratio) && measured.low < 1.0 && measured.high > 1.0, "{measured:?}");
}

#[test]
fn engines_that_come_and_go_change_nothing() {
    let has_truth = |seed: &u64| {
        let mut world = World::new(*seed);
        world.levels = (0..10).map(|i| f64::from(i) * 0.2).collect();
        let before = world.before();
        let mut step: Vec<Interval> = (0..10).map(|_| world.interval(5, 1.0)).collect();
        for (i, interval) in step.iter_mut().enumerate() {
            if i >= 3 {
                // The fastest of the old ones and the slowest of the new ones have gone.
                interval.old.remove("engine-5");
                interval.new.remove("engine-4");
            }
            // A slow one that was not there before.
            let stranger = interval.old.values().next().cloned().expect("old ones");
            interval.new.insert("stranger".into(), Sample { seconds: 30.0, ..stranger });
        }
        let look = Look { number: 10, false_alarm: 0.01 };
        let finding = judge(guard("output_itl_p50<=1x").metric, None, &before, &step, look);
        let measured = finding.measured.expect("an estimate");
        measured.low < 1.0 && measured.high > 1.0
    };
    // Of 95 % intervals; engines that count where they should not shift the ratio by 0.2 and more.
    let has_truth = (0..100).filter(has_truth).count();
    assert!(has_truth >= 85, "{has_truth} of 100");
}

#[test]
fn too_few_values_are_joined_and_then_enough() {
    let mut world = World::new(7);
    world.tokens = 30;
    let before: Vec<Interval> = (0..40).map(|_| world.interval(0, 1.0)).collect();
    let step: Vec<Interval> = (0..8).map(|_| world.interval(1, 1.0)).collect();
    let p90 = guard("output_itl_p90<=1.05x");
    let of = |step: &[Interval]| judge(p90.metric, Some(p90), &before, step, Look { number: 8, false_alarm: 0.01 });
    // 100 values are needed: four intervals of one engine.
    assert_eq!((of(&step[..3]).verdict, of(&step[..3]).blocks), (GuardVerdict::TooFew, 0));
    assert_eq!((of(&step).blocks, of(&step).verdict != GuardVerdict::TooFew), (2, true));
}

#[test]
fn bounds_that_are_anywhere_are_numbers_all_the_same() {
    let mut world = World::new(10);
    let before: Vec<Interval> = (0..3).map(|_| world.interval(0, 1.0)).collect();
    let step = [world.interval(1, 30.0)];
    let p90 = guard("output_itl_p90<=1.05x");
    let look = Look { number: 1, false_alarm: 1e-12 };
    let finding = judge(p90.metric, Some(p90), &before, &step, look);
    let measured = finding.measured.expect("an estimate");
    assert!(measured.surely > 0.0 && measured.high.is_finite(), "{measured:?}");
    let text = serde_json::to_string(&finding).expect("JSON");
    assert_eq!(serde_json::from_str::<Finding>(&text).expect("its own text"), finding);
}

#[test]
fn silence_is_a_finding() {
    let mut world = World::new(8);
    let before = world.before();
    let step: Vec<Interval> = (0..3)
        .map(|_| {
            let mut interval = world.interval(2, 1.0);
            interval.new.values_mut().for_each(|sample| sample.counts = LatencyCounts::default());
            interval
        })
        .collect();
    let starvation = Guard::STARVATION;
    let look = Look { number: 3, false_alarm: 0.001 };
    assert_eq!(judge(starvation.metric, Some(starvation), &before, &step, look).verdict, GuardVerdict::Exceeded);
    let p90 = guard("output_itl_p90<=1.05x");
    assert_eq!(judge(p90.metric, Some(p90), &before, &step, look).verdict, GuardVerdict::TooFew);
}

#[test]
fn one_bad_interval_is_no_alarm() {
    let mut world = World::new(9);
    let before = world.before();
    let mut step = vec![world.interval(1, 8.0)];
    let p90 = guard("output_itl_p90<=1.05x");
    for number in 1..=6 {
        let look = Look { number, false_alarm: 0.01 };
        assert_ne!(judge(p90.metric, Some(p90), &before, &step, look).verdict, GuardVerdict::Exceeded, "{number}");
        step.push(world.interval(1, 1.0));
    }
}

#[test]
fn levels_of_all_looks_add_up() {
    let sum: f64 = (1..10_000).map(|number| Look { number, false_alarm: 0.01 }.level()).sum();
    assert!((0.0099..=0.01).contains(&sum), "{sum}");
}

#[test]
fn only_what_is_needed_is_kept() {
    let mut interval = World::new(1).interval(1, 1.0);
    interval.keep_only(&[guard("ttft_p50<=1x").metric]);
    assert!(interval.old.values().all(|sample| sample.counts.output_itl.count() == 0));
    assert_eq!(interval.new["engine-0"].counts.output_tokens, 150);
}

/// Engines with a service level that the old policy keeps for nine requests in ten.
#[test]
fn a_policy_that_misses_service_levels_is_seen_even_where_it_keeps_none() {
    let interval = |new: usize, in_time: u64| {
        let mut interval = Interval::default();
        for i in 0..10 {
            let in_time = if i < new { in_time } else { 90 + i as u64 % 3 };
            let counts = LatencyCounts { in_time, missed: 100 - in_time, ..LatencyCounts::default() };
            let group = if i < new { &mut interval.new } else { &mut interval.old };
            group.insert(format!("engine-{i}"), Sample { counts, seconds: 30.0 });
        }
        interval
    };
    let before = vec![interval(0, 0); BEFORE];
    let attainment = guard("attainment>=0.9x");
    let look = Look { number: 4, false_alarm: 0.01 };
    for (in_time, expected) in [(90, GuardVerdict::Kept), (45, GuardVerdict::Exceeded), (0, GuardVerdict::Exceeded)] {
        let step = vec![interval(5, in_time); 4];
        assert_eq!(judge(attainment.metric, Some(attainment), &before, &step, look).verdict, expected, "{in_time}");
    }
}

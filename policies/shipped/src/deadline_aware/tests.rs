use meridian_policy_sdk::budget::{Decision, Point, decide};

use super::*;

fn made(config_json: &str) -> Result<DeadlineAware, String> {
    crate::made(config_json)
}

#[test]
fn options_have_ranges() {
    assert!(made("{}").is_ok());
    for (config, expected) in [
        ("{\"full_pressure\": 0}", "full_pressure: 0: must be in 0.001..=1000000"),
        ("{\"least_share\": 0}", "least_share: 0: must be in (0, 1]"),
        ("{\"least_share\": 1.5}", "least_share: 1.5: must be in (0, 1]"),
        ("{\"most_loosening\": 0.5}", "most_loosening: 0.5: must be in 1..=1000000"),
        ("{\"slack_ms\": -1}", "slack_ms: -1: must be in 0..=1000000000"),
    ] {
        assert_eq!(made(config).unwrap_err(), expected);
    }
    assert!(made("{\"slack\": 1}").is_err());
}

/// A generator of the tests' own: the workspace of the guests has no other dependency.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, end: u64) -> u32 {
        (self.next() % end) as u32
    }

    fn unit(&mut self) -> f64 {
        self.next() as f64 / (1u64 << 31) as f64
    }
}

/// How much thinking a verdict allows.
fn allows(verdict: Verdict) -> bool {
    verdict != Verdict::EndNow
}

#[test]
fn more_waiting_never_allows_more_thinking() {
    let mut random = Random(42);
    for _ in 0..200_000 {
        let options = Options {
            full_pressure: 0.01 + 4.0 * random.unit(),
            least_share: 1.0 - random.unit() * 0.999,
            most_loosening: 1.0 + 9.0 * random.unit(),
            slack_ms: f64::from(random.below(2000)),
        };
        let mut policy = DeadlineAware { options };
        let min_think_tokens = random.below(600);
        let configured = Thresholds {
            min_think_tokens,
            max_think_tokens: min_think_tokens + random.below(40_000),
            eat_variance_threshold: random.unit() / 100.0,
            eat_max_bits: random.unit(),
            min_probes: random.below(5),
            ..Thresholds::default()
        };
        let waiting = random.below(300);
        let point = if random.below(2) == 0 { Point::Start } else { Point::Probe };
        let fewer = Load { point, thinking: random.below(80), waiting, configured, ..Load::default() };
        let more = Load { waiting: waiting.saturating_add(1 + random.below(60)), ..fewer };
        let mut slack = || if random.below(2) == 0 { f32::INFINITY } else { random.below(4000) as f32 };
        let (slack, level_slack) = (slack(), slack());
        let columns = [
            random.below(45_000) as f32,
            random.below(4) as f32,
            random.below(12) as f32,
            (random.unit() * 3.0) as f32,
            (random.unit() / 30.0) as f32,
            (random.unit() * 4.0) as f32,
            slack,
            level_slack,
        ];
        let [mut few, mut many] = [Decision::default(), Decision::default()];
        decide(&mut policy, &fewer, 1, &columns, &mut few);
        decide(&mut policy, &more, 1, &columns, &mut many);
        for (few, many) in few.verdicts.iter().zip(&many.verdicts) {
            assert!(allows(*few) || !allows(*many), "{policy:?} {fewer:?} {more:?} {columns:?}");
        }
        for (few, many) in few.thresholds.iter().zip(&many.thresholds) {
            assert!(many.max_think_tokens <= few.max_think_tokens, "{policy:?} {fewer:?} {more:?}");
            assert!(many.eat_variance_threshold >= few.eat_variance_threshold);
            assert!(many.eat_max_bits >= few.eat_max_bits);
            assert!(many.min_think_tokens <= many.max_think_tokens);
            let floor = f64::from(configured.max_think_tokens) * options.least_share;
            assert!(f64::from(many.max_think_tokens) >= floor.floor() - 1.0);
        }
    }
}

#[test]
fn an_empty_queue_leaves_the_configured_thresholds() {
    let load = Load { thinking: 5, ..Load::default() };
    assert_eq!(made("{}").unwrap().tightened(&load), load.configured);
}

//! Whatever a policy says of thinking, each request has thresholds that hold, and one verdict.

use meridian_core::budget::{
    BudgetCandidate, BudgetDecider, Load, Observed, Point, Repeated, Thresholds, Verdict, check_thresholds,
};
use meridian_core::slot::BudgetSlot;
use meridian_core::{Budget, BudgetDecision};

use super::{Scripted, check_asked, length, targets};
use crate::bytes::Bytes;

const MAX_BATCHES: usize = 32;
const MAX_CANDIDATES: usize = 32;

pub(super) fn run(mut bytes: Bytes<'_>) {
    let (answer, policy) = Scripted::<Budget>::boxed();
    let mut slot = BudgetSlot::new(policy, targets());
    let mut now_ms = 0.0;
    for _ in 0..MAX_BATCHES {
        if bytes.is_empty() {
            return;
        }
        now_ms += f64::from(bytes.u16());
        let shape = bytes.u8();
        let point = if shape & 1 == 1 { Point::Probe } else { Point::Start };
        let configured = if shape & 4 == 4 { thresholds(&mut bytes) } else { Thresholds::default() };
        let load = Load { now_ms, point, thinking: bytes.u32(), waiting: bytes.u32(), configured, ..Load::default() };
        let candidates: Vec<BudgetCandidate> =
            (0..bytes.below(MAX_CANDIDATES + 1)).map(|_| candidate(&mut bytes)).collect();
        let given = decision(&mut bytes, point, candidates.len());

        let (fitting, other) = match point {
            Point::Start => (given.thresholds.len(), given.verdicts.len()),
            Point::Probe => (given.verdicts.len(), given.thresholds.len()),
        };
        let fits = (fitting == candidates.len() || fitting == 0)
            && other == 0
            && given.thresholds.iter().all(|given| check_thresholds(given).is_ok());
        let decides = check_asked::<Budget>(&load, candidates.len(), &given, fits);
        let is_asked = slot.control().status().quarantine.is_none();
        let before = slot.stats().active;
        answer.send(given.clone()).expect("the policy is there");
        match point {
            Point::Start => {
                let taken = slot.start(&load, &candidates);
                assert_eq!(taken.len(), candidates.len());
                for thresholds in &taken {
                    check_thresholds(thresholds).expect("a request's thresholds hold");
                }
                if is_asked && decides {
                    assert_eq!(taken, given.thresholds);
                }
            }
            Point::Probe => {
                let verdicts = slot.probe(&load, &candidates);
                assert_eq!(verdicts.len(), candidates.len());
                assert!(!is_asked || !decides || verdicts == given.verdicts, "{verdicts:?} of {given:?}");
            }
        }
        if is_asked {
            assert_eq!(slot.stats().active - before, u64::from(decides), "{given:?}");
        }
    }
}

/// An answer: lists that fit more often than not, the other point's now and then.
fn decision(bytes: &mut Bytes<'_>, point: Point, candidates: usize) -> BudgetDecision {
    let (fitting, other) = (length(bytes.u8(), candidates), bytes.u8());
    let other = if other.is_multiple_of(8) { length(other / 8, candidates) } else { 0 };
    let (thresholds_count, verdict_count) = match point {
        Point::Start => (fitting, other),
        Point::Probe => (other, fitting),
    };
    let thresholds = (0..thresholds_count).map(|_| thresholds(bytes)).collect();
    let verdict = |code: u8| [Verdict::Default, Verdict::KeepThinking, Verdict::EndNow][usize::from(code % 3)];
    BudgetDecision { thresholds, verdicts: (0..verdict_count).map(|_| verdict(bytes.u8())).collect() }
}

/// The configured ones, some of them with any bits.
fn thresholds(bytes: &mut Bytes<'_>) -> Thresholds {
    let (mut thresholds, which) = (Thresholds::default(), bytes.u16());
    let Thresholds {
        min_think_tokens,
        max_think_tokens,
        eat_probe_interval_tokens,
        ema_alpha,
        eat_variance_threshold,
        eat_max_bits,
        min_probes,
        rpdi_window,
        rpdi_threshold,
    } = &mut thresholds;
    let counts = [min_think_tokens, max_think_tokens, eat_probe_interval_tokens, min_probes, rpdi_window];
    for (bit, count) in counts.into_iter().enumerate().filter(|(bit, _)| which >> bit & 1 == 1) {
        *count = if which >> (bit + 9) & 1 == 1 { bytes.u32() } else { u32::from(bytes.u8()) };
    }
    for (bit, value) in [ema_alpha, eat_variance_threshold, eat_max_bits, rpdi_threshold].into_iter().enumerate() {
        if which >> (bit + 5) & 1 == 1 {
            *value = bytes.f64();
        }
    }
    thresholds
}

fn candidate(bytes: &mut Bytes<'_>) -> BudgetCandidate {
    let shape = bytes.u8();
    let mut signal = |bit: u8| (shape >> bit & 1 == 1).then(|| f64::from(bytes.f32()));
    let (eat_bits, eat_variance_bits2, rpdi) = (signal(0), signal(1), signal(2));
    BudgetCandidate {
        prompt_tokens: u32::from(bytes.u16()),
        remaining_tokens: bytes.u32(),
        think_ms: f64::from(bytes.u16()),
        priority: bytes.u32().cast_signed(),
        tenant: u32::from(bytes.u8()),
        observed: Observed {
            think_tokens: bytes.u32(),
            is_probed: shape & 8 == 8,
            is_at_boundary: shape & 16 == 16,
            probes: u32::from(bytes.u8()),
            eat_bits,
            eat_variance_bits2,
            rpdi,
            same_answers: u32::from(bytes.u8()),
            confidence: Some(f64::from(bytes.u8()) / 255.0),
            is_repeating: shape & 32 == 32,
            repeated: Repeated { tokens: u32::from(bytes.u16()), period: u32::from(bytes.u16()) },
        },
        slack_ms: f64::from(bytes.f32()),
        ..BudgetCandidate::default()
    }
}

//! Traffic like the recorded one, for the interval of a prediction.
//!
//! Requests that follow each other share a load that rises and falls, so single requests are not drawn: whole stretches of
//! time are, with their requests and the gaps between them (the moving block bootstrap: H. Künsch, Annals of Statistics
//! 17(3), 1989; on a circle, so that every time is as likely: D. Politis and J. Romano, 1992).

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

use super::Observed;
use crate::trace::{Prefix, TraceRequest};
use crate::vllm::RecordedSteps;

/// Stretches of a resampled trace. Fewer are longer, and keep more of what follows from one minute to the next; more vary
/// more freely.
const STRETCHES: usize = 12;
/// Stretches of resampled steps.
const STEP_STRETCHES: usize = 20;

/// The requests, with lengths for those that had not ended: those of an ended request that is longer, drawn at random.
pub(super) fn completed(observed: &Observed, seed: u64) -> Vec<TraceRequest> {
    let mut random = Pcg64::seed_from_u64(seed ^ 0x6c65_6e67);
    let mut requests = observed.requests.clone();
    let ended: Vec<[u32; 2]> = observed
        .requests
        .iter()
        .zip(&observed.has_ended)
        .filter(|(_, has_ended)| **has_ended)
        .map(|(request, _)| [request.think_tokens, request.output_tokens])
        .collect();
    for (request, _) in requests.iter_mut().zip(&observed.has_ended).filter(|(_, has_ended)| !**has_ended) {
        let answers = request.output_tokens > 1;
        let is_longer = |[think, output]: &&[u32; 2]| {
            if answers { *output > request.output_tokens } else { *think >= request.think_tokens }
        };
        let longer: Vec<&[u32; 2]> = ended.iter().filter(is_longer).collect();
        if longer.is_empty() {
            continue;
        }
        let [think, output] = *longer[random.random_range(0..longer.len())];
        request.output_tokens = output;
        if !answers {
            request.think_tokens = think;
        }
    }
    requests
}

/// As much traffic of the same kind: stretches of `requests`, whose last arrival is at most at `seconds`.
pub(super) fn traffic(requests: &[TraceRequest], seconds: f64, random: &mut Pcg64) -> Vec<TraceRequest> {
    let length_s = seconds / STRETCHES as f64;
    let mut drawn = Vec::with_capacity(requests.len() * 2);
    for stretch in 0..STRETCHES {
        let from_s = random.random::<f64>() * seconds;
        for request in requests {
            let offset_s = (request.arrival_s - from_s).rem_euclid(seconds);
            if offset_s < length_s {
                // A session that is drawn twice is two sessions.
                let prefix = match request.prefix {
                    Prefix::Session { id, turn } => Prefix::Session { id: (stretch as u64 + 1) << 32 | id, turn },
                    ref other => other.clone(),
                };
                drawn.push(TraceRequest { arrival_s: stretch as f64 * length_s + offset_s, prefix, ..request.clone() });
            }
        }
    }
    drawn.sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
    drawn
}

/// As many steps of the same kind.
pub(super) fn steps(steps: &RecordedSteps, random: &mut Pcg64) -> RecordedSteps {
    let count = steps.ms.len();
    let length = count.div_ceil(STEP_STRETCHES).max(1);
    let mut drawn = RecordedSteps::default();
    while drawn.ms.len() < count {
        let from = random.random_range(0..count.max(1));
        for i in (from..from + length).map(|i| i % count).take(count - drawn.ms.len()) {
            drawn.ms.push(steps.ms[i]);
            drawn.requests.push(steps.requests[i]);
            drawn.tokens.push(steps.tokens[i]);
            drawn.context_tokens.push(steps.context_tokens[i]);
            drawn.attention_pairs.push(steps.attention_pairs[i]);
            drawn.arrivals.push(steps.arrivals[i]);
            drawn.arrivals_ms.push(steps.arrivals_ms[i]);
        }
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(count: u32) -> Vec<TraceRequest> {
        let one = |i: u32| TraceRequest {
            arrival_s: f64::from(i),
            prompt_tokens: i + 1,
            prefix: Prefix::Session { id: u64::from(i / 2), turn: i % 2 },
            ..TraceRequest::default()
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn a_resampled_trace_has_about_as_many_requests_in_stretches_of_the_recorded_order() {
        let recorded = requests(1200);
        let drawn = traffic(&recorded, 1200.0, &mut Pcg64::seed_from_u64(3));
        assert!((1150..=1250).contains(&drawn.len()), "{}", drawn.len());
        assert!(drawn.windows(2).all(|pair| pair[0].arrival_s <= pair[1].arrival_s));
        assert!(drawn.iter().all(|request| (0.0..1200.0).contains(&request.arrival_s)));
        let follow = drawn.windows(2).filter(|pair| pair[1].prompt_tokens == pair[0].prompt_tokens + 1).count();
        assert!(follow > 1150, "{follow} follow each other as recorded");
        let again = traffic(&recorded, 1200.0, &mut Pcg64::seed_from_u64(3));
        assert_eq!(drawn, again, "the seed decides");
    }

    #[test]
    fn a_session_that_is_drawn_twice_is_two_sessions() {
        let recorded = requests(24);
        let drawn = traffic(&recorded, 24.0, &mut Pcg64::seed_from_u64(1));
        let mut turns: Vec<_> = drawn
            .iter()
            .map(|request| match request.prefix {
                Prefix::Session { id, turn } => (id, turn),
                _ => panic!("a session"),
            })
            .collect();
        let all = turns.len();
        turns.sort_unstable();
        turns.dedup();
        assert_eq!(turns.len(), all);
    }
}

//! Shipped dispatch policies in a closed loop: what they promise comes about when the host keeps the columns.

use meridian_core::slot::DispatchSlot;
use meridian_core::{Markers, NewRequest, SchedulerConfig, native};
use meridian_memory::{OwnQueues, RequestId, StepLimits};

const START: u32 = 7;
const END: u32 = 8;
const STEP_MS: f64 = 10.0;

fn own_queues(policy: &str) -> OwnQueues {
    let markers = Markers::new(vec![vec![START]], vec![vec![END]], vec![]).expect("usable markers");
    // What the host does against starvation is not to help.
    let config = SchedulerConfig { max_defer_ms: 1e9, ..SchedulerConfig::default() };
    let native = native::policy(policy, config.targets(), "{}").expect("a native policy");
    OwnQueues::with_slot(DispatchSlot::new(native, config.targets()), markers, &config)
}

fn limits(step: u32, max_running: u32) -> StepLimits {
    StepLimits { now_ms: f64::from(step) * STEP_MS, max_running, token_budget: 256, ..StepLimits::default() }
}

/// Tokens served to two tenants while both queue, weighted as in VTC: 200 requests of the one, then 20 of the other.
fn service_of_two_tenants(policy: &str) -> [f64; 2] {
    const PROMPT: u32 = 50;
    let queues = own_queues(policy);
    let tenant = |id: u64| usize::from(id >= 200);
    for id in 0..220 {
        let request = NewRequest {
            prompt: &[1, START],
            prompt_tokens: PROMPT,
            tenant: ["a", "b"][tenant(id)],
            ..Default::default()
        };
        queues.submit(RequestId(id), &request).expect("ids differ");
    }
    let (mut service, mut output, mut admitted) = ([0.0; 2], [0; 220], 0);
    for step in 0.. {
        let batch = queues.schedule_batch(&limits(step, 4));
        for grant in batch.output.iter().chain(&batch.think) {
            let id = grant.request;
            let output = &mut output[id.0 as usize];
            if *output == 0 {
                assert_eq!(grant.tokens, PROMPT, "in one piece");
                service[tenant(id.0)] += f64::from(PROMPT);
                admitted += tenant(id.0);
            }
            *output += 1;
            service[tenant(id.0)] += 2.0;
            queues.generated(id, &[40], &mut Vec::new());
            if *output == 20 {
                queues.finish(id);
            }
        }
        if admitted == 20 || queues.stats().waiting <= 20 {
            break;
        }
    }
    service
}

#[test]
fn fair_share_serves_two_tenants_alike() {
    // The bound of VTC: 4 seats of 50 + 20 tokens, a generated one counts twice.
    let bound = 2.0 * 2.0 * 4.0 * 70.0;
    let [one, other] = service_of_two_tenants("fair-share");
    assert!((one - other).abs() <= bound && other > bound, "{one} and {other}");
    let [one, other] = service_of_two_tenants("fcfs");
    assert!(one - other > bound, "by arrival it is not: {one} and {other}");
}

/// Tokens of output that an answer got in a second of steps beside a request that thinks.
fn output_in_a_second(policy: &str) -> u32 {
    let queues = own_queues(policy);
    for id in 0..2 {
        let request = NewRequest { prompt: &[1, START], ..NewRequest::default() };
        queues.submit(RequestId(id), &request).expect("ids differ");
    }
    let mut output = 0;
    for step in 0..102 {
        let batch = queues.schedule_batch(&limits(step, 4));
        assert!(batch.think.iter().any(|grant| grant.request == RequestId(1)), "thinking is never left out");
        for grant in batch.output.iter().chain(&batch.think) {
            let is_answer = grant.request == RequestId(0);
            output += u32::from(is_answer && step > 0);
            queues.generated(grant.request, &[if is_answer && step == 0 { END } else { 40 }], &mut Vec::new());
        }
    }
    output
}

#[test]
fn answers_are_paced_beside_thinking() {
    // A step takes 10 ms; the first token of output is there after the second.
    assert_eq!(output_in_a_second("output-first"), 101);
    let paced = output_in_a_second("pascal");
    assert!((50..=56).contains(&paced), "{paced} tokens, one each 20 ms and a lead of 4");
    assert_eq!(output_in_a_second("qoe"), 101, "nobody is slowed down while there is room");
}

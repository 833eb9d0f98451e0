use meridian_policy_sdk::{Decision, decide};

use super::*;

fn made(config_json: &str) -> Result<FairShare, String> {
    crate::made(config_json)
}

const PROMPT: u16 = 50;
const OUTPUT: u16 = 20;
const SEATS: usize = 4;
/// Of the paper, for tenants that queue all the time: twice the larger of the longest prompt and the tokens of a full
/// batch, each weighted.
const BOUND: f64 = 2.0 * 2.0 * (SEATS as f64) * (PROMPT as f64 + OUTPUT as f64);

#[derive(Clone, Debug)]
struct Live {
    tenant: u8,
    output: u16,
    served_ms: f64,
}

/// An engine with few seats: it admits in the policy's order, computes a prompt in one step and then a token a step.
struct Engine {
    policy: FairShare,
    now_ms: f64,
    running: Vec<Live>,
    waiting: Vec<Live>,
    /// Tokens served to each tenant, weighted as in the paper.
    service: [f64; 3],
}

impl Engine {
    fn new() -> Self {
        let policy = made("{}").expect("there are defaults");
        Self { policy, now_ms: 0.0, running: Vec::new(), waiting: Vec::new(), service: [0.0; 3] }
    }

    fn arrive(&mut self, tenant: u8, requests: usize) {
        let live = Live { tenant, output: 0, served_ms: self.now_ms };
        self.waiting.extend(std::iter::repeat_n(live, requests));
    }

    fn keys(&mut self) -> Vec<f32> {
        let free = SEATS - self.running.len();
        // Who waits is a candidate only while a seat is free.
        let shown = if free > 0 { self.waiting.len() } else { 0 };
        let candidates: Vec<_> = self.running.iter().chain(&self.waiting[..shown]).cloned().collect();
        let running = self.running.len();
        let mut columns = Vec::new();
        for column in FairShare::INPUTS {
            columns.extend(candidates.iter().enumerate().map(|(i, live)| match column {
                Column::State => f32::from(u8::from(i < running)),
                Column::Tenant => f32::from(live.tenant),
                Column::SinceProgressMs => (self.now_ms - live.served_ms) as f32,
                Column::PromptTokens => f32::from(PROMPT),
                Column::ComputedTokens if i < running => f32::from(PROMPT + live.output - 1),
                Column::OutputTokens => f32::from(live.output),
                _ => 0.0,
            }));
        }
        let waiting = u32::try_from(self.waiting.len()).expect("few");
        let step = Step { now_ms: self.now_ms, waiting, decode_tokens: 1, ..Step::default() };
        let mut decision = Decision::default();
        decide(&mut self.policy, &step, candidates.len(), &columns, &mut decision);
        decision.keys
    }

    fn step(&mut self) {
        let keys = self.keys();
        let mut order: Vec<usize> = (0..keys.len() - self.running.len()).collect();
        order.sort_by(|one, other| keys[self.running.len() + one].total_cmp(&keys[self.running.len() + other]));
        order.truncate(SEATS - self.running.len());
        let admitted: Vec<_> = order.iter().map(|i| self.waiting[*i].clone()).collect();
        order.sort_unstable();
        for i in order.into_iter().rev() {
            self.waiting.remove(i);
        }
        self.running.extend(admitted);
        for live in &mut self.running {
            let prompt = if live.output == 0 { f64::from(PROMPT) } else { 0.0 };
            self.service[usize::from(live.tenant)] += prompt + 2.0;
            live.output += 1;
            live.served_ms = self.now_ms;
        }
        self.running.retain(|live| live.output < OUTPUT);
        self.now_ms += 10.0;
    }

    fn twin(&self) -> Self {
        let Self { policy, now_ms, running, waiting, service } = self;
        let (policy, running, waiting) = (policy.clone(), running.clone(), waiting.clone());
        Self { policy, now_ms: *now_ms, running, waiting, service: *service }
    }

    fn apart(&self) -> f64 {
        (self.service[1] - self.service[2]).abs()
    }
}

#[test]
fn a_tenant_with_ten_times_the_requests_gets_no_more() {
    let mut engine = Engine::new();
    engine.arrive(1, 400);
    engine.arrive(2, 40);
    while engine.waiting.iter().any(|live| live.tenant == 2) {
        engine.step();
        assert!(engine.apart() <= BOUND, "{} apart at {} ms", engine.apart(), engine.now_ms);
    }
    assert!(engine.service[2] > 30.0 * 90.0, "{:?}", engine.service);
    assert!(engine.waiting.len() > 300, "the rest is the other tenant's");
}

#[test]
fn who_comes_back_has_saved_up_nothing() {
    let mut engine = Engine::new();
    engine.arrive(1, 200);
    engine.arrive(2, 1);
    (0..500).for_each(|_| engine.step());
    engine.arrive(2, 100);
    let before = engine.service;
    for _ in 0..200 {
        engine.step();
        let [_, one, two] = [0, 1, 2].map(|tenant| engine.service[tenant] - before[tenant]);
        assert!((one - two).abs() <= BOUND, "{one} and {two} since it came back");
    }
}

#[test]
fn who_comes_to_an_empty_queue_is_lifted_to_the_last_that_queued() {
    let mut engine = Engine::new();
    engine.arrive(1, 3);
    (0..30).for_each(|_| engine.step());
    engine.arrive(1, 1);
    engine.arrive(2, 1);
    assert_eq!(engine.keys(), [0.0, 0.0]);
    engine.arrive(0, 1);
    assert_eq!(engine.keys(), [0.0, 0.0, 0.0], "and those after it to those that queue");
}

#[test]
fn a_snapshot_goes_on_where_it_was_taken() {
    let mut engine = Engine::new();
    engine.arrive(1, 60);
    engine.arrive(2, 30);
    for step in 0..400 {
        if step == 150 {
            engine.arrive(0, 10);
        }
        let state = engine.policy.snapshot();
        let mut restored = made("{}").expect("there are defaults");
        restored.restore(&state).expect("its own snapshot");
        assert_eq!(restored.snapshot(), state);
        let mut other = Engine { policy: restored, ..engine.twin() };
        assert_eq!(other.keys(), engine.twin().keys(), "step {step}");
        engine.step();
    }
}

#[test]
fn a_prompt_is_charged_once_and_not_what_the_cache_had() {
    let mut policy = made("{\"input_weight\": 3.0, \"output_weight\": 1.0}").expect("in range");
    let mut decision = Decision::default();
    let mut decide_at = |now_ms: f64, [since, computed, generated]: [f32; 3]| {
        // State, tenant, progress, prompt, cached, computed, think, output.
        let columns = [1.0, 1.0, since, 100.0, 64.0, computed, generated, 0.0];
        let step = Step { now_ms, decode_tokens: 1, ..Step::default() };
        decide(&mut policy, &step, 1, &columns, &mut decision);
        policy.accounts[1].counter
    };
    assert_eq!(decide_at(0.0, [0.0, 80.0, 0.0]), 0.0, "there was no step before");
    assert_eq!(decide_at(10.0, [10.0, 90.0, 0.0]), 0.0, "a chunk of the prompt");
    assert_eq!(decide_at(20.0, [10.0, 100.0, 1.0]), 109.0, "36 tokens of prompt and the first token");
    assert_eq!(decide_at(30.0, [20.0, 100.0, 1.0]), 109.0, "left out of the step");
    assert_eq!(decide_at(40.0, [10.0, 101.0, 2.0]), 110.0);
    assert_eq!(decide_at(50.0, [10.0, 40.0, 2.0]), 110.0, "computing again what it lost");
    assert_eq!(decide_at(60.0, [10.0, 102.0, 3.0]), 111.0);
    assert_eq!(decide_at(60.0, [0.0, 102.0, 3.0]), 111.0, "no time has passed");
}

#[test]
fn a_hostile_snapshot_is_refused() {
    let mut policy = made("{}").expect("there are defaults");
    policy.accounts = vec![Account { counter: 7.0, queued: 0 }];
    let with = |decided_ms: f64, last: u32, counter: f64, queued: u8| {
        let parts: [&[u8]; 5] =
            [&[1], &decided_ms.to_le_bytes(), &last.to_le_bytes(), &counter.to_le_bytes(), &[queued]];
        parts.concat()
    };
    let good = with(10.0, 0, 3.0, 1);
    let mut newer = good.clone();
    newer[0] = 2;
    let too_many = [&good[..HEADER_BYTES], &vec![0; (MAX_TENANTS + 1) * ACCOUNT_BYTES]].concat();
    let hostile = [
        vec![],
        vec![1],
        newer,
        too_many,
        good[..good.len() - 1].to_vec(),
        with(f64::INFINITY, 0, 3.0, 1),
        with(10.0, 1, 3.0, 1),
        with(10.0, 0, f64::NAN, 1),
        with(10.0, 0, -1.0, 1),
        with(10.0, 0, f64::INFINITY, 1),
        with(10.0, 0, 3.0, 2),
    ];
    for state in hostile {
        let refused = policy.restore(&state).expect_err("hostile");
        assert!(refused.starts_with("state: "), "{refused}");
        assert_eq!(policy.accounts[0].counter, 7.0, "nothing of it was taken over");
    }
    assert_eq!(policy.restore(&good), Ok(()));
    assert_eq!(policy.snapshot(), good);
    policy.accounts = vec![Account::default(); MAX_TENANTS];
    assert!(policy.snapshot().len() < 1 << 20, "the host takes no more");
    assert_eq!(policy.restore(&policy.snapshot()), Ok(()));
}

#[test]
fn options_have_ranges() {
    assert!(made("{\"input_weight\": 0, \"output_weight\": 1}").is_ok());
    for (config, expected) in [
        ("{\"input_weight\": -1}", "input_weight: -1: must be in 0..=1000"),
        ("{\"output_weight\": 1001}", "output_weight: 1001: must be in 0..=1000"),
    ] {
        assert_eq!(made(config).expect_err("out of range"), expected);
    }
    assert!(made("{\"weight\": 1}").is_err());
}

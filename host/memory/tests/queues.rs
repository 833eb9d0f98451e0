//! The scheduler as a whole: nothing lost, nothing doubled, no budget exceeded, whatever policies and callers do.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::mpsc;

use meridian_core::slot::{Contender, DispatchSlot, StrikeLimits};
use meridian_core::{
    Batch, Column, Decision, Description, Dispatch, Fault, FaultKind, Markers, NewRequest, PhaseEvent, Policy,
    SchedulerConfig, SlotKind, ThinkPhase, native,
};
use meridian_memory::{Error, OwnQueues, QueueStats, RequestId, StepLimits};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const START: u32 = 7;
const END: u32 = 8;

fn markers() -> Markers {
    Markers::new(vec![vec![START]], vec![vec![END]], vec![]).expect("usable markers")
}

fn thinking<'a>(prompt_tokens: u32) -> NewRequest<'a> {
    NewRequest { prompt: &[1, START], prompt_tokens, ..NewRequest::default() }
}

fn own_queues() -> OwnQueues {
    let config = SchedulerConfig::default();
    let policy = native::policy::<Dispatch>("output-first", config.targets(), "{}").expect("a native policy");
    deciding(policy, &config)
}

/// However often the policy faults, it is asked again.
fn deciding(policy: Box<dyn Policy>, config: &SchedulerConfig) -> OwnQueues {
    let limits = StrikeLimits { max_strikes: u32::MAX, ..StrikeLimits::default() };
    let slot = DispatchSlot::with_version(Contender::new(policy, "", "test"), config.targets(), limits);
    OwnQueues::with_slot(slot, markers(), config)
}

/// A policy whose answer is a function of the batch.
struct Answers<F>(Description, F);

impl<F: FnMut(&Batch<'_>, &mut Decision) -> Result<(), Fault> + Send> Policy for Answers<F> {
    fn description(&self) -> &Description {
        &self.0
    }
    fn inputs(&self) -> &[Column] {
        &[]
    }
    fn decide(&mut self, batch: &Batch<'_>, decision: &mut Decision) -> Result<(), Fault> {
        (self.1)(batch, decision)
    }
    fn recover(&mut self) -> Result<(), Fault> {
        Ok(())
    }
}

fn answering(answer: impl FnMut(&Batch<'_>, &mut Decision) -> Result<(), Fault> + Send + 'static) -> Box<dyn Policy> {
    Box::new(Answers(Description::default(), answer))
}

fn generated(queues: &OwnQueues, id: u64, tokens: &[u32]) -> Vec<PhaseEvent> {
    let mut events = Vec::new();
    queues.generated(RequestId(id), tokens, &mut events);
    events
}

fn ids(grants: &[meridian_memory::Grant]) -> Vec<u64> {
    grants.iter().map(|grant| grant.request.0).collect()
}

#[test]
fn output_first_then_the_least_recently_served() {
    let queues = own_queues();
    for id in 0..4 {
        queues.submit(RequestId(id), &thinking(2)).unwrap();
    }
    let at = |now_ms, token_budget| StepLimits { now_ms, token_budget, ..StepLimits::default() };
    assert_eq!(ids(&queues.schedule_batch(&at(0.0, 100)).think), [0, 1, 2, 3]);
    for id in 0..4 {
        queues.generated(RequestId(id), &[40], &mut Vec::new());
    }
    assert_eq!(ids(&queues.schedule_batch(&at(1.0, 2)).think), [0, 1]);
    assert_eq!(generated(&queues, 3, &[END]), [PhaseEvent::ExitThink]);
    let batch = queues.schedule_batch(&at(2.0, 3));
    assert_eq!((ids(&batch.output), ids(&batch.think)), (vec![3], vec![2]));
    assert_eq!(queues.stats(), QueueStats { output: 1, think: 3, prefill: 0, waiting: 0 });
}

#[test]
fn priorities_and_near_deadlines_go_first_in_their_phase() {
    let queues = own_queues();
    queues.submit(RequestId(0), &thinking(2)).unwrap();
    queues.submit(RequestId(1), &NewRequest { priority: -1, ..thinking(2) }).unwrap();
    queues.submit(RequestId(2), &NewRequest { deadline_ms: 1e6, ..thinking(2) }).unwrap();
    queues.submit(RequestId(3), &NewRequest { deadline_ms: 500.0, ..thinking(2) }).unwrap();
    assert_eq!(ids(&queues.schedule_batch(&StepLimits::default()).think), [3, 1, 0, 2]);
}

#[test]
fn a_preempted_request_comes_back_first_and_recomputes() {
    let queues = own_queues();
    let limits = StepLimits { max_running: 1, ..StepLimits::default() };
    queues.submit(RequestId(0), &thinking(2)).unwrap();
    queues.submit(RequestId(1), &thinking(2)).unwrap();
    assert_eq!(ids(&queues.schedule_batch(&limits).think), [0]);
    generated(&queues, 0, &[40, 41]);
    assert!(queues.preempt(RequestId(0)));
    assert!(!queues.preempt(RequestId(0)), "it does not run");
    let batch = queues.schedule_batch(&limits);
    assert_eq!((batch.think[0].request, batch.think[0].tokens), (RequestId(0), 4));
}

#[test]
fn a_preempted_answer_goes_before_thinking_that_runs() {
    let queues = own_queues();
    let at = |now_ms| StepLimits { now_ms, token_budget: 64, max_running: 2, ..StepLimits::default() };
    assert_eq!(queues.submit(RequestId(0), &thinking(2)).unwrap(), Some(PhaseEvent::EnterThink));
    let _ = queues.schedule_batch(&at(0.0));
    generated(&queues, 0, &[END]);
    queues.submit(RequestId(1), &thinking(1_000_000)).unwrap();
    let _ = queues.schedule_batch(&at(1.0));
    assert!(queues.preempt(RequestId(0)));
    let batch = queues.schedule_batch(&at(2.0));
    assert_eq!((ids(&batch.output), ids(&batch.think)), (vec![0], vec![1]));
}

#[test]
fn every_event_of_a_step_is_told() {
    let markers = markers().with_resuming(true);
    let queues = OwnQueues::new(&SchedulerConfig::default(), markers);
    queues.submit(RequestId(0), &thinking(2)).unwrap();
    let _ = queues.schedule_batch(&StepLimits::default());
    let events = [PhaseEvent::ExitThink, PhaseEvent::EnterThink];
    assert_eq!(generated(&queues, 0, &[END, 40, START, 41]), events);
}

/// Fewer tokens a step than requests: somebody is always left out, by nobody's decision.
#[test]
fn want_of_tokens_starves_nobody() {
    let config = SchedulerConfig { max_defer_ms: 100.0, ..SchedulerConfig::default() };
    for policy in Dispatch::NATIVES {
        let native = native::policy(policy, config.targets(), "{}").unwrap();
        let queues = deciding(native, &config);
        for id in 0..5 {
            queues.submit(RequestId(id), &thinking(1)).unwrap();
        }
        let mut last_ms = [0.0f64; 5];
        for step in 0..2000 {
            let now_ms = f64::from(step) * 10.0;
            let limits = StepLimits { now_ms, token_budget: 4, max_running: 8, ..StepLimits::default() };
            for grant in queues.schedule_batch(&limits).think {
                last_ms[grant.request.0 as usize] = now_ms;
                generated(&queues, grant.request.0, &[40]);
            }
            for (id, last_ms) in last_ms.iter().enumerate() {
                assert!(now_ms - last_ms <= 120.0, "{policy}: {id} had no tokens for {} ms", now_ms - last_ms);
            }
        }
    }
}

#[test]
fn a_wrong_clock_does_not_end_the_bound() {
    let config = SchedulerConfig { max_defer_ms: 100.0, ..SchedulerConfig::default() };
    for wrong in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1e300] {
        let policy = answering(|batch, decision| {
            decision.keys = vec![0.0; batch.candidates];
            decision.token_caps = (0..batch.candidates as u32).map(|i| u32::from(i > 0)).collect();
            Ok(())
        });
        let queues = deciding(policy, &config);
        for id in 0..2 {
            queues.submit(RequestId(id), &thinking(1)).unwrap();
        }
        let mut served = 0;
        for step in 0..100 {
            let now_ms = if step == 1 { wrong } else { f64::from(step) * 10.0 };
            let limits = StepLimits { now_ms, token_budget: 64, ..StepLimits::default() };
            let batch = queues.schedule_batch(&limits);
            served += u32::from(ids(&batch.think).contains(&0));
        }
        assert!(served >= 7, "{wrong}: served {served} times in a second");
    }
    let wrong = NewRequest { arrival_ms: f64::NAN, ..thinking(1) };
    let refused = own_queues().submit(RequestId(0), &wrong).unwrap_err();
    assert_eq!(refused.to_string(), "arrival_ms: NaN: must be a number of milliseconds");
    let wrong = NewRequest { deadline_ms: f64::NAN, ..thinking(1) };
    assert!(matches!(
        own_queues().submit(RequestId(0), &wrong),
        Err(Error::Core(meridian_core::Error::NotATime { what: "deadline_ms", .. }))
    ));
}

#[test]
fn a_policy_that_cannot_recover_is_not_started_again_at_every_step() {
    struct Broken(Description, std::sync::Arc<std::sync::atomic::AtomicU32>);
    impl Policy for Broken {
        fn description(&self) -> &Description {
            &self.0
        }
        fn inputs(&self) -> &[Column] {
            &[]
        }
        fn decide(&mut self, _: &Batch<'_>, _: &mut Decision) -> Result<(), Fault> {
            Err(Fault::new(FaultKind::Trap, "unreachable"))
        }
        fn recover(&mut self) -> Result<(), Fault> {
            self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Err(Fault::new(FaultKind::Init, "it cannot start"))
        }
    }
    let recoveries = std::sync::Arc::default();
    let policy = Box::new(Broken(Description::default(), std::sync::Arc::clone(&recoveries)));
    let queues = deciding(policy, &SchedulerConfig::default());
    queues.submit(RequestId(0), &thinking(1)).unwrap();
    for step in 0..1000 {
        let _ = queues.schedule_batch(&StepLimits { now_ms: f64::from(step), ..StepLimits::default() });
    }
    let recoveries = recoveries.load(std::sync::atomic::Ordering::Relaxed);
    assert!((5..15).contains(&recoveries), "{recoveries}");
    assert_eq!(queues.faults().0, u64::from(recoveries) + 1);
}

#[test]
fn ids_are_live_once() {
    let queues = own_queues();
    queues.submit(RequestId(0), &thinking(2)).unwrap();
    assert_eq!(queues.submit(RequestId(0), &thinking(2)), Err(Error::DuplicateRequest { id: RequestId(0) }));
    assert!(queues.finish(RequestId(0)));
    assert!(!queues.finish(RequestId(0)));
    assert_eq!(generated(&queues, 0, &[END]), []);
    queues.submit(RequestId(0), &thinking(2)).unwrap();
    assert_eq!(ids(&queues.schedule_batch(&StepLimits::default()).think), [0]);
    assert_eq!(queues.phase(RequestId(0)), Some(ThinkPhase::Think));
}

#[test]
fn a_fault_costs_one_decision() {
    let mut steps = 0;
    let policy = answering(move |batch, decision| {
        steps += 1;
        match steps {
            1 => Err(Fault::new(FaultKind::Trap, "unreachable")),
            2 => {
                decision.keys = vec![0.0; batch.candidates + 1];
                Ok(())
            }
            _ => {
                decision.keys = (0..batch.candidates).map(|i| -(i as f32)).collect();
                Ok(())
            }
        }
    });
    let queues = deciding(policy, &SchedulerConfig::default());
    for id in 0..3 {
        queues.submit(RequestId(id), &thinking(2)).unwrap();
    }
    let at = |now_ms| StepLimits { now_ms, ..StepLimits::default() };
    assert_eq!(ids(&queues.schedule_batch(&at(0.0)).think), [0, 1, 2]);
    assert_eq!(ids(&queues.schedule_batch(&at(1.0)).think), [0, 1, 2]);
    assert_eq!(ids(&queues.schedule_batch(&at(2.0)).think), [2, 1, 0]);
    let (faults, last) = queues.faults();
    assert_eq!((faults, last.map(|fault| fault.kind)), (2, Some(FaultKind::BadAnswer)));
}

#[test]
fn callers_go_on_while_a_policy_decides() {
    let (entered, wait_entered) = mpsc::channel();
    let (leave, wait_leave) = mpsc::channel::<()>();
    let policy = answering(move |batch, decision| {
        entered.send(()).unwrap();
        wait_leave.recv().unwrap();
        decision.keys = vec![0.0; batch.candidates];
        Ok(())
    });
    let queues = deciding(policy, &SchedulerConfig::default());
    for id in 0..3 {
        queues.submit(RequestId(id), &thinking(2)).unwrap();
    }
    std::thread::scope(|scope| {
        let step = scope.spawn(|| queues.schedule_batch(&StepLimits::default()));
        wait_entered.recv().unwrap();
        assert!(queues.finish(RequestId(1)));
        queues.submit(RequestId(1), &thinking(9)).unwrap();
        queues.submit(RequestId(4), &thinking(2)).unwrap();
        assert_eq!(generated(&queues, 2, &[END]), [PhaseEvent::ExitThink]);
        leave.send(()).unwrap();
        let batch = step.join().unwrap();
        assert_eq!((ids(&batch.output), ids(&batch.think)), (vec![2], vec![0]), "1 ended, its successor waits");
    });
    assert_eq!(queues.stats().waiting, 2);
}

#[derive(Clone, Debug)]
enum Op {
    Submit { prompt_tokens: u32, max_tokens: u32 },
    Step { token_budget: u32, max_running: u32, step_ms: f64 },
    Generate { of: prop::sample::Index, tokens: Vec<u32> },
    Finish { of: prop::sample::Index },
    Preempt { of: prop::sample::Index },
}

fn op() -> impl Strategy<Value = Op> {
    let of = any::<prop::sample::Index>;
    prop_oneof![
        2 => (1u32..300, 1u32..9).prop_map(|(prompt_tokens, max_tokens)| Op::Submit { prompt_tokens, max_tokens }),
        4 => (1u32..200, 1u32..6, 0.1f64..30.0)
            .prop_map(|(token_budget, max_running, step_ms)| Op::Step { token_budget, max_running, step_ms }),
        2 => (of(), proptest::collection::vec(START..END + 2, 1..3)).prop_map(|(of, tokens)| Op::Generate { of, tokens }),
        1 => of().prop_map(|of| Op::Finish { of }),
        1 => of().prop_map(|of| Op::Preempt { of }),
    ]
}

/// Arbitrary bits as keys, budgets and caps; faults and wrong lengths now and then.
fn hostile(seed: u64) -> Box<dyn Policy> {
    let mut state = seed | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    answering(move |batch, decision| {
        let n = batch.candidates;
        match next() % 8 {
            0 => return Err(Fault::new(FaultKind::Trap, "trap")),
            1 => return Ok(()),
            2 => decision.keys = vec![0.0; n + 1],
            _ => decision.keys = (0..n).map(|_| f32::from_bits(next() as u32)).collect(),
        }
        decision.token_budget = [None, Some(0), Some(u32::MAX), Some((next() % 64) as u32)][(next() % 4) as usize];
        if next() % 2 == 0 {
            decision.token_caps = (0..n).map(|_| (next() % 40) as u32).collect();
        }
        Ok(())
    })
}

#[test]
fn nothing_is_lost_doubled_or_exceeded() {
    let operations = Cell::new(0);
    let ops = proptest::collection::vec(op(), 1_800..2_200);
    let run = TestRunner::new(ProptestConfig::with_cases(256)).run(&(ops, any::<u64>()), |(ops, seed)| {
        operations.set(operations.get() + 2 * ops.len());
        let config = SchedulerConfig { max_defer_ms: 60.0, ..SchedulerConfig::default() };
        for policy in [None, Some(hostile(seed))] {
            let queues = match policy {
                None => OwnQueues::new(&config, markers()),
                Some(policy) => deciding(policy, &config),
            };
            let mut live: Vec<RequestId> = Vec::new();
            let mut max_tokens: HashMap<RequestId, u32> = HashMap::new();
            let (mut next_id, mut now_ms) = (0, 0.0);
            for op in &ops {
                match op {
                    Op::Submit { prompt_tokens, max_tokens: limit } if live.len() < 40 => {
                        let id = RequestId(next_id);
                        next_id += 1;
                        let request = NewRequest { arrival_ms: now_ms, max_tokens: *limit, ..thinking(*prompt_tokens) };
                        queues.submit(id, &request).unwrap();
                        live.push(id);
                        max_tokens.insert(id, *limit);
                    }
                    Op::Submit { .. } => {}
                    Op::Step { token_budget, max_running, step_ms } => {
                        now_ms += step_ms;
                        let (token_budget, max_running) = (*token_budget, *max_running);
                        let before = queues.stats();
                        let limits = StepLimits { now_ms, token_budget, max_running, ..StepLimits::default() };
                        let batch = queues.schedule_batch(&limits);
                        prop_assert!((1..=token_budget).contains(&batch.token_budget));
                        prop_assert!(batch.tokens() <= batch.token_budget);
                        let granted: Vec<RequestId> =
                            batch.output.iter().chain(&batch.think).map(|g| g.request).collect();
                        prop_assert_eq!(granted.iter().collect::<HashSet<_>>().len(), granted.len(), "doubled");
                        prop_assert!(granted.iter().all(|id| live.contains(id)), "not live");
                        prop_assert!(batch.output.iter().chain(&batch.think).all(|grant| grant.tokens > 0));
                        for grant in &batch.output {
                            prop_assert_eq!(queues.phase(grant.request), Some(ThinkPhase::Output));
                        }
                        let after = queues.stats();
                        let running = after.output + after.think + after.prefill;
                        let ran_before = before.output + before.think + before.prefill;
                        prop_assert!(running <= ran_before.max(max_running as usize), "seats");
                        prop_assert_eq!(running + after.waiting, live.len(), "lost");
                    }
                    Op::Generate { of, tokens } => {
                        if !live.is_empty() {
                            queues.generated(live[of.index(live.len())], tokens, &mut Vec::new());
                        }
                    }
                    Op::Finish { of } => {
                        if !live.is_empty() {
                            prop_assert!(queues.finish(live.swap_remove(of.index(live.len()))));
                        }
                    }
                    Op::Preempt { of } => {
                        if !live.is_empty() {
                            queues.preempt(live[of.index(live.len())]);
                        }
                    }
                }
            }
            // Whatever the policy says, everybody gets tokens, with fewer seats and tokens than requests too: seats come
            // free as those that were served end.
            let mut unserved: HashSet<RequestId> = live.iter().copied().collect();
            for _ in 0..2_000 {
                now_ms += 10.0;
                let limits = StepLimits { now_ms, token_budget: 24, max_running: 8, ..StepLimits::default() };
                let batch = queues.schedule_batch(&limits);
                for grant in batch.output.iter().chain(&batch.think) {
                    unserved.remove(&grant.request);
                    queues.finish(grant.request);
                }
                if unserved.is_empty() {
                    break;
                }
            }
            prop_assert!(unserved.is_empty(), "{unserved:?} starved");
        }
        Ok(())
    });
    println!("operations: {}", operations.get());
    run.expect("every operation keeps every invariant");
}

#[test]
fn the_policy_is_told_which_requests_have_ended() {
    /// For each step the ended requests and the columns.
    type Steps = Vec<(Vec<u32>, Vec<f32>)>;
    #[derive(Default)]
    struct Sees(Description, std::sync::Arc<std::sync::Mutex<Steps>>);
    impl Policy for Sees {
        fn description(&self) -> &Description {
            &self.0
        }
        fn inputs(&self) -> &[Column] {
            &[Column::Request, Column::Session, Column::Turn]
        }
        fn decide(&mut self, batch: &Batch<'_>, _: &mut Decision) -> Result<(), Fault> {
            self.1.lock().expect("no panic").push((batch.finished.to_vec(), batch.columns.to_vec()));
            Ok(())
        }
        fn recover(&mut self) -> Result<(), Fault> {
            Ok(())
        }
    }
    let sees = Sees::default();
    let seen = sees.1.clone();
    let queues = deciding(Box::new(sees), &SchedulerConfig::default());
    let limits = |now_ms| StepLimits { now_ms, token_budget: 64, max_running: 8, ..StepLimits::default() };
    for (id, session) in [(10, "a"), (11, ""), (12, "a")] {
        queues.submit(RequestId(id), &NewRequest { session, ..thinking(4) }).expect("a new id");
    }
    let _ = queues.schedule_batch(&limits(0.0));
    assert!(queues.finish(RequestId(11)) && queues.finish(RequestId(10)));
    // The id of a request may come again, its number does not.
    queues.submit(RequestId(10), &NewRequest { session: "a", ..thinking(4) }).expect("it has ended");
    let _ = queues.schedule_batch(&limits(1.0));
    let _ = queues.schedule_batch(&limits(2.0));
    let seen = seen.lock().expect("no panic");
    let ended: Vec<_> = seen.iter().map(|(ended, _)| ended.as_slice()).collect();
    assert_eq!(ended, [&[][..], &[2, 1], &[]]);
    let by_column = |step: usize| seen[step].1.chunks(seen[step].1.len() / 3).map(<[f32]>::to_vec).collect::<Vec<_>>();
    assert_eq!(by_column(0), [[1.0, 2.0, 3.0], [1.0, 0.0, 1.0], [1.0, 0.0, 2.0]]);
    assert_eq!(by_column(1), [[3.0, 4.0], [1.0, 1.0], [2.0, 3.0]]);
}

//! The phase router: tokens in, events out, whoever feeds it and in whatever state its callers are.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use meridian_core::{Markers, PhaseEvent, ThinkPhase};
use meridian_memory::{Error, PhaseRouter, RequestId, RoutedRequest};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const START: u32 = 7;
const END: u32 = 8;
const A: RequestId = RequestId(1);
const B: RequestId = RequestId(2);

fn markers() -> Markers {
    Markers::new(vec![vec![START]], vec![vec![END, END + 1]], vec![]).expect("usable markers")
}

fn thinking<'a>() -> RoutedRequest<'a> {
    RoutedRequest { prompt: &[1, START], ..RoutedRequest::default() }
}

fn clocked() -> (PhaseRouter, Arc<AtomicU64>) {
    let now_ms = Arc::new(AtomicU64::new(0));
    let clock = now_ms.clone();
    (PhaseRouter::with_clock(markers(), move || clock.load(Ordering::Relaxed)), now_ms)
}

#[test]
fn a_marker_may_be_split_over_batches_and_speculated_tokens() {
    let router = PhaseRouter::new(markers());
    router.register(A, &thinking()).unwrap();
    let mut events = Vec::new();
    router.process_batch(&[(A, 40), (A, END)], &mut events);
    assert_eq!(events, []);
    router.process_batch(&[(A, END + 1), (A, 41)], &mut events);
    assert_eq!(events, [(A, PhaseEvent::ExitThink)]);
    assert_eq!(router.progress(A).map(|p| (p.think_tokens, p.output_tokens)), Some((3, 1)));
}

#[test]
fn prefill_until_the_first_token() {
    let router = PhaseRouter::new(markers());
    assert_eq!(router.register(A, &RoutedRequest::default()).unwrap(), Some(PhaseEvent::EnterThink));
    assert_eq!(router.phase(A), Some(ThinkPhase::Prefill));
    assert_eq!(router.process_token(A, 40), Some(PhaseEvent::ExitThink), "it answers without thinking");
    assert_eq!(router.progress(A).map(|p| (p.think_tokens, p.output_tokens)), Some((0, 1)));
    let single_phase = PhaseRouter::new(Markers::default());
    assert_eq!(single_phase.register(A, &thinking()).unwrap(), None);
    assert_eq!(single_phase.process_token(A, 40), None);
    assert_eq!(single_phase.phase(A), Some(ThinkPhase::Output));
}

#[test]
fn an_unknown_request_is_passed_over_and_counted() {
    let router = PhaseRouter::new(markers());
    router.register(A, &thinking()).unwrap();
    let mut events = Vec::new();
    assert_eq!(router.process_batch(&[(B, END), (A, 40), (B, END + 1)], &mut events), 2);
    assert_eq!((router.process_token(B, 1), router.phase(B), router.remove(B)), (None, None, false));
    assert_eq!(router.begin_turn(B, &[]), Err(Error::UnknownRequest { id: B }));
}

#[test]
fn an_id_is_used_again_only_after_its_request() {
    let router = PhaseRouter::new(markers());
    router.register(A, &thinking()).unwrap();
    router.process_token(A, END);
    assert_eq!(router.register(A, &thinking()), Err(Error::DuplicateRequest { id: A }));
    assert!(router.remove(A));
    router.register(A, &thinking()).unwrap();
    assert_eq!(router.process_token(A, END + 1), None, "half a marker of the request before does not count");
}

#[test]
fn tokens_replayed_after_a_preemption_count_once() {
    let router = PhaseRouter::new(markers());
    router.register(A, &thinking()).unwrap();
    let tokens = [40, END, END + 1, 41];
    for (position, token) in (0..).zip(tokens) {
        router.process_token_at(A, position, token);
    }
    let before = router.progress(A);
    for (position, token) in (0..).zip(tokens) {
        assert_eq!(router.process_token_at(A, position, token), None);
    }
    assert_eq!(router.progress(A), before);
    router.process_token_at(A, 4, 42);
    assert_eq!(router.progress(A).map(|p| p.output_tokens), Some(2));
}

#[test]
fn a_gap_in_the_positions_is_no_reason_to_count_a_token_twice() {
    let router = PhaseRouter::new(markers());
    router.register(A, &thinking()).unwrap();
    let mut events = Vec::new();
    let tokens = [(A, 0, 40), (A, 500, 41), (A, 500, 41), (A, 499, 42), (A, 501, END), (A, 502, END + 1), (B, 0, 1)];
    assert_eq!(router.process_batch_at(&tokens, &mut events), 1);
    assert_eq!(events, [(A, PhaseEvent::ExitThink)]);
    assert_eq!(router.progress(A).map(|p| (p.think_tokens, p.output_tokens)), Some((4, 0)));
}

#[test]
fn the_budget_is_called_once_a_turn() {
    let router = PhaseRouter::new(markers());
    router.register(A, &RoutedRequest { max_think_tokens: 2, ..thinking() }).unwrap();
    let events: Vec<_> = [40, 41, 42, 43].map(|token| router.process_token(A, token)).into();
    assert_eq!(events, [None, Some(PhaseEvent::ForceBudget), None, None]);
    router.process_token(A, END);
    assert_eq!(router.process_token(A, END + 1), Some(PhaseEvent::ExitThink));
    assert_eq!(router.begin_turn(A, &[1, START]).unwrap(), Some(PhaseEvent::EnterThink));
    assert_eq!(router.phase(A), Some(ThinkPhase::Prefill));
    let events: Vec<_> = [40, 41].map(|token| router.process_token(A, token)).into();
    assert_eq!(events, [None, Some(PhaseEvent::ForceBudget)]);
}

#[test]
fn an_end_at_the_limit_is_an_end() {
    let router = PhaseRouter::new(markers());
    router.register(A, &RoutedRequest { max_think_tokens: 2, ..thinking() }).unwrap();
    router.process_token(A, END);
    assert_eq!(router.process_token(A, END + 1), Some(PhaseEvent::ExitThink));
    assert_eq!(router.process_token(A, 40), None);
}

#[test]
fn what_nobody_feeds_is_reaped() {
    let (router, now_ms) = clocked();
    router.register(A, &thinking()).unwrap();
    router.register(B, &thinking()).unwrap();
    now_ms.store(1000, Ordering::Relaxed);
    router.process_token(B, 40);
    assert_eq!(router.reap_stale_older_than(Duration::from_millis(1000)), 0);
    now_ms.store(1001, Ordering::Relaxed);
    assert_eq!(router.reap_stale_older_than(Duration::from_millis(1000)), 1);
    assert_eq!((router.phase(A), router.len()), (None, 1));
    assert!(router.keep_alive(B) && !router.keep_alive(A));
    now_ms.store(2000, Ordering::Relaxed);
    assert_eq!(router.reap_stale_older_than(Duration::from_millis(1000)), 0);
    assert_eq!(router.reap_stale_older_than(Duration::MAX), 0);
}

#[test]
fn two_threads_feed_it() {
    let router = PhaseRouter::new(markers());
    let ids = |thread: u64| (0..200).map(move |i| RequestId(i * 2 + thread));
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let router = &router;
            scope.spawn(move || {
                let mut events = Vec::new();
                for id in ids(thread) {
                    router.register(id, &thinking()).unwrap();
                }
                for token in [40, END, END + 1, 41] {
                    let batch: Vec<_> = ids(thread).map(|id| (id, token)).collect();
                    assert_eq!(router.process_batch(&batch, &mut events), 0);
                }
                assert_eq!(events, ids(thread).map(|id| (id, PhaseEvent::ExitThink)).collect::<Vec<_>>());
            });
        }
    });
    assert_eq!(router.len(), 400);
}

#[derive(Clone, Debug)]
enum Op {
    Register(u64, Vec<u32>, u32),
    Token(u64, u32),
    Replay(u64),
    Turn(u64, Vec<u32>),
    Remove(u64),
    Advance(u64),
    Reap(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let id = 0u64..4;
    let token = 5u32..10;
    let prompt = proptest::collection::vec(token.clone(), 0..4);
    prop_oneof![
        1 => (id.clone(), prompt.clone(), 1u32..6).prop_map(|(id, prompt, limit)| Op::Register(id, prompt, limit)),
        8 => (id.clone(), token).prop_map(|(id, token)| Op::Token(id, token)),
        1 => id.clone().prop_map(Op::Replay),
        1 => (id.clone(), prompt).prop_map(|(id, prompt)| Op::Turn(id, prompt)),
        1 => id.prop_map(Op::Remove),
        1 => (0u64..20).prop_map(Op::Advance),
        1 => (0u64..40).prop_map(Op::Reap),
    ]
}

/// The obvious definition: all tokens of the turn kept, searched anew each time.
#[derive(Clone, Debug)]
struct Reference {
    prompt: Vec<u32>,
    turn: Vec<u32>,
    generated: u32,
    seen_ms: u64,
    entered: i32,
}

impl Reference {
    fn phase(&self) -> ThinkPhase {
        match (self.turn.is_empty(), self.thinking()) {
            (true, _) => ThinkPhase::Prefill,
            (false, true) => ThinkPhase::Think,
            (false, false) => ThinkPhase::Output,
        }
    }

    fn thinking(&self) -> bool {
        let end = [END, END + 1];
        let all = [self.prompt.as_slice(), &self.turn].concat();
        let mut rest = all.as_slice();
        // From one start to its end, to the next start.
        while let Some(start) = rest.iter().position(|token| *token == START) {
            rest = &rest[start + 1..];
            let Some(over) = rest.windows(2).position(|pair| pair == end) else { return true };
            rest = &rest[over + 2..];
        }
        // Nothing is said, and the prompt does not close thinking.
        self.turn.is_empty() && !self.prompt.windows(2).any(|pair| pair == end)
    }
}

#[test]
fn agrees_with_a_search_over_all_tokens() {
    let operations = Cell::new(0);
    let ops = proptest::collection::vec(op(), 1_500..2_500);
    let run = TestRunner::new(ProptestConfig::with_cases(64)).run(&ops, |ops| {
        operations.set(operations.get() + ops.len());
        let (router, clock) = clocked();
        let mut live: HashMap<u64, Reference> = HashMap::new();
        let mut now_ms = 0;
        for op in ops {
            let (id, event) = match op {
                Op::Register(id, prompt, max_think_tokens) => {
                    let registered =
                        router.register(RequestId(id), &RoutedRequest { prompt: &prompt, max_think_tokens });
                    prop_assert_eq!(registered.is_err(), live.contains_key(&id));
                    let Ok(event) = registered else { continue };
                    let fresh = Reference { prompt, turn: Vec::new(), generated: 0, seen_ms: now_ms, entered: 0 };
                    live.insert(id, fresh);
                    (id, event)
                }
                Op::Token(id, token) => {
                    if let Some(request) = live.get_mut(&id) {
                        request.turn.push(token);
                        request.generated += 1;
                        request.seen_ms = now_ms;
                    }
                    (id, router.process_token(RequestId(id), token))
                }
                Op::Replay(id) => {
                    let position = live.get(&id).map_or(0, |request| request.generated.saturating_sub(1));
                    let is_seen = live.get(&id).is_none_or(|request| request.generated > 0);
                    if is_seen {
                        prop_assert_eq!(router.process_token_at(RequestId(id), position, END), None);
                        if let Some(request) = live.get_mut(&id) {
                            request.seen_ms = now_ms;
                        }
                    }
                    continue;
                }
                Op::Turn(id, prompt) => {
                    let begun = router.begin_turn(RequestId(id), &prompt);
                    prop_assert_eq!(begun.is_ok(), live.contains_key(&id));
                    let Ok(event) = begun else { continue };
                    let request = live.get_mut(&id).unwrap();
                    (request.prompt, request.seen_ms) = (prompt, now_ms);
                    request.turn.clear();
                    (id, event)
                }
                Op::Remove(id) => {
                    prop_assert_eq!(router.remove(RequestId(id)), live.remove(&id).is_some());
                    continue;
                }
                Op::Advance(ms) => {
                    now_ms += ms;
                    clock.store(now_ms, Ordering::Relaxed);
                    continue;
                }
                Op::Reap(age_ms) => {
                    let before = live.len();
                    live.retain(|_, request| now_ms - request.seen_ms <= age_ms);
                    prop_assert_eq!(router.reap_stale_older_than(Duration::from_millis(age_ms)), before - live.len());
                    continue;
                }
            };
            prop_assert_eq!(router.len(), live.len());
            let Some(request) = live.get_mut(&id) else {
                prop_assert_eq!(event, None);
                continue;
            };
            request.entered += match event {
                Some(PhaseEvent::EnterThink) => 1,
                Some(PhaseEvent::ExitThink) => -1,
                Some(PhaseEvent::ForceBudget) | None => 0,
            };
            prop_assert_eq!(router.phase(RequestId(id)), Some(request.phase()));
            prop_assert_eq!(request.entered, i32::from(request.thinking()));
            let progress = router.progress(RequestId(id)).unwrap();
            prop_assert_eq!(progress.think_tokens + progress.output_tokens, request.generated);
        }
        Ok(())
    });
    println!("operations: {}", operations.get());
    run.expect("every operation agrees");
}

proptest! {
    #[test]
    fn a_batch_is_its_tokens_one_by_one(
        live in proptest::collection::vec(0u64..300, 0..200),
        tokens in proptest::collection::vec((0u64..300, 5u32..11), 0..800),
    ) {
        let [batched, single] = [(); 2].map(|()| {
            let router = PhaseRouter::new(markers().with_resuming(true));
            for id in &live {
                let _ = router.register(RequestId(*id), &RoutedRequest { max_think_tokens: 2, ..thinking() });
            }
            router
        });
        let tokens: Vec<_> = tokens.into_iter().map(|(id, token)| (RequestId(id), token)).collect();
        let mut events = Vec::new();
        let unknown = batched.process_batch(&tokens, &mut events);
        prop_assert_eq!(unknown, tokens.iter().filter(|(id, _)| !live.contains(&id.0)).count());
        let one_by_one: Vec<_> =
            tokens.iter().filter_map(|(id, token)| single.process_token(*id, *token).map(|event| (*id, event))).collect();
        prop_assert_eq!(events, one_by_one);
        for id in 0..300 {
            prop_assert_eq!(batched.progress(RequestId(id)), single.progress(RequestId(id)));
        }
    }
}

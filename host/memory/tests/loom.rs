//! Every interleaving of a few calls on the shared state of the router and the queues. Built with `--cfg loom`
//! (`make test-all`); loom replaces the locks (`src/sync.rs`).
#![cfg(loom)]

use std::collections::HashSet;
use std::time::Duration;

use loom::sync::Arc;
use loom::thread;
use meridian_core::{Markers, NewRequest, PhaseEvent, SchedulerConfig, ThinkPhase};
use meridian_memory::{OwnQueues, PhaseRouter, RequestId, RoutedRequest, StepLimits};

const START: u32 = 7;
const END: u32 = 8;
const A: RequestId = RequestId(1);
const B: RequestId = RequestId(2);

fn markers() -> Markers {
    Markers::new(vec![vec![START]], vec![vec![END]], vec![]).expect("usable markers")
}

fn router() -> Arc<PhaseRouter> {
    Arc::new(PhaseRouter::with_clock(markers(), || 0))
}

fn thinking<'a>() -> RoutedRequest<'a> {
    RoutedRequest { prompt: &[START], ..RoutedRequest::default() }
}

#[test]
fn an_end_is_reported_once() {
    loom::model(|| {
        let router = router();
        router.register(A, &thinking()).unwrap();
        let feed = |router: &Arc<PhaseRouter>| {
            let router = router.clone();
            thread::spawn(move || router.process_token_at(A, 0, END))
        };
        let events: Vec<_> = [feed(&router), feed(&router)].map(|thread| thread.join().unwrap()).into();
        assert_eq!(events.iter().filter(|event| **event == Some(PhaseEvent::ExitThink)).count(), 1);
        assert_eq!(router.progress(A).unwrap().think_tokens, 1);
    });
}

#[test]
fn an_id_is_registered_by_one() {
    loom::model(|| {
        let router = router();
        let register = |router: &Arc<PhaseRouter>| {
            let router = router.clone();
            thread::spawn(move || router.register(A, &thinking()).is_ok())
        };
        let registered = [register(&router), register(&router)].map(|thread| thread.join().unwrap());
        assert_eq!(registered.iter().filter(|ok| **ok).count(), 1);
        assert_eq!(router.len(), 1);
    });
}

#[test]
fn a_request_used_again_starts_anew() {
    loom::model(|| {
        let router = router();
        router.register(A, &thinking()).unwrap();
        let feeder = {
            let router = router.clone();
            thread::spawn(move || router.process_token(A, END))
        };
        let reaper = {
            let router = router.clone();
            thread::spawn(move || router.reap_stale_older_than(Duration::from_secs(1)))
        };
        router.remove(A);
        router.register(A, &thinking()).unwrap();
        let ended = feeder.join().unwrap() == Some(PhaseEvent::ExitThink);
        assert_eq!(reaper.join().unwrap(), 0);
        let progress = router.progress(A).unwrap();
        // The token met the first request, nobody, or the second, and nothing in between.
        let met_second = progress.phase == ThinkPhase::Output;
        assert!(ended || !met_second);
        assert_eq!(progress.think_tokens, u32::from(met_second));
    });
}

fn limits(max_running: u32) -> StepLimits {
    StepLimits { token_budget: 16, max_running, ..StepLimits::default() }
}

#[test]
fn no_request_is_lost_between_submit_finish_and_a_step() {
    loom::model(|| {
        let queues = Arc::new(OwnQueues::new(&SchedulerConfig::default(), markers()));
        queues.submit(A, &NewRequest { prompt: &[START], ..NewRequest::default() }).unwrap();
        let caller = {
            let queues = queues.clone();
            thread::spawn(move || {
                queues.submit(B, &NewRequest { prompt: &[START], ..NewRequest::default() }).unwrap();
                assert!(queues.finish(A));
            })
        };
        let first = queues.schedule_batch(&limits(2));
        caller.join().unwrap();
        let granted: HashSet<_> = first.think.iter().map(|grant| grant.request).collect();
        assert_eq!(granted.len(), first.think.len(), "doubled");
        let second = queues.schedule_batch(&limits(2));
        assert_eq!(second.think.iter().map(|grant| grant.request).collect::<Vec<_>>(), [B]);
        let stats = queues.stats();
        assert_eq!(stats.waiting + stats.think + stats.output + stats.prefill, 1);
    });
}

#[test]
fn two_steps_at_once_give_each_request_its_tokens_once() {
    loom::model(|| {
        let queues = Arc::new(OwnQueues::new(&SchedulerConfig::default(), markers()));
        for id in [A, B] {
            queues.submit(id, &NewRequest { prompt: &[1, 2, START], ..NewRequest::default() }).unwrap();
        }
        let other = {
            let queues = queues.clone();
            thread::spawn(move || queues.schedule_batch(&limits(1)))
        };
        let batches = [queues.schedule_batch(&limits(1)), other.join().unwrap()];
        let prefills = batches.iter().flat_map(|batch| &batch.think).filter(|grant| grant.tokens == 3);
        assert_eq!(prefills.map(|grant| grant.request).collect::<Vec<_>>(), [A], "one seat, one prefill");
        assert_eq!(queues.stats().waiting, 1);
    });
}

#[test]
fn tokens_and_preemptions_meet_a_step() {
    loom::model(|| {
        let queues = Arc::new(OwnQueues::new(&SchedulerConfig::default(), markers()));
        queues.submit(A, &NewRequest { prompt: &[START], ..NewRequest::default() }).unwrap();
        let _ = queues.schedule_batch(&limits(2));
        let caller = {
            let queues = queues.clone();
            thread::spawn(move || {
                let mut events = Vec::new();
                queues.generated(A, &[END], &mut events);
                assert_eq!(events, [PhaseEvent::ExitThink]);
                queues.preempt(A)
            })
        };
        let batch = queues.schedule_batch(&limits(2));
        assert!(caller.join().unwrap(), "it ran");
        assert!(batch.output.len() + batch.think.len() <= 1);
        let stats = queues.stats();
        assert_eq!((stats.waiting + stats.output, stats.think), (1, 0));
        assert_eq!(queues.phase(A), Some(ThinkPhase::Output));
    });
}

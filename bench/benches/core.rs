//! What do the core's hot paths cost, against the plainest structure that could stand in their place?
//!
//! Router: a token, in batches of one token for each of 4,096 live requests, against a `HashMap` of the same trackers
//! that one thread owns; and the same on two threads. Scheduler: a step over all running requests, against a `Vec` that is
//! sorted by phase and time since progress. Blocks: one eviction, against the scan of a `Vec`.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use meridian_core::{Markers, NewRequest, PhaseTracker, SchedulerConfig, ThinkPhase};
use meridian_memory::{
    BeginKv, BlockManager, KvMemory, OwnQueues, PhaseAwareBlockManager, PhaseRouter, RequestId, RoutedRequest,
    StepLimits,
};

const START: u32 = 151_667;
const END: u32 = 151_668;
const LIVE: u64 = 4096;

fn markers() -> Markers {
    Markers::new(vec![vec![START]], vec![vec![END]], vec![]).expect("usable markers")
}

/// Ids as an engine counts them up, in no order of the map's; any token but a marker.
fn step_tokens(live: std::ops::Range<u64>) -> Vec<(RequestId, u32)> {
    live.map(|i| (RequestId(i.wrapping_mul(0x9e37_79b9) % LIVE), (i % 150_000) as u32)).collect()
}

fn router(c: &mut Criterion) {
    let prompt = [1, 2, START];
    let tokens = step_tokens(0..LIVE);
    let mut group = c.benchmark_group("router");
    group.throughput(Throughput::Elements(LIVE));

    let full = || {
        let router = PhaseRouter::new(markers());
        for id in 0..LIVE {
            router
                .register(RequestId(id), &RoutedRequest { prompt: &prompt, ..RoutedRequest::default() })
                .expect("new");
        }
        router
    };
    let (router, other) = (full(), full());
    let mut events = Vec::new();
    group.bench_function("batch", |b| b.iter(|| router.process_batch(black_box(&tokens), &mut events)));

    let markers = markers();
    let mut plain: HashMap<RequestId, (PhaseTracker, u32)> =
        (0..LIVE).map(|id| (RequestId(id), (PhaseTracker::new(&markers, &prompt), 0))).collect();
    group.bench_function("hashmap", |b| {
        b.iter(|| {
            for (id, token) in black_box(&tokens) {
                if let Some((tracker, count)) = plain.get_mut(id) {
                    *count += 1;
                    if let Some(event) = tracker.token(&markers, *token) {
                        events.push((*id, event));
                    }
                }
            }
        });
    });

    // Both threads do all of `iters` batches of their half, so the time is that of `iters` whole batches in parallel.
    let halves = [step_tokens(0..LIVE / 2), step_tokens(LIVE / 2..LIVE)];
    for (name, routers) in [
        ("one-thread", &[&router][..]),
        ("two-threads", &[&router, &router]),
        // What this machine gives to two threads that share nothing.
        ("two-threads-apart", &[&router, &other]),
    ] {
        group.bench_function(name, |b| b.iter_custom(|iters| timed(routers, &halves, iters)));
    }
    group.finish();
}

/// One thread a router; together they take in both halves `iters` times.
fn timed(routers: &[&PhaseRouter], halves: &[Vec<(RequestId, u32)>; 2], iters: u64) -> Duration {
    let start = Barrier::new(routers.len());
    let work = |router: &PhaseRouter, of: &[Vec<(RequestId, u32)>]| {
        let mut events = Vec::new();
        start.wait();
        let began = Instant::now();
        for _ in 0..iters {
            for half in of {
                router.process_batch(black_box(half), &mut events);
            }
        }
        began.elapsed()
    };
    let share = halves.len() / routers.len();
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = routers
            .iter()
            .zip(halves.chunks(share))
            .map(|(router, of)| scope.spawn(move || work(router, of)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("the work does not panic")).max().unwrap_or_default()
    })
}

/// Each request thinks or answers, in equal parts, and is served at another moment.
fn scheduler(c: &mut Criterion) {
    let mut group = c.benchmark_group("schedule_batch");
    for live in [1024u64, 16_384] {
        group.throughput(Throughput::Elements(live));
        let scheduler = OwnQueues::new(&SchedulerConfig::default(), markers());
        for id in 0..live {
            let request = NewRequest { prompt: &[1, 2, START], ..NewRequest::default() };
            scheduler.submit(RequestId(id), &request).expect("new");
        }
        let mut limits = StepLimits { token_budget: 1 << 20, max_running: 1 << 20, ..StepLimits::default() };
        for _ in 0..=live / meridian_core::WAITING_WINDOW as u64 {
            let _ = scheduler.schedule_batch(&limits);
        }
        for id in (0..live).step_by(2) {
            scheduler.generated(RequestId(id), &[END], &mut Vec::new());
        }
        // Half of the requests get their token in each step, so the order changes from step to step.
        limits.token_budget = (live / 2) as u32;
        group.bench_with_input(BenchmarkId::new("meridian", live), &live, |b, _| {
            b.iter(|| {
                limits.now_ms += 1.0;
                black_box(scheduler.schedule_batch(&limits))
            });
        });

        let mut rows: Vec<(ThinkPhase, f64, RequestId)> = (0..live)
            .map(|id| (if id % 2 == 0 { ThinkPhase::Output } else { ThinkPhase::Think }, 0.0, RequestId(id)))
            .collect();
        let mut now_ms = 0.0;
        group.bench_with_input(BenchmarkId::new("vec", live), &live, |b, _| {
            b.iter(|| {
                now_ms += 1.0;
                rows.sort_by(|(phase, served_ms, _), (other, other_ms, _)| {
                    (*other as u8).cmp(&(*phase as u8)).then(served_ms.total_cmp(other_ms))
                });
                let mut queues: [Vec<(RequestId, u32)>; 2] = [Vec::new(), Vec::new()];
                for (phase, served_ms, id) in rows.iter_mut().take(live as usize / 2) {
                    queues[usize::from(*phase == ThinkPhase::Think)].push((*id, 1));
                    *served_ms = now_ms;
                }
                black_box(queues)
            });
        });
    }
    group.finish();
}

/// One block evicted from `cached` blocks of ended requests. Refilling is not timed.
fn blocks(c: &mut Criterion) {
    const BATCH: u64 = 512;
    let mut group = c.benchmark_group("evict_for");
    for cached in [1_000u64, 10_000, 100_000] {
        let memory = KvMemory { capacity_bytes: cached, block_size_bytes: 1, think_fraction_limit: 1.0 };
        let manager = PhaseAwareBlockManager::new(&memory).expect("in range");
        let mut next = 1u64;
        // Requests of 100 blocks at most come and go until the memory is full of what they left.
        let mut refill = |blocks: u64| {
            for share in (0..blocks).step_by(100) {
                let request = RequestId(next);
                next += 1;
                manager.begin(request, &BeginKv::default()).expect("new");
                manager.allocate(request, (blocks - share).min(100) as u32).expect("as many were evicted");
                manager.finish(request, next as f64).expect("live");
            }
        };
        refill(cached);
        let wants = RequestId(0);
        manager.begin(wants, &BeginKv::default()).expect("new");
        group.bench_with_input(BenchmarkId::new("meridian", cached), &cached, |b, _| {
            b.iter_custom(|iters| {
                let mut spent = Duration::ZERO;
                let mut left = iters;
                while left > 0 {
                    let now = left.min(BATCH);
                    let began = Instant::now();
                    for _ in 0..now {
                        black_box(manager.evict_for(wants, 1).expect("the memory is full of cache"));
                    }
                    spent += began.elapsed();
                    refill(now);
                    left -= now;
                }
                spent
            });
        });
        manager.audit().expect("the books balance");

        let mut plain: Vec<(u8, u64)> = (0..cached).map(|i| ((i % 2) as u8, i)).collect();
        let mut stamp = cached;
        group.bench_with_input(BenchmarkId::new("vec", cached), &cached, |b, _| {
            b.iter(|| {
                let (first, _) = plain.iter().enumerate().min_by_key(|(_, rank)| **rank).expect("never empty");
                stamp += 1;
                black_box(std::mem::replace(&mut plain[first], ((stamp % 2) as u8, stamp)))
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = core;
    config = Criterion::default().sample_size(40).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    targets = router, scheduler, blocks
}
criterion_main!(core);

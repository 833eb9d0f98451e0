//! What does the entropy of a row of logits cost, against reading it once, and against the formula as it is written?
//!
//! One row of 151,936 logits that stays in the second level cache or near it; `read` is a plain sum of the same `f32`,
//! `plain` three loops over them with `f32::exp`. What a row costs that comes from memory:
//! `cargo run --release -p meridian-kernels --example entropy_over_sum`.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use meridian_kernels::{Isa, Logits, Shape};

const VOCAB: usize = 151_936;

/// The formula as it is written.
fn plain(row: &[f32]) -> f32 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = row.iter().map(|x| (x - max).exp()).sum();
    let weighted: f32 = row.iter().map(|x| (x - max) * (x - max).exp()).sum();
    sum.ln() - weighted / sum
}

/// In parts, so that no addition waits for another.
fn read(row: &[f32]) -> [f32; 64] {
    let mut sums = [0.0; 64];
    for chunk in row.chunks_exact(64) {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x;
        }
    }
    sums
}

fn entropy(c: &mut Criterion) {
    let single: Vec<f32> = (0..VOCAB).map(|i| (i * 7919 % 1000) as f32 / 60.0).collect();
    let brain: Vec<u16> = single.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
    // Any bits below infinity are a number.
    let half: Vec<u16> = (0..VOCAB).map(|i| (i * 7919 % 0x4c00) as u16).collect();
    let shape = Shape::packed(1, VOCAB);
    let kinds = [
        ("f32", Logits::f32(&single, shape).expect("the shape fits")),
        ("bf16", Logits::bf16(&brain, shape).expect("the shape fits")),
        ("f16", Logits::f16(&half, shape).expect("the shape fits")),
    ];

    let mut group = c.benchmark_group("entropy");
    group.throughput(Throughput::Elements(VOCAB as u64));
    for (kind, logits) in &kinds {
        for isa in Isa::available() {
            group.bench_function(BenchmarkId::new(format!("{isa:?}"), kind), |b| {
                let mut nats = [0.0];
                b.iter(|| logits.entropy_with(isa, black_box(&[0]), &mut nats).map(|()| nats[0]));
            });
        }
    }
    group.bench_function("read/f32", |b| b.iter(|| read(black_box(&single))));
    group.bench_function("plain/f32", |b| b.iter(|| plain(black_box(&single))));
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(30);
    targets = entropy
}
criterion_main!(benches);

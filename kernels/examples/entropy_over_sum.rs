//! How much longer does the entropy of rows of logits take than reading their memory once? And how exact is it?
//!
//! For matrices of 64 rows of 151,936 logits, on one thread, a row at a time: the time of its entropy over that of a
//! plain SIMD sum, the median of many pairs. Both go round a buffer that is larger than the caches, half of it apart,
//! so neither finds what the other has just read. Then the largest difference from the formula in `f64`, over rows from
//! uniform to one token. One JSON line a kind of logits and a set of instructions:
//!
//! ```sh
//! cargo run --release -p meridian-kernels --example entropy_over_sum
//! ```

use std::hint::black_box;
use std::time::Instant;

use meridian_kernels::{Isa, KernelError, Logits, Shape};

const VOCAB: usize = 151_936;
const ROWS: usize = 64;
/// The largest cache of a current server is 0.5 GB.
const BUFFER_BYTES: usize = 1 << 30;
const ROUNDS: usize = 3;

/// Sums in `LANES` parts, eight registers full of them, so that no addition waits for another.
#[inline(always)]
fn lanes<T: Copy + Default, const LANES: usize>(values: &[T], add: impl Fn(T, T) -> T) -> [T; LANES] {
    let mut sums = [T::default(); LANES];
    for chunk in values.chunks_exact(LANES) {
        for i in 0..LANES {
            sums[i] = add(sums[i], chunk[i]);
        }
    }
    sums
}

macro_rules! sums {
    ($name:ident, $type:ty, $lanes:literal, $add:expr) => {
        fn $name(values: &[$type]) {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx512bw") {
                #[target_feature(enable = "avx512f,avx512bw")]
                fn wide(values: &[$type]) {
                    black_box(lanes::<$type, $lanes>(values, $add));
                }
                // SAFETY: the machine has AVX-512 BW, it was just asked, and F is part of it.
                #[expect(unsafe_code, reason = "instructions that a machine may not have")]
                return unsafe { wide(values) };
            }
            black_box(lanes::<$type, $lanes>(values, $add));
        }
    };
}

sums!(sum_f32, f32, 128, |a, b| a + b);
sums!(sum_u16, u16, 256, |a, b| a.wrapping_add(b));

/// Logits as a model makes them: near a normal distribution, a few standing out.
fn sample() -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..VOCAB).map(|_| 2.5 * ((0..12).map(|_| uniform()).sum::<f32>() - 6.0)).collect()
}

/// Microseconds of `work`.
fn timed(work: impl FnOnce()) -> f64 {
    let began = Instant::now();
    work();
    began.elapsed().as_secs_f64() * 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn measure<T: Copy>(
    name: &str,
    row: &[T],
    view: impl Fn(&[T]) -> Result<Logits<'_>, KernelError>,
    sum: impl Fn(&[T]),
) -> Result<(), KernelError> {
    let rows = BUFFER_BYTES / size_of_val(row) / ROWS * ROWS;
    let buffer = row.repeat(rows);
    let matrices: Vec<Logits<'_>> = buffer.chunks_exact(ROWS * VOCAB).map(view).collect::<Result<_, _>>()?;
    let mut nats = [0.0];
    for isa in Isa::available() {
        let (mut ratios, mut entropy_us, mut sum_us) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..ROUNDS * rows {
            let (i, other) = (i % rows, (i + rows / 2) % rows);
            let (matrix, chosen) = (&matrices[i / ROWS], [(i % ROWS) as u32]);
            let mut refused = Ok(());
            let entropy = timed(|| refused = matrix.entropy_with(isa, black_box(&chosen), &mut nats));
            refused?;
            black_box(&nats);
            let plain = timed(|| sum(black_box(&buffer[other * VOCAB..][..VOCAB])));
            ratios.push(entropy / plain);
            entropy_us.push(entropy);
            sum_us.push(plain);
        }
        let (value, entropy_us, sum_us) = (median(ratios), median(entropy_us), median(sum_us));
        let (gb_s, pairs, best) = (size_of_val(row) as f64 / sum_us / 1e3, ROUNDS * rows, isa == Isa::best());
        println!(
            "{{\"name\": \"entropy over a sum of the same bytes: {name}, {isa:?}\", \"value\": {value:.3}, \"unit\": \
             \"ratio\", \"entropy_us\": {entropy_us:.1}, \"sum_us\": {sum_us:.1}, \"sum_gb_s\": {gb_s:.1}, \"vocab\": \
             {VOCAB}, \"pairs\": {pairs}, \"best\": {best}}}"
        );
    }
    Ok(())
}

/// Largest difference from the formula in `f64`, in nats.
fn error(sample: &[f32]) -> Result<(), KernelError> {
    for isa in Isa::available() {
        let mut largest = 0f64;
        for exponent in -12..=24 {
            let row: Vec<f32> = sample.iter().map(|x| x * 2f32.powf(exponent as f32 / 4.0)).collect();
            let mut nats = [0.0];
            Logits::f32(&row, Shape::packed(1, VOCAB))?.entropy_with(isa, &[0], &mut nats)?;
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let (s, t) = row.iter().fold((0.0, 0.0), |(s, t), x| {
                let d = f64::from(*x) - f64::from(max);
                (s + d.exp(), t + d * d.exp())
            });
            largest = largest.max((f64::from(nats[0]) - (s.ln() - t / s)).abs());
        }
        println!(
            "{{\"name\": \"entropy: largest difference from f64: f32, {isa:?}\", \"value\": {largest:.2e}, \
             \"unit\": \"nats\", \"vocab\": {VOCAB}}}"
        );
    }
    Ok(())
}

fn main() -> Result<(), KernelError> {
    let shape = Shape::packed(ROWS, VOCAB);
    let sample = sample();
    measure("f32", &sample, |values| Logits::f32(values, shape), sum_f32)?;
    let bf16: Vec<u16> = sample.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
    measure("bf16", &bf16, |values| Logits::bf16(values, shape), sum_u16)?;
    let f16: Vec<u16> = sample.iter().map(|x| half(*x)).collect();
    measure("f16", &f16, |values| Logits::f16(values, shape), sum_u16)?;
    error(&sample)
}

/// Single precision to half, cut; enough for numbers that are normal in both.
fn half(x: f32) -> u16 {
    let bits = x.to_bits();
    let exponent = (bits >> 23 & 0xff) as i32 - 112;
    let sign = (bits >> 16 & 0x8000) as u16;
    if exponent <= 0 { sign } else { sign | (exponent as u16) << 10 | (bits >> 13 & 0x3ff) as u16 }
}

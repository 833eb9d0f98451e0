//! The loop in plain Rust: for machines without a path of their own, and what the others are compared with.

use super::row;
use super::simd::{Bf16, Kind, Simd};
use super::sums::Sums;

const LANES: usize = 8;

/// Arrays, which the compiler puts into whatever registers the target has.
#[derive(Clone, Copy)]
struct Arrays;

pub(super) fn sums<K: Kind>(values: &[K::Raw], temperature: f32) -> Option<Sums> {
    row::sums::<Arrays, K>(Arrays, values, temperature)
}

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], of: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    let mut out = a;
    for i in 0..LANES {
        out[i] = of(a[i], b[i]);
    }
    out
}

/// Fused where that is an instruction of the target and not a call.
#[inline(always)]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { a.mul_add(b, c) } else { a * b + c }
}

impl Simd for Arrays {
    type Floats = [f32; LANES];
    type Sums = [f64; LANES];
    const LANES: usize = LANES;

    #[inline(always)]
    fn splat(self, value: f32) -> [f32; LANES] {
        [value; LANES]
    }

    #[inline(always)]
    fn zero(self) -> [f64; LANES] {
        [0.0; LANES]
    }

    #[inline(always)]
    fn add(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; LANES], b: [f32; LANES], mut c: [f32; LANES]) -> [f32; LANES] {
        for i in 0..LANES {
            c[i] = fused(a[i], b[i], c[i]);
        }
        c
    }

    #[inline(always)]
    fn mul_sub(self, a: [f32; LANES], b: [f32; LANES], mut c: [f32; LANES]) -> [f32; LANES] {
        for i in 0..LANES {
            c[i] = fused(a[i], b[i], -c[i]);
        }
        c
    }

    #[inline(always)]
    fn max(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn scale(self, value: [f32; LANES], shifted: [f32; LANES]) -> [f32; LANES] {
        zip(value, shifted, |value, shifted| f32::from_bits(value.to_bits().wrapping_add(shifted.to_bits() << 23)))
    }

    #[inline(always)]
    fn any_above(self, a: [f32; LANES], b: [f32; LANES]) -> bool {
        let mut all = true;
        for i in 0..LANES {
            all &= a[i] <= b[i];
        }
        !all
    }

    #[inline(always)]
    fn largest(self, a: [f32; LANES]) -> f32 {
        let mut largest = f32::NEG_INFINITY;
        for value in a {
            largest = largest.max(value);
        }
        largest
    }

    #[inline(always)]
    fn accumulate(self, mut sums: [f64; LANES], values: [f32; LANES]) -> [f64; LANES] {
        for i in 0..LANES {
            sums[i] += f64::from(values[i]);
        }
        sums
    }

    #[inline(always)]
    fn total(self, sums: [f64; LANES]) -> f64 {
        sums.iter().sum()
    }

    #[inline(always)]
    fn prefetch_far(self, _address: *const u8) {}

    #[inline(always)]
    fn prefetch_near(self, _address: *const u8) {}

    #[inline(always)]
    fn load_f32(self, from: &[f32]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        out.copy_from_slice(&from[..LANES]);
        out
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16]) -> [f32; LANES] {
        let from = &from[..LANES];
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = Bf16::value(from[i]);
        }
        out
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16]) -> [f32; LANES] {
        let from = &from[..LANES];
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = widened(from[i]);
        }
        out
    }
}

/// Half precision to single, exactly. Without branches, so that it is done for all lanes at once.
#[inline(always)]
pub(super) fn widened(half: u16) -> f32 {
    let half = u32::from(half);
    // Exponent and fraction where those of an f32 are; the product puts the exponent's bias right, and makes normal
    // numbers of subnormal ones. Infinity and NaN come out as 2^16 and above, which no half is.
    let value = f32::from_bits((half & 0x7fff) << 13) * f32::from_bits((254 - 15) << 23);
    let top = if value >= 65536.0 { 0xff << 23 } else { 0 };
    f32::from_bits(value.to_bits() | top | (half & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::widened;

    #[test]
    fn every_half_is_widened_exactly() {
        for half in 0..=u16::MAX {
            let sign = if half & 0x8000 == 0 { 1.0 } else { -1.0 };
            let (exponent, fraction) = (i32::from(half >> 10 & 0x1f), f64::from(half & 0x3ff));
            let expected = match exponent {
                0 => fraction * 2f64.powi(-24),
                31 if fraction == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
            } * sign;
            let got = f64::from(widened(half));
            assert!(got == expected || got.is_nan() && expected.is_nan(), "{half:#x}: {got}, expected {expected}");
        }
    }
}

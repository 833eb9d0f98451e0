//! What the loop needs of a machine's registers, and how the kinds of logits come into them.

use super::portable::widened;

/// No register has more lanes.
pub(super) const MAX_LANES: usize = 16;

/// Registers of `f32` lanes. A value of the type is the proof that the machine has the instructions.
pub(crate) trait Simd: Copy {
    /// Some `f32`, [`Simd::LANES`] of them.
    type Floats: Copy;
    /// As many `f64` sums as the register likes to have.
    type Sums: Copy;
    const LANES: usize;

    fn splat(self, value: f32) -> Self::Floats;
    fn zero(self) -> Self::Sums;
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`; rounded once where the machine can.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// `a * b - c`, likewise.
    fn mul_sub(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// The larger of each lane; `b` where either is NaN.
    fn max(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `value * 2^n`, where `n` is the whole number in the low bits of `shifted`, and all results are normal.
    fn scale(self, value: Self::Floats, shifted: Self::Floats) -> Self::Floats;
    /// Whether `a <= b` fails in some lane, as it does for NaN.
    fn any_above(self, a: Self::Floats, b: Self::Floats) -> bool;
    /// The largest lane; any, or `-inf`, when there is a NaN.
    fn largest(self, a: Self::Floats) -> f32;
    /// Adds each lane to a sum.
    fn accumulate(self, sums: Self::Sums, values: Self::Floats) -> Self::Sums;
    fn total(self, sums: Self::Sums) -> f64;

    /// Asks for the memory at an address, which may be any, to be in the second level cache soon.
    fn prefetch_far(self, address: *const u8);
    /// Asks for the memory at an address, which may be any, to be in the first level cache soon.
    fn prefetch_near(self, address: *const u8);
    /// The first [`Simd::LANES`] of `from`.
    fn load_f32(self, from: &[f32]) -> Self::Floats;
    fn load_bf16(self, from: &[u16]) -> Self::Floats;
    fn load_f16(self, from: &[u16]) -> Self::Floats;
}

/// A kind of logits.
pub(crate) trait Kind {
    type Raw: Copy + 'static;
    /// Negative infinity.
    const MASKED: Self::Raw;

    fn value(raw: Self::Raw) -> f32;

    fn load<S: Simd>(simd: S, from: &[Self::Raw]) -> S::Floats;
}

pub(crate) struct F32;
pub(crate) struct Bf16;
pub(crate) struct F16;

impl Kind for F32 {
    type Raw = f32;
    const MASKED: f32 = f32::NEG_INFINITY;

    #[inline(always)]
    fn value(raw: f32) -> f32 {
        raw
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[f32]) -> S::Floats {
        simd.load_f32(from)
    }
}

impl Kind for Bf16 {
    type Raw = u16;
    const MASKED: u16 = 0xff80;

    #[inline(always)]
    fn value(raw: u16) -> f32 {
        f32::from_bits(u32::from(raw) << 16)
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[u16]) -> S::Floats {
        simd.load_bf16(from)
    }
}

impl Kind for F16 {
    type Raw = u16;
    const MASKED: u16 = 0xfc00;

    #[inline(always)]
    fn value(raw: u16) -> f32 {
        widened(raw)
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[u16]) -> S::Floats {
        simd.load_f16(from)
    }
}

//! The pass over one row, for any registers.

use super::simd::{Kind, MAX_LANES, Simd};
use super::sums::Sums;

/// Registers in a group. What is rare (a new maximum) is looked for once a group, and a group's sums are added in `f32`
/// before they go into `f64`: that is exact enough, and cheaper than `f64` throughout.
const GROUP: usize = 8;

const CACHE_LINE: usize = 64;

/// How far ahead memory is asked for, in bytes. A group's arithmetic fills the window in which the processor looks
/// ahead by itself, so without this a row takes as long as the memory and the arithmetic one after the other. Twice,
/// because the first level cache waits for few lines at a time, and the second for many.
const FAR: usize = 8192;
const NEAR: usize = 1024;

/// Differences from the maximum, divided by the temperature, are cut here. `exp` of it is so small that a vocabulary of them is lost beside the 1 of
/// the maximum, `2^n` is still a normal number, and a masked token's difference is one that can be multiplied.
const LOWEST: f32 = -86.0;

/// 1.5 * 2^23: adding it rounds to a whole number, which is then in the low bits.
const ROUND: f32 = 12_582_912.0;

/// `2^f` for `f` in [-0.5, 0.5]: minimax polynomial for the relative error, which is below 2e-7 after rounding. The
/// constant is 1, so that the maximum counts exactly 1.
const EXP2: [f32; 6] = [1.0, 0.693_146_94, 0.240_221_2, 0.055_507_13, 0.009_675_541, 0.001_327_647_2];

/// What has been read of a row.
struct Pass<S: Simd> {
    simd: S,
    /// `log2(e) / T`: so a temperature costs nothing but this factor's rounding, which is that of `T` itself.
    rate: S::Floats,
    /// `LOWEST * T`.
    lowest: S::Floats,
    /// The largest logit yet, once in each lane.
    max: S::Floats,
    /// `max`, but NaN until there is a logit, so that the first group and groups of masked tokens only are looked at.
    limit: S::Floats,
    /// Sums against `max`: of `exp((x - max) / T)`, and of that times `x - max`.
    exp: S::Sums,
    weighted: S::Sums,
    moved: Moved,
}

/// Sums of earlier groups, moved over from the maximum they were made against.
struct Moved {
    temperature: f64,
    max: f32,
    /// Where the group begins that had this maximum first.
    from: usize,
    exp: f64,
    weighted: f64,
}

/// The row has a NaN or `+inf`.
struct NoDistribution;

impl Moved {
    /// From one maximum to a larger one: `exp(x - b) = exp(x - a) exp(a - b)`, and `x - b = (x - a) + (a - b)`. In the
    /// exponents all is divided by `T`.
    fn move_to(&mut self, max: f32) {
        // Before the first maximum nothing was added up, and the distance to -inf is no number.
        if self.max > f32::NEG_INFINITY {
            let by = f64::from(self.max) - f64::from(max);
            let factor = (by / self.temperature).exp();
            self.weighted = factor * (self.weighted + by * self.exp);
            self.exp *= factor;
        }
        self.max = max;
    }
}

/// The sums of `row` at a temperature of [`TAME`](super::sums::TAME); none when it is no distribution.
// Everything that names a register is inlined into one function per machine, which is compiled for its instructions.
// That is also why there are loops here where an iterator would do.
#[inline(always)]
pub(super) fn sums<S: Simd, K: Kind>(simd: S, row: &[K::Raw], temperature: f32) -> Option<Sums> {
    let mut pass = Pass {
        simd,
        rate: simd.splat((std::f64::consts::LOG2_E / f64::from(temperature)) as f32),
        lowest: simd.splat(LOWEST * temperature),
        max: simd.splat(f32::NEG_INFINITY),
        limit: simd.splat(f32::NAN),
        exp: simd.zero(),
        weighted: simd.zero(),
        moved: Moved { temperature: f64::from(temperature), max: f32::NEG_INFINITY, from: 0, exp: 0.0, weighted: 0.0 },
    };
    let mut groups = row.chunks_exact(GROUP * S::LANES);
    let mut from = 0;
    for group in &mut groups {
        pass.group::<K>(group, from).ok()?;
        from += GROUP * S::LANES;
    }
    let rest = groups.remainder();
    if !rest.is_empty() {
        let mut padded = [K::MASKED; GROUP * MAX_LANES];
        padded[..rest.len()].copy_from_slice(rest);
        pass.group::<K>(&padded[..GROUP * S::LANES], from).ok()?;
    }
    pass.end()
}

impl<S: Simd> Pass<S> {
    #[inline(always)]
    fn group<K: Kind>(&mut self, group: &[K::Raw], from: usize) -> Result<(), NoDistribution> {
        let simd = self.simd;
        let bytes = group.as_ptr().cast::<u8>();
        for line in (0..size_of_val(group)).step_by(CACHE_LINE) {
            simd.prefetch_far(bytes.wrapping_add(FAR + line));
            simd.prefetch_near(bytes.wrapping_add(NEAR + line));
        }
        let mut x = [self.max; GROUP];
        for i in 0..GROUP {
            x[i] = K::load(simd, &group[i * S::LANES..][..S::LANES]);
        }
        let mut top = x[0];
        for other in &x[1..] {
            top = simd.max(top, *other);
        }
        if simd.any_above(top, self.limit) {
            let found = simd.largest(top);
            let mut is_number = found < f32::INFINITY;
            for x in &x {
                is_number &= !simd.any_above(*x, *x);
            }
            if !is_number {
                return Err(NoDistribution);
            }
            if found == f32::NEG_INFINITY {
                return Ok(());
            }
            self.rise(found, from);
        }

        let (mut d, mut e) = (x, x);
        for i in 0..GROUP {
            d[i] = simd.max(self.lowest, simd.sub(x[i], self.max));
            e[i] = exp(simd, d[i], self.rate);
        }
        // Two of each, so that no sum waits for the one before it.
        let mut sum = [e[0], e[1]];
        let mut product = [simd.mul(d[0], e[0]), simd.mul(d[1], e[1])];
        for i in 2..GROUP {
            sum[i % 2] = simd.add(sum[i % 2], e[i]);
            product[i % 2] = simd.mul_add(d[i], e[i], product[i % 2]);
        }
        self.exp = simd.accumulate(self.exp, simd.add(sum[0], sum[1]));
        self.weighted = simd.accumulate(self.weighted, simd.add(product[0], product[1]));
        Ok(())
    }

    /// A larger maximum: a few times a row, unless the row is sorted.
    #[inline(always)]
    fn rise(&mut self, max: f32, from: usize) {
        let simd = self.simd;
        self.moved.exp += simd.total(self.exp);
        self.moved.weighted += simd.total(self.weighted);
        self.moved.move_to(max);
        self.moved.from = from;
        (self.exp, self.weighted) = (simd.zero(), simd.zero());
        (self.max, self.limit) = (simd.splat(max), simd.splat(max));
    }

    #[inline(always)]
    fn end(&self) -> Option<Sums> {
        let Moved { temperature, max, from, .. } = self.moved;
        let exp = self.moved.exp + self.simd.total(self.exp);
        let weighted = self.moved.weighted + self.simd.total(self.weighted);
        // A NaN that another logit hid from the comparisons is in this sum.
        (max > f32::NEG_INFINITY && !weighted.is_nan()).then_some(Sums { temperature, max, from, exp, weighted })
    }
}

/// `2^(d * rate)` for `d` from `LOWEST * T` to 0, as `2^n 2^f` with `n` whole. Anything for NaN, whose product with it is NaN.
#[inline(always)]
fn exp<S: Simd>(simd: S, d: S::Floats, rate: S::Floats) -> S::Floats {
    let shifted = simd.mul_add(d, rate, simd.splat(ROUND));
    let n = simd.sub(shifted, simd.splat(ROUND));
    let f = simd.mul_sub(d, rate, n);
    let mut value = simd.splat(EXP2[5]);
    for i in (0..5).rev() {
        value = simd.mul_add(value, f, simd.splat(EXP2[i]));
    }
    simd.scale(value, shifted)
}

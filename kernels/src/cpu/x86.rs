//! AVX2 and AVX-512.
#![expect(unsafe_code, reason = "instructions that a machine may not have")]

use std::arch::x86_64::*;

use super::row;
use super::simd::{Kind, Simd};
use super::sums::Sums;

/// AVX2, FMA and F16C. A value of it exists only where the machine has them.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

/// AVX-512 F and what every machine with it has (AVX2, FMA). A value of it exists only where the machine has them.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let has =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }

    pub(super) fn sums<K: Kind>(self, values: &[K::Raw], temperature: f32) -> Option<Sums> {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<K: Kind>(simd: Avx2, values: &[K::Raw], temperature: f32) -> Option<Sums> {
            row::sums::<Avx2, K>(simd, values, temperature)
        }
        // SAFETY: the machine has the features, or there were no `self`.
        unsafe { compiled::<K>(self, values, temperature) }
    }
}

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let has =
            is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        has.then_some(Self(()))
    }

    pub(super) fn sums<K: Kind>(self, values: &[K::Raw], temperature: f32) -> Option<Sums> {
        #[target_feature(enable = "avx512f,avx2,fma")]
        fn compiled<K: Kind>(simd: Avx512, values: &[K::Raw], temperature: f32) -> Option<Sums> {
            row::sums::<Avx512, K>(simd, values, temperature)
        }
        // SAFETY: the machine has the features, or there were no `self`.
        unsafe { compiled::<K>(self, values, temperature) }
    }
}

/// Instructions without an address, of the features whose presence `self` proves.
macro_rules! lanes {
    ($value:expr) => {{
        // SAFETY: the instructions read and write registers only, and the machine has them, or there were no `self`.
        unsafe { $value }
    }};
}

impl Simd for Avx2 {
    type Floats = __m256;
    type Sums = [__m256d; 2];
    const LANES: usize = 8;

    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        lanes!(_mm256_set1_ps(value))
    }

    #[inline(always)]
    fn zero(self) -> [__m256d; 2] {
        lanes!([_mm256_setzero_pd(); 2])
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        lanes!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        lanes!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        lanes!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        lanes!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn mul_sub(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        lanes!(_mm256_fmsub_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        lanes!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn scale(self, value: __m256, shifted: __m256) -> __m256 {
        lanes!({
            let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value), exponent))
        })
    }

    #[inline(always)]
    fn any_above(self, a: __m256, b: __m256) -> bool {
        lanes!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NLE_UQ>(a, b)) != 0)
    }

    #[inline(always)]
    fn largest(self, a: __m256) -> f32 {
        lanes!({
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        })
    }

    #[inline(always)]
    fn accumulate(self, sums: [__m256d; 2], values: __m256) -> [__m256d; 2] {
        lanes!({
            let (low, high) = (_mm256_castps256_ps128(values), _mm256_extractf128_ps::<1>(values));
            [_mm256_add_pd(sums[0], _mm256_cvtps_pd(low)), _mm256_add_pd(sums[1], _mm256_cvtps_pd(high))]
        })
    }

    #[inline(always)]
    fn total(self, sums: [__m256d; 2]) -> f64 {
        lanes!({
            let sum = _mm256_add_pd(sums[0], sums[1]);
            let sum = _mm_add_pd(_mm256_castpd256_pd128(sum), _mm256_extractf128_pd::<1>(sum));
            _mm_cvtsd_f64(_mm_add_sd(sum, _mm_unpackhi_pd(sum, sum)))
        })
    }

    #[inline(always)]
    fn prefetch_far(self, address: *const u8) {
        // SAFETY: a hint, which accesses nothing; every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }

    #[inline(always)]
    fn prefetch_near(self, address: *const u8) {
        // SAFETY: a hint, which accesses nothing; every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    #[inline(always)]
    fn load_f32(self, from: &[f32]) -> __m256 {
        let from = &from[..8];
        // SAFETY: 8 f32 can be read here, at any alignment; the machine has the load, or there were no `self`.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16]) -> __m256 {
        let from = &from[..8];
        // SAFETY: 8 u16 can be read here, at any alignment; the machine has the load, or there were no `self`.
        let bits = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
        lanes!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits))))
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16]) -> __m256 {
        let from = &from[..8];
        // SAFETY: 8 u16 can be read here, at any alignment; the machine has the load, or there were no `self`.
        let bits = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
        lanes!(_mm256_cvtph_ps(bits))
    }
}

impl Simd for Avx512 {
    type Floats = __m512;
    type Sums = [__m512d; 2];
    const LANES: usize = 16;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        lanes!(_mm512_set1_ps(value))
    }

    #[inline(always)]
    fn zero(self) -> [__m512d; 2] {
        lanes!([_mm512_setzero_pd(); 2])
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        lanes!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        lanes!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        lanes!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        lanes!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn mul_sub(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        lanes!(_mm512_fmsub_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        lanes!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn scale(self, value: __m512, shifted: __m512) -> __m512 {
        lanes!({
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(value), exponent))
        })
    }

    #[inline(always)]
    fn any_above(self, a: __m512, b: __m512) -> bool {
        lanes!(_mm512_cmp_ps_mask::<_CMP_NLE_UQ>(a, b) != 0)
    }

    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        lanes!(_mm512_reduce_max_ps(a))
    }

    #[inline(always)]
    fn accumulate(self, sums: [__m512d; 2], values: __m512) -> [__m512d; 2] {
        lanes!({
            let low = _mm512_castps512_ps256(values);
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(values)));
            [_mm512_add_pd(sums[0], _mm512_cvtps_pd(low)), _mm512_add_pd(sums[1], _mm512_cvtps_pd(high))]
        })
    }

    #[inline(always)]
    fn total(self, sums: [__m512d; 2]) -> f64 {
        lanes!(_mm512_reduce_add_pd(_mm512_add_pd(sums[0], sums[1])))
    }

    #[inline(always)]
    fn prefetch_far(self, address: *const u8) {
        // SAFETY: a hint, which accesses nothing; every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }

    #[inline(always)]
    fn prefetch_near(self, address: *const u8) {
        // SAFETY: a hint, which accesses nothing; every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    #[inline(always)]
    fn load_f32(self, from: &[f32]) -> __m512 {
        let from = &from[..16];
        // SAFETY: 16 f32 can be read here, at any alignment; the machine has the load, or there were no `self`.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16]) -> __m512 {
        let from = &from[..16];
        // SAFETY: 16 u16 can be read here, at any alignment; the machine has the load, or there were no `self`.
        let bits = unsafe { _mm256_loadu_si256(from.as_ptr().cast()) };
        lanes!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits))))
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16]) -> __m512 {
        let from = &from[..16];
        // SAFETY: 16 u16 can be read here, at any alignment; the machine has the load, or there were no `self`.
        let bits = unsafe { _mm256_loadu_si256(from.as_ptr().cast()) };
        lanes!(_mm512_cvtph_ps(bits))
    }
}

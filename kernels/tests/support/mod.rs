//! Matrices of every kind of logits, and the reference.

use meridian_kernels::{Element, Logits, Shape};

pub const ALL: [Element; 3] = [Element::F32, Element::Bf16, Element::F16];

/// Logits of one kind with their memory.
pub struct Matrix {
    pub element: Element,
    pub shape: Shape,
    single: Vec<f32>,
    half: Vec<u16>,
}

impl Matrix {
    /// `values`, rounded to the kind.
    pub fn new(element: Element, rows: usize, vocab: usize, row_stride: usize, values: &[f32]) -> Self {
        let mut matrix =
            Self { element, shape: Shape { rows, vocab, row_stride }, single: Vec::new(), half: Vec::new() };
        match element {
            Element::F32 => matrix.single = values.to_vec(),
            Element::Bf16 | Element::F16 => {
                matrix.half = values.iter().map(|value| bits_of(element, *value) as u16).collect();
            }
        }
        matrix
    }

    pub fn logits(&self) -> Logits<'_> {
        match self.element {
            Element::F32 => Logits::f32(&self.single, self.shape),
            Element::Bf16 => Logits::bf16(&self.half, self.shape),
            Element::F16 => Logits::f16(&self.half, self.shape),
        }
        .expect("the shape fits")
    }

    /// What a row holds after rounding.
    pub fn values(&self, row: u32) -> Vec<f32> {
        let range = row as usize * self.shape.row_stride..row as usize * self.shape.row_stride + self.shape.vocab;
        match self.element {
            Element::F32 => self.single[range].to_vec(),
            element => self.half[range].iter().map(|bits| value_of(element, u32::from(*bits))).collect(),
        }
    }
}

/// The value of the low bits that a logit of this kind has.
pub fn value_of(element: Element, bits: u32) -> f32 {
    match element {
        Element::F32 => f32::from_bits(bits),
        Element::Bf16 => f32::from_bits(bits << 16),
        Element::F16 => {
            let (exponent, fraction) = ((bits >> 10 & 0x1f) as i32, (bits & 0x3ff) as f32);
            let size = match exponent {
                0 => fraction * 2f32.powi(-24),
                31 if fraction == 0.0 => f32::INFINITY,
                31 => f32::NAN,
                _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
            };
            if bits & 0x8000 == 0 { size } else { -size }
        }
    }
}

/// The bits of a value of this kind that is near; infinity where the kind has none so large, a NaN for a NaN.
pub fn bits_of(element: Element, value: f32) -> u32 {
    let bits = value.to_bits();
    match element {
        Element::F32 => bits,
        Element::Bf16 if value.is_nan() => bits >> 16 | 0x40,
        Element::Bf16 => bits >> 16,
        Element::F16 => {
            let (sign, size) = (bits >> 16 & 0x8000, value.abs());
            sign | if value.is_nan() {
                0x7e00 | bits & 0x3ff
            } else if size >= 65536.0 {
                0x7c00
            } else if size < 2f32.powi(-14) {
                (size * 2f32.powi(24)) as u32
            } else {
                (bits >> 13 & 0x3_ffff) - (112 << 10)
            }
        }
    }
}

/// `ln s - t / s` and `ln s` at a temperature, in `f64`; NaN for what is no distribution.
pub fn reference(values: &[f32], temperature: f32) -> (f64, f64) {
    let bad = values.iter().any(|x| x.is_nan() || *x == f32::INFINITY);
    let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if bad || max == f32::NEG_INFINITY {
        return (f64::NAN, f64::NAN);
    }
    let (mut s, mut t) = (0.0, 0.0);
    for x in values.iter().filter(|x| x.is_finite()) {
        let d = (f64::from(*x) - f64::from(max)) / f64::from(temperature);
        s += d.exp();
        t += d * d.exp();
    }
    (s.ln() - t / s, s.ln())
}

/// Mask a part of the logits, and put into the gaps between the rows what is nobody's business.
pub fn mask(values: &mut [f32], shape: Shape, masked: f32, mut seed: u64) {
    for (i, value) in values.iter_mut().enumerate() {
        if uniform(&mut seed) < masked {
            *value = f32::NEG_INFINITY;
        }
        if i % shape.row_stride >= shape.vocab {
            *value = f32::NAN;
        }
    }
}

pub fn uniform(seed: &mut u64) -> f32 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 40) as f32 / (1u64 << 24) as f32
}

/// Near a normal distribution with this deviation.
pub fn normal(len: usize, scale: f32, mut seed: u64) -> Vec<f32> {
    (0..len).map(|_| scale * ((0..12).map(|_| uniform(&mut seed)).sum::<f32>() - 6.0)).collect()
}

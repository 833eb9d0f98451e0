//! Entropies against the formula in `f64`, on every set of instructions that the machine has.

mod support;

use meridian_kernels::{Element, Isa, Shape};
use proptest::prelude::*;
use support::{ALL, Matrix, bits_of, mask, normal, reference, value_of};

const BOUND: f64 = 1e-5;
/// Qwen3.
const VOCAB: usize = 151_936;

/// Every set of instructions is within `BOUND` of the reference, or NaN where it is.
fn check(matrix: &Matrix) {
    let rows: Vec<u32> = (0..matrix.shape.rows as u32).collect();
    let expected: Vec<f64> = rows.iter().map(|row| reference(&matrix.values(*row), 1.0).0).collect();
    for isa in Isa::available() {
        let mut nats = vec![-1.0; rows.len()];
        matrix.logits().entropy_with(isa, &rows, &mut nats).expect("the rows are there");
        for (row, (got, expected)) in nats.iter().zip(&expected).enumerate() {
            let near = *got >= 0.0 && (f64::from(*got) - expected).abs() <= BOUND;
            let both = got.is_nan() && expected.is_nan();
            assert!(near || both, "{isa:?} {:?} row {row}: {got}, expected {expected}", matrix.element);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn any_matrix(
        rows in 0usize..5,
        vocab in 1usize..900,
        gap in 0usize..20,
        // From a uniform distribution to one token.
        scale in -4f32..4.0,
        offset in -50f32..50.0,
        masked in prop_oneof![Just(0.0f32), 0f32..1.0, Just(1.0)],
        element in prop::sample::select(ALL.to_vec()),
        seed: u64,
    ) {
        let stride = vocab + gap;
        let mut values = normal(rows * stride, 10f32.powf(scale), seed);
        values.iter_mut().for_each(|value| *value += offset);
        mask(&mut values, Shape { rows, vocab, row_stride: stride }, masked, seed);
        check(&Matrix::new(element, rows, vocab, stride, &values));
    }

    #[test]
    fn any_bits(
        element in prop::sample::select(ALL.to_vec()),
        bits in prop::collection::vec(any::<u32>(), 1..400),
        finite: bool,
    ) {
        let mut values: Vec<f32> = bits.iter().map(|bits| value_of(element, *bits)).collect();
        if finite {
            values.retain(|value| *value < f32::INFINITY);
            values.push(0.0);
        }
        check(&Matrix::new(element, 1, values.len(), values.len(), &values));
    }

    #[test]
    fn rows_in_any_order(
        chosen in prop::collection::vec(0u32..7, 0..20),
        element in prop::sample::select(ALL.to_vec()),
    ) {
        let matrix = Matrix::new(element, 7, 300, 301, &normal(7 * 301, 3.0, 5));
        let mut nats = vec![0.0; chosen.len()];
        matrix.logits().entropy(&chosen, &mut nats).unwrap();
        for (row, got) in chosen.iter().zip(nats) {
            let mut alone = [0.0];
            matrix.logits().entropy(&[*row], &mut alone).unwrap();
            prop_assert_eq!(got, alone[0]);
        }
    }
}

#[test]
fn a_whole_vocabulary() {
    for element in ALL {
        for scale in [0.0, 1e-3, 0.1, 0.5, 1.0, 2.5, 5.0, 20.0, 300.0, 1e4] {
            check(&Matrix::new(element, 1, VOCAB, VOCAB, &normal(VOCAB, scale, 7)));
        }
        // One token against many equal ones, where every rounding goes the same way.
        for below in [0.1f32, 1.0, 3.3, 7.7, 10.1, 11.93, 12.7, 15.1, 20.0, 60.0, 90.0, 2000.0] {
            let mut values = vec![0.3 - below; VOCAB];
            for at in [0, 77_777, VOCAB - 1] {
                values[at] = 0.3;
                check(&Matrix::new(element, 1, VOCAB, VOCAB, &values));
                values[at] = 0.3 - below;
            }
        }
        // The maximum rises in every group, or never.
        let mut values = normal(VOCAB, 2.5, 11);
        values.sort_by(f32::total_cmp);
        check(&Matrix::new(element, 1, VOCAB, VOCAB, &values));
        values.reverse();
        check(&Matrix::new(element, 1, VOCAB, VOCAB, &values));
        // A grammar's mask: a few tokens may come, at the end.
        values[..VOCAB - 3].fill(f32::NEG_INFINITY);
        check(&Matrix::new(element, 1, VOCAB, VOCAB, &values));
    }
}

#[test]
fn extremes() {
    let cases: [&[f32]; 12] = [
        &[1e30, -1e30, 3.0],
        &[-1e30, 1e30, 1e30],
        &[f32::MIN, f32::MAX],
        &[f32::MAX, f32::MAX, f32::MIN],
        &[f32::MIN; 300],
        &[-1e30; 7],
        &[f32::MIN_POSITIVE / 4.0, -f32::from_bits(1), 0.0, -0.0],
        &[f32::from_bits(1); 130],
        &[f32::NEG_INFINITY, -3e38],
        &[5.0],
        &[f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0],
        &[-87.0, 0.0, -85.9, -86.1, -103.0, -104.0],
    ];
    for element in ALL {
        for case in cases {
            check(&Matrix::new(element, 1, case.len(), case.len(), case));
        }
    }
}

#[test]
fn no_distribution_is_nan_wherever_it_shows() {
    for element in ALL {
        for len in [1, 2, 63, 64, 65, 128, 129, 256, 300] {
            for at in 0..len {
                // A quiet NaN, one whose low bits an exponent could be made of, and infinity.
                for bad in [f32::NAN, f32::from_bits(0x7fff_ffff), f32::from_bits(0xffc0_0001), f32::INFINITY] {
                    for others in [0.0, 50.0, f32::NEG_INFINITY] {
                        let mut values = vec![others; len];
                        values[at] = bad;
                        for isa in Isa::available() {
                            let matrix = Matrix::new(element, 1, len, len, &values);
                            let mut nats = [0.0];
                            matrix.logits().entropy_with(isa, &[0], &mut nats).unwrap();
                            assert!(nats[0].is_nan(), "{isa:?} {element:?} {bad} at {at} of {len}: {}", nats[0]);
                        }
                    }
                }
            }
            check(&Matrix::new(element, 2, len, len, &vec![f32::NEG_INFINITY; 2 * len]));
        }
    }
}

#[test]
fn masked_tokens_count_for_nothing() {
    for element in ALL {
        let kept = normal(50, 2.0, 3);
        let mut spread = vec![f32::NEG_INFINITY; 50 * 97];
        for (i, value) in kept.iter().enumerate() {
            spread[i * 97 + i] = *value;
        }
        for isa in Isa::available() {
            let mut nats = [0.0; 2];
            for (values, out) in [&kept, &spread].into_iter().zip(&mut nats) {
                let matrix = Matrix::new(element, 1, values.len(), values.len(), values);
                matrix.logits().entropy_with(isa, &[0], std::slice::from_mut(out)).unwrap();
            }
            assert!((nats[0] - nats[1]).abs() <= 1e-6, "{isa:?}: {nats:?}");
        }
    }
}

#[test]
fn the_references_conversions_are_each_others_inverse() {
    for bits in 0..=u16::MAX {
        for element in [Element::Bf16, Element::F16] {
            let value = value_of(element, u32::from(bits));
            assert!(value.is_nan() || bits_of(element, value) == u32::from(bits), "{element:?} {bits:#x}");
        }
    }
}

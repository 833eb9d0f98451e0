//! All that is said of a row, against `f64`, on every set of instructions that the machine has.

mod support;

use meridian_kernels::{Element, Isa, Logits, Request, RowStats, Shape, Tokens};
use proptest::prelude::*;
use support::{ALL, Matrix, bits_of, mask, normal, reference, uniform, value_of};

const BOUND: f64 = 1e-5;
const VOCAB: usize = 151_936;

/// What one row's answer must be near to.
fn check_row(values: &[f32], temperature: f32, token: i32, got: &RowStats, what: &str) {
    let (nats, ln_s) = reference(values, temperature);
    if nats.is_nan() {
        // Not `==`, for which no NaN is itself.
        assert_eq!(format!("{got:?}"), format!("{:?}", RowStats::NONE), "{what}");
        return;
    }
    let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    assert_eq!(got.max, max, "{what}");
    assert_eq!(usize::try_from(got.top).ok(), values.iter().position(|x| *x == max), "{what}");
    assert!(got.entropy >= 0.0 && (f64::from(got.entropy) - nats).abs() <= BOUND, "{what}: {got:?}, nats {nats}");
    let logsumexp = f64::from(max) / f64::from(temperature) + ln_s;
    let rounded = logsumexp as f32;
    let near = (f64::from(got.logsumexp) - logsumexp).abs() <= BOUND + 1e-7 * logsumexp.abs();
    assert!(near || rounded.is_infinite() && got.logsumexp == rounded, "{what}: {got:?}, logsumexp {logsumexp}");
    match usize::try_from(token).ok().and_then(|token| values.get(token)) {
        None => assert!(got.probability.is_nan(), "{what}: {got:?}"),
        Some(x) => {
            let d = (f64::from(*x) - f64::from(max)) / f64::from(temperature);
            let p = (d - ln_s).exp();
            let near = (f64::from(got.probability) - p).abs() <= BOUND * p + 1e-38;
            assert!(near, "{what}: {got:?}, probability {p}");
            assert!((0.0..=1.0).contains(&got.probability), "{what}: {got:?}");
        }
    }
    assert_eq!(got.eat.probes, 0);
}

fn check(matrix: &Matrix, request: &Request<'_>) {
    let count = request.rows.map_or(matrix.shape.rows, <[u32]>::len);
    for isa in Isa::available() {
        let mut answers = vec![RowStats::NONE; count];
        matrix.logits().measure_with(isa, request, &mut answers).expect("the request fits");
        for (i, got) in answers.iter().enumerate() {
            let row = request.rows.map_or(i as u32, |rows| rows[i]);
            let temperature = request.temperatures.get(i).copied().unwrap_or(1.0);
            let token = if let Tokens::Host(tokens) = request.tokens { tokens[i] } else { -1 };
            let what = format!("{isa:?} {:?} row {row} T {temperature} token {token}", matrix.element);
            check_row(&matrix.values(row), temperature, token, got, &what);
        }
    }
}

/// One row at one temperature, and each token of `tokens`.
fn check_one(element: Element, values: &[f32], temperature: f32, tokens: &[i32]) {
    let matrix = Matrix::new(element, 1, values.len(), values.len(), values);
    let (rows, temperatures) = (vec![0; tokens.len()], vec![temperature; tokens.len()]);
    check(&matrix, &Request { rows: Some(&rows), tokens: Tokens::Host(tokens), temperatures: &temperatures });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn any_request(
        rows in 1usize..6,
        vocab in 1usize..700,
        gap in 0usize..20,
        scale in -4f32..4.0,
        offset in -50f32..50.0,
        masked in prop_oneof![Just(0.0f32), 0f32..1.0, Just(1.0)],
        chosen in prop::option::of(prop::collection::vec(any::<prop::sample::Index>(), 0..12)),
        heat in prop_oneof![4 => -1f32..1.0, 1 => -36f32..36.0],
        is_tempered: bool,
        element in prop::sample::select(ALL.to_vec()),
        seed: u64,
    ) {
        let mut seed = seed;
        let stride = vocab + gap;
        let mut values = normal(rows * stride, 10f32.powf(scale), seed);
        for value in &mut values {
            // Few values, so that the maximum is there more than once.
            *value = if uniform(&mut seed) < 0.5 { (*value + offset).round() } else { *value + offset };
        }
        mask(&mut values, Shape { rows, vocab, row_stride: stride }, masked, seed);
        let chosen: Option<Vec<u32>> =
            chosen.map(|chosen| chosen.iter().map(|index| index.index(rows) as u32).collect());
        let count = chosen.as_ref().map_or(rows, Vec::len);
        let tokens: Vec<i32> = (0..count).map(|_| (uniform(&mut seed) * (vocab + 4) as f32) as i32 - 2).collect();
        let temperatures: Vec<f32> =
            (0..count).map(|_| 10f32.powf(heat + uniform(&mut seed))).filter(|_| is_tempered).collect();
        let request = Request {
            rows: chosen.as_deref(),
            tokens: Tokens::Host(&tokens),
            temperatures: &temperatures,
        };
        check(&Matrix::new(element, rows, vocab, stride, &values), &request);
    }

    #[test]
    fn any_bits(
        element in prop::sample::select(ALL.to_vec()),
        bits in prop::collection::vec(any::<u32>(), 1..400),
        finite: bool,
        heat in 1u32..0x7f80_0000,
        token in -1i32..400,
    ) {
        let mut values: Vec<f32> = bits.iter().map(|bits| value_of(element, *bits)).collect();
        if finite {
            values.retain(|value| *value < f32::INFINITY);
            values.push(0.0);
        }
        check_one(element, &values, f32::from_bits(heat), &[token]);
    }

    #[test]
    fn without_temperatures_it_is_what_entropy_gives(
        element in prop::sample::select(ALL.to_vec()),
        vocab in 1usize..900,
        scale in -2f32..3.0,
        seed: u64,
    ) {
        let matrix = Matrix::new(element, 1, vocab, vocab, &normal(vocab, 10f32.powf(scale), seed));
        for isa in Isa::available() {
            let (mut nats, mut answers) = ([0.0], [RowStats::NONE; 2]);
            matrix.logits().entropy_with(isa, &[0], &mut nats).unwrap();
            for (temperatures, answer) in [&[][..], &[1.0]].into_iter().zip(answers.chunks_mut(1)) {
                matrix.logits().measure_with(isa, &Request { temperatures, ..Request::default() }, answer).unwrap();
                prop_assert_eq!(answer[0].entropy.to_bits(), nats[0].to_bits());
            }
        }
    }
}

#[test]
fn a_whole_vocabulary() {
    for element in ALL {
        for scale in [0.0, 0.1, 1.0, 2.5, 20.0, 300.0] {
            let values = normal(VOCAB, scale, 7);
            for temperature in [0.01, 0.6, 1.0, 1.7, 50.0] {
                check_one(element, &values, temperature, &[0, 4711, VOCAB as i32 - 1]);
            }
        }
        // One token against many equal ones, where every rounding goes the same way.
        for below in [0.1f32, 3.3, 11.93, 20.0, 90.0] {
            let mut values = vec![0.3 - below; VOCAB];
            values[77_777] = 0.3;
            for temperature in [0.3, 0.7, 1.1, 7.0] {
                check_one(element, &values, temperature, &[0, 77_777]);
            }
        }
    }
}

#[test]
fn the_first_of_equal_maxima_wherever_they_are() {
    for element in ALL {
        for len in [1, 2, 63, 64, 65, 127, 128, 129, 256, 257, 600] {
            for first in [0, len / 3, len / 2, len - 1] {
                let mut values = normal(len, 1.0, len as u64);
                for at in (first..len).step_by(61).chain([first]) {
                    values[at] = 64.0;
                }
                check_one(element, &values, 0.8, &[first as i32]);
                values.iter_mut().filter(|x| **x < 64.0).for_each(|x| *x = f32::NEG_INFINITY);
                check_one(element, &values, 0.8, &[first as i32, (first as i32 + 1) % len as i32]);
            }
        }
        // Both zeros are the same number.
        check_one(element, &[-1.0, -0.0, 0.0], 1.0, &[1, 2]);
        check_one(element, &[-1.0, 0.0, -0.0], 1.0, &[1, 2]);
    }
}

/// From the most likely tokens alone to all as likely, and nothing in between that is neither.
#[test]
fn temperatures_at_the_ends_of_f32() {
    let tiny = f32::from_bits(1);
    for element in ALL {
        let rows: [&[f32]; 7] = [
            &[1.0, 3.0, 2.0, f32::NEG_INFINITY],
            &[1.0, 3.0, 3.0, f32::NEG_INFINITY],
            &[-60000.0, 60000.0, 0.0, 0.0],
            &[1e38, -1e38, f32::NEG_INFINITY, f32::MAX],
            &[f32::MIN, f32::MIN, 1e-30, -1e-30],
            &[0.0, 1e-30, -2e-30, f32::NEG_INFINITY],
            &[f32::from_bits(3), f32::from_bits(1), 0.0, 0.0],
        ];
        for row in rows {
            let values: Vec<f32> = row.iter().map(|x| value_of(element, bits_of(element, *x))).collect();
            for temperature in [tiny, 1e-41, 2e-38, 1e-31, 1e-30, 1e-20, 1e20, 1e30, 2e30, 1e37, 3e38, f32::MAX] {
                check_one(element, &values, temperature, &[0, 1, 2, 3]);
            }
        }
    }
    let values = [1.0, 3.0, 3.0, f32::NEG_INFINITY];
    let logits = Logits::f32(&values, Shape::packed(1, 4)).unwrap();
    let measured = |temperature, token| {
        let mut answers = [RowStats::NONE];
        let request = Request { tokens: Tokens::Host(&[token]), temperatures: &[temperature], ..Request::default() };
        logits.measure(&request, &mut answers).unwrap();
        answers[0]
    };
    for cold in [tiny, 1e-30, 1e-10] {
        let (second, first) = (measured(cold, 1), measured(cold, 0));
        assert_eq!((second.probability, first.probability, second.top), (0.5, 0.0, 1));
        assert_eq!(second.entropy, 2f32.ln());
        assert_eq!(second.logsumexp, (3.0 / f64::from(cold) + 2f64.ln()) as f32);
    }
    for hot in [1e10, 1e30, f32::MAX] {
        let (first, masked) = (measured(hot, 0), measured(hot, 3));
        assert!((first.probability - 1.0 / 3.0).abs() < 1e-6 && masked.probability == 0.0, "{first:?} {masked:?}");
        assert!((first.entropy - 3f32.ln()).abs() < 1e-6, "{first:?}");
        assert!((first.logsumexp - 3f32.ln()).abs() < 1e-6, "{first:?}");
    }
}

#[test]
fn rows_that_are_no_distribution() {
    for element in ALL {
        for len in [1, 64, 129, 300] {
            for bad in [f32::NAN, f32::INFINITY] {
                for at in [0, len / 2, len - 1] {
                    let mut values = normal(len, 2.0, 9);
                    values[at] = bad;
                    for temperature in [1e-40, 0.5, 1.0, 1e37] {
                        check_one(element, &values, temperature, &[at as i32, 0]);
                    }
                }
            }
            check_one(element, &vec![f32::NEG_INFINITY; len], 0.5, &[0]);
            check_one(element, &vec![f32::NEG_INFINITY; len], 1e37, &[0]);
        }
    }
}

#[test]
fn refusals() {
    let values = [0.0; 10];
    let logits = Logits::f32(&values, Shape::packed(2, 5)).unwrap();
    let said = |request: Request<'_>, len| {
        let mut answers = vec![RowStats::NONE; len];
        logits.measure(&request, &mut answers).map_err(|error| error.to_string())
    };
    let request = Request::default();
    assert_eq!(said(request, 2), Ok(()));
    assert_eq!(said(request, 1), Err("out: 1: expected one value a row asked for".into()));
    assert_eq!(said(Request { rows: Some(&[0, 2]), ..request }, 2), Err("rows: 2: expected less than 2".into()));
    let said_of_temperatures = said(Request { temperatures: &[1.0, 0.0], ..request }, 2);
    assert_eq!(said_of_temperatures, Err("temperatures: 0: expected a finite number above 0".into()));
    let device = Tokens::Device(std::ptr::without_provenance(16));
    let refused = said(Request { tokens: device, ..request }, 2).unwrap_err();
    assert_eq!(refused, "tokens: on a device: expected tokens in the machine's memory for logits there");
}

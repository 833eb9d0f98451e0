//! The call for rows anywhere, on the machine's own memory: what it refuses and says, and the states of EAT.
#![expect(unsafe_code, reason = "logits and states are given by their addresses")]

use std::ffi::c_void;
use std::ptr;

use meridian_kernels::{
    Backend, EatState, Element, Isa, KernelError, Logits, MAX_ROWS, MAX_VOCAB, Matrix, Place, Probes, Request,
    RowStats, Shape, Tokens, launch,
};

const VALUES: [f32; 12] = [0.5, 0.5, 0.5, 0.5, 1.0, 2.0, 3.0, 4.0, 0.0, f32::NAN, 0.0, 0.0];

fn matrix(values: &[f32], rows: usize, vocab: usize) -> Matrix {
    Matrix {
        logits: values.as_ptr().cast(),
        element: Element::F32,
        shape: Shape::packed(rows, vocab),
        place: Place::Cpu,
    }
}

/// Of three rows over four tokens; the last one is no distribution.
fn three() -> Matrix {
    matrix(&VALUES, 3, 4)
}

/// What a launch that is refused says.
fn refused(matrix: &Matrix, request: &Request<'_>, probes: Option<&Probes<'_>>) -> String {
    // SAFETY: whatever is wrong with these is refused before it is read; what is not wrong is memory of the test's.
    unsafe { launch(matrix, request, probes) }.map(|_| ()).expect_err("refused").to_string()
}

fn answers(matrix: &Matrix, request: &Request<'_>, probes: Option<&Probes<'_>>) -> Vec<RowStats> {
    // SAFETY: logits and states are memory of the test's that nothing else uses during the call.
    unsafe { launch(matrix, request, probes) }.and_then(|pending| pending.wait()).expect("it runs")
}

#[test]
fn matrices_that_are_none() {
    let (good, request) = (three(), Request::default());
    let said = |matrix: Matrix| refused(&matrix, &request, None);
    assert_eq!(said(Matrix { logits: ptr::null(), ..good }), "logits: null pointer");
    assert_eq!(said(Matrix { shape: Shape::packed(3, 0), ..good }), "vocab: 0: expected at least 1");
    let shape = Shape { row_stride: 3, ..good.shape };
    assert_eq!(said(Matrix { shape, ..good }), "row_stride: 3: expected at least the vocabulary");
    let huge = said(Matrix { shape: Shape::packed(usize::MAX, 4), ..good });
    assert_eq!(huge, format!("rows: {}: expected a matrix that fits into the address space", usize::MAX));
    let long = said(Matrix { shape: Shape::packed(1, MAX_VOCAB + 1), ..good });
    assert_eq!(long, "vocab: 16777217: expected at most 16777216");
    let many = said(Matrix { shape: Shape::packed(MAX_ROWS + 1, 4), ..good });
    assert_eq!(many, "rows: 65537: expected at most 65536 in one launch");
    let between: *const c_void = ptr::without_provenance(18);
    let said_of_between = said(Matrix { logits: between, ..good });
    assert_eq!(said_of_between, "logits: 18: expected an address that is a multiple of the size of a logit");
}

#[test]
fn requests_that_do_not_fit() {
    let good = Request::default();
    let said = |request: Request<'_>| refused(&three(), &request, None);
    assert_eq!(said(Request { rows: Some(&[0, 3]), ..good }), "rows: 3: expected less than 3");
    let rows = vec![0; MAX_ROWS + 1];
    assert_eq!(said(Request { rows: Some(&rows), ..good }), "rows: 65537: expected at most 65536 in one launch");
    let one_a_row = "expected one value a row asked for";
    assert_eq!(said(Request { tokens: Tokens::Host(&[1]), ..good }), format!("tokens: 1: {one_a_row}"));
    assert_eq!(said(Request { temperatures: &[1.0; 4], ..good }), format!("temperatures: 4: {one_a_row}"));
    for (wrong, text) in [(0.0, "0"), (-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let said = said(Request { temperatures: &[1.0, wrong, 1.0], ..good });
        assert_eq!(said, format!("temperatures: {text}: expected a finite number above 0"));
    }
    let device = |address| said(Request { tokens: Tokens::Device(ptr::without_provenance(address)), ..good });
    assert_eq!(device(0), "tokens: null pointer");
    assert_eq!(device(6), "tokens: 6: expected an address that is a multiple of 4");
    assert_eq!(device(8), "tokens: on a device: expected tokens in the machine's memory for logits there");
}

#[test]
fn probes_that_do_not_fit() {
    let mut states = [EatState::default(); 2];
    let good = Probes { slots: &[0, -1, 1], alpha: 0.2, states: states.as_mut_ptr(), len: 2 };
    let said = |probes: Probes<'_>| refused(&three(), &Request::default(), Some(&probes));
    assert_eq!(said(Probes { slots: &[0, 1], ..good }), "slots: 2: expected one value a row asked for");
    for (alpha, text) in [(0.0, "0"), (-0.5, "-0.5"), (1.5, "1.5"), (f32::NAN, "NaN")] {
        assert_eq!(said(Probes { alpha, ..good }), format!("alpha: {text}: expected in (0, 1]"));
    }
    assert_eq!(said(Probes { states: ptr::null_mut(), ..good }), "states: null pointer");
    let states_between = said(Probes { states: ptr::without_provenance_mut(6), ..good });
    assert_eq!(states_between, "states: 6: expected an address that is a multiple of 4");
    for (slots, wrong) in [([0, -1, 2], 2), ([0, -2, 1], -2), ([1, 0, 1], 1), ([i32::MIN, 0, 1], i32::MIN)] {
        let said = said(Probes { slots: &slots, ..good });
        assert_eq!(said, format!("slots: {wrong}: expected -1, or one of the states, for one row only"));
    }
    assert_eq!(states, [EatState::default(); 2], "nothing was written");
}

#[test]
fn a_device_that_is_not_there() {
    // A number that no machine has. Where there is no driver, that is what is said instead.
    let place = Place::Cuda { ordinal: 1000, stream: ptr::null_mut(), overwrites: true };
    // SAFETY: no device is there to read anything.
    let launched = unsafe { launch(&Matrix { place, ..three() }, &Request::default(), None) };
    let error = launched.expect_err("there is no such device");
    assert!(matches!(error, KernelError::Unavailable(_)), "{error}");
    assert!(error.to_string().starts_with("not available on this machine: "), "{error}");
}

#[test]
fn answers_are_those_of_the_view() {
    let request = Request {
        rows: Some(&[1, 0, 1, 2]),
        tokens: Tokens::Host(&[3, 0, -1, 2]),
        temperatures: &[1.0, 0.5, 2.0, 1.0],
    };
    let got = answers(&three(), &request, None);
    let mut expected = [RowStats::NONE; 4];
    Logits::f32(&VALUES, Shape::packed(3, 4)).unwrap().measure(&request, &mut expected).unwrap();
    assert_eq!(format!("{got:?}"), format!("{expected:?}"));
    assert!((got[1].entropy - 4f32.ln()).abs() < 1e-6 && (got[1].probability - 0.25).abs() < 1e-6);
    assert_eq!((got[0].top, got[0].max, got[3].top), (3, 4.0, -1));
    assert_eq!(answers(&three(), &Request { rows: Some(&[]), ..Request::default() }, None), []);
    assert_eq!(answers(&matrix(&VALUES, 0, 4), &Request::default(), None), []);
    assert_eq!(answers(&three(), &Request::default(), None).len(), 3, "all rows");
}

#[test]
fn states_follow_the_formula_over_many_probes() {
    const ALPHA: f32 = 0.2;
    let mut states = [EatState::default(); 3];
    // Mean and variance in f64.
    let mut expected = [(0.0f64, 0.0f64); 3];
    for step in 0..200u32 {
        // Row 0 sharpens, row 1 swings, row 2 stays; their slots go round.
        let values: Vec<f32> = (0..3 * 50)
            .map(|i| {
                let scale = [step as f32 / 100.0, (step % 7) as f32, 1.0][i / 50];
                scale * (i * 31 % 17) as f32 / 4.0
            })
            .collect();
        let slots = [0, 1, 2].map(|row| (row + step as i32) % 3);
        let probes = Probes { slots: &slots, alpha: ALPHA, states: states.as_mut_ptr(), len: 3 };
        let got = answers(&matrix(&values, 3, 50), &Request::default(), Some(&probes));
        for (row, got) in got.iter().enumerate() {
            let (mean, variance) = &mut expected[slots[row] as usize];
            let (x, alpha) = (f64::from(got.entropy), f64::from(ALPHA));
            if step == 0 {
                (*mean, *variance) = (x, 0.0);
            } else {
                *mean = alpha * x + (1.0 - alpha) * *mean;
                *variance = alpha * (x - *mean).powi(2) + (1.0 - alpha) * *variance;
            }
            assert!((f64::from(got.eat.mean) - *mean).abs() < 1e-5, "step {step} row {row}: {got:?}, mean {mean}");
            assert!((f64::from(got.eat.variance) - *variance).abs() < 1e-5, "step {step} row {row}: {got:?}");
            assert_eq!(got.eat.probes, step + 1);
        }
        for (row, got) in got.iter().enumerate() {
            assert_eq!(states[slots[row] as usize], got.eat);
        }
    }
}

#[test]
fn what_is_no_probe_or_no_distribution_leaves_states_alone() {
    let before = EatState { mean: 1.5, variance: 0.25, probes: 7 };
    let mut states = [before; 3];
    let probes = Probes { slots: &[2, -1, 0], alpha: 1.0, states: states.as_mut_ptr(), len: 3 };
    let got = answers(&three(), &Request::default(), Some(&probes));
    assert!(got[2].entropy.is_nan());
    assert_eq!((got[2].eat, states[0]), (before, before), "the row is no distribution");
    assert_eq!((got[1].eat, states[1]), (EatState::default(), before), "the row is no probe");
    // The newest entropy counts for all of the mean.
    assert_eq!(states[2], EatState { mean: got[0].entropy, variance: 0.0, probes: 8 });
    assert_eq!(got[0].eat, states[2]);
}

#[test]
fn backends_have_names() {
    let names = [Backend::Cpu(Isa::Portable), Backend::Cpu(Isa::Avx2), Backend::Cpu(Isa::Avx512), Backend::Cuda(1)];
    assert_eq!(names.map(|backend| backend.to_string()), ["cpu-portable", "cpu-avx2", "cpu-avx512", "cuda"]);
    // SAFETY: the values are the test's.
    let pending = unsafe { launch(&three(), &Request::default(), None) }.expect("it runs");
    assert_eq!(pending.backend(), Backend::Cpu(Isa::best()));
    assert_eq!(pending.is_ready(), Ok(true));
}

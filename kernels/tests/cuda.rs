//! The CUDA kernels and the code around them, on a device that is emulated: see support/emulator.rs. What is checked here
//! is the kernels' own text and every call of the driver; not what nvcc makes of it, nor the speed.
#![expect(unsafe_code, reason = "memory of a device")]

#[path = "support/emulator.rs"]
mod emulator;
#[allow(dead_code, reason = "of the tests on the CPU")]
mod support;

use emulator::{Driver, Memory, Stream};
use meridian_kernels::{
    Backend, EatState, Element, KernelError, MAX_ROWS, Matrix, Missing, Place, Probes, Request, RowStats, Shape,
    Tokens, launch,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use support::{bits_of, reference, value_of};

fn place(stream: &Stream) -> Place {
    Place::Cuda { ordinal: 0, stream: stream.0, overwrites: true }
}

/// Logits on the device, `offset` logits after an address that is a multiple of 256.
struct OnDevice<'d> {
    memory: Memory<'d>,
    element: Element,
    shape: Shape,
    offset: usize,
}

impl<'d> OnDevice<'d> {
    fn new(driver: &'d Driver, element: Element, rows: &[Vec<f32>], gap: usize, offset: usize) -> Self {
        let vocab = rows[0].len();
        let shape = Shape { rows: rows.len(), vocab, row_stride: vocab + gap };
        let logits = offset + (rows.len() - 1) * shape.row_stride + vocab;
        let this = Self { memory: driver.memory(logits * element.bytes()), element, shape, offset };
        for (i, row) in rows.iter().enumerate() {
            this.memory.write(this.at(i), &bytes(element, row));
        }
        this
    }

    /// Byte at which a row begins.
    fn at(&self, row: usize) -> usize {
        (self.offset + row * self.shape.row_stride) * self.element.bytes()
    }

    fn matrix(&self, stream: &Stream) -> Matrix {
        let logits = self.memory.pointer().wrapping_byte_add(self.offset * self.element.bytes());
        Matrix { logits, element: self.element, shape: self.shape, place: place(stream) }
    }
}

fn bytes(element: Element, row: &[f32]) -> Vec<u8> {
    row.iter().flat_map(|x| bits_of(element, *x).to_le_bytes()[..element.bytes()].to_vec()).collect()
}

/// What the device sees of a row.
fn seen(element: Element, row: &[f32]) -> Vec<f32> {
    row.iter().map(|x| value_of(element, bits_of(element, *x))).collect()
}

fn measure(matrix: &Matrix, request: &Request<'_>) -> Vec<RowStats> {
    // SAFETY: the logits are the emulator's memory, which lives longer than the work.
    let pending = unsafe { launch(matrix, request, None) }.expect("launched");
    assert_eq!(pending.backend(), Backend::Cuda(0));
    pending.wait().expect("done")
}

/// The documented values, in `f64`.
fn expected(row: &[f32], temperature: f32, token: i32) -> [f64; 4] {
    let t = f64::from(temperature);
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (entropy, ln_s) = reference(row, temperature);
    let lse = f64::from(max) / t + ln_s;
    let p = usize::try_from(token).ok().and_then(|i| row.get(i)).map_or(f64::NAN, |x| (f64::from(*x) / t - lse).exp());
    [entropy, f64::from(max), lse, p]
}

fn assert_close(got: &RowStats, row: &[f32], temperature: f32, token: i32) {
    let [entropy, max, lse, p] = expected(row, temperature, token);
    let close = |got: f32, wanted: f64, error: f64| {
        assert!(
            (f64::from(got) - wanted).abs() <= error || got.is_nan() && wanted.is_nan(),
            "{got}, expected {wanted}; {} logits, T {temperature}",
            row.len()
        );
    };
    close(got.entropy, entropy, 1e-5 * entropy.max(0.1));
    if entropy.is_nan() {
        assert_eq!((got.top, got.max.is_nan(), got.logsumexp.is_nan()), (-1, true, true));
        return;
    }
    close(got.max, max, 0.0);
    close(got.logsumexp, lse, 2e-6 * lse.abs().max(1.0));
    close(got.probability, p, 2e-5 * p + 1e-9);
    let top = row.iter().position(|x| *x == got.max).map_or(-1, |i| i as i32);
    assert_eq!(got.top, top);
}

const ELEMENTS: [Element; 3] = [Element::F32, Element::Bf16, Element::F16];

fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -10.0f32..10.0,
        2 => Just(f32::NEG_INFINITY),
        1 => (0u32..5).prop_map(|x| x as f32),
        1 => -6.0e4f32..6.0e4,
    ]
}

/// Few rows are read in parts and many are not; vectors begin anywhere in a row.
#[test]
fn any_shape_stride_alignment_and_order() {
    let driver = Driver::get();
    let stream = driver.stream();
    let row = (1usize..5000).prop_flat_map(|n| proptest::collection::vec(logit(), n));
    let given = (row, 1usize..30, 0usize..20, 0usize..20, 0usize..3, any::<u64>(), 0.05f32..8.0);
    let mut runner = TestRunner::new(Config { cases: 80, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&given, |(first, count, gap, offset, element, seed, temperature)| {
        driver.seed(seed);
        let element = ELEMENTS[element];
        let rows: Vec<Vec<f32>> = (0..count)
            .map(|i| first.iter().enumerate().map(|(j, x)| x + ((i * 7 + j) % 13) as f32 / 4.0).collect())
            .collect();
        let logits = OnDevice::new(&driver, element, &rows, gap, offset);
        // Not all, and in another order.
        let asked: Vec<u32> = (0..count as u32).rev().filter(|i| i % 3 != 1 || count == 1).collect();
        let tokens: Vec<i32> = asked.iter().map(|i| *i as i32 * 31 % (first.len() as i32 + 2) - 1).collect();
        let temperatures: Vec<f32> = asked.iter().map(|i| if i % 2 == 0 { 1.0 } else { temperature }).collect();
        let request = Request { rows: Some(&asked), tokens: Tokens::Host(&tokens), temperatures: &temperatures };
        let answers = measure(&logits.matrix(&stream), &request);
        prop_assert_eq!(answers.len(), asked.len());
        for (i, answer) in answers.iter().enumerate() {
            assert_close(answer, &seen(element, &rows[asked[i] as usize]), temperatures[i], tokens[i]);
        }
        let all = measure(&logits.matrix(&stream), &Request::default());
        for (answer, row) in all.iter().zip(&rows) {
            assert_close(answer, &seen(element, row), 1.0, -1);
        }
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_vocabulary_of_a_model() {
    let driver = Driver::get();
    let stream = driver.stream();
    for (element, count, vocab) in [(Element::Bf16, 1, 151_936), (Element::F32, 2, 128_256), (Element::F16, 1, 262_145)]
    {
        for seed in [0, 1] {
            driver.seed(seed);
            let rows: Vec<Vec<f32>> = (0..count)
                .map(|i| (0..vocab).map(|j| ((j * 7919 + i * 31) % 1009) as f32 / 80.0 - 6.0).collect())
                .collect();
            let logits = OnDevice::new(&driver, element, &rows, 3, 1);
            let answers = measure(
                &logits.matrix(&stream),
                &Request { tokens: Tokens::Host(&vec![17; count]), ..Request::default() },
            );
            for (answer, row) in answers.iter().zip(&rows) {
                assert_close(answer, &seen(element, row), 1.0, 17);
            }
        }
    }
}

/// What is masked counts for nothing, and what is no number is told.
#[test]
fn rows_that_are_masked_or_no_distribution() {
    let driver = Driver::get();
    let stream = driver.stream();
    let (inf, low) = (f32::INFINITY, f32::NEG_INFINITY);
    for vocab in [1usize, 7, 64, 3000, 9001] {
        let with = |fill: f32, places: &[(usize, f32)]| {
            let mut row = vec![fill; vocab];
            places.iter().for_each(|(at, value)| row[at % vocab] = *value);
            row
        };
        let rows = [
            with(low, &[]),
            with(low, &[(vocab / 2, -3.0)]),
            with(low, &[(0, 1.0), (vocab - 1, 1.0)]),
            with(0.5, &[(vocab / 3, f32::NAN)]),
            with(low, &[(vocab - 1, f32::NAN)]),
            with(f32::NAN, &[]),
            with(0.5, &[(vocab - 1, inf)]),
            with(inf, &[]),
            // Masks of other kinds, and beside them nothing at all.
            with(f32::MIN, &[(vocab / 2, 2.0), (vocab - 1, 1.0)]),
            with(f32::MIN, &[]),
            with(-1.0e37, &[(vocab / 2, -2.0e37)]),
            with(f32::MAX, &[(0, -1.0)]),
            with(3.0, &[(0, f32::MAX)]),
            with(-0.0, &[(vocab / 2, 0.0)]),
            with(1e-40, &[]),
        ];
        for element in [Element::F32, Element::Bf16] {
            for seed in 0..3 {
                driver.seed(seed);
                let logits = OnDevice::new(&driver, element, &rows, 1, 0);
                let answers = measure(&logits.matrix(&stream), &Request::default());
                for (i, (answer, row)) in answers.iter().zip(&rows).enumerate() {
                    let row = seen(element, row);
                    let is_one = !reference(&row, 1.0).0.is_nan();
                    assert_eq!(!answer.entropy.is_nan(), is_one, "row {i} of {vocab}: {answer:?}");
                    // The formula in f64 for these is what is left of them.
                    if is_one && row.iter().all(|x| x.abs() < 1e30 || *x == low) {
                        assert_close(answer, &row, 1.0, -1);
                    }
                    if is_one {
                        let max = row.iter().copied().fold(low, f32::max);
                        let ties = row.iter().filter(|x| **x == max).count();
                        assert_eq!((answer.max, answer.top), (max, row.iter().position(|x| *x == max).unwrap() as i32));
                        if max.abs() > 1e36 {
                            assert!(
                                (f64::from(answer.entropy) - (ties as f64).ln()).abs() < 1e-5,
                                "row {i}: {answer:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn any_temperature() {
    let driver = Driver::get();
    let stream = driver.stream();
    let low = f32::NEG_INFINITY;
    let plain: Vec<f32> = (0..5000).map(|i| ((i * 31) % 977) as f32 / 100.0 - 5.0).collect();
    let masked: Vec<f32> = plain.iter().enumerate().map(|(i, x)| if i % 3 == 0 { low } else { *x }).collect();
    let wide: Vec<f32> = (0..5000).map(|i| (i % 7) as f32 * -5e37).collect();
    let rows = [plain, masked, wide, vec![0.0; 5000]];
    for temperature in [f32::from_bits(1), 1e-38, 1e-30, 1e-3, 1.0, 1e3, 1e30, f32::MAX] {
        let logits = OnDevice::new(&driver, Element::F32, &rows, 0, 1);
        let request = Request { temperatures: &[temperature; 4], tokens: Tokens::Host(&[7; 4]), ..Request::default() };
        for (i, (answer, row)) in measure(&logits.matrix(&stream), &request).iter().zip(&rows).enumerate() {
            let [entropy, max, lse, p] = expected(row, temperature, 7);
            let close = |got: f32, wanted: f64, error: f64| {
                let is = (f64::from(got) - wanted).abs() <= error || f64::from(got) == f64::from(wanted as f32);
                assert!(is, "row {i}, T {temperature:e}: {got}, expected {wanted}");
            };
            close(answer.entropy, entropy, 1e-5 * entropy.max(0.1));
            close(answer.max, max, 0.0);
            close(answer.logsumexp, lse, 2e-6 * lse.abs().max(1.0));
            close(answer.probability, p, 2e-5 * p + 1e-9);
        }
    }
}

/// Answers are equal to the bit, in whatever order threads and blocks run.
#[test]
fn no_order_of_threads_changes_which_token_is_first() {
    let driver = Driver::get();
    let stream = driver.stream();
    let mut row = vec![0.25f32; 20_000];
    [19_999, 4_321, 12_000].iter().for_each(|i| row[*i] = 9.0);
    let logits = OnDevice::new(&driver, Element::F32, &[row], 0, 1);
    for seed in 0..30 {
        driver.seed(seed);
        assert_eq!(measure(&logits.matrix(&stream), &Request::default())[0].top, 4_321);
    }
}

/// Work on the caller's stream before the launch is seen, and work after it is not; the host waits for nothing.
#[test]
fn a_launch_is_ordered_with_its_stream() {
    let driver = Driver::get();
    for seed in 0..40 {
        driver.seed(seed);
        let stream = driver.stream();
        let row: Vec<f32> = (0..5000).map(|i| (i % 50) as f32 / 10.0 + seed as f32 / 100.0).collect();
        let logits = OnDevice::new(&driver, Element::F32, &[vec![f32::NAN; 5000]], 0, 0);
        let token = driver.memory(4);
        logits.memory.write_on(&stream, 0, &row);
        token.write_on(&stream, 0, &[7i32]);
        let request = Request { tokens: Tokens::Device(token.pointer().cast()), ..Request::default() };
        let waited = driver.calls(c"cuStreamSynchronize") + driver.calls(c"cuEventSynchronize");
        // SAFETY: the emulator's memory, freed after the work.
        let pending = unsafe { launch(&logits.matrix(&stream), &request, None) }.unwrap();
        logits.memory.spoil_on(&stream);
        if seed == 0 {
            assert!(!pending.is_ready().unwrap(), "nothing was waited for");
        }
        assert_eq!(waited, driver.calls(c"cuStreamSynchronize") + driver.calls(c"cuEventSynchronize"));
        // The caller's stream may come first: it must find the logits read.
        if seed % 2 == 1 {
            driver.synchronize(&stream);
            assert!(pending.is_ready().unwrap(), "what overwrites the logits waits for them to be read");
        }
        assert_close(&pending.wait().unwrap()[0], &row, 1.0, 7);
    }
}

#[test]
fn what_nobody_overwrites_holds_nobody_up() {
    let driver = Driver::get();
    let stream = driver.stream();
    let logits = OnDevice::new(&driver, Element::F32, &[vec![1.0; 100]], 0, 0);
    let mut matrix = logits.matrix(&stream);
    matrix.place = Place::Cuda { ordinal: 0, stream: stream.0, overwrites: false };
    // SAFETY: the emulator's memory, freed after the work.
    let pending = unsafe { launch(&matrix, &Request::default(), None) }.unwrap();
    driver.synchronize(&stream);
    assert!(!pending.is_ready().unwrap());
    while !pending.is_ready().unwrap() {}
    assert_close(&pending.wait().unwrap()[0], &[1.0; 100], 1.0, -1);
}

#[test]
fn the_thread_keeps_its_own_context() {
    let driver = Driver::get();
    let stream = driver.stream();
    let logits = OnDevice::new(&driver, Element::F32, &[vec![1.0; 100]], 0, 0);
    let own = driver.own();
    measure(&logits.matrix(&stream), &Request::default());
    assert_eq!(driver.own(), own);
    driver.fail(c"cuLaunchKernel", 0, 719);
    // SAFETY: the emulator's memory, freed after the work.
    assert!(unsafe { launch(&logits.matrix(&stream), &Request::default(), None) }.is_err());
    assert_eq!(driver.own(), own);
    // SAFETY: as above.
    let pending = unsafe { launch(&logits.matrix(&stream), &Request::default(), None) }.unwrap();
    while !pending.is_ready().unwrap() {}
    assert_eq!(driver.own(), own);
    drop(pending);
}

/// Answers are taken in another order than they were asked for, or never.
#[test]
fn many_launches_under_way() {
    let driver = Driver::get();
    let stream = driver.stream();
    driver.seed(5);
    let rows: Vec<Vec<f32>> = (0..40).map(|i| (0..3000).map(|j| ((i + j) % 17) as f32).collect()).collect();
    let logits = OnDevice::new(&driver, Element::Bf16, &rows, 0, 0);
    let mut pending = Vec::new();
    for i in 0..64u32 {
        let row = [i % 40];
        let request = Request { rows: Some(&row), temperatures: &[1.0 + i as f32 / 8.0], ..Request::default() };
        // SAFETY: the emulator's memory, freed after the work.
        pending.push((i, unsafe { launch(&logits.matrix(&stream), &request, None) }.unwrap()));
    }
    // SAFETY: as above.
    let refused = unsafe { launch(&logits.matrix(&stream), &Request::default(), None) };
    assert_eq!(refused.unwrap_err(), KernelError::Busy(64));
    for (i, pending) in pending.into_iter().rev() {
        if i % 3 == 0 {
            continue;
        }
        let row = seen(Element::Bf16, &rows[i as usize % 40]);
        assert_close(&pending.wait().unwrap()[0], &row, 1.0 + i as f32 / 8.0, -1);
    }
    // Those that nobody took are done at some time.
    for _ in 0..3 {
        assert_eq!(measure(&logits.matrix(&stream), &Request::default()).len(), 40);
    }
}

#[test]
fn probes_keep_a_state_on_the_device() {
    let driver = Driver::get();
    let stream = driver.stream();
    let states = driver.memory(4 * size_of::<EatState>());
    states.write(0, &[EatState::default(); 4]);
    let mut wanted = [EatState::default(); 4];
    for round in 0..12usize {
        driver.seed(round as u64);
        let rows: Vec<Vec<f32>> = (0..4)
            .map(|i| {
                (0..2000).map(|j| if (i, round) == (1, 5) { f32::NAN } else { (j % (3 + i + round)) as f32 }).collect()
            })
            .collect();
        let logits = OnDevice::new(&driver, Element::F32, &rows, 0, 0);
        let slots = [2, 0, -1, if round % 2 == 0 { 3 } else { -1 }];
        let probes = Probes { slots: &slots, alpha: 0.25, states: states.pointer().cast(), len: 4 };
        // SAFETY: the emulator's memory, freed after the work.
        let answers =
            unsafe { launch(&logits.matrix(&stream), &Request::default(), Some(&probes)) }.unwrap().wait().unwrap();
        for (answer, slot) in answers.iter().zip(slots) {
            if slot < 0 {
                assert_eq!(answer.eat, EatState::default());
                continue;
            }
            let state = &mut wanted[slot as usize];
            *state = state.observed(answer.entropy, 0.25);
            assert_eq!(answer.eat.probes, state.probes);
            assert!((answer.eat.mean - state.mean).abs() < 1e-6 && (answer.eat.variance - state.variance).abs() < 1e-6);
        }
    }
    let kept: Vec<EatState> = states.read(4);
    assert_eq!(kept.iter().map(|state| state.probes).collect::<Vec<_>>(), [11, 0, 12, 6]);
    assert!((kept[2].mean - wanted[2].mean).abs() < 1e-6);
}

#[test]
fn refusals() {
    let driver = Driver::get();
    let stream = driver.stream();
    let logits = OnDevice::new(&driver, Element::F32, &[vec![1.0; 100]], 0, 0);
    let said = |matrix: &Matrix, request: &Request<'_>| {
        // SAFETY: refused before anything is read.
        unsafe { launch(matrix, request, None) }.expect_err("refused").to_string()
    };
    let good = logits.matrix(&stream);
    let host = [0.0f32; 100];
    assert_eq!(
        said(&Matrix { logits: host.as_ptr().cast(), ..good }, &Request::default()),
        "logits: an address of the host: expected memory of the launch's device"
    );
    let other = Place::Cuda { ordinal: 7, stream: stream.0, overwrites: true };
    assert_eq!(
        said(&Matrix { place: other, ..good }, &Request::default()),
        "not available on this machine: the CUDA driver knows no device 7"
    );
    assert_eq!(said(&Matrix { logits: std::ptr::null(), ..good }, &Request::default()), "logits: null pointer");
    let odd = Matrix { logits: good.logits.wrapping_byte_add(2), ..good };
    assert!(said(&odd, &Request::default()).ends_with("expected an address that is a multiple of the size of a logit"));
    let many = vec![0; MAX_ROWS + 1];
    assert_eq!(
        said(&good, &Request { rows: Some(&many), ..Request::default() }),
        "rows: 65537: expected at most 65536 in one launch"
    );
    assert_eq!(
        said(&good, &Request { tokens: Tokens::Device(std::ptr::null()), ..Request::default() }),
        "tokens: null pointer"
    );
    driver.capture(&stream, true);
    assert_eq!(said(&good, &Request::default()), "stream: captures a graph: expected a stream that does not");
    driver.capture(&stream, false);
    let empty = Request { rows: Some(&[]), ..Request::default() };
    assert!(measure(&good, &empty).is_empty());
}

/// A driver that fails somewhere: the failure is told, and the next launch works.
#[test]
fn failures_of_the_driver() {
    let driver = Driver::get();
    let stream = driver.stream();
    let logits = OnDevice::new(&driver, Element::F32, &[vec![1.0; 3000]], 0, 0);
    let request = Request { temperatures: &[2.0], ..Request::default() };
    measure(&logits.matrix(&stream), &request);
    for (name, later) in [
        (c"cuCtxPushCurrent_v2", 0),
        (c"cuStreamIsCapturing", 0),
        (c"cuMemcpyHtoDAsync_v2", 0),
        (c"cuEventRecord", 0),
        (c"cuEventRecord", 1),
        (c"cuStreamWaitEvent", 0),
        (c"cuStreamWaitEvent", 1),
        (c"cuLaunchKernel", 0),
    ] {
        for seed in [0, 3] {
            driver.seed(seed);
            driver.fail(name, later, 719);
            // SAFETY: the emulator's memory, freed after the work.
            let refused = unsafe { launch(&logits.matrix(&stream), &request, None) }.map(|_| ());
            assert_eq!(refused, Err(KernelError::Launch(719)), "{name:?}");
            driver.synchronize(&stream);
            assert_close(&measure(&logits.matrix(&stream), &request)[0], &[1.0; 3000], 2.0, -1);
        }
    }
    // SAFETY: as above.
    let pending = unsafe { launch(&logits.matrix(&stream), &request, None) }.unwrap();
    driver.fail(c"cuEventSynchronize", 0, 700);
    assert_eq!(pending.wait().unwrap_err(), KernelError::Launch(700));
    assert_close(&measure(&logits.matrix(&stream), &request)[0], &[1.0; 3000], 2.0, -1);
    // Memory is short: an answer needs more than any launch before.
    let logits = OnDevice::new(&driver, Element::F32, &[vec![1.0; 20]], 0, 0);
    let rows = vec![0u32; 1500];
    driver.fail(c"cuMemHostAlloc", 0, 2);
    // SAFETY: as above.
    let refused =
        unsafe { launch(&logits.matrix(&stream), &Request { rows: Some(&rows), ..Request::default() }, None) };
    assert_eq!(refused.unwrap_err(), KernelError::Launch(2));
    assert_eq!(measure(&logits.matrix(&stream), &Request { rows: Some(&rows), ..Request::default() }).len(), 1500);
}

#[test]
fn what_is_missing_is_named() {
    let texts = [
        Missing::Driver,
        Missing::DriverStart(34),
        Missing::Device(3),
        Missing::Architecture(75),
        Missing::Ptx(222),
        Missing::Nvrtc,
        Missing::Symbol("cuInit"),
    ]
    .map(|missing| KernelError::Unavailable(missing).to_string());
    assert_eq!(
        texts,
        [
            "not available on this machine: no CUDA driver (libcuda.so.1) was found",
            "not available on this machine: the CUDA driver does not start (code 34)",
            "not available on this machine: the CUDA driver knows no device 3",
            "not available on this machine: the device is of compute capability 7.5, and 8.0 or newer is needed",
            "not available on this machine: the CUDA driver does not take the kernels (code 222)",
            "not available on this machine: no kernels were compiled ahead for this device, and no NVRTC (libnvrtc.so) that works was found",
            "not available on this machine: the CUDA libraries have no function cuInit",
        ]
    );
}

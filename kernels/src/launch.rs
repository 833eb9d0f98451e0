//! One call for rows of logits wherever they are.
#![expect(unsafe_code, reason = "memory that another runtime owns is reached by its address")]

use std::ffi::c_void;
use std::fmt;

use crate::{Element, Isa, KernelError, Logits, Probes, Request, RowStats, Shape, Tokens, cuda};

/// Most rows of one launch.
pub const MAX_ROWS: usize = 1 << 16;
/// Longest row. Tokens are 32-bit numbers, and no vocabulary comes near this.
pub const MAX_VOCAB: usize = 1 << 24;

/// A matrix of logits somewhere.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Address of the first logit, as `place` knows it.
    pub logits: *const c_void,
    /// Kind of the logits.
    pub element: Element,
    /// Rows, vocabulary and stride.
    pub shape: Shape,
    /// Whose memory it is.
    pub place: Place,
}

/// Where logits are, and who makes them.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// The machine's memory. The logits are there already.
    Cpu,
    /// The memory of a CUDA device.
    Cuda {
        /// Number of the device among those that this process sees.
        ordinal: u32,
        /// The `CUstream` on which the logits are made; null for the legacy default stream.
        stream: *mut c_void,
        /// Whether later work on `stream` may write to the logits, as a sampler does. That work then waits, on the
        /// device, until they are read; the host waits for nothing.
        overwrites: bool,
    },
}

/// What ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// The CPU, on the caller's thread.
    Cpu(Isa),
    /// A CUDA device, by its number.
    Cuda(u32),
}

/// `cpu-avx512`, `cuda`.
impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu(Isa::Portable) => "cpu-portable",
            Self::Cpu(Isa::Avx2) => "cpu-avx2",
            Self::Cpu(Isa::Avx512) => "cpu-avx512",
            Self::Cuda(_) => "cuda",
        })
    }
}

/// Answers that may still be on their way.
#[derive(Debug)]
pub struct Pending(Inner);

#[derive(Debug)]
enum Inner {
    Ready(Isa, Vec<RowStats>),
    Cuda(cuda::Pending),
}

impl Pending {
    /// What runs it.
    #[must_use]
    pub fn backend(&self) -> Backend {
        match &self.0 {
            Inner::Ready(isa, _) => Backend::Cpu(*isa),
            Inner::Cuda(pending) => Backend::Cuda(pending.ordinal()),
        }
    }

    /// Whether [`Pending::wait`] would not wait.
    ///
    /// # Errors
    ///
    /// [`KernelError::Launch`] when the device failed.
    pub fn is_ready(&self) -> Result<bool, KernelError> {
        match &self.0 {
            Inner::Ready(..) => Ok(true),
            Inner::Cuda(pending) => pending.is_ready(),
        }
    }

    /// The answers, in the order of the rows asked for. Blocks the thread until they are there.
    ///
    /// # Errors
    ///
    /// [`KernelError::Launch`] when the device failed.
    pub fn wait(self) -> Result<Vec<RowStats>, KernelError> {
        match self.0 {
            Inner::Ready(_, rows) => Ok(rows),
            Inner::Cuda(pending) => pending.wait(),
        }
    }
}

/// Begin to measure rows of `matrix`: on the CPU at once, on a CUDA device on a stream of its own, after what is on the
/// matrix's stream. Nothing is copied but the request.
///
/// # Safety
///
/// `matrix.logits` is the address of `(rows - 1) * row_stride + vocab` initialized logits of one allocation in the memory
/// of `matrix.place`. On the CPU nobody writes to them during the call. On CUDA they stay allocated until the work is
/// done, or are freed in the order of `matrix.place`'s stream where that waits for the read; what writes to them before
/// that is on this stream or ordered after it; the stream is a live one of the device's primary context. Device tokens are as many as rows; `probes.states` are `len` states, which nobody else
/// touches until the work is done.
///
/// # Errors
///
/// Every [`KernelError`]; nothing was launched then, but after [`KernelError::Launch`], which see.
pub unsafe fn launch(
    matrix: &Matrix,
    request: &Request<'_>,
    probes: Option<&Probes<'_>>,
) -> Result<Pending, KernelError> {
    let count = check(matrix, request, probes)?;
    match matrix.place {
        Place::Cuda { ordinal, stream, overwrites } => {
            let device = cuda::Device::shared(ordinal)?;
            // SAFETY: the request was checked; the rest is this function's contract.
            let pending = unsafe { device.launch(matrix, cuda::Order { stream, overwrites }, request, probes, count)? };
            Ok(Pending(Inner::Cuda(pending)))
        }
        Place::Cpu => {
            // SAFETY: the logits are initialized and left alone during the call, by this function's contract.
            let logits = unsafe { Logits::from_raw(matrix.logits, matrix.element, matrix.shape)? };
            let isa = Isa::best();
            let mut answers = vec![RowStats::NONE; count];
            logits.measure_with(isa, request, &mut answers)?;
            if let Some(probes) = probes {
                for (answer, slot) in answers.iter_mut().zip(probes.slots) {
                    let Ok(slot) = usize::try_from(*slot) else { continue };
                    // SAFETY: the slot was checked to be one of `len` states, which are the caller's to lend.
                    let state = unsafe { &mut *probes.states.add(slot) };
                    *state = state.observed(answer.entropy, probes.alpha);
                    answer.eat = *state;
                }
            }
            Ok(Pending(Inner::Ready(isa, answers)))
        }
    }
}

/// Rows that are asked for.
fn check(matrix: &Matrix, request: &Request<'_>, probes: Option<&Probes<'_>>) -> Result<usize, KernelError> {
    let shape = matrix.shape;
    if matrix.logits.is_null() {
        return Err(KernelError::NullPointer("logits"));
    }
    shape.check(matrix.element)?;
    if !matrix.logits.addr().is_multiple_of(matrix.element.bytes()) {
        let expected = "an address that is a multiple of the size of a logit";
        return Err(KernelError::BadShape { field: "logits", value: matrix.logits.addr(), expected });
    }
    let count = check_request(&shape, request, &matrix.place)?;
    if let Some(probes) = probes {
        one_a_row("slots", probes.slots.len(), count)?;
        check_probes(probes)?;
    }
    Ok(count)
}

fn one_a_row(field: &'static str, len: usize, count: usize) -> Result<(), KernelError> {
    let expected = "one value a row asked for";
    if len == count { Ok(()) } else { Err(KernelError::BadShape { field, value: len, expected }) }
}

/// Rows that are asked for of a matrix in `place`.
pub(crate) fn check_request(shape: &Shape, request: &Request<'_>, place: &Place) -> Result<usize, KernelError> {
    if shape.vocab > MAX_VOCAB {
        return Err(KernelError::BadShape { field: "vocab", value: shape.vocab, expected: "at most 16777216" });
    }
    let count = request.rows.map_or(shape.rows, <[u32]>::len);
    if count > MAX_ROWS {
        return Err(KernelError::BadShape { field: "rows", value: count, expected: "at most 65536 in one launch" });
    }
    if let Some(&row) = request.rows.unwrap_or(&[]).iter().find(|&&row| row as usize >= shape.rows) {
        return Err(KernelError::RowOutOfRange { row, rows: shape.rows });
    }
    match request.tokens {
        Tokens::None => {}
        Tokens::Host(tokens) => one_a_row("tokens", tokens.len(), count)?,
        Tokens::Device(tokens) if tokens.is_null() => return Err(KernelError::NullPointer("tokens")),
        Tokens::Device(tokens) if !tokens.addr().is_multiple_of(align_of::<i32>()) => {
            let expected = "an address that is a multiple of 4";
            return Err(KernelError::BadShape { field: "tokens", value: tokens.addr(), expected });
        }
        Tokens::Device(_) => {
            if matches!(place, Place::Cpu) {
                let (value, expected) = ("on a device".to_owned(), "tokens in the machine's memory for logits there");
                return Err(KernelError::BadValue { field: "tokens", value, expected });
            }
        }
    }
    if !request.temperatures.is_empty() {
        one_a_row("temperatures", request.temperatures.len(), count)?;
    }
    if let Some(wrong) = request.temperatures.iter().find(|t| !(t.is_finite() && **t > 0.0)) {
        let expected = "a finite number above 0";
        return Err(KernelError::BadValue { field: "temperatures", value: wrong.to_string(), expected });
    }
    Ok(count)
}

fn check_probes(probes: &Probes<'_>) -> Result<(), KernelError> {
    if !(probes.alpha > 0.0 && probes.alpha <= 1.0) {
        let (value, expected) = (probes.alpha.to_string(), "in (0, 1]");
        return Err(KernelError::BadValue { field: "alpha", value, expected });
    }
    if probes.states.is_null() {
        return Err(KernelError::NullPointer("states"));
    }
    if !probes.states.is_aligned() {
        let (value, expected) = (probes.states.addr(), "an address that is a multiple of 4");
        return Err(KernelError::BadShape { field: "states", value, expected });
    }
    let mut slots: Vec<i32> = probes.slots.iter().copied().filter(|slot| *slot != -1).collect();
    slots.sort_unstable();
    let is_one = |slot: i32| usize::try_from(slot).is_ok_and(|slot| slot < probes.len);
    let wrong = slots.iter().find(|slot| !is_one(**slot));
    let twice = slots.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| &pair[0]);
    if let Some(slot) = wrong.or(twice) {
        let expected = "-1, or one of the states, for one row only";
        return Err(KernelError::BadValue { field: "slots", value: slot.to_string(), expected });
    }
    Ok(())
}

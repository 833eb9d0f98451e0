//! Rows of logits for Python: begun by address, answered as columns.
#![expect(unsafe_code, reason = "the memory of a tensor is reached by its address")]

use std::sync::{Mutex, OnceLock, PoisonError};

use meridian_kernels::{
    Backend, EatState, Element, KernelError as Failure, Matrix, Pending, Place, Probes, Request, RowStats, Shape,
    Tokens, launch,
};
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

create_exception!(_native, KernelError, PyRuntimeError, "A kernel did not run, or failed; says why.");
create_exception!(_native, KernelUnavailable, KernelError, "This machine has no kernel for it; says what it lacks.");

/// Columns of an answer, of 4 bytes each.
const COLUMNS: usize = 8;

/// Answers that may still be on their way.
#[pyclass(module = "meridian._native", frozen)]
pub(crate) struct PendingRows {
    backend: Backend,
    under_way: Mutex<Option<UnderWay>>,
    answers: OnceLock<Result<Vec<RowStats>, Failure>>,
}

/// In the order in which they are let go of: what runs, then what it reads.
struct UnderWay {
    pending: Pending,
    keep: Option<Py<PyAny>>,
    /// Whether later work on the stream of what is kept waits for the read, so that its memory may be given out again.
    is_fenced: bool,
}

/// Begin to measure rows of a matrix of logits at `address`: `shape` is rows, vocabulary and the stride of a row, in logits;
/// `element` is "float32", "bfloat16" or "float16". `cuda` is the device's number, the stream, and whether that may write
/// to the logits afterwards; None for the machine's memory. `token_address` is of tokens on that device. `probes` are the
/// slots, alpha, the address of the states and how many. `keep` owns all that is named by an address.
///
/// The caller says that the addresses and the shapes are those of live memory, which nobody else writes to but as
/// `meridian_kernels::launch` allows.
#[pyfunction]
#[pyo3(signature = (address, element, shape, cuda, keep, rows = None, tokens = None, token_address = 0, temperatures = None, probes = None))]
#[expect(clippy::too_many_arguments, reason = "one call a step")]
pub(crate) fn launch_rows(
    py: Python<'_>,
    address: usize,
    element: &str,
    shape: (usize, usize, usize),
    cuda: Option<(u32, usize, bool)>,
    keep: Option<Py<PyAny>>,
    rows: Option<Vec<u32>>,
    tokens: Option<Vec<i32>>,
    token_address: usize,
    temperatures: Option<Vec<f32>>,
    probes: Option<(Vec<i32>, f32, usize, usize)>,
) -> PyResult<PendingRows> {
    let element = match element {
        "float32" => Element::F32,
        "bfloat16" => Element::Bf16,
        "float16" => Element::F16,
        other => {
            return Err(PyValueError::new_err(format!("element: {other:?}: expected float32, bfloat16 or float16")));
        }
    };
    let (matrix_rows, vocab, row_stride) = shape;
    let pending = py
        .detach(|| {
            let place = match cuda {
                None => Place::Cpu,
                Some((ordinal, stream, overwrites)) => {
                    Place::Cuda { ordinal, stream: std::ptr::with_exposed_provenance_mut(stream), overwrites }
                }
            };
            let shape = Shape { rows: matrix_rows, vocab, row_stride };
            let matrix = Matrix { logits: std::ptr::with_exposed_provenance(address), element, shape, place };
            let tokens = match &tokens {
                Some(tokens) => Tokens::Host(tokens),
                None if token_address != 0 => Tokens::Device(std::ptr::with_exposed_provenance(token_address)),
                None => Tokens::None,
            };
            let request =
                Request { rows: rows.as_deref(), tokens, temperatures: temperatures.as_deref().unwrap_or_default() };
            let probes = probes.as_ref().map(|(slots, alpha, states, len)| Probes {
                slots,
                alpha: *alpha,
                states: std::ptr::with_exposed_provenance_mut::<EatState>(*states),
                len: *len,
            });
            // SAFETY: the caller says that the addresses and the shapes are those of live memory; `keep` has it stay
            // until the work is done.
            unsafe { launch(&matrix, &request, probes.as_ref()) }
        })
        .map_err(|why| python_error(&why))?;
    let made = PendingRows { backend: pending.backend(), under_way: Mutex::new(None), answers: OnceLock::new() };
    match made.backend {
        // The answers are there, and nothing is read any more.
        Backend::Cpu(_) => drop(made.answers.set(pending.wait())),
        _ => {
            let is_fenced = cuda.is_some_and(|(.., overwrites)| overwrites);
            // The allocator gives fenced memory out again in the order of the stream that waits for the read: held on to, a
            // step's logits would take their place until its answers are asked for.
            let keep = keep.filter(|_| !is_fenced);
            *made.under_way.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(UnderWay { pending, keep, is_fenced });
        }
    }
    Ok(made)
}

#[pymethods]
impl PendingRows {
    /// What runs it: "cpu-avx512", "cuda".
    #[getter]
    fn backend(&self) -> String {
        self.backend.to_string()
    }

    /// Whether the answers can be taken without waiting.
    fn ready(&self) -> PyResult<bool> {
        if self.answers.get().is_some() {
            return Ok(true);
        }
        match self.under_way.try_lock() {
            Ok(found) => {
                found.as_ref().map_or(Ok(true), |way| way.pending.is_ready()).map_err(|why| python_error(&why))
            }
            // Another thread waits for them.
            Err(_) => Ok(false),
        }
    }

    /// Entropies in nats, in the order of the rows asked for. Waits for them, without the GIL.
    fn entropies(&self, py: Python<'_>) -> PyResult<Vec<f32>> {
        self.with_answers(py, |answers| answers.iter().map(|answer| answer.entropy).collect())
    }

    /// All columns one after the other, as 32-bit values: entropy, max, logsumexp, probability, eat_mean, eat_variance, and
    /// as integers top and eat_probes. Waits for them, without the GIL.
    fn columns<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyByteArray>> {
        self.with_answers(py, |answers| {
            let mut bytes = Vec::with_capacity(answers.len() * COLUMNS * 4);
            let columns: [fn(&RowStats) -> [u8; 4]; COLUMNS] = [
                |row| row.entropy.to_ne_bytes(),
                |row| row.max.to_ne_bytes(),
                |row| row.logsumexp.to_ne_bytes(),
                |row| row.probability.to_ne_bytes(),
                |row| row.eat.mean.to_ne_bytes(),
                |row| row.eat.variance.to_ne_bytes(),
                |row| row.top.to_ne_bytes(),
                |row| row.eat.probes.to_ne_bytes(),
            ];
            for column in columns {
                bytes.extend(answers.iter().flat_map(column));
            }
            PyByteArray::new(py, &bytes)
        })
    }
}

impl PendingRows {
    fn with_answers<T>(&self, py: Python<'_>, read: impl FnOnce(&[RowStats]) -> T) -> PyResult<T> {
        if self.answers.get().is_none() {
            // Its reference is let go of where the GIL is held.
            let _keep = py.detach(|| {
                let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
                let UnderWay { pending, keep, .. } = under_way.take()?;
                let answers = pending.wait();
                self.answers.get_or_init(|| answers);
                keep
            });
        }
        match self.answers.get() {
            Some(Ok(answers)) => Ok(read(answers)),
            Some(Err(why)) => Err(python_error(why)),
            None => Err(KernelError::new_err("the answers were lost when waiting for them failed")),
        }
    }
}

impl Drop for PendingRows {
    fn drop(&mut self) {
        let under_way = self.under_way.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Some(UnderWay { pending, keep, is_fenced }) = under_way.take() else { return };
        let mut pending = Some(pending);
        let mut let_go = || match pending.take() {
            // What is kept could be written to by whoever gets its memory next.
            Some(pending) if !is_fenced => drop(pending.wait()),
            pending => drop(pending),
        };
        // It may wait for the device, which must not stop other threads.
        if Python::try_attach(|py| py.detach(&mut let_go)).is_none() {
            let_go();
        }
        drop(keep);
    }
}

fn python_error(error: &Failure) -> PyErr {
    let text = error.to_string();
    match error {
        // What does not compile here is not there either.
        Failure::Unavailable(_) | Failure::Compile(_) => KernelUnavailable::new_err(text),
        Failure::NullPointer(_)
        | Failure::BadShape { .. }
        | Failure::BadValue { .. }
        | Failure::RowOutOfRange { .. } => PyValueError::new_err(text),
        _ => KernelError::new_err(text),
    }
}

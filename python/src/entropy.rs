//! The entropy of logits that a tensor of PyTorch holds.
#![expect(unsafe_code, reason = "the memory of a tensor is reached by its address")]

use std::ffi::c_void;

use meridian_kernels::{Element, Logits, Shape};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Entropies in nats of the rows `indices` of a matrix of logits in the machine's memory: `shape` is rows, vocabulary and
/// the stride of a row, in logits. `element` is "float32", "bfloat16" or "float16". The caller holds the tensor whose
/// `data_ptr()` is `address`, nobody writes to it meanwhile, and its size is what `shape` says.
#[pyfunction]
pub(crate) fn entropies(
    py: Python<'_>,
    address: usize,
    element: &str,
    shape: (usize, usize, usize),
    indices: Vec<u32>,
) -> PyResult<Vec<f32>> {
    let element = match element {
        "float32" => Element::F32,
        "bfloat16" => Element::Bf16,
        "float16" => Element::F16,
        other => {
            return Err(PyValueError::new_err(format!("element: {other:?}: expected float32, bfloat16 or float16")));
        }
    };
    let (rows, vocab, row_stride) = shape;
    py.detach(|| {
        // SAFETY: the caller says that the address and the shape are those of a live tensor that nobody writes to; a null
        // address and a misaligned one are refused.
        let logits = unsafe { Logits::from_raw(address as *const c_void, element, Shape { rows, vocab, row_stride }) };
        let mut nats = vec![0.0; indices.len()];
        logits.and_then(|logits| logits.entropy(&indices, &mut nats)).map(|()| nats)
    })
    .map_err(|error| PyValueError::new_err(error.to_string()))
}

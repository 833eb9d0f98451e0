//! The entropy series of `meridian_core::budget`, for a whole request at once.

use meridian_core::budget::{Eat, Rpdi};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Moving mean and variance of probe entropies; values that are not finite are left out and repeat what was before (NaN
/// before the first).
#[pyfunction]
pub(crate) fn eat(py: Python<'_>, values: Vec<f64>, alpha: f64) -> PyResult<(Vec<f64>, Vec<f64>)> {
    if !(alpha > 0.0 && alpha <= 1.0) {
        return Err(PyValueError::new_err(format!("alpha: {alpha}: must be in (0, 1]")));
    }
    Ok(py.detach(|| {
        let mut eat = Eat::default();
        values
            .into_iter()
            .map(|value| {
                eat.observe(value, alpha);
                (eat.mean().unwrap_or(f64::NAN), eat.variance().unwrap_or(f64::NAN))
            })
            .unzip()
    }))
}

/// Path deviation index after each token's entropy (nats); NaN where it has no value.
#[pyfunction]
pub(crate) fn rpdi(py: Python<'_>, values: Vec<f32>, window: u32) -> PyResult<Vec<f64>> {
    if window == 0 {
        return Err(PyValueError::new_err("window: 0: must be at least 1"));
    }
    Ok(py.detach(|| {
        let mut rpdi = Rpdi::new(window);
        values
            .into_iter()
            .map(|value| {
                rpdi.push(value);
                rpdi.value().unwrap_or(f64::NAN)
            })
            .collect()
    }))
}

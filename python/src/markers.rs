//! How a model marks its thinking, as Python resolves it.

use std::collections::HashSet;

use meridian_core::{Error, Markers};
use pyo3::prelude::*;
use pyo3::types::PyList;

/// The attributes of a `meridian.vllm.markers.TokenMarkers` that the host needs.
#[derive(FromPyObject)]
pub(crate) struct TokenMarkers {
    pub(crate) starts: Vec<Vec<u32>>,
    pub(crate) ends: Vec<Vec<u32>>,
    pub(crate) padding: Vec<u32>,
    pub(crate) tool_calls: Vec<Vec<u32>>,
    pub(crate) calls: Vec<(Vec<u32>, Vec<u32>)>,
    pub(crate) call_ends_thinking: bool,
    pub(crate) forced: Vec<u32>,
    pub(crate) boundaries: HashSet<u32>,
}

impl TokenMarkers {
    pub(crate) fn into_markers(self, resumes: bool) -> Result<Markers, Error> {
        let Self { starts, ends, padding, calls, call_ends_thinking, boundaries, .. } = self;
        let markers = Markers::new(starts, ends, padding)?.with_calls(calls, call_ends_thinking)?;
        let markers = markers.with_boundaries(boundaries.into_iter().collect());
        Ok(markers.with_resuming(resumes))
    }
}

/// The last turn of a prompt: its tokens from the last boundary on. Reads no more of the list than that.
pub(crate) fn last_turn(markers: &Markers, prompt: &Bound<'_, PyList>) -> PyResult<Vec<u32>> {
    let mut turn = Vec::new();
    for at in (0..prompt.len()).rev() {
        let token = prompt.get_item(at)?.extract()?;
        turn.push(token);
        if markers.is_boundary(token) {
            break;
        }
    }
    turn.reverse();
    Ok(turn)
}

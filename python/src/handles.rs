//! Requests as Python knows them, and the Python values of a step.

use std::collections::HashMap;

use foldhash::fast::FixedState;
use meridian_core::RowId;
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};

use crate::rows::RowData;

/// Whether a request was taken in, or what its sampler is to know.
#[derive(IntoPyObject)]
pub(crate) enum Added {
    #[pyo3(transparent)]
    Plain(bool),
    #[pyo3(transparent)]
    Followed(RowData),
}

/// The plan of a step, as the engine carries it out.
#[pyclass(frozen, get_all, module = "meridian._native")]
pub(crate) struct StepPlan {
    /// Tokens that the step may carry.
    pub(crate) token_budget: u32,
    /// Tokens by request id, of the requests that may take fewer than they need; None without any.
    pub(crate) caps: Option<Py<PyDict>>,
    /// The list of running requests has another order than before.
    pub(crate) running_changed: bool,
    /// The list of waiting requests has another order than before.
    pub(crate) waiting_changed: bool,
    /// Running requests that give way to waiting ones; None without any.
    pub(crate) preempted: Option<Py<PyList>>,
    /// Waiting requests that end unserved; None without any.
    pub(crate) refused: Option<Py<PyList>>,
    /// Waiting requests that were deferred for too long; None without any.
    pub(crate) overdue: Option<Py<PyList>>,
    /// Some prompts are computed in units of more than a token.
    pub(crate) has_units: bool,
    /// KV blocks that running requests have yet to take for their prompts.
    pub(crate) prompt_blocks: u32,
    /// Orders for the samplers; None without any.
    pub(crate) orders: Option<Py<PyBytes>>,
    /// The thinking of any live request is followed.
    pub(crate) follows_thinking: bool,
}

/// The rows of the live requests, by the addresses of Python objects; and what a step needs room for.
#[derive(Default)]
pub(crate) struct Handles {
    /// By the address of a request's handle, and by that of its id. `live` keeps both alive, so that no address is used again.
    rows: HashMap<usize, RowId, FixedState>,
    live: HashMap<RowId, Live, FixedState>,
    pub(crate) running: Vec<RowId>,
    pub(crate) waiting: Vec<RowId>,
    pub(crate) given: Vec<(RowId, u32)>,
    pub(crate) generated: Vec<(RowId, u32)>,
}

/// The Python side of a live request.
pub(crate) struct Live {
    handle: Py<PyAny>,
    id: Py<PyString>,
}

impl Handles {
    pub(crate) fn insert(&mut self, row: RowId, handle: Py<PyAny>, id: Py<PyString>) {
        self.rows.insert(handle.as_ptr() as usize, row);
        self.rows.insert(id.as_ptr() as usize, row);
        self.live.insert(row, Live { handle, id });
    }

    pub(crate) fn remove(&mut self, row: RowId) -> Option<Live> {
        let live = self.live.remove(&row)?;
        self.rows.remove(&(live.handle.as_ptr() as usize));
        self.rows.remove(&(live.id.as_ptr() as usize));
        Some(live)
    }

    /// The engine's own id of a request.
    pub(crate) fn id(&self, row: RowId) -> Option<&Py<PyString>> {
        self.live.get(&row).map(|live| &live.id)
    }

    /// The Python object of a request.
    pub(crate) fn handle(&self, py: Python<'_>, row: RowId) -> Option<Py<PyAny>> {
        self.live.get(&row).map(|live| live.handle.clone_ref(py))
    }

    /// The row of a request by the object that is its id. An equal text in another object needs [`meridian_engine::Driver::find`].
    pub(crate) fn row(&self, id: &Bound<'_, PyAny>) -> Option<RowId> {
        self.rows.get(&(id.as_ptr() as usize)).copied()
    }

    /// Find the rows of the handles in two lists, into `running` and `waiting`; false when one is not known.
    pub(crate) fn find(&mut self, running: &Bound<'_, PyList>, waiting: Option<&Bound<'_, PyList>>) -> bool {
        self.waiting.clear();
        rows_of(&self.rows, running, &mut self.running)
            && waiting.is_none_or(|waiting| rows_of(&self.rows, waiting, &mut self.waiting))
    }
}

fn rows_of(known: &HashMap<usize, RowId, FixedState>, list: &Bound<'_, PyList>, out: &mut Vec<RowId>) -> bool {
    out.clear();
    for handle in list {
        match known.get(&(handle.as_ptr() as usize)) {
            Some(row) => out.push(*row),
            None => return false,
        }
    }
    true
}

/// A Python integer of any size, cut to 64 bits: clients choose some of them, and none may end the engine.
pub(crate) fn saturated(number: &Bound<'_, PyAny>) -> PyResult<i64> {
    match number.extract::<i64>() {
        Err(error) if error.is_instance_of::<PyOverflowError>(number.py()) => {
            Ok(if number.lt(0)? { i64::MIN } else { i64::MAX })
        }
        extracted => extracted,
    }
}

pub(crate) fn to_u32(number: i64) -> u32 {
    number.clamp(0, u32::MAX.into()) as u32
}

/// All at once: a list that is half in order has lost requests.
pub(crate) fn reorder(list: &Bound<'_, PyList>, order: &[u32]) -> PyResult<()> {
    if order.is_empty() {
        return Ok(());
    }
    let before: Vec<Bound<'_, PyAny>> = list.iter().collect();
    let after = PyList::new(list.py(), order.iter().map(|from| &before[*from as usize]))?;
    list.set_slice(0, list.len(), &after)
}

//! Memory of one launch: what is asked, what is answered, and the events between them.

use cudarc::driver::sys::{CUevent, CUevent_flags, CUstream};

use super::driver::{Pinned, allocate, cuda};
use crate::launch::Matrix;
use crate::{KernelError, Probes, Request, RowStats, Tokens};

/// Bytes of the four columns that a request may have, one row of each.
const ASKED_BYTES: usize = 16;
const ANSWER_BYTES: usize = size_of::<RowStats>();

/// What a request asks, column by column, as the device's addresses; 0 for a column that is not there.
#[derive(Clone, Copy, Default)]
pub(super) struct Columns {
    pub(super) rows: u64,
    pub(super) tokens: u64,
    pub(super) temperatures: u64,
    pub(super) slots: u64,
}

/// The device's memory and the host's for so many rows.
pub(super) struct Buffers {
    /// Answers, then columns.
    pinned: Pinned,
    /// Columns.
    columns: u64,
    rows: usize,
    /// The logits are made.
    pub(super) made: CUevent,
    /// The answers are there.
    pub(super) done: CUevent,
}

// SAFETY: handles and addresses; the driver's calls may come from any thread, and one holds the slot at a time.
unsafe impl Send for Buffers {}

impl Buffers {
    /// For `rows` at least, in the current context.
    pub(super) fn new(rows: usize) -> Result<Self, KernelError> {
        let rows = rows.next_power_of_two();
        let pinned = Pinned::new(rows * (ANSWER_BYTES + ASKED_BYTES))?;
        let event = |flags: CUevent_flags| {
            let mut event = std::ptr::null_mut();
            let flags = flags as u32 | CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            // SAFETY: written to. Nobody asks for times.
            unsafe { cuda!(cuEventCreate(&raw mut event, flags)) }.map(|()| event)
        };
        let rest = || {
            // Whoever waits for the answers leaves its core to others meanwhile.
            let (default, blocking) = (CUevent_flags::CU_EVENT_DEFAULT, CUevent_flags::CU_EVENT_BLOCKING_SYNC);
            Ok((event(default)?, event(blocking)?, allocate(rows * ASKED_BYTES)?))
        };
        match rest() {
            Ok((made, done, columns)) => Ok(Self { pinned, columns, rows, made, done }),
            Err(error) => {
                pinned.free();
                Err(error)
            }
        }
    }

    pub(super) fn holds(&self, rows: usize) -> bool {
        rows <= self.rows
    }

    /// Where the device writes the answers to.
    pub(super) fn answers(&self) -> u64 {
        self.pinned.device
    }

    /// The answers, after the event `done`.
    pub(super) fn read(&self, count: usize) -> Vec<RowStats> {
        assert!(self.holds(count), "{count} answers were asked for");
        // SAFETY: `rows` answers begin here, aligned as pinned memory is; the kernel wrote `count` of them, by the event
        // that was awaited, and nobody writes now.
        unsafe { std::slice::from_raw_parts(self.pinned.host.cast::<RowStats>(), count) }.to_vec()
    }

    /// Copy what is asked to the device, in `stream`'s order.
    ///
    /// # Safety
    ///
    /// `stream` is one of the current context; no launch uses this slot; the request is a checked one of `count` rows.
    pub(super) unsafe fn ask(
        &self,
        stream: CUstream,
        matrix: &Matrix,
        request: &Request<'_>,
        probes: Option<&Probes<'_>>,
        count: usize,
    ) -> Result<Columns, KernelError> {
        assert!(self.holds(count), "{count} rows were asked for");
        let base = self.rows * ANSWER_BYTES;
        let mut used = 0;
        let mut put = |values: *const u32, len: usize| {
            assert!(len == 0 || len == count, "a column of {len} for {count} rows");
            if len == 0 {
                return 0;
            }
            // SAFETY: four columns of `rows` words are behind the answers, and `count` is at most `rows`.
            unsafe { values.copy_to_nonoverlapping(self.pinned.host.add(base + used).cast(), count) };
            let at = self.columns + used as u64;
            used += count * size_of::<u32>();
            at
        };
        let rows = request.rows.filter(|rows| !is_all(rows, matrix.shape.rows)).unwrap_or(&[]);
        let columns = Columns {
            rows: put(rows.as_ptr(), rows.len()),
            tokens: match request.tokens {
                Tokens::None => 0,
                Tokens::Host(tokens) => put(tokens.as_ptr().cast(), tokens.len()),
                Tokens::Device(tokens) => tokens.addr() as u64,
            },
            temperatures: put(request.temperatures.as_ptr().cast(), request.temperatures.len()),
            slots: probes.map_or(0, |probes| put(probes.slots.as_ptr().cast(), probes.slots.len())),
        };
        if used > 0 {
            // SAFETY: `used` bytes of pinned memory, which stays until the slot is used again, and of the device's.
            unsafe { cuda!(cuMemcpyHtoDAsync_v2(self.columns, self.pinned.host.add(base).cast(), used, stream)) }?;
        }
        Ok(columns)
    }

    /// Give all back, in the current context, when nothing on the device uses it any more.
    pub(super) fn free(self) {
        self.pinned.free();
        // SAFETY: from cuMemAlloc and cuEventCreate, and gone with `self`.
        unsafe {
            let _ = cuda!(cuMemFree_v2(self.columns));
            let _ = cuda!(cuEventDestroy_v2(self.made));
            let _ = cuda!(cuEventDestroy_v2(self.done));
        }
    }
}

/// Whether these are all rows in their order, which the kernel knows by itself.
fn is_all(asked: &[u32], rows: usize) -> bool {
    asked.len() == rows && asked.iter().enumerate().all(|(i, row)| i == *row as usize)
}

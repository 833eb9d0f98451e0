//! What the kernels take, as kernels/cuda/entropy.cu has it.

use std::mem::{offset_of, size_of};

use crate::{EatState, Element, RowStats};

/// Threads of a block, and the vectors of 16 bytes that each asks for at once.
pub(super) const THREADS: u32 = 256;
pub(super) const VECTOR_BYTES: usize = 16;

/// Bytes that a block writes for a part of a row.
pub(super) const PARTIAL_BYTES: usize = 32;

/// Addresses are the device's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Params {
    pub(super) logits: u64,
    pub(super) row_stride: u64,
    pub(super) rows: u64,
    pub(super) tokens: u64,
    pub(super) temperatures: u64,
    pub(super) slots: u64,
    pub(super) states: u64,
    pub(super) partials: u64,
    pub(super) tickets: u64,
    pub(super) answers: u64,
    pub(super) alpha: f32,
    pub(super) vocab: u32,
    pub(super) splits: u32,
}

// The sizes that the kernels count on.
const _: () = {
    assert!(size_of::<RowStats>() == 32 && size_of::<EatState>() == 12 && size_of::<Params>() == 96);
    assert!(offset_of!(RowStats, eat) == 20 && offset_of!(Params, alpha) == 80);
};

/// Name of the kernel for these logits.
pub(super) fn kernel(element: Element) -> &'static std::ffi::CStr {
    match element {
        Element::F32 => c"meridian_entropy_f32",
        Element::Bf16 => c"meridian_entropy_bf16",
        Element::F16 => c"meridian_entropy_f16",
    }
}

/// What a block costs beside what it reads, in bytes read meanwhile. A guess that checks/gpu can better.
const BLOCK_BYTES: usize = 16 << 10;

/// Parts that each row is read in, by a block each, so that a few rows keep the whole device busy and the last blocks to
/// begin do not run alone for long: the number with the least time, if blocks run in waves of [`BLOCKS`] on each of the
/// `multiprocessors`. Every thread of a block reads a vector at least, and there are not more parts than `most_parts`.
pub(super) fn splits(count: usize, row_bytes: usize, multiprocessors: u32, most_parts: usize) -> u32 {
    let at_once = multiprocessors as usize * BLOCKS;
    let most = row_bytes.div_ceil(THREADS as usize * VECTOR_BYTES).min(most_parts / count.max(1)).max(1);
    let time = |parts: &usize| (count * parts).div_ceil(at_once) * (row_bytes / parts + BLOCK_BYTES);
    (1..=most).min_by_key(time).unwrap_or(1) as u32
}

/// Blocks of [`THREADS`] that a multiprocessor runs at the same time (`MERIDIAN_BLOCKS` in the kernels).
pub(super) const BLOCKS: usize = 5;

#[cfg(test)]
mod tests {
    use super::splits;

    #[test]
    fn few_rows_are_split_and_many_are_not() {
        let row = 151_936 * 2;
        assert_eq!(splits(1, row, 132, 1 << 14), 75, "a vector a thread");
        assert_eq!(splits(8, row, 132, 1 << 14), 75);
        assert_eq!(splits(64, row, 132, 1 << 14), 10, "one wave");
        assert_eq!(splits(256, row, 132, 1 << 14), 5, "two waves of small parts rather than one that is not full");
        assert_eq!(splits(661, row, 132, 1 << 14), 4, "not one block alone at the end");
        assert_eq!(splits(4096, row, 132, 1 << 14), 2);
        assert_eq!(splits(0, 2, 132, 1 << 14), 1);
        assert_eq!(splits(1, 2, 132, 1 << 14), 1, "a row of one logit");
        assert_eq!(splits(20_000, row, 1 << 20, 1 << 14), 1, "no more parts than there is memory for");
    }
}

//! The C ABI, as `include/meridian_kernels.h` shows it to C: what is here stays as it is.
#![expect(unsafe_code, reason = "callers in C")]

mod failure;
mod read;

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use failure::{MERIDIAN_LAUNCH_FAILED, MERIDIAN_OK, guarded, last};
use read::{Versioned, array, check_aligned, slice_of};

use crate::{
    Backend, EatState, Element, Isa, KernelError, MAX_ROWS, Matrix, Pending, Place, Probes, Request, RowStats, Shape,
    Tokens, launch,
};

/// Version of this interface. Within a version, structs may grow at their ends, and names may be added; nothing else
/// changes.
pub const MERIDIAN_KERNELS_ABI_VERSION: u32 = 1;

/// IEEE 754 single precision.
pub const MERIDIAN_F32: u32 = 0;
/// The upper 16 bits of a single.
pub const MERIDIAN_BF16: u32 = 1;
/// IEEE 754 half precision.
pub const MERIDIAN_F16: u32 = 2;

/// The logits are in the machine's memory.
pub const MERIDIAN_CPU: i32 = -1;

/// Nothing later on the stream writes to the logits before the answers are there. Without this flag, later work on the
/// stream waits on the device until the logits are read.
pub const MERIDIAN_LOGITS_KEPT: u32 = 1;

/// A matrix of logits, and what is asked of it. Set what is not needed to 0. The arrays in the machine's memory are read
/// during the call only.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MeridianEntropyLaunch {
    /// sizeof(MeridianEntropyLaunch).
    pub struct_size: u64,
    /// MERIDIAN_CPU, or the number of a CUDA device among those that this process sees.
    pub device: i32,
    /// MERIDIAN_F32, MERIDIAN_BF16 or MERIDIAN_F16.
    pub element: u32,
    /// The first logit, in the memory of the device; a multiple of a logit's size.
    pub logits: *const c_void,
    /// Rows of the matrix.
    pub rows: u32,
    /// Logits in a row, 1 to 2^24.
    pub vocab: u32,
    /// From the first logit of a row to the first of the next, in logits; at least vocab.
    pub row_stride: u64,
    /// The rows asked for, count of them, in the order of the answers; NULL for all, and count is then rows.
    pub row_indices: *const u32,
    /// Rows asked for, at most 65536: how long every array here is, and the answer.
    pub count: u32,
    /// MERIDIAN_LOGITS_KEPT, or 0.
    pub flags: u32,
    /// For each row asked for a token whose probability is wanted, such as -1 for none; NULL for no row.
    pub tokens: *const i32,
    /// `tokens` in the memory of the device, ordered before the launch as the logits are; one of the two is NULL.
    pub device_tokens: *const i32,
    /// For each row asked for what its logits are divided by, finite and above 0; NULL for 1.
    pub temperatures: *const f32,
    /// The CUstream on which the logits are made; NULL for the legacy default stream. Unused on the CPU.
    pub stream: *mut c_void,
}

/// Rows that are probes of EAT, and where the states of their requests are.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MeridianEat {
    /// sizeof(MeridianEat).
    pub struct_size: u64,
    /// For each row asked for the place of its state in states, each place once; -1 for a row that is no probe. In the
    /// machine's memory, read during the call only.
    pub slots: *const i32,
    /// In the memory of the device. All zero is a request that was not probed yet.
    pub states: *mut EatState,
    /// States there are.
    pub len: u32,
    /// Weight of the newest entropy, in (0, 1].
    pub alpha: f32,
}

/// A launch whose answers were not taken yet. One thread at a time may use it.
pub struct MeridianPending(Pending);

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<MeridianEntropyLaunch>() == 88 && align_of::<MeridianEntropyLaunch>() == 8);
    assert!(offset_of!(MeridianEntropyLaunch, device) == 8 && offset_of!(MeridianEntropyLaunch, element) == 12);
    assert!(offset_of!(MeridianEntropyLaunch, logits) == 16 && offset_of!(MeridianEntropyLaunch, rows) == 24);
    assert!(offset_of!(MeridianEntropyLaunch, vocab) == 28 && offset_of!(MeridianEntropyLaunch, row_stride) == 32);
    assert!(offset_of!(MeridianEntropyLaunch, row_indices) == 40 && offset_of!(MeridianEntropyLaunch, count) == 48);
    assert!(offset_of!(MeridianEntropyLaunch, flags) == 52 && offset_of!(MeridianEntropyLaunch, tokens) == 56);
    assert!(offset_of!(MeridianEntropyLaunch, device_tokens) == 64);
    assert!(offset_of!(MeridianEntropyLaunch, temperatures) == 72 && offset_of!(MeridianEntropyLaunch, stream) == 80);
    assert!(size_of::<MeridianEat>() == 32 && align_of::<MeridianEat>() == 8);
    assert!(offset_of!(MeridianEat, slots) == 8 && offset_of!(MeridianEat, states) == 16);
    assert!(offset_of!(MeridianEat, len) == 24 && offset_of!(MeridianEat, alpha) == 28);
    assert!(size_of::<EatState>() == 12 && offset_of!(EatState, variance) == 4 && offset_of!(EatState, probes) == 8);
    assert!(size_of::<RowStats>() == 32 && align_of::<RowStats>() == 4);
    assert!(offset_of!(RowStats, max) == 4 && offset_of!(RowStats, logsumexp) == 8);
    assert!(offset_of!(RowStats, probability) == 12 && offset_of!(RowStats, top) == 16);
    assert!(offset_of!(RowStats, eat) == 20);
};

// SAFETY: numbers and pointers, which may be null, after a size.
unsafe impl Versioned for MeridianEntropyLaunch {
    const NAME: &'static str = "launch";
    const SIZES: &'static [u64] = &[88];
}

// SAFETY: numbers and pointers, which may be null, after a size.
unsafe impl Versioned for MeridianEat {
    const NAME: &'static str = "eat";
    const SIZES: &'static [u64] = &[32];
}

/// The version of the library: MERIDIAN_KERNELS_ABI_VERSION of the header that it was built with.
#[unsafe(no_mangle)]
pub extern "C" fn meridian_kernels_abi_version() -> u32 {
    MERIDIAN_KERNELS_ABI_VERSION
}

/// Begin to measure rows of logits: on the CPU at once, on the caller's thread; on a CUDA device on a stream of its own,
/// after what is on the given one. On success *pending is a handle for meridian_pending_wait or meridian_pending_drop,
/// one of which must get it; otherwise *pending is NULL, and nothing was launched if the result is negative.
///
/// A positive result is the CUresult of a launch that failed, of which the device may have done a part.
///
/// # Safety
///
/// The matrix is initialized memory of one allocation on the device. On the CPU nobody writes to it during the call; on a
/// CUDA device it stays allocated until the answers are there, and what writes to it before that is on the stream, or
/// ordered after it. The stream is a live one of the device's primary context. Arrays are as long as they are said to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn meridian_entropy_launch(
    launch: *const MeridianEntropyLaunch,
    pending: *mut *mut MeridianPending,
) -> i32 {
    guarded(|| {
        // SAFETY: this function's contract.
        unsafe { begin(launch, None, pending) }
    })
}

/// Begins a launch as meridian_entropy_launch does, and lets the rows that are probes of EAT move the states of their
/// requests on: on a CUDA device in the order of the launches.
///
/// # Safety
///
/// As meridian_entropy_launch; and nobody else touches the states until the answers are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn meridian_eat_launch(
    launch: *const MeridianEntropyLaunch,
    eat: *const MeridianEat,
    pending: *mut *mut MeridianPending,
) -> i32 {
    guarded(|| {
        // SAFETY: this function's contract.
        unsafe { begin(launch, Some(eat), pending) }
    })
}

/// Whether meridian_pending_wait would not block: 1 when the answers are there, 0 when they are not yet, otherwise a
/// negative code; MERIDIAN_LAUNCH_FAILED when the device failed, with which CUresult meridian_pending_wait says.
///
/// # Safety
///
/// The handle is NULL or one that was not given to meridian_pending_wait or meridian_pending_drop.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn meridian_pending_ready(pending: *const MeridianPending) -> i32 {
    let mut is_ready = false;
    let code = guarded(|| {
        // SAFETY: this function's contract.
        let pending = unsafe { pending.as_ref() }.ok_or(KernelError::NullPointer("pending"))?;
        is_ready = pending.0.is_ready()?;
        Ok(MERIDIAN_OK)
    });
    match code {
        MERIDIAN_OK => i32::from(is_ready),
        // A CUresult, of which 1 is one.
        1.. => MERIDIAN_LAUNCH_FAILED,
        _ => code,
    }
}

/// What runs it: "cpu-portable", "cpu-avx2", "cpu-avx512" or "cuda", a string that is never freed. NULL for NULL.
///
/// # Safety
///
/// As meridian_pending_ready.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn meridian_pending_backend(pending: *const MeridianPending) -> *const c_char {
    let mut name = ptr::null();
    guarded(|| {
        // SAFETY: this function's contract.
        let pending = unsafe { pending.as_ref() }.ok_or(KernelError::NullPointer("pending"))?;
        name = name_of(pending.0.backend()).as_ptr();
        Ok(MERIDIAN_OK)
    });
    name
}

/// Waits for the answers, copies them to out in the order of the rows asked for, and frees the handle, also when it
/// fails; out is untouched then. len is the count of the launch. A positive result is a CUresult of the device.
///
/// # Safety
///
/// As meridian_pending_ready; len structs can be written to out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn meridian_pending_wait(pending: *mut MeridianPending, out: *mut RowStats, len: u32) -> i32 {
    guarded(|| {
        if pending.is_null() {
            return Err(KernelError::NullPointer("pending"));
        }
        // SAFETY: not null, so it is a box that `begin` gave away and nobody took back, by this function's contract.
        let pending = unsafe { Box::from_raw(pending) };
        if out.is_null() && len > 0 {
            return Err(KernelError::NullPointer("out"));
        }
        check_aligned("out", out)?;
        let answers = pending.0.wait()?;
        if answers.len() != len as usize {
            let expected = "one value a row asked for";
            return Err(KernelError::BadShape { field: "out", value: len as usize, expected });
        }
        if !answers.is_empty() {
            // SAFETY: `len` structs can be written, by this function's contract, and `out` is aligned and not null. The
            // answers are a vector of this function's.
            unsafe { ptr::copy_nonoverlapping(answers.as_ptr(), out, answers.len()) };
        }
        Ok(MERIDIAN_OK)
    })
}

/// Frees a handle whose answers nobody wants. NULL is fine.
///
/// # Safety
///
/// As meridian_pending_ready.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn meridian_pending_drop(pending: *mut MeridianPending) {
    guarded(|| {
        if !pending.is_null() {
            // SAFETY: not null, so it is a box that `begin` gave away and nobody took back, by this function's contract.
            drop(unsafe { Box::from_raw(pending) });
        }
        Ok(MERIDIAN_OK)
    });
}

/// The text of the last failure of a call on this thread, in UTF-8; empty when none failed. As snprintf does, it writes
/// at most length bytes, the last of which is 0, and returns the bytes of the whole text without the 0.
///
/// # Safety
///
/// length bytes can be written to buffer, which may be NULL when length is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn meridian_last_error(buffer: *mut c_char, length: usize) -> usize {
    let text = last();
    if !buffer.is_null() && length > 0 {
        let end = text.floor_char_boundary(length - 1);
        // SAFETY: `end` is less than `length`, so that many bytes and one more can be written, by this function's
        // contract. The text is this function's.
        unsafe {
            ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, end);
            buffer.add(end).write(0);
        }
    }
    text.len()
}

/// # Safety
///
/// As [`meridian_eat_launch`].
unsafe fn begin(
    launched: *const MeridianEntropyLaunch,
    eat: Option<*const MeridianEat>,
    pending: *mut *mut MeridianPending,
) -> Result<i32, KernelError> {
    if pending.is_null() {
        return Err(KernelError::NullPointer("pending"));
    }
    check_aligned("pending", pending)?;
    // SAFETY: not null and aligned; the caller's to write to, by the contract.
    unsafe { pending.write(ptr::null_mut()) };
    // SAFETY: the struct is as large as it says, by the contract.
    let from = unsafe { MeridianEntropyLaunch::read(launched)? };
    let matrix = matrix(&from)?;
    // SAFETY: the arrays are as long as they are said to be, by the contract.
    let (request, eat) = unsafe {
        let request = request(&from)?;
        let eat = eat.map(|eat| MeridianEat::read(eat)).transpose()?;
        (request, eat)
    };
    let probes = match &eat {
        None => None,
        Some(eat) => {
            // SAFETY: as above.
            let slots = unsafe { slice_of("slots", eat.slots, from.count)? };
            Some(Probes { slots, alpha: eat.alpha, states: eat.states, len: eat.len as usize })
        }
    };
    // SAFETY: the contract is the same.
    let launched = unsafe { launch(&matrix, &request, probes.as_ref())? };
    // SAFETY: as above.
    unsafe { pending.write(Box::into_raw(Box::new(MeridianPending(launched)))) };
    Ok(MERIDIAN_OK)
}

fn matrix(from: &MeridianEntropyLaunch) -> Result<Matrix, KernelError> {
    let refuse = |field, value: String, expected| Err(KernelError::BadValue { field, value, expected });
    let element = match from.element {
        MERIDIAN_F32 => Element::F32,
        MERIDIAN_BF16 => Element::Bf16,
        MERIDIAN_F16 => Element::F16,
        other => return refuse("element", other.to_string(), "MERIDIAN_F32, MERIDIAN_BF16 or MERIDIAN_F16"),
    };
    if from.flags & !MERIDIAN_LOGITS_KEPT != 0 {
        return refuse("flags", from.flags.to_string(), "0 or MERIDIAN_LOGITS_KEPT");
    }
    let place = match u32::try_from(from.device) {
        Ok(ordinal) => Place::Cuda { ordinal, stream: from.stream, overwrites: from.flags & MERIDIAN_LOGITS_KEPT == 0 },
        Err(_) if from.device == MERIDIAN_CPU => Place::Cpu,
        Err(_) => return refuse("device", from.device.to_string(), "MERIDIAN_CPU, or the number of a CUDA device"),
    };
    let shape = Shape { rows: from.rows as usize, vocab: from.vocab as usize, row_stride: from.row_stride as usize };
    Ok(Matrix { logits: from.logits, element, shape, place })
}

/// # Safety
///
/// The arrays are as long as they are said to be, and nobody writes to them during the call.
unsafe fn request(from: &MeridianEntropyLaunch) -> Result<Request<'_>, KernelError> {
    let count = from.count as usize;
    if count > MAX_ROWS {
        return Err(KernelError::BadShape { field: "count", value: count, expected: "at most 65536 in one launch" });
    }
    if from.row_indices.is_null() && from.count != from.rows {
        let expected = "the number of rows, where row_indices is null";
        return Err(KernelError::BadShape { field: "count", value: count, expected });
    }
    if !from.tokens.is_null() && !from.device_tokens.is_null() {
        let (value, expected) = ("in both memories".to_owned(), "at most one of tokens and device_tokens");
        return Err(KernelError::BadValue { field: "tokens", value, expected });
    }
    // SAFETY: `count` values each, by the contract.
    let (rows, tokens, temperatures) = unsafe {
        (
            array("row_indices", from.row_indices, from.count)?,
            array("tokens", from.tokens, from.count)?,
            array("temperatures", from.temperatures, from.count)?,
        )
    };
    let tokens = match tokens {
        Some(tokens) => Tokens::Host(tokens),
        None if from.device_tokens.is_null() => Tokens::None,
        None => Tokens::Device(from.device_tokens),
    };
    Ok(Request { rows, tokens, temperatures: temperatures.unwrap_or(&[]) })
}

/// What [`Backend`] is displayed as.
fn name_of(backend: Backend) -> &'static CStr {
    match backend {
        Backend::Cpu(Isa::Portable) => c"cpu-portable",
        Backend::Cpu(Isa::Avx2) => c"cpu-avx2",
        Backend::Cpu(Isa::Avx512) => c"cpu-avx512",
        Backend::Cuda(_) => c"cuda",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_displayed() {
        let on_cpu = [Isa::Portable, Isa::Avx2, Isa::Avx512].map(Backend::Cpu);
        for backend in on_cpu.into_iter().chain([Backend::Cuda(3)]) {
            assert_eq!(name_of(backend).to_str(), Ok(&*backend.to_string()));
        }
    }
}

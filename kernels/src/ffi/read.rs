//! What C gives by its address.
#![expect(unsafe_code, reason = "callers in C")]

use std::{mem, ptr, slice};

use crate::KernelError;

/// A struct that a caller may know an older or a newer version of.
///
/// # Safety
///
/// It is C's, begins with a `u64` that is its size, and all zero is one.
pub(super) unsafe trait Versioned: Copy {
    const NAME: &'static str;
    /// Sizes of its versions. What a version lacks is zero.
    const SIZES: &'static [u64];

    /// # Safety
    ///
    /// `from` is null, or that many bytes are readable as its first 8 say, where those are one of [`Self::SIZES`].
    unsafe fn read(from: *const Self) -> Result<Self, KernelError> {
        if from.is_null() {
            return Err(KernelError::NullPointer(Self::NAME));
        }
        check_aligned(Self::NAME, from)?;
        // SAFETY: the struct begins with its size, and what the caller has begins so, by the contracts.
        let size = unsafe { from.cast::<u64>().read() };
        if !Self::SIZES.contains(&size) {
            let (value, expected) = (size as usize, "sizeof of a version of the struct that this library knows");
            return Err(KernelError::BadShape { field: "struct_size", value, expected });
        }
        // SAFETY: the trait's contract.
        let mut read: Self = unsafe { mem::zeroed() };
        // SAFETY: `size` bytes are readable, by the contract, and no version is larger than this one.
        unsafe { ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut read).cast(), size as usize) };
        Ok(read)
    }
}

/// An array that may be left out.
///
/// # Safety
///
/// `from` is null, or `len` initialized values that nobody writes to during `'a`.
pub(super) unsafe fn array<'a, T>(
    name: &'static str,
    from: *const T,
    len: u32,
) -> Result<Option<&'a [T]>, KernelError> {
    if from.is_null() {
        return Ok(None);
    }
    check_aligned(name, from)?;
    // SAFETY: not null and aligned; the rest is the contract.
    Ok(Some(unsafe { slice::from_raw_parts(from, len as usize) }))
}

/// An array that must be there, unless it is empty.
///
/// # Safety
///
/// As [`array`].
pub(super) unsafe fn slice_of<'a, T>(name: &'static str, from: *const T, len: u32) -> Result<&'a [T], KernelError> {
    // SAFETY: the contract is the same.
    match unsafe { array(name, from, len)? } {
        None if len > 0 => Err(KernelError::NullPointer(name)),
        array => Ok(array.unwrap_or(&[])),
    }
}

pub(super) fn check_aligned<T>(name: &'static str, from: *const T) -> Result<(), KernelError> {
    if from.is_aligned() {
        return Ok(());
    }
    let expected =
        if align_of::<T>() == 8 { "an address that is a multiple of 8" } else { "an address that is a multiple of 4" };
    Err(KernelError::BadShape { field: name, value: from.addr(), expected })
}

//! What a call that failed returns, and what it says.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::KernelError;

/// The call did what it says.
pub const MERIDIAN_OK: i32 = 0;
/// This machine, or this build, does not have what was asked for: the driver, the device, the processor's instructions.
pub const MERIDIAN_UNAVAILABLE: i32 = -1;
/// The kernels do not compile on this machine.
pub const MERIDIAN_COMPILE: i32 = -2;
/// Too many launches are under way: wait for some of them first.
pub const MERIDIAN_BUSY: i32 = -3;
/// A pointer that must not be NULL is.
pub const MERIDIAN_NULL_POINTER: i32 = -4;
/// A size, count or address does not fit the others.
pub const MERIDIAN_BAD_SHAPE: i32 = -5;
/// A value is none of those allowed.
pub const MERIDIAN_BAD_VALUE: i32 = -6;
/// A row is asked for that the matrix does not have.
pub const MERIDIAN_ROW_OUT_OF_RANGE: i32 = -7;
/// A bug of this library.
pub const MERIDIAN_INTERNAL: i32 = -8;
/// A launch failed: only from meridian_pending_ready, where a positive value is no CUresult.
pub const MERIDIAN_LAUNCH_FAILED: i32 = -9;

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The text of this thread's last failure.
pub(super) fn last() -> String {
    // A thread that ends has no memory of its own any more, and a call from there is no reason to panic.
    LAST.try_with(|last| last.borrow().clone()).unwrap_or_default()
}

fn remember(text: &str) {
    // A 0 would end the text for C. A thread that ends remembers nothing.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text.replace('\0', " "));
}

/// Runs what a call does. No panic leaves it.
pub(super) fn guarded(body: impl FnOnce() -> Result<i32, KernelError>) -> i32 {
    // What a body that panicked has touched is the caller's to give up: it is told of a bug.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            remember(&error.to_string());
            code_of(&error)
        }
        Err(_) => {
            remember("internal error: a panic, whose message is on the standard error stream");
            MERIDIAN_INTERNAL
        }
    }
}

fn code_of(error: &KernelError) -> i32 {
    match error {
        KernelError::Unavailable(_) => MERIDIAN_UNAVAILABLE,
        // Every CUresult but that of success is positive.
        KernelError::Launch(code) if *code > 0 => *code,
        KernelError::Launch(_) => MERIDIAN_INTERNAL,
        KernelError::Compile(_) => MERIDIAN_COMPILE,
        KernelError::Busy(_) => MERIDIAN_BUSY,
        KernelError::NullPointer(_) => MERIDIAN_NULL_POINTER,
        KernelError::BadShape { .. } => MERIDIAN_BAD_SHAPE,
        KernelError::BadValue { .. } => MERIDIAN_BAD_VALUE,
        KernelError::RowOutOfRange { .. } => MERIDIAN_ROW_OUT_OF_RANGE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_code() {
        assert_eq!(guarded(|| panic!("on purpose")), MERIDIAN_INTERNAL);
        assert!(last().starts_with("internal error"));
    }

    #[test]
    fn every_error_has_its_code_and_text() {
        let fails = |error: KernelError| (guarded(|| Err(error)), last());
        assert_eq!(fails(KernelError::Launch(719)), (719, "the launch failed with code 719".into()));
        assert_eq!(fails(KernelError::Launch(0)).0, MERIDIAN_INTERNAL);
        assert_eq!(fails(KernelError::Busy(8)).0, MERIDIAN_BUSY);
        let text = "the kernels do not compile: line 3 is wrong".to_owned();
        assert_eq!(fails(KernelError::Compile("line\x003 is wrong".into())), (MERIDIAN_COMPILE, text));
        assert_eq!(guarded(|| Ok(0)), MERIDIAN_OK);
        assert!(last().ends_with("line 3 is wrong"), "a call that succeeds leaves it");
        let other = std::thread::spawn(last).join().expect("it does not panic");
        assert_eq!(other, "", "another thread's failures are its own");
    }
}

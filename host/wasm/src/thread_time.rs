//! The processor time of this thread.
#![cfg_attr(target_os = "linux", expect(unsafe_code, reason = "clock_gettime is a C function"))]

use std::time::Duration;

/// Processor time that this thread has used; `None` where the system has no such clock. Takes half a microsecond.
#[cfg(target_os = "linux")]
pub(crate) fn thread_time() -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the result, and the call keeps no pointer to it.
    let done = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    let (Ok(seconds), Ok(nanoseconds)) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec)) else { return None };
    (done == 0).then(|| Duration::new(seconds, nanoseconds))
}

/// As on Linux.
#[cfg(not(target_os = "linux"))]
pub(crate) fn thread_time() -> Option<Duration> {
    None
}

//! The calls of Linux that the standard library lacks: limits of this process, and waiting for several pipes.
#![expect(unsafe_code, reason = "setrlimit, prctl, nice and poll are C functions")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use super::wire::Request;

#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = libc::c_int;

/// Files that may be open: the three standard ones, and those that a program has open when it gets here.
const OPEN_FILES: u64 = 16;
/// Below normal, so that the engine's threads come first: a quarter of a core that one of them wants too. With less, an
/// interpreter would miss its deadline on a busy machine.
const NICENESS: libc::c_int = 5;
/// After the signal that names the reason, before the one that cannot be handled.
const GRACE_S: u64 = 5;

/// Have this process killed when the thread that started it ends.
pub(super) fn die_with_parent() -> io::Result<()> {
    // SAFETY: this option takes a number and changes nothing but a setting of this process.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) })
}

/// Lower the limits of this process for good.
pub(super) fn lower_limits(request: &Request) -> io::Result<()> {
    let is = |limit: u64| libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // When memory runs out, this process is the one to end. Not every container lets a process say so.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    // SAFETY: takes a number and changes nothing but the priority of this process.
    unsafe { libc::nice(NICENESS) };
    // Dumping gigabytes for each hostile component would be an attack of its own; a limit of 0 does not hold for dumps
    // into a program.
    // SAFETY: this option takes a number and changes nothing but a setting of this process.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0 as libc::c_ulong) })?;
    lower(libc::RLIMIT_CORE, is(0))?;
    lower(libc::RLIMIT_FSIZE, is(0))?;
    lower(libc::RLIMIT_NOFILE, is(OPEN_FILES))?;
    lower(libc::RLIMIT_CPU, libc::rlimit { rlim_cur: request.cpu_s, rlim_max: request.cpu_s + GRACE_S })?;
    lower(libc::RLIMIT_AS, is(reserved_bytes().saturating_add(request.memory_bytes)))
}

/// A limit that is lower already stays.
fn lower(resource: Resource, to: libc::rlimit) -> io::Result<()> {
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `now` is an `rlimit` that may be written, and outlives the call.
    check(unsafe { libc::getrlimit(resource, &raw mut now) })?;
    let lowered = libc::rlimit { rlim_cur: to.rlim_cur.min(now.rlim_cur), rlim_max: to.rlim_max.min(now.rlim_max) };
    // SAFETY: `lowered` is an `rlimit`, and outlives the call.
    check(unsafe { libc::setrlimit(resource, &raw const lowered) })
}

/// Address space of this process; 0 when /proc does not say.
fn reserved_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let kib: Option<u64> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    kib.unwrap_or(0) << 10
}

/// Wait until one of the pipes has something to read or was closed, so long at most; which of them.
pub(super) fn readable<const N: usize>(pipes: [Option<BorrowedFd<'_>>; N], wait: Duration) -> io::Result<[bool; N]> {
    // A negative number is no file, and is passed over.
    let entry = |pipe: Option<BorrowedFd<'_>>| libc::pollfd {
        fd: pipe.map_or(-1, |pipe| pipe.as_raw_fd()),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut entries = pipes.map(entry);
    // Rounded up: too early would be a turn for nothing.
    let wait_ms = libc::c_int::try_from(wait.as_millis() + 1).unwrap_or(libc::c_int::MAX);
    // SAFETY: `entries` holds N entries that may be written, and outlives the call; the borrowed files are open.
    match check(unsafe { libc::poll(entries.as_mut_ptr(), N as libc::nfds_t, wait_ms) }) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok([false; N]),
        done => done.map(|()| entries.map(|entry| entry.revents != 0)),
    }
}

fn check(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

//! Compiling with limits. Cranelift cannot be interrupted, so a component is compiled in a process of its own, which can
//! be killed. A program that gives no [`CompileCommand`] compiles on a thread, which cannot.

#[cfg(target_os = "linux")]
mod child;
mod command;
#[cfg(target_os = "linux")]
mod os;
#[cfg(target_os = "linux")]
mod parent;
mod thread;
#[cfg(target_os = "linux")]
mod wire;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[cfg(target_os = "linux")]
pub use child::compile_child;
pub use command::{CompileCommand, CompileLimits};
#[cfg(target_os = "linux")]
pub(crate) use parent::Children;
pub(crate) use thread::Threads;

/// Longest time to compile a component. The largest real ones, interpreters of 12 to 18 MB, take 11 to 15 s on two
/// shared cores.
pub const COMPILE_DEADLINE: Duration = Duration::from_secs(120);

/// Compilations at a time. Each takes one core and, by its limits, some gigabytes at worst.
const MAX_RUNNING: usize = 2;

/// Cranelift and the validator recurse over the nesting of what they are given.
const STACK_BYTES: usize = 8 << 20;

/// The limits of a process that compiles are those of Linux.
#[cfg(not(target_os = "linux"))]
#[must_use]
pub fn compile_child() -> u8 {
    2
}

/// Where components are compiled.
#[derive(Clone)]
pub(crate) enum Compiler {
    Thread(Threads),
    #[cfg(target_os = "linux")]
    Child(std::sync::Arc<Children>),
}

impl Compiler {
    /// In processes that `command` starts; where the limits of a process are not known, on threads.
    pub(crate) fn new(command: CompileCommand) -> Self {
        #[cfg(target_os = "linux")]
        return Self::Child(std::sync::Arc::new(Children::new(command)));
        #[cfg(not(target_os = "linux"))]
        {
            drop(command);
            Self::Thread(Threads::new())
        }
    }
}

/// What is guarded is a count or an enum: whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

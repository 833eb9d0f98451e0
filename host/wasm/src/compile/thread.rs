//! Compiling on a thread, which is left to end by itself when it is late: for programs that start no process for it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::{COMPILE_DEADLINE, MAX_RUNNING, STACK_BYTES, lock};
use crate::LoadError;

/// Threads that compile. While [`MAX_RUNNING`] late ones run, new components are refused.
#[derive(Clone)]
pub(crate) struct Threads {
    deadline: Duration,
    late: Arc<Late>,
}

#[derive(Default)]
struct Late {
    running: Mutex<usize>,
    ended: Condvar,
}

/// Where a compilation stands, seen by the thread that compiles and the one that waits.
enum Job<T> {
    Running,
    Done(thread::Result<T>),
    /// Nobody waits for it any more.
    Abandoned,
}

impl Threads {
    pub(crate) fn new() -> Self {
        Self { deadline: COMPILE_DEADLINE, late: Arc::default() }
    }

    #[cfg(test)]
    fn with_deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// What `compile` returns, if it does so in time.
    pub(crate) fn run<T: Send + 'static>(&self, compile: impl FnOnce() -> T + Send + 'static) -> Result<T, LoadError> {
        let running = *lock(&self.late.running);
        if running >= MAX_RUNNING {
            return Err(LoadError::CompilerBusy { running });
        }
        let shared = Arc::new((Mutex::new(Job::Running), Condvar::new()));
        let theirs = Arc::clone(&shared);
        let late = Arc::clone(&self.late);
        let spawned = thread::Builder::new().name("meridian-compile".into()).stack_size(STACK_BYTES).spawn(move || {
            let result = catch_unwind(AssertUnwindSafe(compile));
            let (job, done) = &*theirs;
            let mut job = lock(job);
            if matches!(*job, Job::Abandoned) {
                // Freed first: the end of a late compilation also means the end of its memory.
                drop(result);
                *lock(&late.running) -= 1;
                late.ended.notify_all();
            } else {
                *job = Job::Done(result);
                done.notify_all();
            }
        });
        spawned.map_err(|error| LoadError::Setup { detail: format!("cannot start the compile thread: {error}") })?;
        let (job, done) = &*shared;
        let waited = done.wait_timeout_while(lock(job), self.deadline, |job| matches!(job, Job::Running));
        let (mut job, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *job, Job::Abandoned) {
            Job::Done(Ok(result)) => Ok(result),
            Job::Done(Err(_)) => Err(LoadError::Invalid { detail: "the compiler panicked over it".into() }),
            Job::Running | Job::Abandoned => {
                *lock(&self.late.running) += 1;
                Err(LoadError::CompileDeadline { limit: self.deadline })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn late_compilations_are_refused_and_bounded_and_end_by_themselves() {
        let threads = Threads::new();
        let impatient = threads.clone().with_deadline(Duration::ZERO);
        let mut gates = Vec::new();
        for _ in 0..MAX_RUNNING {
            let (open, gate) = mpsc::channel::<()>();
            gates.push(open);
            let late = impatient.run(move || gate.recv());
            assert!(matches!(late, Err(LoadError::CompileDeadline { limit: Duration::ZERO })));
        }
        let refused = threads.run(|| ()).unwrap_err();
        assert!(matches!(refused, LoadError::CompilerBusy { running: MAX_RUNNING }), "{refused}");
        drop(gates.pop());
        let running = lock(&threads.late.running);
        drop(threads.late.ended.wait_while(running, |running| *running == MAX_RUNNING).unwrap());
        assert_eq!(threads.run(|| 7).unwrap(), 7);
        drop(gates);
        let running = lock(&threads.late.running);
        assert_eq!(*threads.late.ended.wait_while(running, |running| *running > 0).unwrap(), 0);
    }

    #[test]
    fn a_panic_of_the_compiler_refuses_the_component() {
        let threads = Threads::new();
        let error = threads.run(|| -> () { panic!("on purpose") }).unwrap_err();
        assert_eq!(error.to_string(), "invalid component: the compiler panicked over it");
        assert_eq!(threads.run(|| 7).unwrap(), 7);
    }
}

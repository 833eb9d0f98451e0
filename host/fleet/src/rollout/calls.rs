//! Calls to many engines at once. Each engine has its own: one that hangs delays no other, and gets no second call before it
//! has answered the first.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::AT_A_TIME;

/// How often the caller is asked whether to stop waiting. Calls that take longer keep no other from its turn.
const TICK: Duration = Duration::from_millis(50);

/// A call to an engine, by its name.
pub(super) type Call<T> = (String, Box<dyn FnOnce() -> T + Send>);

/// The engines that have not answered yet.
#[derive(Default)]
pub(super) struct Calls {
    under_way: Arc<Mutex<BTreeSet<String>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Calls {
    /// Make these calls, but for those to engines in which an earlier one is under way. Returns the answers that came
    /// within this time, or before `is_over` said so; calls without one go on, and their answers are dropped.
    pub(super) fn make<T: Send + 'static>(
        &self,
        mut calls: Vec<Call<T>>,
        within: Duration,
        mut is_over: impl FnMut() -> bool,
    ) -> BTreeMap<String, T> {
        let deadline = Instant::now() + within;
        {
            let mut under_way = lock(&self.under_way);
            calls.retain(|(name, _)| !under_way.contains(name));
            under_way.extend(calls.iter().map(|(name, _)| name.clone()));
        }
        let (mut left, mut answers) = (calls.len(), BTreeMap::new());
        let queue = Arc::new(Mutex::new(VecDeque::from(calls)));
        let (to, from) = channel();
        self.work(&queue, &to);
        let mut panicked = None;
        let mut tick = Instant::now() + TICK;
        while left > 0 && Instant::now() < deadline {
            match from.recv_timeout(tick.min(deadline).saturating_duration_since(Instant::now())) {
                Ok((name, answer)) => {
                    left -= 1;
                    match answer {
                        Ok(answer) => drop(answers.insert(name, answer)),
                        Err(panic) => {
                            // The others under way come to their end first.
                            left -= self.drop_waiting(&queue);
                            panicked = Some(panic);
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if Instant::now() >= tick {
                tick = Instant::now() + TICK;
                if is_over() {
                    break;
                }
                self.work(&queue, &to);
            }
        }
        self.drop_waiting(&queue);
        panicked.map_or(answers, |panic| resume_unwind(panic))
    }

    /// Threads for the calls that wait.
    fn work<T: Send + 'static>(&self, queue: &Arc<Mutex<VecDeque<Call<T>>>>, to: &Sender<(String, thread::Result<T>)>) {
        for _ in 0..lock(queue).len().min(AT_A_TIME) {
            let (queue, to, under_way) = (Arc::clone(queue), to.clone(), Arc::clone(&self.under_way));
            let work = move || {
                while let Some((name, call)) = { lock(&queue).pop_front() } {
                    let answer = catch_unwind(AssertUnwindSafe(call));
                    lock(&under_way).remove(&name);
                    // Nobody may wait any more.
                    let _ = to.send((name, answer));
                }
            };
            // Without a thread, those that wait are as engines that do not answer.
            let _ = thread::Builder::new().spawn(work);
        }
    }

    /// Calls that have not begun are not made. Returns how many these are.
    fn drop_waiting<T>(&self, queue: &Mutex<VecDeque<Call<T>>>) -> usize {
        let waiting = std::mem::take(&mut *lock(queue));
        let mut under_way = lock(&self.under_way);
        for (name, _) in &waiting {
            under_way.remove(name);
        }
        waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn call<T>(name: &str, call: impl FnOnce() -> T + Send + 'static) -> Call<T> {
        (name.into(), Box::new(call))
    }

    fn hangs(until: Receiver<()>) -> impl FnOnce() -> u32 + Send {
        move || {
            let _ = until.recv();
            7
        }
    }

    #[test]
    fn one_that_hangs_delays_no_other_and_is_not_called_twice() {
        let calls = Calls::default();
        let (release, until) = channel();
        let mut hanging = vec![call("hangs", hangs(until))];
        hanging.extend((0..100).map(|i| call(&format!("e{i}"), move || i)));
        // As soon as the others have answered.
        let (mut ticks, few) = (0, Duration::from_millis(1));
        let answers = calls.make(hanging, LONG, || {
            ticks += 1;
            ticks == 3
        });
        assert_eq!((answers.len(), answers.get("hangs")), (100, None));
        let answers = calls.make(vec![call("hangs", || 1), call("e0", || 2)], LONG, || false);
        assert_eq!(answers, BTreeMap::from([("e0".to_owned(), 2)]), "one call at a time");
        release.send(()).expect("it waits");
        while lock(&calls.under_way).contains("hangs") {
            thread::yield_now();
        }
        assert_eq!(calls.make(vec![call("hangs", || 3)], LONG, || false).len(), 1, "it answers again");
        let (_release, until) = channel::<()>();
        assert!(calls.make(vec![call("late", hangs(until))], few, || false).is_empty());
    }

    #[test]
    fn many_that_hang_do_not_take_the_turns_of_others() {
        let calls = Calls::default();
        let (release, until): (Vec<_>, Vec<_>) = (0..3 * AT_A_TIME).map(|_| channel()).unzip();
        let mut all: Vec<Call<u32>> =
            until.into_iter().enumerate().map(|(i, until)| call(&format!("hangs-{i}"), hangs(until))).collect();
        all.push(call("answers", || 1));
        let mut ticks = 0;
        let answers = calls.make(all, LONG, || {
            ticks += 1;
            ticks == 20
        });
        assert_eq!(answers, BTreeMap::from([("answers".to_owned(), 1)]));
        drop(release);
    }

    #[test]
    fn a_panic_reaches_the_caller_after_the_others_have_ended() {
        let calls = Calls::default();
        let all = vec![call("panics", || resume_unwind(Box::new("why"))), call("e0", || 1)];
        let panic = catch_unwind(AssertUnwindSafe(|| calls.make(all, LONG, || false))).expect_err("it panicked");
        assert_eq!(panic.downcast_ref(), Some(&"why"));
        assert!(lock(&calls.under_way).is_empty());
    }
}

//! Many members at a time.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Members that are asked at a time.
pub const AT_A_TIME: usize = 32;

/// Call `ask` for each item, at most `at_a_time` at a time, and return the results in the order of the items. One that
/// hangs holds up none of the others.
///
/// ```
/// assert_eq!(meridian_fleet::each(&[1, 2, 3], 2, |n| n * n), [1, 4, 9]);
/// ```
pub fn each<M: Sync, T: Send>(items: &[M], at_a_time: usize, ask: impl Fn(&M) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let results: Vec<_> = items.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..at_a_time.clamp(1, items.len().max(1)) {
            scope.spawn(|| {
                while let Some((item, result)) = at(items, &results, next.fetch_add(1, Ordering::Relaxed)) {
                    *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(ask(item));
                }
            });
        }
    });
    let take = |result: Mutex<Option<T>>| {
        let result = result.into_inner().unwrap_or_else(PoisonError::into_inner);
        result.expect("a thread took every item; one that panicked ended the scope")
    };
    results.into_iter().map(take).collect()
}

fn at<'a, M, R>(items: &'a [M], results: &'a [R], index: usize) -> Option<(&'a M, &'a R)> {
    Some((items.get(index)?, results.get(index)?))
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn as_many_at_a_time_as_said_and_no_more() {
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        // Four must be there at once, or the test hangs.
        let four = Barrier::new(4);
        let items: Vec<usize> = (0..32).collect();
        let results = each(&items, 4, |item| {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            four.wait();
            now.fetch_sub(1, Ordering::SeqCst);
            item * 2
        });
        assert_eq!(results, items.iter().map(|item| item * 2).collect::<Vec<_>>());
        assert_eq!(most.load(Ordering::SeqCst), 4);
        assert!(each(&[] as &[u8], 0, |_| ()).is_empty());
        assert_eq!(each(&[7], 0, |n| *n), [7]);
    }
}

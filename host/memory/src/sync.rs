//! Locks and the concurrent map, replaceable by loom's.

use std::sync::PoisonError;

#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard};

/// Lock, even after a panic with the lock held: the guarded data is consistent between any two statements that can
/// panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(not(loom))]
mod map {
    use std::hash::Hash;

    use dashmap::{DashMap, Entry};
    use foldhash::fast::RandomState;

    /// More shards than threads, so that two threads seldom meet at one; not many more, because a batch takes each.
    const SHARDS: usize = 32;

    /// A concurrent map. Every method holds one shard's lock, for as long as its closure runs.
    pub(crate) struct ConcurrentMap<K, V>(DashMap<K, V, RandomState>);

    impl<K: Eq + Hash, V> ConcurrentMap<K, V> {
        pub(crate) fn new() -> Self {
            Self(DashMap::with_capacity_and_hasher_and_shard_amount(0, RandomState::default(), SHARDS))
        }

        /// Insert a new key. Returns false, without a change, when the key exists.
        pub(crate) fn insert_new(&self, key: K, value: V) -> bool {
            match self.0.entry(key) {
                Entry::Occupied(_) => false,
                Entry::Vacant(vacant) => {
                    vacant.insert(value);
                    true
                }
            }
        }

        #[inline]
        pub(crate) fn update<R>(&self, key: &K, f: impl FnOnce(&mut V) -> R) -> Option<R> {
            self.0.get_mut(key).map(|mut value| f(&mut value))
        }

        /// [`ConcurrentMap::update`] for the keys of many items, in their order for each key: `f` receives the item's
        /// position and the value. Returns the number of missing keys. Takes each shard's lock once instead of once per
        /// key, because the transfer of the lock's cache line between threads dominates the cost.
        pub(crate) fn update_all<T>(
            &self,
            items: &[T],
            key: impl Fn(&T) -> &K,
            mut f: impl FnMut(usize, &mut V),
        ) -> usize {
            let shards = self.0.shards();
            let hashes: Vec<usize> = items.iter().map(|item| self.0.hash_usize(key(item))).collect();
            // A counting sort by shard, stable.
            let mut ends = [0u32; SHARDS];
            for hash in &hashes {
                ends[self.0.determine_shard(*hash)] += 1;
            }
            let mut starts = [0u32; SHARDS];
            for shard in 1..SHARDS {
                starts[shard] = starts[shard - 1] + ends[shard - 1];
            }
            let mut order = vec![0u32; items.len()];
            for (position, hash) in (0u32..).zip(&hashes) {
                let next = &mut starts[self.0.determine_shard(*hash)];
                order[*next as usize] = position;
                *next += 1;
            }
            let mut missing = 0;
            // A locked shard is left for later: waiting threads would follow each other from lock to lock. For the same
            // reason, threads start at different shards.
            let first = hashes.first().map_or(0, |hash| self.0.determine_shard(*hash));
            let mut left = Vec::new();
            let every = (first..SHARDS).chain(0..first);
            for (round, shard) in every.map(|shard| (0, shard)).chain((0..SHARDS).map(|i| (1, i))) {
                let shard = if round == 0 {
                    shard
                } else if let Some(shard) = left.get(shard) {
                    *shard
                } else {
                    break;
                };
                let begin = if shard == 0 { 0 } else { starts[shard - 1] };
                let positions = &order[begin as usize..starts[shard] as usize];
                if positions.is_empty() {
                    continue;
                }
                let mut table = match shards[shard].try_write() {
                    Some(table) => table,
                    None if round == 0 => {
                        left.push(shard);
                        continue;
                    }
                    None => shards[shard].write(),
                };
                for position in positions.iter().map(|position| *position as usize) {
                    let wanted = key(&items[position]);
                    match table.get_mut(hashes[position] as u64, |(other, _)| other == wanted) {
                        Some((_, value)) => f(position, value.get_mut()),
                        None => missing += 1,
                    }
                }
            }
            missing
        }

        pub(crate) fn read<R>(&self, key: &K, f: impl FnOnce(&V) -> R) -> Option<R> {
            self.0.get(key).map(|value| f(&value))
        }

        pub(crate) fn remove(&self, key: &K) -> bool {
            self.0.remove(key).is_some()
        }

        /// Keep the values for which `keep` is true; returns the number of removed ones.
        pub(crate) fn retain(&self, mut keep: impl FnMut(&V) -> bool) -> usize {
            let mut gone = 0;
            self.0.retain(|_, value| {
                let kept = keep(value);
                gone += usize::from(!kept);
                kept
            });
            gone
        }

        pub(crate) fn len(&self) -> usize {
            self.0.len()
        }
    }
}

/// Under loom, one lock replaces dashmap's shards: loom tests the code around the map, not dashmap.
#[cfg(loom)]
mod map {
    use std::collections::HashMap;
    use std::hash::Hash;

    use super::{Mutex, lock};

    pub(crate) struct ConcurrentMap<K, V>(Mutex<HashMap<K, V>>);

    impl<K: Eq + Hash, V> ConcurrentMap<K, V> {
        pub(crate) fn new() -> Self {
            Self(Mutex::new(HashMap::new()))
        }

        pub(crate) fn insert_new(&self, key: K, value: V) -> bool {
            let mut map = lock(&self.0);
            if map.contains_key(&key) {
                return false;
            }
            map.insert(key, value);
            true
        }

        pub(crate) fn update<R>(&self, key: &K, f: impl FnOnce(&mut V) -> R) -> Option<R> {
            lock(&self.0).get_mut(key).map(f)
        }

        pub(crate) fn update_all<T>(
            &self,
            items: &[T],
            key: impl Fn(&T) -> &K,
            mut f: impl FnMut(usize, &mut V),
        ) -> usize {
            (0..).zip(items).filter(|(at, item)| self.update(key(item), |value| f(*at, value)).is_none()).count()
        }

        pub(crate) fn read<R>(&self, key: &K, f: impl FnOnce(&V) -> R) -> Option<R> {
            lock(&self.0).get(key).map(f)
        }

        pub(crate) fn remove(&self, key: &K) -> bool {
            lock(&self.0).remove(key).is_some()
        }

        pub(crate) fn retain(&self, mut keep: impl FnMut(&V) -> bool) -> usize {
            let mut map = lock(&self.0);
            let before = map.len();
            map.retain(|_, value| keep(value));
            before - map.len()
        }

        pub(crate) fn len(&self) -> usize {
            lock(&self.0).len()
        }
    }
}

pub(crate) use map::ConcurrentMap;

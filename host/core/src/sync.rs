//! Locks and the concurrent map, exchangeable for loom's.

#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
use std::sync::PoisonError;
#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard};

/// Lock, whether or not somebody panicked with it: what is guarded is consistent between any two statements that can
/// panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(not(loom))]
mod map {
    use std::hash::Hash;

    use dashmap::{DashMap, Entry};
    use foldhash::fast::RandomState;

    /// More shards than threads, so that two of them seldom meet at one.
    const SHARDS: usize = 64;

    /// A concurrent map. Every method holds one shard's lock, for as long as its closure runs.
    pub(crate) struct ConcurrentMap<K, V>(DashMap<K, V, RandomState>);

    impl<K: Eq + Hash, V> ConcurrentMap<K, V> {
        pub(crate) fn new() -> Self {
            Self(DashMap::with_capacity_and_hasher_and_shard_amount(0, RandomState::default(), SHARDS))
        }

        /// False, and nothing changed, when the key is there.
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

        pub(crate) fn read<R>(&self, key: &K, f: impl FnOnce(&V) -> R) -> Option<R> {
            self.0.get(key).map(|value| f(&value))
        }

        pub(crate) fn remove(&self, key: &K) -> bool {
            self.0.remove(key).is_some()
        }

        /// Keep what `keep` says; returns how many are gone.
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

/// Under loom one lock stands for dashmap's shards: what is explored is the code around the map, not dashmap.
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

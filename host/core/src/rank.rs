/// Turns keys into an order. Whatever the keys are, the order is a permutation.
///
/// ```
/// let mut order = Vec::new();
/// assert!(meridian_core::Ranker::default().rank(&[2.0, f32::NAN, -1.0], &[], &mut order));
/// assert_eq!(order, [2, 0, 1]);
/// ```
#[derive(Debug, Default)]
pub struct Ranker {
    packed: Vec<u64>,
}

impl Ranker {
    /// Order `0..keys.len()` by (`pinned` first, key, present position) into `order`; NaN last. Returns whether the
    /// order differs from the present one. `pinned` gives each position's urgency before all keys (higher first, 0 for
    /// none); it may be empty.
    pub fn rank(&mut self, keys: &[f32], pinned: &[u32], order: &mut Vec<u32>) -> bool {
        order.clear();
        let sorted = keys.windows(2).all(|pair| ordinal(pair[0]) <= ordinal(pair[1]));
        if sorted && pinned.is_empty() {
            return false;
        }
        self.packed.clear();
        self.packed.extend(keys.iter().enumerate().map(|(position, key)| {
            // A step has fewer than 2^32 candidates, so the position breaks ties and makes the sort stable.
            (u64::from(ordinal(*key)) << 32) | position as u64
        }));
        if pinned.is_empty() {
            // From one step to the next, keys change in whole groups, so there are runs, which this sort uses.
            self.packed.sort();
        } else {
            let urgency = |packed: &u64| pinned.get((*packed & 0xffff_ffff) as usize).copied().unwrap_or(0);
            self.packed.sort_unstable_by_key(|packed| (std::cmp::Reverse(urgency(packed)), *packed));
        }
        order.extend(self.packed.iter().map(|packed| *packed as u32));
        order.iter().enumerate().any(|(position, from)| position != *from as usize)
    }
}

/// A `u32` that orders like the key: -0 equals 0, NaN comes after positive infinity.
#[must_use]
pub fn ordinal(key: f32) -> u32 {
    if key.is_nan() {
        return u32::MAX;
    }
    let bits = (key + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | (1 << 31) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn order_is_the_stable_sort_by_key(bits in proptest::collection::vec(any::<u32>(), 0..200), few in any::<bool>()) {
            // Raw bits cover NaN, infinities and subnormals; a few values only make ties.
            let keys: Vec<f32> =
                bits.iter().map(|b| if few { (b % 4) as f32 - 2.0 } else { f32::from_bits(*b) }).collect();
            let mut expected: Vec<u32> = (0..keys.len() as u32).collect();
            expected.sort_by(|a, b| {
                let (a, b) = (keys[*a as usize], keys[*b as usize]);
                a.is_nan().cmp(&b.is_nan()).then(a.partial_cmp(&b).unwrap_or(std::cmp::Ordering::Equal))
            });
            let mut order = Vec::new();
            let changed = Ranker::default().rank(&keys, &[], &mut order);
            let identity: Vec<u32> = (0..keys.len() as u32).collect();
            prop_assert_eq!(changed, expected != identity);
            if changed {
                prop_assert_eq!(order, expected);
            }
        }

        #[test]
        fn pinned_positions_go_first(keys in proptest::collection::vec(any::<f32>(), 1..50), pin in any::<prop::sample::Index>()) {
            let pin = pin.index(keys.len());
            let mut pinned = vec![0; keys.len()];
            pinned[pin] = 1;
            let mut order = Vec::new();
            Ranker::default().rank(&keys, &pinned, &mut order);
            prop_assert_eq!(order[0] as usize, pin);
            order.sort_unstable();
            prop_assert_eq!(order, (0..keys.len() as u32).collect::<Vec<_>>());
        }
    }
}

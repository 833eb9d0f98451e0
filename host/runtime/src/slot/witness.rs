use meridian_core::{Asked, GuardedPolicy, SlotKind};

use crate::control::Version;

/// Writes the columns that it is given, as for the policy.
pub(crate) type Fill<'a, K> = dyn Fn(&[<K as SlotKind>::Column], &mut Vec<f32>) + 'a;

/// Sees every question to the active policy of a slot, and what it answers. The slot calls it on the deciding thread, with
/// the slot held: it must neither block nor fail.
pub(crate) trait Witness<K: SlotKind>: Send {
    /// Before the policy is asked; `stay` tells one stay of a policy in the process from another.
    fn before(&mut self, stay: u64, version: &Version, policy: &mut GuardedPolicy<K>);

    /// After the policy was asked, and before its faults are handled. `fill` writes the columns that it is given;
    /// `decision` is checked unless the policy faulted.
    fn after(&mut self, facts: &K::Facts, candidates: usize, fill: &Fill<'_, K>, asked: &Asked, decision: &K::Decision);
}

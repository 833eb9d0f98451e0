use meridian_core::{Asked, Batch, GuardedPolicy, SlotKind};

use crate::control::Version;

/// Writes the columns that it is given, as for the policy.
pub(crate) type Fill<'a, K> = dyn Fn(&[<K as SlotKind>::Column], &mut Vec<f32>) + 'a;

/// Sees every question to the active policy of a slot, and the answer. The slot calls it on the deciding thread while
/// it holds the slot: it must neither block nor fail.
pub(crate) trait Witness<K: SlotKind>: Send {
    /// Before the policy is asked; `stay` distinguishes the policy's stays in the process.
    fn before(&mut self, stay: u64, version: &Version, policy: &mut GuardedPolicy<K>);

    /// After the policy was asked this batch, and before its faults are handled. `fill` writes the columns that it is given;
    /// `decision` is checked unless the policy faulted.
    fn after(&mut self, batch: &Batch<'_, K>, fill: &Fill<'_, K>, asked: &Asked, decision: &K::Decision);
}

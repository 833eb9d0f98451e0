use super::report::Version;
use crate::{Asked, Batch, GuardedPolicy, SlotKind};

/// Writes the columns that it is given, as for the policy.
pub type Fill<'a, K> = dyn Fn(&[<K as SlotKind>::Column], &mut Vec<f32>) + 'a;

/// Sees every question to the active policy of a slot, and the answer: the tap of a recording. The slot calls it on the
/// deciding thread while it holds the slot: it must neither block nor fail.
///
/// ```
/// use meridian_core::slot::{DispatchSlot, Fill, Version, Witness};
/// use meridian_core::{
///     Asked, Batch, Decision, Dispatch, GuardedPolicy, Markers, RequestTable, SchedulerConfig, Step, native,
/// };
///
/// /// Sends the number of candidates of each decision.
/// struct Sizes(std::sync::mpsc::Sender<usize>);
///
/// impl Witness<Dispatch> for Sizes {
///     fn before(&mut self, _: u64, _: &Version, _: &mut GuardedPolicy) {}
///
///     fn after(&mut self, batch: &Batch<'_>, _: &Fill<'_, Dispatch>, _: &Asked, _: &Decision) {
///         let _ = self.0.send(batch.candidates);
///     }
/// }
///
/// let targets = SchedulerConfig::default().targets();
/// let mut slot = DispatchSlot::new(native::policy("fcfs", targets, "{}")?, targets);
/// let (sends, sizes) = std::sync::mpsc::channel();
/// slot.control().record(Sizes(sends));
/// slot.decide(&Step::default(), &RequestTable::new(Markers::default()), &[], 16);
/// assert_eq!(sizes.try_recv(), Ok(0));
/// # Ok::<(), native::NativeError>(())
/// ```
pub trait Witness<K: SlotKind>: Send {
    /// Called before the policy is asked; `stay` distinguishes the policy's stays in the process.
    fn before(&mut self, stay: u64, version: &Version, policy: &mut GuardedPolicy<K>);

    /// Called after the policy was asked this batch, and before its faults are handled. `fill` writes the columns that
    /// it is given; `decision` is checked unless the policy faulted.
    fn after(&mut self, batch: &Batch<'_, K>, fill: &Fill<'_, K>, asked: &Asked, decision: &K::Decision);
}

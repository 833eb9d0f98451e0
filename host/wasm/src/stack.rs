//! Room on the stack for a component. The compiled code checks how much it has used, not how much is left: on a thread
//! with a small stack a recursive component would end the process.

/// Most stack of a component; past it, the call traps.
pub(crate) const GUEST_BYTES: usize = 512 << 10;
/// Stack of the host's own frames: what calls the component, and what it calls.
const HOST_BYTES: usize = 256 << 10;

/// Run `call` with room for a component: where less is left, on a new stack, which takes some 10 us. A thread's own stack
/// is looked up once.
pub(crate) fn with_room<R>(call: impl FnOnce() -> R) -> R {
    stacker::maybe_grow(GUEST_BYTES + HOST_BYTES, GUEST_BYTES + 2 * HOST_BYTES, call)
}

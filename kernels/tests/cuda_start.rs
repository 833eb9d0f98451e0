//! What fails when a device is made: what says that the machine has none stays so, other failures do not. In a process of
//! its own, as a device is made once.
#![expect(unsafe_code, reason = "memory of a device")]

#[path = "support/emulator.rs"]
mod emulator;

use emulator::{Driver, Stream};
use meridian_kernels::{Element, KernelError, Matrix, Missing, Place, Request, Shape, launch};

fn refused(driver: &Driver, stream: &Stream, ordinal: u32) -> Option<KernelError> {
    let memory = driver.memory(400);
    let place = Place::Cuda { ordinal, stream: stream.0, overwrites: true };
    let matrix = Matrix { logits: memory.pointer(), element: Element::F32, shape: Shape::packed(1, 100), place };
    // SAFETY: the emulator's memory, and the answers are awaited before it is freed.
    unsafe { launch(&matrix, &Request::default(), None) }.and_then(|pending| pending.wait()).err()
}

#[test]
fn only_what_a_machine_lacks_is_remembered() {
    let driver = Driver::get();
    driver.devices(2);
    let stream = driver.stream();
    // Memory is short once.
    for name in [c"cuMemHostAlloc", c"cuMemAlloc_v2", c"cuEventCreate", c"cuStreamCreateWithPriority"] {
        // The first allocation of the device's memory is this test's own.
        driver.fail(name, i32::from(name == c"cuMemAlloc_v2"), 2);
        assert_eq!(refused(&driver, &stream, 0), Some(KernelError::Launch(2)), "{name:?}");
    }
    assert_eq!(refused(&driver, &stream, 0), None);

    // A driver that is older than the compiler. A build that carries PTX has NVRTC's to fall back on.
    driver.fail(c"cuModuleLoadData", 0, 222);
    let first = refused(&driver, &stream, 1);
    if env!("MERIDIAN_AHEAD") == "none" {
        assert_eq!(first, Some(KernelError::Unavailable(Missing::Ptx(222))));
        let loads = driver.calls(c"cuModuleLoadData");
        assert_eq!(refused(&driver, &stream, 1), first, "it is not tried again");
        assert_eq!(driver.calls(c"cuModuleLoadData"), loads);
    } else {
        assert!(matches!(first, Some(KernelError::BadValue { field: "logits", .. })), "the device was made");
    }
}

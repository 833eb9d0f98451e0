//! The CUDA driver's library: whether it is there, and calls that become errors instead of panics.

use std::ffi::c_void;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUcontext, CUresult};

use crate::{KernelError, Missing};

/// A call of the driver, as a `Result`.
macro_rules! cuda {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::cuda::driver::result(cudarc::driver::sys::$function($($argument),*))
    };
}
pub(super) use cuda;

/// Every function that is called. cudarc looks each one up at its first call and panics where there is none.
const FUNCTIONS: [&str; 31] = [
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuPointerGetAttribute",
    "cuMemsetD8Async",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
];

/// The driver is there, has what is called, and is initialised.
pub(super) fn load() -> Result<(), KernelError> {
    static LOADED: OnceLock<Result<(), KernelError>> = OnceLock::new();
    LOADED.get_or_init(find).clone()
}

fn find() -> Result<(), KernelError> {
    // SAFETY: loading the driver's library runs its initialisers, as every user of CUDA does.
    if !unsafe { sys::is_culib_present() } {
        return Err(KernelError::Unavailable(Missing::Driver));
    }
    for name in FUNCTIONS {
        // SAFETY: the library was found above; the function is looked up, and not called as this type.
        let found = unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) };
        if found.is_err() {
            return Err(KernelError::Unavailable(Missing::Symbol(name)));
        }
    }
    // SAFETY: takes no pointers.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => Ok(()),
        // A driver without a GPU, or in a container that was given none.
        CUresult::CUDA_ERROR_NO_DEVICE => Err(KernelError::Unavailable(Missing::Device(0))),
        // A toolkit's stub, a library that is not the kernel module's, and the like.
        other => Err(KernelError::Unavailable(Missing::DriverStart(other as i32))),
    }
}

pub(super) fn result(code: CUresult) -> Result<(), KernelError> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(KernelError::Launch(code as i32)) }
}

/// A context made current for a while; the thread's own is current again afterwards. Meanwhile a graph that another thread
/// captures is not this thread's business: asking for an event's state or for memory would otherwise break the capture.
pub(super) struct Current(sys::CUstreamCaptureMode);

impl Current {
    /// # Safety
    ///
    /// The context lives longer.
    pub(super) unsafe fn push(context: CUcontext) -> Result<Self, KernelError> {
        // SAFETY: the context lives, by this function's contract.
        unsafe { cuda!(cuCtxPushCurrent_v2(context)) }?;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges the thread's mode with the given one.
        let exchanged = unsafe { cuda!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) };
        let this = Self(mode);
        exchanged.map(|()| this)
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: gives the thread its own mode back.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
        // SAFETY: pops what `push` pushed; guards end in the reverse order, as they are local.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
    }
}

/// Memory of the host that the device reaches, with the address that it has there.
pub(super) struct Pinned {
    pub(super) host: *mut u8,
    pub(super) device: u64,
}

// SAFETY: an address; whoever holds the value is the only one to use what it points to.
unsafe impl Send for Pinned {}

impl Pinned {
    /// `bytes` of it, in the current context.
    pub(super) fn new(bytes: usize) -> Result<Self, KernelError> {
        let mut host: *mut c_void = std::ptr::null_mut();
        let mut device = 0;
        // SAFETY: both are written to; the context is current, by this function's contract.
        unsafe {
            cuda!(cuMemHostAlloc(&raw mut host, bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP))?;
            if let Err(error) = cuda!(cuMemHostGetDevicePointer_v2(&raw mut device, host, 0)) {
                let _ = cuda!(cuMemFreeHost(host));
                return Err(error);
            }
        }
        Ok(Self { host: host.cast(), device })
    }

    /// Give it back, in the current context, when nothing on the device uses it any more.
    pub(super) fn free(self) {
        // SAFETY: from cuMemHostAlloc, and gone with `self`.
        let _ = unsafe { cuda!(cuMemFreeHost(self.host.cast())) };
    }
}

/// `bytes` of the device's memory, in the current context.
pub(super) fn allocate(bytes: usize) -> Result<u64, KernelError> {
    let mut address = 0;
    // SAFETY: written to.
    unsafe { cuda!(cuMemAlloc_v2(&raw mut address, bytes)) }.map(|()| address)
}

//! One device: its stream, its kernels, the memory of launches, and launches that are under way.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice_attribute, CUfunction, CUmodule, CUpointer_attribute, CUresult, CUstream, CUstream_flags,
    CUstreamCaptureStatus,
};

use super::buffers::Buffers;
use super::driver::{self, Current, allocate, cuda};
use super::params::{PARTIAL_BYTES, Params, THREADS, kernel, splits};
use super::ptx;
use crate::launch::Matrix;
use crate::{Element, KernelError, Missing, Probes, Request, RowStats};

/// Parts of rows of one launch.
const MOST_PARTS: usize = 1 << 14;
/// Launches whose answers were not taken.
const MOST_SLOTS: usize = 64;
/// Memory that is there from the start: getting more may wait for the device. vLLM samples 1,024 requests at a time at
/// most unless told otherwise, and the logits processor has eight steps and one under way.
const FIRST_SLOTS: usize = 9;
const FIRST_ROWS: usize = 1024;

/// When the logits are there, and for how long.
pub(crate) struct Order {
    pub(crate) stream: *mut c_void,
    pub(crate) overwrites: bool,
}

/// A CUDA device that the kernels run on. There is one a process and device, and it is never given back: the driver may
/// be gone before the process's last destructors.
pub(crate) struct Device {
    ordinal: u32,
    context: CUcontext,
    stream: CUstream,
    functions: [CUfunction; 3],
    multiprocessors: u32,
    /// Of the rows in parts; launches use them one after the other, as they are on one stream.
    partials: u64,
    tickets: u64,
    slots: Mutex<Slots>,
}

// SAFETY: handles and addresses of the driver, whose calls may come from any thread.
unsafe impl Send for Device {}
// SAFETY: likewise; what changes is behind the lock.
unsafe impl Sync for Device {}

#[derive(Default)]
struct Slots {
    free: Vec<Buffers>,
    /// Of answers that nobody took, and which may still be on their way.
    left: Vec<Buffers>,
    made: usize,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("ordinal", &self.ordinal).finish_non_exhaustive()
    }
}

impl Device {
    /// The process's one; made at the first call. That a machine does not have one is remembered.
    pub(crate) fn shared(ordinal: u32) -> Result<&'static Self, KernelError> {
        type Devices = HashMap<u32, Result<&'static Device, KernelError>>;
        static DEVICES: OnceLock<Mutex<Devices>> = OnceLock::new();
        let mut devices = DEVICES.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = devices.get(&ordinal) {
            return known.clone();
        }
        let made = Self::new(ordinal).map(|device| &*Box::leak(Box::new(device)));
        // What else fails, such as memory that is short, may go well the next time.
        if matches!(made, Ok(_) | Err(KernelError::Unavailable(_) | KernelError::Compile(_))) {
            devices.insert(ordinal, made.clone());
        }
        made
    }

    fn new(ordinal: u32) -> Result<Self, KernelError> {
        driver::load()?;
        let missing = KernelError::Unavailable(Missing::Device(ordinal));
        let index = i32::try_from(ordinal).map_err(|_| missing.clone())?;
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: written to.
        unsafe { cuda!(cuDeviceGet(&raw mut device, index)) }.map_err(|_| missing)?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: written to; the device is one.
            unsafe { cuda!(cuDeviceGetAttribute(&raw mut value, attribute, device)) }.map(|()| value as u32)
        };
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let capability = major * 10 + minor;
        ptx::targets(capability)?;
        // SAFETY: written to; the device is one. The primary context is the one that PyTorch uses.
        unsafe { cuda!(cuDevicePrimaryCtxRetain(&raw mut context, device)) }?;
        let made = Self::in_context(ordinal, context, capability, multiprocessors);
        if made.is_err() {
            // SAFETY: retained above.
            let _ = unsafe { cuda!(cuDevicePrimaryCtxRelease_v2(device)) };
        }
        made
    }

    fn in_context(
        ordinal: u32,
        context: CUcontext,
        capability: u32,
        multiprocessors: u32,
    ) -> Result<Self, KernelError> {
        // SAFETY: the context is retained for as long as the device is used.
        let _current = unsafe { Current::push(context) }?;
        let module = load_module(capability)?;
        let function = |element| {
            let mut function = std::ptr::null_mut();
            // SAFETY: written to; the module is loaded.
            unsafe { cuda!(cuModuleGetFunction(&raw mut function, module, kernel(element).as_ptr())) }
                .map(|()| function)
        };
        let functions = [function(Element::F32)?, function(Element::Bf16)?, function(Element::F16)?];
        let (mut stream, mut least, mut greatest) = (std::ptr::null_mut(), 0, 0);
        // SAFETY: written to. The answers of a step are wanted before the next step's matrix products are done, so its
        // blocks go first; they are short.
        unsafe {
            cuda!(cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest))?;
            let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            cuda!(cuStreamCreateWithPriority(&raw mut stream, flags, greatest))?;
        }
        let memory = || -> Result<(u64, u64, Slots), KernelError> {
            let bytes = MOST_PARTS * size_of::<u32>();
            let (partials, tickets) = (allocate(MOST_PARTS * PARTIAL_BYTES)?, allocate(bytes)?);
            // SAFETY: allocated above. Launches come after it on the stream, and leave the tickets at 0.
            unsafe { cuda!(cuMemsetD8Async(tickets, 0, bytes, stream)) }?;
            let free = (0..FIRST_SLOTS).map(|_| Buffers::new(FIRST_ROWS)).collect::<Result<Vec<_>, _>>()?;
            Ok((partials, tickets, Slots { made: free.len(), free, left: Vec::new() }))
        };
        let (partials, tickets, slots) = memory().inspect_err(|_| {
            // SAFETY: made above, and nothing that is kept uses it. What was allocated is lost: with so little left, the
            // device is of no use to anybody.
            let _ = unsafe { cuda!(cuStreamDestroy_v2(stream)) };
        })?;
        Ok(Self { ordinal, context, stream, functions, multiprocessors, partials, tickets, slots: Mutex::new(slots) })
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queue the kernel for a checked request of `count` rows.
    ///
    /// # Safety
    ///
    /// As [`crate::launch`].
    pub(crate) unsafe fn launch(
        &'static self,
        matrix: &Matrix,
        order: Order,
        request: &Request<'_>,
        probes: Option<&Probes<'_>>,
        count: usize,
    ) -> Result<Pending, KernelError> {
        if count == 0 {
            return Ok(Pending { device: self, slot: None, count });
        }
        // SAFETY: the context is never released.
        let _current = unsafe { Current::push(self.context) }?;
        let main: CUstream = order.stream.cast();
        self.check(matrix, main)?;
        // Held to the end: launches come to the stream one after the other.
        let mut slots = self.slots();
        let slot = slots.take(count)?;
        // SAFETY: the slot is nobody else's; the rest is this function's contract.
        match unsafe { self.queue(&slot, main, &order, matrix, request, probes, count) } {
            Ok(()) => Ok(Pending { device: self, slot: Some(slot), count }),
            Err(error) => {
                // What was queued may still use the slot.
                // SAFETY: the stream is this device's.
                let _ = unsafe { cuda!(cuStreamSynchronize(self.stream)) };
                slots.free.push(slot);
                Err(error)
            }
        }
    }

    /// What a launch would otherwise be undefined for, as far as the driver can tell.
    fn check(&self, matrix: &Matrix, main: CUstream) -> Result<(), KernelError> {
        let mut ordinal = -1i32;
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: an attribute of 4 bytes is written to; any address may be asked about.
        let known =
            unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, matrix.logits.addr() as u64) };
        let is_unknown = known == CUresult::CUDA_ERROR_INVALID_VALUE;
        if !is_unknown {
            driver::result(known)?;
        }
        if is_unknown || ordinal != self.ordinal as i32 {
            let value = if is_unknown { "an address of the host".into() } else { format!("on device {ordinal}") };
            return Err(KernelError::BadValue { field: "logits", value, expected: "memory of the launch's device" });
        }
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: written to; the stream is a live one, by the contract of `launch`.
        let asked = unsafe { sys::cuStreamIsCapturing(main, &raw mut status) };
        // The legacy stream cannot be asked while another one captures, as it would be waited for.
        let is_implied = asked == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        if !is_implied {
            driver::result(asked)?;
        }
        if is_implied || status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            let value = "captures a graph".into();
            return Err(KernelError::BadValue { field: "stream", value, expected: "a stream that does not" });
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As [`crate::launch`]; no other launch uses the slot.
    #[expect(clippy::too_many_arguments, reason = "a launch, and where it goes")]
    unsafe fn queue(
        &self,
        slot: &Buffers,
        main: CUstream,
        order: &Order,
        matrix: &Matrix,
        request: &Request<'_>,
        probes: Option<&Probes<'_>>,
        count: usize,
    ) -> Result<(), KernelError> {
        // Before the logits are awaited, so that the copy is done by then.
        // SAFETY: as this function's contract has it.
        let columns = unsafe { slot.ask(self.stream, matrix, request, probes, count) }?;
        let row_bytes = matrix.shape.vocab * matrix.element.bytes();
        let splits = splits(count, row_bytes, self.multiprocessors, MOST_PARTS);
        let (partials, tickets) = if splits > 1 { (self.partials, self.tickets) } else { (0, 0) };
        let mut params = Params {
            logits: matrix.logits.addr() as u64,
            row_stride: matrix.shape.row_stride as u64,
            rows: columns.rows,
            tokens: columns.tokens,
            temperatures: columns.temperatures,
            slots: columns.slots,
            states: probes.map_or(0, |probes| probes.states.addr() as u64),
            partials,
            tickets,
            answers: slot.answers(),
            alpha: probes.map_or(0.0, |probes| probes.alpha),
            vocab: matrix.shape.vocab as u32,
            splits,
        };
        let function = self.functions[match matrix.element {
            Element::F32 => 0,
            Element::Bf16 => 1,
            Element::F16 => 2,
        }];
        let blocks = count as u32 * splits;
        let mut arguments = [(&raw mut params).cast::<c_void>()];
        // SAFETY: handles of this device; the kernel reads and writes what the request was checked for, `count` answers
        // and `count * splits` parts of MOST_PARTS. Parameters are copied by the call.
        unsafe {
            cuda!(cuEventRecord(slot.made, main))?;
            cuda!(cuStreamWaitEvent(self.stream, slot.made, 0))?;
            let arguments = arguments.as_mut_ptr();
            let none = std::ptr::null_mut();
            cuda!(cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, self.stream, arguments, none))?;
            cuda!(cuEventRecord(slot.done, self.stream))?;
            if order.overwrites {
                cuda!(cuStreamWaitEvent(main, slot.done, 0))?;
            }
        }
        Ok(())
    }
}

impl Slots {
    /// One that nothing uses, for `count` rows; in the current context.
    fn take(&mut self, count: usize) -> Result<Buffers, KernelError> {
        let mut i = 0;
        while i < self.left.len() {
            // SAFETY: an event of this device. What failed is not used again either way.
            if unsafe { sys::cuEventQuery(self.left[i].done) } == CUresult::CUDA_ERROR_NOT_READY {
                i += 1;
            } else {
                self.free.push(self.left.swap_remove(i));
            }
        }
        if let Some(i) = self.free.iter().position(|slot| slot.holds(count)) {
            return Ok(self.free.swap_remove(i));
        }
        if self.made >= MOST_SLOTS {
            // One that is too small makes way for a larger one.
            let Some(small) = self.free.pop() else { return Err(KernelError::Busy(self.made)) };
            small.free();
            self.made -= 1;
        }
        let slot = Buffers::new(count)?;
        self.made += 1;
        Ok(slot)
    }
}

/// What a driver says of PTX that it does not take.
const REFUSALS: [CUresult; 4] = [
    CUresult::CUDA_ERROR_INVALID_IMAGE,
    CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
    CUresult::CUDA_ERROR_INVALID_PTX,
    CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
];

/// The kernels, for a device of this compute capability, in the current context.
fn load_module(capability: u32) -> Result<CUmodule, KernelError> {
    let load = |ptx: &str| {
        let text = CString::new(ptx).map_err(|_| KernelError::Compile("PTX with a NUL in it".into()))?;
        let mut module = std::ptr::null_mut();
        // SAFETY: written to; the text ends with NUL.
        let loaded = unsafe { sys::cuModuleLoadData(&raw mut module, text.as_ptr().cast()) };
        if REFUSALS.contains(&loaded) {
            return Err(KernelError::Unavailable(Missing::Ptx(loaded as i32)));
        }
        driver::result(loaded).map(|()| module)
    };
    if let Some(ptx) = ptx::ahead(capability) {
        match load(ptx) {
            Ok(module) => return Ok(module),
            // A build with a newer CUDA than the driver's: NVRTC may be as old as the driver.
            Err(error) => tracing::debug!("the driver does not take the build's PTX: {error}"),
        }
    }
    load(&ptx::by_nvrtc(capability)?)
}

/// Answers on their way. Dropped, they are not waited for.
#[derive(Debug)]
pub(crate) struct Pending {
    device: &'static Device,
    slot: Option<Buffers>,
    count: usize,
}

impl fmt::Debug for Buffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffers").finish_non_exhaustive()
    }
}

impl Pending {
    pub(crate) fn ordinal(&self) -> u32 {
        self.device.ordinal
    }

    pub(crate) fn is_ready(&self) -> Result<bool, KernelError> {
        let Some(slot) = &self.slot else { return Ok(true) };
        // SAFETY: the context is never released; the event is the slot's.
        let state = unsafe {
            let _current = Current::push(self.device.context)?;
            sys::cuEventQuery(slot.done)
        };
        if state == CUresult::CUDA_ERROR_NOT_READY { Ok(false) } else { driver::result(state).map(|()| true) }
    }

    pub(crate) fn wait(mut self) -> Result<Vec<RowStats>, KernelError> {
        let Some(slot) = self.slot.take() else { return Ok(Vec::new()) };
        // SAFETY: the context is never released; the event is the slot's.
        let done =
            unsafe { Current::push(self.device.context).and_then(|_current| cuda!(cuEventSynchronize(slot.done))) };
        let answers = done.map(|()| slot.read(self.count));
        let mut slots = self.device.slots();
        if answers.is_ok() {
            slots.free.push(slot)
        } else {
            slots.left.push(slot)
        }
        answers
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.device.slots().left.push(slot);
        }
    }
}

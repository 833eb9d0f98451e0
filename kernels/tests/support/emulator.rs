//! A CUDA driver and device that this machine does not have: kernels/tests/emulator, loaded in place of libcuda.so. The
//! kernels are the real ones, run on the CPU thread by thread; NVRTC is the real one.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(unsafe_code, reason = "calls of a library")]

#[path = "tools.rs"]
mod tools;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use tools::{cuda_home, script};

/// Load a library before anybody else does: whoever asks for one of its name then gets this one.
fn load(path: &Path) -> Library {
    // SAFETY: a library of this project, or of CUDA.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.unwrap_or_else(|error| panic!("{error}"))
}

/// NVRTC, found from now on by its name.
pub fn load_nvrtc() {
    static LOADED: OnceLock<[Library; 2]> = OnceLock::new();
    LOADED.get_or_init(|| {
        let folder = cuda_home().join("lib");
        [load(&folder.join("libnvrtc-builtins.so.13.0")), load(&folder.join("libnvrtc.so.13"))]
    });
}

/// The driver, for one test at a time.
pub struct Driver {
    library: &'static Library,
    _one: MutexGuard<'static, ()>,
}

/// A call of one of the emulator's functions, whose type is given.
macro_rules! call {
    ($driver:expr, $name:literal, fn($($type:ty),*) -> $answer:ty, $($argument:expr),* $(,)?) => {{
        // SAFETY: the emulator has this function of this type; pointers are to what the caller holds during the call.
        unsafe {
            let found: Symbol<unsafe extern "C" fn($($type),*) -> $answer> =
                $driver.library.get($name).expect("the emulator has it");
            found($($argument),*)
        }
    }};
}

impl Driver {
    /// A device of compute capability 9.0 with 4 multiprocessors.
    pub fn get() -> Self {
        static ONE: Mutex<()> = Mutex::new(());
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let library = LIBRARY.get_or_init(|| {
            load_nvrtc();
            load(&script("build-cuda-emulator.sh", &[]))
        });
        let driver = Self { library, _one: one };
        driver.seed(0);
        driver.make_current();
        driver
    }

    /// 0: work as late as possible and threads in their order; others: an order drawn from it.
    pub fn seed(&self, seed: u64) {
        call!(self, b"emulator_seed", fn(u64) -> (), seed)
    }

    /// After `later` more calls, one of a function fails.
    pub fn fail(&self, name: &CStr, later: c_int, code: c_int) {
        call!(self, b"emulator_fail", fn(*const c_char, c_int, c_int) -> (), name.as_ptr(), later, code)
    }

    /// Calls of a function so far.
    pub fn calls(&self, name: &CStr) -> c_int {
        call!(self, b"emulator_calls", fn(*const c_char) -> c_int, name.as_ptr())
    }

    /// Devices that there are from now on.
    pub fn devices(&self, count: c_int) {
        call!(self, b"emulator_devices", fn(c_int) -> (), count)
    }

    pub fn capture(&self, stream: &Stream, captures: bool) {
        call!(self, b"emulator_capture", fn(*mut c_void, c_int) -> (), stream.0, captures.into())
    }

    /// As an application that uses the device does.
    fn make_current(&self) {
        let mut context = std::ptr::null_mut();
        assert_eq!(call!(self, b"cuInit", fn(u32) -> c_int, 0), 0);
        call!(self, b"cuDevicePrimaryCtxRetain", fn(*mut *mut c_void, c_int) -> c_int, &raw mut context, 0);
        assert_eq!(call!(self, b"cuCtxSetCurrent", fn(*mut c_void) -> c_int, context), 0);
    }

    /// What the thread has for itself: its context, and what a capture of somebody else forbids it.
    pub fn own(&self) -> (*mut c_void, c_int) {
        let (mut context, mut mode) = (std::ptr::null_mut(), 0);
        assert_eq!(call!(self, b"cuCtxGetCurrent", fn(*mut *mut c_void) -> c_int, &raw mut context), 0);
        call!(self, b"cuThreadExchangeStreamCaptureMode", fn(*mut c_int) -> c_int, &raw mut mode);
        let mut back = mode;
        call!(self, b"cuThreadExchangeStreamCaptureMode", fn(*mut c_int) -> c_int, &raw mut back);
        (context, mode)
    }

    pub fn stream(&self) -> Stream {
        let mut stream = std::ptr::null_mut();
        let code = call!(self, b"cuStreamCreate", fn(*mut *mut c_void, u32) -> c_int, &raw mut stream, 1);
        assert_eq!(code, 0);
        Stream(stream)
    }

    pub fn synchronize(&self, stream: &Stream) {
        assert_eq!(call!(self, b"cuStreamSynchronize", fn(*mut c_void) -> c_int, stream.0), 0);
    }

    /// Memory of the device, full of NaN.
    pub fn memory(&self, bytes: usize) -> Memory<'_> {
        let mut address = 0u64;
        let code = call!(self, b"cuMemAlloc_v2", fn(*mut u64, usize) -> c_int, &raw mut address, bytes);
        assert_eq!(code, 0);
        Memory { driver: self, address, bytes }
    }
}

pub struct Stream(pub *mut c_void);

pub struct Memory<'d> {
    driver: &'d Driver,
    pub address: u64,
    pub bytes: usize,
}

impl Memory<'_> {
    pub fn pointer(&self) -> *mut c_void {
        self.address as *mut c_void
    }

    /// Write at once.
    pub fn write<T: Copy>(&self, offset: usize, values: &[T]) {
        let bytes = size_of_val(values);
        assert!(offset + bytes <= self.bytes);

        assert_eq!(
            call!(
                self.driver,
                b"cuMemcpyHtoD_v2",
                fn(u64, *const c_void, usize) -> c_int,
                self.address + offset as u64,
                values.as_ptr().cast(),
                bytes
            ),
            0
        );
    }

    pub fn read<T: Copy + Default>(&self, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];

        assert_eq!(
            call!(
                self.driver,
                b"cuMemcpyDtoH_v2",
                fn(*mut c_void, u64, usize) -> c_int,
                values.as_mut_ptr().cast(),
                self.address,
                size_of_val(&values[..])
            ),
            0
        );
        values
    }

    /// Write when the stream comes to it.
    pub fn write_on<T: Copy>(&self, stream: &Stream, offset: usize, values: &[T]) {
        let (to, bytes) = (self.address + offset as u64, size_of_val(values));
        assert_eq!(
            call!(
                self.driver,
                b"cuMemcpyHtoDAsync_v2",
                fn(u64, *const c_void, usize, *mut c_void) -> c_int,
                to,
                values.as_ptr().cast(),
                bytes,
                stream.0
            ),
            0
        );
    }

    /// Overwrite all when the stream comes to it.
    pub fn spoil_on(&self, stream: &Stream) {
        assert_eq!(
            call!(
                self.driver,
                b"cuMemsetD8Async",
                fn(u64, u8, usize, *mut c_void) -> c_int,
                self.address,
                0x42,
                self.bytes,
                stream.0
            ),
            0
        );
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        let code = call!(self.driver, b"cuMemFree_v2", fn(u64) -> c_int, self.address);
        assert!(code == 0 || std::thread::panicking());
    }
}

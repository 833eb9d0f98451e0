//! What can go wrong, by what the caller can do about it.

use thiserror::Error;

/// Why a kernel did not run, or failed. Nothing was written then, but after [`KernelError::Launch`]: a device that refuses one
/// call may have taken the call before it, and the states of EAT may have been moved.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// This machine, or this build, does not have what was asked for. Use what it has.
    #[error("not available on this machine: {0}")]
    Unavailable(Missing),
    /// A device refused the launch, or failed at it, with its own code (a `CUresult`).
    #[error("the launch failed with code {0}")]
    Launch(i32),
    /// The kernels do not compile on this machine; what the compiler says.
    #[error("the kernels do not compile: {0}")]
    Compile(String),
    /// More launches are under way than there is memory for their answers; take some of those first.
    #[error("{0} launches are under way: their answers must be taken first")]
    Busy(usize),
    /// A pointer that must not be null, by the name of the argument.
    #[error("{0}: null pointer")]
    NullPointer(&'static str),
    /// A size that does not fit the others, by the name of the argument.
    #[error("{field}: {value}: expected {expected}")]
    BadShape {
        /// The argument.
        field: &'static str,
        /// What was given.
        value: usize,
        /// What fits.
        expected: &'static str,
    },
    /// A number that is none of those allowed, by the name of the argument.
    #[error("{field}: {value}: expected {expected}")]
    BadValue {
        /// The argument.
        field: &'static str,
        /// What was given, as text.
        value: String,
        /// What fits.
        expected: &'static str,
    },
    /// A row that the matrix does not have.
    #[error("rows: {row}: expected less than {rows}")]
    RowOutOfRange {
        /// The row that was asked for.
        row: u32,
        /// How many there are.
        rows: usize,
    },
}

/// What a machine lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Missing {
    /// Instructions of the processor.
    #[error("the processor does not have these instructions")]
    Instructions,
    /// The library of the CUDA driver.
    #[error("no CUDA driver (libcuda.so.1) was found")]
    Driver,
    /// The driver is there and does not start, with its own code (a `CUresult`).
    #[error("the CUDA driver does not start (code {0})")]
    DriverStart(i32),
    /// The driver is there, and no such GPU is.
    #[error("the CUDA driver knows no device {0}")]
    Device(u32),
    /// A GPU that the kernels are not written for, by its compute capability times ten.
    #[error("the device is of compute capability {}.{}, and 8.0 or newer is needed", .0 / 10, .0 % 10)]
    Architecture(u32),
    /// PTX of a version that the driver takes, with the driver's own code (a `CUresult`): the compiler is newer than it.
    #[error("the CUDA driver does not take the kernels (code {0})")]
    Ptx(i32),
    /// The run-time compiler, where no kernels were compiled ahead.
    #[error("no kernels were compiled ahead for this device, and no NVRTC (libnvrtc.so) that works was found")]
    Nvrtc,
    /// A function of the driver's or of NVRTC's library.
    #[error("the CUDA libraries have no function {0}")]
    Symbol(&'static str),
}

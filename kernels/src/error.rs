//! What can go wrong, by what the caller can do about it.

use thiserror::Error;

/// Why a kernel did not run. Nothing was written then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// This machine, or this build, does not have what was asked for. Use what it has.
    #[error("not available on this machine")]
    Unavailable,
    /// A device refused the launch, with its own code.
    #[error("the launch failed with code {0}")]
    Launch(i32),
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
    /// A row that the matrix does not have.
    #[error("rows: {row}: expected less than {rows}")]
    RowOutOfRange {
        /// The row that was asked for.
        row: u32,
        /// How many there are.
        rows: usize,
    },
}

use std::path::PathBuf;

use thiserror::Error;

/// A fleet that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FleetError {
    /// The address of an engine is malformed.
    #[error("{address:?}: {reason}")]
    Address {
        /// The address.
        address: String,
        /// The expectation.
        reason: &'static str,
    },
    /// The fleet file cannot be used.
    #[error("{}: {reason}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// One line: the field, the value, and what was expected.
        reason: String,
    },
}

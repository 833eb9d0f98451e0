use thiserror::Error;

use crate::types::RequestId;

/// What can be wrong with what an operator or a caller gave.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is not TOML, or a value has the wrong type.
    #[error("{field}: {reason}")]
    ConfigSyntax {
        /// Dotted path of the field, or `line L, column C` when the text is not TOML.
        field: String,
        /// What was found and what was expected.
        reason: String,
    },
    /// A field that does not exist.
    #[error("{field}: unknown field{}", suggestion.as_ref().map(|name| format!(", did you mean `{name}`?")).unwrap_or_default())]
    ConfigUnknownField {
        /// Dotted path of the field.
        field: String,
        /// The dotted path it most resembles, when one is near.
        suggestion: Option<String>,
    },
    /// A value out of its range.
    #[error("{field}: {value}: {reason}")]
    ConfigValidation {
        /// Dotted path of the field.
        field: &'static str,
        /// The value as it was given.
        value: String,
        /// What was expected: `must be above 0`.
        reason: &'static str,
    },
    /// A request id that is live.
    #[error("request {id} is already there")]
    DuplicateRequest {
        /// The id.
        id: RequestId,
    },
    /// A request id that is not live.
    #[error("request {id} is not known")]
    UnknownRequest {
        /// The id.
        id: RequestId,
    },
    /// Thinking markers that cannot be used.
    #[error("markers: {reason}")]
    Markers {
        /// What was found and what was expected.
        reason: String,
    },
}

//! Errors, grouped by what the caller can do about them.

use thiserror::Error;

use crate::text::{printable, shortened};

// A message is one line that can be read, whatever a file holds.
const MOST_VALUE_CHARS: usize = 512;
const MOST_REASON_CHARS: usize = 2048;

fn value_of(text: &str) -> String {
    shortened(&printable(text), MOST_VALUE_CHARS).into_owned()
}

fn reason_of(text: &str) -> String {
    shortened(&printable(text), MOST_REASON_CHARS).into_owned()
}

/// An error in the input of an operator or a caller.
///
/// ```
/// use meridian_core::{Error, MeridianConfig};
///
/// match MeridianConfig::from_toml("[scheduler]\nmax_defer = 500") {
///     Err(Error::ConfigUnknownField { field, suggestion }) => {
///         assert_eq!(field, "scheduler.max_defer");
///         assert_eq!(suggestion.as_deref(), Some("scheduler.max_defer_ms"));
///     }
///     other => panic!("{other:?}"),
/// }
/// ```
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is not TOML, or a value has the wrong type.
    #[error("{}: {}", value_of(field), reason_of(reason))]
    ConfigSyntax {
        /// Dotted path of the field, or `line L, column C` when the text is not TOML.
        field: String,
        /// The value, and what was expected.
        reason: String,
    },
    /// A field that does not exist.
    #[error("{}: unknown field{}", value_of(field), suggestion.as_ref().map(|name| format!(", did you mean `{name}`?")).unwrap_or_default())]
    ConfigUnknownField {
        /// Dotted path of the field.
        field: String,
        /// The most similar dotted path, if one is near.
        suggestion: Option<String>,
    },
    /// A field that is reserved for a later version.
    #[error("{}: not in this version, expected no such field", value_of(field))]
    ConfigNotYet {
        /// Dotted path of the field or table.
        field: String,
    },
    /// A value out of its range.
    #[error("{}: {}: {}", value_of(field), value_of(value), reason_of(reason))]
    ConfigValidation {
        /// Dotted path of the field.
        field: String,
        /// The given value.
        value: String,
        /// What was expected: `must be above 0`.
        reason: String,
    },
    /// The description of a model family is not valid.
    #[error("{file}: {}: {}", value_of(field), reason_of(reason))]
    ModelFamilyInvalid {
        /// Name of the file.
        file: String,
        /// The field, or `line L, column C` when the text is not TOML.
        field: String,
        /// The value, and what was expected.
        reason: String,
    },
    /// No such model family.
    #[error("{:?}: unknown model family{}, expected one of {known}", shortened(name, MOST_VALUE_CHARS), suggestion.as_ref().map(|name| format!(", did you mean {name:?}")).unwrap_or_default())]
    ModelFamilyUnknown {
        /// The requested name.
        name: String,
        /// The most similar known name, if one is near.
        suggestion: Option<String>,
        /// The known names, with commas.
        known: String,
    },
    /// A request that is live.
    #[error("request {id} is already there")]
    DuplicateRequest {
        /// The engine's id of the request, or its number in a recording.
        id: String,
    },
    /// A value that is not a time.
    #[error("{what}: {value}: must be a number of milliseconds")]
    NotATime {
        /// The name of the value.
        what: &'static str,
        /// The value.
        value: String,
    },
    /// Thinking markers that are not valid.
    #[error("markers: {reason}")]
    Markers {
        /// The markers, and what was expected.
        reason: String,
    },
}

use thiserror::Error;

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
        field: String,
        /// The value as it was given.
        value: String,
        /// What was expected: `must be above 0`.
        reason: String,
    },
    /// The description of a model family is not valid.
    #[error("{file}: {field}: {reason}")]
    ModelFamilyInvalid {
        /// Name of the file.
        file: String,
        /// The field, or `line L, column C` when the text is not TOML.
        field: String,
        /// What was found and what was expected.
        reason: String,
    },
    /// No such model family.
    #[error("{name:?}: unknown model family{}, expected one of {known}", suggestion.as_ref().map(|name| format!(", did you mean {name:?}")).unwrap_or_default())]
    ModelFamilyUnknown {
        /// The name that was asked for.
        name: String,
        /// The known name it most resembles, when one is near.
        suggestion: Option<String>,
        /// The known names, with commas.
        known: String,
    },
    /// A request id that is already in the table.
    #[error("request {id:?} is already there")]
    DuplicateRequest {
        /// The id.
        id: String,
    },
}

//! What a policy's source says: the one place that takes its text apart.

use std::fmt;

use crate::oci::SCHEME;

const NATIVE: &str = "native:";

/// A policy's source, as a configuration, a command or a status names it.
///
/// ```
/// use meridian_core::PolicySource;
///
/// assert_eq!(PolicySource::of("native:srpt"), PolicySource::Native("srpt"));
/// assert_eq!(PolicySource::of("policies/own.wasm"), PolicySource::File("policies/own.wasm"));
/// assert_eq!(PolicySource::Native("srpt").to_string(), "native:srpt");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicySource<'a> {
    /// The native policy of this name, which may be unknown.
    Native(&'a str),
    /// A component in a registry: what is meant to be an [`OciReference`](crate::oci::OciReference).
    Registry(&'a str),
    /// The path of a component.
    File(&'a str),
}

impl<'a> PolicySource<'a> {
    /// What this text names.
    #[must_use]
    pub fn of(source: &'a str) -> Self {
        match source.strip_prefix(NATIVE) {
            Some(name) => Self::Native(name),
            None if source.starts_with(SCHEME) => Self::Registry(source),
            None => Self::File(source),
        }
    }

    /// The name of a native policy.
    #[must_use]
    pub fn native(self) -> Option<&'a str> {
        match self {
            Self::Native(name) => Some(name),
            Self::Registry(_) | Self::File(_) => None,
        }
    }

    /// The reference of a component in a registry, unchecked.
    #[must_use]
    pub fn registry(self) -> Option<&'a str> {
        match self {
            Self::Registry(reference) => Some(reference),
            Self::Native(_) | Self::File(_) => None,
        }
    }

    /// Whether it names a file.
    #[must_use]
    pub fn is_file(self) -> bool {
        matches!(self, Self::File(_))
    }
}

impl fmt::Display for PolicySource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native(name) => write!(f, "{NATIVE}{name}"),
            Self::Registry(source) | Self::File(source) => f.write_str(source),
        }
    }
}

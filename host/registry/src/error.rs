use std::time::Duration;

use thiserror::Error;

/// Why a component was not pulled or pushed. One line: the reference, what is wrong, what was expected.
#[derive(Debug, Error)]
#[error("{reference}: {problem}")]
pub struct RegistryError {
    /// The reference.
    pub reference: String,
    /// What is wrong.
    pub problem: Problem,
}

impl RegistryError {
    /// Whether the same call may succeed later, although nobody changes anything but the registry's health: it could not
    /// be reached, was too busy, or delivered other bytes than it should.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self.problem, Problem::Late { .. })
            || self.problem.is_worth_another_attempt()
            || self.problem.is_wrong()
    }
}

/// What went wrong. No variant holds a credential.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Problem {
    /// No connection, or one that broke.
    #[error("{what}: the registry cannot be reached: {why}")]
    Unreachable {
        /// What was asked for.
        what: String,
        /// Why, one line.
        why: String,
    },
    /// It took too long altogether.
    #[error("the registry was not done within {} s", limit.as_secs_f64())]
    Late {
        /// The longest allowed.
        limit: Duration,
    },
    /// An answer that is none of the expected ones.
    #[error("{what}: the registry answered HTTP {status}, expected {expected}")]
    Status {
        /// What was asked for.
        what: String,
        /// The status.
        status: u16,
        /// The expected ones.
        expected: &'static str,
    },
    /// It wants other credentials.
    #[error("{what}: the registry refused {given} (HTTP {status}), expected a login with `docker login`")]
    Unauthorized {
        /// What was asked for.
        what: String,
        /// Whose credentials.
        given: &'static str,
        /// The status.
        status: u16,
    },
    /// There is no such thing.
    #[error("{what}: the registry does not have it (HTTP 404)")]
    NotFound {
        /// What was asked for.
        what: String,
    },
    /// More bytes than allowed.
    #[error("{what}: more than {limit} bytes, expected at most that")]
    TooLarge {
        /// What was asked for.
        what: String,
        /// The most allowed.
        limit: u64,
    },
    /// Other bytes than the ones that were asked for.
    #[error("{what}: received {found}, expected {expected}")]
    WrongDigest {
        /// What was asked for.
        what: String,
        /// The wanted digest.
        expected: String,
        /// The digest of the received bytes.
        found: String,
    },
    /// It is no policy component.
    #[error("not in the layout of WebAssembly components (as `wkg oci push` writes it): {reason}")]
    Layout {
        /// What is wrong, and what was expected.
        reason: String,
    },
    /// The registry sends the request to where it must not go.
    #[error("{what}: the registry redirects {reason}")]
    Redirect {
        /// What was asked for.
        what: String,
        /// Where, and what was expected.
        reason: String,
    },
    /// The docker configuration is of no use.
    #[error("credentials: {reason}")]
    Credentials {
        /// What is wrong, and what was expected.
        reason: String,
    },
    /// The reference or a file does not do for the call.
    #[error("{reason}")]
    Unfit {
        /// What is wrong, and what was expected.
        reason: String,
    },
}

impl Problem {
    /// Whether the registry may answer well at once. The caller of a pull bounds the attempts.
    pub(crate) fn is_worth_another_attempt(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 425 | 429 | 500..=599),
            _ => false,
        }
    }

    fn is_wrong(&self) -> bool {
        matches!(self, Self::WrongDigest { .. } | Self::TooLarge { .. })
    }

    pub(crate) fn layout(reason: impl Into<String>) -> Self {
        Self::Layout { reason: reason.into() }
    }

    pub(crate) fn of(self, reference: &impl ToString) -> RegistryError {
        RegistryError { reference: reference.to_string(), problem: self }
    }
}

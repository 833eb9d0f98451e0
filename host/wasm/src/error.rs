use std::time::Duration;
use std::{fmt, io};

use meridian_core::text::shortened;
use thiserror::Error;

use crate::trust::SignatureError;
use crate::wit::clip;

/// Why a component was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Larger than a policy may be.
    #[error("{bytes} bytes is too large: a policy component has at most {limit} bytes")]
    TooLarge {
        /// Its size.
        bytes: u64,
        /// The most allowed.
        limit: u64,
    },
    /// Keys are trusted, and nobody signed it.
    #[error("not signed: expected {expected}")]
    Unsigned {
        /// By whom, and in which file when the component is one.
        expected: String,
    },
    /// It comes with a signature that does not do.
    #[error("bad signature: {problem}")]
    BadSignature {
        /// What is wrong with it.
        problem: SignatureError,
    },
    /// Compiling it would take too much time or memory.
    #[error("too complex: {what}: {found}, expected at most {limit}")]
    TooComplex {
        /// What there is too much of.
        what: String,
        /// How much; counting stops at the first that is too much.
        found: u64,
        /// The most allowed.
        limit: u64,
    },
    /// Compiling it took too long. Its process was killed; a thread is left to end by itself.
    #[error("compiling took longer than {} s", limit.as_secs_f64())]
    CompileDeadline {
        /// The longest allowed.
        limit: Duration,
    },
    /// Compiling it took too much memory. Its process has ended.
    #[error("compiling needs more than {} MiB of memory", limit_bytes >> 20)]
    CompileMemory {
        /// The most allowed beside the program itself.
        limit_bytes: u64,
    },
    /// The process that compiled it crashed, or gave no result that can be used.
    #[error("the process that compiled it failed: {problem}")]
    CompileFailed {
        /// How it ended, or what is wrong with its result, one line.
        problem: String,
    },
    /// Components are still being compiled, as many as may be at a time.
    #[error("{running} components are still being compiled; try again when they are done")]
    CompilerBusy {
        /// How many.
        running: usize,
    },
    /// A core module, or not WebAssembly at all.
    #[error("not a component: {found}; expected a WebAssembly component (`meridian policy build` makes one)")]
    NotAComponent {
        /// What it is instead.
        found: &'static str,
    },
    /// Not valid, or not compilable.
    #[error("invalid component: {detail}")]
    Invalid {
        /// wasmtime's reason, one line.
        detail: String,
    },
    /// It wants something from the host. Policies get nothing.
    #[error("unknown import `{import}`: a policy component may import nothing")]
    UnknownImport {
        /// The first import.
        import: String,
    },
    /// It does not export what every policy must.
    #[error("missing export `{expected}`: the component is not a policy")]
    MissingExport {
        /// The interface.
        expected: String,
    },
    /// It exports no slot.
    #[error(
        "fills no slot: expected an export of `meridian:policy/dispatch@{version}`, `meridian:policy/eviction@{version}` \
         or `meridian:policy/budget@{version}`"
    )]
    FillsNothing {
        /// Version of the contract.
        version: &'static str,
    },
    /// It does not fill the slot that it is wanted for.
    #[error("does not fill slot {slot}, only {fills}")]
    NotFilled {
        /// The slot.
        slot: &'static str,
        /// Those it fills.
        fills: String,
    },
    /// It was built for another version of the contract.
    #[error("exports `{found}`, expected `{expected}`: the component was built for another version of the WIT package")]
    WrongVersion {
        /// The interface it exports.
        found: String,
        /// The same interface in the version that this host speaks.
        expected: String,
    },
    /// An interface has the right name, but not the right functions or types.
    #[error("the component does not fit the WIT package: {detail}")]
    WrongType {
        /// wasmtime's reason, one line.
        detail: String,
    },
    /// `inputs` names a column twice.
    #[error("inputs names column {column} twice")]
    DuplicateInput {
        /// The column.
        column: String,
    },
    /// The component refused its configuration.
    #[error("the policy refused its configuration {}: {reason}", shortened(config, LINE_CHARS))]
    Refused {
        /// The options it was given, JSON.
        config: String,
        /// What it says.
        reason: String,
    },
    /// It faulted while it was described or initialised.
    #[error("the policy failed to start: {fault}")]
    Start {
        /// The fault.
        fault: meridian_core::Fault,
    },
    /// wasmtime itself could not be set up.
    #[error("cannot set up WebAssembly: {detail}")]
    Setup {
        /// Why.
        detail: String,
    },
}

/// Longest text of others in an error.
pub(crate) const LINE_CHARS: usize = 1024;

/// Errors of wasmtime and its parser span lines; an operator gets one.
pub(crate) fn one_line(error: &dyn fmt::Display) -> String {
    let text = format!("{error:#}");
    let line = text.split('\n').map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
    // They quote the component, which may hold anything.
    clip(line, LINE_CHARS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_line_without_control_characters() {
        assert_eq!(one_line(&"cannot\n\n  read \x1b[31mred\r\n"), "cannot; read [31mred");
        assert_eq!(one_line(&"x".repeat(2000)).len(), 1024);
    }
}

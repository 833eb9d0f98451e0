//! One engine of a fleet.

use std::sync::Arc;

use meridian_engine::control::{LatencyReport, Mode, ProcessStatus, SlotName, SwapReport};
use thiserror::Error;

/// An engine, over HTTP or simulated in this process. Its methods are called from any thread, and may block: at most as
/// long as a component takes to compile.
pub trait Member: Send + Sync {
    /// Its address, which no other member has.
    fn name(&self) -> &str;

    /// The state of the process.
    ///
    /// # Errors
    /// See [`MemberError`].
    fn status(&self) -> Result<ProcessStatus, MemberError>;

    /// Its latencies since its start.
    ///
    /// # Errors
    /// See [`MemberError`]; an engine that observes none refuses.
    fn latency(&self) -> Result<LatencyReport, MemberError>;

    /// Load a policy and put it to `mode`, as [`Control::put`](meridian_engine::control::Control::put) does.
    ///
    /// # Errors
    /// See [`MemberError`].
    fn put(&self, slot: SlotName, policy: &NamedPolicy, mode: Mode) -> Result<SwapReport, MemberError>;

    /// Make the shadow active.
    ///
    /// # Errors
    /// See [`MemberError`].
    fn promote(&self, slot: SlotName) -> Result<SwapReport, MemberError>;

    /// Return to the previous version.
    ///
    /// # Errors
    /// See [`MemberError`].
    fn rollback(&self, slot: SlotName) -> Result<SwapReport, MemberError>;

    /// Stop the shadow.
    ///
    /// # Errors
    /// See [`MemberError`].
    fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, MemberError>;
}

/// A policy for many engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPolicy {
    /// The policy.
    pub source: PolicyOrigin,
    /// Its options, one JSON object; `None` for the options of each engine's configuration.
    pub options: Option<String>,
}

/// The origin of a [`NamedPolicy`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyOrigin {
    /// A component.
    Component {
        /// Its bytes.
        bytes: Arc<[u8]>,
        /// The text of its minisign signature, if it has one.
        signature: Option<String>,
    },
    /// `native:NAME` or `oci://HOST/NAME@sha256:DIGEST`.
    Named(String),
}

/// A member that did not do as asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MemberError {
    /// It did not answer, or not to the end: the change may have been carried out. One line with its address.
    #[error("{0}")]
    Unreachable(String),
    /// It refused; nothing has changed. One line with its address.
    #[error("{0}")]
    Refused(String),
}

use meridian_core::SlotName;
use thiserror::Error;

/// Why an engine does not start. Each is one line that names the field of the configuration.
#[derive(Debug, Error)]
pub enum EngineError {
    /// A value of the configuration that was not read from a file.
    #[error(transparent)]
    Config(#[from] meridian_core::Error),
    /// A key of `policy.trusted_keys` is not valid.
    #[error(transparent)]
    TrustedKeys(#[from] meridian_wasm::KeyError),
    /// The configured policy of a slot was refused.
    #[error("policy.{}.source: {reason}", slot.label())]
    Policy {
        /// The slot.
        slot: SlotName,
        /// Why.
        reason: String,
    },
    /// The recording cannot be written.
    #[error("policy.record_dir: {reason}")]
    Recording {
        /// Why.
        reason: String,
    },
}

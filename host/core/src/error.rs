//! What can go wrong, by what the caller can do about it.

use thiserror::Error;

use crate::{BlockId, BlockTier, FabricError, RequestId};

/// What can be wrong with what an operator or a caller gave.
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
    /// A field that a later version is to have.
    #[error("{field}: not in this version, expected no such field")]
    ConfigNotYet {
        /// Dotted path of the field or table.
        field: String,
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
    /// A time that is none.
    #[error("{what}: {value}: must be a number of milliseconds")]
    NotATime {
        /// Which.
        what: &'static str,
        /// What it was.
        value: String,
    },
    /// Thinking markers that cannot be used.
    #[error("markers: {reason}")]
    Markers {
        /// What was found and what was expected.
        reason: String,
    },
    /// A KV block that does not exist, or not any more.
    #[error("KV block {block} does not exist")]
    UnknownBlock {
        /// The block.
        block: BlockId,
    },
    /// Not enough KV blocks can be had. Nothing has changed; free some, or preempt.
    #[error("{needed} KV blocks are needed, {available} can be had")]
    OutOfBlocks {
        /// Blocks asked for.
        needed: u32,
        /// Blocks that the same call could have had.
        available: u32,
    },
    /// The share of KV memory that thinking may hold is used up, by more than one request. Nothing has changed.
    #[error("{needed} more KV blocks for thinking on top of {attended} pass the limit of {limit}")]
    ThinkLimit {
        /// Blocks asked for.
        needed: u32,
        /// Blocks that requests which do not answer yet attend.
        attended: u32,
        /// Most blocks they may attend.
        limit: u32,
    },
    /// A block that a live request attends, where only an unattended one will do.
    #[error("KV block {block} is attended by a live request")]
    BlockAttended {
        /// The block.
        block: BlockId,
    },
    /// A block that is not where the call needs it: on the device, or remote.
    #[error("KV block {block} is not {expected}")]
    BlockElsewhere {
        /// The block.
        block: BlockId,
        /// Where it would have to be: `on the device`.
        expected: &'static str,
    },
    /// A block whose transfer has not ended. Nothing has changed; it may be moved again afterwards.
    #[error("KV block {block} is being moved")]
    BlockMoving {
        /// The block.
        block: BlockId,
    },
    /// A block cannot be given a more critical tier than it has, and an attended one no tier but `ThinkComplete`.
    #[error("KV block {block} cannot be demoted from {from} to {to}")]
    TierRaised {
        /// The block.
        block: BlockId,
        /// The tier it has.
        from: BlockTier,
        /// The tier that was asked for.
        to: BlockTier,
    },
    /// No fabric moves KV blocks off the device.
    #[error("no KV fabric is configured")]
    FabricNotConfigured,
    /// The fabric did not move a block.
    #[error("KV block {block} was not moved")]
    Fabric {
        /// The block.
        block: BlockId,
        /// What the fabric said.
        source: FabricError,
    },
}

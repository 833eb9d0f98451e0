//! Errors, grouped by what the caller can do about them.

use thiserror::Error;

use crate::{BlockId, BlockTier, FabricError, RequestId};

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
    #[error("{field}: {reason}")]
    ConfigSyntax {
        /// Dotted path of the field, or `line L, column C` when the text is not TOML.
        field: String,
        /// The value, and what was expected.
        reason: String,
    },
    /// A field that does not exist.
    #[error("{field}: unknown field{}", suggestion.as_ref().map(|name| format!(", did you mean `{name}`?")).unwrap_or_default())]
    ConfigUnknownField {
        /// Dotted path of the field.
        field: String,
        /// The most similar dotted path, if one is near.
        suggestion: Option<String>,
    },
    /// A field that is reserved for a later version.
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
        /// The given value.
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
        /// The value, and what was expected.
        reason: String,
    },
    /// No such model family.
    #[error("{name:?}: unknown model family{}, expected one of {known}", suggestion.as_ref().map(|name| format!(", did you mean {name:?}")).unwrap_or_default())]
    ModelFamilyUnknown {
        /// The requested name.
        name: String,
        /// The most similar known name, if one is near.
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
    /// A KV block that does not exist, or no longer exists.
    #[error("KV block {block} does not exist")]
    UnknownBlock {
        /// The block.
        block: BlockId,
    },
    /// There are not enough KV blocks. Nothing has changed; free some, or preempt.
    #[error("{needed} KV blocks are needed, {available} can be had")]
    OutOfBlocks {
        /// Requested blocks.
        needed: u32,
        /// Blocks that the same call could have taken.
        available: u32,
    },
    /// More than one request has used up the share of KV memory that thinking may hold. Nothing has changed.
    #[error("{needed} more KV blocks for thinking on top of {attended} pass the limit of {limit}")]
    ThinkLimit {
        /// Requested blocks.
        needed: u32,
        /// Blocks that requests which do not answer yet attend.
        attended: u32,
        /// Most blocks they may attend.
        limit: u32,
    },
    /// A block that a live request attends, where the call needs an unattended one.
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
        /// The place that the call needs: `on the device`.
        expected: &'static str,
    },
    /// A block whose transfer has not ended. Nothing has changed; it can be moved again afterwards.
    #[error("KV block {block} is being moved")]
    BlockMoving {
        /// The block.
        block: BlockId,
    },
    /// A block cannot get a more critical tier than it has, and an attended block no tier but `ThinkComplete`.
    #[error("KV block {block} cannot be demoted from {from} to {to}")]
    TierRaised {
        /// The block.
        block: BlockId,
        /// The tier it has.
        from: BlockTier,
        /// The requested tier.
        to: BlockTier,
    },
    /// There is no fabric to move KV blocks off the device.
    #[error("no KV fabric is configured")]
    FabricNotConfigured,
    /// The fabric did not move a block.
    #[error("KV block {block} was not moved")]
    Fabric {
        /// The block.
        block: BlockId,
        /// The error of the fabric.
        source: FabricError,
    },
}

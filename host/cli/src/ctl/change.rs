//! A change of a slot, ready for any number of engines: files are read and checked once.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use meridian_admin::signature_header;
use meridian_core::PolicySource;
use meridian_core::oci::OciReference;
use meridian_core::signature::{MAX_SIGNATURE_BYTES, signature_path};
use meridian_engine::control::{MAX_COMPONENT_BYTES, MAX_OPTIONS_BYTES, Mode, SlotName, SwapReport};
use meridian_fleet::{EngineClient, Member, MemberError, NamedPolicy, PolicyOrigin};
use meridian_wasm::{read_regular, read_signature};
use serde_json::{Map, Value};

use super::PolicyArgs;

pub(super) enum Change {
    Put {
        policy: NamedPolicy,
        mode: Mode,
    },
    /// The active policy with other options, one JSON object.
    Configure {
        options: String,
        mode: Mode,
    },
    StopShadow,
    Promote,
    Rollback,
    Release,
}

impl Change {
    /// Read the component, its signature and its options.
    pub(super) fn put(args: &PolicyArgs, mode: Mode) -> anyhow::Result<Self> {
        let PolicyArgs { source, config, signature } = args;
        let options = config.as_deref().map(options_of).transpose()?;
        let named = source.as_deref().and_then(Path::to_str);
        let named = named.filter(|source| !PolicySource::of(source).is_file());
        let reference = named.and_then(|source| PolicySource::of(source).registry());
        if let Some(reference) = reference {
            OciReference::pinned(reference)?;
        }
        let source = match (source, named) {
            (Some(file), None) => {
                let named = || format!("{}: cannot be read", file.display());
                let Some(component) = read_regular(file, MAX_COMPONENT_BYTES as u64).with_context(named)? else {
                    bail!("{}: is larger than 32 MiB, the most a component may have", file.display());
                };
                let signature = signature_of(file, signature.as_deref())?;
                PolicyOrigin::Component { bytes: component.into(), signature }
            }
            (_, named) => {
                ensure!(
                    signature.is_none() || reference.is_none(),
                    "--signature: the registry has those of its components"
                );
                ensure!(signature.is_none(), "--signature: a native policy needs none");
                match (named, options) {
                    (Some(named), options) => {
                        let policy = NamedPolicy { source: PolicyOrigin::Named(named.to_owned()), options };
                        return Ok(Self::Put { policy, mode });
                    }
                    (None, Some(options)) => return Ok(Self::Configure { options, mode }),
                    (None, None) => bail!("POLICY or --config is needed"),
                }
            }
        };
        Ok(Self::Put { policy: NamedPolicy { source, options }, mode })
    }

    pub(super) fn make(&self, engine: &EngineClient, slot: SlotName) -> Result<SwapReport, MemberError> {
        match self {
            Self::Put { policy, mode } => engine.put(slot, policy, *mode),
            Self::Configure { options, mode } => engine.configure(slot, options, *mode),
            Self::StopShadow => engine.stop_shadow(slot),
            Self::Promote => engine.promote(slot),
            Self::Rollback => engine.rollback(slot),
            Self::Release => engine.release(slot),
        }
    }

    /// Whether making it once more changes nothing where it has been made.
    pub(super) fn is_repeatable(&self) -> bool {
        matches!(self, Self::Put { .. } | Self::Configure { .. })
    }
}

/// The signature of a component: of the file that is named, else of the one beside it, if any.
fn signature_of(component: &Path, named: Option<&Path>) -> anyhow::Result<Option<String>> {
    let path = named.map_or_else(|| signature_path(component), Path::to_owned);
    let text = read_signature(&path).with_context(|| format!("{}: cannot be read", path.display()))?;
    ensure!(text.is_some() || named.is_none(), "{}: no such file, expected a minisign signature", path.display());
    let header = text.as_deref().map(signature_header);
    // The process would not take it either, but could not say so well.
    let is_line = header
        .as_deref()
        .is_none_or(|value| value.len() <= MAX_SIGNATURE_BYTES && value.chars().all(|c| c == '\t' || !c.is_control()));
    ensure!(is_line, "{}: malformed, expected the four lines that `minisign -S` writes", path.display());
    Ok(text)
}

/// The options of `--config`: a JSON object, or `@` and the file that holds it.
fn options_of(config: &str) -> anyhow::Result<String> {
    let text = match config.strip_prefix('@').map(Path::new) {
        Some(file) => {
            let read = read_regular(file, MAX_OPTIONS_BYTES as u64);
            let bytes = read.with_context(|| format!("--config: {}: cannot be read", file.display()))?;
            let bytes = bytes.with_context(|| format!("--config: {}: is larger than 64 KiB", file.display()))?;
            String::from_utf8_lossy(&bytes).into_owned()
        }
        None => config.to_owned(),
    };
    let options: Map<String, Value> = serde_json::from_str(&text).context("--config: must be one JSON object")?;
    Ok(Value::from(options).to_string())
}

//! Checks of `[policy.dispatch]`, `[policy.eviction]` and `[policy.budget]` beyond ranges.

use super::{MeridianConfig, PolicyConfig, SLOTS, SlotConfig, check, get, inline, joined, quoted};
use crate::native::{self, NativeError};
use crate::oci::{OciReference, OciReferenceError};
use crate::source::PolicySource;
use crate::{Budget, Dispatch, Error, Eviction, SlotKind};

/// Check the sources of the three slots and the options of native policies, after [`check_options`]. The caller checks
/// whether a component's file exists.
pub(super) fn check_slots(config: &MeridianConfig) -> Result<(), Error> {
    let PolicyConfig { dispatch, eviction, budget, .. } = &config.policy;
    check_slot::<Dispatch>(config, dispatch)?;
    check_slot::<Eviction>(config, eviction)?;
    check_slot::<Budget>(config, budget)
}

fn check_slot<K: SlotKind>(config: &MeridianConfig, slot: &SlotConfig) -> Result<(), Error> {
    let SlotConfig { source, config: options, .. } = slot;
    let name = K::NAME.label();
    check_source(&format!("policy.{name}.source"), source, K::NATIVES)?;
    let Some(native) = PolicySource::of(source).native() else { return Ok(()) };
    let json = serde_json::to_string(options).expect("options without dates and non-finite numbers are plain JSON");
    match native::policy::<K>(native, config.scheduler.targets(), &json) {
        Err(NativeError::Refused { reason, .. }) => Err(Error::ConfigValidation {
            field: format!("policy.{name}.config"),
            value: inline(&options.clone().into()),
            reason: format!("{source} refused it: {reason}"),
        }),
        Err(NativeError::Unknown { .. }) | Ok(_) => Ok(()),
    }
}

/// Longest path on Linux.
const MAX_SOURCE_BYTES: usize = 4096;

fn check_source(field: &str, source: &str, natives: &[&str]) -> Result<(), Error> {
    let holds = |holds, reason: &str| check(field, quoted(source), holds, || reason.to_owned());
    holds(
        !matches!(PolicySource::of(source), PolicySource::File("") | PolicySource::Native(""))
            && !source.contains('\0'),
        "must be native:NAME, a path or oci://HOST/NAME@sha256:DIGEST",
    )?;
    holds(source.len() <= MAX_SOURCE_BYTES, "must be at most 4096 bytes")?;
    if let Some(reference) = PolicySource::of(source).registry()
        && let Err(OciReferenceError { shown, reason }) = OciReference::pinned(reference)
    {
        return check(field, quoted(&shown), false, || reason.to_owned());
    }
    let Some(name) = PolicySource::of(source).native() else { return Ok(()) };
    check(field, quoted(source), natives.contains(&name), || {
        format!("unknown native policy, expected one of {}", native::sources(natives))
    })
}

/// Check the options of the three slots in the table of a whole file: a policy receives them as JSON, which has neither
/// dates nor non-finite numbers. The typed configuration cannot check this, because it turns a date into a string.
pub(super) fn check_options(given: &toml::Table) -> Result<(), Error> {
    SLOTS.iter().map(|slot| format!("policy.{}.config", slot.label())).try_for_each(|path| match get(given, &path) {
        Some(toml::Value::Table(options)) => check_table(&path, options),
        _ => Ok(()),
    })
}

fn check_table(path: &str, options: &toml::Table) -> Result<(), Error> {
    options.iter().try_for_each(|(key, value)| check_option(&joined(path, key), value))
}

fn check_option(path: &str, value: &toml::Value) -> Result<(), Error> {
    match value {
        toml::Value::Float(number) => check(path, number, number.is_finite(), || "must be finite".into()),
        toml::Value::Datetime(date) => check(path, date, false, || "must not be a date, write it as a string".into()),
        toml::Value::Table(inner) => check_table(path, inner),
        toml::Value::Array(items) => {
            items.iter().enumerate().try_for_each(|(index, item)| check_option(&format!("{path}[{index}]"), item))
        }
        toml::Value::String(_) | toml::Value::Integer(_) | toml::Value::Boolean(_) => Ok(()),
    }
}

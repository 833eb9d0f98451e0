//! `policy.toml`: what the commands know of a policy's folder.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use meridian_core::SlotName;
use meridian_core::file::read_regular_text;
use serde::Deserialize;

use super::language::world;
use super::{Allowed, Language};

pub(crate) const MANIFEST: &str = "policy.toml";
/// Largest one, bytes.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

/// A policy's folder: its language, its slots, what it needs, and what its tests hold it to.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    /// Name of the component's file.
    pub(crate) name: String,
    pub(crate) language: Language,
    /// One slot, or all three.
    pub(crate) slots: Vec<SlotName>,
    #[serde(default)]
    pub(crate) limits: Limits,
    #[serde(default)]
    pub(crate) test: Tests,
}

/// What the slot should allow: the same fields as in `meridian.toml`.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Limits {
    pub(crate) deadline_ms: Option<f32>,
    pub(crate) memory_mib: Option<u32>,
}

/// What `meridian policy test` holds the policy to.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Tests {
    /// The answer about a candidate does not depend on its place in the batch.
    pub(crate) order_independent: bool,
    /// The largest batch that must keep the deadline.
    pub(crate) most_candidates: usize,
}

impl Default for Tests {
    fn default() -> Self {
        Self { order_independent: false, most_candidates: 4096 }
    }
}

impl Manifest {
    /// The manifest of a folder; `None` where there is none.
    pub(crate) fn of(folder: &Path) -> anyhow::Result<Option<Self>> {
        let path = folder.join(MANIFEST);
        let text = match read_regular_text(&path, MAX_MANIFEST_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("{}: cannot read", path.display())),
        };
        Self::parse(&text).with_context(|| path.display().to_string()).map(Some)
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let manifest: Self = match toml::from_str(text) {
            Ok(manifest) => manifest,
            Err(error) => bail!("{}", error.message().replace('\n', "; ")),
        };
        check_name(&manifest.name).context("name")?;
        let slots: Vec<_> = manifest.slots.iter().map(|slot| slot.label()).collect();
        ensure!(
            world(&manifest.slots).is_some(),
            "slots: {slots:?}: expected one slot, or dispatch, eviction and budget"
        );
        if let Some(ms) = manifest.limits.deadline_ms {
            ensure!(ms > 0.0 && ms <= 1000.0, "limits.deadline_ms: {ms}: expected above 0 and at most 1000");
        }
        if let Some(mib) = manifest.limits.memory_mib {
            ensure!((1..=1024).contains(&mib), "limits.memory_mib: {mib}: expected 1 to 1024");
        }
        Ok(manifest)
    }

    pub(crate) fn world(&self) -> &'static str {
        world(&self.slots).expect("parse has checked the slots")
    }

    pub(crate) fn allowed(&self) -> Allowed {
        let Limits { deadline_ms, memory_mib } = self.limits;
        Allowed { deadline_ms, memory_mib }
    }
}

/// A name becomes part of paths, crate names and identifiers.
pub(crate) fn check_name(name: &str) -> anyhow::Result<()> {
    let is_letter = |c: char| c.is_ascii_lowercase();
    let fits = name.len() <= 64
        && name.starts_with(is_letter)
        && name.chars().all(|c| is_letter(c) || c.is_ascii_digit() || c == '-')
        && !name.ends_with('-');
    ensure!(fits, "{name:?}: expected a letter, then letters, digits and hyphens in lower case, at most 64");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = "name = \"mine\"\nlanguage = \"python\"\nslots = [\"dispatch\"]\n[limits]\ndeadline_ms = 20\n";

    #[test]
    fn a_manifest_names_its_world_and_limits() {
        let manifest = Manifest::parse(WHOLE).expect("it is whole");
        assert_eq!((manifest.world(), manifest.limits.deadline_ms), ("dispatch-policy", Some(20.0)));
        assert_eq!((manifest.test.order_independent, manifest.test.most_candidates), (false, 4096));
    }

    #[test]
    fn a_wrong_manifest_is_one_line_with_the_field() {
        for (from, to, expected) in [
            ("mine", "../mine", "name: \"../mine\": expected a letter"),
            ("python", "cobol", "unknown variant `cobol`"),
            ("[\"dispatch\"]", "[\"dispatch\", \"budget\"]", "slots: [\"dispatch\", \"budget\"]: expected one slot"),
            ("20", "0", "limits.deadline_ms: 0: expected above 0"),
            ("deadline_ms", "deadline", "unknown field `deadline`"),
        ] {
            let error = format!("{:#}", Manifest::parse(&WHOLE.replacen(from, to, 1)).expect_err("it is wrong"));
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
    }
}

//! The state of a roll-out: what its file has.

use std::collections::BTreeMap;

use meridian_engine::control::Version;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::judge::Finding;
use super::settings::RolloutSettings;

/// The format of the file.
pub(super) const FORMAT: &str = "meridian-rollout/1";
/// Events that are kept.
const MOST_EVENTS: usize = 500;

/// The policy that is rolled out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewPolicy {
    /// `native:NAME`, a reference of a registry, or the file that a component was read from.
    pub source: String,
    /// Digest of the component, lower-case hexadecimal; empty for a policy that is named.
    pub sha256: String,
    /// Text of its minisign signature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signature: Option<String>,
    /// Its options, one JSON object; `None` for those of each engine's configuration.
    pub options: Option<String>,
}

impl NewPolicy {
    /// Whether engines load it by its name; otherwise the component is sent.
    #[must_use]
    pub fn is_named(&self) -> bool {
        self.sha256.is_empty()
    }

    /// Whether an engine's version is this policy.
    #[must_use]
    pub fn is(&self, version: &Version) -> bool {
        let is_same = if self.is_named() { version.source == self.source } else { version.sha256 == self.sha256 };
        is_same && self.options.as_ref().is_none_or(|options| is_equal(options, &version.options))
    }
}

/// Whether two texts are the same JSON object; no text is an empty one.
fn is_equal(one: &str, other: &str) -> bool {
    let object = |text: &str| if text.is_empty() { Some(Map::new()) } else { serde_json::from_str(text).ok() };
    let (one, other): (Option<Map<String, Value>>, _) = (object(one), object(other));
    one.is_some() && one == other
}

/// Whether two versions are the same policy with the same options, wherever it came from.
pub(super) fn is_same(one: &Version, other: &Version) -> bool {
    (&one.name, &one.version, &one.sha256) == (&other.name, &other.version, &other.sha256)
        && is_equal(&one.options, &other.options)
}

/// The part of a roll-out that is under way.
///
/// ```
/// use meridian_fleet::rollout::Phase;
///
/// assert_eq!(serde_json::to_string(&Phase::Step { number: 0 }).unwrap(), r#"{"phase":"step","number":0}"#);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "phase")]
pub enum Phase {
    /// Every engine compares the new policy in shadow; the old one decides.
    Shadow,
    /// A share of the engines decides by the new policy.
    Step {
        /// Its number, from 0.
        number: usize,
    },
    /// Every engine decides by the new policy, for the first interval.
    Finish,
    /// Every engine returns to the old policy.
    Back {
        /// How it ends.
        outcome: Outcome,
    },
    /// It is over.
    Over {
        /// How it ended.
        outcome: Outcome,
    },
}

/// How a roll-out ends.
///
/// ```
/// use meridian_fleet::rollout::Outcome;
///
/// assert_eq!(serde_json::to_string(&Outcome::Completed).unwrap(), r#"{"outcome":"completed"}"#);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum Outcome {
    /// Every engine decides by the new policy.
    Completed,
    /// Every engine decides by the old policy again.
    RolledBack {
        /// The reason, one line.
        why: String,
    },
    /// Every engine decides by the old policy again, as the operator asked.
    Aborted,
}

/// The policy that an engine should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The old one decides, the new one is in shadow.
    Shadow,
    /// The old one decides.
    Old,
    /// The new one decides.
    New,
}

/// An engine of a roll-out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineRecord {
    /// The policy that it should have.
    pub role: Role,
    /// The version that decided before the roll-out.
    #[serde(default)]
    pub old: Version,
    /// The change by somebody else that took it out of the roll-out, one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub foreign: Option<String>,
    /// Whether it answered at the latest look.
    #[serde(default)]
    pub answers: bool,
    /// Whether it is one of the fleet at the latest look.
    #[serde(default)]
    pub is_listed: bool,
    /// Whether it restarted or stopped answering since the step began.
    #[serde(default)]
    pub was_lost: bool,
    /// Its start, by the engine's own word.
    #[serde(default)]
    pub run: String,
    /// The reason why it has not the policy that it should have, one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Seconds since 1970.
    pub at_s: f64,
    /// One line.
    pub what: String,
}

/// The state of a roll-out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RolloutState {
    /// Always `meridian-rollout/1`.
    pub format: String,
    /// The settings.
    pub settings: RolloutSettings,
    /// The new policy.
    pub policy: NewPolicy,
    /// The old policy of the fleet.
    pub old: Version,
    /// Where the fleet was found: the words of the command line, for a controller that goes on with it.
    pub fleet: Vec<String>,
    /// What is under way.
    #[serde(flatten)]
    pub phase: Phase,
    /// The reason why the next step does not begin, one line.
    pub paused: Option<String>,
    /// Whether the operator accepted that guards of this step are unclear.
    #[serde(default)]
    pub accepted: bool,
    /// Complete intervals of the phase.
    pub intervals: u32,
    /// Lines of the measurements: those before any change come first.
    pub(super) lines: u64,
    /// The line that the intervals of the step begin with.
    pub(super) step_from: u64,
    /// Lines before any change.
    pub(super) before: u64,
    /// Latest findings.
    pub findings: Vec<Finding>,
    /// The engines, by their names.
    pub engines: BTreeMap<String, EngineRecord>,
    /// Latest events.
    pub events: Vec<Event>,
    /// Events so far, those included that are no longer kept.
    #[serde(default)]
    pub noted: u64,
    /// Calls to engines so far.
    pub messages: u64,
    /// When it began, seconds since 1970.
    pub started_s: f64,
    /// When this state was written.
    pub at_s: f64,
    /// A prediction to compare with, as it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Value>,
}

impl RolloutState {
    pub(super) fn note(&mut self, what: impl Into<String>) {
        if self.events.len() >= MOST_EVENTS {
            // The first ones say how it began.
            self.events.remove(MOST_EVENTS / 2);
        }
        self.events.push(Event { at_s: self.at_s, what: what.into() });
        self.noted = self.noted.saturating_add(1);
    }

    /// Intervals that were measured so far, those in shadow included.
    #[must_use]
    pub fn measured_intervals(&self) -> u64 {
        self.lines
    }

    /// Whether the roll-out is over.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome> {
        match &self.phase {
            Phase::Over { outcome } => Some(outcome),
            _ => None,
        }
    }

    /// Engines that take part: listed, and not changed by somebody else.
    pub fn taking_part(&self) -> impl Iterator<Item = (&String, &EngineRecord)> {
        self.engines.iter().filter(|(_, record)| record.is_listed && record.foreign.is_none())
    }

    /// Engines that may still have another policy than they should have, with the reason.
    pub fn left_behind(&self) -> impl Iterator<Item = (&str, &str)> {
        self.engines.iter().filter_map(|(name, record)| Some((name.as_str(), record.problem.as_deref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_recognized_by_content_and_options() {
        let version = |source: &str, sha256: &str, options: &str| Version {
            source: source.into(),
            sha256: sha256.into(),
            options: options.into(),
            ..Version::default()
        };
        let new = NewPolicy { source: "p.wasm".into(), sha256: "ab".into(), ..NewPolicy::default() };
        assert!(new.is(&version("admin", "ab", "{}")) && !new.is(&version("p.wasm", "cd", "{}")));
        assert!(new.is(&version("admin", "ab", r#"{"a": 1}"#)), "the options of the configuration, whatever they are");
        let new = NewPolicy { options: Some(r#"{"a": 1, "b": 2}"#.into()), ..new };
        assert!(new.is(&version("admin", "ab", r#"{"b":2,"a":1}"#)) && !new.is(&version("admin", "ab", "{}")));
        let named = NewPolicy { source: "native:srpt".into(), options: Some("{}".into()), ..NewPolicy::default() };
        assert!(named.is(&version("native:srpt", "", "")) && !named.is(&version("native:fcfs", "", "")));
    }
}

use std::collections::BTreeSet;

use meridian_policy_sdk::Targets;
use serde::{Deserialize, Serialize};

use crate::Error;

/// The contents of `meridian.toml`. Every field has a default; an unknown field is an error with a suggestion.
///
/// ```
/// use meridian_core::MeridianConfig;
///
/// let config = MeridianConfig::from_toml("[scheduler]\noutput_tpot_budget_ms = 15").unwrap();
/// assert_eq!(config.scheduler.output_tpot_budget_ms, 15.0);
/// let error = MeridianConfig::from_toml("[scheduler]\noutput_tpot_budget = 15").unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "scheduler.output_tpot_budget: unknown field, did you mean `scheduler.output_tpot_budget_ms`?"
/// );
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MeridianConfig {
    /// Targets of the step scheduler.
    pub scheduler: SchedulerConfig,
    /// The policy slots.
    pub policy: PolicyConfig,
    /// How the served model marks its thinking.
    pub model: ModelConfig,
}

/// `[scheduler]`
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SchedulerConfig {
    /// Step time to hold while an output-phase request runs, milliseconds, above 0.
    pub output_tpot_budget_ms: f32,
    /// Step time to hold while only thinking runs, milliseconds, above 0.
    pub think_tpot_budget_ms: f32,
    /// How many times the output-phase token budget a step with only thinking may carry, at least 1.
    pub think_batch_multiplier: f32,
    /// Longest time a policy may put a request off, milliseconds, above 0.
    pub max_defer_ms: f32,
}

/// `[policy]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyConfig {
    /// Folder of compiled components; empty for the user's cache folder.
    pub cache_dir: String,
    /// The dispatch slot.
    pub dispatch: DispatchConfig,
}

/// `[policy.dispatch]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DispatchConfig {
    /// `native:NAME`, or the path of a component.
    pub source: String,
    /// The policy's own options, handed to its `init` as JSON.
    pub config: toml::Table,
    /// Longest time one decision may take, milliseconds, above 0, at most 1000.
    pub deadline_ms: f32,
    /// Most linear memory a component may use, MiB, from 1 to 1024.
    pub memory_mib: u32,
}

/// `[model]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelConfig {
    /// Text that starts thinking; empty together with `think_end` for a model that does not think.
    pub think_start: String,
    /// Text that ends thinking.
    pub think_end: String,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            output_tpot_budget_ms: 20.0,
            think_tpot_budget_ms: 80.0,
            think_batch_multiplier: 2.5,
            max_defer_ms: 2000.0,
        }
    }
}

impl Default for DispatchConfig {
    fn default() -> Self {
        Self { source: "native:output-first".into(), config: toml::Table::new(), deadline_ms: 2.0, memory_mib: 64 }
    }
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self { think_start: "<think>".into(), think_end: "</think>".into() }
    }
}

impl SchedulerConfig {
    /// The table as policies are given it.
    #[must_use]
    pub fn targets(&self) -> Targets {
        let Self { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms } = *self;
        Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms }
    }
}

impl MeridianConfig {
    /// Parse and validate the text of a `meridian.toml`.
    ///
    /// # Errors
    /// The first thing that is wrong, with its dotted path (or line and column), the value and what was expected.
    pub fn from_toml(text: &str) -> Result<Self, Error> {
        let table: toml::Table = toml::from_str(text).map_err(|error| not_toml(text, &error))?;
        refuse_unknown_fields(&table)?;
        let config: Self = serde_path_to_error::deserialize(toml::Value::Table(table)).map_err(|error| {
            let reason = error.inner().message().to_owned();
            Error::ConfigSyntax { field: error.path().to_string(), reason }
        })?;
        config.validate()?;
        Ok(config)
    }

    /// Check every value's range; [`MeridianConfig::from_toml`] has done it.
    ///
    /// # Errors
    /// [`Error::ConfigValidation`] for the first value out of range.
    pub fn validate(&self) -> Result<(), Error> {
        let scheduler = &self.scheduler;
        for (field, value) in [
            ("scheduler.output_tpot_budget_ms", scheduler.output_tpot_budget_ms),
            ("scheduler.think_tpot_budget_ms", scheduler.think_tpot_budget_ms),
            ("scheduler.max_defer_ms", scheduler.max_defer_ms),
        ] {
            check(field, value, value > 0.0 && value.is_finite(), "must be above 0")?;
        }
        let multiplier = scheduler.think_batch_multiplier;
        check(
            "scheduler.think_batch_multiplier",
            multiplier,
            (1.0..=1.0e6).contains(&multiplier),
            "must be at least 1",
        )?;
        let dispatch = &self.policy.dispatch;
        let deadline = dispatch.deadline_ms;
        check("policy.dispatch.deadline_ms", deadline, deadline > 0.0 && deadline <= 1000.0, "must be in (0, 1000]")?;
        let memory = dispatch.memory_mib;
        check("policy.dispatch.memory_mib", memory, (1..=1024).contains(&memory), "must be in 1..=1024")?;
        check("policy.dispatch.source", "\"\"", !dispatch.source.is_empty(), "must be native:NAME or a path")?;
        let model = &self.model;
        check(
            "model.think_end",
            format!("{:?}", model.think_end),
            model.think_start.is_empty() == model.think_end.is_empty(),
            "must be set exactly when model.think_start is",
        )
    }
}

fn check(field: &'static str, value: impl ToString, holds: bool, reason: &'static str) -> Result<(), Error> {
    if holds { Ok(()) } else { Err(Error::ConfigValidation { field, value: value.to_string(), reason }) }
}

fn not_toml(text: &str, error: &toml::de::Error) -> Error {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    Error::ConfigSyntax { field: format!("line {line}, column {column}"), reason: error.message().replace('\n', " ") }
}

/// Serde could refuse unknown fields by itself, but would name neither the path nor a likely correction.
fn refuse_unknown_fields(given: &toml::Table) -> Result<(), Error> {
    let known = toml::Table::try_from(MeridianConfig::default()).expect("the default configuration is plain TOML");
    let mut known_paths = BTreeSet::new();
    collect_paths(&known, "", &mut known_paths);
    let mut given_paths = BTreeSet::new();
    collect_paths(given, "", &mut given_paths);
    let Some(field) = given_paths.into_iter().find(|path| !known_paths.contains(path)) else { return Ok(()) };
    let suggestion = known_paths
        .iter()
        .map(|path| (strsim::damerau_levenshtein(&field, path), path))
        .min()
        .filter(|(distance, _)| *distance <= 5)
        .map(|(_, path)| path.clone());
    Err(Error::ConfigUnknownField { field, suggestion })
}

fn collect_paths(table: &toml::Table, prefix: &str, paths: &mut BTreeSet<String>) {
    for (key, value) in table {
        let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        // A policy's options are the policy's own to check.
        if let (toml::Value::Table(inner), false) = (value, path == "policy.dispatch.config") {
            collect_paths(inner, &path, paths);
        }
        paths.insert(path);
    }
}

//! `meridian.toml`: its tables, the range of each field, and the origin of each effective value.
//!
//! `tables.rs` holds the fields; schema, reference and range checks derive from them. No I/O here: see
//! `meridian_engine::config_file`.

mod document;
mod effort;
mod fields;
mod json;
mod levels;
mod meaning;
mod reference;
mod schema;
mod slots;
mod tables;
mod values;

use std::collections::BTreeSet;

pub use document::{from_table, from_toml, table};
pub use effort::{EffortThresholds, ReasoningEfforts};
pub use fields::{Field, NAMED, fields};
pub use levels::{Late, ServiceLevel, ServiceLevels};
pub use reference::reference;
pub use schema::schema;
pub use tables::{
    AdminConfig, DisaggConfig, EntropyConfig, FabricName, HandoffPolicyName, KvMemoryConfig, MeridianConfig,
    ModelConfig, PolicyConfig, ProbeAt, SchedulerConfig, SlotConfig, SlotMode, StopStrings, TelemetryConfig,
    ThinkingDefaults,
};
pub use values::{Auto, HttpUrl, Listen, Texts, Tokens, inline, of_rank};

use crate::text::printable;
use crate::{Error, ModelFamily, PolicySource, SlotName};

/// Source of the dispatch policy that leaves every step to the engine.
pub const STOCK: &str = "native:fcfs";

/// The three slots of `[policy]`.
const SLOTS: [SlotName; 3] = SlotName::ALL;

/// The origin of an effective value.
///
/// ```
/// use meridian_core::config::Origin;
///
/// assert_eq!(Origin::Family("qwen3".into()).to_string(), "family:qwen3");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The default.
    Default,
    /// The file.
    File,
    /// The model family of this name, which the file chose.
    Family(String),
    /// `scheduler.thinking = "guarded"`.
    Guarded,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Default => formatter.write_str("default"),
            Self::File => formatter.write_str("file"),
            Self::Family(name) => write!(formatter, "family:{name}"),
            Self::Guarded => formatter.write_str("guarded"),
        }
    }
}

/// One leaf of an effective configuration.
///
/// ```
/// use meridian_core::MeridianConfig;
/// use meridian_core::config::Origin;
///
/// let parsed = MeridianConfig::parse("[entropy]\nema_alpha = 0.2")?;
/// let alpha = parsed.fields.iter().find(|field| field.path == "entropy.ema_alpha").unwrap();
/// assert_eq!((alpha.value.as_float(), &alpha.origin), (Some(0.2), &Origin::File));
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct EffectiveField {
    /// Dotted path.
    pub path: String,
    /// Its value, digits as in the file.
    pub value: toml::Value,
    /// The origin of the value.
    pub origin: Origin,
}

/// A configuration and the origin of each of its values.
///
/// ```
/// use meridian_core::MeridianConfig;
///
/// let parsed = MeridianConfig::parse("[entropy]\nmin_probes = 8")?;
/// assert_eq!(parsed.config.entropy.min_probes, 8);
/// assert!(parsed.warnings()[0].starts_with("entropy.probe_suffix: \"\": "));
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parsed {
    /// The effective configuration.
    pub config: MeridianConfig,
    /// Every leaf, table by table.
    pub fields: Vec<EffectiveField>,
}

impl Parsed {
    /// Warnings for valid fields that do not do what they seem to, a line each: the field, its value, and what it
    /// needs.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let MeridianConfig { entropy, model, policy, disagg, .. } = &self.config;
        let mut warnings = Vec::new();
        if disagg.enabled {
            warnings.push(
                "disagg.enabled: true: MeridianScheduler does not start with it, expected false: vLLM moves KV blocks itself"
                    .into(),
            );
        }
        for (name, slot) in [("eviction", &policy.eviction), ("budget", &policy.budget)] {
            if slot.mode == SlotMode::Shadow && self.config.asks_for_stock() {
                warnings.push(format!(
                    "policy.{name}.mode: \"shadow\": it is not asked while the engine is stock, expected a \
                     policy.dispatch other than native:fcfs, and not in shadow"
                ));
            }
        }
        let is_mute = entropy.enabled && entropy.probe_suffix.is_empty();
        let is_set = |path: &str| self.fields.iter().any(|field| field.path == path && field.origin == Origin::File);
        // Fields of EAT were set, or a policy that probes.
        let asks = ["ema_alpha", "eat_variance_threshold", "eat_max_bits", "eat_probe_interval_tokens", "min_probes"]
            .iter()
            .any(|name| is_set(&format!("entropy.{name}")));
        let probes = ["eat", "deer", "patience", "code-stop", "deadline-aware"];
        let probes = PolicySource::of(&policy.budget.source).native().is_some_and(|name| probes.contains(&name));
        if is_mute && (asks || probes) && !model.think_end.is_empty() {
            let expected =
                "expected the text that leads to an answer, such as \"Final answer: \", or entropy.enabled = false";
            warnings.push(format!(
                "entropy.probe_suffix: \"\": nothing is probed without it, so EAT ends no thinking; {expected}"
            ));
        }
        warnings
    }
}

/// Data-parallel engines of one machine whose addresses are compared.
const MOST_RANKS: u32 = 64;

impl MeridianConfig {
    /// Parse and validate the text of a `meridian.toml`.
    ///
    /// # Errors
    /// The first error, in one line: its dotted path (or line and column), the value, and what was expected.
    pub fn from_toml(text: &str) -> Result<Self, Error> {
        Self::parse(text).map(|parsed| parsed.config)
    }

    /// As [`MeridianConfig::from_toml`], with the origin of every value.
    ///
    /// # Errors
    /// As [`MeridianConfig::from_toml`].
    pub fn parse(text: &str) -> Result<Parsed, Error> {
        Self::from_table(table(text)?)
    }

    /// Parse and validate the same tables as one JSON object, the JSON form of a [`MeridianConfig`]. A missing field
    /// has its default. The texts `"NaN"`, `"Infinity"` and `"-Infinity"` stand for numbers that JSON cannot hold, so
    /// that validation refuses them as numbers.
    ///
    /// ```
    /// use meridian_core::MeridianConfig;
    ///
    /// let config = MeridianConfig::from_json(r#"{"scheduler": {"max_defer_ms": 500}}"#)?;
    /// assert_eq!(config.scheduler.max_defer_ms, 500.0);
    /// let error = MeridianConfig::from_json(r#"{"scheduler": {"max_defer_ms": "NaN"}}"#).unwrap_err();
    /// assert_eq!(error.to_string(), "scheduler.max_defer_ms: NaN: must be above 0");
    /// # Ok::<(), meridian_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MeridianConfig::from_toml`].
    pub fn from_json(text: &str) -> Result<Self, Error> {
        Self::from_table(json::table(text)?).map(|parsed| parsed.config)
    }

    fn from_table(given: toml::Table) -> Result<Parsed, Error> {
        refuse_unknown_fields(&given)?;
        schema::check(&given)?;
        slots::check_options(&given)?;
        let family = family_of(&given)?;
        let family_fields = family.map(|family| toml::Table::from_iter([("model".into(), family.fields().into())]));
        let guarded = match get(&given, "scheduler.thinking").and_then(toml::Value::as_str) {
            Some("guarded") => ThinkingDefaults::Guarded.fields(),
            _ => toml::Table::new(),
        };
        let mut merged = defaults();
        overlay(&mut merged, guarded.clone());
        family_fields.iter().for_each(|fields| overlay(&mut merged, fields.clone()));
        overlay(&mut merged, given.clone());
        fields::complete(&mut merged);
        settle_markers(&mut merged);
        let config: Self = from_table(merged.clone())?;
        config.check_relations()?;
        let origin = |path: &str| match family {
            _ if get(&given, path).is_some() => Origin::File,
            Some(family) if family_fields.as_ref().is_some_and(|fields| get(fields, path).is_some()) => {
                Origin::Family(family.name.clone())
            }
            _ if get(&guarded, path).is_some() => Origin::Guarded,
            _ => Origin::Default,
        };
        let fields = fields()
            .iter()
            .flat_map(|field| fields::paths(&field.path, &merged))
            .filter_map(|path| Some((get(&merged, &path)?.clone(), path)))
            .map(|(value, path)| EffectiveField { origin: origin(&path), path, value })
            .collect();
        Ok(Parsed { config, fields })
    }

    /// Check every value; [`MeridianConfig::from_toml`] does so too.
    ///
    /// # Errors
    /// [`Error::ConfigValidation`] for the first value that is out of range or contradicts another.
    pub fn validate(&self) -> Result<(), Error> {
        let table = toml::Table::try_from(self).map_err(|error| Error::ConfigSyntax {
            field: "configuration".into(),
            reason: one_line(&error.to_string()),
        })?;
        schema::check(&table)?;
        slots::check_options(&table)?;
        self.check_relations()
    }

    /// Checks beyond ranges: the form of texts, and fields that depend on each other.
    fn check_relations(&self) -> Result<(), Error> {
        let SchedulerConfig { min_think_tokens, max_think_tokens, .. } = self.scheduler;
        check("scheduler.min_think_tokens", min_think_tokens, min_think_tokens <= max_think_tokens, || {
            format!("must be at most scheduler.max_think_tokens, {max_think_tokens}")
        })?;
        self.scheduler.reasoning_effort.check(max_think_tokens)?;
        slots::check_slots(self)?;
        levels::check_levels(&self.service_levels)?;
        let DisaggConfig { enabled, fabric, offload_threshold_blocks: _, policy: _ } = self.disagg;
        check("disagg.fabric", "\"none\"", !enabled || fabric != FabricName::None, || {
            "must be \"tcp\", \"nixl\" or \"mooncake\" when disagg.enabled is true".into()
        })?;
        let PolicyConfig { cache_dir, record_dir, trusted_keys, .. } = &self.policy;
        for (field, path) in [("policy.cache_dir", cache_dir), ("policy.record_dir", record_dir)] {
            check(field, quoted(path), !path.contains('\0'), || "must be a path or empty".into())?;
        }
        let keys_named = trusted_keys.iter().all(|key| !key.trim().is_empty());
        check("policy.trusted_keys", "\"\"", keys_named, || "must not hold an empty key".into())?;
        let suffix = &self.entropy.probe_suffix;
        let ends = self.model.think_end.or("</think>").iter().any(|end| suffix.contains(end.as_str()));
        check("entropy.probe_suffix", quoted(suffix), suffix.len() <= 64 && !ends, || {
            "must be at most 64 bytes, without a text of model.think_end".into()
        })?;
        self.check_addresses()?;
        self.model.check()
    }

    fn check_addresses(&self) -> Result<(), Error> {
        let TelemetryConfig { prometheus, tenants: _, otlp_endpoint, otlp_ca_file, service_name } = &self.telemetry;
        let address = |field: &str, text: &str, parsed: Result<Listen, &'static str>| {
            parsed.map_err(|reason| Error::ConfigValidation {
                field: field.into(),
                value: quoted(text),
                reason: reason.into(),
            })
        };
        let AdminConfig { listen, token_file, tls_cert_file, tls_key_file, audit_log, audit_log_max_mib: _ } =
            &self.admin;
        let admin = address("admin.listen", listen, Listen::parse_any(&Listen::of_rank(listen, 0)))?;
        let has_tls = !tls_cert_file.is_empty() && !tls_key_file.is_empty();
        let is_safe = admin.is_of_this_machine() || has_tls && !token_file.is_empty();
        check("admin.listen", quoted(listen), is_safe, || {
            "must be a loopback address such as 127.0.0.1 or [::1], or have admin.tls_cert_file, admin.tls_key_file and \
             admin.token_file"
                .into()
        })?;
        address("telemetry.prometheus", prometheus, Listen::parse_any(&Listen::of_rank(prometheus, 0)))?;
        // At any data-parallel rank: the engines of a machine share its ports.
        let of_ranks = |text: &str| -> Vec<Listen> {
            let ranks = if text.contains("{rank}") { 0..MOST_RANKS } else { 0..1 };
            ranks.filter_map(|rank| Listen::parse_any(&Listen::of_rank(text, rank)).ok()).collect()
        };
        let metrics_of_ranks = of_ranks(prometheus);
        let apart = of_ranks(listen).iter().all(|admin| metrics_of_ranks.iter().all(|metrics| admin.is_apart(metrics)));
        check("admin.listen", quoted(listen), apart, || {
            format!("must differ from telemetry.prometheus, {prometheus:?}, at every rank")
        })?;
        for (field, path) in [
            ("admin.token_file", token_file),
            ("admin.tls_cert_file", tls_cert_file),
            ("admin.tls_key_file", tls_key_file),
            ("admin.audit_log", audit_log),
        ] {
            check(field, quoted(path), !path.contains('\0'), || "must be a path or empty".into())?;
        }
        let both = tls_cert_file.is_empty() == tls_key_file.is_empty();
        check("admin.tls_key_file", quoted(tls_key_file), both, || {
            "must be set exactly when admin.tls_cert_file is".into()
        })?;
        if !otlp_endpoint.is_empty() {
            HttpUrl::parse(otlp_endpoint).map_err(|reason| Error::ConfigValidation {
                field: "telemetry.otlp_endpoint".into(),
                value: quoted(otlp_endpoint),
                reason,
            })?;
        }
        let is_path = !otlp_ca_file.contains('\0');
        check("telemetry.otlp_ca_file", quoted(otlp_ca_file), is_path, || "must be a path or empty".into())?;
        let named = !service_name.trim().is_empty();
        check("telemetry.service_name", quoted(service_name), named, || "must not be empty".into())
    }
}

impl ModelConfig {
    /// Longest `force_phrase`, bytes.
    const MAX_PHRASE_BYTES: usize = 4096;

    /// Whether later turns leave out this model's reasoning: the field, else the family's value, else false.
    ///
    /// ```
    /// use meridian_core::ModelConfig;
    ///
    /// let of = |family: &str| ModelConfig { family: family.into(), ..ModelConfig::default() };
    /// assert!(of("qwen3").strips_reasoning_or_keep());
    /// assert!(!of("minimax-m2").strips_reasoning_or_keep());
    /// assert!(!of("kimi-k2-thinking").strips_reasoning_or_keep(), "its file does not say");
    /// assert!(!of("").strips_reasoning_or_keep());
    /// ```
    #[must_use]
    pub fn strips_reasoning_or_keep(&self) -> bool {
        match self.strips_reasoning {
            Auto::Set(strips_reasoning) => strips_reasoning,
            Auto::Auto => ModelFamily::find(&self.family).ok().and_then(|family| family.strips_reasoning) == Some(true),
        }
    }

    fn check(&self) -> Result<(), Error> {
        let Self {
            family,
            think_start,
            think_end,
            resumes: _,
            strips_reasoning: _,
            tool_call,
            tool_call_ends_thinking: _,
            force_phrase,
            interrupt,
            eos_guard: _,
            min_answer_tokens: _,
            stop_strings: _,
        } = self;
        if !family.is_empty() {
            ModelFamily::find(family).map_err(|error| unknown_family(family, &error))?;
        }
        let both = think_start.is_empty() == think_end.is_empty();
        check("model.think_end", shown(think_end), both, || "must be set exactly when model.think_start is".into())?;
        let apart = think_end.is_auto() || think_end.as_slice().iter().all(|end| !think_start.as_slice().contains(end));
        check("model.think_end", shown(think_end), apart, || "must differ from model.think_start".into())?;
        let markers = [think_start.or("<think>"), think_end.or("</think>")].concat();
        let is_marker = |text| markers.contains(text);
        check("model.tool_call", shown(tool_call), !tool_call.as_slice().iter().any(is_marker), || {
            "must differ from model.think_start and model.think_end".into()
        })?;
        check("model.interrupt", shown(interrupt), !interrupt.as_slice().iter().any(is_marker), || {
            "must differ from model.think_start and model.think_end".into()
        })?;
        let short = force_phrase.len() <= Self::MAX_PHRASE_BYTES;
        check("model.force_phrase", format!("{} bytes", force_phrase.len()), short, || {
            "must be at most 4096 bytes".into()
        })?;
        // With "auto", the engine checks it when it knows the texts.
        let ends = think_end.is_auto() || think_end.as_slice().iter().any(|end| force_phrase.contains(end.as_str()));
        check("model.force_phrase", quoted(force_phrase), force_phrase.is_empty() || ends, || {
            "must contain a text of model.think_end, or thinking would go on".into()
        })
    }
}

fn check(
    field: impl Into<String>,
    value: impl ToString,
    holds: bool,
    reason: impl FnOnce() -> String,
) -> Result<(), Error> {
    if holds {
        return Ok(());
    }
    Err(Error::ConfigValidation { field: field.into(), value: value.to_string(), reason: reason() })
}

/// The family that the file chooses.
fn family_of(given: &toml::Table) -> Result<Option<&'static ModelFamily>, Error> {
    match get(given, "model.family") {
        Some(toml::Value::String(name)) if !name.is_empty() => {
            ModelFamily::find(name).map(Some).map_err(|error| unknown_family(name, &error))
        }
        _ => Ok(None),
    }
}

fn unknown_family(name: &str, error: &Error) -> Error {
    let reason = error.to_string();
    let reason = reason.strip_prefix(&format!("{name:?}: ")).unwrap_or(&reason).to_owned();
    Error::ConfigValidation { field: "model.family".into(), value: quoted(name), reason }
}

/// The default configuration as a table.
fn defaults() -> toml::Table {
    toml::Table::try_from(MeridianConfig::default()).expect("the default configuration is plain TOML")
}

/// One marker that is set beside another that is not: that one is the text of most models.
fn settle_markers(merged: &mut toml::Table) {
    let Some(toml::Value::Table(model)) = merged.get_mut("model") else { return };
    let is_auto = |model: &toml::Table, name: &str| model.get(name).and_then(toml::Value::as_str) == Some("auto");
    match (is_auto(model, "think_start"), is_auto(model, "think_end")) {
        (true, false) => _ = model.insert("think_start".into(), "<think>".into()),
        (false, true) => _ = model.insert("think_end".into(), "</think>".into()),
        _ => {}
    }
}

/// The value at a dotted path.
fn get<'a>(table: &'a toml::Table, path: &str) -> Option<&'a toml::Value> {
    match path.split_once('.') {
        None => table.get(path),
        Some((first, rest)) => get(table.get(first)?.as_table()?, rest),
    }
}

/// The dotted path of `key` in the table at `prefix`.
fn joined(prefix: &str, key: &str) -> String {
    let is_bare = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'));
    let key = if is_bare { key.to_owned() } else { quoted(key) };
    if prefix.is_empty() { key } else { format!("{prefix}.{key}") }
}

/// A policy's options are replaced as a whole: the default's options belong to another policy.
fn overlay(under: &mut toml::Table, over: toml::Table) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(toml::Value::Table(under)), toml::Value::Table(over)) if key != "config" => overlay(under, over),
            (_, value) => {
                under.insert(key, value);
            }
        }
    }
}

fn quoted(text: &str) -> String {
    format!("{text:?}")
}

fn shown(texts: &Texts) -> String {
    match texts.as_slice() {
        [] => "\"\"".into(),
        [text] => quoted(text),
        texts => format!("{texts:?}"),
    }
}

pub(crate) fn one_line(text: &str) -> String {
    // Multi-line messages of parsers stay readable; the rest is escaped.
    printable(&text.replace(['\n', '\r'], " ")).into_owned()
}

fn line_and_column(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    format!("line {line}, column {column}")
}

/// Serde could refuse unknown fields itself, but would name neither the path nor a likely correction.
fn refuse_unknown_fields(given: &toml::Table) -> Result<(), Error> {
    let mut paths = BTreeSet::new();
    collect_paths(given, "", &mut paths);
    let mut known = BTreeSet::new();
    collect_paths(&defaults(), "", &mut known);
    fields().iter().for_each(|field| known.extend(fields::paths(&field.path, given)));
    known.extend(fields::named_tables(given));
    let Some(field) = paths.into_iter().find(|path| !known.contains(path)) else { return Ok(()) };
    if fields::is_not_yet(&field) {
        return Err(Error::ConfigNotYet { field });
    }
    let suggestion = nearest(&field, &known);
    Err(Error::ConfigUnknownField { field, suggestion })
}

/// A field of the same name in another table, else one with a similar path.
fn nearest(field: &str, known: &BTreeSet<String>) -> Option<String> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let by_distance = |path: &&String| strsim::damerau_levenshtein(field, path);
    if field.len() > 256 {
        return None;
    }
    if let Some(path) = known.iter().filter(|path| last(path) == last(field)).min_by_key(by_distance) {
        return Some(path.clone());
    }
    let (distance, path) = known.iter().map(|path| (by_distance(&path), path)).min()?;
    (distance <= 5 && 2 * distance <= field.len()).then(|| path.clone())
}

fn collect_paths(table: &toml::Table, prefix: &str, paths: &mut BTreeSet<String>) {
    for (key, value) in table {
        let path = joined(prefix, key);
        // The policy checks its own options.
        let is_options = SLOTS.iter().any(|slot| path == format!("policy.{}.config", slot.label()));
        if let (toml::Value::Table(inner), false) = (value, is_options) {
            collect_paths(inner, &path, paths);
        }
        paths.insert(path);
    }
}

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Subcommand;
use meridian_core::config::{self, EffectiveField};
use meridian_core::{Budget, Dispatch, Eviction, MeridianConfig, PolicySource, SlotConfig};
use meridian_engine::config_file::{self, ConfigFile};
use meridian_engine::{Components, Terms, user_cache_dir};
use meridian_wasm::{GuestKind, TrustedKeys};
use serde_json::json;

use crate::levels::Alone;
use crate::{print_json, print_line, say};

#[derive(Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a meridian.toml and the components that it names
    #[command(after_help = "\
Prints the first error on one line, and a warning for each valid field that does not do what it seems to.

Examples:
  meridian config check /etc/meridian.toml
  meridian config check --engine 127.0.0.1:9631    # can the engine that runs there keep these service levels?")]
    Check {
        /// Path of the file; by default, the file that an engine started here would read
        file: Option<PathBuf>,
        /// Warn of service levels that this engine could not keep for a request alone: a preset (MODEL-GPU), a TOML file that
        /// `bench calibrate` wrote, or the address of an engine of this machine that runs: IP:port or unix:PATH
        #[arg(long, value_name = "PRESET|FILE.toml|ADDRESS")]
        engine: Option<String>,
    },
    /// Show every effective value and its origin
    #[command(after_help = "Example:\n  meridian config show | grep -v '# default'")]
    Show {
        /// Path of the file; by default, the file that an engine started here would read
        file: Option<PathBuf>,
    },
    /// Print the reference of meridian.toml as Markdown
    #[command(after_help = "Example:\n  meridian config reference > configuration.md")]
    Reference,
    /// Print the JSON Schema of meridian.toml, for editors
    #[command(after_help = "Example:\n  meridian config schema > meridian.schema.json")]
    Schema,
}

pub(crate) fn run(command: ConfigCommand, json: bool) -> anyhow::Result<()> {
    match command {
        ConfigCommand::Check { file, engine } => check(&config_file::load(file.as_deref())?, engine.as_deref(), json),
        ConfigCommand::Show { file } => show(&config_file::load(file.as_deref())?, json),
        ConfigCommand::Reference if json => print_json(&json!({ "markdown": config::reference() })),
        ConfigCommand::Reference => Ok(print_line(config::reference().trim_end())?),
        ConfigCommand::Schema if json => print_json(config::schema()),
        ConfigCommand::Schema => Ok(print_line(&serde_json::to_string_pretty(config::schema())?)?),
    }
}

/// The components that the three slots name must load and decide, as in the engine.
fn check_components(config: &MeridianConfig, base_dir: &Path) -> anyhow::Result<()> {
    let policy = &config.policy;
    let keys = TrustedKeys::parse("policy.trusted_keys", &policy.trusted_keys, base_dir)?;
    // What is fetched here is there when an engine starts.
    let named = Some(&policy.cache_dir).filter(|dir| !dir.is_empty()).map(|dir| base_dir.join(dir));
    let components = Components::new(None, keys);
    let components = match named.or_else(user_cache_dir) {
        Some(dir) => components.with_fetched_in(&dir),
        None => components,
    };
    check_component::<Dispatch>(&policy.dispatch, config, base_dir, &components)?;
    check_component::<Eviction>(&policy.eviction, config, base_dir, &components)?;
    check_component::<Budget>(&policy.budget, config, base_dir, &components)
}

fn check_component<K: GuestKind>(
    slot: &SlotConfig,
    config: &MeridianConfig,
    base_dir: &Path,
    components: &Components,
) -> anyhow::Result<()> {
    let source = PolicySource::of(&slot.source);
    if source.native().is_some() {
        return Ok(());
    }
    let is_remote = source.registry().is_some();
    let path = if is_remote { PathBuf::from(&slot.source) } else { base_dir.join(&slot.source) };
    let named = || format!("policy.{}.source: {}", K::NAME.label(), path.display());
    if !is_remote {
        let metadata = path.metadata().with_context(|| format!("{}: cannot read it", named()))?;
        ensure!(metadata.is_file(), "{}: not a regular file, expected a component", named());
    }
    let options = serde_json::to_string(&slot.config)?;
    let terms = Terms::of(slot, config.scheduler.targets());
    let started = components.open(&slot.source, base_dir).and_then(|origin| origin.start::<K>(terms, &options));
    let mut contender = started.with_context(|| format!("policy.{}.source", K::NAME.label()))?;
    contender.warm_up().with_context(named)?;
    Ok(())
}

fn check(found: &ConfigFile, engine: Option<&str>, json: bool) -> anyhow::Result<()> {
    let file = || found.path.as_deref().map_or_else(|| "the defaults".to_owned(), |path| path.display().to_string());
    check_components(&found.parsed.config, &found.base_dir).with_context(file)?;
    let mut warnings = found.parsed.warnings();
    if let Some(engine) = engine {
        warnings.extend(Alone::named(engine)?.warnings(&found.parsed.config.service_levels));
    }
    if json {
        return print_json(&json!({ "ok": true, "file": found.path, "warnings": warnings }));
    }
    for warning in &warnings {
        say(&format!("warning: {warning}"));
    }
    Ok(print_line(&match &found.path {
        Some(path) => format!("ok       {}", path.display()),
        None => "ok       no file, the defaults hold".to_owned(),
    })?)
}

fn show(found: &ConfigFile, json: bool) -> anyhow::Result<()> {
    if json {
        let field = |EffectiveField { path, value, origin }: &EffectiveField| json!({ "field": path, "value": value, "origin": origin.to_string() });
        let fields: Vec<_> = found.parsed.fields.iter().map(field).collect();
        let outputs = found.parsed.config.outputs();
        return print_json(&json!({
            "ok": true, "file": found.path, "base_dir": found.base_dir, "outputs": outputs, "fields": fields
        }));
    }
    print_line(&match &found.path {
        Some(path) => format!("# {}", path.display()),
        None => "# no file, the defaults hold".to_owned(),
    })?;
    print_line(&format!("# outputs: {}", found.parsed.config.outputs()))?;
    // Dotted keys: what is printed is a valid meridian.toml.
    for EffectiveField { path, value, origin } in &found.parsed.fields {
        print_line(&format!("{:<58} # {origin}", format!("{path} = {}", config::inline(value))))?;
    }
    Ok(())
}

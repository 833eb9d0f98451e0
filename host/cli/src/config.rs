use std::path::PathBuf;

use clap::Subcommand;
use meridian_core::config::{self, EffectiveField};
use meridian_runtime::config_file::{self, ConfigFile};
use serde_json::json;

use crate::{print_json, print_line};

#[derive(Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a meridian.toml: one line for the first mistake, warnings for fields that do not act yet
    #[command(after_help = "Example: meridian config check /etc/meridian.toml")]
    Check {
        /// The file; without it, the one that an engine started here would read
        file: Option<PathBuf>,
    },
    /// Show every effective value and where it came from
    #[command(after_help = "Example: meridian config show | grep -v '# default'")]
    Show {
        /// The file; without it, the one that an engine started here would read
        file: Option<PathBuf>,
    },
    /// Print the reference of meridian.toml, Markdown
    #[command(after_help = "Example: meridian config reference > configuration.md")]
    Reference,
    /// Print the JSON Schema of meridian.toml, for editors
    #[command(after_help = "Example: meridian config schema > meridian.schema.json")]
    Schema,
}

pub(crate) fn run(command: ConfigCommand, json: bool) -> anyhow::Result<()> {
    match command {
        ConfigCommand::Check { file } => check(&config_file::load(file.as_deref())?, json),
        ConfigCommand::Show { file } => show(&config_file::load(file.as_deref())?, json),
        ConfigCommand::Reference if json => print_json(&json!({ "markdown": config::reference() })),
        ConfigCommand::Reference => Ok(print_line(config::reference().trim_end())?),
        ConfigCommand::Schema if json => print_json(config::schema()),
        ConfigCommand::Schema => Ok(print_line(&serde_json::to_string_pretty(config::schema())?)?),
    }
}

fn warnings(found: &ConfigFile) -> Vec<String> {
    found.parsed.without_effect().map(|field| format!("{field}: has no effect in this version")).collect()
}

fn check(found: &ConfigFile, json: bool) -> anyhow::Result<()> {
    let warnings = warnings(found);
    if json {
        return print_json(&json!({ "ok": true, "file": found.path, "warnings": warnings }));
    }
    for warning in &warnings {
        eprintln!("warning: {warning}");
    }
    Ok(print_line(&match &found.path {
        Some(path) => format!("ok       {}", path.display()),
        None => "ok       no file, the defaults hold".to_owned(),
    })?)
}

fn show(found: &ConfigFile, json: bool) -> anyhow::Result<()> {
    if json {
        let field = |EffectiveField { path, value, origin }: &EffectiveField| {
            let has_effect = config::has_effect(path);
            json!({ "field": path, "value": value, "origin": origin.to_string(), "has_effect": has_effect })
        };
        let fields: Vec<_> = found.parsed.fields.iter().map(field).collect();
        return print_json(&json!({ "ok": true, "file": found.path, "base_dir": found.base_dir, "fields": fields }));
    }
    print_line(&match &found.path {
        Some(path) => format!("# {}", path.display()),
        None => "# no file, the defaults hold".to_owned(),
    })?;
    // Dotted keys: what is printed is a valid meridian.toml.
    for EffectiveField { path, value, origin } in &found.parsed.fields {
        let mark = if config::has_effect(path) { "" } else { ", no effect in this version" };
        print_line(&format!("{:<58} # {origin}{mark}", format!("{path} = {}", config::inline(value))))?;
    }
    Ok(())
}

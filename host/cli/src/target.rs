//! The engines that a command asks: those of this user on this machine, one address, or those of a fleet file.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use meridian_admin::discovery::Found;
use meridian_core::text::printable;
use meridian_fleet::{Endpoint, EngineClient, Fleet, Member, processes};

/// The engine process to query or change.
#[derive(Args)]
pub(crate) struct Target {
    /// Choose the engine process with this id
    #[arg(long, global = true, value_name = "N", conflicts_with_all = ["address", "fleet"])]
    pub(crate) pid: Option<u32>,
    /// Choose the engine process that listens on this address: IP:port on loopback, unix:PATH or https://HOST:port
    #[arg(long, global = true, value_name = "ADDRESS", conflicts_with = "fleet")]
    pub(crate) address: Option<String>,
    /// Read the engines from this file; by default, those of this user on this machine
    #[arg(long, global = true, value_name = "FILE")]
    fleet: Option<PathBuf>,
    /// Choose the engine of the fleet file with this name
    #[arg(long, global = true, value_name = "NAME")]
    engine: Option<String>,
    /// Read the token from this file; by default, from the file that the engine's discovery file or the fleet file names
    #[arg(long, global = true, value_name = "PATH")]
    token_file: Option<PathBuf>,
    /// Accept certificates that an authority in this file has signed; by default, those that the system trusts
    #[arg(long, global = true, value_name = "PATH")]
    ca_file: Option<PathBuf>,
}

impl Target {
    /// The one selected process.
    pub(crate) fn one(&self) -> anyhow::Result<EngineClient> {
        if let Some(address) = &self.address {
            return Ok(self.known(EngineClient::known_at(address).context("--address")?));
        }
        if self.fleet.is_some() || self.engine.is_some() {
            return self.one_of_the_fleet();
        }
        let Found { processes: mut found, malformed } = processes();
        for line in &malformed {
            eprintln!("warning: {}", shown(line));
        }
        if let Some(pid) = self.pid {
            let position = found.iter().position(|process| process.pid == pid);
            let position = position.with_context(|| format!("{pid}: is no engine process with an admin listener"))?;
            return Ok(self.known(EngineClient::of(&found[position])?));
        }
        match (found.pop(), found.as_slice()) {
            (None, _) => bail!("{NONE_HERE}; name one by --address"),
            (Some(process), []) => Ok(self.known(EngineClient::of(&process)?)),
            (Some(last), others) => {
                let rows = others.iter().chain([&last]).map(|process| {
                    let address = process.admin.as_ref().or(process.socket.as_ref()).map_or("", String::as_str);
                    let rank = process.dp_rank.map_or_else(String::new, |rank| format!("  rank {rank}"));
                    format!("\n  --pid {}  {}  {}{rank}", process.pid, shown(&process.model), shown(address))
                });
                bail!(
                    "several engine processes run here, name one, or all of them by --all:{}",
                    rows.collect::<String>()
                )
            }
        }
    }

    /// Whether an option chooses the process.
    pub(crate) fn is_given(&self) -> bool {
        self.pid.is_some() || self.address.is_some() || self.fleet.is_some() || self.engine.is_some()
    }

    /// The options that find the same engines again, wherever they are read.
    pub(crate) fn words(&self) -> anyhow::Result<Vec<String>> {
        let mut words = Vec::new();
        for (name, path) in [("--fleet", &self.fleet), ("--token-file", &self.token_file), ("--ca-file", &self.ca_file)]
        {
            let Some(path) = path else { continue };
            let path = std::path::absolute(path).with_context(|| format!("{name}: {}", path.display()))?;
            let path = path.to_str().with_context(|| format!("{name}: {}: must be UTF-8", path.display()))?;
            words.extend([name.to_owned(), path.to_owned()]);
        }
        Ok(words)
    }

    /// The process that listens on an address of before.
    pub(crate) fn known_at(&self, address: &str) -> anyhow::Result<EngineClient> {
        Ok(self.known(EngineClient::known_at(address)?))
    }

    fn one_of_the_fleet(&self) -> anyhow::Result<EngineClient> {
        let mut engines = self.fleet()?.engines;
        if let Some(name) = &self.engine {
            let position = engines.iter().position(|engine| engine.name() == name);
            let position =
                position.with_context(|| format!("--engine: {name:?}: the fleet file has no such engine"))?;
            return Ok(engines.swap_remove(position));
        }
        match (engines.pop(), engines.len()) {
            (Some(only), 0) => Ok(only),
            (_, others) => {
                bail!("the fleet file has {} engines, name one by --engine, or all of them by --all", others + 1)
            }
        }
    }

    /// Every process, or the selected one.
    pub(crate) fn all(&self) -> anyhow::Result<Fleet> {
        if self.pid.is_some() || self.address.is_some() || self.engine.is_some() {
            return Ok(Fleet { engines: vec![self.one()?], malformed: Vec::new() });
        }
        self.fleet()
    }

    fn fleet(&self) -> anyhow::Result<Fleet> {
        let fleet = match &self.fleet {
            Some(path) => Fleet::from_file(path).context("--fleet")?,
            None if self.engine.is_some() => bail!("--engine: needs the fleet file, --fleet FILE"),
            None => Fleet::local()?,
        };
        let engines = fleet.engines.into_iter().map(|engine| self.known(engine)).collect();
        Ok(Fleet { engines, ..fleet })
    }

    /// With the files of the command line, which come before all others.
    fn known(&self, mut engine: EngineClient) -> EngineClient {
        if let Some(path) = &self.token_file {
            engine = engine.with_token_file(path);
        }
        match &self.ca_file {
            Some(path) if matches!(engine.endpoint(), Endpoint::Tls { .. }) => engine.with_ca_file(path),
            _ => engine,
        }
    }
}

pub(crate) const NONE_HERE: &str = "no engine process with an admin listener runs here as this user";

/// A text of another process, safe for a terminal, in one line.
pub(crate) fn shown(text: &str) -> String {
    printable(text).into_owned()
}

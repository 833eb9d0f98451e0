//! `meridian policy`: make, build, test and check policy components.

mod build;
mod check;
mod inspect;
mod language;
mod manifest;
mod new;
mod pull;
mod push;
mod test;
mod toolchain;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Subcommand;
use meridian_core::{MeridianConfig, PolicySource, SlotConfig, SlotName};
use meridian_engine::{Components, Origin, PolicyError, Terms};

use self::language::Language;

#[derive(Subcommand)]
pub(crate) enum PolicyCommand {
    /// Make a folder with a policy that builds and passes its tests
    #[command(after_help = "Examples:
  meridian policy new short-first --lang python
  meridian policy new gentle --lang rust --slot budget")]
    New(new::NewArgs),
    /// Build policies into components
    #[command(after_help = "\
DIR is a folder of `meridian policy new`, or a cargo package or workspace whose cdylib libraries and
examples are policies. The first build in a language fetches its pinned toolchain into the cache.

Examples:
  meridian policy build
  meridian policy build policies --out target/policies")]
    Build {
        /// Folder of a policy, or of a cargo package or workspace
        #[arg(default_value = ".")]
        dir: PathBuf,
        /// Write the components to this folder
        #[arg(long, default_value = "target/policies")]
        out: PathBuf,
    },
    /// Check a policy component: the engine would load it, it decides, and its state survives a swap
    #[command(after_help = "Examples:
  meridian policy check target/policies/output-first.wasm
  meridian policy check policy.wasm --slot dispatch --deadline-ms 5 --memory-mib 128
  meridian policy check policy.wasm --trusted-key release.pub")]
    Check(check::CheckArgs),
    /// Test a policy: its cases, and properties that hold of every policy
    #[command(after_help = "\
POLICY is a folder of `meridian policy new`, which is built first, the path of a component,
oci://HOST/NAME@sha256:DIGEST, or native:NAME. Cases are the TOML files of the folder `cases` beside it, or of --cases.

Examples:
  meridian policy test
  meridian policy test target/policies/srpt.wasm --cases policies/shipped/cases/srpt
  meridian policy test native:balanced --cases policies/shipped/cases/balanced")]
    Test(test::TestArgs),
    /// Time the decisions of a policy beside the native default and a call that does nothing
    #[command(after_help = "Examples:
  meridian policy bench target/policies/short-first.wasm
  meridian policy bench native:srpt --candidates 64,4096")]
    Bench {
        /// Path of a component, or native:NAME
        policy: meridian_bench::policies::PolicyArg,
        /// Time decisions over this many candidates, at most 65536
        #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [64, 256, 1024, 4096])]
        candidates: Vec<usize>,
    },
    /// Print what a component is: slots, columns, size, contract, signature
    #[command(after_help = "Examples:
  meridian policy inspect target/policies/balanced.wasm
  meridian policy inspect oci://ghcr.io/acme/srpt:1.2")]
    Inspect(inspect::InspectArgs),
    /// Upload a component to an OCI registry, in the layout of wkg, and print its digest
    #[command(after_help = "\
The credentials are those of `docker login`. FILE.minisig is uploaded too, if it exists.

Examples:
  meridian policy push srpt.wasm oci://ghcr.io/acme/srpt:1.2
  meridian policy push srpt.wasm oci://localhost:5000/srpt:1.2 --sign-key cosign.pem")]
    Push(push::PushArgs),
    /// Download a component from an OCI registry, and verify it
    #[command(after_help = "\
The digests are always verified; with --key, a signature too. The file of a minisign signature is
written beside the component.

Examples:
  meridian policy pull oci://ghcr.io/acme/srpt:1.2
  meridian policy pull oci://ghcr.io/acme/srpt@sha256:0123... -o srpt.wasm --key release.pub")]
    Pull(pull::PullArgs),
}

pub(crate) fn run(command: PolicyCommand, json: bool) -> anyhow::Result<()> {
    match command {
        PolicyCommand::New(args) => new::run(&args, json),
        PolicyCommand::Build { dir, out } => build::run(&dir, &out, json),
        PolicyCommand::Check(args) => check::run(&args, json),
        PolicyCommand::Test(args) => test::run(&args, json),
        PolicyCommand::Bench { policy, candidates } => crate::bench::time_policy(policy, candidates, json),
        PolicyCommand::Inspect(args) => inspect::run(&args, json),
        PolicyCommand::Push(args) => push::run(&args, json),
        PolicyCommand::Pull(args) => pull::run(&args, json),
    }
}

/// The component in a file, or in a registry under a reference with a digest.
fn open(components: &Components, source: &Path) -> Result<Origin, PolicyError> {
    match source.to_str().and_then(|source| PolicySource::of(source).registry()) {
        Some(reference) => components.open(reference, Path::new("")),
        None => components.file(source),
    }
}

/// As `deadline_ms` of a slot.
fn deadline_ms(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(ms) if ms > 0.0 && ms <= 1000.0 => Ok(ms),
        _ => Err("expected milliseconds above 0 and at most 1000".to_owned()),
    }
}

/// Limits in the place of a slot's defaults.
#[derive(Clone, Copy, Default)]
struct Allowed {
    deadline_ms: Option<f32>,
    memory_mib: Option<u32>,
}

impl Allowed {
    /// These, and where they say nothing, `others`.
    fn or(self, others: Self) -> Self {
        Self { deadline_ms: self.deadline_ms.or(others.deadline_ms), memory_mib: self.memory_mib.or(others.memory_mib) }
    }

    fn slot(self, slot: SlotName) -> SlotConfig {
        let slot = match slot {
            SlotName::Dispatch => SlotConfig::dispatch(),
            SlotName::Eviction => SlotConfig::eviction(),
            SlotName::Budget => SlotConfig::budget(),
        };
        let deadline_ms = self.deadline_ms.unwrap_or(slot.deadline_ms);
        let memory_mib = self.memory_mib.unwrap_or(slot.memory_mib);
        SlotConfig { deadline_ms, memory_mib, ..slot }
    }

    /// The terms of an engine.
    fn terms(self, slot: SlotName) -> Terms {
        Terms::of(&self.slot(slot), MeridianConfig::default().scheduler.targets())
    }

    /// Terms without a deadline that a busy machine could miss, with the same memory.
    fn unhurried(self, slot: SlotName) -> Terms {
        Terms::unhurried(&self.slot(slot), MeridianConfig::default().scheduler.targets())
    }

    fn deadline(self, slot: SlotName) -> Duration {
        Duration::from_secs_f32(self.slot(slot).deadline_ms / 1e3)
    }
}

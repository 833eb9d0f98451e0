use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Subcommand;
use meridian_core::signature::signature_path;
use meridian_core::{Budget, Description, Dispatch, Eviction, FaultKind, MeridianConfig, SlotConfig, SlotName};
use meridian_engine::{Components, Origin, Terms};
use meridian_runtime::Contender;
use meridian_wasm::{GuestKind, PolicyLimits, Signer, TrustedKeys, read_signature, signature_key_id};
use serde::Serialize;

use crate::{print_json, print_line};

#[derive(Subcommand)]
pub(crate) enum PolicyCommand {
    /// Build the policy crates in a folder into components
    #[command(after_help = "Example:\n  meridian policy build policies --out target/policies")]
    Build {
        /// Folder of a cargo package or workspace whose cdylib crates are policies
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
    Check {
        /// Path of the component
        file: PathBuf,
        /// Check this slot only; by default, check every slot that the component fills
        #[arg(long, value_parser = crate::ctl::slot_parser())]
        slot: Option<SlotName>,
        /// Pass these options to the policy, as one JSON object
        #[arg(long, default_value = "{}", value_name = "JSON")]
        config: String,
        /// Set the deadline of one decision in milliseconds; by default, the slot's own
        #[arg(long, value_name = "MS", value_parser = deadline_ms)]
        deadline_ms: Option<f32>,
        /// Limit linear memory to this many MiB; by default, the slot's own limit
        #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=1024))]
        memory_mib: Option<u32>,
        /// Trust this minisign public key or .pub file; one trusted key must have signed the component (FILE.minisig)
        #[arg(long = "trusted-key", value_name = "KEY_OR_FILE")]
        trusted_keys: Vec<String>,
    },
}

pub(crate) fn run(command: PolicyCommand, json: bool) -> anyhow::Result<()> {
    match command {
        PolicyCommand::Build { dir, out } => build(&dir, &out, json),
        PolicyCommand::Check { file, slot, config, deadline_ms, memory_mib, trusted_keys } => {
            let allowed = Allowed { deadline_ms, memory_mib };
            check(&file, slot, &config, allowed, &trusted_keys, json)
        }
    }
}

/// As `deadline_ms` of a slot.
fn deadline_ms(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(ms) if ms > 0.0 && ms <= 1000.0 => Ok(ms),
        _ => Err("expected milliseconds above 0 and at most 1000".to_owned()),
    }
}

/// What the command line gives in the place of a slot's defaults.
#[derive(Clone, Copy)]
struct Allowed {
    deadline_ms: Option<f32>,
    memory_mib: Option<u32>,
}

impl Allowed {
    fn terms(self, slot: &SlotConfig) -> Terms {
        let deadline_ms = self.deadline_ms.unwrap_or(slot.deadline_ms);
        let memory_mib = self.memory_mib.unwrap_or(slot.memory_mib);
        let slot = SlotConfig { deadline_ms, memory_mib, ..slot.clone() };
        Terms::of(&slot, MeridianConfig::default().scheduler.targets())
    }
}

#[derive(Serialize)]
struct Built {
    name: String,
    path: PathBuf,
    bytes: usize,
}

fn build(dir: &Path, out: &Path, json: bool) -> anyhow::Result<()> {
    let modules = cargo_build(dir)?;
    ensure!(!modules.is_empty(), "{}: no cdylib crate, expected one with `crate-type = [\"cdylib\"]`", dir.display());
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    for (name, module) in modules {
        let core = std::fs::read(&module).with_context(|| format!("cannot read {}", module.display()))?;
        let component = wit_component::ComponentEncoder::default()
            .module(&core)
            .and_then(|encoder| encoder.validate(true).encode())
            .with_context(|| format!("{name}: not a policy module (does it call export_policy!?)"))?;
        let path = out.join(format!("{name}.wasm"));
        std::fs::write(&path, &component).with_context(|| format!("cannot write {}", path.display()))?;
        let built = Built { name, bytes: component.len(), path };
        if json {
            print_json(&built)?;
        } else {
            print_line(&format!("{:<16} {:>6} bytes  {}", built.name, built.bytes, built.path.display()))?;
        }
    }
    Ok(())
}

/// Names and module files of the cdylib crates in `dir`. `CARGO` and `RUSTC` choose the toolchain.
fn cargo_build(dir: &Path) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(&cargo)
        .args([
            "build",
            "--release",
            "--target",
            "wasm32-unknown-unknown",
            "--message-format",
            "json-render-diagnostics",
        ])
        .current_dir(dir)
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {} in {}", cargo.display(), dir.display()))?;
    ensure!(output.status.success(), "cargo build failed in {}", dir.display());
    let mut modules = Vec::new();
    for line in output.stdout.split(|byte| *byte == b'\n') {
        let Ok(message) = serde_json::from_slice::<serde_json::Value>(line) else { continue };
        let is_cdylib = message["target"]["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|k| k == "cdylib"));
        if message["reason"] != "compiler-artifact" || !is_cdylib {
            continue;
        }
        let name = message["target"]["name"].as_str().unwrap_or_default().replace('_', "-");
        let files = message["filenames"].as_array().into_iter().flatten().filter_map(|file| file.as_str());
        modules.extend(files.filter(|file| file.ends_with(".wasm")).map(|file| (name.clone(), PathBuf::from(file))));
    }
    Ok(modules)
}

#[derive(Serialize)]
struct Checked {
    ok: bool,
    file: PathBuf,
    name: String,
    version: String,
    summary: String,
    slots: Vec<CheckedSlot>,
    bytes: usize,
    sha256: String,
    signature: Option<Signature>,
}

#[derive(Serialize)]
struct Signature {
    key_id: String,
    /// Without a trusted key the id is only what the signature says of itself.
    verified: bool,
    trusted_comment: Option<String>,
}

impl Signature {
    fn of(signer: Option<&Signer>, file: &Path) -> Option<Self> {
        match signer {
            Some(Signer { key_id, trusted_comment }) => {
                let trusted_comment = Some(trusted_comment.clone());
                Some(Self { key_id: key_id.clone(), verified: true, trusted_comment })
            }
            None => {
                let text = read_signature(&signature_path(file)).ok()??;
                let key_id = signature_key_id(&text)?;
                Some(Self { key_id, verified: false, trusted_comment: None })
            }
        }
    }

    fn told(&self) -> String {
        let Self { key_id, trusted_comment, .. } = self;
        match trusted_comment {
            Some(comment) => format!("by trusted key {key_id} ({comment})"),
            None => format!("by key {key_id}, not verified: expected --trusted-key to verify it"),
        }
    }
}

#[derive(Serialize)]
struct CheckedSlot {
    slot: SlotName,
    inputs: Vec<String>,
    /// Whether it decided any trial batch, or left every one to the default.
    decides: bool,
    /// How long the slowest trial batch took, and its candidates.
    slowest_ms: f64,
    slowest_candidates: usize,
    /// The longest that the slot would have given it.
    deadline_ms: f64,
    /// Bytes of state that a fresh instance took over; 0 for a policy that keeps none.
    state_bytes: usize,
}

fn check(
    file: &Path,
    slot: Option<SlotName>,
    config_json: &str,
    allowed: Allowed,
    trusted_keys: &[String],
    json: bool,
) -> anyhow::Result<()> {
    let parsed: serde_json::Value =
        serde_json::from_str(config_json).with_context(|| format!("--config: {config_json:?} is not JSON"))?;
    ensure!(parsed.is_object(), "--config: {config_json:?}: expected one JSON object");
    let keys = TrustedKeys::parse("--trusted-key", trusted_keys, ".".as_ref())?;
    let origin = Components::new(None, keys).file(file)?;
    let (mut description, mut slots) = (Description::default(), Vec::new());
    for slot in slot.map_or_else(|| origin.slots(), |slot| Ok(vec![slot]))? {
        let (described, checked) = match slot {
            SlotName::Dispatch => check_slot::<Dispatch>(&origin, config_json, allowed.terms(&SlotConfig::dispatch())),
            SlotName::Eviction => check_slot::<Eviction>(&origin, config_json, allowed.terms(&SlotConfig::eviction())),
            SlotName::Budget => check_slot::<Budget>(&origin, config_json, allowed.terms(&SlotConfig::budget())),
        }?;
        description = described;
        slots.push(checked);
    }
    let Description { name, version, summary } = description;
    let component = origin.component().expect("it came from a file");
    let (bytes, sha256) = (component.size_bytes(), component.sha256().to_owned());
    let signature = Signature::of(component.signer(), file);
    let checked = Checked { ok: true, file: file.to_owned(), name, version, summary, slots, bytes, sha256, signature };
    if json {
        return print_json(&checked);
    }
    print_line(&format!("ok       {} {} ({} bytes)", checked.name, checked.version, checked.bytes))?;
    print_line(&format!("summary  {}", checked.summary))?;
    for slot in &checked.slots {
        print_slot(slot)?;
    }
    print_line(&format!("sha256   {}", checked.sha256))?;
    let signed = checked.signature.as_ref().map_or_else(|| "no".to_owned(), Signature::told);
    Ok(print_line(&format!("signed   {signed}"))?)
}

fn print_slot(checked: &CheckedSlot) -> anyhow::Result<()> {
    let CheckedSlot { slot, inputs, decides, slowest_ms, slowest_candidates, deadline_ms, state_bytes } = checked;
    let inputs = if inputs.is_empty() { "none".to_owned() } else { inputs.join(", ") };
    let answers = if *decides { "decides" } else { "leaves every trial batch to the default" };
    print_line(&format!("{:<8} {answers}; inputs: {inputs}", slot.label()))?;
    let took = format!("{slowest_candidates} candidates took {slowest_ms:.2} ms, deadline {deadline_ms} ms");
    print_line(&format!("         slowest trial batch: {took}"))?;
    print_line(&match state_bytes {
        0 => "         keeps no state over a swap".to_owned(),
        bytes => format!("         hands over its state: {bytes} bytes"),
    })?;
    if slowest_ms > deadline_ms {
        eprintln!("warning: slot {}: {took}: in an engine a decision this slow is a fault", slot.label());
    }
    Ok(())
}

/// Start the component in slot `K`, and try it as the engine would before it gives it traffic. Then hand its state to a
/// fresh instance, as a swap would, and try that one.
fn check_slot<K: GuestKind>(
    origin: &Origin,
    config_json: &str,
    terms: Terms,
) -> anyhow::Result<(Description, CheckedSlot)> {
    let (file, limits) = (origin.source(), terms.limits);
    let start = |limits: PolicyLimits| -> anyhow::Result<Contender<K>> {
        Ok(origin.start(Terms { limits, ..terms }, config_json)?)
    };
    let slot = K::NAME.label();
    let failed = |what: &str, fault: &dyn std::fmt::Display| anyhow::anyhow!("{file}: slot {slot}: {what}{fault}");
    let trial = start(limits)?.try_out().map_err(|fault| failed("", &fault))?;
    // The clock of an engine says something about this machine only: what is slower gets a warning.
    let patient = PolicyLimits { deadline: limits.trial, handover: limits.trial, ..limits };
    let (mut contender, mut fresh) = (start(patient)?, start(patient)?);
    contender.try_out().map_err(|fault| failed("", &fault))?;
    let (state, snapshot_took) = timed(|| contender.policy.snapshot());
    let state = state.map_err(|fault| failed("snapshot failed: ", &fault))?;
    let (restored, restore_took) = timed(|| fresh.policy.restore(&state));
    match restored {
        // It keeps none, and may say so.
        Err(fault) if state.is_empty() && fault.kind == FaultKind::Init => fresh = start(patient)?,
        restored => restored.map_err(|fault| {
            failed(&format!("restore failed on the {} bytes of its own snapshot: ", state.len()), &fault)
        })?,
    }
    fresh.try_out().map_err(|fault| failed("after a restore it ", &fault))?;
    let most = limits.deadline.min(limits.handover);
    for (what, took) in [("snapshot", snapshot_took), ("restore", restore_took)] {
        if took > most {
            let (took, most) = (took.as_secs_f64() * 1e3, most.as_secs_f64() * 1e3);
            eprintln!(
                "warning: slot {slot}: {what} took {took:.2} ms: past {most} ms a swap goes on without the state"
            );
        }
    }
    let checked = CheckedSlot {
        slot: K::NAME,
        inputs: contender.policy.inputs().iter().map(|column| format!("{column:?}")).collect(),
        decides: trial.decides,
        slowest_ms: trial.slowest.as_secs_f64() * 1e3,
        slowest_candidates: trial.slowest_candidates,
        deadline_ms: limits.deadline.as_secs_f64() * 1e3,
        state_bytes: state.len(),
    };
    Ok((contender.policy.description().clone(), checked))
}

fn timed<R>(call: impl FnOnce() -> R) -> (R, Duration) {
    let started = Instant::now();
    let returned = call();
    (returned, started.elapsed())
}

//! `meridian policy check`: try a component as an engine would.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use meridian_bench::grid::below_floor;
use meridian_core::signature::{FetchedComponent, signature_path};
use meridian_core::slot::Contender;
use meridian_core::{Budget, Description, Dispatch, Eviction, FaultKind, SlotName};
use meridian_engine::{Components, Origin, Terms};
use meridian_wasm::{GuestKind, PolicyLimits, Signer, TrustedKeys, read_signature, signature_key_id};
use serde::Serialize;

use super::Allowed;
use crate::{print_json, print_line};

#[derive(Args)]
pub(crate) struct CheckArgs {
    /// Path of the component, or oci://HOST/NAME@sha256:DIGEST
    file: PathBuf,
    /// Check this slot only; by default, check every slot that the component fills
    #[arg(long, value_parser = crate::ctl::slot_parser())]
    slot: Option<SlotName>,
    /// Pass these options to the policy, as one JSON object
    #[arg(long, default_value = "{}", value_name = "JSON")]
    config: String,
    /// Set the deadline of one decision in milliseconds; by default, the slot's own
    #[arg(long, value_name = "MS", value_parser = super::deadline_ms)]
    deadline_ms: Option<f32>,
    /// Limit linear memory to this many MiB; by default, the slot's own limit
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=1024))]
    memory_mib: Option<u32>,
    /// Trust this minisign public key or .pub file; one trusted key must have signed the component (FILE.minisig)
    #[arg(long = "trusted-key", value_name = "KEY_OR_FILE")]
    trusted_keys: Vec<String>,
}

#[derive(Serialize)]
struct Checked {
    ok: bool,
    file: PathBuf,
    name: String,
    version: String,
    summary: String,
    /// Of a shipped policy that falls below the floor: where, and by how much.
    #[serde(skip_serializing_if = "Option::is_none")]
    below_floor: Option<&'static str>,
    slots: Vec<CheckedSlot>,
    bytes: usize,
    sha256: String,
    signature: Option<Signature>,
}

#[derive(Serialize)]
pub(super) struct Signature {
    key_id: String,
    /// Without a trusted key the id is only what the signature says of itself.
    verified: bool,
    trusted_comment: Option<String>,
}

impl Signature {
    pub(super) fn of(signer: Option<&Signer>, file: &Path) -> Option<Self> {
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

    /// That of a component from a registry.
    pub(super) fn of_fetched(signer: Option<&Signer>, fetched: &FetchedComponent) -> Option<Self> {
        if let Some(Signer { key_id, trusted_comment }) = signer {
            return Some(Self {
                key_id: key_id.clone(),
                verified: true,
                trusted_comment: Some(trusted_comment.clone()),
            });
        }
        let minisign = fetched.minisign.iter().find_map(|text| signature_key_id(text));
        // A signature of a manifest does not say whose it is.
        let unnamed = || fetched.cosign.first().map(|_| "of cosign".to_owned());
        let key_id = minisign.or_else(unnamed)?;
        Some(Self { key_id, verified: false, trusted_comment: None })
    }

    pub(super) fn told(&self) -> String {
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

pub(crate) fn run(args: &CheckArgs, json: bool) -> anyhow::Result<()> {
    let CheckArgs { file, slot, config: config_json, deadline_ms, memory_mib, trusted_keys } = args;
    let allowed = Allowed { deadline_ms: *deadline_ms, memory_mib: *memory_mib };
    let parsed: serde_json::Value =
        serde_json::from_str(config_json).with_context(|| format!("--config: {config_json:?} is not JSON"))?;
    ensure!(parsed.is_object(), "--config: {config_json:?}: expected one JSON object");
    let keys = TrustedKeys::parse("--trusted-key", trusted_keys, ".".as_ref())?;
    let origin = super::open(&Components::new(None, keys), file)?;
    let (mut description, mut slots) = (Description::default(), Vec::new());
    for slot in slot.map_or_else(|| origin.slots(), |slot| Ok(vec![slot]))? {
        let terms = allowed.terms(slot);
        let (described, checked) = match slot {
            SlotName::Dispatch => check_slot::<Dispatch>(&origin, config_json, terms),
            SlotName::Eviction => check_slot::<Eviction>(&origin, config_json, terms),
            SlotName::Budget => check_slot::<Budget>(&origin, config_json, terms),
        }?;
        description = described;
        slots.push(checked);
    }
    let Description { name, version, summary } = description;
    let component = origin.component().expect("it is no native policy");
    let (bytes, sha256) = (component.size_bytes(), component.sha256().to_owned());
    let signature = Signature::of(component.signer(), file);
    let below_floor = below_floor(&name);
    let checked =
        Checked { ok: true, below_floor, file: file.clone(), name, version, summary, slots, bytes, sha256, signature };
    if json {
        return print_json(&checked);
    }
    print_line(&format!("ok       {} {} ({} bytes)", checked.name, checked.version, checked.bytes))?;
    print_line(&format!("summary  {}", checked.summary))?;
    if let Some(floor) = &checked.below_floor {
        print_line(&format!("floor    {floor}"))?;
    }
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

//! `meridian policy inspect`: what a component is, even one that an engine would refuse.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use meridian_core::oci::OciReference;
use meridian_core::{Budget, CONTRACT, Dispatch, Eviction, PolicySource, SlotName};
use meridian_engine::{Components, Origin};
use meridian_registry::{Limits, Registry, Signatures};
use meridian_wasm::{GuestKind, MAX_COMPONENT_BYTES, PolicyComponent, TrustedKeys, read_regular, sha256_of};
use serde::Serialize;
use wit_component::DecodedWasm;

use super::Allowed;
use super::check::Signature;
use crate::{print_json, print_line};

#[derive(Args)]
pub(crate) struct InspectArgs {
    /// Path of the component, or oci://HOST/NAME with :TAG, @sha256:DIGEST or both
    file: PathBuf,
    /// Verify the signature with this key: a minisign public key, a PEM public key (cosign), or a file with one of them
    #[arg(long = "trusted-key", value_name = "KEY_OR_FILE")]
    trusted_keys: Vec<String>,
    /// Limit linear memory to this many MiB when the component is asked for its columns
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1024))]
    memory_mib: u32,
}

#[derive(Serialize)]
struct Inspected {
    file: PathBuf,
    bytes: usize,
    sha256: String,
    /// Version of the contract that it was built with; empty where it was refused.
    contract: &'static str,
    /// Interfaces with their versions.
    exports: Vec<String>,
    /// A policy has none.
    imports: Vec<String>,
    signature: Option<Signature>,
    /// Why an engine would not load it; the fields behind it are empty then.
    refused: Option<String>,
    /// Reading, checking and compiling it.
    load_ms: f64,
    /// Starting the first instance of its first slot.
    start_ms: f64,
    name: String,
    version: String,
    summary: String,
    slots: Vec<InspectedSlot>,
}

#[derive(Serialize)]
struct InspectedSlot {
    slot: SlotName,
    columns: Vec<String>,
}

pub(super) fn run(args: &InspectArgs, json: bool) -> anyhow::Result<()> {
    let InspectArgs { file, trusted_keys, memory_mib } = args;
    let shown = file.display();
    let fetched = match file.to_str().and_then(|source| PolicySource::of(source).registry()) {
        Some(reference) => {
            Some(Registry::new(Limits::default()).pull(&OciReference::parse(reference)?, Signatures::Fetch)?)
        }
        None => None,
    };
    let bytes = match &fetched {
        Some(fetched) => fetched.bytes.clone(),
        None => {
            let read = read_regular(file, MAX_COMPONENT_BYTES).with_context(|| format!("{shown}: cannot read"))?;
            let Some(bytes) = read else {
                bail!("{shown}: too large, expected a component of at most {MAX_COMPONENT_BYTES} bytes");
            };
            bytes
        }
    };
    let (exports, imports) = interfaces(&bytes).with_context(|| shown.to_string())?;
    let keys = TrustedKeys::parse("--trusted-key", trusted_keys, ".".as_ref())?;
    let mut inspected = Inspected {
        file: fetched.as_ref().map_or_else(|| file.clone(), |fetched| PathBuf::from(&fetched.source)),
        bytes: bytes.len(),
        sha256: sha256_of(&bytes),
        contract: "",
        exports,
        imports,
        signature: None,
        refused: None,
        load_ms: 0.0,
        start_ms: 0.0,
        name: String::new(),
        version: String::new(),
        summary: String::new(),
        slots: Vec::new(),
    };
    let started = Instant::now();
    let components = Components::new(None, keys);
    let opened = match &fetched {
        Some(fetched) => components.fetched(fetched),
        None => components.file(file),
    };
    match opened {
        Ok(origin) => {
            inspected.load_ms = ms_since(started);
            inspected.contract = CONTRACT;
            let signer = origin.component().and_then(PolicyComponent::signer);
            inspected.signature = match &fetched {
                Some(fetched) => Signature::of_fetched(signer, fetched),
                None => Signature::of(signer, file),
            };
            if let Err(refusal) = ask(&origin, *memory_mib, &mut inspected) {
                inspected.refused = Some(format!("{refusal:#}"));
            }
        }
        Err(refusal) => inspected.refused = Some(refusal.to_string()),
    }
    if json { print_json(&inspected) } else { print(&inspected) }
}

/// Names of the interfaces that a component exports and imports.
pub(super) fn interfaces(bytes: &[u8]) -> anyhow::Result<(Vec<String>, Vec<String>)> {
    let DecodedWasm::Component(resolve, world) = wit_component::decode(bytes).context("not a WebAssembly component")?
    else {
        bail!("a WIT package, expected a component");
    };
    let world = &resolve.worlds[world];
    let names =
        |items: &mut dyn Iterator<Item = &wit_parser::WorldKey>| items.map(|key| resolve.name_world_key(key)).collect();
    Ok((names(&mut world.exports.keys()), names(&mut world.imports.keys())))
}

/// What the component says of itself, and the columns that it reads in each slot.
fn ask(origin: &Origin, memory_mib: u32, inspected: &mut Inspected) -> anyhow::Result<()> {
    for slot in origin.slots()? {
        let columns = match slot {
            SlotName::Dispatch => columns::<Dispatch>(origin, memory_mib, inspected),
            SlotName::Eviction => columns::<Eviction>(origin, memory_mib, inspected),
            SlotName::Budget => columns::<Budget>(origin, memory_mib, inspected),
        }?;
        inspected.slots.push(InspectedSlot { slot, columns });
    }
    Ok(())
}

fn columns<K: GuestKind>(origin: &Origin, memory_mib: u32, inspected: &mut Inspected) -> anyhow::Result<Vec<String>> {
    let allowed = Allowed { memory_mib: Some(memory_mib), ..Allowed::default() };
    let started = Instant::now();
    let policy = origin.policy::<K>(allowed.unhurried(K::NAME), "{}")?;
    if inspected.slots.is_empty() {
        inspected.start_ms = ms_since(started);
    }
    let description = policy.description();
    inspected.name.clone_from(&description.name);
    inspected.version.clone_from(&description.version);
    inspected.summary.clone_from(&description.summary);
    Ok(policy.inputs().iter().map(|column| format!("{column:?}")).collect())
}

fn ms_since(started: Instant) -> f64 {
    started.elapsed().as_secs_f64() * 1e3
}

fn print(inspected: &Inspected) -> anyhow::Result<()> {
    let Inspected { file, bytes, sha256, exports, imports, signature, refused, load_ms, start_ms, .. } = inspected;
    let Inspected { name, version, summary, contract, slots, .. } = inspected;
    let list = |items: &[String]| if items.is_empty() { "none".to_owned() } else { items.join(", ") };
    print_line(&format!("file     {} ({bytes} bytes)", file.display()))?;
    print_line(&format!("sha256   {sha256}"))?;
    print_line(&format!("exports  {}", list(exports)))?;
    print_line(&format!("imports  {}", list(imports)))?;
    print_line(&format!("signed   {}", signature.as_ref().map_or_else(|| "no".to_owned(), Signature::told)))?;
    if let Some(refusal) = refused {
        return Ok(print_line(&format!("refused  {refusal}"))?);
    }
    print_line(&format!("loads    compiled in {load_ms:.0} ms, an instance starts in {start_ms:.2} ms"))?;
    print_line(&format!("policy   {name} {version}, contract {contract}: {summary}"))?;
    for InspectedSlot { slot, columns } in slots {
        print_line(&format!("slot     {}, columns: {}", slot.label(), list(columns)))?;
    }
    Ok(())
}

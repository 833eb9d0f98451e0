//! `meridian policy pull`: a component and its signature out of a registry.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use meridian_core::oci::OciReference;
use meridian_core::signature::signature_path;
use meridian_registry::{Limits, Registry, Signatures};
use meridian_wasm::{TrustedKeys, sha256_of};
use serde::Serialize;

use super::check::Signature;
use crate::{print_json, print_line};

#[derive(Args)]
pub(crate) struct PullArgs {
    /// Where it is: oci://HOST[:PORT]/NAME with :TAG, @sha256:DIGEST or both; then the digest decides
    reference: String,
    /// Write the component to this file; by default, to NAME.wasm in the working directory
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    output: Option<PathBuf>,
    /// Require a signature by this key: a minisign public key, a PEM public key (cosign), or a file with one of them
    #[arg(long = "key", visible_alias = "trusted-key", value_name = "KEY_OR_FILE")]
    keys: Vec<String>,
}

#[derive(Serialize)]
struct Pulled {
    ok: bool,
    file: PathBuf,
    /// For a configuration.
    source: String,
    bytes: usize,
    sha256: String,
    signature: Option<Signature>,
}

pub(super) fn run(args: &PullArgs, json: bool) -> anyhow::Result<()> {
    let PullArgs { reference, output, keys } = args;
    let reference = OciReference::parse(reference)?;
    let keys = TrustedKeys::parse("--key", keys, ".".as_ref())?;
    let fetched = Registry::new(Limits::default()).pull(&reference, Signatures::Fetch)?;
    let source = reference.with_digest(&fetched.manifest_digest).without_tag().to_string();
    let signer = keys.signer_of(&fetched).with_context(|| source.clone())?;
    let name = reference.repository().rsplit('/').next().unwrap_or_default();
    let file = output.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.wasm")));
    // First, so that an engine that watches the component finds it.
    if let [minisign, ..] = fetched.minisign.as_slice() {
        write(&signature_path(&file), minisign.as_bytes())?;
    }
    write(&file, &fetched.bytes)?;
    let signature = Signature::of_fetched(signer.as_ref(), &fetched);
    let (bytes, sha256) = (fetched.bytes.len(), sha256_of(&fetched.bytes));
    let pulled = Pulled { ok: true, file, source, bytes, sha256, signature };
    if json {
        return print_json(&pulled);
    }
    print_line(&format!("pulled   {} ({} bytes)", pulled.file.display(), pulled.bytes))?;
    print_line(&format!("sha256   {}", pulled.sha256))?;
    print_line(&format!("signed   {}", pulled.signature.as_ref().map_or_else(|| "no".to_owned(), Signature::told)))?;
    Ok(print_line(&format!("source   {}", pulled.source))?)
}

/// Aside and renamed: nobody sees half a file.
fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(format!(".{}.tmp", std::process::id()));
    let aside = PathBuf::from(aside);
    let written = File::create(&aside)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&aside, path));
    written
        .inspect_err(|_| drop(std::fs::remove_file(&aside)))
        .with_context(|| format!("{}: cannot write", path.display()))
}

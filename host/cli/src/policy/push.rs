//! `meridian policy push`: a component and its signatures into a registry.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use meridian_core::oci::OciReference;
use meridian_core::signature::{MAX_SIGNATURE_BYTES, signature_path};
use meridian_registry::{Interfaces, Limits, Registry, Signing, SigningKey};
use meridian_wasm::{MAX_COMPONENT_BYTES, read_regular, sha256_of};
use serde::Serialize;

use super::inspect::interfaces;
use crate::{print_json, print_line};

/// Largest file with a private key, bytes.
const MAX_KEY_BYTES: u64 = 16 << 10;

#[derive(Args)]
pub(crate) struct PushArgs {
    /// Path of the component
    file: PathBuf,
    /// Where to put it: oci://HOST[:PORT]/NAME:TAG
    reference: String,
    /// Sign the manifest as `cosign sign --key` does, with this private key: PKCS #8 in PEM, ECDSA P-256, not encrypted
    #[arg(long, value_name = "FILE")]
    sign_key: Option<PathBuf>,
}

#[derive(Serialize)]
struct Pushed {
    ok: bool,
    /// For a configuration.
    source: String,
    reference: String,
    bytes: usize,
    sha256: String,
    /// `minisign`, `cosign`.
    signatures: Vec<&'static str>,
}

pub(super) fn run(args: &PushArgs, json: bool) -> anyhow::Result<()> {
    let PushArgs { file, reference, sign_key } = args;
    let reference = OciReference::parse(reference)?;
    let bytes = read(file, MAX_COMPONENT_BYTES)?;
    let (exports, imports) = interfaces(&bytes).with_context(|| file.display().to_string())?;
    let minisig = signature_path(file);
    let minisign = if minisig.exists() { Some(text(&minisig, MAX_SIGNATURE_BYTES as u64)?) } else { None };
    let key = sign_key.as_deref().map(signing_key).transpose()?;
    let signatures: Vec<_> =
        [minisign.as_ref().map(|_| "minisign"), key.as_ref().map(|_| "cosign")].into_iter().flatten().collect();
    let signing = Signing { minisign, key: key.as_ref() };
    let registry = Registry::new(Limits::push());
    let pushed = registry.push(&reference, &bytes, &Interfaces { exports, imports }, &signing)?;
    let source = pushed.without_tag().to_string();
    let pushed = Pushed {
        ok: true,
        source,
        reference: reference.to_string(),
        bytes: bytes.len(),
        sha256: sha256_of(&bytes),
        signatures,
    };
    if json {
        return print_json(&pushed);
    }
    let signed = if pushed.signatures.is_empty() { "no".to_owned() } else { pushed.signatures.join(", ") };
    print_line(&format!("pushed   {} ({} bytes)", pushed.reference, pushed.bytes))?;
    print_line(&format!("sha256   {}", pushed.sha256))?;
    print_line(&format!("signed   {signed}"))?;
    Ok(print_line(&format!("source   {}", pushed.source))?)
}

fn signing_key(path: &Path) -> anyhow::Result<SigningKey> {
    let pem = text(path, MAX_KEY_BYTES).context("--sign-key")?;
    SigningKey::from_pem(&pem).map_err(|reason| anyhow!("--sign-key: {}: {reason}", path.display()))
}

fn text(path: &Path, limit: u64) -> anyhow::Result<String> {
    let bytes = read(path, limit)?;
    String::from_utf8(bytes).map_err(|_| anyhow!("{}: not UTF-8 text", path.display()))
}

fn read(path: &Path, limit: u64) -> anyhow::Result<Vec<u8>> {
    let shown = path.display();
    match read_regular(path, limit).with_context(|| format!("{shown}: cannot read"))? {
        Some(bytes) => Ok(bytes),
        None => bail!("{shown}: too large, expected at most {limit} bytes"),
    }
}

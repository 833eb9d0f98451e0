//! The signatures of a component: where they are, and how large they may be. The component host verifies them.

use std::path::{Path, PathBuf};

/// A component from a registry, with the signatures that the registry keeps beside it. The bytes are those that the manifest
/// names, and the manifest is that of `manifest_digest`; nobody has verified the signatures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetchedComponent {
    /// Its reference: `oci://HOST/NAME@sha256:DIGEST`.
    pub source: String,
    /// `sha256:` and the digest of the manifest in lower-case hexadecimal.
    pub manifest_digest: String,
    /// The component.
    pub bytes: Vec<u8>,
    /// Texts that `minisign -S` writes, each over the bytes.
    pub minisign: Vec<String>,
    /// Signatures as cosign makes them, each over a text that names the manifest.
    pub cosign: Vec<CosignSignature>,
}

/// A signature as `cosign sign --key` puts it beside a manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CosignSignature {
    /// The signed text: JSON that names the digest of the manifest.
    pub payload: Vec<u8>,
    /// ECDSA over P-256 and SHA-256, ASN.1 DER in base64.
    pub signature: String,
}

/// Largest signature, bytes. minisign allows 1024 bytes of untrusted and 8192 of trusted comment.
pub const MAX_SIGNATURE_BYTES: usize = 16 << 10;

/// The path of the signature of a component's file.
///
/// ```
/// use meridian_core::signature::signature_path;
///
/// assert_eq!(signature_path("policy.wasm".as_ref()), std::path::Path::new("policy.wasm.minisig"));
/// ```
#[must_use]
pub fn signature_path(component: &Path) -> PathBuf {
    let mut path = component.as_os_str().to_owned();
    path.push(".minisig");
    path.into()
}

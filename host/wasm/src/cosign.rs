//! Signatures of manifests as `cosign sign --key` makes them without a transparency log: ECDSA over P-256 and SHA-256 of a
//! small JSON document, which names the digest of the manifest.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use meridian_core::signature::CosignSignature;
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::cache::hex;

const BEGIN: &str = "-----BEGIN ";
const BEGIN_PUBLIC: &str = "-----BEGIN PUBLIC KEY-----";

/// What stands before the point in the DER of a P-256 public key (RFC 5480): its length, the algorithm, the curve.
const SPKI_PREFIX: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce,
    0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// An uncompressed point: 4 and two coordinates.
const POINT_BYTES: usize = 65;

/// A public key that verifies signatures of manifests.
#[derive(Clone, Debug)]
pub(crate) struct ManifestKey {
    point: Vec<u8>,
}

impl ManifestKey {
    /// Whether a text is PEM, of whatever.
    pub(crate) fn is_pem(text: &str) -> bool {
        text.starts_with(BEGIN)
    }

    /// The key and its id.
    pub(crate) fn from_pem(text: &str) -> Result<(String, Self), String> {
        let body = text.split_once(BEGIN_PUBLIC).and_then(|(_, rest)| rest.split_once("-----END PUBLIC KEY-----"));
        let Some((body, _)) = body else { return Err("PEM without a public key".to_owned()) };
        let base64: String = body.split_whitespace().collect();
        let der = BASE64_STANDARD.decode(base64).map_err(|_| "malformed PEM".to_owned())?;
        let point = der.strip_prefix(&SPKI_PREFIX).filter(|point| point.len() == POINT_BYTES && point[0] == 4);
        let point = point.ok_or("a public key of another kind")?.to_vec();
        let id = hex(&Sha256::digest(&der)[..8]).to_uppercase();
        Ok((id, Self { point }))
    }

    /// Whether this is a signature by the key of the manifest with this digest. Nothing of the document is read before
    /// its signature is verified.
    pub(crate) fn has_signed(&self, manifest_digest: &str, signature: &CosignSignature) -> bool {
        let CosignSignature { payload, signature } = signature;
        let Ok(signature) = BASE64_STANDARD.decode(signature.trim()) else { return false };
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &self.point);
        key.verify(payload, &signature).is_ok()
            && serde_json::from_slice(payload).is_ok_and(|Payload { critical }| {
                critical.kind == "cosign container image signature"
                    && critical.image.docker_manifest_digest == manifest_digest
            })
    }
}

#[derive(Deserialize)]
struct Payload {
    critical: Critical,
}

#[derive(Deserialize)]
struct Critical {
    image: Image,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Image {
    docker_manifest_digest: String,
}

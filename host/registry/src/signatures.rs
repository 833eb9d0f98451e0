//! Signatures in the registry: each kind has a tag of its own beside the manifest that it is of.

use std::collections::BTreeMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use meridian_core::oci::{OciReference, is_digest};
use meridian_core::signature::{CosignSignature, MAX_SIGNATURE_BYTES};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
use serde_json::json;

use crate::digest::check;
use crate::manifest::{Descriptor, MANIFEST, MAX_MANIFEST_BYTES, Manifest};
use crate::session::Session;
use crate::{Problem, RegistryError};

/// Most signatures of one kind that are looked at.
const MAX_SIGNATURES: usize = 16;

const COSIGN_ANNOTATION: &str = "dev.cosignproject.cosign/signature";

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Minisign,
    Cosign,
}

impl Kind {
    pub(crate) fn tag(self, manifest_digest: &str) -> String {
        let end = match self {
            Self::Minisign => "minisig",
            Self::Cosign => "sig",
        };
        format!("{}.{end}", manifest_digest.replace(':', "-"))
    }

    fn media_type(self) -> &'static str {
        match self {
            Self::Minisign => "application/vnd.meridian.minisig",
            Self::Cosign => "application/vnd.dev.cosign.simplesigning.v1+json",
        }
    }

    fn what(self) -> &'static str {
        match self {
            Self::Minisign => "its minisign signature",
            Self::Cosign => "its cosign signature",
        }
    }

    /// A document that describes the layers, as registries want one.
    fn config(self, layers: &[Descriptor]) -> (Descriptor, Vec<u8>) {
        let (media_type, bytes) = match self {
            Self::Minisign => ("application/vnd.oci.empty.v1+json", b"{}".to_vec()),
            Self::Cosign => {
                let digests: Vec<_> = layers.iter().map(|layer| &layer.digest).collect();
                let document = json!({
                    "architecture": "",
                    "config": {},
                    "created": "0001-01-01T00:00:00Z",
                    "history": digests.iter().map(|_| json!({ "created": "0001-01-01T00:00:00Z" })).collect::<Vec<_>>(),
                    "os": "",
                    "rootfs": { "type": "layers", "diff_ids": digests },
                });
                ("application/vnd.oci.image.config.v1+json", document.to_string().into_bytes())
            }
        };
        (Descriptor::of(media_type, &bytes), bytes)
    }
}

/// A signature as the registry has it.
pub(crate) struct Stored {
    pub(crate) layer: Descriptor,
    pub(crate) bytes: Vec<u8>,
}

impl Stored {
    pub(crate) fn minisign(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        Self { layer: Descriptor::of(Kind::Minisign.media_type(), &bytes), bytes }
    }

    fn cosign(signature: CosignSignature) -> Self {
        let CosignSignature { payload, signature } = signature;
        let mut layer = Descriptor::of(Kind::Cosign.media_type(), &payload);
        layer.annotations = BTreeMap::from([(COSIGN_ANNOTATION.to_owned(), signature)]);
        Self { layer, bytes: payload }
    }

    fn into_text(self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    fn into_cosign(self) -> Option<CosignSignature> {
        let signature = self.layer.annotations.get(COSIGN_ANNOTATION)?.clone();
        Some(CosignSignature { payload: self.bytes, signature })
    }
}

/// The signatures of a manifest, unverified.
pub(crate) async fn fetch(
    session: &Session<'_>,
    manifest_digest: &str,
) -> Result<(Vec<String>, Vec<CosignSignature>), Problem> {
    let minisign = layers(session, Kind::Minisign, manifest_digest).await?;
    let cosign = layers(session, Kind::Cosign, manifest_digest).await?;
    Ok((
        minisign.into_iter().map(Stored::into_text).collect(),
        cosign.into_iter().filter_map(Stored::into_cosign).collect(),
    ))
}

/// The signatures of one kind, unverified; none where the registry has no such tag.
async fn layers(session: &Session<'_>, kind: Kind, manifest_digest: &str) -> Result<Vec<Stored>, Problem> {
    let what = kind.what();
    let path = format!("manifests/{}", kind.tag(manifest_digest));
    let Some(bytes) = session.get(what, &path, Some(MANIFEST), MAX_MANIFEST_BYTES).await? else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for layer in Manifest::parse(&bytes)?.layers.into_iter().take(MAX_SIGNATURES) {
        if layer.media_type != kind.media_type() || !is_digest(&layer.digest) {
            continue;
        }
        let path = format!("blobs/{}", layer.digest);
        let Some(bytes) = session.get(what, &path, None, MAX_SIGNATURE_BYTES as u64).await? else { continue };
        check(what, &bytes, &layer.digest)?;
        found.push(Stored { layer, bytes });
    }
    Ok(found)
}

/// Add a signature to those that the registry has of this kind.
pub(crate) async fn push(
    session: &Session<'_>,
    kind: Kind,
    manifest_digest: &str,
    signature: Stored,
) -> Result<(), Problem> {
    let mut present = layers(session, kind, manifest_digest).await?;
    if present.iter().any(|stored| stored.layer == signature.layer) {
        return Ok(());
    }
    session.put_blob(kind.what(), &signature.bytes).await?;
    present.push(signature);
    let layers: Vec<_> = present.into_iter().map(|stored| stored.layer).collect();
    let (config, document) = kind.config(&layers);
    session.put_blob(kind.what(), &document).await?;
    let manifest = Manifest::new(config, layers).to_bytes();
    session.put_manifest(kind.what(), &kind.tag(manifest_digest), &manifest).await
}

/// A private key that signs as `cosign sign --key` does: ECDSA over P-256, without a transparency log.
pub struct SigningKey {
    pair: EcdsaKeyPair,
    random: SystemRandom,
}

impl SigningKey {
    /// A key from PEM: PKCS #8, not encrypted, as `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256`
    /// writes it.
    ///
    /// # Errors
    /// What is wrong with it; never its text.
    pub fn from_pem(pem: &str) -> Result<Self, &'static str> {
        const EXPECTED: &str = "not a usable private key, expected PKCS #8 in PEM for ECDSA P-256, not encrypted \
                                (`openssl pkcs8 -topk8 -nocrypt` converts others)";
        let body = pem.split_once("-----BEGIN PRIVATE KEY-----").and_then(|(_, rest)| rest.split_once("-----END"));
        let base64: String = body.ok_or(EXPECTED)?.0.split_whitespace().collect();
        let der = BASE64_STANDARD.decode(base64).map_err(|_| EXPECTED)?;
        let random = SystemRandom::new();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &der, &random).map_err(|_| EXPECTED)?;
        Ok(Self { pair, random })
    }

    /// The signature of a manifest.
    pub(crate) fn sign(&self, reference: &OciReference, manifest_digest: &str) -> Result<Stored, RegistryError> {
        let payload = json!({
            "critical": {
                "identity": { "docker-reference": format!("{}/{}", reference.host(), reference.repository()) },
                "image": { "docker-manifest-digest": manifest_digest },
                "type": "cosign container image signature",
            },
            "optional": null,
        });
        let payload = payload.to_string().into_bytes();
        let failed =
            |_| Problem::Unfit { reason: "the machine has no random numbers to sign with".into() }.of(reference);
        let signature = self.pair.sign(&self.random, &payload).map_err(failed)?;
        let signature = BASE64_STANDARD.encode(signature.as_ref());
        Ok(Stored::cosign(CosignSignature { payload, signature }))
    }
}

/// No part of a key is printed.
impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SigningKey")
    }
}

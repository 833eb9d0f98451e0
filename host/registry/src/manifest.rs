//! The layout of a component in a registry, and of its signatures beside it.

use std::collections::BTreeMap;

use meridian_core::oci::is_digest;
use serde::{Deserialize, Serialize};

use crate::digest::sha256;
use crate::{MAX_COMPONENT_BYTES, Problem};

/// Largest manifest, bytes.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 1 << 20;

pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.wasm.config.v0+json";
pub(crate) const COMPONENT: &str = "application/wasm";

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Manifest {
    pub(crate) schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) media_type: Option<String>,
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) annotations: BTreeMap<String, String>,
}

impl Descriptor {
    pub(crate) fn of(media_type: &str, bytes: &[u8]) -> Self {
        let (media_type, digest) = (media_type.to_owned(), sha256(bytes));
        Self { media_type, digest, size: bytes.len() as u64, annotations: BTreeMap::new() }
    }
}

impl Manifest {
    pub(crate) fn new(config: Descriptor, layers: Vec<Descriptor>) -> Self {
        Self { schema_version: 2, media_type: Some(MANIFEST.to_owned()), config, layers }
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("texts and numbers are JSON")
    }

    /// # Errors
    /// It is another document.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Problem> {
        let parsed: Self = serde_json::from_slice(bytes)
            .map_err(|error| Problem::layout(format!("its manifest: {error}, expected an OCI image manifest")))?;
        let Self { schema_version, media_type, .. } = &parsed;
        if *schema_version != 2 || media_type.as_ref().is_some_and(|media_type| media_type != MANIFEST) {
            let found = media_type.as_deref().unwrap_or("without a media type");
            return Err(Problem::layout(format!(
                "a manifest of version {schema_version}, {found:?}, expected {MANIFEST}"
            )));
        }
        Ok(parsed)
    }

    /// The component's layer.
    pub(crate) fn component(&self) -> Result<&Descriptor, Problem> {
        let found = &self.config.media_type;
        if found != CONFIG {
            return Err(Problem::layout(format!("a configuration of type {found:?}, expected {CONFIG}")));
        }
        let [layer] = self.layers.as_slice() else {
            return Err(Problem::layout(format!("{} layers, expected one", self.layers.len())));
        };
        let Descriptor { media_type, digest, size, .. } = layer;
        if media_type != COMPONENT {
            return Err(Problem::layout(format!("a layer of type {media_type:?}, expected {COMPONENT}")));
        }
        if !is_digest(digest) {
            return Err(Problem::layout(format!("a layer with digest {digest:?}, expected sha256:DIGEST")));
        }
        if *size > MAX_COMPONENT_BYTES {
            return Err(Problem::layout(format!("a layer of {size} bytes, expected at most {MAX_COMPONENT_BYTES}")));
        }
        Ok(layer)
    }
}

/// What a component exports and imports, for its readers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Interfaces {
    /// Names with versions.
    pub exports: Vec<String>,
    /// Names of imports with versions; a policy has none.
    pub imports: Vec<String>,
}

/// The document and its descriptor. It has no time of its own: the same component always has the same digest.
pub(crate) fn component_config(layer: &Descriptor, interfaces: &Interfaces) -> (Descriptor, Vec<u8>) {
    let Interfaces { exports, imports } = interfaces;
    let document = serde_json::json!({
        "created": "1970-01-01T00:00:00Z",
        "author": null,
        "architecture": "wasm",
        "os": "wasip2",
        "layerDigests": [layer.digest],
        "component": { "exports": exports, "imports": imports, "target": null },
    });
    let bytes = document.to_string().into_bytes();
    (Descriptor::of(CONFIG, &bytes), bytes)
}

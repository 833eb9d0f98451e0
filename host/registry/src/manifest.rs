//! The layout of a component in a registry, and of its signatures beside it.

use std::collections::BTreeMap;

use meridian_core::oci::is_digest;
use serde::{Deserialize, Serialize};

use crate::digest::sha256;
use crate::{MAX_COMPONENT_BYTES, Problem};

/// Largest manifest, bytes.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 1 << 20;

pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// What a pull takes: a manifest, or an index that leads to one.
pub(crate) const MANIFEST_OR_INDEX: &str =
    "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json";
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

/// A list of manifests, one for each platform.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    media_type: Option<String>,
    manifests: Vec<Listed>,
}

#[derive(Debug, Deserialize)]
struct Listed {
    #[serde(flatten)]
    manifest: Descriptor,
    platform: Option<Platform>,
}

#[derive(Debug, Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

/// The digest of the one manifest for WebAssembly in an index, or of its only one; `None` for a document of another kind.
///
/// # Errors
/// It has none, or several; names what it has.
pub(crate) fn listed(bytes: &[u8]) -> Result<Option<String>, Problem> {
    let Ok(Index { media_type, manifests }) = serde_json::from_slice(bytes) else { return Ok(None) };
    if media_type.is_some_and(|media_type| media_type != INDEX) {
        return Ok(None);
    }
    let is_wasm = |listed: &&Listed| listed.platform.as_ref().is_some_and(|platform| platform.architecture == "wasm");
    let mut fit: Vec<_> = manifests.iter().filter(is_wasm).collect();
    if fit.is_empty() && manifests.len() == 1 {
        fit.extend(&manifests);
    }
    if let [Listed { manifest: Descriptor { digest, .. }, .. }] = fit.as_slice()
        && is_digest(digest)
    {
        return Ok(Some(digest.clone()));
    }
    const MOST_NAMED: usize = 8;
    let named = manifests.iter().take(MOST_NAMED).map(|Listed { manifest, platform }| match platform {
        Some(Platform { architecture, os }) => format!("{} for {os}/{architecture}", manifest.digest),
        None => format!("{} for no platform", manifest.digest),
    });
    let named = named.collect::<Vec<_>>().join(", ");
    let more = manifests.len().saturating_sub(MOST_NAMED);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    Err(Problem::layout(format!(
        "an index of {} manifests ({named}{more}), expected one manifest, or an index with one for architecture wasm",
        manifests.len()
    )))
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
            let packed = ["gzip", "zstd"].into_iter().find(|form| media_type.ends_with(&format!("+{form}")));
            let packed = packed.map(|form| format!(", packed with {form}")).unwrap_or_default();
            return Err(Problem::layout(format!("a layer of type {media_type:?}{packed}, expected {COMPONENT}")));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(digest: char, platform: &str) -> String {
        let digest = format!("sha256:{}", digest.to_string().repeat(64));
        format!(r#"{{"mediaType": "{MANIFEST}", "digest": "{digest}", "size": 1{platform}}}"#)
    }

    fn of_index(entries: &[String]) -> Result<Option<String>, String> {
        let text = format!(r#"{{"schemaVersion": 2, "mediaType": "{INDEX}", "manifests": [{}]}}"#, entries.join(","));
        listed(text.as_bytes()).map_err(|problem| problem.to_string())
    }

    const WASM: &str = r#", "platform": {"architecture": "wasm", "os": "wasip2"}"#;
    const LINUX: &str = r#", "platform": {"architecture": "amd64", "os": "linux"}"#;

    #[test]
    fn the_one_manifest_for_webassembly_is_found() {
        let found = of_index(&[entry('a', LINUX), entry('b', WASM)]).unwrap();
        assert_eq!(found, Some(format!("sha256:{}", "b".repeat(64))));
        assert_eq!(of_index(&[entry('c', "")]).unwrap(), Some(format!("sha256:{}", "c".repeat(64))));
        assert_eq!(listed(br#"{"schemaVersion": 2}"#).unwrap(), None);
    }

    #[test]
    fn an_index_without_one_is_refused_by_what_is_in_it() {
        let several = of_index(&[entry('a', WASM), entry('b', WASM)]).unwrap_err();
        assert!(
            several.contains("an index of 2 manifests (sha256:aaaa") && several.contains("wasip2/wasm"),
            "{several}"
        );
        let none = of_index(&[entry('a', LINUX), entry('b', "")]).unwrap_err();
        assert!(none.contains("for linux/amd64") && none.contains("for no platform"), "{none}");
        let many: Vec<_> = (0..100).map(|_| entry('a', LINUX)).collect();
        assert!(of_index(&many).unwrap_err().contains(" and 92 more)"));
        assert!(of_index(&[]).unwrap_err().contains("an index of 0 manifests ()"));
    }

    #[test]
    fn a_packed_layer_is_named() {
        for form in ["zstd", "gzip"] {
            let layer = Descriptor::of(&format!("application/vnd.oci.image.layer.v1.tar+{form}"), b"x");
            let refused = Manifest::new(Descriptor::of(CONFIG, b"{}"), vec![layer]).component().err();
            let refused = refused.map(|problem| problem.to_string()).unwrap_or_default();
            assert!(refused.ends_with(&format!("packed with {form}, expected application/wasm")), "{refused}");
        }
    }
}

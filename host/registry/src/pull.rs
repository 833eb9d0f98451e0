use meridian_core::oci::OciReference;
use meridian_core::signature::FetchedComponent;

use crate::digest::{check, sha256};
use crate::manifest::{Descriptor, MANIFEST_OR_INDEX, MAX_MANIFEST_BYTES, Manifest, listed};
use crate::session::Session;
use crate::store::Store;
use crate::{MAX_COMPONENT_BYTES, Problem, Signatures, signatures};

/// The component with the signatures that were fetched with it.
pub(crate) fn stored(store: &Store, reference: &OciReference) -> Option<FetchedComponent> {
    let top = store.read(reference.digest()?, MAX_MANIFEST_BYTES)?;
    let (manifest_digest, manifest) = match listed(&top).ok()? {
        Some(digest) => (digest.clone(), store.read(&digest, MAX_MANIFEST_BYTES)?),
        None => (reference.digest()?.to_owned(), top),
    };
    let manifest = Manifest::parse(&manifest).ok()?;
    let bytes = store.read(&manifest.component().ok()?.digest, MAX_COMPONENT_BYTES)?;
    let (minisign, cosign) = store.read_signatures(&manifest_digest);
    Some(FetchedComponent { source: reference.to_string(), manifest_digest, bytes, minisign, cosign })
}

pub(crate) async fn component(
    session: &Session<'_>,
    store: Option<&Store>,
    reference: &OciReference,
    wanted: Signatures,
) -> Result<FetchedComponent, Problem> {
    let kept = |digest: &str, limit| store.and_then(|store| store.read(digest, limit));
    let keep = |digest: &str, bytes: &[u8]| store.iter().for_each(|store| store.write(digest, bytes));
    let named = reference.digest().or(reference.tag()).expect("a reference has one of them");
    let top = document(session, store, named, reference.digest()).await?;
    let listed = listed(&top)?;
    let manifest = match &listed {
        Some(digest) => document(session, store, digest, Some(digest)).await?,
        None => top.clone(),
    };
    let manifest_digest = sha256(&manifest);
    let parsed = Manifest::parse(&manifest)?;
    let Descriptor { digest, size, .. } = parsed.component()?;
    let bytes = match kept(digest, MAX_COMPONENT_BYTES) {
        Some(bytes) => bytes,
        None => {
            let bytes = blob(session, digest, *size).await?;
            keep(digest, &bytes);
            bytes
        }
    };
    // Last, so that what they name is there.
    keep(&manifest_digest, &manifest);
    if listed.is_some() {
        keep(&sha256(&top), &top);
    }
    let (minisign, cosign) = match wanted {
        Signatures::Ignore => (Vec::new(), Vec::new()),
        Signatures::Fetch => {
            let (minisign, cosign) = signatures::fetch(session, &manifest_digest).await?;
            store.iter().for_each(|store| store.write_signatures(&manifest_digest, &minisign, &cosign));
            (minisign, cosign)
        }
    };
    let source = reference.with_digest(&manifest_digest).to_string();
    Ok(FetchedComponent { source, manifest_digest, bytes, minisign, cosign })
}

/// The manifest or index of this tag or digest; from the store where it has it.
async fn document(
    session: &Session<'_>,
    store: Option<&Store>,
    named: &str,
    digest: Option<&str>,
) -> Result<Vec<u8>, Problem> {
    const WHAT: &str = "its manifest";
    if let Some(kept) = store.zip(digest).and_then(|(store, digest)| store.read(digest, MAX_MANIFEST_BYTES)) {
        return Ok(kept);
    }
    let path = format!("manifests/{named}");
    let found = session.get(WHAT, &path, Some(MANIFEST_OR_INDEX), MAX_MANIFEST_BYTES).await?;
    let bytes = found.ok_or(Problem::NotFound { what: WHAT.to_owned() })?;
    if let Some(digest) = digest {
        check(WHAT, &bytes, digest)?;
    }
    Ok(bytes)
}

async fn blob(session: &Session<'_>, digest: &str, size: u64) -> Result<Vec<u8>, Problem> {
    const WHAT: &str = "the component";
    let found = session.get(WHAT, &format!("blobs/{digest}"), None, size).await?;
    let bytes = found.ok_or(Problem::NotFound { what: WHAT.to_owned() })?;
    check(WHAT, &bytes, digest)?;
    Ok(bytes)
}

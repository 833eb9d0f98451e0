use meridian_core::oci::OciReference;
use meridian_core::signature::FetchedComponent;

use crate::digest::{check, sha256};
use crate::manifest::{Descriptor, MANIFEST, MAX_MANIFEST_BYTES, Manifest};
use crate::session::Session;
use crate::store::Store;
use crate::{MAX_COMPONENT_BYTES, Problem, Signatures, signatures};

/// The component with the signatures that were fetched with it.
pub(crate) fn stored(store: &Store, reference: &OciReference) -> Option<FetchedComponent> {
    let manifest_digest = reference.digest()?;
    let manifest = Manifest::parse(&store.read(manifest_digest, MAX_MANIFEST_BYTES)?).ok()?;
    let bytes = store.read(&manifest.component().ok()?.digest, MAX_COMPONENT_BYTES)?;
    let (minisign, cosign) = store.read_signatures(manifest_digest);
    Some(FetchedComponent {
        source: reference.to_string(),
        manifest_digest: manifest_digest.to_owned(),
        bytes,
        minisign,
        cosign,
    })
}

pub(crate) async fn component(
    session: &Session<'_>,
    store: Option<&Store>,
    reference: &OciReference,
    wanted: Signatures,
) -> Result<FetchedComponent, Problem> {
    let kept = |digest: &str, limit| store.and_then(|store| store.read(digest, limit));
    let keep = |digest: &str, bytes: &[u8]| store.iter().for_each(|store| store.write(digest, bytes));
    let kept_manifest = reference.digest().and_then(|digest| kept(digest, MAX_MANIFEST_BYTES));
    let manifest = match kept_manifest {
        Some(manifest) => manifest,
        None => manifest(session, reference).await?,
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
    // Last, so that what it names is there.
    keep(&manifest_digest, &manifest);
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

async fn manifest(session: &Session<'_>, reference: &OciReference) -> Result<Vec<u8>, Problem> {
    const WHAT: &str = "its manifest";
    let named = reference.digest().or(reference.tag()).expect("a reference has one of them");
    let found = session.get(WHAT, &format!("manifests/{named}"), Some(MANIFEST), MAX_MANIFEST_BYTES).await?;
    let bytes = found.ok_or(Problem::NotFound { what: WHAT.to_owned() })?;
    if let Some(digest) = reference.digest() {
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

//! Which certificates of engines a client accepts.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use meridian_core::file::read_regular;
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

/// Largest file of certificates, bytes.
const MAX_BYTES: u64 = 1 << 20;

/// A client that accepts certificates signed by one of `ca_file` and no others; without a file, by one that the system
/// trusts.
///
/// # Errors
/// One line: the file, and the reason.
pub(crate) fn client(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, String> {
    let roots = match ca_file {
        Some(path) => Arc::new(roots_of(path).map_err(|why| format!("ca_file: {}: {why}", path.display()))?),
        None => of_the_system()?,
    };
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| format!("TLS: {error}"))?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn roots_of(path: &Path) -> Result<RootCertStore, String> {
    let bytes = read_regular(path, MAX_BYTES).map_err(|error| format!("cannot be read: {error}"))?;
    let bytes = bytes.ok_or("is larger than 1 MiB")?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&bytes) {
        let certificate = certificate.map_err(|error| format!("must hold PEM certificates: {error}"))?;
        roots.add(certificate).map_err(|error| format!("must hold certificates of authorities: {error}"))?;
    }
    if roots.is_empty() {
        return Err("must hold PEM certificates, and holds none".into());
    }
    Ok(roots)
}

/// Read once: the files have a hundred and more certificates.
fn of_the_system() -> Result<Arc<RootCertStore>, String> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    let roots = ROOTS.get_or_init(|| {
        let mut roots = RootCertStore::empty();
        // Some of them are malformed on many machines.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        Arc::new(roots)
    });
    if roots.is_empty() {
        Err("this system has no root certificates, a ca_file is needed".into())
    } else {
        Ok(Arc::clone(roots))
    }
}

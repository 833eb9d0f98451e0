//! The certificate of the admin interface.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use meridian_core::file::read_regular;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use meridian_engine::private;

/// Largest file with a certificate or a key, bytes.
const MAX_BYTES: usize = 1 << 20;

/// A certificate with its key, read again when one of the files has changed.
pub(super) struct Certificate {
    cert_file: PathBuf,
    key_file: PathBuf,
    loaded: Mutex<Loaded>,
}

struct Loaded {
    /// What the files were when they were read last, also when that failed.
    files: [Option<Id>; 2],
    acceptor: TlsAcceptor,
}

/// A version of a file: device, inode, length, and time of the last change, of its mode too, in nanoseconds.
type Id = (u64, u64, u64, i64, i64);

impl Certificate {
    /// Read the files.
    ///
    /// # Errors
    /// The field, the file, the problem and the expectation, in one line.
    pub(super) fn read(cert_file: PathBuf, key_file: PathBuf) -> Result<Self, String> {
        let files = [id(&cert_file), id(&key_file)];
        let acceptor = acceptor(&cert_file, &key_file)?;
        Ok(Self { cert_file, key_file, loaded: Mutex::new(Loaded { files, acceptor }) })
    }

    /// For the next connection. Files that cannot be used leave the certificate that was read before.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let files = [id(&self.cert_file), id(&self.key_file)];
        if files != loaded.files {
            loaded.files = files;
            match acceptor(&self.cert_file, &self.key_file) {
                Ok(acceptor) => {
                    tracing::info!("admin.tls_cert_file: {}: read again", self.cert_file.display());
                    loaded.acceptor = acceptor;
                }
                Err(why) => tracing::warn!("{why}: the certificate that was read before stays"),
            }
        }
        loaded.acceptor.clone()
    }
}

fn id(path: &Path) -> Option<Id> {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.len(), metadata.ctime(), metadata.ctime_nsec()))
}

fn acceptor(cert_file: &Path, key_file: &Path) -> Result<TlsAcceptor, String> {
    let cert = |why: String| format!("admin.tls_cert_file: {}: {why}", cert_file.display());
    let key = |why: String| format!("admin.tls_key_file: {}: {why}", key_file.display());
    let bytes = read_regular(cert_file, MAX_BYTES as u64).map_err(|error| cert(format!("cannot be read: {error}")))?;
    let bytes = bytes.ok_or_else(|| cert("is larger than 1 MiB".into()))?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let chain = chain.map_err(|error| cert(format!("must hold PEM certificates: {error}")))?;
    if chain.is_empty() {
        return Err(cert("must hold PEM certificates, and holds none".into()));
    }
    let bytes = private::read(key_file, MAX_BYTES).map_err(key)?;
    // The text of an error has none of the key.
    let private =
        PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| key(format!("must hold a PEM key: {error}")))?;
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| key(error.to_string()))?;
    let config = builder.with_no_client_auth().with_single_cert(chain, private);
    let mut config = config.map_err(|error| key(format!("must be the key of the certificate: {error}")))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

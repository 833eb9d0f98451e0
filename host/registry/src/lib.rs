//! Policy components in OCI registries, in the layout that `wkg` writes. Everything that a registry sends is bounded in
//! size and time, and verified by its digest; the component host verifies signatures.
//!
//! Each call works on a thread of its own (`meridian-fetch`) and blocks its caller until it is done, at most
//! [`Limits::total`]. The thread that schedules never calls this crate.
//!
//! ```no_run
//! use meridian_core::oci::OciReference;
//! use meridian_registry::{Limits, Registry, Signatures};
//!
//! let reference = OciReference::parse("oci://ghcr.io/acme/srpt:1.2")?;
//! let pulled = Registry::new(Limits::default()).pull(&reference, Signatures::Fetch)?;
//! println!("{} has {} bytes", pulled.source, pulled.bytes.len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod auth;
mod digest;
mod error;
mod login;
mod manifest;
mod pull;
mod push;
mod session;
mod signatures;
mod store;

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use meridian_core::oci::OciReference;
use meridian_core::signature::FetchedComponent;

pub use error::{Problem, RegistryError};
pub use manifest::Interfaces;
pub use signatures::SigningKey;

use session::{Access, Session};
use signatures::{Kind, Stored};
use store::Store;

/// Largest component, bytes; that of the component host.
pub const MAX_COMPONENT_BYTES: u64 = 32 << 20;

/// Limits of one pull or push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest time for a connection.
    pub connect: Duration,
    /// Longest time that a registry may send nothing.
    pub silence: Duration,
    /// Longest time for all requests together.
    pub total: Duration,
    /// Most attempts of one request; at least one is made.
    pub attempts: u32,
    /// Pause behind the first attempt; it doubles with each.
    pub backoff: Duration,
    /// Longest pause between two attempts, whatever the registry asks for.
    pub longest_backoff: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            silence: Duration::from_secs(15),
            total: Duration::from_secs(60),
            attempts: 5,
            backoff: Duration::from_millis(250),
            longest_backoff: Duration::from_secs(8),
        }
    }
}

impl Limits {
    /// For a push, where an upload takes its time and a person waits.
    #[must_use]
    pub fn push() -> Self {
        let total = Duration::from_secs(600);
        Self { silence: total, total, ..Self::default() }
    }
}

/// Whether a pull asks for the signatures too: two requests, and one for each signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signatures {
    /// It does.
    Fetch,
    /// No key is trusted, and a signature that nobody asks for may be anything.
    Ignore,
}

/// What a push uploads beside the component.
#[derive(Debug, Default)]
pub struct Signing<'a> {
    /// The text that `minisign -S` wrote for the component.
    pub minisign: Option<String>,
    /// The key that signs the manifest.
    pub key: Option<&'a SigningKey>,
}

/// A client of registries. Cloning shares the store.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    limits: Limits,
    store: Option<Store>,
}

impl Registry {
    /// A client that keeps nothing.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, store: None }
    }

    /// Keep pulled components in this folder, and look there first.
    #[must_use]
    pub fn with_store(self, dir: PathBuf) -> Self {
        Self { store: Some(Store::new(dir)), ..self }
    }

    /// The component of a reference with a digest, when the store has it whole. Asks no registry.
    #[must_use]
    pub fn stored(&self, reference: &OciReference) -> Option<FetchedComponent> {
        pull::stored(self.store.as_ref()?, reference)
    }

    /// The component of a reference. A reference without a digest is resolved by its tag, which the result's source
    /// names no more.
    ///
    /// # Errors
    /// The reference, and what is wrong; see [`RegistryError::is_transient`].
    pub fn pull(&self, reference: &OciReference, signatures: Signatures) -> Result<FetchedComponent, RegistryError> {
        self.work(reference, Access::Pull, async |session| {
            pull::component(session, self.store.as_ref(), reference, signatures).await
        })
    }

    /// Upload a component under the tag of the reference, and its signatures beside it; returns the reference with the
    /// digest.
    ///
    /// # Errors
    /// The reference, and what is wrong.
    pub fn push(
        &self,
        reference: &OciReference,
        bytes: &[u8],
        interfaces: &Interfaces,
        signing: &Signing<'_>,
    ) -> Result<OciReference, RegistryError> {
        let unfit = |reason: &str| Problem::Unfit { reason: reason.to_owned() }.of(reference);
        let (Some(tag), None) = (reference.tag(), reference.digest()) else {
            return Err(unfit(
                "a push must name a tag and no digest, which is that of the content: oci://HOST/NAME:TAG",
            ));
        };
        if bytes.len() as u64 > MAX_COMPONENT_BYTES {
            return Err(unfit(&format!("{} bytes, expected at most {MAX_COMPONENT_BYTES}", bytes.len())));
        }
        let digest = self.work(reference, Access::Push, async |session| {
            let digest = push::component(session, tag, bytes, interfaces).await?;
            if let Some(text) = &signing.minisign {
                signatures::push(session, Kind::Minisign, &digest, Stored::minisign(text)).await?;
            }
            if let Some(key) = signing.key {
                let signed = key.sign(reference, &digest).map_err(|error| error.problem)?;
                signatures::push(session, Kind::Cosign, &digest, signed).await?;
            }
            Ok(digest)
        })?;
        Ok(reference.with_digest(&digest))
    }

    /// Do the requests on a thread of their own, within the limit of time.
    fn work<T: Send>(
        &self,
        reference: &OciReference,
        access: Access,
        work: impl AsyncFnOnce(&Session<'_>) -> Result<T, Problem> + Send,
    ) -> Result<T, RegistryError> {
        let limits = &self.limits;
        let unfit = |why: &dyn std::fmt::Display| Problem::Unfit { reason: format!("no thread for it: {why}") };
        let done = thread::scope(|scope| {
            let fetch = || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
                let runtime = runtime.map_err(|error| unfit(&error))?;
                let session = Session::new(reference, limits, access)?;
                let done = runtime.block_on(async {
                    let late = |_| Problem::Late { limit: limits.total };
                    tokio::time::timeout(limits.total, work(&session)).await.map_err(late)?
                });
                // A resolver or a credential helper that hangs ends by itself.
                runtime.shutdown_background();
                done
            };
            let thread = thread::Builder::new().name("meridian-fetch".into()).spawn_scoped(scope, fetch);
            thread.map_err(|error| unfit(&error))?.join().unwrap_or_else(|_| Err(unfit(&"it panicked")))
        });
        done.map_err(|problem| problem.of(reference))
    }
}

//! The path and the maximum size of a component's signature. The component host verifies it.

use std::path::{Path, PathBuf};

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

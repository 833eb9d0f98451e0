//! Who may have signed a component: minisign and ECDSA public keys, and the check of detached signatures.

use std::fmt;
use std::io;
use std::path::Path;

use meridian_core::file::read_regular;
use meridian_core::signature::{FetchedComponent, MAX_SIGNATURE_BYTES};
use minisign_verify::{PublicKey, Signature};
use thiserror::Error;

use crate::LoadError;
use crate::cosign::ManifestKey;
use crate::wit::clip;

/// Largest file with a public key, bytes: a comment and 56 characters.
const MAX_KEY_FILE_BYTES: u64 = 4 << 10;
/// Characters of a public key: 42 bytes in base64.
const KEY_CHARS: usize = 56;

/// The public keys of which one must have signed a component.
///
/// ```
/// use meridian_wasm::TrustedKeys;
///
/// let entries = ["RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3"];
/// let keys = TrustedKeys::parse("policy.trusted_keys", &entries, ".".as_ref())?;
/// assert_eq!(keys.ids().collect::<Vec<_>>(), ["E7620F1842B4E81F"]);
/// let error = TrustedKeys::parse("policy.trusted_keys", &["RWfoo"], "/etc".as_ref()).unwrap_err();
/// assert!(error.to_string().starts_with("policy.trusted_keys[0]: \"RWfoo\": "));
/// # Ok::<(), meridian_wasm::KeyError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct TrustedKeys {
    keys: Vec<TrustedKey>,
}

#[derive(Clone, Debug)]
struct TrustedKey {
    id: String,
    key: Key,
}

#[derive(Clone, Debug)]
enum Key {
    /// Signs the bytes of components.
    Minisign(PublicKey),
    /// Signs the manifests of components in registries.
    Manifest(ManifestKey),
}

/// An entry of the trusted keys is no key.
#[derive(Debug, Error)]
#[error(
    "{field}: {entry:?}: {reason}, expected a minisign public key (56 characters that begin with RW), a PEM public key \
     (ECDSA P-256), or the path of a file with one of them"
)]
pub struct KeyError {
    /// The dotted field with its index, or the option.
    pub field: String,
    /// The entry.
    pub entry: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Who signed a component.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signer {
    /// The key's id, 16 hexadecimal digits: as minisign prints it, or the first of the SHA-256 of a PEM key's content.
    pub key_id: String,
    /// The comment that a minisign signature covers, by default the time and the file's name; of another signature, the
    /// digest of the signed manifest.
    pub trusted_comment: String,
}

/// Why a signature does not do.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SignatureError {
    /// More bytes than a signature can have.
    #[error("more than {MAX_SIGNATURE_BYTES} bytes, expected the four lines that `minisign -S` writes")]
    TooLarge,
    /// Not the format of minisign.
    #[error("malformed, expected the four lines that `minisign -S` writes")]
    Malformed,
    /// Made over the whole file and not over its hash: in that form a signature of one file can pass for one of another.
    #[error("made in minisign's legacy format, expected a prehashed one (minisign 0.10 or later, or `minisign -SH`)")]
    Legacy,
    /// Made with a key that is not trusted.
    #[error("made with key {found}, expected {}", any_of(trusted))]
    OtherKey {
        /// Id of the key that made it.
        found: String,
        /// Ids of the trusted keys.
        trusted: Vec<String>,
    },
    /// By no trusted key over the digest of the component's manifest.
    #[error("no cosign signature in the registry is one of manifest {manifest_digest} by {}", any_of(trusted))]
    OtherManifest {
        /// `sha256:` and the digest.
        manifest_digest: String,
        /// Ids of the trusted keys.
        trusted: Vec<String>,
    },
    /// Names a trusted key, but is not of this content, or was altered.
    #[error("names trusted key {key_id}, but is not its signature of this component (altered, or of another file)")]
    Mismatch {
        /// Id of the key that the signature names.
        key_id: String,
    },
}

impl TrustedKeys {
    /// The keys of a list of texts. Each is a minisign public key, a PEM public key, or the path of a file with one of
    /// them, relative to `base_dir`. A text of 56 characters that begins with `RW` is a key, and so is one that begins
    /// with `-----BEGIN`. `field` names the list in errors.
    ///
    /// # Errors
    /// The first entry that is neither.
    pub fn parse(field: &str, entries: &[impl AsRef<str>], base_dir: &Path) -> Result<Self, KeyError> {
        let entries = entries.iter().map(AsRef::as_ref).enumerate();
        let keys = entries.map(|(index, entry)| {
            TrustedKey::parse(entry.trim(), base_dir).map_err(|reason| KeyError {
                field: format!("{field}[{index}]"),
                entry: entry.to_owned(),
                reason,
            })
        });
        keys.collect::<Result<_, _>>().map(|keys| Self { keys })
    }

    /// Without a key nothing is checked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The ids of the keys as minisign prints them.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.keys.iter().map(|key| key.id.as_str())
    }

    /// "trusted key A", or "one of the trusted keys A, B".
    pub(crate) fn any(&self) -> String {
        any_of(&self.ids().map(str::to_owned).collect::<Vec<_>>())
    }

    /// Who signed a component of a registry: the bytes (minisign), or the manifest that names them (cosign). `None` when
    /// no keys are trusted.
    ///
    /// # Errors
    /// [`LoadError::Unsigned`] and [`LoadError::BadSignature`].
    pub fn signer_of(&self, fetched: &FetchedComponent) -> Result<Option<Signer>, LoadError> {
        if self.is_empty() {
            return Ok(None);
        }
        let verified = self.verify_fetched(fetched).map_err(|problem| LoadError::BadSignature { problem })?;
        let expected = || format!("a minisign or cosign signature in the registry by {}", self.any());
        verified.map(Some).ok_or_else(|| LoadError::Unsigned { expected: expected() })
    }

    /// `None` when nobody did.
    fn verify_fetched(&self, fetched: &FetchedComponent) -> Result<Option<Signer>, SignatureError> {
        let FetchedComponent { manifest_digest, bytes, minisign, cosign, source: _ } = fetched;
        let mut failed = None;
        for signature in minisign {
            match self.verify(bytes, signature) {
                Ok(signer) => return Ok(Some(signer)),
                Err(error) => failed = Some(error),
            }
        }
        for TrustedKey { id, key } in &self.keys {
            let Key::Manifest(key) = key else { continue };
            if cosign.iter().any(|signature| key.has_signed(manifest_digest, signature)) {
                let trusted_comment = format!("manifest {manifest_digest}");
                return Ok(Some(Signer { key_id: id.clone(), trusted_comment }));
            }
        }
        match failed {
            Some(error) => Err(error),
            None if cosign.is_empty() => Ok(None),
            None => {
                let (manifest_digest, trusted) = (manifest_digest.clone(), self.ids().map(str::to_owned).collect());
                Err(SignatureError::OtherManifest { manifest_digest, trusted })
            }
        }
    }

    /// Check that `signature` is one of `content` by one of the keys.
    pub(crate) fn verify(&self, content: &[u8], signature: &str) -> Result<Signer, SignatureError> {
        if signature.len() > MAX_SIGNATURE_BYTES {
            return Err(SignatureError::TooLarge);
        }
        let found = signature_key_id(signature).ok_or(SignatureError::Malformed)?;
        let decoded = Signature::decode(signature).map_err(|_| SignatureError::Malformed)?;
        let mut failed = SignatureError::OtherKey { found, trusted: self.ids().map(str::to_owned).collect() };
        // Ids are not unique by force: every key of that id is tried.
        for TrustedKey { id, key } in &self.keys {
            let Key::Minisign(key) = key else { continue };
            match key.verify(content, &decoded, false) {
                Ok(()) => {
                    let trusted_comment = clip(decoded.trusted_comment().replace('\t', " "), 256);
                    return Ok(Signer { key_id: id.clone(), trusted_comment });
                }
                Err(minisign_verify::Error::UnexpectedKeyId) => {}
                Err(minisign_verify::Error::UnexpectedAlgorithm) => failed = SignatureError::Legacy,
                Err(_) => failed = SignatureError::Mismatch { key_id: id.clone() },
            }
        }
        Err(failed)
    }
}

impl TrustedKey {
    fn parse(entry: &str, base_dir: &Path) -> Result<Self, String> {
        if entry.starts_with("RW") && entry.len() == KEY_CHARS {
            return Self::from_base64(entry);
        }
        if ManifestKey::is_pem(entry) {
            return Self::from_pem(entry);
        }
        let path = base_dir.join(entry);
        let named = |what: &dyn fmt::Display| format!("{}: {what}", path.display());
        let bytes = read_regular(&path, MAX_KEY_FILE_BYTES).map_err(|error| named(&error))?;
        let bytes = bytes.ok_or_else(|| named(&format_args!("more than {MAX_KEY_FILE_BYTES} bytes")))?;
        let text = String::from_utf8_lossy(&bytes);
        if ManifestKey::is_pem(text.trim()) {
            return Self::from_pem(&text).map_err(|reason| named(&reason));
        }
        let key = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("untrusted comment:"));
        Self::from_base64(key.unwrap_or_default()).map_err(|reason| named(&reason))
    }

    fn from_base64(text: &str) -> Result<Self, String> {
        let not_a_key = || "not a minisign public key".to_owned();
        let key = PublicKey::from_base64(text).map_err(|_| not_a_key())?;
        let id = key_id(text).ok_or_else(not_a_key)?;
        Ok(Self { id, key: Key::Minisign(key) })
    }

    fn from_pem(text: &str) -> Result<Self, String> {
        let (id, key) = ManifestKey::from_pem(text)?;
        Ok(Self { id, key: Key::Manifest(key) })
    }
}

/// The id of the key that a minisign signature names; nothing is verified.
#[must_use]
pub fn signature_key_id(signature: &str) -> Option<String> {
    key_id(signature.lines().nth(1)?)
}

/// The text of a signature's file; `None` when there is none. What is no text turns out malformed, and too much too large,
/// when it is verified.
///
/// # Errors
/// It is there, but cannot be read.
pub fn read_signature(path: &Path) -> io::Result<Option<String>> {
    match read_regular(path, MAX_SIGNATURE_BYTES as u64) {
        Ok(Some(bytes)) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        // Its size alone decides.
        Ok(None) => Ok(Some(" ".repeat(MAX_SIGNATURE_BYTES + 1))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Keys and signatures begin with two bytes of algorithm and eight of key id, a little-endian number, in base64.
fn key_id(base64: &str) -> Option<String> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    // 14 digits are 84 bits: ten bytes and four bits more.
    let digits = base64.as_bytes().get(..14)?;
    let bits = digits.iter().try_fold(0_u128, |bits, byte| Some(bits << 6 | u128::from(digit(*byte)?)))?;
    let id = (bits >> 4) as u64;
    Some(format!("{:016X}", id.swap_bytes()))
}

fn any_of(ids: &[String]) -> String {
    match ids {
        [id] => format!("trusted key {id}"),
        ids => format!("one of the trusted keys {}", ids.join(", ")),
    }
}

//! The names of components in OCI registries.

use thiserror::Error;

/// What each reference begins with.
pub const SCHEME: &str = "oci://";
/// Longest reference, bytes.
const MAX_REFERENCE_BYTES: usize = 512;
/// Longest name of a repository, as registries have it.
const MAX_REPOSITORY_BYTES: usize = 255;
/// Longest tag, as registries have it.
const MAX_TAG_BYTES: usize = 128;

/// Where a component is in a registry: `oci://HOST[:PORT]/NAME[:TAG][@sha256:DIGEST]`. The digest is that of the manifest.
///
/// ```
/// use meridian_core::oci::OciReference;
///
/// let reference = OciReference::parse("oci://ghcr.io/acme/srpt:1.2")?;
/// assert_eq!((reference.host(), reference.repository(), reference.tag()), ("ghcr.io", "acme/srpt", Some("1.2")));
/// let error = OciReference::pinned("oci://ghcr.io/acme/srpt:1.2").unwrap_err();
/// assert!(error.to_string().starts_with("\"oci://ghcr.io/acme/srpt:1.2\": must end in @sha256:DIGEST"));
/// # Ok::<(), meridian_core::oci::OciReferenceError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OciReference {
    host: String,
    repository: String,
    tag: Option<String>,
    digest: Option<String>,
}

/// A text is no reference.
///
/// ```
/// let error = meridian_core::oci::OciReference::parse("oci://ann:secret@example.com/x:1").unwrap_err();
/// assert_eq!(error.shown, "oci://...@example.com/x:1");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{shown:?}: {reason}")]
pub struct OciReferenceError {
    /// The text, without what may be a password.
    pub shown: String,
    /// What it must be.
    pub reason: &'static str,
}

impl OciReference {
    /// A reference with a tag, a digest or both.
    ///
    /// # Errors
    /// The text, and what it must be.
    pub fn parse(text: &str) -> Result<Self, OciReferenceError> {
        Self::parts(text).map_err(|reason| OciReferenceError { shown: shown(text), reason })
    }

    /// A reference with a digest, which names the same bytes for ever. A tag before it is only for its readers.
    ///
    /// # Errors
    /// As [`parse`](Self::parse), and that it has no digest.
    pub fn pinned(text: &str) -> Result<Self, OciReferenceError> {
        let reference = Self::parse(text)?;
        if reference.digest.is_some() {
            return Ok(reference);
        }
        let reason = "must end in @sha256:DIGEST, because a tag may name other bytes tomorrow \
                      (`meridian policy pull` prints the digest)";
        Err(OciReferenceError { shown: shown(text), reason })
    }

    fn parts(text: &str) -> Result<Self, &'static str> {
        let rest = text.strip_prefix(SCHEME).ok_or("must begin with oci://")?;
        if text.len() > MAX_REFERENCE_BYTES {
            return Err("must have at most 512 bytes");
        }
        let (host, path) = rest.split_once('/').ok_or("must be oci://HOST/NAME@sha256:DIGEST")?;
        if !is_host(host) {
            return Err("must have a host name, perhaps with a port, behind oci://, and no user name");
        }
        let (named, digest) = match path.split_once('@') {
            Some((named, digest)) => (named, Some(digest)),
            None => (path, None),
        };
        if digest.is_some_and(|digest| !is_digest(digest)) {
            return Err("must have 64 hexadecimal digits in lower case behind @sha256:");
        }
        let (repository, tag) = match named.split_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (named, None),
        };
        if !is_repository(repository) {
            return Err("must have a name behind the host: words of a-z, 0-9, '.', '_' and '-', with '/' between them");
        }
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err("must have a tag of at most 128 letters, digits, '.', '_' and '-' behind the ':'");
        }
        if tag.is_none() && digest.is_none() {
            return Err("must end in @sha256:DIGEST, or in :TAG where a tag will do");
        }
        Ok(Self {
            host: host.to_ascii_lowercase(),
            repository: repository.to_owned(),
            tag: tag.map(str::to_owned),
            digest: digest.map(str::to_owned),
        })
    }

    /// Name or address of the registry, with its port if it is not the usual one.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Name of the repository.
    #[must_use]
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag, if there is one.
    #[must_use]
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// `sha256:` and the digest of the manifest in lower-case hexadecimal, if there is one.
    #[must_use]
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// This reference with another digest, `sha256:` and lower-case hexadecimal.
    #[must_use]
    pub fn with_digest(&self, digest: &str) -> Self {
        Self { digest: Some(digest.to_owned()), ..self.clone() }
    }

    /// This reference without its tag, as a configuration has it.
    #[must_use]
    pub fn without_tag(&self) -> Self {
        Self { tag: None, ..self.clone() }
    }

    /// Whether the registry is on this machine; plain HTTP is for these alone.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        is_loopback(self.host.rsplit_once(':').map_or(self.host.as_str(), |(name, port)| {
            // An IPv6 address has colons of its own.
            if port.ends_with(']') { self.host.as_str() } else { name }
        }))
    }
}

impl std::fmt::Display for OciReference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { host, repository, tag, digest } = self;
        write!(f, "{SCHEME}{host}/{repository}")?;
        tag.iter().try_for_each(|tag| write!(f, ":{tag}"))?;
        digest.iter().try_for_each(|digest| write!(f, "@{digest}"))
    }
}

/// Whether this name or address, without a port, is of this machine.
///
/// ```
/// assert!(["localhost", "127.0.0.1", "[::1]"].into_iter().all(meridian_core::oci::is_loopback));
/// assert!(!meridian_core::oci::is_loopback("127.example.com"));
/// ```
#[must_use]
pub fn is_loopback(name: &str) -> bool {
    use std::net::{Ipv4Addr, Ipv6Addr};
    let v6 = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    name == "localhost"
        || name.parse().is_ok_and(|address: Ipv4Addr| address.is_loopback())
        || v6.is_some_and(|address| address.parse().is_ok_and(|address: Ipv6Addr| address.is_loopback()))
}

/// A source for an error: what stands before an `@` in the place of the host may be a password.
#[must_use]
pub fn shown(source: &str) -> String {
    let Some(rest) = source.strip_prefix(SCHEME) else { return source.to_owned() };
    let (host, path) = rest.split_once('/').map_or((rest, ""), |(host, path)| (host, path));
    match host.rsplit_once('@') {
        Some((_, host)) => format!("{SCHEME}...@{host}/{path}"),
        None => source.to_owned(),
    }
}

/// Whether a text is `sha256:` and 64 hexadecimal digits in lower case.
///
/// ```
/// assert!(!meridian_core::oci::is_digest("sha256:00"));
/// ```
#[must_use]
pub fn is_digest(text: &str) -> bool {
    let digits = text.strip_prefix("sha256:").unwrap_or_default();
    digits.len() == 64 && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_host(host: &str) -> bool {
    let (name, port) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, port)) => {
            let port = if port.is_empty() { None } else { Some(port.strip_prefix(':').unwrap_or_default()) };
            return address.parse::<std::net::Ipv6Addr>().is_ok() && port.is_none_or(is_port);
        }
        None => host.split_once(':').map_or((host, None), |(name, port)| (name, Some(port))),
    };
    let is_word = |word: &str| {
        !word.is_empty()
            && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !word.starts_with('-')
            && !word.ends_with('-')
    };
    name.split('.').all(is_word) && port.is_none_or(is_port)
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|digit| digit.is_ascii_digit()) && text.parse::<u16>().is_ok_and(|port| port > 0)
}

fn is_repository(name: &str) -> bool {
    let is_word = |word: &str| {
        let ends = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        word.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-'))
            && ends(word.as_bytes().first())
            && ends(word.as_bytes().last())
            && !word.contains("..")
    };
    name.len() <= MAX_REPOSITORY_BYTES && name.split('/').all(is_word)
}

fn is_tag(tag: &str) -> bool {
    tag.len() <= MAX_TAG_BYTES
        && tag.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
        && !tag.is_empty()
        && !tag.starts_with(['.', '-'])
}

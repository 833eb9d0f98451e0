//! Who the client is, and the challenge of a registry.

use std::fmt;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use meridian_core::oci::{OciReference, is_loopback};
use reqwest::Url;
use reqwest::header::HeaderValue;

use crate::{Problem, login};

/// Credentials for one registry.
#[derive(Clone)]
pub(crate) enum Credentials {
    Anonymous,
    Login {
        user: String,
        password: String,
    },
    /// A refresh token, as Azure's registry gives: the registry's server of tokens exchanges it.
    Refresh(String),
    /// A token for the registry itself.
    Token(String),
}

/// No secret gets into a log by accident.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.given())
    }
}

impl Credentials {
    /// Those of this user's docker, podman or Kubernetes configuration, or of the credential helper that it names. A helper
    /// that hangs is left to end by itself.
    pub(crate) async fn of(reference: &OciReference, patience: Duration) -> Result<Self, Problem> {
        let reference = reference.clone();
        let asked = tokio::task::spawn_blocking(move || login::find(&reference));
        let Ok(Ok(found)) = tokio::time::timeout(patience, asked).await else {
            let reason = "the credential helper of the docker configuration did not answer, expected a login";
            return Err(Problem::Credentials { reason: reason.into() });
        };
        found.map_err(|reason| Problem::Credentials { reason })
    }

    pub(crate) fn basic(&self) -> Option<HeaderValue> {
        let Self::Login { user, password } = self else { return None };
        secret(&format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}"))))
    }

    /// For errors.
    pub(crate) fn given(&self) -> &'static str {
        match self {
            Self::Anonymous => "a caller without credentials",
            Self::Login { .. } => "the credentials of the docker configuration",
            Self::Refresh(_) => "the identity token of the docker configuration",
            Self::Token(_) => "the registry token of the docker configuration",
        }
    }
}

pub(crate) fn is_docker_hub(host: &str) -> bool {
    host == "docker.io"
}

/// A header that is not printed.
pub(crate) fn secret(value: &str) -> Option<HeaderValue> {
    let mut header = HeaderValue::from_str(value).ok()?;
    header.set_sensitive(true);
    Some(header)
}

/// What a registry wants to see (`WWW-Authenticate`).
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Challenge {
    Basic,
    /// A token from there, for this service and scope, which its address has too.
    Bearer {
        realm: Url,
        service: Option<String>,
        scope: String,
    },
}

impl Challenge {
    /// The best of what the headers offer; the token's place is asked for with this scope.
    pub(crate) fn of<'a>(
        headers: impl Iterator<Item = &'a HeaderValue>,
        reference: &OciReference,
        scope: &str,
    ) -> Option<Self> {
        let mut found = None;
        for header in headers.filter_map(|header| header.to_str().ok()) {
            let (scheme, parameters) = header.split_once(' ').unwrap_or((header, ""));
            if scheme.eq_ignore_ascii_case("bearer") {
                return Self::bearer(parameters, reference, scope);
            }
            if scheme.eq_ignore_ascii_case("basic") {
                found = Some(Self::Basic);
            }
        }
        found
    }

    fn bearer(parameters: &str, reference: &OciReference, scope: &str) -> Option<Self> {
        let mut realm = Url::parse(&parameter(parameters, "realm")?).ok()?;
        // The login goes there.
        let is_near = reference.is_loopback() && realm.host_str().is_some_and(is_loopback);
        if realm.scheme() != "https" && !(realm.scheme() == "http" && is_near) {
            return None;
        }
        let service = parameter(parameters, "service");
        let named = service.iter().map(|service| ("service", service));
        realm.query_pairs_mut().extend_pairs(named).append_pair("scope", scope);
        Some(Self::Bearer { realm, service, scope: scope.to_owned() })
    }
}

/// The value of `name="value"` in a list.
fn parameter(list: &str, name: &str) -> Option<String> {
    let mut rest = list;
    loop {
        let (key, behind) = rest.split_once('=')?;
        let key = key.trim_start_matches([',', ' ']).trim();
        let (value, behind) = match behind.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => behind.split_once(',').unwrap_or((behind, "")),
        };
        if key.eq_ignore_ascii_case(name) {
            return Some(value.to_owned());
        }
        rest = behind;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn challenge(header: &str, reference: &str) -> Option<Challenge> {
        let header = HeaderValue::from_str(header).unwrap();
        Challenge::of([&header].into_iter(), &OciReference::parse(reference).unwrap(), "repository:a:pull")
    }

    #[test]
    fn a_login_goes_to_no_place_in_plain_text() {
        let bearer = r#"Bearer realm="https://auth.example/token?x=1",service="registry of, all",scope="ignored""#;
        let Some(Challenge::Bearer { realm, service, .. }) = challenge(bearer, "oci://example/a:1") else {
            panic!("no token")
        };
        let expected = "https://auth.example/token?x=1&service=registry+of%2C+all&scope=repository%3Aa%3Apull";
        assert_eq!((realm.as_str(), service.as_deref()), (expected, Some("registry of, all")));
        assert_eq!(challenge("Basic realm=\"x\"", "oci://example/a:1"), Some(Challenge::Basic));
        let plain = r#"Bearer realm="http://127.0.0.1:1/token""#;
        assert_eq!(challenge(plain, "oci://example/a:1"), None, "a far registry names a place on this machine");
        assert!(challenge(plain, "oci://127.0.0.1:5000/a:1").is_some());
        assert_eq!(challenge(r#"Bearer realm="http://auth.example/""#, "oci://127.0.0.1:5000/a:1"), None);
        for malformed in ["", "Bearer", "Bearer realm", "Bearer realm=\"x", "Digest realm=\"x\""] {
            assert_eq!(challenge(malformed, "oci://example/a:1"), None, "{malformed}");
        }
    }

    #[test]
    fn nothing_prints_a_secret() {
        let login = Credentials::Login { user: "ann".into(), password: "geheim".into() };
        let header = login.basic().unwrap();
        let refresh = Credentials::Refresh("geheim".into());
        assert!(!format!("{login:?} {header:?} {refresh:?}").contains("geheim"));
        assert_eq!(header.to_str().unwrap(), "Basic YW5uOmdlaGVpbQ==");
    }
}

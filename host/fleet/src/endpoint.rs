//! The address of an engine, as a client names it.

use std::net::SocketAddr;
use std::path::PathBuf;

use meridian_core::config::Listen;

/// Where a client reaches an engine.
///
/// ```
/// use meridian_fleet::Endpoint;
///
/// assert_eq!(Endpoint::parse("127.0.0.1:9465"), Ok(Endpoint::Loopback(([127, 0, 0, 1], 9465).into())));
/// let remote = Endpoint::parse("https://engine-7.example:9465").unwrap();
/// assert_eq!(remote, Endpoint::Tls { host: "engine-7.example".into(), port: 9465 });
/// assert!(Endpoint::parse("10.0.0.7:9465").is_err(), "a token never leaves this machine without TLS");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A Unix socket of this machine.
    Unix(PathBuf),
    /// A loopback address of this machine, without TLS.
    Loopback(SocketAddr),
    /// A host, with TLS.
    Tls {
        /// Its name or IP address, which its certificate must have. An IPv6 address is without brackets.
        host: String,
        /// Its port.
        port: u16,
    },
}

const EXPECTED: &str = "must be a loopback address with a port, unix:PATH, or https://HOST:port for another machine";

impl Endpoint {
    /// Parse `IP:port` on loopback, `unix:PATH` or `https://HOST:port`.
    ///
    /// # Errors
    /// The expectation; the text follows the address.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if text.starts_with("https://") {
            return Self::parse_url(text);
        }
        match Listen::parse(text) {
            Ok(Listen::Off) => Err("must not be empty"),
            Ok(Listen::Tcp(address)) => Ok(Self::Loopback(address)),
            Ok(Listen::Unix(path)) => Ok(Self::Unix(path)),
            Err(_) => Err(EXPECTED),
        }
    }

    fn parse_url(text: &str) -> Result<Self, &'static str> {
        // The parser drops some of these characters.
        if text.contains(|c: char| c == '\\' || c.is_whitespace() || c.is_control()) {
            return Err(EXPECTED);
        }
        let url = url::Url::parse(text).map_err(|_| EXPECTED)?;
        if !url.username().is_empty() || url.password().is_some() {
            return Err("must be https://HOST:port without a user or a password");
        }
        if url.path() != "/" || url.query().is_some() || url.fragment().is_some() {
            return Err("must be https://HOST:port without a path");
        }
        let host = match url.host() {
            Some(url::Host::Domain(name)) => name.to_owned(),
            Some(url::Host::Ipv4(address)) => address.to_string(),
            Some(url::Host::Ipv6(address)) => address.to_string(),
            None => return Err(EXPECTED),
        };
        match url.port_or_known_default() {
            Some(port) if port > 0 => Ok(Self::Tls { host, port }),
            _ => Err("must have a port in 1..=65535"),
        }
    }

    /// The value of the header `Host`.
    pub(crate) fn host_header(&self) -> String {
        match self {
            Self::Unix(_) => "localhost".into(),
            Self::Loopback(address) => address.to_string(),
            Self::Tls { host, port } if host.contains(':') => format!("[{host}]:{port}"),
            Self::Tls { host, port } => format!("{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let tls = |host: &str, port| Ok(Endpoint::Tls { host: host.into(), port });
        for (text, expected) in [
            ("[::1]:1", Ok(Endpoint::Loopback(([0, 0, 0, 0, 0, 0, 0, 1], 1).into()))),
            ("unix:/run/m.sock", Ok(Endpoint::Unix("/run/m.sock".into()))),
            ("https://10.0.0.7:9465", tls("10.0.0.7", 9465)),
            ("https://10.0.0.7:9465/", tls("10.0.0.7", 9465)),
            ("https://[fd00::7]:9465", tls("fd00::7", 9465)),
            ("https://Engine.Example", tls("engine.example", 443)),
            ("", Err("must not be empty")),
            ("10.0.0.7:9465", Err(EXPECTED)),
            ("http://127.0.0.1:9465", Err(EXPECTED)),
            ("https://", Err(EXPECTED)),
            ("https://a b:1", Err(EXPECTED)),
            ("https://a\\b:1", Err(EXPECTED)),
            ("https://a:99999", Err(EXPECTED)),
            ("https://a:0", Err("must have a port in 1..=65535")),
            ("https://user@a:1", Err("must be https://HOST:port without a user or a password")),
            ("https://:secret@a:1", Err("must be https://HOST:port without a user or a password")),
            ("https://a:1/v1", Err("must be https://HOST:port without a path")),
            ("https://a:1?x", Err("must be https://HOST:port without a path")),
            ("https://a:1#x", Err("must be https://HOST:port without a path")),
        ] {
            assert_eq!(Endpoint::parse(text), expected, "{text}");
        }
        let host = |text| Endpoint::parse(text).map(|endpoint| endpoint.host_header());
        assert_eq!(host("https://[fd00::7]:9465"), Ok("[fd00::7]:9465".into()));
        assert_eq!(host("unix:/run/m.sock"), Ok("localhost".into()));
    }
}

//! Values of `meridian.toml` that accept more than one TOML type.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::PathBuf;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::text::is_printable;

/// `"auto"`, or a given value.
///
/// ```
/// use meridian_core::config::Auto;
///
/// assert_eq!(serde_json::from_str::<Auto<bool>>("true")?, Auto::Set(true));
/// assert_eq!(serde_json::to_string(&Auto::<bool>::Auto)?, "\"auto\"");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Auto<T> {
    /// `"auto"`: the host finds out.
    #[default]
    Auto,
    /// A given value.
    Set(T),
}

/// A value that can replace `"auto"`.
trait Plain: Sized {
    const EXPECTED: &'static str;
    fn schema() -> serde_json::Value;
    fn from_bool(value: bool) -> Option<Self>;
}

impl Plain for bool {
    const EXPECTED: &'static str = "\"auto\", true or false";
    fn schema() -> serde_json::Value {
        serde_json::json!({ "type": "boolean" })
    }
    fn from_bool(value: bool) -> Option<Self> {
        Some(value)
    }
}

impl<T: Serialize> Serialize for Auto<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Set(value) => value.serialize(serializer),
        }
    }
}

impl<'de, T: Plain> Deserialize<'de> for Auto<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AutoVisitor(PhantomData))
    }
}

struct AutoVisitor<T>(PhantomData<T>);

impl<T: Plain> Visitor<'_> for AutoVisitor<T> {
    type Value = Auto<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(T::EXPECTED)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        let unexpected = serde::de::Unexpected::Str(text);
        if text == "auto" { Ok(Auto::Auto) } else { Err(E::invalid_value(unexpected, &self)) }
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Self::Value, E> {
        let unexpected = serde::de::Unexpected::Bool(value);
        T::from_bool(value).map(Auto::Set).ok_or_else(|| E::invalid_type(unexpected, &self))
    }
}

impl<T: Plain> JsonSchema for Auto<T> {
    fn schema_name() -> Cow<'static, str> {
        "Auto".into()
    }
    fn inline_schema() -> bool {
        true
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "type": "string", "const": "auto" }, T::schema()] })
    }
}

/// A number of tokens, or `"unchanged"`.
///
/// ```
/// use meridian_core::config::Tokens;
///
/// assert_eq!(serde_json::from_str::<Tokens>("512")?.get(), Some(512));
/// assert_eq!(serde_json::to_string(&Tokens::default())?, "\"unchanged\"");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokens(Option<u32>);

impl Tokens {
    const UNCHANGED: &str = "unchanged";

    /// The number; `None` for `"unchanged"`.
    #[must_use]
    pub fn get(self) -> Option<u32> {
        self.0
    }
}

impl Serialize for Tokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            None => serializer.serialize_str(Self::UNCHANGED),
            Some(tokens) => serializer.serialize_u32(tokens),
        }
    }
}

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TokensVisitor)
    }
}

struct TokensVisitor;

impl Visitor<'_> for TokensVisitor {
    type Value = Tokens;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("\"unchanged\" or an integer")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        let unexpected = serde::de::Unexpected::Str(text);
        if text == Tokens::UNCHANGED { Ok(Tokens(None)) } else { Err(E::invalid_value(unexpected, &self)) }
    }

    fn visit_i64<E: serde::de::Error>(self, tokens: i64) -> Result<Self::Value, E> {
        let unexpected = serde::de::Unexpected::Signed(tokens);
        u32::try_from(tokens).map(|tokens| Tokens(Some(tokens))).map_err(|_| E::invalid_value(unexpected, &self))
    }

    fn visit_u64<E: serde::de::Error>(self, tokens: u64) -> Result<Self::Value, E> {
        let unexpected = serde::de::Unexpected::Unsigned(tokens);
        u32::try_from(tokens).map(|tokens| Tokens(Some(tokens))).map_err(|_| E::invalid_value(unexpected, &self))
    }
}

impl JsonSchema for Tokens {
    fn schema_name() -> Cow<'static, str> {
        "Tokens".into()
    }
    fn inline_schema() -> bool {
        true
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let number = serde_json::json!({ "type": "integer", "minimum": 0, "maximum": 16_777_216 });
        json_schema!({ "anyOf": [{ "type": "string", "const": "unchanged" }, number] })
    }
}

/// Alternatives of a text: `""` for none, one string, or a list of strings.
///
/// ```
/// use meridian_core::config::Texts;
///
/// let either: Texts = serde_json::from_str(r#"["</think>", "</thought>"]"#)?;
/// assert_eq!(either.as_slice(), ["</think>", "</thought>"]);
/// assert!(Texts::from("").is_empty());
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Texts(Vec<String>);

impl Texts {
    /// Most alternatives.
    pub const MAX: usize = 8;
    /// Longest alternative, bytes.
    pub const MAX_BYTES: usize = 256;

    /// The alternatives, none of them empty.
    #[must_use]
    pub fn as_slice(&self) -> &[String] {
        &self.0
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// `"auto"`: the host finds out.
    #[must_use]
    pub fn auto() -> Self {
        Self(vec!["auto".to_owned()])
    }

    /// Whether it is `"auto"`.
    #[must_use]
    pub fn is_auto(&self) -> bool {
        matches!(self.0.as_slice(), [text] if text == "auto")
    }

    /// The alternatives, with `text` for `"auto"`.
    #[must_use]
    pub fn or(&self, text: &str) -> Vec<String> {
        if self.is_auto() { vec![text.to_owned()] } else { self.0.clone() }
    }

    fn checked(texts: Vec<String>) -> Result<Self, &'static str> {
        if texts.len() > Self::MAX {
            return Err("at most 8 alternatives");
        }
        if texts.iter().any(|text| text.is_empty() || text.len() > Self::MAX_BYTES) {
            return Err("every alternative of 1 to 256 bytes");
        }
        Ok(Self(texts))
    }
}

impl From<&str> for Texts {
    fn from(text: &str) -> Self {
        Self(if text.is_empty() { Vec::new() } else { vec![text.to_owned()] })
    }
}

impl FromIterator<String> for Texts {
    fn from_iter<I: IntoIterator<Item = String>>(texts: I) -> Self {
        Self(texts.into_iter().filter(|text| !text.is_empty()).collect())
    }
}

impl Serialize for Texts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.as_slice() {
            [] => serializer.serialize_str(""),
            [text] => serializer.serialize_str(text),
            texts => texts.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextsVisitor)
    }
}

struct TextsVisitor;

impl<'de> Visitor<'de> for TextsVisitor {
    type Value = Texts;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a string or a list of strings")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Texts, E> {
        let texts = if text.is_empty() { Vec::new() } else { vec![text.to_owned()] };
        Texts::checked(texts).map_err(|expected| E::custom(format_args!("expected {expected}")))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Texts, A::Error> {
        let mut texts = Vec::new();
        while let Some(text) = list.next_element()? {
            texts.push(text);
        }
        Texts::checked(texts).map_err(|expected| A::Error::custom(format_args!("expected {expected}")))
    }
}

impl JsonSchema for Texts {
    fn schema_name() -> Cow<'static, str> {
        "Texts".into()
    }
    fn inline_schema() -> bool {
        true
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let text = |min: usize| serde_json::json!({ "type": "string", "minLength": min, "maxLength": Self::MAX_BYTES });
        json_schema!({ "anyOf": [text(0), { "type": "array", "items": text(1), "maxItems": Self::MAX }] })
    }
}

/// The address of a listener: `telemetry.prometheus`, `admin.listen`.
///
/// ```
/// use meridian_core::config::Listen;
///
/// assert_eq!(Listen::parse("127.0.0.1:9464"), Ok(Listen::Tcp(([127, 0, 0, 1], 9464).into())));
/// assert_eq!(Listen::parse(""), Ok(Listen::Off));
/// assert!(Listen::parse("0.0.0.0:9464").is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// No listener.
    Off,
    /// An address of this machine; from [`Listen::parse`], a loopback address.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl Listen {
    /// Parse `""`, `IP:port` or `unix:PATH`.
    ///
    /// # Errors
    /// The expectation, as in [`Error::ConfigValidation`](crate::Error::ConfigValidation).
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let listen = Self::parse_any(text)?;
        if listen.is_of_this_machine() {
            Ok(listen)
        } else {
            Err("must be a loopback address such as 127.0.0.1 or [::1]: other machines must not reach it")
        }
    }

    /// As [`parse`](Self::parse), and any other `IP:port` as well.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn parse_any(text: &str) -> Result<Self, &'static str> {
        if text.is_empty() {
            return Ok(Self::Off);
        }
        if let Some(path) = text.strip_prefix("unix:") {
            // sun_path of Linux, without its terminating zero.
            return match path.len() {
                1..=107 if !path.contains('\0') => Ok(Self::Unix(path.into())),
                _ => Err("must be unix:PATH with a path of 1 to 107 bytes"),
            };
        }
        text.parse().map(Self::Tcp).map_err(|_| "must be IP:port, unix:PATH or empty")
    }

    /// The text of one data-parallel rank: `{rank}` in the path of a socket is its number, and `+{rank}` after a port adds
    /// it to the port. Other texts stay.
    ///
    /// ```
    /// use meridian_core::config::Listen;
    ///
    /// assert_eq!(Listen::of_rank("10.0.0.7:9465+{rank}", 2), "10.0.0.7:9467");
    /// assert_eq!(Listen::of_rank("unix:/run/meridian-{rank}.sock", 2), "unix:/run/meridian-2.sock");
    /// assert_eq!(Listen::of_rank("127.0.0.1:9465", 2), "127.0.0.1:9465");
    /// ```
    #[must_use]
    pub fn of_rank(text: &str, rank: u32) -> String {
        if text.starts_with("unix:") {
            return of_rank(text, rank);
        }
        let sum = text.strip_suffix("+{rank}").and_then(|address| {
            let (host, port) = address.rsplit_once(':')?;
            let port = port.parse::<u16>().ok()?.checked_add(u16::try_from(rank).ok()?)?;
            Some(format!("{host}:{port}"))
        });
        sum.unwrap_or_else(|| text.to_owned())
    }

    /// Whether one process can listen on both.
    pub(super) fn is_apart(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Off, _) | (_, Self::Off) => true,
            // Port 0 is any free port.
            (Self::Tcp(one), Self::Tcp(other)) => {
                let (own, others) = (one.ip().to_canonical(), other.ip().to_canonical());
                let is_any = own.is_unspecified() || others.is_unspecified();
                one.port() == 0 || one.port() != other.port() || !is_any && own != others
            }
            _ => self != other,
        }
    }

    /// Whether only this machine can reach it.
    #[must_use]
    pub fn is_of_this_machine(&self) -> bool {
        match self {
            Self::Off | Self::Unix(_) => true,
            Self::Tcp(address) => address.ip().to_canonical().is_loopback(),
        }
    }
}

/// A path of `[admin]` for one data-parallel rank: `{rank}` in it is the rank's number.
///
/// ```
/// assert_eq!(meridian_core::config::of_rank("tokens/{rank}.token", 1), "tokens/1.token");
/// ```
#[must_use]
pub fn of_rank(path: &str, rank: u32) -> String {
    path.replace("{rank}", &rank.to_string())
}

/// The address of a collector: `telemetry.otlp_endpoint`.
///
/// ```
/// use meridian_core::config::HttpUrl;
///
/// assert!(HttpUrl::parse("http://[::1]:4318/v1/traces").unwrap().is_loopback());
/// assert!(!HttpUrl::parse("http://collector:4318").unwrap().is_loopback());
/// assert!(HttpUrl::parse("http://[::1").is_err() && HttpUrl::parse("http://localhost:99999").is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpUrl(url::Url);

impl HttpUrl {
    /// Parse an `http://` or `https://` URL.
    ///
    /// # Errors
    /// The expectation, as in [`Error::ConfigValidation`](crate::Error::ConfigValidation).
    pub fn parse(text: &str) -> Result<Self, String> {
        const EXPECTED: &str = "must be an http:// or https:// URL, or empty";
        let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
        // The parser drops some of these characters.
        let is_plain = !text.contains(|c: char| c == '\\' || c.is_whitespace() || c.is_control());
        let Some(rest) = rest.filter(|_| is_plain) else { return Err(EXPECTED.into()) };
        match url::Url::parse(text) {
            Ok(url) if rest.starts_with('/') || !url.has_host() => Err(format!("{EXPECTED}: empty host")),
            Ok(url) if url.port() == Some(0) => Err("must have a port in 1..=65535".into()),
            Ok(url) => Ok(Self(url)),
            Err(error) => Err(format!("{EXPECTED}: {error}")),
        }
    }

    /// Whether its host name or address is this machine.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        match self.0.host() {
            Some(url::Host::Domain(name)) => {
                let name = name.trim_end_matches('.');
                name == "localhost" || name.ends_with(".localhost")
            }
            Some(url::Host::Ipv4(address)) => address.is_loopback(),
            Some(url::Host::Ipv6(address)) => address.to_canonical().is_loopback(),
            None => false,
        }
    }
}

/// A TOML value in one line, which is again TOML.
///
/// ```
/// let table = toml::Table::from_iter([("a".to_owned(), toml::Value::from(vec![1, 2]))]);
/// assert_eq!(meridian_core::config::inline(&table.into()), "{ \"a\" = [1, 2] }");
/// ```
#[must_use]
pub fn inline(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => basic_string(text),
        toml::Value::Array(items) => format!("[{}]", items.iter().map(inline).collect::<Vec<_>>().join(", ")),
        toml::Value::Table(table) if table.is_empty() => "{}".into(),
        toml::Value::Table(table) => {
            let pairs = table.iter().map(|(key, value)| format!("{} = {}", basic_string(key), inline(value)));
            format!("{{ {} }}", pairs.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// JSON's escapes are valid in TOML too; other characters that a terminal does not show get TOML's long form.
fn basic_string(text: &str) -> String {
    let json = serde_json::Value::from(text).to_string();
    json.chars().fold(String::with_capacity(json.len()), |mut out, c| {
        if is_printable(c) {
            out.push(c);
        } else {
            // Writing to a string does not fail.
            let _ = write!(out, "\\U{:08x}", u32::from(c));
        }
        out
    })
}

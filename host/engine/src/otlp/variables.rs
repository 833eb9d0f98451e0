//! Where spans go: the configuration, and OpenTelemetry's variables where it says nothing.

use std::fmt;
use std::time::Duration;

use meridian_core::config::TelemetryConfig;
use opentelemetry::trace::{SpanKind, TraceId};
use opentelemetry::{Key, KeyValue};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SamplingDecision, ShouldSample as _};

use super::TraceParent;

/// Reads a variable of the environment.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Longest limit of one batch that a variable may set: an engine that ends waits for the batch under way.
const MOST_TIMEOUT: Duration = Duration::from_secs(10);

/// The settings of an exporter.
pub(super) struct Export {
    /// The whole URL, and what the field or variable has of it.
    pub(super) endpoint: String,
    pub(super) named_by: &'static str,
    given: String,
    /// A file of certificates, and its field or variable; empty for none.
    pub(super) ca_file: (&'static str, String),
    pub(super) resource: Resource,
    pub(super) sampling: Sampling,
    pub(super) timeout: Duration,
}

impl Export {
    /// `None` when nothing is to be sent. `sending` is the limit of one batch without a variable.
    ///
    /// # Errors
    /// The variable, its value, and what was expected.
    pub(super) fn of(
        telemetry: &TelemetryConfig,
        sending: Duration,
        variables: Variables<'_>,
    ) -> Result<Option<Self>, String> {
        let TelemetryConfig { prometheus: _, tenants: _, otlp_endpoint, otlp_ca_file, service_name } = telemetry;
        let set = |name: &str| variables(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        if set("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        // Of traces, else of all signals.
        let first = |names: [&'static str; 2]| names.into_iter().find_map(|name| Some((name, set(name)?)));
        let (named_by, given, endpoint) = if otlp_endpoint.is_empty() {
            if set("OTEL_TRACES_EXPORTER").is_some_and(|list| list.split(',').all(|exporter| exporter.trim() != "otlp"))
            {
                return Ok(None);
            }
            let endpoints = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
            let Some((name, endpoint)) = first(endpoints) else { return Ok(None) };
            let protocol = first(["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"]);
            if let Some((name, protocol)) = protocol.filter(|(_, protocol)| protocol != "http/protobuf") {
                return Err(format!("{name}: {protocol:?}: no traces are sent: expected http/protobuf"));
            }
            let is_whole = name == endpoints[0];
            let whole =
                if is_whole { endpoint.clone() } else { format!("{}/v1/traces", endpoint.trim_end_matches('/')) };
            (name, endpoint, whole)
        } else {
            ("telemetry.otlp_endpoint", otlp_endpoint.clone(), with_path(otlp_endpoint))
        };
        let ca_file = if otlp_ca_file.is_empty() {
            first(["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"]).unwrap_or_default()
        } else {
            ("telemetry.otlp_ca_file", otlp_ca_file.clone())
        };
        let timeout = first(["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"]);
        let timeout = match timeout {
            Some((name, text)) => match text.parse().ok().filter(|ms| *ms > 0) {
                Some(ms) => Duration::from_millis(ms).min(MOST_TIMEOUT),
                None => return Err(format!("{name}: {text:?}: no traces are sent: expected milliseconds, at least 1")),
            },
            None => sending,
        };
        let sampling = Sampling::of(set("OTEL_TRACES_SAMPLER"), set("OTEL_TRACES_SAMPLER_ARG"))?;
        let described = set("OTEL_RESOURCE_ATTRIBUTES").map(|text| attributes(&text)).transpose()?.unwrap_or_default();
        let is_set = *service_name != TelemetryConfig::default().service_name;
        let named = set("OTEL_SERVICE_NAME").filter(|_| !is_set);
        let is_named = is_set || named.is_some() || described.iter().all(|pair| pair.key != Key::new("service.name"));
        let mut resource = Resource::builder_empty()
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .with_attributes(described)
            .with_attribute(KeyValue::new("process.pid", i64::from(std::process::id())));
        if is_named {
            resource = resource.with_service_name(named.unwrap_or_else(|| service_name.clone()));
        }
        Ok(Some(Self { endpoint, named_by, given, ca_file, resource: resource.build(), sampling, timeout }))
    }

    /// The given URL without the login that it may have, for errors.
    pub(super) fn shown(&self) -> String {
        let Some((scheme, rest)) = self.given.split_once("://") else { return self.given.clone() };
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let behind_login = authority.rfind('@').map_or(0, |at| at + 1);
        format!("{scheme}://{}", &rest[behind_login..])
    }
}

/// The URL unchanged, with the path of the protocol if it has none.
fn with_path(endpoint: &str) -> String {
    let rest = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
    match rest.split_once('/') {
        Some((_, path)) if !path.is_empty() => endpoint.to_owned(),
        _ => format!("{}/v1/traces", endpoint.trim_end_matches('/')),
    }
}

/// `name=value,name=value`, where the values may be percent-encoded.
fn attributes(text: &str) -> Result<Vec<KeyValue>, String> {
    let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    let read = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        let (name, value) = (decoded(name.trim())?, decoded(value.trim())?);
        (!name.is_empty()).then(|| KeyValue::new(name, value))
    };
    let all: Option<Vec<_>> = pairs.map(read).collect();
    all.ok_or_else(|| {
        // Its values are not shown: they are not ours to print.
        String::from("OTEL_RESOURCE_ATTRIBUTES: no traces are sent: expected name=value,name=value, percent-encoded")
    })
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, behind @ ..] = rest {
        rest = behind;
        bytes.push(match (first, behind) {
            (b'%', [high, low, behind @ ..]) => {
                let digit = |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
                rest = behind;
                digit(*high)? * 16 + digit(*low)?
            }
            (b'%', _) => return None,
            (byte, _) => *byte,
        });
    }
    String::from_utf8(bytes).ok()
}

/// Which traces are sent.
pub(super) struct Sampling {
    follows_caller: bool,
    root: Sampler,
}

impl Default for Sampling {
    /// Those that their callers keep, and all that have no caller.
    fn default() -> Self {
        Self { follows_caller: true, root: Sampler::AlwaysOn }
    }
}

impl Sampling {
    fn of(name: Option<String>, argument: Option<String>) -> Result<Self, String> {
        let Some(name) = name else { return Ok(Self::default()) };
        let (follows_caller, root) = match name.strip_prefix("parentbased_") {
            Some(root) => (true, root),
            None => (false, name.as_str()),
        };
        let root = match root {
            "always_on" => Sampler::AlwaysOn,
            "always_off" => Sampler::AlwaysOff,
            "traceidratio" => Sampler::TraceIdRatioBased(ratio(argument)?),
            _ => {
                let known = "always_on, always_off, traceidratio, or parentbased_ and one of them";
                return Err(format!("OTEL_TRACES_SAMPLER: {name:?}: no traces are sent: expected {known}"));
            }
        };
        Ok(Self { follows_caller, root })
    }

    /// Whether this trace is sent. `parent` is the span of the caller.
    pub(super) fn keeps(&self, parent: Option<&TraceParent>, trace: TraceId) -> bool {
        match parent {
            Some(parent) if self.follows_caller => parent.is_sampled(),
            _ => {
                let result = self.root.should_sample(None, trace, "", &SpanKind::Internal, &[], &[]);
                result.decision == SamplingDecision::RecordAndSample
            }
        }
    }
}

fn ratio(argument: Option<String>) -> Result<f64, String> {
    let Some(text) = argument else { return Ok(1.0) };
    text.parse()
        .ok()
        .filter(|ratio| (0.0..=1.0).contains(ratio))
        .ok_or_else(|| format!("OTEL_TRACES_SAMPLER_ARG: {text:?}: no traces are sent: expected a number from 0 to 1"))
}

impl fmt::Debug for Sampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sampling").field("follows_caller", &self.follows_caller).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENDING: Duration = Duration::from_secs(2);

    fn export(telemetry: &TelemetryConfig, set: &[(&str, &str)]) -> Result<Option<Export>, String> {
        let find = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        Export::of(telemetry, SENDING, &find)
    }

    fn configured(otlp_endpoint: &str, service_name: &str) -> TelemetryConfig {
        let service_name = service_name.into();
        TelemetryConfig { otlp_endpoint: otlp_endpoint.into(), service_name, ..TelemetryConfig::default() }
    }

    fn resource(telemetry: &TelemetryConfig, set: &[(&str, &str)], name: &str) -> Option<String> {
        let resource = export(telemetry, set).unwrap().unwrap().resource;
        resource.get(&Key::new(name.to_owned())).map(|value| value.to_string())
    }

    #[test]
    fn the_path_of_the_protocol_is_added_where_there_is_none() {
        for endpoint in ["http://h:4318", "http://h:4318/"] {
            assert_eq!(with_path(endpoint), "http://h:4318/v1/traces");
        }
        for endpoint in ["http://h:4318/v1/traces", "http://h/otlp/"] {
            assert_eq!(with_path(endpoint), endpoint);
        }
    }

    #[test]
    fn the_configuration_wins_over_the_variables() {
        let set = [
            ("OTEL_SERVICE_NAME", "svc"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/"),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca.pem"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "500"),
        ];
        let telemetry = TelemetryConfig { otlp_ca_file: "own.pem".into(), ..configured("http://own:1/x", "own") };
        let own = export(&telemetry, &set).unwrap().unwrap();
        assert_eq!((own.endpoint.as_str(), own.named_by), ("http://own:1/x", "telemetry.otlp_endpoint"));
        assert_eq!(own.ca_file, ("telemetry.otlp_ca_file", "own.pem".into()));
        assert_eq!(resource(&telemetry, &set, "service.name"), Some("own".into()));
        let other = export(&TelemetryConfig::default(), &set).unwrap().unwrap();
        assert_eq!((other.endpoint.as_str(), other.named_by), ("http://collector:4318/v1/traces", set[1].0));
        assert_eq!(other.ca_file, ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca.pem".into()));
        assert_eq!(other.timeout, Duration::from_millis(500));
        assert_eq!(resource(&TelemetryConfig::default(), &set, "service.name"), Some("svc".into()));
    }

    #[test]
    fn variables_of_traces_win_over_those_of_all_signals() {
        let set = [
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:1/as/is"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:1"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "3600000"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ];
        let found = export(&TelemetryConfig::default(), &set).unwrap().unwrap();
        assert_eq!((found.endpoint.as_str(), found.timeout), ("http://traces:1/as/is", MOST_TIMEOUT));
    }

    #[test]
    fn attributes_of_the_resource_are_taken_over() {
        let telemetry = configured("http://h:1", "meridian");
        let set =
            [("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=a, note=a%2Cb%20c,service.name=of-list,service.version=7")];
        for (name, value) in
            [("k8s.pod.name", "a"), ("note", "a,b c"), ("service.name", "of-list"), ("service.version", "7")]
        {
            assert_eq!(resource(&telemetry, &set, name), Some(value.into()));
        }
        assert_eq!(resource(&telemetry, &[set[0], ("OTEL_SERVICE_NAME", "svc")], "service.name"), Some("svc".into()));
        assert_eq!(resource(&telemetry, &[], "service.name"), Some("meridian".into()));
        let refused = export(&telemetry, &[("OTEL_RESOURCE_ATTRIBUTES", "secret")]).err().unwrap();
        assert!(refused.starts_with("OTEL_RESOURCE_ATTRIBUTES: ") && !refused.contains("secret"), "{refused}");
    }

    #[test]
    fn nothing_is_sent_where_the_variables_say_so() {
        let named = configured("http://h:1", "meridian");
        assert!(export(&TelemetryConfig::default(), &[]).unwrap().is_none());
        assert!(export(&named, &[("OTEL_SDK_DISABLED", "TRUE")]).unwrap().is_none());
        assert!(export(&named, &[("OTEL_SDK_DISABLED", "false")]).unwrap().is_some());
        let none = [("OTEL_TRACES_EXPORTER", "none"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:1")];
        assert!(export(&TelemetryConfig::default(), &none).unwrap().is_none());
        assert!(export(&named, &none).unwrap().is_some(), "the configuration names a collector");
    }

    #[test]
    fn a_wrong_variable_is_named() {
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:1");
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
            ("OTEL_TRACES_SAMPLER", "xray"),
        ] {
            let refused = export(&TelemetryConfig::default(), &[endpoint, (name, value)]).err().unwrap();
            let expected = format!("{name}: {value:?}: no traces are sent: expected ");
            assert!(refused.starts_with(&expected), "{refused}");
        }
        let sampler = ("OTEL_TRACES_SAMPLER", "traceidratio");
        let refused = export(&TelemetryConfig::default(), &[endpoint, sampler, ("OTEL_TRACES_SAMPLER_ARG", "2")]);
        assert!(refused.err().unwrap().starts_with("OTEL_TRACES_SAMPLER_ARG: \"2\": "));
        let login = export(&configured("http://ann:geheim@h:1/x", "meridian"), &[]).unwrap().unwrap();
        assert_eq!(login.shown(), "http://h:1/x");
    }

    #[test]
    fn a_sampler_keeps_its_share_and_follows_the_caller_if_it_should() {
        let sampling = |name: &str, argument: &str| {
            Sampling::of(Some(name.into()), Some(argument.to_owned()).filter(|text| !text.is_empty())).unwrap()
        };
        let caller =
            |flags| TraceParent::parse(&format!("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flags}"));
        let (kept, dropped) = (caller("01").unwrap(), caller("00").unwrap());
        let trace = |low: u64| TraceId::from_bytes(u128::from(low).to_be_bytes());
        let half = sampling("traceidratio", "0.5");
        assert_eq!([1 << 62, u64::MAX].map(|low| half.keeps(None, trace(low))), [true, false]);
        assert_eq!([&kept, &dropped].map(|parent| half.keeps(Some(parent), trace(u64::MAX))), [false, false]);
        let off = sampling("parentbased_always_off", "");
        assert!(off.keeps(Some(&kept), trace(1)) && !off.keeps(Some(&dropped), trace(1)) && !off.keeps(None, trace(1)));
        let on = Sampling::default();
        assert!(on.keeps(Some(&kept), trace(1)) && !on.keeps(Some(&dropped), trace(1)) && on.keeps(None, trace(1)));
    }
}

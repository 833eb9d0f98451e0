//! Traces over real sockets: what a collector receives, and that a bad one costs the engine nothing.

#![allow(dead_code, reason = "the support is shared")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use meridian_core::config::TelemetryConfig;
use meridian_core::{Overtaking, Part, Rule};
use meridian_engine::control::{Control, ControlError, FaultEntry, Mode, ProcessStatus, SlotName, SwapReport, Upload};
use meridian_engine::explain::{Explanation, PartTime};
use meridian_engine::otlp::{FinishedRequest, HandoffSpan, Sent, TraceLimits, TraceParent, Traces};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::support;

/// What a hang is told by; nothing waits as long.
const HANG: Duration = Duration::from_secs(60);

/// Batches are sent at once, and nothing runs into a limit.
const SOON: TraceLimits =
    TraceLimits { queue: 64, batch: 1, interval: Duration::from_millis(10), sending: HANG, closing: HANG };

/// The trace and the span of a caller.
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: &str = "00f067aa0ba902b7";

fn caller(flags: &str) -> Option<TraceParent> {
    TraceParent::parse(&format!("00-{TRACE}-{SPAN}-{flags}"))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// How a collector behaves.
#[derive(Clone, Copy, PartialEq)]
enum Answers {
    Takes,
    Fails,
    /// Takes the connection and says nothing.
    Never,
}

struct Collector {
    address: String,
    exports: Receiver<(String, ExportTraceServiceRequest)>,
}

impl Collector {
    fn start(answers: Answers) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (received, exports) = channel();
        std::thread::spawn(move || {
            let mut kept = Vec::new();
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                if answers == Answers::Never {
                    kept.push(stream);
                    continue;
                }
                let received = received.clone();
                std::thread::spawn(move || {
                    serve(stream, answers, |path, export| received.send((path, export)).is_ok())
                });
            }
        });
        Self { address, exports }
    }

    fn telemetry(&self) -> TelemetryConfig {
        telemetry(&format!("http://{}", self.address))
    }

    /// Spans and the attributes of the resource of the next export.
    fn next(&self) -> (Vec<Span>, BTreeMap<String, String>) {
        let (path, export) = self.exports.recv_timeout(HANG).expect("an export");
        assert_eq!(path, "/v1/traces");
        let [of_resource] = <[_; 1]>::try_from(export.resource_spans).unwrap();
        let spans: Vec<Span> = of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans).collect();
        (spans, texts(&of_resource.resource.unwrap().attributes))
    }
}

/// Requests of one connection.
fn serve(stream: impl Read + Write, answers: Answers, mut take: impl FnMut(String, ExportTraceServiceRequest) -> bool) {
    let mut reader = BufReader::new(stream);
    loop {
        let (mut line, mut length) = (String::new(), 0);
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let path = line.split(' ').nth(1).unwrap().to_owned();
        loop {
            line.clear();
            reader.read_line(&mut line).unwrap();
            if line == "\r\n" {
                break;
            }
            let (name, value) = line.split_once(':').unwrap();
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let code = if answers == Answers::Fails { "500 Broken" } else { "200 OK" };
        let answer = format!("HTTP/1.1 {code}\r\nContent-Length: 0\r\n\r\n");
        let _ = reader.get_mut().write_all(answer.as_bytes());
        if !take(path, ExportTraceServiceRequest::decode(body.as_slice()).unwrap()) {
            return;
        }
    }
}

fn telemetry(otlp_endpoint: &str) -> TelemetryConfig {
    TelemetryConfig {
        otlp_endpoint: otlp_endpoint.into(),
        service_name: "reasoning".into(),
        ..TelemetryConfig::default()
    }
}

fn start(telemetry: &TelemetryConfig, limits: TraceLimits) -> Traces {
    Traces::start_with(telemetry, "Qwen/Qwen3-8B", None, limits, &|_| None).unwrap().unwrap()
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |value: &Value| match value {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        Value::DoubleValue(number) => number.to_string(),
        other => format!("{other:?}"),
    };
    attributes.iter().map(|kv| (kv.key.clone(), text(kv.value.as_ref().unwrap().value.as_ref().unwrap()))).collect()
}

fn finished(id: &str) -> FinishedRequest {
    FinishedRequest {
        id: id.into(),
        arrival_ms: 1000.0,
        first_token_ms: Some(1250.0),
        end_of_thinking_ms: Some(3000.0),
        first_output_ms: Some(3020.0),
        finished_ms: 4000.0,
        prompt_tokens: 100,
        cached_tokens: 64,
        think_tokens: 70,
        output_tokens: 30,
        preemptions: 1,
        reason: "stop".into(),
        policy: ("output-first".into(), "0.1.0".into()),
        parent: None,
        explanation: None,
    }
}

#[test]
fn a_request_is_a_span_with_its_phases() {
    let collector = Collector::start(Answers::Takes);
    let traces = start(&collector.telemetry(), SOON);
    traces.request(finished("cmpl-1"));
    let (spans, resource) = collector.next();
    assert_eq!(resource["service.name"], "reasoning");
    assert_eq!(resource["process.pid"], std::process::id().to_string());
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["request", "prefill", "think", "answer"]);
    let whole = &spans[0];
    let attributes = texts(&whole.attributes);
    for (name, value) in [
        ("gen_ai.request.model", "Qwen/Qwen3-8B"),
        ("gen_ai.usage.input_tokens", "100"),
        ("gen_ai.usage.output_tokens", "100"),
        ("meridian.request.id", "cmpl-1"),
        ("meridian.tokens.cached", "64"),
        ("meridian.tokens.think", "70"),
        ("meridian.tokens.answer", "30"),
        ("meridian.preemptions", "1"),
        ("meridian.policy.name", "output-first"),
        ("meridian.policy.version", "0.1.0"),
        ("meridian.ttft_ms", "250"),
        ("meridian.ttfo_ms", "2020"),
    ] {
        assert_eq!(attributes[name], value, "{name}");
    }
    assert!(attributes["gen_ai.response.finish_reasons"].contains("stop"));
    let since = |nanos: u64| (nanos - whole.start_time_unix_nano) as f64 / 1e6;
    let times: Vec<_> =
        spans.iter().map(|span| (since(span.start_time_unix_nano), since(span.end_time_unix_nano))).collect();
    assert_eq!(times, [(0.0, 3000.0), (0.0, 250.0), (250.0, 2000.0), (2020.0, 3000.0)]);
    assert!(whole.parent_span_id.is_empty());
    for phase in &spans[1..] {
        assert_eq!((&phase.trace_id, &phase.parent_span_id), (&whole.trace_id, &whole.span_id), "{}", phase.name);
    }
    assert_eq!(traces.close(), Sent { requests: 1, lost: 0 });
}

#[test]
fn a_request_joins_the_trace_of_its_caller_and_says_where_its_time_went() {
    let collector = Collector::start(Answers::Takes);
    let traces = start(&collector.telemetry(), SOON);
    let explanation = Explanation {
        parts: vec![PartTime { part: Part::Seat, ms: 200.0 }, PartTime { part: Part::Think, ms: 2800.0 }],
        overtaken: 2,
        rescues: 1,
        overtakings: vec![Overtaking {
            by: 9,
            at_ms: 1100.0,
            rule: Rule::Key,
            own_key: Some(3.0),
            other_key: Some(1.0),
        }],
        ..Explanation::default()
    };
    let joined = |id: &str, flags: &str| FinishedRequest {
        parent: caller(flags),
        explanation: Some(explanation.clone()),
        ..finished(id)
    };
    // The caller keeps no spans of the first: neither does Meridian.
    traces.request(joined("unsampled", "00"));
    traces.request(joined("joined", "01"));
    let (spans, _) = collector.next();
    let whole = &spans[0];
    assert_eq!(texts(&whole.attributes)["meridian.request.id"], "joined");
    assert_eq!((hex(&whole.trace_id), hex(&whole.parent_span_id)), (TRACE.to_owned(), SPAN.to_owned()));
    assert!(spans[1..].iter().all(|phase| phase.trace_id == whole.trace_id && phase.parent_span_id == whole.span_id));
    let [event] = whole.events.as_slice() else { panic!("{:?}", whole.events) };
    assert_eq!((event.name.as_str(), event.time_unix_nano), ("why", whole.end_time_unix_nano));
    let said = texts(&event.attributes);
    for (name, value) in [
        ("meridian.why.seat_ms", "200"),
        ("meridian.why.think_ms", "2800"),
        ("meridian.why.overtaken", "2"),
        ("meridian.why.rescues", "1"),
        ("meridian.why.rule", "key"),
    ] {
        assert_eq!(said[name], value, "{name}");
    }
}

#[test]
fn a_header_that_is_none_begins_a_trace_of_its_own() {
    let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    assert!(TraceParent::parse(good).is_some_and(|parent| parent.is_sampled()));
    assert!(TraceParent::parse(&good.replacen("00-", "cc-", 1)).is_some(), "a later version");
    for bad in [
        "",
        "00",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
        "00-\u{e9}bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    ] {
        assert_eq!(TraceParent::parse(bad), None, "{bad}");
    }
}

/// A collector with TLS, whose certificate only the authority of the tests has signed.
fn start_with_tls() -> Collector {
    let file = |name: &str| {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls");
        std::fs::read(folder.join(name)).unwrap()
    };
    let certificate = CertificateDer::from_pem_slice(&file("collector.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_slice(&file("collector.key")).unwrap();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(vec![certificate], key);
    let config = Arc::new(config.unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (received, exports) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let session = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
            let received = received.clone();
            let stream = rustls::StreamOwned::new(session, stream.unwrap());
            std::thread::spawn(move || {
                serve(stream, Answers::Takes, |path, export| received.send((path, export)).is_ok())
            });
        }
    });
    Collector { address, exports }
}

#[test]
fn a_handoff_is_a_span_with_its_transfer_in_the_trace_of_its_caller() {
    let collector = Collector::start(Answers::Takes);
    let traces = start(&collector.telemetry(), SOON);
    let ended = |flags: &str| HandoffSpan {
        engine: "127.0.0.1:8002".into(),
        blocks: 9,
        answer_tokens: 40,
        begun_after: Some(Duration::from_millis(30)),
        took: Duration::from_millis(500),
        failure: None,
        parent: caller(flags),
    };
    // The caller keeps no spans of the first: neither does Meridian.
    traces.handoff(ended("00"));
    traces.handoff(ended("01"));
    let (spans, _) = collector.next();
    let [whole, transfer] = spans.as_slice() else { panic!("{spans:?}") };
    assert_eq!((whole.name.as_str(), transfer.name.as_str()), ("handoff", "transfer"));
    assert_eq!((hex(&whole.trace_id), hex(&whole.parent_span_id)), (TRACE.to_owned(), SPAN.to_owned()));
    assert_eq!((&transfer.trace_id, &transfer.parent_span_id), (&whole.trace_id, &whole.span_id));
    let said = texts(&whole.attributes);
    for (name, value) in
        [("server.address", "127.0.0.1:8002"), ("meridian.handoff.blocks", "9"), ("meridian.tokens.answer", "40")]
    {
        assert_eq!(said[name], value, "{name}");
    }
    let took = |span: &Span| (span.end_time_unix_nano - span.start_time_unix_nano) / 1_000_000;
    assert_eq!((took(whole), took(transfer)), (500, 30));
    assert_eq!(transfer.start_time_unix_nano, whole.start_time_unix_nano);

    traces.handoff(HandoffSpan { begun_after: None, failure: Some("unreachable"), ..ended("01") });
    let (spans, _) = collector.next();
    let [alone] = spans.as_slice() else { panic!("{spans:?}") };
    assert_eq!(alone.status.as_ref().map(|status| status.message.as_str()), Some("unreachable"));
}

#[test]
fn spans_go_over_tls_to_a_collector_that_is_trusted_and_to_no_other() {
    let collector = start_with_tls();
    let authority = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls/authority.pem");
    let trusting = TelemetryConfig {
        otlp_ca_file: authority.to_str().unwrap().into(),
        ..telemetry(&format!("https://{}", collector.address))
    };
    let traces = start(&trusting, SOON);
    traces.request(finished("over-tls"));
    assert_eq!(texts(&collector.next().0[0].attributes)["meridian.request.id"], "over-tls");
    assert_eq!(traces.close(), Sent { requests: 1, lost: 0 });

    let traces = start(&TelemetryConfig { otlp_ca_file: String::new(), ..trusting.clone() }, SOON);
    traces.request(finished("not-trusted"));
    assert_eq!(traces.close(), Sent { requests: 0, lost: 1 });

    for (file, why) in [("/nowhere.pem", "No such file"), (file!(), "telemetry.otlp_ca_file")] {
        let wrong = TelemetryConfig { otlp_ca_file: file.into(), ..trusting.clone() };
        let error = Traces::start_with(&wrong, "m", None, SOON, &|_| None).unwrap_err();
        assert!(error.contains("telemetry.otlp_ca_file") && error.contains(why), "{error}");
    }
}

#[test]
fn a_phase_that_was_not_reached_is_no_span() {
    let collector = Collector::start(Answers::Takes);
    let traces = start(&collector.telemetry(), SOON);
    let names = |finished: FinishedRequest| {
        traces.request(finished);
        let (spans, _) = collector.next();
        spans.into_iter().map(|span| span.name).collect::<Vec<_>>()
    };
    let never = FinishedRequest { arrival_ms: 5.0, finished_ms: 9.0, ..FinishedRequest::default() };
    assert_eq!(names(never), ["request", "prefill"]);
    let thinking =
        FinishedRequest { end_of_thinking_ms: None, first_output_ms: None, output_tokens: 0, ..finished("b") };
    assert_eq!(names(thinking), ["request", "prefill", "think"]);
    let answering = FinishedRequest { end_of_thinking_ms: None, think_tokens: 0, ..finished("c") };
    assert_eq!(names(answering), ["request", "prefill", "answer"]);
    // Times that make no sense are of some span all the same.
    let mad = FinishedRequest { arrival_ms: f64::NAN, first_token_ms: Some(f64::INFINITY), ..finished("d") };
    assert_eq!(names(mad), ["request", "prefill", "think", "answer"]);
}

#[test]
fn what_waits_is_sent_at_the_end() {
    let collector = Collector::start(Answers::Takes);
    let traces = start(&collector.telemetry(), TraceLimits { batch: 8, interval: HANG, ..SOON });
    for id in 0..20 {
        traces.request(finished(&id.to_string()));
    }
    assert_eq!(traces.close(), Sent { requests: 20, lost: 0 });
    let spans: usize = (0..3).map(|_| collector.next().0.len()).sum();
    assert_eq!(spans, 20 * 4);
}

#[test]
fn a_collector_that_is_down_or_fails_costs_its_spans() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let broken = Collector::start(Answers::Fails);
    for telemetry in [telemetry(&format!("http://{closed}")), broken.telemetry()] {
        let traces = start(&telemetry, TraceLimits { batch: 8, sending: Duration::from_millis(100), ..SOON });
        for id in 0..10 {
            traces.request(finished(&id.to_string()));
        }
        assert_eq!(traces.close(), Sent { requests: 0, lost: 10 });
    }
}

#[test]
fn a_collector_that_never_answers_stops_nobody() {
    let collector = Collector::start(Answers::Never);
    let soon = Duration::from_millis(50);
    let traces = start(&collector.telemetry(), TraceLimits { queue: 4, sending: soon, closing: soon, ..SOON });
    // Far more than the queue holds while one batch waits for its answer.
    for id in 0..1000 {
        traces.request(finished(&id.to_string()));
    }
    assert!(traces.sent().lost > 0);
    assert_eq!(traces.close(), Sent { requests: 0, lost: 1000 });
}

/// The environment of a process is its own: the test runs itself again in one with a proxy that does not answer.
#[test]
fn a_proxy_is_not_asked_about_a_collector_on_this_machine() {
    const NAME: &str = "otlp::a_proxy_is_not_asked_about_a_collector_on_this_machine";
    if std::env::var_os("http_proxy").is_none_or(|proxy| proxy != "http://127.0.0.1:1") {
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        again.args([NAME, "--exact"]).env("http_proxy", "http://127.0.0.1:1").env_remove("no_proxy");
        let done = again.env_remove("NO_PROXY").output().unwrap();
        assert!(done.status.success() && String::from_utf8_lossy(&done.stdout).contains("1 passed"), "{done:?}");
        return;
    }
    let collector = Collector::start(Answers::Takes);
    let port = collector.address.rsplit_once(':').unwrap().1;
    for host in ["127.0.0.1", "localhost"] {
        let traces = start(&telemetry(&format!("http://{host}:{port}")), SOON);
        traces.request(finished("1"));
        assert_eq!(traces.close(), Sent { requests: 1, lost: 0 }, "{host}");
    }
}

#[test]
fn variables_name_the_collector_and_describe_the_service() {
    let collector = Collector::start(Answers::Takes);
    let variables = |name: &str| match name {
        "OTEL_EXPORTER_OTLP_ENDPOINT" => Some(format!("http://{}", collector.address)),
        "OTEL_RESOURCE_ATTRIBUTES" => Some("k8s.pod.name=pod-a,deployment.environment=prod".into()),
        "OTEL_SERVICE_NAME" => Some("svc-b".into()),
        _ => None,
    };
    let traces = Traces::start_with(&TelemetryConfig::default(), "m", None, SOON, &variables).unwrap().unwrap();
    traces.request(finished("1"));
    let resource = collector.next().1;
    assert_eq!((resource["service.name"].as_str(), resource["k8s.pod.name"].as_str()), ("svc-b", "pod-a"));
    assert_eq!(resource["deployment.environment"], "prod");
    assert_eq!(traces.close(), Sent { requests: 1, lost: 0 });
}

#[test]
fn nothing_is_sent_unless_a_collector_is_named() {
    let start = |telemetry: &TelemetryConfig| Traces::start_with(telemetry, "m", None, SOON, &|_| None);
    assert!(start(&telemetry("")).unwrap().is_none());
    let why = start(&telemetry("http://no host")).unwrap_err();
    assert!(why.starts_with("telemetry.otlp_endpoint: \"http://no host\": no traces are sent: "), "{why}");
}

/// An engine whose status a test sets.
struct Engine {
    status: Mutex<ProcessStatus>,
}

impl Control for Engine {
    fn status(&self) -> ProcessStatus {
        self.status.lock().unwrap().clone()
    }

    fn faults(&self) -> Vec<FaultEntry> {
        vec![support::fault()]
    }

    fn put(&self, slot: SlotName, _: &Upload<'_>, _: Mode) -> Result<SwapReport, ControlError> {
        Err(ControlError::NoSuchSlot(slot))
    }

    fn promote(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        Err(ControlError::NoSuchSlot(slot))
    }

    fn rollback(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        Err(ControlError::NoSuchSlot(slot))
    }

    fn release(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        Err(ControlError::NoSuchSlot(slot))
    }

    fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        Err(ControlError::NoSuchSlot(slot))
    }
}

#[test]
fn changes_and_faults_of_policies_are_spans() {
    let collector = Collector::start(Answers::Takes);
    let engine = Arc::new(Engine { status: Mutex::new(support::status()) });
    let control = Arc::clone(&engine) as Arc<dyn Control>;
    let traces = Traces::start_with(&collector.telemetry(), "m", Some(control), SOON, &|_| None).unwrap().unwrap();
    let next = |change: fn(&mut ProcessStatus)| {
        change(&mut engine.status.lock().unwrap());
        let (spans, _) = collector.next();
        spans.into_iter().map(|span| (span.name, texts(&span.attributes))).collect::<Vec<_>>()
    };
    let spans = next(|status| {
        status.slots[0].active = support::version("newer");
        status.slots[0].swaps += 1;
    });
    let [(name, attributes)] = spans.as_slice() else { panic!("{spans:?}") };
    assert_eq!(name, "policy change");
    assert_eq!(
        (attributes["meridian.slot"].as_str(), attributes["meridian.policy.name"].as_str()),
        ("dispatch", "newer")
    );
    assert_eq!(attributes["meridian.policy.previous.name"], "current \"one\"\\");
    assert_eq!(attributes["meridian.policy.sha256"].len(), 64);

    let spans = next(|status| {
        status.slots[0].faults[0].1 += 3;
        status.slots[0].quarantine = Some((support::version("newer"), 1000.0));
    });
    let [(first, quarantine), (second, faults)] = spans.as_slice() else { panic!("{spans:?}") };
    assert_eq!((first.as_str(), second.as_str()), ("policy quarantine", "policy faults"));
    assert_eq!(quarantine["meridian.policy.name"], "newer");
    assert_eq!((faults["meridian.faults"].as_str(), faults["meridian.fault.kind"].as_str()), ("3", "trap"));
    // What is left as it is makes no span.
    drop(traces);
    assert!(collector.exports.try_recv().is_err());
}

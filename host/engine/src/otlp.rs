//! Traces: one span per request, with its phases, sent to a collector by OTLP over HTTP.
//!
//! The engine hands over the facts of a finished request and continues. A thread makes spans from them and sends them.
//! It drops and counts the requests that it cannot take or send.

mod handoff;
mod variables;

use std::path::Path;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant, SystemTime};

use meridian_core::RequestState;
use meridian_core::config::{HttpUrl, TelemetryConfig};
use meridian_core::file::read_regular;
use opentelemetry::trace::{Event, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{Array, InstrumentationScope, KeyValue, Value};
use opentelemetry_otlp::{Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, SpanData, SpanEvents, SpanExporter as _, SpanLinks};

pub use self::handoff::HandoffSpan;
pub use self::variables::Variables;
use self::variables::{Export, Sampling};
use crate::control::{Control, FaultEntry, SlotStatus, Version};
use crate::explain::{Explanation, PartTime};

/// Limits on memory and time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceLimits {
    /// Requests that wait to be sent; more are dropped.
    pub queue: usize,
    /// Requests in one batch.
    pub batch: usize,
    /// Interval between two batches, and between two looks at changes of policies.
    pub interval: Duration,
    /// Limit of one batch, from connecting to the answer.
    pub sending: Duration,
    /// After [`Traces::close`], no further batch starts for longer than this.
    pub closing: Duration,
}

impl Default for TraceLimits {
    fn default() -> Self {
        Self {
            queue: 4096,
            batch: 256,
            interval: Duration::from_secs(2),
            sending: Duration::from_secs(2),
            closing: Duration::from_secs(2),
        }
    }
}

/// The facts of an ended request. Times are milliseconds on the engine's clock.
///
/// ```
/// use meridian_core::{Markers, NewRequest, RequestTable};
/// use meridian_engine::otlp::FinishedRequest;
///
/// let mut table = RequestTable::new(Markers::default());
/// let slot = table.insert(&NewRequest { prompt_tokens: 64, ..NewRequest::default() })?;
/// table.set_clock(30.0);
/// table.generated(slot, &[40, 41], &mut Vec::new());
/// let finished = FinishedRequest::of(&table[slot], "cmpl-1", 50.0);
/// assert_eq!((finished.first_token_ms, finished.output_tokens), (Some(30.0), 2));
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FinishedRequest {
    /// The engine's id.
    pub id: String,
    /// Arrival.
    pub arrival_ms: f64,
    /// The first token of any kind.
    pub first_token_ms: Option<f64>,
    /// The end of its thinking, if it thought.
    pub end_of_thinking_ms: Option<f64>,
    /// The first token of output.
    pub first_output_ms: Option<f64>,
    /// Its end, which is now.
    pub finished_ms: f64,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the prompt that were found in the prefix cache.
    pub cached_tokens: u32,
    /// Tokens of thinking.
    pub think_tokens: u32,
    /// Tokens of output.
    pub output_tokens: u32,
    /// Number of preemptions.
    pub preemptions: u32,
    /// The engine's reason for its end; empty when it gives none.
    pub reason: String,
    /// Name and version of the dispatch policy that is active at its end.
    pub policy: (String, String),
    /// The caller's span, if the request came with one.
    pub parent: Option<TraceParent>,
    /// Where its time went.
    pub explanation: Option<Explanation>,
}

/// The span of a caller, from the `traceparent` header of W3C Trace Context.
///
/// ```
/// use meridian_engine::otlp::TraceParent;
///
/// let parent = TraceParent::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01").unwrap();
/// assert!(parent.is_sampled());
/// assert_eq!(TraceParent::parse("00-00000000000000000000000000000000-00f067aa0ba902b7-01"), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    trace: TraceId,
    span: SpanId,
    flags: u8,
}

impl TraceParent {
    /// Read a header. `None` for a text that is not one: the request then begins a trace of its own.
    #[must_use]
    pub fn parse(header: &str) -> Option<Self> {
        let mut parts = header.trim().split('-');
        let mut hex = |digits: usize| {
            let part = parts.next()?;
            let is_hex = part.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
            (part.len() == digits && is_hex).then_some(part)
        };
        let (version, trace, span, flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
        // A later version may append parts; this one has none.
        if version == "ff" || version == "00" && parts.next().is_some() {
            return None;
        }
        let trace = TraceId::from_hex(trace).ok().filter(|id| *id != TraceId::INVALID)?;
        let span = SpanId::from_hex(span).ok().filter(|id| *id != SpanId::INVALID)?;
        Some(Self { trace, span, flags: u8::from_str_radix(flags, 16).ok()? })
    }

    /// Whether the caller keeps this trace. A span in a trace that nobody keeps is not sent.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.flags & 1 == 1
    }
}

impl FinishedRequest {
    /// The mirror's facts about a request that ends at `finished_ms`.
    #[must_use]
    pub fn of(row: &RequestState, id: &str, finished_ms: f64) -> Self {
        Self {
            id: id.to_owned(),
            arrival_ms: row.arrival_ms(),
            first_token_ms: row.first_token_ms(),
            end_of_thinking_ms: row.end_of_thinking_ms(),
            first_output_ms: row.first_output_ms(),
            finished_ms,
            prompt_tokens: row.prompt_tokens(),
            cached_tokens: row.cached_tokens(),
            think_tokens: row.think_tokens(),
            output_tokens: row.output_tokens(),
            preemptions: row.preemptions(),
            reason: String::new(),
            policy: Default::default(),
            parent: None,
            explanation: None,
        }
    }
}

/// The fate of the spans so far. A request has one to four.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Requests whose spans the collector accepted.
    pub requests: u64,
    /// Lost requests: no room, no collector, no time.
    pub lost: u64,
}

#[derive(Debug, Default)]
struct Counts {
    requests: AtomicU64,
    lost: AtomicU64,
    closing: AtomicBool,
}

/// What ended, and the time of day at its end.
type Message = (Ended, SystemTime);

#[derive(Debug)]
enum Ended {
    Request(Box<FinishedRequest>),
    Handoff(HandoffSpan),
}

/// The thread that sends traces. Dropping it calls [`close`](Self::close).
#[derive(Debug)]
pub struct Traces {
    /// `None` after the end. Held only briefly.
    running: Mutex<Option<Running>>,
    counts: Arc<Counts>,
}

#[derive(Debug)]
struct Running {
    queue: SyncSender<Message>,
    thread: JoinHandle<()>,
}

impl Traces {
    /// Send to the collector of the configuration; `None` if it names none. `model` is the served model. The thread
    /// polls `control`, if given, for faults and changes of policies, which become spans as well.
    ///
    /// Where the configuration says nothing, OpenTelemetry's variables decide: endpoint, certificates, name and
    /// attributes of the service, timeout and sampler. Headers always come from `OTEL_EXPORTER_OTLP_HEADERS`.
    ///
    /// # Errors
    /// The endpoint is not a URL, a variable has no valid value, or the system gives no thread; names the field or the
    /// variable.
    pub fn start(
        telemetry: &TelemetryConfig,
        model: &str,
        control: Option<Arc<dyn Control>>,
    ) -> Result<Option<Self>, String> {
        Self::start_with(telemetry, model, control, TraceLimits::default(), &|name| std::env::var(name).ok())
    }

    /// As [`start`](Self::start), with other limits and variables.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(
        telemetry: &TelemetryConfig,
        model: &str,
        control: Option<Arc<dyn Control>>,
        limits: TraceLimits,
        variables: Variables<'_>,
    ) -> Result<Option<Self>, String> {
        let Some(export) = Export::of(telemetry, limits.sending, variables)? else { return Ok(None) };
        let failed = |why: &dyn std::fmt::Display| {
            format!("{}: {:?}: no traces are sent: {why}", export.named_by, export.shown())
        };
        let url = HttpUrl::parse(&export.endpoint).map_err(|error| failed(&error))?;
        let client = client(&url, &export.ca_file, export.timeout).map_err(|error| failed(&error))?;
        let mut exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(export.endpoint.clone())
            .with_timeout(export.timeout)
            .build()
            .map_err(|error| failed(&error))?;
        exporter.set_resource(&export.resource);
        let (queue, messages) = sync_channel(limits.queue);
        let counts = Arc::new(Counts::default());
        let sender = Sender {
            exporter,
            maker: Maker {
                ids: RandomIdGenerator::default(),
                model: model.to_owned(),
                scope: scope(),
                sampling: export.sampling,
            },
            counts: Arc::clone(&counts),
            limits,
            spans: Vec::new(),
            requests: 0,
            told: None,
            watched: control.map(Watched::new),
        };
        let thread = std::thread::Builder::new()
            .name("meridian-traces".into())
            .spawn(move || sender.run(&messages))
            .map_err(|error| format!("telemetry.otlp_endpoint: no traces are sent: {error}"))?;
        Ok(Some(Self { running: Mutex::new(Some(Running { queue, thread })), counts }))
    }

    /// Add an ended request. Never waits.
    pub fn request(&self, finished: FinishedRequest) {
        self.ended(Ended::Request(Box::new(finished)));
    }

    /// Add an answer of another engine that is over. Never waits.
    pub fn handoff(&self, ended: HandoffSpan) {
        self.ended(Ended::Handoff(ended));
    }

    fn ended(&self, ended: Ended) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let taken =
            running.as_ref().is_some_and(|Running { queue, .. }| queue.try_send((ended, SystemTime::now())).is_ok());
        if !taken {
            self.counts.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The fate of the requests so far.
    #[must_use]
    pub fn sent(&self) -> Sent {
        let Counts { requests, lost, closing: _ } = &*self.counts;
        Sent { requests: requests.load(Ordering::Relaxed), lost: lost.load(Ordering::Relaxed) }
    }

    /// Send the waiting requests, as far as the limits allow, and end the thread; later requests are lost.
    pub fn close(&self) -> Sent {
        self.counts.closing.store(true, Ordering::Relaxed);
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Running { queue, thread }) = running {
            drop(queue);
            // A panic of the thread was reported by the panic hook.
            let _ = thread.join();
        }
        self.sent()
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        self.close();
    }
}

/// A proxy in the environment (`http_proxy`) is for other machines: requests to this machine stay on it.
fn client(url: &HttpUrl, ca_file: &(&str, String), timeout: Duration) -> Result<reqwest::blocking::Client, String> {
    // TLS is not made without a provider, for a collector without TLS either.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = reqwest::blocking::Client::builder().timeout(timeout);
    let builder = if url.is_loopback() { builder.no_proxy() } else { builder };
    let builder = if ca_file.1.is_empty() { builder } else { builder.tls_certs_merge(certificates(ca_file)?) };
    // The client has its own runtime, which must not be made inside another.
    let made = std::thread::spawn(|| builder.build()).join();
    made.map_err(|_| String::from("the HTTP client panicked"))?.map_err(|error| error.to_string())
}

/// Largest file of certificates.
const MOST_CERTIFICATE_BYTES: u64 = 1 << 20;

fn certificates((named_by, path): &(&str, String)) -> Result<Vec<reqwest::Certificate>, String> {
    let failed = |why: &dyn std::fmt::Display| format!("{named_by}: {path:?}: {why}");
    let read = read_regular(Path::new(path), MOST_CERTIFICATE_BYTES).map_err(|error| failed(&error))?;
    let bytes = read.ok_or_else(|| failed(&"must be at most 1 MiB"))?;
    let found = reqwest::Certificate::from_pem_bundle(&bytes).map_err(|error| failed(&error))?;
    if found.is_empty() { Err(failed(&"has no PEM certificate")) } else { Ok(found) }
}

fn scope() -> InstrumentationScope {
    InstrumentationScope::builder("meridian").with_version(env!("CARGO_PKG_VERSION")).build()
}

/// The data of the thread.
struct Sender {
    exporter: opentelemetry_otlp::SpanExporter,
    maker: Maker,
    counts: Arc<Counts>,
    limits: TraceLimits,
    /// Spans that are made and not sent, and the number of their requests.
    spans: Vec<SpanData>,
    requests: u64,
    /// Time of the last logged failure.
    told: Option<Instant>,
    watched: Option<Watched>,
}

/// Interval between two logged failures.
const TELLING: Duration = Duration::from_secs(60);

impl Sender {
    fn run(mut self, messages: &Receiver<Message>) {
        let mut next = Instant::now() + self.limits.interval;
        loop {
            match messages.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok((ended, now)) => {
                    self.maker.ended(&ended, now, &mut self.spans);
                    self.requests += 1;
                    if self.requests < self.limits.batch as u64 && Instant::now() < next {
                        continue;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.counts.closing.load(Ordering::Relaxed) {
                break;
            }
            if let Some(watched) = &mut self.watched {
                watched.look(&mut self.maker, &mut self.spans);
            }
            self.send();
            next = Instant::now() + self.limits.interval;
        }
        self.finish(messages);
    }

    /// Send the waiting requests while there is time.
    fn finish(&mut self, messages: &Receiver<Message>) {
        let end = Instant::now() + self.limits.closing;
        if let Some(watched) = &mut self.watched {
            watched.look(&mut self.maker, &mut self.spans);
        }
        for (ended, now) in messages {
            if Instant::now() >= end {
                self.counts.lost.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            self.maker.ended(&ended, now, &mut self.spans);
            self.requests += 1;
            if self.requests >= self.limits.batch as u64 {
                self.send();
            }
        }
        if Instant::now() < end {
            self.send();
        } else {
            self.counts.lost.fetch_add(self.requests, Ordering::Relaxed);
        }
    }

    fn send(&mut self) {
        if self.spans.is_empty() {
            return;
        }
        let (spans, requests) = (std::mem::take(&mut self.spans), std::mem::take(&mut self.requests));
        let Err(error) = wait_for(self.exporter.export(spans)) else {
            self.counts.requests.fetch_add(requests, Ordering::Relaxed);
            return;
        };
        let lost = self.counts.lost.fetch_add(requests, Ordering::Relaxed) + requests;
        if self.told.is_none_or(|told| told.elapsed() >= TELLING) {
            self.told = Some(Instant::now());
            let why: String = error.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            tracing::warn!(why, lost, "traces could not be sent; the requests they are of are lost to the collector");
        }
    }
}

/// The client blocks, so its future is ready at the first poll; a waker that unparks costs nothing more.
fn wait_for<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Makes spans.
struct Maker {
    ids: RandomIdGenerator,
    model: String,
    scope: InstrumentationScope,
    sampling: Sampling,
}

impl Maker {
    fn ended(&mut self, ended: &Ended, now: SystemTime, spans: &mut Vec<SpanData>) {
        match ended {
            Ended::Request(finished) => self.request(finished, now, spans),
            Ended::Handoff(ended) => self.handoff(ended, now, spans),
        }
    }

    /// A span from the request's arrival to its end, and one in it for each phase it reached.
    fn request(&mut self, finished: &FinishedRequest, now: SystemTime, spans: &mut Vec<SpanData>) {
        let FinishedRequest {
            id,
            arrival_ms,
            first_token_ms,
            end_of_thinking_ms,
            first_output_ms,
            finished_ms,
            prompt_tokens,
            cached_tokens,
            think_tokens,
            output_tokens,
            preemptions,
            reason,
            policy,
            parent,
            explanation,
        } = finished;
        let Some((caller, context)) = self.sampled(parent.as_ref()) else { return };
        let at = |ms: f64| {
            let ago_s = ((finished_ms - ms) / 1e3).max(0.0);
            Duration::try_from_secs_f64(ago_s).ok().and_then(|ago| now.checked_sub(ago)).unwrap_or(now)
        };
        let generated = think_tokens.saturating_add(*output_tokens);
        let mut attributes = vec![
            KeyValue::new("gen_ai.request.model", self.model.clone()),
            KeyValue::new("gen_ai.usage.input_tokens", i64::from(*prompt_tokens)),
            KeyValue::new("gen_ai.usage.output_tokens", i64::from(generated)),
            KeyValue::new("meridian.request.id", id.clone()),
            KeyValue::new("meridian.tokens.cached", i64::from(*cached_tokens)),
            KeyValue::new("meridian.tokens.think", i64::from(*think_tokens)),
            KeyValue::new("meridian.tokens.answer", i64::from(*output_tokens)),
            KeyValue::new("meridian.preemptions", i64::from(*preemptions)),
            KeyValue::new("meridian.policy.name", policy.0.clone()),
            KeyValue::new("meridian.policy.version", policy.1.clone()),
        ];
        if !reason.is_empty() {
            let reasons = Value::Array(Array::String(vec![reason.clone().into()]));
            attributes.push(KeyValue::new("gen_ai.response.finish_reasons", reasons));
        }
        for (name, reached_ms) in [("meridian.ttft_ms", first_token_ms), ("meridian.ttfo_ms", first_output_ms)] {
            attributes.extend(reached_ms.map(|ms| KeyValue::new(name, ms - arrival_ms)));
        }
        let (start, end) = (at(*arrival_ms), at(*finished_ms));
        let mut whole = self.span(&context, caller.as_ref(), "request", SpanKind::Server, start, end, attributes);
        whole.parent_span_is_remote = caller.is_some();
        whole.events.events.extend(explanation.as_ref().map(|explanation| why(explanation, end)));
        spans.push(whole);
        let begin_of_output = first_output_ms.or(*end_of_thinking_ms);
        let phases = [
            ("prefill", Some(*arrival_ms), first_token_ms.or(Some(*finished_ms)), *prompt_tokens),
            (
                "think",
                first_token_ms.filter(|_| *think_tokens > 0),
                end_of_thinking_ms.or(Some(*finished_ms)),
                *think_tokens,
            ),
            ("answer", begin_of_output.filter(|_| *output_tokens > 0), Some(*finished_ms), *output_tokens),
        ];
        for (name, begin, end, tokens) in phases {
            let (Some(begin), Some(end)) = (begin, end) else { continue };
            let own = self.context(Some(&context));
            let attributes = vec![KeyValue::new("meridian.tokens", i64::from(tokens))];
            let span = self.span(&own, Some(&context), name, SpanKind::Internal, at(begin), at(end), attributes);
            spans.push(span);
        }
    }

    /// An event at one moment, in its own trace.
    fn moment(&mut self, name: &'static str, now: SystemTime, attributes: Vec<KeyValue>, spans: &mut Vec<SpanData>) {
        let Some((_, context)) = self.sampled(None) else { return };
        let span = self.span(&context, None, name, SpanKind::Internal, now, now, attributes);
        spans.push(span);
    }

    /// The contexts of a caller and of a span of its own; `None` when the trace is not sent.
    fn sampled(&self, parent: Option<&TraceParent>) -> Option<(Option<SpanContext>, SpanContext)> {
        let caller = parent
            .map(|parent| SpanContext::new(parent.trace, parent.span, TraceFlags::SAMPLED, true, TraceState::NONE));
        let context = self.context(caller.as_ref());
        self.sampling.keeps(parent, context.trace_id()).then_some((caller, context))
    }

    fn context(&self, parent: Option<&SpanContext>) -> SpanContext {
        let trace = parent.map_or_else(|| self.ids.new_trace_id(), SpanContext::trace_id);
        SpanContext::new(trace, self.ids.new_span_id(), TraceFlags::SAMPLED, false, TraceState::NONE)
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of a span")]
    fn span(
        &self,
        own: &SpanContext,
        parent: Option<&SpanContext>,
        name: &'static str,
        kind: SpanKind,
        start: SystemTime,
        end: SystemTime,
        attributes: Vec<KeyValue>,
    ) -> SpanData {
        SpanData {
            span_context: own.clone(),
            parent_span_id: parent.map_or(SpanId::INVALID, SpanContext::span_id),
            parent_span_is_remote: false,
            span_kind: kind,
            name: name.into(),
            start_time: start,
            end_time: end,
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.clone(),
        }
    }
}

/// Where the time of a request went, as an event of its span.
fn why(explanation: &Explanation, at: SystemTime) -> Event {
    let mut attributes: Vec<KeyValue> = explanation
        .parts
        .iter()
        .map(|PartTime { part, ms }| KeyValue::new(format!("meridian.why.{}_ms", part.label()), *ms))
        .collect();
    attributes.push(KeyValue::new("meridian.why.overtaken", i64::from(explanation.overtaken)));
    attributes.push(KeyValue::new("meridian.why.rescues", i64::from(explanation.rescues)));
    let end = explanation.think_end.as_ref();
    attributes.extend(end.map(|end| KeyValue::new("meridian.why.think_end", end.clone())));
    if explanation.reopened > 0 {
        attributes.push(KeyValue::new("meridian.why.reopened", i64::from(explanation.reopened)));
    }
    if let Some(first) = explanation.overtakings.first() {
        attributes.push(KeyValue::new("meridian.why.rule", first.rule.label()));
    }
    Event::new("why", at, attributes, 0)
}

/// Changes of policies and faults, found by polling: a change of a policy does not wait for its trace.
struct Watched {
    control: Arc<dyn Control>,
    before: Vec<SlotStatus>,
}

impl Watched {
    fn new(control: Arc<dyn Control>) -> Self {
        let before = control.status().slots;
        Self { control, before }
    }

    fn look(&mut self, maker: &mut Maker, spans: &mut Vec<SpanData>) {
        let after = self.control.status().slots;
        let now = SystemTime::now();
        for slot in &after {
            let Some(before) = self.before.iter().find(|before| before.slot == slot.slot) else { continue };
            if before.active != slot.active || before.swaps != slot.swaps {
                let attributes = changed(slot, &before.active);
                maker.moment("policy change", now, attributes, spans);
            }
            let in_quarantine = |status: &SlotStatus| status.quarantine.as_ref().map(|(version, _)| version.clone());
            if let Some(version) = in_quarantine(slot).filter(|version| in_quarantine(before).as_ref() != Some(version))
            {
                let mut attributes = vec![KeyValue::new("meridian.slot", slot.slot.label())];
                attributes.extend(of_version("meridian.policy", &version));
                maker.moment("policy quarantine", now, attributes, spans);
            }
            let count = |status: &SlotStatus| status.faults.iter().map(|(_, count)| count).sum::<u64>();
            let new = count(slot).saturating_sub(count(before));
            if new > 0 {
                self.faults(slot, new, now, maker, spans);
            }
        }
        self.before = after;
    }

    /// One span for all new faults of a slot, with the latest of them.
    fn faults(&self, slot: &SlotStatus, new: u64, now: SystemTime, maker: &mut Maker, spans: &mut Vec<SpanData>) {
        let faults = self.control.faults();
        let latest = faults.iter().rev().find(|fault| fault.slot == slot.slot && !fault.shadow);
        let mut attributes = vec![
            KeyValue::new("meridian.slot", slot.slot.label()),
            KeyValue::new("meridian.faults", i64::try_from(new).unwrap_or(i64::MAX)),
        ];
        if let Some(FaultEntry { kind, detail, version, .. }) = latest {
            attributes.push(KeyValue::new("meridian.fault.kind", kind.clone()));
            attributes.push(KeyValue::new("meridian.fault.detail", detail.clone()));
            attributes.extend(of_version("meridian.policy", version));
        }
        maker.moment("policy faults", now, attributes, spans);
    }
}

fn changed(slot: &SlotStatus, before: &Version) -> Vec<KeyValue> {
    let mut attributes = vec![KeyValue::new("meridian.slot", slot.slot.label())];
    attributes.extend(of_version("meridian.policy", &slot.active));
    attributes.extend(of_version("meridian.policy.previous", before));
    attributes
}

fn of_version(prefix: &str, version: &Version) -> [KeyValue; 3] {
    let Version { name, version, sha256, source: _, options: _ } = version;
    [("name", name), ("version", version), ("sha256", sha256)]
        .map(|(field, value)| KeyValue::new(format!("{prefix}.{field}"), value.clone()))
}

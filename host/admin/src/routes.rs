//! The routes, and their refusals. Every refusal is `{"error": "one line"}`.

use std::borrow::Cow;
use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::{Path, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{Extensions, HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use meridian_core::PolicySource;
use meridian_core::oci::OciReference;
use prometheus::{Registry, TextEncoder};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use super::ConnectionLimits;
use super::audit::{Actor, AuditLog, Audited, Event};
use super::budgets;
use super::metrics::StatusCollector;
use super::signature::{SIGNATURE_HEADER, signature_text};
use super::token::{Role, Token, Tokens};
use meridian_engine::control::{
    Control, ControlError, Given, MAX_COMPONENT_BYTES, MAX_OPTIONS_BYTES, Mode, ProcessStatus, SlotName, SwapReport,
    Upload,
};
use meridian_engine::timeline::chrome_json;

/// The request header that carries the options of a component, one JSON object.
pub const CONFIG_HEADER: &str = "meridian-config";

/// The request header of a server that passes a request of its own clients on; its value says whose. Such a client may
/// be anywhere, so it needs the token for reading too.
pub const FORWARDED_HEADER: &str = "meridian-forwarded";

/// The state that the routes share.
pub(super) struct Site {
    pub(super) control: Arc<dyn Control>,
    registry: Registry,
    access: Access,
    limits: ConnectionLimits,
    /// Problems of the listeners.
    problems: Vec<String>,
    /// One call at a time that reads, one that loads a component and one that changes. Only the next caller to load
    /// receives a component, so at most one is in memory.
    reading: Arc<Semaphore>,
    uploading: Arc<Semaphore>,
    pub(super) changing: Arc<Semaphore>,
    /// One timeline at a time.
    tracing: Arc<Semaphore>,
    /// Of components from registries, which may not answer: no other change waits for one.
    fetching: Arc<Semaphore>,
}

/// Who may change something, and where that is written down.
#[derive(Default)]
pub(super) struct Access {
    pub(super) tokens: Option<Tokens>,
    /// Why there are no tokens, although some are configured.
    pub(super) without: Option<&'static str>,
    pub(super) audit: Option<Arc<AuditLog>>,
}

/// Calls to the engine at a time.
pub(super) const CALLS: usize = 4;

impl Site {
    pub(super) fn new(
        control: Arc<dyn Control>,
        access: Access,
        problems: Vec<String>,
        limits: ConnectionLimits,
    ) -> Self {
        let registry = Registry::new();
        let collector = Box::new(StatusCollector::new(Arc::clone(&control)));
        registry.register(collector).expect("the names of the metrics are valid and differ");
        let [reading, uploading, changing, fetching] = [(); CALLS].map(|()| Arc::new(Semaphore::new(1)));
        let tracing = Arc::new(Semaphore::new(1));
        Self { control, registry, access, limits, problems, reading, uploading, changing, tracing, fetching }
    }

    /// The rights of a request, by its head.
    pub(super) fn rights<B>(&self, request: &axum::http::Request<B>) -> Rights {
        if request.method().is_safe() || authorize(self, request.headers(), Role::Change).is_err() {
            Rights::Read
        } else if request.method() == Method::PUT && !is_json(request.headers()) {
            Rights::Upload
        } else {
            Rights::Change
        }
    }

    fn status(&self) -> ProcessStatus {
        let status = self.control.status();
        let audit = self.access.audit.as_ref().and_then(|audit| audit.problem());
        let problems = [status.problems, self.problems.clone(), audit.into_iter().collect()].concat();
        ProcessStatus { problems, ..status }
    }

    /// The token that a request carries.
    pub(super) fn bearer(&self, headers: &HeaderMap) -> Option<&Token> {
        let given = headers.get(AUTHORIZATION)?;
        self.access.tokens.as_ref()?.bearer(given.as_bytes())
    }

    /// The engine as this client may change it.
    fn control_for(&self, actor: Actor) -> Audited {
        Audited { control: Arc::clone(&self.control), log: self.access.audit.clone(), actor }
    }

    pub(super) fn record(&self, actor: &Actor, event: &Event<'_>) {
        if let Some(audit) = &self.access.audit {
            audit.record(actor, event);
        }
    }

    /// Write down that a request for a change was refused before it reached the engine.
    pub(super) fn record_refusal(&self, asked: &AuditedRequest, response: &Response) {
        if asked.method.is_safe() || response.extensions().get::<Recorded>().is_some() {
            return;
        }
        let action = format!("{} {}", asked.method, asked.path);
        let why = response.extensions().get::<Why>().map(|Why(why)| why.clone());
        let result = if response.status().is_server_error() && response.status() != StatusCode::SERVICE_UNAVAILABLE {
            "failed"
        } else {
            "refused"
        };
        self.record(&asked.actor, &Event { action: &action, result, why, ..Event::default() });
    }
}

/// A request, as far as the audit log needs it after the request has gone.
pub(super) struct AuditedRequest {
    pub(super) actor: Actor,
    pub(super) method: Method,
    /// Without its query.
    pub(super) path: String,
}

/// The mark of a response whose change is in the audit log already.
#[derive(Clone, Copy)]
pub(super) struct Recorded;

/// The reason of a refusal, for the audit log.
#[derive(Clone)]
struct Why(String);

/// The places that a request may take.
#[derive(Clone, Copy)]
pub(super) enum Rights {
    /// The places for all requests.
    Read,
    /// With the token: the places for uploads of a component.
    Upload,
    /// With the token: the places for changes that compile nothing.
    Change,
}

pub(super) type Shared = State<Arc<Site>>;

pub(super) fn admin(site: Arc<Site>) -> Router {
    let slot = |action: &str| format!("/v1/policies/{{slot}}{action}");
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/policies", get(policies))
        .route("/v1/faults", get(faults))
        .route("/v1/latency", get(latency))
        .route("/v1/why", get(why))
        .route("/v1/trace", get(trace))
        .route("/v1/budgets", get(budgets::list).put(budgets::change))
        .route(&slot(""), put(put_policy))
        .route(
            &slot("/promote"),
            post(async |site: Shared, slot: SlotPath, request: Request| {
                act(site, slot, request, |control, slot| control.promote(slot)).await
            }),
        )
        .route(
            &slot("/rollback"),
            post(async |site: Shared, slot: SlotPath, request: Request| {
                act(site, slot, request, |control, slot| control.rollback(slot)).await
            }),
        )
        .route(
            &slot("/release"),
            post(async |site: Shared, slot: SlotPath, request: Request| {
                act(site, slot, request, |control, slot| control.release(slot)).await
            }),
        )
        .route(
            &slot("/shadow"),
            delete(async |site: Shared, slot: SlotPath, request: Request| {
                act(site, slot, request, |control, slot| control.stop_shadow(slot)).await
            }),
        )
        .merge(common())
        .method_not_allowed_fallback(no_such_method)
        .with_state(site)
}

/// For the listener of `telemetry.prometheus`.
pub(super) fn metrics_only(site: Arc<Site>) -> Router {
    common().method_not_allowed_fallback(no_such_method).with_state(site)
}

fn common() -> Router<Arc<Site>> {
    Router::new()
        .route("/healthz", get(async || json(StatusCode::OK, &json!({ "ok": true }))))
        .route("/metrics", get(metrics))
        .fallback(async || Refusal::new(StatusCode::NOT_FOUND, "no such path"))
}

async fn no_such_method() -> Refusal {
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "no such method for this path")
}

async fn status(State(site): Shared) -> Response {
    read(&site, |site| json(StatusCode::OK, &site.status())).await
}

async fn policies(State(site): Shared) -> Response {
    read(&site, |site| json(StatusCode::OK, &json!({ "slots": site.control.status().slots }))).await
}

async fn faults(State(site): Shared) -> Response {
    read(&site, |site| json(StatusCode::OK, &json!({ "faults": site.control.faults() }))).await
}

async fn latency(State(site): Shared) -> Response {
    read(&site, |site| match site.control.latency() {
        Some(report) => json(StatusCode::OK, &report),
        None => Refusal::new(StatusCode::NOT_FOUND, "this engine observes no latencies").into_response(),
    })
    .await
}

/// Longest timeline, seconds.
const LONGEST_TRACE_S: f64 = 300.0;

async fn why(State(site): Shared, request: Request) -> Response {
    let Some(id) = parameter(&request, "request").filter(|id| !id.is_empty()) else {
        let why = "the query must be request=ID: the engine's id of a request, or a part of it";
        return Refusal::new(StatusCode::BAD_REQUEST, why).into_response();
    };
    let turn = Arc::clone(&site.reading).acquire_owned().await;
    let call = move || {
        let explained = match site.control.insight() {
            Some(insight) => insight.explain(&id),
            None => Err(NO_INSIGHT.into()),
        };
        let response = match explained {
            Ok(explanation) => json(StatusCode::OK, &explanation),
            Err(why) => Refusal::new(StatusCode::NOT_FOUND, why).into_response(),
        };
        (response, turn).0
    };
    blocking(call).await
}

const NO_INSIGHT: &str = "this engine tells nothing of its requests";

/// Ends the timeline, even when its client has hung up.
struct Tracing(Arc<Site>);

impl Drop for Tracing {
    fn drop(&mut self) {
        if let Some(insight) = self.0.control.insight() {
            insight.end_timeline();
        }
    }
}

async fn trace(State(site): Shared, request: Request) -> Response {
    let seconds = parameter(&request, "seconds").and_then(|text| text.parse::<f64>().ok());
    let Some(seconds) = seconds.filter(|seconds| *seconds > 0.0 && *seconds <= LONGEST_TRACE_S) else {
        let why = "the query must be seconds=N, more than 0 and at most 300";
        return Refusal::new(StatusCode::BAD_REQUEST, why).into_response();
    };
    let Ok(turn) = Arc::clone(&site.tracing).try_acquire_owned() else {
        return Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "another timeline is under way").into_response();
    };
    match site.control.insight() {
        // Takes microseconds.
        Some(insight) => insight.begin_timeline(),
        None => return Refusal::new(StatusCode::NOT_FOUND, NO_INSIGHT).into_response(),
    }
    let under_way = Tracing(Arc::clone(&site));
    tokio::time::sleep(std::time::Duration::from_secs_f64(seconds)).await;
    let call = move || {
        let timeline = site.control.insight().and_then(meridian_engine::control::Insight::end_timeline);
        drop(under_way);
        let response = match timeline {
            Some(timeline) => with_type(StatusCode::OK, "application/json", chrome_json(&timeline)),
            None => Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the timeline was ended").into_response(),
        };
        (response, turn).0
    };
    blocking(call).await
}

/// A parameter of the query, decoded.
fn parameter(request: &Request, name: &str) -> Option<String> {
    let query = request.uri().query()?;
    let value = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [first, after @ ..] = rest {
        let hex = |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        match (first, after) {
            (b'%', [high, low, tail @ ..]) => {
                bytes.push(hex(*high)? * 16 + hex(*low)?);
                rest = tail;
            }
            (b'%', _) => return None,
            (b'+', _) => {
                bytes.push(b' ');
                rest = after;
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).ok()
}

async fn metrics(State(site): Shared) -> Response {
    read(&site, |site| match TextEncoder::new().encode_to_string(&site.registry.gather()) {
        Ok(text) => with_type(StatusCode::OK, prometheus::TEXT_FORMAT, text),
        Err(error) => Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    })
    .await
}

type SlotPath = Result<Path<String>, axum::extract::rejection::PathRejection>;

async fn put_policy(State(site): Shared, slot: SlotPath, request: Request) -> Result<Response, Refusal> {
    let (head, body) = request.into_parts();
    authorize(&site, &head.headers, Role::All)?;
    let (slot, mode) = (named(slot)?, mode(head.uri.query())?);
    let control = site.control_for(actor(&head.extensions)?);
    if is_json(&head.headers) {
        let text = receive_for(&site, body, MAX_DESCRIPTION).await?;
        let described = Described::parse(&text)?;
        let mode = described.mode.or(mode).unwrap_or_default();
        let turn = if described.is_remote() {
            // At once: those that wait would take the places of rollbacks.
            Arc::clone(&site.fetching).try_acquire_owned().ok()
        } else {
            Arc::clone(&site.changing).acquire_owned().await.ok()
        };
        let busy = || Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "another component is being fetched");
        let turn = turn.ok_or_else(busy)?;
        let put = move || {
            let upload = Upload { policy: described.policy(), options: described.options.as_deref(), source: "admin" };
            (changed(&control.put(slot, &upload, mode)), turn).0
        };
        return Ok(blocking(put).await);
    }
    let options = options_of(&head.headers)?;
    let signature = head.headers.get(SIGNATURE_HEADER).map(|header| signature_text(header.as_bytes()));
    if body.size_hint().lower() > COMPONENT.bytes as u64 {
        return Err(COMPONENT.too_large());
    }
    let turn = Arc::clone(&site.uploading).acquire_owned().await;
    let component = receive_for(&site, body, COMPONENT).await?;
    let put = move || {
        let policy = Given::Component { bytes: &component, signature: signature.as_deref() };
        let upload = Upload { policy, options: options.as_deref(), source: "admin" };
        (changed(&control.put(slot, &upload, mode.unwrap_or_default())), turn).0
    };
    Ok(blocking(put).await)
}

/// The request in a JSON body: a native policy or a component in a registry, other options, or both.
struct Described {
    /// `native:NAME`, or a reference with a digest.
    source: Option<String>,
    options: Option<String>,
    mode: Option<Mode>,
}

impl Described {
    fn parse(text: &[u8]) -> Result<Self, Refusal> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Fields {
            source: Option<String>,
            config: Option<Map<String, Value>>,
            mode: Option<Mode>,
        }
        let malformed = |why: String| Refusal::new(StatusCode::BAD_REQUEST, why);
        let Fields { source, config, mode } =
            serde_json::from_slice(text).map_err(|error| malformed(format!("the body: {error}")))?;
        if source.is_none() && config.is_none() {
            return Err(malformed("the body must have \"source\", \"config\" or both".into()));
        }
        if let Some(source) = &source {
            match PolicySource::of(source) {
                PolicySource::Native(_) => {}
                PolicySource::Registry(reference) => {
                    OciReference::pinned(reference).map_err(|error| malformed(format!("source: {error}")))?;
                }
                PolicySource::File(_) => {
                    return Err(malformed(format!(
                        "source: {source:?}: must be native:NAME or oci://HOST/NAME@sha256:DIGEST; a component is sent as \
                         the body, as application/wasm"
                    )));
                }
            }
        }
        let options = config.map(|config| Value::from(config).to_string());
        Ok(Self { source, options, mode })
    }

    fn is_remote(&self) -> bool {
        self.source.as_deref().is_some_and(|source| PolicySource::of(source).registry().is_some())
    }

    fn policy(&self) -> Given<'_> {
        let Some(source) = self.source.as_deref() else { return Given::Active };
        PolicySource::of(source).native().map_or(Given::Remote(source), Given::Native)
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let media_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    media_type.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

/// The options that come with a component.
fn options_of(headers: &HeaderMap) -> Result<Option<String>, Refusal> {
    let Some(value) = headers.get(CONFIG_HEADER) else { return Ok(None) };
    let parsed: Result<Map<String, Value>, _> = serde_json::from_slice(value.as_bytes());
    let options = parsed.map_err(|error| {
        Refusal::new(StatusCode::BAD_REQUEST, format!("the header {CONFIG_HEADER} must be one JSON object: {error}"))
    })?;
    Ok(Some(Value::from(options).to_string()))
}

async fn act(
    State(site): Shared,
    slot: SlotPath,
    request: Request,
    call: fn(&dyn Control, SlotName) -> Result<SwapReport, ControlError>,
) -> Result<Response, Refusal> {
    authorize(&site, request.headers(), Role::Change)?;
    let slot = named(slot)?;
    let control = site.control_for(actor(request.extensions())?);
    let turn = Arc::clone(&site.changing).acquire_owned().await;
    Ok(blocking(move || (changed(&call(&control, slot)), turn).0).await)
}

/// Who asks: the connection has noted it.
pub(super) fn actor(extensions: &Extensions) -> Result<Actor, Refusal> {
    let why = "the connection has no client";
    extensions.get().cloned().ok_or_else(|| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, why))
}

/// Make a call on a thread that may block, one at a time.
pub(super) async fn read(site: &Arc<Site>, call: fn(&Site) -> Response) -> Response {
    let turn = Arc::clone(&site.reading).acquire_owned().await;
    let site = Arc::clone(site);
    blocking(move || (call(&site), turn).0).await
}

pub(super) async fn blocking(call: impl FnOnce() -> Response + Send + 'static) -> Response {
    let done = tokio::task::spawn_blocking(call).await;
    done.unwrap_or_else(|_| {
        let why = "the engine failed at this; its log says how";
        Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, why).into_response()
    })
}

/// The response to a change; the code that makes the change logs it.
fn changed(done: &Result<SwapReport, ControlError>) -> Response {
    let mut response = match done {
        Ok(report) => json(StatusCode::OK, report),
        Err(error) => {
            let code = match error {
                ControlError::Refused(_) => StatusCode::UNPROCESSABLE_ENTITY,
                ControlError::Busy(_) => StatusCode::SERVICE_UNAVAILABLE,
                ControlError::Nothing { .. } | ControlError::Overtaken(_) => StatusCode::CONFLICT,
                ControlError::NoSuchSlot(_) => StatusCode::NOT_FOUND,
            };
            Refusal::new(code, error.to_string()).into_response()
        }
    };
    response.extensions_mut().insert(Recorded);
    response
}

/// Whether a request carries a token with this role or more.
pub(super) fn authorize(site: &Site, headers: &HeaderMap, role: Role) -> Result<(), Refusal> {
    if site.access.tokens.is_none() {
        let why = site.access.without.unwrap_or("nothing can be changed: no admin.token_file is configured");
        return Err(Refusal::new(StatusCode::FORBIDDEN, why));
    }
    if let Some(token) = site.bearer(headers) {
        let why = match token.role {
            has if has >= role => return Ok(()),
            Role::Read => "this token may only read: changes need one with `change` or `all` in admin.token_file",
            _ => "this token may not give the engine another policy: that needs one with `all` in admin.token_file",
        };
        return Err(Refusal::new(StatusCode::FORBIDDEN, why));
    }
    let why = "changes need the token of admin.token_file: Authorization: Bearer TOKEN";
    Err(Refusal::new(StatusCode::UNAUTHORIZED, why))
}

/// Refuse a request of another server's client without the token.
fn check_forwarded(site: &Site, headers: &HeaderMap) -> Result<(), Refusal> {
    if !headers.contains_key(FORWARDED_HEADER) {
        return Ok(());
    }
    authorize(site, headers, Role::Read).map_err(|refusal| match refusal.code {
        StatusCode::UNAUTHORIZED => {
            let why = "requests from elsewhere need the token of admin.token_file: Authorization: Bearer TOKEN";
            Refusal::new(refusal.code, why)
        }
        _ => refusal,
    })
}

fn named(slot: SlotPath) -> Result<SlotName, Refusal> {
    let found = slot.ok().and_then(|Path(name)| SlotName::ALL.into_iter().find(|slot| slot.label() == name));
    found.ok_or_else(|| Refusal::new(StatusCode::NOT_FOUND, "no such slot, expected dispatch, eviction or budget"))
}

fn mode(query: Option<&str>) -> Result<Option<Mode>, Refusal> {
    match query {
        None | Some("") => Ok(None),
        Some("mode=active") => Ok(Some(Mode::Active)),
        Some("mode=shadow") => Ok(Some(Mode::Shadow)),
        Some(_) => Err(Refusal::new(StatusCode::BAD_REQUEST, "the query must be mode=active or mode=shadow")),
    }
}

/// The limits on a body.
#[derive(Clone, Copy)]
pub(super) struct Receives {
    what: &'static str,
    bytes: usize,
    most: &'static str,
}

const COMPONENT: Receives = Receives { what: "the component", bytes: MAX_COMPONENT_BYTES, most: "32 MiB" };
/// Room for the options and the text around them.
pub(super) const MAX_DESCRIPTION: Receives =
    Receives { what: "the body", bytes: MAX_OPTIONS_BYTES + 1024, most: "64 KiB" };

impl Receives {
    fn too_large(self) -> Refusal {
        Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, format!("{} must have at most {}", self.what, self.most))
    }
}

pub(super) async fn receive_for(site: &Site, body: Body, receives: Receives) -> Result<Vec<u8>, Refusal> {
    let late = |_| Refusal::new(StatusCode::REQUEST_TIMEOUT, format!("{} did not arrive in time", receives.what));
    tokio::time::timeout(site.limits.body, receive(body, receives)).await.map_err(late)?
}

async fn receive(mut body: Body, receives: Receives) -> Result<Vec<u8>, Refusal> {
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let broken = |_| Refusal::new(StatusCode::BAD_REQUEST, "the body could not be read to its end");
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        if bytes.len() + data.len() > receives.bytes {
            return Err(receives.too_large());
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

/// A status code, and the reason in one line.
pub(super) struct Refusal {
    code: StatusCode,
    why: Cow<'static, str>,
}

impl Refusal {
    pub(super) fn new(code: StatusCode, why: impl Into<Cow<'static, str>>) -> Self {
        Self { code, why: why.into() }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let why: String = self.why.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let mut response = with_type(self.code, "application/json", json!({ "error": &why }).to_string());
        if self.code == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.code == StatusCode::SERVICE_UNAVAILABLE {
            // Seconds, about as long as a late compiler needs to end.
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("10"));
        }
        response.extensions_mut().insert(Why(why));
        response
    }
}

pub(super) fn json(code: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => with_type(code, "application/json", text),
        Err(error) => Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

fn with_type(code: StatusCode, media_type: &'static str, text: String) -> Response {
    (code, [(CONTENT_TYPE, media_type), (HeaderName::from_static("x-content-type-options"), "nosniff")], text)
        .into_response()
}

/// The reach of a listener.
#[derive(Clone, Copy)]
pub(super) enum Reach {
    /// Programs on this machine, including a browser that shows a foreign page.
    Loopback,
    /// Users who may open the socket file.
    Socket,
    /// Other machines, over TLS.
    Network,
    /// Other machines, to which the operator shows metrics in the clear.
    Scrapers,
}

impl Reach {
    /// On loopback, a request must name this machine. Other machines need the token for everything but the probe, which
    /// tells nothing.
    pub(super) fn check<B>(self, site: &Site, request: &axum::http::Request<B>) -> Result<(), Refusal> {
        check_forwarded(site, request.headers())?;
        match self {
            Self::Socket | Self::Scrapers => return Ok(()),
            Self::Network if request.uri().path() == "/healthz" || site.bearer(request.headers()).is_some() => {
                return Ok(());
            }
            Self::Network => {
                let why = "requests from other machines need a token of admin.token_file: Authorization: Bearer TOKEN";
                return Err(Refusal::new(StatusCode::UNAUTHORIZED, why));
            }
            Self::Loopback => {}
        }
        if is_for_loopback(request) {
            return Ok(());
        }
        Err(Refusal::new(StatusCode::FORBIDDEN, "the Host header must be localhost or a loopback address"))
    }
}

/// Whether a request names this machine, in its one `Host` header and in its target, as `localhost` or as a loopback
/// address. A page with a DNS name that its owner points to this machine (DNS rebinding) still sends that name.
#[must_use]
pub fn is_for_loopback<B>(request: &axum::http::Request<B>) -> bool {
    let mut hosts = request.headers().get_all(HOST).iter();
    let named = hosts.next().and_then(|host| host.to_str().ok()).is_some_and(is_loopback);
    let target = request.uri().authority().is_none_or(|authority| is_loopback(authority.as_str()));
    named && target && hosts.next().is_none()
}

/// `localhost` or a loopback address, with or without a port.
fn is_loopback(host: &str) -> bool {
    let is_port = |port: &str| port.parse::<u16>().is_ok();
    let name = match host.rsplit_once(':') {
        Some((name, port)) if is_port(port) && (!name.contains(':') || name.ends_with(']')) => name,
        _ => host,
    };
    if name.eq_ignore_ascii_case("localhost") {
        return true;
    }
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    bare.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::is_loopback;

    #[test]
    fn names_of_this_machine() {
        for host in
            ["localhost", "LocalHost:9465", "127.0.0.1", "127.8.0.1:1", "[::1]", "[::1]:9465", "[::ffff:127.0.0.1]"]
        {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "",
            ":",
            "10.0.0.1",
            "evil.example",
            "localhost.evil.example",
            "localhost:x",
            "127.0.0.1.evil:80",
            "[::2]:1",
            "localhost:1:2",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}

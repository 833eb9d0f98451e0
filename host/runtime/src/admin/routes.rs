//! What is served, and what is refused. Every refusal is `{"error": "one line"}`.

use std::borrow::Cow;
use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::{Path, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use prometheus::{Registry, TextEncoder};
use serde::Serialize;
use serde_json::json;
use tokio::sync::Semaphore;

use super::Limits;
use super::metrics::StatusCollector;
use super::signature::{SIGNATURE_HEADER, signature_text};
use super::token::Token;
use crate::control::{Control, ControlError, MAX_COMPONENT_BYTES, Mode, SlotName, SwapReport, Upload};

/// What the routes share.
pub(super) struct Site {
    control: Arc<dyn Control>,
    registry: Registry,
    token: Option<Token>,
    token_configured: bool,
    limits: Limits,
    /// One call that reads and one that changes at a time. A component is received only by who is next to change, so no
    /// more than one is in memory.
    reading: Arc<Semaphore>,
    changing: Arc<Semaphore>,
}

impl Site {
    pub(super) fn new(control: Arc<dyn Control>, token: Option<Token>, token_configured: bool, limits: Limits) -> Self {
        let registry = Registry::new();
        let collector = Box::new(StatusCollector::new(Arc::clone(&control)));
        registry.register(collector).expect("the names of the metrics are valid and differ");
        let [reading, changing] = [(); 2].map(|()| Arc::new(Semaphore::new(1)));
        Self { control, registry, token, token_configured, limits, reading, changing }
    }
}

type Shared = State<Arc<Site>>;

pub(super) fn admin(site: Arc<Site>) -> Router {
    let slot = |action: &str| format!("/v1/policies/{{slot}}{action}");
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/policies", get(policies))
        .route("/v1/faults", get(faults))
        .route(&slot(""), put(put_component))
        .route(
            &slot("/promote"),
            post(async |site: Shared, slot: SlotPath, headers: HeaderMap| {
                act(site, slot, &headers, |control, slot| control.promote(slot)).await
            }),
        )
        .route(
            &slot("/rollback"),
            post(async |site: Shared, slot: SlotPath, headers: HeaderMap| {
                act(site, slot, &headers, |control, slot| control.rollback(slot)).await
            }),
        )
        .route(
            &slot("/release"),
            post(async |site: Shared, slot: SlotPath, headers: HeaderMap| {
                act(site, slot, &headers, |control, slot| control.release(slot)).await
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
    read(&site, |site| json(StatusCode::OK, &site.control.status())).await
}

async fn policies(State(site): Shared) -> Response {
    read(&site, |site| json(StatusCode::OK, &json!({ "slots": site.control.status().slots }))).await
}

async fn faults(State(site): Shared) -> Response {
    read(&site, |site| json(StatusCode::OK, &json!({ "faults": site.control.faults() }))).await
}

async fn metrics(State(site): Shared) -> Response {
    read(&site, |site| match TextEncoder::new().encode_to_string(&site.registry.gather()) {
        Ok(text) => with_type(StatusCode::OK, prometheus::TEXT_FORMAT, text),
        Err(error) => Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    })
    .await
}

type SlotPath = Result<Path<String>, axum::extract::rejection::PathRejection>;

async fn put_component(State(site): Shared, slot: SlotPath, request: Request) -> Result<Response, Refusal> {
    let (head, body) = request.into_parts();
    authorize(&site, &head.headers)?;
    let (slot, mode) = (named(slot)?, mode(head.uri.query())?);
    let signature = head.headers.get(SIGNATURE_HEADER).map(|header| signature_text(header.as_bytes()));
    if body.size_hint().lower() > MAX_COMPONENT_BYTES as u64 {
        return Err(TOO_LARGE);
    }
    let turn = Arc::clone(&site.changing).acquire_owned().await;
    let component = tokio::time::timeout(site.limits.body, receive(body))
        .await
        .map_err(|_| Refusal::new(StatusCode::REQUEST_TIMEOUT, "the component did not arrive in time"))??;
    let put = move || {
        let upload = Upload { component: &component, signature: signature.as_deref(), source: "admin" };
        (changed(&site.control.put(slot, &upload, mode)), turn).0
    };
    Ok(blocking(put).await)
}

async fn act(
    State(site): Shared,
    slot: SlotPath,
    headers: &HeaderMap,
    call: fn(&dyn Control, SlotName) -> Result<SwapReport, ControlError>,
) -> Result<Response, Refusal> {
    authorize(&site, headers)?;
    let slot = named(slot)?;
    let turn = Arc::clone(&site.changing).acquire_owned().await;
    Ok(blocking(move || (changed(&call(&*site.control, slot)), turn).0).await)
}

/// Call on a thread that may block, one at a time.
async fn read(site: &Arc<Site>, call: fn(&Site) -> Response) -> Response {
    let turn = Arc::clone(&site.reading).acquire_owned().await;
    let site = Arc::clone(site);
    blocking(move || (call(&site), turn).0).await
}

async fn blocking(call: impl FnOnce() -> Response + Send + 'static) -> Response {
    let done = tokio::task::spawn_blocking(call).await;
    done.unwrap_or_else(|_| {
        let why = "the engine failed at this; its log says how";
        Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, why).into_response()
    })
}

/// The result of a change; whoever carries it out logs it.
fn changed(done: &Result<SwapReport, ControlError>) -> Response {
    match done {
        Ok(report) => json(StatusCode::OK, report),
        Err(error) => {
            let code = match error {
                ControlError::Refused(_) => StatusCode::UNPROCESSABLE_ENTITY,
                ControlError::Busy(_) => StatusCode::SERVICE_UNAVAILABLE,
                ControlError::Nothing { .. } => StatusCode::CONFLICT,
                ControlError::NoSuchSlot(_) => StatusCode::NOT_FOUND,
            };
            Refusal::new(code, error.to_string()).into_response()
        }
    }
}

fn authorize(site: &Site, headers: &HeaderMap) -> Result<(), Refusal> {
    let Some(token) = &site.token else {
        let why = if site.token_configured {
            "nothing can be changed: admin.token_file could not be used, the engine's log says why"
        } else {
            "nothing can be changed: no admin.token_file is configured"
        };
        return Err(Refusal::new(StatusCode::FORBIDDEN, why));
    };
    if headers.get(AUTHORIZATION).is_some_and(|given| token.admits(given.as_bytes())) {
        return Ok(());
    }
    let why = "changes need the token of admin.token_file: Authorization: Bearer TOKEN";
    Err(Refusal::new(StatusCode::UNAUTHORIZED, why))
}

fn named(slot: SlotPath) -> Result<SlotName, Refusal> {
    let found = slot.ok().and_then(|Path(name)| SlotName::ALL.into_iter().find(|slot| slot.label() == name));
    found.ok_or_else(|| Refusal::new(StatusCode::NOT_FOUND, "no such slot, expected dispatch, eviction or budget"))
}

fn mode(query: Option<&str>) -> Result<Mode, Refusal> {
    match query {
        None | Some("" | "mode=active") => Ok(Mode::Active),
        Some("mode=shadow") => Ok(Mode::Shadow),
        Some(_) => Err(Refusal::new(StatusCode::BAD_REQUEST, "the query must be mode=active or mode=shadow")),
    }
}

async fn receive(mut body: Body) -> Result<Vec<u8>, Refusal> {
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let broken = |_| Refusal::new(StatusCode::BAD_REQUEST, "the body could not be read to its end");
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        if bytes.len() + data.len() > MAX_COMPONENT_BYTES {
            return Err(TOO_LARGE);
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

/// A code, and why in one line.
pub(super) struct Refusal {
    code: StatusCode,
    why: Cow<'static, str>,
}

const TOO_LARGE: Refusal =
    Refusal { code: StatusCode::PAYLOAD_TOO_LARGE, why: Cow::Borrowed("a component has at most 32 MiB") };

impl Refusal {
    fn new(code: StatusCode, why: impl Into<Cow<'static, str>>) -> Self {
        Self { code, why: why.into() }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let why: String = self.why.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let mut response = with_type(self.code, "application/json", json!({ "error": why }).to_string());
        if self.code == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.code == StatusCode::SERVICE_UNAVAILABLE {
            // Seconds, about as long as a late compiler takes to end.
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("10"));
        }
        response
    }
}

fn json(code: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => with_type(code, "application/json", text),
        Err(error) => Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

fn with_type(code: StatusCode, media_type: &'static str, text: String) -> Response {
    (code, [(CONTENT_TYPE, media_type), (HeaderName::from_static("x-content-type-options"), "nosniff")], text)
        .into_response()
}

/// Who can connect.
#[derive(Clone, Copy)]
pub(super) enum Reach {
    /// Programs on this machine, a browser that shows somebody's page among them.
    Loopback,
    /// Who may open the socket file.
    Socket,
}

impl Reach {
    /// A page whose name its owner has bent to this machine (DNS rebinding) still sends that name.
    pub(super) fn check(self, request: &Request) -> Result<(), Refusal> {
        if matches!(self, Self::Socket) {
            return Ok(());
        }
        let mut hosts = request.headers().get_all(HOST).iter();
        let named = hosts.next().and_then(|host| host.to_str().ok()).is_some_and(is_loopback);
        let target = request.uri().authority().is_none_or(|authority| is_loopback(authority.as_str()));
        if named && target && hosts.next().is_none() {
            return Ok(());
        }
        Err(Refusal::new(StatusCode::FORBIDDEN, "the Host header must be localhost or a loopback address"))
    }
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

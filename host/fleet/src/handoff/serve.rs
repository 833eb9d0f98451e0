//! The server: requests that can be handed over, and all others, which the engine that thinks gets unchanged.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue, TRANSFER_ENCODING,
};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use meridian_admin::is_for_loopback;
use meridian_core::handoff::Handoffs;
use meridian_engine::otlp::Traces;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{Receiver, channel};
use tokio::sync::watch;

use super::answer::unchanged;
use super::counters::Counters;
use super::door::{ClientLimits, Door, Pass};
use super::split::{Api, SplitRequest};
use super::status::{self, AnsweringEngine, HandoffStatus};
use super::stream::{Sent, relay};
use super::upstream::{Connection, Reply, Upstream, passed_on};
use super::whole::complete;
use super::{HandoffError, HandoffSettings, markers};
use crate::Endpoint;

/// Longest time for an answer of the engine that thinks at the start.
const START: Duration = Duration::from_secs(10);
/// Largest head of a request, bytes.
const MAX_HEAD: usize = 64 << 10;
/// Chunks that wait for a slow client before the engine has to wait too.
const CHUNKS: usize = 64;

type Answered = Response<UnsyncBoxBody<Bytes, Broken>>;

/// The body breaks off.
type Broken = Box<dyn std::error::Error + Send + Sync>;

/// Takes one line of log.
type Log = Box<dyn Fn(&str) + Send + Sync>;

/// What all requests share.
pub(super) struct Shared {
    pub(super) think: Upstream,
    pub(super) answer: Vec<Upstream>,
    handoffs: Mutex<Handoffs>,
    started: Instant,
    pub(super) markers: Vec<u64>,
    pub(super) patience: Duration,
    limits: ClientLimits,
    pub(super) counters: Counters,
    pub(super) traces: Option<Traces>,
    /// Of the front's own requests.
    own: HeaderMap,
    log: Log,
}

impl Shared {
    pub(super) fn say(&self, line: &str) {
        (self.log)(line);
    }

    /// The account of handoffs; the lock is held for a decision at most.
    pub(super) fn handoffs(&self) -> MutexGuard<'_, Handoffs> {
        self.handoffs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Milliseconds since the start.
    pub(super) fn now_ms(&self) -> f64 {
        self.started.elapsed().as_secs_f64() * 1e3
    }
}

/// A front that is ready to serve.
pub struct Handoff(Arc<Shared>);

impl Handoff {
    /// Ask the engine that thinks for the tokens that end thinking.
    ///
    /// # Errors
    /// It does not answer, or its tokenizer has no such token.
    pub async fn prepare(
        settings: HandoffSettings,
        log: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Self, HandoffError> {
        let HandoffSettings { think, answer, think_end, policy, patience, limits, traces, api_key } = settings;
        let think = Upstream::new(think).map_err(HandoffError::Think)?;
        let names: Vec<String> = answer.iter().map(Endpoint::host_header).collect();
        let answer =
            answer.into_iter().map(Upstream::new).collect::<Result<Vec<_>, _>>().map_err(HandoffError::Think)?;
        let mut own = HeaderMap::new();
        if let Some(key) = api_key {
            let mut bearer = HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| HandoffError::MalformedKey)?;
            bearer.set_sensitive(true);
            own.insert(AUTHORIZATION, bearer);
        }
        let markers = markers(&think_end, &think, &own, patience.min(START)).await?;
        let counters = Counters::new(names).map_err(|error| HandoffError::Think(error.to_string()))?;
        let handoffs = Mutex::new(Handoffs::new(policy, answer.len()));
        let (started, log) = (Instant::now(), Box::new(log));
        Ok(Self(Arc::new(Shared {
            think,
            answer,
            handoffs,
            started,
            markers,
            patience,
            limits,
            counters,
            traces,
            own,
            log,
        })))
    }

    /// The tokens that end thinking.
    #[must_use]
    pub fn markers(&self) -> &[u64] {
        &self.0.markers
    }

    /// Serve until `stop` ends, and then the requests that have begun, to their end.
    pub async fn serve(self, listener: TcpListener, stop: impl Future<Output = ()>) {
        let limits = self.0.limits;
        let door = Door::new(limits);
        let (serves, stopping) = watch::channel(());
        let mut stop = pin!(stop);
        loop {
            let next = async { (door.place().await, listener.accept().await) };
            let (place, accepted) = tokio::select! {
                next = next => next,
                () = &mut stop => break,
            };
            let Ok((stream, _)) = accepted else {
                // No file descriptors are left; others close theirs meanwhile.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let _ = stream.set_nodelay(true);
            let (shared, mut stopping) = (Arc::clone(&self.0), stopping.clone());
            door.admit(place, |pass| async move {
                let pass = &pass;
                let service = service_fn(move |request| {
                    let shared = Arc::clone(&shared);
                    async move { Ok::<_, Infallible>(handle(shared, request, pass).await) }
                });
                let mut server = http1::Builder::new();
                server
                    .timer(TokioTimer::new())
                    .header_read_timeout(limits.head)
                    .keep_alive(false)
                    .max_buf_size(MAX_HEAD);
                let mut connection = pin!(server.serve_connection(TokioIo::new(stream), service));
                tokio::select! {
                    // A client that breaks the connection has its reasons.
                    _ = &mut connection => return,
                    _ = stopping.changed() => {}
                }
                // Ends it if it has sent nothing.
                connection.as_mut().graceful_shutdown();
                let _ = connection.await;
            });
            // Those before it read what they were sent, so that a crowd does not close them unread.
            tokio::task::yield_now().await;
        }
        drop((listener, serves));
        door.empty().await;
    }
}

async fn handle(shared: Arc<Shared>, request: Request<Incoming>, pass: &Pass) -> Answered {
    // A page whose name was pointed to this machine (DNS rebinding) still sends that name.
    if !is_for_loopback(&request) {
        return refusal(StatusCode::FORBIDDEN, "the Host header must be localhost or a loopback address");
    }
    let (head, body) = request.into_parts();
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    // Holds the memory of the body until there is a response.
    let read = match pass.read(body).await {
        Ok(read) => read,
        Err((status, why)) => return refusal(status, why),
    };
    let body = read.body.clone();
    let mut headers = passed_on(&head.headers);
    let api = match (&head.method, head.uri.path()) {
        (&Method::GET, "/metrics") => return metrics(&shared),
        (&Method::GET, status::PATH) => return status_of(&shared),
        (&Method::GET | &Method::HEAD, "/health") if !headers.contains_key(AUTHORIZATION) => {
            headers.extend(shared.own.clone());
            return pass_through(&shared, head.method, &path, &headers, body).await;
        }
        (&Method::POST, "/v1/completions") => Api::Completions,
        (&Method::POST, "/v1/chat/completions") => Api::Chat,
        _ => return pass_through(&shared, head.method, &path, &headers, body).await,
    };
    shared.counters.requests.inc();
    let plan = serde_json::from_slice::<Value>(&body)
        .map_err(|_| "body".to_owned())
        .and_then(|body| SplitRequest::of(api, &body, &shared.markers));
    let plan = match plan {
        Ok(plan) => {
            let offered = shared.handoffs().offer(shared.now_ms());
            match offered {
                Ok(blocks) => plan.offering(&blocks),
                Err(stays) => {
                    shared.counters.went_on.with_label_values(&[stays.label()]).inc();
                    return pass_through(&shared, head.method, &path, &headers, body).await;
                }
            }
        }
        Err(field) => {
            // A client must not make a counter of each name that it invents.
            let known = ["n", "logprobs", "stop", "stop_token_ids", "tools", "response_format", "prompt", "body"];
            let field = known.iter().find(|known| **known == field).unwrap_or(&"other");
            shared.counters.passed_through.with_label_values(&[field]).inc();
            return pass_through(&shared, head.method, &path, &headers, body).await;
        }
    };
    let first = match shared.think.post(&path, &headers, &plan.think).await {
        Ok(first) => first,
        Err(error) => return refusal(StatusCode::BAD_GATEWAY, &format!("the engine that thinks: {error}")),
    };
    if first.status != StatusCode::OK {
        return relayed(first);
    }
    if plan.streams { streamed(shared, plan, headers, first) } else { whole(&shared, &plan, &headers, first).await }
}

fn streamed(shared: Arc<Shared>, plan: SplitRequest, headers: HeaderMap, first: Reply) -> Answered {
    let (to, from) = channel(CHUNKS);
    tokio::spawn(async move { relay(&shared, &plan, &headers, first.events(), to).await });
    let mut response = Response::new(Chunks(from).boxed_unsync());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

async fn whole(shared: &Shared, plan: &SplitRequest, headers: &HeaderMap, first: Reply) -> Answered {
    let read = async {
        let text = first.whole().await.map_err(|error| format!("the engine that thinks: {error}"))?;
        let response = serde_json::from_slice(&text).map_err(|_| "the engine that thinks: no JSON".to_owned())?;
        complete(shared, plan, headers, response).await
    };
    match read.await {
        Ok(response) => with_body(StatusCode::OK, "application/json", response.to_string()),
        Err(error) => {
            shared.say(&error);
            refusal(StatusCode::BAD_GATEWAY, &error)
        }
    }
}

async fn pass_through(shared: &Shared, method: Method, path: &str, headers: &HeaderMap, body: Bytes) -> Answered {
    match unchanged(&shared.think, method, path, headers, body).await {
        Ok(reply) => relayed(reply),
        Err(error) => refusal(StatusCode::BAD_GATEWAY, &error),
    }
}

fn relayed(reply: Reply) -> Answered {
    let Reply { status, mut headers, body, connection } = reply;
    // hyper writes its own.
    headers.remove(TRANSFER_ENCODING);
    headers.remove("connection");
    let mut response = Response::new(Relayed { body, _connection: connection }.boxed_unsync());
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

fn metrics(shared: &Shared) -> Answered {
    with_body(
        StatusCode::OK,
        "text/plain; version=0.0.4",
        shared.counters.text(shared.handoffs().targets(shared.now_ms())),
    )
}

fn status_of(shared: &Shared) -> Answered {
    let known = |ms: f64| ms.is_finite().then_some(ms);
    let (now_ms, counters) = (shared.now_ms(), &shared.counters);
    let mut handoffs = shared.handoffs();
    let engines = handoffs.targets(now_ms).iter().enumerate().map(|(number, target)| AnsweringEngine {
        engine: counters.engine(number).to_owned(),
        requests: target.requests,
        blocks: target.blocks,
        handed_over: counters.handed_over_to(number),
        begin_ms: known(target.begin_ms),
        itl_ms: known(target.itl_ms),
        is_failing: target.is_failing,
    });
    let status = HandoffStatus {
        pid: std::process::id(),
        uptime_s: now_ms / 1e3,
        requests: counters.requests.get(),
        engines: engines.collect(),
        think_itl_ms: known(handoffs.think_itl_ms()),
        first_engine: counters.by_first_engine(),
    };
    with_body(StatusCode::OK, "application/json", json!(status).to_string())
}

/// An error in the form of the API.
fn refusal(status: StatusCode, message: &str) -> Answered {
    let error = json!({ "error": { "message": message, "type": "InternalServerError", "code": status.as_u16() } });
    with_body(status, "application/json", error.to_string())
}

fn with_body(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answered {
    let body: Bytes = body.into();
    let length = HeaderValue::from(body.len());
    let mut response = Response::new(Full::new(body).map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CONTENT_LENGTH, length);
    response
}

/// The body of a stream.
struct Chunks(Receiver<Sent>);

impl Body for Chunks {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        self.0.poll_recv(context).map(|sent| sent.map(|sent| sent.map(Frame::data).map_err(Into::into)))
    }
}

/// A body of the first engine, with its connection.
struct Relayed {
    body: Incoming,
    _connection: Connection,
}

impl Body for Relayed {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        Pin::new(&mut self.body).poll_frame(context).map_err(Into::into)
    }
}

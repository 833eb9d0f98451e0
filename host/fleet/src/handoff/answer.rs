//! The second part of a request: the answer, by another engine, or by the first one from the tokens so far.

use std::time::Instant;

use hyper::header::HeaderMap;
use hyper::{Method, StatusCode};
use meridian_core::handoff::Answered;
use meridian_engine::otlp::{HandoffSpan, TraceParent};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::said::{Choice, Said};
use super::serve::Shared;
use super::split::{SplitRequest, kept_blocks};
use super::upstream::{self, Upstream};

/// Most tokens of a request, prompt included: more than any context holds.
pub(super) const MOST_TOKENS: usize = 16 << 20;
/// Most pieces without a text in a row.
const MOST_HELD: usize = 1 << 16;
/// An engine that does not say which tokens it has read and written.
pub(super) const NO_IDS: &str = "its answer has no token ids";

/// A request whose thinking is over.
#[derive(Debug)]
pub(super) struct Thought {
    pub(super) prompt_tokens: usize,
    /// Of the prompt, the thinking, and the answer so far.
    pub(super) tokens: Vec<u64>,
    /// Where the first engine keeps the KV blocks, if it does.
    pub(super) kv: Option<Value>,
}

impl Thought {
    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }

    pub(super) fn usage(&self) -> Value {
        let (prompt, all) = (self.prompt_tokens, self.tokens.len());
        json!({ "prompt_tokens": prompt, "completion_tokens": all - prompt, "total_tokens": all })
    }
}

/// Some tokens of an answer.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) ids: Vec<u64>,
    pub(super) finish_reason: Option<String>,
    pub(super) stop_reason: Value,
}

impl Piece {
    /// End the answer after so many of its tokens. Its text goes: no part of it belongs to a token.
    fn end_after(&mut self, tokens: u64) {
        self.ids.truncate(usize::try_from(tokens).unwrap_or(usize::MAX));
        (self.text, self.stop_reason) = (String::new(), Value::Null);
        self.finish_reason = Some("length".into());
    }
}

/// Takes the pieces in their order.
pub(super) trait Sink {
    /// Waits for a slow client.
    fn put(&mut self, piece: Piece) -> impl Future<Output = ()> + Send;
}

/// Write the answer into the sink, the last piece with its reason.
///
/// # Errors
/// The first engine failed as well; the reason for the client.
pub(super) async fn write(
    shared: &Shared,
    plan: &SplitRequest,
    headers: &HeaderMap,
    thought: &mut Thought,
    sink: &mut (impl Sink + Send),
) -> Result<(), String> {
    if plan.left(thought.generated()) == Some(0) {
        let (text, ids) = (String::new(), Vec::new());
        sink.put(Piece { text, ids, finish_reason: Some("length".into()), stop_reason: Value::Null }).await;
        return Ok(());
    }
    let reason = match thought.kv.take() {
        None => "kept",
        Some(kv) => match second(shared, plan, headers, thought, &kv, sink).await {
            Ok(()) => return Ok(()),
            Err(reason) => reason,
        },
    };
    shared.counters.went_on.with_label_values(&[reason]).inc();
    if reason != "kept" {
        shared.say(&format!("the engine that answers: {reason}; the first engine goes on"));
    }
    let body = plan.answer(&thought.tokens, plan.left(thought.generated()), None);
    let reply = shared.think.post("/v1/completions", headers, &body).await;
    let reply = reply.map_err(|error| format!("the engine that thinks: {error}"))?;
    if reply.status != StatusCode::OK {
        return Err(format!("the engine that thinks: HTTP {}", reply.status.as_u16()));
    }
    let before = thought.tokens.len();
    let read = pieces(reply.events(), plan, thought, sink, || ()).await;
    read.map_err(|_| "the engine that thinks: hung up in the middle of the answer")?;
    if reason == "kept" {
        shared.handoffs().stayed(u32::try_from(thought.tokens.len() - before).unwrap_or(u32::MAX));
    }
    Ok(())
}

/// The reason for an engine that answers with a status 4xx: the request's fault, not the engine's.
const REJECTED: &str = "rejected";

/// An answer that an engine is asked for. Its end is told to the account of handoffs, whatever ends it.
struct Underway<'a> {
    shared: &'a Shared,
    target: usize,
    blocks: u32,
    asked: Instant,
    begun: Option<Instant>,
    /// Tokens that the request had before.
    before: usize,
    parent: Option<TraceParent>,
    is_told: bool,
}

impl<'a> Underway<'a> {
    /// None: every engine is failing.
    fn new(shared: &'a Shared, blocks: u32, before: usize, headers: &HeaderMap) -> Option<Self> {
        let target = shared.handoffs().target(blocks, shared.now_ms())?;
        let parent = headers.get("traceparent").and_then(|header| TraceParent::parse(header.to_str().ok()?));
        Some(Self { shared, target, blocks, asked: Instant::now(), begun: None, before, parent, is_told: false })
    }

    fn begun(&mut self) {
        self.begun = Some(Instant::now());
        self.shared.counters.begun(self.target, self.asked.elapsed().as_secs_f64());
    }

    /// Tell the account of handoffs, and the collector of traces.
    fn over(&mut self, thought: &Thought, done: Result<(), &'static str>) {
        let tokens = u32::try_from(thought.tokens.len() - self.before).unwrap_or(u32::MAX);
        match done {
            Ok(()) => self.answered(tokens),
            // No client may make an engine look as if it failed.
            Err(REJECTED) => self.shared.handoffs().dropped(self.target, self.blocks),
            Err(_) => self.shared.handoffs().failed(self.target, self.blocks, self.shared.now_ms()),
        }
        self.is_told = true;
        if let Some(traces) = &self.shared.traces {
            traces.handoff(HandoffSpan {
                engine: self.shared.counters.engine(self.target).to_owned(),
                blocks: self.blocks,
                answer_tokens: tokens,
                begun_after: self.begun.map(|begun| begun.duration_since(self.asked)),
                took: self.asked.elapsed(),
                failure: done.err(),
                parent: self.parent,
            });
        }
    }

    fn answered(&mut self, tokens: u32) {
        let begun = self.begun.unwrap_or(self.asked);
        let ms = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64() * 1e3;
        let answered = Answered { begin_ms: ms(self.asked, begun), tokens, writing_ms: ms(begun, Instant::now()) };
        self.shared.handoffs().answered(self.target, self.blocks, &answered);
    }
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        // The client is gone.
        if !self.is_told {
            self.shared.handoffs().dropped(self.target, self.blocks);
        }
    }
}

async fn second(
    shared: &Shared,
    plan: &SplitRequest,
    headers: &HeaderMap,
    thought: &mut Thought,
    kv: &Value,
    sink: &mut (impl Sink + Send),
) -> Result<(), &'static str> {
    let mut headers = headers.clone();
    // A rank of the first engine.
    headers.remove("x-data-parallel-rank");
    let before = thought.tokens.len();
    let mut underway = Underway::new(shared, kept_blocks(kv), before, &headers).ok_or("failing")?;
    let body = plan.answer(&thought.tokens, plan.left(thought.generated()), Some(kv));
    let engine = &shared.answer[underway.target];
    let done = async {
        let reply = timeout(shared.patience, engine.post("/v1/completions", &headers, &body)).await;
        let reply = reply.map_err(|_| "stalled")?.map_err(|_| "unreachable")?;
        if reply.status != StatusCode::OK {
            return Err(if reply.status.is_client_error() { REJECTED } else { "refused" });
        }
        pieces(reply.events().within(shared.patience), plan, thought, sink, || underway.begun()).await
    };
    let done = done.await;
    underway.over(thought, done);
    done
}

/// Pass on the pieces of a stream until its last one, or until an engine goes on beyond the client's limit.
async fn pieces(
    mut events: upstream::Events,
    plan: &SplitRequest,
    thought: &mut Thought,
    sink: &mut (impl Sink + Send),
    begun: impl FnOnce(),
) -> Result<(), &'static str> {
    let mut begun = Some(begun);
    // Tokens whose text comes later, in the middle of a character. Another engine would have to write them again.
    let mut held: Vec<Piece> = Vec::new();
    let mut left = plan.left(thought.generated());
    while let Some(data) = events.next().await? {
        let chunk: Value = serde_json::from_slice(&data).map_err(|_| "broken")?;
        let mut said = Said::of(&chunk).map_err(|_| "broken")?;
        if said.is_error() {
            return Err("broken");
        }
        let Some(Choice { text, token_ids, finish_reason, stop_reason, .. }) = said.take_choice() else { continue };
        let (text, ids) = (text.unwrap_or_default(), token_ids.unwrap_or_default());
        let mut piece = Piece { text, ids, finish_reason, stop_reason };
        if matches!(piece.finish_reason.as_deref(), Some("error" | "abort")) {
            return Err("broken");
        }
        if thought.tokens.len() > MOST_TOKENS || held.len() > MOST_HELD {
            return Err("broken");
        }
        if let Some(begun) = begun.take() {
            begun();
        }
        if let Some(left) = &mut left {
            // A text without ids is a token at least.
            let tokens = piece.ids.len().max(usize::from(!piece.text.is_empty())) as u64;
            if tokens > *left {
                piece.end_after(*left);
            }
            *left = left.saturating_sub(tokens);
        }
        let is_last = piece.finish_reason.is_some();
        let has_text = !piece.text.is_empty();
        held.push(piece);
        if has_text || is_last {
            for piece in held.drain(..) {
                thought.tokens.extend_from_slice(&piece.ids);
                sink.put(piece).await;
            }
        }
        if is_last {
            return Ok(());
        }
    }
    Err("broken")
}

/// Ask the first engine for what only it serves.
pub(super) async fn unchanged(
    think: &Upstream,
    method: Method,
    path: &str,
    headers: &HeaderMap,
    body: bytes::Bytes,
) -> Result<upstream::Reply, String> {
    think.send(method, path, headers, body).await.map_err(|error| format!("the engine that thinks: {error}"))
}

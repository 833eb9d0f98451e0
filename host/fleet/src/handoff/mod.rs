//! `meridian handoff`: one OpenAI-compatible address before engines. The first one thinks, the others answer.
//!
//! The thinking part of a request is the client's own request with one more stop token, so all that vLLM does for a
//! request holds for it. The answer is a completion of token ids at another engine, which pulls the KV blocks from the
//! first. A [`HandoffPolicy`](meridian_core::handoff::HandoffPolicy) chooses the requests and the engine. Whatever fails
//! there, the first engine goes on from the tokens so far.

mod answer;
mod counters;
mod door;
mod lines;
mod said;
mod serve;
mod split;
mod status;
mod stream;
mod upstream;
mod whole;

use std::time::Duration;

use hyper::header::HeaderMap;
use meridian_core::handoff::HandoffPolicy;
use meridian_engine::otlp::Traces;
use serde::Deserialize;
use serde_json::json;
use thiserror::Error;

use crate::Endpoint;
pub use door::ClientLimits;
pub use serve::Handoff;
pub use status::{AnsweringEngine, HandoffStatus};

/// The engines, and when to move a request from the first to another.
pub struct HandoffSettings {
    /// The engine that thinks, and that serves all requests that cannot be handed over.
    pub think: Endpoint,
    /// The engines that answer, at least one.
    pub answer: Vec<Endpoint>,
    /// Texts that end the thinking of the model; each must be one token.
    pub think_end: Vec<String>,
    /// Which requests move, and to which engine.
    pub policy: Box<dyn HandoffPolicy>,
    /// Longest time without an event from an engine that answers.
    pub patience: Duration,
    /// Limits on clients.
    pub limits: ClientLimits,
    /// Where spans go, if anywhere.
    pub traces: Option<Traces>,
    /// The key of the front's own requests to the engines. Clients bring theirs.
    pub api_key: Option<String>,
}

/// The reason why no request can be served.
#[derive(Debug, Error)]
pub enum HandoffError {
    /// The engine that thinks does not say how it encodes the end of thinking.
    #[error("the engine that thinks: {0}")]
    Think(String),
    /// The engine that thinks wants another key, or one at all.
    #[error("the engine that thinks: {path}: HTTP {status} {}", if *has_key { "to this key" } else { "without a key" })]
    Key {
        /// What was asked.
        path: &'static str,
        /// Its answer.
        status: u16,
        /// Whether a key was sent.
        has_key: bool,
    },
    /// No header can carry the key.
    #[error("the key must be visible ASCII characters")]
    MalformedKey,
    /// The model's end of thinking is not one token.
    #[error("end of thinking {text:?}: the tokenizer gives {tokens:?}, expected one token")]
    Marker {
        /// The text.
        text: String,
        /// Its tokens.
        tokens: Vec<u64>,
    },
    /// No text ends thinking.
    #[error("no text ends thinking, expected one such as \"</think>\"")]
    NoMarker,
}

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u64>,
}

/// Asks the engine that thinks for the token of each text that ends thinking.
pub(crate) async fn markers(
    think_end: &[String],
    to: &upstream::Upstream,
    headers: &HeaderMap,
    within: Duration,
) -> Result<Vec<u64>, HandoffError> {
    let mut found = Vec::new();
    for text in think_end {
        let ask = json!({ "prompt": text, "add_special_tokens": false });
        let tokens = to.json("/tokenize", headers, &ask, within).await?;
        let Tokenized { tokens } = Tokenized::deserialize(&tokens)
            .map_err(|error| HandoffError::Think(format!("/tokenize: its answer is not as expected: {error}")))?;
        match tokens.as_slice() {
            [one] => found.push(*one),
            _ => return Err(HandoffError::Marker { text: text.clone(), tokens }),
        }
    }
    if found.is_empty() { Err(HandoffError::NoMarker) } else { Ok(found) }
}

//! What a front says of itself, for `meridian top`.

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::{Method, StatusCode};
use serde::{Deserialize, Serialize};

use crate::http::{Ask, Within, exchange};
use crate::{Endpoint, tls};

/// The path of the status.
pub(super) const PATH: &str = "/meridian/handoff";
const WITHIN: Within =
    Within { connect: Duration::from_secs(3), answer: Duration::from_secs(4), bytes: 1 << 20, probes: None };

/// The state of a front. Means are moving means; `None` before the first value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HandoffStatus {
    /// Process id.
    pub pid: u32,
    /// Seconds since its start.
    pub uptime_s: f64,
    /// Completions and chats.
    pub requests: u64,
    /// Gap between two tokens in the engine that thinks, mean, milliseconds.
    pub think_itl_ms: Option<f64>,
    /// The engines that answer.
    pub engines: Vec<AnsweringEngine>,
    /// Answers that the first engine wrote, by reason.
    pub first_engine: BTreeMap<String, u64>,
}

/// An engine that answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AnsweringEngine {
    /// Its address.
    pub engine: String,
    /// Answers that it is writing, or about to.
    pub requests: u32,
    /// KV blocks that these had when they were handed over.
    pub blocks: u64,
    /// Answers that it has begun since the start.
    pub handed_over: u64,
    /// From the request for an answer to its first token, mean, milliseconds.
    pub begin_ms: Option<f64>,
    /// Gap between two tokens of an answer, mean, milliseconds.
    pub itl_ms: Option<f64>,
    /// It failed a moment ago, and is left out.
    pub is_failing: bool,
}

impl HandoffStatus {
    /// Ask the front at this address.
    ///
    /// # Errors
    /// One line: it cannot be reached, or is no front of a handoff.
    pub fn ask(front: &Endpoint) -> Result<Self, String> {
        let tls = match front {
            Endpoint::Tls { .. } => Some(tls::client(None)?),
            Endpoint::Loopback(_) | Endpoint::Unix(_) => None,
        };
        let address = front.host_header();
        let answer = exchange(front, tls, &Ask::of(Method::GET, PATH), None, WITHIN);
        let (status, body) = answer.map_err(|error| format!("{address}: {error}"))?;
        let parsed = (status == StatusCode::OK).then(|| serde_json::from_slice(&body).ok()).flatten();
        parsed.ok_or_else(|| format!("{address}: no front of a handoff answers there"))
    }
}

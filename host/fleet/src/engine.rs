//! An engine over HTTP.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderName};
use hyper::{Method, StatusCode};
use meridian_admin::discovery::Process;
use meridian_admin::{CONFIG_HEADER, SIGNATURE_HEADER, read_token, signature_header};
use meridian_core::PolicySource;
use meridian_core::oci::OciReference;
use meridian_core::text::printable;
use meridian_engine::budgets::{BudgetList, ChangeReport, LiveChange};
use meridian_engine::control::{FaultEntry, LatencyReport, Mode, ProcessStatus, SlotName, SwapReport};
use rustls::ClientConfig;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::http::{Ask, Within, exchange};
use crate::member::{Member, MemberError, NamedPolicy, PolicyOrigin};
use crate::{Endpoint, FleetError, tls};

/// The faults of a process with the batches they happened on, or a timeline.
const MAX_REPLY_BYTES: usize = 256 << 20;
/// Any other answer. Many engines are asked at a time.
const MAX_SHORT_REPLY_BYTES: usize = 8 << 20;
/// Most bytes of options beside a component: they are a header of the request.
const MAX_HEADER_BYTES: usize = 8 << 10;
/// Most characters of another process's reason that are repeated.
const MAX_REASON_CHARACTERS: usize = 2000;
/// Longest text in an answer: as long as the options of a policy may be.
const MAX_TEXT_BYTES: usize = 64 << 10;

/// How long a client waits for an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// For a connection.
    pub connect: Duration,
    /// For an answer that is at hand, to its last byte.
    pub read: Duration,
    /// For a change that may compile a component or fetch it, as long as the engine answers probes.
    pub change: Duration,
}

impl Default for Patience {
    /// Two answers come within ten seconds, or do not come.
    fn default() -> Self {
        let [connect, read, change] = [3, 4, 180].map(Duration::from_secs);
        Self { connect, read, change }
    }
}

/// The answer of one engine to a change of budgets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BudgetChange {
    /// Requests that live there were changed.
    Made(ChangeReport),
    /// None of the requests that were meant lives and thinks there. One line with the engine's address.
    NothingHere(String),
}

/// An engine process with an admin listener.
///
/// The token goes with changes only, and with everything that is asked over TLS.
///
/// ```no_run
/// use meridian_fleet::{EngineClient, Member};
///
/// let engine = EngineClient::at("https://engine-7.example:9465")?.with_ca_file("ca.pem").with_token_file("engine-7.token");
/// println!("{} runs {}", engine.name(), engine.status()?.model);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct EngineClient {
    name: String,
    /// The address that identifies it.
    address: String,
    /// The address for requests: its private socket if it has one, which no other process can have taken.
    endpoint: Endpoint,
    token_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
    patience: Patience,
    /// Read at the first request over TLS.
    tls: OnceLock<Result<Arc<ClientConfig>, String>>,
}

impl EngineClient {
    /// The engine at this address: `IP:port` on loopback, `unix:PATH` or `https://HOST:port`.
    ///
    /// # Errors
    /// [`FleetError::Address`].
    pub fn at(address: &str) -> Result<Self, FleetError> {
        let malformed = |reason| FleetError::Address { address: address.to_owned(), reason };
        let endpoint = Endpoint::parse(address).map_err(malformed)?;
        Ok(Self::new(address.to_owned(), endpoint))
    }

    /// The engine that a discovery file describes.
    ///
    /// # Errors
    /// [`FleetError::Address`].
    pub fn of(process: &Process) -> Result<Self, FleetError> {
        let address = known_by(process);
        let mut engine = Self::at(process.socket.as_deref().unwrap_or(address))?;
        engine.name = address.to_owned();
        engine.address = address.to_owned();
        engine.token_file = process.token_file.as_ref().map(PathBuf::from);
        Ok(engine)
    }

    fn new(address: String, endpoint: Endpoint) -> Self {
        let (name, patience) = (address.clone(), Patience::default());
        Self { name, address, endpoint, token_file: None, ca_file: None, patience, tls: OnceLock::new() }
    }

    /// Give the engine a name of its own; by default its address is its name.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Read the token from this file before each request that needs it.
    #[must_use]
    pub fn with_token_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.token_file = Some(path.into());
        self
    }

    /// Trust the authorities in this file to have signed the engine's certificate; without it, those that the system
    /// trusts.
    #[must_use]
    pub fn with_ca_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.ca_file = Some(path.into());
        self
    }

    /// Set the limits of time.
    #[must_use]
    pub fn with_patience(mut self, patience: Patience) -> Self {
        self.patience = patience;
        self
    }

    /// The address that identifies it.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The address for requests.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The file of its token, if known.
    #[must_use]
    pub fn token_file(&self) -> Option<&Path> {
        self.token_file.as_deref()
    }

    /// What it answers to `GET path`, as JSON.
    ///
    /// # Errors
    /// See [`MemberError`].
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, MemberError> {
        self.read(path, MAX_SHORT_REPLY_BYTES)
    }

    /// Its latest faults, oldest first, with the batches that they happened on.
    ///
    /// # Errors
    /// See [`MemberError`].
    pub fn faults(&self) -> Result<Vec<FaultEntry>, MemberError> {
        #[derive(Deserialize)]
        struct Faults {
            faults: Vec<FaultEntry>,
        }
        self.read::<Faults>("/v1/faults", MAX_REPLY_BYTES).map(|found| found.faults)
    }

    /// The text of an answer that it gives only after `after`.
    ///
    /// # Errors
    /// See [`MemberError`].
    pub fn text(&self, path: &str, after: Duration) -> Result<String, MemberError> {
        let within = Within { answer: self.patience.read + after, ..self.reading(MAX_REPLY_BYTES) };
        let (code, reply) = self.exchange(&Ask::of(Method::GET, path), within)?;
        if code != StatusCode::OK {
            return Err(self.refusal(code, &reply));
        }
        String::from_utf8(reply.to_vec()).map_err(|_| self.unreachable("the answer is not text"))
    }

    /// The live requests whose thinking it follows.
    ///
    /// # Errors
    /// See [`MemberError`].
    pub fn budgets(&self) -> Result<BudgetList, MemberError> {
        self.get("/v1/budgets")
    }

    /// Change budgets of live requests.
    ///
    /// # Errors
    /// See [`MemberError`].
    pub fn change_budgets(&self, change: &LiveChange) -> Result<BudgetChange, MemberError> {
        let body = serde_json::to_vec(change).map_err(|error| self.refused(&error.to_string()))?;
        let ask = json(Ask::of(Method::PUT, "/v1/budgets"), body);
        let (code, reply) = self.exchange(&ask, self.reading(MAX_SHORT_REPLY_BYTES))?;
        match code {
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => match self.refusal(code, &reply) {
                MemberError::Refused(why) => Ok(BudgetChange::NothingHere(why)),
                error @ MemberError::Unreachable(_) => Err(error),
            },
            _ => self.parsed(code, &reply).map(BudgetChange::Made),
        }
    }

    /// Restart the policy that decides with other options, one JSON object.
    ///
    /// # Errors
    /// See [`MemberError`].
    pub fn configure(&self, slot: SlotName, options: &str, mode: Mode) -> Result<SwapReport, MemberError> {
        self.describe(slot, None, Some(options), mode)
    }

    /// Retry the version in quarantine at once.
    ///
    /// # Errors
    /// See [`MemberError`].
    pub fn release(&self, slot: SlotName) -> Result<SwapReport, MemberError> {
        self.act(Method::POST, slot, "release")
    }

    fn describe(
        &self,
        slot: SlotName,
        source: Option<&str>,
        options: Option<&str>,
        mode: Mode,
    ) -> Result<SwapReport, MemberError> {
        let mut body = Map::new();
        body.extend(source.map(|source| ("source".to_owned(), source.into())));
        if let Some(options) = options {
            let parsed: Result<Map<String, Value>, _> = serde_json::from_str(options);
            let options =
                parsed.map_err(|error| self.refused(&format!("options: must be one JSON object: {error}")))?;
            body.insert("config".into(), options.into());
        }
        let ask = json(Ask::of(Method::PUT, slot_path(slot, mode)), Value::from(body).to_string().into_bytes());
        let is_native = source.is_some_and(|source| matches!(PolicySource::of(source), PolicySource::Native(_)));
        self.change_slot(slot, &ask, if is_native { self.reading(MAX_SHORT_REPLY_BYTES) } else { self.changing() })
    }

    fn upload(
        &self,
        slot: SlotName,
        component: &Arc<[u8]>,
        signature: Option<&str>,
        options: Option<&str>,
        mode: Mode,
    ) -> Result<SwapReport, MemberError> {
        let mut ask = Ask::of(Method::PUT, slot_path(slot, mode));
        if let Some(signature) = signature {
            ask.headers.push((HeaderName::from_static(SIGNATURE_HEADER), signature_header(signature)));
        }
        if let Some(options) = options {
            let value = ascii(options);
            if value.len() > MAX_HEADER_BYTES {
                return Err(self.refused(&format!(
                    "options: {} bytes: must be at most {MAX_HEADER_BYTES} beside a component; change them after the swap, \
                     without a component",
                    value.len()
                )));
            }
            ask.headers.push((HeaderName::from_static(CONFIG_HEADER), value));
        }
        ask.body = Bytes::from_owner(Arc::clone(component));
        self.change_slot(slot, &ask, self.changing())
    }

    fn act(&self, method: Method, slot: SlotName, action: &str) -> Result<SwapReport, MemberError> {
        let ask = Ask::of(method, format!("/v1/policies/{}/{action}", slot.label()));
        self.change_slot(slot, &ask, self.reading(MAX_SHORT_REPLY_BYTES))
    }

    /// A change of a slot, whose report must be about this slot.
    fn change_slot(&self, slot: SlotName, ask: &Ask, within: Within) -> Result<SwapReport, MemberError> {
        let (code, reply) = self.exchange(ask, within)?;
        let report: SwapReport = self.parsed(code, &reply)?;
        if report.slot != slot {
            let why = format!("answered about the slot {}, expected {}", report.slot.label(), slot.label());
            return Err(self.unreachable(&why));
        }
        Ok(report)
    }

    fn read<T: DeserializeOwned>(&self, path: &str, bytes: usize) -> Result<T, MemberError> {
        let (code, reply) = self.exchange(&Ask::of(Method::GET, path), self.reading(bytes))?;
        self.parsed(code, &reply)
    }

    /// The limits on an answer that is at hand.
    fn reading(&self, bytes: usize) -> Within {
        Within { connect: self.patience.connect, answer: self.patience.read, bytes, probes: None }
    }

    /// The limits on a change that may compile a component or fetch it.
    fn changing(&self) -> Within {
        Within {
            answer: self.patience.change,
            probes: Some(self.patience.read / 2),
            ..self.reading(MAX_SHORT_REPLY_BYTES)
        }
    }

    fn parsed<T: DeserializeOwned>(&self, code: StatusCode, reply: &[u8]) -> Result<T, MemberError> {
        if code != StatusCode::OK {
            return Err(self.refusal(code, reply));
        }
        let longest = longest_text(reply);
        if longest > MAX_TEXT_BYTES {
            let why =
                format!("the answer is not what Meridian gives: a text of {longest} bytes, above {MAX_TEXT_BYTES}");
            return Err(self.unreachable(&why));
        }
        let parsed = serde_json::from_slice(reply);
        parsed.map_err(|error| self.unreachable(&format!("the answer is not what Meridian gives: {error}")))
    }

    fn exchange(&self, ask: &Ask, within: Within) -> Result<(StatusCode, Bytes), MemberError> {
        let is_tls = matches!(self.endpoint, Endpoint::Tls { .. });
        // Reading needs no token on this machine, where another process may have the port.
        let sends_token = is_tls || !ask.method.is_safe();
        let token = match &self.token_file {
            Some(path) if sends_token => {
                let token = read_token(path);
                Some(token.map_err(|why| self.refused(&format!("token_file: {}: {why}", path.display())))?)
            }
            // The process says what is the matter.
            _ => None,
        };
        let tls = is_tls.then(|| self.tls.get_or_init(|| tls::client(self.ca_file.as_deref())).clone()).transpose();
        let tls = tls.map_err(|why| self.refused(&why))?;
        exchange(&self.endpoint, tls, ask, token.as_deref(), within).map_err(|why| self.unreachable(&why))
    }

    /// The reason of an answer other than 200.
    fn refusal(&self, code: StatusCode, reply: &[u8]) -> MemberError {
        #[derive(Deserialize)]
        struct Refusal {
            error: String,
        }
        let said = serde_json::from_slice::<Refusal>(reply).ok().map(|refusal| refusal.error);
        let of_meridian = said.is_some();
        let why = said.unwrap_or_else(|| format!("answered {}, and is no engine process of Meridian", code.as_u16()));
        // A proxy, or an engine that failed on the way: the change may have been carried out.
        if code.is_client_error() || of_meridian && code == StatusCode::SERVICE_UNAVAILABLE {
            self.refused(&why)
        } else {
            self.unreachable(&why)
        }
    }

    fn refused(&self, why: &str) -> MemberError {
        MemberError::Refused(self.line(why))
    }

    fn unreachable(&self, why: &str) -> MemberError {
        MemberError::Unreachable(self.line(why))
    }

    /// One line, safe for a terminal: another process may have chosen the reason.
    fn line(&self, why: &str) -> String {
        let address = if self.name == self.address { String::new() } else { format!(" ({})", self.address) };
        let why: String = why.chars().take(MAX_REASON_CHARACTERS).collect();
        printable(&format!("{}{address}: {why}", self.name)).into_owned()
    }
}

/// The address that an operator knows a process by.
pub(crate) fn known_by(process: &Process) -> &str {
    process.admin.as_ref().or(process.socket.as_ref()).map_or("", String::as_str)
}

fn slot_path(slot: SlotName, mode: Mode) -> String {
    let mode = match mode {
        Mode::Active => "active",
        Mode::Shadow => "shadow",
    };
    format!("/v1/policies/{}?mode={mode}", slot.label())
}

fn json(mut ask: Ask, body: Vec<u8>) -> Ask {
    ask.headers.push((CONTENT_TYPE, "application/json".to_owned()));
    ask.body = body.into();
    ask
}

/// Bytes of the longest text between two quotation marks of a JSON document, which need not be valid.
fn longest_text(json: &[u8]) -> usize {
    let (mut longest, mut begun, mut is_escaped) = (0, None, false);
    for (at, byte) in json.iter().enumerate() {
        match (byte, begun) {
            _ if is_escaped => is_escaped = false,
            (b'\\', Some(_)) => is_escaped = true,
            (b'"', Some(begin)) => {
                longest = longest.max(at - begin - 1);
                begun = None;
            }
            (b'"', None) => begun = Some(at),
            _ => {}
        }
    }
    longest
}

/// JSON in ASCII, with JSON's escapes.
fn ascii(json: &str) -> String {
    let mut value = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() {
            value.push(if c.is_ascii_control() { ' ' } else { c });
        } else {
            let mut units = [0; 2];
            value.extend(c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    value
}

impl Member for EngineClient {
    fn name(&self) -> &str {
        &self.name
    }

    fn status(&self) -> Result<ProcessStatus, MemberError> {
        self.get("/v1/status")
    }

    fn latency(&self) -> Result<LatencyReport, MemberError> {
        self.get("/v1/latency")
    }

    fn put(&self, slot: SlotName, policy: &NamedPolicy, mode: Mode) -> Result<SwapReport, MemberError> {
        let options = policy.options.as_deref();
        match &policy.source {
            PolicyOrigin::Component { bytes, signature } => {
                self.upload(slot, bytes, signature.as_deref(), options, mode)
            }
            PolicyOrigin::Named(source) => {
                if let Some(reference) = PolicySource::of(source).registry() {
                    OciReference::pinned(reference).map_err(|error| self.refused(&error.to_string()))?;
                }
                self.describe(slot, Some(source), options, mode)
            }
        }
    }

    fn promote(&self, slot: SlotName) -> Result<SwapReport, MemberError> {
        self.act(Method::POST, slot, "promote")
    }

    fn rollback(&self, slot: SlotName) -> Result<SwapReport, MemberError> {
        self.act(Method::POST, slot, "rollback")
    }

    fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, MemberError> {
        self.act(Method::DELETE, slot, "shadow")
    }
}

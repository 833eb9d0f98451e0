//! `meridian handoff` before two engines that are scripts: who is asked for what, and what a client gets.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use meridian_core::config::HandoffPolicyName;
use meridian_core::handoff::{HandoffFacts, HandoffPolicy};
use meridian_fleet::{ClientLimits, Endpoint, Handoff, HandoffSettings, HandoffStatus};
use serde_json::{Value, json};

const END: u64 = 37;

/// How an engine answers one request.
#[derive(Clone)]
enum Reply {
    /// A status and a JSON body.
    Json(u16, Value),
    /// Events to their end.
    Events(Vec<Value>),
    /// Events, and then the connection breaks.
    Cut(Vec<Value>),
    /// Events, and then nothing until the client is gone.
    Silent(Vec<Value>),
    /// An event every now and then that says nothing, until the client is gone.
    Idle,
}

/// A request as an engine got it.
type Got = (String, Value);

/// An engine that answers in the order of its script, and the end of thinking at any time.
struct Engine {
    address: SocketAddr,
    got: Arc<Mutex<Vec<Got>>>,
    /// A message for each silent connection that its client has closed.
    gone: Receiver<()>,
}

impl Engine {
    fn new(script: Vec<Reply>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let address = listener.local_addr().expect("bound");
        let got = Arc::new(Mutex::new(Vec::new()));
        let (to, gone) = channel();
        let script = Arc::new(Mutex::new(script.into_iter()));
        let seen = Arc::clone(&got);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (script, seen, to) = (Arc::clone(&script), Arc::clone(&seen), to.clone());
                thread::spawn(move || {
                    let (path, body) = read_request(&stream);
                    let reply = if path == "/tokenize" {
                        Some(Reply::Json(200, json!({ "tokens": [END] })))
                    } else {
                        seen.lock().expect("no test panics").push((path, body));
                        script.lock().expect("no test panics").next()
                    };
                    answer(stream, reply.unwrap_or(Reply::Json(500, json!("the script is over"))), &to);
                });
            }
        });
        Self { address, got, gone }
    }

    fn got(&self) -> Vec<Got> {
        self.got.lock().expect("no test panics").clone()
    }
}

fn read_request(stream: &TcpStream) -> Got {
    let mut reader = BufReader::new(stream);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 || line.trim().is_empty() {
            break;
        }
        lines.push(line.to_ascii_lowercase());
    }
    let length = lines.iter().find_map(|line| line.strip_prefix("content-length:"));
    let length: usize = length.map_or(0, |text| text.trim().parse().expect("a length"));
    let mut body = vec![0; length];
    reader.read_exact(&mut body).expect("the whole body");
    let path = lines.first().and_then(|line| line.split(' ').nth(1)).unwrap_or_default().to_owned();
    (path, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

fn answer(mut stream: TcpStream, reply: Reply, gone: &Sender<()>) {
    let (events, end) = match reply {
        Reply::Json(status, body) => {
            let body = body.to_string();
            let head =
                format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}", body.len());
            let _ = write!(stream, "{head}\r\n\r\n{body}");
            return;
        }
        Reply::Idle => {
            let _ = write!(stream, "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
            while write!(stream, "8\r\n: idle\r\n\r\n").is_ok() {
                thread::yield_now();
            }
            let _ = gone.send(());
            return;
        }
        Reply::Events(events) => (events, Some(true)),
        Reply::Cut(events) => (events, Some(false)),
        Reply::Silent(events) => (events, None),
    };
    let _ = write!(stream, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
    let mut chunk = |text: &str| write!(stream, "{:x}\r\n{text}\r\n", text.len());
    for event in events {
        let _ = chunk(&format!("data: {event}\n\n"));
    }
    match end {
        Some(true) => {
            let _ = chunk("data: [DONE]\n\n");
            let _ = write!(stream, "0\r\n\r\n");
        }
        Some(false) => {}
        None => {
            // Ends when the other side hangs up.
            let _ = stream.read(&mut [0]);
            let _ = gone.send(());
        }
    }
}

/// The address of a front before these engines.
fn front(think: &Engine, answer: SocketAddr) -> SocketAddr {
    front_of(think, &[answer], HandoffPolicyName::Threshold.policy(4))
}

fn front_of(think: &Engine, answer: &[SocketAddr], policy: Box<dyn HandoffPolicy>) -> SocketAddr {
    started(HandoffSettings { policy, ..before(think.address, answer) })
}

fn before(think: SocketAddr, answer: &[SocketAddr]) -> HandoffSettings {
    HandoffSettings {
        think: Endpoint::Loopback(think),
        answer: answer.iter().copied().map(Endpoint::Loopback).collect(),
        think_end: vec!["</think>".into()],
        policy: HandoffPolicyName::Threshold.policy(4),
        patience: Duration::from_secs(60),
        limits: ClientLimits::default(),
        traces: None,
        api_key: None,
    }
}

fn started(settings: HandoffSettings) -> SocketAddr {
    let (to, from) = channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let front = Handoff::prepare(settings, |_| ()).await.expect("the first engine knows its token");
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
            to.send(listener.local_addr().expect("bound")).expect("the test waits");
            front.serve(listener, std::future::pending()).await;
        });
    });
    from.recv().expect("it listens")
}

fn open(front: SocketAddr, method: &str, path: &str, body: &Value) -> TcpStream {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let mut stream = TcpStream::connect(front).expect("it listens");
    let head =
        format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}", body.len());
    write!(stream, "{head}\r\n\r\n{body}").expect("it reads");
    stream
}

/// The text of a response without its head and its chunk sizes.
fn ask(front: SocketAddr, method: &str, path: &str, body: &Value) -> String {
    let mut text = String::new();
    open(front, method, path, body).read_to_string(&mut text).expect("text");
    text.split_once("\r\n\r\n").expect("a head").1.to_owned()
}

fn post(front: SocketAddr, path: &str, body: &Value) -> Value {
    let text = ask(front, "POST", path, body);
    serde_json::from_str(&text).unwrap_or_else(|_| panic!("no JSON: {text}"))
}

/// The chunks of a stream, which must end as it should.
fn stream(front: SocketAddr, path: &str, body: &Value) -> Vec<Value> {
    let text = ask(front, "POST", path, body);
    let lines: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(lines.last(), Some(&"[DONE]"), "{text}");
    lines.iter().take(lines.len() - 1).map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn counter(front: SocketAddr, line: &str) -> bool {
    ask(front, "GET", "/metrics", &Value::Null).lines().any(|found| found == line)
}

fn kv() -> Value {
    json!({ "meridian_handoff": { "stop_token": END }, "do_remote_prefill": true, "remote_port": 7, "remote_block_ids": [[4, 5]] })
}

/// The stream of the first engine: a prompt of two tokens, three tokens of thinking.
fn thinking(stop_reason: Value) -> Vec<Value> {
    let chunk = |text: &str, ids: Value, finish: Value, stop: &Value| {
        json!({ "id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m", "choices":
            [{ "index": 0, "text": text, "token_ids": ids, "finish_reason": finish, "stop_reason": stop }] })
    };
    let mut first = chunk("so", json!([10]), Value::Null, &Value::Null);
    first["choices"][0]["prompt_token_ids"] = json!([1, 2]);
    vec![
        first,
        chunk(" it", json!([11]), Value::Null, &Value::Null),
        chunk("</think>", json!([END]), json!("stop"), &stop_reason),
    ]
}

fn piece(text: &str, ids: &[u64], finish: &Value) -> Value {
    json!({ "id": "cmpl-9", "object": "text_completion", "created": 9, "model": "m", "choices":
        [{ "index": 0, "text": text, "token_ids": ids, "finish_reason": finish, "stop_reason": null }] })
}

fn request() -> Value {
    json!({ "model": "m", "prompt": "p", "max_tokens": 20, "temperature": 0, "stream": true, "return_token_ids": true,
        "stream_options": { "include_usage": true } })
}

fn thought() -> Reply {
    Reply::Events(thinking(json!(kv().to_string())))
}

fn text_of(chunks: &[Value]) -> String {
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect()
}

fn ids_of(chunks: &[Value]) -> Vec<u64> {
    let all = chunks.iter().filter_map(|chunk| chunk["choices"][0]["token_ids"].as_array()).flatten();
    all.filter_map(Value::as_u64).collect()
}

#[test]
fn a_client_sees_one_stream() {
    let think = Engine::new(vec![thought()]);
    let answer =
        Engine::new(vec![Reply::Events(vec![piece(" 4", &[12], &Value::Null), piece("2", &[13], &json!("stop"))])]);
    let front = front(&think, answer.address);
    let chunks = stream(front, "/v1/completions", &request());
    assert_eq!(text_of(&chunks), "so it</think> 42");
    assert_eq!(ids_of(&chunks), [10, 11, END, 12, 13]);
    assert!(chunks.iter().all(|chunk| chunk["id"] == "cmpl-1" && chunk["created"] == 5), "{chunks:?}");
    let reasons: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["finish_reason"]).collect();
    assert_eq!(reasons, [&Value::Null, &Value::Null, &Value::Null, &Value::Null, &json!("stop"), &Value::Null]);
    let usage = json!({ "prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7 });
    assert_eq!(chunks.last().map(|chunk| &chunk["usage"]), Some(&usage));
    let (path, asked) = &think.got()[0];
    assert_eq!((path.as_str(), &asked["stop_token_ids"]), ("/v1/completions", &json!([END])));
    assert_eq!(asked["kv_transfer_params"]["meridian_handoff"], json!({ "min_blocks": 4, "max_blocks": u32::MAX }));
    let (path, asked) = &answer.got()[0];
    assert_eq!((path.as_str(), &asked["prompt"]), ("/v1/completions", &json!([1, 2, 10, 11, END])));
    assert_eq!((&asked["max_tokens"], &asked["kv_transfer_params"]), (&json!(17), &kv()));
    assert!(counter(front, &format!("meridian_handoff_handed_over_total{{engine=\"{}\"}} 1", answer.address)));
    assert!(counter(front, "meridian_handoff_requests_total 1"));
}

#[test]
fn the_first_engine_goes_on() {
    let rest = |text: &str, ids: &[u64]| Reply::Events(vec![piece(text, ids, &json!("length"))]);
    for (second, rest, prompt, reason) in [
        (Reply::Json(503, json!({})), rest(" 42", &[12, 13]), json!([1, 2, 10, 11, END]), "refused"),
        (Reply::Cut(vec![]), rest(" 42", &[12, 13]), json!([1, 2, 10, 11, END]), "broken"),
        // The token without a text is in the middle of a character: it is written again.
        (
            Reply::Cut(vec![piece(" 4", &[12], &Value::Null), piece("", &[99], &Value::Null)]),
            rest("2", &[13]),
            json!([1, 2, 10, 11, END, 12]),
            "broken",
        ),
        (
            Reply::Events(vec![piece(" 4", &[12], &Value::Null), json!({ "error": { "message": "dead" } })]),
            rest("2", &[13]),
            json!([1, 2, 10, 11, END, 12]),
            "broken",
        ),
    ] {
        let think = Engine::new(vec![thought(), rest]);
        let answer = Engine::new(vec![second]);
        let front = front(&think, answer.address);
        let chunks = stream(front, "/v1/completions", &request());
        assert_eq!((text_of(&chunks).as_str(), ids_of(&chunks)), ("so it</think> 42", vec![10, 11, END, 12, 13]));
        assert_eq!(think.got()[1].1["prompt"], prompt);
        assert_eq!(think.got()[1].1.get("kv_transfer_params"), None);
        assert!(counter(front, &format!("meridian_handoff_first_engine_total{{reason=\"{reason}\"}} 1")));
    }
    // No service has this port.
    let closed = SocketAddr::from(([127, 0, 0, 1], 1));
    let think = Engine::new(vec![thought(), rest(" 42", &[12, 13])]);
    let front = front(&think, closed);
    assert_eq!(text_of(&stream(front, "/v1/completions", &request())), "so it</think> 42");
    assert!(counter(front, "meridian_handoff_first_engine_total{reason=\"unreachable\"} 1"));
}

/// Hands over what the test says, to the engine that it says.
struct Scripted {
    offers: std::vec::IntoIter<Option<RangeInclusive<u32>>>,
    target: usize,
}

impl HandoffPolicy for Scripted {
    fn offer(&mut self, _: &HandoffFacts<'_>) -> Option<RangeInclusive<u32>> {
        self.offers.next().flatten()
    }

    fn target(&mut self, blocks: u32, facts: &HandoffFacts<'_>) -> usize {
        assert_eq!((blocks, facts.targets.len()), (2, 2), "the blocks of `kv`");
        self.target
    }
}

#[test]
fn a_policy_chooses_requests_and_engines() {
    let whole = Reply::Json(200, json!({ "choices": [{ "text": "by one" }] }));
    let answered = || Reply::Events(vec![piece(" 42", &[12], &json!("stop"))]);
    let think = Engine::new(vec![whole, thought(), thought()]);
    let (first, second) = (Engine::new(vec![answered()]), Engine::new(vec![answered()]));
    let offers = vec![None, Some(3..=7), Some(1..=1)].into_iter();
    let policy = Box::new(Scripted { offers, target: 1 });
    let front = front_of(&think, &[first.address, second.address], policy);
    let mut unasked = request();
    unasked["stream"] = json!(false);
    assert!(ask(front, "POST", "/v1/completions", &unasked).contains("by one"));
    assert_eq!(think.got()[0].1, unasked, "a request that stays is not changed");
    assert!(counter(front, "meridian_handoff_first_engine_total{reason=\"policy\"} 1"));
    stream(front, "/v1/completions", &request());
    let asked = &think.got()[1].1["kv_transfer_params"]["meridian_handoff"];
    assert_eq!(*asked, json!({ "min_blocks": 3, "max_blocks": 7 }));
    assert_eq!((first.got().len(), second.got().len()), (0, 1));
}

#[test]
fn an_engine_that_fails_is_left_out() {
    let answered = || Reply::Events(vec![piece(" 42", &[12], &json!("stop"))]);
    let rest = Reply::Events(vec![piece(" 42", &[12], &json!("stop"))]);
    let think = Engine::new(vec![thought(), rest, thought(), thought()]);
    let able = Engine::new(vec![answered(), answered()]);
    let closed = SocketAddr::from(([127, 0, 0, 1], 1));
    // Of equal engines the first one is asked first.
    let front = front_of(&think, &[closed, able.address], HandoffPolicyName::Threshold.policy(4));
    for _ in 0..3 {
        assert_eq!(text_of(&stream(front, "/v1/completions", &request())), "so it</think> 42");
    }
    assert!(counter(front, "meridian_handoff_first_engine_total{reason=\"unreachable\"} 1"));
    assert_eq!(able.got().len(), 2);
}

#[test]
fn a_request_that_is_rejected_does_not_make_an_engine_fail() {
    let rest = Reply::Events(vec![piece(" 42", &[12], &json!("stop"))]);
    let think = Engine::new(vec![thought(), rest, thought()]);
    let answer = Engine::new(vec![
        Reply::Json(400, json!({ "error": "no such option" })),
        Reply::Events(vec![piece(" 42", &[12], &json!("stop"))]),
    ]);
    let front = front(&think, answer.address);
    for _ in 0..2 {
        assert_eq!(text_of(&stream(front, "/v1/completions", &request())), "so it</think> 42");
    }
    assert!(counter(front, "meridian_handoff_first_engine_total{reason=\"rejected\"} 1"));
    assert_eq!(answer.got().len(), 2);
    let status = HandoffStatus::ask(&Endpoint::Loopback(front)).expect("it is a front");
    let engine = &status.engines[0];
    assert_eq!((engine.requests, engine.handed_over, engine.is_failing), (0, 1, false));
    assert_eq!((status.requests, status.first_engine["rejected"]), (2, 1));
    assert!(HandoffStatus::ask(&Endpoint::Loopback(think.address)).is_err(), "an engine is no front");
}

#[test]
fn no_engine_gives_a_client_more_tokens_than_it_asked_for() {
    let flood = |of_one: u64, events: usize| -> Vec<Value> {
        (0..events).map(|_| piece(" 4", &vec![12; of_one as usize], &Value::Null)).collect()
    };
    let ended = |of_one, events| {
        let last = piece(" 4", &vec![12; of_one], &json!("stop"));
        Reply::Events(flood(of_one as u64, events).into_iter().chain([last]).collect())
    };
    let mut thinks = thinking(Value::Null);
    thinks.truncate(2);
    thinks.extend(flood(1, 40));
    let no_ids = (0..40).map(|_| piece(" 4", &[], &Value::Null)).collect();
    for (first, second, ids) in [
        (vec![thought()], ended(1, 40), 20),
        (vec![thought()], ended(7, 40), 20),
        (vec![thought()], Reply::Silent(flood(1, 18)), 20),
        (vec![thought()], Reply::Silent(no_ids), 3),
        (vec![thought(), ended(7, 40)], Reply::Json(503, json!({})), 20),
        (vec![Reply::Silent(thinks)], Reply::Json(503, json!({})), 20),
    ] {
        let (think, answer) = (Engine::new(first), Engine::new(vec![second.clone()]));
        let chunks = stream(front(&think, answer.address), "/v1/completions", &request());
        assert_eq!(ids_of(&chunks).len(), ids);
        assert!(text_of(&chunks).matches(" 4").count() <= 18, "{chunks:?}");
        let [.., last, usage] = chunks.as_slice() else { panic!("{chunks:?}") };
        assert_eq!(last["choices"][0]["finish_reason"], json!("length"));
        assert_eq!(usage["usage"]["completion_tokens"], json!(ids));
    }
    // An engine that ends at the limit says why itself, perhaps later.
    let later = vec![piece(" 4", &[12; 17], &Value::Null), piece("", &[], &json!("stop"))];
    let (think, answer) = (Engine::new(vec![thought()]), Engine::new(vec![Reply::Events(later)]));
    let chunks = stream(front(&think, answer.address), "/v1/completions", &request());
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "stop");
    // Whole responses.
    let mut body = request();
    body["stream"] = json!(false);
    let whole = |ids: Vec<u64>| {
        Reply::Json(
            200,
            json!({ "id": "cmpl-1", "choices": [{ "index": 0, "text": "so</think>", "prompt_token_ids": [1],
            "token_ids": ids, "finish_reason": "stop", "stop_reason": kv().to_string() }] }),
        )
    };
    let (think, answer) = (Engine::new(vec![whole(vec![10, END])]), Engine::new(vec![ended(7, 40)]));
    let response = post(front(&think, answer.address), "/v1/completions", &body);
    assert_eq!(response["choices"][0]["finish_reason"], "length");
    assert_eq!(response["choices"][0]["token_ids"].as_array().map(Vec::len), Some(20));
    let think = Engine::new(vec![whole(vec![10; 21])]);
    let response = post(front(&think, answer.address), "/v1/completions", &body);
    assert_eq!(response["error"]["message"], "the engine that thinks: wrote 21 tokens, max_tokens is 20");
}

#[test]
fn few_blocks_stay() {
    let think = Engine::new(vec![
        Reply::Events(thinking(json!(END))),
        Reply::Events(vec![piece(" 42", &[12, 13], &json!("stop"))]),
    ]);
    let answer = Engine::new(vec![]);
    let front = front(&think, answer.address);
    assert_eq!(text_of(&stream(front, "/v1/completions", &request())), "so it</think> 42");
    assert!(answer.got().is_empty());
    assert!(counter(front, "meridian_handoff_first_engine_total{reason=\"kept\"} 1"));
}

#[test]
fn a_request_that_never_ends_its_thinking_is_vllms_own() {
    let mut own = thinking(Value::Null);
    own[2]["choices"][0]["finish_reason"] = json!("length");
    let think = Engine::new(vec![Reply::Events(own.clone())]);
    let answer = Engine::new(vec![]);
    assert_eq!(stream(front(&think, answer.address), "/v1/completions", &request()), own);
}

#[test]
fn whole_responses() {
    let mut body = request();
    body["stream"] = json!(false);
    body["return_token_ids"] = Value::Null;
    let first = json!({ "id": "cmpl-1", "choices": [{ "index": 0, "text": "so</think>", "prompt_token_ids": [1, 2],
        "token_ids": [10, END], "finish_reason": "stop", "stop_reason": kv().to_string() }], "kv_transfer_params": kv() });
    let written = Reply::Events(vec![piece(" 4", &[12], &Value::Null), piece("2", &[13], &json!("stop"))]);
    let think = Engine::new(vec![Reply::Json(200, first)]);
    let front_1 = front(&think, Engine::new(vec![written.clone()]).address);
    let usage = json!({ "prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6 });
    let expected = json!({ "id": "cmpl-1", "choices": [{ "index": 0, "text": "so</think> 42", "finish_reason": "stop",
        "stop_reason": null }], "usage": usage, "kv_transfer_params": null });
    assert_eq!(post(front_1, "/v1/completions", &body), expected);

    let chat = json!({ "model": "m", "messages": [{ "role": "user", "content": "?" }] });
    let first = json!({ "id": "chatcmpl-1", "prompt_token_ids": [1, 2], "choices": [{ "index": 0, "token_ids": [10, END],
        "message": { "role": "assistant", "reasoning": "so", "content": null }, "finish_reason": "stop",
        "stop_reason": kv().to_string() }] });
    let think = Engine::new(vec![Reply::Json(200, first)]);
    let answer = Engine::new(vec![written]);
    let response = post(front(&think, answer.address), "/v1/chat/completions", &chat);
    let message = json!({ "role": "assistant", "reasoning": "so", "content": " 42" });
    assert_eq!((&response["choices"][0]["message"], &response["usage"]), (&message, &usage));
    assert_eq!(response.get("prompt_token_ids"), None);
    assert_eq!(answer.got()[0].1["max_tokens"], Value::Null, "as many as the context holds");
}

#[test]
fn chunks_of_a_chat() {
    let of_chat = |mut chunk: Value, delta: Value| {
        chunk["id"] = json!("chatcmpl-1");
        let choice = chunk["choices"][0].as_object_mut().expect("an object");
        choice.remove("text");
        choice.insert("delta".into(), delta);
        chunk
    };
    let mut first = thinking(json!(kv().to_string()));
    first = first.into_iter().map(|chunk| of_chat(chunk, json!({ "reasoning": "so" }))).collect();
    let think = Engine::new(vec![Reply::Events(first)]);
    let answer = Engine::new(vec![Reply::Events(vec![piece(" 42", &[12, 13], &json!("stop"))])]);
    let body = json!({ "model": "m", "messages": [], "stream": true });
    let chunks = stream(front(&think, answer.address), "/v1/chat/completions", &body);
    let last = json!({ "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "m", "choices": [{
        "index": 0, "delta": { "content": " 42" }, "logprobs": null, "finish_reason": "stop", "stop_reason": null }] });
    assert_eq!(chunks.last(), Some(&last));
    assert_eq!(chunks[0]["choices"][0].get("token_ids"), None, "the client did not ask for them");
}

#[test]
fn others_are_passed_through() {
    let models = json!({ "data": [] });
    let two = json!({ "choices": [{}, {}] });
    let think = Engine::new(vec![Reply::Json(200, two.clone()), Reply::Json(200, models.clone())]);
    let answer = Engine::new(vec![]);
    let front = front(&think, answer.address);
    let body = json!({ "prompt": "p", "n": 2 });
    assert_eq!(post(front, "/v1/completions", &body), two);
    assert_eq!(ask(front, "GET", "/v1/models?x=1", &Value::Null), models.to_string());
    assert_eq!(think.got(), [("/v1/completions".to_owned(), body), ("/v1/models?x=1".to_owned(), Value::Null)]);
    assert!(counter(front, "meridian_handoff_passed_through_total{field=\"n\"} 1"));
}

#[test]
fn a_client_that_is_gone_ends_both_parts() {
    let think = Engine::new(vec![Reply::Silent(thinking(Value::Null).drain(..1).collect()), thought()]);
    let answer = Engine::new(vec![Reply::Silent(vec![piece(" 4", &[12], &Value::Null)])]);
    let front = front(&think, answer.address);
    for engine in [&think, &answer] {
        let mut client = BufReader::new(open(front, "POST", "/v1/completions", &request()));
        let until = if std::ptr::eq(engine, &think) { "so" } else { " 4" };
        let mut line = String::new();
        while !line.contains(&format!("\"text\":\"{until}\"")) {
            line.clear();
            assert!(client.read_line(&mut line).expect("text") > 0, "the stream ended");
        }
        drop(client);
        engine.gone.recv().expect("the engine sees it");
    }
}

#[test]
fn a_client_that_does_not_stream_is_gone() {
    let think = Engine::new(vec![Reply::Silent(vec![])]);
    let front = front(&think, think.address);
    let mut body = request();
    body["stream"] = json!(false);
    let client = open(front, "POST", "/v1/completions", &body);
    // Once the engine has the request.
    while think.got().is_empty() {
        thread::yield_now();
    }
    drop(client);
    think.gone.recv().expect("the engine sees it");
}

/// Events that no vLLM writes.
fn malformed() -> Vec<Value> {
    vec![
        json!(null),
        json!(7),
        json!("text"),
        json!([[]]),
        json!({ "choices": 5 }),
        json!({ "choices": [5] }),
        json!({ "choices": [[1]] }),
        json!({ "choices": ["text"] }),
        json!({ "choices": [null] }),
        json!({ "choices": [{ "text": 5, "finish_reason": null }] }),
        json!({ "choices": [{ "text": "x", "token_ids": [-1], "finish_reason": "stop" }] }),
        json!({ "choices": [{ "text": "x", "token_ids": { "a": 1 }, "finish_reason": null }] }),
        json!({ "choices": [{ "text": "x", "token_ids": [12], "finish_reason": [] }] }),
    ]
}

#[test]
fn the_first_engine_goes_on_after_an_event_that_is_not_as_expected() {
    for event in malformed() {
        let rest = Reply::Events(vec![piece("2", &[13], &json!("stop"))]);
        let think = Engine::new(vec![thought(), rest]);
        let answer = Engine::new(vec![Reply::Events(vec![piece(" 4", &[12], &Value::Null), event.clone()])]);
        let front = front(&think, answer.address);
        let chunks = stream(front, "/v1/completions", &request());
        assert_eq!(text_of(&chunks), "so it</think> 42", "{event}");
        assert!(counter(front, "meridian_handoff_first_engine_total{reason=\"broken\"} 1"), "{event}");
    }
}

#[test]
fn an_engine_that_thinks_and_lies_gives_an_error() {
    let end_without = |field: &str| {
        let mut events = thinking(json!(kv().to_string()));
        events[0]["choices"][0].as_object_mut().expect("an object").remove(field);
        events
    };
    let mut streams: Vec<Vec<Value>> =
        malformed().into_iter().map(|event| vec![thinking(Value::Null).remove(0), event]).collect();
    streams.push(end_without("prompt_token_ids"));
    for events in streams {
        let think = Engine::new(vec![Reply::Events(events.clone())]);
        let answer = Engine::new(vec![]);
        let text = ask(front(&think, answer.address), "POST", "/v1/completions", &request());
        let last = text.lines().filter_map(|line| line.strip_prefix("data: ")).next_back().expect("an event");
        let error: Value = serde_json::from_str(last).expect("JSON");
        let why = error["error"]["message"].as_str().expect("an error");
        assert!(why.starts_with("the engine that thinks: its answer "), "{events:?}: {why}");
        assert!(answer.got().is_empty(), "{events:?}");
    }
    // Whole responses.
    let (completion, chat) = ("/v1/completions", "/v1/chat/completions");
    let ended = json!({ "token_ids": [10, END], "prompt_token_ids": [1], "stop_reason": kv().to_string(),
        "message": "a text" });
    let mut whole: Vec<(&str, Value)> = malformed().into_iter().map(|said| (completion, said)).collect();
    whole.push((chat, json!({ "choices": [ended] })));
    for (path, said) in whole {
        let think = Engine::new(vec![Reply::Json(200, said.clone())]);
        let answer = Engine::new(vec![Reply::Events(vec![piece(" 42", &[12], &json!("stop"))])]);
        let body = json!({ "model": "m", "prompt": "p", "messages": [], "max_tokens": 9 });
        let body = if path == chat { json!({ "model": "m", "messages": [] }) } else { body };
        let response = post(front(&think, answer.address), path, &body);
        let why = response["error"]["message"].as_str().unwrap_or_default();
        assert!(why.starts_with("the engine that thinks: its answer "), "{said}: {response}");
    }
}

#[test]
fn an_event_that_never_ends_and_a_stream_without_events_are_given_up() {
    let rest = || Reply::Events(vec![piece(" 42", &[12], &json!("stop"))]);
    let long = piece(&"x".repeat(17 << 20), &[12], &json!("stop"));
    for (second, reason) in [(Reply::Events(vec![long]), "broken"), (Reply::Idle, "stalled")] {
        let think = Engine::new(vec![thought(), rest()]);
        let answer = Engine::new(vec![second]);
        // Only the stream without events takes so long.
        let patience = Duration::from_millis(if reason == "stalled" { 1_000 } else { 60_000 });
        let front = started(HandoffSettings { patience, ..before(think.address, &[answer.address]) });
        assert_eq!(text_of(&stream(front, "/v1/completions", &request())), "so it</think> 42", "{reason}");
        assert!(counter(front, &format!("meridian_handoff_first_engine_total{{reason=\"{reason}\"}} 1")));
    }
}

#[test]
fn a_front_does_not_start_before_an_engine_that_does_not_answer() {
    // It accepts connections, and no more.
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("bound");
    let settings = HandoffSettings { patience: Duration::from_millis(100), ..before(address, &[address]) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let error = runtime.block_on(Handoff::prepare(settings, |_| ())).err().expect("it does not answer");
    assert_eq!(error.to_string(), "the engine that thinks: /tokenize: no answer within 0.1 s");
}

/// Send a head and whatever follows; the answer until the front hangs up.
fn raw(front: SocketAddr, text: &str) -> String {
    let mut stream = TcpStream::connect(front).expect("it listens");
    stream.write_all(text.as_bytes()).expect("it reads");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn pages_with_another_name_for_this_machine_are_refused() {
    let models = json!({ "data": [] });
    let think = Engine::new(vec![Reply::Json(200, models.clone()); 2]);
    let front = front(&think, think.address);
    for host in ["Host: localhost:8000", "Host: 127.0.0.1"] {
        assert!(
            raw(front, &format!("GET /v1/models HTTP/1.1\r\n{host}\r\n\r\n")).ends_with(&models.to_string()),
            "{host}"
        );
    }
    for host in ["Host: evil.example", "Host: localhost.evil.example:80", "X: y", "Host: localhost\r\nHost: localhost"]
    {
        for path in ["/v1/models", "/metrics", "/meridian/handoff", "http://evil.example/v1/models"] {
            let answer = raw(front, &format!("GET {path} HTTP/1.1\r\n{host}\r\n\r\n"));
            assert!(answer.starts_with("HTTP/1.1 403"), "{host} {path}: {answer}");
        }
    }
    assert_eq!(think.got().len(), 2, "no other reached it");
}

#[test]
fn slow_clients_are_closed_and_take_no_place_of_others() {
    let models = json!({ "data": [] });
    let think = Engine::new(vec![Reply::Json(200, models.clone()); 3]);
    let body = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{";
    let soon = Duration::from_millis(100);
    let limits = ClientLimits { head: soon, body: soon, ..ClientLimits::default() };
    let quick = started(HandoffSettings { limits, ..before(think.address, &[think.address]) });
    assert!(!raw(quick, "GET /v1/mod").contains("200"), "the head");
    assert!(raw(quick, body).starts_with("HTTP/1.1 408"), "the body");
    assert!(raw(quick, &body.replace('9', "99999999")).starts_with("HTTP/1.1 413"), "too large");
    // Four may wait; the fifth closes the first. No time is up.
    let long = Duration::from_secs(600);
    let limits = ClientLimits { head: long, body: long, waiting: 4, open: 6 };
    let patient = started(HandoffSettings { limits, ..before(think.address, &[think.address]) });
    let mut slow: Vec<TcpStream> = Vec::new();
    for text in ["GET /v1/mod", body].repeat(20) {
        let mut stream = TcpStream::connect(patient).expect("it listens");
        stream.write_all(text.as_bytes()).expect("it reads");
        slow.push(stream);
    }
    for stream in &mut slow[..36] {
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "closed");
    }
    let get = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";
    for _ in 0..3 {
        assert!(raw(patient, get).ends_with(&models.to_string()), "a whole request is served");
    }
}

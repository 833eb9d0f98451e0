//! A client that streams: the chunks of both parts, as one stream.

use std::time::Instant;

use bytes::Bytes;
use hyper::header::HeaderMap;
use serde_json::{Value, json};
use tokio::sync::mpsc::Sender;

use super::answer::{MOST_TOKENS, NO_IDS, Piece, Sink, Thought, write};
use super::said::{Said, choice_of, without_ids};
use super::serve::Shared;
use super::split::{Api, End, SplitRequest, end};
use super::upstream::Events;

/// A piece of a body. An error cuts the connection, as an engine that dies does.
pub(super) type Sent = Result<Bytes, &'static str>;

/// Relay the first part, then the answer. Ends when the client is gone.
pub(super) async fn relay(shared: &Shared, plan: &SplitRequest, headers: &HeaderMap, first: Events, to: Sender<Sent>) {
    // Dropping the work ends the requests in the engines.
    tokio::select! {
        () = to.closed() => {}
        done = parts(shared, plan, headers, first, &to) => if let Err(error) = done {
            shared.say(&error);
            let _ = to.send(event(&json!({ "error": { "message": error, "type": "InternalServerError", "code": 500 } }))).await;
            // The error reaches the client before the stream breaks.
            tokio::task::yield_now().await;
            let _ = to.send(Err("an engine hung up")).await;
        },
    }
}

async fn parts(
    shared: &Shared,
    plan: &SplitRequest,
    headers: &HeaderMap,
    mut first: Events,
    to: &Sender<Sent>,
) -> Result<(), String> {
    let (mut prompt, mut generated) = (Vec::new(), Vec::new());
    let mut at_first = 0;
    let mut first_token: Option<Instant> = None;
    let broken = |why: &str| format!("the engine that thinks: {why}");
    let hung_up = "hung up in the middle of its thinking";
    let (head, kv) = loop {
        let data = first.next().await.map_err(|_| broken(hung_up))?.ok_or_else(|| broken(hung_up))?;
        // The last line: the request ended in the first part.
        if &data[..] == b"[DONE]" {
            let _ = to.send(Ok(Bytes::from_static(b"data: [DONE]\n\n"))).await;
            return Ok(());
        }
        let mut chunk: Value = serde_json::from_slice(&data).map_err(|_| broken("an event is not JSON"))?;
        let (of_prompt, mut more, stop_reason) = Said::of(&chunk).map_err(|why| broken(&why))?.into_tokens();
        if prompt.is_empty() {
            prompt = of_prompt;
        }
        let left = plan.left(generated.len()).and_then(|left| usize::try_from(left).ok()).unwrap_or(usize::MAX);
        let goes_on = more.len() > left;
        more.truncate(left);
        generated.extend(more);
        if goes_on {
            // Beyond the client's limit: nothing is left for an answer.
            break (chunk, None);
        }
        if generated.len() > MOST_TOKENS {
            return Err(broken("wrote more tokens than a context holds"));
        }
        if first_token.is_none() && !generated.is_empty() {
            first_token = Some(Instant::now());
            at_first = generated.len();
        }
        if !plan.wants_ids {
            without_ids(&mut chunk);
        }
        let kv = match end(&stop_reason, &shared.markers) {
            End::Over => {
                let _ = to.send(event(&chunk)).await;
                continue;
            }
            End::Thought(kv) => Some(kv),
            End::ThoughtAlone => None,
        };
        if prompt.is_empty() {
            return Err(broken(NO_IDS));
        }
        if let Some(choice) = choice_of(&mut chunk) {
            choice.insert("finish_reason".into(), Value::Null);
            choice.remove("stop_reason");
        }
        let _ = to.send(event(&chunk)).await;
        break (chunk, kv);
    };
    drop(first);
    if let Some(since) = first_token {
        let tokens = u32::try_from(generated.len() - at_first).unwrap_or(u32::MAX);
        shared.handoffs().thought(tokens, since.elapsed().as_secs_f64() * 1e3);
    }
    let prompt_tokens = prompt.len();
    prompt.append(&mut generated);
    let mut thought = Thought { prompt_tokens, tokens: prompt, kv };
    let mut client = Client { to, head: Head::of(&head), plan };
    write(shared, plan, headers, &mut thought, &mut client).await?;
    if plan.wants_usage {
        let mut last = client.head.chunk(plan.api, json!([]));
        last["usage"] = thought.usage();
        let _ = to.send(event(&last)).await;
    }
    let _ = to.send(Ok(Bytes::from_static(b"data: [DONE]\n\n"))).await;
    Ok(())
}

fn event(data: &Value) -> Sent {
    Ok(Bytes::from(format!("data: {data}\n\n")))
}

/// The fields that all chunks of a response share.
struct Head {
    id: Value,
    created: Value,
    model: Value,
}

impl Head {
    fn of(chunk: &Value) -> Self {
        Self { id: chunk["id"].clone(), created: chunk["created"].clone(), model: chunk["model"].clone() }
    }

    fn chunk(&self, api: Api, choices: Value) -> Value {
        let object = if api == Api::Chat { "chat.completion.chunk" } else { "text_completion" };
        let Self { id, created, model } = self;
        json!({ "id": id, "object": object, "created": created, "model": model, "choices": choices })
    }
}

struct Client<'a> {
    to: &'a Sender<Sent>,
    head: Head,
    plan: &'a SplitRequest,
}

impl Sink for Client<'_> {
    async fn put(&mut self, piece: Piece) {
        let Piece { text, ids, finish_reason, stop_reason } = piece;
        let mut choice = json!({ "index": 0, "logprobs": null, "finish_reason": finish_reason });
        match self.plan.api {
            Api::Completions => choice["text"] = json!(text),
            Api::Chat if text.is_empty() => choice["delta"] = json!({}),
            Api::Chat => choice["delta"] = json!({ "content": text }),
        }
        if !choice["finish_reason"].is_null() {
            choice["stop_reason"] = stop_reason;
        }
        if self.plan.wants_ids {
            choice["token_ids"] = json!(ids);
        }
        // A client that is gone ends the relay.
        let _ = self.to.send(event(&self.head.chunk(self.plan.api, json!([choice])))).await;
    }
}

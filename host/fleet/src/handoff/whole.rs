//! A client that does not stream: the response of the first part, with the answer added to it.

use hyper::header::HeaderMap;
use serde_json::{Value, json};

use super::answer::{Piece, Sink, Thought, write};
use super::ids;
use super::serve::Shared;
use super::split::{Api, End, SplitRequest, end, prompt_ids, without_ids};

/// Complete the response of the engine that thinks.
///
/// # Errors
/// Both engines failed; the reason for the client.
pub(super) async fn complete(
    shared: &Shared,
    plan: &SplitRequest,
    headers: &HeaderMap,
    mut response: Value,
) -> Result<Value, String> {
    let ended = response.pointer("/choices/0").map_or(End::Over, |choice| end(choice, &shared.markers));
    let mut tokens = prompt_ids(&response);
    let prompt_tokens = tokens.len();
    tokens.extend(ids(&response["choices"][0]["token_ids"]));
    if !plan.wants_ids {
        without_ids(&mut response);
    }
    let kv = match ended {
        End::Over => return Ok(response),
        End::Thought(kv) => Some(kv),
        End::ThoughtAlone => None,
    };
    let mut thought = Thought { prompt_tokens, tokens, kv };
    let mut answer = Answer::default();
    write(shared, plan, headers, &mut thought, &mut answer).await?;
    let generated = thought.tokens.get(prompt_tokens..).unwrap_or_default();
    let choice = &mut response["choices"][0];
    match plan.api {
        Api::Completions => {
            let thinking = choice["text"].as_str().unwrap_or_default();
            choice["text"] = json!(format!("{thinking}{}", answer.text));
        }
        // As vLLM's reasoning parsers: no content at all when there is none.
        Api::Chat => choice["message"]["content"] = Some(answer.text).filter(|text| !text.is_empty()).into(),
    }
    choice["finish_reason"] = answer.finish_reason;
    choice["stop_reason"] = answer.stop_reason;
    if plan.wants_ids {
        choice["token_ids"] = json!(generated);
    }
    response["usage"] = thought.usage();
    // They belong to the transfer between the engines.
    response["kv_transfer_params"] = Value::Null;
    Ok(response)
}

/// The answer as one text.
#[derive(Default)]
struct Answer {
    text: String,
    finish_reason: Value,
    stop_reason: Value,
}

impl Sink for Answer {
    async fn put(&mut self, piece: Piece) {
        self.text.push_str(&piece.text);
        self.finish_reason = piece.finish_reason;
        self.stop_reason = piece.stop_reason;
    }
}

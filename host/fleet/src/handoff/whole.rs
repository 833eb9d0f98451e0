//! A client that does not stream: the response of the first part, with the answer added to it.

use hyper::header::HeaderMap;
use serde_json::{Value, json};

use super::answer::{NO_IDS, Piece, Sink, Thought, write};
use super::said::{Said, choice_of, without_ids};
use super::serve::Shared;
use super::split::{Api, End, SplitRequest, end};

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
    let broken = |why: &str| format!("the engine that thinks: {why}");
    let (mut tokens, generated, stop_reason) = Said::of(&response).map_err(|why| broken(&why))?.into_tokens();
    if let Some(most) = plan.max_tokens.filter(|most| generated.len() as u64 > *most) {
        return Err(broken(&format!("wrote {} tokens, max_tokens is {most}", generated.len())));
    }
    let ended = end(&stop_reason, &shared.markers);
    let prompt_tokens = tokens.len();
    tokens.extend(generated);
    if !plan.wants_ids {
        without_ids(&mut response);
    }
    let kv = match ended {
        End::Over => return Ok(response),
        End::Thought(kv) => Some(kv),
        End::ThoughtAlone => None,
    };
    if prompt_tokens == 0 {
        return Err(broken(NO_IDS));
    }
    let mut thought = Thought { prompt_tokens, tokens, kv };
    let mut answer = Answer::default();
    write(shared, plan, headers, &mut thought, &mut answer).await?;
    let generated = thought.tokens.get(prompt_tokens..).unwrap_or_default();
    let choice = choice_of(&mut response).ok_or_else(|| broken("no answer"))?;
    match plan.api {
        Api::Completions => {
            let thinking = choice.get("text").and_then(Value::as_str).unwrap_or_default();
            choice.insert("text".into(), json!(format!("{thinking}{}", answer.text)));
        }
        Api::Chat => {
            let message = choice.get_mut("message").and_then(Value::as_object_mut);
            let message = message.ok_or_else(|| broken("its answer has no message"))?;
            // As vLLM's reasoning parsers: no content at all when there is none.
            message.insert("content".into(), Some(answer.text).filter(|text| !text.is_empty()).into());
        }
    }
    choice.insert("finish_reason".into(), answer.finish_reason.into());
    choice.insert("stop_reason".into(), answer.stop_reason);
    if plan.wants_ids {
        choice.insert("token_ids".into(), json!(generated));
    }
    // The parameters belong to the transfer between the engines.
    for (name, value) in [("usage", thought.usage()), ("kv_transfer_params", Value::Null)] {
        if let Some(fields) = response.as_object_mut() {
            fields.insert(name.into(), value);
        }
    }
    Ok(response)
}

/// The answer as one text.
#[derive(Default)]
struct Answer {
    text: String,
    finish_reason: Option<String>,
    stop_reason: Value,
}

impl Sink for Answer {
    async fn put(&mut self, piece: Piece) {
        self.text.push_str(&piece.text);
        self.finish_reason = piece.finish_reason;
        self.stop_reason = piece.stop_reason;
    }
}

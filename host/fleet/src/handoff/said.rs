//! What an engine says, as far as the front reads it. An engine that says anything else has failed.

use serde::Deserialize;
use serde_json::{Map, Value};

/// A chunk of a stream, or a whole response.
#[derive(Debug, Deserialize)]
pub(super) struct Said {
    error: Option<Value>,
    choices: Option<Vec<Choice>>,
    /// Of a chat.
    prompt_token_ids: Option<Vec<u64>>,
}

/// An answer of it.
#[derive(Debug, Deserialize)]
pub(super) struct Choice {
    pub(super) text: Option<String>,
    pub(super) token_ids: Option<Vec<u64>>,
    /// Of a completion.
    prompt_token_ids: Option<Vec<u64>>,
    pub(super) finish_reason: Option<String>,
    #[serde(default)]
    pub(super) stop_reason: Value,
}

impl Said {
    /// # Errors
    /// One line.
    pub(super) fn of(value: &Value) -> Result<Self, String> {
        Self::deserialize(value).map_err(|error| format!("its answer is not as expected: {error}"))
    }

    pub(super) fn is_error(&self) -> bool {
        self.error.is_some()
    }

    /// The first answer, taken out.
    pub(super) fn take_choice(&mut self) -> Option<Choice> {
        self.choices.take()?.into_iter().next()
    }

    /// The ids of the prompt and of the tokens in it, and why it ended: vLLM has those of the prompt at two places.
    pub(super) fn into_tokens(mut self) -> (Vec<u64>, Vec<u64>, Value) {
        let choice = self.take_choice();
        let of_chat = self.prompt_token_ids.unwrap_or_default();
        let Some(choice) = choice else { return (of_chat, Vec::new(), Value::Null) };
        let prompt = if of_chat.is_empty() { choice.prompt_token_ids.unwrap_or_default() } else { of_chat };
        (prompt, choice.token_ids.unwrap_or_default(), choice.stop_reason)
    }
}

/// The fields of the first answer, to change them.
pub(super) fn choice_of(response: &mut Value) -> Option<&mut Map<String, Value>> {
    response.pointer_mut("/choices/0")?.as_object_mut()
}

/// Removes ids that the client did not ask for.
pub(super) fn without_ids(response: &mut Value) {
    for part in ["/choices/0", ""] {
        if let Some(Value::Object(fields)) = response.pointer_mut(part) {
            fields.remove("token_ids");
            fields.remove("prompt_token_ids");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn anything_else_is_refused_in_one_line() {
        for said in [
            json!(null),
            json!([]),
            json!("x"),
            json!({ "choices": {} }),
            json!({ "choices": [7] }),
            json!({ "choices": [[]] }),
            json!({ "choices": [{ "text": 5 }] }),
            json!({ "choices": [{ "token_ids": [-1] }] }),
            json!({ "choices": [{ "token_ids": "37" }] }),
            json!({ "choices": [{ "finish_reason": {} }] }),
            json!({ "prompt_token_ids": [0.5] }),
        ] {
            let why = Said::of(&said).expect_err("it is not as expected");
            assert!(why.starts_with("its answer is not as expected: ") && !why.contains('\n'), "{said}: {why}");
        }
        let empty = Said::of(&json!({ "choices": [], "usage": {} })).expect("the last chunk of a stream");
        assert_eq!(empty.into_tokens(), (vec![], vec![], Value::Null));
    }
}

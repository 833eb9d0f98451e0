//! Which requests can be handed over, and the two requests that such a one becomes.

use std::ops::RangeInclusive;

use serde_json::{Map, Value, json};

/// The answer of `HandoffConnector` to a handoff, and the request for one.
const HANDOFF: &str = "meridian_handoff";

/// The form of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    Chat,
}

/// A request that can be handed over.
#[derive(Debug)]
pub(super) struct SplitRequest {
    pub(super) api: Api,
    /// The body for the engine that thinks.
    pub(super) think: Value,
    /// The sampling parameters of the answer, without prompt and length.
    pub(super) sampling: Map<String, Value>,
    /// None: as many as the context holds.
    pub(super) max_tokens: Option<u64>,
    pub(super) streams: bool,
    pub(super) wants_usage: bool,
    pub(super) wants_ids: bool,
}

/// Fields that both parts have.
const BOTH: [&str; 15] = [
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "ignore_eos",
    "repetition_penalty",
    "logit_bias",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "user",
    "priority",
    "cache_salt",
    "vllm_xargs",
];
/// Fields that only the first part has, or that are dealt with one by one.
const FIRST: [&str; 19] = [
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "return_token_ids",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
    "thinking_token_budget",
    "include_reasoning",
    "metadata",
    "store",
    "n",
    "best_of",
];
/// Fields that must be 0. The penalties see the thinking as output in one engine, and as prompt in another; `min_tokens`
/// forbids the end of thinking.
const ZERO: [&str; 4] = ["presence_penalty", "frequency_penalty", "min_tokens", "top_logprobs"];
/// The option that asks for a report of the thinking, in the field of the response that the transfer needs.
const REPORT: &str = "meridian_think_report";

impl SplitRequest {
    /// # Errors
    /// The field that only one engine can serve.
    pub(super) fn of(api: Api, body: &Value, markers: &[u64]) -> Result<Self, String> {
        let fields = body.as_object().ok_or("body")?;
        for (name, value) in fields {
            let is_neutral = match (name.as_str(), value) {
                ("vllm_xargs", options) => options.get(REPORT).is_none(),
                ("messages", messages) => messages.as_array().is_some_and(|all| all.iter().all(is_text)),
                (name, _) if BOTH.contains(&name) => true,
                ("n" | "best_of", value) => value.is_null() || *value == json!(1),
                ("include_reasoning", value) => *value != json!(false),
                ("response_format", value) => value.is_null() || value["type"] == json!("text"),
                (name, value) if ZERO.contains(&name) => value.is_null() || value.as_f64() == Some(0.0),
                (name, _) if FIRST.contains(&name) => true,
                // One that asks for nothing.
                (_, Value::Null | Value::Bool(false)) => true,
                (_, Value::Array(values)) => values.is_empty(),
                (_, Value::String(text)) => text.is_empty(),
                _ => false,
            };
            if !is_neutral {
                return Err(name.clone());
            }
        }
        let is_one_prompt = match &body["prompt"] {
            Value::String(_) => true,
            Value::Array(ids) => !ids.is_empty() && ids.iter().all(Value::is_u64),
            _ => false,
        };
        if api == Api::Completions && !is_one_prompt {
            return Err("prompt".into());
        }
        let options = &body["stream_options"];
        if options["continuous_usage_stats"] == json!(true) {
            return Err("stream_options".into());
        }
        let max_tokens = match api {
            // vLLM's own default.
            Api::Completions if !fields.contains_key("max_tokens") => Some(16),
            Api::Completions => length(&body["max_tokens"])?,
            Api::Chat => match length(&body["max_completion_tokens"])? {
                None => length(&body["max_tokens"])?,
                given => given,
            },
        };
        let mut think = body.clone();
        think["stop_token_ids"] = json!(markers);
        // The text of the end, as one engine would write it; a reasoning parser needs it too.
        think["include_stop_str_in_output"] = json!(true);
        think["return_token_ids"] = json!(true);
        let sampling = fields.iter().filter(|(name, _)| BOTH.contains(&name.as_str()));
        Ok(Self {
            api,
            think,
            sampling: sampling.map(|(name, value)| (name.clone(), value.clone())).collect(),
            max_tokens,
            streams: body["stream"] == json!(true),
            wants_usage: options["include_usage"] == json!(true),
            wants_ids: body["return_token_ids"] == json!(true),
        })
    }

    /// The engine that thinks is to keep the request's blocks if it has so many at the end of its thinking.
    pub(super) fn offering(mut self, blocks: &RangeInclusive<u32>) -> Self {
        let (least, most) = (blocks.start(), blocks.end());
        let limits = json!({ "min_blocks": least, "max_blocks": most });
        self.think["kv_transfer_params"] = json!({ "do_remote_decode": true, HANDOFF: limits });
        self
    }

    /// The body of a completion that goes on after these tokens.
    pub(super) fn answer(&self, tokens: &[u64], left: Option<u64>, kv: Option<&Value>) -> Value {
        let mut body = Value::Object(self.sampling.clone());
        body["prompt"] = json!(tokens);
        body["max_tokens"] = json!(left);
        // Streamed for every client: what one engine has written is kept when it dies.
        body["stream"] = json!(true);
        body["return_token_ids"] = json!(true);
        if let Some(kv) = kv {
            body["kv_transfer_params"] = kv.clone();
        }
        body
    }

    /// Tokens of the client's limit that are left.
    pub(super) fn left(&self, generated: usize) -> Option<u64> {
        self.max_tokens.map(|most| most.saturating_sub(generated as u64))
    }
}

/// Whether a message has text only: token ids do not hold an image.
fn is_text(message: &Value) -> bool {
    match &message["content"] {
        Value::Array(parts) => parts.iter().all(|part| part["type"] == json!("text")),
        content => content.is_null() || content.is_string(),
    }
}

fn length(value: &Value) -> Result<Option<u64>, String> {
    if value.is_null() { Ok(None) } else { value.as_u64().map(Some).ok_or_else(|| "max_tokens".into()) }
}

/// How the first part ended.
#[derive(Debug, PartialEq)]
pub(super) enum End {
    /// The request is over.
    Over,
    /// Its thinking is over, and the engine keeps its KV blocks for another one.
    Thought(Value),
    /// Its thinking is over, and the engine keeps no blocks.
    ThoughtAlone,
}

/// Reads the reason for which the first part ended.
pub(super) fn end(stop_reason: &Value, markers: &[u64]) -> End {
    match stop_reason {
        Value::String(text) => match serde_json::from_str::<Value>(text) {
            Ok(kv) if kv[HANDOFF]["stop_token"].as_u64().is_some_and(|token| markers.contains(&token)) => {
                End::Thought(kv)
            }
            _ => End::Over,
        },
        reason if reason.as_u64().is_some_and(|token| markers.contains(&token)) => End::ThoughtAlone,
        _ => End::Over,
    }
}

/// KV blocks that the engine that thinks keeps: those of the first group of its parameters. 0 of others.
pub(super) fn kept_blocks(kv: &Value) -> u32 {
    let blocks = &kv["remote_block_ids"];
    let first = if blocks[0].is_array() { &blocks[0] } else { blocks };
    first.as_array().map_or(0, |ids| ids.len() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(api: Api, body: &Value) -> Option<String> {
        SplitRequest::of(api, body, &[37]).err()
    }

    #[test]
    fn requests_that_one_engine_must_serve() {
        for (field, value) in [
            ("n", json!(2)),
            ("logprobs", json!(3)),
            ("stop", json!(["x"])),
            ("stop_token_ids", json!([5])),
            ("tools", json!([{ "type": "function" }])),
            ("tool_choice", json!("auto")),
            ("response_format", json!({ "type": "json_object" })),
            ("min_tokens", json!(5)),
            ("presence_penalty", json!(0.5)),
            ("include_reasoning", json!(false)),
            ("kv_transfer_params", json!({ "do_remote_decode": true })),
            ("stream_options", json!({ "continuous_usage_stats": true })),
            ("a_later_field", json!(1)),
            ("vllm_xargs", json!({ REPORT: true })),
            ("messages", json!([{ "role": "user", "content": [{ "type": "image_url" }] }])),
        ] {
            let mut body = json!({ "messages": [] });
            body[field] = value;
            assert_eq!(refused(Api::Chat, &body).as_deref(), Some(field), "{body}");
        }
        for prompt in [json!(["a"]), json!([[1]]), json!(null), json!([])] {
            assert_eq!(refused(Api::Completions, &json!({ "prompt": prompt })).as_deref(), Some("prompt"));
        }
        let neutral = json!({ "n": 1, "tools": [], "stop": null, "logprobs": false, "presence_penalty": 0, "min_tokens": 0,
            "messages": [{ "role": "user", "content": [{ "type": "text", "text": "?" }] }] });
        assert_eq!(refused(Api::Chat, &neutral), None);
    }

    #[test]
    fn the_two_parts() {
        let body = json!({ "model": "m", "prompt": "p", "temperature": 0, "max_tokens": 9, "return_token_ids": true });
        let plan = SplitRequest::of(Api::Completions, &body, &[37]).expect("can be handed over").offering(&(4..=9));
        assert_eq!(plan.think["stop_token_ids"], json!([37]));
        let offer = json!({ "do_remote_decode": true, HANDOFF: { "min_blocks": 4, "max_blocks": 9 } });
        assert_eq!(plan.think["kv_transfer_params"], offer);
        assert_eq!(plan.think["prompt"], json!("p"));
        let kv = json!({ "remote_port": 1 });
        let answer = json!({ "model": "m", "temperature": 0, "prompt": [1, 37], "max_tokens": 8, "stream": true,
            "return_token_ids": true, "kv_transfer_params": { "remote_port": 1 } });
        assert_eq!(plan.answer(&[1, 37], plan.left(1), Some(&kv)), answer);
        let unlimited = SplitRequest::of(Api::Chat, &json!({ "messages": [] }), &[37]).expect("can be handed over");
        assert_eq!(unlimited.left(5), None);
    }

    #[test]
    fn ends_of_the_first_part() {
        let reason = |reason: Value| end(&reason, &[37]);
        assert_eq!(reason(json!(37)), End::ThoughtAlone);
        assert_eq!(reason(json!(38)), End::Over);
        assert_eq!(reason(json!(null)), End::Over);
        assert_eq!(reason(json!("{\"remote_host\": \"elsewhere\"}")), End::Over);
        let kv = json!({ "meridian_handoff": { "stop_token": 37 }, "remote_port": 7 });
        assert_eq!(reason(json!(kv.to_string())), End::Thought(kv));
    }
}

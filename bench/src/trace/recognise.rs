//! Which format a file has, by its content.

use super::{Format, servegen};

/// What the beginning of a file shows.
pub(super) struct Shape {
    /// Whether its rows are JSON objects rather than lines of CSV.
    pub(super) is_json: bool,
    /// The fields of its first object, or the columns of its first line.
    names: Vec<String>,
}

impl Shape {
    /// Of the beginning of a file, which may be cut short anywhere.
    pub(super) fn of(head: &[u8]) -> Self {
        let text = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).trim_ascii_start();
        let is_json = matches!(text.first(), Some(b'{' | b'['));
        let names = if is_json {
            fields(text)
        } else {
            let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
            let line = String::from_utf8_lossy(line);
            line.trim().split(',').map(|name| name.trim().trim_matches('"').trim().to_owned()).collect()
        };
        Self { is_json, names }
    }

    fn has(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    fn any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.has(name))
    }

    /// The format, if it is one that is read.
    pub(super) fn format(&self) -> Option<Format> {
        let (has, any) = (|name: &str| self.has(name), |names: &[&str]| self.any(names));
        if !self.is_json {
            return if has("TIMESTAMP") && has("ContextTokens") {
                Some(Format::Azure)
            } else if has("Request tokens") && has("Response tokens") {
                Some(Format::BurstGpt)
            } else if has("arrival_s") && has("prompt_tokens") && has("output_tokens") {
                Some(Format::Meridian)
            } else if any(servegen::ARRIVAL) && any(servegen::PROMPT) {
                Some(Format::ServeGen)
            } else {
                None
            };
        }
        if has("arrival_s") {
            Some(Format::Meridian)
        } else if has("requests") && has("block_size") {
            Some(Format::Agentic)
        } else if has("turns") && has("session_id") {
            Some(Format::Copilot)
        } else if any(&["chat_id", "parent_chat_id"]) && has("input_length") {
            Some(Format::Bailian)
        } else if has("metadata") && has("metrics") {
            Some(Format::AiperfExport)
        } else if has("hash_ids") && has("input_length")
            || has("output_length") && any(&["input_length", "text_input", "messages"]) && !has("arrival_time")
            || any(&["input_length", "text_input"]) && any(&["timestamp", "delay", "session_id"])
        {
            Some(Format::Mooncake)
        } else if any(&["conversations", "conversation"]) || has("messages") && !has("model") {
            Some(Format::ShareGpt)
        } else if any(&["input_lens", "endpoint_type", "request_rate"]) {
            Some(Format::VllmBench)
        } else if any(servegen::ARRIVAL) && any(servegen::PROMPT) {
            Some(Format::ServeGen)
        } else {
            None
        }
    }

    /// What a file is that has no requests to replay, and what has them instead.
    pub(super) fn other(&self) -> Option<&'static str> {
        let any = |names: &[&str]| self.any(names);
        let whole = |name: &String| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
        if !self.is_json {
            let is_number = |name: &String| name.parse::<f64>().is_ok();
            let named = |name: &String| name.starts_with(|first: char| first.is_ascii_alphabetic());
            return if self.names.len() >= 4
                && self.names[..3].iter().all(is_number)
                && (is_number(&self.names[3]) || named(&self.names[3]))
            {
                Some(SERVEGEN)
            } else if any(&["Metric"]) && any(&["avg", "p99"]) {
                Some(AIPERF)
            } else {
                None
            };
        }
        if !self.names.is_empty() && self.names.iter().all(whole) {
            Some(SERVEGEN)
        } else if any(&["input_config"]) || any(&["request_latency", "time_to_first_token", "output_sequence_length"]) {
            Some(AIPERF)
        } else if any(&["experiments"]) {
            Some("GenAI-Perf's profile, which has texts and no lengths")
        } else if any(&["benchmarks"]) {
            Some("GuideLLM's report, which has no list of arrivals")
        } else if any(&["schema"]) && any(&["runs"]) {
            Some("results of `meridian bench`, which have no requests: give the trace that they were measured with")
        } else if any(&["traceEvents"]) {
            Some("a timeline for Perfetto, which has no requests")
        } else if any(&["captureData", "custom_id", "prompt", "body", "data"]) || any(&["messages"]) {
            Some("requests as texts, which have neither arrivals nor lengths")
        } else {
            None
        }
    }
}

const SERVEGEN: &str = "ServeGen's distributions, which have no requests: generate some with ServeGen and give those";
const AIPERF: &str = "a summary of AIPerf, which has no requests: give profile_export.jsonl of the same run";

/// Names of the fields of the first object, those of objects in it left out.
fn fields(text: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    let (mut depth, mut least) = (0_usize, usize::MAX);
    let mut last: Option<&[u8]> = None;
    let mut at = 0;
    while at < text.len() {
        match text[at] {
            b'"' => {
                let start = at + 1;
                at = start;
                while at < text.len() && text[at] != b'"' {
                    at += if text[at] == b'\\' { 2 } else { 1 };
                }
                last = text.get(start..at.min(text.len()));
            }
            b'{' => {
                depth += 1;
                least = least.min(depth);
            }
            b'[' => depth += 1,
            b'}' | b']' => {
                if depth <= least && least != usize::MAX {
                    break;
                }
                depth = depth.saturating_sub(1);
            }
            b':' if depth == least => names.extend(last.take().map(|name| String::from_utf8_lossy(name).into_owned())),
            _ => {}
        }
        at += 1;
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_the_first_object_only() {
        let names = |text: &str| Shape::of(text.as_bytes()).names;
        assert_eq!(names("{\"a\": {\"b\": 1, \"c\": [{\"d\": 2}]}, \"e\\\"\": \"f\"}\n{\"g\": 1}"), ["a", "e\\\""]);
        assert_eq!(names("\u{feff}\n [\n {\"a\": [1, 2], \"b\": \"x: y\"}, {\"c\": 1}]"), ["a", "b"]);
        assert_eq!(names("{\"a\": 1, \"cut"), ["a"]);
        assert_eq!(names("{}"), Vec::<String>::new());
        assert_eq!(names(" a , \"b\"\r\n1,2"), ["a", "b"]);
        assert!(names("[1, 2]").is_empty() && names("{\"a\\").is_empty());
    }
}

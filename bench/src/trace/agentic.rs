//! Sessions of coding agents as lists of requests with their prefix blocks: as kv-cache-tester's traces are published, with
//! sub-agents in their parents, or a request as an array.

use std::collections::HashMap;
use std::io::BufRead;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::rows::{MAX_SECONDS, MAX_TOKENS, Row, bad, json_objects};
use super::sessions::{MAX_BLOCK, ThinkingDrawn, merged};
use super::{Format, ReadOptions, Session, SessionRequest, Trace, TraceError};
use crate::limits::REQUESTS;

/// Fewest tokens of a block: fewer would make lists of blocks longer than the text that has them.
pub(super) const MIN_BLOCK_TOKENS: u32 = 8;
const MAX_BLOCK_TOKENS: u32 = 1 << 20;

/// Reads sessions; [`ReadOptions::limit`] is a number of sessions here.
pub(super) fn read(name: &str, input: impl BufRead, options: &ReadOptions) -> Result<Trace, TraceError> {
    let mut sessions = Vec::new();
    let mut counted = Counted::default();
    let mut thinking = ThinkingDrawn::new(options.think);
    json_objects(name, input, options.limit, |row: &Row<'_>| {
        let first = sessions.len();
        session(row, &mut thinking, &mut counted, &mut sessions)?;
        if counted.requests > *REQUESTS.end() {
            return Err(TraceError::TooMany { name: name.to_owned(), limit: *REQUESTS.end() });
        }
        if let Some(most) = options.clip_tokens {
            counted.clipped += sessions[first..].iter_mut().map(|session| session.clip(most.max(2))).sum::<usize>();
        }
        Ok(())
    })?;
    if sessions.is_empty() {
        return Err(TraceError::Empty { name: name.to_owned(), skipped: 0 });
    }
    let notes = counted.notes(options);
    Ok(Trace { name: name.to_owned(), format: Format::Agentic, requests: Vec::new(), sessions, notes })
}

#[derive(Default)]
struct Counted {
    requests: usize,
    /// Requests without tokens of an answer, which get one.
    silent: usize,
    /// Requests whose gap is not recorded.
    without_gap: usize,
    /// Requests that say why they stopped, as nothing.
    without_stop: usize,
    thinking: usize,
    /// Requests that list more blocks than their prompt has.
    beyond: usize,
    clipped: usize,
    sub_agents: usize,
}

impl Counted {
    fn notes(&self, options: &ReadOptions) -> Vec<String> {
        let of = self.requests;
        let mut notes = Vec::new();
        let mut note = |count: usize, text: &str| {
            if count > 0 {
                notes.push(format!("{count} of {of} requests {text}"));
            }
        };
        note(self.silent, "have no generated tokens: they generate one");
        note(
            self.without_gap,
            "have no recorded gap: it is the time from the end of the request before to their start",
        );
        note(self.without_stop, "do not say why they stopped: they count as ended turns");
        if options.think == super::ThinkSplit::None {
            note(
                self.thinking,
                "have thinking of unknown length: all of it counts as answer (--think bimodal splits it)",
            );
        } else {
            note(self.thinking, "have thinking of unknown length: its share is drawn");
        }
        note(self.beyond, "list more blocks than their prompt has: the first ones count");
        if let Some(most) = options.clip_tokens {
            note(self.clipped, &format!("clipped to {most} tokens"));
        }
        if self.sub_agents > 0 {
            let count = self.sub_agents;
            notes.push(format!("{count} sub-agents are sessions of their own: nothing waits for another session"));
        }
        notes
    }
}

fn session(
    row: &Row<'_>,
    thinking: &mut ThinkingDrawn,
    counted: &mut Counted,
    sessions: &mut Vec<Session>,
) -> Result<(), TraceError> {
    let block_tokens = row.tokens("block_size", MIN_BLOCK_TOKENS)?;
    if block_tokens > MAX_BLOCK_TOKENS {
        return Err(row.bad("block_size", format!("{MIN_BLOCK_TOKENS} to {MAX_BLOCK_TOKENS} tokens")));
    }
    let id = row.text("id").ok_or_else(|| row.bad("id", "the name of the session"))?;
    let Some(Value::Array(given)) = row.json("requests") else {
        return Err(row.bad("requests", "an array of requests"));
    };
    if given.is_empty() {
        return Err(row.bad("requests", "at least one request"));
    }
    let agent = Agent { id: id.into_owned(), place: "requests".to_owned(), given };
    Reader { row, block_tokens, ids: HashMap::new(), thinking, counted }.read(&agent, sessions)
}

/// The requests of a session or of one of its sub-agents, and where they stand.
struct Agent<'a> {
    id: String,
    place: String,
    given: &'a [Value],
}

struct Reader<'a> {
    row: &'a Row<'a>,
    block_tokens: u32,
    /// Blocks by their published ids, which may be any numbers, in the order in which they come.
    ids: HashMap<u64, u32>,
    thinking: &'a mut ThinkingDrawn,
    counted: &'a mut Counted,
}

/// A request as recorded.
struct Recorded {
    start_s: Option<f64>,
    prompt_tokens: u32,
    generated: u32,
    api_s: Option<f64>,
    gap_s: Option<f64>,
    stopped_for_tool: bool,
    says_stop: bool,
    thinks: bool,
    blocks: Arc<[[u32; 2]]>,
}

impl Reader<'_> {
    /// Adds the agent's own session, and those of its sub-agents.
    fn read(&mut self, agent: &Agent<'_>, sessions: &mut Vec<Session>) -> Result<(), TraceError> {
        let Agent { id, place, given } = agent;
        let (mut requests, mut below) = (Vec::with_capacity(given.len()), Vec::new());
        let mut ended_s = 0.0;
        for (at, one) in given.iter().enumerate() {
            let place = format!("{place}[{at}]");
            let recorded = match one {
                Value::Object(fields) if fields.get("type").and_then(Value::as_str) == Some("subagent") => {
                    let Some(Value::Array(given)) = fields.get("requests") else {
                        let expected = "an array of requests";
                        return Err(self.bad(&format!("{place}.requests"), fields.get("requests"), expected));
                    };
                    self.counted.sub_agents += 1;
                    let name = fields.get("agent_id").and_then(Value::as_str).map_or(at.to_string(), str::to_owned);
                    let agent = Agent { id: format!("{id}/{name}"), place: format!("{place}.requests"), given };
                    self.read(&agent, &mut below)?;
                    continue;
                }
                Value::Object(fields) => self.object(&place, fields)?,
                one => self.array(&place, one)?,
            };
            let Recorded { prompt_tokens, generated, stopped_for_tool, thinks, blocks, .. } = recorded;
            let is_first = requests.is_empty();
            self.counted.requests += 1;
            self.counted.silent += usize::from(generated == 0);
            self.counted.without_stop += usize::from(!recorded.says_stop);
            self.counted.thinking += usize::from(thinks);
            self.counted.without_gap += usize::from(!is_first && recorded.gap_s.is_none());
            let start_s = recorded.start_s.unwrap_or(ended_s);
            let gap_s = if is_first { 0.0 } else { recorded.gap_s.unwrap_or_else(|| (start_s - ended_s).max(0.0)) };
            ended_s = start_s + recorded.api_s.unwrap_or(0.0);
            let (think_tokens, output_tokens) = self.thinking.split(generated.max(1), thinks);
            requests.push(SessionRequest {
                gap_s,
                prompt_tokens,
                think_tokens,
                output_tokens,
                stopped_for_tool,
                blocks,
                ..SessionRequest::default()
            });
        }
        if !requests.is_empty() {
            sessions.push(Session::new(Arc::from(id.as_str()), self.block_tokens, requests));
        }
        sessions.append(&mut below);
        Ok(())
    }

    /// A request as it is published.
    fn object(&mut self, place: &str, fields: &Map<String, Value>) -> Result<Recorded, TraceError> {
        let column = |field: &str| format!("{place}.{field}");
        let value = |field: &str| fields.get(field).unwrap_or(&Value::Null);
        let prompt_tokens = self.tokens(&column("in"), value("in"))?.max(1);
        let generated = match value("out") {
            Value::Null => 0,
            out => self.tokens(&column("out"), out)?,
        };
        let seconds = |field: &str| self.seconds(&column(field), value(field));
        let (start_s, api_s) = (seconds("t")?, seconds("api_time")?);
        let gap_s = match value("think_time") {
            // The request before had not ended.
            gap if gap.as_f64().is_some_and(|s| s < 0.0) => Some(0.0),
            _ => seconds("think_time")?,
        };
        let stop = value("stop").as_str().unwrap_or_default();
        let thinks = value("output_types").as_array().is_some_and(|types| types.iter().any(|kind| kind == "thinking"));
        let listed = match value("hash_ids") {
            Value::Array(ids) => ids.as_slice(),
            Value::Null => &[],
            other => return Err(self.bad(&column("hash_ids"), Some(other), "an array of ids of blocks")),
        };
        let most = (prompt_tokens / self.block_tokens) as usize;
        self.counted.beyond += usize::from(listed.len() > most);
        let mut blocks = Vec::with_capacity(listed.len().min(most));
        for id in &listed[..listed.len().min(most)] {
            let expected = "an id of a block, a whole number";
            let known = id.as_u64().ok_or_else(|| self.bad(&column("hash_ids"), Some(id), expected))?;
            let next = self.ids.len() as u32;
            blocks.push(*self.ids.entry(known).or_insert(next));
        }
        if self.ids.len() > MAX_BLOCK as usize {
            return Err(self.bad(&column("hash_ids"), None, &format!("at most {MAX_BLOCK} blocks in a session")));
        }
        Ok(Recorded {
            start_s,
            prompt_tokens,
            generated,
            api_s,
            gap_s,
            stopped_for_tool: stop == "tool_use",
            says_stop: !stop.is_empty(),
            thinks,
            blocks: merged(blocks.into_iter().map(|id| [id, id])),
        })
    }

    /// A request as an array.
    fn array(&self, place: &str, one: &Value) -> Result<Recorded, TraceError> {
        let fields = one.as_array().map_or(&[][..], Vec::as_slice);
        let [t_s, input, output, api_s, gap_s, stop, thinks, blocks] = fields else {
            return Err(self.bad(place, Some(one), EXPECTED));
        };
        let column = |at: usize| format!("{place}[{at}]");
        let prompt_tokens = self.tokens(&column(1), input)?.max(1);
        let expected = "a stop reason, such as \"tool_use\", or \"\"";
        let reason = stop.as_str().ok_or_else(|| self.bad(&column(5), Some(stop), expected))?;
        let expected = "ids of blocks, or [first, last] ranges of them";
        let listed = ranges(blocks).ok_or_else(|| self.bad(&column(7), Some(blocks), expected))?;
        let count: u64 = listed.iter().map(|[first, last]| u64::from(last - first) + 1).sum();
        if count * u64::from(self.block_tokens) > u64::from(prompt_tokens) {
            let expected = format!("at most {} blocks, as the prompt has", prompt_tokens / self.block_tokens);
            return Err(self.bad(&column(7), Some(blocks), &expected));
        }
        Ok(Recorded {
            start_s: self.seconds(&column(0), t_s)?,
            prompt_tokens,
            generated: self.tokens(&column(2), output)?,
            api_s: self.seconds(&column(3), api_s)?,
            gap_s: self.seconds(&column(4), gap_s)?,
            stopped_for_tool: reason == "tool_use",
            says_stop: !reason.is_empty(),
            thinks: matches!(thinks, Value::Bool(true)) || thinks.as_u64().is_some_and(|flag| flag != 0),
            blocks: listed,
        })
    }

    fn seconds(&self, column: &str, value: &Value) -> Result<Option<f64>, TraceError> {
        match value.as_f64() {
            Some(s) if (0.0..=MAX_SECONDS).contains(&s) => Ok(Some(s)),
            None if value.is_null() => Ok(None),
            _ => Err(self.bad(column, Some(value), "seconds from 0 to 1e10, or null")),
        }
    }

    fn tokens(&self, column: &str, value: &Value) -> Result<u32, TraceError> {
        match value.as_u64() {
            Some(count) if count <= u64::from(MAX_TOKENS) => Ok(count as u32),
            _ => Err(self.bad(column, Some(value), "a whole number of tokens from 0 to 10000000")),
        }
    }

    fn bad(&self, column: &str, value: Option<&Value>, expected: &str) -> TraceError {
        bad(self.row.name, self.row.line, column, value.map(Value::to_string).as_deref(), expected)
    }
}

const EXPECTED: &str = "an object as published, or \
                        [t_s, input tokens, output tokens, api_s, gap_s, stop, thinking, blocks]";

fn ranges(blocks: &Value) -> Option<Arc<[[u32; 2]]>> {
    let id = |value: &Value| value.as_u64().filter(|id| *id <= u64::from(MAX_BLOCK)).map(|id| id as u32);
    let range = |value: &Value| match value {
        Value::Array(ends) => match ends.as_slice() {
            [first, last] => Some([id(first)?, id(last)?]).filter(|[first, last]| first <= last),
            _ => None,
        },
        one => id(one).map(|one| [one, one]),
    };
    let ranges: Option<Vec<_>> = blocks.as_array()?.iter().map(range).collect();
    Some(merged(ranges?))
}

use std::borrow::Borrow;
use std::collections::HashMap;
use std::io::{self, Write};
use std::str::FromStr;

use serde::Serialize;
use serde_json::json;

use super::rows::MAX_SECONDS;
use super::{Prefix, Session, TraceRequest};

/// Writes requests as CSV in the project's own format, which [`super::read`] gives back.
///
/// # Errors
/// What `output` says; `InvalidInput` for [`Prefix::Ranges`], which [`write_sessions`] writes.
pub fn write_csv<R: Borrow<TraceRequest>>(requests: impl IntoIterator<Item = R>, output: impl Write) -> io::Result<()> {
    let mut writer = csv::Writer::from_writer(output);
    writer.write_record([
        "arrival_s",
        "prompt_tokens",
        "think_tokens",
        "output_tokens",
        "tenant",
        "priority",
        "deadline_ms",
        "session",
        "turn",
        "block_tokens",
        "blocks",
    ])?;
    for request in requests {
        let request = request.borrow();
        let [mut session, mut turn, mut block_tokens, mut blocks] = [const { String::new() }; 4];
        match &request.prefix {
            Prefix::None => {}
            Prefix::Session { id, turn: number } => (session, turn) = (id.to_string(), number.to_string()),
            Prefix::Blocks { tokens, ids } => {
                block_tokens = tokens.to_string();
                blocks = ids.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
            }
            Prefix::Ranges { .. } => return Err(in_closed_loop()),
        }
        let deadline = if request.deadline_ms.is_finite() { request.deadline_ms.to_string() } else { String::new() };
        writer.write_record([
            &request.arrival_s.to_string(),
            &request.prompt_tokens.to_string(),
            &request.think_tokens.to_string(),
            &request.output_tokens.to_string(),
            &*request.tenant,
            &request.priority.to_string(),
            &deadline,
            &session,
            &turn,
            &block_tokens,
            &blocks,
        ])?;
    }
    writer.flush()
}

fn in_closed_loop() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "sessions in closed loop have no arrivals")
}

/// Writes sessions as the format `agentic`, which [`super::read`] gives back. The format has no lengths of thinking.
///
/// # Errors
/// What `output` says.
pub fn write_sessions(sessions: &[Session], mut output: impl Write) -> io::Result<()> {
    for Session { id, block_tokens, requests } in sessions {
        let mut at_s = 0.0_f64;
        let requests: Vec<_> = requests
            .iter()
            .map(|one| {
                at_s = (at_s + one.gap_s).min(MAX_SECONDS);
                let stop = if one.stopped_for_tool { "tool_use" } else { "end_turn" };
                let generated = one.think_tokens + one.output_tokens;
                let thinks = u8::from(one.think_tokens > 0);
                json!([at_s, one.prompt_tokens, generated, null, one.gap_s, stop, thinks, one.blocks.to_vec()])
            })
            .collect();
        writeln!(output, "{}", json!({ "id": &**id, "block_size": block_tokens, "requests": requests }))?;
    }
    output.flush()
}

/// A tool that replays traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// NVIDIA AIPerf, `--custom-dataset-type mooncake_trace`.
    Aiperf,
    /// GuideLLM, the data `kind=mooncake`.
    Guidellm,
    /// `vllm bench serve --dataset-name timed_trace`.
    Vllm,
}

impl FromStr for Tool {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "aiperf" => Ok(Self::Aiperf),
            "guidellm" => Ok(Self::Guidellm),
            "vllm" => Ok(Self::Vllm),
            _ => Err("expected aiperf, guidellm or vllm".to_owned()),
        }
    }
}

#[derive(Serialize)]
struct Line<'a> {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: &'a [u32],
}

/// Writes requests as JSON lines that a tool replays: times, lengths and the blocks of each prompt, numbered from 0. The answer's
/// length has that of the thinking in it; tenants, priorities and deadlines have no place. Returns the tokens of a block.
///
/// # Errors
/// What `output` says; `InvalidInput` where blocks have different sizes, or for [`Prefix::Ranges`].
pub fn write_for(tool: Tool, requests: &[TraceRequest], mut output: impl Write) -> io::Result<u32> {
    let wrong = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why);
    let mut size = None;
    for request in requests {
        match request.prefix {
            Prefix::Blocks { tokens, .. } if *size.get_or_insert(tokens) != tokens => {
                return Err(wrong("blocks of several sizes, expected one"));
            }
            Prefix::Ranges { .. } => return Err(in_closed_loop()),
            _ => {}
        }
    }
    let size = size.unwrap_or(if tool == Tool::Aiperf { 512 } else { 16 });
    let mut numbers: HashMap<u64, u32> = HashMap::new();
    let mut said: HashMap<u64, Vec<u32>> = HashMap::new();
    let mut next = 0_u32;
    let mut new = || {
        let number = next;
        next = next
            .checked_add(1)
            .filter(|next| *next <= i32::MAX as u32)
            .ok_or_else(|| wrong("more than 2^31 blocks"))?;
        Ok::<u32, io::Error>(number)
    };
    for request in requests {
        let count = request.prompt_tokens.div_ceil(size) as usize;
        let mut ids = Vec::with_capacity(count);
        match &request.prefix {
            Prefix::Blocks { ids: given, .. } => {
                for id in given.iter() {
                    ids.push(match numbers.get(id) {
                        Some(number) => *number,
                        None => {
                            let number = new()?;
                            numbers.insert(*id, number);
                            number
                        }
                    });
                }
            }
            // Of the prompt before, the full blocks: the tools write no answers into prompts.
            Prefix::Session { id, .. } => {
                ids.extend(said.get(id).into_iter().flatten().take(request.prompt_tokens as usize / size as usize))
            }
            Prefix::None | Prefix::Ranges { .. } => {}
        }
        while ids.len() < count {
            ids.push(new()?);
        }
        if let Prefix::Session { id, .. } = request.prefix {
            said.insert(id, ids[..request.prompt_tokens as usize / size as usize].to_vec());
        }
        let line = Line {
            timestamp: if tool == Tool::Aiperf { request.arrival_s * 1e3 } else { request.arrival_s },
            input_length: request.prompt_tokens,
            output_length: request.think_tokens + request.output_tokens,
            hash_ids: &ids,
        };
        serde_json::to_writer(&mut output, &line)?;
        output.write_all(b"\n")?;
    }
    output.flush()?;
    Ok(size)
}

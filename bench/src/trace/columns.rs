//! Any CSV or JSON lines, by the names of the columns.

use std::io::BufRead;
use std::str::FromStr;

use super::conversations::Conversations;
use super::lengths::Builder;
use super::meridian::Names;
use super::rows::each_row;
use super::time::nanoseconds;
use super::{Prefix, ReadOptions, TraceError, TraceRequest, Unit};

/// Where the values of a request are.
///
/// ```
/// use meridian_bench::trace::ColumnNames;
///
/// let names: ColumnNames = "arrival=TIMESTAMP,prompt=ContextTokens,output=GeneratedTokens".parse().unwrap();
/// assert_eq!(names.prompt, "ContextTokens");
/// assert!("prompt=a".parse::<ColumnNames>().is_err());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ColumnNames {
    /// When a request arrived: a number, or a date and a time. Without it, one arrives a second.
    pub arrival: Option<String>,
    /// Tokens of the prompt.
    pub prompt: String,
    /// Generated tokens, those of thinking included.
    pub output: String,
    /// Those of them that are thinking.
    pub think: Option<String>,
    /// Name of the tenant.
    pub tenant: Option<String>,
    /// Priority, lower is more urgent.
    pub priority: Option<String>,
    /// Name of the conversation: a prompt that is long enough has all that was said before.
    pub session: Option<String>,
    /// Ids of the prompt's blocks.
    pub blocks: Option<String>,
}

/// What can be named.
const KEYS: &str = "arrival, prompt, output, think, tenant, priority, session, blocks";

impl FromStr for ColumnNames {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut names = Self::default();
        let (mut prompt, mut output) = (None, None);
        for part in text.split(',') {
            let (key, column) = part.split_once('=').ok_or(format!("{part}: expected KEY=COLUMN"))?;
            let (key, column) = (key.trim(), column.trim());
            let place = match key {
                "arrival" => &mut names.arrival,
                "prompt" => &mut prompt,
                "output" => &mut output,
                "think" => &mut names.think,
                "tenant" => &mut names.tenant,
                "priority" => &mut names.priority,
                "session" => &mut names.session,
                "blocks" => &mut names.blocks,
                _ => return Err(format!("{key}: expected one of {KEYS}")),
            };
            if column.is_empty() || place.replace(column.to_owned()).is_some() {
                return Err(format!("{key}: expected one column"));
            }
        }
        names.prompt = prompt.ok_or("expected prompt=COLUMN among them")?;
        names.output = output.ok_or("expected output=COLUMN among them")?;
        Ok(names)
    }
}

/// Tokens of a block of engines that do not say otherwise.
const BLOCK_TOKENS: u32 = 16;

pub(super) fn rows(
    name: &str,
    input: impl BufRead,
    is_json: bool,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    let Some(columns) = &options.columns else {
        let (name, why, expected) = (name.to_owned(), "its columns are not named", "--columns prompt=NAME,output=NAME");
        return Err(TraceError::Needs { name, why, expected });
    };
    let ColumnNames { arrival, prompt, output, think, tenant, priority, session, blocks } = columns;
    let given = [arrival, think, tenant, priority, session, blocks].into_iter().flatten().chain([prompt, output]);
    let given: Vec<[&str; 1]> = given.map(|column| [column.as_str()]).collect();
    let required: Vec<&[&str]> = given.iter().map(<[&str; 1]>::as_slice).collect();
    let unit = options.unit.unwrap_or(Unit::S);
    let mut names = Names::default();
    let mut sessions = Conversations::default();
    let (mut start_ns, mut row_number) = (None, 0_u64);
    if arrival.is_none() {
        builder.note("no column of arrivals: one request arrives a second".to_owned());
    }
    each_row(name, input, is_json, &required, options.limit, |row| {
        row_number += 1;
        let arrival_s = match arrival {
            None => (row_number - 1) as f64,
            Some(column) => match row.text(column).filter(|text| text.parse::<f64>().is_err()) {
                None => row.seconds(column, unit)?,
                Some(date) => {
                    let at_ns = nanoseconds(&date).ok_or_else(|| {
                        row.bad(column, "a number, or a time as in 2023-11-16 18:15:46.680590 or with +00:00 after it")
                    })?;
                    (at_ns - *start_ns.get_or_insert(at_ns)) as f64 / 1e9
                }
            },
        };
        let prompt_tokens = row.tokens(prompt, 0)?;
        let generated = row.tokens(output, 0)?;
        let block_tokens = options.block_tokens.unwrap_or(BLOCK_TOKENS);
        let prefix = match blocks {
            Some(column) => row.blocks(column, block_tokens, prompt_tokens)?,
            None => Prefix::None,
        };
        let session = session.as_ref().and_then(|column| row.text(column)).filter(|_| prefix == Prefix::None);
        let mut request = TraceRequest {
            arrival_s,
            prompt_tokens,
            output_tokens: generated,
            tenant: names.get(tenant.as_ref().and_then(|column| row.text(column)).as_deref().unwrap_or_default()),
            priority: match priority {
                Some(column) => row.parsed(column, "a whole number of 32 bits")?.unwrap_or(0),
                None => 0,
            },
            prefix: match session {
                Some(session) => sessions.next(&session, prompt_tokens, generated, arrival_s).prefix(),
                None => prefix,
            },
            ..TraceRequest::default()
        };
        let think = match think {
            Some(column) if row.text(column).is_some() => Some((column, row.tokens(column, 0)?)),
            _ => None,
        };
        match think {
            None => builder.push_generated(request),
            Some((column, tokens)) if tokens > generated => {
                return Err(row.bad(column, format!("at most the value of {output}")));
            }
            Some(_) if prompt_tokens == 0 || generated == 0 => builder.skip(),
            Some((_, tokens)) => {
                // A request that was cut off while thinking has no answer; the engine still needs one token.
                (request.think_tokens, request.output_tokens) = (tokens, (generated - tokens).max(1));
                builder.push(request);
            }
        }
        Ok(())
    })
}

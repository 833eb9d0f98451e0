use std::borrow::Borrow;
use std::io::{self, Write};

use super::{Prefix, TraceRequest};

/// Writes requests as CSV in the project's own format, which [`super::read`] gives back.
///
/// # Errors
/// What `output` says; `InvalidInput` for [`Prefix::Blocks`] and [`Prefix::Ranges`], for which the format has no column.
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
    ])?;
    for request in requests {
        let request = request.borrow();
        let (session, turn) = match &request.prefix {
            Prefix::None => (String::new(), String::new()),
            Prefix::Session { id, turn } => (id.to_string(), turn.to_string()),
            Prefix::Blocks { .. } | Prefix::Ranges { .. } => {
                let why = "prefix blocks have no column in this format";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
            }
        };
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
        ])?;
    }
    writer.flush()
}

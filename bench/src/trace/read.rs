use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use meridian_core::file::open_regular;

use super::lengths::Builder;
use super::rows::io_error;
use super::{Format, Session, TraceError, TraceRequest};

/// Most that is read of a file, bytes: days of a large service.
const MAX_TRACE_BYTES: u64 = 1 << 30;
/// How much of a file is looked at to tell its format.
const HEAD_BYTES: usize = 64 << 10;

/// What to make of a trace's rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadOptions {
    /// Where the thinking is in traces that do not say so.
    pub think: ThinkSplit,
    /// Only so many rows, in the order of the file; a row may be a session.
    pub limit: Option<usize>,
    /// Most tokens of a request, prompt, thinking and answer together. A longer one loses prompt down to a quarter of
    /// this, then thinking and answer alike.
    pub clip_tokens: Option<u32>,
}

/// How generated tokens become thinking and answer, for traces without phases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThinkSplit {
    /// All of it is the answer.
    #[default]
    None,
    /// The share of thinking is drawn for each row from the two modes of [`super::Workload::reasoning_chat`].
    Bimodal {
        /// Same seed, same shares.
        seed: u64,
    },
}

/// A recorded trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Name of the file, without its folder.
    pub name: String,
    /// Its format, given or detected.
    pub format: Format,
    /// By arrival, the first at 0 s; rows of one arrival keep the order of the file.
    pub requests: Vec<TraceRequest>,
    /// Sessions of a format that has them, and then no requests: those follow each other in closed loop.
    pub sessions: Vec<Session>,
    /// What the reader left out, changed or assumed, for reports.
    pub notes: Vec<String>,
}

/// Reads a trace; without a format, its suffix and first line decide.
///
/// # Errors
/// [`TraceError`]; whatever the file holds, this does not panic.
pub fn read(path: &Path, format: Option<Format>, options: &ReadOptions) -> Result<Trace, TraceError> {
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let (file, _) = open_regular(path).map_err(|e| io_error(&name, e))?;
    // One byte more shows that it is too large.
    let mut file = BufReader::with_capacity(HEAD_BYTES, file.take(MAX_TRACE_BYTES + 1));
    let trace = read_from(&name, &mut file, format, options);
    if file.get_ref().limit() == 0 {
        return Err(TraceError::TooLarge { name: name.into_owned(), limit: MAX_TRACE_BYTES });
    }
    trace
}

/// As [`read`], from anything; the suffix of `name` tells JSON lines from CSV.
///
/// ```
/// use meridian_bench::trace::{Format, ReadOptions, read_from};
///
/// let text = "arrival_s,prompt_tokens,think_tokens,output_tokens\n7.5,120,900,200\n8.0,30,0,10\n";
/// let trace = read_from("two.csv", text.as_bytes(), None, &ReadOptions::default())?;
/// assert_eq!((trace.format, trace.requests[1].arrival_s), (Format::Meridian, 0.5));
/// # Ok::<(), meridian_bench::trace::TraceError>(())
/// ```
///
/// # Errors
/// As [`read`].
pub fn read_from(
    name: &str,
    mut input: impl BufRead,
    format: Option<Format>,
    options: &ReadOptions,
) -> Result<Trace, TraceError> {
    let path = Path::new(name);
    let format = match format {
        Some(format) => format,
        None => {
            let head = input.fill_buf().map_err(|e| io_error(name, e))?;
            if head.is_empty() {
                return Err(TraceError::Empty { name: name.to_owned(), skipped: 0 });
            }
            let line = head.split(|byte| *byte == b'\n').find(|line| !line.trim_ascii().is_empty()).unwrap_or_default();
            let line = String::from_utf8_lossy(&line[..line.len().min(HEAD_BYTES)]);
            Format::detect(path, &line)
                .ok_or_else(|| TraceError::UnknownFormat { what: name.to_owned(), known: Format::known() })?
        }
    };
    let mut builder = Builder::new(options);
    match format {
        Format::Meridian => super::meridian::rows(name, input, options, &mut builder)?,
        Format::ServeGen => super::servegen::rows(name, input, options, &mut builder)?,
        Format::Azure => super::azure::rows(name, input, options, &mut builder)?,
        Format::Mooncake => super::mooncake::rows(name, input, options, &mut builder)?,
        Format::VllmBench => super::vllm_bench::rows(name, input, options, &mut builder)?,
        Format::Agentic => return super::agentic::read(name, input, options),
    }
    let (requests, notes) = builder.finish(name)?;
    Ok(Trace { name: name.to_owned(), format, requests, sessions: Vec::new(), notes })
}

use std::io::{BufRead, BufReader};
use std::path::Path;

use meridian_core::file::open_regular;

use super::lengths::Builder;
use super::recognise::Shape;
use super::rows::io_error;
use super::source::{MAX_TRACE_BYTES, Source};
use super::{ColumnNames, Format, Session, TokenCount, TraceError, TraceRequest, Unit};

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
    /// The unit of times that are numbers, instead of the format's own.
    pub unit: Option<Unit>,
    /// Tokens of a prefix block, instead of the format's own.
    pub block_tokens: Option<u32>,
    /// Where the values of a request are: reads [`Format::Columns`].
    pub columns: Option<ColumnNames>,
    /// Counts the tokens of texts, for formats that have those instead.
    pub count: Option<TokenCount>,
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

/// Reads a trace, which may be packed by gzip or zstd; without a format, its content decides.
///
/// # Errors
/// [`TraceError`]; whatever the file holds, this does not panic.
pub fn read(path: &Path, format: Option<Format>, options: &ReadOptions) -> Result<Trace, TraceError> {
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let (file, _) = open_regular(path).map_err(|e| io_error(&name, e))?;
    read_from(&name, BufReader::new(file), format, options)
}

/// As [`read`], from anything.
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
    input: impl BufRead,
    format: Option<Format>,
    options: &ReadOptions,
) -> Result<Trace, TraceError> {
    let mut source = Source::open(input).map_err(|e| io_error(name, e))?;
    let trace = read_source(name, &mut source, format, options);
    if source.is_too_large() {
        return Err(TraceError::TooLarge { name: name.to_owned(), limit: MAX_TRACE_BYTES });
    }
    trace
}

fn read_source(
    name: &str,
    source: &mut Source<'_>,
    format: Option<Format>,
    options: &ReadOptions,
) -> Result<Trace, TraceError> {
    let shape = Shape::of(&source.head);
    let format = match format.or(options.columns.as_ref().map(|_| Format::Columns)).or_else(|| shape.format()) {
        Some(format) => format,
        None if source.head.trim_ascii().is_empty() => {
            return Err(TraceError::Empty { name: name.to_owned(), skipped: 0 });
        }
        None => {
            let (name, known) = (name.to_owned(), Format::known());
            return Err(match shape.other() {
                Some(kind) => TraceError::Other { name, kind, known },
                None => TraceError::UnknownFormat { what: name, known },
            });
        }
    };
    let (input, is_json) = (&mut source.input, shape.is_json);
    let mut builder = Builder::new(options);
    let read = match format {
        Format::Meridian => super::meridian::rows(name, input, is_json, options, &mut builder),
        Format::ServeGen => super::servegen::rows(name, input, is_json, options, &mut builder),
        Format::Columns => super::columns::rows(name, input, is_json, options, &mut builder),
        Format::Azure => super::azure::rows(name, input, options, &mut builder),
        Format::BurstGpt => super::burstgpt::rows(name, input, options, &mut builder),
        Format::Mooncake => super::mooncake::rows(name, input, options, &mut builder),
        Format::Bailian => super::bailian::rows(name, input, options, &mut builder),
        Format::AiperfExport => super::aiperf::rows(name, input, options, &mut builder),
        Format::ShareGpt => super::sharegpt::rows(name, input, options, &mut builder),
        Format::VllmBench => super::vllm_bench::rows(name, input, options, &mut builder),
        Format::Agentic => return super::agentic::read(name, input, options),
        Format::Copilot => return super::copilot::read(name, input, options),
    };
    match read {
        // A service's week is longer than a run may be: its beginning serves as well.
        Err(TraceError::TooMany { limit, .. }) => {
            builder.note(format!(
                "only the first {limit} rows are read, as with --requests {limit}: a run has at most so many"
            ));
        }
        read => read?,
    }
    let (requests, notes) = builder.finish(name)?;
    Ok(Trace { name: name.to_owned(), format, requests, sessions: Vec::new(), notes })
}

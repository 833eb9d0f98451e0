use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Args;
use meridian_bench::limits::{REQUESTS, within};
use meridian_bench::trace::{Lengths, Summary, Tool, Trace, write_csv, write_for, write_sessions};
use serde_json::json;

use super::reading::ReadArgs;
use super::recordings;
use crate::{Unusable, print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
Formats: Meridian's own, ServeGen, Azure 2023 and 2024, Mooncake (with sessions and delays as AIPerf has them), agents'
sessions, `vllm bench serve` results, Qwen-Bailian, BurstGPT, GitHub Copilot 2026, AIPerf's profile_export.jsonl, ShareGPT
(with --tokenizer), and any CSV or JSON lines by --columns. Files packed by gzip or zstd are unpacked.

Examples:
  meridian bench trace qwen_traceA_blksz_16.jsonl
  meridian bench trace day.csv.gz --columns arrival=time,prompt=in,output=out --unit ms --save day.csv
  meridian bench trace requests.csv --save requests.jsonl --as aiperf")]
pub(crate) struct TraceArgs {
    /// Read this trace
    #[arg(value_name = "FILE")]
    trace: PathBuf,
    #[command(flatten)]
    reading: ReadArgs,
    /// Use only the first N requests, or sessions, of the file; at most 2000000
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Write the requests to this file in Meridian's format (sessions in closed loop as agents' sessions), and replace any existing
    /// file
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Write --save for another tool: aiperf (mooncake_trace), guidellm (mooncake), vllm (timed_trace)
    #[arg(long = "as", value_name = "TOOL", requires = "save")]
    tool: Option<Tool>,
}

pub(crate) fn run(args: &TraceArgs, json: bool) -> anyhow::Result<()> {
    let trace = read(args).map_err(|error| error.context(Unusable))?;
    let summary = Summary::of(&trace);
    let hint = match &args.save {
        Some(path) => save(&trace, path, args.tool)?,
        None => None,
    };
    if json {
        let mut value = serde_json::to_value(&summary)?;
        value["ok"] = json!(true);
        if let Some(path) = &args.save {
            value["saved"] = json!(path.display().to_string());
        }
        if let Some(hint) = hint {
            value["replay"] = json!(hint);
        }
        return print_json(&value);
    }
    trace.notes.iter().for_each(|note| say(&format!("note: {note}")));
    print_line(&table(&summary))?;
    if let Some(path) = &args.save {
        say(&format!(
            "saved {}{}",
            path.display(),
            hint.map_or_else(String::new, |hint| format!("; replay it: {hint}"))
        ));
    }
    Ok(())
}

fn read(args: &TraceArgs) -> anyhow::Result<Trace> {
    let path = &args.trace;
    ensure!(
        !recordings::are_at(path),
        "{}: is a recording: `bench replay --trace` reads it, and `meridian replay` repeats it",
        path.display()
    );
    args.requests.map(|count| within("--requests", count, &REQUESTS)).transpose()?;
    let trace = args.reading.read(path, args.requests)?;
    ensure!(
        args.tool.is_none() || trace.sessions.is_empty(),
        "--as: {}: has sessions in closed loop, without arrivals; expected a trace with arrivals",
        trace.name
    );
    Ok(trace)
}

/// Write the trace; the command that replays it, where another tool does.
fn save(trace: &Trace, path: &Path, tool: Option<Tool>) -> anyhow::Result<Option<String>> {
    let failed = || format!("--save {}: cannot be written", path.display());
    if let Ok(found) = std::fs::symlink_metadata(path) {
        anyhow::ensure!(found.is_file(), "--save {}: expected a new path or a regular file", path.display());
    }
    // In place of the file only when it is whole: it may be the trace itself.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut temporary = tempfile::Builder::new();
    let file = temporary.permissions(permissions()).tempfile_in(folder).with_context(failed)?;
    let mut output = BufWriter::new(&file);
    let hint = match tool {
        Some(tool) => Some(command(tool, path, write_for(tool, &trace.requests, &mut output).with_context(failed)?)),
        None if trace.sessions.is_empty() => {
            write_csv(&trace.requests, &mut output).with_context(failed).map(|()| None)?
        }
        None => write_sessions(&trace.sessions, &mut output).with_context(failed).map(|()| None)?,
    };
    output.flush().with_context(failed)?;
    drop(output);
    file.persist(path).map_err(io::Error::from).with_context(failed)?;
    Ok(hint)
}

/// As those of any file that a command writes: the umask takes its part.
fn permissions() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o666)
}

fn command(tool: Tool, path: &Path, block_tokens: u32) -> String {
    let path = path.display();
    match tool {
        Tool::Aiperf => format!(
            "aiperf profile --custom-dataset-type mooncake_trace --input-file {path} --isl-block-size {block_tokens}"
        ),
        Tool::Guidellm => format!(
            "guidellm benchmark --profile replay --data kind=mooncake,path={path},hash_id_block_size={block_tokens}"
        ),
        Tool::Vllm => format!(
            "vllm bench serve --dataset-name timed_trace --dataset-path {path} --timed-trace-chunk-hash-size {block_tokens}"
        ),
    }
}

/// Ten lines.
fn table(summary: &Summary) -> String {
    let Summary { file, format, requests, span_s, requests_per_s, prompt, think, output, .. } = summary;
    let lengths = |of: &Lengths| {
        let Lengths { sum, mean, p50, p95, max } = of;
        format!("{sum} tokens; mean {mean:.0}, median {p50}, p95 {p95}, longest {max}")
    };
    let rate = match (span_s, requests_per_s) {
        (_, Some(rate)) => format!("{rate:.3} requests/s"),
        (Some(_), None) => "all at once".to_owned(),
        (None, _) => "sessions in closed loop: a request follows the one before".to_owned(),
    };
    let sessions = match (summary.sessions, summary.in_sessions) {
        (0, _) => "none".to_owned(),
        (count, turns) => format!("{count} of several requests, {turns} requests in them"),
    };
    [
        format!("file      {file}"),
        format!("format    {format}"),
        format!("requests  {requests}"),
        format!("span      {}", span_s.map_or_else(|| "none".to_owned(), |span_s| format!("{span_s:.3} s"))),
        format!("rate      {rate}"),
        format!("prompt    {}", lengths(prompt)),
        format!("thinking  {}", lengths(think)),
        format!("answer    {}", lengths(output)),
        format!("sessions  {sessions}"),
        format!("reuse     {:.1} % of the prompt tokens were in a request before", 100.0 * summary.reuse),
    ]
    .join("\n")
}

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use meridian_core::slot::Source;
use meridian_core::{Budget, Eviction, SlotKind, SlotName};
use meridian_engine::recording::{Outcome, Recordable, Recorded, Recording, retrace};
use meridian_engine::timeline::{Timeline, TimelineDecision, chrome_json};
use serde::Serialize;

use crate::progress::seconds;
use crate::target::Target;
use crate::{Unusable, print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
Writes a timeline as JSON, which https://ui.perfetto.dev opens: a track of steps, one for each slot, one for
each request. Without --recording, the command asks a running engine, which keeps its timeline for --seconds.
`meridian bench replay --timeline FILE` writes the timeline of a simulated engine.

Examples:
  meridian trace --seconds 10 --out t.json
  meridian trace --recording recordings/dispatch-*.arrow --out t.json")]
pub(crate) struct TraceArgs {
    #[command(flatten)]
    target: Target,
    /// Follow the engine for this long
    #[arg(long, value_name = "N", default_value_t = 10.0, value_parser = duration, conflicts_with = "recordings")]
    seconds: f64,
    /// Write the timeline to this file
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Retrace these recordings, all of one process, instead of asking an engine
    #[arg(long = "recording", value_name = "FILE", num_args = 1.., conflicts_with_all = ["pid", "address", "fleet"])]
    recordings: Vec<PathBuf>,
}

fn duration(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=300.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be from 0.1 to 300".into()),
    }
}

#[derive(Serialize)]
struct Written {
    ok: bool,
    out: String,
    bytes: usize,
    events: usize,
}

pub(crate) fn run(args: &TraceArgs, json: bool) -> anyhow::Result<()> {
    let text = if args.recordings.is_empty() {
        live(args)?
    } else {
        recorded(&args.recordings).map_err(|error| error.context(Unusable))?
    };
    write(&args.out, &text, json)
}

/// Write a timeline, and print a line about it.
fn write(out: &Path, text: &str, json: bool) -> anyhow::Result<()> {
    std::fs::write(out, text).with_context(|| format!("--out: {}: cannot be written", out.display()))?;
    let events = text.lines().count().saturating_sub(2);
    if json {
        let out = out.display().to_string();
        return print_json(&Written { ok: true, out, bytes: text.len(), events });
    }
    let size = text.len().div_ceil(1024);
    Ok(print_line(&format!("{}: {events} events, {size} KiB; open it in https://ui.perfetto.dev", out.display()))?)
}

fn live(args: &TraceArgs) -> anyhow::Result<String> {
    let engine = args.target.one()?;
    let path = format!("/v1/trace?seconds={}", args.seconds);
    let under_way = seconds(args.seconds, "following the engine");
    let text = engine.text(&path, Duration::from_secs_f64(args.seconds));
    under_way.finish_and_clear();
    let text = text?;
    let is_timeline = serde_json::from_str::<serde_json::Value>(&text).is_ok_and(|json| json["traceEvents"].is_array());
    ensure!(is_timeline, "{}: answered no timeline, expected an object with traceEvents", engine.address());
    Ok(text)
}

/// Recordings in the order of writing.
pub(crate) fn opened(files: &[PathBuf]) -> anyhow::Result<Vec<Recording>> {
    let mut recordings = files.iter().map(|file| Recording::open(file)).collect::<Result<Vec<_>, _>>()?;
    crate::replay::sort_as_written(&mut recordings, Recording::header);
    Ok(recordings)
}

fn recorded(files: &[PathBuf]) -> anyhow::Result<String> {
    let recordings = opened(files)?;
    let (dispatch, others): (Vec<_>, Vec<_>) =
        recordings.into_iter().partition(|recording| recording.slot() == SlotName::Dispatch);
    let mut retraced = retrace(&dispatch, &[]).map_err(|error| match error.file.as_str() {
        "" => anyhow::anyhow!("--recording: expected at least one recording of the dispatch slot"),
        _ => error.into(),
    })?;
    for recording in &others {
        match recording.slot() {
            SlotName::Eviction => decisions::<Eviction>(recording, &mut retraced.timeline)?,
            SlotName::Budget => decisions::<Budget>(recording, &mut retraced.timeline)?,
            SlotName::Dispatch => {}
        }
    }
    if retraced.missing > 0 {
        say(&format!("note: {} decisions are missing from the recordings", retraced.missing));
    }
    Ok(chrome_json(&retraced.timeline))
}

fn decisions<K: SlotKind + Recordable>(recording: &Recording, timeline: &mut Timeline) -> anyhow::Result<()> {
    let mut rows = recording.rows::<K>()?;
    let mut row = Recorded::<K>::default();
    while rows.next_into(&mut row)? {
        timeline.decision(TimelineDecision {
            slot: K::NAME,
            begin_ms: K::now_ms(&row.facts),
            ms: None,
            policy: recording.header().policy.version.name.clone(),
            source: match row.outcome {
                Outcome::Decided => Source::Active,
                Outcome::LeftToDefault => Source::Default,
                Outcome::Faulted(_) | Outcome::NotAsked => Source::Fallback,
            },
            candidates: u32::try_from(row.candidates).unwrap_or(u32::MAX),
            fault: if let Outcome::Faulted(kind) = row.outcome { Some(kind) } else { None },
        });
    }
    Ok(())
}

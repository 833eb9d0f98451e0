use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args;
use meridian_core::{Budget, Dispatch, Eviction, Policy, PolicySource, SlotConfig, SlotName};
use meridian_engine::recording::{
    Difference, Header, Recordable, RecordedPolicy, Recording, ReplayOptions, ReplayReport, replay,
};
use meridian_engine::{Components, Origin, Terms};
use meridian_wasm::{GuestKind, MAX_COMPONENT_BYTES, read_regular, sha256_of};
use serde::Serialize;

use crate::progress::bar;
use crate::target::shown;
use crate::{Said, Unusable, print_json, print_line};

#[derive(Args)]
#[command(after_help = "\
Without --policy, the recorded policy decides again: a native policy, or the component at its recorded
path. That file must not have changed since.

Exit code: 0 every decision is identical, bit for bit; 1 a decision differs, or the replay gave the
policy up because it kept missing its deadline of 10 seconds; 2 the recordings or the policy cannot
be used.

Examples:
  meridian replay recordings/dispatch-*.arrow
  meridian replay recordings/dispatch-4711-*.arrow --policy native:output-first --show 3")]
pub(crate) struct ReplayArgs {
    /// Recordings to replay, all of one slot
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Decide with this policy: a component's path, or native:NAME
    #[arg(long, value_name = "PATH|oci://...|native:NAME")]
    policy: Option<String>,
    /// Pass these options to the policy, as one JSON object; by default, the recorded options
    #[arg(long, value_name = "JSON")]
    config: Option<String>,
    /// Replay at most this many decisions
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// Print at most this many differences one by one
    #[arg(long, value_name = "N", default_value_t = 5)]
    show: usize,
}

pub(crate) fn run(args: &ReplayArgs, json: bool) -> anyhow::Result<()> {
    let (policy, report) = decide(args).map_err(|error| error.context(Unusable))?;
    let holds = report.different == 0 && report.given_up.is_none();
    if json {
        print_json(&Replayed { ok: holds, policy, report: &report })?;
    } else {
        print_report(&policy, &report)?;
    }
    if holds { Ok(()) } else { Err(Said.into()) }
}

#[derive(Serialize)]
struct Replayed<'a> {
    ok: bool,
    policy: String,
    #[serde(flatten)]
    report: &'a ReplayReport,
}

fn decide(args: &ReplayArgs) -> anyhow::Result<(String, ReplayReport)> {
    if let Some(config) = &args.config {
        let parsed: serde_json::Value =
            serde_json::from_str(config).with_context(|| format!("--config: {config:?} is not JSON"))?;
        ensure!(parsed.is_object(), "--config: {config:?}: expected one JSON object");
    }
    ensure!(args.limit != Some(0), "--limit 0: expected at least 1");
    let mut recordings = args.files.iter().map(|file| Recording::open(file)).collect::<Result<Vec<_>, _>>()?;
    let slot = recordings[0].slot();
    sort_as_written(&mut recordings, Recording::header);
    match slot {
        SlotName::Dispatch => decide_in::<Dispatch>(args, &recordings),
        SlotName::Eviction => decide_in::<Eviction>(args, &recordings),
        SlotName::Budget => decide_in::<Budget>(args, &recordings),
    }
}

/// Sort recordings in the order of writing, whatever order the shell gave: run by run, and within a run by file number.
/// The file number decides because the clock may have been set back during a run.
pub(crate) fn sort_as_written<T>(recordings: &mut [T], header: impl Fn(&T) -> &Header) {
    let mut begun = HashMap::<String, u64>::new();
    for Header { run, opened_unix_ms, .. } in recordings.iter().map(&header) {
        let first = begun.entry(run.clone()).or_insert(*opened_unix_ms);
        *first = (*first).min(*opened_unix_ms);
    }
    recordings.sort_by_cached_key(|recording| {
        let Header { run, file, .. } = header(recording);
        (begun[run], run.clone(), *file)
    });
}

fn decide_in<K: GuestKind + Recordable>(
    args: &ReplayArgs,
    recordings: &[Recording],
) -> anyhow::Result<(String, ReplayReport)> {
    let recorded = &recordings[0].header().policy;
    if args.policy.is_none() {
        let other = recordings.iter().find(|recording| !is_same(&recording.header().policy, recorded));
        if let Some(other) = other {
            bail!(
                "{} and {} are of different policies: replay them one by one, or name one with --policy",
                recordings[0].file(),
                other.file()
            );
        }
    }
    let origin = chosen(args.policy.as_deref(), recorded)?;
    let options = args.config.as_ref().unwrap_or(&recorded.options);
    // A deadline is for the engine; a replay waits for any decision that ends.
    let (deadline_ms, memory_mib) = (recorded.deadline_ms, recorded.memory_mib);
    let slot = SlotConfig { deadline_ms, memory_mib, ..SlotConfig::dispatch() };
    let terms = Terms::unhurried(&slot, recorded.targets.into_targets());
    let named = if origin.component().is_some() { format!("{}: ", origin.source()) } else { String::new() };
    let mut start = || -> Result<Box<dyn Policy<K>>, String> {
        origin.policy(terms, options).map_err(|error| format!("{named}{error}"))
    };
    let all: u64 = recordings.iter().map(Recording::row_count).sum();
    let progress = bar(all.min(args.limit.unwrap_or(u64::MAX)), "{human_pos} of {human_len} decisions");
    let options = ReplayOptions { limit: args.limit.unwrap_or(u64::MAX), shown: args.show };
    let report = replay::<K>(recordings, options, &mut start, &mut |done| progress.set_position(done));
    progress.finish_and_clear();
    let report = report?;
    // Nothing that was compared is nothing that was shown.
    if report.decisions == 0 {
        let files = recordings.iter().map(Recording::file).collect::<Vec<_>>().join(", ");
        let why = report.cut.first().map_or_else(String::new, |cut| format!(": {cut}"));
        bail!("{files}: no decision that is whole, expected at least one{why}");
    }
    Ok((origin.source().to_owned(), report))
}

fn is_same(one: &RecordedPolicy, other: &RecordedPolicy) -> bool {
    let RecordedPolicy { version, options, targets, .. } = one;
    version.sha256 == other.version.sha256
        && version.name == other.version.name
        && *options == other.options
        && *targets == other.targets
}

/// The origin of the policy that decides in the replay.
fn chosen(asked: Option<&str>, recorded: &RecordedPolicy) -> anyhow::Result<Origin> {
    let version = &recorded.version;
    let source = asked.unwrap_or(&version.source);
    match PolicySource::of(source) {
        PolicySource::Native(name) => return Ok(Origin::native(name)),
        PolicySource::Registry(_) if asked.is_some() => return Ok(Components::default().open(source, Path::new(""))?),
        PolicySource::Registry(_) | PolicySource::File(_) => {}
    }
    let path = Path::new(source);
    let named = || {
        let name = shown(&version.name);
        format!("the recorded policy {name} came from {:?}: name its component with --policy", shown(source))
    };
    if asked.is_none() {
        ensure!(path.is_file(), "{}, which is no file here", named());
    }
    let at = || path.display().to_string();
    let bytes = read_regular(path, MAX_COMPONENT_BYTES).with_context(at)?;
    let bytes = bytes.with_context(|| format!("{}: is larger than 32 MiB, the most a component may have", at()))?;
    if asked.is_none() {
        // Before anything of it is parsed: a recording may name any file.
        let found = sha256_of(&bytes);
        ensure!(found == version.sha256, "{}: that file has another digest now, {found}", named());
    }
    Components::default().bytes(&bytes, None, source).with_context(at)
}

fn print_report(policy: &str, report: &ReplayReport) -> anyhow::Result<()> {
    let ReplayReport {
        decisions,
        candidates,
        identical,
        different,
        not_compared,
        gaps,
        recorded_faults,
        faults,
        first_fault,
        given_up,
        rank_correlation,
        top_overlap,
        differing_judgements,
        median_us,
        p99_us,
        differences,
        cut,
    } = report;
    let row = |name: &str, text: String| print_line(&format!("{name:<12} {text}"));
    row("policy", shown(policy))?;
    row("decisions", format!("{decisions} of {candidates} candidates in all"))?;
    row("identical", format!("{identical}, different {different}, not compared {not_compared}"))?;
    if let (Some(correlation), Some(overlap), true) = (rank_correlation, top_overlap, *different > 0) {
        let text = format!("correlation {correlation:.4}, first 8 overlap {overlap:.4}, other {differing_judgements}");
        row("agreement", text)?;
    }
    row("faults", format!("{recorded_faults} recorded, {faults} now"))?;
    if let Some(fault) = first_fault {
        row("first fault", shown(fault))?;
    }
    if let Some(why) = given_up {
        row("given up", shown(why))?;
    }
    row("time", format!("median {median_us:.2} us, p99 {p99_us:.2} us a decision"))?;
    if *gaps > 0 {
        row("gaps", format!("{gaps}: records are missing, so the policy's state may not be the recorded one"))?;
    }
    for why in cut {
        row("cut", shown(why))?;
    }
    for Difference { file, seq, recorded, replayed } in differences {
        let (file, recorded, replayed) = (shown(file), shown(recorded), shown(replayed));
        row("differs", format!("{file} decision {seq}: recorded {recorded}; now {replayed}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_in_the_order_of_their_runs_and_numbers() {
        let header = |run: &str, file, opened_unix_ms| Header {
            format: Header::FORMAT,
            slot: "dispatch".into(),
            run: run.into(),
            file,
            opened_unix_ms,
            meridian: String::new(),
            contract: String::new(),
            policy: RecordedPolicy::default(),
        };
        // The clock was set back within the run b, to before the run a.
        let mut headers =
            vec![header("a", 0, 60), header("b", 2, 50), header("b", 0, 100), header("a", 1, 70), header("b", 1, 110)];
        sort_as_written(&mut headers, |header| header);
        let order: Vec<_> = headers.iter().map(|header| (header.run.as_str(), header.file)).collect();
        assert_eq!(order, [("b", 0), ("b", 1), ("b", 2), ("a", 0), ("a", 1)]);
    }
}

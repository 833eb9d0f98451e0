use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::{Args, Subcommand};
use indicatif::ProgressBar;
use meridian_core::oci::OciReference;
use meridian_core::signature::signature_path;
use meridian_core::{PolicySource, SlotName};
use meridian_engine::control::Version;
use meridian_fleet::experiment::{
    Finding, MetricVerdict, Policies, Report, Settings, Side, Stage, State, Stop, Store, StoreError, Surroundings,
    restore, run as run_to_end,
};
use meridian_fleet::stats::{Metric, Ratio};
use meridian_fleet::{EngineClient, Member, NamedPolicy, PolicyOrigin, PredictedRatio, Prediction};
use meridian_wasm::{MAX_COMPONENT_BYTES, read_regular, read_signature, sha256_of};
use serde_json::{Map, Value, json};

use crate::ctl::slot_parser;
use crate::progress::bar;
use crate::target::{Target, shown};
use crate::{Said, Unusable, print_json, print_line, say};

/// Default folder of an experiment.
const FOLDER: &str = "meridian-experiment";
/// How long `stop` waits for the controller: it may be loading a component.
const STOPPING: Duration = Duration::from_secs(240);
/// How long the controller sleeps without looking whether it is to stop.
const SLICE: Duration = Duration::from_millis(200);

#[derive(Subcommand)]
pub(crate) enum ExperimentCommand {
    /// Let two policies take turns on one engine, and measure the difference
    #[command(after_help = "\
The active policy and POLICY take turns, in pairs of intervals. --seed draws which one is first. The warm-up of
each interval is not measured: the queues and the requests of the other policy are still there. The command
runs until every pair is measured, and puts the old policy back. `meridian experiment stop` does so at once. So do
Ctrl-C and SIGTERM, after which `resume` goes on. After kill -9 of this command, `resume` goes on and `stop` puts
the old policy back.

The verdict is about the metrics of --metric. Other metrics are in the report for information.

Exit code: 0 every pair is measured, 1 it ended early or the old policy could not be put back, 2 bad input.

Examples:
  meridian experiment start mine.wasm --metric output_itl_p99 --pairs 30
  meridian experiment start native:srpt --pid 4711 --interval 5m --warm-up 1m --metric ttfo_mean --detect 10%")]
    Start(Box<StartArgs>),
    /// Go on with an experiment whose controller has died
    #[command(after_help = "Example:\n  meridian experiment resume --token-file engine.token")]
    Resume(ResumeArgs),
    /// Show how far an experiment is
    #[command(after_help = "Example:\n  meridian experiment status --folder srpt")]
    Status(FolderArgs),
    /// Show every metric with its interval
    #[command(after_help = "\
Exit code: 0 the verdict is better or same, 1 it is worse, unclear or interim.

Example:
  meridian experiment report --predicted predicted.json")]
    Report(ReportArgs),
    /// End an experiment, and put the old policy back
    #[command(after_help = "Example:\n  meridian experiment stop")]
    Stop(ResumeArgs),
}

#[derive(Args)]
pub(crate) struct FolderArgs {
    /// Keep the state of the experiment in this folder
    #[arg(long, value_name = "DIR", default_value = FOLDER)]
    folder: PathBuf,
}

#[derive(Args)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    folder: FolderArgs,
    #[command(flatten)]
    target: Target,
}

#[derive(Args)]
pub(crate) struct ReportArgs {
    #[command(flatten)]
    folder: FolderArgs,
    /// Show this prediction beside the outcome
    #[arg(long, value_name = "FILE.json")]
    predicted: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct StartArgs {
    /// Try this policy: path of a component, oci://HOST/NAME@sha256:DIGEST or native:NAME
    #[arg(value_name = "POLICY")]
    policy: String,
    /// Pass these options to the policy, as one JSON object
    #[arg(long, value_name = "JSON")]
    config: Option<String>,
    /// Load the old policy from this component at the end, where its recorded path is on another machine
    #[arg(long, value_name = "FILE")]
    old: Option<PathBuf>,
    /// Change the policy of this slot
    #[arg(long, value_parser = slot_parser(), default_value = "dispatch")]
    slot: SlotName,
    /// Decide on this metric; may be given several times
    #[arg(long = "metric", value_name = "METRIC", default_value = "output_itl_mean")]
    metrics: Vec<Metric>,
    /// Let one policy decide for this long at a time: 90s, 2m, 1h
    #[arg(long, value_name = "TIME", value_parser = seconds, default_value = "2m")]
    interval: f64,
    /// Do not measure the first part of each interval
    #[arg(long, value_name = "TIME", value_parser = seconds, default_value = "30s")]
    warm_up: f64,
    /// Measure this many pairs of intervals
    #[arg(long, value_name = "N", default_value_t = Settings::default().pairs)]
    pairs: u32,
    /// Name the smallest difference of interest
    #[arg(long, value_name = "PERCENT", value_parser = percent, default_value = "5%")]
    detect: f64,
    /// Stop when a metric is certainly worse by more than this factor
    #[arg(long, value_name = "FACTOR", value_parser = factor, default_value = "1.5x")]
    stop_above: f64,
    /// Draw the order of the policies with this seed
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    folder: FolderArgs,
    #[command(flatten)]
    target: Target,
}

pub(crate) fn run(command: &ExperimentCommand, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    match command {
        ExperimentCommand::Start(args) => {
            let (store, mut state, engine, policies) = begin(args).map_err(unusable)?;
            control(&store, &mut state, &engine, &policies, json)
        }
        ExperimentCommand::Resume(args) => {
            let (store, mut state, policies) = taken(&args.folder.folder).map_err(unusable)?;
            let engine = engine_of(&args.target, &state)?;
            control(&store, &mut state, &engine, &policies, json)
        }
        ExperimentCommand::Status(args) => status(&args.folder, json),
        ExperimentCommand::Report(args) => report(args, json),
        ExperimentCommand::Stop(args) => stop(args, json),
    }
}

/// A time in seconds.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    let units = [("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let found =
        units.iter().find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?.trim().parse::<f64>().ok()?, seconds)));
    match found {
        Some((number, seconds)) if number.is_finite() && number >= 0.0 => Ok(number * seconds),
        _ => Err(format!("{text}: expected a time, as in 90s, 2m or 1h")),
    }
}

/// A share.
fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
    number.map(|number| number / 100.0).ok_or_else(|| format!("{text}: expected a percentage, as in 5%"))
}

fn factor(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('x').and_then(|number| number.trim().parse().ok());
    number.ok_or_else(|| format!("{text}: expected a factor, as in 1.5x"))
}

/// The store, the first state, the engine and both policies.
fn begin(args: &StartArgs) -> anyhow::Result<(Store, State, EngineClient, Policies)> {
    let settings = Settings {
        slot: args.slot,
        interval_s: args.interval,
        warm_up_s: args.warm_up,
        pairs: args.pairs,
        seed: args.seed,
        metrics: args.metrics.clone(),
        detect: args.detect,
        stop_above: args.stop_above,
    };
    settings.checked()?;
    let new = policy(&args.policy, args.config.as_deref())?;
    let folder = &args.folder.folder;
    let store = Store::take(folder)?;
    let before = store.load()?;
    if let Some(state) = before.as_ref().filter(|state| state.new.is_some()) {
        let is_over = state.stage != Stage::Running && state.restored;
        let shown = folder.display();
        ensure!(
            is_over,
            "--folder {shown}: has an experiment that is not over: go on with it (resume) or end it (stop)"
        );
        // Its measurements took hours.
        bail!("--folder {shown}: has an experiment that is over, expected another folder");
    }
    let engine = args.target.one()?;
    let status = engine.status()?;
    let slot = status.slots.into_iter().find(|slot| slot.slot == args.slot);
    let active = slot.with_context(|| format!("--slot {}: the engine has no such slot", args.slot.label()))?.active;
    let old = old_policy(&active, args.old.as_deref())?;
    let mut state = State::new(settings, engine.address(), active);
    // Of one that did not come to its first pair, there may be a shadow.
    state.begun = before.is_some_and(|before| before.begun && before.engine == state.engine);
    let policies = Policies { old, new };
    store.save_policies(&policies)?;
    Ok((store, state, engine, policies))
}

/// The folder of an experiment that nobody runs.
fn taken(folder: &Path) -> anyhow::Result<(Store, State, Policies)> {
    ensure!(folder.is_dir(), "--folder {}: no such folder, expected that of an experiment", folder.display());
    let store = Store::take(folder)?;
    let state =
        store.load()?.with_context(|| format!("--folder {}: no experiment has begun there", folder.display()))?;
    let policies = store.load_policies()?;
    Ok((store, state, policies))
}

/// The engine of an experiment.
fn engine_of(target: &Target, state: &State) -> anyhow::Result<EngineClient> {
    let engine = if target.is_given() { target.one()? } else { target.known_at(&state.engine)? };
    ensure!(
        engine.address() == state.engine,
        "{}: is not the engine of the experiment, which is {}",
        shown(engine.address()),
        shown(&state.engine)
    );
    Ok(engine)
}

/// A policy that the command line names.
pub(crate) fn policy(source: &str, config: Option<&str>) -> anyhow::Result<NamedPolicy> {
    let options = config.map(|config| -> anyhow::Result<String> {
        let options: Map<String, Value> = serde_json::from_str(config).context("--config: must be one JSON object")?;
        Ok(Value::from(options).to_string())
    });
    let options = options.transpose()?;
    let origin = match PolicySource::of(source) {
        PolicySource::File(path) => component(Path::new(path))?.0,
        PolicySource::Native(_) => PolicyOrigin::Named(source.to_owned()),
        PolicySource::Registry(reference) => {
            OciReference::pinned(reference)?;
            PolicyOrigin::Named(source.to_owned())
        }
    };
    Ok(NamedPolicy { source: origin, options })
}

/// A component with its signature, and its digest.
fn component(path: &Path) -> anyhow::Result<(PolicyOrigin, String)> {
    let failed = || format!("{}: cannot be read", path.display());
    let bytes = read_regular(path, MAX_COMPONENT_BYTES).with_context(failed)?;
    let bytes =
        bytes.with_context(|| format!("{}: is larger than 32 MiB, the most a component may have", path.display()))?;
    let signature = read_signature(&signature_path(path)).with_context(failed)?;
    let digest = sha256_of(&bytes);
    Ok((PolicyOrigin::Component { bytes: bytes.into(), signature }, digest))
}

/// The policy that decides now, as it can be loaded again.
fn old_policy(active: &Version, file: Option<&Path>) -> anyhow::Result<NamedPolicy> {
    let options = (!active.options.is_empty()).then(|| active.options.clone());
    let source = &active.source;
    if !PolicySource::of(source).is_file() && file.is_none() {
        return Ok(NamedPolicy { source: PolicyOrigin::Named(source.clone()), options });
    }
    let path = file.unwrap_or(Path::new(source));
    let named = || format!("{} decides, and came from {:?}", shown(&active.name), shown(source));
    ensure!(path.is_file(), "{}, which is no file here: name its component with --old", named());
    let (component, digest) = component(path)?;
    ensure!(
        digest == active.sha256,
        "{}: {} has another digest, {digest}: name its component with --old",
        named(),
        path.display()
    );
    Ok(NamedPolicy { source: component, options })
}

/// Time, and the folder.
struct Here<'a> {
    store: &'a Store,
    interrupted: Arc<AtomicBool>,
    progress: ProgressBar,
}

impl Surroundings for Here<'_> {
    fn wait(&mut self, seconds: f64) {
        let until = Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 3600.0));
        loop {
            std::thread::sleep(until.saturating_duration_since(Instant::now()).min(SLICE));
            if Instant::now() >= until || self.stop_requested().is_some() {
                return;
            }
        }
    }

    fn save(&mut self, state: &State) -> Result<(), StoreError> {
        self.store.save(state)
    }

    fn stop_requested(&mut self) -> Option<Stop> {
        let is_ending = || self.interrupted.load(Ordering::Relaxed).then_some(Stop::Controller);
        self.store.stop_requested().then_some(Stop::Experiment).or_else(is_ending)
    }

    fn progress(&mut self, state: &State, side: Side, what: &str) {
        let version = match side {
            Side::Old => Some(&state.old),
            Side::New => state.new.as_ref(),
        };
        let name = version.map_or_else(|| "the new policy".to_owned(), |version| shown(&version.name));
        self.progress.set_position(state.measured().len() as u64);
        self.progress.set_message(format!("{name} {what}"));
    }
}

/// Run the experiment to its end, and print the report.
fn control(
    store: &Store,
    state: &mut State,
    engine: &EngineClient,
    policies: &Policies,
    json: bool,
) -> anyhow::Result<()> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).context("no signals can be handled")?;
    }
    store.clear_stop();
    let total_s = state.settings.total_s();
    say(&format!("{} pairs of intervals take {}", state.settings.pairs, time(total_s)));
    let progress = bar(state.settings.pairs.into(), "{msg:36} {pos} of {len} pairs");
    let mut here = Here { store, interrupted, progress: progress.clone() };
    let done = run_to_end(state, engine, policies, &mut here);
    progress.finish_and_clear();
    store.clear_stop();
    done?;
    if state.stage == Stage::Running {
        let (old, pairs) = (shown(&state.old.name), state.measured().len());
        bail!(
            "interrupted after {pairs} pairs: {old} decides again; go on with `meridian experiment resume`, or end it (stop)"
        );
    }
    let report = Report::of(state);
    if json {
        print_json(&report)?;
    } else {
        print_report(&report, None)?;
    }
    if report.is_final() { Ok(()) } else { Err(Said.into()) }
}

fn found(folder: &Path) -> anyhow::Result<State> {
    let state = Store::peek(folder)?;
    state.with_context(|| format!("--folder {}: no experiment has begun there", folder.display()))
}

fn status(folder: &Path, json: bool) -> anyhow::Result<()> {
    let state = found(folder).map_err(|error| error.context(Unusable))?;
    let is_led = matches!(Store::take(folder), Err(StoreError::Busy { .. }));
    let report = Report::of(&state);
    if json {
        let mut object = serde_json::to_value(&report)?;
        object["is_led"] = is_led.into();
        return print_json(&object);
    }
    print_head(&report)?;
    if state.stage == Stage::Running && !is_led {
        print_line("nobody leads it: go on with it (resume), or put the old policy back (stop)")?;
    }
    for finding in report.findings.iter().filter(|finding| finding.decides) {
        print_finding(finding, &report, None)?;
    }
    Ok(())
}

fn report(args: &ReportArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let state = found(&args.folder.folder).map_err(unusable)?;
    let predicted = args.predicted.as_deref().map(Prediction::read).transpose();
    let predicted = predicted.map_err(|error| unusable(error.into()))?;
    let report = Report::of(&state);
    if let (Some(Prediction { slot, new, .. }), Some(tried)) = (&predicted, &report.new) {
        ensure!(
            *slot == report.settings.slot,
            "--predicted: slot: {}: expected {}",
            slot.label(),
            report.settings.slot.label()
        );
        if (&new.name, &new.sha256) != (&tried.name, &tried.sha256) {
            say(&format!("note: the prediction is for {} {}, not for {}", new.name, new.version, tried.name));
        }
    }
    if json {
        print_json(&json!({ "report": report, "predicted": predicted }))?;
    } else {
        print_report(&report, predicted.as_ref())?;
    }
    let is_good =
        |finding: &Finding| !finding.decides || matches!(finding.verdict, MetricVerdict::Better | MetricVerdict::Same);
    if report.is_final() && report.findings.iter().all(is_good) { Ok(()) } else { Err(Said.into()) }
}

fn stop(args: &ResumeArgs, json: bool) -> anyhow::Result<()> {
    let folder = &args.folder.folder;
    found(folder).map_err(|error| error.context(Unusable))?;
    let begun = Instant::now();
    let mut store = Store::take(folder);
    if let Err(StoreError::Busy { .. }) = store {
        Store::request_stop(folder)?;
        let progress = bar(0, "the controller stops");
        while matches!(store, Err(StoreError::Busy { .. })) && begun.elapsed() < STOPPING {
            std::thread::sleep(Duration::from_millis(200));
            store = Store::take(folder);
        }
        progress.finish_and_clear();
    }
    let store = store?;
    store.clear_stop();
    let mut state = found(folder)?;
    if state.stage == Stage::Running {
        state.stage = Stage::Ended { why: "stopped".into(), complete: false };
        store.save(&state)?;
    }
    if !state.restored {
        let policies = store.load_policies()?;
        let engine = engine_of(&args.target, &state)?;
        // An engine that does not answer is not waited for.
        let interrupted = Arc::new(AtomicBool::new(true));
        let mut here = Here { store: &store, interrupted, progress: bar(0, "{msg}") };
        restore(&mut state, &engine, &policies, &mut here)?;
        here.progress.finish_and_clear();
    }
    let report = Report::of(&state);
    if json { print_json(&report) } else { print_report(&report, None) }
}

/// A time for people.
pub(crate) fn time(seconds: f64) -> String {
    let minutes = (seconds / 60.0).round();
    if seconds < 90.0 {
        format!("{seconds:.0} s")
    } else if minutes < 90.0 {
        format!("{minutes:.0} min")
    } else {
        format!("{:.1} h", seconds / 3600.0)
    }
}

fn print_head(report: &Report) -> anyhow::Result<()> {
    let Report { engine, settings, old, new, stage, restored, pairs, void, cut, .. } = report;
    let new = new.as_ref().map_or_else(|| "a new policy".to_owned(), |new| format!("{} {}", new.name, new.version));
    print_line(&format!("engine   {engine}, slot {}", settings.slot.label()))?;
    print_line(&format!("old      {} {}", old.name, old.version))?;
    print_line(&format!("new      {new}"))?;
    print_line(&format!(
        "pairs    {pairs} of {} measured, {void} do not count; {:.0} % of the time is cut off as warm-up",
        settings.pairs,
        100.0 * cut
    ))?;
    let state = match stage {
        Stage::Running => "under way".to_owned(),
        Stage::Ended { why, .. } => format!("ended: {why}"),
    };
    let restored = match (stage, restored) {
        (Stage::Running, _) => "",
        (_, true) => "; the old policy decides",
        (_, false) => "; the old policy does NOT decide yet: run `meridian experiment stop`",
    };
    print_line(&format!("state    {state}{restored}"))?;
    Ok(())
}

fn print_report(report: &Report, predicted: Option<&Prediction>) -> anyhow::Result<()> {
    print_head(report)?;
    let column = if predicted.is_some() { format!("  {:>24}", "predicted") } else { String::new() };
    print_line(&format!(
        "\n{:20} {:>10} {:>10} {:>8} {:>17}{column}  verdict",
        "metric", "old", "new", "new/old", "interval"
    ))?;
    report.findings.iter().try_for_each(|finding| print_finding(finding, report, predicted))?;
    if !report.is_final() {
        print_line("The verdicts are interim: they count once every pair is measured.")?;
    }
    report.notes.iter().try_for_each(|note| print_line(&format!("note: {note}")))?;
    Ok(())
}

fn print_finding(finding: &Finding, report: &Report, predicted: Option<&Prediction>) -> anyhow::Result<()> {
    let Finding { metric, decides, ratio, verdict, carry_over } = finding;
    let name = metric.to_string();
    let beside = predicted.map(|prediction| match prediction.metrics.get(&name) {
        Some(PredictedRatio { ratio, low, high }) => format!("{ratio:.3} ({low:.3} to {high:.3})"),
        None => "-".to_owned(),
    });
    let beside = beside.map_or_else(String::new, |text| format!("  {text:>24}"));
    let numbers = match ratio {
        Some(Ratio { ratio, low, high, old, new, .. }) => {
            let interval = format!("{low:.3} to {high:.3}");
            format!("{old:>10.2} {new:>10.2} {ratio:>8.3} {interval:>17}")
        }
        None => format!("{:>10} {:>10} {:>8} {:>17}", "-", "-", "-", "-"),
    };
    let verdict = match verdict {
        _ if !decides => "for information".to_owned(),
        MetricVerdict::Better => "better".to_owned(),
        MetricVerdict::Worse => "worse".to_owned(),
        MetricVerdict::Same => format!("no difference of {:.3} % or more", 100.0 * report.settings.detect),
        MetricVerdict::Unclear { more_s: Some(more_s) } => {
            format!("unclear: {} more to tell a difference of {:.3} %", time(*more_s), 100.0 * report.settings.detect)
        }
        MetricVerdict::Unclear { more_s: None } => "unclear".to_owned(),
    };
    let mixed = if *carry_over >= 0.01 { format!(" ({:.0} % mixed)", 100.0 * carry_over) } else { String::new() };
    print_line(&format!("{name:20} {numbers}{beside}  {verdict}{mixed}"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_shares_are_read() {
        assert_eq!((seconds("90s"), seconds("2m"), seconds("1.5h")), (Ok(90.0), Ok(120.0), Ok(5400.0)));
        assert_eq!(seconds("2"), Err("2: expected a time, as in 90s, 2m or 1h".into()));
        assert_eq!(seconds("-2s"), Err("-2s: expected a time, as in 90s, 2m or 1h".into()));
        assert_eq!((percent("5%"), factor("1.5x")), (Ok(0.05), Ok(1.5)));
        assert!(percent("5").is_err() && factor("1.5").is_err());
    }

    #[test]
    fn times_are_shown_for_people() {
        assert_eq!([time(45.0), time(600.0), time(9000.0)], ["45 s", "10 min", "2.5 h"]);
    }
}

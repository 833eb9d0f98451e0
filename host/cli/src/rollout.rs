//! `meridian rollout`: a policy reaches a fleet in steps, and goes back by itself.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use clap::{Args, Parser, Subcommand};
use meridian_core::SlotName;
use meridian_fleet::rollout::{
    Clock, Finding, Guard, GuardVerdict, Measured, NewPolicy, Outcome, Phase, Role, Rollout, RolloutError,
    RolloutSettings, RolloutState, Roster, Start, Store, StoreError, Wish, read, wish,
};
use meridian_fleet::stats::Metric;
use meridian_fleet::{Member, NamedPolicy, PolicyOrigin, PredictedRatio, Prediction};
use meridian_wasm::sha256_of;
use serde_json::json;

use crate::ctl::slot_parser;
use crate::experiment::{policy, seconds, time};
use crate::progress::bar;
use crate::target::{Target, shown};
use crate::{Said, Unusable, print_json, print_line, say};

/// Default folder of a roll-out.
const FOLDER: &str = "meridian-rollout";
/// How long `abort` waits for the process that leads to begin.
const ABORTING: Duration = Duration::from_secs(10);
/// Rounds of going back after which `abort` names the engines that are left, and waits no longer.
const ROUNDS: u32 = 4;
/// How long the process that leads sleeps without looking for a wish.
const SLICE_S: f64 = 0.1;
/// Events that `status` shows.
const SHOWN_EVENTS: usize = 10;

#[derive(Subcommand)]
pub(crate) enum RolloutCommand {
    /// Bring a policy to every engine in steps; any guard, fault or quarantine sends all engines back
    #[command(after_help = "\
The policy runs in shadow first. Then it decides on a share of the engines, step by step. Each step lasts --hold.
Guards compare these engines with those that have the old policy over the same minutes; the time in shadow says
how much the engines differ by themselves. A twentieth of the engines, at least one, keeps the old policy until the
last step has passed. The command leads the roll-out until it is over. If it is killed, the engines stay as they are:
`resume` goes on, `abort` returns to the old policy.

Exit code: 0 every engine has the new policy, 1 it has gone back, 2 bad input.

Examples:
  meridian rollout start mine.wasm --to 10%,50%,100% --guard 'output_itl_p99<=1.05x' --hold 5m
  meridian rollout start native:srpt --fleet fleet.toml --guard 'ttft_p90<=1.1x' --guard 'token_rate>=0.95x'")]
    Start(Box<StartArgs>),
    /// Show how far a roll-out is, its guards and its engines
    #[command(after_help = "Example:\n  meridian rollout status --predicted predicted.json")]
    Status(StatusArgs),
    /// Begin no further step; guards and faults still count
    #[command(after_help = "Example:\n  meridian rollout pause")]
    Pause(FolderArgs),
    /// Go on after a pause, or lead a roll-out whose process has died
    #[command(after_help = "Example:\n  meridian rollout resume --fleet fleet.toml")]
    Resume(ResumeArgs),
    /// Return every engine to the old policy
    #[command(after_help = "Example:\n  meridian rollout abort")]
    Abort(ResumeArgs),
}

#[derive(Args)]
pub(crate) struct FolderArgs {
    /// Keep the state of the roll-out in this folder
    #[arg(long, value_name = "DIR", default_value = FOLDER)]
    folder: PathBuf,
}

#[derive(Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    folder: FolderArgs,
    /// Show this prediction beside what was measured
    #[arg(long, value_name = "FILE.json")]
    predicted: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    folder: FolderArgs,
    #[command(flatten)]
    target: Target,
}

#[derive(Args)]
pub(crate) struct StartArgs {
    /// Roll out this policy: path of a component, oci://HOST/NAME@sha256:DIGEST or native:NAME
    #[arg(value_name = "POLICY")]
    policy: String,
    /// Pass these options to the policy, as one JSON object
    #[arg(long, value_name = "JSON")]
    config: Option<String>,
    /// Change the policy of this slot
    #[arg(long, value_parser = slot_parser(), default_value = "dispatch")]
    slot: SlotName,
    /// Let the policy decide on these shares of the engines, one after the other
    #[arg(long, value_name = "SHARES", default_value = "10%,50%,100%")]
    to: String,
    /// Go back when a metric is beyond this multiple of the old policy's; may be given several times
    #[arg(long = "guard", value_name = "GUARD", default_value = "output_itl_p99<=1.1x")]
    guards: Vec<Guard>,
    /// Observe each step for this long: 90s, 5m, 1h
    #[arg(long, value_name = "TIME", value_parser = seconds, default_value = "5m")]
    hold: f64,
    /// Look at the engines this often; by default, a tenth of --hold, at most a minute
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    interval: Option<f64>,
    /// Do not measure this long after each change; by default, half of --interval
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    settle: Option<f64>,
    /// Allow this probability of going back without a reason
    #[arg(long, value_name = "P", default_value_t = 0.01)]
    false_alarm: f64,
    /// Choose the engines of each step with this seed
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// Measure what this prediction predicts, and show both
    #[arg(long, value_name = "FILE.json")]
    predicted: Option<PathBuf>,
    #[command(flatten)]
    folder: FolderArgs,
    #[command(flatten)]
    target: Target,
}

pub(crate) fn run(command: &RolloutCommand, json: bool) -> anyhow::Result<()> {
    match command {
        RolloutCommand::Start(args) => start(args, json),
        RolloutCommand::Status(args) => status(args, json),
        RolloutCommand::Pause(args) => {
            let state = found(&args.folder)?;
            ensure!(state.outcome().is_none(), "{}: the roll-out is over", args.folder.display());
            ensure!(
                is_led(&args.folder),
                "no process leads the roll-out, so that no step begins: lead it (resume) or abort"
            );
            wish(&args.folder, Wish::Pause)?;
            say("no further step begins; guards and faults still count");
            Ok(())
        }
        RolloutCommand::Resume(args) => resume(args, json),
        RolloutCommand::Abort(args) => abort(args, json),
    }
}

/// The engines of the command line, looked up anew at each look.
struct Engines<'a>(&'a Target);

impl Roster for Engines<'_> {
    fn members(&self) -> Result<Vec<Arc<dyn Member>>, String> {
        let fleet = self.0.all().map_err(|error| format!("{error:#}"))?;
        Ok(fleet.engines.into_iter().map(|engine| Arc::new(engine) as Arc<dyn Member>).collect())
    }
}

struct Now;

impl Clock for Now {
    fn now_s(&self) -> f64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
    }

    fn wait(&self, seconds: f64) -> f64 {
        let begun = Instant::now();
        std::thread::sleep(Duration::from_secs_f64(seconds.clamp(0.0, SLICE_S)));
        begun.elapsed().as_secs_f64()
    }
}

/// The words of the command line that find the fleet, read again.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct Words {
    #[command(flatten)]
    target: Target,
}

fn start(args: &StartArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let mut settings = RolloutSettings::new(args.slot, &args.to, args.hold).map_err(|error| unusable(error.into()))?;
    settings.guards.clone_from(&args.guards);
    if let Some(interval_s) = args.interval {
        (settings.interval_s, settings.settle_s) = (interval_s, interval_s / 2.0);
    }
    settings.settle_s = args.settle.unwrap_or(settings.settle_s);
    (settings.false_alarm, settings.seed) = (args.false_alarm, args.seed);
    let predicted = args.predicted.as_deref().map(Prediction::read).transpose();
    let predicted = predicted.map_err(|error| unusable(error.into()))?;
    if let Some(predicted) = &predicted {
        settings.also = predicted.metrics.keys().filter_map(|name| name.parse::<Metric>().ok()).collect();
    }
    settings.validate().map_err(|error| unusable(error.into()))?;
    let NamedPolicy { source, options } = policy(&args.policy, args.config.as_deref()).map_err(unusable)?;
    let (policy, component) = match source {
        PolicyOrigin::Named(source) => (NewPolicy { source, options, ..NewPolicy::default() }, None),
        PolicyOrigin::Component { bytes, signature } => {
            let (source, sha256) = (args.policy.clone(), sha256_of(&bytes));
            (NewPolicy { source, sha256, signature, options }, Some(bytes))
        }
    };
    let store = Store::lock(&args.folder.folder).map_err(|error| unusable(error.into()))?;
    let roster = Engines(&args.target);
    let mut told = teller(json);
    let start = Start {
        settings,
        policy,
        component,
        fleet: args.target.words()?,
        predicted: predicted.map(serde_json::to_value).transpose()?,
        roster: &roster,
        clock: &Now,
        told: &mut told,
    };
    let rollout = Rollout::begin(store, start).map_err(|error| match error {
        RolloutError::Store(StoreError::NotOver(_)) | RolloutError::Setting(_) => unusable(error.into()),
        error => error.into(),
    })?;
    lead(rollout, json)
}

/// Prints what happens.
fn teller(json: bool) -> impl FnMut(&RolloutState) {
    let mut told = 0;
    move |state| {
        // By their number: a clock may be set back.
        let new = usize::try_from(state.noted.saturating_sub(told)).unwrap_or(usize::MAX).min(state.events.len());
        if !json {
            for event in &state.events[state.events.len() - new..] {
                say(&format!("{}  {}", clock_text(event.at_s), event.what));
            }
        }
        told = state.noted;
    }
}

/// The time of day, UTC.
fn clock_text(at_s: f64) -> String {
    let second = (at_s.max(0.0) as u64) % 86_400;
    format!("{:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60)
}

fn lead(mut rollout: Rollout<'_>, json: bool) -> anyhow::Result<()> {
    let outcome = rollout.run()?;
    let state = rollout.state();
    if json {
        print_json(&view(state, None, true))?;
    } else {
        print_state(state, None, true)?;
    }
    let is_whole = state.left_behind().next().is_none();
    if outcome == Outcome::Completed && is_whole { Ok(()) } else { Err(Said.into()) }
}

fn found(folder: &Path) -> anyhow::Result<RolloutState> {
    read(folder).map_err(|error| anyhow::Error::from(error).context(Unusable))
}

/// Whether a process leads the roll-out of this folder.
fn is_led(folder: &Path) -> bool {
    matches!(Store::lock(folder), Err(StoreError::Led(_)))
}

/// The engines of the command line, else those that the roll-out began with.
fn target_of<'a>(given: &'a Target, state: &RolloutState, kept: &'a mut Option<Words>) -> anyhow::Result<&'a Target> {
    if given.is_given() || state.fleet.is_empty() {
        return Ok(given);
    }
    let words = Words::try_parse_from(&state.fleet).context("the state has options that this version does not know")?;
    Ok(&kept.insert(words).target)
}

fn resume(args: &ResumeArgs, json: bool) -> anyhow::Result<()> {
    let folder = &args.folder.folder;
    let state = found(folder)?;
    ensure!(state.outcome().is_none(), "{}: the roll-out is over", folder.display());
    let store = match Store::lock(folder) {
        Err(StoreError::Led(_)) => {
            wish(folder, Wish::Resume)?;
            say("the process that leads the roll-out goes on");
            return Ok(());
        }
        store => store?,
    };
    let mut kept = None;
    let roster = Engines(target_of(&args.target, &state, &mut kept)?);
    let mut told = teller(json);
    let mut rollout = Rollout::reopen(store, &roster, &Now, &mut told)?;
    rollout.resume();
    lead(rollout, json)
}

fn abort(args: &ResumeArgs, json: bool) -> anyhow::Result<()> {
    let folder = &args.folder.folder;
    let state = found(folder)?;
    let is_over = |state: &RolloutState| match state.outcome() {
        Some(outcome) => *outcome == Outcome::Completed || state.left_behind().next().is_none(),
        None => false,
    };
    ensure!(!is_over(&state), "{}: the roll-out is over", folder.display());
    let mut store = Store::lock(folder);
    if let Err(StoreError::Led(_)) = store {
        wish(folder, Wish::Abort)?;
        let begun = Instant::now();
        let progress = bar(0, "the engines return to the old policy");
        while matches!(store, Err(StoreError::Led(_))) && begun.elapsed() < ABORTING {
            std::thread::sleep(Duration::from_millis(100));
            store = Store::lock(folder);
            let state = found(folder)?;
            if matches!(state.phase, Phase::Back { .. }) && state.intervals >= ROUNDS {
                progress.finish_and_clear();
                say("the process that leads goes on with the engines that are left");
                return shown_in_the_end(&state, json);
            }
        }
        progress.finish_and_clear();
    }
    let store = store?;
    let state = found(folder)?;
    if is_over(&state) {
        return shown_in_the_end(&state, json);
    }
    let mut kept = None;
    let roster = Engines(target_of(&args.target, &state, &mut kept)?);
    let mut told = teller(json);
    let mut rollout = Rollout::reopen(store, &roster, &Now, &mut told)?;
    rollout.abort();
    rollout.run()?;
    shown_in_the_end(rollout.state(), json)
}

/// The state after an abort, which holds if every engine has the old policy.
fn shown_in_the_end(state: &RolloutState, json: bool) -> anyhow::Result<()> {
    if json {
        print_json(&view(state, None, false))?;
    } else {
        print_state(state, None, false)?;
    }
    let is_back = state.outcome() != Some(&Outcome::Completed) && state.left_behind().next().is_none();
    if is_back { Ok(()) } else { Err(Said.into()) }
}

fn status(args: &StatusArgs, json: bool) -> anyhow::Result<()> {
    let folder = &args.folder.folder;
    let state = found(folder)?;
    let predicted = args.predicted.as_deref().map(Prediction::read).transpose();
    let predicted = predicted.map_err(|error| anyhow::Error::from(error).context(Unusable))?;
    if json {
        print_json(&view(&state, predicted, is_led(folder)))
    } else {
        print_state(&state, predicted, is_led(folder))
    }
}

/// The prediction of the command line, else that of the start.
fn prediction(state: &RolloutState, given: Option<Prediction>) -> Option<Prediction> {
    given.or_else(|| serde_json::from_value(state.predicted.clone()?).ok())
}

fn view(state: &RolloutState, predicted: Option<Prediction>, is_led: bool) -> serde_json::Value {
    let predicted = prediction(state, predicted);
    let side_by_side: Vec<_> = predicted
        .iter()
        .flat_map(|predicted| &predicted.metrics)
        .map(|(metric, predicted)| {
            let measured = state.findings.iter().find(|finding| finding.metric.to_string() == *metric);
            json!({ "metric": metric, "predicted": predicted, "measured": measured.and_then(|of| of.measured) })
        })
        .collect();
    let mut object = json!(state);
    object["is_led"] = is_led.into();
    object["side_by_side"] = side_by_side.into();
    object
}

fn print_state(state: &RolloutState, predicted: Option<Prediction>, is_led: bool) -> anyhow::Result<()> {
    let RolloutState { settings, policy, old, .. } = state;
    let share = |share: &f64| format!("{}%", (share * 1e4).round() / 1e2);
    let steps: Vec<String> = settings.steps.iter().map(share).collect();
    print_line(&format!(
        "policy   {}, slot {}, in place of {} {}",
        shown(&policy.source),
        settings.slot.label(),
        shown(&old.name),
        shown(&old.version)
    ))?;
    let planned = settings.intervals();
    let under_way = match &state.phase {
        Phase::Shadow => format!("in shadow, interval {} of {planned}", state.intervals),
        Phase::Step { number } => {
            let share = steps.get(*number).map_or("", String::as_str);
            format!("step {share} ({} of {}), interval {} of {planned}", number + 1, steps.len(), state.intervals)
        }
        Phase::Finish => "the last engines follow".into(),
        Phase::Back { .. } => "the engines return to the old policy".into(),
        Phase::Over { outcome: Outcome::Completed } => "completed".into(),
        Phase::Over { outcome: Outcome::RolledBack { why } } => format!("gone back: {}", shown(why)),
        Phase::Over { outcome: Outcome::Aborted } => "aborted: the old policy decides".into(),
    };
    print_line(&format!("state    {under_way}"))?;
    if let Some(why) = &state.paused {
        print_line(&format!("paused   {}", shown(why)))?;
    }
    let count = |role| state.taking_part().filter(|(_, record)| record.role == role).count();
    let all = state.taking_part().count();
    print_line(&format!(
        "engines  {all}: {} with the new policy, {} with the old one",
        count(Role::New),
        all - count(Role::New)
    ))?;
    print_line(&format!(
        "lasted   {}, {} calls to engines",
        time((state.at_s - state.started_s).max(0.0)),
        state.messages
    ))?;
    if state.outcome().is_none() && !is_led {
        print_line("no process leads it: go on with it (resume), or return to the old policy (abort)")?;
    }
    for (name, why) in state.left_behind() {
        print_line(&format!("left     {}: {}", shown(name), shown(why)))?;
    }
    let is_back = matches!(state.phase, Phase::Over { outcome: Outcome::RolledBack { .. } | Outcome::Aborted });
    if is_back && state.left_behind().next().is_some() {
        print_line("to do    abort again once they answer: they may have the new policy")?;
    }
    let predicted = prediction(state, predicted);
    if !state.findings.is_empty() {
        let column = if predicted.is_some() { format!("  {:>24}", "predicted") } else { String::new() };
        print_line(&format!("\n{:28} {:>8} {:>17}{column}  verdict", "guard or metric", "new/old", "95 % interval"))?;
        state.findings.iter().try_for_each(|finding| print_finding(finding, predicted.as_ref()))?;
    }
    print_line("")?;
    for event in state.events.iter().rev().take(SHOWN_EVENTS).rev() {
        print_line(&format!("{}  {}", clock_text(event.at_s), event.what))?;
    }
    Ok(())
}

fn print_finding(finding: &Finding, predicted: Option<&Prediction>) -> anyhow::Result<()> {
    let Finding { metric, guard, verdict, measured, blocks } = finding;
    let name = guard.map_or_else(|| metric.to_string(), |guard| guard.to_string());
    let beside = predicted.map(|predicted| match predicted.metrics.get(&metric.to_string()) {
        Some(PredictedRatio { ratio, low, high }) => format!("{ratio:.3} ({low:.3} to {high:.3})"),
        None => "-".to_owned(),
    });
    let beside = beside.map_or_else(String::new, |text| format!("  {text:>24}"));
    let numbers = match measured {
        Some(Measured { ratio, low, high, .. }) => format!("{ratio:>8.3} {:>17}", format!("{low:.3} to {high:.3}")),
        None => format!("{:>8} {:>17}", "-", "-"),
    };
    let verdict = match verdict {
        GuardVerdict::TooFew => format!("too few values after {blocks} intervals"),
        _ if guard.is_none() => "for information".into(),
        GuardVerdict::Kept => "kept".into(),
        GuardVerdict::Unclear => "not yet clear".into(),
        GuardVerdict::Exceeded => "exceeded".into(),
    };
    print_line(&format!("{name:28} {numbers}{beside}  {verdict}"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_the_fleet_are_read_again() {
        let words = ["--fleet", "/etc/fleet.toml", "--token-file", "/etc/token"].map(str::to_owned);
        let read = Words::try_parse_from(&words).expect("its own words").target;
        assert_eq!(read.words().expect("absolute"), words);
        assert!(Words::try_parse_from(["--nothing"]).is_err());
    }

    #[test]
    fn times_of_day_are_utc() {
        assert_eq!(clock_text(86_400.0 + 3_723.9), "01:02:03");
    }
}

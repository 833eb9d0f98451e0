use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use hyper::Method;
use hyper::header::{CONTENT_TYPE, HeaderName};
use meridian_core::budget::{BudgetStatus, ForceReason};
use meridian_core::latency::{Histogram, STEP_BUCKETS_S, TenantLatency, WAIT_BUCKETS_S};
use meridian_core::oci::OciReference;
use meridian_core::signature::{MAX_SIGNATURE_BYTES, signature_path};
use meridian_runtime::admin::{CONFIG_HEADER, SIGNATURE_HEADER, signature_header};
use meridian_runtime::control::{
    FaultEntry, KvStatus, MAX_COMPONENT_BYTES, MAX_OPTIONS_BYTES, Mode, ProcessStatus, RecordingStatus, ShadowStatus,
    SlotName, SlotStatus, StateHandover, SwapReport, TracesStatus, UNCHANGED, Version,
};
use meridian_wasm::{read_regular, read_signature};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::admin_client::{Asked, Engine, Engines, Target, shown};
use crate::budget::{self, BudgetArgs};
use crate::{print_json, print_line};

#[derive(Args)]
#[command(after_help = "\
The command finds the engine processes of this user. If there are several, choose one with --pid or
--address. Changes need the token of the process, from its admin.token_file or from --token-file.

Examples:
  meridian ctl status --all
  meridian ctl shadow dispatch policy.wasm
  meridian ctl promote dispatch
  meridian ctl swap dispatch native:fcfs
  meridian ctl --pid 4711 rollback dispatch")]
pub(crate) struct CtlArgs {
    #[command(flatten)]
    target: Target,
    /// Read the token for changes from this file; by default, from the process's own token file
    #[arg(long, global = true, value_name = "PATH")]
    token_file: Option<PathBuf>,
    #[command(subcommand)]
    command: CtlCommand,
}

#[derive(Subcommand)]
enum CtlCommand {
    /// Show the active policies, the queues and the problems
    #[command(after_help = "Example:\n  meridian ctl status --all")]
    Status {
        /// Show every engine process of this user
        #[arg(long)]
        all: bool,
    },
    /// List the latest faults, oldest first; --json includes the batches that they happened on
    #[command(after_help = "Example:\n  meridian ctl faults --json")]
    Faults,
    /// List the thinking budgets of live requests, or change them from the next step on
    #[command(after_help = "\
Without an option, the command lists the live requests. A change acts on requests that live now, and fails if
none of them thinks. The operator's scheduler.max_think_tokens holds as well.

Examples:
  meridian ctl budget
  meridian ctl budget chatcmpl-8d2f --max-think-tokens 512
  meridian ctl budget --tenant batch --end-now
  meridian ctl budget --all --reset")]
    Budget(BudgetArgs),
    /// Make a policy decide from the next step on
    #[command(after_help = "\
Examples:
  meridian ctl swap dispatch policy.wasm
  meridian ctl swap dispatch oci://ghcr.io/acme/srpt@sha256:0123...
  meridian ctl swap dispatch native:fair-share --config '{\"output_weight\": 3}'
  meridian ctl swap dispatch --config @options.json")]
    Swap {
        #[arg(value_parser = slot_parser())]
        slot: SlotName,
        #[command(flatten)]
        policy: PolicyArgs,
        /// Make the policy decide (active), or compare it with the active policy (shadow)
        #[arg(long, value_parser = mode_parser(), default_value = "active")]
        mode: Mode,
    },
    /// Compare a policy with the active policy, without changing decisions
    #[command(after_help = "Example:\n  meridian ctl shadow dispatch policy.wasm")]
    Shadow {
        #[arg(value_parser = slot_parser())]
        slot: SlotName,
        #[command(flatten)]
        policy: PolicyArgs,
    },
    /// Stop the shadow policy of a slot
    #[command(after_help = "Example:\n  meridian ctl stop-shadow dispatch")]
    StopShadow {
        #[arg(value_parser = slot_parser())]
        slot: SlotName,
    },
    /// Make the shadow policy of a slot decide
    #[command(after_help = "Example:\n  meridian ctl promote dispatch")]
    Promote {
        #[arg(value_parser = slot_parser())]
        slot: SlotName,
    },
    /// Return a slot to its previous version
    #[command(after_help = "Example:\n  meridian ctl rollback dispatch")]
    Rollback {
        #[arg(value_parser = slot_parser())]
        slot: SlotName,
    },
    /// Retry the version in quarantine at once
    #[command(after_help = "Example:\n  meridian ctl release dispatch")]
    Release {
        #[arg(value_parser = slot_parser())]
        slot: SlotName,
    },
}

/// The policy for a slot, and its options.
#[derive(Args)]
struct PolicyArgs {
    /// Path of a component, oci://HOST/NAME@sha256:DIGEST or native:NAME; without it, the active policy restarts with the options of --config
    #[arg(value_name = "POLICY", required_unless_present = "config")]
    source: Option<PathBuf>,
    /// Pass these options to the policy: a JSON object, or @FILE. By default, a component and the configured native
    /// policy take the options of the configuration; another native policy takes none
    #[arg(long, value_name = "JSON")]
    config: Option<String>,
    /// Read the component's minisign signature from this file; by default, from FILE.minisig if it exists
    #[arg(long, value_name = "FILE", requires = "source")]
    signature: Option<PathBuf>,
}

pub(crate) fn slot_parser() -> impl TypedValueParser<Value = SlotName> {
    PossibleValuesParser::new(SlotName::ALL.map(SlotName::label))
        .try_map(|name| SlotName::ALL.into_iter().find(|slot| slot.label() == name).ok_or("no such slot"))
}

fn mode_parser() -> impl TypedValueParser<Value = Mode> {
    PossibleValuesParser::new(["active", "shadow"])
        .map(|name| if name == "shadow" { Mode::Shadow } else { Mode::Active })
}

pub(crate) fn run(args: &CtlArgs, json: bool) -> anyhow::Result<()> {
    let CtlArgs { target, token_file, command } = args;
    let token_file = token_file.as_deref();
    let ask = |method, slot: &SlotName, action| {
        let path = format!("/v1/policies/{}/{action}", slot.label());
        let asked = Asked { method, path: &path, headers: &[], body: &[] };
        print_report(&target.one()?.change(&asked, token_file)?, json)
    };
    let act = |slot, action| ask(Method::POST, slot, action);
    match command {
        CtlCommand::Status { all: false } => {
            let engine = target.one()?;
            let status = engine.status()?;
            if json { print_json(&status) } else { print_status(&engine, &status) }
        }
        CtlCommand::Status { all: true } => status_of_all(&target.all()?, json),
        CtlCommand::Faults => faults(&target.one()?, json),
        CtlCommand::Budget(args) => budget::run(target, args, token_file, json),
        CtlCommand::Swap { slot, policy, mode } => put(target, *slot, policy, *mode, token_file, json),
        CtlCommand::Shadow { slot, policy } => put(target, *slot, policy, Mode::Shadow, token_file, json),
        CtlCommand::StopShadow { slot } => ask(Method::DELETE, slot, "shadow"),
        CtlCommand::Promote { slot } => act(slot, "promote"),
        CtlCommand::Rollback { slot } => act(slot, "rollback"),
        CtlCommand::Release { slot } => act(slot, "release"),
    }
}

/// Fails when one of them does not answer or its discovery file is malformed, after those that do.
fn status_of_all(found: &Engines, json: bool) -> anyhow::Result<()> {
    let Engines { engines, malformed } = found;
    let asked: Vec<_> = engines.iter().map(|engine| (engine, engine.status())).collect();
    if json {
        let processes: Vec<_> = asked
            .iter()
            .map(|(engine, status)| match status {
                Ok(status) => json!({ "address": engine.address, "status": status }),
                Err(error) => json!({ "address": engine.address, "error": format!("{error:#}") }),
            })
            .chain(malformed.iter().map(|error| json!({ "error": error })))
            .collect();
        print_json(&json!({ "processes": processes }))?;
    } else if asked.is_empty() && malformed.is_empty() {
        print_line("no engine process with an admin listener runs here as this user")?;
    }
    let mut silent = 0;
    for (engine, status) in &asked {
        match status {
            Ok(status) if !json => print_status(engine, status)?,
            Ok(_) => {}
            Err(error) => {
                silent += 1;
                if !json {
                    print_line(&format!("{error:#}"))?;
                }
            }
        }
    }
    if !json {
        malformed.iter().try_for_each(|line| print_line(&shown(line)))?;
    } else if silent + malformed.len() > 0 {
        // What failed is in the object.
        return Err(crate::Said.into());
    }
    ensure!(silent == 0, "{silent} of {} engine processes did not answer", asked.len());
    ensure!(malformed.is_empty(), "{} discovery files cannot be used; they are safe to delete", malformed.len());
    Ok(())
}

fn faults(engine: &Engine, json: bool) -> anyhow::Result<()> {
    #[derive(Serialize, Deserialize)]
    struct Faults {
        faults: Vec<FaultEntry>,
    }
    let found: Faults = engine.get("/v1/faults")?;
    if json {
        return print_json(&found);
    }
    for FaultEntry { slot, now_ms, kind, detail, version, shadow, candidates, batch: _ } in &found.faults {
        let shadow = if *shadow { " (in shadow)" } else { "" };
        let (slot, version) = (slot.label(), version_text(version));
        let (kind, detail) = (shown(kind), shown(detail));
        let seconds = now_ms / 1e3;
        print_line(&format!(
            "{seconds:>12.3} s  {slot}  {version}{shadow}  {kind}  {candidates} candidates: {detail}"
        ))?;
    }
    Ok(())
}

/// The header with the signature of a component: of the file that is named, else of the one beside it, if any.
fn signature_of(component: &Path, named: Option<&Path>) -> anyhow::Result<Option<(HeaderName, String)>> {
    let path = named.map_or_else(|| signature_path(component), Path::to_owned);
    let text = read_signature(&path).with_context(|| format!("{}: cannot be read", path.display()))?;
    ensure!(text.is_some() || named.is_none(), "{}: no such file, expected a minisign signature", path.display());
    let header = text.map(|text| signature_header(&text));
    // The process would not take it either, but could not say so well.
    let is_line = header
        .as_deref()
        .is_none_or(|value| value.len() <= MAX_SIGNATURE_BYTES && value.chars().all(|c| c == '\t' || !c.is_control()));
    ensure!(is_line, "{}: malformed, expected the four lines that `minisign -S` writes", path.display());
    Ok(header.map(|value| (HeaderName::from_static(SIGNATURE_HEADER), value)))
}

/// The options of `--config`: a JSON object, or `@` and the file that holds it.
fn options_of(config: &str) -> anyhow::Result<Map<String, Value>> {
    let text = match config.strip_prefix('@').map(Path::new) {
        Some(file) => {
            let read = read_regular(file, MAX_OPTIONS_BYTES as u64);
            let bytes = read.with_context(|| format!("--config: {}: cannot be read", file.display()))?;
            let bytes = bytes.with_context(|| format!("--config: {}: is larger than 64 KiB", file.display()))?;
            String::from_utf8_lossy(&bytes).into_owned()
        }
        None => config.to_owned(),
    };
    serde_json::from_str(&text).context("--config: must be one JSON object")
}

/// Most bytes of options beside a component: they are a header of the request.
const MAX_HEADER_BYTES: usize = 8 << 10;

fn config_header(options: &Map<String, Value>) -> anyhow::Result<(HeaderName, String)> {
    // In ASCII, with JSON's escapes.
    let mut value = String::new();
    for c in serde_json::to_string(options)?.chars() {
        if c.is_ascii() {
            value.push(c);
        } else {
            let mut units = [0; 2];
            value.extend(c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    let bytes = value.len();
    ensure!(
        bytes <= MAX_HEADER_BYTES,
        "--config: {bytes} bytes: must be at most {MAX_HEADER_BYTES} beside a component; change them after the swap, \
         with --config alone"
    );
    Ok((HeaderName::from_static(CONFIG_HEADER), value))
}

fn put(
    target: &Target,
    slot: SlotName,
    policy: &PolicyArgs,
    mode: Mode,
    token_file: Option<&Path>,
    json: bool,
) -> anyhow::Result<()> {
    let PolicyArgs { source, config, signature } = policy;
    let options = config.as_deref().map(options_of).transpose()?;
    let mode = match mode {
        Mode::Active => "active",
        Mode::Shadow => "shadow",
    };
    let path = format!("/v1/policies/{}?mode={mode}", slot.label());
    let named = source.as_deref().and_then(Path::to_str);
    let named = named.filter(|source| source.starts_with("native:") || OciReference::is_one(source));
    if let Some(reference) = named.filter(|source| OciReference::is_one(source)) {
        OciReference::pinned(reference)?;
    }
    let (headers, body) = match (source, named) {
        (Some(file), None) => {
            let named = || format!("{}: cannot be read", file.display());
            let Some(component) = read_regular(file, MAX_COMPONENT_BYTES as u64).with_context(named)? else {
                bail!("{}: is larger than 32 MiB, the most a component may have", file.display());
            };
            let signature = signature_of(file, signature.as_deref())?;
            let options = options.as_ref().map(config_header).transpose()?;
            (signature.into_iter().chain(options).collect(), component)
        }
        _ => {
            let is_remote = named.is_some_and(OciReference::is_one);
            ensure!(signature.is_none() || !is_remote, "--signature: the registry has those of its components");
            ensure!(signature.is_none(), "--signature: a native policy needs none");
            let mut body = Map::new();
            body.extend(named.map(|source| ("source".to_owned(), source.into())));
            body.extend(options.map(|options| ("config".to_owned(), options.into())));
            (vec![(CONTENT_TYPE, "application/json".to_owned())], serde_json::to_vec(&body)?)
        }
    };
    let asked = Asked { method: Method::PUT, path: &path, headers: &headers, body: &body };
    print_report(&target.one()?.change(&asked, token_file)?, json)
}

fn print_report(report: &SwapReport, json: bool) -> anyhow::Result<()> {
    if json {
        return print_json(report);
    }
    let SwapReport { slot, action, active, previous, state, held_us } = report;
    let state = match state {
        StateHandover::Stateless => String::new(),
        StateHandover::Restored => ", state taken over".into(),
        StateHandover::Own => ", with the state of its own".into(),
        StateHandover::Reset(why) => format!(", state starts fresh: {}", shown(why)),
    };
    if action == UNCHANGED {
        return Ok(print_line(&format!("{}: unchanged: the slot has this policy with these options", slot.label()))?);
    }
    let with_options = |version| match options_text(version) {
        options if options.is_empty() => version_text(version),
        options => format!("{} with {options}", version_text(version)),
    };
    let (slot, action, active) = (slot.label(), shown(action), with_options(active));
    let previous = with_options(previous);
    let before = if active == previous { String::new() } else { format!(", before {previous}") };
    Ok(print_line(&format!("{slot}: {action}: {active} decides{before}{state}; held for {held_us:.1} us"))?)
}

pub(crate) fn version_text(version: &Version) -> String {
    let Version { name, version, sha256, source: _, options: _ } = version;
    let digest: String = sha256.chars().take(8).collect();
    let parts = [name.as_str(), version.as_str(), &digest];
    shown(&parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" "))
}

/// Most characters of options in a line of text; `--json` has them all.
const SHOWN_OPTIONS: usize = 120;

/// The options of a version, cut; empty where there are none.
fn options_text(version: &Version) -> String {
    match version.options.as_str() {
        "" | "{}" => String::new(),
        options if options.chars().count() > SHOWN_OPTIONS => {
            shown(&options.chars().take(SHOWN_OPTIONS).chain("...".chars()).collect::<String>())
        }
        options => shown(options),
    }
}

fn print_status(engine: &Engine, status: &ProcessStatus) -> anyhow::Result<()> {
    let ProcessStatus {
        pid,
        version,
        model,
        uptime_s,
        requests,
        // Counters for rates: `--json` and the metrics have them.
        phase_events: _,
        steps: _,
        blocks: _,
        waiting,
        preemptions,
        step_time_ms,
        latency,
        sessions,
        kv,
        budget,
        slots,
        recording,
        traces,
        problems,
    } = status;
    let (model, version) = (shown(model), shown(version));
    print_line(&format!("process {pid}  {model}  meridian {version}  up {uptime_s:.0} s  {}", engine.address))?;
    problems.iter().try_for_each(|problem| print_line(&format!("  problem      {}", shown(problem))))?;
    let [prefill, think, output] = requests;
    print_line(&format!(
        "  requests     prefill {prefill}, think {think}, output {output}, waiting {waiting}, sessions {sessions}"
    ))?;
    let [prefill, think, output] = preemptions;
    print_line(&format!("  preemptions  prefill {prefill}, think {think}, output {output}"))?;
    if let Some([fixed, decode, prefill]) = step_time_ms {
        print_line(&format!(
            "  step time    {fixed:.3} ms, {decode:.4} ms a decode token, {prefill:.4} ms a prefill token"
        ))?;
    }
    print_latency(latency)?;
    if let Some(kv) = kv {
        print_kv(kv)?;
    }
    if let Some(budget) = budget {
        print_budget(budget)?;
    }
    if let Some(RecordingStatus { dir, recorded, dropped, bytes, stopped }) = recording {
        let mib = *bytes as f64 / f64::from(1 << 20);
        let stopped = stopped.as_ref().map_or_else(String::new, |why| format!(", stopped: {}", shown(why)));
        print_line(&format!(
            "  recording    {recorded} decisions, {dropped} dropped, {mib:.1} MiB in {}{stopped}",
            shown(dir)
        ))?;
    }
    if let Some(TracesStatus { sent, lost }) = traces {
        print_line(&format!("  traces       {sent} requests sent, {lost} lost"))?;
    }
    slots.iter().try_for_each(print_slot)
}

/// Medians over all tenants since the start.
fn print_latency(tenants: &[TenantLatency]) -> anyhow::Result<()> {
    if tenants.is_empty() {
        return Ok(());
    }
    let all = crate::top::all_tenants(tenants);
    let of = |histogram: &Histogram, bounds: &[f64]| {
        let [median, p99] = [0.5, 0.99].map(|share| crate::top::time(histogram.quantile(bounds, share)));
        format!("{median}/{p99}")
    };
    Ok(print_line(&format!(
        "  latency      p50/p99: TTFT {}, TTFO {}, ITL think {} output {}, queue {}",
        of(&all.ttft, &WAIT_BUCKETS_S),
        of(&all.ttfo, &WAIT_BUCKETS_S),
        of(&all.think_itl, &STEP_BUCKETS_S),
        of(&all.output_itl, &STEP_BUCKETS_S),
        of(&all.queue, &WAIT_BUCKETS_S)
    ))?)
}

fn print_kv(status: &KvStatus) -> anyhow::Result<()> {
    let KvStatus { evictions, hit_tokens, missed_tokens, recomputed_tokens, avoidable_output_preemptions, .. } = status;
    let (hits, misses) = (hit_tokens.iter().sum::<u64>(), missed_tokens.iter().sum::<u64>());
    let share = if hits + misses > 0 { 100.0 * hits as f64 / (hits + misses) as f64 } else { 0.0 };
    let [dead, cached, output] = evictions;
    print_line(&format!(
        "  KV memory    {share:.1} % of tokens found in the cache, {recomputed_tokens} computed again after preemption"
    ))?;
    Ok(print_line(&format!(
        "  evictions    {dead} blocks of dead thinking, {cached} other cached, {output} of answers in progress \
         ({avoidable_output_preemptions} preemptions of answers avoidable)"
    ))?)
}

fn print_budget(status: &BudgetStatus) -> anyhow::Result<()> {
    let BudgetStatus { forced, missed, probes_done, probes_dropped, probe_tokens, think_tokens, thought, .. } = status;
    let mean = if *thought > 0 { *think_tokens as f64 / *thought as f64 } else { 0.0 };
    let ended: Vec<_> = ForceReason::ALL
        .iter()
        .zip(forced)
        .filter(|(_, count)| **count > 0)
        .map(|(reason, count)| format!("{} {count}", reason.label()))
        .collect();
    let ended = if ended.is_empty() { "none forced".to_owned() } else { format!("forced: {}", ended.join(", ")) };
    Ok(print_line(&format!(
        "  thinking     {mean:.0} tokens a request, the mean of {thought} that are over; {ended} ({missed} tokens missed); \
         {probes_done} probes of {probe_tokens} tokens, {probes_dropped} dropped"
    ))?)
}

fn print_slot(status: &SlotStatus) -> anyhow::Result<()> {
    let SlotStatus { slot, active, previous, shadow, quarantine, decisions, faults, .. } = status;
    let [policy, default, fallback] = decisions;
    print_line(&format!("  {}", slot.label()))?;
    let row = |name: &str, text: &str| print_line(&format!("    {name:<10} {text}"));
    row("active", &format!("{}  from {}", version_text(active), shown(&active.source)))?;
    let with = |version: &Version| match options_text(version) {
        options if options.is_empty() => Ok(()),
        options => row("  options", &options),
    };
    with(active)?;
    if let Some(previous) = previous {
        row("previous", &version_text(previous))?;
        with(previous)?;
    }
    row("decisions", &format!("policy {policy}, default {default}, fallback {fallback}"))?;
    if status.idle_plans > 0 {
        row("idle plans", &format!("{} left nothing to run; the host lifted their caps", status.idle_plans))?;
    }
    if let Some(shadow) = shadow {
        row("shadow", &shadow_text(shadow))?;
        with(&shadow.version)?;
    }
    if !faults.is_empty() {
        row("faults", &format!("{}; strikes {}", faults_text(faults), status.strikes))?;
    }
    if let Some((version, ms)) = quarantine {
        row("quarantine", &format!("{}, tried again in {:.0} s", version_text(version), ms / 1e3))?;
    }
    if let Some(refusal) = &status.last_refusal {
        row("refused", &shown(refusal))?;
    }
    Ok(())
}

pub(crate) fn faults_text(faults: &[(String, u64)]) -> String {
    shown(&faults.iter().map(|(kind, count)| format!("{kind} {count}")).collect::<Vec<_>>().join(", "))
}

pub(crate) fn shadow_text(shadow: &ShadowStatus) -> String {
    let ShadowStatus { version, compared, skipped, faults, rank_correlation, top_overlap, differences, deciding_us } =
        shadow;
    format!(
        "{}  correlation {rank_correlation:.3}, overlap {top_overlap:.3}, differences {differences}, \
         compared {compared}, skipped {skipped}, faults {faults}, {deciding_us:.1} us",
        version_text(version)
    )
}

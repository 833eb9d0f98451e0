mod all;
mod budget;
mod change;
mod status;

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use meridian_bench::grid::below_floor;
use meridian_engine::control::{FaultEntry, Mode, SlotName, StateHandover, SwapReport, UNCHANGED};
use meridian_fleet::{EngineClient, Member};
use serde_json::json;

use self::budget::BudgetArgs;
use self::change::Change;
pub(crate) use self::status::{faults_text, shadow_text, version_text};
use self::status::{options_text, print_status};
use crate::target::{Target, shown};
use crate::{print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
The command finds the engine processes of this user, or reads them from a fleet file. If there are several,
choose one with --pid, --address or --engine, or all of them with --all. Changes need the token of the process,
from its admin.token_file or from --token-file; engines on other machines need it for reading too. Exit code 0
means that every engine did as asked.

Examples:
  meridian ctl status --all
  meridian ctl shadow dispatch policy.wasm
  meridian ctl promote dispatch
  meridian ctl swap dispatch native:fcfs
  meridian ctl --pid 4711 rollback dispatch
  meridian ctl --fleet fleet.toml swap dispatch native:fcfs --all")]
pub(crate) struct CtlArgs {
    #[command(flatten)]
    target: Target,
    #[command(subcommand)]
    command: CtlCommand,
}

#[derive(Subcommand)]
enum CtlCommand {
    /// Show the active policies, the queues and the problems
    #[command(after_help = "Example:\n  meridian ctl status --all")]
    Status {
        /// Show every engine, one a row
        #[arg(long)]
        all: bool,
    },
    /// List the latest faults, oldest first; --json includes the batches that they happened on
    #[command(after_help = "Example:\n  meridian ctl faults --json")]
    Faults {
        #[command(flatten)]
        every: Every,
    },
    /// List the thinking budgets of live requests, or change them from the next step on
    #[command(after_help = "\
Without an option, the command lists the live requests. A change acts on requests that live now, and fails if
none of them thinks. The operator's scheduler.max_think_tokens holds as well.

Examples:
  meridian ctl budget
  meridian ctl budget chatcmpl-8d2f --max-think-tokens 512
  meridian ctl budget --tenant batch --end-now
  meridian ctl budget --all --reset
  meridian ctl budget --tenant batch --end-now --all-engines")]
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
        #[command(flatten)]
        every: Every,
    },
    /// Compare a policy with the active policy, without changing decisions
    #[command(after_help = "Example:\n  meridian ctl shadow dispatch policy.wasm")]
    Shadow {
        #[arg(value_parser = slot_parser())]
        slot: SlotName,
        #[command(flatten)]
        policy: PolicyArgs,
        #[command(flatten)]
        every: Every,
    },
    /// Stop the shadow policy of a slot
    #[command(after_help = "Example:\n  meridian ctl stop-shadow dispatch")]
    StopShadow {
        #[arg(value_parser = slot_parser())]
        slot: SlotName,
        #[command(flatten)]
        every: Every,
    },
    /// Make the shadow policy of a slot decide
    #[command(after_help = "Example:\n  meridian ctl promote dispatch")]
    Promote {
        #[arg(value_parser = slot_parser())]
        slot: SlotName,
        #[command(flatten)]
        every: Every,
    },
    /// Return a slot to its previous version
    #[command(after_help = "Example:\n  meridian ctl rollback dispatch")]
    Rollback {
        #[arg(value_parser = slot_parser())]
        slot: SlotName,
        #[command(flatten)]
        every: Every,
    },
    /// Retry the version in quarantine at once
    #[command(after_help = "Example:\n  meridian ctl release dispatch")]
    Release {
        #[arg(value_parser = slot_parser())]
        slot: SlotName,
        #[command(flatten)]
        every: Every,
    },
}

/// Whether a command is for one engine or for every one.
#[derive(Args)]
struct Every {
    /// Ask every engine, one a row, and fail if one of them does not do as asked
    #[arg(long)]
    all: bool,
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
    let CtlArgs { target, command } = args;
    let make = |slot: &SlotName, change: &Change, every: &Every| {
        if every.all {
            return all::change(&target.all()?, *slot, change, json);
        }
        print_report(&change.make(&target.one()?, *slot)?, json)
    };
    match command {
        CtlCommand::Status { all: false } => {
            let engine = target.one()?;
            let status = engine.status()?;
            if json { print_json(&status) } else { print_status(&engine, &status) }
        }
        CtlCommand::Status { all: true } => all::status(&target.all()?, json),
        CtlCommand::Faults { every: Every { all: true } } => all::faults(&target.all()?, json),
        CtlCommand::Faults { every: Every { all: false } } => faults(&target.one()?, json),
        CtlCommand::Budget(args) => budget::run(target, args, json),
        CtlCommand::Swap { slot, policy, mode, every } => make(slot, &Change::put(policy, *mode)?, every),
        CtlCommand::Shadow { slot, policy, every } => make(slot, &Change::put(policy, Mode::Shadow)?, every),
        CtlCommand::StopShadow { slot, every } => make(slot, &Change::StopShadow, every),
        CtlCommand::Promote { slot, every } => make(slot, &Change::Promote, every),
        CtlCommand::Rollback { slot, every } => make(slot, &Change::Rollback, every),
        CtlCommand::Release { slot, every } => make(slot, &Change::Release, every),
    }
}

fn faults(engine: &EngineClient, json: bool) -> anyhow::Result<()> {
    let found = engine.faults()?;
    if json {
        return print_json(&json!({ "faults": found }));
    }
    found.iter().try_for_each(|fault| Ok(print_line(&fault_text(fault))?))
}

fn fault_text(fault: &FaultEntry) -> String {
    let FaultEntry { slot, now_ms, kind, detail, version, shadow, candidates, batch: _ } = fault;
    let shadow = if *shadow { " (in shadow)" } else { "" };
    let (slot, version) = (slot.label(), version_text(version));
    let (kind, detail) = (shown(kind), shown(detail));
    let seconds = now_ms / 1e3;
    format!("{seconds:>12.3} s  {slot}  {version}{shadow}  {kind}  {candidates} candidates: {detail}")
}

fn print_report(report: &SwapReport, json: bool) -> anyhow::Result<()> {
    if json {
        return print_json(report);
    }
    let SwapReport { slot, action, active, previous, state, held_us } = report;
    if let Some(floor) = below_floor(&active.name) {
        say(&format!("note: {}: {floor}", active.name));
    }
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

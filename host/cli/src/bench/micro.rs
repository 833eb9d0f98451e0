use std::path::{Path, PathBuf};

use anyhow::ensure;
use clap::Args;
use meridian_bench::limits::{CANDIDATES, within};
use meridian_bench::micro::{self, Report, Row};
use meridian_bench::policies::{self, Loader, PolicyArg};
use meridian_core::{Budget, Dispatch, Eviction, MeridianConfig, SlotKind, SlotName};

use super::input::configured;
use crate::{Unusable, print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
The command times a policy in every slot that it fills, against the native default of that slot. A
policy is native:NAME, or the path of a component, followed by its options:
'mine.wasm{\"tpot_ms\": 40}'. Without --policy and --config, the command times the shipped components
of the defaults: balanced.wasm, tiered-lru.wasm and eat-rpdi.wasm.

Examples:
  meridian bench micro
  meridian bench micro --policy mine.wasm --candidates 64,1024
  meridian bench micro --config meridian.toml")]
pub(crate) struct MicroArgs {
    /// Find the shipped components in this folder; by default, beside the command or in target/policies
    #[arg(long, value_name = "DIR")]
    policies: Option<PathBuf>,
    /// Time this policy; may be given several times
    #[arg(long = "policy", value_name = "POLICY")]
    chosen: Vec<PolicyArg>,
    /// Read the targets from this meridian.toml; without --policy, also the policies to time
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Time decisions over this many candidates, at most 65536
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [16, 64, 256, 1024, 4096])]
    candidates: Vec<usize>,
}

impl MicroArgs {
    /// One policy, against the defaults.
    pub(super) fn of(policy: PolicyArg, candidates: Vec<usize>) -> Self {
        Self { policies: None, chosen: vec![policy], config: None, candidates }
    }
}

pub(crate) fn run(args: &MicroArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    for n in &args.candidates {
        within("--candidates", *n, &CANDIDATES).map_err(unusable)?;
    }
    let config = args
        .config
        .as_deref()
        .map_or_else(|| Ok(MeridianConfig::default()), |path| configured(Some(path)))
        .map_err(unusable)?;
    let mut loader = Loader::new(config);
    let shipped = shipped(args.policies.as_deref()).map_err(unusable)?;
    let plan = plan(args, &mut loader, shipped.as_deref())?;
    let noop = shipped.as_ref().and_then(|folder| component(folder, "noop"));
    let noop_call_ns = noop.map(|noop| micro::noop_call(&mut loader, &noop)).transpose()?;
    let mut rows = Vec::new();
    for (slot, policy) in plan {
        rows.extend(micro::time(&mut loader, slot, policy.as_ref(), &args.candidates, &mut |line| say(line))?);
    }
    let report = Report { noop_call_ns, rows };
    if json { print_json(&report) } else { print(&report) }
}

/// What is timed: a slot, and the policy that is compared with its default.
fn plan(
    args: &MicroArgs,
    loader: &mut Loader,
    shipped: Option<&Path>,
) -> anyhow::Result<Vec<(SlotName, Option<PolicyArg>)>> {
    if !args.chosen.is_empty() {
        let mut plan = Vec::new();
        for policy in &args.chosen {
            plan.extend(loader.slots(policy)?.into_iter().map(|slot| (slot, Some(policy.clone()))));
        }
        return Ok(plan);
    }
    if args.config.is_some() {
        let named = |slot| Ok((slot, Some(policies::configured(loader.config(), slot)?)));
        return SlotName::ALL.into_iter().map(named).collect();
    }
    if shipped.is_none() {
        say(
            "note: no shipped components beside the command or in target/policies: only the native defaults are timed \
             (--policies names a folder)",
        );
    }
    let defaults = [
        (SlotName::Dispatch, Dispatch::NATIVES[0]),
        (SlotName::Eviction, Eviction::NATIVES[0]),
        (SlotName::Budget, Budget::NATIVES[0]),
    ];
    Ok(defaults.into_iter().map(|(slot, name)| (slot, shipped.and_then(|folder| component(folder, name)))).collect())
}

/// The folder of the shipped components: the one that is named, else the one beside the command, else that of a clone.
fn shipped(named: Option<&Path>) -> anyhow::Result<Option<PathBuf>> {
    let has_default = |folder: &PathBuf| component(folder, Dispatch::NATIVES[0]).is_some();
    if let Some(folder) = named {
        let shown = folder.display();
        ensure!(
            has_default(&folder.to_owned()),
            "--policies {shown}: no balanced.wasm, expected a folder of components"
        );
        return Ok(Some(folder.to_owned()));
    }
    // In the wheel, the program is Python, and beside it are its own files.
    let command = std::env::current_exe().ok().filter(|command| command.ends_with("meridian"));
    let beside = command.and_then(|command| Some(command.parent()?.parent()?.join("policies")));
    Ok([beside, Some("target/policies".into())].into_iter().flatten().find(has_default))
}

fn component(folder: &Path, name: &str) -> Option<PolicyArg> {
    let path = folder.join(format!("{name}.wasm"));
    path.is_file().then(|| path.display().to_string().parse().ok()).flatten()
}

fn print(report: &Report) -> anyhow::Result<()> {
    if let Some(ns) = report.noop_call_ns {
        print_line(&format!("no-op call {ns:.0} ns"))?;
    }
    print_line(&format!(
        "{:<9} {:>10} {:>12} {:>12} {:>7}  {:<11} policy over default",
        "slot", "candidates", "default ns", "policy ns", "ratio", "quartiles"
    ))?;
    for row in &report.rows {
        let Row { slot, default, policy, candidates, default_ns, policy_ns, ratio, ratio_low, ratio_high } = row;
        let number =
            |value: &Option<f64>, digits| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"));
        let quartiles = format!("{}-{}", number(ratio_low, 2), number(ratio_high, 2));
        print_line(&format!(
            "{:<9} {candidates:>10} {default_ns:>12.0} {:>12} {:>7}  {quartiles:<11} {} over {default}",
            slot.label(),
            number(policy_ns, 0),
            number(ratio, 2),
            policy.as_deref().unwrap_or("-"),
        ))?;
    }
    Ok(())
}

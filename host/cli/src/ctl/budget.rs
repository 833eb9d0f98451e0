//! `meridian ctl budget`: the thinking budgets of live requests.

use anyhow::bail;
use clap::Args;
use meridian_engine::budgets::{BudgetList, ChangeReport, LiveBudget, LiveChange};
use meridian_fleet::{AT_A_TIME, BudgetChange, EngineClient, Fleet, Member, MemberError};
use serde_json::json;

use super::all;
use crate::target::{Target, shown};
use crate::{print_json, print_line};

#[derive(Args)]
pub(crate) struct BudgetArgs {
    /// Change this request: its id as the client knows it, the engine's id, or a part that only one request has
    #[arg(value_name = "REQUEST", group = "which")]
    request: Option<String>,
    /// Change all live requests of this tenant
    #[arg(long, value_name = "NAME", group = "which")]
    tenant: Option<String>,
    /// Change all live requests; later requests keep the configured budgets
    #[arg(long, group = "which")]
    all: bool,
    /// End thinking at this many tokens, or at once where a request has thought for longer
    #[arg(long, value_name = "N", requires = "which", conflicts_with = "end_now")]
    max_think_tokens: Option<u32>,
    /// End thinking at the next token
    #[arg(long, requires = "which")]
    end_now: bool,
    /// Return to the thresholds of the client and of the configuration
    #[arg(long, requires = "which")]
    reset: bool,
    /// Before this many tokens, only the limit and interrupts end thinking
    #[arg(long, value_name = "N", requires = "which")]
    min_think_tokens: Option<u32>,
    /// As entropy.eat_probe_interval_tokens
    #[arg(long, value_name = "N", requires = "which")]
    eat_probe_interval_tokens: Option<u32>,
    /// As entropy.ema_alpha
    #[arg(long, value_name = "X", requires = "which")]
    ema_alpha: Option<f64>,
    /// As entropy.eat_variance_threshold; 0 turns EAT off
    #[arg(long, value_name = "X", requires = "which")]
    eat_variance_threshold: Option<f64>,
    /// As entropy.eat_max_bits
    #[arg(long, value_name = "X", requires = "which")]
    eat_max_bits: Option<f64>,
    /// As entropy.min_probes
    #[arg(long, value_name = "N", requires = "which")]
    min_probes: Option<u32>,
    /// As entropy.rpdi_window
    #[arg(long, value_name = "N", requires = "which")]
    rpdi_window: Option<u32>,
    /// As entropy.rpdi_threshold
    #[arg(long, value_name = "X", requires = "which")]
    rpdi_threshold: Option<f64>,
    /// Ask every engine, one a row; a request lives in one of them
    #[arg(long)]
    all_engines: bool,
}

impl BudgetArgs {
    fn change(&self) -> LiveChange {
        LiveChange {
            request: self.request.clone(),
            tenant: self.tenant.clone(),
            all: self.all,
            end_now: self.end_now,
            reset: self.reset,
            max_think_tokens: self.max_think_tokens,
            min_think_tokens: self.min_think_tokens,
            eat_probe_interval_tokens: self.eat_probe_interval_tokens,
            ema_alpha: self.ema_alpha,
            eat_variance_threshold: self.eat_variance_threshold,
            eat_max_bits: self.eat_max_bits,
            min_probes: self.min_probes,
            rpdi_window: self.rpdi_window,
            rpdi_threshold: self.rpdi_threshold,
        }
    }
}

pub(super) fn run(target: &Target, args: &BudgetArgs, json: bool) -> anyhow::Result<()> {
    let change = args.change();
    if change == LiveChange::default() {
        return if args.all_engines { list_all(&target.all()?, json) } else { list(&target.one()?, json) };
    }
    if let Err(error) = change.validate() {
        bail!("{error}");
    }
    if args.all_engines {
        return change_all(&target.all()?, &change, json);
    }
    let report = match target.one()?.change_budgets(&change)? {
        BudgetChange::Made(report) => report,
        BudgetChange::NothingHere(why) => bail!("{why}"),
    };
    if json {
        return print_json(&report);
    }
    print_line(&summary(&report))?;
    Ok(report.requests.iter().try_for_each(|request| print_line(&line(request)))?)
}

fn summary(report: &ChangeReport) -> String {
    let ChangeReport { changed, answering, ending, requests: _ } = report;
    format!(
        "{changed} requests changed; unchanged: {answering} that answer already, {ending} about to end their thinking"
    )
}

fn list(engine: &EngineClient, json: bool) -> anyhow::Result<()> {
    let found = engine.budgets()?;
    if json {
        return print_json(&found);
    }
    let BudgetList { live, requests } = &found;
    print_line(&format!("{live} live requests"))?;
    Ok(requests.iter().try_for_each(|request| print_line(&line(request)))?)
}

fn list_all(fleet: &Fleet, json: bool) -> anyhow::Result<()> {
    all::require_some(fleet)?;
    let asked = all::ask(fleet, AT_A_TIME, EngineClient::budgets);
    let silent = asked.iter().filter(|found| found.is_err()).count();
    let asked = fleet.engines.iter().zip(&asked);
    if json {
        let engines: Vec<_> = asked
            .map(|(engine, found)| match found {
                Ok(found) => json!({ "engine": engine.name(), "address": engine.address(), "budgets": found }),
                Err(error) => {
                    json!({ "engine": engine.name(), "address": engine.address(), "error": error.to_string() })
                }
            })
            .chain(all::malformed(fleet))
            .collect();
        print_json(&json!({ "engines": engines }))?;
    } else {
        for (engine, found) in asked {
            match found {
                Ok(BudgetList { live, requests }) => {
                    print_line(&format!("{}: {live} live requests", shown(engine.name())))?;
                    requests.iter().try_for_each(|request| print_line(&line(request)))?;
                }
                Err(error) => print_line(&error.to_string())?,
            }
        }
    }
    all::fail(fleet, silent, "engine processes did not answer", json)
}

/// A request lives in one engine: the others have nothing to change, which is no failure while one has.
fn change_all(fleet: &Fleet, change: &LiveChange, json: bool) -> anyhow::Result<()> {
    all::require_some(fleet)?;
    let asked = all::ask(fleet, AT_A_TIME, |engine| engine.change_budgets(change));
    let failed = asked.iter().filter(|done| done.is_err()).count();
    let made = asked.iter().filter(|done| matches!(done, Ok(BudgetChange::Made(_)))).count();
    let asked = fleet.engines.iter().zip(&asked);
    if json {
        let engines: Vec<_> = asked
            .map(|(engine, done)| {
                let (result, key, value) = match done {
                    Ok(BudgetChange::Made(report)) => ("changed", "report", json!(report)),
                    Ok(BudgetChange::NothingHere(why)) => ("nothing here", "why", json!(why)),
                    Err(MemberError::Refused(why)) => ("refused", "error", json!(why)),
                    Err(MemberError::Unreachable(why)) => ("unknown", "error", json!(why)),
                };
                json!({ "engine": engine.name(), "address": engine.address(), "result": result, key: value })
            })
            .chain(all::malformed(fleet))
            .collect();
        let ok = failed + fleet.malformed.len() == 0 && made > 0;
        print_json(&json!({ "ok": ok, "engines": engines }))?;
    } else {
        let rows = asked.map(|(engine, done)| {
            let (result, why) = match done {
                Ok(BudgetChange::Made(report)) => ("changed", summary(report)),
                Ok(BudgetChange::NothingHere(why)) => ("nothing here", why.clone()),
                Err(MemberError::Refused(why)) => ("refused", why.clone()),
                Err(MemberError::Unreachable(why)) => ("unknown", why.clone()),
            };
            vec![shown(engine.name()), result.to_owned(), why]
        });
        all::print_table(&["engine", "result", ""], rows.collect())?;
    }
    all::fail(fleet, failed, "engines did not do as asked, see their rows", json)?;
    if made > 0 {
        return Ok(());
    }
    if json { Err(crate::Said.into()) } else { bail!("no engine has such a request that thinks") }
}

fn line(of: &LiveBudget) -> String {
    let LiveBudget { request, tenant, phase, think_tokens, min_think_tokens: _, max_think_tokens, ends_by } = of;
    let tenant = if tenant.is_empty() { String::new() } else { format!("  tenant {}", shown(tenant)) };
    let ends = ends_by.as_ref().map_or_else(String::new, |reason| format!("  ended by {}", shown(reason)));
    format!("  {}  {}  {think_tokens} of {max_think_tokens} think tokens{tenant}{ends}", shown(request), shown(phase))
}

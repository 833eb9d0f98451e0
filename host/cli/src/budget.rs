//! `meridian ctl budget`: the thinking budgets of live requests.

use std::path::Path;

use anyhow::bail;
use clap::Args;
use hyper::Method;
use hyper::header::CONTENT_TYPE;
use meridian_runtime::budgets::{BudgetList, ChangeReport, LiveBudget, LiveChange};

use crate::admin_client::{Asked, Target, shown};
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

pub(crate) fn run(target: &Target, args: &BudgetArgs, token_file: Option<&Path>, json: bool) -> anyhow::Result<()> {
    let change = args.change();
    if change == LiveChange::default() {
        return list(target, json);
    }
    if let Err(error) = change.validate() {
        bail!("{error}");
    }
    let body = serde_json::to_vec(&change)?;
    let headers = [(CONTENT_TYPE, "application/json".to_owned())];
    let asked = Asked { method: Method::PUT, path: "/v1/budgets", headers: &headers, body: &body };
    let report: ChangeReport = target.one()?.change(&asked, token_file)?;
    if json {
        return print_json(&report);
    }
    let ChangeReport { changed, answering, ending, requests } = &report;
    print_line(&format!(
        "{changed} requests changed; unchanged: {answering} that answer already, {ending} about to end their thinking"
    ))?;
    Ok(requests.iter().try_for_each(|request| print_line(&line(request)))?)
}

fn list(target: &Target, json: bool) -> anyhow::Result<()> {
    let found: BudgetList = target.one()?.get("/v1/budgets")?;
    if json {
        return print_json(&found);
    }
    let BudgetList { live, requests } = &found;
    print_line(&format!("{live} live requests"))?;
    Ok(requests.iter().try_for_each(|request| print_line(&line(request)))?)
}

fn line(of: &LiveBudget) -> String {
    let LiveBudget { request, tenant, phase, think_tokens, min_think_tokens: _, max_think_tokens, ends_by } = of;
    let tenant = if tenant.is_empty() { String::new() } else { format!("  tenant {}", shown(tenant)) };
    let ends = ends_by.as_ref().map_or_else(String::new, |reason| format!("  ended by {}", shown(reason)));
    format!("  {}  {}  {think_tokens} of {max_think_tokens} think tokens{tenant}{ends}", shown(request), shown(phase))
}

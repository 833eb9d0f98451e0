//! The plots of the page, section by section.

use std::fmt::Write;

use super::{key, summary};
use crate::report::format::{escape, figure};
use crate::report::grid::Grid;
use crate::report::plots::{self, Axis, Caption};
use crate::results::Run;

/// Distributions that are shown: key, axis, title.
const CURVES: [(&str, &str, &str); 4] = [
    ("ttfo", "arrival to first answer token", "TTFO"),
    ("ttot", "end of thinking to first answer token", "TTOT"),
    ("itl_think", "gap between tokens of thinking", "ITL of thinking"),
    ("itl_output", "gap between tokens of the answer", "ITL of the answer"),
];
const MOST_LISTED: usize = plots::MOST_EVENTS;

/// What changes with the load.
pub(super) fn against_rates(grid: &Grid<'_>) -> String {
    let top = |key: &str| {
        let spreads = grid.rates.iter().flat_map(|&rate| (0..grid.policies.len()).map(move |policy| (rate, policy)));
        spreads.filter_map(|(rate, policy)| Some(grid.spread(rate, policy, key)?.high)).fold(0.0, f64::max)
    };
    let rows = [
        ("goodput_rps", "Goodput against load", Axis::linear("goodput (requests/s)", 0.0, 1.05 * top("goodput_rps"))),
        ("slo_attainment", "SLO attainment against load", Axis::linear("share of requests", 0.0, 1.0)),
    ];
    let mut out = format!("<h2>Against the load</h2>\n{}<div class=\"plots\">\n", key(grid));
    for (key, title, y) in rows {
        let caption = Caption {
            id: format!("load-{key}"),
            title: title.to_owned(),
            description: format!("{title}, a line a policy; the values are in the tables of each rate, row {key}."),
        };
        out.push_str(&plots::against_rate(grid, key, y, &caption).unwrap_or_default());
    }
    out + "</div>\n"
}

/// Everything about one rate.
pub(super) fn rate(grid: &Grid<'_>, at: usize, rate: f64) -> String {
    let mut out = format!("<h2 id=\"rate-{at}\">{} requests a second</h2>\n", figure(rate));
    out.push_str(&summary::table(grid, rate));
    let curves: Vec<String> = CURVES
        .iter()
        .filter_map(|(name, axis, title)| {
            let caption = Caption {
                id: format!("r{at}-{name}"),
                title: format!("{title}: share of values at most x"),
                description: format!(
                    "Cumulative distribution of {title}, {axis}, a line a policy. Lines further left are faster."
                ),
            };
            plots::cdf(grid, rate, name, axis, &caption)
        })
        .collect();
    section(&mut out, "Distributions", &key(grid), &curves);
    timelines(&mut out, grid, at, rate);
    let caption = Caption {
        id: format!("r{at}-tenants"),
        title: "TTFO p99 by tenant".to_owned(),
        description: format!(
            "99th percentile of arrival to first answer token for the {} largest tenants, a dot a policy.",
            plots::MOST_TENANTS
        ),
    };
    let tenants: Vec<String> = plots::tenants(grid, rate, &caption).into_iter().collect();
    section(&mut out, "Fairness between tenants", &key(grid), &tenants);
    out
}

fn section(out: &mut String, title: &str, before: &str, figures: &[String]) {
    if !figures.is_empty() {
        let _ = write!(out, "<h3>{title}</h3>\n{before}<div class=\"plots\">\n{}</div>\n", figures.concat());
    }
}

/// Of the first seed: a mean over seeds would show a queue that never was.
fn timelines(out: &mut String, grid: &Grid<'_>, at: usize, rate: f64) {
    let firsts: Vec<(usize, &Run)> =
        (0..grid.policies.len()).filter_map(|policy| Some((policy, *grid.runs(rate, policy).first()?))).collect();
    let firsts: Vec<(usize, &Run)> = firsts.into_iter().filter(|(_, run)| !run.timeline.is_empty()).collect();
    let points = || firsts.iter().flat_map(|(_, run)| &run.timeline);
    let finite = |value: f64| if value.is_finite() { value } else { 0.0 };
    let end = points().map(|point| finite(point.t_s)).fold(0.0, f64::max);
    let total =
        |run: &Run| run.timeline.iter().map(|p| finite(p.waiting + p.prefill + p.think + p.output)).fold(0.0, f64::max);
    let most = firsts.iter().map(|(_, run)| total(run)).fold(0.0, f64::max);
    let caption = |policy: usize, kind: &str, what: &str| Caption {
        id: format!("r{at}-p{policy}-{kind}"),
        title: grid.policies[policy].to_owned(),
        description: format!("{what} over time with policy {}, first seed.", grid.policies[policy]),
    };
    let queues: Vec<String> = firsts
        .iter()
        .map(|&(policy, run)| plots::queues(run, policy, end, most, &caption(policy, "queues", "Requests by state")))
        .collect();
    let kv: Vec<String> = firsts
        .iter()
        .map(|&(policy, run)| plots::kv(run, policy, end, &caption(policy, "kv", "Shares of KV blocks")))
        .collect();
    let lists: String = firsts.iter().map(|(policy, run)| events(grid.policies[*policy], run)).collect();
    let note = match firsts.first() {
        Some((_, run)) if grid.runs(rate, 0).len() > 1 => format!("<p class=\"note\">Seed {}.</p>\n", run.seed),
        _ => String::new(),
    };
    let states = shades(&["answer", "thinking", "prefill", "waiting"]);
    section(out, "Requests over time", &format!("{note}{states}"), &queues);
    out.push_str(&lists);
    section(out, "KV memory over time", &shades(&["held by requests", "free, in the prefix cache"]), &kv);
}

/// Stacked areas, from the bottom.
fn shades(names: &[&str]) -> String {
    let items = names.iter().zip(plots::SHADES);
    let items =
        items.map(|(name, shade)| format!("<li><span class=\"box\" style=\"opacity:{shade}\"></span>{name}</li>"));
    format!("<ul class=\"key\" aria-label=\"Shades, from the bottom\">{}</ul>\n", items.collect::<String>())
}

/// The numbers in the plots.
fn events(policy: &str, run: &Run) -> String {
    if run.events.is_empty() {
        return String::new();
    }
    let listed = run.events.iter().take(MOST_LISTED);
    let items = listed.map(|event| format!("<li>{} s: {}</li>\n", figure(event.t_s), escape(&event.what)));
    let more = match run.events.len().saturating_sub(MOST_LISTED) {
        0 => String::new(),
        more => format!("<p class=\"note\">and {more} more</p>\n"),
    };
    format!(
        "<p class=\"note\">Events with {} (vertical lines):</p>\n<ol class=\"events\">\n{}</ol>\n{more}",
        escape(policy),
        items.collect::<String>()
    )
}

//! A grid of cells as one HTML file, to be read from top to bottom: a day, the map of all cells, the medians, the losses.

use std::fmt::Write;

use super::format::{escape, figure};
use super::plots::{Axis, COLOURS, Caption, day};
use crate::grid::{Cell, FLOOR, Gain, Grid, OPPONENTS, Row, SINGLE, STOCK, broken, gains};
use crate::metrics::HOLDS;
use crate::results::{HEADLINES, LevelPoint};

/// A ratio of this, or its inverse, has the full colour.
const FULL_COLOUR: f64 = 2.0;
/// The grid as one file that needs no network and no script, for light and dark screens and paper.
pub fn heat_map(grid: &Grid) -> String {
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>Meridian: policies against the vLLM that people run</title>\n<style>\n{}</style>\n</head>\n<body>\n\
         <h1>Policies against the vLLM that people run</h1>\n\
         <p>Simulated engines with vLLM\u{2019}s own defaults. A request attains its service level when its answer begins within \
         {} s plus {} ms a token of its prompt plus {} ms a token of its thinking, and its answer\u{2019}s tokens come {} ms apart \
         or less in the mean. Loads are parts of the capacity: the highest steady rate at which nine of ten requests attain \
         it under stock vLLM as it starts.</p>\n",
        include_str!("style.css"),
        figure(grid.slo.ttfo_ms / 1e3),
        figure(grid.slo.prompt_ms),
        figure(grid.slo.think_ms),
        figure(grid.slo.tpot_ms),
    );
    for policy in grid.policies() {
        days(&mut out, grid, policy);
        map(&mut out, grid, policy);
        medians(&mut out, grid, policy);
    }
    capacities(&mut out, grid);
    // Writing into a string does not fail, here and below.
    let _ = writeln!(
        out,
        "<dl><dt>Command</dt><dd><code>{}</code></dd><dt>Meridian</dt><dd>{}, on {}</dd></dl>\n</body>\n</html>",
        escape(&grid.made_by.command),
        escape(&grid.made_by.version),
        escape(&grid.made_by.machine)
    );
    out
}

/// The first day that counts, over time.
fn days(out: &mut String, grid: &Grid, policy: &str) {
    let is_drawn = |cell: &&Cell| cell.contenders.get(STOCK).is_some_and(|stock| !stock.levels.is_empty());
    let Some(cell) = grid.counted().find(is_drawn) else { return };
    let names = [STOCK, SINGLE, policy];
    let drawn: Vec<_> = names.iter().filter_map(|name| Some((*name, cell.contenders.get(*name)?))).collect();
    let _ = writeln!(
        out,
        "<h2>A day with a burst: {}</h2>\n<p>{} requests a second at 0.6, 1.6 and again 0.6 of the capacity; the upright lines \
         are the burst.</p>\n<ul class=\"key\">",
        escape(&cell.name()),
        figure(cell.rate)
    );
    for (at, (name, contender)) in drawn.iter().enumerate() {
        let flags = if contender.flags.is_empty() { String::new() } else { format!(" ({})", contender.flags) };
        let colour = COLOURS[at % COLOURS.len()];
        let _ = writeln!(
            out,
            "<li><span class=\"line\" style=\"color:{colour}\"></span>{}{}</li>",
            escape(name),
            escape(&flags)
        );
    }
    out.push_str("</ul>\n<div class=\"plots\">\n");
    type Of = fn(&LevelPoint) -> f64;
    let share: Of = |level| level.attained as f64 / level.arrived.max(1) as f64;
    let ttfo: Of = |level| level.ttfo_p50_ms / 1e3;
    let gap: Of = |level| level.tpot_p50_ms;
    let mut plot = |id: &str, title: &str, unit: &str, values: Vec<Vec<(f64, f64)>>, most: Option<f64>| {
        let axis = match most {
            Some(most) => Axis::linear(unit, 0.0, most),
            None => Axis::of(unit, values.iter().flatten().map(|(_, value)| *value)),
        };
        let caption = Caption {
            id: format!("{id}-{}", names.len()),
            title: title.to_owned(),
            description: format!("{title} over the day, a line a scheduler"),
        };
        let _ = writeln!(out, "{}", day(&values, cell.burst_s, axis, &caption));
    };
    let series = |of: Of| -> Vec<Vec<(f64, f64)>> {
        let line = |contender: &crate::grid::Contender| {
            contender.levels.iter().filter(|level| level.arrived > 0).map(|level| (level.t_s, of(level))).collect()
        };
        drawn.iter().map(|(_, contender)| line(contender)).collect()
    };
    plot("attained", "requests within their service level", "share", series(share), Some(1.0));
    plot("ttfo", "median time to the first answer token", "seconds", series(ttfo), None);
    plot("gap", "median gap between answer tokens", "milliseconds", series(gap), None);
    let waiting = |contender: &crate::grid::Contender| -> Vec<(f64, f64)> {
        contender.levels.iter().zip(&contender.waiting).map(|(level, waiting)| (level.t_s, *waiting)).collect()
    };
    let queue = drawn.iter().map(|(_, contender)| waiting(contender)).collect();
    let most = drawn.iter().flat_map(|(_, of)| &of.waiting).copied().fold(1.0, f64::max);
    plot("queue", "requests that wait", "requests", queue, Some(most));
    out.push_str("</div>\n");
}

/// Goodput of a policy over stock's: a row an engine and its traffic, a column a load.
fn map(out: &mut String, grid: &Grid, policy: &str) {
    let mut loads: Vec<&str> = Vec::new();
    let column = |cell: &Cell| if cell.part.is_none() && !cell.load.starts_with("day") { "sessions" } else { "" };
    let named = |cell: &'_ Cell| if column(cell).is_empty() { cell.load.clone() } else { column(cell).to_owned() };
    let names: Vec<String> = grid.cells.iter().map(named).collect();
    for name in &names {
        if !loads.contains(&name.as_str()) {
            loads.push(name);
        }
    }
    let heads: String = loads.iter().map(|load| format!("<th scope=\"col\">{}</th>", escape(load))).collect();
    let found = broken(grid, policy, STOCK).len();
    let _ = writeln!(
        out,
        "<h2>{0} over stock vLLM, all cells</h2>\n<p>Requests a second that attain their service level, over stock\u{2019}s as it \
         starts. Green is better, red is worse, no colour is a tie (of steady loads: the 95 % interval holds 1), a frame marks a cell in which a \
         floor breaks ({found} of {1}), grey cells are left out of all medians.</p>\n<table class=\"map\"><thead><tr>\
         <th></th>{heads}</tr></thead><tbody>",
        escape(policy),
        grid.counted().count() * FLOOR.len()
    );
    for row in &grid.rows {
        let _ = write!(out, "<tr><th scope=\"row\">{} <span>{}</span></th>", escape(&row.engine), escape(&row.traffic));
        for load in &loads {
            let is_it = |cell: &&Cell| cell.engine == row.engine && cell.traffic == row.traffic && named(cell) == *load;
            match grid.cells.iter().find(is_it) {
                Some(cell) => out.push_str(&square(row, cell, policy)),
                None => out.push_str("<td></td>"),
            }
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table>\n");
}

fn square(row: &Row, cell: &Cell, policy: &str) -> String {
    let key = "goodput_rps";
    let Some(ratio) = cell.ratio(policy, STOCK, key) else { return "<td>-</td>".to_owned() };
    if row.left_out().is_some() || !cell.converged {
        return format!("<td class=\"out\">{ratio:.2}</td>");
    }
    let interval = cell.contenders.get(policy).and_then(|found| found.over_stock.get(key));
    let is_tie = interval.is_some_and(|[low, high]| (*low..=*high).contains(&1.0));
    let strength = if ratio > 0.0 { (ratio.ln() / FULL_COLOUR.ln()).clamp(-1.0, 1.0) } else { -1.0 };
    // Seen by those who tell red from green badly as well: blue in one, none in the other.
    let colour = if strength > 0.0 { "0,150,110" } else { "205,70,0" };
    let strength = if is_tie { 0.0 } else { 0.55 * strength.abs() };
    let breaks = FLOOR.iter().any(|floor| !floor.holds(cell, policy, STOCK));
    let frame = if breaks { ";outline:2px solid;outline-offset:-2px" } else { "" };
    format!("<td style=\"background:rgba({colour},{strength:.2}){frame}\">{ratio:.2}</td>")
}

/// Medians over the hard cells against every opponent, ten metrics and the rest folded, then what is lost.
fn medians(out: &mut String, grid: &Grid, policy: &str) {
    let all: Vec<Vec<Gain>> = OPPONENTS.iter().map(|name| gains(grid, policy, name, Cell::is_hard)).collect();
    let mut keys: Vec<(&str, &str)> = Vec::new();
    for gain in all.iter().flatten() {
        if !keys.iter().any(|(key, _)| *key == gain.key) {
            keys.push((gain.key, gain.title));
        }
    }
    let heads: String = OPPONENTS.iter().map(|name| format!("<th scope=\"col\">{}</th>", escape(name))).collect();
    let table = |chosen: &dyn Fn(&str) -> bool| {
        let mut rows = String::new();
        for (key, title) in keys.iter().filter(|(key, _)| chosen(key)) {
            let _ = write!(rows, "<tr><th scope=\"row\">{}</th>", escape(title));
            for gains in &all {
                match gains.iter().find(|gain| gain.key == *key) {
                    Some(Gain { median, interval: [low, high], .. }) => {
                        let _ = write!(rows, "<td>{median:.2} <small>{low:.2}-{high:.2}</small></td>");
                    }
                    None => rows.push_str("<td>-</td>"),
                }
            }
            rows.push_str("</tr>\n");
        }
        format!(
            "<div class=\"wide\"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>\n"
        )
    };
    let _ = writeln!(
        out,
        "<h2>{} over every opponent</h2>\n<p>Medians of the ratio, with 95 % intervals, over loads of 0.95 of the capacity, days \
         and sessions. The last three opponents are bounds: no engine knows the length of a thought, or sets flags anew when \
         the load changes.</p>\n{}",
        escape(policy),
        table(&|key| HEADLINES.contains(&key))
    );
    if keys.iter().any(|(key, _)| !HEADLINES.contains(key)) {
        let rest = table(&|key| !HEADLINES.contains(&key));
        let _ = writeln!(out, "<details><summary>All metrics</summary>\n{rest}</details>");
    }
    let lost = broken(grid, policy, STOCK);
    if lost.is_empty() {
        return;
    }
    let _ = writeln!(out, "<details><summary>Floors that break against stock vLLM: {}</summary>\n<ul>", lost.len());
    for broken in lost {
        let _ = writeln!(
            out,
            "<li>{}: {} {:.2} of stock\u{2019}s, floor {}</li>",
            escape(&broken.cell),
            broken.metric,
            broken.ratio,
            broken.bound
        );
    }
    out.push_str("</ul></details>\n");
}

/// What stock vLLM serves.
fn capacities(out: &mut String, grid: &Grid) {
    let _ = writeln!(
        out,
        "<h2>Capacity of stock vLLM as it starts</h2>\n<p>The highest steady rate at which {:.0} % attain the service level, in runs \
         of at least 20 mean lives of a request, and in runs of twice that length.</p>\n<div class=\"wide\"><table><thead><tr>\
         <th></th><th scope=\"col\">requests/s</th><th scope=\"col\">twice the run</th><th scope=\"col\">lives, s</th>\
         <th scope=\"col\">busy</th><th scope=\"col\">best single flags, or why it is left out</th></tr></thead><tbody>",
        100.0 * HOLDS
    );
    for row in &grid.rows {
        let cells = match (&row.capacity, row.at_once) {
            (Some(found), _) => [found.rate, found.doubled, found.residence_s, found.busy].map(figure),
            (None, Some(sessions)) => [format!("{sessions} sessions"), "-".into(), "-".into(), "-".into()],
            (None, None) => ["none", "-", "-", "-"].map(str::to_owned),
        };
        let flags = if row.best_flags.is_empty() { "its own".to_owned() } else { row.best_flags.clone() };
        let flags = row.left_out().unwrap_or(flags);
        let _ = writeln!(
            out,
            "<tr><th scope=\"row\">{} <span>{}</span></th><td>{}</td><td>{}</td></tr>",
            escape(&row.engine),
            escape(&row.traffic),
            cells.map(|cell| escape(&cell)).join("</td><td>"),
            escape(&flags)
        );
    }
    out.push_str("</tbody></table></div>\n");
}

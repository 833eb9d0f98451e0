//! A grid of cells as one HTML file: for each metric a map of ratios, coloured by who is better.

use std::fmt::Write;

use super::format::{escape, figure};
use crate::grid::{Cell, FLOOR, Floor, Grid, STOCK, TUNED, broken};

/// A ratio of this, or its inverse, has the full colour.
const FULL_COLOUR: f64 = 2.0;

/// The grid as one file that needs no network and no script, for light and dark screens and paper.
pub fn heat_map(grid: &Grid) -> String {
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>Meridian: policies over engines, traffic and load</title>\n<style>\n{}</style>\n</head>\n<body>\n\
         <h1>Policies over engines, traffic and load</h1>\n\
         <p>Simulated engines. Each cell is the ratio of a policy to stock vLLM, the median over {} seeds: green is better \
         than stock, red is worse, and a frame marks a floor that does not hold. Loads are parts of what stock vLLM with its \
         best flags can serve: the highest rate at which nine of ten requests attain the service levels.</p>\n\
         <dl><dt>Command</dt><dd><code>{}</code></dd><dt>Meridian</dt><dd>{}, on {}</dd></dl>\n",
        include_str!("style.css"),
        grid.seeds.len(),
        escape(&grid.made_by.command),
        escape(&grid.made_by.version),
        escape(&grid.made_by.machine)
    );
    for policy in grid.policies() {
        for (against, title) in [(STOCK, "stock vLLM"), (TUNED, "stock vLLM with the best flags for each cell")] {
            // Writing into a string does not fail, here and below.
            let _ = writeln!(out, "<h2>{} over {title}</h2>", escape(policy));
            let found = broken(grid, policy, against).len();
            let of = grid.cells.len() * FLOOR.len();
            let _ = writeln!(out, "<p>{found} of {of} floors do not hold.</p>\n<div class=\"plots\">");
            FLOOR.iter().for_each(|floor| map(&mut out, grid, policy, against, floor));
            out.push_str("</div>\n");
        }
    }
    capacities(&mut out, grid);
    out.push_str("</body>\n</html>\n");
    out
}

/// The highest rates served.
fn capacities(out: &mut String, grid: &Grid) {
    let policies = grid.policies();
    let heads: String = policies.iter().map(|name| format!("<th scope=\"col\">{}</th>", escape(name))).collect();
    let _ = writeln!(
        out,
        "<h2>Capacity</h2>\n<div class=\"wide\"><table><caption>Highest rate served, requests a second</caption><thead><tr>\
         <th></th><th scope=\"col\">tuned stock</th>{heads}</tr></thead><tbody>"
    );
    for row in &grid.rows {
        let _ = write!(out, "<tr><th scope=\"row\">{} <span>{}</span></th>", escape(&row.engine), escape(&row.traffic));
        for name in std::iter::once(TUNED).chain(policies.iter().copied()) {
            let rate = row.capacity.get(name).map_or("none".to_owned(), |rate| figure(*rate));
            let _ = write!(out, "<td>{rate}</td>");
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}

/// One metric: a row an engine and its traffic, a column a load.
fn map(out: &mut String, grid: &Grid, policy: &str, against: &str, floor: &Floor) {
    let mut loads: Vec<f64> = grid.cells.iter().map(|cell| cell.load).collect();
    loads.sort_by(f64::total_cmp);
    loads.dedup();
    let mut rows: Vec<(&str, &str)> = Vec::new();
    for cell in &grid.cells {
        if !rows.contains(&(cell.engine.as_str(), cell.traffic.as_str())) {
            rows.push((&cell.engine, &cell.traffic));
        }
    }
    let heads: String = loads.iter().map(|load| format!("<th scope=\"col\">{}</th>", figure(*load))).collect();
    let better = if floor.more_is_better { "more is better" } else { "less is better" };
    let _ = writeln!(
        out,
        "<div class=\"wide\"><table><caption>{}, {better}</caption><thead><tr><th scope=\"col\">load</th>{heads}</tr></thead><tbody>",
        floor.title
    );
    for (engine, traffic) in rows {
        let _ = write!(out, "<tr><th scope=\"row\">{} <span>{}</span></th>", escape(engine), escape(traffic));
        for load in &loads {
            let is_it = |cell: &&Cell| cell.engine == engine && cell.traffic == traffic && cell.load == *load;
            let cell = grid.cells.iter().find(is_it);
            match cell.and_then(|cell| Some((cell, floor.ratio(cell, policy, against)?))) {
                Some((cell, ratio)) => out.push_str(&coloured(ratio, floor, floor.holds(cell, policy, against))),
                None => out.push_str("<td>-</td>"),
            }
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}

fn coloured(ratio: f64, floor: &Floor, holds: bool) -> String {
    let better = if floor.more_is_better { ratio } else { 1.0 / ratio };
    let strength = if better > 0.0 { (better.ln() / FULL_COLOUR.ln()).clamp(-1.0, 1.0) } else { -1.0 };
    // Seen by those who tell red from green badly as well: blue in one, none in the other.
    let colour = if strength > 0.0 { "0,150,110" } else { "205,70,0" };
    let frame = if holds { "" } else { ";outline:2px solid;outline-offset:-2px;font-weight:600" };
    format!("<td style=\"background:rgba({colour},{:.2}){frame}\">{ratio:.2}</td>", 0.55 * strength.abs())
}

//! The table of a rate.

use std::fmt::Write;

use super::swatch;
use crate::report::format::{escape, figure};
use crate::report::grid::{Grid, Row};
use crate::report::text::range;
use crate::results::HEADLINES;

/// Policies as columns, the baseline first; metrics as rows.
pub(super) fn table(grid: &Grid<'_>, rate: f64) -> String {
    let rows = grid.rows(rate);
    let has_seeds = rows.iter().flat_map(|row| row.cells.iter().flatten()).any(|cell| cell.count > 1);
    let seeds = if has_seeds { " Means over seeds; below them the least and the most." } else { "" };
    let mut out = format!(
        "<div class=\"wide\" role=\"region\" aria-label=\"Metrics at {rate} requests a second\" tabindex=\"0\">\n<table>\n\
         <caption>In brackets: ratio to {}. A value that is better than all others is bold and marked *; values that \
         an interval of 95 % does not tell apart are not.{seeds}</caption>\n\
         <thead><tr><th scope=\"col\">metric</th>",
        grid.policies.first().map_or_else(String::new, |name| escape(name)),
        rate = figure(rate),
    );
    for (at, name) in grid.policies.iter().enumerate() {
        let baseline = if at == 0 { "<br><small>baseline</small>" } else { "" };
        let _ = write!(out, "<th scope=\"col\">{}<br>{}{baseline}</th>", swatch(at), escape(name));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    let (first, rest): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| HEADLINES.contains(&row.metric.key));
    let lines = |out: &mut String, rows: &[&Row]| {
        for row in rows {
            let (title, unit) = (escape(row.metric.title.trim()), escape(row.metric.unit));
            let _ = write!(out, "<tr><th scope=\"row\">{title} <span>{unit}</span></th>");
            (0..grid.policies.len()).for_each(|policy| out.push_str(&cell(row, policy)));
            out.push_str("</tr>\n");
        }
    };
    lines(&mut out, &first);
    out.push_str("</tbody>\n</table>\n</div>\n");
    if !rest.is_empty() {
        out.push_str("<details><summary>All metrics</summary>\n<div class=\"wide\">\n<table><tbody>\n");
        lines(&mut out, &rest);
        out.push_str("</tbody></table>\n</div>\n</details>\n");
    }
    out
}

fn cell(row: &Row, policy: usize) -> String {
    let Some(value) = row.cells[policy] else { return "<td>-</td>".to_owned() };
    let (class, mark) = if row.is_best(policy) { (" class=\"best\"", "*") } else { ("", "") };
    let ratio = row.ratio(policy).map_or_else(String::new, |ratio| format!(" <small>({ratio:.2}x)</small>"));
    let range = range(value).map_or_else(String::new, |range| format!("<br><small>{range}</small>"));
    format!("<td{class}>{}{mark}{ratio}{range}</td>", figure(value.mean))
}

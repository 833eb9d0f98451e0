//! Tables as plain text and as Markdown.

use super::format::{aligned, clean, cut, escape_markdown, figure};
use super::grid::{Grid, Row, Spread};
use crate::results::{HEADLINES, METRICS, Results};
use crate::tune::Tuned;

const LEGEND: &str = "\
ITL: gap between two tokens of a phase. TTOT: end of thinking to first output token. TTFO: arrival to first output
token. TTFT: arrival to first token of any kind. In brackets: ratio to the first policy";
const WIDEST_NAME: usize = 28;
/// Stretches of a day in one line, and the heights of what happened in one.
const DAY_WIDTH: usize = 48;
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Side by side, a table a rate: a column a policy, the baseline first, a row a metric; behind each value its ratio to the
/// baseline's. With several seeds values are means, with the least and the most behind them. The [headlines](HEADLINES), or all
/// metrics.
pub fn table(results: &Results, all: bool) -> String {
    let grid = Grid::new(results);
    if grid.rates.is_empty() {
        return "no runs".to_owned();
    }
    let mut out = Vec::new();
    let mut has_range = false;
    for &rate in &grid.rates {
        let names = grid.policies.iter().map(|name| cut(name, WIDEST_NAME));
        let mut rows = vec![["".to_owned(), "".to_owned()].into_iter().chain(names).collect::<Vec<_>>()];
        for (slot, title) in [("eviction", "eviction policy"), ("budget", "budget policy")] {
            let names = grid.in_slot(rate, slot);
            if names.iter().any(Option::is_some) {
                let names = names.into_iter().map(|name| cut(name.unwrap_or("-"), WIDEST_NAME));
                rows.push([title.to_owned(), String::new()].into_iter().chain(names).collect());
            }
        }
        for row in grid.rows(rate) {
            if !all && !HEADLINES.contains(&row.metric.key) {
                continue;
            }
            has_range |= row.cells.iter().flatten().any(|cell| cell.count > 1);
            let cells = (0..grid.policies.len()).map(|policy| cell(&row, policy, true));
            let titles = [row.metric.title.to_owned(), row.metric.unit.to_owned()];
            rows.push(titles.into_iter().chain(cells).collect());
        }
        let day = day(&grid, rate).map_or_else(String::new, |day| format!("\n\n{day}"));
        out.push(format!("{}\n{}{day}", load(rate), aligned(&rows, 2)));
    }
    let range = if has_range { "; in square brackets: least and most over seeds." } else { "." };
    let notes: String = results.notes.iter().map(|note| format!("\nnote: {}", clean(note))).collect();
    let more = if all { "" } else { " --all shows every metric." };
    format!("{}\n\n{LEGEND}{range}{more}{notes}", out.join("\n\n"))
}

/// A day with a burst as a line a policy: the share of requests in time, by when they arrived, of all seeds together.
fn day(grid: &Grid, rate: f64) -> Option<String> {
    let runs = |policy| grid.runs(rate, policy).into_iter().filter(|run| !run.levels.is_empty()).collect::<Vec<_>>();
    let first = (0..grid.policies.len()).flat_map(runs).next()?;
    // Stretches are of one length, and the first begins at 0.
    let end_s = first.levels.last()?.t_s + first.levels.get(1)?.t_s;
    let minutes = figure(end_s / 60.0);
    let mut out = format!("requests in time, by when they arrived: from none to all, over {minutes} minutes");
    let names: Vec<_> = grid.policies.iter().map(|name| cut(name, WIDEST_NAME)).collect();
    let widest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    for (policy, name) in names.iter().enumerate().filter(|(policy, _)| !runs(*policy).is_empty()) {
        let mut stretches = [(0u64, 0u64); DAY_WIDTH];
        for level in runs(policy).into_iter().flat_map(|run| &run.levels) {
            let at = ((level.t_s / end_s * DAY_WIDTH as f64) as usize).min(DAY_WIDTH - 1);
            let (arrived, attained) = &mut stretches[at];
            *arrived = arrived.saturating_add(level.arrived);
            *attained = attained.saturating_add(level.attained);
        }
        let bars: String = stretches.iter().map(|stretch| bar(*stretch)).collect();
        out.push_str(&format!("\n{name:widest$}  {}", bars.trim_end()));
    }
    Some(out)
}

/// The height of `attained` of `arrived`, the lowest for none; a space where nothing arrived.
fn bar((arrived, attained): (u64, u64)) -> char {
    let share = attained.min(arrived) as f64 / arrived as f64;
    if arrived == 0 { ' ' } else { BARS[(share * (BARS.len() - 1) as f64).ceil() as usize] }
}

/// Metrics that tuning is told by.
const TUNED: [&str; 6] =
    ["goodput_rps", "slo_attainment", "throughput_tok_s", "ttfo_p50_ms", "ttft_p50_ms", "itl_output_p99_ms"];

/// What was tried, a row the flags, the best marked.
pub fn tuned(found: &Tuned) -> String {
    let metrics = TUNED.iter().filter_map(|key| METRICS.iter().find(|metric| metric.key == *key));
    let titles: Vec<String> = metrics
        .map(|metric| match metric.unit {
            "" => metric.title.to_owned(),
            unit => format!("{}, {unit}", metric.title),
        })
        .collect();
    let mut out = Vec::new();
    for (name, best) in &found.best_of {
        let mut rows = vec![["".to_owned(), "flags".to_owned()].into_iter().chain(titles.clone()).collect::<Vec<_>>()];
        for tried in &found.tried {
            let Some(metrics) = tried.metrics.get(name) else { continue };
            let mark = if tried.flags == *best { "best" } else { "" };
            let values = TUNED.iter().map(|key| metrics.get(*key).map_or("-".to_owned(), |value| figure(*value)));
            let shown = if tried.shown.is_empty() { "its own" } else { &tried.shown };
            rows.push([mark.to_owned(), shown.to_owned()].into_iter().chain(values).collect());
        }
        out.push(format!("{name}\n{}", aligned(&rows, 2)));
    }
    let whole = if found.best_of.len() > 1 { "The best single set for all: " } else { "" };
    out.push(format!("{whole}vllm serve {}", found.best));
    out.join("\n\n")
}

/// What is offered, requests a second. None where the next request waits for an answer, or all were there from the start.
pub(super) fn load(rate: f64) -> String {
    if rate == 0.0 { "no rate of arrivals".to_owned() } else { format!("{} req/s", figure(rate)) }
}

/// A short table a rate for documents: the metrics with those keys, in that order. Keys that no run has are left out.
pub fn markdown(results: &Results, keys: &[&str]) -> String {
    let grid = Grid::new(results);
    let mut out = Vec::new();
    for &rate in &grid.rates {
        let names: Vec<String> = grid.policies.iter().map(|name| escape_markdown(name)).collect();
        let mut lines =
            vec![format!("| {} | {} |", load(rate), names.join(" | ")), format!("|---|{}", "--:|".repeat(names.len()))];
        let rows = grid.rows(rate);
        for row in keys.iter().filter_map(|key| rows.iter().find(|row| row.metric.key == *key)) {
            let cells: Vec<String> = (0..names.len()).map(|policy| cell(row, policy, false)).collect();
            let unit = if row.metric.unit.is_empty() { String::new() } else { format!(", {}", row.metric.unit) };
            lines.push(format!("| {}{unit} | {} |", row.metric.title.trim(), cells.join(" | ")));
        }
        out.push(lines.join("\n"));
    }
    out.join("\n\n") + "\n"
}

fn cell(row: &Row, policy: usize, with_range: bool) -> String {
    let Some(value) = row.cells[policy] else { return "-".to_owned() };
    let range =
        if with_range { range(value).map_or_else(String::new, |range| format!(" [{range}]")) } else { String::new() };
    let ratio = row.ratio(policy).map_or_else(String::new, |ratio| format!(" ({ratio:.2}x)"));
    format!("{}{range}{ratio}", figure(value.mean))
}

/// Least and most over seeds, when they differ.
pub(super) fn range(value: Spread) -> Option<String> {
    (value.low < value.high).then(|| format!("{}-{}", figure(value.low), figure(value.high)))
}

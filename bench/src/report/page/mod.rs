//! The report as one HTML file: no script, nothing loaded from anywhere.

mod sections;
mod summary;

use std::fmt::Write;

use super::format::{escape, figure};
use super::grid::Grid;
use super::plots::{COLOURS, DASHES};
use super::text::load;
use crate::results::Results;

/// The report: what was simulated, a table and plots for each rate, and plots against the rate when there are several.
///
/// One file that needs no network and no script, for light and dark screens, narrow ones and paper.
pub fn html(results: &Results) -> String {
    let grid = Grid::new(results);
    let title = match results.trace.source.as_str() {
        "" => "Meridian: policies compared".to_owned(),
        source => format!("Meridian: policies compared on {}", escape(source)),
    };
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>{title}</title>\n<style>\n{}</style>\n</head>\n<body>\n<h1>{title}</h1>\n",
        include_str!("../style.css")
    );
    out.push_str(&facts(&grid));
    if grid.rates.is_empty() {
        out.push_str("<p>No runs.</p>\n");
    }
    if grid.rates.len() > 1 {
        out.push_str("<nav aria-label=\"Rates\">");
        for (at, rate) in grid.rates.iter().enumerate() {
            // Writing into a string does not fail, here and below.
            let _ = write!(out, "<a href=\"#rate-{at}\">{}</a> ", load(*rate));
        }
        out.push_str("</nav>\n");
        out.push_str(&sections::against_rates(&grid));
    }
    for (at, &rate) in grid.rates.iter().enumerate() {
        out.push_str(&sections::rate(&grid, at, rate));
    }
    out.push_str("</body>\n</html>\n");
    out
}

/// A parameter of the step model: four digits, whatever its size.
fn parameter(value: f64) -> String {
    if value != 0.0 && value.abs() < 1e-3 { format!("{value:.3e}") } else { format!("{}", (value * 1e4).round() / 1e4) }
}

/// What was simulated.
fn facts(grid: &Grid<'_>) -> String {
    let Results { made_by, trace, engine, .. } = grid.results;
    let slo = engine.slo;
    let [prompt, think, output] = trace.mean_tokens.map(figure);
    let parameters: Vec<String> =
        engine.step_model.iter().map(|(name, value)| format!("{} = {}", escape(name), parameter(*value))).collect();
    let rows = [
        (
            "Trace",
            format!(
                "{}: {} requests in {} s ({} req/s); mean tokens: prompt {prompt}, thinking {think}, answer {output}",
                escape(&trace.source),
                figure(trace.requests as f64),
                figure(trace.duration_s),
                figure(trace.rate)
            ),
        ),
        (
            "Engines",
            format!(
                "{} of {}, routed by {}; at most {} running requests and {} tokens a step; {} KV blocks of {} tokens each",
                engine.engines,
                escape(&engine.preset),
                escape(&engine.router),
                engine.max_num_seqs,
                engine.max_num_batched_tokens,
                figure(f64::from(engine.kv_blocks)),
                engine.block_tokens
            ),
        ),
        ("Step model", parameters.join(", ")),
        ("Policies", policies(grid)),
        (
            "Service levels",
            format!(
                "first answer token within {} ms plus {} ms for each token of thinking, mean gap between answer tokens at \
                 most {} ms; QoE at a reading speed of {} tokens/s",
                figure(slo.ttfo_ms),
                figure(slo.think_ms),
                figure(slo.tpot_ms),
                figure(slo.reading_tok_s)
            ),
        ),
        ("Command", format!("<code>{}</code>", escape(&made_by.command))),
        ("Meridian", format!("{}, on {}", escape(&made_by.version), escape(&made_by.machine))),
    ];
    let rows = rows
        .iter()
        .filter(|(_, text)| !text.is_empty())
        .map(|(name, text)| format!("<dt>{name}</dt><dd>{text}</dd>\n"));
    let lead = if engine.step_model.is_empty() {
        "The real engine: times were measured on the machine named below."
    } else {
        "Simulated engines: times are those of the step model, not of a machine that ran the model."
    };
    let notes: String =
        grid.results.notes.iter().map(|note| format!("<p class=\"note\">{}</p>\n", escape(note))).collect();
    format!(
        "<p>{lead}</p>\n{notes}<dl>\n{}</dl>\n\
         <p class=\"note\">ITL: gap between two tokens of a phase. TTOT: end of thinking to first answer token. TTFO: arrival \
         to first answer token. TTFT: arrival to first token of any kind. Goodput: requests a second that attain the service \
         levels.</p>\n",
        rows.collect::<String>()
    )
}

/// Who decided in the slots that the names of the policies need not tell.
fn policies(grid: &Grid<'_>) -> String {
    let Some(&rate) = grid.rates.first() else { return String::new() };
    let slots = ["eviction", "budget"].map(|slot| grid.in_slot(rate, slot));
    let told = grid.policies.iter().enumerate().filter_map(|(at, name)| {
        let [eviction, budget] = [slots[0][at]?, slots[1][at]?];
        Some(format!("{}: eviction {}, budget {}", escape(name), escape(eviction), escape(budget)))
    });
    told.collect::<Vec<_>>().join("; ")
}

/// The line of a policy, as plots draw it.
fn swatch(policy: usize) -> String {
    let (colour, dash) = (COLOURS[policy % COLOURS.len()], DASHES[policy / COLOURS.len() % DASHES.len()].0);
    format!("<span class=\"line\" style=\"border-color:{colour};border-top-style:{dash}\"></span>")
}

fn key(grid: &Grid<'_>) -> String {
    let policies = grid.policies.iter().enumerate();
    let items = policies.map(|(at, name)| format!("<li>{}{}</li>", swatch(at), escape(name)));
    format!("<ul class=\"key\" aria-label=\"Colours of policies\">{}</ul>\n", items.collect::<String>())
}

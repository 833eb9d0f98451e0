//! The comparison as text.

use std::fmt;

use super::{Change, ChangeVerdict, Comparison, Scale, Source};
use crate::report::format::{aligned, clean, figure};

impl fmt::Display for Comparison {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for note in &self.notes {
            writeln!(out, "note: {note}")?;
        }
        for group in &self.groups {
            let seeds: Vec<String> = group.seeds.iter().map(u64::to_string).collect();
            writeln!(
                out,
                "A: {}   B: {}   {} req/s, seed{} {}",
                clean(&group.policy_a),
                clean(&group.policy_b),
                figure(group.rate),
                if seeds.len() == 1 { "" } else { "s" },
                seeds.join(", ")
            )?;
            let head = ["", "", "A", "B", "change", "95 % interval", "pairs", "verdict"].map(str::to_owned).to_vec();
            let rows: Vec<Vec<String>> = std::iter::once(head).chain(group.metrics.iter().map(row)).collect();
            writeln!(out, "{}\n", aligned(&rows, 2))?;
        }
        writeln!(
            out,
            "{} worse, {} better. A and B are values of whole runs; change and interval come from pairs of\n\
             batches, or of seeds (s). A verdict needs a change of {} % and a p-value below {:.2} after Holm's\n\
             correction for all metrics.",
            self.worse,
            self.better,
            figure(100.0 * self.min_change),
            1.0 - self.confidence
        )
    }
}

fn row(row: &Change) -> Vec<String> {
    let shown = |value: f64| match row.scale {
        Scale::Ratio => format!("{:+.1}%", 100.0 * value),
        Scale::Difference => format!("{}{}", if value < 0.0 { "-" } else { "+" }, figure(value.abs())),
    };
    let interval = match (row.low, row.high) {
        (Some(low), Some(high)) => format!("{} to {}", shown(low), shown(high)),
        _ => "-".to_owned(),
    };
    let verdict = match row.verdict {
        ChangeVerdict::Better => "better",
        ChangeVerdict::Worse => "WORSE",
        ChangeVerdict::Noise => "noise",
        ChangeVerdict::Unknown => "too few pairs",
    };
    let pairs = format!("{}{}", row.pairs, if row.source == Source::Seeds { "s" } else { "" });
    vec![
        row.title.to_owned(),
        row.unit.to_owned(),
        figure(row.a),
        figure(row.b),
        row.change.map_or_else(|| "-".to_owned(), shown),
        interval,
        pairs,
        verdict.to_owned(),
    ]
}

//! Tenants side by side.

use plotters::prelude::*;

use super::{Axis, COLOURS, Caption, Frame, colour};
use crate::report::format::cut;
use crate::report::grid::{Grid, Spread};

/// Tenants in the plot, the largest first.
pub(in crate::report) const MOST: usize = 16;
const LONGEST_NAME: usize = 16;
const ROW: u32 = 56;

/// TTFO p99 by tenant, a dot a policy; nothing when there are fewer than two tenants.
pub(in crate::report) fn tenants(grid: &Grid<'_>, rate: f64, caption: &Caption) -> Option<String> {
    let mut sizes = Vec::<(&str, u64)>::new();
    for row in (0..grid.policies.len()).flat_map(|policy| grid.runs(rate, policy)).flat_map(|run| &run.tenants) {
        match sizes.iter_mut().find(|(name, _)| *name == row.name) {
            Some((_, size)) => *size = size.saturating_add(row.requests),
            None => sizes.push((&row.name, row.requests)),
        }
    }
    sizes.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    sizes.truncate(MOST);
    if sizes.len() < 2 {
        return None;
    }
    let value = |policy: usize, name: &str| {
        let runs = grid.runs(rate, policy);
        let rows = runs.iter().filter_map(|run| run.tenants.iter().find(|row| row.name == name));
        Spread::of(rows.map(|row| row.ttfo_p99_ms)).map(|spread| spread.mean)
    };
    let count = sizes.len();
    let mut dots = Vec::new();
    for (at, (name, _)) in sizes.iter().enumerate() {
        // The first row at the top.
        dots.extend((0..grid.policies.len()).filter_map(|policy| Some((policy, count - 1 - at, value(policy, name)?))));
    }
    let x = Axis::of("TTFO p99 (ms)", dots.iter().map(|dot| 1.03 * dot.2));
    let names: Vec<String> = sizes.iter().rev().map(|(name, _)| shown(name)).collect();
    let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    // A guess that suits wide letters too, for there is no font to ask.
    let left = 40 + 19 * u32::try_from(longest).unwrap_or(0);
    let size = (super::SIZE.0, 130 + ROW * u32::try_from(count.max(3)).unwrap_or(3));
    let frame = Frame { size, left, names, ..Frame::new(x, Axis::positions(count)) };
    Some(frame.draw(caption, |chart| {
        let policies = grid.policies.len();
        for &(policy, at, value) in dots.iter().rev() {
            // One above the other within the row, so that equal values do not hide each other.
            let shift = 0.6 * ((policy as f64 + 0.5) / policies as f64 - 0.5);
            // Hollow where the colours repeat.
            let style = if policy < COLOURS.len() { colour(policy).filled() } else { colour(policy).stroke_width(3) };
            let dot = Circle::new((frame.x.place(value), at as f64 - shift), 8, style);
            chart.draw_series(std::iter::once(dot))?;
        }
        Ok(())
    }))
}

fn shown(name: &str) -> String {
    if name.is_empty() { "(none)".to_owned() } else { cut(name, LONGEST_NAME) }
}

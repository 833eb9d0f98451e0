use super::{FLOOR, Grid, STOCK, TUNED, broken, gains};
use crate::report::format::{aligned, clean, figure};

/// For a terminal: a table for each policy and baseline, a row a cell, then what does not hold and the gains.
#[must_use]
pub fn table(grid: &Grid) -> String {
    let mut out = Vec::new();
    for policy in grid.policies() {
        for against in [STOCK, TUNED] {
            out.push(ratios(grid, policy, against));
        }
    }
    out.push(capacities(grid));
    out.join("\n\n")
}

/// The highest rates served.
fn capacities(grid: &Grid) -> String {
    let policies = grid.policies();
    let mut rows = vec![vec!["capacity, req/s".to_owned(), String::new(), "tuned stock".to_owned()]];
    rows[0].extend(policies.iter().map(|name| clean(name)));
    for row in &grid.rows {
        let shown = |name: &str| row.capacity.get(name).map_or("none".to_owned(), |rate| figure(*rate));
        let rates = std::iter::once(TUNED).chain(policies.iter().copied()).map(shown);
        rows.push([clean(&row.engine), clean(&row.traffic)].into_iter().chain(rates).collect());
    }
    aligned(&rows, 2)
}

/// A policy over a baseline.
fn ratios(grid: &Grid, policy: &str, against: &str) -> String {
    let mut rows = vec![vec!["cell".to_owned(), "flags of tuned stock".to_owned()]];
    rows[0].extend(FLOOR.iter().map(|floor| floor.title.to_owned()));
    for cell in &grid.cells {
        let mut row = vec![clean(&cell.name()), cell.flags.to_string()];
        row.extend(FLOOR.iter().map(|floor| match floor.ratio(cell, policy, against) {
            Some(ratio) if floor.holds(cell, policy, against) => format!("{ratio:.2} "),
            Some(ratio) => format!("{ratio:.2}*"),
            None => "- ".to_owned(),
        }));
        rows.push(row);
    }
    let found = broken(grid, policy, against);
    let gains: Vec<String> = gains(grid, policy, against)
        .iter()
        .map(|gain| format!("{} {:.2} ({:.2} to {:.2})", gain.title, gain.median, gain.low, gain.high))
        .collect();
    format!(
        "{} over {}, medians of {} seeds; * breaks the floor: {} of {}\n{}\nFrom 0.95 of the capacity on, median over cells \
         (lowest to highest): {}",
        clean(policy),
        if against == TUNED { "tuned stock vLLM" } else { "stock vLLM" },
        figure(grid.seeds.len() as f64),
        found.len(),
        grid.cells.len() * FLOOR.len(),
        aligned(&rows, 2),
        gains.join(", ")
    )
}

use super::{Cell, FLOOR, Grid, OPPONENTS, STOCK, broken, gains};
use crate::report::format::{aligned, clean, figure};

/// For a terminal: what each row can serve, the goodput of each cell, and for each policy the medians over every opponent.
#[must_use]
pub fn table(grid: &Grid) -> String {
    let mut out = vec![capacities(grid), goodput(grid)];
    out.extend(grid.policies().into_iter().map(|policy| against(grid, policy)));
    out.join("\n\n")
}

/// What stock vLLM serves, and the best flags.
fn capacities(grid: &Grid) -> String {
    let heads = ["engine", "traffic", "capacity, req/s", "of twice the run", "lives, s", "busy", "best single flags"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    for row in &grid.rows {
        let capacity = match (&row.capacity, row.at_once) {
            (Some(found), _) => [found.rate, found.doubled, found.residence_s, found.busy].map(figure).to_vec(),
            (None, Some(sessions)) => vec![format!("{sessions} sessions"), "-".into(), "-".into(), "-".into()],
            (None, None) => vec!["none".into(), "-".into(), "-".into(), "-".into()],
        };
        let flags = if row.best_flags.is_empty() { "its own".to_owned() } else { row.best_flags.clone() };
        let flags = row.left_out().unwrap_or(flags);
        rows.push([vec![clean(&row.engine), clean(&row.traffic)], capacity, vec![flags]].concat());
    }
    format!(
        "Capacity of stock vLLM as it starts: nine of ten requests attain the service levels\n{}",
        aligned(&rows, 2)
    )
}

/// Requests a second that attain the service levels, by contender.
fn goodput(grid: &Grid) -> String {
    let names: Vec<&str> = OPPONENTS.into_iter().chain(grid.policies()).collect();
    let mut rows = vec![vec!["goodput, req/s".to_owned()]];
    rows[0].extend(names.iter().map(|name| clean(name)));
    for cell in grid.counted() {
        let mut row = vec![clean(&cell.name())];
        row.extend(names.iter().map(|name| cell.metric(name, "goodput_rps").map_or("-".to_owned(), figure)));
        rows.push(row);
    }
    aligned(&rows, 1)
}

/// A policy over every opponent: medians over the hard cells, and the floors that do not hold in any.
fn against(grid: &Grid, policy: &str) -> String {
    let opponents: Vec<&str> = OPPONENTS.into_iter().collect();
    let mut rows = vec![vec![format!("{} over", clean(policy))]];
    rows[0].extend(opponents.iter().map(|name| clean(name)));
    let all: Vec<_> = opponents.iter().map(|name| gains(grid, policy, name, Cell::is_hard)).collect();
    let titles: Vec<(&str, &str)> = all.iter().flatten().map(|gain| (gain.key, gain.title)).collect();
    let mut shown: Vec<&str> = Vec::new();
    for (key, title) in titles {
        if shown.contains(&key) {
            continue;
        }
        shown.push(key);
        let cell = |gains: &Vec<super::Gain>| {
            gains.iter().find(|gain| gain.key == key).map_or("-".to_owned(), |gain| {
                format!("{:.2} ({:.2}-{:.2})", gain.median, gain.interval[0], gain.interval[1])
            })
        };
        rows.push(std::iter::once(title.to_owned()).chain(all.iter().map(cell)).collect());
    }
    let floors = grid.counted().count() * FLOOR.len();
    let mut lost = vec!["floors that do not hold".to_owned()];
    lost.extend(opponents.iter().map(|name| format!("{} of {floors}", broken(grid, policy, name).len())));
    rows.push(lost);
    let found = broken(grid, policy, STOCK);
    let mut out = format!(
        "Medians over cells from 0.95 of the capacity on, days and sessions, with 95 % intervals\n{}",
        aligned(&rows, 1)
    );
    for broken in found {
        out += &format!(
            "\n  {}: {} {:.2} of stock\u{2019}s, floor {}",
            clean(&broken.cell),
            broken.metric,
            broken.ratio,
            broken.bound
        );
    }
    out
}

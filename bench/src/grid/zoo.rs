//! What a shipped policy must not cost anywhere, or say so first.

use super::{Cell, Grid, STOCK};

/// Least throughput and goodput of a shipped policy in any cell, over stock vLLM as it starts.
const LEAST: [(&str, &str, f64); 2] = [("throughput_tok_s", "throughput", 0.9), ("goodput_rps", "goodput", 0.8)];
/// The pages of the shipped policies, a section each.
const README: &str = include_str!("../../../policies/shipped/README.md");
/// How a section begins whose policy falls below.
const MARK: &str = "**Below the floor.** ";

/// What a policy costs in its worst cell, as its section must begin; `None` where it keeps to the floor in every cell that
/// counts.
#[must_use]
pub fn worst(grid: &Grid, policy: &str) -> Option<String> {
    let below = |cell: &Cell| {
        let of = |(key, title, least): (&str, &'static str, f64)| Some((cell.ratio(policy, STOCK, key)?, title, least));
        let found = LEAST.into_iter().filter_map(of).filter(|(ratio, _, least)| ratio < least);
        found.map(|(ratio, title, least)| (ratio / least, format!("{}: {title} {ratio:.2}", cell.name()))).collect()
    };
    let mut all: Vec<(f64, String)> = grid.counted().flat_map(|cell| -> Vec<(f64, String)> { below(cell) }).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (_, line) = all.into_iter().next()?;
    Some(format!("{line} of stock vLLM's"))
}

/// The first line of a shipped policy's section, where that says what the policy costs below the floor.
///
/// ```
/// use meridian_bench::grid::below_floor;
///
/// assert_eq!(below_floor("balanced"), None);
/// ```
#[must_use]
pub fn below_floor(policy: &str) -> Option<&'static str> {
    let (_, section) = README.split_once(&format!("\n### {policy}\n"))?;
    let line = section.lines().find(|line| !line.is_empty())?;
    line.strip_prefix(MARK).map(|line| line.trim_end_matches('.'))
}

//! What a default must not lose anywhere, and what it is to win where the load is high.

use serde::Serialize;

use super::{Cell, Grid, median};

/// How much worse than a baseline a metric may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Floor {
    /// Key of the metric.
    pub key: &'static str,
    /// For tables.
    pub title: &'static str,
    /// The ratio to the baseline: at least this where more is better, at most this otherwise.
    pub ratio: f64,
    /// Or so much above the baseline, in the metric's unit.
    pub or_above: f64,
    /// More is better.
    pub more_is_better: bool,
}

const fn at_least(key: &'static str, title: &'static str, ratio: f64) -> Floor {
    Floor { key, title, ratio, or_above: 0.0, more_is_better: true }
}

const fn at_most(key: &'static str, title: &'static str, ratio: f64, or_above: f64) -> Floor {
    Floor { key, title, ratio, or_above, more_is_better: false }
}

/// The floor of every cell.
pub const FLOOR: [Floor; 8] = [
    at_least("throughput_tok_s", "throughput", 0.99),
    at_least("goodput_rps", "goodput", 0.99),
    at_most("ttfo_p50_ms", "TTFO p50", 1.03, 0.0),
    at_most("ttfo_p99_ms", "TTFO p99", 1.03, 0.0),
    at_most("itl_output_p99_ms", "output ITL p99", 1.03, 0.0),
    at_most("ttft_p50_ms", "TTFT p50", 1.1, 50.0),
    at_most("ttft_p99_ms", "TTFT p99", 1.15, 500.0),
    at_least("fairness_jain", "fairness", 0.98),
];

impl Floor {
    /// The median ratio of a contender to a baseline in a cell, where both have the metric.
    #[must_use]
    pub fn ratio(&self, cell: &Cell, contender: &str, against: &str) -> Option<f64> {
        median(cell.ratios(contender, against, self.key))
    }

    /// Whether a contender keeps it in a cell; a metric that one of them does not have is kept.
    #[must_use]
    pub fn holds(&self, cell: &Cell, contender: &str, against: &str) -> bool {
        let Some(ratio) = self.ratio(cell, contender, against) else { return true };
        if self.more_is_better {
            return ratio >= self.ratio;
        }
        let above = cell.median(contender, self.key).zip(cell.median(against, self.key)).map(|(own, base)| own - base);
        ratio <= self.ratio || above.is_some_and(|above| above <= self.or_above)
    }
}

/// A floor that does not hold in a cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Broken {
    /// The cell.
    pub cell: String,
    /// The baseline.
    pub against: String,
    /// The metric.
    pub metric: &'static str,
    /// Median ratio to the baseline.
    pub ratio: f64,
    /// The bound.
    pub bound: f64,
}

/// Every floor that a contender breaks.
#[must_use]
pub fn broken(grid: &Grid, contender: &str, against: &str) -> Vec<Broken> {
    let cells = grid.cells.iter().flat_map(|cell| FLOOR.iter().map(move |floor| (cell, floor)));
    let of = |(cell, floor): (&Cell, &Floor)| {
        let ratio = floor.ratio(cell, contender, against).filter(|_| !floor.holds(cell, contender, against))?;
        Some(Broken { cell: cell.name(), against: against.to_owned(), metric: floor.title, ratio, bound: floor.ratio })
    };
    cells.filter_map(of).collect()
}

/// A metric of a contender over a baseline's, over many cells.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// Key of the metric.
    pub key: &'static str,
    /// For tables.
    pub title: &'static str,
    /// The median over cells of the median over seeds, the lowest and the highest.
    pub median: f64,
    /// The lowest of a cell.
    pub low: f64,
    /// The highest of a cell.
    pub high: f64,
    /// Cells.
    pub cells: usize,
}

/// What is looked at beside the floor: only where work is lost.
const RECOMPUTED: (&str, &str) = ("recomputed_tokens", "recomputed tokens");
/// Loads from here on are high.
const HIGH_LOAD: f64 = 0.95;

/// The gains of a contender where the load is high.
#[must_use]
pub fn gains(grid: &Grid, contender: &str, against: &str) -> Vec<Gain> {
    let keys = FLOOR.iter().map(|floor| (floor.key, floor.title)).chain([RECOMPUTED]);
    let of = |(key, title)| {
        let cells = grid.cells.iter().filter(|cell| cell.load >= HIGH_LOAD);
        let is_lost = |cell: &&Cell| key != RECOMPUTED.0 || cell.median(against, key).is_some_and(|lost| lost > 0.0);
        let ratios = cells.filter(is_lost).filter_map(|cell| median(cell.ratios(contender, against, key)));
        let mut ratios: Vec<f64> = ratios.collect();
        ratios.sort_by(f64::total_cmp);
        let (low, high) = (*ratios.first()?, *ratios.last()?);
        Some(Gain { key, title, low, high, cells: ratios.len(), median: median(ratios)? })
    };
    keys.filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::grid::{STOCK, TUNED};
    use crate::tune::Flags;

    fn metrics(ttft_ms: f64, goodput: f64) -> BTreeMap<String, f64> {
        BTreeMap::from([("ttft_p50_ms".to_owned(), ttft_ms), ("goodput_rps".to_owned(), goodput)])
    }

    fn cell(load: f64, own: &[(f64, f64)], stock: &[(f64, f64)]) -> Cell {
        let of = |values: &[(f64, f64)]| values.iter().map(|(ttft_ms, goodput)| metrics(*ttft_ms, *goodput)).collect();
        let contenders =
            BTreeMap::from([("mine".into(), of(own)), (STOCK.into(), of(stock)), (TUNED.into(), of(stock))]);
        let flags = Flags { max_num_batched_tokens: 8192, long_prefill_token_threshold: 0 };
        Cell { engine: "e".into(), traffic: "t".into(), load, rate: 1.0, flags, contenders }
    }

    #[test]
    fn a_floor_is_a_median_over_seeds_and_small_differences_are_none() {
        let seeds = [(100.0, 1.0), (100.0, 1.0), (100.0, 1.0)];
        let slower = cell(1.0, &[(149.0, 1.0), (140.0, 0.5), (160.0, 1.0)], &seeds);
        let grid = Grid { cells: vec![slower], ..Grid::default() };
        assert_eq!(broken(&grid, "mine", STOCK), [], "49 ms more than 100, and one bad seed");
        let slow = cell(1.3, &[(400.0, 0.9), (400.0, 0.9), (90.0, 2.0)], &seeds);
        let grid = Grid { cells: vec![slow], ..Grid::default() };
        let broken = broken(&grid, "mine", STOCK);
        let found: Vec<_> = broken.iter().map(|broken| (broken.metric, broken.ratio)).collect();
        assert_eq!(found, [("goodput", 0.9), ("TTFT p50", 4.0)]);
        assert_eq!(broken[0].cell, "e, t, load 1.3");
    }

    #[test]
    fn gains_are_of_high_loads() {
        let seeds = [(100.0, 1.0)];
        let cells = vec![
            cell(0.5, &[(1.0, 9.0)], &seeds),
            cell(0.95, &[(100.0, 1.2)], &seeds),
            cell(1.3, &[(100.0, 1.4)], &seeds),
        ];
        let grid = Grid { cells, ..Grid::default() };
        let goodput = gains(&grid, "mine", TUNED).into_iter().find(|gain| gain.key == "goodput_rps").unwrap();
        assert!((goodput.median - 1.3).abs() < 1e-9 && goodput.cells == 2, "{goodput:?}");
    }
}

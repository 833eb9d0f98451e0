//! What a default must not lose anywhere, and what it is to win where the load is high.

use serde::Serialize;

use super::{Cell, Grid, STOCK};

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
    /// The ratio of a contender to a baseline in a cell, where both have the metric.
    #[must_use]
    pub fn ratio(&self, cell: &Cell, contender: &str, against: &str) -> Option<f64> {
        cell.ratio(contender, against, self.key)
    }

    /// Whether a contender keeps it in a cell. A metric that one of them does not have is kept, and so is one whose interval
    /// says that the two are alike.
    #[must_use]
    pub fn holds(&self, cell: &Cell, contender: &str, against: &str) -> bool {
        let Some(ratio) = self.ratio(cell, contender, against) else { return true };
        let interval = cell.contenders.get(contender).and_then(|found| found.over_stock.get(self.key));
        if against == STOCK && interval.is_some_and(|[low, high]| (*low..=*high).contains(&1.0)) {
            return true;
        }
        if self.more_is_better {
            return ratio >= self.ratio;
        }
        let above = cell.metric(contender, self.key).zip(cell.metric(against, self.key)).map(|(own, base)| own - base);
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
    /// Ratio to the baseline.
    pub ratio: f64,
    /// The bound.
    pub bound: f64,
}

/// Every floor that a contender breaks, in the cells that count.
#[must_use]
pub fn broken(grid: &Grid, contender: &str, against: &str) -> Vec<Broken> {
    let cells = grid.counted().flat_map(|cell| FLOOR.iter().map(move |floor| (cell, floor)));
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
    /// The median over cells.
    pub median: f64,
    /// Its 95 % interval, from order statistics; the range of the cells where they are too few for one.
    pub interval: [f64; 2],
    /// The lowest of a cell.
    pub low: f64,
    /// The highest of a cell.
    pub high: f64,
    /// Cells.
    pub cells: usize,
}

/// What is looked at beside the floor: work is lost in some cells only, and only days have a burst.
const BESIDE: [(&str, &str); 4] = [
    ("slo_attainment", "SLO attainment"),
    ("recomputed_tokens", "recomputed tokens"),
    ("burst_attainment", "SLO attainment of the burst"),
    ("recovery_s", "recovery after the burst"),
];

/// A contender over a baseline in the cells that count and that `chosen` takes: the metrics of the floor, and some beside.
#[must_use]
pub fn gains(grid: &Grid, contender: &str, against: &str, chosen: impl Fn(&Cell) -> bool) -> Vec<Gain> {
    let keys = FLOOR.iter().map(|floor| (floor.key, floor.title)).chain(BESIDE);
    let of = |(key, title): (&'static str, &'static str)| {
        let cells = grid.counted().filter(|cell| chosen(cell));
        let is_there = |cell: &&Cell| cell.metric(against, key).is_some_and(|value| value > 0.0);
        let mut ratios: Vec<f64> =
            cells.filter(is_there).filter_map(|cell| cell.ratio(contender, against, key)).collect();
        ratios.sort_by(f64::total_cmp);
        let (low, high) = (*ratios.first()?, *ratios.last()?);
        let (median, interval) = (median(&ratios)?, median_interval(&ratios));
        Some(Gain { key, title, median, interval, low, high, cells: ratios.len() })
    };
    keys.filter_map(of).collect()
}

/// The median of sorted values; `None` of nothing.
fn median(sorted: &[f64]) -> Option<f64> {
    let (low, high) = (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
    Some(f64::midpoint(*low, *high))
}

/// The 95 % interval of the median of sorted values, whatever their distribution: between those order statistics that the
/// median leaves outside with a chance of at most 2.5 % a side (the sign test; Conover, "Practical Nonparametric
/// Statistics", section 3.2).
fn median_interval(sorted: &[f64]) -> [f64; 2] {
    let n = sorted.len();
    let (mut chance, mut term, mut outside) = (0.0, 0.5_f64.powi(n.min(1000) as i32), 0);
    for k in 0..n / 2 {
        chance += term;
        if chance > 0.025 {
            break;
        }
        outside = k + 1;
        term *= (n - k) as f64 / (k + 1) as f64;
    }
    // So many values on each side may be left out, but for the one that the interval ends at.
    let at = outside.saturating_sub(1);
    [sorted[at], sorted[n - 1 - at]]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::grid::{Contender, Row};
    use crate::steady::Capacity;

    fn contender(ttft_ms: f64, goodput: f64) -> Contender {
        let metrics = [("ttft_p50_ms".to_owned(), ttft_ms), ("goodput_rps".to_owned(), goodput)];
        Contender { metrics: metrics.into(), ..Contender::default() }
    }

    fn grid(cells: Vec<Cell>) -> Grid {
        let capacity = Some(Capacity { rate: 1.0, doubled: 1.0, converged: true, busy: 0.9, ..Capacity::default() });
        let rows = vec![Row { engine: "e".into(), traffic: "t".into(), capacity, ..Row::default() }];
        Grid { rows, cells, ..Grid::default() }
    }

    fn cell(part: f64, own: (f64, f64), stock: (f64, f64)) -> Cell {
        Cell {
            engine: "e".into(),
            traffic: "t".into(),
            load: format!("load {part}"),
            part: Some(part),
            rate: part,
            burst_s: None,
            most_in_time: None,
            converged: true,
            contenders: BTreeMap::from([
                ("mine".into(), contender(own.0, own.1)),
                (STOCK.into(), contender(stock.0, stock.1)),
            ]),
        }
    }

    #[test]
    fn small_differences_break_no_floor() {
        let slower = grid(vec![cell(0.8, (149.0, 1.0), (100.0, 1.0))]);
        assert_eq!(broken(&slower, "mine", STOCK), [], "49 ms more than 100");
        let slow = grid(vec![cell(0.95, (400.0, 0.9), (100.0, 1.0))]);
        let broken = broken(&slow, "mine", STOCK);
        let found: Vec<_> = broken.iter().map(|broken| (broken.metric, broken.ratio)).collect();
        assert_eq!(found, [("goodput", 0.9), ("TTFT p50", 4.0)]);
        assert_eq!(broken[0].cell, "e, t, load 0.95");
    }

    #[test]
    fn an_interval_that_holds_one_is_a_tie() {
        let mut tied = cell(0.95, (400.0, 0.9), (100.0, 1.0));
        let mine = tied.contenders.get_mut("mine").unwrap();
        mine.over_stock = BTreeMap::from([("goodput_rps".to_owned(), [0.8, 1.02])]);
        let found = broken(&grid(vec![tied]), "mine", STOCK);
        assert_eq!(found.iter().map(|broken| broken.metric).collect::<Vec<_>>(), ["TTFT p50"]);
    }

    #[test]
    fn idle_rows_and_those_without_a_steady_state_do_not_count() {
        let cells = vec![cell(0.95, (400.0, 0.9), (100.0, 1.0))];
        for change in
            [|capacity: &mut Capacity| capacity.busy = 0.49, |capacity: &mut Capacity| capacity.converged = false]
        {
            let mut grid = grid(cells.clone());
            change(grid.rows[0].capacity.as_mut().unwrap());
            assert!(grid.rows[0].left_out().is_some());
            assert_eq!((broken(&grid, "mine", STOCK), gains(&grid, "mine", STOCK, |_| true)), (vec![], vec![]));
        }
    }

    #[test]
    fn gains_are_medians_with_intervals() {
        let cells: Vec<Cell> = (1..=9).map(|i| cell(0.95, (100.0, f64::from(i)), (100.0, 1.0))).collect();
        let hard = gains(&grid(cells), "mine", STOCK, Cell::is_hard);
        let goodput = hard.iter().find(|gain| gain.key == "goodput_rps").unwrap();
        assert_eq!((goodput.median, goodput.interval, goodput.cells), (5.0, [2.0, 8.0], 9));
        // Of five cells, no interval leaves one out.
        assert_eq!(median_interval(&[1.0, 2.0, 3.0, 4.0, 5.0]), [1.0, 5.0]);
    }
}

//! Distributions: share of values at most x.

use plotters::prelude::*;

use super::{Axis, Caption, Frame, colour, line};
use crate::report::grid::Grid;

/// A line a policy; nothing when no run has the curve. With several seeds the mean of their distributions.
pub(in crate::report) fn cdf(grid: &Grid<'_>, rate: f64, key: &str, what: &str, caption: &Caption) -> Option<String> {
    let curves: Vec<Vec<(f64, f64)>> = (0..grid.policies.len())
        .map(|policy| {
            let seeds = grid.runs(rate, policy);
            let seeds: Vec<Vec<[f64; 2]>> =
                seeds.iter().filter_map(|run| run.curves.get(key)).map(|c| usable(c)).collect();
            mean_of(&seeds.iter().filter(|curve| !curve.is_empty()).map(Vec::as_slice).collect::<Vec<_>>())
        })
        .collect();
    if curves.iter().all(Vec::is_empty) {
        return None;
    }
    let x = Axis::of(&format!("{what} (ms)"), curves.iter().flatten().map(|point| point.0));
    let frame = Frame::new(x, Axis::linear("share of values", 0.0, 1.0));
    Some(frame.draw(caption, |chart| {
        // The baseline last, so that it lies on top.
        for (policy, curve) in curves.iter().enumerate().rev().filter(|(_, curve)| !curve.is_empty()) {
            line(chart, &frame, curve, colour(policy).stroke_width(4))?;
        }
        Ok(())
    }))
}

/// Finite points, in rising order.
fn usable(curve: &[[f64; 2]]) -> Vec<[f64; 2]> {
    let mut points: Vec<[f64; 2]> = curve.iter().copied().filter(|[x, y]| x.is_finite() && y.is_finite()).collect();
    points.sort_by(|a, b| a[0].total_cmp(&b[0]).then(a[1].total_cmp(&b[1])));
    points
}

fn mean_of(curves: &[&[[f64; 2]]]) -> Vec<(f64, f64)> {
    if let [only] = curves {
        return only.iter().map(|&[x, y]| (x, y)).collect();
    }
    let mut xs: Vec<f64> = curves.iter().copied().flatten().map(|point| point[0]).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let share = |x: f64| curves.iter().map(|curve| share_at(curve, x)).sum::<f64>() / curves.len() as f64;
    xs.into_iter().map(|x| (x, share(x))).collect()
}

fn share_at(curve: &[[f64; 2]], x: f64) -> f64 {
    let after = curve.partition_point(|point| point[0] <= x);
    match (after.checked_sub(1).map(|at| curve[at]), curve.get(after)) {
        (None, _) => 0.0,
        (Some([_, share]), None) => share,
        (Some([x0, y0]), Some([x1, y1])) => y0 + (y1 - y0) * (x - x0) / (x1 - x0),
    }
}

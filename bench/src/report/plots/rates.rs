//! A metric against the offered load.

use plotters::prelude::*;

use super::{Axis, Caption, Frame, colour, line};
use crate::report::grid::{Grid, Spread};

/// A line a policy, with a bar from the least to the most over seeds; nothing when no run has the metric.
pub(in crate::report) fn against_rate(grid: &Grid<'_>, key: &str, y: Axis, caption: &Caption) -> Option<String> {
    let of = |policy: usize| -> Vec<(f64, Spread)> {
        grid.rates.iter().filter_map(|&rate| Some((rate, grid.spread(rate, policy, key)?))).collect()
    };
    let lines: Vec<Vec<(f64, Spread)>> = (0..grid.policies.len()).map(of).collect();
    if lines.iter().all(Vec::is_empty) {
        return None;
    }
    let frame = Frame::new(Axis::of("offered load (requests/s)", grid.rates.iter().copied()), y);
    Some(frame.draw(caption, |chart| {
        for (policy, values) in lines.iter().enumerate().rev() {
            let points: Vec<(f64, f64)> = values.iter().map(|(rate, spread)| (*rate, spread.mean)).collect();
            line(chart, &frame, &points, colour(policy).stroke_width(4))?;
            for (rate, spread) in values {
                let x = frame.x.place(*rate);
                let bar = vec![(x, frame.y.place(spread.low)), (x, frame.y.place(spread.high))];
                chart.draw_series(std::iter::once(PathElement::new(bar, colour(policy).stroke_width(3))))?;
                let dot = (x, frame.y.place(spread.mean));
                chart.draw_series(std::iter::once(Circle::new(dot, 7, colour(policy).filled())))?;
            }
        }
        Ok(())
    }))
}

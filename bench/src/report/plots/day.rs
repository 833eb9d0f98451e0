//! A metric over a day, a line a scheduler.

use plotters::prelude::*;

use super::{Axis, Caption, Frame, INK, colour, line};

/// One line for each series of points (seconds, value), in the colours of policies; vertical lines where the burst begins
/// and ends.
pub(in crate::report) fn day(
    series: &[Vec<(f64, f64)>],
    burst_s: Option<[f64; 2]>,
    y: Axis,
    caption: &Caption,
) -> String {
    let end_s = series.iter().flatten().map(|(t_s, _)| *t_s).fold(0.0, f64::max);
    let frame = Frame::new(Axis::linear("arrival (minutes)", 0.0, end_s / 60.0), y);
    frame.draw(caption, |chart| {
        for t_s in burst_s.into_iter().flatten() {
            let x = frame.x.place(t_s / 60.0);
            let ends = vec![(x, frame.y.place(f64::NEG_INFINITY)), (x, frame.y.place(f64::INFINITY))];
            chart.draw_series(std::iter::once(PathElement::new(ends, INK.mix(0.4).stroke_width(2))))?;
        }
        for (policy, points) in series.iter().enumerate().rev() {
            let points: Vec<(f64, f64)> = points.iter().map(|(t_s, value)| (t_s / 60.0, *value)).collect();
            line(chart, &frame, &points, colour(policy).stroke_width(4))?;
        }
        Ok(())
    })
}

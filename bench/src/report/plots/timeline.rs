//! Engines over time: queues, KV memory, and what happened.

use plotters::prelude::*;

use super::{Axis, Caption, Chart, Drawn, FONT, Frame, INK, colour, thinned};
use crate::results::{Run, TimelinePoint};

/// Columns of a plot: more points than pixels only make the file large.
const COLUMNS: usize = 300;
/// Lines of events in a plot.
pub(in crate::report) const MOST_EVENTS: usize = 20;
/// Opacities of stacked areas, the lowest first, as the page's legend shows them.
pub(in crate::report) const SHADES: [f64; 4] = [0.9, 0.55, 0.3, 0.12];

type Layer = fn(&TimelinePoint) -> f64;

/// Requests by state, stacked; `most` is the upper end of the axis, so that plots of several policies can be compared.
pub(in crate::report) fn queues(run: &Run, policy: usize, end_s: f64, most: f64, caption: &Caption) -> String {
    let layers: [Layer; 4] = [|p| p.output, |p| p.think, |p| p.prefill, |p| p.waiting];
    stacked(run, policy, end_s, Axis::linear("requests", 0.0, most), &layers, caption)
}

/// Shares of KV blocks, stacked: held by requests, then free but cached.
pub(in crate::report) fn kv(run: &Run, policy: usize, end_s: f64, caption: &Caption) -> String {
    let layers: [Layer; 2] = [|p| 100.0 * p.kv_used, |p| 100.0 * p.kv_cached];
    stacked(run, policy, end_s, Axis::linear("KV blocks (%)", 0.0, 100.0), &layers, caption)
}

fn stacked(run: &Run, policy: usize, end_s: f64, y: Axis, layers: &[Layer], caption: &Caption) -> String {
    let frame = Frame::new(Axis::linear("time (s)", 0.0, end_s), y);
    let points = binned(&run.timeline, layers);
    frame.draw(caption, |chart| {
        for (at, shade) in SHADES.into_iter().enumerate().take(layers.len()) {
            let mut area = line_of(&frame, &points, at + 1);
            area.extend(line_of(&frame, &points, at).into_iter().rev());
            chart.draw_series(std::iter::once(Polygon::new(area, colour(policy).mix(shade).filled())))?;
        }
        let total = line_of(&frame, &points, layers.len());
        chart.draw_series(std::iter::once(PathElement::new(total, colour(policy).stroke_width(2))))?;
        events(chart, &frame, run)
    })
}

/// Upper edge of the first so many layers.
fn line_of(frame: &Frame, points: &[(f64, Vec<f64>)], layers: usize) -> Vec<(f64, f64)> {
    let sums: Vec<(f64, f64)> = points.iter().map(|(t, values)| (*t, values[..layers].iter().sum())).collect();
    thinned(frame, &sums)
}

/// Means of neighbouring points, with the time of the first.
fn binned(timeline: &[TimelinePoint], layers: &[Layer]) -> Vec<(f64, Vec<f64>)> {
    let good = |value: f64| if value.is_finite() { value.max(0.0) } else { 0.0 };
    let group = timeline.len().div_ceil(COLUMNS).max(1);
    let values = |points: &[TimelinePoint]| {
        let mean = |layer: &Layer| points.iter().map(|p| good(layer(p))).sum::<f64>() / points.len() as f64;
        (good(points[0].t_s), layers.iter().map(mean).collect())
    };
    timeline.chunks(group).map(values).collect()
}

/// Numbered, as in the list below the plots: texts side by side would cover each other.
fn events(chart: &mut Chart<'_, '_>, frame: &Frame, run: &Run) -> Drawn {
    let font = ("sans-serif", FONT).into_font().color(&INK);
    let ends = chart.y_range();
    let mut labelled = f64::NEG_INFINITY;
    for (at, event) in run.events.iter().take(MOST_EVENTS).enumerate().filter(|(_, event)| event.t_s.is_finite()) {
        let x = frame.x.place(event.t_s);
        let style = INK.stroke_width(2);
        chart.draw_series(std::iter::once(PathElement::new(vec![(x, ends.start), (x, ends.end)], style)))?;
        // A number needs some room: of close events only the first is numbered.
        if x - labelled >= frame.x.span() / 24.0 {
            labelled = x;
            let place = (x + frame.x.span() / 150.0, ends.end);
            chart.draw_series(std::iter::once(Text::new((at + 1).to_string(), place, font.clone())))?;
        }
    }
    Ok(())
}

//! Points with an interval in both directions beside a line of labelled points, as a file of its own.

use plotters::coord::Shift;
use plotters::prelude::*;

use super::{Axis, Caption, Drawn, FONT, Frame, INK, colour, finished_file, line};

const SIZE: (u32, u32) = (1500, 1000);
/// Lines of the title and of the legend above the chart.
const LINE: i32 = 50;
const COLUMNS: usize = 3;
const LABEL_FONT: i32 = 28;
/// Of a marker, from its middle.
const RADIUS: i32 = 11;
const MARKER_STROKE: u32 = 4;

/// A value and the ends of its interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Whiskers {
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

/// A point in the units of the axes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Spot {
    pub name: String,
    pub x: Whiskers,
    pub y: Whiskers,
}

/// What is drawn.
#[derive(Clone, Debug)]
pub(crate) struct Points {
    /// Titles of the axes.
    pub x: String,
    pub y: String,
    /// Upper end of y; both axes begin at 0.
    pub y_most: f64,
    /// The line's entry in the legend.
    pub line_name: String,
    /// Its points, each with its name beside it.
    pub line: Vec<Spot>,
    /// The others: a colour and a shape each, by name in the legend.
    pub others: Vec<Spot>,
}

/// The plot as SVG. The same points give the same text.
///
/// # Errors
/// plotters cannot draw it.
pub(crate) fn points(of: &Points, caption: &Caption) -> anyhow::Result<String> {
    let mut svg = String::new();
    draw(of, caption, &SVGBackend::with_string(&mut svg, SIZE).into_drawing_area())
        .map_err(|error| anyhow::anyhow!("the plot cannot be drawn: {error}"))?;
    Ok(finished_file(&svg, caption, SIZE))
}

fn draw(of: &Points, caption: &Caption, root: &DrawingArea<SVGBackend<'_>, Shift>) -> Drawn {
    let names: Vec<&str> =
        [of.line_name.as_str()].into_iter().chain(of.others.iter().map(|spot| spot.name.as_str())).collect();
    let lines = 1 + i32::try_from(names.len().div_ceil(COLUMNS)).unwrap_or(1);
    let (above, chart) = root.split_vertically(LINE * lines + LINE / 2);
    legend(&above, &caption.title, &names)?;
    let furthest = of.line.iter().chain(&of.others).map(|spot| spot.x.value.max(spot.x.high)).fold(1.0, f64::max);
    let frame = Frame::new(Axis::linear(&of.x, 0.0, 1.1 * furthest), Axis::linear(&of.y, 0.0, of.y_most));
    frame.draw_on(&chart, |chart| {
        let style = |at: usize| colour(at).stroke_width(MARKER_STROKE);
        let places: Vec<(f64, f64)> = of.line.iter().map(|spot| (spot.x.value, spot.y.value)).collect();
        line(chart, &frame, &places, INK.mix(0.6).stroke_width(4))?;
        let others = of.others.iter().enumerate().map(|(at, spot)| (at + 1, spot));
        for (at, spot) in of.line.iter().map(|spot| (0, spot)).chain(others) {
            let at_x = |x: f64| (frame.x.place(x), frame.y.place(spot.y.value));
            let at_y = |y: f64| (frame.x.place(spot.x.value), frame.y.place(y));
            let whiskers = [vec![at_x(spot.x.low), at_x(spot.x.high)], vec![at_y(spot.y.low), at_y(spot.y.high)]];
            chart.draw_series(whiskers.into_iter().map(|ends| PathElement::new(ends, style(at))))?;
            let place = at_x(spot.x.value);
            chart.draw_series([EmptyElement::at(place) + PathElement::new(outline(at), style(at))])?;
            if at == 0 {
                let font = ("sans-serif", LABEL_FONT).into_font().color(&INK);
                chart.draw_series([EmptyElement::at(place) + Text::new(spot.name.clone(), (8, 10), font)])?;
            }
        }
        Ok(())
    })
}

/// The title, and a marker and a name in each cell: nobody knows how wide a name is.
fn legend(area: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, names: &[&str]) -> Drawn {
    let font = |size: i32| ("sans-serif", size).into_font().color(&INK);
    area.draw(&Text::new(title.to_owned(), (LINE / 2, LINE / 2), font(FONT)))?;
    let width = i32::try_from(SIZE.0).unwrap_or(0) / i32::try_from(COLUMNS).unwrap_or(1);
    for (at, name) in names.iter().enumerate() {
        let [column, row] = [at % COLUMNS, at / COLUMNS].map(|place| i32::try_from(place).unwrap_or(0));
        let middle = (LINE + column * width, 2 * LINE + row * LINE);
        area.draw(&(EmptyElement::at(middle) + PathElement::new(outline(at), colour(at).stroke_width(MARKER_STROKE))))?;
        area.draw(&Text::new((*name).to_owned(), (middle.0 + 2 * RADIUS, middle.1 - RADIUS), font(LABEL_FONT)))?;
    }
    Ok(())
}

/// A closed line around a marker's middle, hollow so that equal points do not hide each other: a small square for the line's
/// points, another shape for each of the others.
fn outline(at: usize) -> Vec<(i32, i32)> {
    let r = RADIUS;
    let mut corners = match at {
        0 => vec![(-3, -3), (3, -3), (3, 3), (-3, 3)],
        // Around all others: what lies near the first rule is seen inside.
        1 => vec![(-7, -16), (7, -16), (16, -7), (16, 7), (7, 16), (-7, 16), (-16, 7), (-16, -7)],
        2 => vec![(-r, -r), (r, -r), (r, r), (-r, r)],
        3 => vec![(0, -r - 1), (r + 1, 0), (0, r + 1), (-r - 1, 0)],
        4 => vec![(-r, -r), (r, -r), (0, r)],
        _ => vec![(-r, r), (r, r), (0, -r)],
    };
    corners.push(corners[0]);
    corners
}

//! Plots as SVG, by plotters.
//!
//! Without a font library plotters only guesses how wide a text is. So nothing here depends on the width of a text: ticks
//! and titles are anchored by the reader's browser, tick positions are chosen here, and legends are HTML, not drawn; where a plot
//! is a file of its own, each entry of its legend has the same room.

mod axis;
mod cdf;
mod day;
mod points;
mod rates;
mod tenants;
mod timeline;

pub(super) use axis::Axis;
pub(super) use cdf::cdf;
pub(super) use day::day;
pub(crate) use points::{Points, Spot, Whiskers, points};
pub(super) use rates::against_rate;
pub(super) use tenants::{MOST as MOST_TENANTS, tenants};
pub(super) use timeline::{MOST_EVENTS, SHADES, kv, queues};

use plotters::coord::Shift;
use plotters::prelude::*;

use super::format::escape;

/// Okabe and Ito's colours, distinguishable with any common colour blindness. The first, theirs is black, is the page's text
/// colour, so that it shows on dark pages too; the palest is the last.
pub(super) const COLOURS: [&str; 8] =
    ["currentColor", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442"];
/// After eight policies the colours repeat with another dash: as CSS border style and as SVG dash array, in SVG units.
pub(super) const DASHES: [(&str, &str); 3] = [("solid", ""), ("dashed", "16 8"), ("dotted", "4 6")];

/// The page's text colour. plotters takes fixed colours only; this one is replaced in what it draws, as those of policies.
const INK: RGBColor = RGBColor(1, 1, 1);
/// plotters rounds to whole units, so plots are drawn at twice the size at which they are meant.
const SIZE: (u32, u32) = (1000, 600);
const LEFT: u32 = 130;
const FONT: i32 = 36;

/// What a plot that is no part of a page is drawn on: the colours of the report's page.
const PAGE: &str = "<style>svg{color:#1a1a1a}.page{fill:#fff}@media(prefers-color-scheme:dark){svg{color:#e8e8e8}\
.page{fill:#14161a}}</style>\n<rect class=\"page\" width=\"100%\" height=\"100%\"/>\n";

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Plane>;
type Plane = Cartesian2d<axis::Places, axis::Places>;
type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Colour of a policy until [`finished`] puts in the right one.
fn colour(policy: usize) -> RGBColor {
    RGBColor(1, 2, u8::try_from(policy % (COLOURS.len() * DASHES.len())).unwrap_or(0))
}

/// What a plot is, for readers and for screen readers. Both are escaped here.
pub(crate) struct Caption {
    /// Unique in the page.
    pub id: String,
    pub title: String,
    pub description: String,
}

struct Frame {
    size: (u32, u32),
    left: u32,
    x: Axis,
    y: Axis,
    /// Names of the ticks of y, at 0, 1, 2, ...; figures when empty.
    names: Vec<String>,
}

impl Frame {
    fn new(x: Axis, y: Axis) -> Self {
        Self { size: SIZE, left: LEFT, x, y, names: Vec::new() }
    }

    fn draw(&self, caption: &Caption, content: impl FnOnce(&mut Chart<'_, '_>) -> Drawn) -> String {
        let mut svg = String::new();
        let drawn = self.draw_on(&SVGBackend::with_string(&mut svg, self.size).into_drawing_area(), content);
        match drawn {
            Ok(()) => finished(&svg, caption, self.size),
            Err(error) => format!("<p>cannot be drawn: {}</p>", escape(&error.to_string())),
        }
    }

    fn draw_on<'b>(
        &self,
        root: &DrawingArea<SVGBackend<'b>, Shift>,
        content: impl FnOnce(&mut Chart<'_, 'b>) -> Drawn,
    ) -> Drawn {
        let mut chart = ChartBuilder::on(root)
            .margin_top(24)
            .margin_right(40)
            .margin_bottom(6)
            .margin_left(6)
            .x_label_area_size(96)
            .y_label_area_size(self.left)
            .build_cartesian_2d(self.x.coordinates(), self.y.coordinates())?;
        let x_label = |value: &f64| self.x.label(*value);
        let y_label = |value: &f64| match self.names.is_empty() {
            true => self.y.label(*value),
            false => self.names.get(value.round() as usize).cloned().unwrap_or_default(),
        };
        let font = ("sans-serif", FONT).into_font().color(&INK);
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(INK.mix(0.15).stroke_width(2))
            .axis_style(INK.mix(0.5).stroke_width(2))
            .label_style(font.clone())
            .axis_desc_style(font)
            .x_label_formatter(&x_label)
            .y_label_formatter(&y_label)
            .x_desc(self.x.title.as_str())
            .y_desc(self.y.title.as_str())
            .draw()?;
        content(&mut chart)?;
        root.present()
    }
}

/// A line through points in the units of the axes; points that would fall on the one before are left out.
fn line(chart: &mut Chart<'_, '_>, frame: &Frame, points: &[(f64, f64)], style: ShapeStyle) -> Drawn {
    let points = thinned(frame, points);
    chart.draw_series(std::iter::once(PathElement::new(points, style)))?;
    Ok(())
}

fn thinned(frame: &Frame, points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let (width, height) = (frame.x.span() / f64::from(SIZE.0), frame.y.span() / f64::from(SIZE.1));
    let mut kept = Vec::<(f64, f64)>::new();
    for (at, &(x, y)) in points.iter().enumerate() {
        let point = (frame.x.place(x), frame.y.place(y));
        let is_near =
            kept.last().is_some_and(|last| (point.0 - last.0).abs() < width && (point.1 - last.1).abs() < height);
        if !is_near || at + 1 == points.len() {
            kept.push(point);
        }
    }
    kept
}

/// What plotters drew, with the page's colours, a size that follows the page, and words for who cannot see it.
fn finished(svg: &str, caption: &Caption, size: (u32, u32)) -> String {
    let title = escape(&caption.title);
    let svg = with_words(&coloured(svg), caption, &format!("viewBox=\"0 0 {} {}\"", size.0, size.1), "");
    format!("<figure><figcaption>{title}</figcaption>\n{svg}</figure>\n")
}

/// A plot as a file of its own, with a size and with a page to be drawn on, light or dark as its reader prefers.
fn finished_file(svg: &str, caption: &Caption, (width, height): (u32, u32)) -> String {
    let shape = format!("width=\"{}\" height=\"{}\" viewBox=\"0 0 {width} {height}\"", width / 2, height / 2);
    with_words(&coloured(svg), caption, &shape, PAGE)
}

/// The body of what plotters drew, with the page's colours.
fn coloured(svg: &str) -> String {
    let body = svg.find('>').map_or(svg, |end| &svg[end + 1..]);
    let mut body = body.replace("=\"#010101\"", "=\"currentColor\"");
    // Text from files cannot hold these attributes: plotters escapes its quotes.
    for policy in 0..COLOURS.len() * DASHES.len() {
        let (own, to) = (format!("#0102{policy:02X}"), COLOURS[policy % COLOURS.len()]);
        // A dot's outline is dashed with it, which tells it from those of the first eight as well.
        let dash = match DASHES[policy / COLOURS.len()].1 {
            "" => String::new(),
            dash => format!(" stroke-dasharray=\"{dash}\""),
        };
        body = body.replace(&format!("stroke=\"{own}\""), &format!("stroke=\"{to}\"{dash}"));
        body = body.replace(&format!("fill=\"{own}\""), &format!("fill=\"{to}\""));
    }
    body
}

fn with_words(body: &str, caption: &Caption, shape: &str, page: &str) -> String {
    let Caption { id, title, description } = caption;
    let (title, description) = (escape(title), escape(description));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" {shape} role=\"img\" aria-labelledby=\"{id}-t {id}-d\">\
         <title id=\"{id}-t\">{title}</title><desc id=\"{id}-d\">{description}</desc>\n{page}{body}"
    )
}

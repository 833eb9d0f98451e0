//! Axes: range, scale and ticks.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};

use crate::report::format::short;

/// Ratio of the largest to the least above which an axis is logarithmic.
const WIDE: f64 = 100.0;
const TICKS: f64 = 5.0;

pub(in crate::report) struct Axis {
    pub title: String,
    /// In places: logarithms when logarithmic.
    low: f64,
    high: f64,
    is_log: bool,
    ticks: Vec<f64>,
}

impl Axis {
    /// From 0, or logarithmic when the positive values differ by more than a factor of 100.
    pub(in crate::report) fn of(title: &str, values: impl IntoIterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.into_iter().filter(|value| value.is_finite() && *value > 0.0).collect();
        let high = values.iter().copied().fold(0.0, f64::max);
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        if high > low * WIDE { Self::log(title, low, high) } else { Self::linear(title, 0.0, high) }
    }

    pub(in crate::report) fn linear(title: &str, low: f64, high: f64) -> Self {
        let high = if high > low { high } else { low + 1.0 };
        let rough = (high - low) / TICKS;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|digit| digit * power).find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        let ticks = (0..=12).map(|at| (low / step).ceil().mul_add(step, f64::from(at) * step));
        let ticks = ticks.filter(|tick| *tick <= high + step * 1e-9).collect();
        Self { title: title.to_owned(), low, high, is_log: false, ticks }
    }

    fn log(title: &str, low: f64, high: f64) -> Self {
        let (low, high) = (low.log10(), high.log10());
        // On a span of many decades only some fit.
        let every = (((high - low) / 8.0).ceil() as usize).max(1);
        let decades = (low.floor() as i32..=high.ceil() as i32).step_by(every);
        let digits: &[f64] = if high - low < 3.0 { &[1.0, 3.0] } else { &[1.0] };
        let ticks = decades.flat_map(|decade| digits.iter().map(move |digit| f64::from(decade) + digit.log10()));
        let ticks = ticks.filter(|tick| (low..=high).contains(tick)).collect();
        Self { title: format!("{title}, log scale"), low, high, is_log: true, ticks }
    }

    /// A tick at each whole number, with room for half a step on both sides.
    pub(super) fn positions(count: usize) -> Self {
        let ticks = (0..count).map(|at| at as f64).collect();
        Self { title: String::new(), low: -0.5, high: count as f64 - 0.5, is_log: false, ticks }
    }

    pub(super) fn coordinates(&self) -> Places {
        Places { low: self.low, high: self.high, ticks: self.ticks.clone() }
    }

    /// Where a value is, in the axis's coordinates, at its ends when it is beyond them.
    pub(super) fn place(&self, value: f64) -> f64 {
        let place = if self.is_log { value.max(f64::MIN_POSITIVE).log10() } else { value };
        if place.is_nan() { self.low } else { place.clamp(self.low, self.high) }
    }

    pub(super) fn span(&self) -> f64 {
        self.high - self.low
    }

    pub(super) fn label(&self, place: f64) -> String {
        short(if self.is_log { 10_f64.powf(place) } else { place })
    }
}

/// An axis for plotters, which would choose ticks by itself.
pub(super) struct Places {
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

impl Ranged for Places {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        let share = (value - self.low) / (self.high - self.low);
        from + (share * f64::from(to - from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        // Asked twice: for lines with a label, then for those without.
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> Range<f64> {
        self.low..self.high
    }
}

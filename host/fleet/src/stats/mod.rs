//! Comparing engines: metrics of latency sketches, and ratios of two policies with an interval.

mod bootstrap;
mod metric;

pub use bootstrap::{Bootstrap, Pair, Ratio};
pub use metric::{Metric, MetricError, Rate, Sample, Statistic};

//! A day, stretch by stretch.

use hdrhistogram::Histogram;

/// The requests that arrived in a stretch of a day.
pub(super) struct Level {
    pub(super) arrived: u64,
    pub(super) attained: u64,
    pub(super) ttfo: Histogram<u32>,
    pub(super) tpot: Histogram<u32>,
}

impl Level {
    pub(super) fn new() -> Self {
        let histogram = || Histogram::new(2).expect("few digits");
        Self { arrived: 0, attained: 0, ttfo: histogram(), tpot: histogram() }
    }
}

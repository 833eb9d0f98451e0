//! Which requests of a run are measured.

use super::{BATCHES, NOT_MEASURED};

/// Which requests are measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Measured {
    /// All of them, so many.
    All(usize),
    /// Those that arrive in a stretch of time, milliseconds of the run.
    Between {
        /// From then on.
        from_ms: f64,
        /// Until then.
        to_ms: f64,
        /// The burst of a day: from, until.
        burst: Option<[f64; 2]>,
    },
}

impl Measured {
    /// The group of consecutive requests that one belongs to.
    pub(crate) fn batch(&self, index: usize, arrival_ms: f64) -> u16 {
        let last = usize::from(BATCHES) - 1;
        match *self {
            Self::All(count) => (index * usize::from(BATCHES) / count.max(1)).min(last) as u16,
            Self::Between { from_ms, to_ms, .. } if (from_ms..to_ms).contains(&arrival_ms) => {
                let share = (arrival_ms - from_ms) / (to_ms - from_ms);
                ((share * f64::from(BATCHES)) as usize).min(last) as u16
            }
            Self::Between { .. } => NOT_MEASURED,
        }
    }

    /// From and until when engines are looked at, in a run whose last token came then.
    pub(crate) fn stretch_ms(&self, last_ms: f64) -> [f64; 2] {
        match *self {
            Self::All(_) => [0.0, last_ms],
            Self::Between { from_ms, to_ms, .. } => [from_ms, to_ms],
        }
    }
}

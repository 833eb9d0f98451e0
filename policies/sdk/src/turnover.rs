use crate::eviction::Memory;

/// Turnovers that count: earlier ones count half.
const WEIGHED: f64 = 4.0;

/// How long a block stays in the pool when nothing but use orders it: the size of the pool, at the rate of new blocks.
///
/// ```
/// use meridian_policy_sdk::Turnover;
/// use meridian_policy_sdk::eviction::Memory;
///
/// let mut turnover = Turnover::default();
/// for step in 0..=10 {
///     turnover.note(&Memory { now_ms: 100.0 * f64::from(step), total_blocks: 500, ..Memory::default() }, 10);
/// }
/// let memory = Memory { now_ms: 1000.0, total_blocks: 500, ..Memory::default() };
/// assert_eq!(turnover.ms(&memory), 5000.0);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Turnover {
    since_ms: Option<f64>,
    new_blocks: f64,
}

impl Turnover {
    /// A batch has so many blocks that were never matched: they were computed since the last time.
    pub fn note(&mut self, memory: &Memory, new_blocks: usize) {
        let Some(since_ms) = self.since_ms else {
            // Nobody knows how long the first ones took.
            self.since_ms = Some(memory.now_ms);
            return;
        };
        self.new_blocks += new_blocks as f64;
        if self.new_blocks > WEIGHED * f64::from(memory.total_blocks) {
            self.new_blocks /= 2.0;
            self.since_ms = Some((since_ms + memory.now_ms) / 2.0);
        }
    }

    /// Milliseconds of a turnover; 0 before it is known.
    #[must_use]
    pub fn ms(&self, memory: &Memory) -> f32 {
        let ms = memory.now_ms - self.since_ms.unwrap_or(memory.now_ms);
        if self.new_blocks > 0.0 { (ms * f64::from(memory.total_blocks) / self.new_blocks) as f32 } else { 0.0 }
    }
}

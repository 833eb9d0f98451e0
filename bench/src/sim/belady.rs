//! The bound of eviction: the block whose next use is farthest goes first (Belady, IBM Systems Journal 5(2), 1966), as far as
//! a closed loop knows its future.

use meridian_core::{EvictionCandidate, EvictionRanker, EvictionSubject, Fault, Memory};

/// Knows when each block is asked for again. A session's next request arrives its recorded gap after this one ended, and
/// requests are served in order of arrival, so a block is worth the more the earlier that arrival is. Blocks that the
/// session's next prompt does not hold are never used again and go first.
///
/// The bound is of hits, in the run that it brings about itself: other evictions would make other arrivals. It sees one use
/// ahead, and a block that only a later request of the session holds counts as never used.
#[derive(Debug, Default)]
pub(crate) struct Belady {
    /// Milliseconds of the next use, by block; infinite for none.
    next_use_ms: Vec<f64>,
}

impl Belady {
    /// A request lets go of `blocks`: the first `kept` of them are asked for again at `at_ms`.
    pub(super) fn note(&mut self, blocks: &[u32], kept: usize, at_ms: f64) {
        for (position, block) in blocks.iter().enumerate() {
            let block = *block as usize;
            if block >= self.next_use_ms.len() {
                self.next_use_ms.resize(block + 1, f64::INFINITY);
            }
            self.next_use_ms[block] = if position < kept { at_ms } else { f64::INFINITY };
        }
    }
}

impl EvictionRanker for Belady {
    fn keys(&mut self, _: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault> {
        // In seconds: an `f32` tells apart hundredths of them within a day.
        keys.extend(candidates.iter().map(|candidate| match candidate.subject {
            EvictionSubject::Block(block) => {
                let at_ms = self.next_use_ms.get(block.0 as usize).copied().unwrap_or(f64::INFINITY);
                (-at_ms / 1e3) as f32
            }
            EvictionSubject::Request(_) => 0.0,
        }));
        Ok(())
    }
}

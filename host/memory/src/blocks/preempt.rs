//! The choice of live requests that give up their blocks, made before any change.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use meridian_core::{BlockId, BlockTier, EvictionCandidate, EvictionSubject, Subject, ThinkPhase, ordinal};

use super::judge::Judge;
use super::pool::Pool;
use super::record::Live;
use crate::RequestId;

/// The requests to preempt, and the blocks that they free.
#[derive(Debug, Default)]
pub(super) struct Preemption {
    pub(super) victims: Vec<RequestId>,
    /// With the class of each block at the decision.
    pub(super) freed: Vec<(BlockId, BlockTier)>,
}

/// Find victims that together free at least `count` blocks. Requests that have not begun to answer go before the
/// others, each group in the policy's order; `spared` never goes. The caller has checked that there are enough.
///
/// A request whose leaving frees nothing is skipped, unless only its leaving can free the blocks it shares.
pub(super) fn plan(pool: &Pool, judge: &mut Judge, spared: RequestId, count: u32) -> Preemption {
    let mut search = Search { pool, count: count as usize, left: HashMap::new(), plan: Preemption::default() };
    let mut passed_over = Vec::new();
    for class in [BlockTier::ThinkActive, BlockTier::OutputCritical] {
        if search.is_enough() {
            break;
        }
        let order = order(pool, judge, spared, class);
        search.take(&order);
        // Blocks that thinking requests share with answers come free only with the answers.
        let taken: BTreeSet<RequestId> = search.plan.victims.iter().copied().collect();
        passed_over.splice(0..0, order.into_iter().filter(|request| !taken.contains(request)));
    }
    search.take(&passed_over);
    search.plan
}

/// The live requests of a class, in the order of preemption.
fn order(pool: &Pool, judge: &mut Judge, spared: RequestId, class: BlockTier) -> Vec<RequestId> {
    let of_class = |(request, live): &(&RequestId, &Live)| {
        **request != spared && (live.phase == ThinkPhase::Output) == (class == BlockTier::OutputCritical)
    };
    // Oldest first, so that a policy receives the same candidates in the same order in every run.
    let mut requests: Vec<(u64, RequestId, &Live)> = pool
        .requests
        .iter()
        .filter(of_class)
        .filter(|(_, live)| !live.members.is_empty())
        .map(|(request, live)| (live.seq, *request, live))
        .collect();
    requests.sort_unstable_by_key(|(seq, ..)| *seq);
    let candidates: Vec<_> = requests
        .iter()
        .map(|(_, request, live)| EvictionCandidate {
            subject: EvictionSubject::Request(request.0),
            tier: class,
            blocks: live.unshared,
            age_ms: (pool.now_ms - live.begun_ms) as f32,
            computed_tokens: u32::try_from(live.members.len()).unwrap_or(u32::MAX).saturating_mul(pool.block_tokens),
            phase: live.phase,
            ..EvictionCandidate::default()
        })
        .collect();
    let keys = judge.rank(&pool.memory(Subject::Requests), &candidates).keys;
    let key = |i: usize| ordinal(keys.get(i).copied().unwrap_or(0.0));
    let mut order: Vec<_> = candidates
        .iter()
        .zip(requests)
        .enumerate()
        .map(|(i, (candidate, (seq, request, _)))| {
            (key(i), candidate.computed_tokens, candidate.blocks, Reverse(seq), request)
        })
        .collect();
    order.sort_unstable();
    order.into_iter().map(|(.., request)| request).collect()
}

struct Search<'a> {
    pool: &'a Pool,
    count: usize,
    /// Number of victims that leave each shared block.
    left: HashMap<BlockId, u32>,
    plan: Preemption,
}

impl Search<'_> {
    fn is_enough(&self) -> bool {
        self.plan.freed.len() >= self.count
    }

    fn take(&mut self, order: &[RequestId]) {
        let mut rest = order.to_vec();
        loop {
            let before = rest.len();
            rest.retain(|request| {
                if self.is_enough() || !self.frees_any(*request) {
                    return true;
                }
                self.add(*request);
                false
            });
            if self.is_enough() || rest.is_empty() {
                return;
            }
            if rest.len() == before {
                break;
            }
        }
        // The rest comes free only when several requests leave together.
        let first = self.plan.victims.len();
        for request in rest {
            if self.is_enough() {
                break;
            }
            self.add(request);
        }
        let freed: BTreeSet<BlockId> = self.plan.freed.iter().map(|(block, _)| *block).collect();
        for request in self.plan.victims.split_off(first) {
            let live = &self.pool.requests[&request];
            if live.members.iter().any(|block| freed.contains(block)) {
                self.plan.victims.push(request);
            } else {
                // In vain: none of its blocks comes free.
                for block in &live.members {
                    if let Some(left) = self.left.get_mut(block) {
                        *left -= 1;
                    }
                }
            }
        }
    }

    fn frees_any(&self, request: RequestId) -> bool {
        let live = &self.pool.requests[&request];
        live.unshared > 0
            || live
                .members
                .iter()
                .any(|block| self.pool.blocks[block].readers() == self.left.get(block).copied().unwrap_or(0) + 1)
    }

    fn add(&mut self, request: RequestId) {
        self.plan.victims.push(request);
        for (_, id) in self.pool.requests[&request].chain() {
            let block = &self.pool.blocks[&id];
            let readers = block.readers();
            let left = if readers == 1 { 1 } else { *self.left.entry(id).and_modify(|left| *left += 1).or_insert(1) };
            if left == readers {
                self.plan.freed.push((id, block.class()));
            }
        }
    }
}

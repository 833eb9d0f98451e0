//! Free blocks in the order of eviction, and those of them that are kept for a time.

use std::collections::{BTreeMap, BTreeSet};

use super::policy::{Rank, Ranked, UNKNOWN, Until};
use crate::{BlockId, BlockTier};

/// The name of a block in a pool.
pub(super) trait Number: Copy + Ord {
    const LOWEST: Self;
}

impl Number for u32 {
    const LOWEST: Self = 0;
}

impl Number for BlockId {
    const LOWEST: Self = Self(0);
}

/// Place in the order of eviction; the lowest goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place<B> {
    pub(super) tier: BlockTier,
    pub(super) rank: Rank,
    pub(super) stamp: u64,
    pub(super) block: B,
    /// End of the time for which the block is kept, if its rank says so. It never decides, because a block has one place.
    /// Removing needs the same value.
    until: Until,
}

impl<B> Place<B> {
    pub(super) fn new(tier: BlockTier, ranked: Ranked, stamp: u64, block: B) -> Self {
        Self { tier, rank: ranked.rank, stamp, block, until: ranked.until }
    }
}

impl<B: Number> Place<B> {
    /// The place before all blocks of a tier that were ranked in `epoch` or later.
    fn first(tier: BlockTier, epoch: u32) -> Self {
        let rank = Rank { epoch, ..Rank::default() };
        Self::new(tier, Ranked { rank, ..Ranked::default() }, 0, B::LOWEST)
    }
}

/// Blocks without a reader in one place, in the order of eviction. Every change costs O(log n) of them.
#[derive(Debug)]
pub(super) struct EvictionOrder<B> {
    places: BTreeSet<Place<B>>,
    by_tier: [u32; 3],
    /// Number of places with each tier and rank.
    ranks: BTreeMap<(BlockTier, Rank), u32>,
    /// Kept blocks, by the end of their time.
    kept: BTreeSet<(Until, B)>,
}

impl<B> Default for EvictionOrder<B> {
    fn default() -> Self {
        Self { places: BTreeSet::new(), by_tier: [0; 3], ranks: BTreeMap::new(), kept: BTreeSet::new() }
    }
}

impl<B: Number> EvictionOrder<B> {
    pub(super) fn insert(&mut self, place: Place<B>) {
        if !self.places.insert(place) {
            return;
        }
        self.by_tier[place.tier as usize] += 1;
        *self.ranks.entry((place.tier, place.rank)).or_default() += 1;
        if place.rank.is_kept {
            self.kept.insert((place.until, place.block));
        }
    }

    /// Remove a place; returns whether it existed.
    pub(super) fn remove(&mut self, place: &Place<B>) -> bool {
        let was_there = self.places.remove(place);
        if was_there {
            self.left(place);
        }
        was_there
    }

    pub(super) fn pop_first(&mut self) -> Option<Place<B>> {
        let place = self.places.pop_first()?;
        self.left(&place);
        Some(place)
    }

    fn left(&mut self, place: &Place<B>) {
        self.by_tier[place.tier as usize] -= 1;
        if place.rank.is_kept {
            self.kept.remove(&(place.until, place.block));
        }
        if let Some(count) = self.ranks.get_mut(&(place.tier, place.rank)) {
            *count -= 1;
            if *count == 0 {
                self.ranks.remove(&(place.tier, place.rank));
            }
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn contains(&self, place: &Place<B>) -> bool {
        self.places.contains(place)
    }

    /// Blocks that were ranked before `epoch`, starting with the last of their tier.
    pub(super) fn ranked_before(&self, epoch: u32) -> impl Iterator<Item = &Place<B>> {
        let before = move |tier| self.places.range(Place::first(tier, UNKNOWN)..Place::first(tier, epoch)).rev();
        BlockTier::ALL.into_iter().rev().flat_map(before)
    }

    /// A kept block whose time is over.
    pub(super) fn over(&self, now_ms: f64) -> Option<B> {
        self.kept.first().filter(|(until, _)| *until <= Until::of(now_ms)).map(|(_, block)| *block)
    }

    /// Number of kept blocks.
    pub(super) fn kept(&self) -> u32 {
        u32::try_from(self.kept.len()).unwrap_or(u32::MAX)
    }

    /// Whether all have the same tier and rank, so that they go by their stamps alone.
    pub(super) fn is_by_stamp(&self) -> bool {
        self.ranks.len() < 2
    }

    pub(super) fn len(&self) -> u32 {
        self.by_tier.iter().sum()
    }

    pub(super) fn by_tier(&self) -> [u32; 3] {
        self.by_tier
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Place<B>> {
        self.places.iter()
    }

    /// Recount; the first count that is wrong, in words.
    pub(super) fn audit(&self) -> Result<(), String> {
        let by_rank: u32 = self.ranks.values().sum();
        if by_rank != self.len() || self.places.len() != self.len() as usize {
            return Err(format!("{} blocks are cached, {} by tier, {by_rank} by rank", self.places.len(), self.len()));
        }
        let mut by_tier = [0; 3];
        self.places.iter().for_each(|place| by_tier[place.tier as usize] += 1);
        if by_tier != self.by_tier {
            return Err(format!("cached blocks by tier: booked {:?}, counted {by_tier:?}", self.by_tier));
        }
        let kept = self.places.iter().filter(|place| place.rank.is_kept).count();
        if kept != self.kept.len() {
            return Err(format!("{kept} blocks are kept, {} by time", self.kept.len()));
        }
        Ok(())
    }
}

//! Free blocks in the order of eviction, and those of them that are kept for a time: what [`CachedBlocks`] and pools
//! outside this crate share.
//!
//! [`CachedBlocks`]: crate::CachedBlocks

mod ranks;

use std::collections::{BTreeMap, BTreeSet};

use crate::BlockTier;

pub use self::ranks::{Epochs, REKEYED_AT_ONCE, Rank, Ranked, RankingId};
pub(super) use self::ranks::{UNKNOWN, Until};

/// Place in the order of eviction; the lowest goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place<B> {
    /// The tier of the block.
    pub tier: BlockTier,
    /// What the policy says.
    pub rank: Rank,
    /// Sequence number of its last release.
    pub stamp: u64,
    /// The name of the block in its pool.
    pub block: B,
    /// End of the time for which the block is kept, if its rank says so. It never decides, because a block has one place.
    /// Removing needs the same value.
    until: Until,
}

impl<B> Place<B> {
    /// The place of a block that was released as number `stamp`.
    pub fn new(tier: BlockTier, ranked: Ranked, stamp: u64, block: B) -> Self {
        Self { tier, rank: ranked.rank, stamp, block, until: ranked.until }
    }
}

impl<B: Copy + Ord + Default> Place<B> {
    /// The place before all blocks of a tier that were ranked in `epoch` or later.
    fn first(tier: BlockTier, epoch: u32) -> Self {
        let rank = Rank { epoch, ..Rank::default() };
        Self::new(tier, Ranked { rank, ..Ranked::default() }, 0, B::default())
    }
}

/// Blocks without a reader in one place, in the order of eviction. Every change costs O(log n) of them. The default of
/// `B`, the name of a block, is the lowest.
#[derive(Debug)]
pub struct EvictionOrder<B> {
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

impl<B: Copy + Ord + Default> EvictionOrder<B> {
    /// Add a block; one that is there stays as it is.
    pub fn insert(&mut self, place: Place<B>) {
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
    pub fn remove(&mut self, place: &Place<B>) -> bool {
        let was_there = self.places.remove(place);
        if was_there {
            self.left(place);
        }
        was_there
    }

    /// Remove the block that goes first.
    pub fn pop_first(&mut self) -> Option<Place<B>> {
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

    /// Whether the block has this place.
    #[must_use]
    pub fn contains(&self, place: &Place<B>) -> bool {
        self.places.contains(place)
    }

    /// Blocks that were ranked before `epoch`, starting with the last of their tier.
    pub fn ranked_before(&self, epoch: u32) -> impl Iterator<Item = &Place<B>> {
        let before = move |tier| self.places.range(Place::first(tier, UNKNOWN)..Place::first(tier, epoch)).rev();
        BlockTier::ALL.into_iter().rev().flat_map(before)
    }

    /// A kept block whose time is over.
    #[must_use]
    pub fn over(&self, now_ms: f64) -> Option<B> {
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

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.by_tier.iter().sum()
    }

    /// Whether it has no block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Number of blocks of each tier.
    #[must_use]
    pub fn by_tier(&self) -> [u32; 3] {
        self.by_tier
    }

    /// Every place, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Place<B>> {
        self.places.iter()
    }

    /// Recount.
    ///
    /// # Errors
    /// The first count that is wrong, in words.
    pub fn audit(&self) -> Result<(), String> {
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

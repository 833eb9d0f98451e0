//! One block, and one request.

use std::collections::HashSet;

use meridian_core::order::{Place, Ranked};
use meridian_core::{BlockId, BlockTier, ThinkPhase};

use super::Sections;
use crate::BlockLocation;

/// The phase of a request when a block joined its chain; the index of [`Live::sections`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Section {
    Prompt = 0,
    Think = 1,
    Output = 2,
}

impl Section {
    pub(super) fn written_in(phase: ThinkPhase) -> Self {
        match phase {
            ThinkPhase::Prefill => Self::Prompt,
            ThinkPhase::Think => Self::Think,
            ThinkPhase::Output => Self::Output,
        }
    }
}

/// The tier of a block for a request in `phase` that has it in `section`.
pub(super) fn view(phase: ThinkPhase, section: Section) -> BlockTier {
    match (phase, section) {
        (ThinkPhase::Prefill | ThinkPhase::Think, _) => BlockTier::ThinkActive,
        (ThinkPhase::Output, Section::Think) => BlockTier::ThinkComplete,
        (ThinkPhase::Output, Section::Prompt | Section::Output) => BlockTier::OutputCritical,
    }
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) place: BlockLocation,
    /// Number of live requests that attend the block, by its tier for each.
    pub(super) views: [u32; 3],
    /// The exclusive or of their ids: with one reader, its id.
    pub(super) reader_ids: u64,
    /// Tier while unattended.
    pub(super) cached_tier: BlockTier,
    /// Marked as dead while it was attended: it will never match again.
    pub(super) dead: bool,
    /// A transfer of it is running, so no other may begin.
    pub(super) is_moving: bool,
    pub(super) ranked: Ranked,
    /// Its time to be kept is over, and the policy is to be asked again.
    pub(super) has_expired: bool,
    /// Distance from the head of the chain of the request that released it, blocks.
    pub(super) position: u32,
    /// Sequence number of its last release, for least-recently-used order. Changes whenever it may have been written
    /// to.
    pub(super) stamp: u64,
    pub(super) hits: u32,
    pub(super) born_ms: f64,
}

impl Block {
    pub(super) fn readers(&self) -> u32 {
        self.views.iter().sum()
    }

    pub(super) fn tier(&self) -> BlockTier {
        if self.readers() == 0 {
            self.cached_tier
        } else if self.dead {
            BlockTier::ThinkComplete
        } else {
            BlockTier::ALL.into_iter().rfind(|tier| self.views[*tier as usize] > 0).expect("the block is attended")
        }
    }

    /// The tier that determines when the block may go. An attended block goes only with every request that attends it.
    pub(super) fn class(&self) -> BlockTier {
        if self.readers() == 0 {
            self.cached_tier
        } else if self.views[BlockTier::ThinkComplete as usize] + self.views[BlockTier::OutputCritical as usize] > 0 {
            BlockTier::OutputCritical
        } else {
            BlockTier::ThinkActive
        }
    }

    pub(super) fn place(&self, block: BlockId) -> Place<BlockId> {
        Place::new(self.cached_tier, self.ranked, self.stamp, block)
    }
}

#[derive(Debug)]
pub(super) struct Live {
    pub(super) phase: ThinkPhase,
    /// It has generated think tokens.
    pub(super) thought: bool,
    /// Its chain before its preemption.
    pub(super) resumed: Option<Sections>,
    pub(super) strips_reasoning: bool,
    pub(super) begun_ms: f64,
    /// Sequence number of its beginning; the youngest has the highest.
    pub(super) seq: u64,
    /// Blocks that no other request attends.
    pub(super) unshared: u32,
    pub(super) sections: [Vec<BlockId>; 3],
    pub(super) members: HashSet<BlockId>,
}

impl Live {
    /// The chain, head first.
    pub(super) fn chain(&self) -> impl DoubleEndedIterator<Item = (Section, BlockId)> + '_ {
        let section = |section: Section| self.sections[section as usize].iter().map(move |block| (section, *block));
        section(Section::Prompt).chain(section(Section::Think)).chain(section(Section::Output))
    }

    /// Whether the request holds blocks before it answers.
    pub(super) fn holds_as_thinking(&self) -> bool {
        self.phase != ThinkPhase::Output && !self.members.is_empty()
    }

    /// The section of the next block of the chain, if it is written in `phase`.
    pub(super) fn next_section(&self, phase: ThinkPhase) -> Section {
        let Some(Sections { prompt_blocks, think_blocks }) = self.resumed else { return Section::written_in(phase) };
        let position = self.members.len() as u64;
        if position < u64::from(prompt_blocks) {
            Section::Prompt
        } else if position < u64::from(prompt_blocks) + u64::from(think_blocks) {
            Section::Think
        } else if phase == ThinkPhase::Prefill {
            Section::Output
        } else {
            Section::written_in(phase)
        }
    }

    /// The tier of a block that this request is the last to release.
    pub(super) fn leaves_behind(&self, section: Section, dead: bool) -> BlockTier {
        let after_thinking = section != Section::Prompt && self.thought && self.strips_reasoning;
        if dead || after_thinking { BlockTier::ThinkComplete } else { BlockTier::ThinkActive }
    }
}

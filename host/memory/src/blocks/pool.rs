//! The books: the place, the readers and the order of eviction of each block. Single-threaded, without outside calls or
//! panics.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use meridian_core::order::{EvictionOrder, REKEYED_AT_ONCE, Ranked};
use meridian_core::{BlockId, BlockTier, EvictionCandidate, EvictionSubject, Memory, Subject, ThinkPhase};

use super::preempt::Preemption;
use super::record::{Block, Live, Section, view};
use super::{Allocation, BeginKv, Evicted, KvMemory, KvStats};
use crate::{BlockLocation, Error, RequestId};

/// Default limit of blocks in the fabric.
const DEFAULT_REMOTE_BLOCKS: u32 = 1 << 20;

#[derive(Debug)]
pub(super) struct Pool {
    pub(super) capacity: u32,
    pub(super) think_limit: u32,
    /// Device blocks from this number on were never used.
    pub(super) fresh: u32,
    pub(super) returned: Vec<u32>,
    /// Device blocks held for a transfer that has not ended.
    pub(super) reserved: u32,
    pub(super) blocks: HashMap<BlockId, Block>,
    pub(super) requests: BTreeMap<RequestId, Live>,
    /// Unattended blocks on the device.
    pub(super) cached: EvictionOrder<BlockId>,
    pub(super) attended: u32,
    /// Blocks that a request attends before it answers.
    pub(super) think_attended: u32,
    /// Requests that hold blocks before they answer.
    pub(super) think_holders: u32,
    /// Blocks in the fabric.
    pub(super) remote: EvictionOrder<BlockId>,
    /// Blocks whose time to be kept is over, for the policy to be asked again; each is in it once.
    expired: VecDeque<BlockId>,
    pub(super) remote_limit: u32,
    pub(super) remote_evictions: u64,
    /// Tokens of a block; 0 when unknown.
    pub(super) block_tokens: u32,
    next_block: u64,
    next_stamp: u64,
    next_seq: u64,
    /// The latest valid time, finite.
    pub(super) now_ms: f64,
    pub(super) evictions: [u64; 3],
    pub(super) preemptions: u64,
}

impl Pool {
    pub(super) fn new(memory: &KvMemory) -> Result<Self, Error> {
        memory.validate()?;
        Ok(Self {
            capacity: memory.capacity_blocks(),
            think_limit: memory.think_limit_blocks(),
            fresh: 0,
            returned: Vec::new(),
            reserved: 0,
            blocks: HashMap::new(),
            requests: BTreeMap::new(),
            cached: EvictionOrder::default(),
            attended: 0,
            think_attended: 0,
            think_holders: 0,
            remote: EvictionOrder::default(),
            expired: VecDeque::new(),
            remote_limit: DEFAULT_REMOTE_BLOCKS,
            remote_evictions: 0,
            block_tokens: 0,
            next_block: 0,
            next_stamp: 0,
            next_seq: 0,
            now_ms: 0.0,
            evictions: [0; 3],
            preemptions: 0,
        })
    }

    pub(super) fn free_count(&self) -> u32 {
        self.capacity - self.fresh + u32::try_from(self.returned.len()).expect("at most the capacity")
    }

    pub(super) fn stats(&self) -> KvStats {
        KvStats {
            capacity: self.capacity,
            free: self.free_count(),
            cached: self.cached.len(),
            cached_by_tier: self.cached.by_tier(),
            attended: self.attended,
            think_attended: self.think_attended,
            reserved: self.reserved,
            remote: self.remote.len(),
            remote_evictions: self.remote_evictions,
            requests: self.requests.len(),
            evictions: self.evictions,
            preemptions: self.preemptions,
            policy_faults: 0,
        }
    }

    /// A time that is not finite, or earlier than the latest, is ignored.
    pub(super) fn tell_time(&mut self, now_ms: f64) {
        if now_ms.is_finite() && now_ms > self.now_ms {
            self.now_ms = now_ms;
            self.expire();
        }
    }

    /// Blocks whose time is over go by their keys.
    fn expire(&mut self) {
        for order in [&mut self.cached, &mut self.remote] {
            while let Some(id) = order.over(self.now_ms) {
                let block = self.blocks.get_mut(&id).expect("an order names blocks that exist");
                order.remove(&block.place(id));
                block.ranked = block.ranked.not_kept();
                order.insert(block.place(id));
                if !std::mem::replace(&mut block.has_expired, true) {
                    self.expired.push_back(id);
                }
            }
        }
    }

    pub(super) fn begin(&mut self, request: RequestId, begin: &BeginKv) -> Result<(), Error> {
        if self.requests.contains_key(&request) {
            return Err(Error::DuplicateRequest { id: request });
        }
        self.tell_time(begin.now_ms);
        self.next_seq += 1;
        let live = Live {
            phase: begin.phase,
            thought: begin.resumed.is_some_and(|sections| sections.think_blocks > 0),
            resumed: begin.resumed,
            strips_reasoning: begin.strips_reasoning,
            begun_ms: self.now_ms,
            seq: self.next_seq,
            unshared: 0,
            sections: Default::default(),
            members: HashSet::new(),
        };
        self.requests.insert(request, live);
        Ok(())
    }

    pub(super) fn live(&self, request: RequestId) -> Result<&Live, Error> {
        self.requests.get(&request).ok_or(Error::UnknownRequest { id: request })
    }

    pub(super) fn block(&self, block: BlockId) -> Result<&Block, Error> {
        self.blocks.get(&block).ok_or(Error::UnknownBlock { block })
    }

    pub(super) fn set_phase(&mut self, request: RequestId, phase: ThinkPhase, think_tokens: u32) -> Result<(), Error> {
        let live = self.requests.get_mut(&request).ok_or(Error::UnknownRequest { id: request })?;
        if think_tokens > 0 && !live.thought {
            live.thought = true;
            if live.phase == ThinkPhase::Output {
                // It answered first: its output until now precedes the thinking and matches like the prompt.
                let [prompt, _, output] = &mut live.sections;
                prompt.append(output);
            }
        }
        match (live.phase, phase) {
            (ThinkPhase::Prefill, ThinkPhase::Think) => live.phase = ThinkPhase::Think,
            (ThinkPhase::Prefill | ThinkPhase::Think, ThinkPhase::Output) => self.answer(request),
            _ => {}
        }
        Ok(())
    }

    /// Note that a live request begins to answer.
    fn answer(&mut self, request: RequestId) {
        let live = self.requests.get_mut(&request).expect("the request is live");
        self.think_holders -= u32::from(live.holds_as_thinking());
        live.phase = ThinkPhase::Output;
        for (section, block) in live.chain() {
            let block = self.blocks.get_mut(&block).expect("a chain names blocks that exist");
            block.views[BlockTier::ThinkActive as usize] -= 1;
            block.views[view(ThinkPhase::Output, section) as usize] += 1;
            self.think_attended -= u32::from(block.views[BlockTier::ThinkActive as usize] == 0);
        }
    }

    pub(super) fn allocate(&mut self, request: RequestId, count: u32) -> Result<Allocation, Error> {
        let phase = self.live(request)?.phase;
        self.check_think_limit(request, count)?;
        let available = self.free_count() + self.cached.len();
        if available < count {
            return Err(Error::OutOfBlocks { needed: count, available });
        }
        let evicted = self.evict_cached(count.saturating_sub(self.free_count()));
        let blocks = (0..count)
            .map(|_| {
                let index = self.take_free().expect("enough blocks are free");
                let id = BlockId(self.next_block);
                self.next_block += 1;
                let block = Block {
                    place: BlockLocation::Device { index },
                    views: [0; 3],
                    reader_ids: 0,
                    cached_tier: BlockTier::ThinkActive,
                    dead: false,
                    is_moving: false,
                    ranked: Ranked::default(),
                    has_expired: false,
                    position: 0,
                    stamp: 0,
                    hits: 0,
                    born_ms: self.now_ms,
                };
                self.blocks.insert(id, block);
                let section = self.requests[&request].next_section(phase);
                self.attach(id, request, section);
                id
            })
            .collect();
        Ok(Allocation { blocks, evicted })
    }

    pub(super) fn touch(&mut self, request: RequestId, blocks: &[BlockId]) -> Result<u32, Error> {
        let live = self.live(request)?;
        let mut new = Vec::with_capacity(blocks.len());
        let mut seen = HashSet::with_capacity(blocks.len());
        let mut more_thinking = 0;
        for id in blocks {
            let block = self.block(*id)?;
            if !matches!(block.place, BlockLocation::Device { .. }) {
                return Err(Error::BlockElsewhere { block: *id, expected: "on the device" });
            }
            if !live.members.contains(id) && seen.insert(*id) {
                new.push(*id);
                more_thinking += u32::from(block.views[BlockTier::ThinkActive as usize] == 0);
            }
        }
        self.check_think_limit(request, more_thinking)?;
        for id in &new {
            let block = self.blocks.get_mut(id).expect("looked up above");
            if block.readers() == 0 {
                self.cached.remove(&block.place(*id));
            }
            block.dead = false;
            block.hits = block.hits.saturating_add(1);
            let section = self.requests[&request].next_section(ThinkPhase::Prefill);
            self.attach(*id, request, section);
        }
        Ok(u32::try_from(new.len()).expect("at most the capacity"))
    }

    fn check_think_limit(&self, request: RequestId, more: u32) -> Result<(), Error> {
        let live = self.live(request)?;
        let (attended, limit) = (self.think_attended, self.think_limit);
        let is_alone = self.think_holders == u32::from(live.holds_as_thinking());
        // A limit of all blocks is no limit; then only memory is short.
        let is_limited = live.phase != ThinkPhase::Output && limit < self.capacity && !is_alone;
        if is_limited && more > limit.saturating_sub(attended) {
            return Err(Error::ThinkLimit { needed: more, attended, limit });
        }
        Ok(())
    }

    /// The blocks that would become unattended with the request, in the order of [`Live::chain`].
    pub(super) fn leaving(&self, request: RequestId) -> Result<Vec<EvictionCandidate>, Error> {
        let live = self.live(request)?;
        let mut candidates = Vec::with_capacity(live.unshared as usize);
        for (position, (section, id)) in live.chain().enumerate() {
            let block = &self.blocks[&id];
            if block.readers() == 1 {
                let position = u32::try_from(position).unwrap_or(u32::MAX);
                candidates.push(self.candidate(id, live.leaves_behind(section, block.dead), position));
            }
        }
        Ok(candidates)
    }

    fn candidate(&self, id: BlockId, tier: BlockTier, position: u32) -> EvictionCandidate {
        let block = &self.blocks[&id];
        EvictionCandidate {
            subject: EvictionSubject::Block(id),
            tier,
            blocks: 1,
            position,
            hits: block.hits,
            age_ms: (self.now_ms - block.born_ms) as f32,
            computed_tokens: self.block_tokens,
            ..EvictionCandidate::default()
        }
    }

    /// Unattended blocks to rank again, a bounded number: with keys of an earlier epoch, and whose time is over.
    pub(super) fn due_for_rekey(&mut self, epoch: u32) -> Vec<EvictionCandidate> {
        let places = self.cached.ranked_before(epoch).chain(self.remote.ranked_before(epoch));
        let mut due: Vec<BlockId> = places.take(REKEYED_AT_ONCE).map(|place| place.block).collect();
        while due.len() < REKEYED_AT_ONCE
            && let Some(id) = self.expired.pop_front()
        {
            let Some(block) = self.blocks.get_mut(&id) else { continue };
            block.has_expired = false;
            // Used or kept again since, or of an earlier epoch: that is asked about above.
            let rank = block.ranked.rank;
            if block.readers() == 0 && !rank.is_kept && rank.epoch >= epoch {
                due.push(id);
            }
        }
        let candidate = |id: &BlockId| {
            let block = &self.blocks[id];
            self.candidate(*id, block.cached_tier, block.position)
        };
        due.iter().map(candidate).collect()
    }

    /// Rank unattended blocks again.
    pub(super) fn rank(&mut self, ranks: impl Iterator<Item = (BlockId, Ranked)>) {
        for (id, ranked) in ranks {
            let Some(block) = self.blocks.get_mut(&id) else { continue };
            let order = match block.place {
                BlockLocation::Device { .. } => &mut self.cached,
                BlockLocation::Remote { .. } => &mut self.remote,
            };
            if order.remove(&block.place(id)) {
                block.ranked = ranked;
                order.insert(block.place(id));
            }
        }
    }

    fn remove(&mut self, request: RequestId) -> Live {
        let live = self.requests.remove(&request).expect("the request is live");
        self.think_holders -= u32::from(live.holds_as_thinking());
        live
    }

    /// The facts about the pool for an eviction policy.
    pub(super) fn memory(&self, subject: Subject) -> Memory {
        let KvStats { capacity, free, cached, .. } = self.stats();
        Memory { now_ms: self.now_ms, subject, free_blocks: free, cached_blocks: cached, total_blocks: capacity }
    }

    /// End a live request; its blocks stay as cache. `ranks` are the ranks of [`Pool::leaving`].
    pub(super) fn retire(&mut self, request: RequestId, leaving: &[EvictionCandidate], ranks: &[Ranked]) {
        let live = self.remove(request);
        let mut ranked = leaving.iter().zip(ranks).rev();
        // Tail first: the rest of a partly evicted prefix is still a prefix.
        for (section, id) in live.chain().rev() {
            if !self.detach(id, request, live.phase, section) {
                continue;
            }
            self.next_stamp += 1;
            let block = self.blocks.get_mut(&id).expect("a chain names blocks that exist");
            block.cached_tier = live.leaves_behind(section, block.dead);
            block.dead = false;
            if let Some((candidate, rank)) = ranked.next() {
                (block.position, block.ranked) = (candidate.position, *rank);
            }
            block.stamp = self.next_stamp;
            self.cached.insert(block.place(id));
        }
    }

    /// End a live request and drop the blocks that no other request attends.
    pub(super) fn drop_request(&mut self, request: RequestId) -> Vec<BlockId> {
        let live = self.remove(request);
        let mut dropped = Vec::with_capacity(live.unshared as usize);
        for (section, id) in live.chain() {
            if self.detach(id, request, live.phase, section) {
                self.forget(id);
                dropped.push(id);
            }
        }
        dropped
    }

    /// Evict the first `count` cached blocks.
    pub(super) fn evict_cached(&mut self, count: u32) -> Evicted {
        let mut evicted = Evicted::default();
        for _ in 0..count {
            let Some(place) = self.cached.pop_first() else { break };
            self.evictions[place.tier as usize] += 1;
            self.forget(place.block);
            evicted.push(place.block, place.tier);
        }
        evicted
    }

    /// Carry out a plan that was made from the present books.
    pub(super) fn preempt(&mut self, plan: &Preemption, evicted: &mut Evicted) {
        for request in &plan.victims {
            self.preemptions += 1;
            self.drop_request(*request);
        }
        for (block, class) in &plan.freed {
            self.evictions[*class as usize] += 1;
            evicted.push(*block, *class);
        }
        evicted.preempted.extend_from_slice(&plan.victims);
    }

    pub(super) fn demote(&mut self, id: BlockId, to: BlockTier) -> Result<(), Error> {
        let block = self.blocks.get_mut(&id).ok_or(Error::UnknownBlock { block: id })?;
        let from = block.tier();
        let is_attended = block.readers() > 0;
        if to > from || (is_attended && to != BlockTier::ThinkComplete) {
            return Err(Error::TierRaised { block: id, from, to });
        }
        if is_attended {
            block.dead = true;
            return Ok(());
        }
        let order = match block.place {
            BlockLocation::Device { .. } => &mut self.cached,
            BlockLocation::Remote { .. } => &mut self.remote,
        };
        order.remove(&block.place(id));
        block.cached_tier = to;
        order.insert(block.place(id));
        Ok(())
    }

    /// An unattended block, or the reason why it is not one.
    pub(super) fn unattended(&self, id: BlockId) -> Result<&Block, Error> {
        let block = self.block(id)?;
        if block.readers() > 0 { Err(Error::BlockAttended { block: id }) } else { Ok(block) }
    }

    /// Drop an unattended block; returns the handle if the fabric has it.
    pub(super) fn discard(&mut self, id: BlockId) -> Result<Option<u64>, Error> {
        let block = self.unattended(id)?;
        let (place, location) = (block.place(id), block.place);
        self.cached.remove(&place);
        self.forget(id);
        Ok(match location {
            BlockLocation::Device { .. } => None,
            BlockLocation::Remote { handle } => Some(handle),
        })
    }

    /// Start moving an unattended block from the device; returns its device block and stamp.
    pub(super) fn begin_offload(&mut self, id: BlockId) -> Result<(u32, u64), Error> {
        let block = self.unattended(id)?;
        let BlockLocation::Device { index } = block.place else {
            return Err(Error::BlockElsewhere { block: id, expected: "on the device" });
        };
        let stamp = block.stamp;
        self.begin_move(id)?;
        Ok((index, stamp))
    }

    /// Start moving a remote block to the device; returns its handle.
    pub(super) fn begin_ingest(&mut self, id: BlockId) -> Result<u64, Error> {
        let BlockLocation::Remote { handle } = self.block(id)?.place else {
            return Err(Error::BlockElsewhere { block: id, expected: "remote" });
        };
        self.begin_move(id)?;
        Ok(handle)
    }

    fn begin_move(&mut self, id: BlockId) -> Result<(), Error> {
        let block = self.blocks.get_mut(&id).expect("the block was looked up under the same lock");
        if std::mem::replace(&mut block.is_moving, true) { Err(Error::BlockMoving { block: id }) } else { Ok(()) }
    }

    /// End a transfer, whatever its result; the block may be gone.
    pub(super) fn end_move(&mut self, id: BlockId) {
        if let Some(block) = self.blocks.get_mut(&id) {
            block.is_moving = false;
        }
    }

    /// Drop remote blocks until one more is within the limit, in the order of eviction, without moving ones; returns
    /// their handles.
    pub(super) fn make_remote_room(&mut self) -> Vec<u64> {
        let mut handles = Vec::new();
        while self.remote.len() >= self.remote_limit {
            let Some(id) = self.remote.iter().map(|place| place.block).find(|id| !self.blocks[id].is_moving) else {
                break;
            };
            if let BlockLocation::Remote { handle } = self.blocks[&id].place {
                handles.push(handle);
            }
            self.remote_evictions += 1;
            self.forget(id);
        }
        handles
    }

    /// Note that the bytes of an unattended block have left the device.
    pub(super) fn left_device(&mut self, id: BlockId, handle: u64) {
        let block = self.blocks.get_mut(&id).expect("the block was looked up under the same lock");
        self.cached.remove(&block.place(id));
        if let BlockLocation::Device { index } = std::mem::replace(&mut block.place, BlockLocation::Remote { handle }) {
            self.returned.push(index);
            self.remote.insert(block.place(id));
        }
    }

    /// Hold a device block for a transfer; evicts when none is free.
    pub(super) fn reserve(&mut self) -> Result<(u32, Evicted), Error> {
        let evicted = if self.free_count() == 0 { self.evict_cached(1) } else { Evicted::default() };
        let index = self.take_free().ok_or(Error::OutOfBlocks { needed: 1, available: 0 })?;
        self.reserved += 1;
        Ok((index, evicted))
    }

    pub(super) fn unreserve(&mut self, index: u32) {
        self.reserved -= 1;
        self.returned.push(index);
    }

    /// Note that the bytes of a remote block are in the device block reserved for it.
    pub(super) fn came_back(&mut self, id: BlockId, index: u32) {
        self.reserved -= 1;
        self.next_stamp += 1;
        let block = self.blocks.get_mut(&id).expect("the block was looked up under the same lock");
        self.remote.remove(&block.place(id));
        block.place = BlockLocation::Device { index };
        block.stamp = self.next_stamp;
        self.cached.insert(block.place(id));
    }

    fn take_free(&mut self) -> Option<u32> {
        self.returned.pop().or_else(|| {
            let index = self.fresh;
            (index < self.capacity).then(|| self.fresh += 1).map(|()| index)
        })
    }

    /// Drop a block that no request attends and that is not in the device's order of eviction.
    pub(super) fn forget(&mut self, id: BlockId) {
        let Some(block) = self.blocks.remove(&id) else { return };
        match block.place {
            BlockLocation::Device { index } => self.returned.push(index),
            BlockLocation::Remote { .. } => _ = self.remote.remove(&block.place(id)),
        }
    }

    fn attach(&mut self, id: BlockId, request: RequestId, section: Section) {
        let block = self.blocks.get_mut(&id).expect("the block exists");
        let readers = block.readers();
        if readers == 1 {
            self.requests.get_mut(&RequestId(block.reader_ids)).expect("a reader is live").unshared -= 1;
        }
        let live = self.requests.get_mut(&request).expect("the request is live");
        let view = view(live.phase, section) as usize;
        block.views[view] += 1;
        block.reader_ids ^= request.0;
        self.think_attended += u32::from(view == BlockTier::ThinkActive as usize && block.views[view] == 1);
        self.attended += u32::from(readers == 0);
        live.unshared += u32::from(readers == 0);
        let held = live.holds_as_thinking();
        live.sections[section as usize].push(id);
        live.members.insert(id);
        self.think_holders += u32::from(!held && live.holds_as_thinking());
    }

    /// Detach a request that is no longer live; true when no request attends the block any more.
    fn detach(&mut self, id: BlockId, request: RequestId, phase: ThinkPhase, section: Section) -> bool {
        let block = self.blocks.get_mut(&id).expect("a chain names blocks that exist");
        let view = view(phase, section) as usize;
        block.views[view] -= 1;
        block.reader_ids ^= request.0;
        self.think_attended -= u32::from(view == BlockTier::ThinkActive as usize && block.views[view] == 0);
        let readers = block.readers();
        if readers == 1 {
            self.requests.get_mut(&RequestId(block.reader_ids)).expect("a reader is live").unshared += 1;
        }
        self.attended -= u32::from(readers == 0);
        readers == 0
    }
}

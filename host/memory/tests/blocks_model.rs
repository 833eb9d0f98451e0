//! The block manager against a naive reference: lists that are searched, no counts that are kept.
//!
//! Every operation must give the same result, the same victims in the same order and the same tiers; after every one the
//! books are audited. Policies and fabrics fail and panic throughout.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};

use meridian_core::{
    BlockId, BlockTier, EvictionCandidate, EvictionRanker, EvictionSubject, Fault, FaultKind, Memory, ThinkPhase,
};
use meridian_memory::{
    BeginKv, BlockLocation, BlockManager, Error, Fabric, FabricError, KvMemory, PhaseAwareBlockManager, RequestId,
    Sections,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use BlockTier::{OutputCritical, ThinkActive, ThinkComplete};

/// What the policy and the fabric do when they are called.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Mood {
    #[default]
    Plain,
    Keys(u64),
    TooMany,
    Fault,
    Lost,
    Panic,
}

#[derive(Clone, Default)]
struct Script(Arc<Mutex<(Mood, u64, Vec<u64>)>>);

impl Script {
    fn mood(&self) -> Mood {
        self.0.lock().unwrap().0
    }
}

fn key(seed: u64, subject: EvictionSubject) -> f32 {
    let id = match subject {
        EvictionSubject::Block(block) => block.0,
        EvictionSubject::Request(request) => request + 1000,
    };
    match (id ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61 {
        0 => f32::NAN,
        1 => f32::NEG_INFINITY,
        n => n as f32 - 4.0,
    }
}

impl EvictionRanker for Script {
    fn keys(&mut self, _memory: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault> {
        match self.mood() {
            Mood::Plain | Mood::Lost => {}
            Mood::Keys(seed) => keys.extend(candidates.iter().map(|candidate| key(seed, candidate.subject))),
            Mood::TooMany => keys.resize(candidates.len() + 1, 0.0),
            Mood::Fault => {
                keys.push(1.0);
                return Err(Fault::new(FaultKind::Trap, "unreachable"));
            }
            Mood::Panic => resume_unwind(Box::new("policy")),
        }
        Ok(())
    }
}

impl Fabric for Script {
    fn offload(&self, _block: BlockId, _index: u32) -> Result<u64, FabricError> {
        let mut state = self.0.lock().unwrap();
        match state.0 {
            Mood::Fault => Err(FabricError::Failed("full".into())),
            Mood::Panic => {
                drop(state);
                resume_unwind(Box::new("fabric"))
            }
            _ => {
                state.1 += 1;
                let handle = state.1;
                state.2.push(handle);
                Ok(handle)
            }
        }
    }

    fn ingest(&self, handle: u64, _index: u32) -> Result<(), FabricError> {
        match self.mood() {
            Mood::Fault => Err(FabricError::Failed("down".into())),
            Mood::Lost => {
                self.discard(handle);
                Err(FabricError::Lost)
            }
            Mood::Panic => resume_unwind(Box::new("fabric")),
            _ => Ok(()),
        }
    }

    fn discard(&self, handle: u64) {
        self.0.lock().unwrap().2.retain(|stored| *stored != handle);
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Section {
    Prompt,
    Think,
    Output,
}

#[derive(Clone, Debug)]
struct Block {
    readers: Vec<(u64, Section)>,
    cached_tier: BlockTier,
    dead: bool,
    key: f32,
    remote: bool,
}

#[derive(Clone, Debug)]
struct Live {
    phase: ThinkPhase,
    thought: bool,
    resumed: Option<Sections>,
    strips: bool,
    age: u64,
    chain: Vec<(Section, u64)>,
}

impl Live {
    /// Section of the next block.
    fn section(&self, phase: ThinkPhase) -> Section {
        let at = self.chain.len() as u32;
        match (self.resumed, phase) {
            (Some(sections), _) if at < sections.prompt_blocks => Section::Prompt,
            (Some(sections), _) if at < sections.prompt_blocks + sections.think_blocks => Section::Think,
            (Some(_), ThinkPhase::Prefill) => Section::Output,
            (None, ThinkPhase::Prefill) => Section::Prompt,
            (_, ThinkPhase::Think) => Section::Think,
            (_, ThinkPhase::Output) => Section::Output,
        }
    }

    fn insert(&mut self, section: Section, id: u64) {
        let at = self.chain.iter().position(|(other, _)| *other as u8 > section as u8).unwrap_or(self.chain.len());
        self.chain.insert(at, (section, id));
    }
}

#[derive(Clone, Default)]
struct Model {
    capacity: usize,
    think_limit: usize,
    remote_limit: usize,
    remote_evictions: u64,
    blocks: BTreeMap<u64, Block>,
    /// Every block that was left unattended, the oldest first.
    left: Vec<u64>,
    requests: BTreeMap<u64, Live>,
    begun: u64,
    highest: Option<u64>,
    evictions: [u64; 3],
    preemptions: u64,
    faults: u64,
}

/// What a call did, as far as both sides can say.
#[derive(Debug, Default, PartialEq)]
struct Did {
    evicted: Vec<u64>,
    preempted: Vec<u64>,
    by_tier: [u32; 3],
    count: u32,
}

struct Panicked;

impl Model {
    fn view(&self, request: u64, section: Section) -> BlockTier {
        match (self.requests[&request].phase, section) {
            (ThinkPhase::Output, Section::Think) => ThinkComplete,
            (ThinkPhase::Output, _) => OutputCritical,
            _ => ThinkActive,
        }
    }

    fn tier(&self, id: u64) -> BlockTier {
        let block = &self.blocks[&id];
        if block.dead {
            return ThinkComplete;
        }
        block.readers.iter().map(|(r, s)| self.view(*r, *s)).max().unwrap_or(block.cached_tier)
    }

    fn class(&self, id: u64) -> BlockTier {
        let block = &self.blocks[&id];
        if block.readers.is_empty() {
            return block.cached_tier;
        }
        if block.readers.iter().any(|(r, _)| self.requests[r].phase == ThinkPhase::Output) {
            OutputCritical
        } else {
            ThinkActive
        }
    }

    fn thinks(&self, id: u64) -> bool {
        self.blocks[&id].readers.iter().any(|(r, _)| self.requests[r].phase != ThinkPhase::Output)
    }

    fn think_attended(&self) -> usize {
        self.blocks.keys().filter(|id| self.thinks(**id)).count()
    }

    fn attended(&self) -> usize {
        self.blocks.values().filter(|block| !block.readers.is_empty()).count()
    }

    fn cached(&self) -> Vec<u64> {
        self.in_order(false)
    }

    /// Unattended blocks, on the device or remote, the first to go first.
    fn in_order(&self, remote: bool) -> Vec<u64> {
        let mut cached: Vec<u64> =
            self.blocks.iter().filter(|(_, b)| b.readers.is_empty() && b.remote == remote).map(|(id, _)| *id).collect();
        let age = |id: &u64| self.left.iter().rposition(|left| left == id).unwrap();
        cached.sort_by(|a, b| {
            let (x, y) = (&self.blocks[a], &self.blocks[b]);
            x.cached_tier
                .cmp(&y.cached_tier)
                .then(x.key.is_nan().cmp(&y.key.is_nan()))
                .then(x.key.partial_cmp(&y.key).unwrap_or(std::cmp::Ordering::Equal))
                .then(age(a).cmp(&age(b)))
        });
        cached
    }

    fn free(&self) -> usize {
        self.capacity - self.blocks.values().filter(|block| !block.remote).count()
    }

    fn drop_block(&mut self, id: u64) {
        self.blocks.remove(&id);
        self.left.retain(|left| *left != id);
    }

    fn evict_cached(&mut self, count: usize, did: &mut Did) {
        for id in self.cached().into_iter().take(count) {
            let tier = self.blocks[&id].cached_tier as usize;
            did.by_tier[tier] += 1;
            self.evictions[tier] += 1;
            did.evicted.push(id);
            self.drop_block(id);
        }
    }

    fn live(&self, request: u64) -> Result<&Live, Error> {
        self.requests.get(&request).ok_or(Error::UnknownRequest { id: RequestId(request) })
    }

    fn check_limit(&self, request: u64, more: usize) -> Result<(), Error> {
        let attended = self.think_attended();
        let thinks = |live: &Live| live.phase != ThinkPhase::Output;
        let is_alone = !self.requests.iter().any(|(id, live)| *id != request && thinks(live) && !live.chain.is_empty());
        let is_limited = self.think_limit < self.capacity && thinks(&self.requests[&request]) && !is_alone;
        if is_limited && more > self.think_limit.saturating_sub(attended) {
            let (needed, attended, limit) = (more as u32, attended as u32, self.think_limit as u32);
            return Err(Error::ThinkLimit { needed, attended, limit });
        }
        Ok(())
    }

    fn allocate(&mut self, request: u64, count: usize) -> Result<Did, Error> {
        self.live(request)?;
        self.check_limit(request, count)?;
        let available = self.free() + self.cached().len();
        if available < count {
            return Err(Error::OutOfBlocks { needed: count as u32, available: available as u32 });
        }
        let mut did = Did { count: count as u32, ..Did::default() };
        self.evict_cached(count.saturating_sub(self.free()), &mut did);
        Ok(did)
    }

    fn add_allocated(&mut self, request: u64, ids: &[BlockId]) {
        let live = self.requests.get_mut(&request).unwrap();
        for id in ids {
            let section = live.section(live.phase);
            assert!(self.highest.is_none_or(|highest| id.0 > highest), "a block id was used again");
            self.highest = Some(id.0);
            live.insert(section, id.0);
            let readers = vec![(request, section)];
            self.blocks.insert(id.0, Block { readers, cached_tier: ThinkActive, dead: false, key: 0.0, remote: false });
        }
    }

    fn touch(&mut self, request: u64, ids: &[u64]) -> Result<Did, Error> {
        self.live(request)?;
        let mut new = Vec::new();
        for id in ids {
            let block = self.blocks.get(id).ok_or(Error::UnknownBlock { block: BlockId(*id) })?;
            if block.remote {
                return Err(Error::BlockElsewhere { block: BlockId(*id), expected: "on the device" });
            }
            if !block.readers.iter().any(|(r, _)| *r == request) && !new.contains(id) {
                new.push(*id);
            }
        }
        self.check_limit(request, new.iter().filter(|id| !self.thinks(**id)).count())?;
        for id in &new {
            let block = self.blocks.get_mut(id).unwrap();
            let live = self.requests.get_mut(&request).unwrap();
            let section = live.section(ThinkPhase::Prefill);
            block.readers.push((request, section));
            block.dead = false;
            live.insert(section, *id);
        }
        Ok(Did { count: new.len() as u32, ..Did::default() })
    }

    fn set_phase(&mut self, request: u64, phase: ThinkPhase, think_tokens: u32) {
        let Some(live) = self.requests.get_mut(&request) else { return };
        if think_tokens > 0 && !live.thought {
            live.thought = true;
            if live.phase == ThinkPhase::Output {
                // What it answered before it thought belongs to the prompt.
                let (mut before, think): (Vec<_>, Vec<_>) =
                    live.chain.iter().copied().partition(|(section, _)| *section != Section::Think);
                for (section, id) in &mut before {
                    *section = Section::Prompt;
                    let readers = &mut self.blocks.get_mut(id).unwrap().readers;
                    readers.iter_mut().filter(|(r, _)| *r == request).for_each(|reader| reader.1 = Section::Prompt);
                }
                live.chain = [before, think].concat();
            }
        }
        live.phase = live.phase.max(phase);
    }

    fn keys(&mut self, mood: Mood, subjects: &[EvictionSubject]) -> Result<Vec<f32>, Panicked> {
        if subjects.is_empty() {
            return Ok(Vec::new());
        }
        match mood {
            Mood::Panic => return Err(Panicked),
            Mood::Keys(seed) => return Ok(subjects.iter().map(|subject| key(seed, *subject)).collect()),
            Mood::TooMany | Mood::Fault => self.faults += 1,
            Mood::Plain | Mood::Lost => {}
        }
        Ok(vec![0.0; subjects.len()])
    }

    fn finish(&mut self, request: u64, mood: Mood) -> Result<Result<(), Error>, Panicked> {
        let live = match self.live(request) {
            Ok(live) => live.clone(),
            Err(error) => return Ok(Err(error)),
        };
        let alone: Vec<(Section, u64)> =
            live.chain.iter().copied().filter(|(_, id)| self.blocks[id].readers.len() == 1).collect();
        let subjects: Vec<EvictionSubject> = alone.iter().map(|(_, id)| EvictionSubject::Block(BlockId(*id))).collect();
        let keys = self.keys(mood, &subjects)?;
        for (i, (section, id)) in alone.iter().enumerate().rev() {
            let block = self.blocks.get_mut(id).unwrap();
            let stripped = live.strips && live.thought && *section != Section::Prompt;
            block.cached_tier = if block.dead || stripped { ThinkComplete } else { ThinkActive };
            block.dead = false;
            block.key = keys[i];
            self.left.push(*id);
        }
        self.end(request);
        Ok(Ok(()))
    }

    fn end(&mut self, request: u64) {
        for block in self.blocks.values_mut() {
            block.readers.retain(|(r, _)| *r != request);
        }
        self.requests.remove(&request);
    }

    /// What comes free when all of `victims` leave.
    fn freed(&self, victims: &[u64]) -> BTreeSet<u64> {
        let leave = |b: &Block| !b.readers.is_empty() && b.readers.iter().all(|(r, _)| victims.contains(r));
        self.blocks.iter().filter(|(_, block)| leave(block)).map(|(id, _)| *id).collect()
    }

    fn take(&self, order: &[u64], need: usize, victims: &mut Vec<u64>) {
        loop {
            let before = victims.len();
            for request in order {
                if self.freed(victims).len() >= need {
                    return;
                }
                let with: Vec<u64> = victims.iter().chain([request]).copied().collect();
                if !victims.contains(request) && self.freed(&with).len() > self.freed(victims).len() {
                    *victims = with;
                }
            }
            if victims.len() == before {
                break;
            }
        }
        let mut all = victims.clone();
        for request in order {
            if self.freed(&all).len() < need && !all.contains(request) {
                all.push(*request);
            }
        }
        let freed = self.freed(&all);
        let useful = |request: &u64| self.requests[request].chain.iter().any(|(_, id)| freed.contains(id));
        let more: Vec<u64> = all[victims.len()..].iter().copied().filter(useful).collect();
        victims.extend(more);
    }

    fn evict_for(&mut self, request: u64, count: usize, mood: Mood) -> Result<Result<Did, Error>, Panicked> {
        let own = match self.live(request) {
            Ok(live) => live.chain.len(),
            Err(error) => return Ok(Err(error)),
        };
        let cached = self.cached().len();
        let available = cached + self.attended() - own;
        if available < count {
            return Ok(Err(Error::OutOfBlocks { needed: count as u32, available: available as u32 }));
        }
        let need = count.saturating_sub(cached);
        let mut victims = Vec::new();
        let mut orders: Vec<Vec<u64>> = Vec::new();
        for answering in [false, true] {
            if self.freed(&victims).len() >= need {
                break;
            }
            let of_class = |(id, live): &(&u64, &Live)| {
                **id != request && (live.phase == ThinkPhase::Output) == answering && !live.chain.is_empty()
            };
            let order: Vec<u64> = self.requests.iter().filter(of_class).map(|(id, _)| *id).collect();
            let subjects: Vec<_> = order.iter().map(|id| EvictionSubject::Request(*id)).collect();
            let keys = self.keys(mood, &subjects)?;
            let mut order: Vec<(f32, usize, u64, u64)> = order
                .iter()
                .zip(keys)
                .map(|(id, key)| (key, self.freed(&[*id]).len(), u64::MAX - self.requests[id].age, *id))
                .collect();
            order.sort_by(|a, b| {
                a.0.is_nan()
                    .cmp(&b.0.is_nan())
                    .then(a.0.partial_cmp(&b.0).unwrap_or(std::cmp::Ordering::Equal))
                    .then((a.1, a.2).cmp(&(b.1, b.2)))
            });
            let order: Vec<u64> = order.into_iter().map(|entry| entry.3).collect();
            self.take(&order, need, &mut victims);
            orders.insert(0, order);
        }
        if self.freed(&victims).len() < need {
            self.take(&orders.concat(), need, &mut victims);
        }
        let freed = self.freed(&victims);
        let mut did = Did::default();
        self.evict_cached(count - need, &mut did);
        for id in freed {
            let class = self.class(id) as usize;
            did.by_tier[class] += 1;
            self.evictions[class] += 1;
            did.evicted.push(id);
        }
        for victim in &victims {
            self.end(*victim);
            self.preemptions += 1;
        }
        for id in &did.evicted {
            self.drop_block(*id);
        }
        did.preempted = victims;
        Ok(Ok(did))
    }

    fn demote(&mut self, id: u64, to: BlockTier) -> Result<(), Error> {
        if !self.blocks.contains_key(&id) {
            return Err(Error::UnknownBlock { block: BlockId(id) });
        }
        let from = self.tier(id);
        let block = self.blocks.get_mut(&id).unwrap();
        if to > from || (!block.readers.is_empty() && to != ThinkComplete) {
            return Err(Error::TierRaised { block: BlockId(id), from, to });
        }
        if block.readers.is_empty() {
            block.cached_tier = to;
        } else {
            block.dead = true;
        }
        Ok(())
    }

    fn unattended(&mut self, id: u64) -> Result<&mut Block, Error> {
        let block = self.blocks.get_mut(&id).ok_or(Error::UnknownBlock { block: BlockId(id) })?;
        if block.readers.is_empty() { Ok(block) } else { Err(Error::BlockAttended { block: BlockId(id) }) }
    }
}

/// Both sides, and an operation's worth of random bits.
struct Pair {
    real: PhaseAwareBlockManager,
    model: Model,
    script: Script,
    now_ms: f64,
}

impl Pair {
    fn new(capacity: u32, think_fraction_limit: f64, remote_limit: u32) -> Self {
        let script = Script::default();
        let memory = KvMemory { capacity_bytes: u64::from(capacity) * 16, block_size_bytes: 16, think_fraction_limit };
        let real =
            PhaseAwareBlockManager::new(&memory).unwrap().with_policy(script.clone()).with_fabric(script.clone());
        let real = real.with_remote_limit(remote_limit);
        let think_limit = memory.think_limit_blocks() as usize;
        let remote_limit = remote_limit as usize;
        let model = Model { capacity: capacity as usize, think_limit, remote_limit, ..Model::default() };
        Self { real, model, script, now_ms: 0.0 }
    }

    /// A block that exists, mostly.
    fn pick(&self, bits: u64) -> u64 {
        let n = self.model.blocks.len() as u64;
        let nth = bits % (n + 1);
        self.model.blocks.keys().nth(nth as usize).copied().unwrap_or(bits % 50)
    }

    fn step(&mut self, bits: u64) -> Result<(), TestCaseError> {
        let byte = |i: u32| bits >> (8 * i) & 255;
        let (what, request, count) = (byte(0) % 32, byte(1) % 6, byte(2) % 6);
        let id = RequestId(request);
        let mood = match byte(3) % 16 {
            0 => Mood::Panic,
            1 => Mood::Fault,
            2 => Mood::TooMany,
            3 => Mood::Lost,
            4..8 => Mood::Keys(byte(4)),
            _ => Mood::Plain,
        };
        self.script.0.lock().unwrap().0 = mood;
        self.now_ms += 1.0;
        match what {
            0..5 => {
                let phase = [ThinkPhase::Prefill, ThinkPhase::Prefill, ThinkPhase::Think, ThinkPhase::Output]
                    [byte(4) as usize % 4];
                let strips = byte(5) % 2 == 0;
                let sections = Sections { prompt_blocks: byte(6) as u32 % 4, think_blocks: byte(6) as u32 / 4 % 4 };
                let resumed = (byte(7) % 4 == 0).then_some(sections);
                let now_ms = if byte(7) % 8 == 1 { f64::INFINITY } else { self.now_ms };
                let real = self.real.begin(id, &BeginKv { phase, resumed, strips_reasoning: strips, now_ms });
                let is_new = !self.model.requests.contains_key(&request);
                prop_assert_eq!(real.is_ok(), is_new);
                if is_new {
                    self.model.begun += 1;
                    let thought = resumed.is_some_and(|sections| sections.think_blocks > 0);
                    let live = Live { phase, thought, resumed, strips, age: self.model.begun, chain: Vec::new() };
                    self.model.requests.insert(request, live);
                }
            }
            5..11 => {
                let (real, expected) =
                    (self.real.allocate(id, count as u32), self.model.allocate(request, count as usize));
                match (real, expected) {
                    (Ok(real), Ok(did)) => {
                        prop_assert_eq!(numbers(&real.evicted.blocks), did.evicted);
                        prop_assert_eq!(real.evicted.by_tier, did.by_tier);
                        prop_assert_eq!((real.evicted.preempted.len(), real.blocks.len()), (0, count as usize));
                        self.model.add_allocated(request, &real.blocks);
                    }
                    (real, expected) => prop_assert_eq!(real.err(), expected.err()),
                }
            }
            11..14 => {
                let ids: Vec<u64> = (0..count).map(|i| self.pick(byte(4) + i * (1 + byte(5) % 3))).collect();
                let blocks: Vec<BlockId> = ids.iter().copied().map(BlockId).collect();
                let (real, expected) = (self.real.touch(id, &blocks), self.model.touch(request, &ids));
                prop_assert_eq!(real, expected.map(|did| did.count));
            }
            14..18 => {
                let phase = [ThinkPhase::Prefill, ThinkPhase::Think, ThinkPhase::Output][byte(4) as usize % 3];
                let think_tokens = byte(5) as u32 % 3;
                let real = self.real.set_phase(id, phase, think_tokens);
                prop_assert_eq!(real, self.model.live(request).map(|_| ()));
                self.model.set_phase(request, phase, think_tokens);
            }
            18..20 => {
                let (block, to) = (self.pick(byte(4)), BlockTier::ALL[byte(5) as usize % 3]);
                prop_assert_eq!(self.real.demote(BlockId(block), to), self.model.demote(block, to));
            }
            20..23 => {
                let now_ms = self.now_ms;
                let real = catch_unwind(AssertUnwindSafe(|| {
                    if what == 22 {
                        self.real.release(id).then_some(()).ok_or(Error::UnknownRequest { id })
                    } else {
                        self.real.finish(id, now_ms)
                    }
                }));
                match (real, self.model.finish(request, mood)) {
                    (Ok(real), Ok(expected)) => prop_assert_eq!(real, expected),
                    (real, expected) => prop_assert_eq!(real.is_err(), expected.is_err()),
                }
            }
            23 => {
                let real = self.real.free(id).map(|blocks| numbers(&blocks));
                let expected = self.model.live(request).map(|live| {
                    let alone = |id: &u64| self.model.blocks[id].readers.len() == 1;
                    live.chain.iter().map(|(_, id)| *id).filter(alone).collect::<Vec<u64>>()
                });
                if let Ok(gone) = &expected {
                    gone.iter().for_each(|id| self.model.drop_block(*id));
                    self.model.end(request);
                }
                prop_assert_eq!(real, expected);
            }
            24..26 => self.offload(self.pick(byte(4)), mood)?,
            26..28 => self.ingest(self.pick(byte(4)), mood)?,
            28..31 => self.evict_for(request, count as usize, mood)?,
            _ => {
                let block = self.pick(byte(4));
                let expected = self.model.unattended(block).map(|_| ());
                if expected.is_ok() {
                    self.model.drop_block(block);
                }
                prop_assert_eq!(self.real.discard(BlockId(block)), expected);
            }
        }
        self.compare()
    }

    fn offload(&mut self, id: u64, mood: Mood) -> Result<(), TestCaseError> {
        let block = BlockId(id);
        let real = catch_unwind(AssertUnwindSafe(|| self.real.offload_block(block)));
        let expected = match self.model.unattended(id) {
            Err(error) => Some(error),
            Ok(found) if found.remote => Some(Error::BlockElsewhere { block, expected: "on the device" }),
            Ok(_) if mood == Mood::Fault => Some(Error::Fabric { block, source: FabricError::Failed("full".into()) }),
            Ok(_) if mood == Mood::Panic => {
                prop_assert!(real.is_err());
                return Ok(());
            }
            Ok(_) => {
                while self.model.in_order(true).len() >= self.model.remote_limit {
                    self.model.drop_block(self.model.in_order(true)[0]);
                    self.model.remote_evictions += 1;
                }
                self.model.blocks.get_mut(&id).unwrap().remote = true;
                None
            }
        };
        prop_assert_eq!(real.unwrap().err(), expected);
        Ok(())
    }

    fn ingest(&mut self, id: u64, mood: Mood) -> Result<(), TestCaseError> {
        let block = BlockId(id);
        let real = catch_unwind(AssertUnwindSafe(|| self.real.ingest_block(block)));
        let Some(found) = self.model.blocks.get(&id) else {
            prop_assert_eq!(real.unwrap().err(), Some(Error::UnknownBlock { block }));
            return Ok(());
        };
        if !found.remote {
            prop_assert_eq!(real.unwrap().err(), Some(Error::BlockElsewhere { block, expected: "remote" }));
            return Ok(());
        }
        let mut did = Did::default();
        if self.model.free() == 0 {
            if self.model.cached().is_empty() {
                prop_assert_eq!(real.unwrap().err(), Some(Error::OutOfBlocks { needed: 1, available: 0 }));
                return Ok(());
            }
            self.model.evict_cached(1, &mut did);
        }
        match (mood, real) {
            (Mood::Panic, real) => prop_assert!(real.is_err()),
            (Mood::Fault, real) => {
                let source = FabricError::Failed("down".into());
                prop_assert_eq!(real.unwrap().err(), Some(Error::Fabric { block, source }));
            }
            (Mood::Lost, real) => {
                prop_assert_eq!(real.unwrap().err(), Some(Error::Fabric { block, source: FabricError::Lost }));
                self.model.drop_block(id);
            }
            (_, real) => {
                let real = real.unwrap();
                prop_assert_eq!(real.as_ref().map(|evicted| numbers(&evicted.blocks)), Ok(did.evicted));
                self.model.blocks.get_mut(&id).unwrap().remote = false;
                self.model.left.push(id);
            }
        }
        Ok(())
    }

    fn evict_for(&mut self, request: u64, count: usize, mood: Mood) -> Result<(), TestCaseError> {
        let real = catch_unwind(AssertUnwindSafe(|| self.real.evict_for(RequestId(request), count as u32)));
        let cached = self.model.cached().len().min(count);
        let model = &self.model;
        let others = |id: &&u64| !model.blocks[*id].readers.iter().any(|(r, _)| *r == request);
        let less_critical: Vec<u64> = model.blocks.keys().filter(others).copied().collect();
        let less_critical: Vec<u64> = less_critical
            .into_iter()
            .filter(|id| !model.blocks[id].remote && model.class(*id) < OutputCritical)
            .collect();
        match (real, self.model.evict_for(request, count, mood)) {
            (Ok(Ok(real)), Ok(Ok(mut did))) => {
                let mut blocks = numbers(&real.blocks);
                prop_assert!(blocks.len() >= count);
                prop_assert_eq!(&blocks[..cached], &did.evicted[..cached]);
                blocks.sort_unstable();
                did.evicted.sort_unstable();
                prop_assert_eq!(blocks, did.evicted);
                let preempted: Vec<u64> = real.preempted.iter().map(|request| request.0).collect();
                prop_assert!(!preempted.contains(&request));
                prop_assert_eq!(preempted, did.preempted);
                prop_assert_eq!(real.by_tier, did.by_tier);
                // Independent of how victims are chosen: an answer is hurt only once all else is gone.
                if real.by_tier[OutputCritical as usize] > 0 {
                    prop_assert!(less_critical.iter().all(|id| !self.model.blocks.contains_key(id)));
                }
                if !real.preempted.is_empty() {
                    prop_assert!(self.model.cached().is_empty());
                }
            }
            (Ok(real), Ok(expected)) => prop_assert_eq!(real.err(), expected.err()),
            (real, expected) => prop_assert_eq!(real.is_err(), expected.is_err()),
        }
        Ok(())
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        let (stats, model) = (self.real.stats(), &self.model);
        if let Err(wrong) = self.real.audit() {
            return Err(TestCaseError::fail(wrong));
        }
        prop_assert_eq!(stats.free as usize, model.free());
        prop_assert_eq!(stats.cached as usize, model.cached().len());
        prop_assert_eq!(stats.attended as usize, model.attended());
        prop_assert_eq!(stats.think_attended as usize, model.think_attended());
        prop_assert_eq!(stats.remote as usize, model.blocks.values().filter(|block| block.remote).count());
        prop_assert_eq!(stats.remote_evictions, model.remote_evictions);
        prop_assert_eq!((stats.reserved, stats.requests), (0, model.requests.len()));
        prop_assert_eq!(stats.evictions, model.evictions);
        prop_assert_eq!((stats.preemptions, stats.policy_faults), (model.preemptions, model.faults));
        prop_assert_eq!(self.script.0.lock().unwrap().2.len(), stats.remote as usize, "the fabric keeps no orphan");
        for (id, block) in &model.blocks {
            let id = BlockId(*id);
            prop_assert_eq!(self.real.tier(id), Some(model.tier(id.0)), "block {}", id);
            prop_assert_eq!(self.real.is_attended(id), Some(!block.readers.is_empty()));
            let is_remote = matches!(self.real.block_location(id), Some(BlockLocation::Remote { .. }));
            prop_assert_eq!(is_remote, block.remote);
        }
        Ok(())
    }
}

fn numbers(blocks: &[BlockId]) -> Vec<u64> {
    blocks.iter().map(|block| block.0).collect()
}

#[test]
fn agrees_with_the_reference() {
    let count = Cell::new(0);
    let limit = prop_oneof![Just(1.0), 0.2f64..1.0];
    // 320 operations each on average: above a million in all.
    let cases = (1u32..20, limit, 1u32..4, proptest::collection::vec(any::<u64>(), 1..640));
    let run = TestRunner::new(ProptestConfig::with_cases(3400)).run(&cases, |(capacity, limit, remote, operations)| {
        count.set(count.get() + operations.len());
        let mut pair = Pair::new(capacity, limit, remote);
        for bits in operations {
            pair.step(bits)?;
        }
        Ok(())
    });
    println!("operations: {}", count.get());
    run.expect("every operation agrees, and the books balance after it");
}

#[test]
fn the_operations_reach_every_rule() {
    let (mut state, mut evictions, mut preemptions, mut faults) = (1u64, [0; 3], 0, 0);
    let (mut remote, mut remote_evictions) = (0, 0);
    for capacity in 1..20 {
        let mut pair = Pair::new(capacity, 0.8, 1 + capacity % 2);
        for _ in 0..2000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            pair.step(state ^ state >> 29).unwrap();
            remote += pair.real.stats().remote;
        }
        let stats = pair.real.stats();
        (0..3).for_each(|tier| evictions[tier] += stats.evictions[tier]);
        preemptions += stats.preemptions;
        faults += stats.policy_faults;
        remote_evictions += stats.remote_evictions;
    }
    assert!(evictions.iter().all(|count| *count > 200), "{evictions:?}");
    assert!(remote_evictions > 50, "{remote_evictions}");
    assert!(preemptions > 500 && faults > 100 && remote > 1000, "{preemptions} {faults} {remote}");
}

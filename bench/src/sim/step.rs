//! One step of a simulated engine as its plan is carried out: the KV blocks of its requests.

use meridian_core::{EngineStep, EvictionRanker, Memory, RowId, Stop, Subject};
use meridian_engine::Driver;

use super::content::Chain;
use super::live::Live;
use super::pool::Pool;
use super::recorder::Collector;
use super::{Belady, EngineConfig, StepWork};

pub(super) struct Serving<'a> {
    pub(super) now_ms: f64,
    /// Free blocks that admission leaves to the running requests.
    pub(super) reserve: u32,
    pub(super) config: &'a EngineConfig,
    pub(super) manages_kv: bool,
    pub(super) belady: &'a mut Option<Belady>,
    pub(super) driver: &'a mut Driver,
    pub(super) pool: &'a mut Pool,
    pub(super) live: &'a mut [Option<Box<Live>>],
    /// Most tokens of the step.
    pub(super) token_budget: u32,
    /// Most tokens of one prompt.
    pub(super) prompt_limit: u32,
    /// Room for the blocks that the prefix cache has.
    pub(super) found: &'a mut Vec<u32>,
    /// Running requests in prefill, think and output.
    pub(super) phases: &'a mut [u32; 3],
    pub(super) given: &'a mut Vec<(RowId, u32)>,
    /// See [`super::engine::Engine::take_pulled`].
    pub(super) pulled: &'a mut Vec<(usize, usize)>,
    pub(super) work: StepWork,
    pub(super) recorder: &'a mut Collector,
}

/// The ranker of the blocks that a request leaves behind: the eviction slot, or the bound in its place.
pub(super) fn ranker<'a>(belady: &'a mut Option<Belady>, driver: &'a mut Driver) -> &'a mut dyn EvictionRanker {
    match belady {
        Some(belady) => belady,
        None => driver.eviction(),
    }
}

fn of(live: &mut [Option<Box<Live>>], row: RowId) -> &mut Live {
    live[row.index()].as_deref_mut().expect("a request of the queues is live")
}

/// What running requests have yet to take for prompts, and Meridian's admission leaves to them.
fn blocks_of_prompts(live: &[Option<Box<Live>>], running: &[RowId], config: &EngineConfig) -> u32 {
    if config.state_blocks > 0 {
        // As for all models whose layers take blocks in groups.
        return 0;
    }
    let block_tokens = config.block_tokens;
    let live = running.iter().filter_map(|row| live[row.index()].as_deref());
    let missing = |live: &Live| live.known_tokens.div_ceil(block_tokens).saturating_sub(live.blocks.len() as u32);
    live.filter(|live| live.known_tokens - live.computed_tokens > 1).map(missing).sum()
}

impl EngineStep for Serving<'_> {
    fn needed_tokens(&mut self, row: RowId) -> u32 {
        let live = self.live[row.index()].as_deref().expect("a request of the queues is live");
        (live.known_tokens - live.computed_tokens).min(self.prompt_limit)
    }

    fn units(&mut self, row: RowId, tokens: u32) -> u32 {
        let live = self.live[row.index()].as_deref().expect("a request of the queues is live");
        self.config.whole_blocks(live.computed_tokens, tokens, live.known_tokens, self.token_budget)
    }

    fn grow(&mut self, row: RowId, tokens: u32) -> bool {
        let live = of(self.live, row);
        let end = live.computed_tokens + tokens;
        let needed = end.div_ceil(self.config.block_tokens) - live.blocks.len() as u32;
        if self.pool.free() < needed {
            return false;
        }
        if needed > 0 {
            self.pool.take(needed, self.now_ms, &mut live.blocks);
        }
        true
    }

    fn victim(&mut self, running: &[RowId]) -> Option<usize> {
        if !self.manages_kv || running.len() < 2 {
            return None;
        }
        let reads_blocks = self.driver.reads_victim_blocks();
        let held = |row: &RowId| self.live[row.index()].as_ref().map_or(0, |live| self.pool.unshared(&live.blocks));
        let blocks: Vec<u32> = if reads_blocks { running.iter().map(held).collect() } else { Vec::new() };
        let memory = Memory {
            now_ms: self.now_ms,
            subject: Subject::Requests,
            free_blocks: self.pool.free() - self.pool.cached(),
            cached_blocks: self.pool.cached(),
            total_blocks: self.config.kv_blocks,
        };
        self.driver.victim(&memory, running, &blocks)
    }

    fn preempted(&mut self, row: RowId) {
        let live = of(self.live, row);
        self.recorder.preempted(live);
        self.phases[live.phase()] -= 1;
        let chain = self.driver.scheduler().mirror().chain_ends(row, Stop::Preempted);
        self.pool.chain_ends(&live.blocks, &chain);
        if let Some(belady) = self.belady {
            belady.note(&live.blocks, live.blocks.len(), live.facts.arrival_ms);
        }
        let own_blocks = self.pool.unshared(&live.blocks);
        self.pool.release(ranker(self.belady, self.driver), &mut live.blocks, self.now_ms);
        self.pool.release(ranker(self.belady, self.driver), &mut live.state, self.now_ms);
        live.computed_tokens = 0;
        live.chain = Chain::default();
        live.preemptions += 1;
        self.driver.preempted(row, own_blocks);
    }

    /// With blocks for all that it knows.
    fn admit(&mut self, row: RowId, most: u32, running: &[RowId]) -> Option<u32> {
        let block_tokens = self.config.block_tokens;
        let live = self.live[row.index()].as_deref().expect("a request of the queues is live");
        let chain = live.find_prefix(self.pool, self.config, self.found);
        let kept = live.moves.kept;
        // One that comes from another engine lacks its last token only.
        let cached = if kept.is_some() { live.known_tokens - 1 } else { chain.blocks * block_tokens };
        let tokens = (live.known_tokens - cached).min(self.prompt_limit).min(most);
        let tokens = self.config.whole_blocks(cached, tokens, live.known_tokens, self.token_budget);
        if tokens == 0 {
            return None;
        }
        let revived = self.found.iter().filter(|block| self.pool.is_free(**block)).count() as u32;
        let known = if self.config.scheduler_reserve_full_isl { live.known_tokens } else { cached + tokens };
        let whole = known.div_ceil(block_tokens) - chain.blocks + revived + self.config.state_blocks;
        let watermark = if running.is_empty() { 0 } else { self.reserve };
        // One whose KV another engine sends waits for no room that prompts need.
        let fits = |more: u32| whole + watermark + more <= self.pool.free();
        let keeps_room = self.manages_kv && kept.is_none();
        if !fits(0) || keeps_room && !fits(blocks_of_prompts(self.live, running, self.config)) {
            return None;
        }
        let live = of(self.live, row);
        self.pool.touch(self.found);
        self.pool.matched(self.found, live.preemptions > 0);
        live.blocks.extend_from_slice(self.found);
        live.chain = chain;
        live.computed_tokens = cached;
        let needed = (cached + tokens).div_ceil(block_tokens) - chain.blocks;
        self.pool.take(needed, self.now_ms, &mut live.blocks);
        if self.config.state_blocks > 0 {
            self.pool.take(self.config.state_blocks, self.now_ms, &mut live.state);
        }
        match kept {
            Some(kept) => {
                live.moves.kept = None;
                self.pulled.push(kept);
            }
            None => self.recorder.admitted(live, block_tokens),
        }
        self.phases[live.phase()] += 1;
        self.driver.admitted(row, cached);
        Some(tokens)
    }

    #[inline]
    fn give(&mut self, row: RowId, tokens: u32) {
        let live = of(self.live, row);
        self.work.add(live.computed_tokens, tokens);
        live.computed_tokens += tokens;
        self.given.push((row, tokens));
        let block_tokens = self.config.block_tokens;
        while self.config.prefix_caching && (live.chain.blocks + 1) * block_tokens <= live.computed_tokens {
            let key = live.content.next(&mut live.chain, block_tokens, live.think_tokens);
            let position = live.chain.blocks - 1;
            self.pool.fill(live.blocks[position as usize], key, live.chain.blocks * block_tokens);
        }
    }
}

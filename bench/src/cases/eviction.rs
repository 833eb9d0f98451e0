//! Cases of the eviction slot: blocks or requests of one tier, and the order that is expected.

use meridian_core::{
    Batch, BlockId, BlockTier, Eviction, EvictionCandidate, EvictionColumn, EvictionSubject, Memory, Policy, Ranker,
    Ranking, SessionFacts, SlotKind, Subject, ThinkPhase, columns,
};
use rand::RngExt;
use rand_pcg::Pcg64;
use serde::Deserialize;

use super::{CaseKind, expect};

/// A case of the eviction slot.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvictionCase {
    name: String,
    #[serde(default)]
    config: toml::Table,
    subject: Subject,
    candidates: Vec<Candidate>,
    /// Positions of the candidates, first to last, those that are kept behind the others.
    order: Vec<u32>,
    /// The expected times to keep, milliseconds; none when absent.
    #[serde(default)]
    keep_ms: Vec<f32>,
    /// Facts about the pool, other than its size 0.
    #[serde(default)]
    now_ms: f64,
    #[serde(default)]
    total_blocks: u32,
    /// The policy leaves the batch to the default.
    #[serde(default)]
    default: bool,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Candidate {
    /// 0 dead thinking, 1 of a request that does not answer, 2 of an answer.
    tier: u8,
    blocks: u32,
    position: u32,
    hits: u32,
    age_ms: f32,
    computed_tokens: u32,
    chain_tokens: u32,
    chain_blocks: u32,
    chain_hits: u32,
    is_generated: bool,
    session: u32,
    turn: u32,
    idle_ms: f32,
    /// No gap by default, as for a first turn.
    last_gap_ms: Option<f32>,
    gap_ms: Option<f32>,
    gap_spread_ms: Option<f32>,
    gaps: u32,
    stopped_for_tool: bool,
    priority: i32,
    recompute_ms: f32,
    /// 0 prefill, 1 think, 2 output.
    phase: u8,
    preemptions: u32,
    served_tokens: u32,
    awaited: bool,
    /// Infinite by default, as without a service level.
    level_slack_ms: Option<f32>,
}

impl Candidate {
    fn row(&self) -> Result<EvictionCandidate, String> {
        let tier = BlockTier::ALL.get(usize::from(self.tier));
        let tier = *tier.ok_or_else(|| format!("tier: {}: expected 0, 1 or 2", self.tier))?;
        let phases = [ThinkPhase::Prefill, ThinkPhase::Think, ThinkPhase::Output];
        let phase = phases.get(usize::from(self.phase));
        let phase = *phase.ok_or_else(|| format!("phase: {}: expected 0, 1 or 2", self.phase))?;
        Ok(EvictionCandidate {
            subject: EvictionSubject::Block(BlockId(0)),
            tier,
            blocks: self.blocks,
            position: self.position,
            hits: self.hits,
            age_ms: self.age_ms,
            computed_tokens: self.computed_tokens,
            chain_tokens: self.chain_tokens,
            chain_blocks: self.chain_blocks,
            chain_hits: self.chain_hits,
            is_generated: self.is_generated,
            session: SessionFacts {
                is_named: true,
                session: self.session,
                turn: self.turn,
                last_gap_ms: self.last_gap_ms.unwrap_or(f32::NAN),
                gap_ms: self.gap_ms.unwrap_or(f32::NAN),
                gap_spread_ms: self.gap_spread_ms.unwrap_or(f32::NAN),
                gaps: self.gaps,
                stopped_for_tool: self.stopped_for_tool,
            },
            idle_ms: self.idle_ms,
            priority: self.priority,
            recompute_ms: self.recompute_ms,
            phase,
            preemptions: self.preemptions,
            served_tokens: self.served_tokens,
            is_awaited: self.awaited,
            level_slack_ms: self.level_slack_ms.unwrap_or(f32::INFINITY),
        })
    }
}

impl CaseKind for Eviction {
    type Case = EvictionCase;

    fn head(case: &EvictionCase) -> (&str, &toml::Table) {
        (&case.name, &case.config)
    }

    fn run(case: &EvictionCase, mut policy: Box<dyn Policy<Self>>) -> Result<(), String> {
        let candidates = case.candidates.iter().map(Candidate::row).collect::<Result<Vec<_>, _>>()?;
        let n = candidates.len();
        let EvictionCase { subject, now_ms, total_blocks, .. } = *case;
        let memory = Memory { subject, now_ms, total_blocks, ..Memory::default() };
        let (mut values, mut ranking) = (Vec::new(), Ranking::default());
        columns::fill_eviction(policy.inputs(), &candidates, &mut values);
        let batch = Batch { facts: &memory, candidates: n, columns: &values, finished: &[] };
        policy.decide(&batch, &mut ranking).map_err(|fault| fault.to_string())?;
        Self::check(&memory, &ranking, n).map_err(|fault| fault.to_string())?;
        let Ranking { keys, keep_ms } = &ranking;
        expect("leaves the batch to the default", &(n > 0 && keys.is_empty()), &case.default)?;
        expect("times to keep", keep_ms, &case.keep_ms)?;
        let mut order = Vec::new();
        if !Ranker::default().rank(keys, &[], &mut order) {
            order = (0..n as u32).collect();
        }
        order.sort_by_key(|at| keep_ms.get(*at as usize).is_some_and(|ms| *ms > 0.0));
        expect("order", &order, &case.order)
    }

    fn random(random: &mut Pcg64, inputs: &[EvictionColumn], candidates: usize) -> (Memory, Vec<f32>) {
        let subject = [Subject::Blocks, Subject::Requests][random.random_range(0..2)];
        let is_block = subject == Subject::Blocks;
        let row = |random: &mut Pcg64| EvictionCandidate {
            subject: EvictionSubject::Block(BlockId(0)),
            tier: [BlockTier::ThinkComplete, BlockTier::ThinkActive, BlockTier::OutputCritical]
                [random.random_range(0..3)],
            blocks: if is_block { 1 } else { random.random_range(0..2_000) },
            position: if is_block { random.random_range(0..2_000) } else { 0 },
            hits: if is_block { random.random_range(0..20) } else { 0 },
            age_ms: random.random_range(0.0..600_000.0),
            computed_tokens: if is_block { 16 } else { random.random_range(0..32_000) },
            ..if is_block { left_behind(random) } else { live(random) }
        };
        let made: Vec<_> = (0..candidates).map(|_| row(random)).collect();
        let mut values = Vec::new();
        columns::fill_eviction(inputs, &made, &mut values);
        let total_blocks = random.random_range(candidates as u32 + 1..candidates as u32 + 100_000);
        let memory = Memory {
            now_ms: random.random_range(0.0..1e9),
            subject,
            free_blocks: random.random_range(0..total_blocks),
            cached_blocks: candidates as u32,
            total_blocks,
        };
        (memory, values)
    }

    fn answers(ranking: &Ranking) -> Vec<String> {
        let keep = |i: usize| ranking.keep_ms.get(i).copied().unwrap_or(0.0);
        ranking.keys.iter().enumerate().map(|(i, key)| format!("key {key:?}, kept for {:?} ms", keep(i))).collect()
    }
}

/// What may be known of a block by the chain and the session that used it last: nothing for one in eight.
fn left_behind(random: &mut Pcg64) -> EvictionCandidate {
    if random.random_range(0..8) == 0 {
        return EvictionCandidate::default();
    }
    let gap = |random: &mut Pcg64| {
        if random.random_range(0..4) == 0 { f32::NAN } else { random.random_range(0.0..300_000.0) }
    };
    let is_session = random.random_range(0..4) > 0;
    let (gap_ms, gap_spread_ms) = (gap(random), gap(random));
    let session = SessionFacts {
        is_named: true,
        session: random.random_range(1..2_000),
        turn: random.random_range(1..80),
        last_gap_ms: gap(random),
        gap_ms,
        gap_spread_ms: if gap_ms.is_nan() { f32::NAN } else { gap_spread_ms },
        gaps: random.random_range(0..40),
        stopped_for_tool: random.random_range(0..2) == 0,
    };
    EvictionCandidate {
        chain_tokens: random.random_range(1..200_000),
        chain_blocks: random.random_range(1..3_000),
        chain_hits: random.random_range(0..10_000),
        is_generated: random.random_range(0..4) == 0,
        session: if is_session { session } else { SessionFacts::default() },
        idle_ms: random.random_range(0.0..600_000.0),
        priority: random.random_range(-3..4),
        recompute_ms: random.random_range(0.0..4.0),
        ..EvictionCandidate::default()
    }
}

/// A live request as a candidate, with random facts.
fn live(random: &mut Pcg64) -> EvictionCandidate {
    EvictionCandidate {
        chain_tokens: random.random_range(1..200_000),
        priority: random.random_range(-3..4),
        recompute_ms: random.random_range(0.0..4_000.0),
        phase: [ThinkPhase::Prefill, ThinkPhase::Think, ThinkPhase::Output][random.random_range(0..3)],
        preemptions: random.random_range(0..4),
        served_tokens: random.random_range(0..512),
        is_awaited: random.random(),
        level_slack_ms: [f32::INFINITY, random.random_range(-1e4..1e5)][random.random_range(0..2)],
        ..EvictionCandidate::default()
    }
}

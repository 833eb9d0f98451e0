//! Cases of the eviction slot: blocks or requests of one tier, and the order that is expected.

use meridian_core::{
    Batch, BlockId, BlockTier, Eviction, EvictionCandidate, EvictionColumn, EvictionSubject, Memory, Policy, Ranker,
    SlotKind, Subject, columns,
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
    /// Positions of the candidates, first to last.
    order: Vec<u32>,
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
}

impl Candidate {
    fn row(&self) -> Result<EvictionCandidate, String> {
        let Self { tier, blocks, position, hits, age_ms, computed_tokens } = *self;
        let tiers = [BlockTier::ThinkComplete, BlockTier::ThinkActive, BlockTier::OutputCritical];
        let tier = *tiers.get(usize::from(tier)).ok_or_else(|| format!("tier: {tier}: expected 0, 1 or 2"))?;
        let subject = EvictionSubject::Block(BlockId(0));
        Ok(EvictionCandidate { subject, tier, blocks, position, hits, age_ms, computed_tokens })
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
        let memory = Memory { subject: case.subject, ..Memory::default() };
        let (mut values, mut keys) = (Vec::new(), Vec::new());
        columns::fill_eviction(policy.inputs(), &candidates, &mut values);
        let batch = Batch { facts: &memory, candidates: n, columns: &values, finished: &[] };
        policy.decide(&batch, &mut keys).map_err(|fault| fault.to_string())?;
        Self::check(&memory, &keys, n).map_err(|fault| fault.to_string())?;
        expect("leaves the batch to the default", &(n > 0 && keys.is_empty()), &case.default)?;
        let mut order = Vec::new();
        if !Ranker::default().rank(&keys, &[], &mut order) {
            order = (0..n as u32).collect();
        }
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

    fn answers(keys: &Vec<f32>) -> Vec<String> {
        keys.iter().map(|key| format!("key {key:?}")).collect()
    }
}

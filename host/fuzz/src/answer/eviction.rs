//! Whatever a policy ranks blocks by, each candidate has a key or none has.

use meridian_core::slot::{EvictionSlot, Source};
use meridian_core::types::BlockId;
use meridian_core::{Batch, BlockTier, Eviction, EvictionCandidate, EvictionSubject, Memory, Ranking, Subject, native};

use super::{Scripted, check_asked, length, targets};
use crate::bytes::Bytes;

const MAX_BATCHES: usize = 32;
const MAX_CANDIDATES: usize = 64;

pub(super) fn run(mut bytes: Bytes<'_>) {
    let (answer, policy) = Scripted::<Eviction>::boxed();
    let mut slot = EvictionSlot::new(policy, targets());
    let mut default = native::default_policy::<Eviction>(targets());
    let mut now_ms = 0.0;
    for _ in 0..MAX_BATCHES {
        if bytes.is_empty() {
            return;
        }
        now_ms += f64::from(bytes.u16());
        let subject = if bytes.u8() & 1 == 1 { Subject::Requests } else { Subject::Blocks };
        let [free_blocks, cached_blocks, total_blocks] = std::array::from_fn(|_| bytes.u32());
        let memory = Memory { now_ms, subject, free_blocks, cached_blocks, total_blocks };
        let candidates: Vec<EvictionCandidate> =
            (0..bytes.below(MAX_CANDIDATES + 1)).map(|_| candidate(&mut bytes, subject)).collect();
        let (count, is_any) = (length(bytes.u8(), candidates.len()), bytes.u8() & 1 == 1);
        let mut key = || if is_any { bytes.f32() } else { f32::from(bytes.u8() % 4) };
        let keys: Vec<f32> = (0..count).map(|_| key()).collect();
        let keep_ms: Vec<f32> = (0..length(bytes.u8(), candidates.len())).map(|_| bytes.f32()).collect();
        let given = Ranking { keys, keep_ms };

        let fits = |list: &[f32]| list.len() == candidates.len() || list.is_empty();
        let fits = fits(&given.keys) && fits(&given.keep_ms);
        let decides = check_asked::<Eviction>(&memory, candidates.len(), &given, fits);
        // A policy that faulted too often is not asked, and its stand-in is the active one.
        let is_asked = slot.control().status().quarantine.is_none();
        answer.send(given.clone()).expect("the policy is there");
        let (source, ranking) = slot.decide(&memory, &candidates);
        let bits = |ranking: &Ranking| -> Vec<u32> {
            ranking.keys.iter().chain(&ranking.keep_ms).map(|value| value.to_bits()).collect()
        };
        if is_asked {
            assert_eq!(source == Source::Active, decides, "{given:?} for {} candidates", candidates.len());
        }
        if is_asked && decides {
            assert_eq!(bits(ranking), bits(&given));
            continue;
        }
        // Nor does an answer that is refused leave anything behind.
        if source != Source::Active {
            let (mut columns, mut expected) = (Vec::new(), Ranking::default());
            meridian_core::columns::fill_eviction(default.inputs(), &candidates, &mut columns);
            let batch = Batch { facts: &memory, candidates: candidates.len(), columns: &columns, finished: &[] };
            default.decide(&batch, &mut expected).expect("a native default does not fault");
            assert_eq!(bits(ranking), bits(&expected));
        }
        assert!(ranking.keys.len() == candidates.len() || ranking.keys.is_empty());
    }
}

fn candidate(bytes: &mut Bytes<'_>, subject: Subject) -> EvictionCandidate {
    let number = u64::from(bytes.u8());
    let tiers = [BlockTier::ThinkComplete, BlockTier::ThinkActive, BlockTier::OutputCritical];
    EvictionCandidate {
        subject: match subject {
            Subject::Blocks => EvictionSubject::Block(BlockId(number)),
            Subject::Requests => EvictionSubject::Request(number),
        },
        tier: tiers[usize::from(bytes.u8()) % tiers.len()],
        blocks: bytes.u32(),
        position: u32::from(bytes.u8()),
        hits: u32::from(bytes.u8()),
        age_ms: bytes.f32(),
        computed_tokens: bytes.u32(),
        ..EvictionCandidate::default()
    }
}

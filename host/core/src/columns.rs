//! Builds the columns that a policy reads.

use meridian_policy_sdk::{Column, budget, eviction};

use crate::budget::BudgetCandidate;
use crate::{EvictionCandidate, RequestState, RequestTable, RowId};

/// Write the columns `inputs` of `candidates` at `now_ms` into `out`, laid out as in WIT `dispatch.decide`.
/// `block_tokens` is the size of a KV block. A row that is not live reads as a request without any known facts.
pub fn fill(
    inputs: &[Column],
    table: &RequestTable,
    candidates: &[RowId],
    now_ms: f64,
    block_tokens: u32,
    out: &mut Vec<f32>,
) {
    out.clear();
    out.resize(inputs.len() * candidates.len(), 0.0);
    let block_tokens = block_tokens.max(1);
    for (chunk, row_ids) in candidates.chunks(CHUNK).enumerate() {
        for (position, column) in inputs.iter().enumerate() {
            let start = position * candidates.len() + chunk * CHUNK;
            fill_chunk(*column, table, row_ids, now_ms, block_tokens, &mut out[start..start + row_ids.len()]);
        }
    }
}

/// Number of candidates whose rows stay in the first-level cache while their columns are read one after the other.
const CHUNK: usize = 128;

fn fill_chunk(
    column: Column,
    table: &RequestTable,
    row_ids: &[RowId],
    now_ms: f64,
    block_tokens: u32,
    out: &mut [f32],
) {
    match column {
        Column::Phase => write(out, table, row_ids, |row| f32::from(row.phase() as u8)),
        Column::State => write(out, table, row_ids, |row| f32::from(row.state as u8)),
        Column::WaitMs => write(out, table, row_ids, |row| since(now_ms, row.arrival_ms)),
        Column::SinceProgressMs => write(out, table, row_ids, |row| since(now_ms, row.last_progress_ms)),
        Column::SlackMs => write(out, table, row_ids, |row| (row.deadline_ms - now_ms) as f32),
        Column::PromptTokens => write(out, table, row_ids, |row| row.prompt_tokens as f32),
        Column::CachedTokens => write(out, table, row_ids, |row| row.cached_tokens as f32),
        Column::ComputedTokens => write(out, table, row_ids, |row| row.computed_tokens as f32),
        Column::ThinkTokens => write(out, table, row_ids, |row| row.think_tokens() as f32),
        Column::OutputTokens => write(out, table, row_ids, |row| row.output_tokens() as f32),
        Column::RemainingTokens => write(out, table, row_ids, |row| {
            row.max_tokens.saturating_sub(row.think_tokens().saturating_add(row.output_tokens())) as f32
        }),
        Column::KvBlocks => write(out, table, row_ids, |row| row.computed_tokens.div_ceil(block_tokens) as f32),
        Column::Priority => write(out, table, row_ids, |row| row.priority as f32),
        Column::Tenant => write(out, table, row_ids, |row| row.tenant as f32),
        Column::Preemptions => write(out, table, row_ids, |row| row.preemptions as f32),
        Column::OutputMs => write(out, table, row_ids, |row| row.output_ms(now_ms)),
        Column::Request => write(out, table, row_ids, |row| row.number as f32),
        Column::Session => write(out, table, row_ids, |row| row.session.session as f32),
        Column::Turn => write(out, table, row_ids, |row| row.session.turn as f32),
        Column::ServedTokens => write(out, table, row_ids, |row| table.served_tokens(row) as f32),
        Column::Eat => write(out, table, row_ids, |row| row.signals().eat_bits),
        Column::EatVariance => write(out, table, row_ids, |row| row.signals().eat_variance_bits2),
        Column::Rpdi => write(out, table, row_ids, |row| row.signals().rpdi),
        Column::ThinkLeft => write(out, table, row_ids, |row| table.left(row).think),
        Column::ThinkLeftHigh => write(out, table, row_ids, |row| table.left(row).think_high),
        Column::OutputLeft => write(out, table, row_ids, |row| table.left(row).output),
        Column::Level => write(out, table, row_ids, |row| f32::from(row.level)),
        Column::LevelSlackMs => write(out, table, row_ids, |row| table.level_slack_ms(row, now_ms)),
        Column::LevelWeight => write(out, table, row_ids, |row| table.level(row).map_or(1.0, |level| level.weight)),
        Column::LevelTpotMs => {
            write(out, table, row_ids, |row| table.level(row).map_or(f32::INFINITY, |level| level.tpot_ms));
        }
        Column::ResidentTokens => write(out, table, row_ids, |row| row.resident_tokens() as f32),
        Column::RoomTokens => out.fill(table.room_tokens()),
    }
}

/// Generic, so that each column compiles to its own loop.
#[inline(always)]
fn write(out: &mut [f32], table: &RequestTable, row_ids: &[RowId], value: impl Fn(&RequestState) -> f32) {
    for (out, row_id) in out.iter_mut().zip(row_ids) {
        *out = table.get(*row_id).map_or(0.0, &value);
    }
}

fn since(now_ms: f64, then_ms: f64) -> f32 {
    (now_ms - then_ms).max(0.0) as f32
}

/// Write the columns `inputs` of blocks or requests into `out`, laid out as in WIT `eviction.rank`.
pub fn fill_eviction(inputs: &[eviction::Column], candidates: &[EvictionCandidate], out: &mut Vec<f32>) {
    use eviction::Column;
    out.clear();
    for column in inputs {
        // Each column compiles to its own loop.
        let mut write = |value: &dyn Fn(&EvictionCandidate) -> f32| out.extend(candidates.iter().map(value));
        match column {
            Column::Tier => write(&|c| f32::from(c.tier as u8)),
            Column::Blocks => write(&|c| c.blocks as f32),
            Column::Position => write(&|c| c.position as f32),
            Column::Hits => write(&|c| c.hits as f32),
            Column::AgeMs => write(&|c| c.age_ms),
            Column::ComputedTokens => write(&|c| c.computed_tokens as f32),
            Column::ChainTokens => write(&|c| c.chain_tokens as f32),
            Column::ChainBlocks => write(&|c| c.chain_blocks as f32),
            Column::ChainHits => write(&|c| c.chain_hits as f32),
            Column::Generated => write(&|c| f32::from(u8::from(c.is_generated))),
            Column::Session => write(&|c| c.session.session as f32),
            Column::Turn => write(&|c| c.session.turn as f32),
            Column::IdleMs => write(&|c| c.idle_ms),
            Column::LastGapMs => write(&|c| c.session.last_gap_ms),
            Column::GapMs => write(&|c| c.session.gap_ms),
            Column::GapSpreadMs => write(&|c| c.session.gap_spread_ms),
            Column::Gaps => write(&|c| c.session.gaps as f32),
            Column::StoppedForTool => write(&|c| f32::from(u8::from(c.session.stopped_for_tool))),
            Column::Priority => write(&|c| c.priority as f32),
            Column::RecomputeMs => write(&|c| c.recompute_ms),
            Column::Phase => write(&|c| f32::from(c.phase as u8)),
            Column::Preemptions => write(&|c| c.preemptions as f32),
            Column::ServedTokens => write(&|c| c.served_tokens as f32),
            Column::Awaited => write(&|c| f32::from(u8::from(c.is_awaited))),
            Column::LevelSlackMs => write(&|c| c.level_slack_ms),
        }
    }
}

/// Write the columns `inputs` of thinking requests into `out`, laid out as in WIT `budget.start`.
pub fn fill_budget(inputs: &[budget::Column], candidates: &[BudgetCandidate], out: &mut Vec<f32>) {
    out.clear();
    let or_nan = |value: Option<f64>| value.map_or(f32::NAN, |value| value as f32);
    for column in inputs {
        out.extend(candidates.iter().map(|candidate| {
            let BudgetCandidate { prompt_tokens, remaining_tokens, think_ms, slack_ms, priority, tenant, .. } =
                candidate;
            let BudgetCandidate { request, session, turn, observed, .. } = candidate;
            match column {
                budget::Column::PromptTokens => *prompt_tokens as f32,
                budget::Column::ThinkTokens => observed.think_tokens as f32,
                budget::Column::RemainingTokens => *remaining_tokens as f32,
                budget::Column::ThinkMs => think_ms.max(0.0) as f32,
                budget::Column::Priority => *priority as f32,
                budget::Column::Tenant => *tenant as f32,
                budget::Column::Signal => {
                    f32::from(u8::from(observed.is_probed) + 2 * u8::from(observed.is_at_boundary))
                }
                budget::Column::Probes => observed.probes as f32,
                budget::Column::Eat => or_nan(observed.eat_bits),
                budget::Column::EatVariance => or_nan(observed.eat_variance_bits2),
                budget::Column::Rpdi => or_nan(observed.rpdi),
                budget::Column::SameAnswers => observed.same_answers as f32,
                budget::Column::SlackMs => *slack_ms as f32,
                budget::Column::Request => *request as f32,
                budget::Column::Session => *session as f32,
                budget::Column::Turn => *turn as f32,
                budget::Column::Repetition => observed.repeated.tokens as f32,
                budget::Column::RepetitionPeriod => observed.repeated.period as f32,
                budget::Column::Confidence => or_nan(observed.confidence),
                budget::Column::LevelSlackMs => candidate.level_slack_ms,
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Markers, NewRequest};

    #[test]
    fn tokens_of_the_last_step() {
        let mut table = RequestTable::default();
        let rows = [(); 2].map(|()| table.insert(&NewRequest::default()).expect("finite times"));
        let served = |table: &RequestTable| {
            let mut out = Vec::new();
            fill(&[Column::ServedTokens], table, &rows, 0.0, 16, &mut out);
            out
        };
        assert_eq!(served(&table), [0.0, 0.0]);
        table.next_step();
        table.scheduled(rows[0], 64, 10.0);
        table.scheduled(rows[1], 3, 10.0);
        assert_eq!(served(&table), [64.0, 3.0]);
        // The clock may stand still.
        table.next_step();
        table.scheduled(rows[1], 1, 10.0);
        assert_eq!(served(&table), [0.0, 1.0]);
    }

    #[test]
    fn time_since_the_first_token_of_output() {
        let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![]).expect("usable markers");
        let mut table = RequestTable::new(markers);
        let request = NewRequest { prompt: &[1, 7], arrival_ms: 1000.0, ..NewRequest::default() };
        let row_id = table.insert(&request).expect("finite times");
        let output_ms = |table: &RequestTable, now_ms: f64| {
            let mut out = Vec::new();
            fill(&[Column::OutputMs], table, &[row_id], now_ms, 16, &mut out);
            out[0]
        };
        table.scheduled(row_id, 2, 1010.0);
        table.set_clock(1020.0);
        table.generated(row_id, &[40, 8], &mut Vec::new());
        assert!(output_ms(&table, 1030.0).is_nan(), "the end of thinking is no output");
        table.set_clock(1040.0);
        table.generated(row_id, &[41], &mut Vec::new());
        table.set_clock(1050.0);
        table.generated(row_id, &[42], &mut Vec::new());
        assert_eq!([1040.0, 1065.0].map(|now_ms| output_ms(&table, now_ms)), [0.0, 25.0]);
        assert_eq!(output_ms(&table, 1000.0), 0.0, "a clock that went back");
        table.preempted(row_id);
        assert_eq!(output_ms(&table, 1065.0), 25.0);
    }
}

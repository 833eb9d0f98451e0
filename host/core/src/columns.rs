//! Builds the columns that a policy asked for.

use meridian_policy_sdk::Column;

use crate::{RequestState, RequestTable, Slot};

/// Write the columns `inputs` of `candidates` at `now_ms` into `out`, laid out as in WIT `dispatch.decide`.
/// `block_tokens` is the size of a KV block. A slot that is not live reads as a request about which nothing is known.
pub fn fill(
    inputs: &[Column],
    table: &RequestTable,
    candidates: &[Slot],
    now_ms: f64,
    block_tokens: u32,
    out: &mut Vec<f32>,
) {
    out.clear();
    out.reserve(inputs.len() * candidates.len());
    let block_tokens = block_tokens.max(1);
    for column in inputs {
        match column {
            Column::Phase => write(out, table, candidates, |row| f32::from(row.phase() as u8)),
            Column::State => write(out, table, candidates, |row| f32::from(row.state as u8)),
            Column::WaitMs => write(out, table, candidates, |row| since(now_ms, row.arrival_ms)),
            Column::SinceProgressMs => write(out, table, candidates, |row| since(now_ms, row.last_progress_ms)),
            Column::SlackMs => write(out, table, candidates, |row| (row.deadline_ms - now_ms) as f32),
            Column::PromptTokens => write(out, table, candidates, |row| row.prompt_tokens as f32),
            Column::CachedTokens => write(out, table, candidates, |row| row.cached_tokens as f32),
            Column::ComputedTokens => write(out, table, candidates, |row| row.computed_tokens as f32),
            Column::ThinkTokens => write(out, table, candidates, |row| row.think_tokens as f32),
            Column::OutputTokens => write(out, table, candidates, |row| row.output_tokens as f32),
            Column::RemainingTokens => {
                write(out, table, candidates, |row| {
                    row.max_tokens.saturating_sub(row.think_tokens.saturating_add(row.output_tokens)) as f32
                });
            }
            Column::KvBlocks => write(out, table, candidates, |row| row.computed_tokens.div_ceil(block_tokens) as f32),
            Column::Priority => write(out, table, candidates, |row| row.priority as f32),
            Column::Tenant => write(out, table, candidates, |row| row.tenant as f32),
            Column::Preemptions => write(out, table, candidates, |row| row.preemptions as f32),
            // Not measured by this host: the documented absent value.
            Column::Eat | Column::EatVariance | Column::Rpdi => write(out, table, candidates, |_| f32::NAN),
        }
    }
}

/// Generic, so that each column compiles to a loop of its own.
#[inline(always)]
fn write(out: &mut Vec<f32>, table: &RequestTable, candidates: &[Slot], value: impl Fn(&RequestState) -> f32) {
    out.extend(candidates.iter().map(|slot| table.get(*slot).map_or(0.0, &value)));
}

fn since(now_ms: f64, then_ms: f64) -> f32 {
    (now_ms - then_ms).max(0.0) as f32
}

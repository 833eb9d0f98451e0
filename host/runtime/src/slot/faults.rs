use std::collections::VecDeque;

use meridian_core::{Column, Fault, Step};

use crate::control::{FaultBatch, FaultEntry, SlotName, Version};

/// Faults kept for the operator; all are counted elsewhere.
const KEPT: usize = 256;
/// Of them, how many of the newest keep the batch they happened on.
const WITH_BATCH: usize = 8;

/// The latest faults, with what is needed to reproduce the newest of them.
#[derive(Debug, Default)]
pub(super) struct FaultLog {
    entries: VecDeque<FaultEntry>,
}

impl FaultLog {
    #[expect(clippy::too_many_arguments, reason = "one row of a log")]
    pub(super) fn push(
        &mut self,
        slot: SlotName,
        version: &Version,
        shadow: bool,
        now_ms: f64,
        candidates: usize,
        fault: &Fault,
        batch: Option<(&[Column], &[f32], &Step)>,
    ) {
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        let batch = batch.map(|(inputs, columns, step)| FaultBatch {
            inputs: inputs.iter().map(|column| format!("{column:?}")).collect(),
            columns_bits: columns.iter().map(|value| value.to_bits()).collect(),
            step: step_json(step),
        });
        self.entries.push_back(FaultEntry {
            slot,
            now_ms,
            kind: fault.kind.label().into(),
            detail: fault.detail.clone(),
            version: version.clone(),
            shadow,
            candidates,
            batch,
        });
        if let Some(old) = self.entries.len().checked_sub(WITH_BATCH + 1) {
            self.entries[old].batch = None;
        }
    }

    pub(super) fn entries(&self) -> Vec<FaultEntry> {
        self.entries.iter().cloned().collect()
    }
}

fn step_json(step: &Step) -> serde_json::Value {
    let Step {
        now_ms,
        token_budget,
        free_blocks,
        total_blocks,
        running,
        running_think,
        running_output,
        waiting,
        decode_tokens,
        fixed_ms,
        decode_token_ms,
        prefill_token_ms,
    } = *step;
    serde_json::json!({
        "now_ms": now_ms, "token_budget": token_budget, "free_blocks": free_blocks, "total_blocks": total_blocks,
        "running": running, "running_think": running_think, "running_output": running_output, "waiting": waiting,
        "decode_tokens": decode_tokens, "fixed_ms": fixed_ms, "decode_token_ms": decode_token_ms,
        "prefill_token_ms": prefill_token_ms,
    })
}

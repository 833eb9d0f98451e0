//! The bindings of world `dispatch-policy`, and the only place where WIT types become host types.

use meridian_core::{Column, Decision, Description, Step, Targets};

wasmtime::component::bindgen!({
    path: "../../wit",
    world: "dispatch-policy",
});

pub(crate) use exports::meridian::policy::{dispatch, lifecycle};

pub(crate) fn description(description: lifecycle::Description) -> Description {
    let lifecycle::Description { name, version, summary } = description;
    Description { name: clip(name, 64), version: clip(version, 64), summary: clip(summary, 512) }
}

/// A guest's text is shown in terminals and logs: no control characters, bounded length.
pub(crate) fn clip(text: String, max_chars: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(max_chars).collect()
}

pub(crate) fn targets(targets: Targets) -> lifecycle::Targets {
    let Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms } = targets;
    lifecycle::Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms }
}

pub(crate) fn step(step: &Step) -> dispatch::Step {
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
    dispatch::Step {
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
    }
}

pub(crate) fn decision(from: dispatch::Decision, to: &mut Decision) {
    let dispatch::Decision { keys, token_budget, token_caps } = from;
    *to = Decision { keys, token_budget, token_caps };
}

pub(crate) fn column(column: dispatch::Column) -> Column {
    match column {
        dispatch::Column::Phase => Column::Phase,
        dispatch::Column::State => Column::State,
        dispatch::Column::WaitMs => Column::WaitMs,
        dispatch::Column::SinceProgressMs => Column::SinceProgressMs,
        dispatch::Column::SlackMs => Column::SlackMs,
        dispatch::Column::PromptTokens => Column::PromptTokens,
        dispatch::Column::CachedTokens => Column::CachedTokens,
        dispatch::Column::ComputedTokens => Column::ComputedTokens,
        dispatch::Column::ThinkTokens => Column::ThinkTokens,
        dispatch::Column::OutputTokens => Column::OutputTokens,
        dispatch::Column::RemainingTokens => Column::RemainingTokens,
        dispatch::Column::KvBlocks => Column::KvBlocks,
        dispatch::Column::Priority => Column::Priority,
        dispatch::Column::Tenant => Column::Tenant,
        dispatch::Column::Preemptions => Column::Preemptions,
        dispatch::Column::Eat => Column::Eat,
        dispatch::Column::EatVariance => Column::EatVariance,
        dispatch::Column::Rpdi => Column::Rpdi,
    }
}

//! The bindings of every interface, and the only place where WIT types become host types.

use meridian_core::budget::{Load, PolicyThresholds, Verdict};
use meridian_core::text::is_printable;
use meridian_core::{BudgetColumn, Column, Decision, Description, EvictionColumn, Memory, Step, Subject, Targets};

/// Of world `policy` only its interfaces are used, each where a component exports it.
#[allow(dead_code)]
mod bindings {
    wasmtime::component::bindgen!({
        path: "../../wit",
        world: "policy",
    });
}

pub(crate) use bindings::exports::meridian::policy::{budget, dispatch, eviction, lifecycle};

pub(crate) fn description(description: lifecycle::Description) -> Description {
    let lifecycle::Description { name, version, summary } = description;
    Description { name: clip(name, 64), version: clip(version, 64), summary: clip(summary, 512) }
}

/// A guest's text is shown in terminals and logs: only what those show as it is, bounded length.
pub(crate) fn clip(text: String, max_chars: usize) -> String {
    text.chars().filter(|c| is_printable(*c)).take(max_chars).collect()
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

pub(crate) fn memory(memory: &Memory) -> eviction::Memory {
    let Memory { now_ms, subject, free_blocks, cached_blocks, total_blocks } = *memory;
    let subject = match subject {
        Subject::Blocks => eviction::Subject::Blocks,
        Subject::Requests => eviction::Subject::Requests,
    };
    eviction::Memory { now_ms, subject, free_blocks, cached_blocks, total_blocks }
}

pub(crate) fn load(load: &Load) -> budget::Load {
    // The point is told by which function is called.
    let Load { now_ms, point: _, thinking, answering, waiting, free_blocks, total_blocks, configured } = *load;
    let PolicyThresholds {
        min_think_tokens,
        max_think_tokens,
        eat_probe_interval_tokens,
        ema_alpha,
        eat_variance_threshold,
        eat_max_bits,
        min_probes,
        rpdi_window,
        rpdi_threshold,
    } = configured;
    let configured = budget::Thresholds {
        min_think_tokens,
        max_think_tokens,
        eat_probe_interval_tokens,
        ema_alpha,
        eat_variance_threshold,
        eat_max_bits,
        min_probes,
        rpdi_window,
        rpdi_threshold,
    };
    budget::Load { now_ms, thinking, answering, waiting, free_blocks, total_blocks, configured }
}

pub(crate) fn thresholds(thresholds: budget::Thresholds) -> PolicyThresholds {
    let budget::Thresholds {
        min_think_tokens,
        max_think_tokens,
        eat_probe_interval_tokens,
        ema_alpha,
        eat_variance_threshold,
        eat_max_bits,
        min_probes,
        rpdi_window,
        rpdi_threshold,
    } = thresholds;
    PolicyThresholds {
        min_think_tokens,
        max_think_tokens,
        eat_probe_interval_tokens,
        ema_alpha,
        eat_variance_threshold,
        eat_max_bits,
        min_probes,
        rpdi_window,
        rpdi_threshold,
    }
}

/// Variants of two enums with the same names.
macro_rules! same {
    ($value:expr, $from:path => $to:path: $($variant:ident)*) => {{
        use {$from as From, $to as To};
        match $value {
            $(From::$variant => To::$variant,)*
        }
    }};
}

pub(crate) fn verdict(verdict: budget::Verdict) -> Verdict {
    same!(verdict, budget::Verdict => Verdict: Default KeepThinking EndNow)
}

pub(crate) fn dispatch_column(column: dispatch::Column) -> Column {
    same!(column, dispatch::Column => Column:
        Phase State WaitMs SinceProgressMs SlackMs PromptTokens CachedTokens ComputedTokens ThinkTokens OutputTokens
        RemainingTokens KvBlocks Priority Tenant Preemptions Eat EatVariance Rpdi OutputMs)
}

pub(crate) fn eviction_column(column: eviction::Column) -> EvictionColumn {
    same!(column, eviction::Column => EvictionColumn: Tier Blocks Position Hits AgeMs ComputedTokens)
}

pub(crate) fn budget_column(column: budget::Column) -> BudgetColumn {
    same!(column, budget::Column => BudgetColumn:
        PromptTokens ThinkTokens RemainingTokens ThinkMs Priority Tenant Signal Probes Eat EatVariance Rpdi
        SameAnswers SlackMs)
}

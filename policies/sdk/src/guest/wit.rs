//! The only place where WIT types become those of the SDK, and back.

use super::{budget_wit, dispatch_wit, eviction_wit, lifecycle};
use crate::{Column, Step, Targets, budget, eviction};

pub(super) fn targets(targets: lifecycle::Targets) -> Targets {
    let lifecycle::Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms } =
        targets;
    Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms }
}

pub(super) fn step(step: dispatch_wit::Step) -> Step {
    let dispatch_wit::Step {
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
    } = step;
    Step {
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

pub(super) fn memory(memory: eviction_wit::Memory) -> eviction::Memory {
    let eviction_wit::Memory { now_ms, subject, free_blocks, cached_blocks, total_blocks } = memory;
    let subject = match subject {
        eviction_wit::Subject::Blocks => eviction::Subject::Blocks,
        eviction_wit::Subject::Requests => eviction::Subject::Requests,
    };
    eviction::Memory { now_ms, subject, free_blocks, cached_blocks, total_blocks }
}

pub(super) fn load(load: budget_wit::Load, point: budget::Point) -> budget::Load {
    let budget_wit::Load { now_ms, thinking, answering, waiting, free_blocks, total_blocks, configured } = load;
    let budget_wit::Thresholds {
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
    budget::Load { now_ms, point, thinking, answering, waiting, free_blocks, total_blocks, configured }
}

pub(super) fn thresholds(thresholds: budget::Thresholds) -> budget_wit::Thresholds {
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
    budget_wit::Thresholds {
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

pub(super) fn verdict(verdict: budget::Verdict) -> budget_wit::Verdict {
    match verdict {
        budget::Verdict::Default => budget_wit::Verdict::Default,
        budget::Verdict::KeepThinking => budget_wit::Verdict::KeepThinking,
        budget::Verdict::EndNow => budget_wit::Verdict::EndNow,
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

pub(super) fn dispatch_column(column: Column) -> dispatch_wit::Column {
    same!(column, Column => dispatch_wit::Column:
        Phase State WaitMs SinceProgressMs SlackMs PromptTokens CachedTokens ComputedTokens ThinkTokens OutputTokens
        RemainingTokens KvBlocks Priority Tenant Preemptions Eat EatVariance Rpdi OutputMs)
}

pub(super) fn eviction_column(column: eviction::Column) -> eviction_wit::Column {
    same!(column, eviction::Column => eviction_wit::Column: Tier Blocks Position Hits AgeMs ComputedTokens)
}

pub(super) fn budget_column(column: budget::Column) -> budget_wit::Column {
    same!(column, budget::Column => budget_wit::Column:
        PromptTokens ThinkTokens RemainingTokens ThinkMs Priority Tenant Signal Probes Eat EatVariance Rpdi
        SameAnswers SlackMs)
}

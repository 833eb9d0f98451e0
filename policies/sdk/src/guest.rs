//! The component side: bindings of world `dispatch-policy` and the glue from them to [`DispatchPolicy`].

#![allow(missing_docs)] // generated bindings; the documentation is in wit/

wit_bindgen::generate!({
    path: "../../wit",
    world: "dispatch-policy",
    pub_export_macro: true,
    default_bindings_module: "meridian_policy_sdk::guest",
});

use exports::meridian::policy::{dispatch, lifecycle};

use crate::{Column, DispatchPolicy, Init, Step, Targets, decide};

/// The one instance of a policy in a component; implemented by `export_dispatch!`.
pub trait Instance {
    type Policy: DispatchPolicy;
    fn with<R>(f: impl FnOnce(&mut Option<Self::Policy>) -> R) -> R;
}

impl<T: Instance> lifecycle::Guest for T {
    fn describe() -> lifecycle::Description {
        lifecycle::Description {
            name: T::Policy::NAME.into(),
            version: T::Policy::VERSION.into(),
            summary: T::Policy::SUMMARY.into(),
        }
    }

    fn init(targets: lifecycle::Targets, config_json: String) -> Result<(), String> {
        let lifecycle::Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms } =
            targets;
        let targets = Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms };
        let policy = T::Policy::new(Init { targets, config_json: &config_json })?;
        T::with(|slot| *slot = Some(policy));
        Ok(())
    }

    fn snapshot() -> Vec<u8> {
        T::with(|slot| slot.as_ref().map(DispatchPolicy::snapshot).unwrap_or_default())
    }

    fn restore(state: Vec<u8>) -> Result<(), String> {
        T::with(|slot| match slot {
            Some(policy) => policy.restore(&state),
            None => Err("restore before init".into()),
        })
    }
}

impl<T: Instance> dispatch::Guest for T {
    fn inputs() -> Vec<dispatch::Column> {
        T::Policy::INPUTS.iter().map(|column| to_wit(*column)).collect()
    }

    fn decide(step: dispatch::Step, candidates: u32, columns: Vec<f32>) -> dispatch::Decision {
        let dispatch::Step {
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
        let step = Step {
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
        };
        let mut decision = crate::Decision::default();
        T::with(|slot| {
            if let Some(policy) = slot {
                decide(policy, &step, candidates as usize, &columns, &mut decision);
            }
        });
        let crate::Decision { keys, token_budget, token_caps } = decision;
        dispatch::Decision { keys, token_budget, token_caps }
    }
}

fn to_wit(column: Column) -> dispatch::Column {
    match column {
        Column::Phase => dispatch::Column::Phase,
        Column::State => dispatch::Column::State,
        Column::WaitMs => dispatch::Column::WaitMs,
        Column::SinceProgressMs => dispatch::Column::SinceProgressMs,
        Column::SlackMs => dispatch::Column::SlackMs,
        Column::PromptTokens => dispatch::Column::PromptTokens,
        Column::CachedTokens => dispatch::Column::CachedTokens,
        Column::ComputedTokens => dispatch::Column::ComputedTokens,
        Column::ThinkTokens => dispatch::Column::ThinkTokens,
        Column::OutputTokens => dispatch::Column::OutputTokens,
        Column::RemainingTokens => dispatch::Column::RemainingTokens,
        Column::KvBlocks => dispatch::Column::KvBlocks,
        Column::Priority => dispatch::Column::Priority,
        Column::Tenant => dispatch::Column::Tenant,
        Column::Preemptions => dispatch::Column::Preemptions,
        Column::Eat => dispatch::Column::Eat,
        Column::EatVariance => dispatch::Column::EatVariance,
        Column::Rpdi => dispatch::Column::Rpdi,
    }
}

//! The policies that Meridian ships, one module each.
//!
//! A module is also the root of an example of its own, which is the policy's component: see `Cargo.toml`. The library is empty in
//! a build for WebAssembly, since a component holds one policy.

#![cfg(not(target_arch = "wasm32"))]

pub mod balanced;
pub mod code_stop;
pub mod cost_aware;
pub mod deadline_aware;
pub mod deer;
pub mod eat;
pub mod eat_rpdi;
pub mod edf;
pub mod fair_share;
pub mod fcfs;
pub mod fixed_budget;
pub mod jitserve;
pub mod lpm;
pub mod lru;
pub mod mlfq;
pub mod next_use;
pub mod noop;
pub mod output_first;
pub mod pascal;
pub mod patience;
pub mod prefix_value;
pub mod priority;
pub mod qoe;
pub mod qoserve;
pub mod rpdi;
pub mod scorpio;
pub mod srpt;
pub mod t_lru;
pub mod tiered_lru;
pub mod ttl;
pub mod wa_lru;

#[cfg(test)]
fn made<P: meridian_policy_sdk::Policy>(config_json: &str) -> Result<P, String> {
    let targets = meridian_policy_sdk::Targets {
        output_tpot_budget_ms: 20.0,
        think_tpot_budget_ms: 80.0,
        think_batch_multiplier: 2.5,
        max_defer_ms: 2000.0,
    };
    P::new(meridian_policy_sdk::Init { targets, config_json })
}

/// The decision about candidates, whose columns are in the order of the policy's `INPUTS`.
#[cfg(test)]
fn decided<P: meridian_policy_sdk::DispatchPolicy, C>(
    policy: &mut P,
    step: &meridian_policy_sdk::Step,
    candidates: &[C],
    columns: &[fn(&C) -> f32],
) -> meridian_policy_sdk::Decision {
    let columns: Vec<f32> = columns.iter().flat_map(|of| candidates.iter().map(of)).collect();
    let mut decision = meridian_policy_sdk::Decision::default();
    meridian_policy_sdk::decide(policy, step, candidates.len(), &columns, &mut decision);
    decision
}

/// Positions of keys, first to last.
#[cfg(test)]
fn order(keys: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by(|a, b| keys[*a].total_cmp(&keys[*b]));
    order
}

/// A step of 5 ms, with 0.1 ms a decode and 0.03 ms for a token of a prompt.
#[cfg(test)]
fn step() -> meridian_policy_sdk::Step {
    meridian_policy_sdk::Step {
        token_budget: 8192,
        decode_tokens: 1,
        fixed_ms: 5.0,
        decode_token_ms: 0.1,
        prefill_token_ms: 0.03,
        ..meridian_policy_sdk::Step::default()
    }
}

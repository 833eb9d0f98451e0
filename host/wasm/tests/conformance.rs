//! Every shipped policy against its cases, natively and as a component.
//!
//! A case is data: `policies/NAME/cases/*.toml`. Needs the components: `make policies`.

mod support;

use std::path::{Path, PathBuf};

use meridian_core::types::RequestId;
use meridian_core::{
    Batch, Column, Decision, Dispatch, MeridianConfig, NewRequest, Policy, Ranker, RequestTable, SlotKind, Step,
    columns,
};
use meridian_runtime::native;
use meridian_wasm::Runtime;
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cases {
    case: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    #[serde(default)]
    step: StepFacts,
    #[serde(default)]
    candidates: Vec<Candidate>,
    /// Positions of the candidates, first to last.
    order: Option<Vec<u32>>,
    /// A number, or `"engine"` for the engine's own.
    token_budget: Option<toml::Value>,
    /// The policy leaves the step to the default.
    #[serde(default)]
    default: bool,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct StepFacts {
    token_budget: u32,
    running: u32,
    running_think: u32,
    running_output: u32,
    decode_tokens: Option<u32>,
    fixed_ms: f32,
    decode_token_ms: f32,
    prefill_token_ms: f32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Candidate {
    phase: Phase,
    state: State,
    #[serde(default)]
    since_progress_ms: f64,
    #[serde(default)]
    priority: i32,
    /// Milliseconds until the deadline; none when absent.
    slack_ms: Option<f64>,
}

#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Phase {
    Prefill,
    Think,
    Output,
}

#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum State {
    Waiting,
    Running,
    Preempted,
}

const NOW_MS: f64 = 2e9;

/// The columns of the candidates, built by the host's own mirror from a history that leads to them.
fn build_columns(inputs: &[Column], candidates: &[Candidate]) -> Vec<f32> {
    let mut table =
        RequestTable::new(meridian_core::Markers::new(vec![vec![1]], vec![vec![2]], vec![]).expect("usable"));
    let mut slots = Vec::new();
    for (i, candidate) in (0..).zip(candidates) {
        let served_ms = NOW_MS - candidate.since_progress_ms;
        let request = NewRequest {
            prompt: &[0, 0, 1],
            arrival_ms: served_ms,
            priority: candidate.priority,
            deadline_ms: candidate.slack_ms.map_or(f64::INFINITY, |slack_ms| NOW_MS + slack_ms),
            ..NewRequest::default()
        };
        let slot = table.insert(RequestId(i), &request).expect("ids differ");
        if candidate.state != State::Waiting {
            table.scheduled(slot, if candidate.phase == Phase::Prefill { 1 } else { 3 }, served_ms);
        }
        if candidate.phase != Phase::Prefill {
            table.generated(slot, if candidate.phase == Phase::Output { &[2] } else { &[5] }, &mut Vec::new());
        }
        if candidate.state == State::Preempted {
            table.preempted(slot);
        }
        slots.push(slot);
    }
    let mut out = Vec::new();
    columns::fill(inputs, &table, &slots, NOW_MS, 16, &mut out);
    out
}

fn run_case(policy: &mut dyn Policy, case: &Case, what: &str) {
    let facts = &case.step;
    let step = Step {
        now_ms: NOW_MS,
        token_budget: facts.token_budget,
        running: facts.running,
        running_think: facts.running_think,
        running_output: facts.running_output,
        decode_tokens: facts.decode_tokens.unwrap_or(1),
        fixed_ms: facts.fixed_ms,
        decode_token_ms: facts.decode_token_ms,
        prefill_token_ms: facts.prefill_token_ms,
        ..Step::default()
    };
    let n = case.candidates.len();
    let columns = build_columns(policy.inputs(), &case.candidates);
    let mut decision = Decision::default();
    policy.decide(&Batch { facts: &step, candidates: n, columns: &columns }, &mut decision).expect(what);
    Dispatch::check(&step, &decision, n).expect(what);
    if let Some(expected) = &case.order {
        let mut order = Vec::new();
        if !Ranker::default().rank(&decision.keys, &[], &mut order) {
            order = (0..n as u32).collect();
        }
        assert_eq!(&order, expected, "{what}");
    }
    match &case.token_budget {
        None => {}
        Some(toml::Value::Integer(tokens)) => assert_eq!(decision.token_budget.map(i64::from), Some(*tokens), "{what}"),
        Some(_) => assert_eq!(decision.token_budget, None, "{what}"),
    }
    assert_eq!(case.default, n > 0 && decision.keys.is_empty(), "{what}");
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn every_policy_meets_its_cases() {
    let runtime = Runtime::new(None).unwrap();
    let targets = MeridianConfig::default().scheduler.targets();
    for name in Dispatch::NATIVES {
        let component = runtime.load_file(&root().join(format!("target/policies/{name}.wasm"))).unwrap();
        let mut wasm = component.dispatch_policy(support::LIMITS, targets, "{}").unwrap();
        let mut native = native::policy(name, targets, "{}").unwrap();
        let mut cases = 0;
        for file in std::fs::read_dir(root().join("policies").join(name).join("cases")).unwrap() {
            let path = file.unwrap().path();
            let parsed: Cases = toml::from_str(&std::fs::read_to_string(&path).unwrap())
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            for case in &parsed.case {
                let what = format!("{name}, {}: {}", path.file_name().unwrap().display(), case.name);
                run_case(native.as_mut(), case, &format!("native {what}"));
                run_case(&mut wasm, case, &format!("component {what}"));
                cases += 1;
            }
        }
        assert!(cases > 0, "{name} has no cases");
    }
}

//! Every shipped policy against its cases, natively and as a component.
//!
//! A case is data: `policies/NAME/cases/*.toml`. Needs the components: `make policies`.

mod support;

use std::path::{Path, PathBuf};

use meridian_core::types::RequestId;
use meridian_core::{
    Batch, Column, Decision, Dispatch, MeridianConfig, NewRequest, Policy, Ranker, RequestTable, RowId, SlotKind, Step,
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
    /// The policy's options.
    #[serde(default)]
    config: toml::Table,
    #[serde(default)]
    step: StepFacts,
    /// Steps that the same instance decided before.
    #[serde(default)]
    earlier: Vec<Earlier>,
    #[serde(default)]
    candidates: Vec<Candidate>,
    /// Positions of the candidates, first to last.
    order: Option<Vec<u32>>,
    /// A number, or `"engine"` for the engine's own.
    token_budget: Option<toml::Value>,
    /// For each candidate a number, or `"none"`.
    token_caps: Option<Vec<toml::Value>>,
    /// The policy leaves the step to the default.
    #[serde(default)]
    default: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Earlier {
    ms_ago: f64,
    candidates: Vec<Candidate>,
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
    /// Since its arrival; as long as anything else has taken when absent.
    wait_ms: Option<f64>,
    #[serde(default)]
    since_progress_ms: f64,
    #[serde(default)]
    priority: i32,
    /// Milliseconds until the deadline; none when absent.
    slack_ms: Option<f64>,
    #[serde(default)]
    tenant: String,
    #[serde(default = "shortest_prompt")]
    prompt_tokens: u32,
    #[serde(default)]
    cached_tokens: u32,
    /// All that its phase and tokens ask for when absent.
    computed_tokens: Option<u32>,
    /// One when absent and it has thought.
    think_tokens: Option<u32>,
    #[serde(default)]
    output_tokens: u32,
    /// Without a limit when absent.
    remaining_tokens: Option<u32>,
    #[serde(default)]
    preemptions: u32,
    /// Since its first token of output.
    #[serde(default)]
    output_ms: f64,
}

/// The prompt that leaves a model thinking; a longer one ends with it.
const PROMPT: [u32; 3] = [0, 0, THINK];
const THINK: u32 = 1;
const END_OF_THINKING: u32 = 2;

fn shortest_prompt() -> u32 {
    PROMPT.len() as u32
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

fn table() -> RequestTable {
    let markers = meridian_core::Markers::new(vec![vec![THINK]], vec![vec![END_OF_THINKING]], vec![]);
    RequestTable::new(markers.expect("usable"))
}

impl Candidate {
    /// Put it into the host's own mirror, by a history that leads to it.
    fn insert(&self, table: &mut RequestTable, id: RequestId, now_ms: f64) -> RowId {
        let think = match self.phase {
            Phase::Prefill => 0,
            Phase::Think => self.think_tokens.unwrap_or(1),
            Phase::Output => self.think_tokens.unwrap_or(1).max(1),
        };
        let generated = think + self.output_tokens;
        let arrival_ms = now_ms - self.wait_ms.unwrap_or(self.since_progress_ms.max(self.output_ms));
        let request = NewRequest {
            prompt: &PROMPT,
            prompt_tokens: self.prompt_tokens,
            max_tokens: self.remaining_tokens.map_or(u32::MAX, |remaining| remaining + generated),
            arrival_ms,
            deadline_ms: self.slack_ms.map_or(f64::INFINITY, |slack_ms| now_ms + slack_ms),
            priority: self.priority,
            tenant: &self.tenant,
            ..NewRequest::default()
        };
        let slot = table.insert(id, &request).expect("ids differ");
        if self.state == State::Waiting {
            return slot;
        }
        let served_ms = now_ms - self.since_progress_ms;
        table.admitted(slot, self.cached_tokens);
        let computed = self.computed_tokens.unwrap_or(match self.phase {
            Phase::Prefill => self.cached_tokens + 1,
            Phase::Think | Phase::Output => (self.prompt_tokens + generated).saturating_sub(1).max(self.prompt_tokens),
        });
        if self.phase != Phase::Prefill {
            table.set_computed(slot, self.prompt_tokens);
            let ends = usize::from(self.phase == Phase::Output);
            let mut thought = vec![5; think as usize - ends];
            thought.extend([END_OF_THINKING].iter().take(ends));
            table.generated(slot, &thought, &mut Vec::new());
            table.set_clock(now_ms - self.output_ms);
            table.generated(slot, &vec![6; self.output_tokens as usize], &mut Vec::new());
        }
        for _ in 0..self.preemptions.max(u32::from(self.state == State::Preempted)) {
            table.preempted(slot);
        }
        if self.state == State::Running {
            table.scheduled(slot, 0, served_ms);
            table.set_computed(slot, computed);
        }
        slot
    }
}

/// The columns of the candidates, built by the host.
fn build_columns(table: &mut RequestTable, inputs: &[Column], candidates: &[Candidate], now_ms: f64) -> Vec<f32> {
    let insert = |(i, candidate): (u64, &Candidate)| candidate.insert(table, RequestId(i), now_ms);
    let slots: Vec<RowId> = (0..).zip(candidates).map(insert).collect();
    let mut out = Vec::new();
    columns::fill(inputs, table, &slots, now_ms, 16, &mut out);
    // Numbers of tenants stay, as between the steps of an engine.
    slots.iter().for_each(|slot| assert!(table.remove(*slot)));
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
    let (mut table, mut decision) = (table(), Decision::default());
    for Earlier { ms_ago, candidates } in &case.earlier {
        let now_ms = NOW_MS - ms_ago;
        let columns = build_columns(&mut table, policy.inputs(), candidates, now_ms);
        let step = Step { now_ms, ..step };
        let batch = Batch { facts: &step, candidates: candidates.len(), columns: &columns };
        policy.decide(&batch, &mut decision).expect(what);
    }
    let n = case.candidates.len();
    let columns = build_columns(&mut table, policy.inputs(), &case.candidates, NOW_MS);
    decision.clear();
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
    if let Some(expected) = &case.token_caps {
        let cap = |cap: &toml::Value| cap.as_integer().map_or(u32::MAX, |cap| u32::try_from(cap).expect("a cap"));
        assert_eq!(decision.token_caps, expected.iter().map(cap).collect::<Vec<_>>(), "{what}");
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
        let mut cases = 0;
        for file in std::fs::read_dir(root().join("policies").join(name).join("cases")).unwrap() {
            let path = file.unwrap().path();
            let parsed: Cases = toml::from_str(&std::fs::read_to_string(&path).unwrap())
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            for case in &parsed.case {
                let what = format!("{name}, {}: {}", path.file_name().unwrap().display(), case.name);
                let config = serde_json::to_string(&case.config).unwrap();
                let mut native = native::policy(name, targets, &config).unwrap();
                run_case(native.as_mut(), case, &format!("native {what}"));
                let mut wasm = component.dispatch_policy(support::LIMITS, targets, &config).unwrap();
                run_case(&mut wasm, case, &format!("component {what}"));
                cases += 1;
            }
        }
        assert!(cases > 0, "{name} has no cases");
    }
}

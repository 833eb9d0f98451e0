//! Cases of the dispatch slot: requests by their history, and the order, token budget and caps that are expected.

use meridian_core::{
    Batch, Column, Decision, Dispatch, Markers, NewRequest, Policy, Ranker, RequestTable, RowId, SlotKind, Step,
    columns,
};
use rand::RngExt;
use rand_pcg::Pcg64;
use serde::Deserialize;

use super::{CaseKind, expect};

/// A case of the dispatch slot.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DispatchCase {
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
    /// Positions of the running candidates that may give way to a waiting one, first to last.
    victims: Option<Vec<u32>>,
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
    /// Its number; its position, from 1, when absent.
    request: Option<u32>,
    /// Number of its session.
    #[serde(default)]
    session: u32,
    #[serde(default)]
    turn: u32,
    /// Number of its service level, and what is left to keep it.
    #[serde(default)]
    level: u32,
    level_slack_ms: Option<f32>,
    level_weight: Option<f32>,
    level_tpot_ms: Option<f32>,
    /// What its session has in the prefix cache, and the room beside warm sessions.
    resident_tokens: Option<f32>,
    room_tokens: Option<f32>,
    /// What is forecast of it.
    #[serde(default)]
    think_left: f32,
    #[serde(default)]
    think_left_high: f32,
    #[serde(default)]
    output_left: f32,
}

/// The prompt that leaves a model thinking; a longer one ends with it.
const PROMPT: [u32; 3] = [0, 0, THINK];
const THINK: u32 = 1;
const END_OF_THINKING: u32 = 2;
const BLOCK_TOKENS: u32 = 16;
const NOW_MS: f64 = 2e9;

fn shortest_prompt() -> u32 {
    PROMPT.len() as u32
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Phase {
    Prefill,
    Think,
    Output,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum State {
    Waiting,
    Running,
    Preempted,
}

fn table() -> RequestTable {
    let markers = Markers::new(vec![vec![THINK]], vec![vec![END_OF_THINKING]], vec![]);
    RequestTable::new(markers.expect("three different tokens"))
}

impl Candidate {
    /// Put it into the host's own mirror, by a history that leads to it.
    fn insert(&self, table: &mut RequestTable, now_ms: f64) -> RowId {
        let think = match self.phase {
            Phase::Prefill => 0,
            Phase::Think => self.think_tokens.unwrap_or(1),
            Phase::Output => self.think_tokens.unwrap_or(1).max(1),
        };
        let generated = think.saturating_add(self.output_tokens);
        let arrival_ms = now_ms - self.wait_ms.unwrap_or(self.since_progress_ms.max(self.output_ms));
        let request = NewRequest {
            prompt: &PROMPT,
            prompt_tokens: self.prompt_tokens,
            max_tokens: self.remaining_tokens.map_or(u32::MAX, |remaining| remaining.saturating_add(generated)),
            arrival_ms,
            deadline_ms: self.slack_ms.map_or(f64::INFINITY, |slack_ms| now_ms + slack_ms),
            priority: self.priority,
            tenant: &self.tenant,
            ..NewRequest::default()
        };
        let row = table.insert(&request).expect("finite times");
        if self.state == State::Waiting {
            return row;
        }
        let served_ms = now_ms - self.since_progress_ms;
        table.admitted(row, self.cached_tokens);
        let computed = self.computed_tokens.unwrap_or(match self.phase {
            Phase::Prefill => self.cached_tokens + 1,
            Phase::Think | Phase::Output => (self.prompt_tokens + generated).saturating_sub(1).max(self.prompt_tokens),
        });
        if self.phase != Phase::Prefill {
            table.set_computed(row, self.prompt_tokens);
            let ends = usize::from(self.phase == Phase::Output);
            let mut thought = vec![5; think as usize - ends];
            thought.extend([END_OF_THINKING].iter().take(ends));
            table.generated(row, &thought, &mut Vec::new());
            table.set_clock(now_ms - self.output_ms);
            table.generated(row, &vec![6; self.output_tokens as usize], &mut Vec::new());
        }
        for _ in 0..self.preemptions.max(u32::from(self.state == State::Preempted)) {
            table.preempted(row);
        }
        if self.state == State::Running {
            table.scheduled(row, 0, served_ms);
            table.set_computed(row, computed);
        }
        row
    }

    /// One that an engine might have.
    fn random(random: &mut Pcg64) -> Self {
        let state = [State::Waiting, State::Running, State::Preempted][random.random_range(0..3)];
        let phase = match state {
            State::Waiting => Phase::Prefill,
            _ => [Phase::Prefill, Phase::Think, Phase::Output][random.random_range(0..3)],
        };
        let prompt_tokens = random.random_range(3..20_000);
        let since_progress_ms = f64::from(random.random_range(0..4_000));
        let output_ms = f64::from(random.random_range(0..20_000));
        Self {
            phase,
            state,
            wait_ms: Some(output_ms.max(since_progress_ms) + f64::from(random.random_range(0..60_000))),
            since_progress_ms,
            priority: random.random_range(-3..4),
            slack_ms: random.random::<bool>().then(|| f64::from(random.random_range(-1_000..10_000))),
            tenant: ["", "a", "b", "c"][random.random_range(0..4)].to_owned(),
            prompt_tokens,
            cached_tokens: random.random_range(0..prompt_tokens),
            computed_tokens: None,
            // Long histories would only cost time: what is generated is generated token by token.
            think_tokens: Some(random.random_range(1..200)),
            output_tokens: random.random_range(0..200),
            remaining_tokens: Some(random.random_range(1..8_000)),
            preemptions: random.random_range(0..3),
            output_ms,
            request: None,
            session: random.random_range(0..4),
            turn: random.random_range(1..9),
            level: random.random_range(0..3),
            level_slack_ms: random.random::<bool>().then(|| random.random_range(-60_000.0..60_000.0)),
            level_weight: random.random::<bool>().then(|| random.random_range(0.1..10.0)),
            level_tpot_ms: random.random::<bool>().then(|| random.random_range(5.0..100.0)),
            resident_tokens: random.random::<bool>().then(|| random.random_range(0..prompt_tokens) as f32),
            room_tokens: None,
            think_left: random.random_range(0.0..5_000.0),
            think_left_high: random.random_range(0.0..20_000.0),
            output_left: random.random_range(0.0..2_000.0),
        }
    }
}

/// The columns of the candidates, built by the host.
fn build_columns(table: &mut RequestTable, inputs: &[Column], candidates: &[Candidate], now_ms: f64) -> Vec<f32> {
    let rows: Vec<RowId> = candidates.iter().map(|candidate| candidate.insert(table, now_ms)).collect();
    let mut out = Vec::new();
    columns::fill(inputs, table, &rows, now_ms, BLOCK_TOKENS, &mut out);
    // The mirror counts what arrives; a case says which request of an earlier step a candidate is, and what is promised.
    for (input, values) in inputs.iter().zip(out.chunks_mut(candidates.len().max(1))) {
        let given = |(i, candidate): (usize, &Candidate)| match input {
            Column::Request => Some(candidate.request.unwrap_or(i as u32 + 1) as f32),
            Column::Session => Some(candidate.session as f32),
            Column::Turn => Some(candidate.turn as f32),
            Column::Level => Some(candidate.level as f32),
            Column::LevelSlackMs => candidate.level_slack_ms,
            Column::LevelWeight => candidate.level_weight,
            Column::LevelTpotMs => candidate.level_tpot_ms,
            Column::ResidentTokens => candidate.resident_tokens,
            Column::RoomTokens => candidate.room_tokens,
            Column::ThinkLeft => Some(candidate.think_left),
            Column::ThinkLeftHigh => Some(candidate.think_left_high),
            Column::OutputLeft => Some(candidate.output_left),
            _ => None,
        };
        for (value, given) in values.iter_mut().zip(candidates.iter().enumerate().map(given)) {
            *value = given.unwrap_or(*value);
        }
    }
    // Numbers of tenants stay, as between the steps of an engine.
    for row in &rows {
        table.remove(*row);
    }
    out
}

impl DispatchCase {
    fn facts(&self) -> Step {
        let facts = &self.step;
        Step {
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
        }
    }

    fn verify(&self, decision: &Decision) -> Result<(), String> {
        let n = self.candidates.len();
        expect("leaves the step to the default", &(n > 0 && decision.keys.is_empty()), &self.default)?;
        if let Some(expected) = &self.order {
            let mut order = Vec::new();
            if !Ranker::default().rank(&decision.keys, &[], &mut order) {
                order = (0..n as u32).collect();
            }
            expect("order", &order, expected)?;
        }
        match &self.token_budget {
            None => {}
            Some(toml::Value::Integer(tokens)) => {
                expect("token_budget", &decision.token_budget.map(i64::from), &Some(*tokens))?;
            }
            Some(_) => expect("token_budget", &decision.token_budget, &None)?,
        }
        if let Some(expected) = &self.victims {
            let key = |at: u32| decision.victim_keys.get(at as usize).copied().unwrap_or(f32::NAN);
            let mut victims: Vec<u32> = (0..n as u32).filter(|at| !key(*at).is_nan()).collect();
            victims.sort_by(|one, other| key(*one).total_cmp(&key(*other)));
            expect("victims", &victims, expected)?;
        }
        let Some(expected) = &self.token_caps else { return Ok(()) };
        let mut caps = Vec::new();
        for cap in expected {
            caps.push(match cap {
                toml::Value::Integer(tokens) => {
                    u32::try_from(*tokens).map_err(|_| format!("token_caps: {tokens}: expected at least 0"))?
                }
                _ => u32::MAX,
            });
        }
        expect("token_caps", &decision.token_caps, &caps)
    }
}

impl CaseKind for Dispatch {
    type Case = DispatchCase;

    fn head(case: &DispatchCase) -> (&str, &toml::Table) {
        (&case.name, &case.config)
    }

    fn run(case: &DispatchCase, mut policy: Box<dyn Policy>) -> Result<(), String> {
        let (step, mut table, mut decision) = (case.facts(), table(), Decision::default());
        for Earlier { ms_ago, candidates } in &case.earlier {
            let now_ms = NOW_MS - ms_ago;
            let columns = build_columns(&mut table, policy.inputs(), candidates, now_ms);
            let step = Step { now_ms, ..step };
            let batch = Batch { facts: &step, candidates: candidates.len(), columns: &columns, finished: &[] };
            decision.clear();
            policy.decide(&batch, &mut decision).map_err(|fault| format!("an earlier step: {fault}"))?;
        }
        let n = case.candidates.len();
        let columns = build_columns(&mut table, policy.inputs(), &case.candidates, NOW_MS);
        decision.clear();
        let batch = Batch { facts: &step, candidates: n, columns: &columns, finished: &[] };
        policy.decide(&batch, &mut decision).map_err(|fault| fault.to_string())?;
        Self::check(&step, &decision, n).map_err(|fault| fault.to_string())?;
        case.verify(&decision)
    }

    fn random(random: &mut Pcg64, inputs: &[Column], candidates: usize) -> (Step, Vec<f32>) {
        let made: Vec<Candidate> = (0..candidates).map(|_| Candidate::random(random)).collect();
        let count = |phase: Option<Phase>| {
            let runs = |candidate: &&Candidate| {
                candidate.state == State::Running && phase.is_none_or(|phase| candidate.phase == phase)
            };
            made.iter().filter(runs).count() as u32
        };
        let total_blocks = random.random_range(1..100_000);
        let step = Step {
            now_ms: NOW_MS,
            token_budget: random.random_range(1..8_192),
            free_blocks: random.random_range(0..total_blocks),
            total_blocks,
            running: count(None),
            running_think: count(Some(Phase::Think)),
            running_output: count(Some(Phase::Output)),
            waiting: candidates as u32 - count(None),
            decode_tokens: 1,
            fixed_ms: random.random_range(1.0..20.0),
            decode_token_ms: random.random_range(0.01..0.2),
            prefill_token_ms: random.random_range(0.01..0.5),
            decode_context_tokens: random.random_range(0..100_000),
        };
        (step, build_columns(&mut table(), inputs, &made, NOW_MS))
    }

    fn answers(decision: &Decision) -> Vec<String> {
        let cap = |i: usize| decision.token_caps.get(i).copied().unwrap_or(u32::MAX);
        let victim = |i: usize| decision.victim_keys.get(i).copied().unwrap_or(f32::NAN);
        let answer = |(i, key): (usize, &f32)| format!("key {key:?}, cap {}, victim key {:?}", cap(i), victim(i));
        decision.keys.iter().enumerate().map(answer).collect()
    }
}

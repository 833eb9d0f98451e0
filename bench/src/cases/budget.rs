//! Cases of the budget slot: requests that think, and the verdicts and thresholds that are expected.

use meridian_core::budget::{BudgetCandidate, BudgetDecider, Load, Observed, Point, Repeated, Thresholds, Verdict};
use meridian_core::slot::BudgetSlot;
use meridian_core::{Budget, BudgetColumn, BudgetDecision, MeridianConfig, Policy, columns};
use rand::RngExt;
use rand_pcg::Pcg64;
use serde::Deserialize;

use super::{CaseKind, expect};

/// A case of the budget slot.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BudgetCase {
    name: String,
    #[serde(default)]
    config: toml::Table,
    /// Differences from the default thresholds.
    #[serde(default)]
    configured: toml::Table,
    #[serde(default)]
    thinking: u32,
    #[serde(default)]
    waiting: u32,
    candidates: Vec<Candidate>,
    /// `default`, `keep-thinking` or `end-now` for each candidate.
    verdicts: Vec<String>,
    /// Differences from the configured thresholds that the policy gives each candidate.
    #[serde(default)]
    thresholds: toml::Table,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Candidate {
    think_tokens: u32,
    is_probed: bool,
    is_at_boundary: bool,
    probes: u32,
    eat: Option<f64>,
    eat_variance: Option<f64>,
    rpdi: Option<f64>,
    same_answers: u32,
    confidence: Option<f64>,
    repetition: u32,
    repetition_period: u32,
    slack_ms: f64,
    level_slack_ms: f32,
    request: u32,
    session: u32,
    turn: u32,
}

impl Default for Candidate {
    fn default() -> Self {
        Self {
            think_tokens: 100,
            is_probed: false,
            is_at_boundary: false,
            probes: 0,
            eat: None,
            eat_variance: None,
            rpdi: None,
            same_answers: 0,
            confidence: None,
            repetition: 0,
            repetition_period: 0,
            slack_ms: f64::INFINITY,
            level_slack_ms: f32::INFINITY,
            request: 1,
            session: 0,
            turn: 0,
        }
    }
}

impl Candidate {
    fn row(&self) -> BudgetCandidate {
        let Self { think_tokens, is_probed, is_at_boundary, probes, eat, eat_variance, rpdi, same_answers, .. } = *self;
        let Self {
            confidence, repetition, repetition_period, slack_ms, level_slack_ms, request, session, turn, ..
        } = *self;
        let observed = Observed {
            think_tokens,
            is_probed,
            is_at_boundary,
            probes,
            eat_bits: eat,
            eat_variance_bits2: eat_variance,
            rpdi,
            same_answers,
            confidence,
            is_repeating: repetition > 0,
            repeated: Repeated { tokens: repetition, period: repetition_period },
        };
        BudgetCandidate {
            prompt_tokens: 10,
            slack_ms,
            level_slack_ms,
            request,
            session,
            turn,
            observed,
            ..BudgetCandidate::default()
        }
    }
}

/// `thresholds` with some fields changed.
fn changed(thresholds: &Thresholds, changes: &toml::Table) -> Result<Thresholds, String> {
    let mut table = toml::Table::try_from(thresholds).map_err(|error| error.to_string())?;
    for (field, value) in changes {
        if table.insert(field.clone(), value.clone()).is_none() {
            return Err(format!("{field}: no such threshold"));
        }
    }
    table.try_into().map_err(|error: toml::de::Error| error.message().to_owned())
}

fn label(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Default => "default",
        Verdict::KeepThinking => "keep-thinking",
        Verdict::EndNow => "end-now",
    }
}

impl CaseKind for Budget {
    type Case = BudgetCase;

    fn head(case: &BudgetCase) -> (&str, &toml::Table) {
        (&case.name, &case.config)
    }

    fn run(case: &BudgetCase, policy: Box<dyn Policy<Self>>) -> Result<(), String> {
        let configured = changed(&Thresholds::default(), &case.configured)?;
        let expected = changed(&configured, &case.thresholds)?;
        let load = Load { thinking: case.thinking, waiting: case.waiting, configured, ..Load::default() };
        let candidates: Vec<_> = case.candidates.iter().map(Candidate::row).collect();
        // What an engine does with an answer is the slot's: an empty one stands for the configured thresholds.
        let mut slot = BudgetSlot::new(policy, MeridianConfig::default().scheduler.targets());
        let verdicts = slot.probe(&load, &candidates).into_iter().map(|verdict| label(verdict).to_owned());
        expect("verdicts", &verdicts.collect::<Vec<_>>(), &case.verdicts)?;
        for given in slot.start(&load, &candidates) {
            expect("thresholds", &given, &expected)?;
        }
        slot.last_fault().map_or(Ok(()), |fault| Err(fault.to_string()))
    }

    fn random(random: &mut Pcg64, inputs: &[BudgetColumn], candidates: usize) -> (Load, Vec<f32>) {
        let row = |random: &mut Pcg64| {
            let probes = random.random_range(0..20);
            let mut measured = |most: f64| (probes > 0).then(|| random.random_range(0.0..most));
            let (eat, eat_variance, rpdi) = (measured(8.0), measured(2.0), measured(3.0));
            let confidence = measured(1.0);
            let repetition_period = random.random_range(0..1000);
            Candidate {
                think_tokens: random.random_range(1..20_000),
                is_probed: random.random(),
                is_at_boundary: random.random(),
                probes,
                eat,
                eat_variance,
                rpdi,
                same_answers: random.random_range(0..=probes),
                confidence,
                repetition: if repetition_period > 0 { random.random_range(24..4000) } else { 0 },
                repetition_period,
                slack_ms: [f64::INFINITY, random.random_range(-1e4..1e5)][random.random_range(0..2)],
                level_slack_ms: [f32::INFINITY, random.random_range(-1e4..1e5)][random.random_range(0..2)],
                request: random.random_range(1..1 << 24),
                session: random.random_range(0..4),
                turn: random.random_range(0..9),
            }
            .row()
        };
        let made: Vec<_> = (0..candidates).map(|_| row(random)).collect();
        let mut values = Vec::new();
        columns::fill_budget(inputs, &made, &mut values);
        let load = Load {
            now_ms: random.random_range(0.0..1e9),
            point: [Point::Start, Point::Probe][random.random_range(0..2)],
            thinking: candidates as u32,
            answering: random.random_range(0..200),
            waiting: random.random_range(0..200),
            ..Load::default()
        };
        (load, values)
    }

    fn answers(decision: &BudgetDecision) -> Vec<String> {
        let BudgetDecision { thresholds, verdicts } = decision;
        let thresholds = thresholds.iter().map(|given| format!("{given:?}"));
        thresholds.chain(verdicts.iter().map(|verdict| format!("{verdict:?}"))).collect()
    }
}

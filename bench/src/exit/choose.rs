use anyhow::{Context, ensure};
use serde::{Serialize, Serializer};

use super::rules::literature;
use super::{ExitFamily, ExitOutcome, ExitRule, Thought, evaluate, no_limit};

/// A share of so many thoughts is not an exact number.
const ROUNDING: f64 = 1e-12;

/// What is given up for fewer think tokens, and what is not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChoiceMargins {
    /// A rule may be this much less accurate on the tuning split than no limit.
    pub accuracy: f64,
    /// Settings whose think tokens are within this share of the fewest count as equally cheap.
    pub tokens: f64,
}

impl Default for ChoiceMargins {
    /// Half of the point that is allowed on the report split: the best of many settings does a little worse on other problems. And
    /// without a share of tokens, the last tenth of a token would be bought with the whole margin of accuracy.
    fn default() -> Self {
        Self { accuracy: 0.005, tokens: 0.01 }
    }
}

/// The setting of a rule that was chosen on recorded thoughts, and what it reached there.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ChosenRule {
    /// The setting.
    #[serde(rename = "setting")]
    pub rule: ExitRule,
    /// Mean think tokens.
    pub tokens: f64,
    /// Share of right answers.
    pub accuracy: f64,
    /// False: no setting was accurate enough, this is the most accurate.
    pub within_margin: bool,
    /// Settings that were evaluated.
    pub settings_tried: usize,
}

/// The cheapest setting in think tokens that is accurate enough; of those that are equally cheap, the most accurate. If none is
/// accurate enough, the most accurate of all. Of equals the one with fewer tokens, then the earlier.
///
/// # Errors
/// There are no settings, or no thoughts.
pub fn choose(rules: &[ExitRule], thoughts: &[Thought], margins: ChoiceMargins) -> anyhow::Result<ChosenRule> {
    ensure!(!thoughts.is_empty(), "no recorded thoughts: expected at least one");
    let least = no_limit(thoughts).accuracy() - margins.accuracy - ROUNDING;
    let tried: Vec<(ExitRule, ExitOutcome)> = rules.iter().map(|rule| (*rule, evaluate(rule, thoughts))).collect();
    let is_good = |(_, found): &&(ExitRule, ExitOutcome)| found.accuracy() >= least;
    let good: Vec<_> = tried.iter().filter(is_good).collect();
    let within_margin = !good.is_empty();
    let cheapest = good.iter().map(|(_, found)| found.mean_tokens()).fold(f64::INFINITY, f64::min);
    let most = (1.0 + margins.tokens) * cheapest;
    let open = if within_margin { good } else { tried.iter().collect() };
    let by_worth = |(_, a): &&(ExitRule, ExitOutcome), (_, b): &&(ExitRule, ExitOutcome)| {
        b.accuracy().total_cmp(&a.accuracy()).then(a.mean_tokens().total_cmp(&b.mean_tokens()))
    };
    let best = open.into_iter().filter(|(_, found)| found.mean_tokens() <= most).min_by(by_worth);
    let (rule, found) = best.context("no settings to choose from: expected at least one")?;
    Ok(ChosenRule {
        rule: *rule,
        tokens: found.mean_tokens(),
        accuracy: found.accuracy(),
        within_margin,
        settings_tried: tried.len(),
    })
}

/// The tuning split: what was chosen there, and what settings of the literature reach there without a choice.
#[derive(Debug, Serialize)]
pub(super) struct Tuning {
    pub no_limit: ExitOutcome,
    #[serde(serialize_with = "by_key")]
    pub choices: Vec<(ExitFamily, ChosenRule)>,
    pub literature: Vec<FromLiterature>,
}

/// A setting of the literature on the tuning split.
#[derive(Debug, Serialize)]
pub(super) struct FromLiterature {
    #[serde(skip)]
    pub family: ExitFamily,
    #[serde(rename = "setting")]
    pub rule: ExitRule,
    #[serde(flatten)]
    pub found: ExitOutcome,
}

/// The setting of each rule that the recorded thoughts choose.
///
/// # Errors
/// The engine measured nothing there.
pub(super) fn tuned(thoughts: &[Thought]) -> anyhow::Result<Tuning> {
    ensure!(
        thoughts.iter().any(|thought| thought.probes().next().is_some()),
        "the recorded run has no probe: the model ends no line of its thoughts, or probes are off"
    );
    let chosen = |family: ExitFamily| Ok((family, choose(&family.rules(), thoughts, ChoiceMargins::default())?));
    Ok(Tuning {
        no_limit: no_limit(thoughts),
        choices: ExitFamily::ALL.into_iter().map(chosen).collect::<anyhow::Result<_>>()?,
        literature: literature()
            .map(|(family, rule)| FromLiterature { family, rule, found: evaluate(&rule, thoughts) })
            .into_iter()
            .collect(),
    })
}

fn by_key<S: Serializer>(choices: &[(ExitFamily, ChosenRule)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(choices.iter().map(|(family, chosen)| (family.key(), chosen)))
}

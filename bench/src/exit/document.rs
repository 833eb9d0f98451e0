//! The JSON of the scenario's results. A figure without a value is null.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};

use super::choose::{ChoiceMargins, Tuning};
use super::claims::{Claim, claimed};
use super::configuration::PROBES;
use super::recording::{PassCounters, SolvedPass};
use super::rules::RPDI_WINDOW;
use super::stats::{Compared, Comparing, RESAMPLES, compare};
use super::{ExitFamily, SCENARIO};
use crate::vllm::{Dtype, Machine, Setting};

/// Name of the setting in which every thought ends by itself.
pub(super) const NONE: &str = "none";
/// A rule is also held against the cheapest fixed budget that is at most so much less accurate than the rule.
const WITHIN: f64 = 0.005;

/// What the scenario measured.
#[derive(Debug, Serialize)]
pub struct ExitDocument {
    pub(super) scenario: &'static str,
    #[serde(flatten)]
    pub(super) facts: ExitFacts,
    pub(super) margin: f64,
    pub(super) equally_cheap: f64,
    pub(super) rpdi_window: u32,
    pub(super) resamples: usize,
    pub(super) within: f64,
    pub(super) tuning: Tuning,
    #[serde(serialize_with = "by_name")]
    pub(super) settings: Vec<(String, ExitSetting)>,
    pub(super) overhead: Overhead,
    pub(super) claims: Vec<Claim>,
    pub(super) faults: BTreeMap<String, u64>,
}

/// What was asked for, and what it ran on.
#[derive(Debug, Serialize)]
pub(super) struct ExitFacts {
    pub problems: usize,
    pub tune: usize,
    pub repeats: usize,
    pub budgets: Vec<u32>,
    pub temperature: f64,
    pub dtype: Dtype,
    pub seed: u64,
    pub machine: Machine,
    /// Fields of `meridian.toml` in each engine but that of the fixed budgets.
    #[serde(serialize_with = "as_flags")]
    pub engine_settings: Vec<(String, Vec<Setting>)>,
}

/// One setting beside no limit and beside the fixed budgets.
#[derive(Debug, Serialize)]
pub(super) struct ExitSetting {
    pub title: String,
    pub budget: Option<u32>,
    #[serde(flatten)]
    pub compared: Compared,
    pub wall_s: f64,
    pub generated_tokens: u64,
    pub unended: u64,
    #[serde(flatten)]
    pub counters: PassCounters,
    /// Of every token that the engine computed after the prompts, against no limit: what a probe costs is part of it.
    pub computed_saving: Option<f64>,
    pub wall_ratio: Option<f64>,
}

/// What probing costs by itself: the run that probes and ends nothing, against the run that does neither.
#[derive(Debug, Serialize)]
pub(super) struct Overhead {
    pub probe_tokens_per_generated_token: Option<f64>,
    pub probes_per_generated_token: Option<f64>,
    pub wall_ratio: Option<f64>,
}

/// One setting in the engine, over the report split.
#[derive(Debug)]
pub(super) struct MeasuredSetting {
    pub name: String,
    pub title: String,
    pub pass: SolvedPass,
}

impl ExitDocument {
    /// Of the settings: no limit first, then the fixed budgets from the smallest, then the others.
    ///
    /// # Errors
    /// The settings have not the same problems.
    pub(super) fn new(
        facts: ExitFacts,
        tuning: Tuning,
        measured: Vec<MeasuredSetting>,
        faults: BTreeMap<String, u64>,
    ) -> anyhow::Result<Self> {
        let base = measured.iter().position(|setting| setting.name == NONE).unwrap_or(0);
        let is_fixed = |at: &usize| measured[*at].pass.budget.is_some();
        let curve: Vec<usize> = (0..measured.len()).filter(is_fixed).chain([base]).collect();
        let means: Vec<_> = measured.iter().map(|setting| setting.pass.means()).collect();
        let how = Comparing { base, curve: &curve, within: WITHIN, seed: facts.seed, resamples: RESAMPLES };
        let compared = compare(&means, &how)?;
        let none = (measured[base].pass.generated_tokens, measured[base].pass.wall_s);
        let settings: Vec<(String, ExitSetting)> = measured
            .into_iter()
            .zip(compared)
            .map(|(setting, compared)| (setting.name.clone(), ExitSetting::new(setting, compared, none)))
            .collect();
        let ChoiceMargins { accuracy: margin, tokens: equally_cheap } = ChoiceMargins::default();
        let of = |name: &str| settings.iter().find(|(known, _)| known == name).map(|(_, setting)| setting);
        Ok(Self {
            scenario: SCENARIO,
            facts,
            margin,
            equally_cheap,
            rpdi_window: RPDI_WINDOW,
            resamples: RESAMPLES,
            within: WITHIN,
            tuning,
            overhead: Overhead::of(of(PROBES), of(NONE)),
            claims: of(ExitFamily::Eat.key()).map_or_else(Vec::new, claimed),
            settings,
            faults,
        })
    }

    pub(super) fn setting(&self, name: &str) -> Option<&ExitSetting> {
        self.settings.iter().find(|(known, _)| known == name).map(|(_, setting)| setting)
    }
}

impl ExitSetting {
    fn new(measured: MeasuredSetting, compared: Compared, (none_tokens, none_wall_s): (u64, f64)) -> Self {
        let MeasuredSetting { name: _, title, pass } = measured;
        let computed = pass.generated_tokens.saturating_add(pass.counters.probe_tokens) as f64;
        Self {
            title,
            budget: pass.budget,
            compared,
            wall_s: pass.wall_s,
            generated_tokens: pass.generated_tokens,
            unended: pass.unended,
            counters: pass.counters,
            computed_saving: ratio(computed, none_tokens as f64).map(|ratio| 1.0 - ratio),
            wall_ratio: ratio(pass.wall_s, none_wall_s),
        }
    }

    /// Seconds of a generated token.
    fn token_s(&self) -> Option<f64> {
        ratio(self.wall_s, self.generated_tokens as f64)
    }
}

impl Overhead {
    fn of(probed: Option<&ExitSetting>, plain: Option<&ExitSetting>) -> Self {
        let generated = probed.map_or(0.0, |probed| probed.generated_tokens as f64);
        let of_generated = |count: fn(&ExitSetting) -> u64| ratio(count(probed?) as f64, generated);
        Self {
            probe_tokens_per_generated_token: of_generated(|setting| setting.counters.probe_tokens),
            probes_per_generated_token: of_generated(|setting| setting.counters.probes.done),
            // Sampled apart, the two runs differ a little in length, so the time of a token is compared.
            wall_ratio: probed
                .and_then(ExitSetting::token_s)
                .zip(plain.and_then(ExitSetting::token_s))
                .and_then(|(probed, plain)| ratio(probed, plain)),
        }
    }
}

/// `None` where there is nothing to divide by.
fn ratio(value: f64, of: f64) -> Option<f64> {
    (of != 0.0).then(|| value / of).filter(|ratio| ratio.is_finite())
}

fn by_name<S: Serializer>(settings: &[(String, ExitSetting)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(settings.iter().map(|(name, setting)| (name, setting)))
}

fn as_flags<S: Serializer>(engines: &[(String, Vec<Setting>)], serializer: S) -> Result<S::Ok, S::Error> {
    let flags = |settings: &[Setting]| -> Vec<String> {
        settings.iter().map(|(field, value)| format!("{field}={value}")).collect()
    };
    serializer.collect_map(engines.iter().map(|(name, settings)| (name, flags(settings))))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::made_up;

    fn keys(value: &Value) -> Vec<&str> {
        value.as_object().expect("an object").keys().map(String::as_str).collect()
    }

    #[test]
    fn every_setting_is_compared_with_no_limit_and_the_budgets() {
        let document = made_up::document();
        let names: Vec<&str> = document.settings.iter().map(|(name, _)| name.as_str()).collect();
        let rules = ["eat", "eat-published", "level", "rpdi", "patience", "deer", "code-stop"];
        assert_eq!(names, [&["none", "fixed-16", "fixed-40", "fixed-56", "probes"][..], &rules].concat());
        let json = serde_json::to_value(&document).expect("JSON");
        let eat = &json["settings"]["eat"];
        let number = |value: &Value| value.as_f64().expect("a number");
        assert!((number(&eat["saving"]["value"]) - 0.6).abs() < 0.02, "{eat}");
        assert!(number(&eat["computed_saving"]) < number(&eat["saving"]["value"]));
        let none = &json["settings"]["none"];
        assert_eq!(none["difference"], serde_json::json!({"value": 0.0, "low": 0.0, "high": 0.0}));
        assert!(number(&json["overhead"]["wall_ratio"]) > 1.0);
        let choices = &json["tuning"]["choices"];
        assert!(number(&choices["level"]["tokens"]) <= number(&choices["eat"]["tokens"]));
        assert!(number(&choices["eat"]["tokens"]) < 100.0);
        // Flat ignorance looks settled: with the constants of the literature, most thoughts end before they know.
        for found in &json["tuning"]["literature"].as_array().expect("settings")[..2] {
            assert_eq!(found["setting"]["min_probes"], 4);
            assert!(number(&found["accuracy"]) < 0.9);
        }
        let low = number(&eat["difference"]["low"]);
        let holds: Vec<bool> = document.claims.iter().map(|claim| claim.holds).collect();
        assert_eq!(holds, [true, low >= -0.01, true, true]);
    }

    #[test]
    fn fields_are_those_of_the_kept_results() {
        let kept = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/results/early-exit.json"));
        let kept: Value = serde_json::from_str(&kept.expect("kept results")).expect("JSON");
        let made = serde_json::to_value(made_up::document()).expect("JSON");
        let mut without_source = keys(&kept);
        // When and where: whoever keeps results adds it.
        without_source.retain(|key| !["commit", "measured"].contains(key));
        assert_eq!(keys(&made), without_source);
        for path in [
            "/settings/eat",
            "/settings/none/tokens",
            "/settings/eat/reference",
            "/settings/eat/probes",
            "/tuning",
            "/tuning/no_limit",
            "/tuning/choices",
            "/tuning/choices/eat",
            "/tuning/choices/eat/setting",
            "/tuning/choices/rpdi/setting",
            "/tuning/choices/patience/setting",
            "/tuning/literature/0",
            "/engine_settings",
            "/overhead",
            "/claims/0",
        ] {
            let of = |value: &Value| {
                let mut names = keys(value.pointer(path).expect(path));
                // Rows of `--component`, of which a run has any number.
                names.retain(|name| !name.starts_with("component-"));
                names.join(" ")
            };
            assert_eq!(of(&made), of(&kept), "{path}");
        }
        let flags = |of: &Value| -> Vec<String> {
            let all = of["engine_settings"]["eat"].as_array().expect("settings").iter();
            let mut fields: Vec<String> = all
                .map(|flag| flag.as_str().expect("a text").split('=').next().unwrap_or_default().to_owned())
                .collect();
            fields.sort();
            fields
        };
        assert_eq!(flags(&made), flags(&kept));
    }
}

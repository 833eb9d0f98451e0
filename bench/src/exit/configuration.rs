//! Fields of `meridian.toml` for each engine of the scenario.

use std::path::Path;

use super::rules::{NO_GUARD_BITS, RPDI_WINDOW};
use super::{ChosenRule, ExitFamily, ExitRule};
use crate::vllm::Setting;

/// Names of runs that are no rule.
pub(super) const FIXED: &str = "fixed";
pub(super) const PROBES: &str = "probes";
/// Begins the names of runs in which a component decides.
pub(super) const COMPONENT: &str = "component-";

/// Tokens, above every context.
const NEVER: u32 = 1_000_000;
/// Probes before the first that may end thinking by EAT: none gets there.
const EAT_OFF_PROBES: u32 = 65_536;
const PROBES_OFF_TOKENS: u32 = 65_536;

/// While an answer streams, probes get only the time that its latency target leaves; here no target is to be held.
fn thinking(least: u32) -> Vec<Setting> {
    [
        ("scheduler.output_tpot_budget_ms", "10000".to_owned()),
        ("scheduler.think_tpot_budget_ms", "10000".to_owned()),
        ("scheduler.min_think_tokens", least.to_string()),
        ("scheduler.max_think_tokens", NEVER.to_string()),
    ]
    .map(owned)
    .to_vec()
}

/// Probes at every line, and no rule that acts on them.
fn probed() -> Vec<Setting> {
    [
        ("entropy.enabled", "true".to_owned()),
        ("entropy.probe_at", "newline".to_owned()),
        // At every line, however short.
        ("entropy.eat_probe_interval_tokens", "1".to_owned()),
        // The thought ends with a line break where it is probed, and the model's answer is `ans N`.
        ("entropy.probe_newline", "false".to_owned()),
        ("entropy.probe_suffix", "ans".to_owned()),
        ("entropy.eat_max_bits", float(NO_GUARD_BITS)),
        ("entropy.rpdi_window", RPDI_WINDOW.to_string()),
        // Turns the measuring off.
        ("entropy.rpdi_threshold", "inf".to_owned()),
    ]
    .map(owned)
    .to_vec()
}

/// The recording: every probe, and nothing ended.
pub(super) fn recording() -> Vec<Setting> {
    merged([probed(), thinking(NEVER)])
}

/// Fixed budgets and no limit: thinking may end at any token, and no policy measures or ends it.
pub(super) fn fixed() -> Vec<Setting> {
    merged([thinking(0), vec![owned(("entropy.enabled", "false".to_owned()))]])
}

/// What a rule needs in `meridian.toml`.
pub(super) fn of_rule(rule: &ExitRule) -> Vec<Setting> {
    let own = match *rule {
        ExitRule::Eat { alpha, delta, min_probes, max_bits } => vec![
            ("entropy.ema_alpha", float(alpha)),
            ("entropy.eat_variance_threshold", float(delta)),
            ("entropy.min_probes", min_probes.to_string()),
            ("entropy.eat_max_bits", float(max_bits)),
        ],
        ExitRule::Patience { answers } => vec![
            ("entropy.min_probes", "1".to_owned()),
            ("policy.budget.source", "native:patience".to_owned()),
            ("policy.budget.config.answers", answers.to_string()),
        ],
        ExitRule::Deer { confidence } => vec![
            ("policy.budget.source", "native:deer".to_owned()),
            ("policy.budget.config.confidence", float(confidence)),
        ],
        ExitRule::CodeStop { low, high, ramp, degeneration } => vec![
            ("policy.budget.source", "native:code-stop".to_owned()),
            ("policy.budget.config.low", float(low)),
            ("policy.budget.config.high", float(high)),
            ("policy.budget.config.ramp", ramp.to_string()),
            ("policy.budget.config.degeneration", float(degeneration)),
        ],
        ExitRule::Rpdi { threshold, window } => vec![
            ("entropy.min_probes", EAT_OFF_PROBES.to_string()),
            ("entropy.probe_at", "interval".to_owned()),
            ("entropy.eat_probe_interval_tokens", PROBES_OFF_TOKENS.to_string()),
            ("entropy.rpdi_window", window.to_string()),
            ("entropy.rpdi_threshold", float(threshold)),
        ],
    };
    merged([probed(), thinking(0), own.into_iter().map(owned).collect()])
}

/// What a rule needs when this component decides in the place of its native policy, with the same options.
pub(super) fn of_component(rule: &ExitRule, file: &Path) -> Vec<Setting> {
    merged([of_rule(rule), vec![owned(("policy.budget.source", file.display().to_string()))]])
}

/// The runs that are reported beside the fixed budgets, by name: probing by itself, then the chosen rules.
pub(super) fn reported(choices: &[(ExitFamily, ChosenRule)]) -> Vec<(String, Vec<Setting>)> {
    let rules = choices.iter().map(|(family, chosen)| (family.key().to_owned(), of_rule(&chosen.rule)));
    [(PROBES.to_owned(), recording())].into_iter().chain(rules).collect()
}

/// A later one of the same field takes the place of an earlier.
fn merged(parts: impl IntoIterator<Item = Vec<Setting>>) -> Vec<Setting> {
    let mut out = Vec::<Setting>::new();
    for (field, value) in parts.into_iter().flatten() {
        match out.iter_mut().find(|(known, _)| *known == field) {
            Some((_, earlier)) => *earlier = value,
            None => out.push((field, value)),
        }
    }
    out
}

fn owned((field, value): (&str, String)) -> Setting {
    (field.to_owned(), value)
}

/// As TOML writes it: a whole number keeps its point.
fn float(value: f64) -> String {
    format!("{value:?}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vllm::meridian_config;

    fn value<'a>(settings: &'a [Setting], field: &str) -> &'a str {
        let found: Vec<&str> =
            settings.iter().filter(|(known, _)| known == field).map(|(_, value)| value.as_str()).collect();
        assert_eq!(found.len(), 1, "{field}");
        found[0]
    }

    #[test]
    fn meridian_takes_every_setting_of_every_rule() {
        for settings in [recording(), fixed()] {
            meridian_config(&settings).expect("a configuration");
        }
        for rule in ExitFamily::ALL.into_iter().flat_map(ExitFamily::rules) {
            meridian_config(&of_rule(&rule)).unwrap_or_else(|error| panic!("{rule:?}: {error}"));
        }
    }

    #[test]
    fn a_rule_becomes_the_fields_that_it_was_evaluated_with() {
        let rule = ExitRule::Eat { alpha: 0.3, delta: 2_f64.powi(-14), min_probes: 8, max_bits: 0.5 };
        let config = meridian_config(&of_rule(&rule)).expect("a configuration");
        let entropy = config.entropy;
        assert_eq!((entropy.ema_alpha, entropy.eat_variance_threshold), (0.3, 2_f64.powi(-14)));
        assert_eq!((entropy.min_probes, entropy.eat_max_bits), (8, 0.5));
        assert_eq!(entropy.eat_probe_interval_tokens, 1, "at every line");
        assert_eq!(entropy.rpdi_threshold, f64::INFINITY);
        assert_eq!((config.scheduler.min_think_tokens, config.scheduler.max_think_tokens), (0, NEVER));
    }

    #[test]
    fn rules_turn_off_what_they_do_not_need() {
        let rpdi = of_rule(&ExitRule::Rpdi { threshold: 3.0, window: 16 });
        assert_eq!(value(&rpdi, "entropy.rpdi_threshold"), "3.0");
        assert_eq!(value(&rpdi, "entropy.eat_probe_interval_tokens"), "65536");
        let patience = of_rule(&ExitRule::Patience { answers: 2 });
        assert_eq!(value(&patience, "policy.budget.config.answers"), "2");
        assert_eq!(value(&of_rule(&ExitRule::published_eat(0.1, 1e-4, 4)), "entropy.eat_max_bits"), "1000000000.0");
        assert_eq!(value(&recording(), "scheduler.min_think_tokens"), NEVER.to_string());
    }
}

//! meridian.toml: what is accepted, and how a mistake is named.

use meridian_core::MeridianConfig;

fn refusal(text: &str) -> String {
    MeridianConfig::from_toml(text).expect_err("the text is wrong").to_string()
}

#[test]
fn empty_means_defaults() {
    let config = MeridianConfig::from_toml("").unwrap();
    assert_eq!(config, MeridianConfig::default());
    assert_eq!(config.policy.dispatch.source, "native:output-first");
    assert_eq!(config.scheduler.output_tpot_budget_ms, 20.0);
}

#[test]
fn mistakes_name_field_value_and_expectation() {
    assert_eq!(refusal("[scheduler]\nmax_defer_ms = -1"), "scheduler.max_defer_ms: -1: must be above 0");
    assert_eq!(
        refusal("[scheduler]\noutput_tpot_budget_ms = nan"),
        "scheduler.output_tpot_budget_ms: NaN: must be above 0"
    );
    assert_eq!(refusal("[policy.dispatch]\nmemory_mib = 0"), "policy.dispatch.memory_mib: 0: must be in 1..=1024");
    assert_eq!(refusal("[polcy.dispatch]\n"), "polcy: unknown field, did you mean `policy`?");
    assert_eq!(
        refusal("[policy.dispatch]\nsorce = 'x'"),
        "policy.dispatch.sorce: unknown field, did you mean `policy.dispatch.source`?"
    );
    assert_eq!(refusal("zzzzzzzzzzzz = 1"), "zzzzzzzzzzzz: unknown field");
    assert!(refusal("[scheduler]\nmax_defer_ms = 'soon'").starts_with("scheduler.max_defer_ms: invalid type"));
    assert!(refusal("[scheduler]\nmax_defer_ms = = 1").starts_with("line 2, column 16: "));
    assert_eq!(
        refusal("[model]\nthink_end = ''"),
        "model.think_end: \"\": must be set exactly when model.think_start is"
    );
}

#[test]
fn policy_options_are_the_policys_own() {
    let config = MeridianConfig::from_toml("[policy.dispatch]\nconfig = { anything = { goes = 1 } }").unwrap();
    assert!(config.policy.dispatch.config.contains_key("anything"));
}

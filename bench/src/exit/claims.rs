use serde::Serialize;

use super::document::ExitSetting;

/// What early exit with EAT is held to, what was measured, and whether it holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Claim {
    /// The claim in words.
    pub claim: &'static str,
    /// A share; `None` where the figure has no value.
    pub value: Option<f64>,
    /// The least that it may be.
    pub at_least: f64,
    /// `%`, or `points` of a difference.
    pub unit: &'static str,
    /// Without a value it does not.
    pub holds: bool,
}

/// Fixed budgets of equal accuracy are a matter of chance where their curve is flat, so both readings of "equal" must hold.
pub(super) fn claimed(setting: &ExitSetting) -> Vec<Claim> {
    let claim = |claim, value: Option<f64>, at_least, unit| {
        let holds = value.is_some_and(|value| value >= at_least);
        Claim { claim, value, at_least, unit, holds }
    };
    vec![
        claim("think tokens saved against no limit", setting.compared.saving.value, 0.5, "%"),
        claim(
            "accuracy less that of no limit, lower end of the interval",
            setting.compared.difference.low,
            -0.01,
            "points",
        ),
        claim(
            "think tokens saved against the cheapest equally accurate fixed budget",
            setting.compared.saving_fixed.value,
            0.2,
            "%",
        ),
        claim(
            "the same with a little less accuracy allowed to the budget",
            setting.compared.saving_fixed_within.value,
            0.2,
            "%",
        ),
    ]
}

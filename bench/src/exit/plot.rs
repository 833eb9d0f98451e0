use super::configuration::PROBES;
use super::document::{ExitDocument, ExitSetting, NONE};
use super::stats::Interval;
use super::{ExitFamily, SCENARIO};
use crate::report::format::figure;
use crate::report::plots::{Caption, Points, Spot, Whiskers, points};

/// Accuracy against mean think tokens: the fixed budgets as a line, the rules as points with their intervals. One SVG file, for
/// light and dark screens; the same results give the same file.
///
/// # Errors
/// It cannot be drawn.
pub fn svg(document: &ExitDocument) -> anyhow::Result<String> {
    let title_of = |setting: &ExitSetting| setting.budget.map_or_else(|| "no limit".to_owned(), |n| n.to_string());
    let fixed = document.settings.iter().filter(|(_, setting)| setting.budget.is_some());
    let none = document.settings.iter().filter(|(name, _)| name == NONE);
    let rules = document
        .settings
        .iter()
        .filter(|(name, setting)| setting.budget.is_none() && ![NONE, PROBES].contains(&name.as_str()));
    let drawn = Points {
        x: "mean think tokens".to_owned(),
        y: "accuracy (%)".to_owned(),
        y_most: 100.0,
        line_name: "fixed budgets, no limit".to_owned(),
        line: fixed.chain(none).filter_map(|(_, setting)| spot(title_of(setting), setting)).collect(),
        others: rules.filter_map(|(_, setting)| spot(setting.title.clone(), setting)).collect(),
    };
    let facts = &document.facts;
    let rules: Vec<&str> = ExitFamily::ALL.iter().map(|family| family.title()).collect();
    points(
        &drawn,
        &Caption {
            id: SCENARIO.to_owned(),
            title: format!("{} problems, T={}, 95 % intervals", figure(facts.problems as f64), facts.temperature),
            description: format!(
                "Accuracy against mean think tokens: fixed budgets and no limit as a line; {} as points.",
                rules.join(", ")
            ),
        },
    )
}

fn spot(name: String, setting: &ExitSetting) -> Option<Spot> {
    Some(Spot { name, x: whiskers(&setting.compared.tokens, 1.0)?, y: whiskers(&setting.compared.accuracy, 100.0)? })
}

/// An interval of resamples may, in a degenerate sample, leave out the value itself.
fn whiskers(of: &Interval, factor: f64) -> Option<Whiskers> {
    let value = of.value?;
    let [low, high] = [of.low, of.high].map(|end| factor * end.unwrap_or(value));
    let value = factor * value;
    Some(Whiskers { value, low: low.min(value), high: high.max(value) })
}

#[cfg(test)]
mod tests {
    use super::super::made_up;
    use super::*;

    #[test]
    fn the_same_results_give_the_same_file() {
        let drawn = svg(&made_up::document()).expect("it can be drawn");
        assert_eq!(drawn, svg(&made_up::document()).expect("it can be drawn"));
        assert!(drawn.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" width=") && drawn.ends_with("</svg>\n"));
        for title in ExitFamily::ALL.map(ExitFamily::title) {
            // In the legend, and in the words for who cannot see it.
            assert_eq!(drawn.matches(title).count(), 2, "{title}");
        }
        for text in [
            "mean think tokens",
            "accuracy (%)",
            "\nno limit\n",
            "\n56\n",
            "400 problems, T=0.6",
            "prefers-color-scheme",
        ] {
            assert!(drawn.contains(text), "{text}: {drawn}");
        }
        assert!(!drawn.contains("#0102") && !drawn.contains("#010101") && !drawn.contains("NaN"));
    }

    #[test]
    fn figures_without_a_value_are_left_out() {
        let mut document = made_up::document();
        let nothing = Interval { value: None, low: None, high: None };
        for (name, setting) in &mut document.settings {
            if name == "rpdi" {
                setting.compared.accuracy = nothing;
            }
            setting.compared.tokens = Interval { low: None, high: None, ..setting.compared.tokens };
        }
        let drawn = svg(&document).expect("it can be drawn");
        assert_eq!(drawn.matches("RPDI").count(), 1, "only in the words");
    }

    #[test]
    fn whiskers_hold_their_value() {
        let of = |value, low, high| whiskers(&Interval { value, low, high }, 100.0);
        assert_eq!(of(Some(0.5), Some(0.6), Some(0.7)), Some(Whiskers { value: 50.0, low: 50.0, high: 70.0 }));
        assert_eq!(of(Some(0.5), None, None), Some(Whiskers { value: 50.0, low: 50.0, high: 50.0 }));
        assert_eq!(of(None, Some(0.1), Some(0.2)), None);
    }
}

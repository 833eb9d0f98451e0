//! The results as a table, as a page, and as notes.

use super::configuration::{COMPONENT, PROBES};
use super::document::{ExitDocument, ExitSetting, NONE};
use super::rules::NO_GUARD_BITS;
use super::stats::Interval;
use super::{ExitFamily, ExitRule};
use crate::report::format::{aligned, clean, escape_markdown, figure};

/// Fewer problems are a trial.
const ENOUGH_PROBLEMS: usize = 2000;
/// A loss of accuracy that is told.
const A_POINT: f64 = 0.01;
const HEAD: [&str; 9] = [
    "",
    "accuracy, %",
    "against no limit, points",
    "think tokens",
    "saved, %",
    "saved against fixed, %",
    "probes",
    "probe tokens",
    "time, s",
];

/// For a terminal.
pub fn table(document: &ExitDocument) -> String {
    let head = HEAD.map(str::to_owned).to_vec();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows(document)).collect();
    format!("{}\n\n{}", heading(document).join("\n"), aligned(&rows, 1))
}

/// The table as Markdown, with the chosen settings, the claims and the notes below it.
pub fn markdown(document: &ExitDocument) -> String {
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut out = format!("{}.\n\n", escape_markdown(&heading(document).join(". ")));
    let head = HEAD.map(|title| if title.is_empty() { "setting" } else { title }.to_owned());
    out.push_str(&line(head.to_vec()));
    out.push_str(&line(vec!["---".to_owned(); HEAD.len()]));
    rows(document).into_iter().for_each(|row| out.push_str(&line(row)));
    out.push_str("\nChosen on the tuning split:\n\n");
    for (family, chosen) in &document.tuning.choices {
        let fields: Vec<String> =
            fields(&chosen.rule).iter().map(|(name, value)| format!("`{name}={value}`")).collect();
        out.push_str(&format!(
            "- {}: {}; there {} % and {:.1} think tokens.\n",
            family.title(),
            fields.join(", "),
            percent(Some(chosen.accuracy)),
            chosen.tokens
        ));
    }
    out.push('\n');
    for line in claims(document).iter().chain(&notes(document)) {
        out.push_str(&format!("- {}\n", escape_markdown(line)));
    }
    out
}

/// One line a claim: yes or no.
pub fn claims(document: &ExitDocument) -> Vec<String> {
    let title = ExitFamily::Eat.title();
    let line = |claim: &super::Claim| {
        let value = claim.value.map_or_else(|| "-".to_owned(), |value| format!("{:.2}", 100.0 * value));
        let holds = if claim.holds { "holds" } else { "DOES NOT HOLD" };
        let (what, least, unit) = (claim.claim, 100.0 * claim.at_least, claim.unit);
        format!("{title}: {what}: {value} {unit}, expected at least {least:.0}: {holds}")
    };
    document.claims.iter().map(line).collect()
}

/// What a reader must know before believing the table, losses first.
pub fn notes(document: &ExitDocument) -> Vec<String> {
    let mut out = Vec::new();
    for (family, chosen) in &document.tuning.choices {
        let title = family.title();
        if !chosen.within_margin {
            out.push(format!(
                "{title}: none of {} settings was within {} point of no limit on the tuning split; the most accurate is reported",
                chosen.settings_tried,
                100.0 * document.margin
            ));
        }
        if let Some(setting) = document.setting(family.key()) {
            out.extend(of_rule(setting, document.within).into_iter().map(|note| format!("{title}: {note}")));
        }
    }
    for of in &document.tuning.literature {
        let setting: Vec<String> = fields(&of.rule).iter().map(|(name, value)| format!("{name} {value}")).collect();
        out.push(format!(
            "{} with constants from the literature ({}), on the tuning split: {} % right after {:.1} think tokens",
            of.family.title(),
            setting.join(", "),
            percent(Some(of.found.accuracy())),
            of.found.mean_tokens()
        ));
    }
    out.extend(of_all(document));
    out
}

/// What a rule saves and loses.
fn of_rule(setting: &ExitSetting, within: f64) -> Vec<String> {
    let mut out = Vec::new();
    if setting.compared.difference.low.is_some_and(|low| low < -A_POINT) {
        out.push(format!(
            "may be more than a point less accurate than no limit: {}",
            points(&setting.compared.difference)
        ));
    }
    if setting.compared.saving.value.is_some_and(|value| value <= 0.0) {
        out.push("saves no think tokens".to_owned());
    } else if setting.compared.saving_fixed.value.is_some_and(|value| value <= 0.0) {
        let saved = share(&setting.compared.saving_fixed);
        out.push(format!("a fixed budget of equal accuracy is as cheap: saves {saved} % of it"));
    }
    if !setting.compared.reference.reached {
        out.push("more accurate than every budget measured; held against the most accurate of them".to_owned());
    } else if setting.compared.reference.at_smallest {
        out.push("the smallest budget measured is as accurate; a smaller one might be too".to_owned());
    }
    out.push(format!(
        "{} % saved against the cheapest fixed budget at most {} point less accurate",
        share(&setting.compared.saving_fixed_within),
        100.0 * within
    ));
    if let (true, Some(saved), Some(ratio)) =
        (setting.counters.probe_tokens > 0, setting.computed_saving, setting.wall_ratio)
    {
        let (amount, which) = (percent(Some(saved.abs())), if saved < 0.0 { "more" } else { "fewer" });
        out.push(format!(
            "{amount} % {which} tokens computed with its probes counted, {ratio:.2} times the wall time of no limit"
        ));
    }
    out
}

/// What concerns every setting.
fn of_all(document: &ExitDocument) -> Vec<String> {
    let mut out = Vec::new();
    let same = document.setting(PROBES).map(|setting| &setting.compared.difference);
    if let Some(same @ Interval { low: Some(low), high: Some(high), .. }) = same
        && !(*low..=*high).contains(&0.0)
    {
        out.push(format!("probing alone should change nothing, but accuracy differs by {} points", points(same)));
    }
    let cost = &document.overhead;
    if let (Some(ratio), Some(tokens)) = (cost.wall_ratio, cost.probe_tokens_per_generated_token) {
        out.push(format!(
            "probing at every line, ending nothing: {tokens:.2} probe tokens for each generated one, {ratio:.2} times the wall \
             time of a token"
        ));
    }
    let settings = || document.settings.iter().map(|(_, setting)| setting);
    let unended = settings().filter(|setting| setting.unended > 0);
    let unended: Vec<String> = unended.map(|setting| format!("{} {}", setting.title, setting.unended)).collect();
    if !unended.is_empty() {
        out.push(format!("thoughts that never ended and count as wrong: {}", unended.join(", ")));
    }
    for setting in settings().filter(|setting| setting.counters.probes.dropped > 0) {
        let [dropped, asked] = [setting.counters.probes.dropped, setting.counters.probes.asked].map(count);
        out.push(format!("{}: {dropped} of {asked} probes were dropped", setting.title));
    }
    let faults = document.faults.iter().filter(|(_, times)| **times > 0);
    let faults: Vec<String> = faults.map(|(kind, times)| format!("{times} {}", clean(kind))).collect();
    if !faults.is_empty() {
        out.push(format!("policy faults: {}", faults.join(", ")));
    }
    let problems = document.facts.problems;
    if problems < ENOUGH_PROBLEMS {
        out.push(format!("{problems} problems are a trial: a result needs at least {}", count(ENOUGH_PROBLEMS as u64)));
    }
    out
}

/// The cells of the table, a row a setting.
fn rows(document: &ExitDocument) -> Vec<Vec<String>> {
    let is_rule = |name: &str| ExitFamily::ALL.iter().any(|family| family.key() == name);
    let is_component = |name: &str| name.starts_with(COMPONENT);
    let shown = |is_shown: bool, text: String| if is_shown { text } else { String::new() };
    let row = |(name, setting): &(String, ExitSetting)| {
        let (is_compared, probes) = (name != NONE, setting.counters.probes.done);
        vec![
            setting.title.clone(),
            percent(setting.compared.accuracy.value),
            shown(is_compared, points(&setting.compared.difference)),
            setting.compared.tokens.value.map_or_else(|| "-".to_owned(), |tokens| format!("{tokens:.1}")),
            shown(is_compared, share(&setting.compared.saving)),
            shown(is_rule(name) || is_component(name), share(&setting.compared.saving_fixed)),
            shown(probes > 0, count(probes)),
            shown(setting.counters.probe_tokens > 0, count(setting.counters.probe_tokens)),
            format!("{:.1}", setting.wall_s),
        ]
    };
    document.settings.iter().map(row).collect()
}

/// What was asked for, and what it ran on.
fn heading(document: &ExitDocument) -> [String; 2] {
    let facts = &document.facts;
    let samples = if facts.repeats > 1 { format!(", {} samples each", facts.repeats) } else { String::new() };
    let [problems, tune] = [facts.problems, facts.tune].map(|problems| count(problems as u64));
    let (temperature, dtype, seed, machine) = (facts.temperature, facts.dtype, facts.seed, &facts.machine);
    [
        format!(
            "{problems} problems{samples}, T={temperature}, {dtype}, seed {seed}; thresholds chosen on {tune} others"
        ),
        format!(
            "vLLM {}, {} cores of {}; in brackets 95 % paired intervals",
            clean(&machine.vllm),
            machine.cores,
            clean(&machine.cpu)
        ),
    ]
}

/// The fields of a setting; a guard that guards nothing is left out.
fn fields(rule: &ExitRule) -> Vec<(&'static str, String)> {
    match *rule {
        ExitRule::Eat { alpha, delta, min_probes, max_bits } => {
            let mut out = vec![
                ("alpha", alpha.to_string()),
                ("delta", delta.to_string()),
                ("min_probes", min_probes.to_string()),
            ];
            if max_bits < NO_GUARD_BITS {
                out.push(("max_bits", max_bits.to_string()));
            }
            out
        }
        ExitRule::Patience { answers } => vec![("answers", answers.to_string())],
        ExitRule::Rpdi { threshold, window } => {
            vec![("threshold", threshold.to_string()), ("window", window.to_string())]
        }
        ExitRule::Deer { confidence } => vec![("confidence", confidence.to_string())],
        ExitRule::CodeStop { low, high, ramp, degeneration } => vec![
            ("low", low.to_string()),
            ("high", high.to_string()),
            ("ramp", ramp.to_string()),
            ("degeneration", degeneration.to_string()),
        ],
    }
}

fn count(count: u64) -> String {
    figure(count as f64)
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.1}", 100.0 * share))
}

/// A difference of shares in points, with its interval.
fn points(of: &Interval) -> String {
    let Some(value) = of.value else { return "-".to_owned() };
    let ends = of.low.zip(of.high).map(|(low, high)| format!(" ({:+.1} to {:+.1})", 100.0 * low, 100.0 * high));
    format!("{:+.1}{}", 100.0 * value, ends.unwrap_or_default())
}

/// A share in percent, with its interval.
fn share(of: &Interval) -> String {
    let Some(value) = of.value else { return "-".to_owned() };
    let ends = of.low.zip(of.high).map(|(low, high)| format!(" ({:.1} to {:.1})", 100.0 * low, 100.0 * high));
    format!("{:.1}{}", 100.0 * value, ends.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::super::made_up;
    use super::*;

    fn interval(value: f64, low: f64, high: f64) -> Interval {
        Interval { value: Some(value), low: Some(low), high: Some(high) }
    }

    /// Results in which everything is lost.
    fn losses() -> ExitDocument {
        let mut document = made_up::document();
        for (name, setting) in &mut document.settings {
            setting.compared.difference =
                if name == NONE { interval(0.0, -0.02, 0.02) } else { interval(-0.03, -0.04, -0.02) };
            setting.compared.saving = interval(-0.1, -0.2, 0.0);
            setting.compared.saving_fixed = Interval { value: None, low: None, high: None };
            setting.compared.saving_fixed_within = interval(0.0, -0.02, 0.02);
            setting.compared.reference.reached = false;
            setting.unended = 2;
            setting.counters.probes.asked = 4000;
            setting.counters.probes.dropped = 1;
            setting.computed_saving = Some(-0.2);
        }
        document.tuning.choices.iter_mut().for_each(|(_, chosen)| chosen.within_margin = false);
        document.faults.insert("trap".into(), 1);
        document.claims = document.setting("eat").map(super::super::claims::claimed).expect("EAT");
        document
    }

    #[test]
    fn losses_are_told() {
        let document = losses();
        let text = notes(&document).join("\n");
        for told in [
            "RPDI: none of 10 settings was within 0.5 point",
            "EAT as published: may be more than a point less accurate than no limit: -3.0 (-4.0 to -2.0)",
            "patience: saves no think tokens",
            "more accurate than every budget measured",
            "20.0 % more tokens computed",
            "probing alone should change nothing, but accuracy differs",
            "count as wrong: no limit 2, fixed budget 16 2",
            "patience: 1 of 4,000 probes were dropped",
            "policy faults: 1 trap",
            "400 problems are a trial: a result needs at least 2,000",
        ] {
            assert!(text.contains(told), "{told}: {text}");
        }
        assert!(document.claims.iter().all(|claim| !claim.holds), "without a value a claim does not hold");
        assert!(claims(&document).iter().all(|line| line.ends_with(": DOES NOT HOLD")));
        assert!(claims(&document)[2].contains(": - %, expected at least 20"));
    }

    #[test]
    fn the_cheapest_of_equal_budgets_is_told() {
        let mut document = made_up::document();
        for (_, setting) in &mut document.settings {
            setting.compared.saving_fixed = interval(-0.05, -0.1, 0.1);
            setting.compared.reference.at_smallest = true;
        }
        let text = notes(&document).join("\n");
        assert!(
            text.contains("RPDI: a fixed budget of equal accuracy is as cheap: saves -5.0 (-10.0 to 10.0) % of it")
        );
        assert!(text.contains("RPDI: the smallest budget measured is as accurate; a smaller one might be too"));
        assert!(!text.contains("policy faults"), "none happened");
    }

    #[test]
    fn table_and_page_have_every_setting() {
        let document = made_up::document();
        let (text, page) = (table(&document), markdown(&document));
        for (_, setting) in &document.settings {
            assert!(text.lines().any(|line| line.starts_with(&setting.title)), "{text}");
            assert!(page.contains(&format!("| {} |", setting.title)), "{page}");
        }
        assert!(
            text.starts_with(
                "400 problems, T=0.6, float32, seed 1; thresholds chosen on 60 others\nvLLM 0.0, 2 cores of"
            )
        );
        assert!(page.contains("- EAT as published: `alpha=") && page.contains("- patience: `answers="), "{page}");
        assert!(!page.contains("max_bits=1000000000"), "a guard that guards nothing: {page}");
        assert!(page.contains("(alpha 0.1, delta 0.0009765625, min\\_probes 4), on the tuning split"), "{page}");
        let columns: Vec<usize> =
            page.lines().filter(|line| line.starts_with('|')).map(|line| line.matches(" | ").count()).collect();
        assert!(columns.iter().all(|count| *count == 8), "{columns:?}");
        let holds: Vec<bool> = claims(&document).iter().map(|line| line.ends_with(": holds")).collect();
        assert_eq!(holds, document.claims.iter().map(|claim| claim.holds).collect::<Vec<_>>());
    }

    #[test]
    fn words_of_others_steer_neither_terminal_nor_page() {
        let mut document = made_up::document();
        document.facts.machine.cpu = "a\n| <b>\u{1b}[2J".into();
        document.faults.insert("x\u{1b}[2J|".into(), 1);
        let (text, page) = (table(&document), markdown(&document));
        assert!(!text.contains('\u{1b}') && !page.contains('\u{1b}'));
        assert!(text.lines().nth(1).is_some_and(|line| line.ends_with("95 % paired intervals")), "{text}");
        assert!(page.contains("a\\\\u{a}\\| &lt;b&gt;"), "{page}");
        assert!(notes(&document).iter().any(|note| note.contains("1 x\\u{1b}[2J|")));
    }
}

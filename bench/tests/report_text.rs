//! The report as text.

use meridian_bench::report::{markdown, table};
use meridian_bench::results::{LevelPoint, METRICS, Results};
use support::Made;

use crate::support;

#[test]
fn ten_metrics_come_first() {
    let text = table(&Made::default().results(), false);
    let shown = METRICS.iter().filter(|metric| text.lines().any(|line| line.starts_with(metric.title))).count();
    assert!((8..=13).contains(&shown) && text.contains("--all"), "{text}");
}

#[test]
fn every_metric_has_a_row() {
    let text = table(&Made::default().results(), true);
    for metric in METRICS {
        assert!(text.lines().any(|line| line.starts_with(metric.title)), "{}", metric.key);
    }
    let head = text.lines().nth(1).expect("names of policies");
    assert!(head.find("native:fcfs") < head.find("output-first.wasm"), "{head}");
    assert!(text.contains("x)"), "ratios");
}

#[test]
fn one_table_a_rate_and_ranges_over_seeds() {
    let text = table(&Made { rates: &[8.0, 2.0], seeds: &[1, 2], ..Made::default() }.results(), true);
    let rates: Vec<&str> = text.lines().filter(|line| line.ends_with("req/s") && !line.contains("goodput")).collect();
    assert_eq!(rates, ["2 req/s", "8 req/s"]);
    assert!(text.contains("square brackets"));
}

#[test]
fn who_decides_in_the_other_slots_is_named() {
    let mut results = Made { policies: &["fcfs", "srpt"], ..Made::default() }.results();
    assert!(!table(&results, true).contains("eviction policy"), "results of an earlier version do not say");
    for (run, eviction) in results.runs.iter_mut().zip(["vLLM's own", "prefix-value"]) {
        run.slots = [("eviction", eviction), ("budget", "none")].map(|(slot, name)| (slot.into(), name.into())).into();
    }
    let text = table(&results, true);
    let row = |title: &str| text.lines().find(|line| line.starts_with(title)).expect("a row").to_owned();
    assert!(row("eviction policy").find("vLLM's own") < row("eviction policy").find("prefix-value"));
    assert_eq!(row("budget policy").matches("none").count(), 2);
    let page = meridian_bench::report::html(&results);
    assert!(page.contains("srpt: eviction prefix-value, budget none"));
}

#[test]
fn ratio_to_the_baseline() {
    let mut results = Made { policies: &["new", "base"], ..Made::default() }.results();
    results.baseline = "base".into();
    for (run, value) in results.runs.iter_mut().zip([50.0, 100.0]) {
        run.metrics = [("ttfo_p99_ms".to_owned(), value)].into();
    }
    let row = table(&results, true).lines().nth(3).map(str::to_owned).expect("one metric");
    assert_eq!(row.split_whitespace().collect::<Vec<_>>(), ["TTFO", "p99", "ms", "100", "50", "(0.50x)"]);
}

#[test]
fn markdown_has_the_chosen_keys_in_order() {
    let results = Made { policies: &["a|b", "c<d>"], ..Made::default() }.results();
    let text = markdown(&results, &["goodput_rps", "ttfo_p99_ms", "nonsense"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert_eq!(lines[0], "| 4 req/s | a\\|b | c&lt;d&gt; |");
    assert!(lines[2].starts_with("| goodput, req/s |") && lines[3].starts_with("| TTFO p99, ms |"), "{text}");
}

#[test]
fn a_day_with_a_burst_is_a_line_a_policy() {
    let mut results = Made { policies: &["fcfs", "balanced", "srpt"], seeds: &[1, 2], ..Made::default() }.results();
    assert!(!table(&results, false).contains("in time"), "no day");
    // Two stretches become one of the line; the burst is the second quarter of the day.
    let level =
        |at: u32, attained| LevelPoint { t_s: f64::from(at) * 30.0, arrived: 10, attained, ..LevelPoint::default() };
    for run in &mut results.runs {
        let in_burst =
            |at: u32| if at.is_multiple_of(2) { [0, 3] } else { [0, 6] }[usize::from(run.policy == "balanced")];
        if run.policy != "srpt" {
            run.levels = (0..96).map(|at| level(at, if (24..48).contains(&at) { in_burst(at) } else { 10 })).collect();
            run.levels[94..].fill(LevelPoint { t_s: 94.0 * 30.0, ..LevelPoint::default() });
            run.levels[95].t_s = 95.0 * 30.0;
        }
    }
    let text = table(&results, false);
    let bars = |of: char| ["█".repeat(12), of.to_string().repeat(12), "█".repeat(23)].concat();
    assert!(text.contains("in time, by when they arrived: from none to all, over 48 minutes\n"), "{text}");
    assert!(text.lines().any(|line| line == format!("fcfs      {}", bars('▁'))), "{text}");
    // 0.45 of a line of eight heights.
    assert!(text.lines().any(|line| line == format!("balanced  {}", bars('▅'))), "{text}");
    assert!(!text.lines().any(|line| line.starts_with("srpt ")), "it has no day: {text}");
}

#[test]
fn terminals_are_not_steered() {
    let text = table(&Made { policies: &["\u{1b}[2Ja", "b\u{202e}"], ..Made::default() }.results(), true);
    assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'));
    assert_eq!(table(&Results::default(), true), "no runs");
}

//! The report as HTML: complete, self-contained, well-formed, whatever names it shows.

use meridian_bench::report::html;
use meridian_bench::results::{METRICS, Results};
use support::{Made, assert_well_formed};

use crate::support;

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn one_rate_shows_everything() {
    let page = html(&Made::default().results());
    assert_well_formed(&page);
    for metric in METRICS {
        let title = metric.title.trim().replace('>', "&gt;").replace('\'', "&#39;");
        assert!(page.contains(&format!("<th scope=\"row\">{title} ")), "{}", metric.key);
    }
    // Four distributions, queues and KV of three policies, tenants.
    assert_eq!(count(&page, "<svg "), 4 + 3 + 3 + 1);
    assert_eq!(count(&page, "<svg "), count(&page, "role=\"img\""));
    assert_eq!(count(&page, "<svg "), count(&page, "<desc "));
    for part in
        ["reason.csv", "h100-8b", "decode_us_per_seq = 31.5", "meridian bench replay", "reading speed", "baseline"]
    {
        assert!(page.contains(part), "{part}");
    }
    assert!(page.contains("class=\"best\""));
    assert!(page.contains("(ms), log scale"), "TTFO spans more than a factor of 100");
    assert!(!page.contains("Against the load"), "there is one rate");
}

#[test]
fn several_rates_and_seeds() {
    let page = html(&Made { rates: &[2.0, 4.0, 8.0], seeds: &[1, 2, 3], ..Made::default() }.results());
    assert_well_formed(&page);
    assert_eq!(count(&page, "<svg "), 2 + 3 * (4 + 3 + 3 + 1));
    // The headlines of each rate, and all metrics folded.
    assert_eq!(count(&page, "<table>"), 2 * 3);
    assert!(page.contains("Goodput against load") && page.contains("SLO attainment against load"));
    assert!(page.contains("least and the most"));
}

#[test]
fn ids_are_unique() {
    let page = html(&Made { rates: &[2.0, 4.0], ..Made::default() }.results());
    let mut ids: Vec<&str> = page.split(" id=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    let all = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), all);
}

#[test]
fn nothing_is_loaded_and_nothing_runs() {
    let page = html(&Made::default().results());
    let without_namespaces = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    for part in
        ["http://", "https://", "<script", "<link", "<img", "<iframe", "@import", "url(", "javascript:", " src="]
    {
        assert!(!without_namespaces.contains(part), "{part}");
    }
}

#[test]
fn hostile_names_stay_text() {
    let evil = "</title></svg><script>alert(1)</script>\"' onload=\"x&amp;\u{1b}[2J\u{202e}";
    let made = Made {
        policies: &[evil, "b<img src=x>"],
        tenants: &[evil, "t2"],
        event: evil,
        rates: &[1.0, 2.0],
        ..Made::default()
    };
    let mut results = made.results();
    results.trace.source = evil.into();
    results.made_by.command = evil.into();
    results.made_by.version = evil.into();
    results.made_by.machine = evil.into();
    results.engine.preset = evil.into();
    results.engine.router = evil.into();
    results.engine.step_model.insert(evil.into(), 1.0);
    let page = html(&results);
    assert_well_formed(&page);
    for part in ["<script", "<img", "\u{1b}", "\u{202e}", "x&amp;\u{1b}"] {
        assert!(!page.contains(part), "{part:?}");
    }
    assert!(page.contains("&lt;script&gt;"));
    assert!(page.contains("x&amp;amp;"), "what looks escaped is escaped again");
}

#[test]
fn text_that_looks_like_a_colour_stays_text() {
    let name = "fill=\"#010101\"";
    let page = html(&Made { tenants: &[name, "b"], ..Made::default() }.results());
    assert!(page.contains("fill=&quot;#010101&quot;"));
    assert!(!page.contains("=\"#010101\"") && !page.contains("=\"#0102"), "colours were not replaced");
}

#[test]
fn odd_values_do_not_break_it() {
    assert_well_formed(&html(&Results::default()));
    let mut results = Made { rates: &[0.0, 1e300], ..Made::default() }.results();
    for run in &mut results.runs {
        for value in run.metrics.values_mut() {
            *value = f64::NAN;
        }
        for curve in run.curves.values_mut() {
            curve[3] = [f64::INFINITY, f64::NAN];
            curve[4] = [-5.0, 7.0];
        }
        run.timeline[5].waiting = f64::NAN;
        run.timeline[6].t_s = f64::INFINITY;
        run.tenants[0].ttfo_p99_ms = f64::INFINITY;
        run.events.iter_mut().for_each(|event| event.t_s = f64::NAN);
    }
    let page = html(&results);
    assert_well_formed(&page);
    assert!(!page.contains("NaN") && !page.contains("cannot be drawn"));
    results.runs.truncate(1);
    results.runs[0].metrics.clear();
    results.runs[0].curves.clear();
    results.runs[0].timeline.clear();
    results.runs[0].tenants.clear();
    assert_well_formed(&html(&results));
}

#[test]
fn colours_stay_with_their_policy() {
    let names: Vec<String> = (0..10).map(|at| format!("policy-{at}")).collect();
    let policies: Vec<&str> = names.iter().map(String::as_str).collect();
    let page = html(&Made { policies: &policies, ..Made::default() }.results());
    assert_well_formed(&page);
    // The tenth has the colour of the second, dashed.
    let legend = "<li><span class=\"line\" style=\"border-color:#D55E00;border-top-style:dashed\"></span>policy-9</li>";
    assert!(page.contains(legend));
    assert!(page.contains("stroke=\"#D55E00\" stroke-dasharray="));
}

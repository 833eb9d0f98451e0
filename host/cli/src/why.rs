use std::fmt::Write;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use meridian_core::{Overtaking, Part, Rule};
use meridian_engine::explain::Explanation;
use meridian_engine::recording::retrace;

use crate::target::{Target, shown};
use crate::trace::opened;
use crate::{Unusable, print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
REQUEST is the engine's id of a live request or one of the latest 1,024 that ended, or a part of the id that
only one of them has. In a recording, it is the request's number in the columns of policies.

Examples:
  meridian why chatcmpl-8d2f
  meridian why 17 --recording recordings/dispatch-*.arrow")]
pub(crate) struct WhyArgs {
    /// Explain this request
    #[arg(value_name = "REQUEST")]
    request: String,
    #[command(flatten)]
    target: Target,
    /// Look it up in these recordings, all of one process, instead of asking an engine
    #[arg(long = "recording", value_name = "FILE", num_args = 1.., conflicts_with_all = ["pid", "address", "fleet"])]
    recordings: Vec<PathBuf>,
}

pub(crate) fn run(args: &WhyArgs, json: bool) -> anyhow::Result<()> {
    let explanation = if args.recordings.is_empty() {
        args.target.one()?.get(&format!("/v1/why?request={}", encoded(&args.request)))?
    } else {
        recorded(args).map_err(|error| error.context(Unusable))?
    };
    if json {
        return print_json(&explanation);
    }
    Ok(print_line(text(&explanation).trim_end())?)
}

fn recorded(args: &WhyArgs) -> anyhow::Result<Explanation> {
    let number = args.request.trim_start_matches('#');
    let Ok(number) = number.parse::<u32>() else {
        bail!("{:?}: expected the number of a request in the recording", args.request);
    };
    let mut retraced = retrace(&opened(&args.recordings)?, &[number])?;
    if retraced.missing > 0 {
        say(&format!("note: {} decisions are missing from the recordings", retraced.missing));
    }
    match retraced.explained.pop() {
        Some(explanation) => Ok(explanation),
        None => bail!("{number}: none of the {} requests of the recordings has this number", retraced.requests),
    }
}

/// Percent-encoded for a query.
fn encoded(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

fn text(of: &Explanation) -> String {
    let mut out = String::new();
    let mut line = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    let state = if of.ended { format!("ended: {}", shown(&of.state)) } else { of.state.clone() };
    line(format!("request {} (#{}), {state}, policy {}", shown(&of.request), of.number, shown(&of.policy)));
    let first = |name: &str, ms: Option<f64>| ms.map_or_else(String::new, |ms| format!(", {name} {ms:.1} ms"));
    line(format!(
        "latency {:.1} ms{}{}; {} prompt tokens ({} cached), {} think, {} output, {} preemptions",
        of.latency_ms,
        first("TTFT", of.ttft_ms),
        first("TTFO", of.ttfo_ms),
        of.prompt_tokens,
        of.cached_tokens,
        of.think_tokens,
        of.output_tokens,
        of.preemptions
    ));
    let again = if of.reopened > 0 { format!("; it began again {} times", of.reopened) } else { String::new() };
    if let Some(end) = &of.think_end {
        line(format!("its thinking ended: {}{again}", shown(end)));
    }
    for part in &of.parts {
        let share = 100.0 * part.ms / of.latency_ms.max(1e-9);
        line(format!("{:>12.1} ms {share:>5.1}%  {:<10} {}", part.ms, part.part.label(), meaning(part.part)));
    }
    if let Some(part) = of.waits_for {
        line(format!("it waits now: {}", meaning(part)));
    }
    if let Some(level) = &of.level {
        let slack = of.level_slack_ms.map_or_else(String::new, |ms| match ms {
            ms if ms < 0.0 => format!(": it cannot be kept, late by {:.1} s", -ms / 1e3),
            ms => format!(": it can be kept, {:.1} s left", ms / 1e3),
        });
        line(format!("service level {}{}", shown(level), if of.ended { String::new() } else { slack }));
    }
    if of.passed_over > 0 {
        line(format!("passed over in {} steps for requests whose service level could still be kept", of.passed_over));
    }
    if of.rescues > 0 {
        line(format!("the starvation bound gave it tokens in {} steps", of.rescues));
    }
    let name = |number: u32| {
        let known = of.names.iter().find(|(of, _)| *of == number);
        known.map_or_else(|| format!("#{number}"), |(_, id)| format!("{} (#{number})", shown(id)))
    };
    if of.overtaken > 0 {
        line(format!("later arrivals were admitted before it in {} steps, first:", of.overtaken));
    }
    for Overtaking { by, at_ms, rule, own_key, other_key } in &of.overtakings {
        let key = |key: &Option<f32>| key.map_or_else(|| "none".into(), |key| key.to_string());
        let after = at_ms - of.arrival_ms;
        line(format!("  {after:>10.1} ms  {}: {}", name(*by), rule_text(*rule, &key(own_key), &key(other_key))));
    }
    if of.before_count > 0 {
        line(format!("{} requests were admitted before it, latest:", of.before_count));
    }
    for admission in of.before.iter().rev().take(8) {
        let after = admission.at_ms - of.arrival_ms;
        let came = if admission.arrival_ms <= of.arrival_ms { "arrived earlier" } else { "arrived later" };
        let rule = admission.rule.label();
        line(format!("  {after:>10.1} ms  {}: {came}, rule {rule}", name(admission.number)));
    }
    out
}

fn rule_text(rule: Rule, own: &str, other: &str) -> String {
    match rule {
        Rule::Arrival => "in the engine's own order".into(),
        Rule::Priority => "its priority is more urgent".into(),
        Rule::Key => format!("the policy gave it key {other}, and this request {own}"),
        Rule::Cap => "the policy left this request out of the step".into(),
        Rule::Rescue => "it had been put off for too long, or its service level was owed its least share".into(),
        Rule::Level => "its service level could still be kept, and that of this request could not".into(),
    }
}

fn meaning(part: Part) -> &'static str {
    match part {
        Part::Arrival => "front end, and the step under way at its arrival",
        Part::Seat => "waited for a seat",
        Part::Blocks => "waited for KV blocks",
        Part::Budget => "waited for tokens of a step: the engine's own budget was used up",
        Part::Policy => "waited because the policy put others first or limited the step",
        Part::Engine => "waited for something of the engine's own: a grammar, an adapter, a transfer",
        Part::Probes => "steps took longer because of probes",
        Part::Prefill => "computed its prompt",
        Part::Recompute => "computed again what a preemption had lost",
        Part::Think => "generated thinking",
        Part::Output => "generated its answer",
    }
}

#[cfg(test)]
mod tests {
    use meridian_engine::explain::PartTime;

    use super::*;

    #[test]
    fn an_explanation_names_the_key_and_the_request_that_went_first() {
        let explanation = Explanation {
            request: "chat\x1b-1".into(),
            number: 3,
            state: "waiting".into(),
            arrival_ms: 100.0,
            latency_ms: 40.0,
            parts: vec![PartTime { part: Part::Seat, ms: 30.0 }, PartTime { part: Part::Policy, ms: 10.0 }],
            waits_for: Some(Part::Seat),
            overtaken: 14,
            passed_over: 14,
            level: Some("chat".into()),
            level_slack_ms: Some(-1500.0),
            overtakings: vec![Overtaking {
                by: 9,
                at_ms: 125.0,
                rule: Rule::Key,
                own_key: Some(7.5),
                other_key: Some(2.0),
            }],
            names: vec![(9, "chat-9".into())],
            ..Explanation::default()
        };
        let text = text(&explanation);
        for line in [
            r"request chat\u{1b}-1 (#3), waiting",
            "        30.0 ms  75.0%  seat       waited for a seat",
            "it waits now: waited for a seat",
            "service level chat: it cannot be kept, late by 1.5 s",
            "passed over in 14 steps for requests whose service level could still be kept",
            "        25.0 ms  chat-9 (#9): the policy gave it key 2, and this request 7.5",
        ] {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
    }

    #[test]
    fn an_id_is_encoded_for_a_query() {
        assert_eq!(encoded("cmpl-1/ä?&"), "cmpl-1%2F%C3%A4%3F%26");
    }
}

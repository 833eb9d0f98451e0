//! A timeline in the JSON format of Chrome's trace viewer, which the Perfetto UI opens.
//!
//! Times are whole nanoseconds, so that spans which follow one another do not overlap. A track has the spans of one thing:
//! the steps, one slot, or one request.

use std::fmt::Write;

use meridian_core::slot::Source;
use meridian_core::{Doing, Part, SlotName};
use serde_json::{Value, json};

use super::{Timeline, TimelineDecision, TimelineStep};

const ENGINE: u32 = 1;
const REQUESTS: u32 = 2;
const STEPS: u32 = 1;
const FIRST_SLOT: u32 = 2;

/// The timeline as one JSON object.
#[must_use]
pub fn chrome_json(timeline: &Timeline) -> String {
    let mut events = Events { text: String::new(), begin_ms: timeline.begin_ms };
    events.text.push_str("{\"displayTimeUnit\":\"ms\",\"otherData\":");
    let about = json!({
        "meridian": env!("CARGO_PKG_VERSION"), "model": timeline.title, "begin_ms": timeline.begin_ms,
        "lost_records": timeline.lost,
    });
    let _ = write!(events.text, "{about}");
    events.text.push_str(",\"traceEvents\":[\n");
    let name = format!("engine {}", timeline.title);
    events.metadata("process_name", ENGINE, 0, name.trim_end());
    events.metadata("process_name", REQUESTS, 0, "requests");
    events.metadata("thread_name", ENGINE, STEPS, "steps");
    for slot in SlotName::ALL {
        events.metadata("thread_name", ENGINE, track(slot), &format!("{} slot", slot.label()));
    }
    steps(timeline, &mut events);
    decisions(timeline, &mut events);
    requests(timeline, &mut events);
    events.text.truncate(events.text.trim_end_matches([',', '\n']).len());
    events.text.push_str("\n]}\n");
    events.text
}

fn track(slot: SlotName) -> u32 {
    FIRST_SLOT + slot as u32
}

struct Events {
    text: String,
    begin_ms: f64,
}

impl Events {
    fn ns(&self, ms: f64) -> u64 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a conversion to integers saturates"
        )]
        let ns = ((ms - self.begin_ms) * 1e6).round() as u64;
        ns
    }

    fn metadata(&mut self, what: &str, pid: u32, tid: u32, name: &str) {
        let event = json!({ "ph": "M", "name": what, "pid": pid, "tid": tid, "args": { "name": name } });
        let _ = writeln!(self.text, "{event},");
    }

    /// A span; none when it is empty.
    fn span(&mut self, track: (u32, u32), category: &str, name: &str, ms: (f64, f64), args: &Value) {
        let (begin, end) = (self.ns(ms.0), self.ns(ms.1));
        if end <= begin {
            return;
        }
        let _ = writeln!(
            self.text,
            "{{\"ph\":\"X\",\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":{},\"cat\":{},\"name\":{},\"args\":{args}}},",
            track.0,
            track.1,
            us(begin),
            us(end - begin),
            Value::from(category),
            Value::from(name),
        );
    }

    fn instant(&mut self, track: (u32, u32), category: &str, name: &str, at_ms: f64, args: &Value) {
        let _ = writeln!(
            self.text,
            "{{\"ph\":\"i\",\"s\":\"t\",\"pid\":{},\"tid\":{},\"ts\":{},\"cat\":{},\"name\":{},\"args\":{args}}},",
            track.0,
            track.1,
            us(self.ns(at_ms)),
            Value::from(category),
            Value::from(name),
        );
    }

    fn counter(&mut self, name: &str, at_ms: f64, values: &Value) {
        let at = us(self.ns(at_ms));
        let name = Value::from(name);
        let _ = writeln!(
            self.text,
            "{{\"ph\":\"C\",\"pid\":{ENGINE},\"tid\":0,\"ts\":{at},\"name\":{name},\"args\":{values}}},"
        );
    }
}

/// Microseconds with the nanoseconds as decimals: no number of a trace is rounded.
fn us(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

fn steps(timeline: &Timeline, events: &mut Events) {
    let mut before: Option<&TimelineStep> = None;
    for step in timeline.steps() {
        let name = match (step.decode_tokens, step.prefill_tokens) {
            (0, 0) => "empty step",
            (_, 0) => "decode step",
            (0, _) => "prefill step",
            _ => "mixed step",
        };
        let prefills: serde_json::Map<String, Value> = step
            .prefills
            .iter()
            .map(|(number, tokens)| (request_name(timeline, *number), Value::from(*tokens)))
            .collect();
        let args = json!({
            "measured_ms": rounded(step.end_ms - step.begin_ms),
            "predicted_ms": step.predicted_ms.map(|ms| rounded(ms.into())),
            "token_budget": step.token_budget,
            "engine_token_budget": step.engine_budget,
            "decode_tokens": step.decode_tokens,
            "prefill_tokens": step.prefill_tokens,
            "probe_tokens": step.probe_tokens,
            "running_prefill": step.running[0],
            "running_think": step.running[1],
            "running_output": step.running[2],
            "waiting": step.waiting,
            "limited_requests": step.capped,
            "free_blocks": step.free_blocks,
            "decided_by": step.source.map(source),
            "waiting_for": step.cause.map(Part::label),
            "prefills": prefills,
        });
        events.span((ENGINE, STEPS), "step", name, (step.begin_ms, step.end_ms), &args);
        if before.is_none_or(|before| before.running != step.running || before.waiting != step.waiting) {
            let [prefill, think, output] = step.running;
            events.counter("running", step.begin_ms, &json!({ "prefill": prefill, "think": think, "output": output }));
            events.counter("waiting", step.begin_ms, &json!({ "requests": step.waiting }));
        }
        if before.is_none_or(|before| before.free_blocks != step.free_blocks) {
            events.counter("free KV blocks", step.begin_ms, &json!({ "blocks": step.free_blocks }));
        }
        before = Some(step);
    }
}

fn source(source: Source) -> &'static str {
    match source {
        Source::Active => "policy",
        Source::Default => "default",
        Source::Fallback => "fallback",
    }
}

fn decisions(timeline: &Timeline, events: &mut Events) {
    for slot in SlotName::ALL {
        let track = (ENGINE, track(slot));
        let mut policy: Option<&str> = None;
        let mut free_from_ms = timeline.begin_ms;
        let mut steps = timeline.steps().iter().peekable();
        for decision in timeline.decisions().iter().filter(|decision| decision.slot == slot) {
            let TimelineDecision { begin_ms, ms, policy: name, source: by, candidates, fault, .. } = decision;
            if policy.is_some_and(|policy| policy != name) {
                let args = json!({ "from": policy, "to": name });
                events.instant(track, "swap", &format!("swap to {name}"), *begin_ms, &args);
            }
            policy = Some(name);
            let args = json!({
                "decided_by": source(*by), "candidates": candidates, "fault": fault.map(|fault| fault.label()),
            });
            let name = match fault {
                Some(fault) => format!("{name}: {}", fault.label()),
                None => name.clone(),
            };
            let category = if fault.is_some() { "fault" } else { "decision" };
            let Some(ms) = ms else {
                events.instant(track, category, &name, *begin_ms, &args);
                continue;
            };
            // The host's clock and the decision's own are read at different moments: a decision belongs to one step.
            while steps.peek().is_some_and(|step| step.end_ms <= *begin_ms) {
                steps.next();
            }
            let latest_ms =
                steps.peek().filter(|step| step.begin_ms <= *begin_ms).map_or(f64::INFINITY, |step| step.end_ms);
            let begin_ms = begin_ms.max(free_from_ms);
            let end_ms = (begin_ms + ms).min(latest_ms);
            events.span(track, category, &name, (begin_ms, end_ms), &args);
            free_from_ms = end_ms.max(begin_ms);
        }
    }
}

fn requests(timeline: &Timeline, events: &mut Events) {
    for (number, spans) in timeline.lives() {
        events.metadata("thread_name", REQUESTS, number, &request_name(timeline, number));
        let mut has_run = false;
        for (begin_ms, end_ms, doing) in spans {
            let track = (REQUESTS, number);
            match doing {
                Doing::Arriving => {
                    events.span(track, "wait", "arriving", (begin_ms, end_ms), &json!({ "why": "arrival" }));
                }
                Doing::Waiting => {
                    let name = if has_run { "preempted" } else { "waiting" };
                    for (begin_ms, end_ms, why) in causes(timeline, begin_ms, end_ms) {
                        let why = why.map_or("", Part::label);
                        events.span(track, "wait", name, (begin_ms, end_ms), &json!({ "why": why }));
                    }
                }
                Doing::Overtaken => {
                    events.span(track, "wait", "waiting", (begin_ms, end_ms), &json!({ "why": "policy" }));
                }
                Doing::Stalled => {
                    events.span(track, "wait", "stalled", (begin_ms, end_ms), &json!({ "why": "left out of steps" }));
                }
                Doing::Running(part) => {
                    has_run = true;
                    events.span(track, "run", run_name(part), (begin_ms, end_ms), &json!({}));
                }
                Doing::Ended => events.instant(track, "end", "ended", begin_ms, &json!({})),
            }
        }
    }
}

fn run_name(part: Part) -> &'static str {
    match part {
        Part::Think => "thinking",
        other => other.label(),
    }
}

/// A wait, cut where its cause changes.
fn causes(timeline: &Timeline, begin_ms: f64, end_ms: f64) -> Vec<(f64, f64, Option<Part>)> {
    let mut cut: Vec<(f64, f64, Option<Part>)> = Vec::new();
    let steps = timeline.steps();
    let first = steps.partition_point(|step| step.end_ms <= begin_ms);
    let mut at_ms = begin_ms;
    let mut add = |to_ms: f64, cause: Option<Part>| {
        if to_ms > at_ms {
            match cut.last_mut() {
                Some((_, end_ms, last)) if *last == cause => *end_ms = to_ms,
                _ => cut.push((at_ms, to_ms, cause)),
            }
            at_ms = to_ms;
        }
    };
    for step in steps[first..].iter().take_while(|step| step.begin_ms < end_ms) {
        add(step.begin_ms.min(end_ms), None);
        add(step.end_ms.min(end_ms), step.cause);
    }
    add(end_ms, None);
    cut
}

fn request_name(timeline: &Timeline, number: u32) -> String {
    timeline.names.get(&number).cloned().unwrap_or_else(|| format!("#{number}"))
}

fn rounded(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

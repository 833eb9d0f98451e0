//! What an engine did over some seconds: its steps, its requests and its decisions, as a trace for Perfetto.

mod chrome;

use std::collections::HashMap;

use meridian_core::slot::Source;
use meridian_core::{Doing, FaultKind, Part, SlotName, Transition};

pub use self::chrome::chrome_json;

/// Limits on the memory of a timeline, in records.
const MOST_STEPS: usize = 1 << 18;
const MOST_PREFILLS: usize = 1 << 20;
const MOST_TRANSITIONS: usize = 1 << 20;
const MOST_DECISIONS: usize = 1 << 19;
const MOST_NAMES: usize = 1 << 17;

/// A step. Times are milliseconds on the host's clock.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TimelineStep {
    /// Its plan.
    pub begin_ms: f64,
    /// The next plan, or the end of the engine's work.
    pub end_ms: f64,
    /// The time that the learned model predicted.
    pub predicted_ms: Option<f32>,
    /// Tokens that the plan allowed.
    pub token_budget: u32,
    /// The engine's own limit.
    pub engine_budget: u32,
    /// Tokens of decoding requests.
    pub decode_tokens: u32,
    /// Tokens of prompts, of probes too.
    pub prefill_tokens: u32,
    /// Tokens of probes.
    pub probe_tokens: u32,
    /// Requests that ran, in prefill, think and output.
    pub running: [u32; 3],
    /// Requests that waited.
    pub waiting: u32,
    /// Free KV blocks.
    pub free_blocks: u32,
    /// Why no further request was admitted.
    pub cause: Option<Part>,
    /// Who decided.
    pub source: Option<Source>,
    /// Requests that the plan left out or limited.
    pub capped: u32,
    /// Tokens of requests that computed a prompt, by number.
    pub prefills: Vec<(u32, u32)>,
}

/// A decision of a slot.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineDecision {
    /// The slot.
    pub slot: SlotName,
    /// Its begin, milliseconds on the host's clock.
    pub begin_ms: f64,
    /// Its time, milliseconds; `None` where it is not known: simulated and recorded decisions.
    pub ms: Option<f64>,
    /// The active policy.
    pub policy: String,
    /// Who decided.
    pub source: Source,
    /// Candidates in the batch.
    pub candidates: u32,
    /// The policy's fault.
    pub fault: Option<FaultKind>,
}

/// What a request did, from one time to another, milliseconds.
type Span = (f64, f64, Doing);

/// What an engine did from one time to another. Memory is bounded: records beyond the limits are counted as lost.
///
/// ```
/// use meridian_core::{Doing, Part, Transition};
/// use meridian_engine::timeline::{Timeline, TimelineStep, chrome_json};
///
/// let mut timeline = Timeline::new("Qwen3-8B", 1000.0);
/// timeline.name(7, "chat-7");
/// timeline.transition(Transition { number: 7, at_ms: 1000.0, doing: Doing::Waiting });
/// timeline.transition(Transition { number: 7, at_ms: 1005.0, doing: Doing::Running(Part::Prefill) });
/// timeline.step(TimelineStep { begin_ms: 1005.0, prefill_tokens: 64, ..TimelineStep::default() });
/// timeline.end(1015.0);
/// let json: serde_json::Value = serde_json::from_str(&chrome_json(&timeline))?;
/// assert!(json["traceEvents"].as_array().unwrap().iter().any(|event| event["name"] == "prefill"));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    title: String,
    begin_ms: f64,
    end_ms: f64,
    steps: Vec<TimelineStep>,
    prefills: usize,
    /// The latest step is not over.
    step_is_open: bool,
    transitions: Vec<Transition>,
    decisions: Vec<TimelineDecision>,
    names: HashMap<u32, String>,
    lost: u64,
}

impl Timeline {
    /// A timeline that begins at `begin_ms`; `title` is the model's name.
    #[must_use]
    pub fn new(title: &str, begin_ms: f64) -> Self {
        Self { title: title.to_owned(), begin_ms, end_ms: begin_ms, ..Self::default() }
    }

    /// The same under another title.
    #[must_use]
    pub fn titled(self, title: &str) -> Self {
        Self { title: title.to_owned(), ..self }
    }

    /// Its begin, milliseconds on the host's clock.
    #[must_use]
    pub fn begin_ms(&self) -> f64 {
        self.begin_ms
    }

    /// The steps.
    #[must_use]
    pub fn steps(&self) -> &[TimelineStep] {
        &self.steps
    }

    /// The decisions.
    #[must_use]
    pub fn decisions(&self) -> &[TimelineDecision] {
        &self.decisions
    }

    /// The changes of what requests did.
    #[must_use]
    pub fn transitions(&self) -> &[Transition] {
        &self.transitions
    }

    /// Records that were lost because there were too many.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Name the request with this number.
    pub fn name(&mut self, number: u32, id: &str) {
        if self.names.len() < MOST_NAMES {
            self.names.insert(number, id.to_owned());
        }
    }

    /// A step begins; the one before is over.
    pub fn step(&mut self, step: TimelineStep) {
        self.step_ends(step.begin_ms);
        if self.steps.len() < MOST_STEPS {
            self.steps.push(TimelineStep { end_ms: step.begin_ms, ..step });
            self.step_is_open = true;
        } else {
            self.lost += 1;
        }
    }

    /// The step that has begun, for what is known of it later.
    pub fn open_step(&mut self) -> Option<&mut TimelineStep> {
        self.steps.last_mut().filter(|_| self.step_is_open)
    }

    /// The step that has begun gives a request tokens of its prompt.
    pub fn prefill(&mut self, number: u32, tokens: u32) {
        if self.prefills == MOST_PREFILLS {
            self.lost += 1;
        } else if let Some(step) = self.steps.last_mut().filter(|_| self.step_is_open) {
            step.prefills.push((number, tokens));
            self.prefills += 1;
        }
    }

    /// The step that has begun is over, and no other begins.
    pub fn step_ends(&mut self, now_ms: f64) {
        if let Some(step) = self.open_step() {
            step.end_ms = now_ms.max(step.begin_ms);
            self.step_is_open = false;
        }
        self.end_ms = self.end_ms.max(now_ms);
    }

    /// A request does something else.
    pub fn transition(&mut self, transition: Transition) {
        if self.transitions.len() < MOST_TRANSITIONS {
            self.transitions.push(transition);
        } else {
            self.lost += 1;
        }
    }

    /// A slot decided.
    pub fn decision(&mut self, decision: TimelineDecision) {
        if self.decisions.len() < MOST_DECISIONS {
            self.decisions.push(decision);
        } else {
            self.lost += 1;
        }
    }

    /// Records were lost elsewhere.
    pub fn lose(&mut self, records: u64) {
        self.lost += records;
    }

    /// It ends at `now_ms`.
    pub fn end(&mut self, now_ms: f64) {
        self.step_ends(now_ms);
        // Stalls are known when they are over.
        self.transitions.sort_by(|one, other| one.at_ms.total_cmp(&other.at_ms));
        self.decisions.sort_by(|one, other| one.begin_ms.total_cmp(&other.begin_ms));
    }

    /// What each request did, in spans of milliseconds that follow one another, by number.
    fn lives(&self) -> Vec<(u32, Vec<Span>)> {
        let mut lives: HashMap<u32, Vec<Span>> = HashMap::new();
        for Transition { number, at_ms, doing } in &self.transitions {
            let at_ms = at_ms.clamp(self.begin_ms, self.end_ms);
            let spans = lives.entry(*number).or_default();
            if let Some((_, end_ms, _)) = spans.last_mut() {
                *end_ms = at_ms;
            }
            spans.push((at_ms, self.end_ms, *doing));
        }
        let mut lives: Vec<_> = lives.into_iter().collect();
        lives.sort_unstable_by_key(|(number, _)| *number);
        lives
    }
}

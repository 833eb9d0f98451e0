use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::{Account, Doing, Overtaking, PARTS, Part, WAITS};
use crate::RowId;

/// The engine's clocks: how long its steps have had each cause of waiting. Milliseconds since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Clocks {
    /// By the causes of [`WAITS`].
    pub(super) waits_ms: [f64; WAITS.len()],
    /// Time that probes added to the steps.
    pub(super) probes_ms: f64,
    /// Steps whose plan left out running requests.
    pub(super) stalls_ms: f64,
}

/// Why requests got no tokens in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
struct StepCauses {
    /// Why no further request was admitted: one of [`WAITS`].
    waiting: Part,
    /// The plan limited the running requests.
    limits_running: bool,
    /// Tokens of probes.
    probe_tokens: u32,
}

impl Default for StepCauses {
    fn default() -> Self {
        Self { waiting: Part::Engine, limits_running: false, probe_tokens: 0 }
    }
}

/// The begin of a step that gave tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Entry {
    /// Milliseconds on the host's clock.
    pub(super) at_ms: f64,
    pub(super) clocks: Clocks,
}

/// The rule by which a request was admitted before others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// The engine's own order: by arrival, or by priority and arrival.
    #[default]
    Arrival,
    /// The engine schedules by priority, and its priority is more urgent.
    Priority,
    /// The policy gave it a lower key.
    Key,
    /// The policy left out the others.
    Cap,
    /// The starvation bound: it had been put off for too long.
    Rescue,
    /// Its service level can still be kept, and that of the others cannot.
    Level,
}

impl Rule {
    /// Its name.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Arrival => "arrival",
            Self::Priority => "priority",
            Self::Key => "key",
            Self::Cap => "cap",
            Self::Rescue => "rescue",
            Self::Level => "level",
        }
    }
}

/// A request that got a seat.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Admission {
    /// Number of the request.
    pub number: u32,
    /// Time, milliseconds on the host's clock.
    pub at_ms: f64,
    /// Its arrival.
    pub arrival_ms: f64,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// It had been preempted.
    pub resumed: bool,
    /// The rule.
    pub rule: Rule,
}

/// A change of what a request does, for a timeline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transition {
    /// Number of the request.
    pub number: u32,
    /// Time, milliseconds on the host's clock.
    pub at_ms: f64,
    /// What it does from then on.
    pub doing: Doing,
}

/// Begins of steps that are kept, so that a stall of so many steps is attributed.
const KEPT_STEPS: usize = 1024;
/// Requests that arrive within one step, at most.
const MOST_FRESH: usize = 8192;
/// Admissions that are kept.
const KEPT_ADMISSIONS: usize = 4096;
/// Most transitions that wait for their timeline.
const MOST_TRANSITIONS: usize = 1 << 16;

/// The accounts of an engine: its clocks, and what happened lately.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    clocks: Clocks,
    /// The begin of the latest step; `None` before any and after an idle time.
    step_ms: Option<f64>,
    causes: StepCauses,
    /// By the number of the step.
    steps: Vec<Entry>,
    /// Requests that have arrived since the latest step began.
    fresh: Vec<RowId>,
    /// Requests that the latest step's plan left out.
    pub(crate) put_off: Vec<RowId>,
    admissions: VecDeque<Admission>,
    admitted_in_step: u32,
    /// For a timeline.
    transitions: Option<Vec<Transition>>,
    lost_transitions: u64,
}

impl Ledger {
    /// A step begins at `now_ms`. Returns the time of the one before, without that of its probes, and its cause of
    /// waiting. `probe_token_ms` is the learned time of a prompt token.
    pub(crate) fn begin_step(&mut self, now_ms: f64, probe_token_ms: f64) -> (f64, Part) {
        let causes = std::mem::take(&mut self.causes);
        self.admitted_in_step = 0;
        let Some(before_ms) = self.step_ms.replace(now_ms) else { return (0.0, causes.waiting) };
        let ms = (now_ms - before_ms).max(0.0);
        let probes_ms = (f64::from(causes.probe_tokens) * probe_token_ms).clamp(0.0, ms);
        add(&mut self.clocks, &causes, ms - probes_ms, probes_ms);
        (ms - probes_ms, causes.waiting)
    }

    /// A request has arrived.
    pub(crate) fn arrived(&mut self, row_id: RowId) {
        // Nobody begins steps, or more arrive at once than any engine takes in: their wait counts as arrival.
        if self.fresh.len() == MOST_FRESH {
            self.fresh.clear();
        }
        self.fresh.push(row_id);
    }

    /// The requests that have arrived since the last call.
    pub(crate) fn take_fresh(&mut self) -> Vec<RowId> {
        std::mem::take(&mut self.fresh)
    }

    /// The step gives tokens, as number `step`.
    pub(crate) fn step_gives(&mut self, step: u64) {
        if self.steps.is_empty() {
            self.steps.resize(KEPT_STEPS, Entry::default());
        }
        self.steps[slot(step)] = self.entry();
    }

    fn entry(&self) -> Entry {
        Entry { at_ms: self.step_ms.unwrap_or(0.0), clocks: self.clocks }
    }

    /// Time until the next step belongs to none.
    pub(crate) fn idle(&mut self) {
        self.step_ms = None;
        self.causes = StepCauses::default();
    }

    pub(crate) fn set_causes(&mut self, waiting: Part, limits_running: bool) {
        self.causes.waiting = waiting;
        self.causes.limits_running = limits_running;
    }

    pub(crate) fn probes(&mut self, tokens: u32) {
        self.causes.probe_tokens = tokens;
    }

    /// The cause of waiting in the latest step.
    pub(crate) fn cause(&self) -> Part {
        self.causes.waiting
    }

    /// Requests admitted since the step began.
    pub(crate) fn admitted_in_step(&self) -> u32 {
        self.admitted_in_step
    }

    /// The clocks as they stand at `now_ms`, within the latest step.
    pub(super) fn clocks_at(&self, now_ms: f64) -> Clocks {
        let mut clocks = self.clocks;
        if let Some(begin_ms) = self.step_ms {
            add(&mut clocks, &self.causes, (now_ms - begin_ms).max(0.0), 0.0);
        }
        clocks
    }

    /// The parts of an account, as of `now_ms`.
    pub(crate) fn parts_at(&self, account: &Account, now_ms: f64) -> [f64; PARTS] {
        let mut account = account.clone();
        account.turn(now_ms, &self.clocks_at(now_ms), Doing::Ended);
        account.parts()
    }

    pub(crate) fn turn(&mut self, account: &mut Account, number: u32, now_ms: f64, next: Doing) {
        let clocks = self.clocks_at(now_ms);
        account.turn(now_ms, &clocks, next);
        self.note(number, now_ms, next);
    }

    pub(crate) fn note(&mut self, number: u32, at_ms: f64, doing: Doing) {
        let Some(transitions) = &mut self.transitions else { return };
        if transitions.len() < MOST_TRANSITIONS {
            transitions.push(Transition { number, at_ms, doing });
        } else {
            self.lost_transitions += 1;
        }
    }

    /// A running request that was last served in step `served` is served in step `step`, not the next one.
    pub(crate) fn stalled(&mut self, account: &mut Account, number: u32, served: u64, step: u64) {
        let first = (served + 1).max(step.saturating_sub(KEPT_STEPS as u64 - 1));
        if let (Some(from), Some(to)) = (self.steps.get(slot(first)), self.steps.get(slot(step))) {
            let (from, to, doing) = (*from, *to, account.doing());
            account.stalled(&from, &to);
            self.note(number, from.at_ms, Doing::Stalled);
            self.note(number, to.at_ms, doing);
        }
    }

    /// A waiting request that was put off in the step that is over, which had this cause and lasted `ms`.
    pub(crate) fn was_put_off(account: &mut Account, cause: Part, ms: f64) {
        account.put_off(cause, ms);
    }

    pub(crate) fn overtaken(&mut self, account: &mut Account, number: u32, overtaking: Overtaking) {
        account.overtake(overtaking);
        if account.doing() == Doing::Waiting {
            self.turn(account, number, overtaking.at_ms, Doing::Overtaken);
        }
    }

    pub(crate) fn admitted(&mut self, admission: Admission) {
        self.admitted_in_step += 1;
        if self.admissions.len() == KEPT_ADMISSIONS {
            self.admissions.pop_front();
        }
        self.admissions.push_back(admission);
    }

    /// Set the rule of a request that was admitted in this step.
    pub(crate) fn set_rule(&mut self, number: u32, rule: Rule) {
        let mut latest = self.admissions.iter_mut().rev().take(self.admitted_in_step as usize);
        if let Some(admission) = latest.find(|admission| admission.number == number) {
            admission.rule = rule;
        }
    }

    /// The latest admissions, oldest first.
    pub(crate) fn admissions(&self) -> impl Iterator<Item = &Admission> {
        self.admissions.iter()
    }

    /// Keep transitions from now on, or no longer.
    pub(crate) fn keep_transitions(&mut self, keep: bool) {
        self.transitions = keep.then(Vec::new);
        self.lost_transitions = 0;
    }

    /// Pass the kept transitions to `each`; returns the number of lost ones so far.
    pub(crate) fn take_transitions(&mut self, each: impl FnMut(Transition)) -> u64 {
        if let Some(transitions) = &mut self.transitions {
            transitions.drain(..).for_each(each);
        }
        self.lost_transitions
    }
}

fn add(clocks: &mut Clocks, causes: &StepCauses, ms: f64, probes_ms: f64) {
    let cause = WAITS.iter().position(|part| *part == causes.waiting).unwrap_or(WAITS.len() - 1);
    clocks.waits_ms[cause] += ms;
    clocks.probes_ms += probes_ms;
    if causes.limits_running {
        clocks.stalls_ms += ms;
    }
}

fn slot(step: u64) -> usize {
    (step % KEPT_STEPS as u64) as usize
}

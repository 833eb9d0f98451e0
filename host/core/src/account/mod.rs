//! Where the time of each request goes: the parts of its latency, and who overtook it.
//!
//! A request costs nothing here in a step that serves it like the step before. The engine's clocks of waiting advance once
//! a step; a request reads them when its wait begins and when it ends.

mod ledger;

use serde::{Deserialize, Serialize};

pub(crate) use self::ledger::Ledger;
pub use self::ledger::{Admission, Rule, Transition};
use self::ledger::{Clocks, Entry};

/// A part of a request's latency. The parts of a request add up to its latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// From its arrival to the engine's next step: the front end, and the step under way.
    Arrival,
    /// It waited, and no seat was free.
    Seat,
    /// It waited, and the free KV blocks did not suffice.
    Blocks,
    /// Other requests used up the engine's own token budget.
    Budget,
    /// The policy put others before it, or limited its tokens.
    Policy,
    /// The engine held it back for a reason of its own: a grammar, an adapter, a KV transfer.
    Engine,
    /// Probes of other requests made its steps longer.
    Probes,
    /// The engine computed its prompt.
    Prefill,
    /// The engine computed again what a preemption had lost.
    Recompute,
    /// It generated thinking.
    Think,
    /// It generated its answer.
    Output,
}

/// Number of parts.
pub(crate) const PARTS: usize = Part::ALL.len();

impl Part {
    /// Every part, in the order of a request's life.
    pub const ALL: [Self; 11] = [
        Self::Arrival,
        Self::Seat,
        Self::Blocks,
        Self::Budget,
        Self::Policy,
        Self::Engine,
        Self::Probes,
        Self::Prefill,
        Self::Recompute,
        Self::Think,
        Self::Output,
    ];

    /// Its name.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Arrival => "arrival",
            Self::Seat => "seat",
            Self::Blocks => "blocks",
            Self::Budget => "budget",
            Self::Policy => "policy",
            Self::Engine => "engine",
            Self::Probes => "probes",
            Self::Prefill => "prefill",
            Self::Recompute => "recompute",
            Self::Think => "think",
            Self::Output => "output",
        }
    }
}

/// What a request does, as its account knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// It has arrived, and no step has begun since.
    Arriving,
    /// It waits; each step has its own cause.
    Waiting,
    /// It waits because a request that arrived later was admitted before it.
    Overtaken,
    /// The engine computes it; the part says what.
    Running(Part),
    /// It runs, and steps give it no tokens; only in a [`Transition`].
    Stalled,
    /// It has ended.
    Ended,
}

/// A request that was admitted before another that had arrived earlier.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Overtaking {
    /// Number of the request that went first.
    pub by: u32,
    /// Time, milliseconds on the host's clock.
    pub at_ms: f64,
    /// The rule.
    pub rule: Rule,
    /// Key of the request that was overtaken, in that step; `None` where it is not a number.
    pub own_key: Option<f32>,
    /// Key of the request that went first.
    pub other_key: Option<f32>,
}

/// Overtakings that are kept of one request: the first ones.
const KEPT_OVERTAKINGS: usize = 8;

/// The account of one request: its time by part.
#[derive(Clone, Debug)]
pub struct Account {
    /// Time up to which the parts are complete.
    at_ms: f64,
    doing: Doing,
    /// The engine's clocks at that time.
    since: Clocks,
    parts: [f64; PARTS],
    overtakings: Vec<Overtaking>,
    overtaken: u32,
    passed_over: u32,
    rescues: u32,
}

impl Account {
    pub(crate) fn new(arrival_ms: f64) -> Self {
        Self {
            at_ms: arrival_ms,
            doing: Doing::Arriving,
            since: Clocks::default(),
            parts: [0.0; PARTS],
            overtakings: Vec::new(),
            overtaken: 0,
            passed_over: 0,
            rescues: 0,
        }
    }

    /// What the request does.
    #[must_use]
    pub fn doing(&self) -> Doing {
        self.doing
    }

    /// The first requests that overtook it, at most eight.
    #[must_use]
    pub fn overtakings(&self) -> &[Overtaking] {
        &self.overtakings
    }

    /// Steps in which requests that arrived later were admitted before it.
    #[must_use]
    pub fn overtaken(&self) -> u32 {
        self.overtaken
    }

    /// Of these, the steps in which the service level of the others could still be kept, and its own could not.
    #[must_use]
    pub fn passed_over(&self) -> u32 {
        self.passed_over
    }

    /// Steps in which the starvation bound gave it tokens.
    #[must_use]
    pub fn rescues(&self) -> u32 {
        self.rescues
    }

    pub(crate) fn rescued(&mut self) {
        self.rescues = self.rescues.saturating_add(1);
    }

    /// Attribute the time until `now_ms`, when the engine's clocks stand at `clocks`, and do something else from then on.
    fn turn(&mut self, now_ms: f64, clocks: &Clocks, next: Doing) {
        let ms = (now_ms - self.at_ms).max(0.0);
        let probes_ms = (clocks.probes_ms - self.since.probes_ms).clamp(0.0, ms);
        match self.doing {
            Doing::Arriving => self.parts[Part::Arrival as usize] += ms,
            Doing::Waiting => {
                let mut left = ms;
                for (part, (now, since)) in WAITS.iter().zip(clocks.waits_ms.iter().zip(self.since.waits_ms)) {
                    let waited = (now - since).clamp(0.0, left);
                    self.parts[*part as usize] += waited;
                    left -= waited;
                }
                let probes_ms = probes_ms.min(left);
                self.parts[Part::Probes as usize] += probes_ms;
                // Between two steps that belong to none: the engine was idle.
                self.parts[Part::Engine as usize] += left - probes_ms;
            }
            Doing::Overtaken => {
                self.parts[Part::Policy as usize] += ms - probes_ms;
                self.parts[Part::Probes as usize] += probes_ms;
            }
            Doing::Running(part) => {
                self.parts[part as usize] += ms - probes_ms;
                self.parts[Part::Probes as usize] += probes_ms;
            }
            Doing::Stalled | Doing::Ended => {}
        }
        self.at_ms = self.at_ms.max(now_ms);
        self.since = *clocks;
        self.doing = next;
    }

    /// A running request got no tokens from the step that began at `from` to the one that begins at `to`.
    fn stalled(&mut self, from: &Entry, to: &Entry) {
        let Doing::Running(part) = self.doing else { return };
        if from.at_ms > self.at_ms {
            self.turn(from.at_ms, &from.clocks, Doing::Running(part));
        }
        let ms = (to.at_ms - self.at_ms).max(0.0);
        let probes_ms = (to.clocks.probes_ms - self.since.probes_ms).clamp(0.0, ms);
        let policy_ms = (to.clocks.stalls_ms - self.since.stalls_ms).clamp(0.0, ms - probes_ms);
        self.parts[Part::Probes as usize] += probes_ms;
        self.parts[Part::Policy as usize] += policy_ms;
        self.parts[Part::Budget as usize] += ms - probes_ms - policy_ms;
        self.at_ms = to.at_ms;
        self.since = to.clocks;
    }

    /// The time of a step was the policy's doing, not that of the step's own cause.
    fn put_off(&mut self, cause: Part, ms: f64) {
        if self.doing == Doing::Waiting {
            // The step's cause is added when the wait ends.
            self.parts[cause as usize] -= ms;
            self.parts[Part::Policy as usize] += ms;
        }
    }

    fn overtake(&mut self, overtaking: Overtaking) {
        self.overtaken = self.overtaken.saturating_add(1);
        self.passed_over = self.passed_over.saturating_add(u32::from(overtaking.rule == Rule::Level));
        if self.overtakings.len() < KEPT_OVERTAKINGS {
            self.overtakings.push(overtaking);
        }
    }

    /// Milliseconds by part.
    pub(crate) fn parts(&self) -> [f64; PARTS] {
        self.parts
    }
}

/// The causes of waiting that steps have, in the order of the clocks.
const WAITS: [Part; 5] = [Part::Seat, Part::Blocks, Part::Budget, Part::Policy, Part::Engine];

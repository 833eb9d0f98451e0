use meridian_core::budget::{Eat, Thresholds};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use super::{Thought, ThoughtPoint, offline};

/// Stands for "no guard" in a configuration: no entropy comes near it.
pub(super) const NO_GUARD_BITS: f64 = 1e9;
/// The only known setting of the paper is 512 tokens, longer than any thought of the bundled model.
pub(super) const RPDI_WINDOW: u32 = 16;

/// The published sweep is 0.05 to 0.3, for thoughts of hundreds of steps. The bundled model's have about 20, so that a mean as slow
/// as that would not have moved by their end; 1 is left to [`ExitFamily::Level`], which is what EAT becomes then.
const ALPHAS: [f64; 7] = [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9];
/// Variances are powers of two with these exponents, bits squared.
const DELTA_EXPONENTS: [i32; 10] = [-16, -14, -12, -10, -8, -6, -4, -2, 0, 2];
/// Bits.
const LEVELS: [f64; 7] = [0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0];
const MIN_PROBES: [u32; 6] = [1, 2, 4, 8, 12, 16];
const ANSWERS: [u32; 8] = [2, 3, 4, 5, 6, 8, 10, 12];
/// Confidences in thousandths; the paper of DEER has 950.
const CONFIDENCES: [u32; 10] = [500, 600, 700, 800, 900, 950, 980, 990, 995, 999];
/// The threshold of CoDE-Stop begins lower than it ends, in thousandths; the authors' code has 50.
const RISES: [u32; 3] = [0, 50, 200];
/// Probes of that rise; the authors' code has 2.
const RAMPS: [u32; 2] = [2, 8];
/// Degeneration scores; the authors' code has 2, and the last is never reached.
const DEGENERATIONS: [f64; 6] = [2.0, 4.0, 8.0, 16.0, 32.0, 1e9];
const RPDI_THRESHOLDS: [f64; 10] = [1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0];

/// When to end a thought early.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ExitRule {
    /// EAT: the moving variance of the probes' entropies is below `delta`, and their moving mean not above `max_bits`.
    Eat {
        /// Weight of the latest probe.
        alpha: f64,
        /// Bits squared.
        delta: f64,
        /// Probes that pass before the first that may end thinking.
        min_probes: u32,
        /// The guard on the mean, which is not in the paper.
        max_bits: f64,
    },
    /// So many probes in a row gave the same answer.
    Patience {
        /// Equal answers.
        answers: u32,
    },
    /// The path deviation index is above `threshold` at a boundary. It needs no probe.
    Rpdi {
        /// Ratio of mean entropies.
        threshold: f64,
        /// Tokens in the window of the index.
        window: u32,
    },
    /// DEER: the confidence of a probe is above `confidence`.
    Deer {
        /// Probability.
        confidence: f64,
    },
    /// CoDE-Stop: confident enough for the number of probes, or the confidence keeps falling.
    CodeStop {
        /// Probability that the first probe must exceed.
        low: f64,
        /// Probability that later probes must exceed.
        high: f64,
        /// Probes from the one to the other.
        ramp: u32,
        /// Score of the drops above which thinking ends.
        degeneration: f64,
    },
}

impl ExitRule {
    /// EAT without the guard on the mean.
    #[must_use]
    pub fn published_eat(alpha: f64, delta: f64, min_probes: u32) -> Self {
        Self::Eat { alpha, delta, min_probes, max_bits: NO_GUARD_BITS }
    }

    /// The options of its policy in JSON: the fields of the setting, by the policy's own names.
    fn options(&self) -> String {
        serde_json::to_string(self).expect("numbers")
    }

    /// Where the rule ends a thought; `None` where the thought ends by itself.
    #[must_use]
    pub fn exit<'a>(&self, thought: &'a Thought) -> Option<&'a ThoughtPoint> {
        match *self {
            Self::Eat { alpha, delta, min_probes, max_bits } => {
                let thresholds = Thresholds {
                    ema_alpha: alpha,
                    eat_variance_threshold: delta,
                    eat_max_bits: max_bits,
                    min_probes,
                    ..Thresholds::default()
                };
                let mut eat = Eat::default();
                let mut fires = |bits| eat.observe(bits, alpha) && eat.fires(&thresholds);
                thought.probes().find(|(_, bits)| fires(*bits)).map(|(point, _)| point)
            }
            Self::Patience { answers } => {
                let (mut latest, mut same) = (None, 0_u32);
                let mut fires = |answer: Option<u32>| {
                    let before = if answer == latest { same } else { 0 };
                    same = if answer.is_some() { before.saturating_add(1) } else { 0 };
                    latest = answer;
                    same >= answers
                };
                thought.probes().find(|(point, _)| fires(point.answer)).map(|(point, _)| point)
            }
            Self::Rpdi { threshold, .. } => {
                thought.points().iter().find(|point| point.rpdi.is_some_and(|index| index > threshold))
            }
            Self::Deer { .. } => offline::exit("deer", &self.options(), thought),
            Self::CodeStop { .. } => offline::exit("code-stop", &self.options(), thought),
        }
    }
}

/// Settings of one rule to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitFamily {
    /// EAT with a guard on the mean.
    Eat,
    /// EAT without the guard.
    EatPublished,
    /// The guard alone: with `alpha` 1 the mean is the latest probe, and the variance is 0.
    Level,
    /// The path deviation index.
    Rpdi,
    /// Equal answers.
    Patience,
    /// The confidence of one probe.
    Deer,
    /// The confidences of all probes.
    CodeStop,
}

impl ExitFamily {
    /// In the order of tables.
    pub const ALL: [Self; 7] =
        [Self::Eat, Self::EatPublished, Self::Level, Self::Rpdi, Self::Patience, Self::Deer, Self::CodeStop];

    /// Its name in files.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::Eat => "eat",
            Self::EatPublished => "eat-published",
            Self::Level => "level",
            Self::Rpdi => "rpdi",
            Self::Patience => "patience",
            Self::Deer => "deer",
            Self::CodeStop => "code-stop",
        }
    }

    /// Its name in tables.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Eat => "EAT with a guard on the mean",
            Self::EatPublished => "EAT as published",
            Self::Level => "level of one probe",
            Self::Rpdi => "RPDI",
            Self::Patience => "patience",
            Self::Deer => "DEER",
            Self::CodeStop => "CoDE-Stop",
        }
    }

    /// The settings.
    #[must_use]
    pub fn rules(self) -> Vec<ExitRule> {
        match self {
            Self::Eat => {
                let guarded = |(alpha, delta, min_probes)| {
                    LEVELS.map(move |max_bits| ExitRule::Eat { alpha, delta, min_probes, max_bits })
                };
                eat_grid().flat_map(guarded).collect()
            }
            Self::EatPublished => {
                eat_grid().map(|(alpha, delta, min_probes)| ExitRule::published_eat(alpha, delta, min_probes)).collect()
            }
            Self::Level => {
                let level = |min_probes, max_bits| ExitRule::Eat { alpha: 1.0, delta: 1.0, min_probes, max_bits };
                MIN_PROBES.into_iter().flat_map(|probes| LEVELS.map(|bits| level(probes, bits))).collect()
            }
            Self::Rpdi => RPDI_THRESHOLDS.map(|threshold| ExitRule::Rpdi { threshold, window: RPDI_WINDOW }).to_vec(),
            Self::Patience => ANSWERS.map(|answers| ExitRule::Patience { answers }).to_vec(),
            Self::Deer => CONFIDENCES.map(|of| ExitRule::Deer { confidence: thousandths(of) }).to_vec(),
            Self::CodeStop => code_stop_grid().collect(),
        }
    }
}

/// Weight, variance and probes that pass, of EAT with and without the guard.
fn eat_grid() -> impl Iterator<Item = (f64, f64, u32)> {
    let deltas = DELTA_EXPONENTS.map(|exponent| 2_f64.powi(exponent));
    let tail = move |alpha| deltas.into_iter().flat_map(move |delta| MIN_PROBES.map(|probes| (alpha, delta, probes)));
    ALPHAS.into_iter().flat_map(tail)
}

fn thousandths(count: u32) -> f64 {
    f64::from(count) / 1000.0
}

fn code_stop_grid() -> impl Iterator<Item = ExitRule> {
    CONFIDENCES.into_iter().flat_map(|high| {
        RISES.into_iter().flat_map(move |rise| {
            RAMPS.into_iter().flat_map(move |ramp| {
                let (low, high) = (thousandths(high - rise), thousandths(high));
                DEGENERATIONS.map(|degeneration| ExitRule::CodeStop { low, high, ramp, degeneration })
            })
        })
    })
}

/// Published EAT with the constants of its authors' example, and with those of a second implementation; DEER and CoDE-Stop with
/// those of their authors. All were made for longer thoughts. RPDI's window of 512 tokens is longer than any thought here.
pub(super) fn literature() -> [(ExitFamily, ExitRule); 4] {
    [
        (ExitFamily::EatPublished, ExitRule::published_eat(0.1, 2_f64.powi(-10), 4)),
        (ExitFamily::EatPublished, ExitRule::published_eat(0.2, 1e-4, 4)),
        (ExitFamily::Deer, ExitRule::Deer { confidence: 0.95 }),
        (ExitFamily::CodeStop, ExitRule::CodeStop { low: 0.9, high: 0.95, ramp: 2, degeneration: 2.0 }),
    ]
}

/// What a rule makes of recorded thoughts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitOutcome {
    thoughts: u64,
    fired: u64,
    tokens: u64,
    right: u64,
}

impl ExitOutcome {
    /// Thoughts that it was evaluated on.
    #[must_use]
    pub fn thoughts(&self) -> u64 {
        self.thoughts
    }

    /// Thoughts that the rule ended.
    #[must_use]
    pub fn fired(&self) -> u64 {
        self.fired
    }

    /// Think tokens of a thought; NaN of no thoughts.
    #[must_use]
    pub fn mean_tokens(&self) -> f64 {
        self.tokens as f64 / self.thoughts as f64
    }

    /// Share of right answers; NaN of no thoughts.
    #[must_use]
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.thoughts as f64
    }
}

impl Serialize for ExitOutcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_struct("ExitOutcome", 4)?;
        out.serialize_field("tokens", &self.mean_tokens())?;
        out.serialize_field("accuracy", &self.accuracy())?;
        out.serialize_field("thoughts", &self.thoughts)?;
        out.serialize_field("fired", &self.fired)?;
        out.end()
    }
}

/// Each thought ends where the rule holds first, else at its own end.
#[must_use]
pub fn evaluate(rule: &ExitRule, thoughts: &[Thought]) -> ExitOutcome {
    outcome(thoughts, |thought| rule.exit(thought))
}

/// Each thought ends at its own end.
#[must_use]
pub fn no_limit(thoughts: &[Thought]) -> ExitOutcome {
    outcome(thoughts, |_| None)
}

fn outcome(thoughts: &[Thought], exit: impl Fn(&Thought) -> Option<&ThoughtPoint>) -> ExitOutcome {
    let mut out = ExitOutcome::default();
    for thought in thoughts {
        let at = exit(thought);
        out.thoughts += 1;
        out.fired += u64::from(at.is_some());
        out.tokens += u64::from(at.map_or(thought.end_tokens(), |point| point.think_tokens));
        out.right += u64::from(at.map_or(thought.end_right(), |point| thought.is_right_at(point)));
    }
    out
}

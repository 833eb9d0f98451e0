//! How far an experiment is: everything that a controller needs to go on after it was killed.

use meridian_engine::control::Version;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use serde::{Deserialize, Serialize};

use super::Settings;
use crate::stats::{Pair, Sample};

/// The version of the format of a state file.
pub const EXPERIMENT_FORMAT: &str = "meridian-experiment/1";

/// One of the two policies.
///
/// ```
/// use meridian_fleet::experiment::Side;
///
/// assert_eq!(Side::Old.other(), Side::New);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The policy that decided before the experiment, and that decides after it.
    Old,
    /// The policy that is tried.
    New,
}

impl Side {
    /// The other one.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Old => Self::New,
            Self::New => Self::Old,
        }
    }
}

/// Whether an experiment goes on.
///
/// ```
/// use meridian_fleet::experiment::Stage;
///
/// let text = serde_json::to_string(&Stage::Ended { why: "stopped".into(), complete: false }).unwrap();
/// assert_eq!(text, r#"{"stage":"ended","why":"stopped","complete":false}"#);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "stage", rename_all = "lowercase")]
pub enum Stage {
    /// Policies take turns.
    Running,
    /// It is over.
    Ended {
        /// The reason.
        why: String,
        /// Every pair was measured.
        complete: bool,
    },
}

/// A pair of intervals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairRecord {
    /// The policy that decided first.
    pub first: Side,
    /// The measured part of the interval of the old policy.
    pub old: Option<Sample>,
    /// The measured part of the interval of the new policy.
    pub new: Option<Sample>,
    /// Why the pair does not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub void: Option<String>,
}

impl PairRecord {
    /// Both intervals; `None` of a pair that does not count.
    #[must_use]
    pub fn pair(&self) -> Option<Pair> {
        match (&self.old, &self.new, &self.void) {
            (Some(old), Some(new), None) => Some(Pair { old: old.clone(), new: new.clone() }),
            _ => None,
        }
    }

    /// The measured part of a side's interval.
    pub(super) fn of(&mut self, side: Side) -> &mut Option<Sample> {
        match side {
            Side::Old => &mut self.old,
            Side::New => &mut self.new,
        }
    }
}

/// The state of an experiment.
///
/// ```
/// use meridian_fleet::experiment::{Settings, Side, State};
///
/// let state = State::new(Settings::default(), "127.0.0.1:9464", Default::default());
/// let order: Vec<Side> = (0..4).map(|pair| state.first_of(pair)).collect();
/// // Every two pairs, each policy is first once.
/// assert!(order[0] != order[1] && order[2] != order[3]);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// [`EXPERIMENT_FORMAT`].
    pub format: String,
    /// What it does.
    pub settings: Settings,
    /// The engine, by its address.
    pub engine: String,
    /// The policy that decided before.
    pub old: Version,
    /// The policy that is tried, once the engine has loaded it.
    pub new: Option<Version>,
    /// A controller has begun: a shadow of the slot may be its own.
    pub begun: bool,
    /// Whether it goes on.
    #[serde(flatten)]
    pub stage: Stage,
    /// Whether the old policy decides again, or another that somebody put there meanwhile.
    pub restored: bool,
    /// Every pair so far; the last one may be under way.
    pub pairs: Vec<PairRecord>,
}

impl State {
    /// An experiment that has not begun.
    #[must_use]
    pub fn new(settings: Settings, engine: &str, old: Version) -> Self {
        Self {
            format: EXPERIMENT_FORMAT.into(),
            settings,
            engine: engine.to_owned(),
            old,
            new: None,
            begun: false,
            stage: Stage::Running,
            restored: true,
            pairs: Vec::new(),
        }
    }

    /// The policy that decides first in a pair. Of every two pairs, each policy is first in one.
    #[must_use]
    pub fn first_of(&self, pair: usize) -> Side {
        let mut random = Pcg64::seed_from_u64(self.settings.seed ^ ((pair as u64 / 2) << 20));
        let is_old = random.random::<bool>();
        if is_old == pair.is_multiple_of(2) { Side::Old } else { Side::New }
    }

    /// The pairs that count.
    #[must_use]
    pub fn measured(&self) -> Vec<Pair> {
        self.pairs.iter().filter_map(PairRecord::pair).collect()
    }

    /// Pairs that do not count, and why.
    pub fn void(&self) -> impl Iterator<Item = &str> {
        self.pairs.iter().filter_map(|pair| pair.void.as_deref())
    }

    /// The version of a side.
    pub(super) fn version(&self, side: Side) -> Option<&Version> {
        match side {
            Side::Old => Some(&self.old),
            Side::New => self.new.as_ref(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_balanced_and_the_seed_draws_it() {
        let order = |seed| -> Vec<Side> {
            let state = State::new(Settings { seed, ..Settings::default() }, "a", Version::default());
            (0..200).map(|pair| state.first_of(pair)).collect()
        };
        let one = order(1);
        assert!(one.chunks(2).all(|two| two[0] != two[1]));
        let old_first = one.chunks(2).filter(|two| two[0] == Side::Old).count();
        assert!((30..=70).contains(&old_first), "{old_first} of 100");
        assert_eq!(one, order(1));
        assert_ne!(one, order(2));
    }

    #[test]
    fn a_state_is_read_as_it_was_written() {
        let mut state = State::new(Settings::default(), "a", Version { name: "old".into(), ..Version::default() });
        let sample = Sample { seconds: 90.0, ..Sample::default() };
        let old = Some(sample.clone());
        state.pairs.push(PairRecord { first: Side::New, old, new: Some(sample), void: None });
        state.pairs.push(PairRecord { first: Side::Old, old: None, new: None, void: Some("why".into()) });
        state.stage = Stage::Ended { why: "stopped".into(), complete: false };
        let text = serde_json::to_string(&state).expect("plain data");
        assert_eq!(serde_json::from_str::<State>(&text).expect("its own text"), state);
        assert_eq!((state.measured().len(), state.void().collect::<Vec<_>>()), (1, vec!["why"]));
    }
}

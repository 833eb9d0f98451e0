//! The controller of an experiment: switches policies, takes measurements, and puts the old policy back.

use meridian_engine::control::{LatencyReport, Mode, SlotStatus, SwapReport, Version};
use thiserror::Error;

use super::report::intolerable;
use super::{PairRecord, SettingsError, Side, Stage, State, StoreError};
use crate::stats::Sample;
use crate::{Member, MemberError, NamedPolicy};

/// Longest time between two looks at the engine, seconds.
const LOOK_S: f64 = 5.0;
/// How often a silent engine is asked, and how long the controller waits in between, seconds.
const TRIES: u32 = 12;
const PAUSE_S: f64 = 5.0;
/// The reason of a pair that another controller finds unfinished.
const INTERRUPTED: &str = "the controller was interrupted";
/// Pairs that may fail, for each that is wanted.
const MOST_VOID: usize = 1;

/// Both policies, as they can be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policies {
    /// The policy that decided before.
    pub old: NamedPolicy,
    /// The policy that is tried.
    pub new: NamedPolicy,
}

impl Policies {
    fn of(&self, side: Side) -> &NamedPolicy {
        match side {
            Side::Old => &self.old,
            Side::New => &self.new,
        }
    }
}

/// What is to stop. The old policy is put back first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The experiment: it is over.
    Experiment,
    /// The process that controls it: another one may go on with it.
    Controller,
}

/// What an experiment needs besides its engine. All methods are called by the controller's thread; `wait` may take as long
/// as it is asked to.
pub trait Surroundings {
    /// Let time pass, seconds. Returns early when something is to stop.
    fn wait(&mut self, seconds: f64);

    /// Keep the state, so that it survives the end of this process.
    ///
    /// # Errors
    /// See [`StoreError`]; the experiment ends then.
    fn save(&mut self, state: &State) -> Result<(), StoreError>;

    /// What is to stop, if anything.
    fn stop_requested(&mut self) -> Option<Stop>;

    /// Told of each step: the state, the policy that decides, and what happens.
    fn progress(&mut self, state: &State, side: Side, what: &str) {
        let _ = (state, side, what);
    }
}

/// An experiment that could not begin, or whose end needs an operator.
#[derive(Debug, Error)]
pub enum ExperimentError {
    /// A setting cannot be used.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The state could not be kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The engine refused, or does not answer. Nothing has changed.
    #[error(transparent)]
    Member(#[from] MemberError),
    /// The engine is not in a state for an experiment; one line.
    #[error("{0}")]
    NotNow(String),
    /// The old policy could not be put back; one line.
    #[error(
        "{engine}: the old policy {old} could not be put back: {why}; run `meridian experiment stop` once it answers"
    )]
    NotRestored {
        /// The engine.
        engine: String,
        /// The policy.
        old: String,
        /// The reason.
        why: String,
    },
}

/// Why an interval does not count.
enum Trouble {
    /// The pair is measured again.
    Void(String),
    /// The experiment ends.
    End(String),
    /// Somebody else has put a policy into the slot: the experiment ends, and leaves that policy.
    Taken(String),
    /// Somebody wants it to stop.
    Stopped(Stop),
    /// The state cannot be kept.
    Store(StoreError),
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Run an experiment to its end, from its begin or from where an earlier controller left it. In the end, the old policy
/// decides, whatever happened in between; only a policy that somebody else put into the slot stays. After
/// [`Stop::Controller`], the experiment is still running in its state.
///
/// # Errors
/// [`ExperimentError::NotRestored`] is the one that needs an operator.
pub fn run(
    state: &mut State,
    member: &dyn Member,
    policies: &Policies,
    around: &mut dyn Surroundings,
) -> Result<(), ExperimentError> {
    state.settings.checked()?;
    if state.stage == Stage::Running {
        if let Some(last) = state.pairs.last_mut()
            && last.pair().is_none()
        {
            last.void.get_or_insert_with(|| INTERRUPTED.into());
        }
        if state.new.is_none() {
            prepare(state, member, policies, around)?;
        }
        let mut controller = Controller { member, policies, around: &mut *around };
        let stage = match controller.take_turns(state) {
            Ok(()) => Stage::Ended { why: "every pair was measured".into(), complete: true },
            Err(Trouble::Void(why) | Trouble::End(why)) => Stage::Ended { why, complete: false },
            Err(Trouble::Stopped(Stop::Experiment)) => Stage::Ended { why: "stopped".into(), complete: false },
            Err(Trouble::Stopped(Stop::Controller)) => Stage::Running,
            Err(Trouble::Taken(why)) => {
                state.restored = true;
                Stage::Ended { why, complete: false }
            }
            Err(Trouble::Store(error)) => {
                // Without a state, nobody would put it back later.
                let _ = restore(state, member, policies, around);
                return Err(error.into());
            }
        };
        state.stage = stage;
        around.save(state)?;
    }
    restore(state, member, policies, around)
}

/// Load the new policy as a shadow, which changes nothing: to find out whether it can be loaded, and which version it is.
fn prepare(
    state: &mut State,
    member: &dyn Member,
    policies: &Policies,
    around: &mut dyn Surroundings,
) -> Result<(), ExperimentError> {
    let slot = state.settings.slot;
    let status = slot_of(member, state)?;
    if let Some((version, _)) = &status.quarantine {
        return Err(ExperimentError::NotNow(format!(
            "{}: {} is in quarantine, expected an engine in order",
            slot.label(),
            version.name
        )));
    }
    if let (Some(shadow), false) = (&status.shadow, state.begun) {
        let name = &shadow.version.name;
        return Err(ExperimentError::NotNow(format!(
            "{}: {name} is its shadow, expected none: stop it with `meridian ctl stop-shadow {}`",
            slot.label(),
            slot.label()
        )));
    }
    state.old = status.active;
    state.begun = true;
    around.save(state)?;
    member.put(slot, &policies.new, Mode::Shadow)?;
    let status = slot_of(member, state);
    let stopped = member.stop_shadow(slot);
    let shadow = status?.shadow;
    stopped?;
    let Some(shadow) = shadow else {
        return Err(ExperimentError::NotNow(format!("{}: the new policy did not become its shadow", slot.label())));
    };
    if is_same(&shadow.version, &state.old) {
        let name = &state.old.name;
        return Err(ExperimentError::NotNow(format!(
            "{}: {name} decides already, with the same options",
            slot.label()
        )));
    }
    state.new = Some(shadow.version);
    around.save(state)?;
    Ok(())
}

fn slot_of(member: &dyn Member, state: &State) -> Result<SlotStatus, MemberError> {
    let slot = state.settings.slot;
    let found = member.status()?.slots.into_iter().find(|of| of.slot == slot);
    found.ok_or_else(|| MemberError::Refused(format!("{}: has no slot {}", member.name(), slot.label())))
}

/// Whether two versions are the same policy with the same options, wherever they came from.
fn is_same(one: &Version, other: &Version) -> bool {
    let options =
        |version: &Version| if version.options.is_empty() { "{}".to_owned() } else { version.options.clone() };
    one.name == other.name
        && one.version == other.version
        && one.sha256 == other.sha256
        && options(one) == options(other)
}

/// Put the old policy back, if the new one decides or is in quarantine.
///
/// # Errors
/// [`ExperimentError::NotRestored`] after a minute of tries, or at once when something is to stop and the engine does not
/// answer; a later call may succeed.
pub fn restore(
    state: &mut State,
    member: &dyn Member,
    policies: &Policies,
    around: &mut dyn Surroundings,
) -> Result<(), ExperimentError> {
    if state.restored {
        return Ok(());
    }
    let slot = state.settings.slot;
    let mut why = String::new();
    for attempt in 0..TRIES {
        if attempt > 0 {
            around.wait(PAUSE_S);
        }
        let status = match slot_of(member, state) {
            Ok(status) => status,
            Err(error) => {
                why = error.to_string();
                if around.stop_requested().is_some() {
                    break;
                }
                continue;
            }
        };
        let is_new = |version: &Version| state.new.as_ref().is_some_and(|new| is_same(new, version));
        let in_quarantine = status.quarantine.as_ref().is_some_and(|(version, _)| is_new(version));
        if !is_new(&status.active) && !in_quarantine {
            // The old one, or somebody else's.
            state.restored = true;
            around.save(state)?;
            return Ok(());
        }
        around.progress(state, Side::Old, "puts the old policy back");
        // A version that steps back into quarantine would come again: only a new swap forgets it.
        let is_previous =
            !in_quarantine && status.previous.as_ref().is_some_and(|previous| is_same(previous, &state.old));
        let done = if is_previous { member.rollback(slot) } else { member.put(slot, &policies.old, Mode::Active) };
        if let Err(error) = done {
            why = error.to_string();
        }
        // The next look at the status says whether it worked.
    }
    Err(ExperimentError::NotRestored { engine: member.name().to_owned(), old: state.old.name.clone(), why })
}

struct Controller<'a> {
    member: &'a dyn Member,
    policies: &'a Policies,
    around: &'a mut dyn Surroundings,
}

impl Controller<'_> {
    /// Every pair.
    fn take_turns(&mut self, state: &mut State) -> Result<(), Trouble> {
        let wanted = state.settings.pairs as usize;
        while state.measured().len() < wanted {
            if let Some(stop) = self.around.stop_requested() {
                return Err(Trouble::Stopped(stop));
            }
            if state.pairs.len() >= wanted * (1 + MOST_VOID) {
                return Err(Trouble::End(format!(
                    "{} pairs of {} do not count",
                    state.void().count(),
                    state.pairs.len()
                )));
            }
            let first = state.first_of(state.pairs.len());
            state.pairs.push(PairRecord { first, old: None, new: None, void: None });
            // From here on, whoever finds the state must look.
            state.restored = false;
            self.around.save(state)?;
            let measured = self.pair(state, first);
            let void = match &measured {
                Err(Trouble::Void(why) | Trouble::End(why) | Trouble::Taken(why)) => Some(why.as_str()),
                Err(Trouble::Stopped(Stop::Experiment)) => Some("stopped"),
                Err(Trouble::Stopped(Stop::Controller)) => Some(INTERRUPTED),
                Err(Trouble::Store(_)) | Ok(()) => None,
            };
            if let (Some(why), Some(last)) = (void, state.pairs.last_mut()) {
                last.void = Some(why.to_owned());
            }
            self.around.save(state)?;
            match measured {
                Ok(()) | Err(Trouble::Void(_)) => {}
                Err(trouble) => return Err(trouble),
            }
            if let Some(why) = intolerable(&state.settings, &state.pairs) {
                return Err(Trouble::End(why));
            }
        }
        Ok(())
    }

    fn pair(&mut self, state: &mut State, first: Side) -> Result<(), Trouble> {
        for side in [first, first.other()] {
            let sample = self.interval(state, side)?;
            if let Some(last) = state.pairs.last_mut() {
                *last.of(side) = Some(sample);
            }
            self.around.save(state)?;
        }
        Ok(())
    }

    /// One interval: switch, warm up, measure.
    fn interval(&mut self, state: &State, side: Side) -> Result<Sample, Trouble> {
        // Before the switch: an engine that restarts after it has another policy again.
        let run = self.patiently(|member| member.latency())?.run;
        self.switch(state, side)?;
        let faults = self.patiently(|member| slot_of(member, state))?;
        let watch = Watch { side, run, faults: fault_count(&faults) };
        self.around.progress(state, side, "warms up");
        self.pass(state, &watch, state.settings.warm_up_s)?;
        let before = self.look(state, &watch)?;
        self.around.progress(state, side, "is measured");
        self.pass(state, &watch, state.settings.measured_s())?;
        let after = self.look(state, &watch)?;
        let counts = after.counts.since(&before.counts);
        let counts = counts.ok_or_else(|| Trouble::Void("the engine counts anew".into()))?;
        Ok(Sample { counts, seconds: (after.uptime_s - before.uptime_s).max(0.0) })
    }

    /// Let time pass, and look at the engine now and then.
    fn pass(&mut self, state: &State, watch: &Watch, seconds: f64) -> Result<(), Trouble> {
        let mut left = seconds;
        while left > 0.0 {
            if let Some(stop) = self.around.stop_requested() {
                return Err(Trouble::Stopped(stop));
            }
            let now = left.min(LOOK_S);
            self.around.wait(now);
            left -= now;
            if left > 0.0 {
                self.look(state, watch)?;
            }
        }
        Ok(())
    }

    /// Whether all is as the interval expects; the latencies so far.
    fn look(&mut self, state: &State, watch: &Watch) -> Result<LatencyReport, Trouble> {
        let status = self.patiently(|member| slot_of(member, state))?;
        // After the status, so that it shows every restart before that.
        let report = self.patiently(|member| member.latency())?;
        if report.run != watch.run {
            return Err(Trouble::Void("the engine restarted".into()));
        }
        let name = state.version(watch.side).map_or("", |version| &version.name);
        if let Some((version, _)) = &status.quarantine {
            return Err(Trouble::End(format!("{} went into quarantine", version.name)));
        }
        if !state.version(watch.side).is_some_and(|version| is_same(version, &status.active)) {
            return Err(Trouble::Taken(format!("{} was put in place of {name} by somebody else", status.active.name)));
        }
        if fault_count(&status) > watch.faults {
            return Err(Trouble::End(format!("{name} faulted")));
        }
        Ok(report)
    }

    /// Make a side's policy decide.
    fn switch(&mut self, state: &State, side: Side) -> Result<(), Trouble> {
        let slot = state.settings.slot;
        let wanted = state.version(side).ok_or_else(|| Trouble::End("the new policy is not known".into()))?;
        let other = state.version(side.other());
        let mut why = String::new();
        for attempt in 0..TRIES {
            if attempt > 0 {
                self.pause()?;
            }
            let status = self.patiently(|member| slot_of(member, state))?;
            if let Some((version, _)) = &status.quarantine {
                return Err(Trouble::End(format!("{} went into quarantine", version.name)));
            }
            if is_same(&status.active, wanted) {
                return Ok(());
            }
            if !other.is_some_and(|other| is_same(&status.active, other)) {
                return Err(Trouble::Taken(format!("{} was put into the slot by somebody else", status.active.name)));
            }
            let is_previous = status.previous.as_ref().is_some_and(|previous| is_same(previous, wanted));
            let done = if is_previous {
                self.member.rollback(slot)
            } else {
                self.member.put(slot, self.policies.of(side), Mode::Active)
            };
            match done {
                Ok(SwapReport { active, .. }) if is_same(&active, wanted) => return Ok(()),
                // It restarted since then, and a rollback there leads to the other one: once more.
                Ok(SwapReport { active, .. }) if other.is_some_and(|other| is_same(&active, other)) => {
                    why = format!("{} decides, where {} was expected", active.name, wanted.name);
                }
                Ok(SwapReport { active, .. }) => {
                    let name = &wanted.name;
                    return Err(Trouble::End(format!("{} decides, where {name} was expected", active.name)));
                }
                // The change may have been carried out: the status says.
                Err(MemberError::Unreachable(error)) => why = error,
                // It may have restarted since then, and has no previous version any more.
                Err(MemberError::Refused(error)) if is_previous => why = error,
                Err(MemberError::Refused(error)) => return Err(Trouble::End(error)),
            }
        }
        Err(Trouble::End(why))
    }

    /// Wait before another try, unless something is to stop.
    fn pause(&mut self) -> Result<(), Trouble> {
        self.around.wait(PAUSE_S);
        self.around.stop_requested().map_or(Ok(()), |stop| Err(Trouble::Stopped(stop)))
    }

    /// Ask an engine that may be busy for a moment.
    fn patiently<T>(&mut self, ask: impl Fn(&dyn Member) -> Result<T, MemberError>) -> Result<T, Trouble> {
        let mut why = String::new();
        for attempt in 0..TRIES {
            if attempt > 0 {
                self.pause()?;
            }
            match ask(self.member) {
                Ok(answer) => return Ok(answer),
                Err(MemberError::Unreachable(error)) => why = error,
                Err(MemberError::Refused(error)) => return Err(Trouble::End(error)),
            }
        }
        Err(Trouble::End(why))
    }
}

/// What must not change in an interval.
struct Watch {
    side: Side,
    run: String,
    faults: u64,
}

fn fault_count(status: &SlotStatus) -> u64 {
    status.faults.iter().fold(0_u64, |sum, (_, count)| sum.saturating_add(*count))
}

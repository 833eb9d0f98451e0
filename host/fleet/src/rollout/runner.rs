//! Carries a roll-out through: looks at the engines, saves what follows from it, and only then changes them.
//!
//! Whatever ends this process, the next one reads the state, sees which policy each engine really has, and does what is
//! missing: no change is repeated blindly, and none is forgotten. No engine waits for another one: those that hang are
//! left to themselves, and an abort is heeded while they do.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use meridian_core::text::printable;
use thiserror::Error;

use super::calls::{Call, Calls};
use super::change::{Left, slot_of};
use super::machine::{EngineReport, Engines, Machine};
use super::settings::SettingError;
use super::state::{NewPolicy, Outcome, Phase, RolloutState};
use super::store::{Store, StoreError, Wish};
use crate::{Member, MemberError, NamedPolicy, PolicyOrigin};

/// The engines of a fleet, which come and go. Called before each look, on the thread of the roll-out.
pub trait Roster {
    /// The engines now.
    ///
    /// # Errors
    /// One line. The roll-out goes on with the engines that it had before.
    fn members(&self) -> Result<Vec<Arc<dyn Member>>, String>;
}

/// Time. A simulation has its own.
pub trait Clock {
    /// Seconds since 1970, for events: nothing is decided by it, and it may jump.
    fn now_s(&self) -> f64;

    /// Wait for this many seconds or less, at most about one, and return how many have passed. The thread of the roll-out
    /// calls it, and looks for a wish of the operator in between.
    fn wait(&self, seconds: f64) -> f64;
}

/// The reason why a roll-out does not begin or go on. Engines are as they were, or as its state says.
#[derive(Debug, Error)]
pub enum RolloutError {
    /// A setting.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// Its folder.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The engines; one line or more.
    #[error("{0}")]
    Fleet(String),
}

/// A roll-out under way, led by this process.
pub struct Rollout<'a> {
    pub(super) store: Store,
    pub(super) machine: Machine,
    policy: Arc<NamedPolicy>,
    roster: &'a dyn Roster,
    pub(super) clock: &'a dyn Clock,
    /// Receives the state after each event, with the number of events that it has been told.
    told: &'a mut dyn FnMut(&RolloutState),
    pub(super) members: BTreeMap<String, Arc<dyn Member>>,
    pub(super) calls: Calls,
    messages: Arc<AtomicU64>,
    /// Refusals in a row.
    refusals: HashMap<String, u32>,
    /// Engines with a change that may be carried out yet, as they have not answered to it.
    unsure: BTreeSet<String>,
    /// The latest look, if nothing has changed since then.
    seen: Option<Engines>,
    /// Rounds in which engines may go back, a second each at least.
    back_rounds: u32,
    pub(super) waits: Waits,
}

/// How long the others wait for an engine.
#[derive(Clone, Copy)]
pub(super) struct Waits {
    /// In a look.
    pub(super) look: Duration,
    /// In a change: it may compile a component.
    pub(super) change: Duration,
    /// In a round of going back, before those that answer again are asked.
    pub(super) round: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        let [look, change, round] = [5, 30, 1].map(Duration::from_secs);
        Self { look, change, round }
    }
}

/// Refusals in a row that end a roll-out; an engine that compiles another component refuses one.
const MOST_REFUSALS: u32 = 3;
/// Longest time without looking for a wish, seconds.
const SLICE_S: f64 = 1.0;
/// Rounds before a roll-out ends without an engine that does not answer: it may restart.
const PROCESS_ROUNDS: u32 = 60;
/// The same where the operator waits.
const OPERATOR_ROUNDS: u32 = 5;

impl<'a> Rollout<'a> {
    /// Go on with the roll-out of a folder.
    ///
    /// # Errors
    /// [`RolloutError::Store`].
    pub fn reopen(
        mut store: Store,
        roster: &'a dyn Roster,
        clock: &'a dyn Clock,
        told: &'a mut dyn FnMut(&RolloutState),
    ) -> Result<Self, RolloutError> {
        let (state, intervals) = store.load()?;
        let component = if state.policy.is_named() { None } else { Some(store.component()?.into()) };
        let given = given(&state.policy, component);
        let mut machine = Machine::new(state, intervals);
        if matches!(machine.state.phase, Phase::Back { .. }) {
            machine.look_at_all();
        }
        Ok(Self::of(store, machine, given, roster, clock, told))
    }

    pub(super) fn of(
        store: Store,
        machine: Machine,
        policy: NamedPolicy,
        roster: &'a dyn Roster,
        clock: &'a dyn Clock,
        told: &'a mut dyn FnMut(&RolloutState),
    ) -> Self {
        let messages = Arc::new(AtomicU64::new(machine.state.messages));
        Self {
            store,
            machine,
            policy: Arc::new(policy),
            roster,
            clock,
            told,
            members: BTreeMap::new(),
            calls: Calls::default(),
            messages,
            refusals: HashMap::new(),
            unsure: BTreeSet::new(),
            seen: None,
            back_rounds: PROCESS_ROUNDS,
            waits: Waits::default(),
        }
    }

    /// The state.
    #[must_use]
    pub fn state(&self) -> &RolloutState {
        &self.machine.state
    }

    /// Return every engine to the old policy, those included that an earlier roll-back has left behind: the next
    /// [`Rollout::run`] does it, and ends after some seconds without engines that do not answer.
    pub fn abort(&mut self) {
        self.machine.abort(self.clock.now_s());
        self.back_rounds = OPERATOR_ROUNDS;
    }

    /// Go on after a pause.
    pub fn resume(&mut self) {
        self.machine.pause(self.clock.now_s(), false);
    }

    /// Lead the roll-out until it is over.
    ///
    /// # Errors
    /// [`RolloutError::Store`]: the state cannot be written, so nothing more is changed. [`Rollout::reopen`] goes on.
    pub fn run(&mut self) -> Result<Outcome, RolloutError> {
        let _ = self.find_members();
        loop {
            match &self.machine.state.phase {
                Phase::Over { outcome } => return Ok(outcome.clone()),
                Phase::Back { .. } => self.go_back()?,
                Phase::Shadow | Phase::Step { .. } | Phase::Finish => self.go_on()?,
            }
        }
    }

    /// One phase, until the next one: bring each engine to its role, let it settle, and measure.
    fn go_on(&mut self) -> Result<(), RolloutError> {
        let phase = self.machine.state.phase.clone();
        let seen = self.seen.take();
        let Some(engines) = (if seen.is_some() { seen } else { self.look()? }) else { return Ok(()) };
        self.converge(&engines)?;
        self.save()?;
        if self.machine.state.phase != phase {
            return Ok(());
        }
        // Requests that the other policy began are not what the interval is about.
        self.wait(self.machine.state.settings.settle_s)?;
        if self.machine.state.phase != phase {
            return Ok(());
        }
        let Some(began) = self.look()? else { return Ok(()) };
        self.machine.begin(self.clock.now_s(), &began);
        while self.machine.state.phase == phase {
            self.wait(self.machine.state.settings.interval_s)?;
            let _ = self.find_members();
            if self.machine.state.phase != phase {
                break;
            }
            let Some(engines) = self.look()? else { break };
            let lines = self.machine.state.lines;
            self.machine.look(self.clock.now_s(), &engines);
            if self.machine.state.lines > lines
                && let Some(interval) = self.machine.intervals.last()
            {
                self.store.append(interval)?;
            }
            // Before any engine is changed.
            self.save()?;
            if self.machine.state.phase == phase {
                // A few engines that restarted, joined or answer again: the others go on being measured.
                self.converge(&engines)?;
            } else {
                self.seen = Some(engines);
            }
        }
        self.save()
    }

    /// Wait, unless the operator wants to abort or the roll-out has another phase.
    fn wait(&mut self, seconds: f64) -> Result<(), RolloutError> {
        let phase = self.machine.state.phase.clone();
        let mut left_s = seconds;
        while self.machine.state.phase == phase {
            if heed(&self.store, &mut self.machine, self.clock)?.is_some() {
                self.save()?;
            }
            if left_s <= 0.0 {
                break;
            }
            if self.machine.state.phase == phase {
                left_s -= self.clock.wait(left_s.min(SLICE_S));
            }
        }
        Ok(())
    }

    pub(super) fn save(&mut self) -> Result<(), RolloutError> {
        self.machine.state.messages = self.messages.load(Ordering::Relaxed);
        self.machine.state.at_s = self.clock.now_s();
        self.store.save(&self.machine.state)?;
        (self.told)(&self.machine.state);
        Ok(())
    }

    pub(super) fn find_members(&mut self) -> Result<(), String> {
        let members = self.roster.members()?;
        self.members = members.into_iter().map(|member| (member.name().to_owned(), member)).collect();
        Ok(())
    }

    /// A look at every engine: its status and its latencies.
    pub(super) fn looks(&self) -> Vec<Call<Result<EngineReport, MemberError>>> {
        let slot = self.machine.state.settings.slot;
        let looks = self.members.iter().map(|(name, member)| {
            let (member, messages) = (Arc::clone(member), Arc::clone(&self.messages));
            let look = move || {
                let slot = slot_of(member.as_ref(), slot, &messages)?;
                messages.fetch_add(1, Ordering::Relaxed);
                Ok(EngineReport { slot, report: member.latency()? })
            };
            let call: Call<_> = (name.clone(), Box::new(look));
            call
        });
        looks.collect()
    }

    /// What the engines say that answer; `None` if the operator aborts meanwhile.
    fn look(&mut self) -> Result<Option<Engines>, RolloutError> {
        let (looks, within) = (self.looks(), self.waits.look);
        let Some(mut answers) = self.heeding(looks, within)? else { return Ok(None) };
        let seen = |name: &String| (name.clone(), answers.remove(name).and_then(Result::ok));
        Ok(Some(self.members.keys().map(seen).collect()))
    }

    /// Make calls; `None` if the operator aborts meanwhile.
    fn heeding<T: Send + 'static>(
        &mut self,
        calls: Vec<Call<T>>,
        within: Duration,
    ) -> Result<Option<BTreeMap<String, T>>, RolloutError> {
        let Self { calls: engines, store, machine, clock, .. } = self;
        let mut heeded = Ok(None);
        let answers = engines.make(calls, within, || {
            heeded = heed(store, machine, *clock);
            matches!(heeded, Err(_) | Ok(Some(Wish::Abort)))
        });
        Ok((heeded? != Some(Wish::Abort)).then_some(answers))
    }

    /// Bring every engine that answers to the policy that it should have.
    fn converge(&mut self, engines: &Engines) -> Result<(), RolloutError> {
        let mut problems = BTreeMap::new();
        let mut changes = Vec::new();
        for (name, seen) in engines {
            let Some(seen) = seen else {
                problems.insert(name.clone(), Left::Silent.to_string());
                continue;
            };
            if self.machine.wanted(name, &self.policy).is_some_and(|wanted| !wanted.is_met(&seen.slot)) {
                problems.insert(name.clone(), Left::Silent.to_string());
                changes.extend(self.change(name, Some(seen)));
            }
        }
        let asked = names(&changes);
        let brought = self.heeding(changes, self.waits.change)?;
        self.unsure
            .extend(asked.into_iter().filter(|name| !brought.as_ref().is_some_and(|all| all.contains_key(name))));
        let phase = self.machine.state.phase.clone();
        if let Some(brought) = brought {
            self.note(brought, &mut problems);
            // After refusals, all go back, and show in turn that they have.
            if self.machine.state.phase == phase {
                self.machine.settle(&problems);
            }
        }
        Ok(())
    }

    /// Return every engine to the old policy, each as soon as it answers.
    fn go_back(&mut self) -> Result<(), RolloutError> {
        self.seen = None;
        self.save()?;
        loop {
            let _ = self.find_members();
            self.machine.list(|name| self.members.contains_key(name));
            let left: Vec<String> = self.machine.state.left_behind().map(|(name, _)| name.to_owned()).collect();
            let changes: Vec<_> = left.iter().filter_map(|name| self.change(name, None)).collect();
            let asked = names(&changes);
            let brought = self.calls.make(changes, self.waits.round, || false);
            self.unsure.extend(asked.into_iter().filter(|name| !brought.contains_key(name)));
            let mut problems = left.into_iter().map(|name| (name, Left::Silent.to_string())).collect();
            self.note(brought, &mut problems);
            self.machine.settle_back(&problems, self.back_rounds);
            self.save()?;
            if self.machine.state.outcome().is_some() {
                return Ok(());
            }
            let mut left_s = SLICE_S;
            while left_s > 0.0 {
                left_s -= self.clock.wait(left_s);
            }
        }
    }

    /// The change of one engine, from where it was seen or from a new look.
    fn change(&self, name: &str, seen: Option<&EngineReport>) -> Option<Call<Result<(), Left>>> {
        let (wanted, member) = (self.machine.wanted(name, &self.policy)?, Arc::clone(self.members.get(name)?));
        let (seen, messages) = (seen.map(|seen| seen.slot.clone()), Arc::clone(&self.messages));
        Some((name.to_owned(), Box::new(move || wanted.bring(member.as_ref(), seen, &messages))))
    }

    /// Which engines have their policy now, and why others do not.
    fn note(&mut self, brought: BTreeMap<String, Result<(), Left>>, problems: &mut BTreeMap<String, String>) {
        for (name, result) in brought {
            if let Err(Left::Refused(why)) = &result {
                let count = self.refusals.entry(name.clone()).or_default();
                *count += 1;
                if *count >= MOST_REFUSALS {
                    self.machine.refused(&printable(why));
                }
            }
            match result {
                // A change of before may be carried out yet: once more.
                Ok(()) if self.unsure.remove(&name) => {
                    problems.insert(name, "may be changed yet".into());
                }
                Ok(()) => {
                    self.refusals.remove(&name);
                    problems.remove(&name);
                }
                Err(left) => {
                    if matches!(left, Left::Unsure(_)) {
                        self.unsure.insert(name.clone());
                    }
                    problems.insert(name, left.to_string());
                }
            }
        }
    }
}

fn names<T>(calls: &[Call<T>]) -> Vec<String> {
    calls.iter().map(|(name, _)| name.clone()).collect()
}

/// Do what the operator wants, if anything.
fn heed(store: &Store, machine: &mut Machine, clock: &dyn Clock) -> Result<Option<Wish>, StoreError> {
    let wish = store.take_wish()?;
    let now_s = clock.now_s();
    match wish {
        Some(Wish::Abort) => machine.abort(now_s),
        Some(Wish::Pause) => machine.pause(now_s, true),
        Some(Wish::Resume) => machine.pause(now_s, false),
        None => {}
    }
    Ok(wish)
}

pub(super) fn given(policy: &NewPolicy, component: Option<Arc<[u8]>>) -> NamedPolicy {
    let source = match component {
        Some(bytes) => PolicyOrigin::Component { bytes, signature: policy.signature.clone() },
        None => PolicyOrigin::Named(policy.source.clone()),
    };
    NamedPolicy { source, options: policy.options.clone() }
}

/// Take the lock of a folder and go on with its roll-out.
///
/// # Errors
/// [`RolloutError::Store`].
pub fn reopen<'a>(
    dir: &Path,
    roster: &'a dyn Roster,
    clock: &'a dyn Clock,
    told: &'a mut dyn FnMut(&RolloutState),
) -> Result<Rollout<'a>, RolloutError> {
    Rollout::reopen(Store::lock(dir)?, roster, clock, told)
}

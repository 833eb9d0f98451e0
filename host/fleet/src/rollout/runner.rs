//! Carries a roll-out through: looks at the engines, saves what follows from it, and only then changes them.
//!
//! Whatever ends this process, the next one reads the state, sees which policy each engine really has, and does what is
//! missing: no change is repeated blindly, and none is forgotten.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use meridian_core::text::printable;
use meridian_engine::control::{LatencyReport, Mode, ProcessStatus, SlotStatus, Version};
use thiserror::Error;

use super::machine::{Action, EngineReport, Engines, Machine};
use super::settings::{RolloutSettings, SettingError};
use super::state::{FORMAT, NewPolicy, Outcome, Phase, RolloutState, is_same};
use super::store::{Store, StoreError, Wish};
use crate::{AT_A_TIME, Member, MemberError, NamedPolicy, PolicyOrigin, each};

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
    /// Seconds since 1970.
    fn now_s(&self) -> f64;

    /// Return after this many seconds, at most about one.
    fn wait(&self, seconds: f64);
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
    store: Store,
    machine: Machine,
    policy: NamedPolicy,
    roster: &'a dyn Roster,
    clock: &'a dyn Clock,
    /// Receives the state after each event, with the number of events that it has been told.
    told: &'a mut dyn FnMut(&RolloutState),
    members: BTreeMap<String, Arc<dyn Member>>,
    messages: AtomicU64,
    /// Refusals in a row.
    refusals: HashMap<String, u32>,
}

/// A new roll-out.
pub struct Start<'a> {
    /// The settings.
    pub settings: RolloutSettings,
    /// The policy.
    pub policy: NewPolicy,
    /// Its component, unless engines load it by its name.
    pub component: Option<Arc<[u8]>>,
    /// The words that find the fleet, for a later controller.
    pub fleet: Vec<String>,
    /// A prediction, to compare with.
    pub predicted: Option<serde_json::Value>,
    /// The engines.
    pub roster: &'a dyn Roster,
    /// The time.
    pub clock: &'a dyn Clock,
    /// Called with the state after whatever happens.
    pub told: &'a mut dyn FnMut(&RolloutState),
}

/// Refusals in a row that end a roll-out; an engine that compiles another component refuses one.
const MOST_REFUSALS: u32 = 3;
/// Rounds of changes after a look: an engine may need two.
const ROUNDS: usize = 3;
/// Longest time without looking for a wish, seconds.
const SLICE_S: f64 = 1.0;

/// What an engine answered: its name, its state and its latencies.
type Answered = (String, Result<ProcessStatus, MemberError>, Result<LatencyReport, MemberError>);

impl<'a> Rollout<'a> {
    /// Check the fleet and write the first state. Nothing is changed yet.
    ///
    /// # Errors
    /// [`RolloutError`]: nothing has begun.
    pub fn begin(mut store: Store, start: Start<'a>) -> Result<Self, RolloutError> {
        let Start { settings, policy, component, fleet, predicted, roster, clock, told } = start;
        settings.validate()?;
        store.clear()?;
        if let Some(component) = &component {
            store.keep_component(component)?;
        }
        let now_s = clock.now_s();
        let state = RolloutState {
            format: FORMAT.into(),
            settings,
            policy,
            old: Version::default(),
            fleet,
            phase: Phase::Shadow,
            paused: None,
            accepted: false,
            intervals: 0,
            lines: 0,
            step_from: 0,
            before: 0,
            findings: Vec::new(),
            engines: BTreeMap::new(),
            events: Vec::new(),
            messages: 0,
            started_s: now_s,
            at_s: now_s,
            predicted,
        };
        let given = given(&state.policy, component);
        let mut rollout = Self::of(store, Machine::new(state, Vec::new()), given, roster, clock, told);
        rollout.check_fleet()?;
        let steps = rollout.machine.state.settings.steps.len();
        let engines = rollout.machine.state.engines.len();
        let name = printable(&rollout.machine.state.policy.source).into_owned();
        rollout.machine.state.note(format!("{name} in shadow on {engines} engines, then {steps} steps"));
        rollout.save()?;
        Ok(rollout)
    }

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
        Ok(Self::of(store, Machine::new(state, intervals), given, roster, clock, told))
    }

    fn of(
        store: Store,
        machine: Machine,
        policy: NamedPolicy,
        roster: &'a dyn Roster,
        clock: &'a dyn Clock,
        told: &'a mut dyn FnMut(&RolloutState),
    ) -> Self {
        let messages = AtomicU64::new(machine.state.messages);
        let (members, refusals) = (BTreeMap::new(), HashMap::new());
        Self { store, machine, policy, roster, clock, told, members, messages, refusals }
    }

    /// The state.
    #[must_use]
    pub fn state(&self) -> &RolloutState {
        &self.machine.state
    }

    /// Return every engine to the old policy: the next [`Rollout::run`] does it.
    pub fn abort(&mut self) {
        self.machine.abort(self.clock.now_s());
    }

    /// Go on after a pause.
    pub fn resume(&mut self) {
        self.machine.pause(self.clock.now_s(), false);
    }

    /// Whether every engine can take part: one old version, latencies, and not yet the new policy.
    fn check_fleet(&mut self) -> Result<(), RolloutError> {
        self.find_members().map_err(RolloutError::Fleet)?;
        let slot = self.machine.state.settings.slot;
        let asked = self.ask();
        let mut problems = Vec::new();
        let mut versions: Vec<(Version, usize)> = Vec::new();
        let mut engines = Engines::new();
        for (name, status, latency) in asked {
            let (status, report) = match (status, latency) {
                (Ok(status), Ok(report)) => (status, report),
                (Err(error), _) | (_, Err(error)) => {
                    problems.push(error.to_string());
                    continue;
                }
            };
            let Some(found) = status.slots.into_iter().find(|of| of.slot == slot) else {
                problems.push(format!("{name}: has no {} slot", slot.label()));
                continue;
            };
            if let Some((version, _)) = &found.quarantine {
                problems.push(format!("{name}: {} is in quarantine", version.name));
            }
            match versions.iter_mut().find(|(version, _)| is_same(version, &found.active)) {
                Some((_, count)) => *count += 1,
                None => versions.push((found.active.clone(), 1)),
            }
            engines.insert(name, Some(EngineReport { slot: found, report }));
        }
        if engines.len() < 2 && problems.is_empty() {
            return Err(RolloutError::Fleet(format!(
                "{} engines: a roll-out compares engines and needs at least two; on one, use an experiment",
                engines.len()
            )));
        }
        if !problems.is_empty() {
            return Err(RolloutError::Fleet(problems.join("\n")));
        }
        if versions.len() > 1 {
            let all: Vec<String> = versions
                .iter()
                .map(|(version, count)| format!("{} {} ({count})", version.name, version.version))
                .collect();
            return Err(RolloutError::Fleet(format!(
                "the engines decide by several versions: {}; bring them to one first (meridian ctl swap --all)",
                all.join(", ")
            )));
        }
        let Some((old, _)) = versions.pop() else { return Err(RolloutError::Fleet("no engine was found".into())) };
        if self.machine.state.policy.is(&old) {
            return Err(RolloutError::Fleet(format!(
                "{}: every engine decides by it already",
                self.machine.state.policy.source
            )));
        }
        self.machine.state.old = old;
        self.machine.look(self.clock.now_s(), &engines);
        Ok(())
    }

    /// Lead the roll-out until it is over.
    ///
    /// # Errors
    /// [`RolloutError::Store`]: the state cannot be written, so nothing more is changed. [`Rollout::reopen`] goes on.
    pub fn run(&mut self) -> Result<Outcome, RolloutError> {
        let _ = self.find_members();
        let mut engines = self.look();
        loop {
            let phase = self.machine.state.phase.clone();
            self.converge(&engines)?;
            self.save()?;
            if let Some(outcome) = self.machine.state.outcome() {
                return Ok(outcome.clone());
            }
            if self.machine.state.phase != phase {
                // Refused.
                engines = self.look();
                continue;
            }
            // Requests that the other policy began are not what the interval is about.
            self.wait(self.machine.state.settings.settle_s)?;
            let began = self.look();
            self.machine.begin(self.clock.now_s(), &began);
            if self.machine.state.phase != phase {
                self.save()?;
                engines = began;
                continue;
            }
            loop {
                self.wait(self.machine.state.settings.interval_s)?;
                let _ = self.find_members();
                engines = self.look();
                let lines = self.machine.state.lines;
                self.machine.look(self.clock.now_s(), &engines);
                if self.machine.state.lines > lines
                    && let Some(interval) = self.machine.intervals.last()
                {
                    self.store.append(interval)?;
                }
                // Before any engine is changed.
                self.save()?;
                if self.machine.state.phase != phase || !matches!(phase, Phase::Shadow | Phase::Step { .. }) {
                    break;
                }
                // A few engines that restarted or joined: the others go on being measured.
                self.converge(&engines)?;
                if self.machine.state.phase != phase {
                    self.save()?;
                    break;
                }
            }
        }
    }

    /// Wait, unless the operator wants to abort.
    fn wait(&mut self, seconds: f64) -> Result<(), RolloutError> {
        let until_s = self.clock.now_s() + seconds;
        loop {
            let wish = self.store.take_wish()?;
            let now_s = self.clock.now_s();
            match wish {
                Some(Wish::Abort) => self.machine.abort(now_s),
                Some(Wish::Pause) => self.machine.pause(now_s, true),
                Some(Wish::Resume) => self.machine.pause(now_s, false),
                None => {}
            }
            if wish.is_some() {
                self.save()?;
            }
            let left_s = until_s - now_s;
            let is_aborted = wish == Some(Wish::Abort);
            // A clock that was set back must not make it wait for longer.
            if is_aborted || left_s <= 0.0 || left_s > seconds {
                return Ok(());
            }
            self.clock.wait(left_s.min(SLICE_S));
        }
    }

    fn save(&mut self) -> Result<(), RolloutError> {
        self.machine.state.messages = self.messages.load(Ordering::Relaxed);
        self.machine.state.at_s = self.clock.now_s();
        self.store.save(&self.machine.state)?;
        (self.told)(&self.machine.state);
        Ok(())
    }

    fn find_members(&mut self) -> Result<(), String> {
        let members = self.roster.members()?;
        self.members = members.into_iter().map(|member| (member.name().to_owned(), member)).collect();
        Ok(())
    }

    /// Status and latencies of every engine.
    fn ask(&self) -> Vec<Answered> {
        let members: Vec<_> = self.members.iter().collect();
        let messages = &self.messages;
        each(&members, AT_A_TIME, |(name, member)| {
            messages.fetch_add(2, Ordering::Relaxed);
            ((*name).clone(), member.status(), member.latency())
        })
    }

    fn look(&self) -> Engines {
        let slot = self.machine.state.settings.slot;
        let seen = self.ask().into_iter().map(|(name, status, latency)| {
            let slot = status.ok().and_then(|status| status.slots.into_iter().find(|of| of.slot == slot));
            (name, slot.zip(latency.ok()).map(|(slot, report)| EngineReport { slot, report }))
        });
        seen.collect()
    }

    /// Bring every engine to the policy that it should have, as far as it answers.
    fn converge(&mut self, engines: &Engines) -> Result<(), RolloutError> {
        let mut slots: BTreeMap<String, Option<SlotStatus>> =
            engines.iter().map(|(name, seen)| (name.clone(), seen.as_ref().map(|seen| seen.slot.clone()))).collect();
        let mut problems: BTreeMap<String, String> = BTreeMap::new();
        for (name, slot) in &slots {
            if slot.is_none() {
                problems.insert(name.clone(), "does not answer".into());
            }
        }
        for round in 0..=ROUNDS {
            let mut changes: Vec<(String, Action)> = Vec::new();
            for (name, slot) in slots.iter().filter_map(|(name, slot)| Some((name, slot.as_ref()?))) {
                changes.extend(self.machine.action(name, slot).map(|action| (name.clone(), action)));
            }
            if changes.is_empty() {
                break;
            }
            if round == ROUNDS {
                for (name, _) in changes {
                    problems.insert(name, "has another policy after its change".into());
                }
                break;
            }
            let Self { machine, policy, members, messages, .. } = self;
            let results = each(&changes, AT_A_TIME, |(name, action)| {
                let Some(member) = members.get(name) else {
                    return Err(MemberError::Unreachable(format!("{name}: is no longer listed")));
                };
                messages.fetch_add(2, Ordering::Relaxed);
                change(member.as_ref(), &machine.state, policy, *action)
            });
            for ((name, _), result) in changes.into_iter().zip(results) {
                match result {
                    Ok(slot) => {
                        self.refusals.remove(&name);
                        slots.insert(name, Some(slot));
                    }
                    Err(error) => {
                        if let MemberError::Refused(why) = &error {
                            let count = self.refusals.entry(name.clone()).or_default();
                            *count += 1;
                            if *count >= MOST_REFUSALS {
                                self.machine.refused(&printable(why));
                            }
                        }
                        problems.insert(name.clone(), printable(&error.to_string()).into_owned());
                        // Not before the next look.
                        slots.remove(&name);
                    }
                }
            }
        }
        self.machine.settle(&problems);
        Ok(())
    }
}

/// Change an engine, and see what it has then.
fn change(
    member: &dyn Member,
    state: &RolloutState,
    new: &NamedPolicy,
    action: Action,
) -> Result<SlotStatus, MemberError> {
    let slot = state.settings.slot;
    match action {
        Action::Shadow => member.put(slot, new, Mode::Shadow),
        Action::Activate => member.put(slot, new, Mode::Active),
        Action::Promote => member.promote(slot),
        Action::StopShadow => member.stop_shadow(slot),
        Action::RollBack => member.rollback(slot),
        Action::PutOld => {
            let old = state.engines.get(member.name()).map(|record| record.old.clone()).unwrap_or_default();
            let options = if old.options.is_empty() { "{}".into() } else { old.options };
            let old = NamedPolicy { source: PolicyOrigin::Named(old.source), options: Some(options) };
            member.put(slot, &old, Mode::Active)
        }
    }?;
    let found = member.status()?.slots.into_iter().find(|of| of.slot == slot);
    found.ok_or_else(|| MemberError::Refused(format!("{}: has no {} slot", member.name(), slot.label())))
}

fn given(policy: &NewPolicy, component: Option<Arc<[u8]>>) -> NamedPolicy {
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

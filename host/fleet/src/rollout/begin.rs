//! The begin of a roll-out: whether the fleet can take part, and the first state.

use std::collections::BTreeMap;
use std::sync::Arc;

use meridian_core::text::printable;
use meridian_engine::control::Version;

use super::machine::{EngineReport, Engines, Machine};
use super::runner::{Clock, Rollout, RolloutError, Roster, given};
use super::settings::RolloutSettings;
use super::state::{FORMAT, NewPolicy, Phase, RolloutState, is_same};
use super::store::Store;

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
            noted: 0,
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

    /// Whether every engine can take part: one old version, latencies, and not yet the new policy.
    fn check_fleet(&mut self) -> Result<(), RolloutError> {
        self.find_members().map_err(RolloutError::Fleet)?;
        let mut answers = self.calls.make(self.looks(), self.waits.look, || false);
        let mut problems = Vec::new();
        let mut versions: Vec<(Version, usize)> = Vec::new();
        let mut engines = Engines::new();
        for name in self.members.keys() {
            let seen: EngineReport = match answers.remove(name) {
                Some(Ok(seen)) => seen,
                Some(Err(error)) => {
                    problems.push(error.to_string());
                    continue;
                }
                None => {
                    problems.push(format!("{name}: does not answer within {} s", self.waits.look.as_secs_f64()));
                    continue;
                }
            };
            if let Some((version, _)) = &seen.slot.quarantine {
                problems.push(format!("{name}: {} is in quarantine", version.name));
            }
            match versions.iter_mut().find(|(version, _)| is_same(version, &seen.slot.active)) {
                Some((_, count)) => *count += 1,
                None => versions.push((seen.slot.active.clone(), 1)),
            }
            engines.insert(name.clone(), Some(seen));
        }
        if !problems.is_empty() {
            return Err(RolloutError::Fleet(problems.join("\n")));
        }
        let fleet = |why: String| Err(RolloutError::Fleet(why));
        if engines.len() < 2 {
            let count = engines.len();
            let why = "a roll-out compares engines and needs at least two; on one, use an experiment";
            return fleet(format!("{count} engines: {why}"));
        }
        if versions.len() > 1 {
            let all: Vec<String> = versions
                .iter()
                .map(|(version, count)| format!("{} {} ({count})", version.name, version.version))
                .collect();
            return fleet(format!(
                "the engines decide by several versions: {}; bring them to one first (meridian ctl swap --all)",
                all.join(", ")
            ));
        }
        let Some((old, _)) = versions.pop() else { return fleet("no engine was found".into()) };
        if self.machine.state.policy.is(&old) {
            return fleet(format!("{}: every engine decides by it already", self.machine.state.policy.source));
        }
        self.machine.state.old = old;
        self.machine.look(self.clock.now_s(), &engines);
        Ok(())
    }
}

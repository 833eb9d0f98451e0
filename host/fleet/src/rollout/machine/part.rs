//! Which engines take part: those of the fleet that nobody else has changed.

use super::super::change::{Decides, is_quarantined};
use super::super::state::{EngineRecord, Phase, Role, is_same};
use super::{EngineReport, Engines, Machine};

impl Machine {
    /// Which engines are there, and which of them somebody else has changed.
    pub(super) fn take_part(&mut self, engines: &Engines) {
        let mut notes = Vec::new();
        for record in self.state.engines.values_mut() {
            record.is_listed = false;
        }
        for (name, seen) in engines {
            let is_known = self.state.engines.contains_key(name);
            if !is_known && let Some(seen) = seen {
                self.join(name, seen);
            }
            let before = self.before.get(name).map(|before| (before.decides, before.report.run.clone()));
            let decides = seen.as_ref().map(|seen| self.decides(name, &seen.slot));
            let is_quarantined = seen.as_ref().is_some_and(|seen| is_quarantined(&self.state.policy, &seen.slot));
            let Some(record) = self.state.engines.get_mut(name) else { continue };
            record.is_listed = true;
            let answered = std::mem::replace(&mut record.answers, seen.is_some());
            let Some(seen) = seen else {
                record.was_lost = true;
                if answered {
                    notes.push(format!("{name} does not answer"));
                }
                continue;
            };
            let run = &seen.report.run;
            let restarted = !record.run.is_empty() && record.run != *run;
            record.run.clone_from(run);
            record.was_lost |= restarted;
            let is_same_run = before.as_ref().is_some_and(|(_, of)| of == run);
            let foreign = match (before.map(|(decides, _)| decides), decides) {
                (_, Some(Decides::Other)) if !is_quarantined => Some(format!(
                    "decides by {} {}, which somebody else has put there",
                    seen.slot.active.name, seen.slot.active.version
                )),
                (Some(Decides::New), Some(Decides::Old)) if is_same_run && !is_quarantined => {
                    Some("returned to the old policy, which somebody else has asked for".to_owned())
                }
                _ => None,
            };
            // A roll-out that returns has asked for it itself.
            let foreign =
                foreign.filter(|_| !matches!(self.state.phase, Phase::Back { .. }) && record.foreign.is_none());
            if let Some(foreign) = foreign {
                notes.push(format!("{name}: {foreign}; it is no longer part of the roll-out"));
                record.foreign = Some(foreign);
            } else if restarted {
                notes.push(format!("{name} has restarted"));
            }
        }
        notes.into_iter().for_each(|note| self.state.note(note));
    }

    fn join(&mut self, name: &str, seen: &EngineReport) {
        let active = &seen.slot.active;
        let has_new = self.state.policy.is(active);
        let role = match self.state.phase {
            Phase::Shadow => Role::Shadow,
            Phase::Finish => Role::New,
            // Its configuration may have the new policy already.
            Phase::Step { .. } if has_new => Role::New,
            Phase::Step { .. } | Phase::Back { .. } | Phase::Over { .. } => Role::Old,
        };
        let is_other = if has_new { role == Role::Shadow } else { !is_same(active, &self.state.old) };
        let foreign = is_other.then(|| format!("decides by {} {} when it joins", active.name, active.version));
        let record = EngineRecord {
            role,
            old: self.state.old.clone(),
            foreign,
            answers: true,
            is_listed: true,
            was_lost: false,
            run: seen.report.run.clone(),
            problem: None,
        };
        let is_late = self.state.intervals > 0 || !matches!(self.state.phase, Phase::Shadow);
        self.state.engines.insert(name.to_owned(), record);
        if is_late {
            self.state.note(format!("{name} joins the fleet"));
        }
    }
}

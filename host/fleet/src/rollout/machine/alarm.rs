//! What sends every engine back to the old policy at once.

use statrs::distribution::{DiscreteCDF, Hypergeometric};

use super::super::change::{Decides, is_quarantined};
use super::super::state::{Phase, Role};
use super::{EngineReport, Engines, Machine, faults};

/// Probability below which more losses among engines with the new policy are no accident.
const LOSS_LEVEL: f64 = 0.01;

impl Machine {
    /// The reason to return to the old policy at once.
    pub(super) fn alarm(&self, engines: &Engines) -> Option<String> {
        let policy = &self.state.policy;
        for (name, seen) in engines {
            let (Some(EngineReport { slot, .. }), Some(record)) = (seen, self.state.engines.get(name)) else {
                continue;
            };
            if record.foreign.is_some() {
                continue;
            }
            if is_quarantined(policy, slot) {
                return Some(format!("{name}: the new policy is in quarantine"));
            }
            if let Some(shadow) = slot.shadow.as_ref().filter(|shadow| policy.is(&shadow.version) && shadow.faults > 0)
            {
                return Some(format!("{name}: faults of the new policy in shadow: {}", shadow.faults));
            }
            let before = self.before.get(name).filter(|before| before.decides == Decides::New);
            let more = before.map_or(0, |before| faults(slot).saturating_sub(before.faults));
            if record.role == Role::New && policy.is(&slot.active) && (more > 0 || slot.strikes > 0) {
                let kinds: Vec<&str> = slot
                    .faults
                    .iter()
                    .filter(|(kind, count)| *count > 0 && kind != "load")
                    .map(|(kind, _)| kind.as_str())
                    .collect();
                let count = more.max(u64::from(slot.strikes));
                return Some(format!("{name}: faults of the new policy: {count} ({})", kinds.join(", ")));
            }
        }
        self.too_many_lost()
    }

    /// More engines with the new policy restart or vanish than chance explains: Fisher's exact test.
    fn too_many_lost(&self) -> Option<String> {
        if !matches!(self.state.phase, Phase::Step { .. }) {
            return None;
        }
        let count = |role, is_lost: bool| {
            let of_role = self.state.taking_part().filter(|(_, record)| record.role == role);
            of_role.filter(|(_, record)| !is_lost || record.was_lost).count() as u64
        };
        let (new, old) = (count(Role::New, false), count(Role::Old, false));
        let (lost_new, lost_old) = (count(Role::New, true), count(Role::Old, true));
        if lost_new == 0 {
            return None;
        }
        let chance = Hypergeometric::new(new + old, lost_new + lost_old, new).ok()?.sf(lost_new - 1);
        (chance < LOSS_LEVEL).then(|| {
            format!(
                "{lost_new} of {new} engines with the new policy restarted or vanished, and {lost_old} of {old} others"
            )
        })
    }
}

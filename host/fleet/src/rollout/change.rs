//! The changes that bring one engine to the policy that it should have. Each engine has its own, and waits for no other.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use meridian_core::{PolicySource, SlotName};
use meridian_engine::control::{Mode, SlotStatus, Version};

use super::state::{NewPolicy, Role, is_same};
use crate::{Member, MemberError, NamedPolicy, PolicyOrigin};

/// Changes in a row: an engine may need two.
const MOST_CHANGES: usize = 3;

/// The change that brings an engine nearer to its role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Put the new policy into shadow.
    Shadow,
    /// Make it active: from the shadow, if it is there.
    Activate,
    Promote,
    StopShadow,
    /// Return to the previous version, which is the old one.
    RollBack,
    /// Put the old policy by its name.
    PutOld,
}

/// The policy that decides in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decides {
    Old,
    New,
    Other,
}

impl Decides {
    pub(super) fn of(new: &NewPolicy, old: Option<&Version>, slot: &SlotStatus) -> Self {
        if new.is(&slot.active) {
            Self::New
        } else if old.is_some_and(|old| is_same(old, &slot.active)) {
            Self::Old
        } else {
            Self::Other
        }
    }
}

/// The reason why an engine may not have the policy that it should have.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// It does not say what it has.
    Silent,
    /// It refused the change.
    Refused(String),
    /// The change may be carried out, or may be yet.
    Unsure(String),
    /// It has done as asked, and has something else.
    Otherwise,
}

impl fmt::Display for Left {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent => formatter.write_str("does not answer"),
            Self::Refused(why) | Self::Unsure(why) => formatter.write_str(why),
            Self::Otherwise => formatter.write_str("has another policy after its change"),
        }
    }
}

/// The policy that one engine should have.
#[derive(Clone)]
pub(super) struct Wanted {
    pub(super) slot: SlotName,
    pub(super) role: Role,
    pub(super) old: Version,
    pub(super) new: NewPolicy,
    /// The new policy, as engines load it.
    pub(super) given: Arc<NamedPolicy>,
}

impl Wanted {
    /// Whether an engine has it.
    pub(super) fn is_met(&self, slot: &SlotStatus) -> bool {
        self.action(slot).is_none()
    }

    /// Change the engine until it has it, and count the calls. Without `seen`, look at it first.
    ///
    /// # Errors
    /// The engine may have another policy.
    pub(super) fn bring(&self, member: &dyn Member, seen: Option<SlotStatus>, calls: &AtomicU64) -> Result<(), Left> {
        let look = || slot_of(member, self.slot, calls);
        let mut now = match seen {
            Some(seen) => seen,
            None => look().map_err(|_| Left::Silent)?,
        };
        let left = |error| match error {
            MemberError::Refused(why) => Left::Refused(why),
            MemberError::Unreachable(why) => Left::Unsure(why),
        };
        for _ in 0..MOST_CHANGES {
            let Some(action) = self.action(&now) else { return Ok(()) };
            calls.fetch_add(1, Ordering::Relaxed);
            self.change(member, action).map_err(left)?;
            now = look().map_err(|error| Left::Unsure(error.to_string()))?;
        }
        if self.is_met(&now) { Ok(()) } else { Err(Left::Otherwise) }
    }

    fn change(&self, member: &dyn Member, action: Action) -> Result<(), MemberError> {
        let slot = self.slot;
        match action {
            Action::Shadow => member.put(slot, &self.given, Mode::Shadow),
            Action::Activate => member.put(slot, &self.given, Mode::Active),
            Action::Promote => member.promote(slot),
            Action::StopShadow => member.stop_shadow(slot),
            Action::RollBack => member.rollback(slot),
            Action::PutOld => {
                let options = if self.old.options.is_empty() { "{}" } else { &self.old.options };
                let source = PolicyOrigin::Named(self.old.source.clone());
                member.put(slot, &NamedPolicy { source, options: Some(options.into()) }, Mode::Active)
            }
        }
        .map(drop)
    }

    fn action(&self, slot: &SlotStatus) -> Option<Action> {
        let has_shadow = slot.shadow.as_ref().is_some_and(|shadow| self.new.is(&shadow.version));
        let decides = Decides::of(&self.new, Some(&self.old), slot);
        match self.role {
            Role::Shadow => (decides == Decides::Old && !has_shadow).then_some(Action::Shadow),
            Role::New => match (decides, has_shadow) {
                (Decides::New, true) => Some(Action::StopShadow),
                (Decides::Old, true) => Some(Action::Promote),
                (Decides::Old, false) => Some(Action::Activate),
                _ => None,
            },
            Role::Old if is_quarantined(&self.new, slot) => Some(self.back_action(slot)),
            Role::Old => match (decides, has_shadow) {
                (Decides::New, _) => Some(self.back_action(slot)),
                (_, true) => Some(Action::StopShadow),
                _ => None,
            },
        }
    }

    fn back_action(&self, slot: &SlotStatus) -> Action {
        let is_old = |version: &Version| is_same(version, &self.old);
        let has_it = slot.previous.as_ref().is_some_and(is_old);
        // In quarantine, the old one stands in.
        let stands_in = slot.quarantine.is_some() && is_old(&slot.active);
        let is_named = self.old.sha256.is_empty() || PolicySource::of(&self.old.source).registry().is_some();
        // Its own instance, with its state, before one that starts anew.
        if has_it || stands_in || !is_named { Action::RollBack } else { Action::PutOld }
    }
}

/// The state of a slot of an engine.
pub(super) fn slot_of(member: &dyn Member, slot: SlotName, calls: &AtomicU64) -> Result<SlotStatus, MemberError> {
    calls.fetch_add(1, Ordering::Relaxed);
    let found = member.status()?.slots.into_iter().find(|of| of.slot == slot);
    found.ok_or_else(|| MemberError::Refused(format!("{}: has no {} slot", member.name(), slot.label())))
}

pub(super) fn is_quarantined(policy: &NewPolicy, slot: &SlotStatus) -> bool {
    slot.quarantine.as_ref().is_some_and(|(version, _)| policy.is(version))
}

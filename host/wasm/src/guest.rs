//! What differs from slot to slot in calling a component: which interface, how a batch goes in and how the answer comes
//! out.

use meridian_core::{Batch, Budget, Dispatch, Eviction, SlotKind, SlotName};
use wasmtime::component::{Instance, InstancePre};
use wasmtime::{Result, Store};

use crate::instance::StoreState;
use crate::wit::{self, budget, dispatch, eviction, lifecycle};

/// A slot whose policies may be components; implemented for every slot.
pub trait GuestKind: Calls {}

impl<K: Calls> GuestKind for K {}

/// The interface of a slot.
pub trait Calls: SlotKind {
    /// Its name in the contract.
    const INTERFACE: &'static str;
    /// Where its functions are in a component.
    type Indices: Send + Sync;
    /// Its functions in an instance.
    type Guest: Send;

    /// The slot, as `lifecycle.init` names it.
    const SLOT: lifecycle::Slot;
    /// Bytes of an answer per candidate, at most.
    const ANSWER_BYTES: usize;

    /// Of the slots that a component fills, this one.
    fn of(filled: &Filled) -> Option<&Self::Indices>;
    /// Find the functions in an instance.
    fn load(indices: &Self::Indices, store: &mut Store<StoreState>, instance: &Instance) -> Result<Self::Guest>;
    /// The columns it wants.
    fn inputs(guest: &Self::Guest, store: &mut Store<StoreState>) -> Result<Vec<Self::Column>>;
    /// Ask about one batch.
    fn decide(
        guest: &Self::Guest,
        store: &mut Store<StoreState>,
        batch: &Batch<'_, Self>,
        decision: &mut Self::Decision,
    ) -> Result<()>;
}

/// The slots that a component fills.
pub struct Filled {
    dispatch: Option<dispatch::GuestIndices>,
    eviction: Option<eviction::GuestIndices>,
    budget: Option<budget::GuestIndices>,
}

impl Filled {
    /// Find the functions of every interface that `fills` says is there.
    pub(crate) fn find(pre: &InstancePre<StoreState>, fills: impl Fn(&str) -> bool) -> Result<Self> {
        Ok(Self {
            dispatch: fills(Dispatch::INTERFACE).then(|| dispatch::GuestIndices::new(pre)).transpose()?,
            eviction: fills(Eviction::INTERFACE).then(|| eviction::GuestIndices::new(pre)).transpose()?,
            budget: fills(Budget::INTERFACE).then(|| budget::GuestIndices::new(pre)).transpose()?,
        })
    }

    pub(crate) fn names(&self) -> Vec<SlotName> {
        let Self { dispatch, eviction, budget } = self;
        let filled = [dispatch.is_some(), eviction.is_some(), budget.is_some()];
        SlotName::ALL.into_iter().zip(filled).filter(|(_, filled)| *filled).map(|(slot, _)| slot).collect()
    }
}

fn count(candidates: usize) -> u32 {
    u32::try_from(candidates).unwrap_or(u32::MAX)
}

impl Calls for Dispatch {
    const INTERFACE: &'static str = "meridian:policy/dispatch@0.1.0";
    type Indices = dispatch::GuestIndices;
    type Guest = dispatch::Guest;

    const SLOT: lifecycle::Slot = lifecycle::Slot::Dispatch;
    const ANSWER_BYTES: usize = 16;

    fn of(filled: &Filled) -> Option<&Self::Indices> {
        filled.dispatch.as_ref()
    }

    fn load(indices: &Self::Indices, store: &mut Store<StoreState>, instance: &Instance) -> Result<Self::Guest> {
        indices.load(store, instance)
    }

    fn inputs(guest: &Self::Guest, store: &mut Store<StoreState>) -> Result<Vec<Self::Column>> {
        Ok(guest.call_inputs(store)?.into_iter().map(wit::dispatch_column).collect())
    }

    fn decide(
        guest: &Self::Guest,
        store: &mut Store<StoreState>,
        batch: &Batch<'_, Self>,
        decision: &mut Self::Decision,
    ) -> Result<()> {
        let answer = guest.call_decide(store, wit::step(batch.facts), count(batch.candidates), batch.columns)?;
        wit::decision(answer, decision);
        Ok(())
    }
}

impl Calls for Eviction {
    const INTERFACE: &'static str = "meridian:policy/eviction@0.1.0";
    type Indices = eviction::GuestIndices;
    type Guest = eviction::Guest;

    const SLOT: lifecycle::Slot = lifecycle::Slot::Eviction;
    const ANSWER_BYTES: usize = 16;

    fn of(filled: &Filled) -> Option<&Self::Indices> {
        filled.eviction.as_ref()
    }

    fn load(indices: &Self::Indices, store: &mut Store<StoreState>, instance: &Instance) -> Result<Self::Guest> {
        indices.load(store, instance)
    }

    fn inputs(guest: &Self::Guest, store: &mut Store<StoreState>) -> Result<Vec<Self::Column>> {
        Ok(guest.call_inputs(store)?.into_iter().map(wit::eviction_column).collect())
    }

    fn decide(
        guest: &Self::Guest,
        store: &mut Store<StoreState>,
        batch: &Batch<'_, Self>,
        keys: &mut Self::Decision,
    ) -> Result<()> {
        *keys = guest.call_rank(store, wit::memory(batch.facts), count(batch.candidates), batch.columns)?;
        Ok(())
    }
}

impl Calls for Budget {
    const INTERFACE: &'static str = "meridian:policy/budget@0.1.0";
    type Indices = budget::GuestIndices;
    type Guest = budget::Guest;

    const SLOT: lifecycle::Slot = lifecycle::Slot::Budget;
    const ANSWER_BYTES: usize = 128;

    fn of(filled: &Filled) -> Option<&Self::Indices> {
        filled.budget.as_ref()
    }

    fn load(indices: &Self::Indices, store: &mut Store<StoreState>, instance: &Instance) -> Result<Self::Guest> {
        indices.load(store, instance)
    }

    fn inputs(guest: &Self::Guest, store: &mut Store<StoreState>) -> Result<Vec<Self::Column>> {
        Ok(guest.call_inputs(store)?.into_iter().map(wit::budget_column).collect())
    }

    fn decide(
        guest: &Self::Guest,
        store: &mut Store<StoreState>,
        batch: &Batch<'_, Self>,
        decision: &mut Self::Decision,
    ) -> Result<()> {
        let (load, candidates) = (wit::load(batch.facts), count(batch.candidates));
        match batch.facts.point {
            meridian_core::budget::Point::Start => {
                let answer = guest.call_start(store, load, candidates, batch.columns)?;
                decision.thresholds.extend(answer.into_iter().map(wit::thresholds));
            }
            meridian_core::budget::Point::Probe => {
                let answer = guest.call_probe(store, load, candidates, batch.columns)?;
                decision.verdicts.extend(answer.into_iter().map(wit::verdict));
            }
        }
        Ok(())
    }
}

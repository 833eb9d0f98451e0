//! What differs from slot to slot in calling a component: which interface, how a batch goes in and how the answer comes
//! out.

use meridian_core::budget::Point;
use meridian_core::{
    Batch, Budget, BudgetColumn, Column, Description, Dispatch, Eviction, EvictionColumn, SlotKind, SlotName, Targets,
};
use wasmtime::component::{Instance, InstancePre};
use wasmtime::{Result, Store};

use crate::instance::StoreState;
use crate::wit::{Same, budget, dispatch, eviction, lifecycle};

/// A slot whose policies may be components; implemented for every slot.
pub trait GuestKind: Calls {}

impl<K: Calls> GuestKind for K {}

/// The interface of a slot.
pub trait Calls: SlotKind {
    /// Where its functions are in a component.
    type Indices: Send + Sync;
    /// Its functions in an instance.
    type Guest: Send;

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

/// Where the functions of a component are.
pub struct Filled {
    lifecycle: lifecycle::GuestIndices,
    dispatch: Option<dispatch::GuestIndices>,
    eviction: Option<eviction::GuestIndices>,
    budget: Option<budget::GuestIndices>,
}

impl Filled {
    /// Find the functions of a component that fills these slots.
    pub(crate) fn find(pre: &InstancePre<StoreState>, slots: &[SlotName]) -> Result<Self> {
        let fills = |slot| slots.contains(&slot);
        Ok(Self {
            lifecycle: lifecycle::GuestIndices::new(pre)?,
            dispatch: fills(SlotName::Dispatch).then(|| dispatch::GuestIndices::new(pre)).transpose()?,
            eviction: fills(SlotName::Eviction).then(|| eviction::GuestIndices::new(pre)).transpose()?,
            budget: fills(SlotName::Budget).then(|| budget::GuestIndices::new(pre)).transpose()?,
        })
    }

    /// The functions that every policy has.
    pub(crate) fn lifecycle(&self, store: &mut Store<StoreState>, instance: &Instance) -> Result<Lifecycle> {
        Ok(Lifecycle(self.lifecycle.load(store, instance)?))
    }
}

/// The functions that every policy has, in an instance.
pub(crate) struct Lifecycle(lifecycle::Guest);

impl Lifecycle {
    pub(crate) fn describe(&self, store: &mut Store<StoreState>) -> Result<Description> {
        Ok(self.0.call_describe(store)?.same())
    }

    /// The inner error is the reason for which the component refuses.
    pub(crate) fn init<K: SlotKind>(
        &self,
        store: &mut Store<StoreState>,
        targets: Targets,
        config_json: &str,
    ) -> Result<Result<(), String>> {
        let slot = match K::NAME {
            SlotName::Dispatch => lifecycle::Slot::Dispatch,
            SlotName::Eviction => lifecycle::Slot::Eviction,
            SlotName::Budget => lifecycle::Slot::Budget,
        };
        self.0.call_init(store, slot, targets.same(), config_json)
    }

    pub(crate) fn finished(&self, store: &mut Store<StoreState>, requests: &[u32]) -> Result<()> {
        self.0.call_finished(store, requests)
    }

    pub(crate) fn snapshot(&self, store: &mut Store<StoreState>) -> Result<Vec<u8>> {
        self.0.call_snapshot(store)
    }

    pub(crate) fn restore(&self, store: &mut Store<StoreState>, state: &[u8]) -> Result<Result<(), String>> {
        self.0.call_restore(store, state)
    }
}

fn count(candidates: usize) -> u32 {
    u32::try_from(candidates).unwrap_or(u32::MAX)
}

impl Calls for Dispatch {
    type Indices = dispatch::GuestIndices;
    type Guest = dispatch::Guest;

    const ANSWER_BYTES: usize = 16;

    fn of(filled: &Filled) -> Option<&Self::Indices> {
        filled.dispatch.as_ref()
    }

    fn load(indices: &Self::Indices, store: &mut Store<StoreState>, instance: &Instance) -> Result<Self::Guest> {
        indices.load(store, instance)
    }

    fn inputs(guest: &Self::Guest, store: &mut Store<StoreState>) -> Result<Vec<Self::Column>> {
        Ok(guest.call_inputs(store)?.iter().map(|column| Column::ALL[*column as usize]).collect())
    }

    fn decide(
        guest: &Self::Guest,
        store: &mut Store<StoreState>,
        batch: &Batch<'_, Self>,
        decision: &mut Self::Decision,
    ) -> Result<()> {
        let Batch { facts, candidates, columns, .. } = *batch;
        *decision = guest.call_decide(store, facts.same(), count(candidates), columns)?.same();
        Ok(())
    }
}

impl Calls for Eviction {
    type Indices = eviction::GuestIndices;
    type Guest = eviction::Guest;

    const ANSWER_BYTES: usize = 16;

    fn of(filled: &Filled) -> Option<&Self::Indices> {
        filled.eviction.as_ref()
    }

    fn load(indices: &Self::Indices, store: &mut Store<StoreState>, instance: &Instance) -> Result<Self::Guest> {
        indices.load(store, instance)
    }

    fn inputs(guest: &Self::Guest, store: &mut Store<StoreState>) -> Result<Vec<Self::Column>> {
        Ok(guest.call_inputs(store)?.iter().map(|column| EvictionColumn::ALL[*column as usize]).collect())
    }

    fn decide(
        guest: &Self::Guest,
        store: &mut Store<StoreState>,
        batch: &Batch<'_, Self>,
        ranking: &mut Self::Decision,
    ) -> Result<()> {
        let Batch { facts, candidates, columns, .. } = *batch;
        *ranking = guest.call_rank(store, facts.same(), count(candidates), columns)?.same();
        Ok(())
    }
}

impl Calls for Budget {
    type Indices = budget::GuestIndices;
    type Guest = budget::Guest;

    const ANSWER_BYTES: usize = 128;

    fn of(filled: &Filled) -> Option<&Self::Indices> {
        filled.budget.as_ref()
    }

    fn load(indices: &Self::Indices, store: &mut Store<StoreState>, instance: &Instance) -> Result<Self::Guest> {
        indices.load(store, instance)
    }

    fn inputs(guest: &Self::Guest, store: &mut Store<StoreState>) -> Result<Vec<Self::Column>> {
        Ok(guest.call_inputs(store)?.iter().map(|column| BudgetColumn::ALL[*column as usize]).collect())
    }

    fn decide(
        guest: &Self::Guest,
        store: &mut Store<StoreState>,
        batch: &Batch<'_, Self>,
        decision: &mut Self::Decision,
    ) -> Result<()> {
        let Batch { facts, candidates, columns, .. } = *batch;
        match facts.point {
            Point::Start => {
                let answer = guest.call_start(store, facts.same(), count(candidates), columns)?;
                decision.thresholds.extend(answer.into_iter().map(Same::same));
            }
            Point::Probe => {
                let answer = guest.call_probe(store, facts.same(), count(candidates), columns)?;
                decision.verdicts.extend(answer.into_iter().map(Same::same));
            }
        }
        Ok(())
    }
}

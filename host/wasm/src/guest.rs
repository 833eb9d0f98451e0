//! What differs from slot to slot in calling a component: which interface, how a batch goes in and how the answer comes
//! out. Components of both versions of the contract are called alike: where a column, a fact or a part of an answer is newer,
//! one of the version before does not have it.

use meridian_core::budget::Point;
use meridian_core::{
    Batch, Budget, BudgetColumn, Column, Description, Dispatch, Eviction, EvictionColumn, SlotKind, SlotName, Targets,
};
use wasmtime::component::{Instance, InstancePre};
use wasmtime::{Result, Store};

use crate::contract::{Contract, Versioned, each, either};
use crate::instance::StoreState;
use crate::wit::{Same, before, current};

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

type DispatchIndices = Versioned<current::dispatch::GuestIndices, before::dispatch::GuestIndices>;
type EvictionIndices = Versioned<current::eviction::GuestIndices, before::eviction::GuestIndices>;
type BudgetIndices = Versioned<current::budget::GuestIndices, before::budget::GuestIndices>;
type LifecycleIndices = Versioned<current::lifecycle::GuestIndices, before::lifecycle::GuestIndices>;

/// Where the functions of an interface are in a component of this version.
macro_rules! find {
    ($interface:ident, $contract:expr, $pre:expr) => {
        match $contract {
            Contract::Current => current::$interface::GuestIndices::new($pre).map(Versioned::Current),
            Contract::Before => before::$interface::GuestIndices::new($pre).map(Versioned::Before),
        }
    };
}

/// Where the functions of a component are.
pub struct Filled {
    lifecycle: LifecycleIndices,
    dispatch: Option<DispatchIndices>,
    eviction: Option<EvictionIndices>,
    budget: Option<BudgetIndices>,
}

impl Filled {
    /// Find the functions of a component that fills these slots.
    pub(crate) fn find(pre: &InstancePre<StoreState>, contract: Contract, slots: &[SlotName]) -> Result<Self> {
        let fills = |slot| slots.contains(&slot);
        Ok(Self {
            lifecycle: find!(lifecycle, contract, pre)?,
            dispatch: fills(SlotName::Dispatch).then(|| find!(dispatch, contract, pre)).transpose()?,
            eviction: fills(SlotName::Eviction).then(|| find!(eviction, contract, pre)).transpose()?,
            budget: fills(SlotName::Budget).then(|| find!(budget, contract, pre)).transpose()?,
        })
    }

    /// The functions that every policy has.
    pub(crate) fn lifecycle(&self, store: &mut Store<StoreState>, instance: &Instance) -> Result<Lifecycle> {
        Ok(Lifecycle(each!(&self.lifecycle, indices => indices.load(store, instance)?)))
    }
}

/// The functions that every policy has, in an instance.
pub(crate) struct Lifecycle(Versioned<current::lifecycle::Guest, before::lifecycle::Guest>);

impl Lifecycle {
    pub(crate) fn describe(&self, store: &mut Store<StoreState>) -> Result<Description> {
        either!(&self.0, guest => Ok(guest.call_describe(store)?.same()))
    }

    /// The inner error is the reason for which the component refuses.
    pub(crate) fn init<K: SlotKind>(
        &self,
        store: &mut Store<StoreState>,
        targets: Targets,
        config_json: &str,
    ) -> Result<Result<(), String>> {
        macro_rules! slot {
            ($version:ident) => {
                match K::NAME {
                    SlotName::Dispatch => $version::lifecycle::Slot::Dispatch,
                    SlotName::Eviction => $version::lifecycle::Slot::Eviction,
                    SlotName::Budget => $version::lifecycle::Slot::Budget,
                }
            };
        }
        match &self.0 {
            Versioned::Current(guest) => guest.call_init(store, slot!(current), targets.same(), config_json),
            Versioned::Before(guest) => guest.call_init(store, slot!(before), targets.same(), config_json),
        }
    }

    pub(crate) fn finished(&self, store: &mut Store<StoreState>, requests: &[u32]) -> Result<()> {
        either!(&self.0, guest => guest.call_finished(store, requests))
    }

    pub(crate) fn snapshot(&self, store: &mut Store<StoreState>) -> Result<Vec<u8>> {
        either!(&self.0, guest => guest.call_snapshot(store))
    }

    pub(crate) fn restore(&self, store: &mut Store<StoreState>, state: &[u8]) -> Result<Result<(), String>> {
        either!(&self.0, guest => guest.call_restore(store, state))
    }
}

fn count(candidates: usize) -> u32 {
    u32::try_from(candidates).unwrap_or(u32::MAX)
}

impl Calls for Dispatch {
    type Indices = DispatchIndices;
    type Guest = Versioned<current::dispatch::Guest, before::dispatch::Guest>;

    const ANSWER_BYTES: usize = 16;

    fn of(filled: &Filled) -> Option<&Self::Indices> {
        filled.dispatch.as_ref()
    }

    fn load(indices: &Self::Indices, store: &mut Store<StoreState>, instance: &Instance) -> Result<Self::Guest> {
        Ok(each!(indices, indices => indices.load(store, instance)?))
    }

    fn inputs(guest: &Self::Guest, store: &mut Store<StoreState>) -> Result<Vec<Self::Column>> {
        // New columns come last, so those of the version before have the same numbers.
        Ok(
            either!(guest, guest => guest.call_inputs(store)?.iter().map(|column| Column::ALL[*column as usize]).collect()),
        )
    }

    fn decide(
        guest: &Self::Guest,
        store: &mut Store<StoreState>,
        batch: &Batch<'_, Self>,
        decision: &mut Self::Decision,
    ) -> Result<()> {
        let Batch { facts, candidates, columns, .. } = *batch;
        *decision = either!(guest, guest => guest.call_decide(store, facts.same(), count(candidates), columns)?.same());
        Ok(())
    }
}

impl Calls for Eviction {
    type Indices = EvictionIndices;
    type Guest = Versioned<current::eviction::Guest, before::eviction::Guest>;

    const ANSWER_BYTES: usize = 16;

    fn of(filled: &Filled) -> Option<&Self::Indices> {
        filled.eviction.as_ref()
    }

    fn load(indices: &Self::Indices, store: &mut Store<StoreState>, instance: &Instance) -> Result<Self::Guest> {
        Ok(each!(indices, indices => indices.load(store, instance)?))
    }

    fn inputs(guest: &Self::Guest, store: &mut Store<StoreState>) -> Result<Vec<Self::Column>> {
        let column = |number: usize| EvictionColumn::ALL[number];
        Ok(either!(guest, guest => guest.call_inputs(store)?.iter().map(|number| column(*number as usize)).collect()))
    }

    fn decide(
        guest: &Self::Guest,
        store: &mut Store<StoreState>,
        batch: &Batch<'_, Self>,
        ranking: &mut Self::Decision,
    ) -> Result<()> {
        let Batch { facts, candidates, columns, .. } = *batch;
        *ranking = either!(guest, guest => guest.call_rank(store, facts.same(), count(candidates), columns)?.same());
        Ok(())
    }
}

impl Calls for Budget {
    type Indices = BudgetIndices;
    type Guest = Versioned<current::budget::Guest, before::budget::Guest>;

    const ANSWER_BYTES: usize = 128;

    fn of(filled: &Filled) -> Option<&Self::Indices> {
        filled.budget.as_ref()
    }

    fn load(indices: &Self::Indices, store: &mut Store<StoreState>, instance: &Instance) -> Result<Self::Guest> {
        Ok(each!(indices, indices => indices.load(store, instance)?))
    }

    fn inputs(guest: &Self::Guest, store: &mut Store<StoreState>) -> Result<Vec<Self::Column>> {
        let column = |number: usize| BudgetColumn::ALL[number];
        Ok(either!(guest, guest => guest.call_inputs(store)?.iter().map(|number| column(*number as usize)).collect()))
    }

    fn decide(
        guest: &Self::Guest,
        store: &mut Store<StoreState>,
        batch: &Batch<'_, Self>,
        decision: &mut Self::Decision,
    ) -> Result<()> {
        let Batch { facts, candidates, columns, .. } = *batch;
        either!(guest, guest => match facts.point {
            Point::Start => {
                let answer = guest.call_start(store, facts.same(), count(candidates), columns)?;
                decision.thresholds.extend(answer.into_iter().map(Same::same));
            }
            Point::Probe => {
                let answer = guest.call_probe(store, facts.same(), count(candidates), columns)?;
                decision.verdicts.extend(answer.into_iter().map(Same::same));
            }
        });
        Ok(())
    }
}

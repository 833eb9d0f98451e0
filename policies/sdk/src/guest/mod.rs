//! The component side: bindings of the interfaces, one internal world each so that a component exports just what it
//! fills, and the glue from them to the policy traits.

#![allow(missing_docs)] // generated bindings; the documentation is in wit/

mod wit;

use std::cell::RefCell;

use self::budget_part::exports::meridian::policy::budget as budget_wit;
use self::dispatch_part::exports::meridian::policy::dispatch as dispatch_wit;
use self::eviction_part::exports::meridian::policy::eviction as eviction_wit;
use self::lifecycle_part::exports::meridian::policy::lifecycle;
pub use self::lifecycle_part::exports::meridian::policy::lifecycle::Slot;
use crate::budget::BudgetPolicy;
use crate::eviction::EvictionPolicy;
use crate::{DispatchPolicy, Init, Policy, budget, eviction};

pub mod lifecycle_part {
    wit_bindgen::generate!({
        inline: "package meridian:sdk; world lifecycle-part { export meridian:policy/lifecycle@1.0.0-rc; }",
        path: "../../wit",
        world: "meridian:sdk/lifecycle-part",
        pub_export_macro: true,
        default_bindings_module: "meridian_policy_sdk::guest::lifecycle_part",
    });
}

pub mod dispatch_part {
    wit_bindgen::generate!({
        inline: "package meridian:sdk; world dispatch-part { export meridian:policy/dispatch@1.0.0-rc; }",
        path: "../../wit",
        world: "meridian:sdk/dispatch-part",
        pub_export_macro: true,
        default_bindings_module: "meridian_policy_sdk::guest::dispatch_part",
    });
}

pub mod eviction_part {
    wit_bindgen::generate!({
        inline: "package meridian:sdk; world eviction-part { export meridian:policy/eviction@1.0.0-rc; }",
        path: "../../wit",
        world: "meridian:sdk/eviction-part",
        pub_export_macro: true,
        default_bindings_module: "meridian_policy_sdk::guest::eviction_part",
    });
}

pub mod budget_part {
    wit_bindgen::generate!({
        inline: "package meridian:sdk; world budget-part { export meridian:policy/budget@1.0.0-rc; }",
        path: "../../wit",
        world: "meridian:sdk/budget-part",
        pub_export_macro: true,
        default_bindings_module: "meridian_policy_sdk::guest::budget_part",
    });
}

/// Marks the slots in [`Holds`].
pub struct Dispatch;
pub struct Eviction;
pub struct Budget;

/// The one policy of a component for slot `S`; implemented by `export_policy!`.
pub trait Holds<S> {
    type Policy: Policy + 'static;
    fn cell() -> &'static std::thread::LocalKey<RefCell<Option<Self::Policy>>>;

    fn with<R>(f: impl FnOnce(&mut Option<Self::Policy>) -> R) -> R {
        Self::cell().with_borrow_mut(f)
    }
}

/// What `lifecycle` does for one slot of a component.
pub struct Part {
    pub slot: Slot,
    pub init: fn(Init<'_>) -> Result<(), String>,
    pub snapshot: fn() -> Option<Vec<u8>>,
    pub restore: fn(&[u8]) -> Option<Result<(), String>>,
    pub finished: fn(&[u32]),
}

impl Part {
    pub const fn of<S, T: Holds<S>>(slot: Slot) -> Self {
        Self {
            slot,
            init: |init| {
                let policy = T::Policy::new(init)?;
                T::with(|held| *held = Some(policy));
                Ok(())
            },
            snapshot: || T::with(|held| held.as_ref().map(Policy::snapshot)),
            restore: |state| T::with(|held| held.as_mut().map(|policy| policy.restore(state))),
            finished: |requests| T::with(|held| held.iter_mut().for_each(|policy| policy.finished(requests))),
        }
    }
}

/// The slots of a component; implemented by `export_policy!`.
pub trait Parts {
    /// Describes the component.
    type First: Policy;
    const PARTS: &'static [Part];
}

impl<T: Parts> lifecycle::Guest for T {
    fn describe() -> lifecycle::Description {
        lifecycle::Description {
            name: T::First::NAME.into(),
            version: T::First::VERSION.into(),
            summary: T::First::SUMMARY.into(),
        }
    }

    fn init(slot: Slot, targets: lifecycle::Targets, config_json: String) -> Result<(), String> {
        match T::PARTS.iter().find(|part| part.slot == slot) {
            Some(part) => (part.init)(Init { targets: wit::targets(targets), config_json: &config_json }),
            None => Err("this component does not fill the slot".into()),
        }
    }

    fn finished(requests: Vec<u32>) {
        T::PARTS.iter().for_each(|part| (part.finished)(&requests));
    }

    fn snapshot() -> Vec<u8> {
        T::PARTS.iter().find_map(|part| (part.snapshot)()).unwrap_or_default()
    }

    fn restore(state: Vec<u8>) -> Result<(), String> {
        T::PARTS.iter().find_map(|part| (part.restore)(&state)).unwrap_or(Err("restore before init".into()))
    }
}

impl<T: Holds<Dispatch>> dispatch_wit::Guest for T
where
    T::Policy: DispatchPolicy,
{
    fn inputs() -> Vec<dispatch_wit::Column> {
        T::Policy::INPUTS.iter().map(|column| wit::dispatch_column(*column)).collect()
    }

    fn decide(step: dispatch_wit::Step, candidates: u32, columns: Vec<f32>) -> dispatch_wit::Decision {
        let step = wit::step(step);
        let mut decision = crate::Decision::default();
        T::with(|policy| {
            if let Some(policy) = policy {
                crate::decide(policy, &step, candidates as usize, &columns, &mut decision);
            }
        });
        let crate::Decision { keys, token_budget, token_caps, victim_keys } = decision;
        dispatch_wit::Decision { keys, token_budget, token_caps, victim_keys }
    }
}

impl<T: Holds<Eviction>> eviction_wit::Guest for T
where
    T::Policy: EvictionPolicy,
{
    fn inputs() -> Vec<eviction_wit::Column> {
        T::Policy::INPUTS.iter().map(|column| wit::eviction_column(*column)).collect()
    }

    fn rank(memory: eviction_wit::Memory, candidates: u32, columns: Vec<f32>) -> eviction_wit::Ranking {
        let mut ranking = eviction::Ranking::default();
        T::with(|policy| {
            if let Some(policy) = policy {
                eviction::rank(policy, &wit::memory(memory), candidates as usize, &columns, &mut ranking);
            }
        });
        let eviction::Ranking { keys, keep_ms } = ranking;
        eviction_wit::Ranking { keys, keep_ms }
    }
}

impl<T: Holds<Budget>> budget_wit::Guest for T
where
    T::Policy: BudgetPolicy,
{
    fn inputs() -> Vec<budget_wit::Column> {
        T::Policy::INPUTS.iter().map(|column| wit::budget_column(*column)).collect()
    }

    fn start(load: budget_wit::Load, candidates: u32, columns: Vec<f32>) -> Vec<budget_wit::Thresholds> {
        let decision = decide_budget::<T>(wit::load(load, budget::Point::Start), candidates, &columns);
        decision.thresholds.into_iter().map(wit::thresholds).collect()
    }

    fn probe(load: budget_wit::Load, candidates: u32, columns: Vec<f32>) -> Vec<budget_wit::Verdict> {
        let decision = decide_budget::<T>(wit::load(load, budget::Point::Probe), candidates, &columns);
        decision.verdicts.into_iter().map(wit::verdict).collect()
    }
}

fn decide_budget<T: Holds<Budget>>(load: budget::Load, candidates: u32, columns: &[f32]) -> budget::Decision
where
    T::Policy: BudgetPolicy,
{
    let mut decision = budget::Decision::default();
    T::with(|policy| {
        if let Some(policy) = policy {
            budget::decide(policy, &load, candidates as usize, columns, &mut decision);
        }
    });
    decision
}

/// `export_policy!` in a component.
#[doc(hidden)]
#[macro_export]
macro_rules! __export_policy {
    ($component:ident, $first:ident: $described:ty $(, $slot:ident: $policy:ty)*) => {
        impl $crate::guest::Parts for $component {
            type First = $described;
            const PARTS: &'static [$crate::guest::Part] =
                &[$crate::__part!($component, $first) $(, $crate::__part!($component, $slot))*];
        }
        $crate::guest::lifecycle_part::export!($component with_types_in $crate::guest::lifecycle_part);
        $crate::__export_slot!($component, $first: $described);
        $($crate::__export_slot!($component, $slot: $policy);)*
    };
}

/// One slot of `export_policy!`: where its policy is kept, and the exports of its interface.
#[doc(hidden)]
#[macro_export]
macro_rules! __export_slot {
    (@ $component:ident, $marker:ident, $policy:ty) => {
        impl $crate::guest::Holds<$crate::guest::$marker> for $component {
            type Policy = $policy;
            fn cell() -> &'static ::std::thread::LocalKey<::std::cell::RefCell<::std::option::Option<$policy>>> {
                ::std::thread_local! {
                    static POLICY: ::std::cell::RefCell<::std::option::Option<$policy>> =
                        const { ::std::cell::RefCell::new(None) };
                }
                &POLICY
            }
        }
    };
    ($component:ident, dispatch: $policy:ty) => {
        $crate::__export_slot!(@ $component, Dispatch, $policy);
        $crate::guest::dispatch_part::export!($component with_types_in $crate::guest::dispatch_part);
    };
    ($component:ident, eviction: $policy:ty) => {
        $crate::__export_slot!(@ $component, Eviction, $policy);
        $crate::guest::eviction_part::export!($component with_types_in $crate::guest::eviction_part);
    };
    ($component:ident, budget: $policy:ty) => {
        $crate::__export_slot!(@ $component, Budget, $policy);
        $crate::guest::budget_part::export!($component with_types_in $crate::guest::budget_part);
    };
}

/// The entry of one slot of `export_policy!` in its component's list.
#[doc(hidden)]
#[macro_export]
macro_rules! __part {
    ($component:ident, dispatch) => {
        $crate::guest::Part::of::<$crate::guest::Dispatch, $component>($crate::guest::Slot::Dispatch)
    };
    ($component:ident, eviction) => {
        $crate::guest::Part::of::<$crate::guest::Eviction, $component>($crate::guest::Slot::Eviction)
    };
    ($component:ident, budget) => {
        $crate::guest::Part::of::<$crate::guest::Budget, $component>($crate::guest::Slot::Budget)
    };
}

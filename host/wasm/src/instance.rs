use std::sync::Arc;
use std::time::Duration;

use meridian_core::{Batch, Column, Decision, Description, Fault, FaultKind, Targets};
use wasmtime::{Store, Trap};

use crate::LoadError;
use crate::component::Shared;
use crate::error::one_line;
use crate::limiter::Limiter;
use crate::runtime::{EPOCH_TICK, MAX_MEMORY_BYTES};
use crate::wit::{self, DispatchPolicy as Bindings};

/// What a policy may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Longest time of one decision; kept to the epoch's grain of 0.5 ms, rounded up.
    pub deadline: Duration,
    /// Most linear memory, bytes.
    pub memory_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { deadline: Duration::from_millis(2), memory_bytes: 64 << 20 }
    }
}

/// Starting is off the hot path: it may parse options and build tables.
const START_DEADLINE: Duration = Duration::from_millis(200);
/// Starting again happens inside a step.
const RECOVERY_DEADLINE: Duration = Duration::from_millis(5);
/// Most bytes that `describe`, `init` and `inputs` may hand to the host.
const START_ANSWER_BYTES: usize = 64 << 10;
/// Most bytes of a snapshot: it is handed over while the slot is held.
pub const MAX_STATE_BYTES: usize = 1 << 20;
/// Bytes of an answer beside its keys and caps.
const ANSWER_OVERHEAD_BYTES: usize = 256;

pub(crate) struct StoreState {
    limiter: Limiter,
}

struct Instance {
    store: Store<StoreState>,
    bindings: Bindings,
}

/// A dispatch policy that runs as a WebAssembly component.
///
/// After any fault the store is dead; [`meridian_core::DispatchPolicy::recover`] makes a new one from the compiled
/// component and initialises it with the same configuration.
pub struct WasmDispatch {
    shared: Arc<Shared>,
    limits: Limits,
    targets: Targets,
    config_json: String,
    description: Description,
    inputs: Vec<Column>,
    instance: Option<Instance>,
}

impl WasmDispatch {
    pub(crate) fn start(
        shared: Arc<Shared>,
        limits: Limits,
        targets: Targets,
        config_json: &str,
    ) -> Result<Self, LoadError> {
        let limits = Limits { memory_bytes: limits.memory_bytes.min(MAX_MEMORY_BYTES), ..limits };
        let mut policy = Self {
            shared,
            limits,
            targets,
            config_json: config_json.to_owned(),
            description: Description::default(),
            inputs: Vec::new(),
            instance: None,
        };
        policy.instantiate(START_DEADLINE)?;
        Ok(policy)
    }

    /// Make the instance, and take description and inputs from it.
    fn instantiate(&mut self, deadline: Duration) -> Result<(), LoadError> {
        self.instance = None;
        let state = StoreState { limiter: Limiter::new(self.limits.memory_bytes) };
        let mut store = Store::new(&self.shared.engine, state);
        store.limiter(|state| &mut state.limiter);
        store.epoch_deadline_trap();
        store.set_epoch_deadline(ticks(deadline));
        store.set_hostcall_fuel(START_ANSWER_BYTES);
        let started = self.start_in(&mut store);
        let (bindings, description, inputs, accepted) = started.map_err(|error| {
            let fault = fault_of(&store, &error);
            LoadError::Start { fault: Fault::new(FaultKind::Init, fault.to_string()) }
        })?;
        accepted.map_err(|reason| LoadError::Refused { config: self.config_json.clone(), reason })?;
        self.description = description;
        self.inputs = inputs;
        self.instance = Some(Instance { store, bindings });
        Ok(())
    }

    #[expect(clippy::type_complexity, reason = "destructured by its one caller")]
    fn start_in(
        &self,
        store: &mut Store<StoreState>,
    ) -> wasmtime::Result<(Bindings, Description, Vec<Column>, Result<(), String>)> {
        let bindings = self.shared.pre.instantiate(&mut *store)?;
        let lifecycle = bindings.meridian_policy_lifecycle();
        let description = wit::description(lifecycle.call_describe(&mut *store)?);
        let accepted = lifecycle.call_init(&mut *store, wit::targets(self.targets), &self.config_json)?;
        let inputs = match accepted {
            Ok(()) => bindings.meridian_policy_dispatch().call_inputs(&mut *store)?,
            Err(_) => Vec::new(),
        };
        Ok((bindings, description, inputs.into_iter().map(wit::column).collect(), accepted))
    }
}

impl WasmDispatch {
    /// Call the instance within its deadline; `answer_bytes` bounds what it may hand over. A fault costs the instance.
    fn call<R>(
        &mut self,
        answer_bytes: usize,
        call: impl FnOnce(&mut Store<StoreState>, &Bindings) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        let Some(Instance { store, bindings }) = &mut self.instance else {
            return Err(Fault::new(FaultKind::Init, "the policy has no instance"));
        };
        store.data_mut().limiter.forget();
        store.set_epoch_deadline(ticks(self.limits.deadline));
        // Refuses an enormous answer before it is copied.
        store.set_hostcall_fuel(answer_bytes);
        match call(store, bindings) {
            Ok(answer) => Ok(answer),
            Err(error) => {
                let fault = fault_of(store, &error);
                self.instance = None;
                Err(fault)
            }
        }
    }
}

impl meridian_core::DispatchPolicy for WasmDispatch {
    fn description(&self) -> &Description {
        &self.description
    }

    fn inputs(&self) -> &[Column] {
        &self.inputs
    }

    fn decide(&mut self, batch: &Batch<'_>, decision: &mut Decision) -> Result<(), Fault> {
        let answer_bytes = batch.candidates.saturating_mul(16).saturating_add(ANSWER_OVERHEAD_BYTES);
        let candidates = u32::try_from(batch.candidates).unwrap_or(u32::MAX);
        let answer = self.call(answer_bytes, |store, bindings| {
            bindings.meridian_policy_dispatch().call_decide(store, wit::step(batch.step), candidates, batch.columns)
        })?;
        wit::decision(answer, decision);
        Ok(())
    }

    fn snapshot(&mut self) -> Result<Vec<u8>, Fault> {
        let state =
            self.call(MAX_STATE_BYTES, |store, bindings| bindings.meridian_policy_lifecycle().call_snapshot(store))?;
        if state.len() > MAX_STATE_BYTES {
            let detail = format!("a snapshot of {} bytes, expected at most {MAX_STATE_BYTES}", state.len());
            return Err(Fault::new(FaultKind::BadAnswer, detail));
        }
        Ok(state)
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Fault> {
        let restored = self.call(START_ANSWER_BYTES, |store, bindings| {
            bindings.meridian_policy_lifecycle().call_restore(store, state)
        })?;
        restored.map_err(|reason| Fault::new(FaultKind::Init, wit::clip(reason, 512)))
    }

    fn recover(&mut self) -> Result<(), Fault> {
        self.instantiate(RECOVERY_DEADLINE).map_err(|error| match error {
            LoadError::Start { fault } => fault,
            other => Fault::new(FaultKind::Init, other.to_string()),
        })
    }
}

/// Ticks until the deadline has surely passed: the tick under way may be almost over.
fn ticks(deadline: Duration) -> u64 {
    u64::try_from(deadline.as_nanos().div_ceil(EPOCH_TICK.as_nanos())).unwrap_or(u64::MAX / 2).max(1) + 1
}

fn fault_of(store: &Store<StoreState>, error: &wasmtime::Error) -> Fault {
    let trap = error.downcast_ref::<Trap>();
    let kind = if store.data().limiter.was_refused() {
        FaultKind::Memory
    } else {
        match trap {
            Some(Trap::Interrupt) => FaultKind::Deadline,
            Some(_) => FaultKind::Trap,
            // Not a trap: the answer could not be lifted.
            None => FaultKind::BadAnswer,
        }
    };
    let detail = trap.map_or_else(|| one_line(error), ToString::to_string);
    Fault::new(kind, detail)
}
